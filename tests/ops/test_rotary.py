"""Rotary positions, beside complex numbers."""

import jax
import numpy as np

from dpjax import ops
from tests.reference.exact import normal

BATCH, LENGTH, HEADS, FEATURES, BASE = 2, 7, 3, 10, 50.0
X = normal(BATCH, LENGTH, HEADS, FEATURES)


def test_pairs_turn_as_complex_numbers_do():
  output = jax.jit(ops.rotate)(X, ops.rotary_angles(LENGTH, FEATURES, BASE)[None])
  x, i = np.float64(X), np.arange(FEATURES // 2)
  turn = np.exp(1j * np.arange(LENGTH)[:, None, None] * BASE ** (-2 * i / FEATURES))
  z = (x[..., : FEATURES // 2] + 1j * x[..., FEATURES // 2 :]) * turn
  np.testing.assert_allclose(output, np.concatenate([z.real, z.imag], -1), rtol=1e-5, atol=1e-6)


def test_fewer_angles_turn_the_first_features():
  table = ops.rotary_angles(LENGTH, 4, BASE)[None]
  output = ops.rotate(X, table)
  np.testing.assert_array_equal(output[..., 4:], X[..., 4:])
  np.testing.assert_array_equal(output[..., :4], ops.rotate(X[..., :4], table))


def test_distant_positions_lose_no_digits():
  table = ops.rotary_angles(100_003, FEATURES)
  assert table.dtype == np.float32 and 0 <= table.min() and table.max() <= np.float32(2 * np.pi)
  for i in range(FEATURES // 2):
    exact = np.exp(1j * 100_002 * 10_000.0 ** (-2 * i / FEATURES))
    assert abs(np.exp(1j * np.float64(table[-1, i])) - exact) < 4e-7
