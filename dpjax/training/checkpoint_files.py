"""Reads the files of checkpoints, checks every array, and detects damage."""

import contextlib
import dataclasses
import errno
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dpjax.errors import UserError
from dpjax.training.step import TrainState

FORMAT = 1  # of what a checkpoint holds; a version reads its own and all before it


def fingerprints(state: TrainState) -> list[int]:
  """One number for each array: the sum of its 32-bit words, weighted by place.

    sum over i of words[i] * (2 i + 1)  mod 2**32

  Sums of integers do not depend on their order, so the result is the same on all devices.
  """
  return _fingerprints_of(storable(as_dict(state)))


def _fingerprints_of(tree) -> list[int]:
  return [int(number) for number in jax.device_get(_fingerprints(tree))]


@jax.jit
def _fingerprints(tree) -> list[jax.Array]:
  def of_array(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.random.key_data(array)
    if array.dtype == bool:
      array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
      array = jnp.stack([array.real, array.imag])
    info = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
    bits = jnp.dtype(f"uint{info(array.dtype).bits}")
    words = jax.lax.bitcast_convert_type(array.ravel(), bits).astype(jnp.uint32)
    places = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)

  return [of_array(leaf) for leaf in jax.tree.leaves(tree)]


@contextlib.contextmanager
def _silent_coroutines():
  """Silences coroutines that Orbax abandons, with a page of output each, at a damaged file."""
  hook = sys.unraisablehook
  sys.unraisablehook = lambda _: None
  try:
    yield
  except Exception:
    gc.collect()
    raise
  finally:
    sys.unraisablehook = hook


class _RefusedError(UserError):
  """The checkpoint is intact, but must not be used."""


class DamagedError(Exception):
  """The checkpoint is proven to be damaged."""


def read(folder: Path, target: dict, origin: Mapping[str, str]) -> tuple[dict, dict]:
  """Reads the parts of a state in `target`, and the meta, with the same result in all processes.

  Raises:
    DamagedError: the checkpoint is damaged for at least one process.
    Exception: at least one process could not read it for another reason.
  """
  found, error = None, None
  try:
    with _silent_coroutines():
      found = _read_files(folder, storable(target), origin)
  except Exception as caught:
    error = _damage_or_cause(caught, folder)
  raise_together(error, folder)
  assert found is not None
  tree, meta, expected = found
  if _fingerprints_of(tree) != expected:
    error = DamagedError("its arrays are not those that were saved")
  raise_together(error, folder)

  def refill(wanted, array):
    is_empty = array is None
    return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding) if is_empty else array

  return jax.tree.map(refill, target, tree), meta


def _read_files(
  folder: Any, target: dict, origin: Mapping[str, str]
) -> tuple[dict, dict, list[int]]:
  """The result of `read` and its saved fingerprints, without waiting for other processes."""
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
  """Checks the names, shapes and dtypes of arrays against the model's."""
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


def system_error(
  error: BaseException, folder: Path, but: tuple[type[OSError], ...] = ()
) -> OSError | None:
  """The error of the file system that led to another error; None if none did.

  Args:
    error: from Orbax.
    folder: the folder to name where the error names none.
    but: errors to pass over.
  """
  each: BaseException | None = error
  while each is not None:
    if isinstance(each, OSError) and not isinstance(each, but):
      if each.errno is None or each.filename is not None:
        return each
      return OSError(each.errno, each.strerror, str(folder))
    # TensorStore, which is not of Python, tells errors of the system in its text.
    for number in errno.errorcode:
      found = OSError(number, os.strerror(number), str(folder))
      if os.strerror(number) in str(each) and not isinstance(found, but):
        return found
    each = each.__cause__ or each.__context__
  return None


def _damage_or_cause(error: Exception, folder: Path) -> Exception:
  """Turns a read error into a `DamagedError` if it proves damage."""
  if isinstance(error, (_RefusedError, MemoryError, jax.errors.JaxRuntimeError)):
    return error
  cause = system_error(error, folder, but=_GONE)
  if cause is not None:
    return cause
  if type(error) is not Exception and not isinstance(error, (*_GONE, *_UNPARSABLE)):
    return error
  try:
    _read_all(folder)
  except OSError as failure:
    return OSError(failure.errno, failure.strerror, failure.filename or str(folder))
  return DamagedError(f"{type(error).__name__}: {error}".split("\n")[0][:200])


def _read_all(folder: Path) -> None:
  """Reads every file, to find errors of the file system."""

  def fail(error: OSError) -> None:
    # A folder that is missing is damage, as a file is.
    if not isinstance(error, _GONE):
      raise error

  for root, _, names in os.walk(folder, onerror=fail):
    for name in names:
      with open(os.path.join(root, name), "rb") as file:
        while file.read(2**24):
          pass


def raise_together(error: Exception | None, folder: Path) -> None:
  """Raises in all processes if one has an error; damage comes last."""
  own = 0 if error is None else 1 if isinstance(error, DamagedError) else 2
  worst = max(every := gather(own))
  if worst == 0:
    return
  if error is not None and own == worst:
    raise error
  message = f"Process {every.index(worst)} could not read or move {folder}, and says why."
  raise DamagedError(message) if worst == 1 else RuntimeError(message)


def gather(number: int) -> list[int]:
  """Gathers a number from every process; all must call it."""
  if jax.process_count() == 1:
    return [number]
  return multihost_utils.process_allgather(np.uint32(number)).tolist()


def check_can_save(tree: Mapping) -> None:
  """Checks that a checkpoint can hold the arrays of a model and an optimizer.

  Args:
    tree: "params" and "opt_state", arrays or their shapes.

  Raises:
    UserError: two arrays have one name, or the file format does not know a type.
  """
  import tensorstore

  names = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    of, _, name = name.partition(".")
    of = {"params": "model", "opt_state": "optimizer"}[of]
    if (of, name) in names:
      raise UserError(f"{of}: expected names of arrays that differ, got {name} twice")
    names.add((of, name))
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    try:
      _ = is_key or tensorstore.dtype(str(leaf.dtype))
    except ValueError as error:
      raise UserError(
        f"{of}: expected arrays that can be saved, got {name} of {leaf.dtype}"
      ) from error


def storable(tree: Any) -> Any:
  """The tree with None for arrays without elements, which Orbax does not save."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def as_dict(state: TrainState) -> dict:
  """The parts of a state by name, without a missing average."""
  parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
  return {name: part for name, part in parts.items() if part is not None}
