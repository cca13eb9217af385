"""Segments: the matrix of weights, and what must not matter."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops.segments import (
  init_segment_cache,
  pool_segments,
  pool_segments_cached,
  segment_ids,
  upsample_segments,
)
from tests import helpers
from tests.reference import exact
from tests.reference import pooling as reference

ROUNDING = dict(rtol=1e-5, atol=1e-5)
ROWS = {
  "none": "00000000000",
  "all": "11111111111",
  "first": "10000000000",
  "last": "00000000001",
  "both": "10000000001",
  "pairs": "00110110011",
  "some": "00010010100",
}
BOUNDARIES = np.array([[int(x) for x in row] for row in ROWS.values()])
BATCH, LENGTH = BOUNDARIES.shape
WIDTH, SMALL, LARGE = 5, 3, 13


def draw(places, dtype=jnp.float32):
  generator = np.random.default_rng(places)
  inputs = generator.standard_normal((BATCH, LENGTH, WIDTH))
  weights = generator.standard_normal((BATCH, places, WIDTH))
  return jnp.asarray(inputs, dtype), jnp.asarray(weights, dtype)


@partial(jax.jit, static_argnames=("capacity", "method"))
def pool(inputs, boundaries, weights, capacity, method="mean"):
  """The result and its gradients, one compilation."""
  result, pull = jax.vjp(
    lambda h, b: pool_segments(h, b, capacity, method=method), inputs, boundaries
  )
  return result, *pull(weights)


def floats():
  return jnp.asarray(BOUNDARIES, jnp.float32)


def assert_close(actual, expected, **tolerance):
  for a, b in zip(actual, expected, strict=True):
    b = np.asarray(b, np.float32)
    np.testing.assert_allclose(a.astype(jnp.float32), b, **(tolerance or ROUNDING))


def exact_pool(inputs, weights, capacity, method="mean"):
  equation = partial(reference.pool, capacity=capacity, method=method)
  return exact.run(equation, (inputs, BOUNDARIES), weights)


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_mean_is_that_of_the_matrix_and_so_are_its_gradients(capacity):
  inputs, weights = draw(capacity)
  expected = exact_pool(inputs, weights, capacity)
  assert_close(pool(inputs, floats(), weights, capacity), expected)
  assert np.abs(expected[2]).max() > 0.1


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_last_is_the_closing_token_and_gives_boundaries_no_gradient(capacity):
  inputs, weights = draw(capacity)
  expected = exact_pool(inputs, weights, capacity, "last")
  assert not expected[2].any()
  assert_close(pool(inputs, floats(), weights, capacity, "last"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_segments", [SMALL, LARGE])
def test_upsampling_reads_the_last_closed_segment_or_gives_nan(num_segments):
  weights, segments = draw(num_segments)
  equation = partial(reference.upsample, boundaries=BOUNDARIES)
  expected = exact.run(equation, (segments,), weights)
  assert np.isnan(expected[0]).any() == (num_segments == SMALL)
  found = exact.with_gradients(upsample_segments, (segments, floats()), weights)
  assert_close(found, (*expected, 0 * BOUNDARIES))


def test_boolean_boundaries_mean_the_same():
  inputs, weights = draw(LARGE)
  whole = BOUNDARIES.astype(bool)
  result, pull = jax.vjp(lambda x: pool_segments(x, whole, LARGE), inputs)
  assert_close((result, *pull(weights)), pool(inputs, floats(), weights, LARGE)[:2])
  np.testing.assert_array_equal(segment_ids(whole), np.cumsum(BOUNDARIES, axis=1) - BOUNDARIES)


@pytest.mark.parametrize("method", ["mean", "last"])
def test_no_matrix_of_tokens_and_segments_is_built(method):
  inputs, weights = draw(LARGE)
  programs = [
    pool.lower(inputs, floats(), weights, LARGE, method),
    jax.jit(partial(exact.with_gradients, upsample_segments)).lower((weights, floats()), inputs),
  ]
  for program in programs:
    shapes = re.findall(r"tensor<([\dx]+)x[a-z]\w+>", program.as_text())
    sizes = {math.prod(map(int, shape.split("x"))) for shape in shapes}
    assert max(sizes) == weights.size < BATCH * LENGTH * LARGE


def test_an_offset_of_the_activations_costs_no_digits():
  inputs, weights = draw(LARGE)
  inputs = 1e4 + inputs
  expected, *gradients = exact_pool(inputs, weights, LARGE)
  result, by_inputs, by_boundaries = pool(inputs, floats(), weights, LARGE)
  np.testing.assert_allclose(result, expected, rtol=2e-7)
  np.testing.assert_allclose(by_inputs, gradients[0], **ROUNDING)
  # A unit in the last place of 1e4 is 1e-3; weighted sums of 1e4 would lose 100 times it.
  np.testing.assert_allclose(by_boundaries, gradients[1], atol=5e-3)


def test_equals_the_authors_code():
  arrays = helpers.golden("E_shortening_mixed").items()
  arrays = {name: jnp.swapaxes(x, 0, 1) if x.ndim == 3 else x for name, x in arrays}
  boundaries, weights = jnp.asarray(arrays["in/boundaries"]), arrays["in/cot_down"]
  down = pool(arrays["in/hidden"], boundaries, weights[:, 1:], weights.shape[1] - 1)
  null = jnp.broadcast_to(arrays["in/null_group"], weights[:, :1].shape)
  pooled = jnp.concatenate([null, down[0]], axis=1)
  np.testing.assert_allclose(pooled, arrays["out/downsampled"], **ROUNDING)
  segments = arrays["in/shortened"], boundaries
  up = exact.with_gradients(upsample_segments, segments, arrays["in/cot_up"])
  np.testing.assert_array_equal(up[0], arrays["out/upsampled"])
  names = ("down/hidden", "down/boundaries", "up/shortened", "up/boundaries")
  expected = [arrays[f"grad_{name}"] for name in names]
  assert_close((*down[1:], *up[1:]), expected, rtol=0, atol=1e-4)


def test_bfloat16_is_summed_in_float32():
  inputs, weights = draw(LARGE, jnp.bfloat16)
  boundaries = floats().astype(jnp.bfloat16)
  half = pool(inputs, boundaries, weights, LARGE)
  assert [x.dtype for x in half] == [jnp.bfloat16] * 3
  wide = pool(inputs.astype(jnp.float32), floats(), weights.astype(jnp.float32), LARGE)
  for a, b in zip(half, wide, strict=True):
    np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))
  # Ones added up in bfloat16 would stop at 256.
  many = jnp.ones((2, 600, 3), jnp.bfloat16)
  none = jnp.zeros((2, 600), jnp.int32)
  np.testing.assert_array_equal(pool_segments(many, none, 1), 1)
  _, pull = jax.vjp(lambda s: upsample_segments(s, none), many[:, :2])
  np.testing.assert_array_equal(pull(many)[0][0], [[600] * 3, [0] * 3])


# Chunks of four rows, and how many tokens of each are real.
CHUNKS = [(4, (4, 3, 0, 2)), (1, (1, 0, 1, 1)), (1, (0, 1, 1, 0)), (4, (2, 4, 4, 4))]
CHUNKS += [(1, (1, 1, 0, 1)), (4, (3, 2, 4, 0)), (4, (0, 0, 1, 3))]
pool_cached = jax.jit(pool_segments_cached, static_argnames="method")


@pytest.mark.parametrize(
  "method, dtype", [("mean", jnp.float32), ("mean", jnp.bfloat16), ("last", jnp.float32)]
)
def test_chunks_are_the_whole(method, dtype):
  inputs, boundaries = np.asarray(draw(LARGE, dtype)[0][:4]), BOUNDARIES[[0, 1, 4, 6]]
  whole = pool_segments(inputs, boundaries, LENGTH, method=method)
  cache, seen, found = init_segment_cache(4, WIDTH), np.zeros(4, int), [[] for _ in range(4)]
  for size, lengths in CHUNKS:
    chunk = np.full((4, size, WIDTH), np.nan, dtype)
    b_bc = np.ones((4, size), int)
    for row, length in enumerate(lengths):
      part = slice(seen[row], seen[row] + length)
      chunk[row, :length] = inputs[row, part]
      b_bc[row, :length] = boundaries[row, part]
    segments, cache = pool_cached(chunk, b_bc, cache, method=method, lengths=np.array(lengths))
    assert segments.dtype == dtype and cache.total.dtype == jnp.float32
    segments = np.asarray(segments, np.float32)
    for row, length in enumerate(lengths):
      ended = int(b_bc[row, :length].sum())
      found[row].append(segments[row, :ended])
      # What is no segment is zero, nan in the padding or not.
      np.testing.assert_array_equal(segments[row, ended:], 0)
    seen += lengths
  assert (seen == LENGTH).all()
  # The sums' order is another, which may round a bfloat16 the other way.
  rounding = dict(rtol=1e-6 if dtype == jnp.float32 else 2**-8, atol=1e-6)
  for row, segments in enumerate(found):
    expected = whole[row, : boundaries[row].sum()].astype(jnp.float32)
    np.testing.assert_allclose(np.concatenate(segments), expected, err_msg=str(row), **rounding)
