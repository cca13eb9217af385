"""Operators with a cache: however rows are cut, the outputs are those of the equation."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests.reference import dispatcher, exact, extractors
from tests.reference.attention import attention as reference_attention
from tests.reference.exact import normal

BATCH, LENGTH, HEADS, FEATURES, WIDTH = 3, 41, 2, 5, 7
LEVELS, RING, TAPS = 4, 5, 13  # All reach less far than the rows.
ROW = BATCH, LENGTH, HEADS, FEATURES
QKV = tuple(normal(*ROW, seed=seed) for seed in range(3))
BIASES = normal(HEADS, FEATURES), normal(HEADS, FEATURES, seed=1)
POSITIONS = normal(LENGTH, HEADS, FEATURES), *BIASES


class Case(NamedTuple):
  """An operator with a cache.

  Attributes:
    parts: its arrays, [B, T, ...].
    whole: parts -> outputs, the equation.
    cached: (*parts, *rest, cache, lengths=) -> outputs, cache.
    rest: arguments that all tokens share.
    init: dtype -> an empty cache.
    tolerance: of outputs in bfloat16.
  """

  parts: tuple
  whole: Callable
  cached: Callable
  rest: tuple
  init: Callable
  tolerance: float = 1e-4

  def step(self, parts, cache, lengths=None):
    rest = jax.tree.map(lambda x: x.astype(parts[0].dtype), self.rest)
    return self.cached(*parts, *rest, cache, lengths=lengths)


def attention(cached, window, *rest, base=None):
  # Rotary positions need an even number of features.
  parts = QKV if base is None else tuple(x[..., 1:] for x in QKV)
  if base is not None:
    cached = functools.partial(cached, rotary_base=base)

  def whole(q, k, v):
    if base is not None:
      angles = ops.rotary_angles(LENGTH, q.shape[3], base)[None]
      q, k = ops.rotate(q, angles), ops.rotate(k, angles)
    return reference_attention(q, k, v, *rest, window=window)

  init = functools.partial(ops.init_attention_cache, BATCH, window, HEADS, parts[0].shape[3])
  return Case(parts, whole, cached, rest, init, tolerance=0.1)


def convolution(*tap_shape):
  taps = normal(TAPS, *tap_shape)
  padded = jnp.pad(taps, [(0, LENGTH - TAPS)] + [(0, 0)] * len(tap_shape))
  whole = functools.partial(extractors.causal_convolution, filters=padded)
  init = functools.partial(ops.init_convolution_cache, BATCH, TAPS, WIDTH)
  return Case((normal(BATCH, LENGTH, WIDTH),), whole, ops.causal_convolution_cached, (taps,), init)


CASES = {
  "shift and sum": Case(
    (normal(*ROW), jax.nn.sigmoid(normal(*ROW[:3], LEVELS))),
    dispatcher.shift_and_sum,
    ops.shift_and_sum_cached,
    (),
    functools.partial(ops.init_shift_and_sum_cache, BATCH, HEADS, FEATURES, LEVELS),
  ),
  "attention": attention(ops.causal_attention_cached, LENGTH),
  "relative attention": attention(ops.relative_attention_cached, RING, *POSITIONS),
  "local attention": attention(ops.local_attention_cached, RING),
  "rotary local attention": attention(ops.local_attention_cached, 3, base=5.0),
  "convolution": convolution(WIDTH),
  "convolution of matrices": convolution(WIDTH, 3),
}


def feed(case, parts, cache):
  """A long chunk and three tokens over and over, 0 to all of them real; outputs and cache.

  Padding is nan, as the worst that it can be.
  """
  generator, done, step = np.random.default_rng(0), np.zeros(BATCH, int), jax.jit(case.step)
  parts, outputs = [np.asarray(x) for x in parts], [[] for _ in range(BATCH)]
  for size in itertools.cycle((19, 1, 1, 1)):
    if (done == LENGTH).all():
      break
    lengths = np.minimum(generator.integers(0, size + 1, BATCH), LENGTH - done)
    chunk = [np.full((BATCH, size, *x.shape[2:]), np.nan, x.dtype) for x in parts]
    for b, count in enumerate(lengths):
      for new, old in zip(chunk, parts, strict=True):
        new[b, :count] = old[b, done[b] : done[b] + count]
    y, cache = step(chunk, cache, lengths.astype(np.int32))
    assert y.dtype == parts[0].dtype and np.isfinite(y := np.asarray(y, np.float32)).all()
    for b, count in enumerate(lengths):
      outputs[b].extend(y[b, :count])
    done += lengths
    np.testing.assert_array_equal(cache.length, done)
  return np.asarray(outputs), cache


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_rows_of_different_lengths_are_the_equation(name):
  case = CASES[name]
  outputs, _ = feed(case, case.parts, case.init())
  expected = exact.run(case.whole, case.parts)
  np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=2e-5)


def test_an_inf_of_a_cache_does_not_reach_the_padding():
  values, gates = jnp.full((1, 2, 1, 3), jnp.inf), jnp.full((1, 2, 1, 3), 0.5)
  cache, step = ops.init_shift_and_sum_cache(1, 1, 3, 3), jax.jit(ops.shift_and_sum_cached)
  _, cache = step(values, gates, cache)
  outputs, _ = step(values, gates, cache, lengths=jnp.asarray([1]))
  assert np.isinf(outputs[:, 0]).all()
  np.testing.assert_array_equal(outputs[:, 1], 0)


@pytest.mark.parametrize("name", ["shift and sum", "relative attention", "convolution"])
def test_bfloat16_is_summed_in_float32(name):
  case = CASES[name]
  half = [x.astype(jnp.bfloat16) for x in case.parts]
  outputs, cache = feed(case, half, case.init(dtype=jnp.bfloat16))
  kept = {x.dtype.name for x in jax.tree.leaves(cache)} - {"int32"}
  assert kept == {"float32"} if name == "shift and sum" else "bfloat16" in kept
  wide = case._replace(rest=jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.rest))
  expected, _ = feed(wide, [x.astype(jnp.float32) for x in half], case.init())
  error = np.abs(outputs - expected)
  assert (error <= 2.0**-8 * 1.01 * np.abs(expected) + case.tolerance).all()
