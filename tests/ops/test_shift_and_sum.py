"""Shift-and-sum: every implementation against Alg. 1, and what it promises beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops.shift_and_sum import dispatch_matrix, num_levels, shift_and_sum
from tests.reference import dispatcher as reference
from tests.reference import exact

IMPLEMENTATIONS = ("loop", "unrolled", "recompute")
SHAPE = (2, 13, 3, 5, 4)  # The last block of 2 features overlaps the one before it.


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
  return request.param


def draw(batch, length, heads, features, levels, dtype=jnp.float32):
  """Values, and gates in (0, 1)."""
  values = exact.normal(batch, length, heads, features)
  gates = jax.nn.sigmoid(exact.normal(batch, length, heads, levels))
  return values.astype(dtype), gates.astype(dtype)


def assert_close(actual, expected, tolerance=1e-5):
  for name, x, y in zip(("result", "values", "gates"), actual, expected, strict=True):
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


SHAPES = [
  (2, 8, 1, 1, 3),  # One head of one feature.
  (2, 1, 3, 5, 4),  # One position: no level does anything.
  (1, 5, 2, 3, 7),  # More levels than positions.
  (2, 11, 2, 3, 2),  # Fewer: a position sees the last four.
  (2, 3, 2, 5, 0),
]


@pytest.mark.parametrize(
  "shape, implementation",
  [(SHAPE, name) for name in IMPLEMENTATIONS] + [(shape, None) for shape in SHAPES],
)
def test_equals_the_algorithm(shape, implementation):
  operator = functools.partial(shift_and_sum, implementation=implementation)
  assert_close(*exact.both(operator, reference.shift_and_sum, draw(*shape)))


def test_the_past_does_not_see_a_later_nan():
  values, gates = draw(2, 13, 2, 3, 4)
  changed = shift_and_sum(values.at[:, 9:].set(jnp.nan), gates)
  np.testing.assert_array_equal(changed[:, :9], shift_and_sum(values, gates)[:, :9])


def test_a_dropped_level_is_skipped(implementation):
  keep = np.array([True, False, True, False])
  operator = functools.partial(shift_and_sum, level_keep=keep, implementation=implementation)
  equation = functools.partial(reference.shift_and_sum, level_keep=keep)
  actual, expected = exact.both(operator, equation, draw(*SHAPE))
  assert_close(actual, expected)
  np.testing.assert_array_equal(actual[2][..., ~keep], 0)


def test_bfloat16_is_summed_in_float32(implementation):
  operator = functools.partial(shift_and_sum, implementation=implementation)
  actual, expected = exact.both(operator, reference.shift_and_sum, draw(*SHAPE, jnp.bfloat16))
  assert [x.dtype for x in actual] == [jnp.bfloat16] * 3
  np.testing.assert_array_equal(actual[0], expected[0].astype(jnp.bfloat16))
  assert_close(actual, expected, 2**-7)


def test_matrix_is_the_product_of_the_levels():
  level_keep = [True, False, True, True]
  batch, length, heads, *_ = SHAPE
  values, gates = draw(*SHAPE)
  matrix = jax.jit(functools.partial(dispatch_matrix, level_keep=level_keep))(gates)
  assert matrix.shape == (batch, heads, length, length)
  for b, h in np.ndindex(batch, heads):
    product = np.eye(length)
    for k in np.flatnonzero(level_keep):
      d_tt = np.diag(np.asarray(gates[b, :, h, k], np.float64))
      product = (np.eye(length) + d_tt @ np.eye(length, k=-(2**k))) @ product
    np.testing.assert_allclose(matrix[b, h], product, rtol=1e-5, atol=1e-5)
  mixed = jnp.einsum("bhts,bshe->bthe", matrix, values, precision="highest")
  expected = jax.jit(functools.partial(shift_and_sum, level_keep=level_keep))(values, gates)
  np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)


def temporary_bytes(length, implementation):
  values, gates = (
    jax.ShapeDtypeStruct((1, length, 2, size), jnp.float32) for size in (48, num_levels(length))
  )
  operator = functools.partial(shift_and_sum, implementation=implementation)
  run = jax.jit(functools.partial(exact.with_gradients, operator))
  return run.lower((values, gates), values).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_recompute_needs_memory_for_one_level():
  short, long = (temporary_bytes(length, "recompute") for length in (1024, 8192))
  assert short <= 0.4 * temporary_bytes(1024, "unrolled")
  # Of all levels it would grow by 8 * 13 / 10.
  assert long <= 8 * 1.1 * short


def test_forward_mode_names_the_implementations_that_have_it():
  values, gates = draw(2, 5, 3, 2, 3)
  with pytest.raises(TypeError, match='^implementation: expected "unrolled" or "loop" for forward'):
    jax.jvp(lambda x: shift_and_sum(x, gates), (values,), (values,))
