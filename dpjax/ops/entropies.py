"""Boundaries at tokens after which a model's prediction is uncertain.

`document_starts` is 1 at the first token of each document, else 0; None means that each row is one
document. B batch, T position, V entry of the vocabulary.

Sources: the pooling paper, Sec. 3.1.3; BLT, arXiv:2412.09871, Sec. 2.3.
"""

import bisect
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from dpjax.errors import UserError, unknown
from dpjax.ops import arrays
from dpjax.ops.arrays import Binary, Starts, typed
from dpjax.ops.documents import document_positions
from dpjax.ops.products import sum_dtype

RULES = ("global", "monotonic", "combined")  # of `entropy_threshold`


@typed
def conditional_entropy(logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
  """Entropy of the distribution predicted at every position.

    H_t = -sum over v of p_tv ln p_tv,   p_t = softmax(logits_t)

  Two equal logits give ln 2 = 0.693. A symbol with logit -inf adds nothing, but one of every V
  must be finite. Returns nats, in float32, or float64 for float64 logits.
  """
  if not logits.shape[2]:
    raise ValueError(f"logits: expected V of at least 1, got {arrays.describe(logits)}")
  logits = logits.astype(sum_dtype(logits))
  # A large common offset would cost the differences precision.
  logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  log_p_btv = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  # 0 ln 0 = 0, and no nan in the gradient either: e**-200 is 0.
  log_p_btv = jnp.maximum(log_p_btv, -200)
  return -jnp.sum(jnp.exp(log_p_btv) * log_p_btv, axis=-1)


@typed
def entropy_spikes(
  entropies: Float[Array, "B T"],
  left: int = 2,
  *,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Int32[Array, "B T"]:
  """Ends a segment where the entropy exceeds that of the preceding tokens.

    b_t = 1 where H_t > H_i for all i in t - left .. t - 1

  b_0 is always 1. With left 2, [[3, 2, 4, 4, 5, 1]] -> [[1, 0, 1, 0, 1, 0]].

  Args:
    entropies: H, in nats, without nan.
    left: the number of preceding tokens to compare with, at least 1.
    document_starts: tokens of earlier documents are not compared.

  The boundaries have no gradient. Source: the pooling paper, Eq. 6.
  """
  arrays.integer("left", left)
  h_bt = lax.stop_gradient(entropies.astype(sum_dtype(entropies)))  # At least float32.
  position_bt = jnp.arange(h_bt.shape[1], dtype=jnp.int32)[None]
  if document_starts is not None:
    position_bt = document_positions(document_starts)

  def join(lag, before_bt):
    past_bt = jnp.where(position_bt >= lag, jnp.roll(h_bt, lag, axis=1), -jnp.inf)
    return jnp.maximum(before_bt, past_bt)

  lags = 1, min(left + 1, h_bt.shape[1])
  before_bt = lax.fori_loop(*lags, join, jnp.full_like(h_bt, -jnp.inf))
  return (h_bt > before_bt).astype(jnp.int32)


@typed
def entropy_threshold(
  entropies: Float[Array, "B T"],
  rule: str,
  theta: float,
  theta_add: float = 0.0,
  *,
  previous: tuple[Float[Array, "B"], Binary[Array, "B"]] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Int32[Array, "B T"]:
  """Ends a segment where the next token is hard to predict.

    "global":     b_t = 1 where H_t > theta
    "monotonic":  b_t = 1 where H_t - H_{t-1} > theta
    "combined":   b_t = 1 where H_t > theta and H_t - H_{t-1} > theta_add and b_{t-1} = 0

  with H_{-1} = -inf and b_{-1} = 0. With theta 1, [[2, 3, 0, 2]] -> global [[1, 1, 0, 1]],
  monotonic [[1, 0, 0, 1]]; with theta_add 0, combined [[1, 0, 0, 1]].

  Args:
    entropies: H, in nats, of a model's prediction of token t + 1.
    rule: a name in `RULES`.
    theta: the threshold, in nats.
    theta_add: the second threshold, in nats; 0 unless the rule is "combined".
    previous: H_{-1} and b_{-1}, to continue rows; None begins rows.
    document_starts: t counts from the first token of each document.

  The boundaries have no gradient.

  Source: Pagnoni et al. 2024, arXiv:2412.09871, Sec. 2.3; facebookresearch/blt@1ca0e04:
  bytelatent/data/patcher.py. Its "combined" requires b_{t-1} = 0 only at t = 1, and its
  first token is always a boundary.
  """
  theta_add = check_rule(rule, theta_add)
  theta = arrays.number("theta", theta, "a number", lambda x: x == x, traced=True)
  h_bt = lax.stop_gradient(entropies.astype(sum_dtype(entropies)))  # As precise as `theta`.
  if previous is None:
    rows = h_bt.shape[0]
    previous = jnp.full(rows, -jnp.inf, h_bt.dtype), jnp.zeros(rows, jnp.int32)
  entropy, boundary = previous
  before_bt = jnp.concatenate([entropy[:, None].astype(h_bt.dtype), h_bt[:, :-1]], 1)
  if document_starts is not None:
    before_bt = jnp.where(document_starts != 0, -jnp.inf, before_bt)
  if rule == "global":
    return (h_bt > theta).astype(jnp.int32)
  if rule == "monotonic":
    return (h_bt - before_bt > theta).astype(jnp.int32)
  may_bt = (h_bt > theta) & (h_bt - before_bt > theta_add)
  # In a run of candidate tokens, every other one is a boundary: the first, the third, ...
  index_t = jnp.arange(h_bt.shape[1], dtype=jnp.int32)[None]
  taken_b1 = boundary[:, None].astype(jnp.int32)
  refused_bt = jnp.where(may_bt, -1 - taken_b1, index_t)
  if document_starts is not None:
    refused_bt = jnp.where(document_starts != 0, jnp.maximum(refused_bt, index_t - 1), refused_bt)
  last_bt = lax.cummax(refused_bt, axis=1)
  return (may_bt & ((index_t - last_bt) % 2 == 1)).astype(jnp.int32)


@typed
def entropy_theta(
  entropies: Float[Array, "B T"], factor: float, rule: str = "global", theta_add: float = 0.0
) -> float:
  """The theta at which segments by `entropy_threshold` have a mean length of `factor` tokens.

    share of boundaries = 1 / factor, as nearly as ties allow

  Found by bisection: the quantile 1 - 1 / factor of H ("global") or of H_t - H_{t-1}
  ("monotonic"), between two entropies, so that rounding changes nothing. With [[1, 2, 3, 4]] and
  factor 2, it is 2.5. A factor below what the rule can reach raises a `ValueError`.

  Args:
    entropies: those of a text in B windows, in nats.
    factor: the target number of tokens per segment, at least 1.
    rule: see `entropy_threshold`.
    theta_add: see `entropy_threshold`.
  """
  theta_add = check_rule(rule, theta_add)
  factor = arrays.number(
    "factor", factor, "at least 1, and finite", lambda x: 1 <= x < math.inf, error=UserError
  )
  if not entropies.size or not arrays.is_concrete(entropies):
    raise ValueError(f"entropies: expected at least one, not traced, got {entropies.shape}")
  values = np.asarray(entropies, np.float32)
  if rule == "monotonic":
    values = np.diff(values, axis=1)
  values = np.unique(values)
  # No float lies between adjacent floats; the lower one separates them as well.
  between = values[:-1] + np.diff(values) / 2
  between = np.where(between < values[1:], between, values[:-1])
  ends = (values[:1] - 1, between, values[-1:])
  thetas = np.concatenate(ends) if values.size else np.zeros(1, np.float32)
  target = entropies.size / factor

  def count(index: int) -> int:
    return int(entropy_threshold(entropies, rule, float(thetas[index]), theta_add).sum())

  max_count = count(0)
  if max_count < math.floor(target):
    raise UserError(
      f"factor: expected at least {entropies.size / max_count:.4g}, which theta_add = {theta_add} "
      f"leaves, got {factor}"
    )
  # The first index with fewer than the target, or the one before it.
  high = bisect.bisect_right(range(len(thetas)), -target, key=lambda index: -count(index))
  near = max(high - 1, 0), min(high, len(thetas) - 1)
  return float(thetas[min(near, key=lambda index: abs(count(index) - target))])


def check_rule(rule: str, theta_add: float = 0.0) -> float:
  """Checks that a rule exists, and uses `theta_add` unless it is 0; returns `theta_add`."""
  if not isinstance(rule, str) or rule not in RULES:
    raise unknown("rule", RULES, rule)
  theta_add = arrays.number("theta_add", theta_add, error=UserError)
  if rule != "combined" and theta_add != 0:
    raise UserError(f"theta_add: expected 0 with the rule {rule}, got {theta_add}")
  return theta_add
