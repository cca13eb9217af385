"""CC-100: web text in a hundred languages, of which a beginning is taken."""

import dataclasses
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import tensorflow_datasets as tfds

from dpjax.data.builders.base import TextBuilder
from dpjax.data.download import File
from dpjax.errors import UserError

BASE_URL = "https://data.statmt.org/cc-100"
HEAD_BYTES = 2**28
MAX_CHARACTERS = 520 * 10**6
READ_BYTES = 2**20


@dataclasses.dataclass(eq=False)
class CC100Config(tfds.core.BuilderConfig):
  """A language's beginning.

  Attributes:
    language: as in the file's name; "": the config's own name.
    head_bytes: of the packed file, how many are fetched.
    max_characters: after how many the text ends, with a whole document.
  """

  language: str = ""
  head_bytes: int = HEAD_BYTES
  max_characters: int = MAX_CHARACTERS


class CC100(TextBuilder, skip_registration=True):
  """The beginning of CC-100 (Conneau et al., ACL 2020; Wenzek et al., LREC 2020).

  Web pages of Common Crawl of 2018, chosen as for XLM-R. Source:
  https://data.statmt.org/cc-100/en.txt.xz (82 GB packed; fi, he, vi likewise). Licence:
  the preparers claim no rights; Common Crawl's terms of use hold for the pages.

  One split, "train": the first documents as they stand, until 520M characters are full:
  enough for the pooling paper's 400M for training and 2M and 2M after them, which are
  cut once the text is cleaned. Of the file only the first 256 MiB are fetched; they
  unpack to about a billion bytes. A paragraph is a line, a blank line ends a document;
  one that the cut goes through is left out. By hand: cc100-en.txt.xz in the manual
  folder, all of it or as much of its beginning.

  Configs: en, fi, he, vi, and any language of the site as `CC100Config(name="sw")`.
  """

  name = "cc100"
  BUILDER_CONFIGS = [CC100Config(name=code) for code in ("en", "fi", "he", "vi")]

  def texts(self, get):
    """See `TextBuilder`."""
    return {"train": self._documents(get)}

  def _documents(self, get) -> Iterator[str]:
    config = cast(CC100Config, self.builder_config)
    name = f"{config.language or config.name}.txt.xz"
    file = File(f"{BASE_URL}/{name}", f"cc100-{name}", head_bytes=config.head_bytes)
    left = config.max_characters
    for text in read_documents(get(file)):
      yield text
      left -= len(text)
      if left <= 0:
        return


def read_documents(path: Path) -> Iterator[str]:
  """The documents of an .xz file, or of the beginning of one, blank lines included.

  Raises:
    ValueError: it is no .xz file, damaged, or not UTF-8.
  """
  rest = b""
  try:
    with lzma.open(path) as file:
      while part := file.read1(READ_BYTES):
        *documents, rest = (rest + part).split(b"\n\n")
        for document in documents:
          yield document.decode() + "\n\n"
    yield rest.decode()
  except EOFError:  # only the beginning; what is left in `rest` is no whole document
    return
  except (lzma.LZMAError, UnicodeDecodeError) as error:
    raise UserError(
      f"{path}: expected UTF-8 text packed by xz, or the beginning of such a file, got {error}"
    ) from error
