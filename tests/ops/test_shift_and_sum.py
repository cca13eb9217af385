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
ROUNDING = dict(rtol=1e-5, atol=1e-5)
SHAPE = (2, 13, 3, 5, 4)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
  return request.param


def draw(batch, length, heads, features, levels, dtype=jnp.float32):
  """Values, gates in (0, 1), and the weights of a scalar to differentiate."""
  generator = np.random.default_rng(length)
  values = generator.standard_normal((batch, length, heads, features))
  gates = generator.uniform(size=(batch, length, heads, levels))
  weights = generator.standard_normal(values.shape)
  return tuple(jnp.asarray(x, dtype) for x in (values, gates, weights))


@functools.partial(jax.jit, static_argnames="implementation")
def run(values, gates, weights, level_keep=None, implementation=None):
  """The result and its gradients by values and gates, one compilation."""

  def operator(values, gates):
    return shift_and_sum(values, gates, level_keep=level_keep, implementation=implementation)

  result, pull = jax.vjp(operator, values, gates)
  return result, *pull(weights)


@functools.cache
def expect(shape, level_keep=None):
  """By Alg. 1, of what `draw` gives."""
  *arrays, weights = draw(*shape)
  equation = functools.partial(reference.shift_and_sum, level_keep=level_keep)
  return exact.run(equation, arrays, weights)


def assert_close(actual, expected, **tolerance):
  for name, a, b in zip(("result", "values", "gates"), actual, expected, strict=True):
    a = np.asarray(a.astype(jnp.float32))
    np.testing.assert_allclose(a, b, **(tolerance or ROUNDING), err_msg=name)


@pytest.mark.parametrize(
  "shape",
  [
    SHAPE,  # The last block of 2 features overlaps the one before it.
    (2, 8, 1, 1, 3),  # One head of one feature.
    (2, 1, 3, 5, 4),  # One position: no level does anything.
    (1, 5, 2, 3, 7),  # More levels than positions.
    (2, 11, 2, 3, 2),  # Fewer: a position sees the last four.
    (2, 3, 2, 5, 0),
  ],
  ids=lambda shape: "B{}-T{}-H{}-E{}-K{}".format(*shape),
)
def test_equals_the_algorithm(shape, implementation):
  assert_close(run(*draw(*shape), implementation=implementation), expect(shape))


def test_the_past_does_not_see_a_later_nan():
  values, gates, _ = draw(2, 13, 2, 3, 4)
  changed = shift_and_sum(values.at[:, 9:].set(jnp.nan), gates)
  np.testing.assert_array_equal(changed[:, :9], shift_and_sum(values, gates)[:, :9])


@pytest.mark.parametrize("level_keep", [(True, False, True, False), (False,) * 4], ids=str)
def test_a_dropped_level_is_skipped(level_keep, implementation):
  is_kept = np.array(level_keep)
  kept = run(*draw(*SHAPE), is_kept, implementation=implementation)
  assert_close(kept, expect(SHAPE, level_keep))
  np.testing.assert_array_equal(kept[2][..., ~is_kept], 0)


def test_bfloat16_is_summed_in_float32(implementation):
  arrays = draw(*SHAPE, jnp.bfloat16)
  outputs = run(*arrays, implementation=implementation)
  assert [x.dtype for x in outputs] == [jnp.bfloat16] * 3
  exact = run(*(x.astype(jnp.float32) for x in arrays), implementation=implementation)
  np.testing.assert_array_equal(outputs[0], exact[0].astype(jnp.bfloat16))
  assert_close(outputs, exact, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("level_keep", [None, [True, False, True, True]], ids=str)
def test_matrix_is_the_product_of_the_levels(level_keep):
  batch, length, heads, _, levels = SHAPE
  values, gates, _ = draw(*SHAPE)
  matrix = jax.jit(functools.partial(dispatch_matrix, level_keep=level_keep))(gates)
  assert matrix.shape == (batch, heads, length, length)
  for b, h in np.ndindex(batch, heads):
    product = np.eye(length)
    for k in range(levels):
      if level_keep is None or level_keep[k]:
        d_tt = np.diag(np.asarray(gates[b, :, h, k], np.float64))
        product = (np.eye(length) + d_tt @ np.eye(length, k=-(2**k))) @ product
    np.testing.assert_allclose(matrix[b, h], product, **ROUNDING)
  mixed = jnp.einsum("bhts,bshe->bthe", matrix, values, precision="highest")
  expected = jax.jit(functools.partial(shift_and_sum, level_keep=level_keep))(values, gates)
  np.testing.assert_allclose(mixed, expected, **ROUNDING)


def temporary_bytes(length, implementation):
  arrays = [
    jax.ShapeDtypeStruct((1, length, 2, size), jnp.float32) for size in (48, num_levels(length), 48)
  ]
  compiled = run.lower(*arrays, implementation=implementation).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_recompute_needs_memory_for_one_level():
  short, long = (temporary_bytes(length, "recompute") for length in (1024, 8192))
  assert short <= 0.4 * temporary_bytes(1024, "unrolled")
  # Of all levels it would grow by 8 * 13 / 10.
  assert long <= 8 * 1.1 * short


def test_forward_mode_names_the_implementations_that_have_it():
  values, gates, _ = draw(2, 5, 3, 2, 3)
  with pytest.raises(TypeError, match='^implementation: expected "unrolled" or "loop" for forward'):
    jax.jvp(lambda x: shift_and_sum(x, gates), (values,), (values,))
