"""Causal convolution over time, what every Extractor mixes tokens with.

Letters: B batch, T position, L tap, D feature read, E feature written.

Source: Chen 2023, arXiv:2308.07661, Sec. 5, Eqs. 23, 26, 28 and 29.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def causal_convolution(
    inputs: jax.Array, filters: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  """Adds up the inputs so far, each times the tap of its distance.

    y[b, t] = sum over s <= t of inputs[b, s] * filters[t - s]

  A tap is a number (ME, Eq. 29), a vector multiplied element by element (WE and
  HE, Eqs. 26 and 28) or a matrix on the right of a row vector (SHE, Eq. 23). For
  the taps 2 and 3, the inputs 1, 10 become 2, 23. Inputs shorter than the filter
  use its first taps.

  Sums are carried in float32, in float64 where an argument has it. All
  implementations are this one function, values and gradients, up to rounding:

  - "scan", the sum over the lags as it stands and the reference, O(T**2): the least
    memory, and the only one where a later inf or nan leaves the past alone.
  - "conv", XLA's convolution, O(T**2); on a CPU many times slower within a loop, such
    as that over the layers of a model.
  - "toeplitz", products with a matrix M[t, s] = filters[t - s], O(T**2), its memory
    too; for matrix taps with that of the inputs.
  - "fft", products of Fourier transforms, O(T log T). XLA computes an FFT of a batch
    that is spread over devices on each of them.
  - "dft", the same with the transforms as matrix products in two steps, O(T**1.5).

  In the last two a position sees rounding errors of later ones, about 1e-7 of them,
  and for that reason all their products have float32's full precision. Products of
  the others have that of `jax.default_matmul_precision`, which matters where a
  platform has a faster float32 than that of IEEE.

  Args:
    inputs: [B, T, D], floats.
    filters: [L], [L, D] or [L, D, E], floats; L at least 1 and at least T.
    implementation: one of the names above, or None: `choose_implementation`.

  Returns:
    [B, T, D], with matrix taps [B, T, E], in the dtype of `inputs`.

  Raises:
    ValueError: an array has the wrong rank, width or kind of dtype, the inputs are
      longer than the filter, or the implementation is unknown.
  """
  inputs, filters = jnp.asarray(inputs), jnp.asarray(filters)
  _check(inputs, filters)
  batch, length, width = inputs.shape
  if implementation is None:
    implementation = choose_implementation(
        filters.ndim, batch, length, jax.default_backend(), jax.device_count())
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(f"implementation: expected one of {[*_IMPLEMENTATIONS]} or "
                     f"None, got {implementation!r}")
  shape = batch, length, filters.shape[2] if filters.ndim == 3 else width
  if 0 in shape or inputs.size == 0:
    return jnp.zeros(shape, inputs.dtype)
  dtype = jnp.float64 if jnp.float64 in (inputs.dtype, filters.dtype) else jnp.float32
  y_bte = _IMPLEMENTATIONS[implementation](
      inputs.astype(dtype), filters[:length].astype(dtype))
  return y_bte.astype(inputs.dtype)


# By benchmarks/causal_convolution.py on a CPU, see results/causal_convolution.json, the
# fastest in training, but for "conv", which it measures outside of a loop. The first row
# that fits counts: rank of the filters, B and T up to these, implementation. D matters
# little: work grows with D or D**2 in all of them.
_FASTEST = (
    (1, math.inf, 256, "toeplitz"),
    (1, math.inf, math.inf, "fft"),
    (2, 4, 16, "scan"),
    (2, 4, math.inf, "fft"),
    (2, math.inf, 32, "toeplitz"),
    (2, math.inf, math.inf, "fft"),
    (3, 4, 16, "scan"),
    (3, math.inf, 2048, "dft"),
    (3, math.inf, math.inf, "fft"),
)


def choose_implementation(
    rank: int, batch: int, length: int, platform: str, devices: int
) -> str:
  """The implementation that None stands for in `causal_convolution`.

  Args:
    rank: of the filters.
    batch: B.
    length: T.
    platform: of `jax.default_backend`.
    devices: of `jax.device_count`.

  Returns:
    Its name.
  """
  name = next(
      name for of_rank, max_batch, max_length, name in _FASTEST
      if rank == of_rank and batch <= max_batch and length <= max_length)
  # Nothing but a CPU as one device has been measured. But an accelerator would wait at
  # each small step of a loop, and several devices, a batch being spread over them as a
  # rule, would each compute the FFTs of all.
  if (name == "scan" and platform != "cpu") or (name == "fft" and devices > 1):
    return "dft"
  return name


def _check(inputs, filters):
  if inputs.ndim != 3 or not jnp.issubdtype(inputs.dtype, jnp.floating):
    raise ValueError("inputs: expected floats [B, T, D], got "
                     f"{inputs.dtype} {inputs.shape}")
  if filters.ndim not in (1, 2, 3) or not jnp.issubdtype(filters.dtype, jnp.floating):
    raise ValueError("filters: expected floats [L], [L, D] or [L, D, E], got "
                     f"{filters.dtype} {filters.shape}")
  if filters.ndim > 1 and filters.shape[1] != inputs.shape[2]:
    raise ValueError(f"filters: expected a width of {inputs.shape[2]}, that of the "
                     f"inputs, got shape {filters.shape}")
  if filters.shape[0] == 0:
    raise ValueError(f"filters: expected at least one tap, got shape {filters.shape}")
  if inputs.shape[1] > filters.shape[0]:
    raise ValueError(f"inputs: expected at most {filters.shape[0]} positions, one for "
                     f"each tap, got {inputs.shape[1]}")


def _lead(x, ndim):
  """`x` with axes of 1 in front."""
  return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _scan(x_btd, w):
  length = x_btd.shape[1]
  padded = jnp.pad(x_btd, ((0, 0), (length, 0), (0, 0)))

  # Recomputed in the gradient, where all shifted inputs would be kept otherwise.
  @jax.checkpoint
  def body(y_bte, lag_tap):
    lag, tap = lag_tap
    past_btd = lax.dynamic_slice_in_dim(padded, length - lag, length, axis=1)
    if tap.ndim == 2:
      return y_bte + jnp.einsum("btd,de->bte", past_btd, tap), None
    return y_bte + past_btd * _lead(tap, 3), None

  shape = *x_btd.shape[:2], w.shape[-1] if w.ndim == 3 else x_btd.shape[2]
  y_bte, _ = lax.scan(body, jnp.zeros(shape, w.dtype), (jnp.arange(length), w))
  return y_bte


def _conv(x_btd, w):
  batch, length, width = x_btd.shape
  convolve = functools.partial(
      lax.conv_general_dilated, window_strides=(1,), padding=[(length - 1, 0)],
      dimension_numbers=("NWC", "WIO", "NWC"))
  w = w[::-1]
  if w.ndim == 3:
    return convolve(x_btd, w)
  if w.ndim == 2:
    return convolve(x_btd, w[:, None], feature_group_count=width)
  x_ct1 = jnp.moveaxis(x_btd, 2, 1).reshape(batch * width, length, 1)
  y_bdt = convolve(x_ct1, w[:, None, None]).reshape(batch, width, length)
  return jnp.moveaxis(y_bdt, 1, 2)


def _toeplitz_matrix(x, axis):
  """[.., T, ..] to [.., T, T, ..], M[t, s] = x[t - s] and 0 for s > t; no gather."""
  x = jnp.moveaxis(x, axis, -1)
  length = x.shape[-1]
  # Rows of 2 T - 1 cut from a run of period 2 T begin one earlier every time.
  period = jnp.concatenate(
      [x[..., :1], jnp.zeros(x.shape[:-1] + (length,), x.dtype), x[..., :0:-1]], axis=-1)
  run = jnp.tile(period, (1,) * (x.ndim - 1) + (length,))
  run = run[..., :length * (2 * length - 1)]
  matrix = run.reshape(*x.shape, 2 * length - 1)[..., :length]
  return jnp.moveaxis(matrix, (-2, -1), (axis, axis + 1))


def _toeplitz(x_btd, w):
  if w.ndim == 1:
    return jnp.einsum("ts,bsd->btd", _toeplitz_matrix(w, 0), x_btd)
  if w.ndim == 2:
    m_dts = _toeplitz_matrix(w.T, 1)
    return jnp.einsum("dts,bsd->btd", m_dts, x_btd)
  # Of the inputs: that of the taps is larger wherever B < D.
  return jnp.einsum("btld,lde->bte", _toeplitz_matrix(x_btd, 1), w)


# Of the transforms' products: see `causal_convolution`.
_einsum = functools.partial(jnp.einsum, precision="highest")


def _fft(x_btd, w):
  length = x_btd.shape[1]
  # Half of 2 * 2**i, 2 * 3 * 2**i or 2 * 5 * 2**i: a size that FFTs are fast at.
  half = min(k << (-(-length // (2 * k)) - 1).bit_length() for k in (1, 3, 5))
  add = 2 * half - length
  x_bdt = jnp.pad(jnp.moveaxis(x_btd, 1, 2), ((0, 0), (0, 0), (0, add)))
  w_t = jnp.pad(jnp.moveaxis(w, 0, -1), [(0, 0)] * (w.ndim - 1) + [(0, add)])

  def multiply(x, w):
    if w.ndim < 3:
      return x * _lead(w, 3)
    product = functools.partial(_einsum, "bdf,def->bef")
    # By real products, as complex ones are slow on CPU.
    return lax.complex(
        product(x.real, w.real) - product(x.imag, w.imag),
        product(x.real, w.imag) + product(x.imag, w.real))

  # With its beginning p (T sums, wanted) and its end q the convolution is p + q
  # where the end is added to the beginning, and p - q where it is taken off. The
  # second sum is a product of polynomials modulo z**(2 half) + 1, that is of complex
  # ones modulo z**half - i. Both together cost as much as one of zero-padded arrays,
  # with half of the memory.
  p_plus_q = jnp.fft.irfft(multiply(jnp.fft.rfft(x_bdt), jnp.fft.rfft(w_t)), 2 * half)
  root = np.exp(0.5j * np.pi / half * np.arange(half))

  def fold(x):
    z = lax.complex(x[..., :half], x[..., half:])
    return jnp.fft.fft(z * _lead(jnp.asarray(root, z.dtype), z.ndim))

  z = jnp.fft.ifft(multiply(fold(x_bdt), fold(w_t)))
  z *= _lead(jnp.asarray(root.conj(), z.dtype), 3)
  p_minus_q = jnp.concatenate([z.real, z.imag], axis=-1)
  y_bet = (p_plus_q + p_minus_q)[..., :length] / 2
  return jnp.moveaxis(y_bet, 2, 1)


def _dft_matrices(length, dtype):
  """Two steps of a discrete Fourier transform as matrices.

  The transform of T' >= `length` positions at the T' frequencies (f + 1/2) / (2 T'),
  of which no two are conjugates, f = k + 2 S j: T' = R * S, position R u + r,
  k and u < S, j and r < R. That many tell the convolution of two arrays of T'.

  Returns:
    [k, c, u] and [k, j, c, c', r], c and c' the real and the imaginary part.
  """
  # Measured up to 4096; beyond that the work 2 S + 4 R is least for R = sqrt(T / 2), and
  # little more for a power of two that is at least half of it.
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
  second = np.stack(
      [np.stack([cos, sin], axis=2), np.stack([-sin, cos], axis=2)], axis=2)
  return jnp.asarray(first, dtype), jnp.asarray(second, dtype)


def _dft(x_btd, w):
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
    rows = jnp.stack([jnp.concatenate([re, -im], axis=2),
                      jnp.concatenate([im, re], axis=2)], axis=1)
    y_fcbe = _einsum(
        "fcbd,fde->fcbe", rows, w_fc.reshape(w_fc.shape[0], -1, w.shape[2]))
  else:
    w_re, w_im = (w_fc[:, c].reshape(-1, 1, w.size // w.shape[0]) for c in (0, 1))
    y_fcbe = jnp.stack([re * w_re - im * w_im, re * w_im + im * w_re], axis=1)
  # But for the factor T', a transform and its transpose cancel each other.
  y_kjcm = y_fcbe.reshape(s_size, r_size, 2, -1)
  y_kerm = _einsum("kjcer,kjcm->kerm", second, y_kjcm)
  y_urm = _einsum("kcu,kcrm->urm", first, y_kerm) / (s_size * r_size)
  y_tbe = y_urm.reshape(s_size * r_size, *y_fcbe.shape[2:])[:length]
  return jnp.moveaxis(y_tbe, 0, 1)


_IMPLEMENTATIONS = {
    "scan": _scan, "conv": _conv, "toeplitz": _toeplitz, "fft": _fft, "dft": _dft}
