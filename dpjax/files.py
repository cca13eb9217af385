"""Small files: read within a limit, and written completely or not at all."""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 2**27
_log = logging.getLogger(__name__)


def read_file(path: str | Path) -> bytes:
  """The content of a file.

  Raises:
    ValueError: it is a folder, device or pipe, or has more than `MOST_BYTES`.
    OSError: it cannot be read.
  """
  path = Path(path)
  size = path.stat().st_size
  # Opening a pipe would wait, and some devices never end.
  if not path.is_file():
    raise ValueError("a folder, a device or a pipe")
  if size > MOST_BYTES:
    raise ValueError(f"more than {MOST_BYTES:,} bytes")
  return path.read_bytes()


def load_json(path: str | Path) -> Any:
  """The value in a JSON file.

  Raises:
    ValueError: it is damaged, nested too deeply, or no file for `read_file`.
    OSError: it cannot be read.
  """
  try:
    return json.loads(read_file(path))
  except RecursionError as error:
    raise ValueError("JSON that is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
  """The JSON object in a file; {} without a readable one."""
  try:
    content = load_json(path)
  except (OSError, ValueError):
    return {}
  return content if isinstance(content, dict) else {}


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
    # A full disk is reported without the file's name.
    raise OSError(error.errno, error.strerror, str(path)) from error


def checksum(path: Path, kind: str = "sha256") -> str:
  """The checksum of a file, as hexadecimal digits."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, kind).hexdigest()


def try_lock(file: IO) -> bool:
  """Locks an open file until it is closed; False if another process holds its lock."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno in (errno.EAGAIN, errno.EACCES):
      return False
    _log.warning("%s: this file system has no locks (%s)", file.name, error.strerror)
  return True
