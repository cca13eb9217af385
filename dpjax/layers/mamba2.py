"""The mixer of Mamba-2. B batch, T position, D width, H head, P feature of a head, N state."""

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from dpjax import ops
from dpjax.layers.common import check_settings, linear, symmetric_uniform
from dpjax.layers.mixer import Cache, Context, Mixer
from dpjax.ops import norms


class SelectiveInputs(NamedTuple):
  """What the states of `Mamba2` are computed from.

  Attributes:
    x: [B, T, H, P].
    dt: [B, T, H], float32.
    a: [H], float32.
    b: [B, T, 1, N]: one for all heads.
    c: [B, T, 1, N].
  """

  x: jax.Array
  dt: jax.Array
  a: jax.Array
  b: jax.Array
  c: jax.Array


class Mamba2Cache(NamedTuple):
  """The cache of `Mamba2`, of a size that does not depend on the length.

  Attributes:
    convolution: the last k - 1 inputs of the short convolution, [B, k - 1, I + 2 N].
    state: h, [B, H, P, N], float32.
  """

  convolution: jax.Array
  state: Cache


class Mamba2(Mixer):
  """A selective state space behind a short convolution, gated and normalized.

    [z, xbc, dt] = u W_in                     u [D] the layer's input, z [I], xbc [I + 2 N], dt [H]
    [x, b, c]    = silu(convolve(xbc) + bias)               over k positions; x [I], b [N], c [N]
    dt           = softplus(dt + dt_bias)
    a            = -exp(A_log)
    h_t          = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T     for each head: h [P, N], x [P]
    y_t          = h_t c_t + skip x_t
    out          = rms_norm(y silu(z)) W_out                with a gain, epsilon 1e-5

  with I = expand D = H P, and one b and c for all heads. The paper writes Delta for dt, capital
  letters for a, b and c, and D for skip. The layer has
  D (3 I + 2 N + H) + (k + 1) (I + 2 N) + 3 H + I parameters, costs O(T), and generates with a
  cache of fixed size.

  Attributes:
    state_width: N, the features of b and c.
    head_width: P, the features of x in each head, a divisor of I.
    expand: I / D, the width within the layer over that of the model.
    num_taps: k, the positions that the convolution reads.

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

  def check_width(self, width: int) -> None:
    """See `Mixer`."""
    inner, heads = self._sizes(width)
    num_columns = 3 * inner + 2 * self.state_width + heads
    # XLA divides by zero where an axis is longer.
    if num_columns >= 2**31:
      expected = "expected an input matrix W_in of fewer than 2**31 columns"
      raise ValueError(f"state_width: {expected}, got {num_columns}")

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: Mamba2Cache | None
  ) -> tuple[jax.Array, Mamba2Cache | None]:
    """See `Mixer`."""
    batch, length, width = inputs.shape
    inner, heads = self._sizes(width)
    mixed = inner + 2 * self.state_width
    uniform = symmetric_uniform(self.num_taps**-0.5)
    taps = self.param("taps", uniform, (self.num_taps, mixed), jnp.float32).astype(self.dtype)
    taps_bias = self.param("taps_bias", uniform, (mixed,), jnp.float32).astype(self.dtype)
    dt_bias = self.param("dt_bias", draw_dt_bias, (heads,), jnp.float32)
    a_log = self.param("a_log", _a_log, (heads,), jnp.float32)
    skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
    gain = self.param("gain", nn.initializers.ones, (inner,), jnp.float32)

    joined = linear(self, inner + mixed + heads, "in")(inputs)
    z_bti, xbc_btf, dt_bth = jnp.split(joined, [inner, inner + mixed], axis=-1)
    if cache is None:
      xbc_btf = ops.short_convolution(xbc_btf, taps, document_starts=context.document_starts)
    else:
      xbc_btf, convolution = ops.short_convolution_cached(
        xbc_btf, taps, cache.convolution, lengths=context.lengths
      )
      cache = cache._replace(convolution=convolution)
    # The gradient would keep a second array of these features.
    xbc_btf = jax.checkpoint(nn.silu)(xbc_btf + taps_bias[None, None])
    x_bti, b_btn, c_btn = jnp.split(xbc_btf, [inner, inner + self.state_width], axis=-1)
    x_bthp = x_bti.reshape(batch, length, heads, self.head_width)
    b_btgn = b_btn[:, :, None]  # one group of heads
    c_btgn = c_btn[:, :, None]
    dt_bth = nn.softplus(dt_bth.astype(jnp.float32) + dt_bias[None, None])
    a = -jnp.exp(a_log)
    selective = SelectiveInputs(x_bthp, dt_bth, a, b_btgn, c_btgn)
    before = None if cache is None else cache.state
    y_bthp, state = self.read_states(inputs, selective, context, before)
    if cache is not None:
      cache = cache._replace(state=state)

    @jax.checkpoint  # The gradient would keep many arrays of I features.
    def gate(y_bthp, x_bthp, z_bti, skip, gain):
      y_bthp = y_bthp.astype(jnp.float32) + skip[None, None, :, None] * x_bthp.astype(jnp.float32)
      y_bti = y_bthp.reshape(z_bti.shape) * nn.silu(z_bti.astype(jnp.float32))
      return norms.rms_norm(y_bti, gain).astype(self.dtype)

    out = linear(self, width, "out", scale=self.out_scale)
    return out(gate(y_bthp, x_bthp, z_bti, skip, gain)), cache

  def read_states(
    self, inputs: jax.Array, selective: SelectiveInputs, context: Context, state: Cache
  ) -> tuple[jax.Array, Cache]:
    """Computes h_t c_t, [B, T, H, P], and the state after them if there is one before.

    A subclass with other states writes it, and `init_state`.

    Args:
      inputs: u, [B, T, D].
      selective: what the states are computed from.
      context: see `Context`.
      state: None for whole rows, or from `init_state` or the previous call.
    """
    if state is None:
      y_bthp = ops.selective_state_space(*selective, document_starts=context.document_starts)
      return y_bthp, None
    return ops.selective_state_space_cached(*selective, state, lengths=context.lengths)

  def init_state(self, batch: int, num_heads: int) -> Cache:
    """The state before the first position."""
    return ops.init_selective_state(batch, num_heads, self.head_width, self.state_width)

  def init_cache(self, batch: int, width: int) -> Mamba2Cache:
    """See `Mixer`."""
    inner, heads = self._sizes(width)
    past = ops.init_short_convolution_cache(
      batch, self.num_taps, inner + 2 * self.state_width, self.dtype
    )
    return Mamba2Cache(past, self.init_state(batch, heads))

  def _sizes(self, width: int) -> tuple[int, int]:
    """I and H."""
    inner = self.expand * width
    if inner % self.head_width:
      raise ValueError(
        f"head_width: expected a divisor of expand * D = {inner}, got {self.head_width}"
      )
    return inner, inner // self.head_width


def draw_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
  """The inverse of softplus at exp(U(log 0.001, log 0.1)), so that steps begin there."""
  log_step = jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1))
  step = jnp.maximum(jnp.exp(log_step), 1e-4)
  return step + jnp.log(-jnp.expm1(-step))


def _a_log(key, shape, dtype):
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
