"""Causal convolution over time, which mixes tokens in every Extractor: of rows, and in chunks.

B batch, T position, C position of a chunk, L tap, D input feature, E output feature, U inputs.

Source: Chen 2023, arXiv:2308.07661, Sec. 5, Eqs. 23, 26, 28 and 29.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.backend import (
  FFT_CAN_DEADLOCK,
  automatic_axes,
  by_platform,
  complex_einsum,
  take_rows,
  transform_rows,
)
from dpjax.ops.documents import document_positions, mask_padding
from dpjax.ops.placement import is_symbolic, num_devices
from dpjax.ops.products import low_product, product, sum_dtype, sum_products


@automatic_axes
@typed
def causal_convolution(
  inputs: Float[Array, "B T D"],
  filters: Float[Array, "L"] | Float[Array, "L D"] | Float[Array, "L D E"],
  *,
  document_starts: Starts[Array, "B T"] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B T D"] | Float[Array, "B T E"]:
  """Sums the inputs so far, each times the tap for its distance.

    y[b, t] = sum over s <= t of inputs[b, s] * filters[t - s]

  A tap is a number (ME, Eq. 29), a vector multiplied element by element (WE and HE, Eqs. 26 and
  28) or a matrix on the right of a row vector (SHE, Eq. 23). For the taps 2 and 3, the inputs
  1, 10 become 2, 23. Sums are in float32, or in float64 if an argument is. The implementations are

  - "scan", the sum over the lags as written, O(T**2): the reference, with the least memory,
    and the only one in which a later inf or nan does not affect earlier outputs.
  - "toeplitz", products with a matrix M[t, s] = filters[t - s], O(T**2) in time and memory.
  - "fft", products of Fourier transforms, O(T log T). XLA computes the FFT of a distributed
    batch on every device.
  - "dft", the same with each transform as two matrix products, O(T**1.5). On a CPU it also stands
    in for "fft" with jaxlib 0.11.1 and 0.11.2, in which FFTs that run at once can deadlock.

  In the last two, a position sees the rounding errors of later ones, about 1e-7 of their size.
  The first two multiply in bfloat16 or float16 if both arguments have that dtype ("scan" only
  matrix taps; a CPU in float32), and then have no forward-mode derivatives.

  With `document_starts`, a document does not see those before it: s >= t - o_t, with o_t the
  position of t within its document, for at most O(log T) times the work.

  Args:
    inputs: one vector for each position.
    filters: the taps; without `document_starts` L is at least T.
    document_starts: 1 at the first token of each document, else 0; inputs L or more tokens ago
      count as 0. None means that each row is one document.
    implementation: one of the names above; None uses `choose_implementation`.

  Returns:
    y, in the dtype of `inputs`.

  Raises:
    ValueError: shapes or dtypes do not match, or the implementation is unknown.
  """
  batch, length, width = inputs.shape
  if not len(filters):
    raise ValueError("filters: expected at least one tap, got none")
  if length > len(filters) and document_starts is None:
    raise ValueError(
      f"inputs: expected at most {len(filters)} positions, one for each tap, got {length}"
    )
  arrays.choice("implementation", implementation, CAUSAL_CONVOLUTION, or_none=True)
  if implementation is None:
    sizes = filters.ndim, math.inf if is_symbolic(inputs) else batch, length
    cpu = choose_implementation(*sizes, "cpu", num_devices())
    default = choose_implementation(*sizes, "default", num_devices())
  else:
    cpu = default = implementation
  if cpu == "fft" and FFT_CAN_DEADLOCK:
    cpu = "dft"
  names = {"default": default} if cpu == default else {"default": default, "cpu": cpu}
  position_bt = None if document_starts is None else document_positions(document_starts)
  shape = batch, length, filters.shape[2] if filters.ndim == 3 else width
  if 0 in shape or inputs.size == 0:
    return jnp.zeros(shape, inputs.dtype)
  dtype = sum_dtype(inputs, filters)
  is_low = inputs.dtype == filters.dtype and inputs.dtype in _LOW
  factors = inputs.dtype if is_low else dtype

  def run(name: str, x_btd, w):
    if position_bt is None:
      return CAUSAL_CONVOLUTION[name](x_btd, w, factors)
    if name == "scan":
      return _scan(x_btd, w, factors, position_bt)
    return _convolve_documents(CAUSAL_CONVOLUTION[name], x_btd, w, factors, position_bt)

  runs = {platform: functools.partial(run, name) for platform, name in names.items()}
  y_bte = by_platform(runs, inputs.astype(dtype), filters[:length].astype(dtype))
  return y_bte.astype(inputs.dtype)


# Positions of a block that is convolved lag by lag if a row has several documents.
_BLOCK = 32
_LOW = (jnp.bfloat16, jnp.float16)
# The fastest in training, on a CPU by results/causal_convolution.json, elsewhere by
# results/ops_h200.json. The first matching row is used: rank of the filters, maximum of B, maximum
# of T, implementation.
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
  """An einsum of float32 or float64 arrays whose values are exact in `dtype`."""
  return product(formula, a, b) if dtype == a.dtype else low_product(a, b, formula, dtype)


def _scan(x_btd, w, dtype, position_bt=None):
  length = x_btd.shape[1]
  padded = jnp.pad(x_btd, ((0, 0), (length, 0), (0, 0)))

  # Recomputed in the gradient, which would otherwise keep all shifted inputs.
  @jax.checkpoint
  def body(y_bte, lag_tap):
    lag, tap = lag_tap
    past_btd = lax.dynamic_slice_in_dim(padded, length - lag, length, axis=1)
    if position_bt is not None:
      past_btd = jnp.where((lag <= position_bt)[..., None], past_btd, 0)
    if tap.ndim == 2:
      return y_bte + _product("btd,de->bte", dtype, past_btd, tap), None
    return y_bte + past_btd * _lead(tap, 3), None

  shape = *x_btd.shape[:2], w.shape[-1] if w.ndim == 3 else x_btd.shape[2]
  # Within `jax.shard_map` these zeros vary over devices as the sums do.
  zeros = jnp.zeros_like(x_btd, shape=shape) + jnp.zeros_like(w, shape=())
  y_bte, _ = lax.scan(body, zeros, (jnp.arange(len(w)), w))
  return y_bte


def _convolve_documents(implementation, x_btd, w, dtype, position_bt):
  """Convolves within blocks lag by lag, then across the middle of pairs of 1, 2, 4, .. blocks."""
  # Only one document crosses the middle of a pair, so inputs and outputs of all others are set to
  # 0, and no document sees rounding errors of another.
  batch, length, width = x_btd.shape
  doublings = (-(-length // _BLOCK) - 1).bit_length()
  size = -(-length // 2**doublings)
  total = size << doublings
  x_btd = jnp.pad(x_btd, ((0, 0), (0, total - length), (0, 0)))
  position_bt = jnp.pad(position_bt, ((0, 0), (0, total - length)))
  w = jnp.pad(w, [(0, total - len(w))] + [(0, 0)] * (w.ndim - 1))
  within_bt = jnp.minimum(position_bt, jnp.arange(total, dtype=jnp.int32)[None] % size)
  rows = x_btd.reshape(-1, size, width)
  y_bte = _scan(rows, w[:size], dtype, within_bt.reshape(-1, size)).reshape(batch, total, -1)
  for half in (size << j for j in range(doublings)):
    x_plrd = x_btd.reshape(-1, 2, half, width)
    right_pr = position_bt.reshape(-1, 2, half)[:, 1]
    index_r = jnp.arange(half, dtype=jnp.int32)
    is_seen_pl = half - index_r[None] <= right_pr[:, :1]
    sees_pr = right_pr > index_r[None]
    left_pld = jnp.where(is_seen_pl[..., None], x_plrd[:, 0], 0)
    left_pld = jnp.pad(left_pld, ((0, 0), (0, half), (0, 0)))
    y_pre = implementation(left_pld, w[: 2 * half], dtype)[:, half:]
    y_pre = jnp.where(sees_pr[..., None], y_pre, 0)
    y_bte += jnp.pad(y_pre, ((0, 0), (half, 0), (0, 0))).reshape(y_bte.shape)
  return y_bte[:, :length]


def _toeplitz_matrix(x, axis):
  """[.., T, ..] to [.., T, T, ..], M[t, s] = x[t - s] and 0 for s > t, without a gather."""
  x = jnp.moveaxis(x, axis, -1)
  length = x.shape[-1]
  # Rows of 2 T - 1 cut from a sequence of period 2 T each begin one position earlier.
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
  # The matrix of the taps is larger if B < D.
  return _product("btld,lde->bte", dtype, _toeplitz_matrix(x_btd, 1), w)


_einsum = functools.partial(jnp.einsum, precision="highest")


def _fft(x_btd, w, _):
  length = x_btd.shape[1]
  # 2**i, 3 * 2**i or 5 * 2**i: a size that FFTs are fast at.
  size = min(k << (-(-length // k) - 1).bit_length() for k in (1, 3, 5))
  # A product of polynomials modulo z**size - i: terms beyond the size wrap around times i, so the
  # real part is the beginning of the convolution. It equals that of p(z c) modulo z**size - 1,
  # c**size = i, by FFTs of that size: as much work as real FFTs of zero-padded arrays.
  angle = np.pi / (2 * size) * np.arange(size)
  cos = jnp.asarray(np.cos(angle), w.dtype)
  sin = jnp.asarray(np.sin(angle), w.dtype)

  def transform(x, axis):
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - length)])
    x = lax.complex(x * _lead(cos, x.ndim), x * _lead(sin, x.ndim))
    return transform_rows(jnp.fft.fft, x)

  y_bef = transform_rows(jnp.fft.ifft, _multiply(transform(x_btd, 1), transform(w, 0)))
  y_bet = y_bef.real * _lead(cos, 3) + y_bef.imag * _lead(sin, 3)
  return y_bet[..., :length].swapaxes(1, 2)


def _multiply(x_bdf, w):
  """The product of the transforms, [f], [d, f] or [d, e, f] for the taps."""
  if w.ndim < 3:
    return x_bdf * _lead(w, 3)
  if x_bdf.shape[0] == 1:
    return (x_bdf[:, :, None] * w[None]).sum(axis=1)
  return complex_einsum("bdf,def->bef", x_bdf, w)


def _dft_matrices(length, dtype):
  """Two steps of a discrete Fourier transform as matrices, [k, c, u] and [k, j, c, c', r]."""
  # The T' = R * S >= `length` positions are R u + r, the T' frequencies (f + 1/2) / (2 T'), no two
  # of them conjugates, f = k + 2 S j, with k and u < S, j and r < R; c and c' are the real and
  # the imaginary part.
  # Measured up to 4096; beyond that the work 2 S + 4 R is least for R = sqrt(T / 2).
  r_size = 1 if length < 32 else 8 if length <= 1024 else 32
  while 2 * r_size**2 < length // 4:
    r_size *= 2
  s_size = -(-length // r_size)
  k = np.arange(s_size)
  r = np.arange(r_size)
  angle = np.pi / s_size * (k[:, None] + 0.5) * k
  first = np.stack([np.cos(angle), -np.sin(angle)], axis=1)
  f = k[:, None] + 2 * s_size * r
  angle = np.pi / (s_size * r_size) * (f[:, :, None] + 0.5) * r
  cos = np.cos(angle)
  sin = np.sin(angle)
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

  x_fcbd = transform(jnp.moveaxis(x_btd, 1, 0))
  w_fc = transform(w)
  re = x_fcbd[:, 0]
  im = x_fcbd[:, 1]
  if w.ndim == 3:
    # Both parts of the result as one product per frequency.
    rows = jnp.stack(
      [jnp.concatenate([re, -im], axis=2), jnp.concatenate([im, re], axis=2)], axis=1
    )
    y_fcbe = _einsum("fcbd,fde->fcbe", rows, w_fc.reshape(w_fc.shape[0], -1, w.shape[2]))
  else:
    w_re = w_fc[:, 0].reshape(-1, 1, w.size // w.shape[0])
    w_im = w_fc[:, 1].reshape(-1, 1, w.size // w.shape[0])
    y_fcbe = jnp.stack([re * w_re - im * w_im, re * w_im + im * w_re], axis=1)
  # Up to the factor T', a transform and its transpose cancel.
  y_kjcm = y_fcbe.reshape(s_size, r_size, 2, -1)
  y_kerm = _einsum("kjcer,kjcm->kerm", second, y_kjcm)
  y_urm = _einsum("kcu,kcrm->urm", first, y_kerm) / (s_size * r_size)
  y_tbe = y_urm.reshape(s_size * r_size, *y_fcbe.shape[2:])[:length]
  return jnp.moveaxis(y_tbe, 0, 1)


CAUSAL_CONVOLUTION = {"scan": _scan, "toeplitz": _toeplitz, "fft": _fft, "dft": _dft}


class ConvolutionCache(NamedTuple):
  """The last L inputs of every row; a step costs O(L D), with matrix taps O(L D E).

  Attributes:
    inputs: a ring buffer, with position t at t modulo L; zeros for missing inputs.
    length: the number of inputs so far in each row.
  """

  inputs: Float[Array, "B L D"]
  length: Int32[Array, "B"]


def init_convolution_cache(
  batch: int, num_taps: int, width: int, dtype: DTypeLike = jnp.float32
) -> ConvolutionCache:
  """An empty `ConvolutionCache` for B rows, L taps, the width D and inputs of a float dtype."""
  arrays.integers(batch=batch, num_taps=num_taps, width=width)
  arrays.float_dtype(dtype)
  return ConvolutionCache(jnp.zeros((batch, num_taps, width), dtype), jnp.zeros(batch, jnp.int32))


@automatic_axes
@typed
def causal_convolution_cached(
  inputs: Float[Array, "B C D"],
  taps: Float[Array, "L"] | Float[Array, "L D"] | Float[Array, "L D E"],
  cache: ConvolutionCache,
  *,
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C D"] | Float[Array, "B C E"], ConvolutionCache]:
  """Continues every row of a causal convolution from its cache.

    y[b, t] = sum over s of inputs[b, s] * taps[t - s], t - L < s <= t

  Up to L positions, this equals `causal_convolution` of all inputs so far, for any division
  into chunks. For the taps 2, 3 the chunks [1], [10, 100] become [2], [23, 230].

  A chunk of more than one position costs about `causal_convolution` of L + C positions, and an
  input of inf or nan may affect earlier outputs of its chunk.

  Args:
    inputs: a chunk, C at least 1.
    taps: the same in every call.
    cache: the cache of the inputs so far.
    lengths: see `causal_attention_cached`; outputs of the padding are meaningless.

  Returns:
    y, in the dtype of `inputs`, and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, lengths are outside of 0 .. C.
  """
  arrays.check_not_empty(inputs=inputs)
  arrays.check_dtype(inputs.dtype, **{"cache.inputs": cache.inputs})
  inputs, lengths_b = mask_padding(inputs, lengths)
  chunk = inputs.shape[1]
  num_taps = len(taps)
  if chunk == 1:
    # The ring is written before it is read, as XLA would copy it otherwise.
    ring_bld = _write(cache, inputs, lengths_b)
    y_be = _newest(ring_bld, cache.length, taps)
    y_b1e = y_be[:, None].astype(inputs.dtype)
    return y_b1e, ConvolutionCache(ring_bld, cache.length + lengths_b)
  slots_bl = (cache.length[:, None] + _range(1 - num_taps, 0)[None]) % num_taps
  past_bld = take_rows(cache.inputs, slots_bl)
  y_bte = causal_convolution(
    jnp.concatenate([past_bld, inputs], axis=1),
    jnp.pad(taps, [(0, chunk - 1)] + [(0, 0)] * (taps.ndim - 1)),
  )
  ring_bld = _write(cache, inputs, lengths_b)
  cache = ConvolutionCache(ring_bld, cache.length + lengths_b)
  return y_bte[:, num_taps - 1 :], cache


def _range(*bounds):
  return jnp.arange(*bounds, dtype=jnp.int32)


def _write(cache, inputs, lengths_b):
  """The ring with the first `lengths_b` of `inputs`, for each row."""
  ring_bld = cache.inputs
  length_b = cache.length
  num_taps = ring_bld.shape[1]
  chunk = inputs.shape[1]
  if chunk == 1:
    # In place if the cache is donated. A row without an input gets a zero in the slot of
    # the input L positions before, which is not read again.
    write = jax.vmap(lambda x, slot, new: x.at[slot].set(new))
    return write(ring_bld, length_b % num_taps, inputs[:, 0])
  last_b = length_b + lengths_b - 1
  ago_bl = (last_b[:, None] - _range(num_taps)[None]) % num_taps
  index_bl = lengths_b[:, None] - 1 - ago_bl
  new_bld = jnp.take_along_axis(inputs, index_bl.clip(0, chunk - 1)[:, :, None], axis=1)
  return jnp.where((index_bl >= 0)[:, :, None], new_bld, ring_bld)


def _newest(ring_bld, last_b, taps):
  """The output at position `last_b` of each row, [B, E]."""
  # The slot of each tap; also the tap of each slot, as the map is its own inverse.
  index_bl = (last_b[:, None] - _range(len(taps))[None]) % len(taps)
  if taps.ndim == 1:
    return sum_products(taps[index_bl][..., None], ring_bld)
  if taps.ndim == 2:
    return sum_products(ring_bld, taps[None], index_bl)
  dtype = sum_dtype(ring_bld, taps)
  x_bld = take_rows(ring_bld, index_bl)
  return jnp.einsum("bld,lde->be", x_bld.astype(dtype), taps.astype(dtype))
