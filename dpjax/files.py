"""File access: opens only regular files, writes atomically, and locks."""

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from dpjax.errors import UserError, not_writable

MAX_BYTES = 2**27  # limit for a file that is read at once
RECORD = "data.json"  # in each folder that `build_once` built
JsonObject = dict[str, Any]
# Of an address, also where `Path` has removed a slash; drives of Windows have one letter.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")
_log = logging.getLogger(__name__)


def check_plain(path: Path) -> None:
  """Raises a `UserError` for a folder, a pipe (would block) or a device (may never end)."""
  if not stat.S_ISREG(path.stat().st_mode):
    raise UserError(f"{path}: expected a plain file, got a folder, a device or a pipe")


def open_plain(path: str | Path, mode: str = "rb", **options: Any) -> Any:
  """Opens a regular file like `open`; used for every file whose name users choose.

  Raises:
    UserError: see `check_plain`; or the file to write has a hard link, through which another
      file would change.
    OSError: it cannot be opened.
  """
  path = Path(path)
  with contextlib.suppress(FileNotFoundError):
    check_plain(path)
    if mode != "rb" and path.stat().st_nlink > 1:
      got = "got a hard link to another file; put a copy in its place"
      raise UserError(f"{path}: expected a file to write to, {got}")
  return path.open(mode, **options)


def read_file(path: str | Path) -> bytes:
  """The content of a file; raises like `open_plain`, and a `ValueError` above `MAX_BYTES`."""
  with open_plain(path) as file:
    if os.fstat(file.fileno()).st_size > MAX_BYTES:
      raise ValueError(f"more than {MAX_BYTES:,} bytes")
    return file.read()


def load_json(path: str | Path) -> Any:
  """The value in a JSON file.

  Raises:
    ValueError: it is damaged or nested too deeply, or `read_file` rejects it.
    OSError: it cannot be read.
  """
  try:
    return json.loads(read_file(path))
  except RecursionError as error:
    raise ValueError("JSON that is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
  """The JSON object in a file; {} if it cannot be read."""
  try:
    content = load_json(path)
  except (OSError, ValueError):
    return {}
  return content if isinstance(content, dict) else {}


def short_name(name: str) -> str:
  """A name cut to 80 bytes, so that with a suffix it is a valid file name on every disk."""
  return os.fsdecode(os.fsencode(name)[:80])


def refusal(path: str | Path) -> str:
  """Why nothing can be written to a path that users chose; "" if it may be possible.

  The address http://x/y would become a folder `http:`.
  """
  is_address = _SCHEME.match(str(path)) is not None
  return f"expected a path on this machine, got the address {path}" if is_address else ""


def check_local(key: str, path: str | Path) -> None:
  """Raises a `UserError` that begins with `key` if a path to write to is an address."""
  if reason := refusal(path):
    raise UserError(f"{key}: {reason}")


def check_writable(folder: Path) -> None:
  """Makes a folder if missing; an `OSError` that names it if it is not writable."""
  folder.mkdir(parents=True, exist_ok=True)
  try:
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise OSError(error.errno, error.strerror, str(folder)) from error


def write_file(path: Path, content: bytes) -> None:
  """Writes a file atomically; makes its folder if missing, and replaces a link."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing_file(path) as file:
    file.write(content)


def write_output(path: Path, content: bytes) -> None:
  """Writes a file that the user named, like `write_file`, but keeps what is there.

  Of a link, the file that it leads to is written; a device or a pipe gets the content.

  Raises:
    OSError: it names the file, which cannot be written, or is a pipe that no process reads.
  """
  if _is_special(path):
    _write_into(path, content)
  else:
    write_file(Path(os.path.realpath(path)), content)


def _is_special(path: Path) -> bool:
  """Whether there is a device, a pipe or a socket."""
  try:
    mode = path.stat().st_mode
  except FileNotFoundError:
    return False
  return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write_into(path: Path, content: bytes) -> None:
  """Writes to a device or a pipe, which a rename would replace."""
  # A pipe without a reader would block.
  nonblocking = getattr(os, "O_NONBLOCK", 0)
  try:
    descriptor = os.open(path, os.O_WRONLY | nonblocking)
    with open(descriptor, "wb") as file:
      if nonblocking:
        os.set_blocking(descriptor, True)
      file.write(content)
  except OSError as error:
    raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON file with `write_file`."""
  write_file(path, as_json(content))


def as_json(content: Mapping[str, Any]) -> bytes:
  """The content of a JSON file."""
  return (json.dumps(content, indent=2) + "\n").encode()


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
  """Yields a new file to fill, which then replaces `path` atomically."""
  try:
    with temporary(path) as file:
      yield file
      sync(file)
      if os.name == "nt":  # Windows neither renames nor removes an open file.
        file.close()
      os.replace(file.name, path)
  except OSError as error:
    # A full disk is reported without the file's name.
    raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[IO[bytes]]:
  """Yields a new file beside `path`, removed at the end; first removes those of ended processes.

  data.json  ->  data.json.5f3c09ab44d1e207.tmp, locked until its process ends, in any way
  """
  for _ in left_beside(path):
    pass
  with contextlib.ExitStack() as stack:
    exists = False
    while not exists:
      new = path.with_name(f"{short_name(path.name)}.{secrets.token_hex(8)}.tmp")
      file = new.open("xb")
      stack.callback(new.unlink, missing_ok=True)
      stack.enter_context(file)
      with contextlib.suppress(OSError):  # Without locks, nothing is removed either.
        lock_descriptor(file.fileno())
      exists = new.exists()  # Otherwise another process removed it before it was locked.
    yield file


def left_beside(path: Path) -> Iterator[Path]:
  """Yields, then removes, each file of `temporary` that an ended process left beside `path`."""
  digits = "[0-9a-f]" * 16  # No other program names files like this.
  for left in path.parent.glob(f"{glob.escape(short_name(path.name))}.{digits}.tmp"):
    with contextlib.suppress(OSError), left.open("r+b") as file:
      if lock_descriptor(file.fileno(), blocking=False):
        yield left
        if os.name == "nt":
          file.close()
        left.unlink()


def check_there(file: IO, path: Path) -> None:
  """Raises a `UserError` if an open file is no longer at `path`, as after removing its folder."""
  with contextlib.suppress(FileNotFoundError):
    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
      return
  raise UserError(
    f"workdir: expected the folder where training started, got {path.parent}, which is gone; the "
    "same command starts again"
  )


def sync(*opened: IO) -> None:
  """Waits until everything written to the files is on the disk."""
  for file in opened:
    file.flush()
    os.fsync(file.fileno())


def checksum(path: Path, algorithm: str = "sha256") -> str:
  """The checksum of a file, as hexadecimal digits."""
  with open_plain(path) as file:
    return hashlib.file_digest(file, algorithm).hexdigest()


def try_lock(file: IO, *, wait: bool = False) -> bool:
  """Locks an open file until it is closed; False if another process holds its lock.

  With `wait`, waits for that process. Without locks, warns and returns True. On Windows,
  no other process can read the first byte of a locked file.
  """
  try:
    return lock_descriptor(file.fileno(), blocking=wait)
  except OSError as error:
    _log.warning("%s: this file system has no locks (%s)", file.name, error.strerror)
  return True


def build_once(
  folder: Path, inputs: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
  """Builds a folder once for all processes, unless it was built from the same inputs.

  For a folder text8, the files are

    text8/            the complete folder with its record, data.json
    text8.partial/    the unfinished folder; rebuilt if its process was killed
    text8.replaced/   the old folder, until the new one is in its place
    text8.lock        an empty file, locked by the process that builds; not removed

  Args:
    folder: the folder; one built from other inputs is replaced.
    inputs: JSON values; "files" is the record's.
    build: fills an empty folder, and returns additional values to record.

  Returns the record: `inputs`, the result of `build`, and the sizes of the files.

  Raises:
    UserError: from `build` or `replacing`; or data_dir cannot be written, or its disk is full.
  """
  assert "files" not in inputs
  inputs = json.loads(json.dumps(inputs))
  if record := read_record(folder, inputs):
    return record
  path = folder.with_name(folder.name + ".lock")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_plain(path, "ab") as file:
      if not try_lock(file):
        _log.warning("%s: waiting for another process that builds this", path)
        try_lock(file, wait=True)
      bring_back(folder)
      if not (record := read_record(folder, inputs)):
        with replacing(folder) as partial:
          record = {**inputs, **build(partial)}
          record["files"] = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
          write_json(partial / RECORD, record)
      return record
  except OSError as error:
    raise not_writable("data.data_dir", folder.parent, error) from error


def read_record(folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
  """The record of a folder; {} if it is missing, incomplete or built from other inputs."""
  record = read_json(folder / RECORD)
  sizes = record.get("files")
  if not isinstance(sizes, dict) or any(record.get(key) != x for key, x in inputs.items()):
    return {}
  paths = {folder / name: size for name, size in sizes.items()}
  is_complete = all(path.is_file() and path.stat().st_size == size for path, size in paths.items())
  return record if is_complete else {}


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
  """Yields an empty folder to fill, which then replaces `folder`.

  The old folder is removed last, so that one of them is whole at any time; see `bring_back`.

  Raises a `UserError` if `folder` has files but no `RECORD`, and so is not dpjax's.
  """
  folder = Path(os.path.realpath(folder))  # A link stays.
  bring_back(folder)
  if folder.exists() and any(folder.iterdir()) and not (folder / RECORD).exists():
    raise UserError(
      f"{folder}: expected a folder that dpjax can replace, got one that holds something else; "
      "move it away"
    )
  partial = folder.with_name(folder.name + ".partial")
  old = _replaced(folder)
  shutil.rmtree(partial, ignore_errors=True)
  shutil.rmtree(old, ignore_errors=True)
  try:
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
      os.replace(folder, old)
    os.replace(partial, folder)
  finally:
    bring_back(folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def bring_back(folder: Path) -> None:
  """Puts back the old folder where a process was killed while it replaced it.

  Raises:
    OSError: it cannot be renamed.
  """
  old = _replaced(folder)
  if old.is_dir() and not folder.exists():
    os.replace(old, os.path.realpath(folder))


def _replaced(folder: Path) -> Path:
  """Where `replacing` keeps the old folder until the new one is in its place."""
  return Path(f"{os.path.realpath(folder)}.replaced")
