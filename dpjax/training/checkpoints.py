"""Checkpoints: written completely or not at all, and checked when read."""

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from dpjax import files
from dpjax.errors import UserError, not_writable
from dpjax.training.optimizer import describe_arrays
from dpjax.training.step import TrainState

FORMAT = 1  # of what a checkpoint holds; a version reads its own and all before it

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _without_repetition() -> Iterator[None]:
  """Lets what Orbax raises be heard once: it also logs it, and its other tasks print theirs."""
  make, logger = asyncio.new_event_loop, logging.getLogger("absl")

  def is_news(line: logging.LogRecord) -> bool:
    error = line.exc_info and line.exc_info[1]
    return not (error and re.search("orbax|tensorstore", f"{line.pathname} {error}"))

  async def finish() -> None:
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
      await asyncio.wait(tasks, timeout=10)

  def new_event_loop() -> asyncio.AbstractEventLoop:
    loop = make()
    close = loop.close

    def close_at_end() -> None:
      # Orbax closes it at the first error; each other one would print that it is closed.
      if not (loop.is_closed() or loop.is_running()):
        loop.run_until_complete(finish())
      close()

    loop.close = close_at_end
    return loop

  logger.addFilter(is_news)
  asyncio.new_event_loop = new_event_loop
  try:
    yield
  finally:
    asyncio.new_event_loop = make
    logger.removeFilter(is_news)


class Checkpoints(contextlib.AbstractContextManager):
  """A run's `keep` last checkpoints and the best by validation; `keep` None only reads `folder`.

  Each holds the train state (with the step, which is the position in the data), JSON values,
  and fingerprints of the arrays, since the file format does not detect all damage.
  """

  def __init__(self, folder: str | Path, keep: int | None = None):
    self._folder = Path(folder).absolute()
    self._manager: Any = None
    self._stack = contextlib.ExitStack()
    if keep is not None:
      self._kept = [managers.LatestN(keep), managers.CustomSteps([])]  # `save` knows the best.
      kept = managers.AnyPreservationPolicy(self._kept)
      # Where a folder could not be made in the background, threads would wait for it for minutes.
      made = ocp.options.AsyncOptions(create_directories_asynchronously=False)
      options = ocp.CheckpointManagerOptions(
        preservation_policy=kept, cleanup_tmp_directories=True, async_options=made
      )
      self._manager = ocp.CheckpointManager(self._folder, options=options)
      self._stack.enter_context(_without_repetition())

  def __exit__(self, *_) -> None:
    if self._manager:
      with self._stack, contextlib.closing(self._manager), self._writing() as manager:
        manager.wait_until_finished()

  def steps(self) -> list[int]:
    """Steps that can be read, ascending."""
    return [int(path.name) for path in reversed(find_complete(self._folder))]

  def best_step(self) -> int | None:
    """The best step by validation, if it was saved."""
    paths = find_complete(self._folder)
    for path in paths:
      with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        step = files.load_json(path / "meta" / "metadata")["best"]["step"]
        return step if any(path.name == str(step) for path in paths) else None
    return None

  def save(
    self, state: TrainState, meta: Mapping, *, origin: Mapping[str, str] | None = None
  ) -> None:
    """Writes a checkpoint in the background; the state may be donated at once.

    `meta` are JSON values; the checkpoint of `meta["best"]["step"]` is kept. `origin` are inputs of
    the run by name: its vocabulary, a hash of its text.

    Raises:
      UserError: this checkpoint or the last cannot be written.
    """
    tree = _storable(_parts(state))
    own = {"origin": dict(origin or {}), "format": FORMAT}
    own["fingerprints"] = [int(number) for number in fingerprints(tree)]
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave({**meta, **own})
    )
    with self._writing() as manager:
      self._kept[1] = managers.CustomSteps([meta.get("best", {}).get("step")])
      manager.save(int(state.step), args=items, force=True)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[Any]:
    """Makes one line of an error of the file system, and removes what is half written."""
    try:
      yield self._manager
    except Exception as error:
      cause = _system_error(error, self._folder)
      if cause is None:
        raise
      with contextlib.suppress(Exception):  # of the same cause
        self._manager.wait_until_finished()
      for pause in (0.0, 0.1, 1.0):  # The first error ends the wait; other threads still write.
        time.sleep(pause)
        for path in self._folder.glob("*.orbax-checkpoint-tmp*"):
          shutil.rmtree(path, ignore_errors=True)
      raise not_writable("workdir", self._folder, cause) from error

  def restore(
    self, abstract: TrainState, origin: Mapping[str, str] | None = None
  ) -> tuple[TrainState, dict] | None:
    """Reads the newest undamaged checkpoint: the state and `meta`; None without a checkpoint.

    Damaged ones, with missing or unparsable files or with other fingerprints than their arrays,
    are moved into the folder "damaged". An error of the file system is not damage.

    `abstract` has the shapes, dtypes and shardings of the state; for `origin` see `save`.

    Raises:
      UserError: all are damaged, or one has a later format, another origin or another model.
      OSError: the file system could not read one. Nothing is moved.
    """
    paths = self._list_alike()
    if not paths:
      return None
    (_, tree, meta), damaged = _read_first(paths, _parts(abstract), origin or {})
    if damaged and self._manager:
      if jax.process_index() == 0:
        (self._folder / "damaged").mkdir(exist_ok=True)
        for path in damaged:
          path.rename(self._folder / "damaged" / f"{path.name}_{time.time_ns()}")
      multihost_utils.sync_global_devices("damaged")
      self._manager.reload()
    return TrainState(**tree), meta

  def restore_step(
    self,
    abstract: Mapping,
    step: int | None = None,
    origin: Mapping[str, str] | None = None,
    part: str = "params",
  ) -> tuple[int, dict]:
    """Reads the step and the parameters alone of one checkpoint; raises as `restore` does.

    `step` None is the best by validation, or else the newest. `part` is "params" or "average".
    """
    paths = self._list_alike()
    if not paths:
      raise UserError("workdir: expected a run with a checkpoint, got none")
    if step is None:
      best = str(self.best_step())
      paths.sort(key=lambda path: path.name != best)
    elif not (paths := [path for path in paths if path.name == str(step)]):
      raise UserError(f"step: expected one of {self.steps()}, got {step}")
    (found, tree, _), _ = _read_first(paths, {part: abstract}, origin or {})
    return found, tree[part]

  def _list_alike(self) -> list[Path]:
    """The complete checkpoints, which all processes must see alike."""
    paths = find_complete(self._folder)
    if len({*_gather(zlib.crc32(repr([path.name for path in paths]).encode()))}) > 1:
      raise UserError(
        f"workdir: expected all processes to see the same checkpoints in {self._folder}, "
        f"got others than those of the steps {self.steps()} in some"
      )
    return paths


def find_complete(folder: str | Path) -> list[Path]:
  """The complete checkpoints in a folder, the newest first; each is named after its step."""
  steps = ocp.path.step.standard_name_format().find_all(Path(folder).absolute())
  return [Path(each.path) for each in sorted(steps, key=lambda each: -each.step)]


@jax.jit
def fingerprints(tree: Any) -> list[jax.Array]:
  """One number for each array: the sum of its 32-bit words, weighted by place.

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
    bits = jnp.dtype(f"uint{min(32, info(array.dtype).bits)}")  # of 64 bits, two words
    words = jax.lax.bitcast_convert_type(array.ravel(), bits).astype(jnp.uint32).ravel()
    places = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)

  return [fingerprint(leaf) for leaf in jax.tree.leaves(tree)]


def _parts(state: TrainState) -> dict:
  """The parts of a state by name, without a missing average."""
  return {name: part for name, part in vars(state).items() if part is not None}


def _storable(tree: Any) -> Any:
  """The tree with None for arrays without elements, which Orbax does not save."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


class _DamagedError(Exception):
  """The checkpoint is proven to be damaged."""


def _read_first(paths: list[Path], target: dict, origin: Mapping[str, str]):
  """The step, tree and meta of the first intact checkpoint, and the damaged ones before it."""
  damaged: list[Path] = []
  for path in paths:
    try:
      return (int(path.name), *_read(path, target, origin)), damaged
    except _DamagedError as error:
      damaged.append(path)
      text = "The checkpoint of step %s is damaged (%s); trying the one before."
      _log.warning(text, path.name, error)
  raise UserError(
    f"workdir: expected a whole checkpoint in {paths[0].parent}, got damaged ones of the steps "
    f"{[int(path.name) for path in damaged]}. Restore that folder from a backup, or begin anew in "
    "another workdir (train.init_from can name a run to begin with)"
  )


def _read(path: Path, target: dict, origin: Mapping[str, str]) -> tuple[dict, dict]:
  """The parts of a state in `target`, and the meta; all processes raise if one does."""
  found: Any = None
  error = None
  try:
    with _without_repetition():
      found = _read_files(path, _storable(target), origin)
  except Exception as caught:
    cause = _system_error(caught, path, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    is_damage = cause is None and not isinstance(caught, (UserError, MemoryError, RuntimeError))
    text = f"{type(caught).__name__}: {caught}".split("\n")[0][:200]
    error = _DamagedError(text) if is_damage else cause or caught
  _raise_together(error, path)
  tree, meta, expected = found
  if [int(number) for number in fingerprints(tree)] != expected:
    error = _DamagedError("its arrays are not those that were saved")
  _raise_together(error, path)

  def refill(wanted, array):
    return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding) if array is None else array

  return jax.tree.map(refill, target, tree), meta


def _read_files(path: Any, target: dict, origin: Mapping[str, str]) -> tuple[dict, dict, list[int]]:
  """The tree, the meta and the saved fingerprints, read by this process alone."""
  metadata = path / "meta" / "metadata"
  for file in path.rglob("*"):
    # For others, Orbax could wait.
    if not (file.is_file() or file.is_dir() and not file.is_symlink() and file != metadata):
      raise ValueError(f"{file} is no plain file")
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
  handler = ocp.PyTreeCheckpointHandler()
  leaves: Any = jax.tree.leaves(handler.metadata(path / "state").tree)
  pairs = zip(leaves, meta["fingerprints"], strict=True)
  saved = {leaf.name: (leaf, x) for leaf, x in pairs if leaf.name.partition(".")[0] in target}
  found = {name: f"{np.dtype(x.dtype)} {list(x.shape)}" for name, (x, _) in saved.items()}
  message = f"workdir: expected a checkpoint of this model, got another in {path}"
  check_arrays(found, describe_arrays(target), message)
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
  layout = ocp.checkpoint_utils.construct_restore_args(target)
  how = ocp.args.PyTreeRestore(target, restore_args=layout, partial_restore=True)
  tree = handler.restore(path / "state", args=how)
  return tree, meta, [fingerprint for _, fingerprint in saved.values()]


def check_arrays(found: Mapping[str, Any], expected: Mapping[str, Any], message: str) -> None:
  """Raises a `UserError` that begins with `message` unless arrays, by name, are the model's."""
  if wrong := [name for name in {**found, **expected} if found.get(name) != expected.get(name)]:
    wrong.sort(key=lambda name: (not name.startswith("params."), name))  # Moments follow them.
    lines = [f"{x} is {found.get(x)}, in the model {expected.get(x)}" for x in wrong[:4]]
    raise UserError(f"{message}: {'; '.join(lines)}{'; ...' if wrong[4:] else ''}")


def _system_error(error: BaseException, folder: Path, but: tuple = ()) -> OSError | None:
  """The error of the file system, except those in `but`, that led to an error of Orbax."""
  each: BaseException | None = error
  while each is not None:
    # TensorStore, which is not of Python, names errors of the system in its text.
    named = (OSError(x, os.strerror(x)) for x in errno.errorcode if os.strerror(x) in str(each))
    for found in [each] if isinstance(each, OSError) else named:
      if not isinstance(found, but):
        return OSError(found.errno, found.strerror, found.filename or str(folder))
    each = each.__cause__ or each.__context__
  return None


def _raise_together(error: Exception | None, path: Path) -> None:
  """Raises in all processes if one has an error; damage comes last."""
  own = 0 if error is None else 1 if isinstance(error, _DamagedError) else 2
  worst = max(every := _gather(own))
  if error is not None and own == worst:
    raise error
  if worst:
    message = f"Process {every.index(worst)} could not read {path}, and says why."
    raise _DamagedError(message) if worst == 1 else RuntimeError(message)


def _gather(number: int) -> list[int]:
  """A number from every process; all must call it."""
  return multihost_utils.process_allgather(np.uint32(number)).tolist()
