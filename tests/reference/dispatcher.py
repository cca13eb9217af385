"""Alg. 1 of the Dispatcher's paper."""

import jax.numpy as jnp


def shift_and_sum(values, gates, level_keep=None):
  """v[t] + gates[t, k] * v[t - 2**k], level after level; [B, T, H, E]."""
  for k in range(gates.shape[3]):
    if level_keep is None or level_keep[k]:
      before = jnp.roll(values, 2**k, axis=1).at[:, : 2**k].set(0)
      values = values + gates[:, :, :, k, None] * before
  return values
