from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import layers, models
from dpjax.layers import block as block_lib


def test_branches_are_summed_in_the_wider_dtype():
  norm = layers.Norm("rms_norm", jnp.bfloat16)
  block = layers.Block(
    layers.ShortConvolution(max_length=5, dtype=jnp.bfloat16), None, norm, None, True
  )
  inputs = jnp.float32(np.random.default_rng(0).standard_normal((2, 5, 6)))
  params = jax.tree.map(jnp.zeros_like, block.init(jax.random.key(0), inputs)["params"])
  assert params.keys() == {"mixer", "mixer_norm"}  # one branch, which gives 0
  apply = models.Stack(1, (block,), residual_dtype=jnp.float32).apply
  layer = {"params": {"blocks_0": jax.tree.map(lambda x: x[None], params)}}
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
  parts = layers.ME(max_length=3), layers.FeedForward(11), layers.Norm(), layers.Norm()
  block, inputs = layers.Block(*parts, is_pre_norm=True, dropout=0.5), jnp.zeros((13, 1, 6))
  shapes = jax.eval_shape(block.init, jax.random.key(0), inputs)["params"]
  params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
  params["mixer_norm"]["bias"], params["mixer"]["taps"] = jnp.ones(6), jnp.ones(3)
  params["feed_forward"]["out"]["bias"] = jnp.full(6, 100.0)
  rngs = {"dropout": jax.random.key(0)}
  train = jax.jit(partial(block.apply, deterministic=False))
  output = train({"params": params}, inputs, rngs=rngs)
  # Kept values grow by 1 / (1 - 0.5).
  assert {*np.unique(output)} == {0.0, 2.0, 200.0, 202.0}
