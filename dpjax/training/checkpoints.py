"""Checkpoints: written completely or not at all, and checked when read."""

import asyncio
import contextlib
import copy
import errno
import glob
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint import checkpoint_managers as managers

from dpjax import files
from dpjax.errors import UserError, is_lost_process, not_writable
from dpjax.models import names
from dpjax.training.optimizers import describe_arrays
from dpjax.training.trainer import TrainState

FORMAT = 1  # checkpoint format; a version reads its own and all earlier ones

_log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextlib.contextmanager
def _report_once() -> Iterator[None]:
  """Silences what Orbax logs about an error that it also raises."""
  logger = logging.getLogger("absl")

  def is_from_others(record: logging.LogRecord) -> bool:
    error = record.exc_info and record.exc_info[1]
    return not (error and re.search("orbax|tensorstore", f"{record.pathname} {error}"))

  logger.addFilter(is_from_others)
  try:
    yield
  finally:
    logger.removeFilter(is_from_others)


def _array_handler() -> ocp.type_handlers.TypeHandler:
  """Orbax's handler of arrays, which here waits for the others if one cannot be read.

  Orbax closes its event loop after an error, and each array that is still being read would then
  print that the loop is closed.
  """
  handler: Any = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
  handler.metadata = _patiently(handler.metadata)
  handler.deserialize = _patiently(handler.deserialize)
  return handler


def _patiently(
  read: Callable[Arguments, Coroutine[Any, Any, Result]],
) -> Callable[Arguments, Coroutine[Any, Any, Result]]:
  """Wraps `read`: after an error, it waits for the tasks that `read` has started."""

  async def read_patiently(*args: Arguments.args, **settings: Arguments.kwargs) -> Result:
    before = asyncio.all_tasks()
    try:
      return await read(*args, **settings)
    except Exception:
      if tasks := asyncio.all_tasks() - before:
        await asyncio.wait(tasks, timeout=10)
      raise

  return read_patiently


class Checkpoints(contextlib.AbstractContextManager):
  """A run's last `keep` checkpoints and the best by validation; `keep=None` only reads `folder`.

  Each holds the train state (with the step, which is the position in the data), JSON values,
  and fingerprints of the arrays, since the file format does not detect all damage.
  """

  def __init__(self, folder: str | Path, keep: int | None = None):
    self._folder = Path(folder).absolute()
    if keep and glob.escape(str(self._folder)) != str(self._folder):
      raise UserError(
        "workdir: expected a path without *, ? and [, which Orbax takes for patterns, got "
        f"{self._folder.parent}"
      )
    self._keep = keep
    self._manager: ocp.CheckpointManager | None = None  # created by the first save
    self._policies: list[managers.PreservationPolicy] = []
    self._stack = contextlib.ExitStack()

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    with self._stack:
      # Orbax would wait for minutes for a process that has ended.
      if self._manager and not is_lost_process(error):
        with contextlib.closing(self._manager), self._writing():
          self._manager.wait_until_finished()

  def steps(self) -> list[int]:
    """Steps that can be read, ascending."""
    return [int(path.name) for path in reversed(find_complete(self._folder))]

  def best_step(self) -> int | None:
    """The best step by validation, if it was saved."""
    best = read_meta(self._folder).get("best")
    step = best.get("step") if isinstance(best, dict) else None
    return step if step in self.steps() else None

  def save(
    self, state: TrainState, meta: Mapping, *, origin: Mapping[str, str] | None = None
  ) -> None:
    """Writes a checkpoint in the background; the state may be donated at once.

    `meta` holds JSON values; the checkpoint of `meta["best"]["step"]` is kept. `origin` maps names
    to inputs of the run: its vocabulary, a hash of its text.

    Raises:
      UserError: this checkpoint or the previous one cannot be written.
    """
    tree = _storable(_fields(state))
    sums = [int(number) for number in fingerprints(tree)]
    content = {**meta, "origin": dict(origin or {}), "format": FORMAT, "fingerprints": sums}
    items = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(content))
    best = managers.CustomSteps([meta.get("best", {}).get("step")])
    with self._writing():
      self._policies[:] = [managers.LatestN(self._keep), best]
      if self._manager is None:
        self._manager = self._open_manager()
      self._manager.save(int(state.step), args=items, force=True)

  def _open_manager(self) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
      preservation_policy=managers.AnyPreservationPolicy(self._policies),
      cleanup_tmp_directories=True,
      # If a folder cannot be made in the background, other threads wait for it for minutes.
      async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
    )
    self._stack.enter_context(_report_once())
    return ocp.CheckpointManager(self._folder, options=options)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Converts write errors to a `UserError`, and removes the partial checkpoint."""
    try:
      yield
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise
    except Exception as error:
      with contextlib.suppress(Exception):  # fails for the same reason
        if self._manager:
          self._manager.wait_until_finished()
      for _ in range(20):  # Writes of other arrays may still add files.
        for path in self._folder.glob("*.orbax-checkpoint-tmp*"):
          shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)
        if not any(self._folder.glob("*.orbax-checkpoint-tmp*")):
          break
      raise not_writable("workdir", self._folder, _system_reason(error)) from error

  def restore(
    self, abstract: TrainState, origin: Mapping[str, str] | None = None
  ) -> tuple[TrainState, dict] | None:
    """Reads the newest intact checkpoint: the state and `meta`; None without a checkpoint.

    A damaged one, with missing or unparsable files or fingerprints that do not match its arrays,
    is skipped with a warning, and renamed if this run also saves.

    `abstract` has the shapes, dtypes and shardings of the state; for `origin` see `save`.

    Raises:
      UserError: all are damaged, or one has a newer format, another origin or another model; or the
        folder cannot be written.
      OSError: the file system could not read a checkpoint.
    """
    paths = self._list()
    if not paths:
      return None
    path, tree, meta = _read_first(paths, _fields(abstract), origin or {})
    if self._keep:
      self._clean(paths[: paths.index(path)], self._keep, meta)
    return TrainState(**tree), meta

  def _clean(self, damaged: list[Path], keep: int, meta: Mapping) -> None:
    """Renames damaged checkpoints and removes surplus ones, in the first process.

    Raises a `UserError` in every process if it cannot.
    """
    error = None
    if jax.process_index() == 0:
      try:
        for path in damaged:
          path.rename(f"{path}.damaged-{time.time_ns()}")
        self._remove_surplus(keep, meta)
      except OSError as caught:
        error = caught
    # No process lists checkpoints that are being removed.
    failed = max(_gather(0 if error is None else 1))
    if error is not None:
      raise not_writable("workdir", self._folder, error) from error
    if failed:
      raise UserError("workdir: process 0 could not rename checkpoints; see that process's log")

  def _remove_surplus(self, keep: int, meta: Mapping) -> None:
    """Removes what a killed process left: checkpoints beyond those to keep, and partial ones."""
    best = str(meta.get("best", {}).get("step"))
    for path in find_complete(self._folder)[keep:]:
      if path.name != best:
        path.rename(f"{path}.orbax-checkpoint-tmp")  # A kill leaves no part of it to be read.
    for path in self._folder.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path, ignore_errors=True)

  def restore_step(
    self,
    abstract: Mapping,
    step: int | None = None,
    origin: Mapping[str, str] | None = None,
    field: str = "params",
  ) -> tuple[int, dict]:
    """Reads only the step and the parameters of a checkpoint; raises the errors of `restore`.

    `step=None` selects the best by validation, else the newest. `field` is "params" or "average".
    """
    paths = self._list()
    if not paths:
      raise UserError("workdir: expected a run with a checkpoint, got none")
    if step is None:
      best = str(self.best_step())
      paths.sort(key=lambda path: path.name != best)
    elif not (paths := [path for path in paths if path.name == str(step)]):
      raise UserError(f"step: expected one of {self.steps()}, got {step}")
    path, tree, _ = _read_first(paths, {field: abstract}, origin or {})
    return int(path.name), tree[field]

  def _list(self) -> list[Path]:
    """Lists complete checkpoints, newest first; `UserError` if processes see different ones."""
    paths = find_complete(self._folder)
    if len({*_gather(zlib.crc32(repr([path.name for path in paths]).encode()))}) > 1:
      raise UserError(
        f"workdir: expected all processes to see the same checkpoints in {self._folder}, "
        f"got others than those of the steps {self.steps()} in some"
      )
    return paths


def find_complete(folder: str | Path) -> list[Path]:
  """Lists the complete checkpoints in a folder, newest first; each is named after its step."""
  steps = ocp.path.step.standard_name_format().find_all(Path(folder).absolute())
  return [Path(each.path) for each in sorted(steps, key=lambda each: -each.step)]


def read_meta(folder: str | Path) -> files.JsonObject:
  """The JSON values of the newest complete checkpoint that has readable ones; {} without any."""
  for path in find_complete(folder):
    with contextlib.suppress(OSError, ValueError):
      meta = files.load_json(path / "meta" / "metadata")
      if isinstance(meta, dict):
        return meta
  return {}


@jax.jit
def fingerprints(tree: Any) -> list[jax.Array]:
  """One number for each array: the sum of its 32-bit words, weighted by position.

    sum over i of words[i] * (2 i + 1)  mod 2**32

  Sums of integers do not depend on their order: the result is the same on all devices.
  """

  def fingerprint(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.random.key_data(array)
    if array.dtype == bool:
      array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
      array = jnp.stack([array.real, array.imag])
    info = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
    bits = jnp.dtype(f"uint{min(32, info(array.dtype).bits)}")  # 64 bits are two words
    words = jax.lax.bitcast_convert_type(array.ravel(), bits).astype(jnp.uint32).ravel()
    weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return jnp.sum(words * weights, dtype=jnp.uint32)

  return [fingerprint(leaf) for leaf in jax.tree.leaves(tree)]


def _fields(state: TrainState) -> dict:
  """The fields of a state by name, without a missing average."""
  return {name: value for name, value in vars(state).items() if value is not None}


def _storable(tree: Any) -> Any:
  """The tree with None for arrays without elements, which Orbax does not save."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _read_first(
  paths: list[Path], target: dict, origin: Mapping[str, str]
) -> tuple[Path, dict, dict]:
  """The path, tree and meta of the first intact checkpoint, the same one in all processes."""
  for path in paths:
    stored = None
    error = None
    try:
      with _report_once():
        stored = _read(path, target, origin)
    except Exception as caught:
      error = caught
    damage = 0
    if error is not None:
      damage = 1 if _is_damage(error) else 2
    worst = max(_gather(damage))
    if error is not None and damage == 2:
      if isinstance(error, OSError) and error.errno and error.filename is None:
        error.filename = str(path)  # Libraries do not set it.
      raise error
    if worst == 2:
      raise UserError(f"workdir: another process could not read {path}; see that process's log")
    if stored is not None and not worst:
      # The order depends on the names, and on the optimizer's fields.
      if sorted(int(number) for number in fingerprints(stored.tree)) == stored.fingerprints:
        return path, _join(stored, target), stored.meta
    reason = f"{type(error).__name__}: {error}" if error else "other fingerprints than its arrays"
    reason = reason.split("\n")[0][:200]
    text = "The checkpoint of step %s is damaged (%s); trying the one before."
    _log.warning(text, path.name, reason)
  raise UserError(
    f"workdir: expected an intact checkpoint in {paths[0].parent}, got damaged ones of the steps "
    f"{[int(path.name) for path in paths]}. Restore that folder from a backup, or start again in "
    "another workdir (train.init_from can name a run to start from)"
  )


def _is_damage(error: Exception) -> bool:
  """Whether this read error means that the checkpoint is damaged."""
  if isinstance(error, OSError):
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
  return not isinstance(error, UserError | MemoryError | RuntimeError)


class _Stored(NamedTuple):
  """What a checkpoint holds."""

  tree: Any  # with the names of the version that wrote it
  parts: dict[str, list[str]]  # see `names.find_parts`
  meta: dict
  fingerprints: list[int]  # sorted


def _join(stored: _Stored, target: dict) -> dict:
  """The arrays of a checkpoint as the tree `target`."""
  arrays = names.by_name(stored.tree)
  joined = []
  for name, x in names.by_name(target).items():
    parts = [arrays[part] for part in stored.parts.get(name, [])]
    if not parts:  # without elements, see `_storable`
      joined.append(jnp.zeros(x.shape, x.dtype, device=x.sharding))
    elif len(parts) == 1:
      joined.append(parts[0])
    else:
      joined.append(jax.jit(names.join, out_shardings=x.sharding)(parts))
  return jax.tree.unflatten(jax.tree.structure(target), joined)


def _read(path: Path, target: dict, origin: Mapping[str, str]) -> _Stored:
  """The fields of a state in `target`, the meta and the saved fingerprints."""
  metadata = path / "meta" / "metadata"
  for file in path.rglob("*"):  # Orbax could wait for a pipe.
    if not (file.is_file() or file.is_dir() and not file.is_symlink() and file != metadata):
      raise ValueError(f"{file} is not a regular file")
  # Without the manager, whose `restore` ends with a barrier that an error would skip.
  meta = dict(files.load_json(metadata))
  if meta["format"] > FORMAT:
    raise UserError(
      f"checkpoints: expected a format up to {FORMAT}, got {meta['format']}, which a "
      "later version of dpjax wrote"
    )
  for name, value in origin.items():
    if meta["origin"].get(name) != value:
      raise UserError(
        f"workdir: expected the {name} that its checkpoints were made with, got another; "
        "was the folder data/ changed?"
      )
  registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _array_handler()))
  handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
  state: Any = path / "state"  # Orbax declares a class of its own for paths.
  tree: Any = handler.metadata(state).tree
  pairs = zip(jax.tree.leaves(tree), meta["fingerprints"], strict=True)
  # Only the order of the fields is that of the fingerprints.
  pairs = [(leaf, x) for leaf, x in pairs if leaf.name.partition(".")[0] in target]
  saved = {leaf.name: leaf for leaf, _ in pairs}
  tree = {field: each for field, each in tree.items() if field in target}
  target = _storable(target)
  expected = names.by_name(target)
  parts = names.find_parts(saved, expected)
  arrays = {}
  for name, each in parts.items():
    shape = names.joined_shape([saved[part].shape for part in each])
    arrays[name] = f"{np.dtype(saved[each[0]].dtype)} {list(shape)}"
  message = f"workdir: expected a checkpoint of this model, got another in {path}"
  check_arrays(arrays, describe_arrays(target), message)
  abstract = {}
  for name, each in parts.items():
    x = expected[name]
    abstract[each[0]] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    if len(each) > 1:
      for part in each:
        shape = saved[part].shape
        abstract[part] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=_replicated(x.sharding))
  tree = jax.tree.map(lambda leaf: abstract[leaf.name], tree)
  restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
  options = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
  tree = handler.restore(state, args=options)
  return _Stored(tree, parts, meta, sorted(fingerprint for _, fingerprint in pairs))


def _replicated(sharding: Sharding) -> Sharding:
  """On the same devices, for an array of any shape."""
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, PartitionSpec())
  return sharding


def check_arrays(
  arrays: Mapping[str, str | tuple[int, ...]],
  expected: Mapping[str, str | tuple[int, ...]],
  message: str,
) -> None:
  """Raises a `UserError` that begins with `message` unless the arrays have the expected forms.

  A form is a dtype and a shape, or only a shape.
  """
  if wrong := [name for name in {**arrays, **expected} if arrays.get(name) != expected.get(name)]:
    wrong.sort(key=lambda name: (not name.startswith("params."), name))  # Moments follow them.
    lines = [f"{x} is {arrays.get(x)}, in the model {expected.get(x)}" for x in wrong[:4]]
    raise UserError(f"{message}: {'; '.join(lines)}{'; ...' if wrong[4:] else ''}")


def _system_reason(error: BaseException) -> str:
  """The system's error message: Orbax wraps errors, and TensorStore quotes them as text."""
  while cause := error.__cause__ or error.__context__:
    error = cause
  text = str(error).split("\n")[0]
  reasons = (os.strerror(number) for number in errno.errorcode)
  return next((reason for reason in reasons if reason in text), text[:200])


def _gather(number: int) -> list[int]:
  """Gathers a number from every process; all processes must call it."""
  return multihost_utils.process_allgather(np.uint32(number)).tolist()
