"""What a run can be taken up from: written whole or not at all, and checked when read."""

import contextlib
import dataclasses
import gc
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dpjax.errors import UserError
from dpjax.training.step import TrainState

FORMAT = 1  # of what a checkpoint holds; a version reads its own and all before it

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """One that was read.

  Attributes:
    step: updates made.
    state: the train state.
    meta: what was saved beside it, with the "format".
  """

  step: int
  state: TrainState
  meta: dict


class Checkpoints:
  """The checkpoints of a run: the last ones, and the best by validation.

  Each holds parameters, optimiser state, random key and step (which is the position in
  the data), and beside them the configuration, the vocabulary and a format version. A
  fingerprint of the arrays is kept with them, since the file format does not notice
  every damage.

  Args:
    folder: of the run's checkpoints.
    keep: how many of the last to keep; None only reads, and changes nothing.
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
    """The step that was best by validation, if any was saved."""
    return self._best.latest_step()

  def save(
    self,
    state: TrainState,
    meta: Mapping,
    *,
    origin: Mapping[str, str] | None = None,
    best: bool = False,
  ) -> None:
    """Writes a checkpoint in the background; the state may be used up at once.

    Args:
      state: its step becomes the checkpoint's.
      meta: anything JSON can hold.
      origin: what the run is made from, by name: its vocabulary, a hash of its text.
      best: put it in the place of the best, too.
    """
    step = int(state.step)
    meta = {
      **meta,
      "origin": dict(origin or {}),
      "format": FORMAT,
      "fingerprints": fingerprints(state),
    }
    if best:
      self._save(self._best, step, state, meta)
      # The last names the best, so it must not come first.
      self._best.wait_until_finished()
      for later in [other for other in self._best.all_steps() if other > step]:
        self._best.delete(later)
    self._save(self._last, step, state, meta)

  def _save(self, manager, step: int, state: TrainState, meta: dict) -> None:
    if step not in manager.all_steps():
      items = ocp.args.Composite(
        state=ocp.args.StandardSave(_as_dict(state)), meta=ocp.args.JsonSave(meta)
      )
      manager.save(step, args=items, force=True)

  def restore(
    self, abstract: TrainState, origin: Mapping[str, str] | None = None
  ) -> Checkpoint | None:
    """Reads the newest undamaged checkpoint, to go on from it.

    Damaged ones are moved into the folder "damaged", out of the way of those to come.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      origin: what the run is made from now, by name, as in `save`.

    Returns:
      The checkpoint, or None where there is none.

    Raises:
      ValueError: there are checkpoints, and all are damaged, or one is of a later format
        or another origin.
    """
    tries = [(step, self._last) for step in sorted(self._last.all_steps(), reverse=True)]
    best = self.best_step()
    if best is not None and best not in self._last.all_steps():
      tries.append((best, self._best))
    found, damaged = self._first_readable(tries, abstract, origin or {})
    if found is None and damaged:
      raise UserError(
        f"workdir: expected a whole checkpoint in {self._root}, got damaged ones of the "
        f"steps {[step for step, _ in damaged]}"
      )
    for step, manager in damaged:
      self._set_aside(step, manager)
    return found

  def restore_step(
    self,
    abstract: TrainState,
    step: int | None = None,
    origin: Mapping[str, str] | None = None,
  ) -> Checkpoint:
    """Reads one checkpoint to look at: `step`, or the best, or else the newest.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      step: of the checkpoint; None is the best by validation.
      origin: as in `restore`, of which it may be a part.

    Returns:
      The checkpoint.

    Raises:
      ValueError: there is no such step, or nothing that can be read.
    """
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
    found, damaged = self._first_readable(tries, abstract, origin or {})
    if found is None:
      raise UserError(
        f"step: expected a whole checkpoint, got a damaged one of step {damaged[0][0]}"
      )
    return found

  def wait(self) -> None:
    """Returns when all that was saved is on disk."""
    self._last.wait_until_finished()
    self._best.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets go of the folder."""
    self.wait()
    self._last.close()
    self._best.close()

  def _first_readable(self, tries, abstract: TrainState, origin: Mapping[str, str]):
    damaged = []
    for step, manager in tries:
      with _silent_coroutines():
        try:
          return _read(manager, step, abstract, origin), damaged
        except (_RefusedError, MemoryError, jax.errors.JaxRuntimeError):
          raise
        # Damage shows as any of a dozen types, a bare Exception among them.
        except Exception as error:
          reason = str(error).split("\n")[0][:200]
      damaged.append((step, manager))
      _log.warning(
        "The checkpoint of step %d is damaged (%s); trying the one before.", step, reason
      )
    return None, damaged

  def _set_aside(self, step: int, manager: ocp.CheckpointManager) -> None:
    if jax.process_index() == 0:
      folder = self._root / "damaged"
      folder.mkdir(exist_ok=True)
      name = f"{manager.directory.name}_{step}_{time.time_ns()}"
      (Path(manager.directory) / str(step)).rename(folder / name)
    multihost_utils.sync_global_devices("damaged checkpoint set aside")
    manager.reload()


def fingerprints(state: TrainState) -> list[int]:
  """One number for each array: the sum of its 32-bit words, each times its place.

    sum over i of words[i] * (2 i + 1)  mod 2**32

  Integers add up the same in any order, so it is the same on any devices.
  """
  return [int(number) for number in jax.device_get(_fingerprints(_as_dict(state)))]


@jax.jit
def _fingerprints(tree) -> list[jax.Array]:
  def of_array(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.random.key_data(array)
    bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    words = jax.lax.bitcast_convert_type(array.ravel(), bits).astype(jnp.uint32)
    places = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)

  return [of_array(leaf) for leaf in jax.tree.leaves(tree)]


@contextlib.contextmanager
def _silent_coroutines():
  """Orbax abandons coroutines where a file is damaged, each with a page of its state."""
  hook = sys.unraisablehook
  sys.unraisablehook = lambda _: None
  try:
    yield
    gc.collect()
  finally:
    sys.unraisablehook = hook


class _RefusedError(UserError):
  """The checkpoint is whole, and not to be used."""


def _read(
  manager: ocp.CheckpointManager,
  step: int,
  abstract: TrainState,
  origin: Mapping[str, str],
) -> Checkpoint:
  meta_args = ocp.args.Composite(meta=ocp.args.JsonRestore())
  meta = manager.restore(step, args=meta_args)["meta"]
  if meta["format"] > FORMAT:
    raise _RefusedError(
      f"checkpoints: expected a format up to {FORMAT}, got {meta['format']}, which a "
      "later version of dpjax wrote"
    )
  for name, value in origin.items():
    if meta["origin"].get(name) != value:
      raise _RefusedError(
        f"workdir: expected the {name} that its checkpoints were made with, got another; "
        "was the folder data/ changed?"
      )
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_dict(abstract))
  state_args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
  state = TrainState(**manager.restore(step, args=state_args)["state"])
  if fingerprints(state) != meta["fingerprints"]:
    raise UserError("its arrays are not those that were saved")
  return Checkpoint(step, state, meta)


def _as_dict(state: TrainState) -> dict:
  return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
  writes = keep is not None
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep, cleanup_tmp_directories=writes, create=writes
  )
  return ocp.CheckpointManager(folder, options=options)
