from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax import layers, models
from dpjax.layers import block as block_lib
from tests.reference import transformer

BATCH, LENGTH, WIDTH, HIDDEN = 2, 5, 6, 11


class Mixer(nn.Module):
  """A running sum over the positions, times what it is given beside its inputs."""

  @nn.compact
  def __call__(self, inputs, *, scale=1.0, deterministic=True):
    return scale * jnp.cumsum(inputs, axis=1)


def draw(shape, seed=0, scale=1.0):
  normal = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(scale * normal, jnp.float32)


def make(activation="relu", **settings):
  """A block and normal parameters in the place of the initial ones."""
  parts = Mixer(), layers.FeedForward(HIDDEN, activation), layers.Norm(), layers.Norm()
  block = layers.Block(*parts, **settings)
  shapes = jax.eval_shape(block.init, jax.random.key(0), draw((BATCH, LENGTH, WIDTH)))
  leaves, tree = jax.tree.flatten(shapes["params"])
  return block, jax.tree.unflatten(tree, [draw(x.shape, i) for i, x in enumerate(leaves)])


@pytest.mark.parametrize(
  "norm, activation, scale", [("post", "gelu", {}), ("pre", "relu", dict(scale=3.7))]
)
def test_block(norm, activation, scale):
  block, params = make(activation, is_pre_norm=norm == "pre")
  inputs = draw((BATCH, LENGTH, WIDTH), seed=17)
  exact_params = jax.tree.map(np.float64, params)

  def mix(x):
    return scale.get("scale", 1) * np.cumsum(x, axis=1)

  expected = transformer.block(np.float64(inputs), exact_params, mix, norm, activation)
  output = jax.jit(block.apply)({"params": params}, inputs, **scale)
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_branches_are_summed_in_the_wider_dtype():
  norm = layers.Norm("rms_norm", jnp.bfloat16)
  block = layers.Block(layers.ShortConvolution(LENGTH, dtype=jnp.bfloat16), None, norm, None, True)
  inputs = draw((BATCH, LENGTH, WIDTH))
  params = jax.tree.map(jnp.zeros_like, block.init(jax.random.key(0), inputs)["params"])
  assert params.keys() == {"mixer", "mixer_norm"}  # one branch, which gives 0
  apply = models.Stack(1, block, residual_dtype=jnp.float32).apply
  layer = {"params": jax.tree.map(lambda x: x[None], params)}
  np.testing.assert_array_equal(apply(layer, inputs), inputs)
  output = apply(layer, inputs.astype(jnp.bfloat16))
  assert output.dtype == jnp.float32


def test_gelu_is_by_erf():
  x = np.float32([-2, -0.5, 0, 0.5, 2])
  expected = [-0.04550026, -0.15426877, 0, 0.34573123, 1.9544997]
  # The approximation by tanh is off by 1e-4 at 0.5, and by 1e-3 at 2.
  np.testing.assert_allclose(block_lib.ACTIVATIONS["gelu"](x), expected, atol=2e-7)


def test_each_branch_drops_features_of_its_own_before_they_are_added():
  # Biases of the network's output alone: each branch is a known constant, or dropped.
  block, params = make(is_pre_norm=True, dropout=0.5)
  params = jax.tree.map(jnp.zeros_like, params)
  params["mixer_norm"]["bias"] = jnp.ones(WIDTH)
  params["feed_forward"]["out"]["bias"] = jnp.full(WIDTH, 100.0)
  rngs = {"dropout": jax.random.key(0)}
  inputs = jnp.zeros((13, 1, WIDTH))
  train = jax.jit(partial(block.apply, deterministic=False))
  output = train({"params": params}, inputs, rngs=rngs)
  # Kept values grow by 1 / (1 - 0.5).
  assert {*np.unique(output)} == {0.0, 2.0, 200.0, 202.0}
