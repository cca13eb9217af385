"""Relative attention, over all pairs of positions."""

import jax
import jax.numpy as jnp
import numpy as np


def relative_positions(length, width):
  """Sines, then cosines, of r / 10000 ** (2i / D), [R, D]."""
  half = (width + 1) // 2
  table = np.zeros((length, width))
  for r in range(length):
    for feature in range(width):
      angle = r / 10000 ** (2 * (feature % half) / width)
      table[r, feature] = np.sin(angle) if feature < half else np.cos(angle)
  return table


def relative_attention(queries, keys, values, positions, content_bias, position_bias):
  """[B, T, H, E]: the mean of the values so far, by the softmax of their scores."""
  place = jnp.arange(queries.shape[1])
  distance = place[:, None] - place
  scores = jnp.einsum("bthe,bshe->bhts", queries + content_bias, keys)
  r_tshe = positions[jnp.maximum(distance, 0)]
  scores += jnp.einsum("bthe,tshe->bhts", queries + position_bias, r_tshe)
  scores = jnp.where(distance >= 0, scores / queries.shape[3] ** 0.5, -jnp.inf)
  return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), values)
