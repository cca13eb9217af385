"""Pooling by chunks: that of the whole rows, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import init_segment_cache, pool_segments, pool_segments_cached

WIDTH, LENGTH = 5, 19
ROWS = (
  "0000000000000000000",  # none
  "1111111111111111111",
  "1000000000010000001",  # the first token and the last
  "0011010001100000100",
)
BOUNDARIES = np.array([[int(x) for x in row] for row in ROWS])
BATCH = len(ROWS)
INPUTS = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH))
CHUNKS = [(7, (7, 3, 0, 5)), (1, (1, 0, 1, 1)), (1, (0, 1, 1, 0)), (7, (2, 7, 7, 6))]
CHUNKS += [(1, (1, 1, 0, 1)), (7, (7, 4, 6, 0)), (7, (1, 3, 4, 6))]

pool = jax.jit(pool_segments_cached, static_argnames="method")


def by_chunks(inputs, boundaries, method):
  """All segments of each row in turn, and the cache at the end."""
  cache, seen = init_segment_cache(BATCH, WIDTH), np.zeros(BATCH, int)
  found = [[] for _ in ROWS]
  for size, lengths in CHUNKS:
    chunk = jnp.full((BATCH, size, WIDTH), jnp.nan, inputs.dtype)
    b_bc = np.ones((BATCH, size), boundaries.dtype)
    for row, length in enumerate(lengths):
      part = slice(seen[row], seen[row] + length)
      chunk = chunk.at[row, :length].set(inputs[row, part])
      b_bc[row, :length] = boundaries[row, part]
    lengths = np.asarray(lengths, np.int32)
    segments, cache = pool(chunk, b_bc, cache, method=method, lengths=lengths)
    assert segments.shape == chunk.shape and segments.dtype == inputs.dtype
    assert cache.total.dtype == jnp.float32 and cache.count.dtype == jnp.int32
    for row, length in enumerate(lengths):
      ended = int(b_bc[row, :length].sum())
      found[row].append(segments[row, :ended])
      # What is no segment is zero, nan in the padding or not.
      np.testing.assert_array_equal(segments[row, ended:], jnp.zeros((), inputs.dtype))
    seen += lengths
  assert (seen == LENGTH).all()
  return [np.concatenate(x).astype(np.float32) for x in found], cache


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", ["mean", "last"])
def test_chunks_are_the_whole(method, dtype):
  inputs = jnp.asarray(INPUTS, dtype)
  whole = pool_segments(inputs, BOUNDARIES, LENGTH, method=method)
  found, cache = by_chunks(inputs, BOUNDARIES, method)
  # The sums' order is another, which may round a bfloat16 the other way.
  rounding = 1e-6 if dtype == jnp.float32 else 2**-8
  for row, segments in enumerate(found):
    expected = whole[row, : BOUNDARIES[row].sum()].astype(jnp.float32)
    assert segments.shape == expected.shape
    np.testing.assert_allclose(segments, expected, rtol=rounding, atol=1e-6)
    # The open segment is what came after the last boundary.
    ends = np.flatnonzero(BOUNDARIES[row])
    begin = ends[-1] + 1 if len(ends) else 0
    opened = np.asarray(inputs[row, begin:].astype(jnp.float32))
    np.testing.assert_allclose(cache.total[row], opened.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert cache.count[row] == LENGTH - begin


@pytest.mark.parametrize("method", ["mean", "last"])
def test_all_is_real_without_lengths_and_boundaries_may_be_floats(method):
  inputs, cache = jnp.asarray(INPUTS, jnp.float32), init_segment_cache(BATCH, WIDTH)
  whole = pool_segments(inputs, BOUNDARIES, LENGTH, method=method)
  found, first = pool(inputs, BOUNDARIES.astype(np.float32), cache, method=method)
  is_closed = np.arange(LENGTH) < BOUNDARIES.sum(axis=1)[:, None]
  np.testing.assert_allclose(found[is_closed], whole[is_closed], rtol=1e-6)
  np.testing.assert_array_equal(found[~is_closed], 0)
  lengths = np.full(BATCH, LENGTH, np.int32)
  again, second = pool(inputs, BOUNDARIES, cache, method=method, lengths=lengths)
  jax.tree.map(np.testing.assert_array_equal, (found, first), (again, second))


X = jnp.zeros((2, 3, 5))
B = np.zeros((2, 3), int)
CACHE = init_segment_cache(2, 5)
LENGTHS = np.array([3, 0])


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(inputs=X[0]), r"inputs: .* got float32 \(3, 5\)"),
    (dict(inputs=X.astype(int)), "inputs: .* got int32"),
    (dict(method="sum"), "method: .* got 'sum'"),
    (dict(inputs=X[:1], boundaries=B[:1]), r"cache.total: .*\(1, 5\), got float32 \(2, 5\)"),
    (dict(inputs=X[..., :4]), r"cache.total: .*\(2, 4\).*\(2, 5\)"),
    (
      dict(cache=CACHE._replace(count=jnp.zeros(3, int))),
      r"cache.count: .*\(2,\), got int32 \(3,\)",
    ),
    (dict(boundaries=B[:, :2]), r"boundaries: .*\(2, 3\).*\(2, 2\)"),
    (dict(boundaries=B + 2), "boundaries: .* got 2"),
    (dict(lengths=LENGTHS[:1]), r"lengths: .*\(2,\), got int64 \(1,\)"),
    (dict(lengths=LENGTHS + 1), "C = 3, got 4"),
  ],
)
def test_refuses_what_does_not_match(changes, message):
  with pytest.raises(ValueError, match=message):
    pool_segments_cached(**dict(inputs=X, boundaries=B, cache=CACHE) | changes)


def test_refuses_a_cache_of_nothing():
  with pytest.raises(ValueError, match="batch: expected at least 1, got 0"):
    init_segment_cache(0, 5)
  with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
    init_segment_cache(2, 0)
