r"""Wiki-40B: articles of 41 Wikipedias (Guo et al., LREC 2020), about 90/5/5 % of them a split.

Source: https://huggingface.co/datasets/google/wiki40b, Parquet files of the text of TFDS's
wiki40b 1.3. Articles are as published, with marker lines, one directly after another:

  "\n_START_ARTICLE_\nAhti\n_START_PARAGRAPH_\nAhti on ..._NEWLINE_Se ..."

Some languages (he, sk ...) have Python's representation of its bytes, which we decode. The head is
the pooling paper's 400M and 2M characters after cleaning, which removes less than a fifth.
"""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.sources import Files, Source, reading
from dpjax.errors import UserError

REPOSITORY = "google/wiki40b"
HEAD_CHARACTERS = {"train": 520 * 10**6, "valid": 4 * 10**6, "test": 4 * 10**6}


def read(files: Files, language: str, is_head: bool = False) -> Iterator[tuple[str, str]]:
  """The articles of a language; a split's head ends with a whole article."""
  for split, most in HEAD_CHARACTERS.items():
    stem = "validation" if split == "valid" else split
    paths = reading.hub_parquet(files, "wiki40b", REPOSITORY, language, stem)
    articles = (_plain(text, path) for path in paths for text in reading.parquet_texts(path))
    yield from ((split, text) for text in reading.head(articles, most if is_head else math.inf))


def _plain(text: str, path: Path) -> str:
  """An article, decoded if it is Python's representation of bytes."""
  if not text.startswith(("b'", 'b"')):
    return text
  try:
    return ast.literal_eval(text).decode()
  except (SyntaxError, ValueError) as error:
    raise UserError(
      f"{path}: expected articles, as text or as Python prints their "
      f"bytes, got {text[:40]!r} ... ({error})"
    ) from error


SOURCE = Source(
  "Wiki40B, Wikipedia in one language",
  read,
  "CC BY-SA 3.0",
  "en 9.4 GB, download 6.2 GB (its head 0.6 GB); he, download 0.8 GB; fi, vi: not known",
  "Guo et al. 2020, aclanthology.org/2020.lrec-1.297",
  ("en", "fi", "he", "vi"),
  head=(400_000_000, 3_000_000, 3_000_000),
  documents=r"(?=\n_START_ARTICLE_\n)",
)
