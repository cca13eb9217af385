"""Streams text out of archives, Parquet files and JSON lines, without unpacking them to disk."""

import bz2
import codecs
import fnmatch
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dpjax.data.sources import File, Files
from dpjax.errors import UserError

PIECE = 2**20  # bytes


def _open_zst(path: Path, mode: str) -> io.BufferedReader:
  import pyarrow as pa

  raw: Any = pa.CompressedInputStream(pa.OSFile(str(path), mode), "zstd")
  return io.BufferedReader(raw)


OPENERS = {
  "": open,
  ".xz": lzma.open,
  ".gz": gzip.open,
  ".bz2": bz2.open,
  ".zst": _open_zst,
}
_ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error)
_DAMAGES = (*_ARCHIVE_ERRORS, EOFError, KeyError, UnicodeDecodeError, OSError)


def _pieces(file: IO[bytes]) -> Iterator[str]:
  """The pieces of a file's text; "" for an empty file."""
  decoder = codecs.getincrementaldecoder("utf-8")()
  while block := file.read(PIECE):
    yield decoder.decode(block)
  yield decoder.decode(b"", final=True)


def head(texts: Iterable[str], most: float) -> Iterator[str]:
  """The first whole texts, until they have `most` characters."""
  size = 0
  for text in texts:
    yield text
    size += len(text)
    if size >= most:
      return


def damage(path: Path, expected: str, error: Exception) -> UserError:
  """The error for a file that cannot be read in its format."""
  return UserError(f"{path}: expected {expected}, got {error}")


def text_file(path: Path) -> Iterator[str]:
  """The exact text of a UTF-8 file, plain or compressed; a `UserError` for a damaged one."""
  try:
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
      yield from _pieces(file)
  except _DAMAGES as error:
    raise damage(path, "a text in UTF-8", error) from error


def find_split(folder: Path, split: str, kinds: Sequence[str] = (".txt",)) -> Path | None:
  """The file of a split, plain or compressed; None if there is none."""
  stems = (split, "validation") if split == "valid" else (split,)
  names = [f"{x}{kind}{packing}" for kind in kinds for packing in OPENERS for x in stems]
  return next((folder / name for name in names if (folder / name).exists()), None)


def read_text(path: str | Path, setting: str = "data.path") -> str:
  """A text as `data.path` reads it: UTF-8 without a byte-order mark, line ends as they are.

  Raises:
    UserError: `setting: ...`, it is no regular file, not UTF-8, or damaged.
  """
  path = Path(path)
  try:
    if path.stat() and path.is_file():
      return "".join(text_file(path)).removeprefix("\ufeff")
    reason: Any = "no regular file"
  except (UserError, OSError) as error:
    reason = getattr(error, "strerror", None) or error.__cause__
  raise UserError(f"{setting}: expected a text in UTF-8, got {path} ({reason})")


def zip_member(path: Path, member: str) -> Iterator[str]:
  """The text of a member of a zip archive, which is checked at the end.

  Raises:
    UserError: the archive is damaged, lacks the member or has one whose name leads out of it, or
      the text is not UTF-8.
  """
  try:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
      _check_names(archive.namelist())
      yield from _pieces(file)
  except _DAMAGES as error:
    raise damage(path, f"a zip archive with {member} in UTF-8", error) from error


def _check_names(names: Iterable[str]) -> None:
  for name in names:
    if name.startswith("/") or ".." in name.split("/"):
      raise KeyError(f"the name {name}, which leads out of it")


def tar_members(path: Path, wanted: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str]]:
  """The text of members of a tar.gz archive, in its order, with errors as in `zip_member`.

  `wanted` has for each split a regular expression for the end of their paths, and their number.
  """
  left = {split: count for split, (_, count) in wanted.items()}
  try:
    # The module gzip notices a cut archive, tarfile by itself does not.
    with gzip.open(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
      for member in archive:
        _check_names([member.name])
        for split, (pattern, _) in wanted.items():
          if left[split] and re.fullmatch(f"(.*/)?{pattern}", member.name):
            if content := archive.extractfile(member):
              yield from ((split, piece) for piece in _pieces(content))
              left[split] -= 1
        if not any(left.values()):
          return
  except _DAMAGES as error:
    names = ", ".join(pattern for pattern, _ in wanted.values())
    raise damage(path, f"a tar.gz archive with {names} in UTF-8", error) from error
  for split, count in left.items():
    if count:
      pattern, expected = wanted[split]
      raise UserError(f"{path}: expected {expected} members {pattern}, got {expected - count}")


def texts(path: str | Path, columns: Sequence[str]) -> Iterator[str]:
  """The texts of a Parquet file, or of JSON objects, one a line, plain or compressed.

  They are the strings in the first of the columns that a file or an object has; without a value,
  "". A `UserError` for a damaged file or one without the column.
  """
  path = Path(path)
  if path.suffix == ".parquet":
    return parquet_texts(path, columns)
  return _json_texts(path, columns)


def json_line(text: str) -> str:
  """A text as a JSON object with the field `text`, in a line."""
  return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def _json_texts(path: Path, columns: Sequence[str]) -> Iterator[str]:
  try:
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
      for number, line in enumerate(file, 1):
        if line := line.strip():
          record = json.loads(line)
          if not isinstance(record, dict):
            raise TypeError(f"line {number} of the type {type(record).__name__}")
          column = next((name for name in columns if name in record), columns[0])
          text = record[column]
          if text is not None and not isinstance(text, str):
            raise TypeError(f"{column} in line {number} of the type {type(text).__name__}")
          (text or "").encode()  # half a pair of surrogates is no text
          yield text or ""
  except (*_DAMAGES, ValueError, TypeError, RecursionError) as error:
    names = " or ".join(map(repr, columns))
    raise damage(path, f"a JSON object with a string {names} on each line", error) from error


def parquet_texts(path: Path, columns: Sequence[str] = ("text",)) -> Iterator[str]:
  """The texts of a Parquet file, row by row; see `texts`."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  try:
    # With a buffer, a large group of rows is read a page at a time.
    with pq.ParquetFile(path, buffer_size=PIECE) as file:
      column = next((name for name in columns if name in file.schema_arrow.names), columns[0])
      kind = file.schema_arrow.field(column).type
      if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise TypeError(f"{column} of the type {kind}")
      for i in range(file.num_row_groups):  # all at once, it keeps what it has read
        for batch in file.iter_batches(64, row_groups=[i], columns=[column]):
          yield from (text or "" for text in batch.column(0).to_pylist())
  except (pa.ArrowException, KeyError, TypeError, OSError, UnicodeError) as error:
    names = " or ".join(columns)
    raise damage(path, f"a Parquet file with a column of strings named {names}", error) from error


def hub_parquet(
  files: Files, corpus: str, repository: str, folder: str, split: str
) -> Iterator[Path]:
  """Yields the files FOLDER/SPLIT-00000-of-00019.parquet ... of a dataset at huggingface.co.

  The manual folder may hold them under the corpus's name (wiki40b/fi/train-00000-of-...).
  """
  pattern = f"{split}-?????-of-?????.parquet"
  names = sorted(path.name for path in (files.manual_dir / corpus / folder).glob(pattern))
  if not _is_complete(names):
    import huggingface_hub

    address = f"hf://datasets/{repository}/{folder}"
    try:
      listed = huggingface_hub.HfApi().list_repo_files(repository, repo_type="dataset")
    except Exception as error:  # Of several libraries.
      raise UserError(f"{address}: expected a list of files, got {error!r}") from error
    names = sorted(Path(x).name for x in fnmatch.filter(listed, f"{folder}/{pattern}"))
    if not _is_complete(names):
      raise UserError(
        f"{address}: expected all of {split}-00000-of-NNNNN.parquet and so on, got "
        f"{', '.join(names) or 'none'}"
      )
  for name in names:
    place = f"{folder}/{name}"
    yield files.get(File(f"hf://datasets/{repository}/{place}", f"{corpus}/{place}"))


def _is_complete(names: Sequence[str]) -> bool:
  """Whether there are NNNNN names that end with -of-NNNNN.parquet."""
  return bool(names) and len(names) == int(names[0].removesuffix(".parquet")[-5:])
