"""Shift-and-sum with a cache: however a row is cut, it says what the whole row says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops.shift_and_sum import init_shift_and_sum_cache, shift_and_sum, shift_and_sum_cached

# More than two times the reach of 2**LEVELS positions, and no power of two.
BATCH, LENGTH, HEADS, FEATURES, LEVELS = 3, 37, 2, 5, 4
ROUNDING = dict(rtol=1e-6, atol=1e-6)

cached = jax.jit(shift_and_sum_cached)


@functools.cache
def draw(levels=LEVELS, dtype="float32"):
  generator = np.random.default_rng(levels)
  values = generator.standard_normal((BATCH, LENGTH, HEADS, FEATURES))
  gates = generator.uniform(size=(BATCH, LENGTH, HEADS, levels))
  return jnp.asarray(values, dtype), jnp.asarray(gates, dtype)


@functools.cache
def whole(levels=LEVELS, dtype="float32"):
  result = jax.jit(functools.partial(shift_and_sum, implementation="loop"))(*draw(levels, dtype))
  assert result.dtype == dtype
  return np.asarray(result, np.float32)


@functools.cache
def by_steps():
  """All tokens, one by one, and the cache after the last."""

  def step(cache, x):
    outputs, cache = shift_and_sum_cached(*(y[:, None] for y in x), cache)
    return cache, outputs[:, 0]

  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in draw())
  cache, outputs = jax.jit(functools.partial(jax.lax.scan, step))(empty(), tokens)
  return np.moveaxis(np.asarray(outputs), 0, 1), cache


def empty(levels=LEVELS, batch=BATCH):
  return init_shift_and_sum_cache(batch, HEADS, FEATURES, levels)


def feed(chunks, values, gates, cache):
  """Feeds chunks [(C, real tokens of each row)]; the outputs of each row, and the cache.

  Padding is nan, as the worst that it can be.
  """
  values, gates = np.asarray(values), np.asarray(gates)
  outputs = [[] for _ in values]
  start_b = np.asarray(cache.length)
  for size, lengths in chunks:
    v = np.full((len(values), size, *values.shape[2:]), np.nan, values.dtype)
    g = np.full((len(values), size, *gates.shape[2:]), np.nan, gates.dtype)
    for b, length in enumerate(lengths):
      v[b, :length] = values[b, start_b[b] : start_b[b] + length]
      g[b, :length] = gates[b, start_b[b] : start_b[b] + length]
    y, cache = cached(v, g, cache, lengths=np.asarray(lengths, np.int32))
    assert y.dtype == values.dtype
    assert cache.ring.dtype == jnp.float32
    for b, length in enumerate(lengths):
      outputs[b].extend(np.asarray(y[b, :length], np.float32))
      np.testing.assert_array_equal(np.asarray(y[b, length:], np.float32), 0)
    start_b = start_b + lengths
    np.testing.assert_array_equal(cache.length, start_b)
  return [np.asarray(x) for x in outputs], cache


def ragged(sizes, seed):
  """Chunks of these sizes, over and over, until every row has all of its tokens."""
  generator = np.random.default_rng(seed)
  left_b = np.full(BATCH, LENGTH)
  for size in itertools.cycle(sizes):
    if not left_b.any():
      return
    lengths = np.minimum(generator.integers(0, size + 1, BATCH), left_b)
    left_b = left_b - lengths
    yield size, lengths


@pytest.mark.parametrize("sizes", [(5, 1, 16, 1, 1, 11, 2), (LENGTH,)], ids=str)
def test_chunks_of_any_size(sizes):
  cache, outputs, start = empty(), [], 0
  for size in sizes:
    y, cache = cached(*(x[:, start : start + size] for x in draw()), cache)
    outputs.append(y)
    start += size
  assert start == LENGTH
  np.testing.assert_allclose(np.concatenate(outputs, 1), whole(), **ROUNDING)
  assert_same_cache(cache, by_steps()[1])


# Shorter than the reach, as long, longer; one token; all of them mixed.
@pytest.mark.parametrize("sizes", [(1,), (7,), (16,), (19,), (7, 1, 19, 1, 1)], ids=str)
def test_rows_of_different_lengths(sizes):
  outputs, cache = feed(ragged(sizes, 0), *draw(), empty())
  np.testing.assert_allclose(outputs, whole(), **ROUNDING)
  assert_same_cache(cache, by_steps()[1])


def test_bfloat16_is_summed_in_float32():
  values, gates = draw(dtype="bfloat16")
  outputs, cache = feed(ragged((7, 1), 0), values, gates, empty())
  np.testing.assert_array_equal(outputs, whole(dtype="bfloat16"))
  in_float32 = (np.asarray(x, np.float32) for x in (values, gates))
  _, expected = feed(ragged((7, 1), 0), *in_float32, empty())
  assert_same_cache(cache, expected)


def assert_same_cache(actual, expected):
  np.testing.assert_allclose(actual.ring, expected.ring, **ROUNDING)
  np.testing.assert_array_equal(actual.length, expected.length)


def test_gradients_pass_through_the_cache():
  weights = jnp.asarray(np.random.default_rng(0).standard_normal(draw()[0].shape), "float32")

  def in_chunks(values, gates):
    cache, outputs = empty(), []
    for part in (slice(0, 19), slice(19, 20), slice(20, LENGTH)):
      y, cache = shift_and_sum_cached(values[:, part], gates[:, part], cache)
      outputs.append(y)
    return jnp.concatenate(outputs, 1)

  found, expected = (
    jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1](weights))(*draw()) for f in (in_chunks, shift_and_sum)
  )
  for actual, x in zip(found, expected, strict=True):
    np.testing.assert_allclose(actual, x, rtol=1e-5, atol=1e-5)


def test_a_donated_cache_is_written_in_its_place():
  step = jax.jit(shift_and_sum_cached, donate_argnums=2)
  values, gates = (x[:, :1] for x in draw(12))
  old = empty(12)
  memory = step.lower(values, gates, old).compile().memory_analysis()
  assert memory.alias_size_in_bytes >= old.ring.nbytes
  assert memory.temp_size_in_bytes < old.ring.nbytes / 20
  outputs, _ = step(values, gates, old)
  assert old.ring.is_deleted()
  np.testing.assert_array_equal(outputs, values)
