"""Linear attention with the layers of flash-linear-attention around it.

B batch, T position, D width, H head, K feature of a key, V feature of a value, R rank.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from dpjax import ops
from dpjax.layers import Context, Mixer, check_settings, linear, symmetric_uniform
from dpjax.layers.mamba2 import draw_dt_bias
from dpjax.layers.mixer import features_per_head
from dpjax.ops import arrays, norms
from dpjax_relatives import recurrences


class LinearAttentionCache(NamedTuple):
  """The cache of linear attention, of a size that does not depend on the length.

  Attributes:
    convolution: the last inputs of the short convolution, [B, num_taps - 1, H (2 K + V)].
    state: S, [B, H, K, V], float32.
  """

  convolution: jax.Array
  state: jax.Array


class LinearAttention(Mixer):
  """The base class of mixers that read a matrix S_t, which each position decays and writes to.

    [q, k, v] = silu(convolve(x W_in))              q [H, K], k [H, K], v [H, V]
    S_t       = a function of S_{t-1}, k_t, v_t and gates(x_t)           for each head, [K, V]
    y_t       = S_t^T q_t / sqrt(K)
    out       = (rms_norm(y) * output_gate(x)) W_out               with a gain, epsilon 1e-5

  Each subclass has its own S, gates and output gate. In those with the delta rule, q and k are
  divided by their norms. In those with `a_log`, the rate exp(a_log) starts at U(0, 16), in `KDA` at
  U(1, 16), and the step softplus(dt_bias) log-uniformly between 0.001 and 0.1. Gates, states and
  the norm are float32. A mixer costs O(T) and generates with a cache of fixed size. There is no
  dropout.

  Attributes:
    num_heads: H, a divisor of D unless both widths are set.
    key_width: K, the features of a key in each head; None: D / H.
    value_width: V, the features of a value in each head; None: D / H.
    num_taps: the positions that the convolution reads; 0: no convolution.
    implementation: `reference` runs the recurrence position by position, `chunked` by chunks, and
      `mosaic_gpu` as a kernel of Hopper GPUs, in bfloat16 and for K and V of 64 or 128; None: the
      kernel where it can run, else chunks.

  For the other attributes see `dpjax.layers.Mixer`.

  Raises:
    UserError: `jla` is not installed.
    ValueError: a setting is out of range; or, at a call, `jla` has no such kernel for the device,
      the dtype or the shapes.
  """

  separates_documents: ClassVar[bool] = True
  # The name of the recurrence in `jla`, and whether it is a delta rule.
  recurrence: ClassVar[str]
  has_delta_rule: ClassVar[bool] = True
  # exp(a_log) starts at U(least_rate, 16).
  least_rate: ClassVar[float] = 0.0

  num_heads: int = 4
  key_width: int | None = None
  value_width: int | None = None
  num_taps: int = 4
  implementation: str | None = None

  def __post_init__(self):
    """Checks that the settings are in range, and that `jla` is installed."""
    check_settings(self, sizes=("num_heads",), implementations=recurrences.IMPLEMENTATIONS)
    arrays.integer("num_taps", self.num_taps, 0)
    for name in ("key_width", "value_width"):
      if getattr(self, name) is not None:
        arrays.integer(name, getattr(self, name))
    recurrences.check_installed(self)
    super().__post_init__()

  def check_width(self, width: int) -> None:
    """See `dpjax.layers.Mixer`."""
    self.sizes(width)

  def sizes(self, width: int) -> tuple[int, int]:
    """K and V; a `ValueError` if H does not divide D, and one of them is D / H."""
    keys = self.key_width or features_per_head(width, self.num_heads)
    values = self.value_width or features_per_head(width, self.num_heads)
    return keys, values

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: LinearAttentionCache | None
  ) -> tuple[jax.Array, LinearAttentionCache | None]:
    """See `dpjax.layers.Mixer`."""
    batch, length, width = inputs.shape
    keys, values = self.sizes(width)
    joined_btf = linear(self, self.num_heads * (2 * keys + values), "in")(inputs)
    if self.num_taps:
      joined_btf, cache = self._convolve(joined_btf, context, cache)
    if self.num_taps or self.has_delta_rule:
      joined_btf = nn.silu(joined_btf.astype(jnp.float32))
    ends = [self.num_heads * keys, 2 * self.num_heads * keys]
    q_btf, k_btf, v_btf = jnp.split(joined_btf, ends, axis=-1)
    q_bthk = q_btf.reshape(batch, length, self.num_heads, keys)
    k_bthk = k_btf.reshape(batch, length, self.num_heads, keys)
    v_bthv = v_btf.reshape(batch, length, self.num_heads, values)
    if self.has_delta_rule:
      q_bthk = _unit(q_bthk)
      k_bthk = _unit(k_bthk)
    vectors = {
      "q": q_bthk.astype(self.dtype),
      "k": k_bthk.astype(self.dtype),
      "v": v_bthv.astype(self.dtype),
    }
    y_bthv, state = recurrences.run(
      self.recurrence,
      {**vectors, **self.gates(inputs)},
      context,
      None if cache is None else cache.state,
      implementation=self.implementation,
    )
    if cache is not None:
      cache = cache._replace(state=state)
    gain = self.param("gain", nn.initializers.ones, (values,), jnp.float32)
    y_btf = norms.rms_norm(y_bthv, gain).reshape(batch, length, self.num_heads * values)
    gate_btf = self.output_gate(inputs)
    if gate_btf is not None:
      y_btf = y_btf * gate_btf
    out = linear(self, width, "out", scale=self.out_scale)
    return out(y_btf.astype(self.dtype)), cache

  def _convolve(
    self, joined_btf: jax.Array, context: Context, cache: LinearAttentionCache | None
  ) -> tuple[jax.Array, LinearAttentionCache | None]:
    uniform = symmetric_uniform(self.num_taps**-0.5)
    shape = (self.num_taps, joined_btf.shape[-1])
    taps = self.param("taps", uniform, shape, jnp.float32)
    joined_btf = joined_btf.astype(jnp.float32)
    if cache is None:
      convolved_btf = ops.short_convolution(
        joined_btf, taps, document_starts=context.document_starts
      )
      return convolved_btf, None
    convolved_btf, past = ops.short_convolution_cached(
      joined_btf, taps, cache.convolution, lengths=context.lengths
    )
    return convolved_btf, cache._replace(convolution=past)

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """The arrays besides q, k and v that S_t is computed from, in float32, by `jla`'s names."""
    raise NotImplementedError

  def output_gate(self, inputs: jax.Array) -> jax.Array | None:
    """The factors of the outputs, [B, T, H V] in float32: silu(x W_gate); None: no gate."""
    _, values = self.sizes(inputs.shape[-1])
    return nn.silu(self.project(inputs, self.num_heads * values, "gate"))

  def init_cache(self, batch: int, width: int) -> LinearAttentionCache:
    """See `dpjax.layers.Mixer`."""
    keys, values = self.sizes(width)
    features = self.num_heads * (2 * keys + values)
    past = ops.init_short_convolution_cache(batch, self.num_taps or 1, features, self.dtype)
    state = jnp.zeros((batch, self.num_heads, keys, values), jnp.float32)
    return LinearAttentionCache(past, state)

  def project(self, inputs: jax.Array, features: int, name: str) -> jax.Array:
    """A linear layer without a bias; float32."""
    return linear(self, features, name)(inputs).astype(jnp.float32)

  def project_by_rank(
    self, inputs: jax.Array, rank: int, features: int, name: str, *, use_bias: bool = False
  ) -> jax.Array:
    """Two linear layers, [D, R] and [R, features], perhaps with a bias after them; float32."""
    down = linear(self, rank, f"{name}_down")
    up = linear(self, features, f"{name}_up", use_bias=use_bias)
    return up(down(inputs)).astype(jnp.float32)

  def split_heads(self, x_btf: jax.Array) -> jax.Array:
    """[B, T, H F] -> [B, T, H, F]."""
    batch, length, features = x_btf.shape
    return x_btf.reshape(batch, length, self.num_heads, features // self.num_heads)

  def draw_a_log(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """The log of U(least_rate, 16), without -inf."""
    rate = jax.random.uniform(key, shape, dtype, self.least_rate, 16.0)
    return jnp.log(jnp.maximum(rate, 1e-4))

  def decay_by_head(self, inputs: jax.Array) -> jax.Array:
    """The log of a decay for each head, -exp(a_log) softplus(x W_decay + dt_bias), [B, T, H]."""
    step_bth = self.project(inputs, self.num_heads, "decay")
    dt_bias = self.param("dt_bias", draw_dt_bias, (self.num_heads,), jnp.float32)
    a_log = self.param("a_log", self.draw_a_log, (self.num_heads,), jnp.float32)
    return -jnp.exp(a_log)[None, None] * nn.softplus(step_bth + dt_bias[None, None])

  def decay_by_key(self, inputs: jax.Array) -> jax.Array:
    """The same for each feature of the keys, with a W_decay of rank V, [B, T, H, K]."""
    keys, values = self.sizes(inputs.shape[-1])
    step_btf = self.project_by_rank(inputs, values, self.num_heads * keys, "decay")
    dt_bias = self.param("dt_bias", draw_dt_bias, (self.num_heads, keys), jnp.float32)
    a_log = self.param("a_log", self.draw_a_log, (self.num_heads,), jnp.float32)
    step_bthk = nn.softplus(self.split_heads(step_btf) + dt_bias[None, None])
    return -jnp.exp(a_log)[None, None, :, None] * step_bthk


class DeltaNet(LinearAttention):
  """DeltaNet, the delta rule: each position moves S towards S^T k = v. It has no output gate.

    S_t  = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T            b_t = sigmoid(x_t W_beta), [H]
    y_t  = S_t^T q_t / sqrt(K)

  Around it are the layers of `LinearAttention`.

  Source: Yang et al. 2024, arXiv:2406.06484.
  """

  recurrence = "deltanet"

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """See `LinearAttention`."""
    return {"beta": nn.sigmoid(self.project(inputs, self.num_heads, "beta"))}

  def output_gate(self, inputs: jax.Array) -> None:
    """See `LinearAttention`."""
    return None


class GatedDeltaNet(LinearAttention):
  """Gated DeltaNet: the delta rule on a state that decays by head.

    S'_t = exp(g_t) S_{t-1}                     g_t = -exp(a_log) softplus(x_t W_decay + dt_bias)
    S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T                     b_t = sigmoid(x_t W_beta), [H]
    y_t  = S_t^T q_t / sqrt(K)

  with g_t [H], and the output gate silu(x W_gate). Around it are the layers of `LinearAttention`.

  Source: Yang et al. 2024, arXiv:2412.06464.
  """

  recurrence = "gated_deltanet"

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """See `LinearAttention`."""
    return {
      "g": self.decay_by_head(inputs),
      "beta": nn.sigmoid(self.project(inputs, self.num_heads, "beta")),
    }


class GatedDeltaNet2(LinearAttention):
  """Gated DeltaNet-2: the delta rule with gates for what it erases and for what it writes.

    S'_t = diag(exp(g_t)) S_{t-1}
    S_t  = S'_t + k_t (w_t * v_t - S'_t^T (b_t * k_t))^T
    y_t  = S_t^T q_t / sqrt(K)

  with g_t = -exp(a_log) softplus(x_t W_decay + dt_bias), [H, K], and W_decay of rank V; the gates
  b_t = sigmoid(x_t W_erase), [H, K], and w_t = sigmoid(x_t W_write), [H, V]; and the output gate
  silu(x W_gate). Around it are the layers of `LinearAttention`.

  Source: Hatamizadeh et al. 2026, arXiv:2605.22791.
  """

  recurrence = "gdn2"

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """See `LinearAttention`."""
    keys, values = self.sizes(inputs.shape[-1])
    erase = nn.sigmoid(self.project(inputs, self.num_heads * keys, "erase"))
    write = nn.sigmoid(self.project(inputs, self.num_heads * values, "write"))
    return {
      "g": self.decay_by_key(inputs),
      "b": self.split_heads(erase),
      "w": self.split_heads(write),
    }


class KDA(LinearAttention):
  """Kimi Delta Attention: the delta rule on a state that decays by feature of the keys.

    S'_t = diag(exp(g_t)) S_{t-1}               g_t = -exp(a_log) softplus(x_t W_decay + dt_bias)
    S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T                     b_t = sigmoid(x_t W_beta), [H]
    y_t  = S_t^T q_t / sqrt(K)

  with g_t [H, K] and a_log [H], and the output gate sigmoid(x W_gate + bias). W_decay and W_gate
  are products of two matrices, of rank V. exp(a_log) starts at U(1, 16). Around it are the layers
  of `LinearAttention`.

  Source: Kimi Team 2025, arXiv:2510.26692.
  """

  recurrence = "kda"
  least_rate = 1.0

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """See `LinearAttention`."""
    return {
      "g": self.decay_by_key(inputs),
      "beta": nn.sigmoid(self.project(inputs, self.num_heads, "beta")),
    }

  def output_gate(self, inputs: jax.Array) -> jax.Array:
    """See `LinearAttention`."""
    _, values = self.sizes(inputs.shape[-1])
    features = self.num_heads * values
    return nn.sigmoid(self.project_by_rank(inputs, values, features, "gate", use_bias=True))


class GLA(LinearAttention):
  """Gated linear attention: a state that decays by feature of the keys, without the delta rule.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T     g_t = log(sigmoid(x_t W_decay + bias)) / 16, [H, K]
    y_t = S_t^T q_t / sqrt(K)

  with W_decay of rank 16, and the output gate silu(x W_gate). By default it has no convolution, and
  then no silu of q, k and v. Around it are the layers of `LinearAttention`.

  Source: Yang et al. 2023, arXiv:2312.06635.
  """

  recurrence = "gla"
  has_delta_rule = False

  num_taps: int = 0

  def gates(self, inputs: jax.Array) -> dict[str, jax.Array]:
    """See `LinearAttention`."""
    keys, _ = self.sizes(inputs.shape[-1])
    logits = self.project_by_rank(inputs, 16, self.num_heads * keys, "decay", use_bias=True)
    return {"g": self.split_heads(nn.log_sigmoid(logits) / 16)}


def _unit(x: jax.Array) -> jax.Array:
  """Divides by the norm over the last axis, sqrt(sum(x**2) + 1e-6)."""
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
