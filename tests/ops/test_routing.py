"""H-Net's routing: the authors' numbers, and what must hold of any numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests import helpers

BATCH, LENGTH, WIDTH = 3, 11, 5


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def golden(case):
  file = np.load(helpers.ROOT / f"tests/golden/L_hnet_routing_{case}.npz")
  return {name: jnp.asarray(file[name]) for name in file}


def forward(h, q, k, residual_weight, residual_bias, *, capacity):
  """Everything between the first and the last stack, with the goldens' fixed middle."""
  probabilities, boundaries = ops.route(h, q.T, k.T)
  chunks = ops.pool_segments(h, boundaries, capacity, method="last")
  counts = jnp.arange(1, capacity + 1, dtype=jnp.float32)[None, :, None]
  middle = jnp.tanh(chunks + jnp.cumsum(chunks, axis=1) / counts)
  p_of_segments = ops.pool_segments(probabilities[..., None], boundaries, capacity, method="last")[
    ..., 0
  ]
  smooth = ops.smooth_segments(middle, p_of_segments)
  null = jnp.full_like(smooth[:, :1], 1e6)  # no token reads it
  chosen = ops.upsample_segments(jnp.concatenate([null, smooth], axis=1), boundaries)
  output = ops.straight_through(probabilities, boundaries)[..., None] * chosen
  output += h @ residual_weight.T + residual_bias[None, None]
  return output, (probabilities, boundaries, chunks, middle, chosen)


@pytest.mark.parametrize(("case", "factor"), [("a", 3.0), ("b", 4.5)])
def test_the_authors_values_and_gradients(case, factor):
  data = golden(case)
  names = ("h", "q", "k", "residual_weight", "residual_bias")
  inputs = [data[f"in/{name}"] for name in names]
  capacity = data["out/chunks"].shape[1]

  def total(*inputs):
    output, known = forward(*inputs, capacity=capacity)
    ratio = ops.ratio_loss(known[1], known[0], factor)
    return jnp.sum(output * data["in/cotangent"]) + 0.7 * ratio, (output, ratio, *known)

  gradient = jax.jit(jax.value_and_grad(total, tuple(range(5)), has_aux=True))
  (value, found), grads = gradient(*inputs)
  output, ratio, probabilities, boundaries, chunks, middle, chosen = found
  np.testing.assert_array_equal(boundaries, data["out/boundaries"])
  is_real = data["out/chunk_is_real"].astype(bool)
  for ours, name in (
    (probabilities, "probability"),
    (chunks, "chunks"),
    (middle, "middle"),
    (chosen, "dechunked"),
    (output, "output"),
    (ratio, "ratio_loss"),
    (value, "total"),
  ):
    theirs = data[f"out/{name}"]
    if name in ("chunks", "middle"):
      ours, theirs = ours[is_real], theirs[is_real]
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=name)
  for grad, name in zip(grads, names, strict=True):
    np.testing.assert_allclose(grad, data[f"grad/{name}"], atol=1e-4, rtol=1e-4, err_msg=name)


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
  segments, p = normal(6, BATCH, 7, WIDTH), np.asarray(jax.nn.sigmoid(normal(7, BATCH, 7)))
  e, rows = np.zeros((BATCH, WIDTH)), []
  for m in range(7):
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


@pytest.mark.parametrize("factor", [2.0, 4.5])
def test_the_ratio_loss_is_one_where_the_share_is_right(factor):
  share = jnp.full((2, 18), 1 / factor)
  assert ops.ratio_loss(share, share, factor) == pytest.approx(1.0)
  more = ops.ratio_loss(share + 0.1, share + 0.1, factor)
  assert more > 1
  assert not jax.grad(lambda b: ops.ratio_loss(b, share, factor))(share + 0.1).any()
  weights = jnp.zeros((2, 18)).at[:, :5].set(1)
  mixed = jnp.where(weights > 0, share, 0.9)
  assert ops.ratio_loss(mixed, mixed, factor, weights=weights) == pytest.approx(1.0)
