"""The pooling paper (arXiv:2211.09761), Sec. 3, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def pool(inputs, boundaries, capacity, method):
  """[B, capacity, D]: means or closing tokens of the segments, by a matrix.

  Token t of segment m has the weight 1 + (id_t - m) in its mean.
  """
  before = jnp.cumsum(boundaries, axis=1) - boundaries
  segment = jnp.arange(capacity)[:, None]
  belongs = jax.lax.stop_gradient(before)[:, None] == segment
  if method == "last":
    return (belongs & (boundaries[:, None] > 0)) @ inputs
  weights = jnp.where(belongs, 1 + before[:, None] - segment, 0)
  total = weights.sum(axis=2, keepdims=True)
  return weights @ inputs / jnp.where(total == 0, 1, total)


def upsample(segments, boundaries):
  """u_t = segments[sum over i <= t of b_i], nan where there is no such segment."""
  index = np.cumsum(boundaries, axis=1)[..., None]
  return jnp.take_along_axis(segments, index, axis=1, mode="fill", fill_value=jnp.nan)


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
