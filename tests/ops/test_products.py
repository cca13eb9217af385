"""Products with the leading axes as one: the same numbers, and a gradient of one sum."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.models.build import build_model
from dpjax.ops import dot_general
from tests import helpers

OVER_LAST = (((2,), (0,)), ((), ()))


def normal(*shape):
  return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
  "lhs, rhs, numbers",
  [
    ((2, 3, 5), (5, 7, 4), OVER_LAST),  # DenseGeneral's
    ((2, 3, 4, 5), (5, 7), (((3,), (0,)), ((), ()))),
    ((2, 3, 5), (7, 5), (((2,), (1,)), ((), ()))),
    ((0, 3, 5), (5, 7), OVER_LAST),
    ((3, 5), (5, 7), (((1,), (0,)), ((), ()))),
    ((2, 3, 5), (3, 7), (((1,), (0,)), ((), ()))),  # Not over the last axis.
    ((2, 3, 5), (2, 5, 7), (((2,), (1,)), ((0,), (0,)))),
  ],
)
def test_is_jaxs_own(lhs, rhs, numbers):
  x, w = normal(*lhs), normal(*rhs)

  def run(product):
    multiply = partial(product, dimension_numbers=numbers, precision=jax.lax.Precision.HIGHEST)

    @jax.jit
    def both(x, w):
      result, pull = jax.vjp(multiply, x, w)
      return result, *pull(jnp.cos(jnp.arange(result.size)).reshape(result.shape))

    return both(x, w)

  for ours, theirs in zip(run(dot_general), run(jax.lax.dot_general), strict=True):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_jaxlib_multiplies_many_narrow_rows_correctly():
  """Fails with jaxlib 0.10.2 on CPU, which pyproject.toml therefore excludes."""
  rows, matrix = normal(32803, 3), normal(3, 3)
  squares = jax.jit(lambda rows, matrix: jnp.sum((matrix @ rows.T) ** 2, axis=0))
  expected = np.sum((np.asarray(matrix) @ np.asarray(rows).T) ** 2, axis=0)
  np.testing.assert_allclose(squares(rows, matrix), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", ["dispatcher", "attention"])
def test_the_layers_of_a_model_use_it(mixer):
  model = build_model(helpers.model_settings(mixer))
  tokens = jnp.zeros((3, 5), jnp.int32)
  params = helpers.draw_params(model, 1, 1.0)
  gradient = jax.grad(lambda params: model.apply({"params": params}, tokens).logits.sum())
  text = str(jax.make_jaxpr(gradient)(params))
  found = re.findall(r"dimension_numbers=\(\(\[([0-9, ]*)\], \[[0-9, ]*\]\)", text)
  assert len(found) > 10
  assert {sums.count(",") for sums in found} == {0}
