"""Stacks of two mixers in turn: causality, chunks, documents, and shared positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers, models
from dpjax.models.hourglass import HourglassCache
from tests import helpers
from tests.test_contract import MIXERS

BATCH, LENGTH, WIDTH, MAX_LENGTH, NUM_LAYERS = 2, 11, 12, 13, 3
X = np.float32(np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)))
# Row, first position and end of each document.
DOCUMENTS = [(0, 0, 4), (0, 4, 6), (0, 6, 11), (1, 0, 1), (1, 1, 11)]
STARTS = np.zeros((BATCH, LENGTH), np.int32)
STARTS[[0, 0, 0, 1, 1], [0, 4, 6, 0, 1]] = 1
# Sizes of chunks, and how many positions of each row are real.
CHUNKS = [(5, (5, 2)), (1, (1, 1)), (5, (0, 4)), (5, (5, 4))]

NAMES = [*MIXERS]
# Each mixer is once the first and once the second; two of relative attention share positions.
PAIRS = [(name, NAMES[(i + 1) % len(NAMES)]) for i, name in enumerate(NAMES)]
RELATIVE = ("relative_attention", "relative_attention")
FAST = [("dispatcher", "dispatcher_multihead"), RELATIVE]
in_turn = pytest.mark.parametrize(
  "pair",
  [helpers.slow_unless(pair in FAST, pair, id="-".join(pair)) for pair in [*PAIRS, RELATIVE]],
)


def make_block(name):
  mixer = MIXERS[name][0](max_length=MAX_LENGTH)
  norms = layers.Norm(), layers.Norm()
  return layers.Block(mixer, layers.FeedForward(7, "gelu"), *norms, is_pre_norm=True)


def make(pair):
  """A model's three layers of two mixers in turn, and what they share."""
  stack = models.Stack(NUM_LAYERS, tuple(make_block(name) for name in pair))
  shared = [mixer.make_positions() for mixer in stack.mixers]
  return models.Hourglass(stack, shared_positions=shared[0] or shared[1])


def draw_params(core):
  """Normal numbers instead of the initial values, since some of those are 0."""
  shapes = jax.eval_shape(core.init, jax.random.key(0), X)["params"]
  generator = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.float32(generator.standard_normal(x.shape) / 3), shapes)


@in_turn
def test_an_output_depends_on_its_row_up_to_its_position(pair):
  core = make(pair)
  params = draw_params(core)

  def run(x):
    return core.apply({"params": params}, x).hidden.sum(axis=2)

  # [row, position, row, position] of the output and the input.
  depends = (np.array(jax.jit(jax.jacrev(run))(X)) != 0).any(axis=4)
  distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
  for row in range(BATCH):
    own = depends[row, :, row]
    assert own[distance == 0].all() and not own[distance < 0].any()
    assert not np.delete(depends[row], row, axis=1).any()


@in_turn
def test_chunks_give_the_outputs_of_whole_rows(pair):
  core = make(pair)
  params = {"params": draw_params(core)}
  full = jax.jit(core.apply)(params, X).hidden

  @jax.jit
  def step(x, cache, lengths):
    return core.apply(params, x, None, cache, layers.Context(lengths=lengths), method="step")

  cache = HourglassCache((), core.layers.init_cache(BATCH, WIDTH))
  seen = np.zeros(BATCH, int)
  for size, lengths in CHUNKS:
    chunk = np.full((BATCH, size, WIDTH), 1e3, np.float32)
    for row, length in enumerate(lengths):
      chunk[row, :length] = X[row, seen[row] :][:length]
    output, cache = step(chunk, cache, jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
      expected = full[row, seen[row] :][:length]
      np.testing.assert_allclose(output[row, :length], expected, rtol=1e-4, atol=1e-4)
    seen += lengths
  assert (seen == LENGTH).all()


@in_turn
def test_documents_give_the_outputs_that_they_have_alone(pair):
  core = make(pair)
  run = jax.jit(partial(core.apply, {"params": draw_params(core)}))
  packed = run(X, None, layers.Context(document_starts=jnp.asarray(STARTS))).hidden
  alone = np.zeros((len(DOCUMENTS), LENGTH, WIDTH), np.float32)
  for i, (row, start, end) in enumerate(DOCUMENTS):
    alone[i, : end - start] = X[row, start:end]
  expected = run(alone).hidden
  for i, (row, start, end) in enumerate(DOCUMENTS):
    want = expected[i, : end - start]
    np.testing.assert_allclose(packed[row, start:end], want, rtol=1e-4, atol=1e-4)
  assert not np.allclose(packed, run(X).hidden, atol=1e-2)


def test_layers_of_relative_attention_share_positions_and_biases():
  core = make(RELATIVE)
  params = draw_params(core)
  shared = {"content_bias": (2, WIDTH // 2), "position_bias": (2, WIDTH // 2)}
  assert {name: x.shape for name, x in params["shared_positions"].items()} == shared
  mixers = [params["layers"][f"blocks_{p}"]["mixer"] for p in range(2)]
  assert all("positions" not in mixer for mixer in mixers)

  @jax.jit
  def run(params):
    whole = core.apply({"params": params}, X).hidden
    shared = {"params": params["shared_positions"]}
    positions = core.shared_positions.apply(shared, LENGTH, WIDTH)
    context = layers.Context(positions=positions)
    return whole, core.layers.apply({"params": params["layers"]}, X, context)

  whole, handed_on = run(params)
  np.testing.assert_allclose(whole, handed_on, rtol=1e-5, atol=1e-5)
  grads = jax.jit(jax.grad(lambda params: run(params)[0][:, :, :5].sum()))(params)
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(grads["shared_positions"]))
