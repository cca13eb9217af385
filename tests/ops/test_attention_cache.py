"""Attention with a cache: cut in any way, it says what the whole pass says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.ops import attention_cache

BATCH, LENGTH, HEADS, FEATURES, DISTANCES, CHUNK = 3, 13, 2, 5, 17, 4
RING = 5  # Rows go through it two times and a half.
ROUNDING = dict(rtol=1e-5, atol=1e-5)
TRACES = []


def draw(dtype=jnp.float32):
  """Queries, keys, values of the whole rows; positions and the two biases."""
  shapes = [(BATCH, LENGTH, HEADS, FEATURES)] * 3
  shapes += [(DISTANCES, HEADS, FEATURES), (HEADS, FEATURES), (HEADS, FEATURES)]
  generator = np.random.default_rng(8)
  arrays = [jnp.asarray(generator.standard_normal(x), dtype) for x in shapes]
  return arrays[:3], arrays[3:]


def new_cache(dtype=jnp.float32, max_length=LENGTH):
  return attention_cache.init_attention_cache(BATCH, max_length, HEADS, FEATURES, dtype)


def attend(parts, distances, cache, lengths=None):
  """Relative where there are distances."""
  TRACES.append(parts[0].shape)
  if distances:
    return attention_cache.relative_attention_cached(*parts, *distances, cache, lengths=lengths)
  return attention_cache.causal_attention_cached(*parts, cache, lengths=lengths)


step = jax.jit(attend, donate_argnums=2)


whole_causal, whole_relative = map(jax.jit, (ops.causal_attention, ops.relative_attention))


def whole(is_relative, dtype=jnp.float32):
  """In float32, of numbers that are rounded to the dtype."""
  parts, distances = jax.tree.map(lambda x: x.astype(jnp.float32), draw(dtype))
  return np.asarray(whole_relative(*parts, *distances) if is_relative else whole_causal(*parts))


def whole_of_a_ring():
  """Relative attention of every token to the last `RING`, in a pass for each token."""
  parts, distances = draw()
  windows = [jnp.concatenate([x[:, t - RING : t] for t in range(RING, LENGTH + 1)]) for x in parts]
  last = np.asarray(whole_relative(*windows, *distances))[:, -1]
  last = last.reshape(-1, BATCH, HEADS, FEATURES).swapaxes(0, 1)
  return np.concatenate([whole(True)[:, : RING - 1], last], axis=1)


def feed(schedule, is_relative, cache=None, chunk=CHUNK, dtype=jnp.float32):
  """Gives row b its next schedule[i][b] tokens in chunk i; outputs, cache, in order."""
  parts, distances = draw(dtype)
  cache = new_cache() if cache is None else cache
  outputs = np.full(parts[0].shape, np.nan, np.float32)
  for counts in schedule:
    counts, begin = np.asarray(counts, np.int32), np.asarray(cache.length)
    padded = [np.full((BATCH, chunk, *x.shape[2:]), np.nan, np.float32) for x in parts]
    for b, count in enumerate(counts):
      for new, old in zip(padded, parts, strict=True):
        new[b, :count] = old[b, begin[b] : begin[b] + count]
    padded = [jnp.asarray(x, dtype) for x in padded]
    found, cache = step(padded, distances if is_relative else [], cache, counts)
    assert found.dtype == dtype
    for b, count in enumerate(counts):
      outputs[b, begin[b] : begin[b] + count] = found[b, :count]
      np.testing.assert_array_equal(found[b, count:], 0)
    np.testing.assert_array_equal(cache.length, begin + counts)
  return outputs, cache


def ragged(chunk=CHUNK, length=LENGTH, seed=3):
  """0 .. chunk tokens of each row at a time, until all rows are full."""
  generator, left, schedule = np.random.default_rng(seed), np.full(BATCH, length), []
  while left.any():
    schedule.append(np.minimum(generator.integers(0, chunk + 1, BATCH), left))
    left = left - schedule[-1]
  return schedule


@pytest.fixture(params=[False, True], ids=["causal", "relative"])
def is_relative(request):
  return request.param


@pytest.mark.parametrize("chunk", [CHUNK, 1])
def test_ragged_chunks_equal_the_whole_pass(is_relative, chunk):
  schedule = ragged(chunk)
  # Rows are apart, some rest, and the last chunk goes on beyond the end with padding.
  assert all((np.array(schedule)[:4] == 0).any(axis=0))
  TRACES.clear()
  outputs, cache = feed(schedule, is_relative, chunk=chunk)
  np.testing.assert_allclose(outputs, whole(is_relative), **ROUNDING)
  for found, exact in zip(cache, draw()[0][1:], strict=False):
    np.testing.assert_array_equal(found.swapaxes(1, 2), exact)
  feed(ragged(chunk, seed=1), is_relative, chunk=chunk)
  assert TRACES in ([], [(BATCH, chunk, HEADS, FEATURES)])


@pytest.mark.parametrize("chunk", [1, 3, RING])
def test_a_ring_goes_on_beyond_its_end(chunk):
  schedule = ragged(chunk)
  outputs, cache = feed(schedule, True, new_cache(max_length=RING), chunk)
  np.testing.assert_allclose(outputs, whole_of_a_ring(), **ROUNDING)
  # It is another thing than to see all tokens, and than to see none before the ring.
  assert (np.abs(outputs - whole(True))[:, RING:].max(axis=(2, 3)) > 1e-3).all()
  for found, new in zip(cache[:2], draw()[0][1:], strict=True):
    for token in range(LENGTH - RING, LENGTH):
      np.testing.assert_array_equal(found[:, :, token % RING], new[:, token])


def test_a_row_that_went_round_the_ring_can_be_begun_anew():
  _, cache = feed(ragged(3), True, new_cache(max_length=RING), 3)
  cache = cache._replace(length=cache.length.at[1].set(0))
  outputs, _ = feed([[0, 3, 0]] * 4, True, cache, 3)
  np.testing.assert_allclose(outputs[1, :12], whole_of_a_ring()[1, :12], **ROUNDING)


def test_absolute_attention_beyond_the_end_is_nan():
  _, cache = feed([[4, 4, 4]] * 3, False)
  before = jax.tree.map(np.array, cache)
  parts, _ = draw()
  # The last token, and then some again.
  parts = [jnp.concatenate([x[:, 12:], x[:, :3]], axis=1) for x in parts]
  counts = np.array([4, 0, 2], np.int32)
  outputs, cache = step(parts, [], cache, counts)
  exact = whole(False)[[0, 2], 12]
  np.testing.assert_allclose(outputs[np.array([0, 2]), 0], exact, **ROUNDING)
  is_nan = np.isnan(outputs).all(axis=(2, 3))
  np.testing.assert_array_equal(is_nan, [[0, 1, 1, 1], [0] * 4, [0, 1, 0, 0]])
  for b, count in enumerate(counts):
    np.testing.assert_array_equal(outputs[b, count:], 0)
  for found, old, new in zip(cache[:2], before[:2], parts[1:], strict=True):
    expected = old.copy()
    expected[[0, 2], :, 12] = new[np.array([0, 2]), 0]
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(cache.length, [16, 12, 14])


def first_chunk(scale=1):
  """Of rows of 4, 0 and 2 tokens, with the distances."""
  parts, distances = jax.tree.map(lambda x: scale * x, draw())
  return [x[:, :CHUNK] for x in parts], distances, np.array([4, 0, 2], np.int32)


def test_a_donated_cache_lies_where_it_lay(is_relative):
  cache = new_cache()
  places = [x.unsafe_buffer_pointer() for x in cache]
  parts, distances, counts = first_chunk()
  _, after = step(parts, distances if is_relative else [], cache, counts)
  assert all(x.is_deleted() for x in cache)
  assert [x.unsafe_buffer_pointer() for x in after] == places


def test_steps_in_a_scan_make_no_copy_of_the_cache(is_relative):
  parts, (_, *biases) = draw()
  by_token = [x[:, :, None].swapaxes(0, 1) for x in parts]
  cache = new_cache(max_length=1009)
  distances = [jnp.zeros((1009, HEADS, FEATURES)), *biases] if is_relative else []

  def run(cache, by_token):
    def body(cache, parts):
      return attend(parts, distances, cache)[::-1]

    return jax.lax.scan(body, cache, by_token)

  compiled = jax.jit(run, donate_argnums=0).lower(cache, by_token).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < cache.keys.nbytes


def test_bfloat16(is_relative):
  outputs, cache = feed(ragged(), is_relative, new_cache(jnp.bfloat16), dtype=jnp.bfloat16)
  assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
  np.testing.assert_allclose(outputs, whole(is_relative, jnp.bfloat16), rtol=0, atol=0.05)


@pytest.mark.parametrize("lengths", [None, [0, 3, 13]])
def test_absolute_attention_refuses_rows_that_are_too_long(lengths):
  cache = new_cache()
  cache = cache._replace(length=cache.length.at[2].set(1))
  with pytest.raises(ValueError, match="cache: expected rows of at most M = 13 .* got 14"):
    attend(draw()[0], [], cache, lengths)
