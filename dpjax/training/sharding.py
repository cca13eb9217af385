"""The layout of a run on its devices: one axis that divides the batch."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpjax.errors import UserError
from dpjax.ops.placement import AXIS

Tree = TypeVar("Tree")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def make_mesh(devices: Sequence | None = None) -> Mesh:
  """A mesh of all devices of all processes (or of `devices`) with one axis, "data"."""
  devices = jax.devices() if devices is None else devices
  return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def state_sharding(state: Tree, mesh: Mesh, param_sharding: str = "replicated") -> Tree:
  """The sharding of each array (or shape) of a train state.

  With `param_sharding` "replicated", every device holds all arrays; with "fsdp", an array is split
  along its longest axis that the number of devices divides, or replicated if there is none.
  """

  def sharding_of(leaf) -> NamedSharding:
    divisible = [size for size in leaf.shape if size and size % mesh.size == 0]
    if param_sharding != "fsdp" or not divisible:
      return NamedSharding(mesh, PartitionSpec())
    axis = leaf.shape.index(max(divisible))
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))

  return jax.tree.map(sharding_of, state)


def place(shapes: Tree, mesh: Mesh, param_sharding: str) -> Tree:
  """Adds `state_sharding` to a tree of shapes and dtypes."""
  shardings = state_sharding(shapes, mesh, param_sharding)
  return jax.tree.map(
    lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), shapes, shardings
  )


def on_mesh(function: Callable[Arguments, Result], mesh: Mesh) -> Callable[Arguments, Result]:
  """Wraps a function to be traced under the mesh."""

  @functools.wraps(function)
  def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return run


def check_rows(batch_size: int, grad_accum_steps: int = 1, devices: int | None = None) -> None:
  """Raises a `UserError` unless `devices` (None: JAX's) divide a batch and each part of it."""
  devices = devices or jax.device_count()
  if batch_size % (devices * grad_accum_steps):
    raise UserError(
      f"train.batch_size: expected a multiple of {devices * grad_accum_steps} ({devices} "
      f"devices x {grad_accum_steps} accumulated parts), got {batch_size}"
    )


def process_rows(batch_size: int) -> slice:
  """The rows of a batch that this process feeds."""
  num_rows = batch_size // jax.process_count()
  return slice(jax.process_index() * num_rows, (jax.process_index() + 1) * num_rows)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Puts this process's rows on its devices, as a part of the batch."""
  sharding = NamedSharding(mesh, PartitionSpec(AXIS))
  if jax.process_count() == 1:
    return jax.device_put(dict(batch), sharding)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
  }


def machine_memory() -> int:
  """The bytes of this machine's memory; 0 if the system does not report it."""
  if not hasattr(os, "sysconf"):
    return 0
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
