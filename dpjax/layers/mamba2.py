"""The mixer of Mamba-2. B batch, T position, D width, H head, P feature of a head, N state."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.common import linear, symmetric_uniform
from dpjax.ops import norms


class Mamba2Cache(NamedTuple):
  """The cache of `Mamba2`, of a size that does not depend on the length.

  Attributes:
    convolution: the last k - 1 inputs of the short convolution, [B, k - 1, I + 2 N].
    state: [B, H, P, N], float32.
  """

  convolution: jax.Array
  state: jax.Array


class Mamba2(nn.Module):
  """A selective state space behind a short convolution, gated and normalised.

    [z, u, dt] = x W_in                     z [I], u [I + 2 N], dt [H];  I = expand D, P = I / H
    [v, b, c]  = silu(short_convolution(u, taps) + bias)
    s_t = exp(d_t a) s_{t-1} + d_t v_t b_t^T     d = softplus(dt + dt_bias),  a = -exp(A_log)
    y_t = s_t c_t + skip v_t
    out = (g / sqrt(mean(g**2) + 1e-5) gain) W_out          g = y silu(z)

  with one group of b and c for all heads. It has D (3 I + 2 N + H) + (k + 1) (I + 2 N) + 3 H + I
  parameters, costs O(T), and generates with a cache of fixed size.

  Attributes:
    max_length: the longest T.
    state_width: N.
    head_width: P; it divides I.
    expand: I / D.
    num_taps: k.
    init_std: standard deviation of the matrices, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters, steps, states and the norm are float32.
    out_scale: a factor of the output matrix's initial values.

  Source: Dao and Gu 2024, arXiv:2405.21060; initial values: state-spaces/mamba.
  """

  max_length: int
  state_width: int = 128
  head_width: int = 64
  expand: int = 2
  num_taps: int = 4
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    sizes = "max_length", "state_width", "head_width", "expand", "num_taps"
    mixer.check_settings(self, sizes=sizes)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: Mamba2Cache | None = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    inputs = mixer.check_input(
      inputs, max_length=self.max_length, document_starts=document_starts, cache=cache
    )
    width = inputs.shape[-1]
    inner, heads = self._sizes(width)
    mixed = inner + 2 * self.state_width
    joined = linear(self, inner + mixed + heads, "in")(inputs)
    z_bti, u_btf, dt_bth = jnp.split(joined, [inner, inner + mixed], axis=-1)
    uniform = symmetric_uniform(self.num_taps**-0.5)
    taps = self.param("taps", uniform, (self.num_taps, mixed), jnp.float32).astype(self.dtype)
    bias = self.param("taps_bias", uniform, (mixed,), jnp.float32).astype(self.dtype)
    if cache is None:
      u_btf = ops.short_convolution(u_btf, taps, document_starts=document_starts)
    else:
      u_btf, past = ops.short_convolution_cached(u_btf, taps, cache.convolution, lengths=lengths)
    v_bti, b_btn, c_btn = jnp.split(
      nn.silu(u_btf + bias[None, None]), [inner, mixed - self.state_width], axis=-1
    )
    v_bthp = v_bti.reshape(*v_bti.shape[:2], heads, self.head_width)
    dt_bias = self.param("dt_bias", _dt_bias, (heads,), jnp.float32)
    a_log = self.param("a_log", _a_log, (heads,), jnp.float32)
    skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
    gain = self.param("gain", nn.initializers.ones, (inner,), jnp.float32)
    d_bth = nn.softplus(dt_bth.astype(jnp.float32) + dt_bias[None, None])
    space = v_bthp, d_bth, -jnp.exp(a_log), b_btn[:, :, None], c_btn[:, :, None]
    if cache is None:
      y_bthp = ops.selective_state_space(*space, document_starts=document_starts)
    else:
      y_bthp, state = ops.selective_state_space_cached(*space, cache.state, lengths=lengths)
      cache = Mamba2Cache(past, state)
    y_bthp = y_bthp.astype(jnp.float32) + skip[None, None, :, None] * v_bthp.astype(jnp.float32)
    g_bti = y_bthp.reshape(z_bti.shape) * nn.silu(z_bti.astype(jnp.float32))
    out = linear(self, width, "out", scale=self.out_scale)
    y_btd = out(norms.rms_norm(g_bti, gain).astype(self.dtype))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> Mamba2Cache:
    """See `dpjax.layers.mixer.Mixer`."""
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
