"""Shift-and-sum as two products with banded matrices, for what multiplies matrices fast.

Letters: S sequence, N position, H head, E feature of a head, K level, W band, M block.

The first levels let a position reach W - 1 back, and are one lower triangular matrix whose
band is W wide. To the others, whose shifts are multiples of W, the positions p, p + W,
p + 2 W, ... are a sequence of their own, in which they shift by 1, 2, 4, ...: the same
again. With W = sqrt(T) that is O(T**1.5 D) work, all of it in matrix products, in place of
O(T log T D) that moves every number through memory once a level.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dpjax.ops.products import sum_dtype


@jax.custom_vjp
def matrix_form(values: jax.Array, gates: jax.Array, level_keep: jax.Array | None) -> jax.Array:
  """`dpjax.ops.shift_and_sum`, of which it is an implementation.

  Kept for the gradient are `values` and `gates` alone; beside them it takes memory for
  O(B H T**1.5) numbers of the matrices. A level that is dropped has gates of 0, and its
  work is not saved. Products of float32 have its full precision; where `values` are
  bfloat16 or float16, so are the matrices and what goes from one product to the other,
  while each product sums in float32, or float64 where an argument has it. An inf or nan
  reaches up to 2 sqrt(T) positions of the past, by products with 0.

  Args:
    values: [B, T, H, E], floats.
    gates: [B, T, H, K], floats, K at least 1.
    level_keep: [K] booleans, or None.

  Returns:
    [B, T, H, E], in the dtype of `values`.
  """
  return _both_passes(values, gates, level_keep)


def _both_passes(values, gates, level_keep):
  batch, length, heads, features = values.shape
  dtype = sum_dtype(values, gates)
  gates = gates.astype(dtype)
  if level_keep is not None:
    gates = jnp.where(level_keep, gates, 0)
  levels = gates.shape[3]
  num_low = (levels + 1) // 2
  band = 2**num_low
  v_bthe = values.astype(dtype) if dtype == jnp.float64 else values
  v_bthe = _multiply(v_bthe, gates[..., :num_low])
  if levels > num_low:
    # [B, T, ...] -> [B W, T / W, ...] and back.
    stride = -(-length // band)
    fill = ((0, 0), (0, stride * band - length), (0, 0), (0, 0))

    def split(x):
      x = jnp.pad(x, fill).reshape(batch, stride, band, heads, -1)
      return x.swapaxes(1, 2).reshape(batch * band, stride, heads, -1)

    v_snhe = _multiply(split(v_bthe), split(gates[..., num_low:]))
    v_bthe = v_snhe.reshape(batch, band, stride, heads, features).swapaxes(1, 2)
    v_bthe = v_bthe.reshape(batch, stride * band, heads, features)[:, :length]
  return v_bthe.astype(values.dtype)


def _multiply(v_snhe, c_snhk):
  """All levels of K as one product with a matrix of which a block is [W, 2 W]."""
  sequences, length, heads, features = v_snhe.shape
  a_snhw = _bands(c_snhk)
  width = min(a_snhw.shape[3], length)
  blocks = -(-length // width)
  fill = ((0, 0), (0, blocks * width - length), (0, 0), (0, 0))

  def cut(x):
    return jnp.pad(x, fill).reshape(sequences, blocks, width, heads, -1)

  m_smhij = _matrices(jnp.moveaxis(cut(a_snhw[..., :width]), 3, 2))
  v_smjhe = cut(v_snhe)
  if blocks == 1:
    m_smhij = m_smhij[..., width:]
  else:
    before = jnp.pad(v_smjhe[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * 3)
    v_smjhe = jnp.concatenate([before, v_smjhe], axis=2)
  v_smihe = jnp.einsum(
    "smhij,smjhe->smihe",
    m_smhij.astype(v_snhe.dtype),
    v_smjhe,
    precision="highest",
    preferred_element_type=c_snhk.dtype,
  )
  v_snhe = v_smihe.reshape(sequences, blocks * width, heads, features)[:, :length]
  return v_snhe.astype(v_smjhe.dtype)


def _bands(c_snhk):
  """[S, N, H, W], W = 2**K: what each position takes of the one w before it.

  The shifts of w are its binary digits, so there is one way back for each w, and a level
  doubles how many there are.
  """
  a_snhw = jnp.ones((*c_snhk.shape[:3], 1), c_snhk.dtype)
  for k in range(c_snhk.shape[3]):
    shift = min(2**k, c_snhk.shape[1])
    past = jnp.pad(a_snhw, ((0, 0), (shift, 0), (0, 0), (0, 0)))[:, : c_snhk.shape[1]]
    a_snhw = jnp.concatenate([a_snhw, c_snhk[..., k, None] * past], axis=3)
  return a_snhw


def _matrices(a_smhiw):
  """[..., W, W] by row i and distance w to [..., W, 2 W], column W + i - w; no gather."""
  width = a_smhiw.shape[-1]
  # Rows that are one number too long begin one column later every time.
  rows = jnp.pad(a_smhiw[..., ::-1], [(0, 0)] * (a_smhiw.ndim - 1) + [(1, width)])
  flat = rows.reshape(*a_smhiw.shape[:-2], -1)[..., : 2 * width**2]
  return flat.reshape(*a_smhiw.shape[:-1], 2 * width)


def _forward(values, gates, level_keep):
  return _both_passes(values, gates, level_keep), (values, gates, level_keep)


def _backward(residuals, cotangent):
  values, gates, level_keep = residuals
  _, pull = jax.vjp(partial(_both_passes, level_keep=level_keep), values, gates)
  return *pull(cotangent), None


matrix_form.defvjp(_forward, _backward)
