"""The sum of the Extractors of arXiv:2308.07661, Eqs. 23-29."""

import jax.numpy as jnp


def causal_convolution(inputs, filters):
  """y[t] = sum over s <= t of inputs[s] * filters[t - s], [B, T, D] or [B, T, E].

  Filters are [l], [l, D] or [l, D, E].
  """
  if filters.ndim < 3:
    filters = filters.reshape(len(filters), -1, 1) * jnp.eye(inputs.shape[2])
  place = jnp.arange(inputs.shape[1])
  distance = place[:, None] - place
  taps = jnp.where(distance[..., None, None] >= 0, filters[distance], 0)
  return jnp.einsum("bsd,tsde->bte", inputs, taps)
