"""H-Net's routing; tests/interop/test_hnet.py has the authors' numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests.reference.exact import normal

BATCH, LENGTH, WIDTH = 3, 7, 5


def test_equal_neighbours_are_joined_and_opposite_ones_cut():
  hidden = jnp.array([[[1.0, 2.0], [2.0, 4.0], [-1.0, -2.0], [2.0, -1.0], [0.0, 0.0]]])
  probabilities, boundaries = ops.route(hidden, jnp.eye(2), jnp.eye(2))
  np.testing.assert_allclose(probabilities, [[1, 0, 1, 0.5, 0.5]], atol=1e-6)
  assert boundaries.tolist() == [[1, 0, 1, 0, 0]]


def test_vectors_of_zeros_have_finite_gradients():
  eye = jnp.eye(WIDTH)
  grad = jax.jit(jax.grad(lambda h: ops.route(h, eye, eye)[0].sum()))(jnp.zeros((2, 3, WIDTH)))
  assert np.isfinite(grad).all()


def test_smoothing_is_the_loop():
  segments, p = normal(BATCH, LENGTH, WIDTH), jax.nn.sigmoid(normal(BATCH, LENGTH))
  e, rows = np.zeros((BATCH, WIDTH)), []
  for m in range(LENGTH):
    e = p[:, m, None] * segments[:, m] + (1 - p[:, m, None]) * e
    rows.append(e)
  np.testing.assert_allclose(
    jax.jit(ops.smooth_segments)(segments, p), np.stack(rows, 1), atol=1e-6
  )


def test_a_sure_boundary_keeps_a_trace_of_what_was_before():
  segments = jnp.ones((1, 2, 1)) * jnp.array([[[1.0], [0.0]]])
  smooth = ops.smooth_segments(segments, jnp.ones((1, 2)))
  np.testing.assert_allclose(smooth[0, :, 0], [1 - 1e-4, 1e-4 * (1 - 1e-4)], rtol=1e-3)
  assert ops.smooth_segments(segments.astype(jnp.bfloat16), jnp.ones((1, 2))).dtype == (
    jnp.bfloat16
  )


def test_the_straight_through_factor_is_one_with_the_gradient_of_the_chosen_probability():
  p, boundaries = jnp.array([[0.8, 0.3]]), jnp.array([[1, 0]])
  factor, pull = jax.vjp(lambda p: ops.straight_through(p, boundaries), p)
  np.testing.assert_array_equal(factor, 1)
  np.testing.assert_array_equal(*pull(jnp.ones((1, 2))), [[1, -1]])


def test_the_ratio_loss():
  boundaries, p = jnp.array([[1, 0, 0, 1, 0]]), jnp.array([[0.9, 0.2, 0.4, 0.6, 0.1]])
  loss, by_p = jax.value_and_grad(lambda p: ops.ratio_loss(boundaries, p, 3.0))(p)
  share, mean = 0.4, 0.44
  np.testing.assert_allclose(loss, 1.5 * (2 * share * mean + (1 - share) * (1 - mean)), rtol=1e-6)
  np.testing.assert_allclose(by_p, np.full((1, 5), 1.5 * (3 * share - 1) / 5), rtol=1e-5)
  # It is 1 where the share is right, whatever does not count.
  weights, right = jnp.arange(18)[None] < 5, jnp.full((1, 18), 1 / 4.5)
  mixed = jnp.where(weights, right, 0.9)
  assert ops.ratio_loss(mixed, mixed, 4.5, weights=weights) == pytest.approx(1.0)
  assert not jax.grad(lambda b: ops.ratio_loss(b, right, 4.5))(mixed).any()
