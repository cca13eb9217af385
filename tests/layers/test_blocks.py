from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax.layers import blocks
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


def make(**settings):
  """A block and normal parameters in the place of the initial ones."""
  block = blocks.Block(lambda name: Mixer(name=name), HIDDEN, **settings)
  shapes = jax.eval_shape(block.init, jax.random.key(0), draw((BATCH, LENGTH, WIDTH)))
  leaves, tree = jax.tree.flatten(shapes["params"])
  return block, jax.tree.unflatten(tree, [draw(x.shape, i) for i, x in enumerate(leaves)])


@pytest.mark.parametrize(
  "norm, activation, scale", [("post", "gelu", {}), ("pre", "relu", dict(scale=3.7))]
)
def test_block(norm, activation, scale):
  block, params = make(norm=norm, activation=activation)
  inputs = draw((BATCH, LENGTH, WIDTH), seed=17)
  exact_params = jax.tree.map(np.float64, params)

  def mix(x):
    return scale.get("scale", 1) * np.cumsum(x, axis=1)

  expected = transformer.block(np.float64(inputs), exact_params, mix, norm, activation)
  output = jax.jit(block.apply)({"params": params}, inputs, **scale)
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm, use_bias", [("post", True), ("pre", False)])
def test_a_block_of_rms_norm_and_swiglu(norm, use_bias):
  settings = dict(norm=norm, activation="swiglu", norm_kind="rms_norm", use_bias=use_bias)
  block, params = make(**settings)
  assert {*params["mixer_norm"], *params["feed_forward_norm"]} == {"scale"}
  biases = {"bias"} if use_bias else set()
  shapes = {name: layer["kernel"].shape for name, layer in params["feed_forward"].items()}
  assert shapes == dict(hidden=(WIDTH, HIDDEN), gate=(WIDTH, HIDDEN), out=(HIDDEN, WIDTH))
  assert all({*layer} == {"kernel"} | biases for layer in params["feed_forward"].values())
  inputs = draw((BATCH, LENGTH, WIDTH), seed=17)
  exact_params = jax.tree.map(np.float64, params)

  def mix(x):
    return np.cumsum(x, axis=1)

  parts = np.float64(inputs), exact_params, mix, norm, "swiglu", transformer.rms_norm
  output = jax.jit(block.apply)({"params": params}, inputs)
  np.testing.assert_allclose(output, transformer.block(*parts), rtol=1e-5, atol=1e-5)


def test_gelu_is_by_erf():
  x = np.float32([-2, -0.5, 0, 0.5, 2])
  expected = [-0.04550026, -0.15426877, 0, 0.34573123, 1.9544997]
  # The approximation by tanh is off by 1e-4 at 0.5, and by 1e-3 at 2.
  np.testing.assert_allclose(blocks.ACTIVATIONS["gelu"](x), expected, atol=2e-7)


def test_the_epsilon_of_layer_norm_shows_where_the_variance_is_small():
  norm = blocks.Norm("layer_norm", jnp.float32)
  x = draw((3, WIDTH), scale=1e-3)
  params = {"scale": draw((WIDTH,), 1), "bias": draw((WIDTH,), 2)}
  output = norm.apply({"params": params}, x)
  exact_params = jax.tree.map(np.float64, params)
  expected = transformer.layer_norm(np.float64(x), exact_params)
  np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_each_branch_drops_features_of_its_own_before_they_are_added():
  # Biases of the network's output alone: each branch is a known constant, or dropped.
  block, params = make(norm="pre", dropout=0.5)
  params = jax.tree.map(jnp.zeros_like, params)
  params["mixer_norm"]["bias"] = jnp.ones(WIDTH)
  params["feed_forward"]["out"]["bias"] = jnp.full(WIDTH, 100.0)
  rngs = {"dropout": jax.random.key(0)}
  inputs = jnp.zeros((13, 1, WIDTH))
  train = jax.jit(partial(block.apply, deterministic=False))
  output = train({"params": params}, inputs, rngs=rngs)
  # Kept values grow by 1 / (1 - 0.5).
  assert {*np.unique(output)} == {0.0, 2.0, 200.0, 202.0}
