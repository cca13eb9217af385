"""The positions of relative attention: a layer's own, and those that layers share."""

import jax
import numpy as np
import pytest

from dpjax.layers import Context
from dpjax.layers.attention import RelativeAttention, SharedPositions
from tests.reference.exact import normal

BATCH, LENGTH, MAX_LENGTH, HEADS, WIDTH = 2, 5, 7, 3, 12


def test_alone_is_as_with_shared_positions():
  layer, distances = RelativeAttention(num_heads=HEADS, max_length=MAX_LENGTH), LENGTH + 4
  inputs, weights = normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, WIDTH, seed=1)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), inputs)["params"]
  leaves, tree = jax.tree.flatten(shapes)
  leaves = [normal(*leaf.shape, seed=7 + i) / 2 for i, leaf in enumerate(leaves)]
  params = jax.tree.unflatten(tree, leaves)

  def alone(params, inputs):
    return layer.apply({"params": params}, inputs)

  def sharing(params, inputs):
    positions = SharedPositions(HEADS).apply({"params": params["positions"]}, distances, WIDTH)
    assert positions.table.shape == (distances, WIDTH)
    rest = {name: leaf for name, leaf in params.items() if name != "positions"}
    return layer.apply({"params": rest}, inputs, Context(positions=positions))

  @jax.jit
  def run(params, inputs):
    pairs = [jax.vjp(function, params, inputs) for function in (alone, sharing)]
    return [(result, pull(weights)) for result, pull in pairs]

  expected, actual = run(params, inputs)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
  )
  by_positions = expected[1][0]["positions"]
  assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(by_positions))


@pytest.mark.parametrize(
  "module, arguments",
  [
    (
      RelativeAttention(num_heads=HEADS, max_length=MAX_LENGTH, position_dropout=0.5),
      [normal(BATCH, LENGTH, WIDTH)],
    ),
    (SharedPositions(HEADS, 0.5), [LENGTH, WIDTH]),
  ],
)
def test_positions_are_dropped_in_training_alone(module, arguments):
  variables = module.init(jax.random.key(0), *arguments)

  def run(seed, **settings):
    rngs = {"dropout": jax.random.key(seed)}
    return jax.tree.leaves(module.apply(variables, *arguments, rngs=rngs, **settings))[0]

  first, second = (run(seed, deterministic=False) for seed in (3, 4))
  assert not np.allclose(first, second, atol=1e-3) and not np.allclose(first, run(3), atol=1e-3)
