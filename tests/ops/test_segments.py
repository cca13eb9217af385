"""Segments: the matrix of weights, the authors' numbers, and what must not matter."""

import functools
import math
import re

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


@functools.partial(jax.jit, static_argnames=("capacity", "method"))
def pool(inputs, boundaries, weights, capacity, method="mean"):
  """The result and its gradients, one compilation."""
  result, pull = jax.vjp(
    lambda h, b: pool_segments(h, b, capacity, method=method), inputs, boundaries
  )
  return result, *pull(weights)


@jax.jit
def upsample(segments, boundaries, weights):
  result, pull = jax.vjp(upsample_segments, segments, boundaries)
  return result, *pull(weights)


def floats(boundaries=BOUNDARIES):
  return jnp.asarray(boundaries, jnp.float32)


def assert_close(actual, expected, **tolerance):
  for a, b in zip(actual, expected, strict=True):
    b = np.asarray(b, np.float32)
    np.testing.assert_allclose(a.astype(jnp.float32), b, **(tolerance or ROUNDING))


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_mean_is_that_of_the_matrix_and_so_are_its_gradients(capacity):
  inputs, weights = draw(capacity)
  expected = reference.pool_mean(inputs, BOUNDARIES, capacity)
  gradients = reference.pool_mean_gradients(inputs, BOUNDARIES, capacity, weights)
  actual = pool(inputs, floats(), weights, capacity)
  assert_close(actual, (expected, *gradients))
  assert np.abs(gradients[1]).max() > 0.1
  is_used = np.arange(capacity) <= BOUNDARIES.sum(axis=1)[:, None]
  np.testing.assert_array_equal(np.asarray(actual[0])[~is_used], 0)


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_last_is_the_closing_token_and_gives_boundaries_no_gradient(capacity):
  inputs, weights = draw(capacity)
  actual = pool(inputs, floats(), weights, capacity, "last")
  expected = reference.pool_last(inputs, BOUNDARIES, capacity)
  by_inputs = np.zeros(inputs.shape)
  for b, row in enumerate(BOUNDARIES):
    for m, t in enumerate(np.flatnonzero(row)[:capacity]):
      by_inputs[b, t] = weights[b, m]
  assert_close(actual, (expected, by_inputs, 0 * BOUNDARIES), rtol=0, atol=0)


@pytest.mark.parametrize("num_segments", [SMALL, LARGE])
def test_upsampling_reads_the_last_closed_segment_or_gives_nan(num_segments):
  weights, segments = draw(num_segments)
  actual = upsample(segments, floats(), weights)
  expected = reference.upsample(segments, BOUNDARIES)
  np.testing.assert_array_equal(actual[0], expected.astype(np.float32))
  assert np.isnan(expected).any() == (num_segments == SMALL)
  by_segments = reference.upsample_gradient(num_segments, BOUNDARIES, weights)
  assert_close(actual[1:], (by_segments, np.zeros_like(BOUNDARIES)))


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8])
def test_boundaries_of_any_dtype_mean_the_same(dtype):
  inputs, weights = draw(LARGE)
  expected = pool(inputs, floats(), weights, LARGE)
  whole = BOUNDARIES.astype(dtype)

  @jax.jit
  def run(inputs):
    result, pull = jax.vjp(lambda x: pool_segments(x, whole, LARGE), inputs)
    return result, *pull(weights)

  assert_close(run(inputs), expected[:2])
  ids = segment_ids(whole)
  assert ids.dtype == jnp.int32
  np.testing.assert_array_equal(ids, reference.segment_ids(BOUNDARIES))


@pytest.mark.parametrize("method", ["mean", "last"])
def test_no_matrix_of_tokens_and_segments_is_built(method):
  inputs, weights = draw(LARGE)
  programs = [
    pool.lower(inputs, floats(), weights, LARGE, method),
    upsample.lower(weights, floats(), inputs),
  ]
  for program in programs:
    shapes = re.findall(r"tensor<([\dx]+)x[a-z]\w+>", program.as_text())
    sizes = {math.prod(map(int, shape.split("x"))) for shape in shapes}
    assert max(sizes) == weights.size < BATCH * LENGTH * LARGE


def test_an_offset_of_the_activations_costs_no_digits():
  inputs, weights = draw(LARGE)
  inputs = 1e4 + inputs
  expected = reference.pool_mean(inputs, BOUNDARIES, LARGE)
  gradients = reference.pool_mean_gradients(inputs, BOUNDARIES, LARGE, weights)
  result, by_inputs, by_boundaries = pool(inputs, floats(), weights, LARGE)
  np.testing.assert_allclose(result, expected, rtol=2e-7)
  np.testing.assert_allclose(by_inputs, gradients[0], **ROUNDING)
  # A unit in the last place of 1e4 is 1e-3; weighted sums of 1e4 would lose 100 times it.
  np.testing.assert_allclose(by_boundaries, gradients[1], atol=5e-3)


@pytest.mark.parametrize("case", ["mixed", "random", "none"])
def test_equals_the_authors_code(case):
  with np.load(helpers.ROOT / f"tests/golden/E_shortening_{case}.npz") as file:
    arrays = {name: jnp.swapaxes(x, 0, 1) if x.ndim == 3 else x for name, x in file.items()}
  boundaries, weights = jnp.asarray(arrays["in/boundaries"]), arrays["in/cot_down"]
  capacity = weights.shape[1] - 1
  down = pool(arrays["in/hidden"], boundaries, weights[:, 1:], capacity)
  null = jnp.broadcast_to(arrays["in/null_group"], weights[:, :1].shape)
  pooled = jnp.concatenate([null, down[0]], axis=1)
  np.testing.assert_allclose(pooled, arrays["out/downsampled"], **ROUNDING)
  up = upsample(arrays["in/shortened"], boundaries, arrays["in/cot_up"])
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", ["mean", "last"])
def test_chunks_are_the_whole(method, dtype):
  inputs, boundaries = draw(LARGE, dtype)[0][:4], BOUNDARIES[[0, 1, 4, 6]]
  whole = pool_segments(inputs, boundaries, LENGTH, method=method)
  cache, seen, found = init_segment_cache(4, WIDTH), np.zeros(4, int), [[] for _ in range(4)]
  for size, lengths in CHUNKS:
    chunk = jnp.full((4, size, WIDTH), jnp.nan, dtype)
    b_bc = np.ones((4, size), int)
    for row, length in enumerate(lengths):
      part = slice(seen[row], seen[row] + length)
      chunk = chunk.at[row, :length].set(inputs[row, part])
      b_bc[row, :length] = boundaries[row, part]
    segments, cache = pool_cached(chunk, b_bc, cache, method=method, lengths=np.array(lengths))
    assert segments.dtype == dtype and cache.total.dtype == jnp.float32
    for row, length in enumerate(lengths):
      ended = int(b_bc[row, :length].sum())
      found[row].append(segments[row, :ended])
      # What is no segment is zero, nan in the padding or not.
      np.testing.assert_array_equal(segments[row, ended:], jnp.zeros((), dtype))
    seen += lengths
  assert (seen == LENGTH).all()
  # The sums' order is another, which may round a bfloat16 the other way.
  rounding = dict(rtol=1e-6 if dtype == jnp.float32 else 2**-8, atol=1e-6)
  for row, segments in enumerate(found):
    expected = whole[row, : boundaries[row].sum()].astype(jnp.float32)
    np.testing.assert_allclose(
      np.concatenate(segments).astype(np.float32), expected, err_msg=str(row), **rounding
    )
    # The open segment is what came after the last boundary.
    ends = np.flatnonzero(boundaries[row])
    begin = ends[-1] + 1 if len(ends) else 0
    opened = np.asarray(inputs[row, begin:].astype(jnp.float32))
    np.testing.assert_allclose(cache.total[row], opened.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert cache.count[row] == LENGTH - begin
