"""Causal attention, plain, local and relative, over all pairs of positions."""

import jax
import jax.numpy as jnp


def attention(queries, keys, values, positions=None, content_bias=0, position_bias=0, window=None):
  """[B, T, H, E]: the mean of the last `window` values, by the softmax of their scores."""
  place = jnp.arange(queries.shape[1])
  distance = place[:, None] - place
  scores = jnp.einsum("bthe,bshe->bhts", queries + content_bias, keys)
  if positions is not None:
    r_tshe = positions[jnp.maximum(distance, 0)]
    scores += jnp.einsum("bthe,tshe->bhts", queries + position_bias, r_tshe)
  is_seen = (distance >= 0) & (distance < (window or len(place)))
  scores = jnp.where(is_seen, scores / queries.shape[3] ** 0.5, -jnp.inf)
  return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), values)
