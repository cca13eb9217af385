"""What a run can be taken up from: written whole or not at all, and checked when read."""

import contextlib
import dataclasses
import errno
import gc
import logging
import os
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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


class Parameters(NamedTuple):
  """The parameters of a checkpoint.

  Attributes:
    step: updates made.
    params: the model's parameters.
    meta: as of `Checkpoint`.
  """

  step: int
  params: dict
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

    Damaged ones are moved into the folder "damaged", out of the way of those to come. A
    checkpoint is damaged if a file is missing or cannot be parsed, or if its arrays do
    not match their fingerprints. An error of the file system is not damage.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      origin: what the run is made from now, by name, as in `save`.

    Returns:
      The checkpoint, or None where there is none.

    Raises:
      ValueError: there are checkpoints, and all are damaged, or one is of a later format,
        another origin or another model.
      OSError: the file system could not read one. Nothing is moved.
    """
    self._check_alike()
    tries = [
      (step, manager) for manager in (self._last, self._best) for step in manager.all_steps()
    ]
    tries.sort(key=lambda step_and_manager: step_and_manager[0], reverse=True)
    found, damaged = self._first_readable(tries, _as_dict(abstract), origin or {})
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
  ) -> Parameters:
    """Reads the parameters of one checkpoint: `step`, or the best, or else the newest.

    The rest of the state is neither read nor checked.

    Args:
      abstract: shapes, dtypes and shardings of the parameters.
      step: of the checkpoint; None is the best by validation.
      origin: as in `restore`, of which it may be a part.

    Returns:
      The parameters.

    Raises:
      ValueError: there is no such step, nothing that is whole, or one is refused as in
        `restore`.
      OSError: as in `restore`.
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
    found, damaged = self._first_readable(tries, {"params": abstract}, origin or {})
    if found is None:
      raise UserError(
        f"step: expected a whole checkpoint in {self._root}, got a damaged one of step "
        f"{damaged[0][0]}"
      )
    step, tree, meta = found
    return Parameters(step, tree["params"], meta)

  def wait(self) -> None:
    """Returns when all that was saved is on disk."""
    self._last.wait_until_finished()
    self._best.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets go of the folder."""
    self.wait()
    self._last.close()
    self._best.close()

  def _check_alike(self) -> None:
    steps = [[*self._last.all_steps()], [*self._best.all_steps()]]
    if len({*_gather(zlib.crc32(repr(steps).encode()))}) > 1:
      raise UserError(
        f"workdir: expected all processes to see the same checkpoints in {self._root}, "
        f"got others than those of the steps {self.steps()} in some"
      )

  def _first_readable(self, tries, target: dict, origin: Mapping[str, str]):
    damaged = []
    for step, manager in tries:
      try:
        tree, meta = _read(Path(manager.directory) / str(step), target, origin)
        return (step, tree, meta), damaged
      except _DamagedError as error:
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
    _raise_together(error, source)
    manager.reload()


def fingerprints(state: TrainState) -> list[int]:
  """One number for each array: the sum of its 32-bit words, each times its place.

    sum over i of words[i] * (2 i + 1)  mod 2**32

  Integers add up the same in any order, so it is the same on any devices.
  """
  return _fingerprints_of(_as_dict(state))


def _fingerprints_of(tree) -> list[int]:
  return [int(number) for number in jax.device_get(_fingerprints(tree))]


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


class _DamagedError(Exception):
  """The checkpoint is proven to be damaged."""


def _read(folder: Path, target: dict, origin: Mapping[str, str]) -> tuple[dict, dict]:
  """Reads the parts of a state that `target` has, and the meta, in all processes alike.

  Raises:
    _DamagedError: it is damaged for at least one process.
    Exception: at least one process could not read it for another reason.
  """
  found, error = None, None
  with _silent_coroutines():
    try:
      found = _read_files(folder, target, origin)
    except Exception as caught:
      error = _damage_or_cause(caught, folder)
  _raise_together(error, folder)
  assert found is not None
  tree, meta, expected = found
  if _fingerprints_of(tree) != expected:
    error = _DamagedError("its arrays are not those that were saved")
  _raise_together(error, folder)
  return tree, meta


def _read_files(
  folder: Any, target: dict, origin: Mapping[str, str]
) -> tuple[dict, dict, list[int]]:
  """What `_read` gives, and the fingerprints saved for it; waits for no other process."""
  # Without the manager, whose `restore` ends with a barrier that an error would skip.
  meta = dict(ocp.JsonCheckpointHandler().restore(folder / "meta"))
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
  handler = ocp.PyTreeCheckpointHandler()
  saved: Any = jax.tree.leaves(handler.metadata(folder / "state").tree)
  is_wanted = [leaf.name.partition(".")[0] in target for leaf in saved]
  expected = [
    number for number, is_part in zip(meta["fingerprints"], is_wanted, strict=True) if is_part
  ]
  _check_arrays(
    {
      leaf.name: (leaf.shape, leaf.dtype)
      for leaf, is_part in zip(saved, is_wanted, strict=True)
      if is_part
    },
    target,
    folder,
  )
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
  state_args = ocp.args.PyTreeRestore(
    target,
    restore_args=ocp.checkpoint_utils.construct_restore_args(target),
    partial_restore=True,
  )
  return handler.restore(folder / "state", args=state_args), meta, expected


def _check_arrays(saved: Mapping[str, tuple], target: dict, folder: Path) -> None:
  """Refuses arrays of other names, shapes or dtypes than the model's."""
  wanted = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(target):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    wanted[name] = tuple(leaf.shape), leaf.dtype

  def text(found: tuple) -> str:
    return f"{np.dtype(found[1])} {list(found[0])}"

  wrong = [f"{name} is missing" for name in wanted.keys() - saved.keys()]
  wrong += [f"{name} is not the model's" for name in saved.keys() - wanted.keys()]
  wrong += [
    f"{name} is {text(saved[name])} and not {text(wanted[name])}"
    for name in wanted.keys() & saved.keys()
    if text(saved[name]) != text(wanted[name])
  ]
  if wrong:
    # Moments have the names of their parameters.
    wrong.sort(key=lambda line: (not line.startswith("params."), line))
    more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    raise _RefusedError(
      f"workdir: expected a checkpoint of this model, got another in {folder}: "
      f"{'; '.join(wrong[:8])}{more}"
    )


_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# What parsers raise; Orbax also wraps errors of TensorStore in a bare Exception.
_UNPARSABLE = (ValueError, LookupError, TypeError, AttributeError, NotImplementedError)


def _damage_or_cause(error: Exception, folder: Path) -> Exception:
  """What an error of reading means: a `_DamagedError` where it proves damage."""
  if isinstance(error, (_RefusedError, MemoryError, jax.errors.JaxRuntimeError)):
    return error
  each: BaseException | None = error
  while each is not None:
    if isinstance(each, OSError) and not isinstance(each, _GONE):
      if each.errno is None or each.filename is not None:
        return each
      return OSError(each.errno, each.strerror, str(folder))
    # TensorStore, which is not of Python, tells errors of the system in its text.
    for number in errno.errorcode.keys() - {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}:
      if os.strerror(number) in str(each):
        return OSError(number, os.strerror(number), str(folder))
    each = each.__cause__ or each.__context__
  if type(error) is not Exception and not isinstance(error, (*_GONE, *_UNPARSABLE)):
    return error
  try:
    _read_all(folder)
  except OSError as failure:
    return OSError(failure.errno, failure.strerror, failure.filename or str(folder))
  return _DamagedError(f"{type(error).__name__}: {error}".split("\n")[0][:200])


def _read_all(folder: Path) -> None:
  """Reads every file, for the errors of the file system alone."""

  def fail(error: OSError) -> None:
    # A folder that is missing is damage, as a file is.
    if not isinstance(error, _GONE):
      raise error

  for root, _, names in os.walk(folder, onerror=fail):
    for name in names:
      with open(os.path.join(root, name), "rb") as file:
        while file.read(2**24):
          pass


def _raise_together(error: Exception | None, folder: Path) -> None:
  """Raises in all processes if one has an error, damage being the least of them."""
  own = 0 if error is None else 1 if isinstance(error, _DamagedError) else 2
  worst = max(every := _gather(own))
  if worst == 0:
    return
  if error is not None and own == worst:
    raise error
  message = f"Process {every.index(worst)} could not read or move {folder}, and says why."
  raise _DamagedError(message) if worst == 1 else RuntimeError(message)


def _gather(number: int) -> list[int]:
  """The number of every process; all have to ask."""
  if jax.process_count() == 1:
    return [number]
  return multihost_utils.process_allgather(np.uint32(number)).tolist()


def _as_dict(state: TrainState) -> dict:
  return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
  writes = keep is not None
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep, cleanup_tmp_directories=writes, create=writes
  )
  return ocp.CheckpointManager(folder, options=options)
