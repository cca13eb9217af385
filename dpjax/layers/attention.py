"""Masked self-attention (MSA), the baseline; the same over a window; and relative attention.

B batch, T position, H head, E feature of a head, D width, R distance.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.common import PRODUCTS, Dropout, linear, linear_kernel, weights
from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed


class SelfAttention(nn.Module):
  """Multi-head masked self-attention, like torch.nn.MultiheadAttention.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T; required.
    dropout: probability with which an attention weight is dropped in training.
    use_bias: False as in Chen 2023, arXiv:2308.07661, Eqs. 10-17; biases begin as 0.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults, with
      queries, keys and values from one Xavier-uniform matrix [D, 3D].
    dtype: the dtype of the computation; parameters are float32.
    rotary_base: the base of rotary positions (`dpjax.ops.rotate`), 10,000 in the RoPE paper;
      None for no rotation.
    rotary_features: an even number, how many of a head's features are rotated, the first ones;
      None: all.
    out_scale: a factor of the output matrix's initial values.
  """

  is_unbounded: ClassVar[bool] = False
  window = None  # not annotated: as a field of a subclass it comes last

  num_heads: int = 1
  max_length: int = 0
  dropout: float = 0.0
  use_bias: bool = True
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  rotary_base: float | None = None
  rotary_features: int | None = None
  out_scale: float = 1.0

  def __post_init__(self):
    mixer.check_settings(self, sizes=("num_heads", "max_length"), rates=("dropout",))
    if self.rotary_base is not None:
      expected = "None or a number above 1"
      arrays.number("rotary_base", self.rotary_base, expected, lambda x: 1 < x < math.inf)
    rotated = self.rotary_features
    if rotated is not None and (type(rotated) is not int or rotated < 2 or rotated % 2):
      raise ValueError(f"rotary_features: expected None or an even number from 2 on, got {rotated}")
    super().__post_init__()

  @nn.compact
  @typed
  def __call__(
    self,
    inputs: Float[Array, "B T D"],
    *,
    deterministic: bool = True,
    cache: ops.AttentionCache | None = None,
    lengths: Integer[Array, "B"] | None = None,
    document_starts: Starts[Array, "B T"] | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    sizes: Any = dict(max_length=self.max_length, num_heads=self.num_heads)
    inputs = mixer.check_input(
      inputs, document_starts=document_starts, cache=cache, is_unbounded=self.is_unbounded, **sizes
    )
    q, k, v = _queries_keys_values(self, inputs, nn.initializers.xavier_uniform(), self.use_bias)
    if cache is not None and self.window is not None:
      rotary = dict(rotary_base=self.rotary_base, rotary_features=self.rotary_features)
      options: Any = dict(lengths=lengths, **rotary)
      y_bthe, cache = ops.local_attention_cached(q, k, v, cache, **options)
    else:
      if self.rotary_base is not None:
        angles = self._angles(self.rotary_base, q.shape, cache, document_starts)
        q, k = ops.rotate(q, angles), ops.rotate(k, angles)
      q, k, v = (ops.as_factor(x) for x in (q, k, v))
      if cache is None:
        options = dict(document_starts=document_starts, window=self.window)
        y_bthe = ops.causal_attention(q, k, v, **options, **_dropout(self, deterministic))
      else:
        y_bthe, cache = ops.causal_attention_cached(q, k, v, cache, lengths=lengths)
    out = linear(self, inputs.shape[-1], "out", scale=self.out_scale, use_bias=self.use_bias)
    y_btd = out(y_bthe.reshape(inputs.shape))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, max_length, E]."""
    return _init_cache(self, batch, width, self.max_length)

  def _angles(self, base: float, shape, cache, document_starts) -> jax.Array:
    """The angles of `dpjax.ops.rotate`, by the position of each token in its row or document."""
    batch, length, _, features = shape
    features = self.rotary_features or features
    if self.window is not None:
      # Scores depend only on distances, so positions in the row also serve documents.
      return jnp.asarray(ops.rotary_angles(length, features, base))[None]
    table = jnp.asarray(ops.rotary_angles(self.max_length, features, base))
    if cache is not None:
      position_bt = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    elif document_starts is not None:
      position_bt = ops.document_positions(document_starts)
    else:
      return table[None, :length]
    # nan beyond `max_length`, as in attention with a cache.
    return jnp.take(table, position_bt, axis=0, mode="fill", fill_value=jnp.nan)


class LocalAttention(SelfAttention):
  """Masked self-attention in which position t reads max(0, t - w + 1) .. t, at O(T w D).

  With w >= T it is `SelfAttention` with the same parameters. With a cache, which keeps the keys and
  values of w tokens, a row may be longer than `max_length`.

  Attributes:
    window: w, the number of positions that each one reads, including itself.

  For the other attributes see `SelfAttention`.
  """

  is_unbounded: ClassVar[bool] = True

  window: int = 256  # pyright: ignore[reportIncompatibleVariableOverride]

  def __post_init__(self):
    mixer.check_settings(self, sizes=("window",))
    super().__post_init__()

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, window, E]."""
    return _init_cache(self, batch, width, self.window)


class RelativePositions(NamedTuple):
  """Embeddings of distances, and biases of queries: for keys and for positions."""

  table: Float[Array, "N D"]
  content_bias: Float[Array, "H E"]
  position_bias: Float[Array, "H E"]


class SharedPositions(nn.Module):
  """Makes the shared `RelativePositions`; `dropout` applies to the table, once per call."""

  num_heads: int
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, length: int, width: int, *, deterministic: bool = True) -> RelativePositions:
    """The distances 0 .. length - 1, for layers of width D."""
    shape = (self.num_heads, width // self.num_heads)
    init = weights(self.init_std, nn.initializers.zeros)
    content, position = (
      self.param(name, init, shape, jnp.float32).astype(self.dtype)
      for name in ("content_bias", "position_bias")
    )
    table = jnp.asarray(ops.relative_positions(length, width), self.dtype)
    table = Dropout(self.dropout)(table, deterministic=deterministic)
    return RelativePositions(table, content, position)


class RelativeAttentionCache(NamedTuple):
  """Keys and values, and the projected table of distances, computed where a row begins."""

  attention: ops.AttentionCache
  distances: Float[Array, "H R E"]


class RelativeAttention(nn.Module):
  """Multi-head attention with relative positions (`dpjax.ops.relative_attention`), with biases.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T, and with a cache M: a token then attends to the last M tokens.
    dropout: probability with which an attention weight is dropped in training.
    position_dropout: the dropout rate of the table of distances, if the layer does not share it.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
    out_scale: a factor of the output matrix's initial values.
  """

  num_heads: int = 1
  max_length: int = 0
  dropout: float = 0.0
  position_dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    rates = "dropout", "position_dropout"
    mixer.check_settings(self, sizes=("num_heads", "max_length"), rates=rates)
    super().__post_init__()

  def make_positions(self) -> partial[SharedPositions]:
    """Makes the positions and biases that all layers of a model share."""
    sizes = self.num_heads, self.position_dropout, self.init_std, self.dtype
    return partial(SharedPositions, *sizes)

  @nn.compact
  @typed
  def __call__(
    self,
    inputs: Float[Array, "B T D"],
    *,
    deterministic: bool = True,
    positions: RelativePositions | None = None,
    cache: RelativeAttentionCache | None = None,
    lengths: Integer[Array, "B"] | None = None,
    document_starts: Starts[Array, "B T"] | None = None,
  ) -> Any:
    """Mixes [B, T, D]; shared `positions` have T or more distances, with a cache `max_length`."""
    limits: Any = dict(max_length=self.max_length, num_heads=self.num_heads)
    inputs = mixer.check_input(inputs, document_starts=document_starts, cache=cache, **limits)
    batch, length, width = inputs.shape
    length = length if cache is None else self.max_length
    per_head = self.num_heads, width // self.num_heads
    if positions is None:
      shared = self.make_positions()(name="positions")
      positions = shared(length, width, deterministic=deterministic)
    if len(positions.table) < length:
      raise ValueError(
        f"positions.table: expected {length} distances or more, got {len(positions.table)}"
      )
    q, k, v = _queries_keys_values(self, inputs, linear_kernel)
    project = linear(self, width, "distances", use_bias=True)
    biases = positions.content_bias, positions.position_bias
    if cache is None:
      r_rhe = project(positions.table[:length]).reshape(-1, *per_head)
      k, v, r_rhe = (ops.as_factor(x) for x in (k, v, r_rhe))
      drop = _dropout(self, deterministic)
      y_bthe = ops.relative_attention(
        q, k, v, r_rhe, *biases, document_starts=document_starts, **drop
      )
    else:
      attention = cache.attention
      table, variables = positions.table[:length], dict(project.variables)
      free = project.clone(parent=None)

      def fill(_):
        rows: Any = free.apply(variables, table)
        return rows.reshape(-1, *per_head).swapaxes(0, 1).reshape(-1), jnp.zeros((), bool)

      # Computed where a row begins: at every token it would be most of the cost. A loop of at most
      # one round, as `lax.cond` would copy the cache; flat arrays, as they have only one layout.
      state = cache.distances.reshape(-1), jnp.any(attention.length == 0)
      r_hre = jax.lax.while_loop(lambda x: x[1], fill, state)[0].reshape(cache.distances.shape)
      r_rhe = r_hre.swapaxes(0, 1)
      y_bthe, attention = ops.relative_attention_cached(
        q, k, v, r_rhe, *biases, attention, lengths=lengths
      )
      cache = RelativeAttentionCache(attention, r_hre)
    out = linear(self, width, "out", scale=self.out_scale, use_bias=True)
    y_btd = out(y_bthe.reshape(inputs.shape))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> RelativeAttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, max_length, E]."""
    attention = _init_cache(self, batch, width, self.max_length)
    distances = jnp.zeros(attention.values.shape[1:], self.dtype)
    return RelativeAttentionCache(attention, distances)


def _queries_keys_values(module, inputs, default, use_bias: bool = True) -> list[jax.Array]:
  """Three arrays [B, T, H, E]."""
  qkv_btpd = nn.DenseGeneral(
    (3, inputs.shape[-1]),
    use_bias=use_bias,
    dtype=module.dtype,
    kernel_init=weights(module.init_std, default),
    **PRODUCTS,
    name="queries_keys_values",
  )(ops.as_factor(inputs))
  per_head = module.num_heads, inputs.shape[-1] // module.num_heads
  qkv_btphe = qkv_btpd.reshape(*inputs.shape[:2], 3, *per_head)
  return [qkv_btphe[:, :, i] for i in range(3)]


def _dropout(module, deterministic: bool) -> dict:
  """The dropout of attention weights in training."""
  rate = 0.0 if deterministic else module.dropout
  return dict(dropout_rate=rate, dropout_key=module.make_rng("dropout") if rate else None)


def _init_cache(module, batch: int, width: int, size: int) -> ops.AttentionCache:
  features = width // module.num_heads
  return ops.init_attention_cache(batch, size, module.num_heads, features, module.dtype)
