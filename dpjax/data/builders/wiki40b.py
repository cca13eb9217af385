"""Wiki-40B: Wikipedia in 41 languages."""

import ast
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import tensorflow_datasets as tfds

from dpjax.data.builders.hub import HubBuilder, read_texts
from dpjax.errors import UserError

LANGUAGES = """ar bg ca cs da de el en es et fa fi fr he hi hr hu id it ja ko lt lv ms nl
no pl pt ro ru sk sl sr sv th tl tr uk vi zh-cn zh-tw""".split()
HEAD_CHARACTERS = {"train": 520 * 10**6, "validation": 4 * 10**6, "test": 4 * 10**6}


@dataclasses.dataclass(eq=False)
class Wiki40bConfig(tfds.core.BuilderConfig):
  """A language, whole or its beginning.

  Attributes:
    language: as in `LANGUAGES`.
    max_characters: by split, after how many a split ends, with a whole article; splits
      that are not named are whole.
  """

  language: str = ""
  max_characters: dict[str, int] = dataclasses.field(default_factory=dict)


class Wiki40b(HubBuilder, skip_registration=True):
  r"""Articles of 41 Wikipedias (Guo et al., LREC 2020), split by their authors.

  Source: https://huggingface.co/datasets/google/wiki40b, the Parquet files of what TFDS
  (wiki40b 1.3) keeps in a bucket; en: 19 + 1 or 2 + 2 files, 6.2 GB. Licence: CC BY-SA
  3.0. Splits: train, validation, test, about 90/5/5 % of the articles.

  An article is as published, its structure in marker lines; the next follows at once:

    "\n_START_ARTICLE_\nAhti\n_START_PARAGRAPH_\nAhti on ..._NEWLINE_Se ..."

  Some languages of the repository have that text (en, de ...), others (he, sk ...) what
  Python prints of its bytes, b'\n_START_ARTICLE_\n\xd7\x90...'; this is undone.

  Configs: a language's code, or that and "_head", its beginning: 520M characters of
  train and 4M each of validation and test, for work on 400M and 2M that are left after
  cleaning (the pooling paper's; cleaning takes away less than a fifth). Files are
  fetched one by one, as they are read: for "en_head" two of 19.
  """

  name = "wiki40b"
  REPOSITORY = "google/wiki40b"
  BUILDER_CONFIGS = [
    Wiki40bConfig(name=code + suffix, language=code, max_characters=limits)
    for code in LANGUAGES
    for suffix, limits in (("", {}), ("_head", HEAD_CHARACTERS))
  ]

  def texts(self, get):
    """See `TextBuilder`."""
    return {split: self._articles(get, split) for split in HEAD_CHARACTERS}

  def _articles(self, get, split: str) -> Iterator[str]:
    config = cast(Wiki40bConfig, self.builder_config)
    left = config.max_characters.get(split, math.inf)
    for path in self.parquet_paths(get, config.language, split):
      for text in map(functools.partial(_plain, path=path), read_texts(path)):
        yield text
        left -= len(text)
        if left <= 0:
          return


def _plain(text: str, path: Path) -> str:
  """An article, from what Python prints of its bytes where it is that."""
  if not text.startswith(("b'", 'b"')):
    return text
  try:
    return ast.literal_eval(text).decode()
  except (SyntaxError, ValueError) as error:
    raise UserError(
      f"{path}: expected articles, as text or as Python prints their "
      f"bytes, got {text[:40]!r} ... ({error})"
    ) from error
