"""Chooses an implementation by the platform and the devices that are compiled for."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

AXIS = "data"  # of a run's devices


def num_devices() -> int:
  """The devices of the mesh in use (`jax.sharding.use_abstract_mesh`), without one all of JAX's."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.device_count() if mesh.empty else mesh.size


def is_symbolic(x: jax.Array) -> bool:
  """Whether the first axis has no number yet, as while `jax.export` leaves the batch open."""
  return export.is_symbolic_dim(x.shape[0])


def divide_rows(x: jax.Array) -> jax.Array:
  """Keeps the first axis of an activation divided over the devices of a run, as its batch is.

  Else XLA may divide the features, like parameters (`train.param_sharding=fsdp`), and move
  activations at every layer. Does nothing outside of a run.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or is_symbolic(x):
    return x
  return _place(x, AXIS) if x.shape[0] % mesh.size == 0 else x


def replicate(arrays: Any) -> Any:
  """Gives each device of a run the whole arrays, once: before a loop, which would gather again."""
  return jax.tree.map(_place, arrays)


def _place(x: jax.Array, *axes: str) -> jax.Array:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.axis_names != (AXIS,) or mesh.manual_axes or mesh.size == 1:
    return x
  return lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*axes))


def pvary_like(arrays: Any) -> Any:
  """Within `jax.shard_map`, the arrays as varying over the devices over which one of them does.

  Where a `jax.custom_vjp` takes them, JAX then sums the gradients of those that devices share.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return arrays
  leaves = jax.tree.leaves(arrays)
  zero = sum((jnp.zeros_like(x, jnp.float32, shape=()) for x in leaves), jnp.float32(0))
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)


def has_cuda() -> bool:
  """Whether JAX is installed with its compiler for NVIDIA's GPUs, though perhaps without one."""
  return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def has_triton() -> bool:
  """Whether JAX can compile Pallas kernels for GPUs by Triton, which it will give up."""
  return has_cuda() and bool(importlib.util.find_spec("jax.experimental.pallas.triton"))


def has_libtpu() -> bool:
  """Whether the compiler for TPUs is installed, though perhaps without one."""
  return bool(importlib.util.find_spec("libtpu"))


def by_platform(functions: Mapping[str, Callable], *arrays: Any) -> Any:
  """`jax.lax.platform_dependent`: applies the function of the platform that is compiled for.

  Their names are platforms, "cpu", "cuda", "rocm" or "tpu", and "default" for all others.
  """
  if len(functions) == 1:
    return functions["default"](*arrays)
  others = dict(functions)
  return lax.platform_dependent(*arrays, default=others.pop("default"), **others)
