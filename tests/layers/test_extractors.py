"""The Extractors against float64 sums over pairs of positions, and their counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.layers import attention, extractors
from tests.reference import exact
from tests.reference import extractors as reference

WIDTH, WINDOW = 6, 9
BARE = dict(adjustment=False, output_projection=False)


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
  "module, names",
  [
    (extractors.SHE(WINDOW), {"adjustment", "out"}),
    (extractors.HE(WINDOW), {"values", "adjustment", "out"}),
    (extractors.HE(WINDOW, adjustment=False), {"values", "out"}),
    (extractors.WE(WINDOW), {"adjustment", "out"}),
    (extractors.WE(WINDOW, output_projection=False), {"adjustment"}),
    (extractors.SHE(WINDOW, **BARE), set()),
    (extractors.ME(WINDOW), set()),
  ],
  ids=["she", "he", "he unadjusted", "we", "we unprojected", "she bare", "me"],
)
def test_values_and_gradients(module, names):
  inputs, weights = draw(3, 8, WIDTH), draw(3, 8, WIDTH, seed=5)
  shapes = jax.eval_shape(module.init, jax.random.key(0), inputs)["params"]
  assert shapes.keys() == names | {"taps"}
  leaves, tree = jax.tree.flatten(shapes)
  params = [draw(*leaf.shape, seed=7 + i) / 2 for i, leaf in enumerate(leaves)]
  params = jax.tree.unflatten(tree, params)
  plain = {name: x if name == "taps" else x["kernel"] for name, x in params.items()}

  @jax.jit
  def run(inputs, plain):
    def forward(inputs, plain):
      params = {name: x if name == "taps" else {"kernel": x} for name, x in plain.items()}
      return module.apply({"params": params}, inputs)

    result, pull = jax.vjp(forward, inputs, plain)
    return result, *pull(weights)

  expected = exact.run(reference.extractor, (inputs, plain), weights)

  def check(found, expected):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))

  jax.tree.map(check, run(inputs, plain), expected)


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
