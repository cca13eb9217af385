"""Causal dot-product attention. B batch, T position, H head, E feature of a head."""

import jax
import jax.numpy as jnp


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
  if dropout_key is None:
    raise ValueError(
      f"dropout_key: expected a key for dropout_rate = {dropout_rate}, got None"
    )
  length, features = queries.shape[1], queries.shape[3]
  scores_bhts = jnp.einsum(
    "bthe,bshe->bhts", queries, keys, preferred_element_type=jnp.float32
  )
  is_past_ts = jnp.tril(jnp.ones((length, length), bool))
  scores_bhts = jnp.where(is_past_ts[None, None], scores_bhts * features**-0.5, -jnp.inf)
  weights_bhts = jax.nn.softmax(scores_bhts, axis=-1)
  keep_bhts = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights_bhts.shape)
  weights_bhts = jnp.where(keep_bhts, weights_bhts / (1 - dropout_rate), 0)
  return jnp.einsum("bhts,bshe->bthe", weights_bhts.astype(values.dtype), values)
