"""Norms, against float64 and against derivatives of the plain formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import norms
from tests.reference import exact

BATCH, LENGTH, WIDTH = 2, 3, 7


def draw():
  scale, bias = exact.normal(WIDTH), exact.normal(WIDTH, seed=1)
  return 2 * exact.normal(BATCH, LENGTH, WIDTH) + 5, scale.at[3].set(0), bias


def plain(is_centred, x, scale, bias=0):
  deviation = x - x.mean(-1, keepdims=True) if is_centred else x
  return deviation / jnp.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


@pytest.mark.parametrize(
  "norm, count", [(norms.layer_norm, 3), (norms.layer_norm, 2), (norms.rms_norm, 2)]
)
def test_is_the_formula_and_so_is_its_gradient(norm, count):
  formula = partial(plain, norm is norms.layer_norm)
  actual, expected = exact.both(norm, formula, draw()[:count])
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-5)
  for x, y in zip(actual[1:], expected[1:], strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keeps_one_array_of_its_input_and_its_dtype(dtype):
  x, scale, bias = draw()
  output, pull = jax.vjp(norms.layer_norm, x.astype(dtype), scale, bias)
  kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
  assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, dtype)]
  assert output.dtype == dtype
  assert [g.dtype for g in pull(output)] == [dtype, jnp.float32, jnp.float32]
