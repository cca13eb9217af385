"""Operators with a cache: however rows are cut, the outputs are those of the whole pass."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests import helpers

BATCH, LENGTH, HEADS, FEATURES, WIDTH = 3, 61, 2, 5, 7
LEVELS, RING, TAPS = 4, 5, 13  # All reach less far than the rows.


def draw(*shape):
  return jnp.asarray(np.random.default_rng([1, *shape]).standard_normal(shape), jnp.float32)


ROW = BATCH, LENGTH, HEADS, FEATURES
QKV = draw(*ROW), draw(*ROW)[:, ::-1], draw(*ROW)[:, :, ::-1]
BIASES = draw(HEADS, FEATURES), draw(HEADS, FEATURES)[::-1]
DISTANCES = draw(LENGTH, HEADS, FEATURES)


class Case(NamedTuple):
  """An operator: its arrays [B, T, ...], in one pass and with a cache.

  Attributes:
    parts: the arrays.
    whole: parts -> outputs.
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


def convolution(*tap_shape):
  taps = draw(TAPS, *tap_shape)

  def whole(inputs):
    padded = jnp.pad(taps, [(0, LENGTH - TAPS)] + [(0, 0)] * len(tap_shape))
    return ops.causal_convolution(inputs, padded, implementation="scan")

  init = functools.partial(ops.init_convolution_cache, BATCH, TAPS, WIDTH)
  return Case((draw(BATCH, LENGTH, WIDTH),), whole, ops.causal_convolution_cached, (taps,), init)


def relative(max_length, whole):
  init = functools.partial(ops.init_attention_cache, BATCH, max_length, HEADS, FEATURES)
  cached, rest = ops.relative_attention_cached, (DISTANCES, *BIASES)
  return Case(QKV, whole, cached, rest, init, tolerance=0.1)


def whole_relative(*parts):
  return ops.relative_attention(*parts, DISTANCES, *BIASES)


def of_the_last(*parts):
  """Relative attention of every token to the last `RING`, in a pass for each token."""
  windows = [jnp.concatenate([x[:, t - RING : t] for t in range(RING, LENGTH + 1)]) for x in parts]
  last = whole_relative(*windows)[:, -1].reshape(-1, BATCH, HEADS, FEATURES).swapaxes(0, 1)
  return jnp.concatenate([whole_relative(*parts)[:, : RING - 1], last], axis=1)


def local(window, **rotary):
  """Attention to the last `window` tokens, in chunks of any length."""
  q, k, v = QKV if not rotary else [x[..., 1:] for x in QKV]

  def whole(q, k, v):
    if rotary:
      angles = jnp.asarray(ops.rotary_angles(LENGTH, q.shape[3], **rotary))[None]
      q, k = ops.rotate(q, angles), ops.rotate(k, angles)
    return ops.causal_attention(q, k, v, window=window)

  cached = functools.partial(ops.local_attention_cached, rotary_base=rotary.get("base"))
  init = functools.partial(ops.init_attention_cache, BATCH, window, HEADS, q.shape[3])
  return Case((q, k, v), whole, cached, (), init, tolerance=0.1)


CASES = {
  "shift and sum": Case(
    (draw(*ROW), jax.nn.sigmoid(draw(*ROW[:3], LEVELS))),
    functools.partial(ops.shift_and_sum, implementation="loop"),
    ops.shift_and_sum_cached,
    (),
    lambda dtype=jnp.float32: ops.init_shift_and_sum_cache(BATCH, HEADS, FEATURES, LEVELS, dtype),
  ),
  "attention": Case(
    QKV,
    ops.causal_attention,
    ops.causal_attention_cached,
    (),
    functools.partial(ops.init_attention_cache, BATCH, LENGTH, HEADS, FEATURES),
    tolerance=0.1,
  ),
  "relative attention": relative(LENGTH, whole_relative),
  "ring": relative(RING, of_the_last),
  "local attention": local(RING),
  "rotary local attention": local(3, base=5.0),
  "convolution of numbers": convolution(),
  "convolution": convolution(WIDTH),
  "convolution of matrices": convolution(WIDTH, 3),
}


@pytest.fixture(params=CASES)
def case(request):
  return CASES[request.param]


def feed(case, parts, cache):
  """A long chunk and three tokens over and over, 0 to all of them real; outputs and cache.

  Padding is nan, as the worst that it can be.
  """
  generator, done, step = np.random.default_rng(0), np.zeros(BATCH, int), jax.jit(case.step)
  outputs = [[] for _ in range(BATCH)]
  for size in itertools.cycle((19, 1, 1, 1)):
    if (done == LENGTH).all():
      break
    lengths = np.minimum(generator.integers(0, size + 1, BATCH), LENGTH - done)
    chunk = [np.full((BATCH, size, *x.shape[2:]), np.nan, x.dtype) for x in parts]
    for (b, count), (new, old) in itertools.product(
      enumerate(lengths), zip(chunk, parts, strict=True)
    ):
      new[b, :count] = old[b, done[b] : done[b] + count]
    y, cache = step(chunk, cache, lengths.astype(np.int32))
    assert y.dtype == parts[0].dtype and np.isfinite(y.astype(jnp.float32)).all()
    for b, count in enumerate(lengths):
      outputs[b].extend(np.asarray(y[b, :count], np.float32))
    done += lengths
    np.testing.assert_array_equal(cache.length, done)
  return np.asarray(outputs), cache


def test_chunks_of_rows_of_different_lengths_are_the_whole(case):
  outputs, _ = feed(case, case.parts, case.init())
  expected = jax.jit(case.whole)(*case.parts)
  np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=2e-5)


def test_an_inf_of_a_cache_does_not_reach_the_padding():
  values, gates = jnp.full((1, 2, 1, 3), jnp.inf), jnp.full((1, 2, 1, 3), 0.5)
  cache, step = ops.init_shift_and_sum_cache(1, 1, 3, 3), jax.jit(ops.shift_and_sum_cached)
  _, cache = step(values, gates, cache)
  outputs, _ = step(values, gates, cache, lengths=jnp.asarray([1]))
  assert np.isinf(outputs[:, 0]).all()
  np.testing.assert_array_equal(outputs[:, 1], 0)


@pytest.mark.parametrize(
  "name",
  [helpers.slow_unless(x in ("shift and sum", "attention", "convolution"), x) for x in CASES],
)
def test_bfloat16_is_summed_in_float32(name):
  case = CASES[name]
  half = [x.astype(jnp.bfloat16) for x in case.parts]
  outputs, cache = feed(case, half, case.init(dtype=jnp.bfloat16))
  kept = {x.dtype.name for x in jax.tree.leaves(cache)} - {"int32"}
  assert kept == {"float32"} if name == "shift and sum" else "bfloat16" in kept
  wide = case._replace(rest=jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.rest))
  exact, _ = feed(wide, [x.astype(jnp.float32) for x in half], case.init())
  error = np.abs(outputs - exact)
  assert (error <= 2.0**-8 * 1.01 * np.abs(exact) + case.tolerance).all()


@pytest.mark.parametrize(
  "name", [helpers.slow_unless(x == "shift and sum", x) for x in CASES if x != "ring"]
)
def test_gradients_pass_through_the_cache(name):
  case = CASES[name]
  weights = jnp.cos(jnp.arange(LENGTH, dtype=jnp.float32))

  def in_chunks(*parts):
    cache, outputs = case.init(), []
    for part in (slice(0, 19), slice(19, 20), slice(20, LENGTH)):
      y, cache = case.step([x[:, part] for x in parts], cache)
      outputs.append(y)
    return jnp.concatenate(outputs, 1)

  def gradients(function):
    def loss(*parts):
      y = function(*parts)
      return jnp.sum(y * weights.reshape(1, LENGTH, *[1] * (y.ndim - 2)))

    return jax.jit(jax.grad(loss, argnums=range(len(case.parts))))(*case.parts)

  for found, expected in zip(gradients(in_chunks), gradients(case.whole), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
