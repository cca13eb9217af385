"""Attention to the last tokens. B batch, T position, H head, E feature of a head, D width."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.attention import SelfAttention


class LocalAttention(SelfAttention):
  """Masked self-attention in which position t reads max(0, t - w + 1) .. t, at O(T w D).

  With w >= T it is `SelfAttention` with the same parameters. A row of a cache may be longer than
  `max_length`; it keeps the keys and values of w tokens.

  Attributes:
    window: w, the most positions that one reads, its own included.

  The others are those of `SelfAttention`.
  """

  is_unbounded: ClassVar[bool] = True

  window: int = 256

  def __post_init__(self):
    mixer.check_settings(self, sizes=("window",))
    super().__post_init__()

  def init_cache(self, batch: int, width: int) -> ops.AttentionCache:
    """See `dpjax.layers.mixer.Mixer`; keys and values, [B, H, window, E]."""
    features = width // self.num_heads
    return ops.init_attention_cache(batch, self.window, self.num_heads, features, self.dtype)

  def _attend(self, q, k, v, document_starts, **options) -> jax.Array:
    return super()._attend(q, k, v, document_starts, window=self.window, **options)

  def _attend_cached(self, q, k, v, cache, lengths) -> tuple[jax.Array, ops.AttentionCache]:
    options: Any = dict(lengths=lengths, rotary_base=self.rotary_base)
    return ops.local_attention_cached(q, k, v, cache, **options)

  def _angles(self, base: float, shape, cache, document_starts) -> jax.Array:
    # Scores depend on distances alone: places in the row serve documents, too.
    return jnp.asarray(ops.rotary_angles(shape[1], shape[3], base))[None]
