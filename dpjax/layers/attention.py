"""Masked self-attention (MSA), the baseline; the same over a window; and relative attention.

B batch, T position, H head, E feature of a head, D width, R distance.
"""

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.layers.common import Dropout, check_settings, linear, linear_kernel, weights
from dpjax.layers.mixer import Context, Mixer, RelativePositions, features_per_head
from dpjax.ops import arrays
from dpjax.ops.products import promote


class _Attention(Mixer):
  """The parts of every attention: queries, keys and values, dropout, and the output.

  Attributes:
    num_heads: H, a divisor of D.
    dropout: probability with which an attention weight is dropped in training.
  """

  separates_documents: ClassVar[bool] = True

  num_heads: int = 1
  dropout: float = 0.0

  def __post_init__(self):
    check_settings(self, sizes=("num_heads",), rates=("dropout",))
    super().__post_init__()

  def check_width(self, width: int) -> None:
    """See `Mixer`."""
    features_per_head(width, self.num_heads)

  def _queries_keys_values(
    self, inputs: jax.Array, default: nn.initializers.Initializer, use_bias: bool
  ) -> list[jax.Array]:
    """Three arrays [B, T, H, E]."""
    batch, length, width = inputs.shape
    features = features_per_head(width, self.num_heads)
    qkv_btpd = nn.DenseGeneral(
      (3, width),
      use_bias=use_bias,
      dtype=self.dtype,
      kernel_init=weights(self.init_std, default),
      dot_general=ops.dot_general,
      promote_dtype=promote,  # pyright: ignore[reportArgumentType]
      name="queries_keys_values",
    )(ops.as_factor(inputs))
    qkv_btphe = qkv_btpd.reshape(batch, length, 3, self.num_heads, features)
    return [qkv_btphe[:, :, i] for i in range(3)]

  def _project(self, y_bthe: jax.Array, use_bias: bool) -> jax.Array:
    """[B, T, H, E] -> [B, T, D]."""
    batch, length, heads, features = y_bthe.shape
    out = linear(self, heads * features, "out", scale=self.out_scale, use_bias=use_bias)
    return out(y_bthe.reshape(batch, length, heads * features))

  def _dropout(self, context: Context) -> tuple[float, jax.Array | None]:
    """The rate and the key of dropped weights."""
    if context.deterministic or not self.dropout:
      return 0.0, None
    return self.dropout, self.make_rng("dropout")

  def _init_slots(self, batch: int, width: int, size: int) -> ops.AttentionCache:
    features = features_per_head(width, self.num_heads)
    return ops.init_attention_cache(batch, size, self.num_heads, features, self.dtype)


class SelfAttention(_Attention):
  """Multi-head masked self-attention, like torch.nn.MultiheadAttention.

  Attributes:
    num_heads: H, a divisor of D.
    dropout: probability with which an attention weight is dropped in training.
    use_bias: False as in Chen 2023, arXiv:2308.07661, Eqs. 10-17; biases begin as 0.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults, with
      queries, keys and values from one Xavier-uniform matrix [D, 3D].
    rotary_base: the base of rotary positions (`dpjax.ops.rotate`), 10,000 in the RoPE paper;
      None for no rotation.
    rotary_features: an even number, how many of a head's features are rotated, the first ones;
      None: all.

  For the other attributes see `Mixer`.
  """

  is_unbounded: ClassVar[bool] = False

  use_bias: bool = True
  rotary_base: float | None = None
  rotary_features: int | None = None

  def __post_init__(self):
    if self.rotary_base is not None:
      expected = "None or a number above 1"
      arrays.number("rotary_base", self.rotary_base, expected, lambda x: 1 < x < math.inf)
    rotated = self.rotary_features
    if rotated is not None and (type(rotated) is not int or rotated < 2 or rotated % 2):
      raise ValueError(f"rotary_features: expected None or an even number from 2 on, got {rotated}")
    super().__post_init__()

  def check_width(self, width: int) -> None:
    """See `Mixer`."""
    features = features_per_head(width, self.num_heads)
    rotated = self.rotary_features or features
    if rotated > features:
      expected = f"None or at most the {features} features of a head"
      raise ValueError(f"rotary_features: expected {expected}, got {rotated}")
    if self.rotary_base is not None and rotated % 2:
      expected = "None where a head has an odd number of features"
      got = f"{width} // {self.num_heads} = {features} of them"
      raise ValueError(f"rotary_base: expected {expected}, got {got}")
    if self.rotary_base is None and self.rotary_features is not None:
      got = self.rotary_features
      raise ValueError(f"rotary_features: expected None without rotary_base, got {got}")

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: ops.AttentionCache | None
  ) -> tuple[jax.Array, ops.AttentionCache | None]:
    """See `Mixer`."""
    init = nn.initializers.xavier_uniform()
    q_bthe, k_bthe, v_bthe = self._queries_keys_values(inputs, init, self.use_bias)
    if cache is None:
      y_bthe = self._attend(q_bthe, k_bthe, v_bthe, context)
    else:
      y_bthe, cache = self._attend_cached(q_bthe, k_bthe, v_bthe, context, cache)
    return self._project(y_bthe, self.use_bias), cache

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `Mixer`; keys and values, [B, H, max_length, E]."""
    return self._init_slots(batch, width, self.max_length)

  def _attend(
    self, q_bthe: jax.Array, k_bthe: jax.Array, v_bthe: jax.Array, context: Context
  ) -> jax.Array:
    """The attention of whole rows."""
    q_bthe, k_bthe = self._rotate(q_bthe, k_bthe, context, None)
    rate, key = self._dropout(context)
    return ops.causal_attention(
      ops.as_factor(q_bthe),
      ops.as_factor(k_bthe),
      ops.as_factor(v_bthe),
      document_starts=context.document_starts,
      dropout_rate=rate,
      dropout_key=key,
    )

  def _attend_cached(
    self,
    q_bche: jax.Array,
    k_bche: jax.Array,
    v_bche: jax.Array,
    context: Context,
    cache: ops.AttentionCache,
  ) -> tuple[jax.Array, ops.AttentionCache]:
    """The attention of the next positions to them and those in the cache."""
    q_bche, k_bche = self._rotate(q_bche, k_bche, context, cache)
    return ops.causal_attention_cached(
      ops.as_factor(q_bche),
      ops.as_factor(k_bche),
      ops.as_factor(v_bche),
      cache,
      lengths=context.lengths,
    )

  def _rotate(
    self,
    q_bthe: jax.Array,
    k_bthe: jax.Array,
    context: Context,
    cache: ops.AttentionCache | None,
  ) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, rotated by the position of each in its row or document."""
    if self.rotary_base is None:
      return q_bthe, k_bthe
    length = q_bthe.shape[1]
    features = self.rotary_features or q_bthe.shape[3]
    table = jnp.asarray(ops.rotary_angles(self.max_length, features, self.rotary_base))
    position_bt = None
    if cache is not None:
      position_bt = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    elif context.document_starts is not None:
      position_bt = ops.document_positions(context.document_starts)
    if position_bt is None:
      angles = table[None, :length]
    else:
      # nan beyond `max_length`, as in attention with a cache.
      angles = jnp.take(table, position_bt, axis=0, mode="fill", fill_value=jnp.nan)
    return ops.rotate(q_bthe, angles), ops.rotate(k_bthe, angles)


class LocalAttention(SelfAttention):
  """Masked self-attention in which position t reads max(0, t - w + 1) .. t, at O(T w D).

  With w >= T it is `SelfAttention` with the same parameters. With a cache, which keeps the keys and
  values of w tokens, a row may be longer than `max_length`.

  Attributes:
    window: w, the number of positions that each one reads, including itself.

  For the other attributes see `SelfAttention`.
  """

  is_unbounded: ClassVar[bool] = True

  window: int = 256

  def __post_init__(self):
    check_settings(self, sizes=("window",))
    super().__post_init__()

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `Mixer`; keys and values, [B, H, window, E]."""
    return self._init_slots(batch, width, self.window)

  def _attend(
    self, q_bthe: jax.Array, k_bthe: jax.Array, v_bthe: jax.Array, context: Context
  ) -> jax.Array:
    if self.rotary_base is not None:
      # Scores depend only on distances, so positions in the row also serve documents.
      features = self.rotary_features or q_bthe.shape[3]
      angles = jnp.asarray(ops.rotary_angles(q_bthe.shape[1], features, self.rotary_base))[None]
      q_bthe = ops.rotate(q_bthe, angles)
      k_bthe = ops.rotate(k_bthe, angles)
    rate, key = self._dropout(context)
    return ops.causal_attention(
      ops.as_factor(q_bthe),
      ops.as_factor(k_bthe),
      ops.as_factor(v_bthe),
      document_starts=context.document_starts,
      window=self.window,
      dropout_rate=rate,
      dropout_key=key,
    )

  def _attend_cached(
    self,
    q_bche: jax.Array,
    k_bche: jax.Array,
    v_bche: jax.Array,
    context: Context,
    cache: ops.AttentionCache,
  ) -> tuple[jax.Array, ops.AttentionCache]:
    return ops.local_attention_cached(
      q_bche,
      k_bche,
      v_bche,
      cache,
      lengths=context.lengths,
      rotary_base=self.rotary_base,
      rotary_features=self.rotary_features,
    )


class SharedPositions(nn.Module):
  """Makes the shared `RelativePositions`; `dropout` applies to the table, once per call."""

  num_heads: int
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, length: int, width: int, *, deterministic: bool = True) -> RelativePositions:
    """The distances 0 .. length - 1, for layers of width D."""
    shape = (self.num_heads, width // self.num_heads)
    init = weights(self.init_std, nn.initializers.zeros)
    content = self.param("content_bias", init, shape, jnp.float32).astype(self.dtype)
    position = self.param("position_bias", init, shape, jnp.float32).astype(self.dtype)
    table = jnp.asarray(ops.relative_positions(length, width), self.dtype)
    table = Dropout(self.dropout)(table, deterministic=deterministic)
    return RelativePositions(table, content, position)


class RelativeAttentionCache(NamedTuple):
  """Keys and values, and the projected table of distances, computed where a row begins."""

  attention: ops.AttentionCache
  distances: Float[Array, "H R E"]


class RelativeAttention(_Attention):
  """Multi-head attention with relative positions (`dpjax.ops.relative_attention`), with biases.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T, and with a cache M: a token then attends to the last M tokens.
    dropout: probability with which an attention weight is dropped in training.
    position_dropout: the dropout rate of the table of distances, shared or not.

  For the other attributes see `Mixer`.
  """

  position_dropout: float = 0.0

  def __post_init__(self):
    check_settings(self, rates=("position_dropout",))
    super().__post_init__()

  def make_positions(self) -> SharedPositions:
    """The positions and biases that all layers of a model share."""
    return SharedPositions(
      self.num_heads, self.position_dropout, self.init_std, self.dtype, parent=None
    )

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: RelativeAttentionCache | None
  ) -> tuple[jax.Array, RelativeAttentionCache | None]:
    """See `Mixer`; `context.positions` have T or more distances, with a cache `max_length`."""
    length = inputs.shape[1] if cache is None else self.max_length
    positions = self._positions(length, inputs.shape[2], context)
    q_bthe, k_bthe, v_bthe = self._queries_keys_values(inputs, linear_kernel, use_bias=True)
    project = linear(self, inputs.shape[2], "distances", use_bias=True)
    if cache is None:
      r_rhe = project(positions.table[:length]).reshape(length, *q_bthe.shape[2:])
      rate, key = self._dropout(context)
      y_bthe = ops.relative_attention(
        q_bthe,
        ops.as_factor(k_bthe),
        ops.as_factor(v_bthe),
        ops.as_factor(r_rhe),
        positions.content_bias,
        positions.position_bias,
        document_starts=context.document_starts,
        dropout_rate=rate,
        dropout_key=key,
      )
    else:
      r_hre = _project_once(project, positions.table[:length], cache)
      y_bthe, attention = ops.relative_attention_cached(
        q_bthe,
        k_bthe,
        v_bthe,
        r_hre.swapaxes(0, 1),
        positions.content_bias,
        positions.position_bias,
        cache.attention,
        lengths=context.lengths,
      )
      cache = RelativeAttentionCache(attention, r_hre)
    return self._project(y_bthe, use_bias=True), cache

  def init_cache(self, batch: int, width: int) -> RelativeAttentionCache:
    """See `Mixer`; keys and values, [B, H, max_length, E]."""
    attention = self._init_slots(batch, width, self.max_length)
    distances = jnp.zeros(attention.values.shape[1:], self.dtype)
    return RelativeAttentionCache(attention, distances)

  def _positions(self, length: int, width: int, context: Context) -> RelativePositions:
    """The positions that the model shares, or the layer's own."""
    positions = context.positions
    if positions is None:
      shared = self.make_positions().clone(parent=self, name="positions")
      positions = shared(length, width, deterministic=context.deterministic)
    if len(positions.table) < length:
      raise ValueError(
        f"positions.table: expected {length} distances or more, got {len(positions.table)}"
      )
    return positions


def _project_once(
  project: nn.Dense, table_rd: jax.Array, cache: RelativeAttentionCache
) -> jax.Array:
  """The projected distances [H, R, E], computed where a row begins, and otherwise those cached."""
  heads, length, features = cache.distances.shape
  free, variables = project.unbind()

  def fill(_):
    r_rd = free.apply(variables, table_rd)
    assert isinstance(r_rd, jax.Array)
    r_rhe = r_rd.reshape(length, heads, features)
    return r_rhe.swapaxes(0, 1).reshape(-1), jnp.zeros((), bool)

  # At every token it would be most of the cost. A loop of at most one round, as `lax.cond` would
  # copy the cache; flat arrays, as they have only one layout.
  state = cache.distances.reshape(-1), jnp.any(cache.attention.length == 0)
  return jax.lax.while_loop(lambda x: x[1], fill, state)[0].reshape(cache.distances.shape)
