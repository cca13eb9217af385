"""The mixer of Mamba-2. B batch, T position, D width, H head, P feature of a head, N state."""

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers.common import check_settings, linear, symmetric_uniform
from dpjax.layers.mixer import Context, Mixer
from dpjax.ops import norms


class Mamba2Cache(NamedTuple):
  """The cache of `Mamba2`, of a size that does not depend on the length.

  Attributes:
    convolution: the last k - 1 inputs of the short convolution, [B, k - 1, I + 2 N].
    state: [B, H, P, N], float32.
  """

  convolution: jax.Array
  state: jax.Array


class Mamba2(Mixer):
  """A selective state space behind a short convolution, gated and normalised.

    [z, u, dt] = x W_in                     z [I], u [I + 2 N], dt [H];  I = expand D, P = I / H
    [v, b, c]  = silu(short_convolution(u, taps) + bias)
    s_t = exp(d_t a) s_{t-1} + d_t v_t b_t^T     d = softplus(dt + dt_bias),  a = -exp(A_log)
    y_t = s_t c_t + skip v_t
    out = (g / sqrt(mean(g**2) + 1e-5) gain) W_out          g = y silu(z)

  with one group of b and c for all heads. It has D (3 I + 2 N + H) + (k + 1) (I + 2 N) + 3 H + I
  parameters, costs O(T), and generates with a cache of fixed size.

  Attributes:
    state_width: N.
    head_width: P; it divides I.
    expand: I / D.
    num_taps: k.

  For the other attributes see `Mixer`; steps, states and the norm are float32.

  Source: Dao and Gu 2024, arXiv:2405.21060; initial values: state-spaces/mamba.
  """

  separates_documents: ClassVar[bool] = True

  state_width: int = 128
  head_width: int = 64
  expand: int = 2
  num_taps: int = 4

  def __post_init__(self):
    check_settings(self, sizes=("state_width", "head_width", "expand", "num_taps"))
    super().__post_init__()

  @nn.compact
  def mix(self, inputs: jax.Array, context: Context, cache: Mamba2Cache | None):
    """See `Mixer`."""
    width = inputs.shape[-1]
    inner, heads = self._sizes(width)
    mixed = inner + 2 * self.state_width
    joined = linear(self, inner + mixed + heads, "in")(inputs)
    z_bti, u_btf, dt_bth = jnp.split(joined, [inner, inner + mixed], axis=-1)
    past, state = (None, None) if cache is None else cache
    u_btf, past = self._convolve(u_btf, context, past)
    y_bti, state = self._scan_states(u_btf, dt_bth, context, state)
    gain = self.param("gain", nn.initializers.ones, (inner,), jnp.float32)
    g_bti = y_bti * nn.silu(z_bti.astype(jnp.float32))
    out = linear(self, width, "out", scale=self.out_scale)
    y_btd = out(norms.rms_norm(g_bti, gain).astype(self.dtype))
    return y_btd, None if cache is None else Mamba2Cache(past, state)

  def _convolve(self, u_btf: jax.Array, context: Context, past: jax.Array | None):
    """The short convolution, its bias and its silu; and the next past."""
    uniform = symmetric_uniform(self.num_taps**-0.5)
    shape = self.num_taps, u_btf.shape[-1]
    taps = self.param("taps", uniform, shape, jnp.float32).astype(self.dtype)
    bias = self.param("taps_bias", uniform, shape[1:], jnp.float32).astype(self.dtype)
    if past is None:
      u_btf = ops.short_convolution(u_btf, taps, document_starts=context.document_starts)
    else:
      u_btf, past = ops.short_convolution_cached(u_btf, taps, past, lengths=context.lengths)
    return nn.silu(u_btf + bias[None, None]), past

  def _scan_states(
    self, u_btf: jax.Array, dt_bth: jax.Array, context: Context, state: jax.Array | None
  ):
    """y_t for all t, [B, T, I], float32; and the next state."""
    batch, length, heads = dt_bth.shape
    inner = heads * self.head_width
    v_bti, b_btn, c_btn = jnp.split(u_btf, [inner, inner + self.state_width], axis=-1)
    v_bthp = v_bti.reshape(batch, length, heads, self.head_width)
    dt_bias = self.param("dt_bias", _dt_bias, (heads,), jnp.float32)
    a_log = self.param("a_log", _a_log, (heads,), jnp.float32)
    skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
    d_bth = nn.softplus(dt_bth.astype(jnp.float32) + dt_bias[None, None])
    space = v_bthp, d_bth, -jnp.exp(a_log), b_btn[:, :, None], c_btn[:, :, None]
    if state is None:
      y_bthp = ops.selective_state_space(*space, document_starts=context.document_starts)
    else:
      y_bthp, state = ops.selective_state_space_cached(*space, state, lengths=context.lengths)
    y_bthp = y_bthp.astype(jnp.float32) + skip[None, None, :, None] * v_bthp.astype(jnp.float32)
    return y_bthp.reshape(batch, length, inner), state

  def init_cache(self, batch: int, width: int) -> Mamba2Cache:
    """See `Mixer`."""
    inner, heads = self._sizes(width)
    past = ops.init_short_convolution_cache(
      batch, self.num_taps, inner + 2 * self.state_width, self.dtype
    )
    state = ops.init_selective_state(batch, heads, self.head_width, self.state_width)
    return Mamba2Cache(past, state)

  def _sizes(self, width: int) -> tuple[int, int]:
    """I and H."""
    inner = self.expand * width
    if inner % self.head_width:
      raise ValueError(
        f"head_width: expected a divisor of expand * D = {inner}, got {self.head_width}"
      )
    return inner, inner // self.head_width


def _dt_bias(key, shape, dtype):
  """The inverse of softplus at exp(U(log 0.001, log 0.1)), so that steps begin there."""
  low, high = math.log(1e-3), math.log(0.1)
  step = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, dtype, low, high)), 1e-4)
  return step + jnp.log(-jnp.expm1(-step))


def _a_log(key, shape, dtype):
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
