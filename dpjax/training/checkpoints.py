"""Checkpoints: written completely or not at all, and checked when read."""

import contextlib
import dataclasses
import logging
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from dpjax.errors import UserError
from dpjax.training.checkpoint_files import (
  FORMAT,
  DamagedError,
  as_dict,
  fingerprints,
  gather,
  raise_together,
  read,
  storable,
  system_error,
)
from dpjax.training.step import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint that was read.

  Attributes:
    step: the number of updates made.
    state: the train state.
    meta: the values saved beside it, with the "format".
  """

  step: int
  state: TrainState
  meta: dict


class Parameters(NamedTuple):
  """The parameters of a checkpoint.

  Attributes:
    step: the number of updates made.
    params: the model's parameters.
    meta: see `Checkpoint`.
  """

  step: int
  params: dict
  meta: dict


class Checkpoints:
  """The checkpoints of a run: the last ones, and the best by validation.

  Each holds parameters, optimizer state, random key and step (the position in the data), and
  also the configuration, the vocabulary and a format version. It includes fingerprints of the
  arrays, since the file format does not detect all damage.

  Args:
    folder: the folder of the run's checkpoints.
    keep: the number of last checkpoints to keep; None opens the folder read-only.
  """

  def __init__(self, folder: str | Path, keep: int | None = None):
    self._root = Path(folder).absolute()
    self._last = _manager(self._root / "last", keep)
    self._best = _manager(self._root / "best", keep and 1)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def steps(self) -> list[int]:
    """Steps that can be read, ascending."""
    return sorted({*self._last.all_steps(), *self._best.all_steps()})

  def best_step(self) -> int | None:
    """The best step by validation, if one was saved."""
    return self._best.latest_step()

  def save(
    self,
    state: TrainState,
    meta: Mapping,
    *,
    origin: Mapping[str, str] | None = None,
    best: bool = False,
  ) -> None:
    """Writes a checkpoint in the background; the state may be donated at once.

    Args:
      state: the state; its step becomes the checkpoint's.
      meta: JSON values.
      origin: inputs of the run by name: its vocabulary, a hash of its text.
      best: whether it also replaces the best.

    Raises:
      UserError: the folder was removed, or this checkpoint or the one before cannot be
        written, of which nothing is left.
    """
    step = int(state.step)
    meta = {
      **meta,
      "origin": dict(origin or {}),
      "format": FORMAT,
      "fingerprints": fingerprints(state),
    }
    with self._writing():
      if best:
        self._save(self._best, step, state, meta)
        # The last names the best, so it must not come first.
        self._best.wait_until_finished()
        for later in [other for other in self._best.all_steps() if other > step]:
          self._best.delete(later)
      self._save(self._last, step, state, meta)

  def _save(self, manager, step: int, state: TrainState, meta: dict) -> None:
    # Orbax would make it again, for a checkpoint of a run without settings and vocabulary.
    if not self._root.is_dir():
      raise UserError(
        f"workdir: expected the run's folder to stay, got {self._root}, which was removed "
        "since the training began"
      )
    if step not in manager.all_steps():
      items = ocp.args.Composite(
        state=ocp.args.StandardSave(storable(as_dict(state))), meta=ocp.args.JsonSave(meta)
      )
      manager.save(step, args=items, force=True)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Makes one line of an error of the file system, and removes what is half written."""
    try:
      yield
    except Exception as error:
      cause = system_error(error, self._root)
      if cause is None:
        raise
      for manager in (self._last, self._best):
        with contextlib.suppress(Exception):  # of the same cause
          manager.wait_until_finished()
        for path in Path(manager.directory).glob("*.orbax-checkpoint-tmp*"):
          shutil.rmtree(path, ignore_errors=True)
      raise UserError(
        f"workdir: expected a folder that can be written, got {self._root} "
        f"({cause.strerror or cause})"
      ) from error

  def restore(
    self, abstract: TrainState, origin: Mapping[str, str] | None = None
  ) -> Checkpoint | None:
    """Reads the newest undamaged checkpoint, to resume from it.

    Damaged ones are moved into the folder "damaged". A checkpoint is damaged if a file is
    missing or cannot be parsed, or if its arrays do not match their fingerprints. An error of
    the file system is not damage.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      origin: the current inputs of the run by name; see `save`.

    Returns:
      The checkpoint, or None without one.

    Raises:
      ValueError: all checkpoints are damaged, or one has a later format, another origin or
        another model.
      OSError: the file system could not read one. Nothing is moved.
    """
    self._check_alike()
    tries = [
      (step, manager) for manager in (self._last, self._best) for step in manager.all_steps()
    ]
    tries.sort(key=lambda step_and_manager: step_and_manager[0], reverse=True)
    found, damaged = self._first_readable(tries, as_dict(abstract), origin or {})
    if found is None:
      if damaged:
        raise UserError(
          f"workdir: expected a whole checkpoint in {self._root}, got damaged ones of the "
          f"steps {[step for step, _ in damaged]}. Restore that folder from a backup, or "
          "begin anew in another workdir (train.initial_run can name a run whose "
          "parameters to begin with)"
        )
      return None
    for step, manager in damaged:
      self._set_aside(step, manager)
    step, tree, meta = found
    return Checkpoint(step, TrainState(**tree), meta)

  def restore_step(
    self,
    abstract: Mapping,
    step: int | None = None,
    origin: Mapping[str, str] | None = None,
    part: str = "params",
  ) -> Parameters:
    """Reads the parameters of one checkpoint: `step`, or the best, or else the newest.

    The rest of the state is neither read nor checked.

    Args:
      abstract: shapes, dtypes and shardings of the parameters.
      step: the step of the checkpoint; None is the best by validation.
      origin: see `restore`; may be a part of it.
      part: "params", or "average" for a run that has one.

    Returns:
      The parameters.

    Raises:
      ValueError: there is no such step, no intact checkpoint, or a mismatch; see `restore`.
      OSError: see `restore`.
    """
    self._check_alike()
    known = self.steps()
    if not known:
      raise UserError("workdir: expected a run with a checkpoint, got none")
    if step is not None and step not in known:
      raise UserError(f"step: expected one of {known}, got {step}")
    best = self.best_step()
    wanted = [step] if step is not None else known[::-1]
    if step is None and best is not None:
      wanted.insert(0, best)
    tries = [(each, self._last) for each in wanted if each in self._last.all_steps()]
    if best is not None and step in (None, best):
      tries.insert(0, (best, self._best))
    found, damaged = self._first_readable(tries, {part: abstract}, origin or {})
    if found is None:
      raise UserError(
        f"step: expected a whole checkpoint in {self._root}, got a damaged one of step "
        f"{damaged[0][0]}"
      )
    step, tree, meta = found
    return Parameters(step, tree[part], meta)

  def wait(self) -> None:
    """Waits until all checkpoints are on disk."""
    with self._writing():
      self._last.wait_until_finished()
      self._best.wait_until_finished()

  def close(self) -> None:
    """Waits for writes, and releases the folder."""
    try:
      self.wait()
    finally:
      self._last.close()
      self._best.close()

  def _check_alike(self) -> None:
    steps = [[*self._last.all_steps()], [*self._best.all_steps()]]
    if len({*gather(zlib.crc32(repr(steps).encode()))}) > 1:
      raise UserError(
        f"workdir: expected all processes to see the same checkpoints in {self._root}, "
        f"got others than those of the steps {self.steps()} in some"
      )

  def _first_readable(self, tries, target: dict, origin: Mapping[str, str]):
    damaged = []
    for step, manager in tries:
      try:
        tree, meta = read(Path(manager.directory) / str(step), target, origin)
        return (step, tree, meta), damaged
      except DamagedError as error:
        damaged.append((step, manager))
        _log.warning(
          "The checkpoint of step %d is damaged (%s); trying the one before.", step, error
        )
    return None, damaged

  def _set_aside(self, step: int, manager: ocp.CheckpointManager) -> None:
    source, error = Path(manager.directory) / str(step), None
    if jax.process_index() == 0:
      try:
        folder = self._root / "damaged"
        folder.mkdir(exist_ok=True)
        source.rename(folder / f"{source.parent.name}_{step}_{time.time_ns()}")
      except OSError as caught:
        error = caught
    raise_together(error, source)
    manager.reload()


def saved_steps(folder: str | Path, kind: str) -> list[int]:
  """The steps of the complete checkpoints in a folder of a run's checkpoints, ascending.

  Args:
    folder: the folder, which need not exist.
    kind: "last" or "best".
  """
  names = ocp.path.step.standard_name_format()
  return sorted(found.step for found in names.find_all(Path(folder).absolute() / kind))


def _is_news(record: logging.LogRecord) -> bool:
  """Whether a line is to be logged; Orbax logs each error that it raises many times."""
  return not (record.exc_info and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_is_news)


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
  writes = keep is not None
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep,
    cleanup_tmp_directories=writes,
    create=writes,
    # Managers meet at barriers by name. Without this the last of one process could meet the
    # best of another, and both wait for ever.
    multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=folder.name),
  )
  return ocp.CheckpointManager(folder, options=options)
