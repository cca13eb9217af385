"""Builds each folder in data_dir once, and completely or not at all.

For a folder text8 there are

  text8/            the complete folder with its record, data.json
  text8.partial/    the unfinished folder, perhaps of a process that was killed: built anew
  text8.lock        locked by the process that builds it; stays, and is empty
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.errors import UserError

RECORD = "data.json"

_log = logging.getLogger(__name__)


def build_once(
  folder: Path, inputs: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
  """Builds a folder once for all processes, unless it was built from the same inputs.

  Args:
    folder: the folder; one built from other inputs is replaced.
    inputs: JSON values.
    build: fills a given empty folder, and returns what else to record.

  Returns the record: `inputs`, the result of `build`, and the sizes of the files.

  Raises:
    UserError: from `build`; or data_dir cannot be written, or its disk is full.
  """
  inputs = json.loads(json.dumps(inputs))
  if record := read_record(folder, inputs):
    return record
  partial = folder.with_name(folder.name + ".partial")
  try:
    with lock(folder.with_name(folder.name + ".lock")):
      if record := read_record(folder, inputs):
        return record
      check_replaceable(folder)
      try:
        if partial.exists():
          shutil.rmtree(partial)
        partial.mkdir()
        record = {**inputs, **build(partial)}
        record["files"] = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        files.write_json(partial / RECORD, record)
        replace_folder(partial, folder)
        return record
      finally:
        shutil.rmtree(partial, ignore_errors=True)
  except OSError as error:
    raise UserError(
      f"data.data_dir: expected a folder that can be written, got {folder.parent} "
      f"({error.strerror or error})"
    ) from error


def read_record(folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
  """The record of a folder; {} if it is missing, incomplete or built from other inputs."""
  record = files.read_json(folder / RECORD)
  if any(record.get(key) != value for key, value in inputs.items()):
    return {}
  sizes = {folder / name: size for name, size in record.get("files", {}).items()}
  is_whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
  return record if is_whole else {}


def check_replaceable(folder: Path) -> None:
  """Raises a `UserError` for a folder whose content is not dpjax's."""
  if folder.exists() and any(folder.iterdir()) and not (folder / RECORD).exists():
    raise UserError(
      f"{folder}: expected a folder that dpjax can replace, got one that holds something else; "
      "move it away"
    )


def replace_folder(source: Path, target: Path) -> None:
  """Moves a complete folder to its place."""
  if target.exists():
    shutil.rmtree(target)
  os.replace(source, target)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
  """Waits until no other process holds the lock, an empty file that stays, and takes it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    if not files.try_lock(file):
      _log.warning("%s: waiting for another process that builds this", path)
      fcntl.flock(file, fcntl.LOCK_EX)
    yield  # The lock ends with the file.
