"""Products and the dtype of their sums."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
  """The dtype for sums of the arrays: float64 if one of them is, else float32."""
  is_wide = any(x.dtype == jnp.float64 for x in arrays)
  return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """`jnp.einsum` with the `sum_dtype` of the arrays."""
  return jnp.einsum(spec, x, y, preferred_element_type=sum_dtype(x, y))


def dot_general(
  lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
  """`jax.lax.dot_general`, of [..., D] times [D, ...] as a product of two matrices.

  The numbers are the same, but the gradients then sum over one axis: for a sum over two, XLA:CPU
  would first transpose a factor. Other products go to `jax.lax.dot_general` unchanged.
  """
  sums, shared = (tuple(map(tuple, pair)) for pair in dimension_numbers)
  if sums != ((lhs.ndim - 1,), (0,)) or shared != ((), ()) or lhs.shape[-1] != rhs.shape[0]:
    return lax.dot_general(lhs, rhs, dimension_numbers, **options)
  lead, rest = lhs.shape[:-1], rhs.shape[1:]
  rows = lhs.reshape(math.prod(lead), lhs.shape[-1])
  columns = rhs.reshape(rhs.shape[0], math.prod(rest))
  flat = lax.dot_general(rows, columns, (((1,), (0,)), ((), ())), **options)
  return flat.reshape(*lead, *rest)
