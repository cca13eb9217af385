"""Causal attention, plain and relative.

B batch, T position, H head, E feature of a head, D width, R distance.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.ops.dropout import dropout


def causal_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  dropout_rate: float = 0.0,
  dropout_key: jax.Array | None = None,
) -> jax.Array:
  """Attends from every position to itself and to those before it.

    weights[b, h, t, s] = softmax over s <= t of queries[b, t, h] . keys[b, s, h] / sqrt(E)
    output[b, t, h]     = sum over s <= t of weights[b, h, t, s] values[b, s, h]

  Without dropout this is `jax.nn.dot_product_attention`, in the form that it takes
  by itself. Dropout of the attention weights is not to be had there, so with it
  the weights are built here. Either way they take O(B H T T) memory, and the
  softmax is taken in float32.

  Args:
    queries: [B, T, H, E], floats.
    keys: as `queries`.
    values: as `queries`.
    dropout_rate: probability in [0, 1) that a weight is set to zero, the others
      growing by 1 / (1 - dropout_rate).
    dropout_key: random key, needed where `dropout_rate` > 0.

  Returns:
    [B, T, H, E], in the dtype of `values`.

  Raises:
    ValueError: the shapes differ, or a key for the dropout is missing.

  Source: Vaswani et al. 2017, Sec. 3.2; the baseline (MSA) of the Dispatcher
  paper, aclanthology.org/2022.clasp-1.3, Sec. 3.
  """
  if not (queries.ndim == 4 and queries.shape == keys.shape == values.shape):
    raise ValueError(
      "queries, keys, values: expected one shape [B, T, H, E], got "
      f"{queries.shape}, {keys.shape}, {values.shape}"
    )
  if not dropout_rate:
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
  scores_bhts = jnp.einsum(
    "bthe,bshe->bhts", queries, keys, preferred_element_type=jnp.float32
  )
  return _attend(scores_bhts, values, dropout_rate, dropout_key)


def relative_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  positions: jax.Array,
  content_bias: jax.Array,
  position_bias: jax.Array,
  *,
  dropout_rate: float = 0.0,
  dropout_key: jax.Array | None = None,
) -> jax.Array:
  """Attends to oneself and the past, by content and by distance.

    score[b, h, t, s] = ((queries[b, t, h] + content_bias[h]) . keys[b, s, h]
                       + (queries[b, t, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, t, h]   = sum over s <= t of softmax(score[b, h, t])[s] values[b, s, h]

  There is no memory of earlier windows. Takes O(B H T T) memory; the softmax is taken
  in float32.

  Args:
    queries: [B, T, H, E], floats.
    keys: as `queries`.
    values: as `queries`.
    positions: [R, H, E], R >= T; row r is for the distance r = t - s.
    content_bias: [H, E], u of the source, the authors' `r_w_bias`.
    position_bias: [H, E], v of the source, the authors' `r_r_bias`.
    dropout_rate: as in `causal_attention`.
    dropout_key: likewise.

  Returns:
    [B, T, H, E], in the dtype of `values`.

  Raises:
    ValueError: the shapes do not match, or a key for the dropout is missing.

  Source: Dai et al. 2019, arXiv:1901.02860, Sec. 3.3; without memory in Nawrot et al.
  2023, arXiv:2211.09761, Sec. 4.2.
  """
  if not (queries.ndim == 4 and queries.shape == keys.shape == values.shape):
    raise ValueError(
      "queries, keys, values: expected one shape [B, T, H, E], got "
      f"{queries.shape}, {keys.shape}, {values.shape}"
    )
  length, heads = queries.shape[1], queries.shape[2:]
  if positions.shape[1:] != heads or len(positions) < length:
    raise ValueError(
      f"positions: expected [R, H, E] = [at least {length}, {heads[0]}, {heads[1]}], got "
      f"the shape {positions.shape}"
    )
  if not content_bias.shape == position_bias.shape == heads:
    raise ValueError(
      f"content_bias, position_bias: expected [H, E] = {heads}, got "
      f"{content_bias.shape}, {position_bias.shape}"
    )
  scores_bhts = jnp.einsum(
    "bthe,bshe->bhts",
    queries + content_bias[None, None],
    keys,
    preferred_element_type=jnp.float32,
  )
  # The farthest first, so that column s of row t is s + T - 1 - t here.
  farthest_first_rhe = positions[:length][::-1]
  by_distance_bhtr = jnp.einsum(
    "bthe,rhe->bhtr",
    queries + position_bias[None, None],
    farthest_first_rhe,
    preferred_element_type=jnp.float32,
  )
  return _attend(
    scores_bhts + _align(by_distance_bhtr), values, dropout_rate, dropout_key
  )


def relative_positions(length: int, width: int) -> np.ndarray:
  """Sinusoidal embeddings of distances, sines first.

    table[r, i]       = sin(r / 10000 ** (2i / D))     0 <= i < ceil(D / 2)
    table[r, D/2 + i] = cos(r / 10000 ** (2i / D))

  Args:
    length: R, the number of distances, 0 first.
    width: D.

  Returns:
    [R, D], float32.

  Source: as `relative_attention`.
  """
  angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  return np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width].astype(np.float32)


def _align(by_distance_bhtr: jax.Array) -> jax.Array:
  """Moves row t to the left by T - 1 - t; what comes in from the right is of the future.

  Rows [c b a], [f e d], [i h g]  ->  [a . .], [e d .], [i h g].
  """
  batch, heads, length, _ = by_distance_bhtr.shape
  # With one column more, a row of the flat array begins one place earlier each time.
  padded = jnp.pad(by_distance_bhtr, ((0, 0), (0, 0), (0, 0), (1, 0)))
  rows = padded.reshape(batch, heads, length + 1, length)
  return rows[:, :, 1:]


def _attend(scores_bhts, values_bshe, dropout_rate: float, dropout_key):
  """Causal softmax of the scores over sqrt(E), dropout, and the sum of the values."""
  if dropout_rate and dropout_key is None:
    raise ValueError(
      f"dropout_key: expected a key for dropout_rate = {dropout_rate}, got None"
    )
  length, features = values_bshe.shape[1], values_bshe.shape[3]
  is_past_ts = jnp.tril(jnp.ones((length, length), bool))
  scores_bhts = jnp.where(is_past_ts[None, None], scores_bhts * features**-0.5, -jnp.inf)
  weights_bhts = jax.nn.softmax(scores_bhts, axis=-1)
  if dropout_rate:
    weights_bhts = dropout(weights_bhts, dropout_rate, dropout_key)
  return jnp.einsum(
    "bhts,bshe->bthe", weights_bhts.astype(values_bshe.dtype), values_bshe
  )
