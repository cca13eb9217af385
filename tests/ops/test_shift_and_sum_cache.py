"""Shift-and-sum with a cache: however a row is cut, it says what the whole row says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dpjax.ops.shift_and_sum import shift_and_sum
from dpjax.ops.shift_and_sum_cache import (
  ShiftAndSumCache,
  init_shift_and_sum_cache,
  shift_and_sum_cached,
)
from tests.reference import dispatcher as reference

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


@pytest.mark.parametrize("sizes", [(5, 1, 16, 1, 1, 11, 2), (17, 20), (LENGTH,)], ids=str)
def test_chunks_of_any_size(sizes):
  values, gates = draw()
  cache, outputs, start = empty(), [], 0
  for size in sizes:
    part = slice(start, start + size)
    y, cache = cached(values[:, part], gates[:, part], cache)
    outputs.append(y)
    start += size
  assert start == LENGTH
  np.testing.assert_allclose(np.concatenate(outputs, 1), whole(), **ROUNDING)
  assert_same_cache(cache, by_steps()[1])


# Shorter than the reach, as long, longer; one token; all of them mixed.
@pytest.mark.parametrize("sizes", [(1,), (7,), (16,), (19,), (7, 1, 19, 1, 1)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_different_lengths(sizes, seed):
  outputs, cache = feed(ragged(sizes, seed), *draw(), empty())
  np.testing.assert_allclose(outputs, whole(), **ROUNDING)
  assert_same_cache(cache, by_steps()[1])


@pytest.mark.parametrize("size", [1, 7, 16, 19])
def test_a_row_without_tokens_keeps_its_cache(size):
  _, before = feed([(19, [19, 3, 0])], *draw(), empty())
  _, after = feed([(size, [0, 1, 0])], *draw(), before)
  for b, is_same in enumerate((True, False, True)):
    assert np.array_equal(after.ring[b], before.ring[b]) == is_same
  assert not after.ring[2].any()


@pytest.mark.parametrize("levels", [0, 1, 6])
def test_any_number_of_levels(levels):
  chunks = ragged((7, 1), 0)
  outputs, cache = feed(chunks, *draw(levels), empty(levels))
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


def test_places_of_the_ring():
  values, gates = (np.asarray(x, np.float64) for x in draw())
  lengths = [LENGTH, 11, 2]
  _, cache = feed([(LENGTH, lengths)], *draw(), empty())
  expected = np.zeros((BATCH, 2**LEVELS - 1, HEADS, FEATURES))
  for k in range(LEVELS):
    v_bthe = reference.shift_and_sum(values, gates[..., :k])
    for b, length in enumerate(lengths):
      for t in range(max(0, length - 2**k), length):
        expected[b, 2**k - 1 + t % 2**k] = v_bthe[b, t]
  np.testing.assert_allclose(cache.ring, expected, **ROUNDING)


def test_values_of_the_docstring():
  values = jnp.asarray([1.0, 10.0, 100.0, 1000.0])[None, :, None, None]
  gates = jnp.ones((1, 4, 1, 2))
  cache = init_shift_and_sum_cache(1, 1, 1, 2)
  outputs, cache = cached(values[:, :3], gates[:, :3], cache)
  np.testing.assert_array_equal(outputs.ravel(), [1, 11, 111])
  np.testing.assert_array_equal(cache.ring.ravel(), [100, 110, 11])
  outputs, cache = cached(values[:, 3:], gates[:, 3:], cache)
  np.testing.assert_array_equal(outputs.ravel(), [1111])
  np.testing.assert_array_equal(cache.ring.ravel(), [1000, 110, 1100])


def test_gradients_pass_through_the_cache():
  values, gates = draw()
  weights = jnp.asarray(np.random.default_rng(0).standard_normal(values.shape), "float32")

  @jax.jit
  def gradients(values, gates):
    def operator(values, gates):
      cache, outputs = empty(), []
      for part in (slice(0, 19), slice(19, 20), slice(20, LENGTH)):
        y, cache = shift_and_sum_cached(values[:, part], gates[:, part], cache)
        outputs.append(y)
      return jnp.concatenate(outputs, 1)

    return jax.vjp(operator, values, gates)[1](weights)

  arrays = (np.asarray(x, np.float64) for x in (values, gates, weights))
  expected = reference.shift_and_sum_gradients(*arrays)
  for actual, x in zip(gradients(values, gates), expected, strict=True):
    np.testing.assert_allclose(actual, x, rtol=1e-5, atol=1e-5)


def test_one_compilation_for_all_steps():
  traces = []

  @jax.jit
  def step(*arguments, **lengths):
    traces.append(arguments)
    return shift_and_sum_cached(*arguments, **lengths)

  values, gates = draw()
  cache = empty()
  for t in range(18):
    is_real = np.asarray([1, t % 2, 0], np.int32)
    _, cache = step(values[:, :1], gates[:, :1], cache, lengths=is_real)
  assert len(traces) == 1
  np.testing.assert_array_equal(cache.length, [18, 9, 0])


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
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = NamedSharding(mesh, PartitionSpec("batch"))
  values, gates = (jnp.concatenate([x] * 6)[:16] for x in draw())
  placed = jax.device_put((values[:, :7], gates[:, :7], empty(batch=16)), sharding)
  lengths = jax.device_put(np.arange(16, dtype=np.int32) % 8, sharding)
  compiled = cached.lower(*placed, lengths=lengths).compile()
  outputs, cache = compiled(*placed, lengths=lengths)
  for b in range(16):
    np.testing.assert_allclose(outputs[b, : b % 8], whole()[b % BATCH, : b % 8], **ROUNDING)
  assert cache.ring.sharding.is_equivalent_to(sharding, 4)
  text = compiled.as_text()
  assert not [
    name
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    if name in text
  ]


def zeros(*shape, dtype=jnp.float32):
  return jnp.zeros(shape, dtype)


CACHE = empty()


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(values=zeros(3, 7, 2)), r"values: expected .* got float32 \(3, 7, 2\)"),
    (dict(values=zeros(3, 7, 2, 5, dtype=jnp.int32)), "values: .* got int32"),
    (dict(values=zeros(3, 0, 2, 5)), r"values: .* got float32 \(3, 0, 2, 5\)"),
    (dict(gates=zeros(3, 7, 2)), r"gates: .*\(3, 7, 2\), got float32 \(3, 7, 2\)"),
    (dict(gates=zeros(3, 2, 2, 4)), r"gates: .* got float32 \(3, 2, 2, 4\)"),
    (dict(gates=zeros(3, 7, 2, 4, dtype=bool)), "gates: .* got bool"),
    (dict(gates=zeros(3, 7, 2, 3)), r"cache: .*\(3, 7, 2, 5\) for K = 3.*\(3, 15, 2, 5\)"),
    (dict(gates=zeros(3, 7, 2, 5)), r"cache: .*\(3, 31, 2, 5\) for K = 5.*\(3, 15, 2, 5\)"),
    (dict(values=zeros(2, 7, 2, 5), gates=zeros(2, 7, 2, 4)), "cache: .* ring .*2, 15, 2,"),
    (dict(values=zeros(3, 7, 2, 3)), r"cache: .* ring .*\(3, 15, 2, 3\) .*3, 15, 2, 5"),
    (dict(cache=CACHE._replace(ring=CACHE.ring.astype(jnp.bfloat16))), "cache: .*bfloat16"),
    (dict(cache=CACHE._replace(length=zeros(3))), "cache: .* length .* got float32"),
    (dict(cache=CACHE._replace(length=zeros(dtype=jnp.int32))), r"cache: .* int32 \(\)"),
    (dict(lengths=zeros(2, dtype=jnp.int32)), r"lengths: .*= \(3,\), got int32 \(2,\)"),
    (dict(lengths=zeros(3)), "lengths: .* got float32"),
    (dict(lengths=jnp.asarray([0, 8, 7])), r"lengths: expected 0 .. C = 7, got 8"),
    (dict(lengths=jnp.asarray([0, -1, 7])), r"lengths: expected 0 .. C = 7, got -1"),
  ],
)
def test_refuses_what_does_not_match(changes, message):
  arguments = dict(values=zeros(3, 7, 2, 5), gates=zeros(3, 7, 2, 4), cache=CACHE)
  with pytest.raises(ValueError, match=message):
    shift_and_sum_cached(**arguments | changes)


@pytest.mark.parametrize(
  "sizes, message",
  [
    ((0, 2, 5, 4), "batch: expected at least 1, got 0"),
    ((3, 0, 5, 4), "num_heads: expected at least 1, got 0"),
    ((3, 2, 0, 4), "features: expected at least 1, got 0"),
    ((3, 2, 5, -1), "num_levels: expected at least 0, got -1"),
  ],
)
def test_refuses_a_cache_of_nothing(sizes, message):
  with pytest.raises(ValueError, match=message):
    init_shift_and_sum_cache(*sizes)


def test_a_cache_is_a_plain_pytree():
  leaves, structure = jax.tree.flatten(CACHE)
  assert [(x.shape, x.dtype) for x in leaves] == [
    ((BATCH, 15, HEADS, FEATURES), jnp.float32),
    ((BATCH,), jnp.int32),
  ]
  assert isinstance(jax.tree.unflatten(structure, leaves), ShiftAndSumCache)
