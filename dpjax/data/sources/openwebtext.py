"""OpenWebText: 8,013,769 web pages that Reddit links to, English (Gokaslan and Cohen 2019).

An open counterpart of GPT-2's training text. Source:
https://huggingface.co/datasets/Skylion007/openwebtext, 80 Parquet files of about 301 MB, 39.8
GB of text; home: https://skylion007.github.io/OpenWebTextCorpus. Licence: CC0 for the
packaging; the pages are their authors'.

Splits: none are published. We count documents from 0 over all files; document i is validation
if i % 1000 == 998, test if i % 1000 == 999, and train otherwise, so that every part of the
corpus contributes to each split.

Each document, the last one included, is followed by a line end and the line <|endoftext|>,
GPT-2's mark, a single token for a byte-level BPE that knows it.
"""

from collections.abc import Iterator

from dpjax.data.corpus import line_pattern
from dpjax.data.download import Files
from dpjax.data.sources import reading
from dpjax.data.sources.source import Source

REPOSITORY = "Skylion007/openwebtext"
SEPARATOR = "<|endoftext|>"


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The documents of all files."""
  i = 0
  for path in reading.hub_parquet(files, "openwebtext", REPOSITORY, "plain_text", "train"):
    for text in reading.parquet_texts(path):
      yield {998: "valid", 999: "test"}.get(i % 1000, "train"), f"{text}\n{SEPARATOR}\n"
      i += 1


SOURCES = {
  "openwebtext": Source(
    "OpenWebText, web pages",
    read,
    "CC0 for the packaging; the pages are their authors'",
    "40 GB; download 24 GB",
    "Gokaslan et al. 2019, skylion007.github.io/OpenWebTextCorpus",
    documents=line_pattern(SEPARATOR),
  )
}
