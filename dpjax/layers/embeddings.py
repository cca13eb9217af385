"""What goes into the first block: token and position tables. T position, D width."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax.layers import dropout, initializers


def sinusoidal_positions(length: int, width: int) -> np.ndarray:
  """Vaswani et al. 2017, Sec. 3.5.

    table[t, 2i]     = sin(t / 10000 ** (2i / D))
    table[t, 2i + 1] = cos(t / 10000 ** (2i / D))

  Args:
    length: T, the number of positions.
    width: D.

  Returns:
    [T, D], float32.
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
    positions: "sinusoidal", added as they are; "learned", a table times sqrt(D); or
      "none", for mixers that have their own: then the tokens are not scaled either.
    dropout: of the sum.
    init_std: of the tables, N(0, init_std**2); 0: U(-0.1, 0.1).
    dtype: of the computation; parameters are float32.
  """

  vocab_size: int
  width: int
  max_length: int
  positions: str = "sinusoidal"
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    deterministic: bool = True,
    start: jax.Array | None = None,
  ) -> jax.Array:
    """[B, T] token ids -> [B, T, D].

    Args:
      tokens: [B, T].
      deterministic: False in training.
      start: [B], the position of each row's first token; None: 0. Positions from
        `max_length` on are taken for the last before it.

    Raises:
      ValueError: T is above `max_length`, or `tokens` is not [B, T].
    """
    if tokens.ndim != 2 or tokens.shape[1] > self.max_length:
      raise ValueError(
        f"tokens: expected [B, T] with T <= max_length = {self.max_length}, got "
        f"the shape {tokens.shape}"
      )
    length = tokens.shape[1]
    embedding_init = initializers.weights(
      self.init_std, initializers.symmetric_uniform(0.1)
    )
    x_btd = nn.Embed(
      self.vocab_size,
      self.width,
      dtype=self.dtype,
      embedding_init=embedding_init,
      name="tokens",
    )(tokens)
    scale = jnp.asarray(self.width**0.5, self.dtype)
    if self.positions == "learned":
      shape = (self.max_length, self.width)
      table = self.param("positions", embedding_init, shape, jnp.float32)
      x_btd = (x_btd + _rows(table, start, length).astype(self.dtype)) * scale
    elif self.positions == "sinusoidal":
      table = sinusoidal_positions(self.max_length, self.width)
      table_btd = _rows(jnp.asarray(table), start, length).astype(self.dtype)
      x_btd = x_btd * scale + table_btd
    return dropout.Dropout(self.dropout)(x_btd, deterministic=deterministic)


def _rows(table: jax.Array, start: jax.Array | None, length: int) -> jax.Array:
  """[1, T, D] from 0 on, or [B, T, D] from `start` on."""
  if start is None:
    return table[None, :length]
  place_bt = start[:, None] + jnp.arange(length, dtype=start.dtype)[None]
  return jnp.take(table, place_bt, axis=0, mode="clip")
