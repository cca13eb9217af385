"""Where segments end: rules, samples and targets for the boundaries of `segments`.

A boundary of 1 says that a segment ends with that token. Letters: B batch, T position,
V vocabulary.

Source: the pooling paper (Nawrot et al. 2023, arXiv:2211.09761), Sec. 3.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.typing import ArrayLike

from dpjax.ops.documents import document_places
from dpjax.ops.products import sum_dtype
from dpjax.ops.segments import sum_of_segments


def fixed_boundaries(
  shape: Sequence[int],
  factor: int,
  offset: int | None = None,
  *,
  start: jax.Array | None = None,
  starts: ArrayLike | None = None,
) -> jax.Array:
  """Ends a segment with every `factor`-th token.

    b_t = 1 where t mod factor = offset

  With T = 7 and factor 3, [0, 0, 1, 0, 0, 1, 0]; with offset 0,
  [1, 0, 0, 1, 0, 0, 1].

  Args:
    shape: (B, T).
    factor: tokens of a segment, at least 1.
    offset: place of the first boundary, 0 <= offset < factor. None is factor - 1, so
      that all segments are of one size; the authors' code has 0.
    start: [B], integers, the place t of each row's first token; None: 0.
    starts: [B, T], 1 at the first token of each document, else 0: there t is 0. None: a row
      is one document.

  Returns:
    [B, T], int32, without `start` and `starts` all rows alike.

  Raises:
    ValueError: `factor` or `offset` is out of range, `shape` is not of two numbers, or
      `start` is not [B].

  Source: the pooling paper, Eq. 2.
  """
  if len(shape) != 2:
    raise ValueError(f"shape: expected (B, T), got {tuple(shape)}")
  if factor < 1:
    raise ValueError(f"factor: expected at least 1, got {factor}")
  if offset is None:
    offset = factor - 1
  if not 0 <= offset < factor:
    raise ValueError(f"offset: expected 0 <= offset < {factor}, got {offset}")
  place_bt = jnp.arange(shape[1], dtype=jnp.int32)[None]
  if start is not None:
    if start.shape != (shape[0],):
      raise ValueError(f"start: expected [B] = ({shape[0]},), got {start.shape}")
    place_bt += start[:, None]
  if starts is not None:
    place_bt = document_places(starts, start)
  is_end_bt = place_bt % factor == offset
  return jnp.broadcast_to(is_end_bt.astype(jnp.int32), tuple(shape))


def whitespace_boundaries(tokens: ArrayLike, space_ids: Sequence[int]) -> jax.Array:
  """Ends a segment with every space.

    b_t = 1 where x_t is a space

  With the space 0, [[5, 3, 0, 7, 0, 0]] -> [[0, 0, 1, 0, 1, 1]].

  Args:
    tokens: [B, T], integers: ids of the vocabulary.
    space_ids: the ids that count as a space, at least one; the newline's, too, where
      the alphabet has one.

  Returns:
    [B, T], int32.

  Raises:
    ValueError: there is no space id, or the tokens are not integers [B, T].

  Source: the pooling paper, Sec. 3 (whitespace).
  """
  space_ids = tuple(space_ids)
  if not space_ids:
    raise ValueError(
      "space_ids: expected at least one id, got none: an alphabet without a space has "
      "no whitespace boundaries"
    )
  tokens = jnp.asarray(tokens)
  if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(f"tokens: expected integers [B, T], got {tokens.dtype} {tokens.shape}")
  is_space_bt = jnp.zeros(tokens.shape, bool)
  for space_id in space_ids:
    is_space_bt |= tokens == int(space_id)
  return is_space_bt.astype(jnp.int32)


def spacelike_boundaries(
  tokens: ArrayLike,
  space_ids: Sequence[int],
  end_ids: Sequence[int] | None = None,
  *,
  previous: jax.Array | None = None,
  starts: ArrayLike | None = None,
) -> jax.Array:
  """Ends a segment with the first of each run of spacelike tokens.

    b_t = 1 where x_t is spacelike and x_{t-1} is not

  With the space 0, [[5, 3, 0, 7, 0, 0]] -> [[0, 0, 1, 0, 1, 0]]. A byte is spacelike if it
  is no ASCII letter, no digit and no continuation byte of UTF-8 (0x80 .. 0xBF). A token of
  several bytes begins with one and ends with another.

  Args:
    tokens: [B, T], integers: ids of the vocabulary.
    space_ids: tokens whose first byte is spacelike.
    end_ids: tokens whose last byte is; None: the same.
    previous: [B], whether the token before each row's first ends with a spacelike byte,
      where rows go on; None: it does not.
    starts: [B, T], 1 at the first token of each document, before which there is no other.

  Returns:
    [B, T], int32.

  Source: Slagle 2024, arXiv:2404.14408, Sec. 3.
  """
  tokens = jnp.asarray(tokens)
  ends_bt = _is_in(tokens, space_ids if end_ids is None else end_ids)
  if previous is None:
    previous = jnp.zeros(len(tokens), bool)
  before_bt = jnp.concatenate([previous[:, None].astype(bool), ends_bt[:, :-1]], axis=1)
  if starts is not None:
    before_bt &= ~jnp.asarray(starts).astype(bool)
  return (_is_in(tokens, space_ids) & ~before_bt).astype(jnp.int32)


def _is_in(tokens: jax.Array, ids: Sequence[int]) -> jax.Array:
  return jnp.isin(tokens, np.asarray(sorted(ids), np.int32))


def gumbel_sigmoid(
  logits: jax.Array,
  temperature: float,
  *,
  key: jax.Array | None = None,
  noise: ArrayLike | None = None,
) -> jax.Array:
  """Samples boundaries, hard in value and soft in gradient.

    soft = sigmoid((logit(p) + log u - log(1 - u)) / temperature)
    b    = 1 where soft > 0.5, else 0,   db = dsoft (straight-through)

  with p = sigmoid(logits) and u uniform in (0, 1), so b is 1 with probability p at any
  temperature. With temperature 0.5 and noise 0.5, whose logit is 0,
  [-1, 2] -> [0, 1], and the derivatives are those of sigmoid(2 logits): [0.21, 0.035].

  Args:
    logits: [B, T], floats: the predictor's log-odds, logit(p).
    temperature: above 0; the paper's is 0.5.
    key: random key that u is drawn with; either this or `noise` is given.
    noise: [B, T], u itself, in (0, 1).

  Returns:
    [B, T], float32, or float64 as the logits, exactly 0.0 or 1.0.

  Raises:
    ValueError: not one of `key` and `noise` is given, or an argument is not as above.
      Values are looked at outside of `jit` only.

  Source: the pooling paper, Eq. 4.
  """
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise ValueError(f"logits: expected floats, got {logits.dtype}")
  if not isinstance(temperature, core.Tracer) and not temperature > 0:
    raise ValueError(f"temperature: expected above 0, got {temperature}")
  if (key is None) == (noise is None):
    got = "none" if key is None else "both"
    raise ValueError(f"key, noise: expected one of the two, got {got}")
  if noise is None:
    u = _open_uniform(key, logits.shape)
  else:
    u = jnp.asarray(noise)
    _check_noise(u, logits.shape)
  dtype = sum_dtype(logits)
  u = u.astype(dtype)
  noisy = logits.astype(dtype) + jnp.log(u) - jnp.log1p(-u)
  return _straight_through(jax.nn.sigmoid(noisy / jnp.asarray(temperature, dtype)))


def binomial_prior_loss(
  boundaries: ArrayLike,
  alpha: float,
  *,
  weights: ArrayLike | None = None,
  starts: ArrayLike | None = None,
) -> jax.Array:
  """How unlikely a row's number of boundaries is under a binomial prior.

    loss = -ln Binomial(k; L, alpha) / L
         = -(ln L! - ln k! - ln (L - k)! + k ln alpha + (L - k) ln(1 - alpha)) / L

  with k = sum of b * weights and L = sum of weights. The factorials are log-gamma
  functions, so k has a gradient. Two boundaries among five tokens, alpha 0.2:
  -ln(10 * 0.2**2 * 0.8**3) / 5 = 0.317.

  Args:
    boundaries: [B, T], zeros and ones; floats get a gradient.
    alpha: prior probability of a boundary, in (0, 1).
    weights: [B, T], 1 where a token counts and 0 where not. None: all count.
    starts: [B, T], 1 at the first token of each document, else 0: each has a k and an L of
      its own, and the row's loss is the mean of theirs by their L. None: a row is one
      document.

  Returns:
    [B], nats per token, float32, or float64 as the boundaries. A row in which no token
    counts gives 0, and zero gradient.

  Raises:
    ValueError: `alpha` is out of range, or the shapes are not [B, T].

  Source: the pooling paper, Eq. 7.
  """
  if not 0 < alpha < 1:
    raise ValueError(f"alpha: expected 0 < alpha < 1, got {alpha}")
  b_bt = jnp.asarray(boundaries)
  if b_bt.ndim != 2:
    raise ValueError(f"boundaries: expected [B, T], got shape {b_bt.shape}")
  b_bt = b_bt.astype(sum_dtype(b_bt))
  w_bt = jnp.ones_like(b_bt) if weights is None else jnp.asarray(weights)
  if w_bt.shape != b_bt.shape:
    raise ValueError(f"weights: expected {b_bt.shape}, got {w_bt.shape}")
  w_bt = w_bt.astype(b_bt.dtype)
  total_b = jnp.sum(w_bt, axis=1)
  if starts is None:
    log_p_b = _log_binomial(jnp.sum(b_bt * w_bt, axis=1), total_b, alpha)
  else:
    document_bt = jnp.cumsum(jnp.asarray(starts), axis=1, dtype=jnp.int32) - 1
    ones_bn, total_bn = (
      sum_of_segments(x_bt, document_bt, b_bt.shape[1]) for x_bt in (b_bt * w_bt, w_bt)
    )
    log_p_b = jnp.sum(_log_binomial(ones_bn, total_bn, alpha), axis=1)
  is_any_b = total_b > 0
  return jnp.where(is_any_b, -log_p_b / jnp.where(is_any_b, total_b, 1), 0)


def _log_binomial(ones, total, alpha: float) -> jax.Array:
  log_choices = lax.lgamma(total + 1) - lax.lgamma(ones + 1) - lax.lgamma(total - ones + 1)
  return log_choices + ones * math.log(alpha) + (total - ones) * math.log1p(-alpha)


@jax.custom_jvp
def _straight_through(soft):
  return (soft > 0.5).astype(soft.dtype)


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
  return _straight_through(*primals), tangents[0]


def _open_uniform(key, shape):
  """Uniform in (0, 1), neither end of it: the odd multiples of 2**-24."""
  return jax.random.uniform(key, shape, jnp.float32) + 2.0**-24


def _check_noise(noise, shape):
  if noise.shape != shape or not jnp.issubdtype(noise.dtype, jnp.floating):
    raise ValueError(
      f"noise: expected floats {shape} as the logits, got {noise.dtype} {noise.shape}"
    )
  if isinstance(noise, core.Tracer):
    return
  values = np.asarray(noise)
  is_wrong = ~((values > 0) & (values < 1))
  if is_wrong.any():
    raise ValueError(f"noise: expected above 0 and below 1, got {values[is_wrong][0]}")
