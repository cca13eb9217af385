"""The pooling paper (arXiv:2211.09761), Sec. 3, in float64."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import exact


def segment_ids(boundaries):
  """[B, T]: how many segments have ended before the token."""
  return np.array([[int(sum(row[:t])) for t in range(len(row))] for row in boundaries])


def _pool_mean(inputs, boundaries, capacity):
  """Means by the matrix with weight 1 + (id_t - m) for token t where it belongs to segment m."""
  before = jnp.cumsum(boundaries, axis=1) - boundaries
  belongs = jax.lax.stop_gradient(before)[:, None] == jnp.arange(capacity)[:, None]
  weights = jnp.where(belongs, 1 + before[:, None] - jnp.arange(capacity)[:, None], 0)
  total = weights.sum(axis=2, keepdims=True)
  return weights @ inputs / jnp.where(total == 0, 1, total)


def pool_mean(inputs, boundaries, capacity):
  """[B, capacity, D] means of the segments."""
  return exact.run(partial(_pool_mean, capacity=capacity), (inputs, boundaries))


def pool_mean_gradients(inputs, boundaries, capacity, weights):
  """Gradients of sum(weights * pool_mean(...)) by the inputs and by the boundaries."""
  return exact.run(partial(_pool_mean, capacity=capacity), (inputs, boundaries), weights)[1:]


def pool_last(inputs, boundaries, capacity):
  """[B, capacity, D]: the token that closes a segment."""
  inputs = np.asarray(inputs, np.float64)
  result = np.zeros((inputs.shape[0], capacity, inputs.shape[2]))
  for b, row in enumerate(boundaries):
    for m, t in enumerate(np.flatnonzero(row)[:capacity]):
      result[b, m] = inputs[b, t]
  return result


def _upsample(segments, boundaries):
  index = np.cumsum(boundaries, axis=1).astype(int)[..., None]
  return jnp.take_along_axis(segments, index, axis=1, mode="fill", fill_value=jnp.nan)


def upsample(segments, boundaries):
  """u_t = segments[sum over i <= t of b_i], nan where there is no such segment."""
  return exact.run(partial(_upsample, boundaries=boundaries), (segments,))


def upsample_gradient(num_segments, boundaries, weights):
  """Gradient of sum(weights * upsample(segments, boundaries)) by the segments."""
  segments = np.zeros((len(weights), num_segments, weights.shape[2]))
  return exact.run(partial(_upsample, boundaries=boundaries), (segments,), weights)[1]


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


def rate_bounds(boundaries, highest, lowest, weights):
  """FlexiTokens' loss of every row, and its derivative by each of the row's boundaries."""
  losses, slopes = [], []
  for b, w in zip(np.float64(boundaries), np.float64(weights), strict=True):
    total = w.sum()
    rate = (b * w).sum() / total if total else (highest + lowest) / 2
    losses.append(max(0.0, rate - highest) + max(0.0, lowest - rate))
    slopes.append(w / max(total, 1) * (int(rate > highest) - int(rate < lowest)))
  return np.array(losses), np.array(slopes)


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
