"""minGRU for the program of an export. T position, D width, E hidden width."""

import numpy as np

from dpjax.runs.numpy_model import linear, part


def min_gru(p, x, mixer):
  """The mixer of [T, D]; `p` has its arrays by name."""
  z = 1 / (1 + np.exp(-linear(part(p, "gates"), x)))  # [T, E]
  v = linear(part(p, "values"), x)
  v = np.where(v >= 0, v + 0.5, 1 / (1 + np.exp(-v)))
  h = np.zeros(z.shape[1], np.float32)
  y = []
  for t in range(len(x)):
    h = (1 - z[t]) * h + z[t] * v[t]
    y.append(h)
  return linear(part(p, "out"), np.stack(y))
