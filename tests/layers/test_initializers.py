"""Where parameters begin, by what is known of their distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.config import registry
from dpjax.layers import attention, block, dispatcher, embeddings, extractors
from dpjax.models.build import build_model
from tests import helpers

WIDTH, HIDDEN = 102, 77


def init(module):
  inputs = jnp.zeros((2, 3, WIDTH))
  return jax.jit(module.init)(jax.random.key(0), inputs)["params"]


def kernels(params):
  """Shapes of the kernels, of which each is U(-1, 1) / sqrt(its inputs); there is nothing else."""
  for leaves in params.values():
    assert leaves.keys() == {"kernel"}
    is_uniform(leaves["kernel"], len(leaves["kernel"]) ** -0.5)
  return {name: leaves["kernel"].shape for name, leaves in params.items()}


def is_uniform(x, bound):
  """U(-bound, bound): the ends are nearly reached, and the deviation fits."""
  x = np.asarray(x)
  assert abs(x).max() <= bound
  assert abs(x).max() > (1 - 8 / x.size) * bound
  error = 6 * bound / np.sqrt(3 * x.size)
  assert abs(x.mean()) < error
  assert abs(x.std() - bound / np.sqrt(3)) < error


def test_dispatchers():
  shapes = {"values": (34, 34), "gates": (34, 9), "out": (34, 34)}
  assert kernels(init(dispatcher.Dispatcher(3, 512))) == shapes
  shapes = {"values": (WIDTH, WIDTH), "gates": (WIDTH, 27), "out": (WIDTH, WIDTH)}
  assert kernels(init(dispatcher.MultiHeadDispatcher(3, 512))) == shapes


def test_attention():
  params = init(attention.SelfAttention(3, 512))
  assert params["queries_keys_values"]["kernel"].shape == (WIDTH, 3, WIDTH)
  # Xavier of the one matrix [D, 3D].
  is_uniform(params["queries_keys_values"]["kernel"], (6 / (4 * WIDTH)) ** 0.5)
  is_uniform(params["out"]["kernel"], WIDTH**-0.5)
  assert not params["queries_keys_values"]["bias"].any()
  assert not params["out"]["bias"].any()


def test_feed_forward():
  params = init(block.FeedForward(HIDDEN))
  for name, fan_in in (("hidden", WIDTH), ("out", HIDDEN)):
    is_uniform(params[name]["kernel"], fan_in**-0.5)
    is_uniform(params[name]["bias"], fan_in**-0.5)


def test_outputs_begin_smaller_on_request():
  layer = block.FeedForward(HIDDEN, out_scale=0.5)
  params = init(layer)
  is_uniform(params["hidden"]["kernel"], WIDTH**-0.5)
  is_uniform(params["out"]["kernel"], 0.5 * HIDDEN**-0.5)
  out = init(attention.SelfAttention(3, 512, init_std=0.3, out_scale=0.1))["out"]["kernel"]
  is_normal(out, 0.03)


@pytest.mark.parametrize(
  "layer, shape, fan_in",
  # The weights of a convolution over all channels, over each, and over one for all.
  [
    (extractors.SHE, (5, WIDTH, WIDTH), 5 * WIDTH),
    (extractors.HE, (53, WIDTH), 53),
    (extractors.WE, (53, WIDTH), 53),
    (extractors.ME, (999,), 999),
  ],
)
def test_extractors(layer, shape, fan_in):
  params = dict(init(layer(shape[0])))
  taps = params.pop("taps")
  assert taps.shape == shape
  is_uniform(taps, fan_in**-0.5)
  assert set(kernels(params).values()) <= {(WIDTH, WIDTH)}


def is_normal(x, std):
  """N(0, std**2), by its mean, its deviation and the share beyond two of them."""
  x = np.asarray(x) / std
  assert abs(x.mean()) < 6 / np.sqrt(x.size)
  assert abs(x.std() - 1) < 6 / np.sqrt(2 * x.size)
  assert abs(np.mean(abs(x) > 2) - 0.0455) < 6 * np.sqrt(0.0455 / x.size)


def check_normal(settings, std, norm_std):
  """Asserts how a model's parameters begin; gives them, and the kinds that there are."""
  model = build_model(settings)
  params = jax.jit(model.init)(jax.random.key(2), jnp.zeros((2, 5), jnp.int32))["params"]
  seen = set()
  for path, leaf in jax.tree.leaves_with_path(params):
    kind = path[-1].key
    seen.add(kind)
    if kind == "scale" and norm_std:
      is_normal(leaf - 1, norm_std)
    elif kind == "scale":
      assert (leaf == 1).all()
    elif kind == "bias":
      assert not leaf.any()
    else:
      is_normal(leaf, 1 if kind == "null_group" else std)
    if leaf.ndim == 4 or norm_std and kind == "scale" and leaf.ndim == 2:
      assert (leaf[0] != leaf[1]).mean() > 0.9, "the layers begin alike"
  return params, seen - {"kernel", "embedding", "scale", "bias"}


SIZES = dict(vocab_size=71, width=WIDTH, feed_forward_width=HIDDEN)


def test_a_model_of_normal_weights():
  settings = helpers.model_settings(
    "he", norm_position="pre", init_std=0.03, max_length=127, positions="learned", **SIZES
  )
  assert check_normal(settings, 0.03, 0)[1] == {"positions", "taps"}


# So the authors of the pooling paper begin, with 0.02 for both.
@pytest.mark.slow
def test_a_model_with_token_pooling():
  mixer = helpers.component(registry.mixers, "relative_attention", num_heads=3)
  stacks = {place: dict(num_layers=2, mixer=mixer) for place in ("first", "last")}
  settings = helpers.model_settings(
    mixer, "gumbel", init_std=0.02, norm_init_std=0.03, max_length=7, **stacks, **SIZES
  )
  params, seen = check_normal(settings, 0.02, 0.03)
  assert seen == {"null_group", "content_bias", "position_bias"}
  # The biases of the attention are there once, for the layers of all three stacks.
  assert params["hourglass"]["relative_positions"]["content_bias"].shape == (3, 34)


def test_tables():
  layer = embeddings.TokenAndPosition(71, WIDTH, 37, "learned")
  params = layer.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  is_uniform(params["tokens"]["embedding"], 0.1)
  is_uniform(params["positions"], 0.1)


def test_relative_attention():
  params = init(attention.RelativeAttention(3, 512))
  shapes = jax.tree.map(jnp.shape, params)
  per_head, square = (3, WIDTH // 3), (WIDTH, WIDTH)
  assert shapes == {
    "positions": {"content_bias": per_head, "position_bias": per_head},
    "queries_keys_values": {"kernel": (WIDTH, 3, WIDTH), "bias": (3, WIDTH)},
    "distances": {"kernel": square, "bias": (WIDTH,)},
    "out": {"kernel": square, "bias": (WIDTH,)},
  }
  for name in ("queries_keys_values", "distances", "out"):
    is_uniform(params[name]["kernel"], WIDTH**-0.5)
    assert not params[name]["bias"].any()
  for name in ("content_bias", "position_bias"):
    assert not params["positions"][name].any()
