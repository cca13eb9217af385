"""Reads the text of files, plain or compressed, a few MB at a time."""

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

from dpjax.errors import UserError

BLOCK_BYTES = 2**20
RECORDS = (".jsonl", ".parquet")  # files with one document per line or row
COMPRESSED = (".xz", ".gz", ".bz2", ".zst")


def optional(module: str, package: str = "") -> ModuleType:
  """Imports a library that only some sources need; a `UserError` says how to install it."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    package = package or module.partition(".")[0]
    expected = f"expected the package {package} (pip install {package})"
    raise UserError(f"{module}: {expected}, got: {error}") from error


DAMAGES = (EOFError, UnicodeDecodeError, OSError, lzma.LZMAError, zlib.error)


def open_file(path: Path) -> io.BufferedIOBase:
  """Opens a file to read, plain or compressed as its suffix says."""
  if path.suffix == ".xz":
    return lzma.open(path, "rb")
  if path.suffix == ".gz":
    return gzip.open(path, "rb")
  if path.suffix == ".bz2":
    return bz2.open(path, "rb")
  if path.suffix == ".zst":
    pa = optional("pyarrow")
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"))
  return path.open("rb")


def line_pattern(separator: str) -> str:
  """The `dpjax.data.text_file.TextFile.marks` for documents with a separator line."""
  return rf"^{re.escape(separator)}\r?\n"


def damage(path: Path, expected: str, error: Exception) -> UserError:
  """The error for a file that cannot be read in its format."""
  return UserError(f"{path}: expected {expected}, got {error}")


def decode(file: IO[bytes] | io.BufferedIOBase) -> Iterator[str]:
  """The text of an open UTF-8 file in blocks, without a byte-order mark."""
  decoder = codecs.getincrementaldecoder("utf-8-sig")()
  while block := file.read(BLOCK_BYTES):
    yield decoder.decode(block)
  yield decoder.decode(b"", final=True)


def read_blocks(path: Path) -> Iterator[str]:
  """The text of a UTF-8 file in blocks; line ends stay. A `UserError` for a damaged file."""
  try:
    with open_file(path) as file:
      yield from decode(file)
  except DAMAGES as error:
    raise damage(path, "a text in UTF-8", error) from error


def read_text(path: str | Path, setting: str = "data.path") -> str:
  """The full text of a file, as `read_blocks` reads it.

  Raises:
    UserError: `setting: ...`, it is not a regular file, not UTF-8, or damaged.
  """
  path = Path(path)
  expected = f"{setting}: expected a text in UTF-8, got {path}"
  try:
    if path.stat() and path.is_file():
      return "".join(read_blocks(path))
  except (UserError, OSError) as error:
    reason = getattr(error, "strerror", None) or error.__cause__ or error
    raise UserError(f"{expected} ({reason})") from error
  raise UserError(f"{expected} (not a regular file)")


def read_records(path: str | Path, columns: Sequence[str]) -> Iterator[str]:
  """The texts in a Parquet file, or in JSON lines, plain or compressed.

  They are the strings in the first of `columns` that the file or object has; null becomes "".

  Raises:
    UserError: the file is damaged, or has no such column of strings.
  """
  path = Path(path)
  if path.suffix == ".parquet":
    return _parquet(path, columns)
  if path.with_suffix("").suffix == ".parquet":
    raise UserError(f"{path}: expected .parquet, which is compressed inside, got {path.suffix}")
  return _json_lines(path, columns)


def _json_lines(path: Path, columns: Sequence[str]) -> Iterator[str]:
  number = 0
  try:
    with open_file(path) as file:
      for line in file:
        number += 1
        if line := line.strip():
          record = json.loads(line)
          if not isinstance(record, dict):
            raise TypeError(f"the type {type(record).__name__}")
          column = next((name for name in columns if name in record), columns[0])
          text = record[column]
          if text is not None and not isinstance(text, str):
            raise TypeError(f"{column} of the type {type(text).__name__}")
          (text or "").encode()  # a lone surrogate is not text
          yield text or ""
  except (*DAMAGES, ValueError, KeyError, TypeError, RecursionError) as error:
    names = " or ".join(map(repr, columns))
    raise UserError(
      f"{path}: expected a JSON object with a string {names} (data.text_field) on each line, got "
      f"another line {number} ({error!r})"
    ) from error


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[str]:
  pa = optional("pyarrow")
  pq = optional("pyarrow.parquet")
  try:
    # With a buffer, a large group of rows is read a page at a time.
    with pq.ParquetFile(path, buffer_size=BLOCK_BYTES) as file:
      column = next((name for name in columns if name in file.schema_arrow.names), columns[0])
      dtype = file.schema_arrow.field(column).type
      if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        raise TypeError(f"{column} of the type {dtype}")
      for i in range(file.num_row_groups):  # In a single call, it would keep all that it has read.
        for batch in file.iter_batches(64, row_groups=[i], columns=[column]):
          yield from (text or "" for text in batch.column(0).to_pylist())
  except (pa.ArrowException, KeyError, TypeError, OSError, UnicodeError) as error:
    names = " or ".join(columns)
    expected = f"a Parquet file with a column of strings named {names} (data.text_field)"
    raise damage(path, expected, error) from error
