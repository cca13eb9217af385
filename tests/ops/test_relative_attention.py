"""Relative attention against float64 sums over pairs of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests.reference import attention as reference
from tests.reference import exact

BATCH, LENGTH, HEADS, FEATURES, DISTANCES = 2, 7, 3, 5, 9
NAMES = ("queries", "keys", "values", "positions", "content_bias", "position_bias")
ROUNDING = dict(rtol=1e-5, atol=1e-5)


def draw(length=LENGTH, distances=DISTANCES):
  """The six arguments; prefixes of one array, whatever the length."""
  shapes = [(BATCH, LENGTH, HEADS, FEATURES)] * 3
  shapes += [(DISTANCES, HEADS, FEATURES), (HEADS, FEATURES), (HEADS, FEATURES)]
  generator = np.random.default_rng(4)
  arrays = [generator.standard_normal(shape) for shape in shapes]
  arrays[:4] = *(x[:, :length] for x in arrays[:3]), arrays[3][:distances]
  return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("length", [1, LENGTH])
def test_values_and_gradients(length):
  arguments = draw(length)
  weights = draw()[2][:, ::-1][:, :length]

  @jax.jit
  def run(arguments, weights):
    result, pull = jax.vjp(ops.relative_attention, *arguments)
    return result, *pull(weights)

  found = run(arguments, weights)
  expected = exact.run(reference.relative_attention, arguments, weights)
  for name, x, y in zip(("result", *NAMES), found, expected, strict=True):
    np.testing.assert_allclose(x, y, **ROUNDING, err_msg=name)
  # One position attends to itself alone, whatever the scores.
  is_used = [np.abs(x).max() > 0.1 for x in found[1:]]
  assert is_used == [length > 1 or name == "values" for name in NAMES]
  np.testing.assert_array_equal(found[4][length:], 0)
