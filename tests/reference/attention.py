"""Relative attention in float64 NumPy, a pair of positions at a time."""

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
  arrays = _exact(queries, keys, values, positions, content_bias, position_bias)
  result = np.zeros(values.shape)
  for b, t, h, weights in _weights(*arrays):
    result[b, t, h] = weights @ arrays[2][b, : t + 1, h]
  return result


def relative_attention_gradients(
  queries, keys, values, positions, content_bias, position_bias, cotangent
):
  """Gradients of sum(cotangent * relative_attention(...)) by its six arguments."""
  arrays = _exact(queries, keys, values, positions, content_bias, position_bias)
  q, k, v, r, u, w = arrays
  by_q, by_k, by_v, by_r, by_u, by_w = grads = [np.zeros(x.shape) for x in arrays]
  for b, t, h, weights in _weights(*arrays):
    of_output = np.float64(cotangent[b, t, h])
    of_weights = v[b, : t + 1, h] @ of_output
    of_scores = weights * (of_weights - weights @ of_weights) / np.sqrt(q.shape[3])
    for s in range(t + 1):
      by_v[b, s, h] += weights[s] * of_output
      by_k[b, s, h] += of_scores[s] * (q[b, t, h] + u[h])
      by_r[t - s, h] += of_scores[s] * (q[b, t, h] + w[h])
      by_q[b, t, h] += of_scores[s] * (k[b, s, h] + r[t - s, h])
      by_u[h] += of_scores[s] * k[b, s, h]
      by_w[h] += of_scores[s] * r[t - s, h]
  return grads


def _exact(*arrays):
  return [np.asarray(x, np.float64) for x in arrays]


def _weights(q, k, v, r, u, w):
  """The weights of s = 0 .. t, for every row, position and head."""
  for b, t, h in np.ndindex(q.shape[:3]):
    scores = np.array(
      [(q[b, t, h] + u[h]) @ k[b, s, h] + (q[b, t, h] + w[h]) @ r[t - s, h] for s in range(t + 1)]
    )
    weights = np.exp((scores - scores.max()) / np.sqrt(q.shape[3]))
    yield b, t, h, weights / weights.sum()
