"""Norms, against float64 and against derivatives of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import norms

BATCH, LENGTH, WIDTH = 2, 3, 7


def draw():
  generator = np.random.default_rng(2)
  x = 2 * generator.standard_normal((BATCH, LENGTH, WIDTH)) + 5
  scale, bias, grad = (generator.standard_normal(x) for x in ((WIDTH,), (WIDTH,), x.shape))
  scale[3] = 0
  return [jnp.asarray(a, jnp.float32) for a in (x, scale, bias, grad)]


def rms(x, scale, bias=None):
  return norms.rms_norm(x, scale)


def plain(is_centred, x, scale, bias):
  deviation = x - x.mean(-1, keepdims=True) if is_centred else x
  y = deviation / jnp.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None]
  return y if bias is None else y + bias[None, None]


CASES = [(norms.layer_norm, True, True), (norms.layer_norm, True, False), (rms, False, False)]


@pytest.mark.parametrize("norm, is_centred, has_bias", CASES)
def test_is_the_formula_and_so_is_its_gradient(norm, is_centred, has_bias):
  x, scale, bias, grad = draw()
  bias = bias if has_bias else None
  output, pull = jax.vjp(norm, x, scale, bias)
  expected, expected_pull = jax.vjp(lambda *given: plain(is_centred, *given), x, scale, bias)
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    pull(grad),
    expected_pull(grad),
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keeps_one_array_of_its_input_and_its_dtype(dtype):
  x, scale, bias, grad = draw()
  output, pull = jax.vjp(norms.layer_norm, x.astype(dtype), scale, bias)
  kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
  assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, dtype)]
  assert output.dtype == dtype
  assert [g.dtype for g in pull(grad.astype(dtype))] == [dtype, jnp.float32, jnp.float32]
