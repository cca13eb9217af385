"""Masked self-attention (MSA), the baseline, and Transformer-XL's relative attention.

B batch, T position, H head, E feature of a head, D width, R distance.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import dropout, initializers, mixer
from dpjax.ops import checks


class SelfAttention(nn.Module):
  """Multi-head masked self-attention, like torch.nn.MultiheadAttention.

  Queries, keys and values come from one [D, 3D] matrix; biases are initialised to 0.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T; required.
    dropout: probability with which an attention weight is dropped in training.
    use_bias: False as in Chen 2023, arXiv:2308.07661, Eqs. 10-17.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults, with
      the [D, 3D] matrix drawn as one Xavier-uniform matrix.
    dtype: the dtype of the computation; parameters are float32.
    rotary_base: the base of rotary positions (`dpjax.ops.rotate`), 10,000 in their paper;
      None for no rotation.
  """

  is_endless: ClassVar[bool] = False

  num_heads: int = 1
  max_length: int = 0
  dropout: float = 0.0
  use_bias: bool = True
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  rotary_base: float | None = None

  def __post_init__(self):
    """Checks that the settings are in range."""
    mixer.check_settings(self, sizes=("num_heads", "max_length"), rates=("dropout",))
    if self.rotary_base is not None:
      expected = "None or a number above 1"
      checks.number("rotary_base", self.rotary_base, expected, lambda x: 1 < x < math.inf)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: ops.AttentionCache | None = None,
    lengths: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    mixer.check_input(
      inputs, max_length=self.max_length, num_heads=self.num_heads, is_start=is_start
    )
    if cache is not None:
      checks.record(
        "cache", cache, ops.AttentionCache, dict(B=len(inputs)), length=("B", jnp.int32)
      )
    width = inputs.shape[-1]
    qkv_btpd = nn.DenseGeneral(
      (3, width),
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, nn.initializers.xavier_uniform()),
      dot_general=ops.dot_general,
      name="queries_keys_values",
    )(inputs)
    qkv_btphe = qkv_btpd.reshape(*inputs.shape[:2], 3, self.num_heads, -1)
    qkv = qkv_btphe[:, :, 0], qkv_btphe[:, :, 1], qkv_btphe[:, :, 2]
    if self.rotary_base is not None:
      features = width // self.num_heads
      angles = self._angles(inputs.shape[:2], features, self.rotary_base, cache, is_start)
      qkv = ops.rotate(qkv[0], angles), ops.rotate(qkv[1], angles), qkv[2]
    if cache is None:
      rate = 0.0 if deterministic else self.dropout
      key = self.make_rng("dropout") if rate else None
      y_bthe = ops.causal_attention(*qkv, dropout_rate=rate, dropout_key=key, is_start=is_start)
    else:
      y_bthe, cache = ops.causal_attention_cached(*qkv, cache, lengths=lengths, is_start=is_start)
    y_btd = nn.Dense(
      width,
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, initializers.linear_kernel),
      dot_general=ops.dot_general,
      name="out",
    )(y_bthe.reshape(inputs.shape))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, max_length, E]."""
    return ops.init_attention_cache(
      batch, self.max_length, self.num_heads, width // self.num_heads, self.dtype
    )

  def _angles(self, shape, features, base, cache, is_start) -> jax.Array:
    """The angles of `dpjax.ops.rotate`, by the place of each token in its row or document."""
    table = jnp.asarray(ops.rotary_angles(self.max_length, features, base))
    if cache is None and is_start is None:
      return table[None, : shape[1]]
    is_start = jnp.zeros(shape, jnp.int32) if is_start is None else is_start
    place_bt = ops.document_places(is_start, None if cache is None else cache.length)
    # Beyond the longest, as the attention with a cache has it.
    return jnp.take(table, place_bt, axis=0, mode="fill", fill_value=jnp.nan)


class RelativePositions(NamedTuple):
  """The positions and biases that relative attention shares across layers.

  Attributes:
    table: [R, D], embeddings of the distances 0 .. R - 1.
    content_bias: [H, E], added to the queries in products with keys.
    position_bias: [H, E], added to the queries in products with positions.
  """

  table: jax.Array
  content_bias: jax.Array
  position_bias: jax.Array


class SharedPositions(nn.Module):
  """Makes `RelativePositions`, which layers share, including the two biases.

  Attributes:
    num_heads: H, a divisor of D.
    dropout: the dropout rate of the table, drawn once for each call.
    init_std: the standard deviation of the biases, N(0, init_std**2).
    dtype: the dtype of the computation; parameters are float32.
  """

  num_heads: int
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, length: int, width: int, *, deterministic: bool = True) -> RelativePositions:
    """The distances 0 .. length - 1, for layers of the given width."""
    shape = (self.num_heads, width // self.num_heads)
    init = initializers.weights(self.init_std, nn.initializers.zeros)
    content, position = (
      self.param(name, init, shape, jnp.float32).astype(self.dtype)
      for name in ("content_bias", "position_bias")
    )
    table = jnp.asarray(ops.relative_positions(length, width), self.dtype)
    table = dropout.Dropout(self.dropout)(table, deterministic=deterministic)
    return RelativePositions(table, content, position)


class RelativeAttentionCache(NamedTuple):
  """The cache of `RelativeAttention`.

  Attributes:
    attention: keys and values.
    distances: [H, R, E], the projected table, computed at the beginning of a row.
  """

  attention: ops.AttentionCache
  distances: jax.Array


class RelativeAttention(nn.Module):
  """Multi-head attention with relative positions (`dpjax.ops.relative_attention`).

  Queries, keys and values come from one [D, 3D] matrix, positions from a [D, D] one; all
  have biases, initialised to 0.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T, and with a cache M: a token then attends to the last M tokens.
    dropout: probability with which an attention weight is dropped in training.
    position_dropout: the dropout rate of the table of distances, if the layer has its own.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
  """

  num_heads: int = 1
  max_length: int = 0
  dropout: float = 0.0
  position_dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    """Checks that the settings are in range."""
    mixer.check_settings(self, sizes=("num_heads", "max_length"), rates=("dropout",))
    super().__post_init__()

  def make_positions(self) -> partial[SharedPositions]:
    """Makes the positions and biases that all layers of a model share."""
    return partial(
      SharedPositions,
      num_heads=self.num_heads,
      dropout=self.position_dropout,
      init_std=self.init_std,
      dtype=self.dtype,
    )

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    positions: RelativePositions | None = None,
    cache: RelativeAttentionCache | None = None,
    lengths: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]; layers may share `positions`.

    They need at least T distances, or `max_length` with a cache.
    """
    mixer.check_input(
      inputs, max_length=self.max_length, num_heads=self.num_heads, is_start=is_start
    )
    length, width = inputs.shape[1:]
    shape = dict(H=self.num_heads, E=width // self.num_heads, D=width)
    if cache is not None:
      length = self.max_length
      kept = ("B", jnp.int32)
      checks.record(
        "cache", cache, RelativeAttentionCache, dict(shape, R=length), distances="H R E"
      )
      sizes = dict(B=len(inputs))
      checks.record("cache.attention", cache.attention, ops.AttentionCache, sizes, length=kept)
    if positions is None:
      positions = SharedPositions(
        self.num_heads, self.position_dropout, self.init_std, self.dtype, name="positions"
      )(length, width, deterministic=deterministic)
    checks.record(
      "positions",
      positions,
      RelativePositions,
      dict(shape, T=length),
      table="R>=T D",
      content_bias="H E",
      position_bias="H E",
    )
    per_head = (-1, self.num_heads, width // self.num_heads)
    kernel_init = initializers.weights(self.init_std, initializers.linear_kernel)
    qkv_btpd = nn.DenseGeneral(
      (3, width),
      dtype=self.dtype,
      kernel_init=kernel_init,
      dot_general=ops.dot_general,
      name="queries_keys_values",
    )(inputs)
    qkv_btphe = qkv_btpd.reshape(*inputs.shape[:2], 3, *per_head[1:])
    project = nn.Dense(
      width,
      dtype=self.dtype,
      kernel_init=kernel_init,
      dot_general=ops.dot_general,
      name="distances",
    )
    qkv = qkv_btphe[:, :, 0], qkv_btphe[:, :, 1], qkv_btphe[:, :, 2]
    biases = positions.content_bias, positions.position_bias
    if cache is None:
      rate = 0.0 if deterministic else self.dropout
      y_bthe = ops.relative_attention(
        *qkv,
        project(positions.table[:length]).reshape(per_head),
        *biases,
        dropout_rate=rate,
        dropout_key=self.make_rng("dropout") if rate else None,
        is_start=is_start,
      )
    else:
      table, matrices = positions.table[:length], project.variables["params"]
      free = project.clone(parent=None)

      def fill(state):
        del state
        rows: Any = free.apply({"params": matrices}, table)
        r_rhe = rows.reshape(per_head)
        return r_rhe.swapaxes(0, 1).reshape(-1), jnp.zeros((), bool)

      # [R, D] times [D, D] at every token would be most of its cost, so: where a row
      # begins. A loop of no or one round, where `lax.cond` would copy what is kept, and
      # flat, for which there is one layout only.
      state = cache.distances.reshape(-1), jnp.any(cache.attention.length == 0)
      r_hre = jax.lax.while_loop(lambda x: x[1], fill, state)[0]
      r_hre = r_hre.reshape(cache.distances.shape)
      y_bthe, kept = ops.relative_attention_cached(
        *qkv, r_hre.swapaxes(0, 1), *biases, cache.attention, lengths=lengths, is_start=is_start
      )
      cache = RelativeAttentionCache(kept, r_hre)
    y_btd = nn.Dense(
      width,
      dtype=self.dtype,
      kernel_init=kernel_init,
      dot_general=ops.dot_general,
      name="out",
    )(y_bthe.reshape(inputs.shape))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> RelativeAttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, max_length, E]."""
    shape = self.num_heads, width // self.num_heads
    kept = ops.init_attention_cache(batch, self.max_length, *shape, self.dtype)
    return RelativeAttentionCache(kept, jnp.zeros(kept.keys.shape[1:], self.dtype))
