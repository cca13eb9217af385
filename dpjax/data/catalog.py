"""Corpora and vocabularies by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpjax.data.corpus import SPLITS, Corpus, build_texts
from dpjax.data.sources import (
  File,
  Files,
  Source,
  cc100,
  childrens_books,
  hub,
  lm1b,
  openwebtext,
  penn_treebank,
  reading,
  text8,
  tfds,
  wiki40b,
  wikitext,
)
from dpjax.errors import UserError, unknown
from dpjax.files import read_record

PYTHON_MANUAL = "python_manual"  # which comes with Python
ENTRIES: dict[str, Source] = {
  "penn_treebank": penn_treebank.SOURCE,
  **wikitext.SOURCES,
  "lm1b": lm1b.SOURCE,
  "openwebtext": openwebtext.SOURCE,
  "text8": text8.SOURCE,
  "wiki40b": wiki40b.SOURCE,
  "cc100": cc100.SOURCE,
  "childrens_books": childrens_books.SOURCE,
}

# The papers' vocabularies; checksums of gpt2: tiktoken_ext/openai_public.py of openai/tiktoken.
VOCABULARIES = {
  "bert_base_cased": (
    File("hf://google-bert/bert-base-cased/vocab.txt", name="bert_base_cased_vocab.txt"),
  ),
  "gpt2": (
    File(
      "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
      name="gpt2_merges.txt",
      checksum="sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    File(
      "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
      name="gpt2_vocab.json",
      checksum="sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
  ),
}


def register_corpus(name: str, source: Source) -> None:
  """Registers a corpus for `data.name`; a `UserError` if the name is taken or no identifier."""
  if name in (PYTHON_MANUAL, *ENTRIES) or not name.isidentifier():
    raise UserError(f"name: expected a new one, of letters, digits and _, got {name!r}")
  ENTRIES[name] = source


def find(name: str, language: str = "") -> Source:
  """The corpus of a registered name, of hf:NAME or of tfds:NAME.

  A `UserError` for an unknown name, or an unknown language of a corpus that has several.
  """
  if name.startswith(tfds.PREFIX):
    return tfds.source(name)
  if name.startswith(hub.PREFIX):
    return hub.source(name)
  if name not in ENTRIES:
    others = ("hf:OWNER/NAME of the Hugging Face Hub", "tfds:NAME of TensorFlow Datasets")
    raise unknown("data.name", (PYTHON_MANUAL, *ENTRIES, *others, "or a data.path"), name)
  entry = ENTRIES[name]
  if entry.languages and language not in entry.languages:
    raise UserError(
      f"data.language: expected one of {', '.join(entry.languages)} for {name}, got {language!r}"
    )
  return entry


def is_name(source: str) -> bool:
  """Whether a source of a mixture is a corpus by its name; others are paths."""
  prefixes = (hub.PREFIX, tfds.PREFIX)
  return source == PYTHON_MANUAL or source in ENTRIES or source.startswith(prefixes)


def open_named(
  name: str,
  language: str,
  data_dir: str | Path,
  manual_dir: str | Path = "",
  *,
  is_head: bool = False,
) -> Corpus:
  """Opens a named corpus with the splits that it has; writes its text first if necessary.

  train.txt, valid.txt and test.txt, plain or compressed, in a folder NAME or NAME/LANGUAGE of the
  manual folder come first. With `is_head`, the first part is enough, if the corpus has one. For
  the rest and errors, see `dpjax.data.text.load_corpus`.
  """
  entry = find(name, language)
  language = language if entry.languages else ""
  # The whole text begins alike.
  whole = Path(data_dir, "texts", _join(name, language))
  is_head = is_head and bool(entry.head) and not read_record(whole, {"version": entry.version})
  about = {"name": name, "language": language, "is_head": is_head, "version": entry.version}
  folder = Path(data_dir, "texts", _join(name, language, "head" * is_head))

  def read() -> Iterator[tuple[str, str]]:
    print(f"preparing {folder.name} in {folder.parent}", flush=True)
    files = Files(data_dir, manual_dir)
    by_hand = files.manual_dir / name / language
    found = {split: reading.find_split(by_hand, split) for split in SPLITS}
    paths = {split: path for split, path in found.items() if path}
    if not paths:
      settings: dict[str, Any] = {"language": language} if entry.languages else {}
      return entry.read(files, **settings, **({"is_head": is_head} if entry.head else {}))
    if missing := [f"{split}.txt" for split in SPLITS if split not in paths]:
      raise UserError(
        f"data.manual_dir: expected train.txt, valid.txt and test.txt, got {by_hand} "
        f"without {', '.join(missing)}"
      )
    return ((x, piece) for x, path in paths.items() for piece in reading.text_file(path))

  splits, about["texts"] = build_texts(folder, about, read)
  return Corpus(_join(name, language), splits, about)


def _join(name: str, *parts: str) -> str:
  return "_".join(filter(None, (re.sub(r"[^\w.-]", "_", name), *parts)))


def find_vocabulary(name: str, data_dir: str | Path, manual_dir: str | Path = "") -> str:
  """The path of a vocabulary: a downloaded one of `VOCABULARIES`, or `name` as a path."""
  if name not in VOCABULARIES:
    return name
  wanted, files = VOCABULARIES[name], Files(data_dir, manual_dir)
  # The files of one vocabulary have to lie together.
  by_hand = all((files.manual_dir / file.name).exists() for file in wanted)
  return str([files.get(file, by_hand=by_hand) for file in wanted][0])
