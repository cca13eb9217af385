"""The pooling paper (arXiv:2211.09761), Sec. 3, in float64 NumPy, token by token."""

import math

import numpy as np


def segment_ids(boundaries):
  """[B, T]: how many segments have ended before the token."""
  return np.array([[int(sum(row[:t])) for t in range(len(row))] for row in boundaries])


def weight_matrix(boundaries, capacity, near=None):
  """[B, capacity, T]: weight 1 + (id_l - m) of token l where it belongs to segment m.

  Args:
    boundaries: [B, T], not quite zeros and ones where the matrix is differentiated.
    capacity: number of segments.
    near: the zeros and ones that say which segment a token belongs to.
  """
  boundaries = np.asarray(boundaries, np.float64)
  belongs = segment_ids(boundaries if near is None else near)
  result = np.zeros((boundaries.shape[0], capacity, boundaries.shape[1]))
  for b, row in enumerate(boundaries):
    for t in range(len(row)):
      m = belongs[b, t]
      if m < capacity:
        result[b, m, t] = 1 + sum(row[:t]) - m
  return result


def pool_mean(inputs, boundaries, capacity, near=None):
  """[B, capacity, D] means of the segments, by the matrix of weights."""
  weights = weight_matrix(boundaries, capacity, near)
  sums = weights @ np.asarray(inputs, np.float64)
  total = weights.sum(axis=2, keepdims=True)
  return np.divide(sums, total, out=np.zeros_like(sums), where=total != 0)


def pool_last(inputs, boundaries, capacity):
  """[B, capacity, D]: the token that closes a segment."""
  inputs = np.asarray(inputs, np.float64)
  result = np.zeros((inputs.shape[0], capacity, inputs.shape[2]))
  for b, row in enumerate(boundaries):
    for m, t in enumerate(np.flatnonzero(row)[:capacity]):
      result[b, m] = inputs[b, t]
  return result


def pool_mean_gradients(inputs, boundaries, capacity, weights):
  """Gradients of sum(weights * pool_mean(inputs, boundaries, capacity)).

  By the inputs it is linear; by the boundaries central differences are taken.

  Returns:
    The gradients by `inputs` and by `boundaries`, float64, of their shapes.
  """
  boundaries, weights = (np.asarray(x, np.float64) for x in (boundaries, weights))
  matrix = weight_matrix(boundaries, capacity)
  total = np.maximum(matrix.sum(axis=2, keepdims=True), 1)
  by_inputs = np.swapaxes(matrix / total, 1, 2) @ weights
  by_boundaries, step = np.zeros_like(boundaries), 1e-4
  for index in np.ndindex(*boundaries.shape):
    for sign in (1, -1):
      moved = boundaries.copy()
      moved[index] += sign * step
      value = np.sum(weights * pool_mean(inputs, moved, capacity, near=boundaries))
      by_boundaries[index] += sign * value / (2 * step)
  return by_inputs, by_boundaries


def upsample(segments, boundaries):
  """u_t = segments[sum over i <= t of b_i], nan where there is no such segment."""
  segments = np.asarray(segments, np.float64)
  batch, length = np.shape(boundaries)
  result = np.full((batch, length, segments.shape[2]), np.nan)
  for b in range(batch):
    for t in range(length):
      index = int(sum(boundaries[b][: t + 1]))
      if index < segments.shape[1]:
        result[b, t] = segments[b, index]
  return result


def upsample_gradient(num_segments, boundaries, weights):
  """Gradient of sum(weights * upsample(segments, boundaries)) by the segments."""
  weights = np.asarray(weights, np.float64)
  result = np.zeros((weights.shape[0], num_segments, weights.shape[2]))
  for b in range(weights.shape[0]):
    for t in range(weights.shape[1]):
      index = int(sum(boundaries[b][: t + 1]))
      if index < num_segments:
        result[b, index] += weights[b, t]
  return result


def entropy(logits):
  """-sum p ln p over the symbols of probability above 0."""
  logits = np.asarray(logits, np.float64)
  result = np.zeros(logits.shape[:-1])
  for index in np.ndindex(*result.shape):
    numbers = np.exp(logits[index] - logits[index].max())
    p = numbers / numbers.sum()
    result[index] = -sum(x * math.log(x) for x in p if x > 0)
  return result


def spikes(entropies, left):
  """Eq. 6: above all of the `left` entropies before, where they exist."""
  return np.array(
    [
      [int(all(row[t] > x for x in row[max(t - left, 0) : t])) for t in range(len(row))]
      for row in entropies
    ]
  )


def binomial_prior(boundaries, alpha, weights):
  """Eq. 7 of every row."""
  result = []
  for b, w in zip(boundaries, weights, strict=True):
    k, total = float(np.sum(np.asarray(b) * w)), float(np.sum(w))
    log_p = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
    log_p += k * math.log(alpha) + (total - k) * math.log(1 - alpha)
    result.append(-log_p / total if total else 0.0)
  return np.array(result)


def entropy_threshold(entropies, rule, theta, theta_add=0.0):
  """[B, T]: BLT's thresholds (arXiv:2412.09871, Sec. 2.3)."""
  result = np.zeros(np.shape(entropies), int)
  for b, row in enumerate(np.asarray(entropies)):
    for t, h in enumerate(row):
      rise = h - row[t - 1] if t else np.inf
      if rule == "global":
        result[b, t] = h > theta
      elif rule == "monotonic":
        result[b, t] = rise > theta
      else:
        result[b, t] = h > theta and rise > theta_add and not (t and result[b, t - 1])
  return result
