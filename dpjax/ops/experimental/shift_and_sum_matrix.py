"""Shift-and-sum as two products with banded matrices, for hardware with fast matrix products.

S sequence, N position, H head, E feature of a head, K level, W band, M block.

The first levels reach W - 1 positions back and form one lower triangular matrix with a band of
width W. The others shift by multiples of W. In the sequence p, p + W, p + 2 W, ... they shift by
1, 2, 4, ..., and so form another such matrix. With W = sqrt(T) this takes O(T**1.5 D) work.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dpjax.ops.products import sum_dtype


@jax.custom_vjp
def matrix_form(values: jax.Array, gates: jax.Array, level_keep: jax.Array | None) -> jax.Array:
  """An implementation of `dpjax.ops.shift_and_sum`.

  The gradient stores only `values` and `gates`; the matrices take O(B H T**1.5) numbers. A
  dropped level costs as much as others. If `values` are bfloat16 or float16, so are the matrices
  and the result of the first product. An inf or nan affects up to 2 sqrt(T) earlier positions.
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
  """Computes all K levels as one product with a matrix that consists of blocks [W, 2 W]."""
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
  """[S, N, H, W], W = 2**K: the weight of the input w positions before each position."""
  # The binary digits of w are its shifts: each w has one path, and a level doubles the paths.
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


def _backward(residuals, cotangent):
  values, gates, level_keep = residuals
  _, pull = jax.vjp(partial(_both_passes, level_keep=level_keep), values, gates)
  return *pull(cotangent), None


matrix_form.defvjp(lambda *x: (_both_passes(*x), x), _backward)
