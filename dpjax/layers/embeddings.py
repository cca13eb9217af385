"""Embeddings of tokens and positions. T position, D width."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Integer

from dpjax import ops
from dpjax.layers.common import Dropout, check_settings, symmetric_uniform, weights
from dpjax.layers.mixer import Context, as_context
from dpjax.ops import arrays


def sinusoidal_positions(length: int, width: int) -> np.ndarray:
  """A table [T, D] of positions, float32, from Vaswani et al. 2017, Sec. 3.5.

  table[t, 2i]     = sin(t / 10000 ** (2i / D))
  table[t, 2i + 1] = cos(t / 10000 ** (2i / D))
  """
  angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  table = np.empty((length, width), np.float32)
  table[:, 0::2] = np.sin(angles)
  table[:, 1::2] = np.cos(angles[:, : width // 2])
  return table


class TokenAndPosition(nn.Module):
  """Embeds tokens: sqrt(D) * token_table[tokens] + positions, then dropout.

  Attributes:
    vocab_size: V.
    width: D.
    max_length: the longest T.
    positions: "sinusoidal", added without a factor; "learned", a table times sqrt(D); or
      "none", for mixers with their own positions, where tokens are not scaled either.
    dropout: the dropout rate of the sum.
    init_std: standard deviation of the tables, N(0, init_std**2); 0: U(-0.1, 0.1).
    dtype: the dtype of the computation; parameters are float32.
  """

  vocab_size: int
  width: int
  max_length: int
  positions: str = "sinusoidal"
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    context: Context | None = None,
    *,
    deterministic: bool | None = None,
    document_starts: jax.Array | None = None,
  ) -> jax.Array:
    """[B, T] token ids -> [B, T, D].

    Positions count from `context.num_before`, by default 0; sinusoidal ones then continue beyond
    `max_length`, where learned ones are nan. With document starts they count from the start of each
    document.

    Args:
      tokens: [B, T], integers in [0, V).
      context: what a model hands on, in place of the keywords.
      deterministic: False in training, which applies dropout; None means True.
      document_starts: [B, T], 1 where a document begins, else 0.

    Raises:
      ValueError: an argument is not as above, or T exceeds `max_length` without `document_starts`
        or `num_before` with positions that continue.
    """
    context = as_context(context, deterministic=deterministic, document_starts=document_starts)
    tokens = arrays.check("tokens", tokens, Integer[Array, "B T"])
    self._check(tokens.shape, context)
    init = weights(self.init_std, symmetric_uniform(0.1))
    embed = nn.Embed(
      self.vocab_size, self.width, dtype=self.dtype, embedding_init=init, name="tokens"
    )
    x_btd = embed(tokens)
    if self.positions != "none":
      position_bt = _positions(tokens.shape[1], context)
      scale = jnp.asarray(self.width**0.5, self.dtype)
      if self.positions == "learned":
        rows_btd = self._learned(position_bt, tokens.shape[1], init)
        x_btd = (x_btd + rows_btd) * scale
      else:
        rows_btd = self._sinusoidal(position_bt, tokens.shape[1], context)
        x_btd = x_btd * scale + rows_btd
    return Dropout(self.dropout)(x_btd, deterministic=context.deterministic)

  def _check(self, shape: tuple[int, ...], context: Context) -> None:
    check_settings(self, sizes=("vocab_size", "width", "max_length"), rates=("dropout",))
    arrays.choice("positions", self.positions, ("sinusoidal", "learned", "none"))
    if context.num_before is not None:
      arrays.check("num_before", context.num_before, Integer[Array, "B"])
    if context.document_starts is not None:
      ops.check_starts(context.document_starts, shape)
      if context.num_before is not None:
        raise ValueError("document_starts: expected None with num_before")
      return
    is_unbounded = context.num_before is not None and self.positions != "learned"
    if shape[1] > self.max_length and not is_unbounded:
      longest = f"T <= max_length = {self.max_length}"
      raise ValueError(f"tokens: expected [B, T] with {longest}, got the shape {shape}")

  def _learned(
    self, position_bt: jax.Array | None, length: int, init: nn.initializers.Initializer
  ) -> jax.Array:
    table = self.param("positions", init, (self.max_length, self.width), jnp.float32)
    if position_bt is None:
      rows_btd = table[None, :length]
    else:
      rows_btd = jnp.take(table, position_bt, axis=0, mode="fill", fill_value=jnp.nan)
    return rows_btd.astype(self.dtype)

  def _sinusoidal(self, position_bt: jax.Array | None, length: int, context: Context) -> jax.Array:
    if position_bt is None:
      table = jnp.asarray(sinusoidal_positions(length, self.width))
      return table[None].astype(self.dtype)
    table = jnp.asarray(sinusoidal_positions(self.max_length, self.width))
    rows_btd = jnp.take(table, position_bt, axis=0, mode="clip")
    if context.num_before is not None or length > self.max_length:
      is_in_table = (position_bt < self.max_length)[..., None]
      rows_btd = jnp.where(is_in_table, rows_btd, _sinusoidal_rows(position_bt, self.width))
    return rows_btd.astype(self.dtype)


def _positions(length: int, context: Context) -> jax.Array | None:
  """[B, T], the position of each token in its row or document; None for 0 .. T - 1."""
  if context.document_starts is not None:
    return ops.document_positions(context.document_starts)
  if context.num_before is None:
    return None
  return context.num_before[:, None] + jnp.arange(length, dtype=context.num_before.dtype)[None]


def _sinusoidal_rows(position_bt: jax.Array, width: int) -> jax.Array:
  """Rows of an endless table of `sinusoidal_positions`, [B, T, D]."""
  # At position 10,000, float32 has too few digits for position times frequency. So
  # angles are 32-bit integers in units of 2**-32 turns, whose overflow drops whole turns.
  frequency_f = 10000.0 ** (-np.arange(0, width, 2) / width)
  units_f = frequency_f / (2 * np.pi) * 2.0**32
  whole_f = units_f.astype(np.uint32)
  rest_f = (units_f % 1).astype(np.float32)
  position_bt1 = position_bt[..., None]
  angle_btf = position_bt1.astype(jnp.uint32) * whole_f[None, None]
  angle_btf += (position_bt1.astype(jnp.float32) * rest_f[None, None]).astype(jnp.uint32)
  angle_btf = lax.bitcast_convert_type(angle_btf, jnp.int32).astype(jnp.float32)
  angle_btf *= np.float32(2 * np.pi / 2.0**32)
  rows_btf2 = jnp.stack([jnp.sin(angle_btf), jnp.cos(angle_btf)], axis=-1)
  return rows_btf2.reshape(*position_bt.shape, 2 * len(frequency_f))[..., :width]
