"""Products of layers. [..., D] are vectors of any number of leading axes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.ops import checks


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
  """The dtype for sums of the arrays: float64 if one of them is, else float32."""
  is_wide = any(x.dtype == jnp.float64 for x in arrays)
  return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def dot_general(
  lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
  """`jax.lax.dot_general`, of [..., D] times [D, ...] as a product of two matrices.

  The numbers are the same, but the gradients then sum over one axis. For a sum over two,
  XLA:CPU would first make a transposed copy of a factor.

  Args:
    lhs: [..., D]; any other product goes to `jax.lax.dot_general` unchanged.
    rhs: [D, ...].
    dimension_numbers: see `jax.lax.dot_general`.
    **options: see `jax.lax.dot_general`.

  Returns:
    See `jax.lax.dot_general`; `flax.linen.Dense` takes this function in its place.

  Raises:
    ValueError: an argument is not as above.
  """
  lhs, rhs = checks.arrays(lhs=(lhs, "...", checks.ANY), rhs=(rhs, "...", checks.ANY))
  sums, shared = _check(lhs, rhs, dimension_numbers)
  lead, rest = lhs.shape[:-1], rhs.shape[1:]
  if sums != ((len(lead),), (0,)) or any(map(len, shared)):
    return lax.dot_general(lhs, rhs, dimension_numbers, **options)
  rows = lhs.reshape(math.prod(lead), lhs.shape[-1])
  columns = rhs.reshape(rhs.shape[0], math.prod(rest))
  flat = lax.dot_general(rows, columns, (((1,), (0,)), ((), ())), **options)
  return flat.reshape(*lead, *rest)


def _check(lhs, rhs, dimension_numbers) -> list[tuple[tuple[int, ...], ...]]:
  """The axes to sum over and to share, each of both sides."""
  try:
    pairs = [tuple(map(tuple, pair)) for pair in dimension_numbers]
    sizes = [
      [[x.shape[i] for i in axes] for x, axes in zip((lhs, rhs), pair, strict=True)]
      for pair in pairs
    ]
    if len(pairs) != 2:
      raise ValueError
  except (TypeError, ValueError, IndexError):
    raise ValueError(
      "dimension_numbers: expected ((of lhs, of rhs), (of lhs, of rhs)), axes to sum over and to "
      f"share, got {dimension_numbers!r}"
    ) from None
  if any(left != right for left, right in sizes):
    raise ValueError(f"rhs: expected the sizes of lhs {lhs.shape} at {pairs}, got {rhs.shape}")
  return pairs
