"""Products, and the dtypes of their factors and sums."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from dpjax.ops import arrays
from dpjax.ops.placement import automatic_axes, by_platform, divide_rows, pvary_like

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


def factor_dtype(x: jax.Array, y: jax.Array) -> Any:
  """Returns the 16-bit dtype that `product` casts its factors to, or None if it casts nothing."""
  if _context.value == "bfloat16":
    is_low = {x.dtype, y.dtype} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    return jnp.dtype(jnp.bfloat16) if is_low else None
  return x.dtype if x.dtype == y.dtype and x.dtype in LOW else None


def as_factor(x: jax.Array) -> jax.Array:
  """Casts `x` as `product` would; use it for arrays that only products read."""
  return x.astype(factor_dtype(x, x) or x.dtype)


@automatic_axes
def low_product(x: jax.Array, y: jax.Array, spec: str, dtype: Any) -> jax.Array:
  """An einsum of two arrays of at most 32 bits: factors of 16 bits, sums in float32."""
  x, y = pvary_like((x, y))
  with arrays.reverse_mode("dtype: expected float32"):
    return _low_product(spec, dtype, x.dtype, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _low_product(spec, dtype, _, x, y):
  runs = {"cpu": _multiply_in_rows, "default": _multiply}
  factors = x.astype(dtype), y.astype(dtype)
  return by_platform({key: functools.partial(run, spec) for key, run in runs.items()}, *factors)


def _forward(spec, dtype, of_x, x, y):
  stored = x.astype(dtype)
  if jax.__version_info__ < (0, 11):
    # At every layer, XLA:CPU would convert all floats that a scan has stored so far, but not bits.
    stored = lax.bitcast_convert_type(stored, jnp.uint16)
  return _low_product(spec, dtype, of_x, x, y), (stored, y)


def _backward(spec, dtype, of_x, factors, grad):
  # JAX's rule would multiply float32 by `dtype`.
  x, y = factors
  x = lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
  terms, z = spec.split("->")
  a, b = terms.split(",")
  by_x = low_product(grad, y, f"{z},{b}->{a}", dtype)
  by_y = low_product(x, grad, f"{a},{z}->{b}", dtype)
  return by_x.astype(of_x), by_y.astype(y.dtype)


_low_product.defvjp(_forward, _backward)

_SUMS: Any = dict(preferred_element_type=jnp.float32, precision=lax.Precision.DEFAULT)


def _multiply(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum(spec, x, y, **_SUMS)


def _multiply_in_rows(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """The einsum, with the summed axes of `x` last in memory.

  XLA:CPU multiplies other orders in float32 (results/products.json), even those of a transposition
  without the constraint, which then moves nothing. A single row takes a loop of 1 GB/s; with a
  second row of zeros, and sums over `_PART` terms at a time, it is faster than in float32.
  """
  terms, result = spec.split("->")
  a, b = terms.split(",")
  shared = [c for c in a if c in b and c in result]
  summed = [c for c in a if c in b and c not in result]
  rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
  if (order := shared + rows + summed) != [*a]:
    # Without the barrier, XLA:CPU fuses slices of what a scan stored, and takes four times as long.
    x = jnp.transpose(lax.optimization_barrier(x), [a.index(c) for c in order])
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  axes = [order.index(c) for c in summed], [b.index(c) for c in summed]
  batch = [order.index(c) for c in shared], [b.index(c) for c in shared]
  if math.prod(x.shape[order.index(c)] for c in rows) == 1:
    z = _multiply_row(x, y, axes, batch)
  else:
    z = lax.dot_general(x, y, (axes, batch), **_SUMS)
  # XLA may fold the transposition of the result into a product that XLA:CPU does not have.
  z = lax.optimization_barrier(z)
  return jnp.transpose(z, [(shared + rows + columns).index(c) for c in result])


_PART = 64  # terms of a sum of one row, by benchmarks/generation.py


def _multiply_row(x: jax.Array, y: jax.Array, axes: Any, batch: Any) -> jax.Array:
  """`lax.dot_general` of factors of 16 bits, x [shared.., 1.., summed..]."""
  num_summed, num_shared = len(axes[0]), len(batch[0])
  columns = [n for i, n in enumerate(y.shape) if i not in (*axes[1], *batch[1])]
  shape = *x.shape[: x.ndim - num_summed], *columns
  x = x.reshape(*x.shape[:num_shared], 1, *x.shape[x.ndim - num_summed :])
  has_parts = not num_shared and axes[1] == [0] and x.size % _PART == 0
  if has_parts:
    x, y = x.reshape(-1, 1, _PART), y.reshape(-1, _PART, *y.shape[1:])
    num_shared, batch, axes = 1, ([0], [0]), ([2], [1])
  x = jnp.pad(x, [(0, i == num_shared) for i in range(x.ndim)])
  axes = [*range(num_shared + 1, x.ndim)], axes[1]
  z = lax.dot_general(x, y, (axes, ([*range(num_shared)], batch[1])), **_SUMS)
  z = lax.index_in_dim(z, 0, num_shared, keepdims=False)
  return (jnp.sum(z, axis=0) if has_parts else z).reshape(shape)


def row_product(x_bhk: jax.Array, y_bhkn: jax.Array) -> jax.Array:
  """Multiplies one row for each b and h, [B, H, N], in the `sum_dtype` of both."""

  def multiply(x_bhk, y_bhkn):
    dtype = sum_dtype(x_bhk, y_bhkn)
    return jnp.einsum("bhk,bhkn->bhn", x_bhk, y_bhkn, preferred_element_type=dtype)

  def add(x_bhk, y_bhkn):
    return _sum_parts(x_bhk[..., None], y_bhkn)

  return by_platform({"cpu": add, "default": multiply}, x_bhk, y_bhkn)


def sum_products(x: jax.Array, y: jax.Array, rows: jax.Array | None = None) -> jax.Array:
  """Sums x * y over axis -2, in the `sum_dtype` of both; x [.., K, N or 1], y [.., K, N].

  With `rows` [B, K], x[b, rows[b, k]] takes the place of x[b, k].
  """

  def add(x, y, rows):
    dtype = sum_dtype(x, y)
    x = x if rows is None else take_rows(x, rows)
    return jnp.sum(x.astype(dtype) * y.astype(dtype), axis=-2)

  return by_platform({"cpu": _sum_parts, "default": add}, x, y, rows)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  """x[b, rows[b, k]], [B, K, N]; the rows are not checked."""
  return jax.vmap(lambda x, rows: x.at[rows].get(mode="promise_in_bounds"))(x, rows)


_MOST_PARTS = 16  # the fastest of 8, 16, 32 and 64, for 128 and 512 slots of 64 features


def _sum_parts(x: jax.Array, y: jax.Array, rows: jax.Array | None = None) -> jax.Array:
  """`sum_products`, as a sum of products of parts of K.

  XLA:CPU multiplies rows of a batch on one core, and those of 16 bits at 1 GB/s; `jnp.sum(x * y)`
  over an axis can take thirty times as long. Sums of slices it fuses, for all cores. A prime K is
  one slice.
  """
  dtype, length = sum_dtype(x, y), y.shape[-2]
  count = next(n for n in range(_MOST_PARTS, 0, -1) if length % n == 0)
  if rows is None:
    xs = jnp.split(x, count, axis=-2)
  else:  # Each part is read where it is added, without a copy.
    xs = [take_rows(x, part) for part in jnp.split(rows, count, axis=-1)]
  ys = jnp.split(y, count, axis=-2)
  terms = [a.astype(dtype) * b.astype(dtype) for a, b in zip(xs, ys, strict=True)]
  # Without the barrier, XLA:CPU would fuse all into loops that it does not vectorize.
  return jnp.sum(lax.optimization_barrier(sum(terms[1:], terms[0])), axis=-2)


def promote(*operands: Any, dtype: Any, inexact: bool = True) -> list[Any]:
  """Flax's `promote_dtype`, except for inputs already rounded by `as_factor`."""
  inputs, *params = operands
  is_factor = inputs.dtype in LOW and inputs.dtype == factor_dtype(inputs, params[0])
  inputs = inputs if is_factor else inputs.astype(dtype)
  return [inputs, *(x if x is None else x.astype(dtype) for x in params)]


def dot_general(
  lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
  """`jax.lax.dot_general`, of [..., D] times [D, ...] as a `product` of two matrices.

  The gradients then sum over one axis: for a sum over two, XLA:CPU would first transpose a factor.
  Products of 16 bits (`product_dtype`) have only reverse-mode derivatives.
  Other products, and calls with options, go to `jax.lax.dot_general` unchanged.
  """
  sums, shared = (tuple(map(tuple, pair)) for pair in dimension_numbers)
  if sums != ((lhs.ndim - 1,), (0,)) or shared != ((), ()) or lhs.shape[-1] != rhs.shape[0]:
    return lax.dot_general(lhs, rhs, dimension_numbers, **options)
  lead, rest = lhs.shape[:-1], rhs.shape[1:]
  rows = divide_rows(lhs.reshape(math.prod(lead), lhs.shape[-1]))
  columns = rhs.reshape(rhs.shape[0], math.prod(rest))
  if factor_dtype(rows, columns) is None or any(options.values()):
    flat = lax.dot_general(rows, columns, (((1,), (0,)), ((), ())), **options)
  else:
    flat = product("rk,kn->rn", rows, columns).astype(rhs.dtype)
  return divide_rows(flat).reshape(*lead, *rest)
