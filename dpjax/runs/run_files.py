"""The files in a run's folder.

config.json      the settings, as given
frozen.json      the settings of the model that boundaries use, if any
data/            the vocabulary, the sizes of the texts, and the path of their tokens in
                 data_dir/tokens; with unigram boundaries, their model
checkpoints/     the last, and the best by validation
metrics.jsonl    scores of each report; tensorboard/ has the same
losses.f32       the loss of every update, as float32
scores_<split>_<step>.json    scores of a whole split, by `dpjax train` and `dpjax evaluate`
lock             locked by the training process; has its host and process id
"""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from dpjax import files, hub
from dpjax.config import loading, registry, schema, sections
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError, not_writable
from dpjax.files import try_lock, write_json
from dpjax.interop import hnet
from dpjax.runs import processes
from dpjax.training import checkpoints

PARAMETERS = "model.safetensors"  # of an exported run, instead of checkpoints
# The files of an exported run; the first four are in every export. Users may change the card.
_EACH = ("config.json", PARAMETERS, "data/data.json", "data/tokenizer.json")
CHECKED = (*_EACH[1:], "frozen.json", "boundaries.json", "data/unigram.model")
EXPORTED = ("config.json", "README.md", *CHECKED)
# Files that each run has, besides those within folders.
ALWAYS_WRITTEN = ("config.json", "lock", "losses.f32", "metrics.jsonl")
# The beginnings of the names that training writes into the folder, with any endings.
_WRITTEN = (
  r"(checkpoints|config|data|frozen|lock|losses|metrics|profile|scores_\w+|tensorboard)(\.|$)"
)
# Those that are there before the first update.
_BEFORE_TRAINING = {"config.json", "data", "frozen.json", "lock"}


def find(address: str | Path) -> Path:
  """The folder of a run, with ~ expanded; downloads a model hf://OWNER/NAME[@REVISION].

  Raises a `UserError` if the model cannot be read, is not from dpjax, or its small files have
  changed; or a file of a run is not a regular file, or has a hard link (those of an export may be
  hard links, as package managers make them).
  """
  if not hub.is_address(address):
    folder = Path(os.path.expanduser(address))
  else:
    folder = hub.download(str(address), EXPORTED)
    if missing := [name for name in _EACH if not (folder / name).exists()]:
      if (released := _download_released(str(address))) is not None:
        return released
      hub.check_fetched(str(address), missing)
      expected = "expected a model that dpjax exported"
      raise UserError(f"{address}: {expected}, got a repository without {', '.join(missing)}")
  if is_exported(folder):
    check_exported(folder, *CHECKED[1:])
  elif is_run(folder):
    check_files(folder)
  return folder


def _download_released(address: str) -> Path | None:
  """The folder or file of a Hub model that is an H-Net released by its authors; else None."""
  folder = hub.download(address, ["*.json"])
  names = hnet.names_in(folder)
  return hub.download(address, ["*.json", *names]) if names else None


def check_exported(folder: Path, *names: str) -> bool:
  """Whether an exported run has checksums; a `UserError` if those of the files `names` differ."""
  sums = files.read_json(folder / "config.json").get(loading.CHECKSUMS)
  if not isinstance(sums, dict):
    return False
  for path, expected in [(folder / name, sums[name]) for name in names if name in sums]:
    if not path.exists() or files.checksum(path) != expected:
      got = "another" if path.exists() else "none"
      raise UserError(f"{path}: expected the file as it was exported, got {got}")
  return True


def check_workdir(workdir: Path) -> None:
  """Raises a `UserError` if a path is an address, or an exported run is there."""
  files.check_local("workdir", workdir)
  if is_exported(workdir):
    hint = "to continue training, use a new workdir with train.init_from set to this folder"
    expected = "expected an empty folder or a run"
    raise UserError(f"workdir: {expected}, got {workdir}, an exported one; {hint}")


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
  """Locks the folder, made if missing, against other runs while the block runs.

  If the block fails before training begins, what it made is removed again, and the name of the
  last process that trained stays in the file `lock`.

  Raises a `UserError` as `check_workdir`, or if another process trains in it, it cannot be
  written, a file in it is a link or not a regular file, or it is removed.
  """
  check_workdir(workdir)
  made = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
  before = _names_in(workdir)
  with contextlib.ExitStack() as stack:
    locked = []  # the file and the name that was in it, on the first process

    def take() -> None:
      file = stack.enter_context(_open_lock(workdir))
      owner = f"\nprocess {os.getpid()} on {socket.gethostname()}\n"
      locked.append((file, _replace_owner(file, owner)))

    try:
      processes.on_first_process(take)
      yield
    except Exception:
      for file, owner in locked:
        files.check_there(file, workdir / "lock")
        _replace_owner(file, owner)
        _remove_untrained(workdir, before)
      for folder in made:
        with contextlib.suppress(OSError):  # It has other files.
          folder.rmdir()
      raise


def _names_in(folder: Path) -> set[str]:
  return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _remove_untrained(workdir: Path, before: Collection[str]) -> None:
  """Removes from a run's folder what was not there before, unless training began in it."""
  names = _names_in(workdir)
  if not {name for name in names if re.match(_WRITTEN, name)} <= _BEFORE_TRAINING:
    return
  for name in _BEFORE_TRAINING & names - {*before}:
    path = workdir / name
    if path.is_dir():
      shutil.rmtree(path, ignore_errors=True)
    else:
      with contextlib.suppress(OSError):  # Windows keeps the open file of the lock.
        path.unlink()


def _open_lock(workdir: Path) -> IO[str]:
  """The locked file."""
  try:
    check_files(workdir, to_write=True)
    workdir.mkdir(parents=True, exist_ok=True)
    file = files.open_plain(workdir / "lock", "a+", encoding="utf-8", errors="surrogateescape")
  except OSError as error:
    raise not_writable("workdir", workdir, error) from error
  if not try_lock(file):
    file.seek(1)  # Windows refuses to read the byte that is locked.
    owner = file.read().strip() or "another process"
    file.close()
    raise UserError(f"workdir: expected a folder that is free, got {workdir}, locked by {owner}")
  files.check_there(file, workdir / "lock")  # Its process may have removed what it had made.
  return file


def _replace_owner(file: IO[str], owner: str) -> str:
  """Writes the name of a process into a locked file; returns the name that was there."""
  before = ""
  with contextlib.suppress(OSError):  # The name is only informative.
    file.seek(0)
    before = file.read()
    file.truncate(0)
    file.write(owner)
    file.flush()
  return before


def check_files(workdir: Path, *, to_write: bool = False) -> None:
  """Raises a `UserError` if a file of a run is a device or a pipe, or has a hard link.

  With `to_write`, also if it links out of the folder: training would change another file.
  """
  entries = workdir.iterdir() if workdir.is_dir() else ()
  for entry in [entry for entry in entries if re.match(_WRITTEN, entry.name)]:
    inner = (Path(place, x) for place, folders, names in os.walk(entry) for x in folders + names)
    for path in (entry, *inner):
      with contextlib.suppress(FileNotFoundError):  # training may have removed it
        _check_file(workdir, path, to_write)


def _check_file(workdir: Path, path: Path, to_write: bool) -> None:
  target = Path(os.path.realpath(path))  # also for a loop of links
  if to_write and path.is_symlink() and not target.is_relative_to(os.path.realpath(workdir)):
    raise UserError(
      f"workdir: expected a run whose files are in its folder, got {path}, a link to "
      f"{path.readlink()} (to keep them on another disk, let the folder itself be a link)"
    )
  if path.exists() and not path.is_dir():
    files.check_plain(path)
    if path.stat().st_nlink > 1:
      raise UserError(
        f"{path}: expected a file with one name, got a hard link; `cp -a {workdir} COPY` makes a "
        "copy without links"
      )


def resumes(workdir: Path, config: ConfigDict) -> bool:
  """Whether training resumes a run; a `UserError` if the run has other settings."""
  path = workdir / "config.json"
  if not path.exists():
    saved = (workdir / "checkpoints").glob("*")
    if not all(".orbax-checkpoint-tmp" in path.name for path in saved):
      raise UserError(
        f"workdir: expected an empty folder or a complete run, got {workdir}, which has "
        "checkpoints and no config.json"
      )
    return False
  differences = sections.differences(loading.read_settings(path), config.to_dict())
  if differences and has_saved(workdir):
    hint = ""
    if all(line.partition(":")[0] in schema.LENGTHS for line in differences):
      hint = (
        " (the schedule ends with the length: to train on, take a new workdir and "
        f"train.init_from = {workdir})"
      )
    raise UserError(
      f"workdir: expected an empty folder or a run of this configuration, got {workdir}, "
      f"whose run has another: {'; '.join(differences)}{hint}"
    )
  return not differences


def is_exported(folder: Path) -> bool:
  """Whether a folder is an exported run."""
  return (folder / PARAMETERS).exists()


def is_run(folder: Path) -> bool:
  """Whether a folder has a run, an exported run, or an H-Net released by its authors."""
  has_run = (folder / "checkpoints").is_dir() or is_exported(folder)
  return has_run or hnet.find(folder) is not None


def has_saved(workdir: Path) -> bool:
  """Whether the folder has a complete checkpoint."""
  return bool(checkpoints.find_complete(workdir / "checkpoints"))


def write_config(workdir: Path, config: ConfigDict, frozen: ConfigDict | None = None) -> None:
  """Writes the settings, as given, and those of the model that the boundaries use."""

  def write() -> None:
    try:
      if frozen is not None:
        write_json(workdir / "frozen.json", frozen.to_dict())
      plugins = {"plugins": sections.plugins_in(config)}
      write_json(workdir / "config.json", config.to_dict() | plugins)
    except OSError as error:
      raise not_writable("workdir", workdir, error) from error

  processes.on_first_process(write)


def read_config(workdir: Path) -> ConfigDict:
  """The settings of the run in a folder; a `UserError` if they cannot be read."""
  if not (workdir / "config.json").exists():
    raise UserError(f"workdir: expected the folder of a run, got {workdir}")
  return loading.of_run(workdir)


def check_saved(workdir: Path, settings: ConfigDict, config: ConfigDict) -> None:
  """Raises a `UserError` if a run's checkpoints have other settings than its config.json.

  Args:
    workdir: the run's folder.
    settings: those of config.json.
    config: the same with what follows from the tokenizer, which checkpoints compare themselves.
  """
  saved = checkpoints.read_meta(workdir / "checkpoints").get("config")
  if not isinstance(saved, dict):
    return
  following = {line.partition(":")[0] for line in sections.differences(settings, config)}
  differences = [
    line
    for line in sections.differences(loading.without_idle(saved), config.to_dict())
    if line.partition(":")[0] not in following
  ]
  if differences:
    raise UserError(
      f"{workdir / 'config.json'}: expected the settings with which the run was trained (there, in "
      f"its checkpoints), got others: {'; '.join(differences)}"
    )


def read_frozen(config: ConfigDict, workdir: Path) -> ConfigDict | None:
  """The settings of the model that the boundaries of a run use, if any."""
  if not needs_run(config):
    return None
  model = loading.read_settings(workdir / "frozen.json")
  return loading.from_dict(loading.without_idle({"model": model})).model


def needs_run(config: ConfigDict) -> bool:
  """Whether the boundaries use the model of another run."""
  if not sections.is_pooled(config.model):
    return False
  return registry.boundaries.component(config.model.boundaries.name).needs_run
