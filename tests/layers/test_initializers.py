"""Where parameters begin, by the bounds of their uniform distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.layers import attention, blocks, dispatcher, embeddings

WIDTH, HIDDEN = 102, 77


def init(module, length=3):
  inputs = jnp.zeros((2, length, WIDTH))
  return jax.jit(module.init)(jax.random.key(0), inputs)["params"]


def is_uniform(x, bound):
  """U(-bound, bound): the ends are nearly reached, and the deviation fits."""
  x = np.asarray(x)
  assert abs(x).max() <= bound
  assert abs(x).max() > (1 - 8 / x.size) * bound
  error = 6 * bound / np.sqrt(3 * x.size)
  assert abs(x.mean()) < error
  assert abs(x.std() - bound / np.sqrt(3)) < error


@pytest.mark.parametrize("num_heads", [1, 3])
def test_dispatcher(num_heads):
  params = init(dispatcher.Dispatcher(num_heads, 512))
  size = WIDTH // num_heads
  shapes = {name: params[name]["kernel"].shape for name in params}
  assert shapes == {"values": (size, size), "gates": (size, 9), "out": (size, size)}
  for name in params:
    assert params[name].keys() == {"kernel"}
    is_uniform(params[name]["kernel"], size**-0.5)


def test_multi_head_dispatcher():
  params = init(dispatcher.MultiHeadDispatcher(3, 512))
  shapes = {name: params[name]["kernel"].shape for name in params}
  square = (WIDTH, WIDTH)
  assert shapes == {"values": square, "gates": (WIDTH, 27), "out": square}
  for name in params:
    assert params[name].keys() == {"kernel"}
    is_uniform(params[name]["kernel"], WIDTH**-0.5)


def test_attention():
  params = init(attention.SelfAttention(3, 512))
  assert params["queries_keys_values"]["kernel"].shape == (WIDTH, 3, WIDTH)
  # Xavier of the one matrix [D, 3D].
  is_uniform(params["queries_keys_values"]["kernel"], (6 / (4 * WIDTH)) ** 0.5)
  is_uniform(params["out"]["kernel"], WIDTH**-0.5)
  assert not params["queries_keys_values"]["bias"].any()
  assert not params["out"]["bias"].any()


def test_feed_forward():
  params = init(blocks.FeedForward(HIDDEN))
  for name, fan_in in (("hidden", WIDTH), ("out", HIDDEN)):
    is_uniform(params[name]["kernel"], fan_in**-0.5)
    is_uniform(params[name]["bias"], fan_in**-0.5)


def test_tables():
  layer = embeddings.TokenAndPosition(71, WIDTH, 37, "learned")
  params = layer.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  is_uniform(params["tokens"]["embedding"], 0.1)
  is_uniform(params["positions"], 0.1)
