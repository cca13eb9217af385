"""Segment boundaries: rules, samples and losses. B batch, T position.

A boundary of 1 means that a segment ends with that token. `document_starts` is 1 at the first token
of each document, else 0; None means that each row is one document.

Source: the pooling paper (Nawrot et al. 2023, arXiv:2211.09761), Sec. 3.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Integer, PRNGKeyArray

from dpjax.ops import arrays
from dpjax.ops.arrays import Binary, Real, Starts, typed
from dpjax.ops.documents import check_starts, document_positions
from dpjax.ops.products import sum_dtype
from dpjax.ops.segments import sum_of_segments


@typed
def fixed_boundaries(
  shape: Sequence[int],
  factor: int,
  offset: int | None = None,
  *,
  num_before: Integer[Array, "B"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Int32[Array, "B T"]:
  """Ends a segment with every `factor`-th token.

    b_t = 1 where t mod factor = offset

  With T = 7 and factor 3, [0, 0, 1, 0, 0, 1, 0]; with offset 0, [1, 0, 0, 1, 0, 0, 1].

  Args:
    shape: (B, T).
    factor: the number of tokens in a segment, at least 1.
    offset: the position of the first boundary. None means factor - 1, for segments of equal length;
      the authors' code uses 0.
    num_before: the position t of each row's first token; None means 0.
    document_starts: not with `num_before`; t is 0 at the first token of each document.

  Source: Eq. 2.
  """
  batch, length = arrays.shape(shape)
  arrays.integer("factor", factor)
  offset = factor - 1 if offset is None else arrays.integer("offset", offset, 0, factor - 1)
  position_bt = jnp.arange(length, dtype=jnp.int32)[None]
  if num_before is not None:
    arrays.check("num_before", num_before, Integer[Array, arrays.dims(shape).split()[0]])
    position_bt += num_before[:, None]
  if document_starts is not None:
    position_bt = document_positions(check_starts(document_starts, shape))
  is_end_bt = position_bt % factor == offset
  return jnp.broadcast_to(is_end_bt.astype(jnp.int32), (batch, length))


@typed
def whitespace_boundaries(
  tokens: Integer[Array, "B T"], space_ids: Sequence[int]
) -> Int32[Array, "B T"]:
  """Ends a segment with every space.

    b_t = 1 where x_t is a space

  With the space 0, [[5, 3, 0, 7, 0, 0]] -> [[0, 0, 1, 0, 1, 1]]. Takes token ids, and the ids of
  spaces (and newlines), at least one.
  """
  space_ids = arrays.ids("space_ids", space_ids)
  if not space_ids:
    raise ValueError("space_ids: expected at least one id, got none: an alphabet without a space")
  return _is_in(tokens, space_ids).astype(jnp.int32)


@typed
def spacelike_boundaries(
  tokens: Integer[Array, "B T"],
  space_ids: Sequence[int],
  end_ids: Sequence[int] | None = None,
  *,
  previous: Binary[Array, "B"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Int32[Array, "B T"]:
  """Ends a segment with the first of each run of spacelike tokens.

    b_t = 1 where x_t is spacelike and x_{t-1} is not

  With the space 0, [[5, 3, 0, 7, 0, 0]] -> [[0, 0, 1, 0, 1, 0]]. A byte is spacelike unless it
  is an ASCII letter, a digit or a continuation byte of UTF-8 (0x80 .. 0xBF).

  Args:
    tokens: ids.
    space_ids: the tokens whose first byte is spacelike.
    end_ids: the tokens whose last byte is spacelike; None means `space_ids`.
    previous: whether the token before each row ends with a spacelike byte; None means no.
    document_starts: the token before a document is not spacelike.

  Source: Slagle 2024, arXiv:2404.14408, Sec. 3.
  """
  space_ids = arrays.ids("space_ids", space_ids)
  end_ids = space_ids if end_ids is None else arrays.ids("end_ids", end_ids)
  ends_bt = _is_in(tokens, end_ids)
  if previous is None:
    previous = jnp.zeros(tokens.shape[0], bool)
  before_bt = jnp.concatenate([previous[:, None].astype(bool), ends_bt[:, :-1]], axis=1)
  if document_starts is not None:
    before_bt &= ~document_starts.astype(bool)
  return (_is_in(tokens, space_ids) & ~before_bt).astype(jnp.int32)


def _is_in(tokens: jax.Array, ids: Sequence[int]) -> jax.Array:
  return jnp.isin(tokens.astype(jnp.int32), np.asarray(sorted(ids), np.int32))


@typed
def gumbel_sigmoid(
  logits: Float[Array, "B T"],
  temperature: float,
  *,
  key: PRNGKeyArray | None = None,
  noise: Float[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
  """Samples boundaries, hard in value and soft in gradient.

    soft = sigmoid((logit(p) + log u - log(1 - u)) / temperature)
    b    = 1 where soft > 0.5, else 0,   db = dsoft (straight-through)

  with u uniform in (0, 1), so that b is 1 with probability p at any temperature. With
  temperature 0.5 and noise 0.5, whose logit is 0, [-1, 2] -> [0, 1], and the derivatives are
  those of sigmoid(2 logits): [0.21, 0.035].

  Args:
    logits: logit(p).
    temperature: above 0; the paper's is 0.5.
    key: a random key for the draw of u; give either this or `noise`.
    noise: u itself, in (0, 1).

  Returns 0.0 or 1.0, in float32, or float64 for float64 logits. Source: Eq. 4.
  """
  temperature = arrays.number(
    "temperature", temperature, "a number above 0", lambda x: x > 0, traced=True
  )
  if (key is None) == (noise is None):
    got = "none" if key is None else "both"
    raise ValueError(f"key, noise: expected one of the two, got {got}")
  if noise is None:
    assert key is not None
    # In the open interval (0, 1): the odd multiples of 2**-24.
    u = jax.random.uniform(key, logits.shape, jnp.float32) + 2.0**-24
  else:
    u = noise
    if arrays.is_concrete(u) and not ((np.asarray(u) > 0) & (np.asarray(u) < 1)).all():
      raise ValueError("noise: expected values above 0 and below 1, got others")
  dtype = sum_dtype(logits)
  u = u.astype(dtype)
  noisy = logits.astype(dtype) + jnp.log(u) - jnp.log1p(-u)
  soft = jax.nn.sigmoid(noisy / jnp.asarray(temperature, dtype))
  return (noisy > 0).astype(dtype) + (soft - lax.stop_gradient(soft))


@typed
def binomial_prior_loss(
  boundaries: Real[Array, "B T"],
  alpha: jax.Array | float,
  *,
  weights: Real[Array, "B T"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Float[Array, "B"]:
  """The negative log-probability of a row's number of boundaries under a binomial prior.

    loss = -ln Binomial(k; L, alpha) / L
         = -(ln L! - ln k! - ln (L - k)! + k ln alpha + (L - k) ln(1 - alpha)) / L

  with k = sum of b * weights and L = sum of weights; log-gamma functions give k a gradient.
  Two boundaries among five tokens, alpha 0.2: -ln(10 * 0.2**2 * 0.8**3) / 5 = 0.317.

  Args:
    boundaries: zeros and ones; floats get a gradient.
    alpha: the prior probability of a boundary, in (0, 1); it may be traced.
    weights: 1 where a token counts, else 0. None means that all count.
    document_starts: a row's loss is the mean of its documents', weighted by L.

  Returns nats per token, in float32, or float64 for float64 boundaries; 0 for a row in which no
  token counts. Source: Eq. 7.
  """
  alpha = arrays.number("alpha", alpha, "0 < alpha < 1", lambda x: 0 < x < 1, traced=True)
  log, log1p = (math.log, math.log1p) if arrays.is_concrete(alpha) else (jnp.log, jnp.log1p)

  def nats(ones, total):
    log_choices = lax.lgamma(total + 1) - lax.lgamma(ones + 1) - lax.lgamma(total - ones + 1)
    return -(log_choices + ones * log(alpha) + (total - ones) * log1p(-alpha))

  return _mean_of_rows(nats, boundaries, weights, document_starts)


@typed
def rate_bounds_loss(
  boundaries: Real[Array, "B T"],
  highest: jax.Array | float,
  lowest: jax.Array | float,
  *,
  weights: Real[Array, "B T"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Float[Array, "B"]:
  """How far a row's boundary rate lies outside two bounds.

    loss = max(0, r - highest) + max(0, lowest - r),  r = k / L

  with k = sum of b * weights and L = sum of weights. Between the bounds there is no gradient. Two
  boundaries among five tokens, bounds 0.3 and 0.2: 0.1.

  Args:
    boundaries: see `binomial_prior_loss`.
    highest: a number; it may be traced.
    lowest: at most `highest`; it may be traced.
    weights: see `binomial_prior_loss`.
    document_starts: see `binomial_prior_loss`.

  Returns float32, or float64 for float64 boundaries; 0 for a row in which no token counts.

  Source: Owodunni et al. 2025, arXiv:2507.12720; owos/flexitokens@4f9f4fa.
  """
  highest = arrays.number("highest", highest, traced=True)
  lowest = arrays.number("lowest", lowest, traced=True)

  def outside(ones, total):
    rate = ones / jnp.where(total > 0, total, 1)
    return total * (jnp.maximum(0, rate - highest) + jnp.maximum(0, lowest - rate))

  return _mean_of_rows(outside, boundaries, weights, document_starts)


def _mean_of_rows(function, boundaries, weights, document_starts) -> jax.Array:
  """[B], function(k, L) / L for each row's k boundaries among L tokens, or for its documents."""
  b_bt = boundaries.astype(sum_dtype(boundaries))
  w_bt = jnp.ones_like(b_bt) if weights is None else weights.astype(b_bt.dtype)
  total_b = jnp.sum(w_bt, axis=1)
  if document_starts is None:
    sum_b = function(jnp.sum(b_bt * w_bt, axis=1), total_b)
  else:
    document_bt = jnp.cumsum(document_starts, axis=1, dtype=jnp.int32) - 1
    sums = (sum_of_segments(x_bt, document_bt, b_bt.shape[1]) for x_bt in (b_bt * w_bt, w_bt))
    sum_b = jnp.sum(function(*sums), axis=1)
  is_any_b = total_b > 0
  return jnp.where(is_any_b, sum_b / jnp.where(is_any_b, total_b, 1), 0)
