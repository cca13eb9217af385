"""Where parameters begin, by what is known of their distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from dpjax.config import registry
from dpjax.layers import attention, block, dispatcher, embeddings, extractors
from dpjax.models.build import build_model
from tests import helpers

WIDTH, HIDDEN = 102, 77


def is_uniform(x, bound):
  """U(-bound, bound): the ends are nearly reached, and the deviation fits."""
  x = np.asarray(x)
  assert abs(x).max() <= bound
  assert abs(x).max() > (1 - 8 / x.size) * bound
  error = 6 * bound / np.sqrt(3 * x.size)
  assert abs(x.mean()) < error
  assert abs(x.std() - bound / np.sqrt(3)) < error


SQUARE = ((WIDTH, WIDTH), WIDTH**-0.5)
PER_HEAD, NONE = ((34, 34), 34**-0.5), ((WIDTH,), 0)
ATTENTION = {"queries_keys_values.bias": ((3, WIDTH), 0), "out.kernel": SQUARE, "out.bias": NONE}
# All parameters of each layer, (shape, bound): U(-bound, bound), by the inputs of a matrix.
LAYERS = [
  (
    dispatcher.Dispatcher(num_heads=3, max_length=512),
    {"values.kernel": PER_HEAD, "gates.kernel": ((34, 9), 34**-0.5), "out.kernel": PER_HEAD},
  ),
  (
    dispatcher.MultiHeadDispatcher(num_heads=3, max_length=512),
    {"values.kernel": SQUARE, "gates.kernel": ((WIDTH, 27), SQUARE[1]), "out.kernel": SQUARE},
  ),
  (  # Xavier of the one matrix [D, 3D].
    attention.SelfAttention(num_heads=3, max_length=512),
    ATTENTION | {"queries_keys_values.kernel": ((WIDTH, 3, WIDTH), (6 / (4 * WIDTH)) ** 0.5)},
  ),
  (
    attention.RelativeAttention(num_heads=3, max_length=512),
    ATTENTION
    | {"queries_keys_values.kernel": ((WIDTH, 3, WIDTH), WIDTH**-0.5)}
    | {"distances.kernel": SQUARE, "distances.bias": NONE}
    | {f"positions.{name}_bias": ((3, WIDTH // 3), 0) for name in ("content", "position")},
  ),
  (
    block.FeedForward(HIDDEN),
    {"hidden.kernel": ((WIDTH, HIDDEN), WIDTH**-0.5), "hidden.bias": ((HIDDEN,), WIDTH**-0.5)}
    | {"out.kernel": ((HIDDEN, WIDTH), HIDDEN**-0.5), "out.bias": ((WIDTH,), HIDDEN**-0.5)},
  ),
  (
    extractors.SHE(max_length=5),
    {"taps": ((5, WIDTH, WIDTH), (5 * WIDTH) ** -0.5)}
    | {"adjustment.kernel": SQUARE, "out.kernel": SQUARE},
  ),
  (
    extractors.HE(max_length=53),
    {"taps": ((53, WIDTH), 53**-0.5), "values.kernel": SQUARE}
    | {"adjustment.kernel": SQUARE, "out.kernel": SQUARE},
  ),
  (
    extractors.WE(max_length=53),
    {"taps": ((53, WIDTH), 53**-0.5), "adjustment.kernel": SQUARE, "out.kernel": SQUARE},
  ),
  (extractors.ME(max_length=999), {"taps": ((999,), 999**-0.5)}),
  (
    embeddings.TokenAndPosition(71, WIDTH, 37, "learned"),
    {"tokens.embedding": ((71, WIDTH), 0.1), "positions": ((37, WIDTH), 0.1)},
  ),
]


def test_outputs_begin_smaller_on_request():
  def init(layer):
    return layer.init(jax.random.key(0), jnp.zeros((1, 3, WIDTH)))["params"]

  params = init(block.FeedForward(HIDDEN, out_scale=0.5))
  is_uniform(params["hidden"]["kernel"], WIDTH**-0.5)
  is_uniform(params["out"]["kernel"], 0.5 * HIDDEN**-0.5)
  out = init(attention.SelfAttention(num_heads=3, max_length=512, init_std=0.3, out_scale=0.1))[
    "out"
  ]["kernel"]
  is_normal(out, 0.03)


@pytest.mark.parametrize("module, expected", LAYERS, ids=[type(x).__name__ for x, _ in LAYERS])
def test_layers(module, expected):
  is_embedding = isinstance(module, embeddings.TokenAndPosition)
  inputs = jnp.zeros((2, 3), int) if is_embedding else jnp.zeros((2, 3, WIDTH))
  params = flatten_dict(jax.jit(module.init)(jax.random.key(0), inputs)["params"], sep=".")
  assert {name: x.shape for name, x in params.items()} == {k: v[0] for k, v in expected.items()}
  for name, (_, bound) in expected.items():
    if bound:
      is_uniform(params[name], bound)
    else:
      assert not params[name].any()


def is_normal(x, std):
  """N(0, std**2), by its mean, its deviation and the share beyond two of them."""
  x = np.asarray(x) / std
  assert abs(x.mean()) < 6 / np.sqrt(x.size)
  assert abs(x.std() - 1) < 6 / np.sqrt(2 * x.size)
  assert abs(np.mean(abs(x) > 2) - 0.0455) < 6 * np.sqrt(0.0455 / x.size)


@pytest.mark.slow
def test_a_model_of_normal_weights():
  # So the authors of the pooling paper begin, with 0.02 for both.
  relative = helpers.component(registry.mixers, "relative_attention", num_heads=3)
  outer = dict(first=dict(num_layers=2, mixer="he"), last=dict(num_layers=2, mixer=relative))
  sizes = dict(vocab_size=71, width=WIDTH, feed_forward_width=HIDDEN, max_length=127)
  settings = helpers.model_settings(
    *(relative, "gumbel"), init_std=0.02, norm_init_std=0.03, positions="learned", **outer, **sizes
  )
  model = build_model(settings)
  params = jax.jit(model.init)(jax.random.key(2), jnp.zeros((2, 5), jnp.int32))["params"]
  seen = set()
  for path, leaf in jax.tree.leaves_with_path(params):
    kind = path[-1].key
    seen.add(kind)
    if kind == "scale":
      is_normal(leaf - 1, 0.03)
    elif kind == "bias":
      assert not leaf.any()
    else:
      is_normal(leaf, 1 if kind == "null_group" else 0.02)
    if leaf.ndim == 4 or kind == "scale" and leaf.ndim == 2:
      assert (leaf[0] != leaf[1]).mean() > 0.9, "the layers begin alike"
  own = {"taps", "positions", "null_group", "content_bias", "position_bias"}
  assert seen == own | {"kernel", "embedding", "scale", "bias"}
  # The biases of the attention are there once, for the layers of both stacks.
  assert params["stages_0"]["shared_positions"]["content_bias"].shape == (3, 34)
