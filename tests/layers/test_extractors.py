"""The Extractors against float64 loops over pairs of positions, and their counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.layers import attention, extractors
from tests.reference import extractors as reference

BATCH, WIDTH, WINDOW = 3, 6, 9
LAYERS = {
  "she": (extractors.SHE, reference.she),
  "he": (extractors.HE, reference.he),
  "we": (extractors.WE, reference.we),
  "me": (extractors.ME, reference.me),
}
PARTS = [
  dict(adjustment=adjustment, output_projection=output_projection)
  for adjustment in (True, False)
  for output_projection in (True, False)
]
CASES = [(name, parts) for name in ("she", "he", "we") for parts in PARTS] + [("me", {})]


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def draw_params(module, width=WIDTH):
  shapes = jax.eval_shape(module.init, jax.random.key(0), draw(1, 1, width))["params"]
  leaves, tree = jax.tree.flatten(shapes)
  return jax.tree.unflatten(
    tree, [draw(*leaf.shape, seed=7 + i) / 2 for i, leaf in enumerate(leaves)]
  )


def check(module, layer, parts, inputs):
  """Values and gradients by inputs and parameters, within 1e-5 of the largest."""
  params, weights = draw_params(module, inputs.shape[2]), draw(*inputs.shape, seed=5)

  @jax.jit
  def run(params, inputs):
    def loss(params, inputs):
      output = module.apply({"params": params}, inputs)
      return jnp.sum(output * weights), output

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, output), grads = gradient(params, inputs)
    return output, grads

  output, (by_params, by_inputs) = run(params, inputs)
  plain = {name: value if name == "taps" else value["kernel"] for name, value in params.items()}
  # The reference's ME is an Extractor without parts.
  off = parts or dict(adjustment=False, output_projection=False)
  by_inputs_64, by_params_64 = reference.gradients(inputs, plain, weights, **off)
  by_params = {
    name: value if name == "taps" else value["kernel"] for name, value in by_params.items()
  }
  assert by_params.keys() == by_params_64.keys()
  pairs = [(output, layer(inputs, plain, **parts)), (by_inputs, by_inputs_64)]
  pairs += [(by_params[name], by_params_64[name]) for name in by_params]
  for found, expected in pairs:
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("length", [1, 4, WINDOW])
@pytest.mark.parametrize("name, parts", CASES)
def test_values_and_gradients(name, parts, length):
  module, layer = LAYERS[name]
  check(module(WINDOW, **parts), layer, parts, draw(BATCH, length, WIDTH))


@pytest.mark.parametrize("name", LAYERS)
def test_a_longer_window(name):
  module, layer = LAYERS[name]
  check(module(64), layer, {} if name == "me" else PARTS[0], draw(2, 61, 16) / 4)


# Table 7.
@pytest.mark.parametrize(
  "module, expected",
  [
    (extractors.SHE(128), 2_129_920),
    (extractors.HE(128), 65_536),
    (extractors.WE(128), 49_152),
    (extractors.ME(128), 128),
    (attention.SelfAttention(32, 128, use_bias=False), 65_536),
    (attention.SelfAttention(1, 128, use_bias=False), 65_536),
  ],
)
def test_parameters_of_table_7(module, expected):
  shapes = jax.eval_shape(module.init, jax.random.key(0), draw(2, 5, 128))
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


def test_she_of_diagonal_taps_is_we_and_we_of_equal_ones_is_me():
  inputs = draw(BATCH, 8, WIDTH)
  we = extractors.WE(WINDOW)
  params = draw_params(we)
  diagonal = params["taps"][:, :, None] * jnp.eye(WIDTH)[None]
  she = extractors.SHE(WINDOW).apply({"params": params | {"taps": diagonal}}, inputs)
  np.testing.assert_allclose(she, we.apply({"params": params}, inputs), rtol=1e-5, atol=1e-5)
  numbers = draw(WINDOW, seed=3)
  equal = {"taps": jnp.tile(numbers[:, None], (1, WIDTH))}
  bare = extractors.WE(WINDOW, adjustment=False, output_projection=False)
  me = extractors.ME(WINDOW).apply({"params": {"taps": numbers}}, inputs)
  np.testing.assert_allclose(me, bare.apply({"params": equal}, inputs), rtol=1e-5, atol=1e-5)


def test_he_is_we_of_projected_inputs_but_for_the_adjustment():
  inputs, he = draw(BATCH, 8, WIDTH), extractors.HE(WINDOW, adjustment=False)
  params = draw_params(he)
  values = inputs @ params["values"]["kernel"]
  rest = {name: params[name] for name in ("taps", "out")}
  we = extractors.WE(WINDOW, adjustment=False).apply({"params": rest}, values)
  np.testing.assert_allclose(we, he.apply({"params": params}, inputs), rtol=1e-5, atol=1e-5)
