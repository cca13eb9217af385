"""The devices of a run, on which the rows of a batch lie."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import export

AXIS = "data"  # the mesh axis of a run's devices
_Tree = TypeVar("_Tree")


def num_devices() -> int:
  """The size of the current mesh (`jax.sharding.use_abstract_mesh`), or JAX's device count."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.device_count() if mesh.empty else mesh.size


def is_symbolic(x: jax.Array) -> bool:
  """Whether the first axis has a symbolic size, like a symbolic batch in `jax.export`."""
  return export.is_symbolic_dim(x.shape[0])


def pvary_like(arrays: _Tree) -> _Tree:
  """Within `jax.shard_map`, makes the arrays vary over all devices over which one of them does.

  JAX then sums the gradients of a `jax.custom_vjp` for arrays that devices share.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return arrays
  leaves = jax.tree.leaves(arrays)
  zero = sum((jnp.zeros_like(x, jnp.float32, shape=()) for x in leaves), jnp.float32(0))
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)
