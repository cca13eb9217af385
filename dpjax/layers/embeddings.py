"""Embeddings of tokens and positions. T position, D width."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Integer

from dpjax import ops
from dpjax.layers.common import Dropout, symmetric_uniform, weights
from dpjax.layers.mixer import check_settings
from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed


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
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  @typed
  def __call__(
    self,
    tokens: Integer[Array, "B T"],
    *,
    deterministic: bool = True,
    num_before: Integer[Array, "B"] | None = None,
    document_starts: Starts[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """[B, T] token ids -> [B, T, D].

    `num_before` [B] is the position of each row's first token, by default 0; sinusoidal positions
    then continue beyond `max_length`, where learned ones are nan. `document_starts` [B, T] is 1 at
    the first token of each document, which has the position 0; not with `num_before`.

    Raises:
      ValueError: an argument is not as above, or T exceeds `max_length` without `document_starts`
        or `num_before` with positions that continue.
    """
    check_settings(self, sizes=("vocab_size", "width", "max_length"), rates=("dropout",))
    arrays.choice("positions", self.positions, ("sinusoidal", "learned", "none"))
    length = tokens.shape[1]
    is_unbounded = num_before is not None and self.positions != "learned"
    if length > self.max_length and document_starts is None and not is_unbounded:
      longest = f"T <= max_length = {self.max_length}"
      raise ValueError(f"tokens: expected [B, T] with {longest}, got the shape {tokens.shape}")
    init = weights(self.init_std, symmetric_uniform(0.1))
    embed = nn.Embed(
      self.vocab_size, self.width, dtype=self.dtype, embedding_init=init, name="tokens"
    )
    x_btd = embed(tokens)
    if self.positions == "none":
      return Dropout(self.dropout)(x_btd, deterministic=deterministic)
    position_bt = None
    if document_starts is not None:
      if num_before is not None:
        raise ValueError("document_starts: expected None with num_before")
      position_bt = ops.document_positions(document_starts)
    elif num_before is not None:
      position_bt = num_before[:, None] + jnp.arange(length, dtype=num_before.dtype)[None]
    scale, is_learned = jnp.asarray(self.width**0.5, self.dtype), self.positions == "learned"
    if is_learned:
      table = self.param("positions", init, (self.max_length, self.width), jnp.float32)
    else:
      rows = length if position_bt is None else self.max_length
      table = jnp.asarray(sinusoidal_positions(rows, self.width))
    if position_bt is None:
      rows_btd = table[None, :length]
    elif is_learned:
      rows_btd = jnp.take(table, position_bt, axis=0, mode="fill", fill_value=jnp.nan)
    else:
      rows_btd = jnp.take(table, position_bt, axis=0, mode="clip")
      if num_before is not None or length > self.max_length:
        is_in_table = (position_bt < self.max_length)[..., None]
        rows_btd = jnp.where(is_in_table, rows_btd, _sinusoidal_rows(position_bt, self.width))
    rows_btd = rows_btd.astype(self.dtype)
    x_btd = (x_btd + rows_btd) * scale if is_learned else x_btd * scale + rows_btd
    return Dropout(self.dropout)(x_btd, deterministic=deterministic)


def _sinusoidal_rows(position_bt: jax.Array, width: int) -> jax.Array:
  """Rows of an endless table of `sinusoidal_positions`, [B, T, D]."""
  # At position 10,000, float32 has too few digits for position times frequency. So
  # angles are 32-bit integers in units of 2**-32 turns, whose overflow drops whole turns.
  frequency_f = 10000.0 ** (-np.arange(0, width, 2) / width)
  units_f = frequency_f / (2 * np.pi) * 2.0**32
  whole_f, rest_f = units_f.astype(np.uint32), (units_f % 1).astype(np.float32)
  position_bt1 = position_bt[..., None]
  angle_btf = position_bt1.astype(jnp.uint32) * whole_f[None, None]
  angle_btf += (position_bt1.astype(jnp.float32) * rest_f[None, None]).astype(jnp.uint32)
  angle_btf = lax.bitcast_convert_type(angle_btf, jnp.int32).astype(jnp.float32)
  angle_btf *= np.float32(2 * np.pi / 2.0**32)
  rows_btf2 = jnp.stack([jnp.sin(angle_btf), jnp.cos(angle_btf)], axis=-1)
  return rows_btf2.reshape(*position_bt.shape, 2 * len(frequency_f))[..., :width]
