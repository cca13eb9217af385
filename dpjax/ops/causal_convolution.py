"""Causal convolution over time, with which every Extractor mixes tokens.

B batch, T position, L tap, D feature read, E feature written.

Source: Chen 2023, arXiv:2308.07661, Sec. 5, Eqs. 23, 26, 28 and 29.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.ops import checks
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.platforms import by_platform, is_symbolic, num_devices
from dpjax.ops.products import low_product, product, sum_dtype


@automatic_axes
def causal_convolution(
  inputs: jax.Array,
  filters: jax.Array,
  *,
  document_starts: jax.Array | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Sums the inputs so far, each times the tap of its distance.

    y[b, t] = sum over s <= t of inputs[b, s] * filters[t - s]

  A tap is a number (ME, Eq. 29), a vector multiplied element by element (WE and HE, Eqs. 26 and
  28) or a matrix on the right of a row vector (SHE, Eq. 23). For the taps 2 and 3, the inputs
  1, 10 become 2, 23. Sums are in float32, or in float64 if an argument is. The implementations are

  - "scan", the sum over the lags as written, O(T**2): the reference, with the least memory,
    and the only one in which a later inf or nan does not affect earlier outputs.
  - "conv", XLA's convolution, O(T**2), on a CPU slow within a loop, such as that over layers;
    XLA chooses the dtype of sums of bfloat16 and float16.
  - "toeplitz", products with a matrix M[t, s] = filters[t - s], O(T**2) in time and memory.
  - "fft", products of Fourier transforms, O(T log T). XLA computes the FFT of a distributed
    batch on every device.
  - "dft", the same with each transform as two matrix products, O(T**1.5).

  In the last two, a position sees the rounding errors of later ones, about 1e-7 of their size.
  The first three multiply in bfloat16 or float16 if both arguments have that dtype ("scan" only
  matrix taps; a CPU in float32); "scan" and "toeplitz" then have no forward-mode derivatives.

  With `document_starts`, a document sees nothing of those before it, s >= t - o_t with o_t the
  place of t within its document, for at most O(log T) times the work.

  Args:
    inputs: [B, T, D], floats.
    filters: [L], [L, D] or [L, D, E], floats; without `document_starts` L is at least T.
    document_starts: [B, T], 1 at the first token of each document, else 0; inputs L or more tokens
      ago count as 0. None means that each row is one document.
    implementation: one of the names above; None takes that of `choose_implementation`.

  Returns:
    [B, T, D], with matrix taps [B, T, E], in the dtype of `inputs`.

  Raises:
    ValueError: shapes or dtypes do not match, or the implementation is unknown.
  """
  inputs, filters = checks.arrays(
    inputs=(inputs, "B T D"), filters=(filters, "L>=1 | L>=1 D | L>=1 D E")
  )
  batch, length, width = inputs.shape
  if length > len(filters) and document_starts is None:
    raise ValueError(
      f"inputs: expected at most {len(filters)} positions, one for each tap, got {length}"
    )
  checks.choice("implementation", implementation, CAUSAL_CONVOLUTION, or_none=True)
  names: dict[str, str] = {"default": implementation or ""}
  if implementation is None:
    sizes = filters.ndim, math.inf if is_symbolic(inputs) else batch, length
    devices = num_devices()
    chosen = [choose_implementation(*sizes, platform, devices) for platform in ("cpu", "default")]
    names = {"default": chosen[1]} | ({} if chosen[0] == chosen[1] else {"cpu": chosen[0]})
  place_bt = (
    None
    if document_starts is None
    else document_places(check_starts(document_starts, (batch, length)))
  )
  shape = batch, length, filters.shape[2] if filters.ndim == 3 else width
  if 0 in shape or inputs.size == 0:
    return jnp.zeros(shape, inputs.dtype)
  dtype = sum_dtype(inputs, filters)
  is_low = inputs.dtype == filters.dtype and inputs.dtype in _LOW
  arrays = inputs.astype(dtype), filters[:length].astype(dtype), inputs.dtype if is_low else dtype

  def run(name: str, x_btd, w):
    if place_bt is None:
      return CAUSAL_CONVOLUTION[name](x_btd, w, arrays[2])
    if name == "scan":
      return _scan(x_btd, w, arrays[2], place_bt)
    return _convolve_documents(CAUSAL_CONVOLUTION[name], x_btd, w, arrays[2], place_bt)

  runs = {platform: functools.partial(run, name) for platform, name in names.items()}
  return by_platform(runs, *arrays[:2]).astype(inputs.dtype)


# Positions of a block that goes lag by lag where a row has several documents.
_BLOCK = 32
_LOW = (jnp.bfloat16, jnp.float16)
# The fastest in training, on a CPU by results/causal_convolution.json, except "conv", which is
# measured outside of a loop, elsewhere by results/ops_h200.json. The first row that fits counts:
# rank of the filters, most B, most T, implementation.
_FASTEST = {
  "cpu": (
    (1, math.inf, 256, "toeplitz"),
    (1, math.inf, math.inf, "fft"),
    (2, 4, 16, "scan"),
    (2, 4, math.inf, "fft"),
    (2, math.inf, 32, "toeplitz"),
    (2, math.inf, math.inf, "fft"),
    (3, 4, 16, "scan"),
    (3, 1, 64, "scan"),
    (3, 1, 256, "dft"),
    (3, 1, math.inf, "fft"),
    (3, math.inf, 2048, "dft"),
    (3, math.inf, math.inf, "fft"),
  ),
  "default": (
    (1, math.inf, 2048, "toeplitz"),
    (2, math.inf, 128, "toeplitz"),
    (3, math.inf, 2048, "dft"),
    *((rank, math.inf, math.inf, "fft") for rank in (1, 2, 3)),
  ),
}


def choose_implementation(rank: int, batch: float, length: int, platform: str, devices: int) -> str:
  """The default implementation of `causal_convolution` for filters of a rank, B and T."""
  name = next(
    name
    for of_rank, max_batch, max_length, name in _FASTEST["cpu" if platform == "cpu" else "default"]
    if rank == of_rank and batch <= max_batch and length <= max_length
  )
  # Several devices would each compute the FFTs of the whole batch.
  return "dft" if name == "fft" and devices > 1 else name


def _lead(x, ndim):
  """`x` with axes of 1 in front."""
  return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _product(formula, dtype, a, b):
  """An einsum of float32 or float64 arrays whose values are those of `dtype`."""
  return product(formula, a, b) if dtype == a.dtype else low_product(a, b, formula, dtype)


def _scan(x_btd, w, dtype, place_bt=None):
  length = x_btd.shape[1]
  padded = jnp.pad(x_btd, ((0, 0), (length, 0), (0, 0)))

  # Recomputed in the gradient, where all shifted inputs would be kept otherwise.
  @jax.checkpoint
  def body(y_bte, lag_tap):
    lag, tap = lag_tap
    past_btd = lax.dynamic_slice_in_dim(padded, length - lag, length, axis=1)
    if place_bt is not None:
      past_btd = jnp.where((lag <= place_bt)[..., None], past_btd, 0)
    if tap.ndim == 2:
      return y_bte + _product("btd,de->bte", dtype, past_btd, tap), None
    return y_bte + past_btd * _lead(tap, 3), None

  shape = *x_btd.shape[:2], w.shape[-1] if w.ndim == 3 else x_btd.shape[2]
  # Within `jax.shard_map` these zeros vary over devices as the sums do.
  zeros = jnp.zeros_like(x_btd, shape=shape) + jnp.zeros_like(w, shape=())
  y_bte, _ = lax.scan(body, zeros, (jnp.arange(len(w)), w))
  return y_bte


def _convolve_documents(implementation, x_btd, w, dtype, place_bt):
  """Convolves within blocks lag by lag, then across the middle of pairs of 1, 2, 4, .. blocks."""
  # Only one document crosses the middle of a pair, so inputs and outputs of all others are set to
  # 0, and no document sees rounding errors of another.
  batch, length, width = x_btd.shape
  doublings = (-(-length // _BLOCK) - 1).bit_length()
  size = -(-length // 2**doublings)
  total = size << doublings
  x_btd = jnp.pad(x_btd, ((0, 0), (0, total - length), (0, 0)))
  place_bt = jnp.pad(place_bt, ((0, 0), (0, total - length)))
  w = jnp.pad(w, [(0, total - len(w))] + [(0, 0)] * (w.ndim - 1))
  within_bt = jnp.minimum(place_bt, jnp.arange(total, dtype=jnp.int32)[None] % size)
  rows = x_btd.reshape(-1, size, width)
  y_bte = _scan(rows, w[:size], dtype, within_bt.reshape(-1, size)).reshape(batch, total, -1)
  for half in (size << j for j in range(doublings)):
    x_plrd = x_btd.reshape(-1, 2, half, width)
    right_pr = place_bt.reshape(-1, 2, half)[:, 1]
    index_r = jnp.arange(half, dtype=jnp.int32)
    is_seen_pl = half - index_r[None] <= right_pr[:, :1]
    sees_pr = right_pr > index_r[None]
    left_pld = jnp.where(is_seen_pl[..., None], x_plrd[:, 0], 0)
    left_pld = jnp.pad(left_pld, ((0, 0), (0, half), (0, 0)))
    y_pre = implementation(left_pld, w[: 2 * half], dtype)[:, half:]
    y_pre = jnp.where(sees_pr[..., None], y_pre, 0)
    y_bte += jnp.pad(y_pre, ((0, 0), (half, 0), (0, 0))).reshape(y_bte.shape)
  return y_bte[:, :length]


def _conv(x_btd, w, dtype):
  x_btd, w = x_btd.astype(dtype), w.astype(dtype)
  batch, length, width = x_btd.shape
  convolve = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1,),
    padding=[(length - 1, 0)],
    dimension_numbers=("NWC", "WIO", "NWC"),
  )
  w = w[::-1]
  if w.ndim == 3:
    return convolve(x_btd, w)
  if w.ndim == 2:
    return convolve(x_btd, w[:, None], feature_group_count=width)
  x_ct1 = x_btd.swapaxes(1, 2).reshape(batch * width, length, 1)
  return convolve(x_ct1, w[:, None, None]).reshape(batch, width, length).swapaxes(1, 2)


def _toeplitz_matrix(x, axis):
  """[.., T, ..] to [.., T, T, ..], M[t, s] = x[t - s] and 0 for s > t; no gather."""
  x = jnp.moveaxis(x, axis, -1)
  length = x.shape[-1]
  # Rows of 2 T - 1 cut from a run of period 2 T begin one earlier every time.
  period = jnp.concatenate(
    [x[..., :1], jnp.zeros(x.shape[:-1] + (length,), x.dtype), x[..., :0:-1]], axis=-1
  )
  run = jnp.tile(period, (1,) * (x.ndim - 1) + (length,))[..., : length * (2 * length - 1)]
  matrix = run.reshape(*x.shape, 2 * length - 1)[..., :length]
  return jnp.moveaxis(matrix, (-2, -1), (axis, axis + 1))


def _toeplitz(x_btd, w, dtype):
  if w.ndim == 1:
    return _product("ts,bsd->btd", dtype, _toeplitz_matrix(w, 0), x_btd)
  if w.ndim == 2:
    return _product("dts,bsd->btd", dtype, _toeplitz_matrix(w.T, 1), x_btd)
  # The matrix of the taps is larger wherever B < D.
  return _product("btld,lde->bte", dtype, _toeplitz_matrix(x_btd, 1), w)


_einsum = functools.partial(jnp.einsum, precision="highest")


def _fft(x_btd, w, _):
  length = x_btd.shape[1]
  # 2**i, 3 * 2**i or 5 * 2**i: a size that FFTs are fast at.
  size = min(k << (-(-length // k) - 1).bit_length() for k in (1, 3, 5))
  # A product of polynomials modulo z**size - i: terms beyond the size come back times i, so the
  # real part is the beginning of the convolution. It is that of p(z c) modulo z**size - 1,
  # c**size = i, by FFTs of that size: as much work as real ones of zero-padded arrays.
  angle = np.pi / (2 * size) * np.arange(size)
  cos, sin = jnp.asarray(np.cos(angle), w.dtype), jnp.asarray(np.sin(angle), w.dtype)

  def transform(x, axis):
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - length)])
    x = lax.complex(x * _lead(cos, x.ndim), x * _lead(sin, x.ndim))
    return _map_rows(jnp.fft.fft, x)

  y_bef = _map_rows(jnp.fft.ifft, _multiply(transform(x_btd, 1), transform(w, 0)))
  y_bet = y_bef.real * _lead(cos, 3) + y_bef.imag * _lead(sin, 3)
  return y_bet[..., :length].swapaxes(1, 2)


def _map_rows(transform, x):
  # For a distributed batch, XLA:CPU rejects layouts that it chooses itself for more axes.
  return transform(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _multiply(x_bdf, w):
  """The product of the transforms, [f], [d, f] or [d, e, f] for the taps."""
  if w.ndim < 3:
    return x_bdf * _lead(w, 3)
  if x_bdf.shape[0] == 1:
    return (x_bdf[:, :, None] * w[None]).sum(axis=1)
  multiply = functools.partial(_einsum, "bdf,def->bef")
  # By real products, as complex ones are slow on CPU.
  return lax.complex(
    multiply(x_bdf.real, w.real) - multiply(x_bdf.imag, w.imag),
    multiply(x_bdf.real, w.imag) + multiply(x_bdf.imag, w.real),
  )


def _dft_matrices(length, dtype):
  """Two steps of a discrete Fourier transform as matrices, [k, c, u] and [k, j, c, c', r]."""
  # Of T' = R * S >= `length` positions R u + r at the T' frequencies (f + 1/2) / (2 T'), of which
  # no two are conjugates, f = k + 2 S j, with k and u < S, j and r < R; c and c' are the real and
  # the imaginary part.
  # Measured up to 4096; beyond that the work 2 S + 4 R is least for R = sqrt(T / 2).
  r_size = 1 if length < 32 else 8 if length <= 1024 else 32
  while 2 * r_size**2 < length // 4:
    r_size *= 2
  s_size = -(-length // r_size)
  k, r = np.arange(s_size), np.arange(r_size)
  angle = np.pi / s_size * (k[:, None] + 0.5) * k
  first = np.stack([np.cos(angle), -np.sin(angle)], axis=1)
  f = k[:, None] + 2 * s_size * r
  angle = np.pi / (s_size * r_size) * (f[:, :, None] + 0.5) * r
  cos, sin = np.cos(angle), np.sin(angle)
  second = np.stack([np.stack([cos, sin], axis=2), np.stack([-sin, cos], axis=2)], axis=2)
  return jnp.asarray(first, dtype), jnp.asarray(second, dtype)


def _dft(x_btd, w, _):
  length = x_btd.shape[1]
  first, second = _dft_matrices(length, w.dtype)
  s_size, r_size = second.shape[:2]

  def transform(x):
    x = jnp.pad(x, [(0, s_size * r_size - length)] + [(0, 0)] * (x.ndim - 1))
    x_urm = x.reshape(s_size, r_size, -1)
    x_kcrm = _einsum("kcu,urm->kcrm", first, x_urm)
    x_kjcm = _einsum("kjcer,kerm->kjcm", second, x_kcrm)
    return x_kjcm.reshape(s_size * r_size, 2, *x.shape[1:])

  x_fcbd, w_fc = transform(jnp.moveaxis(x_btd, 1, 0)), transform(w)
  re, im = x_fcbd[:, 0], x_fcbd[:, 1]
  if w.ndim == 3:
    # Both parts of the result as one product per frequency.
    rows = jnp.stack(
      [jnp.concatenate([re, -im], axis=2), jnp.concatenate([im, re], axis=2)], axis=1
    )
    y_fcbe = _einsum("fcbd,fde->fcbe", rows, w_fc.reshape(w_fc.shape[0], -1, w.shape[2]))
  else:
    w_re, w_im = (w_fc[:, c].reshape(-1, 1, w.size // w.shape[0]) for c in (0, 1))
    y_fcbe = jnp.stack([re * w_re - im * w_im, re * w_im + im * w_re], axis=1)
  # But for the factor T', a transform and its transpose cancel each other.
  y_kjcm = y_fcbe.reshape(s_size, r_size, 2, -1)
  y_kerm = _einsum("kjcer,kjcm->kerm", second, y_kjcm)
  y_urm = _einsum("kcu,kcrm->urm", first, y_kerm) / (s_size * r_size)
  y_tbe = y_urm.reshape(s_size * r_size, *y_fcbe.shape[2:])[:length]
  return jnp.moveaxis(y_tbe, 0, 1)


CAUSAL_CONVOLUTION = {"scan": _scan, "conv": _conv, "toeplitz": _toeplitz, "fft": _fft, "dft": _dft}
