"""Samples the next token. B batch, V vocabulary."""

import math

import jax
import jax.numpy as jnp

from dpjax.ops.arrays import is_concrete

_COLDEST = 1e-20  # below it, as at 0, the largest logit is taken


def sample(
  logits: jax.Array,
  keys: jax.Array,
  *,
  temperature: float | jax.Array = 1.0,
  top_k: int | jax.Array = 0,
  top_p: float | jax.Array = 1.0,
) -> jax.Array:
  """Draws a token for each row from softmax(logits / temperature), restricted to the top.

    logits [2, 1, 0, -1], top_k = 2            draws from tokens 0 and 1
    probabilities [.5, .3, .15, .05], top_p=.6 draws from tokens 0 and 1 (.5 < .6 <= .8)

  Returns [B], int32. The settings may be traced; otherwise those out of range raise a `ValueError`.

  Args:
    logits: [B, V], floats; -inf excludes a token.
    keys: [B], a random key for each row.
    temperature: at least 0; below 1e-20, it takes the largest logit (the first of equals).
    top_k: keep only the k most likely tokens, and ties with the k-th; 0 keeps all.
    top_p: keep only the most likely tokens that together reach this probability, in (0, 1]
      (nucleus sampling, Holtzman et al. 2020), after `top_k`; ties with the last of them stay.
  """
  if logits.ndim != 2:
    raise ValueError(f"logits: expected [B, V], got the shape {logits.shape}")
  if is_concrete(temperature) and not 0 <= temperature < math.inf:
    raise ValueError(f"temperature: expected a finite number of at least 0, got {temperature}")
  if is_concrete(top_k) and top_k < 0:
    raise ValueError(f"top_k: expected at least 0, got {top_k}")
  if is_concrete(top_p) and not 0 < top_p <= 1:
    raise ValueError(f"top_p: expected above 0 and at most 1, got {top_p}")
  size = logits.shape[1]

  def cut_to_k(logits_bv: jax.Array) -> jax.Array:
    # A token stays if fewer than k come before it.
    return _cut(logits_bv, jnp.ones_like(logits_bv), jnp.asarray(top_k, jnp.float32))

  def cut_to_p(scaled_bv: jax.Array) -> jax.Array:
    # A token stays if those before it have not reached top_p: the first always does.
    weights_bv = jax.nn.softmax(scaled_bv, axis=-1)
    return _cut(scaled_bv, weights_bv, jnp.asarray(top_p, jnp.float32))

  def draw(logits_bv: jax.Array) -> jax.Array:
    x_bv = logits_bv.astype(jnp.float32)
    x_bv = jax.lax.cond((top_k > 0) & (top_k < size), cut_to_k, lambda x: x, x_bv)
    # For large logits, only the differences divided by the temperature may fit float32.
    largest_b1 = jnp.max(x_bv, axis=-1, keepdims=True)
    x_bv -= jnp.where(jnp.isfinite(largest_b1), largest_b1, 0)
    scaled_bv = x_bv / jnp.asarray(temperature, jnp.float32)
    scaled_bv = jax.lax.cond(top_p < 1, cut_to_p, lambda x: x, scaled_bv)
    # The draws of `jax.random.categorical`, which takes twice the time on a CPU.
    noise_bv = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    return _first_largest(noise_bv + scaled_bv)

  return jax.lax.cond(temperature < _COLDEST, _first_largest, draw, logits)


def _first_largest(x_bv: jax.Array) -> jax.Array:
  """The index of the first largest value, [B]: `jnp.argmax` in two passes that a CPU vectorises."""
  size = x_bv.shape[1]
  largest_b1 = jnp.max(x_bv, axis=-1, keepdims=True)
  index_bv = jax.lax.broadcasted_iota(jnp.int32, x_bv.shape, 1)
  return jnp.min(jnp.where(x_bv < largest_b1, size, index_bv), axis=-1)


def _cut(x_bv: jax.Array, weights_bv: jax.Array, limit: jax.Array) -> jax.Array:
  """Sets all but the top of each row to -inf: x_i stays if sum_{j: x_j > x_i} weights_j < limit.

  x [3, 1, 2, 1], weights all 1, limit 2  ->  [3, -inf, 2, -inf];  limit 3  ->  all
  """
  # Bisection in int32 finds the smallest value that stays. 32 sums are faster than sorting.

  def halve(_, range_b1):
    low_b1, high_b1 = range_b1
    middle_b1 = (low_b1 & high_b1) + ((low_b1 ^ high_b1) >> 1)  # cannot overflow
    above_bv = jnp.where(x_bv > _number(middle_b1), weights_bv, 0)
    stays_b1 = jnp.sum(above_bv, axis=-1, keepdims=True) < limit
    return (jnp.where(stays_b1, low_b1, middle_b1 + 1), jnp.where(stays_b1, middle_b1, high_b1))

  low_b1 = _rank(jnp.min(x_bv, axis=-1, keepdims=True))
  high_b1 = _rank(jnp.max(x_bv, axis=-1, keepdims=True))
  _, least_b1 = jax.lax.fori_loop(0, 32, halve, (low_b1, high_b1))
  return jnp.where(x_bv < _number(least_b1), -jnp.inf, x_bv)


def _rank(x: jax.Array) -> jax.Array:
  """Maps float32 to int32 in the same order: the bits, all but the sign inverted if negative."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _number(rank: jax.Array) -> jax.Array:
  """The inverse of `_rank`."""
  return jax.lax.bitcast_convert_type(jnp.where(rank < 0, rank ^ 0x7FFFFFFF, rank), jnp.float32)
