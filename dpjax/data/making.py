"""Makes everything in data_dir: once, and complete or not at all.

For a folder "text8", or a file "text8.zip" beside its record, there are

  text8/            the complete folder with its record, data.json
  text8.zip, text8.zip.json
  text8.partial/    the unfinished folder, perhaps of a process that was killed
  text8.lock        locked by the process that makes it; stays, and is empty
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpjax.errors import UserError

RECORD = "data.json"
MOST_BYTES, MOST_DEPTH = 2**24, 64  # of a JSON file

_log = logging.getLogger(__name__)


class UnfinishedError(UserError):
  """The result is not complete, but the next call can continue."""


def make_once(
  target: Path,
  made_of: Mapping[str, Any],
  make: Callable[[Path], Mapping[str, Any]],
  *,
  is_file: bool = False,
) -> dict[str, Any]:
  """Makes a folder or a file, unless it exists and was made from the same inputs.

  If several processes ask for it, one makes it and the others wait.

  Args:
    target: the folder or the file; one made from other inputs is replaced.
    made_of: the inputs, as JSON values.
    make: fills a given folder and returns what else to record. The folder holds the files of
      an earlier call that was killed, or that raised an `UnfinishedError` or an error other
      than a `UserError`. To make a file, it writes <folder>/<target's name>.
    is_file: whether `target` is a file.

  Returns:
    The record: `made_of` and the result of `make`.

  Raises:
    UserError: from `make`; or data_dir cannot be written, or its disk is full.
  """
  made_of = json.loads(json.dumps(made_of))
  record = read_record(target, made_of, is_file=is_file)
  if record is not None:
    return record
  partial = target.with_name(target.name + ".partial")
  try:
    with locked(target.with_name(target.name + ".lock")):
      record = read_record(target, made_of, is_file=is_file)
      if record is not None:
        return record
      if target.is_dir() and any(target.iterdir()) and not (target / RECORD).exists():
        raise UnfinishedError(
          f"data.data_dir: expected room for what is made, got {target}, which holds something "
          "else; move it away"
        )
      note = partial / "made_of.json"
      if partial.is_file():
        partial.unlink()  # A download of version 0.1.
      elif partial.exists() and read_json(note) != made_of:
        shutil.rmtree(partial)
      partial.mkdir(exist_ok=True)
      write_json(note, made_of)
      record = {**made_of, **make(partial)}
      if is_file:
        # Without its file, a record is of no account.
        target.unlink(missing_ok=True)
        write_json(_record_path(target, is_file), record)
        _replace(partial / target.name, target)
        shutil.rmtree(partial)
        return record
      note.unlink()
      record["files"] = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
      write_json(partial / RECORD, record)
      if target.exists():
        shutil.rmtree(target)
      _replace(partial, target)
  except UserError as error:
    if not isinstance(error, UnfinishedError):
      shutil.rmtree(partial, ignore_errors=True)
    raise
  except OSError as error:
    raise UserError(
      f"data.data_dir: expected a folder that can be written, got {target.parent} "
      f"({error.strerror or error}); what is done stays, and the next call goes on from it"
    ) from error
  return record


def read_record(
  target: Path, made_of: Mapping[str, Any] | None = None, *, is_file: bool = False
) -> dict[str, Any] | None:
  """The record of a target; None if it is missing, incomplete or made from other inputs.

  Args:
    target: see `make_once`.
    made_of: see `make_once`; None accepts any inputs.
    is_file: see `make_once`.
  """
  record = read_json(_record_path(target, is_file)) if target.exists() else {}
  if not record or any(record.get(key) != value for key, value in (made_of or {}).items()):
    return None
  sizes = {target: record.get("size")} if is_file else {}
  sizes |= {target / name: size for name, size in record.get("files", {}).items()}
  is_whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
  return record if is_whole else None


def _record_path(target: Path, is_file: bool) -> Path:
  return target.with_name(target.name + ".json") if is_file else target / RECORD


def _replace(source: Path, target: Path) -> None:
  os.replace(source, target)
  folder = os.open(target.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
  """The JSON object in a file; {} without the file."""
  try:
    content = load_json(path)
  except (OSError, ValueError):
    return {}
  return content if isinstance(content, dict) else {}


def load_json(path: Path) -> Any:
  """The value in a JSON file, which may be anybody's.

  Raises:
    ValueError: it is damaged, or larger or deeper than any of dpjax's.
    OSError: it cannot be read.
  """
  try:
    value = json.loads(read_file(path, MOST_BYTES))
  except RecursionError:
    value = depth = MOST_DEPTH + 1
  else:
    depth, level = 0, [value]
    while level and depth <= MOST_DEPTH:
      depth += 1
      level = [x for y in level if isinstance(y, dict | list) for x in _within(y)]
  if depth > MOST_DEPTH:
    raise ValueError(f"expected at most {MOST_DEPTH} levels of JSON, got more")
  return value


def _within(value: dict | list) -> Any:
  return value.values() if isinstance(value, dict) else value


def read_file(path: Path, most_bytes: int) -> bytes:
  """The content of a file, but of no device or pipe, which may have no end.

  Raises:
    ValueError: it is no file, or a larger one.
    OSError: it cannot be read.
  """
  with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise ValueError("expected a file, got a device or a pipe")
    content = file.read(most_bytes + 1)
  if len(content) > most_bytes:
    raise ValueError(f"expected at most {most_bytes:,} bytes, got more")
  return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON file completely or not at all; makes its folder if missing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  temporary.unlink(missing_ok=True)  # Perhaps a link to another file.
  try:
    with temporary.open("x", encoding="utf-8", newline="\n") as file:
      file.write(json.dumps(content, indent=2) + "\n")
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    # That a disk is full comes without the file's name.
    raise OSError(error.errno, error.strerror, str(path)) from error


def checksum(path: Path, kind: str = "sha256") -> str:
  """The checksum of a file, as hexadecimal digits."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Waits until no other process holds the lock, and takes it.

  Args:
    path: an empty file; it is made if missing, and stays.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      _log.warning("%s: another process makes what is to be there; waiting for it", path)
      fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
      _log.warning("%s: this file system has no locks (%s)", path, error.strerror)
    yield  # The lock ends with the file.
