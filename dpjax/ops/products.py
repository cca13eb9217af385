"""Products, and the dtypes of their factors and sums."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpjax.ops import arrays, backend
from dpjax.ops.backend import automatic_axes, by_platform, divide_rows
from dpjax.ops.placement import pvary_like

LOW = (jnp.bfloat16, jnp.float16)
_context = jax.make_user_context(default_value="float32")


def sum_dtype(*terms: jax.Array) -> jnp.dtype:
  """The dtype for sums of arrays: float64 if one of them is, else float32."""
  is_wide = any(x.dtype == jnp.float64 for x in terms)
  return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def product_dtype(dtype: str) -> contextlib.AbstractContextManager:
  """A context in which `product` and `dot_general` round float32 factors to a dtype.

  `dtype` is "bfloat16", or "float32" for no rounding. It affects all that is traced or run in the
  context, and its gradients. Only these products of dpjax stay in float32: Fourier transforms, the
  similarity of `route`, sums of gate gradients, projections between stages of different widths, and
  the values of attention with a cache.
  """
  arrays.choice("dtype", dtype, ("float32", "bfloat16"))
  return _context(dtype)


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """`jnp.einsum` of two arrays with the `sum_dtype` of both.

  Factors of bfloat16 or float16, and those of float32 within `product_dtype("bfloat16")`, are
  multiplied in that dtype; so are those of the gradients, in reverse mode only. Then every axis of
  a factor must be an axis of the other or of the result.
  """
  dtype = factor_dtype(x, y)
  if dtype is None:
    return jnp.einsum(spec, x, y, preferred_element_type=sum_dtype(x, y))
  return low_product(x, y, spec, dtype)


def factor_dtype(x: jax.Array, y: jax.Array) -> jnp.dtype | None:
  """Returns the 16-bit dtype that `product` casts its factors to, or None if it casts nothing."""
  if _context.value == "bfloat16":
    is_low = {x.dtype, y.dtype} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    return jnp.dtype(jnp.bfloat16) if is_low else None
  return x.dtype if x.dtype == y.dtype and x.dtype in LOW else None


def as_factor(x: jax.Array) -> jax.Array:
  """Casts `x` as `product` would; use it for arrays that only products read."""
  return x.astype(factor_dtype(x, x) or x.dtype)


@automatic_axes
def low_product(x: jax.Array, y: jax.Array, spec: str, dtype: DTypeLike) -> jax.Array:
  """An einsum of two arrays of at most 32 bits: factors of 16 bits, sums in float32."""
  x, y = pvary_like((x, y))
  with arrays.reverse_mode("dtype: expected float32"):
    return _low_product(spec, dtype, x.dtype, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _low_product(spec, dtype, _, x, y):
  runs = {
    "cpu": functools.partial(backend.multiply_low_on_cpu, spec),
    "default": functools.partial(backend.multiply_low, spec),
  }
  return by_platform(runs, x.astype(dtype), y.astype(dtype))


def _forward(spec, dtype, of_x, x, y):
  stored = backend.to_stored(x.astype(dtype))
  return _low_product(spec, dtype, of_x, x, y), (stored, y)


def _backward(spec, dtype, of_x, residuals, grad):
  # JAX's rule would multiply float32 by `dtype`.
  stored, y = residuals
  x = backend.from_stored(stored, dtype)
  terms, z = spec.split("->")
  a, b = terms.split(",")
  by_x = low_product(grad, y, f"{z},{b}->{a}", dtype)
  by_y = low_product(x, grad, f"{a},{z}->{b}", dtype)
  return by_x.astype(of_x), by_y.astype(y.dtype)


_low_product.defvjp(_forward, _backward)


def row_product(x_bhk: jax.Array, y_bhkn: jax.Array) -> jax.Array:
  """Multiplies one row for each b and h, [B, H, N], in the `sum_dtype` of both."""

  def multiply(x_bhk, y_bhkn):
    dtype = sum_dtype(x_bhk, y_bhkn)
    return jnp.einsum("bhk,bhkn->bhn", x_bhk, y_bhkn, preferred_element_type=dtype)

  def add(x_bhk, y_bhkn):
    return backend.sum_parts(x_bhk[..., None], y_bhkn, sum_dtype(x_bhk, y_bhkn))

  return by_platform({"cpu": add, "default": multiply}, x_bhk, y_bhkn)


def sum_products(x: jax.Array, y: jax.Array, rows: jax.Array | None = None) -> jax.Array:
  """Sums x * y over axis -2, in the `sum_dtype` of both; x [.., K, N or 1], y [.., K, N].

  With `rows` [B, K], x[b, rows[b, k]] takes the place of x[b, k].
  """
  dtype = sum_dtype(x, y)

  def add(x, y, rows):
    x = x if rows is None else backend.take_rows(x, rows)
    return jnp.sum(x.astype(dtype) * y.astype(dtype), axis=-2)

  def add_parts(x, y, rows):
    return backend.sum_parts(x, y, dtype, rows)

  return by_platform({"cpu": add_parts, "default": add}, x, y, rows)


def promote(
  inputs: jax.Array,
  kernel: jax.Array,
  *biases: jax.Array | None,
  dtype: DTypeLike,
  inexact: bool = True,
) -> list[jax.Array | None]:
  """Flax's `promote_dtype`, except for inputs already rounded by `as_factor`."""
  is_factor = inputs.dtype in LOW and inputs.dtype == factor_dtype(inputs, kernel)
  inputs = inputs if is_factor else inputs.astype(dtype)
  return [inputs, *(x if x is None else x.astype(dtype) for x in (kernel, *biases))]


def dot_general(
  lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers, **options: Any
) -> jax.Array:
  """`jax.lax.dot_general`, of [..., D] times [D, ...] as a `product` of two matrices.

  The gradients then sum over one axis (`dpjax.ops.backend` says why).
  Products of 16 bits (`product_dtype`) have only reverse-mode derivatives.
  Other products, and calls with options, go to `jax.lax.dot_general` unchanged.
  """
  sums, shared = (tuple(map(tuple, pair)) for pair in dimension_numbers)
  if sums != ((lhs.ndim - 1,), (0,)) or shared != ((), ()) or lhs.shape[-1] != rhs.shape[0]:
    return lax.dot_general(lhs, rhs, dimension_numbers, **options)
  lead = lhs.shape[:-1]
  rest = rhs.shape[1:]
  rows = divide_rows(lhs.reshape(math.prod(lead), lhs.shape[-1]))
  columns = rhs.reshape(rhs.shape[0], math.prod(rest))
  if factor_dtype(rows, columns) is None or any(options.values()):
    flat = lax.dot_general(rows, columns, (((1,), (0,)), ((), ())), **options)
  else:
    flat = product("rk,kn->rn", rows, columns).astype(rhs.dtype)
  return divide_rows(flat).reshape(*lead, *rest)
