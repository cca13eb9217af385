"""Corpora and vocabularies by name."""

from pathlib import Path

from dpjax.data.download import File, Files
from dpjax.data.sources import (
  cc100,
  childrens_books,
  lm1b,
  openwebtext,
  penn_treebank,
  text8,
  tfds,
  wiki40b,
  wikitext,
)
from dpjax.data.sources.source import Source
from dpjax.errors import UserError, unknown

PYTHON_MANUAL = "python_manual"  # which comes with Python
ENTRIES: dict[str, Source] = {
  **penn_treebank.SOURCES,
  **wikitext.SOURCES,
  **lm1b.SOURCES,
  **openwebtext.SOURCES,
  **text8.SOURCES,
  **wiki40b.SOURCES,
  **cc100.SOURCES,
  **childrens_books.SOURCES,
}

# The vocabularies of the papers: files by the names that their readers expect. Checksums:
# openai/tiktoken, tiktoken_ext/openai_public.py, for gpt2.
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
  """Registers a corpus under a name for `data.name`.

  Raises:
    UserError: the name is taken, or cannot be the name of a folder.
  """
  if name in (PYTHON_MANUAL, *ENTRIES) or not name.isidentifier():
    raise UserError(f"name: expected a new one, of letters, digits and _, got {name!r}")
  ENTRIES[name] = source


def find(name: str, language: str = "") -> Source:
  """The corpus of a registered name, or of tfds:NAME.

  Raises:
    UserError: `data.name` is unknown, or `data.language` is missing or not a language of the
      corpus.
  """
  if name == PYTHON_MANUAL:
    raise UserError(f"data.name: expected a corpus to prepare, got {name}, which comes with Python")
  if name.startswith(tfds.PREFIX):
    return tfds.source(name)
  if name not in ENTRIES:
    names = [PYTHON_MANUAL, *ENTRIES]
    raise unknown("data.name", (*names, "tfds:NAME of TensorFlow Datasets (or a data.path)"), name)
  entry = ENTRIES[name]
  if entry.languages and language not in entry.languages:
    raise UserError(
      f"data.language: expected one of {', '.join(entry.languages)} for {name}, got {language!r}"
    )
  return entry


def find_vocabulary(name: str, data_dir: str | Path, manual_dir: str | Path = "") -> str:
  """The path of a vocabulary: a downloaded one of `VOCABULARIES`, or `name` as a path.

  Raises:
    UserError: the download failed.
  """
  if name not in VOCABULARIES:
    return name
  wanted, files = VOCABULARIES[name], Files(data_dir, manual_dir)
  # Those of one vocabulary have to lie together.
  by_hand = all((files.manual_dir / file.name).exists() for file in wanted)
  first, *_ = [files.get(file, by_hand=by_hand) for file in wanted]
  return str(first)
