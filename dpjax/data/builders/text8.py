"""text8: the letters of Wikipedia."""

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.builders.base import TextBuilder
from dpjax.data.download import File
from dpjax.errors import UserError

PIECE_BYTES = 2**20


class Text8(TextBuilder, skip_registration=True):
  """The first 10^8 characters of the text of the English Wikipedia of March 2006.

  Letters a to z and single spaces alone, digits spelt out, one line without an end.
  Train is the first 90%, validation and test are the 5% each that follow, as in the
  literature: 90M, 5M and 5M characters. (Of n characters, n // 20 each; train takes
  what rounding leaves.)

  Source: Mahoney, mattmahoney.net/dc/textdata.html; the splits of Mikolov et al. 2012,
  "Subword language modeling with neural networks". Licence: Wikipedia's text, then GFDL,
  now CC BY-SA 3.0.
  """

  name = "text8"
  FILES = (
    File(
      "http://mattmahoney.net/dc/text8.zip",
      # Setup.hs of github.com/d61h6k4/tensorflow-text8-input-data.
      checksum="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
      # scripts/datasets/url_checksums/language_model.txt of github.com/dmlc/gluon-nlp.
      size=31_344_016,
    ),
  )

  def texts(self, get):
    """The three stretches of the one text in the archive."""
    path = get(self.FILES[0])
    size = _size(path)
    part = size // 20
    first, second = size - 2 * part, size - part
    return {
      "train": _read(path, 0, first),
      "validation": _read(path, first, second),
      "test": _read(path, second, size),
    }


def _size(path: Path) -> int:
  try:
    with zipfile.ZipFile(path) as archive:
      return archive.getinfo("text8").file_size
  except (zipfile.BadZipFile, KeyError) as error:
    raise UserError(f"{path}: expected a zip archive of text8, got {error}") from error


def _read(path: Path, begin: int, end: int) -> Iterator[str]:
  try:
    with zipfile.ZipFile(path) as archive, archive.open("text8") as file:
      # At the end zipfile compares the archive's own checksum, unless it was to seek.
      for at in range(0, begin, PIECE_BYTES):
        file.read(min(PIECE_BYTES, begin - at))
      for at in range(begin, end, PIECE_BYTES):
        yield file.read(min(PIECE_BYTES, end - at)).decode("ascii")
  except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
    raise UserError(f"{path}: expected text8, whole and in ASCII, got {error}") from error
