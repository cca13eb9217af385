"""Convolution with a cache: the whole pass in whatever pieces, and what it refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import causal_convolution
from dpjax.ops.causal_convolution_cache import (
  causal_convolution_cached,
  init_convolution_cache,
  init_online_convolution_cache,
)

BATCH, TAPS, WIDTH, WRITTEN = 3, 29, 5, 7
# Blocks of 4, 8 and 16 inputs, and of all of them every 32 steps.
KINDS = {
  "plain": init_convolution_cache,
  "online": functools.partial(init_online_convolution_cache, block=4),
}
CASES = [("plain", 1), ("plain", 2), ("plain", 3), ("online", 1), ("online", 2)]
STEPS = 107

decode = jax.jit(causal_convolution_cached)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-rank{case[1]}")
def case(request):
  return request.param


def draw(rank, length=STEPS, seed=0):
  """Inputs and taps."""
  generator = np.random.default_rng(seed)
  inputs = generator.standard_normal((BATCH, length, WIDTH)).astype(np.float32)
  taps = generator.standard_normal((TAPS, WIDTH, WRITTEN)[:rank]).astype(np.float32)
  return inputs, taps


def init(kind, dtype=jnp.float32):
  return KINDS[kind](BATCH, TAPS, WIDTH, dtype)


def whole(inputs, taps):
  """One pass over all inputs; taps of zero follow those that there are."""
  more = max(inputs.shape[1] - taps.shape[0], 0)
  taps = np.pad(taps, [(0, more)] + [(0, 0)] * (taps.ndim - 1))
  return np.asarray(causal_convolution(inputs, taps, implementation="scan"))


def by_chunks(inputs, taps, cache, sizes, lengths):
  """Outputs row by row, of chunks of which `lengths` [chunks, B] inputs are real."""
  outputs, done = [[] for _ in inputs], np.zeros(len(inputs), int)
  for size, real in zip(sizes, lengths, strict=True):
    chunk = np.full((len(inputs), size, WIDTH), np.nan, np.float32)
    for b, count in enumerate(real):
      chunk[b, :count] = inputs[b, done[b] : done[b] + count]
    y, cache = decode(chunk, taps, cache, lengths=np.asarray(real, np.int32))
    assert np.isfinite(y).all()
    for b, count in enumerate(real):
      outputs[b].append(np.asarray(y)[b, :count])
    done += real
  np.testing.assert_array_equal(cache.length, done)
  return [np.concatenate(x) for x in outputs]


@functools.partial(jax.jit, donate_argnums=2)
def by_steps(inputs, taps, cache, real):
  """Outputs and cache of a scan over [T, B, 1, D], of which `real` [T, B] count."""

  def body(cache, x):
    y, cache = causal_convolution_cached(x[0], taps, cache, lengths=x[1])
    return cache, y[:, 0]

  cache, y_tbe = jax.lax.scan(body, cache, (inputs, real))
  return y_tbe, cache


def assert_close(actual, expected):
  assert actual.shape == expected.shape
  assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


def test_chunks_of_rows_of_different_lengths_are_one_pass(case):
  kind, rank = case
  inputs, taps = draw(rank, 211)
  generator = np.random.default_rng(1)
  # A prompt, steps of a whole block and more, a chunk longer than the window, steps.
  sizes = [13, *[1] * 11, 37, *[1] * 19, 13, 13, 1, 1]
  lengths = [generator.integers(0, size + 1, BATCH) for size in sizes]
  lengths[0], lengths[12], lengths[32] = [13, 0, 6], [37, 2, 31], [0, 13, 5]
  for b, y in enumerate(by_chunks(inputs, taps, init(kind), sizes, lengths)):
    assert_close(y, whole(inputs[b : b + 1, : len(y)], taps)[0])


def test_steps_are_one_pass_where_rows_pause(case):
  kind, rank = case
  inputs, taps = draw(rank)
  generator = np.random.default_rng(2)
  real = generator.integers(0, 4, (STEPS, BATCH)) > [[0, 1, 2]]
  # A row that pauses for a whole round of blocks.
  real[30:65, 1] = False
  index = np.maximum(real.cumsum(axis=0) - 1, 0)
  given = np.stack([x[i] for x, i in zip(inputs, index.T, strict=True)], axis=1)
  given[~real] = np.nan
  y_tbe, cache = by_steps(given[:, :, None], taps, init(kind), real.astype(np.int32))
  np.testing.assert_array_equal(cache.length, real.sum(axis=0))
  assert real[:, :2].sum(axis=0).min() > TAPS
  for b, count in enumerate(cache.length):
    y = np.asarray(y_tbe)[real[:, b], b]
    assert_close(y, whole(inputs[b : b + 1, :count], taps)[0])


def all_steps(rank, cache, length=STEPS, window=TAPS, seed=0):
  """Outputs [B, T, .] of every step, and those of one pass."""
  inputs, taps = draw(rank, length, seed)
  real = np.ones((length, BATCH), np.int32)
  y_tbd, _ = by_steps(inputs.swapaxes(0, 1)[:, :, None], taps[:window], cache, real)
  return y_tbd.swapaxes(0, 1), whole(inputs, taps[:window])


@pytest.mark.parametrize("window, block", [(TAPS, 4), (1, 1), (3, 1), (7, 8), (8, 4)])
def test_online_is_one_pass_at_every_step(window, block):
  length = STEPS if window == TAPS else 23
  cache = init_online_convolution_cache(BATCH, window, WIDTH, block=block)
  found, expected = all_steps(2, cache, length, window, seed=3)
  # Of a few: where a block gives too little or too much, few steps differ.
  for begin in range(0, length, 16):
    assert_close(found[:, begin : begin + 16], expected[:, begin : begin + 16])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_compile_once_and_in_place(kind):
  traced = []

  @functools.partial(jax.jit, donate_argnums=2)
  def step(inputs, taps, cache):
    traced.append(cache)
    return causal_convolution_cached(inputs, taps, cache)

  inputs, taps = draw(2)
  cache = init(kind)
  for t in range(9):
    old = cache
    _, cache = step(inputs[:, t : t + 1], taps, cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
  assert len(traced) == 1
  memory = step.lower(inputs[:, :1], taps, cache).compile().memory_analysis()
  assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_a_step_neither_copies_the_cache_nor_transforms_ahead():
  inputs, taps = draw(2)
  given, real = inputs.swapaxes(0, 1)[:, :, None], np.ones((STEPS, BATCH), np.int32)
  text = by_steps.lower(given, taps, init("online"), real).compile().as_text()
  assert not re.findall(rf"= f32\[{BATCH},{TAPS},{WIDTH}\]\S* copy\(", text)
  # Transforms stay in the branches that run when a block ends, apart from the scan.
  transforms = [x for x in text.split("\n\n") if " fft(" in x]
  assert len(transforms) == 4
  assert not [x for x in transforms if " while(" in x]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_summed_in_float32(kind):
  inputs, taps = (jnp.asarray(x, jnp.bfloat16) for x in draw(2))
  real = np.ones((STEPS, BATCH), np.int32)
  y_tbd, _ = by_steps(inputs.swapaxes(0, 1)[:, :, None], taps, init(kind, dtype=jnp.bfloat16), real)
  assert y_tbd.dtype == jnp.bfloat16
  expected = whole(*(np.asarray(x.astype(jnp.float32)) for x in (inputs, taps)))
  error = np.abs(y_tbd.swapaxes(0, 1).astype(jnp.float32) - expected)
  # That of rounding the sum: 8 bits, up to half of the last one.
  assert (error <= 2.0**-8 * 1.01 * np.abs(expected) + 1e-4).all()
