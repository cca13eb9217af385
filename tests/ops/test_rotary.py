"""Rotary positions, beside complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops

BATCH, LENGTH, HEADS, FEATURES, BASE = 2, 7, 3, 10, 50.0


def draw(seed=0):
  normal = np.random.default_rng(seed).standard_normal((BATCH, LENGTH, HEADS, FEATURES))
  return jnp.asarray(normal, jnp.float32)


def angles(start=0):
  table = ops.rotary_angles(LENGTH + start, FEATURES, BASE)
  return jnp.asarray(table)[None, start:]


def test_pairs_turn_as_complex_numbers_do():
  output = jax.jit(ops.rotate)(draw(), angles())
  x, i = np.float64(draw()), np.arange(FEATURES // 2)
  turn = np.exp(1j * np.arange(LENGTH)[:, None, None] * BASE ** (-2 * i / FEATURES))
  z = (x[..., : FEATURES // 2] + 1j * x[..., FEATURES // 2 :]) * turn
  np.testing.assert_allclose(output, np.concatenate([z.real, z.imag], -1), rtol=1e-5, atol=1e-6)


def test_products_depend_on_the_distance_alone():
  queries, keys = draw(), draw(1)

  def scores(start):
    turned = (ops.rotate(x, angles(start)) for x in (queries, keys))
    return jnp.einsum("bthe,bshe->bhts", *turned)

  np.testing.assert_allclose(scores(0), scores(1000), rtol=0, atol=2e-5)
  plain = jnp.einsum("bthe,bshe->bhts", queries, keys)
  assert np.abs(scores(0) - plain).max() > 0.5
  # Nothing turns at a distance of 0.
  diagonal = (jnp.diagonal(x, axis1=2, axis2=3) for x in (scores(0), plain))
  np.testing.assert_allclose(*diagonal, rtol=1e-5, atol=1e-5)


def test_fewer_angles_turn_the_first_features():
  table = jnp.asarray(ops.rotary_angles(LENGTH, 4, BASE))[None]
  output = ops.rotate(draw(), table)
  np.testing.assert_array_equal(output[..., 4:], draw()[..., 4:])
  np.testing.assert_array_equal(output[..., :4], ops.rotate(draw()[..., :4], table))
  with pytest.raises(
    ValueError, match=r"angles: expected at most E / 2 .* got the shape \(1, 7, 2"
  ):
    ops.rotate(draw()[..., :2], table)


def test_distant_positions_lose_no_digits():
  table = ops.rotary_angles(100_003, FEATURES)
  assert table.dtype == np.float32 and 0 <= table.min() and table.max() <= np.float32(2 * np.pi)
  for i in range(FEATURES // 2):
    exact = np.exp(1j * 100_002 * 10_000.0 ** (-2 * i / FEATURES))
    assert abs(np.exp(1j * np.float64(table[-1, i])) - exact) < 4e-7
