"""The files in a run's folder.

config.json      the settings, as given
frozen.json      the settings of the model that boundaries use, if any
data/            the vocabulary, the sizes of the texts, and the path of their tokens in
                 data_dir/tokens; with unigram boundaries, their model
checkpoints/     the last, and the best by validation
metrics.jsonl    scores of each report; tensorboard/ has the same
losses.f32       the loss of every update, as float32
scores_<split>_<step>.json    scores of a whole split, by train.py and evaluate.py
lock             locked by the training process; names its host and number
"""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax import config as config_lib
from dpjax import files, hub
from dpjax.config import ConfigDict, loading, registry, schema
from dpjax.errors import UserError, not_writable
from dpjax.files import try_lock, write_json
from dpjax.training import checkpoints

PARAMETERS = "model.safetensors"  # of an exported run, in the place of checkpoints
# The files of an exported run; the first four are in each. Its users may change the card.
_EACH = ("config.json", PARAMETERS, "data/data.json", "data/tokenizer.json")
CHECKED = (*_EACH[1:], "frozen.json", "boundaries.json", "data/unigram.model")
EXPORTED = ("config.json", "README.md", *CHECKED)
# How the names begin of what training writes into the folder, with any endings.
_OWN = r"(checkpoints|config|data|frozen|lock|losses|metrics|profile|scores_\w+|tensorboard)(\.|$)"


def find(place: str | Path) -> Path:
  """The folder of a run, with ~ expanded; that of a model hf://OWNER/NAME[@REVISION] is downloaded.

  A `UserError` if the model cannot be read, is not of dpjax, or its small files have changed.
  """
  if not hub.is_address(place):
    folder = Path(os.path.expanduser(place))
  else:
    folder = hub.download(str(place), EXPORTED)
    if missing := [name for name in _EACH if not (folder / name).exists()]:
      hub.check_fetched(str(place), missing)
      expected = "expected a model that dpjax exported"
      raise UserError(f"{place}: {expected}, got a repository without {', '.join(missing)}")
  if is_exported(folder):
    check_exported(folder, *CHECKED[1:])
  return folder


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


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
  """Locks the folder, made if missing, against other runs while the block runs.

  A `UserError` if another process trains in it, it is an exported run, it cannot be written, a
  link leads out of it, its disk becomes full, or it is removed.
  """
  if is_exported(workdir):
    hint = "to train on, take a new workdir and it as train.init_from"
    expected = "expected an empty folder or a run"
    raise UserError(f"workdir: {expected}, got {workdir}, an exported one; {hint}")
  with contextlib.ExitStack() as stack:
    opened: list[Any] = []
    on_first_process(lambda: _lock(workdir, stack, opened))
    try:
      yield
    except Exception as error:
      for file in opened:
        files.check_there(file, workdir / "lock")
      if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        if error.filename is None:  # as of writing to an open file
          raise not_writable("workdir", workdir, error) from error
      raise


def _lock(workdir: Path, stack: contextlib.ExitStack, opened: list[Any]) -> None:
  try:
    str(workdir).encode()
  except UnicodeEncodeError:  # which the writer of checkpoints cannot take
    raise UserError(f"workdir: expected a name in UTF-8, got {str(workdir)!r}") from None
  try:
    _check_files(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context(files.open_plain(workdir / "lock", "a+", encoding="utf-8"))
    opened.append(file)
  except OSError as error:
    raise not_writable("workdir", workdir, error) from error
  if not try_lock(file):
    file.seek(1)  # Windows refuses to read the byte that is locked.
    owner = file.read().strip() or "another process"
    expected = "expected a folder in which no other process trains"
    raise UserError(f"workdir: {expected}, got {workdir}, in which {owner} does")
  with contextlib.suppress(OSError):  # Who trains is of use to people alone.
    file.truncate(0)
    file.write(f"\nprocess {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _check_files(workdir: Path) -> None:
  """A `UserError` if training could write over a file outside of the folder, or wait for a pipe."""
  if not workdir.is_dir():
    return
  own = [entry for entry in workdir.iterdir() if re.match(_OWN, entry.name)]
  for path in [*own, *(inner for entry in own for inner in entry.rglob("*"))]:
    if path.exists() and not (path.is_file() or path.is_dir()):
      raise UserError(f"{path}: expected a plain file, got a device or a pipe")
    target = Path(os.path.realpath(path))  # also of a loop
    if path.is_symlink() and not target.is_relative_to(os.path.realpath(workdir)):
      raise UserError(
        f"workdir: expected a run whose files are in its folder, got {path}, a link to "
        f"{path.readlink()} (to keep them on another disk, let the folder itself be a link)"
      )


def resumes(workdir: Path, config: ConfigDict) -> bool:
  """Whether training resumes a run; a `UserError` if that has other settings."""
  path = workdir / "config.json"
  if not path.exists():
    saved = (workdir / "checkpoints").glob("*")
    if not all(".orbax-checkpoint-tmp" in path.name for path in saved):
      raise UserError(
        f"workdir: expected an empty folder or a whole run, got {workdir}, which has "
        "checkpoints and no config.json"
      )
    return False
  differences = config_lib.differences(loading.read_settings(path), config.to_dict())
  if differences and has_saved(workdir):
    hint = " (the schedule ends with the length: to train on, take a new workdir and "
    hint += f"train.init_from = {workdir})"
    hint *= all(line.startswith(schema.LENGTH_KEYS) for line in differences)
    raise UserError(
      f"workdir: expected an empty folder or a run of this configuration, got {workdir}, "
      f"whose run has another: {'; '.join(differences)}{hint}"
    )
  return not differences


def is_exported(folder: Path) -> bool:
  """Whether a folder is an exported run."""
  return (folder / PARAMETERS).exists()


def is_run(folder: Path) -> bool:
  """Whether a folder belongs to a run or an exported run."""
  return (folder / "checkpoints").is_dir() or is_exported(folder)


def has_saved(workdir: Path) -> bool:
  """Whether the folder has a complete checkpoint."""
  return bool(checkpoints.find_complete(workdir / "checkpoints"))


def write_config(workdir: Path, config: ConfigDict, frozen: ConfigDict | None = None) -> None:
  """Writes the settings, as given, and those of the model of its boundaries."""

  def write() -> None:
    try:
      if frozen is not None:
        write_json(workdir / "frozen.json", frozen.to_dict())
      plugins = {"plugins": schema.plugins_in(config)}
      write_json(workdir / "config.json", config.to_dict() | plugins)
    except OSError as error:
      raise not_writable("workdir", workdir, error) from error

  on_first_process(write)


def read_config(workdir: Path) -> ConfigDict:
  """The settings of the run in a folder; a `UserError` if they cannot be read."""
  if not (workdir / "config.json").exists():
    raise UserError(f"workdir: expected the folder of a run, got {workdir}")
  return loading.of_run(workdir)


def read_frozen(config: ConfigDict, workdir: Path) -> ConfigDict | None:
  """The settings of the model that the boundaries of a run use, if any."""
  if not needs_run(config):
    return None
  return config_lib.from_dict({"model": loading.read_settings(workdir / "frozen.json")}).model


def needs_run(config: ConfigDict) -> bool:
  """Whether the boundaries use the model of another run."""
  return registry.boundaries.component(config.model.boundaries.name).needs_run


def on_first_process(work: Callable[[], None]) -> None:
  """Runs a function on the first process; the others wait, and all raise its error."""
  if jax.process_count() == 1:
    return work()
  # The first one to be sent has a short time limit, which long work would exceed.
  multihost_utils.broadcast_one_to_all(np.zeros(1, np.uint8))
  message, own = "", None
  if jax.process_index() == 0:
    try:
      work()
    except Exception as error:  # Whatever it is: the others would wait for ever.
      own, message = error, str(error) or type(error).__name__
  letters = np.zeros(4096, np.uint8)
  known = np.frombuffer(message.encode()[: letters.size], np.uint8)
  letters[: known.size] = known
  letters = np.asarray(multihost_utils.broadcast_one_to_all(letters))
  message = letters.tobytes().rstrip(b"\0").decode(errors="replace")
  if own is not None:
    raise own
  if message:
    raise UserError(message)
