"""Relative attention of a layer, alone and with positions that layers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax.layers.attention import RelativeAttention, SharedPositions

BATCH, LENGTH, MAX_LENGTH, HEADS, WIDTH = 2, 5, 7, 3, 12


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def make(**settings):
  """A layer and normal parameters in the place of the initial ones."""
  layer = RelativeAttention(HEADS, MAX_LENGTH, **settings)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), draw(1, 1, WIDTH))["params"]
  leaves, tree = jax.tree.flatten(shapes)
  leaves = [draw(*leaf.shape, seed=7 + i) / 2 for i, leaf in enumerate(leaves)]
  return layer, jax.tree.unflatten(tree, leaves)


def test_alone_is_as_with_shared_positions():
  (layer, params), distances = make(), LENGTH + 4
  inputs, weights = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)

  def alone(params, inputs):
    return layer.apply({"params": params}, inputs)

  def sharing(params, inputs):
    positions = SharedPositions(HEADS).apply({"params": params["positions"]}, distances, WIDTH)
    assert positions.table.shape == (distances, WIDTH)
    rest = {name: leaf for name, leaf in params.items() if name != "positions"}
    return layer.apply({"params": rest}, inputs, positions=positions)

  @jax.jit
  def run(params, inputs):
    pairs = [jax.vjp(function, params, inputs) for function in (alone, sharing)]
    return [(result, pull(weights)) for result, pull in pairs]

  expected, found = run(params, inputs)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
  by_positions = expected[1][0]["positions"]
  assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(by_positions))


@functools.partial(jax.jit, static_argnums=0)
def train(module, params, inputs):
  rngs = {"dropout": jax.random.key(3)}
  return module.apply({"params": params}, inputs, deterministic=False, rngs=rngs)


class Pair(nn.Module):
  """Two layers, each with dropout of the positions: of shared ones, or of its own."""

  is_shared: bool

  @nn.compact
  def __call__(self, inputs, *, deterministic=True):
    settings = dict(deterministic=deterministic)
    if self.is_shared:
      settings["positions"] = SharedPositions(HEADS, 0.5, name="positions")(
        *inputs.shape[1:], deterministic=deterministic
      )
    return [
      RelativeAttention(HEADS, MAX_LENGTH, position_dropout=0.5, name=name)(inputs, **settings)
      for name in ("first", "second")
    ]


def test_layers_that_share_positions_drop_the_same():
  layer, params = make()
  rest = {name: leaf for name, leaf in params.items() if name != "positions"}
  shared = {"first": rest, "second": rest, "positions": params["positions"]}
  inputs = draw(BATCH, LENGTH, WIDTH)
  first, second = train(Pair(True), shared, inputs)
  np.testing.assert_array_equal(first, second)
  assert not np.allclose(first, layer.apply({"params": params}, inputs), atol=1e-2)
  own = {"first": params, "second": params}
  first, second = train(Pair(False), own, inputs)
  assert not np.allclose(first, second, atol=1e-2)
