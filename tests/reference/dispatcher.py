"""Alg. 1 of the Dispatcher's paper in float64 NumPy, written position by position."""

import numpy as np


def shift_and_sum(values, gates, level_keep=None):
  """v[t] + gates[t, k] * v[t - 2**k], level after level.

  Args:
    values: [B, T, H, E].
    gates: [B, T, H, K].
    level_keep: [K] booleans, or None for all.

  Returns:
    [B, T, H, E], float64.
  """
  values, gates = np.array(values, np.float64), np.asarray(gates, np.float64)
  length, levels = values.shape[1], gates.shape[3]
  for k in range(levels):
    if level_keep is not None and not level_keep[k]:
      continue
    before = values.copy()
    for t in range(2**k, length):
      values[:, t] = before[:, t] + gates[:, t, :, k, None] * before[:, t - 2**k]
  return values


def shift_and_sum_gradients(values, gates, weights, level_keep=None):
  """Gradients of sum(weights * shift_and_sum(values, gates)).

  The sum is of the first degree in every single value and gate, so that its
  derivative by one is the difference between that one set to 1 and set to 0.

  Args:
    values: [B, T, H, E].
    gates: [B, T, H, K].
    weights: [B, T, H, E].
    level_keep: [K] booleans, or None for all.

  Returns:
    The gradients by `values` and by `gates`, float64, of their shapes.
  """
  arrays = [np.array(x, np.float64) for x in (values, gates)]
  gradients = [np.zeros_like(x) for x in arrays]
  weights = np.asarray(weights, np.float64)
  for x, gradient in zip(arrays, gradients, strict=True):
    for index in np.ndindex(x.shape):
      old, sums = x[index], []
      for x[index] in (0.0, 1.0):
        sums.append((weights * shift_and_sum(*arrays, level_keep)).sum())
      x[index], gradient[index] = old, sums[1] - sums[0]
  return gradients
