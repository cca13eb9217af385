"""The number of real positions in each row. B batch, C position of a chunk."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax.ops import checks


def check_lengths(lengths: ArrayLike, batch: int, chunk: int) -> jax.Array:
  """Checks that lengths are integers [B], in 0 .. C unless traced, and makes them int32."""
  array = checks.array("lengths", lengths, "B", checks.INTEGERS, B=batch)
  if checks.is_known(array):
    found = np.asarray(array)
    is_wrong = (found < 0) | (found > chunk)
    if is_wrong.any():
      raise ValueError(f"lengths: expected 0 .. C = {chunk}, got {found[is_wrong][0]}")
  return jnp.asarray(array, jnp.int32)


def is_real(lengths: jax.Array, chunk: int) -> jax.Array:
  """Whether each position is real, [B, C]: [2, 0], C = 3  ->  [[1, 1, 0], [0, 0, 0]]."""
  return jnp.arange(chunk, dtype=jnp.int32)[None] < lengths[:, None]
