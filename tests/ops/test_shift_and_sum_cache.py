"""Shift-and-sum with a cache: however a row is cut, it says what the whole row says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops.shift_and_sum import shift_and_sum
from dpjax.ops.shift_and_sum import init_shift_and_sum_cache, shift_and_sum_cached
from tests import helpers

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


def test_token_by_token():
  outputs, cache = by_steps()
  np.testing.assert_allclose(outputs, whole(), **ROUNDING)
  np.testing.assert_array_equal(cache.length, LENGTH)


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


@pytest.mark.parametrize("levels", [0, 1, 6])
def test_any_number_of_levels(levels):
  outputs, cache = feed(ragged((7, 1), 0), *draw(levels), empty(levels))
  np.testing.assert_allclose(outputs, whole(levels), **ROUNDING)
  assert cache.ring.shape == (BATCH, 2**levels - 1, HEADS, FEATURES)


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


def test_a_batch_over_devices_stays_there():
  values, gates = (jnp.concatenate([x] * 6)[:16, :7] for x in draw())
  lengths, (by_rows, _) = np.arange(16, dtype=np.int32) % 8, helpers.over_devices()
  *placed, lengths = jax.device_put((values, gates, empty(batch=16), lengths), by_rows)
  compiled = cached.lower(*placed, lengths=lengths).compile()
  outputs, cache = compiled(*placed, lengths=lengths)
  for b in range(16):
    np.testing.assert_allclose(outputs[b, : b % 8], whole()[b % BATCH, : b % 8], **ROUNDING)
  assert cache.ring.sharding.is_equivalent_to(by_rows, 4)
  assert not helpers.collectives(compiled)


def test_refuses_a_cache_of_nothing():
  for index, name in enumerate(("batch", "num_heads", "features", "num_levels")):
    sizes, least = [3, 2, 5, 4], 0 if name == "num_levels" else 1
    sizes[index] = least - 1
    with pytest.raises(ValueError, match=f"{name}: expected at least {least}, got {least - 1}"):
      init_shift_and_sum_cache(*sizes)


def zeros(*shape, dtype=jnp.float32):
  return jnp.zeros(shape, dtype)


CACHE = empty()


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(values=zeros(3, 7, 2)), r"values: expected .* got float32 \(3, 7, 2\)"),
    (dict(values=zeros(3, 7, 2, 5, dtype=jnp.int32)), "values: .* got int32"),
    (dict(values=zeros(3, 0, 2, 5)), r"values: .* got float32 \(3, 0, 2, 5\)"),
    (dict(gates=zeros(3, 2, 2, 4)), r"gates: .* got float32 \(3, 2, 2, 4\)"),
    (dict(gates=zeros(3, 7, 2, 4, dtype=bool)), "gates: .* got bool"),
    (dict(gates=zeros(3, 7, 2, 5)), r"cache.ring: .*\(3, 31, 2, 5\), got .*\(3, 15, 2, 5\)"),
    (dict(values=zeros(2, 7, 2, 5), gates=zeros(2, 7, 2, 4)), "cache.ring: .*2, 15, 2,"),
    (dict(values=zeros(3, 7, 2, 3)), r"cache.ring: .*\(3, 15, 2, 3\), .*3, 15, 2, 5"),
    (dict(cache=CACHE._replace(ring=CACHE.ring.astype(jnp.bfloat16))), "cache.ring: .*bfloat16"),
    (dict(cache=CACHE._replace(length=zeros(3))), "cache.length: .* got float32"),
    (dict(lengths=zeros(2, dtype=jnp.int32)), r"lengths: .*= \(3,\), got int32 \(2,\)"),
    (dict(lengths=jnp.asarray([0, 8, 7])), r"lengths: expected 0 .. C = 7, got 8"),
  ],
)
def test_refuses_what_does_not_match(changes, message):
  arguments = dict(values=zeros(3, 7, 2, 5), gates=zeros(3, 7, 2, 4), cache=CACHE)
  with pytest.raises(ValueError, match=message):
    shift_and_sum_cached(**arguments | changes)
