"""OpenWebText, in the form of its authors' repository at Hugging Face."""

import functools
from collections.abc import Iterator

from dpjax.data.builders.hub import HubBuilder, read_texts

SEPARATOR = "<|endoftext|>"


class OpenWebText(HubBuilder, skip_registration=True):
  """8,013,769 web pages that Reddit links to, English (Gokaslan and Cohen 2019).

  An open counterpart of what GPT-2 was trained on. Source:
  https://huggingface.co/datasets/Skylion007/openwebtext, 80 Parquet files of about
  301 MB, 39.8 GB of text; home: https://skylion007.github.io/OpenWebTextCorpus. Licence:
  CC0 for the packaging; the pages are their authors'.

  Splits: none are published. Ours: of the documents, counted from 0 over all files,
  those with i % 1000 == 998 are validation, with i % 1000 == 999 test, the others train
  (so every part of the corpus has its share). Each split is a pass over the files.

  A document stands as it is, then a line end and the line <|endoftext|>, after the last
  one too: GPT-2's mark, a single token for a byte-level BPE that knows it. It is on a line
  of its own, as the children's books have theirs, so that words and lines of two pages
  never run together, for whatever tokenizer.
  """

  name = "openwebtext"
  REPOSITORY = "Skylion007/openwebtext"

  def texts(self, get):
    """See `TextBuilder`."""
    find = functools.cache(get)  # three passes, but each file is found and checked once
    return {split: self._documents(find, split) for split in ("train", "validation", "test")}

  def _documents(self, get, split: str) -> Iterator[str]:
    i = 0
    for path in self.parquet_paths(get, "plain_text", "train"):
      for text in read_texts(path):
        if split == {998: "validation", 999: "test"}.get(i % 1000, "train"):
          yield f"{text}\n{SEPARATOR}\n"
        i += 1
