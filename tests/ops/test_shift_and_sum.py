"""Shift-and-sum: every implementation against Alg. 1, and what it promises beside."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dpjax.ops.shift_and_sum import (
  DEFAULT_IMPLEMENTATION,
  dispatch_matrix,
  num_levels,
  shift_and_sum,
)
from tests.reference import dispatcher as reference

IMPLEMENTATIONS = ("loop", "unrolled", "recompute", "matrix")
BY_LEVELS = IMPLEMENTATIONS[:3]
ROUNDING = dict(rtol=1e-5, atol=1e-5)


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


def expect(values, gates, weights, level_keep=None):
  gradients = reference.shift_and_sum_gradients(values, gates, weights, level_keep)
  return reference.shift_and_sum(values, gates, level_keep), *gradients


def assert_close(actual, expected, **tolerance):
  for name, a, b in zip(("result", "values", "gates"), actual, expected, strict=True):
    a = np.asarray(a.astype(jnp.float32))
    np.testing.assert_allclose(a, b, **(tolerance or ROUNDING), err_msg=name)


@pytest.mark.parametrize(
  "shape",
  [
    (2, 13, 3, 5, 4),  # The last block of 2 features overlaps the one before it.
    (3, 16, 2, 5, 4),
    (2, 1, 3, 5, 4),  # One position: no level does anything.
    (2, 7, 1, 1, 3),  # One head of one feature.
    (1, 5, 2, 3, 7),  # More levels than positions.
    (2, 11, 2, 3, 2),  # Fewer: a position sees the last four.
    (2, 3, 2, 5, 0),
  ],
  ids=lambda shape: "B{}-T{}-H{}-E{}-K{}".format(*shape),
)
def test_equals_the_algorithm(shape, implementation):
  arrays = draw(*shape)
  assert_close(run(*arrays, implementation=implementation), expect(*arrays))


@pytest.mark.parametrize("levels", [2, 4])
def test_reach_is_exact(implementation, levels):
  length = 13
  values, gates, _ = draw(1, length, 1, 1, levels)
  operator = functools.partial(shift_and_sum, implementation=implementation)
  by_values, by_gates = jax.jacrev(operator, argnums=(0, 1))(values, gates)
  distance = np.arange(length)[:, None] - np.arange(length)
  is_seen = (distance >= 0) & (distance < 2**levels)
  np.testing.assert_array_equal(by_values.reshape(length, length) != 0, is_seen)
  later = by_gates.reshape(length, length, levels)[distance < 0]
  np.testing.assert_array_equal(later, 0)


def test_the_past_does_not_see_a_later_nan():
  values, gates, _ = draw(2, 13, 2, 3, 4)
  changed = shift_and_sum(values.at[:, 9:].set(jnp.nan), gates)
  np.testing.assert_array_equal(changed[:, :9], shift_and_sum(values, gates)[:, :9])


@pytest.mark.parametrize(
  "level_keep", [[True, False, True, False], [False] * 4, [True] * 4], ids=str
)
def test_a_dropped_level_is_a_level_of_zero_gates(level_keep, implementation):
  values, gates, weights = draw(2, 13, 3, 5, 4)
  is_kept = np.array(level_keep)
  kept = run(values, gates, weights, is_kept, implementation=implementation)
  assert_close(kept, expect(values, gates, weights, level_keep))
  zeroed = run(
    values,
    gates * is_kept[None, None, None].astype(np.float32),
    weights,
    implementation=implementation,
  )
  for a, b in zip(kept[:2], zeroed[:2], strict=True):  # A gate of 0 has a gradient.
    np.testing.assert_allclose(a, b, **ROUNDING)
  np.testing.assert_array_equal(kept[2][..., ~is_kept], 0)


def test_level_keep_need_not_be_traced(implementation):
  values, gates, weights = draw(2, 13, 3, 5, 4)
  level_keep = [False, True, True, False]
  fixed = jax.jit(
    functools.partial(shift_and_sum, level_keep=level_keep, implementation=implementation)
  )
  expected = reference.shift_and_sum(values, gates, level_keep)
  np.testing.assert_allclose(fixed(values, gates), expected, **ROUNDING)


@pytest.mark.parametrize("implementation", BY_LEVELS)
def test_level_keep_branches_and_nothing_else_does(implementation):
  arrays = draw(2, 13, 3, 5, 4)
  level_keep = jnp.ones(4, bool)
  branching = run.lower(*arrays, level_keep, implementation=implementation).as_text()
  plain = run.lower(*arrays, implementation=implementation).as_text()
  # One for a loop's body or one a level, and the same again in the backward pass.
  assert branching.count("stablehlo.case") >= 2
  assert "stablehlo.case" not in plain


def test_bfloat16_is_summed_in_float32(implementation):
  arrays = draw(2, 13, 3, 5, 4, jnp.bfloat16)
  outputs = run(*arrays, implementation=implementation)
  assert [x.dtype for x in outputs] == [jnp.bfloat16] * 3
  in_float32 = run(*(x.astype(jnp.float32) for x in arrays), implementation=implementation)
  if implementation in BY_LEVELS:
    np.testing.assert_array_equal(outputs[0], in_float32[0].astype(jnp.bfloat16))
  # The products of gates in its matrices are rounded, too.
  atol = 2**-6 if implementation in BY_LEVELS else 2**-5
  assert_close(outputs, expect(*(np.asarray(x, np.float64) for x in arrays)), rtol=2**-7, atol=atol)


def test_dtypes_of_values_and_gates_may_differ(implementation):
  values, gates, weights = draw(2, 13, 3, 5, 4)
  half = values.astype(jnp.bfloat16)
  result, by_values, by_gates = run(
    half, gates, weights.astype(jnp.bfloat16), implementation=implementation
  )
  assert result.dtype == by_values.dtype == jnp.bfloat16
  assert by_gates.dtype == jnp.float32


@pytest.mark.parametrize("level_keep", [None, [True, False, True, True]], ids=str)
def test_matrix_is_the_product_of_the_levels(level_keep):
  batch, length, heads, levels = 2, 13, 3, 4
  values, gates, _ = draw(batch, length, heads, 5, levels)
  matrix = dispatch_matrix(gates, level_keep=level_keep)
  assert matrix.shape == (batch, heads, length, length)
  for b in range(batch):
    for h in range(heads):
      product = np.eye(length)
      for k in range(levels):
        if level_keep is None or level_keep[k]:
          d_tt = np.diag(np.asarray(gates[b, :, h, k], np.float64))
          product = (np.eye(length) + d_tt @ np.eye(length, k=-(2**k))) @ product
      np.testing.assert_allclose(matrix[b, h], product, **ROUNDING)
  mixed = jnp.einsum("bhts,bshe->bthe", matrix, values, precision="highest")
  expected = shift_and_sum(values, gates, level_keep=level_keep)
  np.testing.assert_allclose(mixed, expected, **ROUNDING)


def test_matrix_of_the_docstring():
  a, b = np.arange(2.0, 5.0), np.arange(5.0, 8.0)
  gates = jnp.asarray(np.stack([a, b], axis=1)[None, :, None], jnp.float32)
  expected = [[1, 0, 0], [a[1], 1, 0], [b[2], a[2], 1]]
  np.testing.assert_array_equal(dispatch_matrix(gates)[0, 0], expected)


def test_values_of_the_docstring(implementation):
  values = jnp.asarray([1.0, 10.0, 100.0, 1000.0])[None, :, None, None]
  result = shift_and_sum(values, jnp.ones((1, 4, 1, 2)), implementation=implementation)
  np.testing.assert_array_equal(result.ravel(), [1, 11, 111, 1111])


def test_rows_of_a_batch_are_independent(implementation):
  arrays = draw(2, 13, 3, 5, 4)
  other = [x.at[1].multiply(-3) for x in arrays]
  before = run(*arrays, implementation=implementation)
  after = run(*other, implementation=implementation)
  for x, y in zip(before, after, strict=True):
    np.testing.assert_array_equal(x[0], y[0])
    assert np.abs(x[1] - y[1]).max() > 0.1


@pytest.mark.parametrize("level_keep", [None, [True, False, True, True]], ids=str)
def test_a_batch_over_devices_stays_there(level_keep, implementation):
  arrays = draw(16, 13, 3, 5, 4)
  keep = None if level_keep is None else jnp.asarray(level_keep)
  expected = run(*arrays, keep, implementation=implementation)
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = NamedSharding(mesh, PartitionSpec("batch"))
  placed = jax.device_put(arrays, sharding)
  if keep is not None:
    keep = jax.device_put(keep, NamedSharding(mesh, PartitionSpec()))
  compiled = run.lower(*placed, keep, implementation=implementation).compile()
  for x, y in zip(compiled(*placed, keep), expected, strict=True):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    np.testing.assert_allclose(x, y, **ROUNDING)
  text = compiled.as_text()
  assert not [
    name
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    if name in text
  ]


def test_inside_vmap_and_scan(implementation):
  arrays = [jnp.stack([x, 2 * x, -x]) for x in draw(2, 13, 3, 5, 4)]
  keeps = jnp.asarray([[True, False, True, True], [True] * 4, [False] * 4])
  one = functools.partial(run, implementation=implementation)
  expected = [jnp.stack(x) for x in zip(*map(one, *arrays, keeps), strict=True)]
  assert_close(jax.vmap(one)(*arrays, keeps), expected)
  _, scanned = jax.lax.scan(lambda carry, x: (carry, one(*x)), 0, (*arrays, keeps))
  assert_close(scanned, expected)


def test_matrix_form_keeps_nothing_of_the_levels():
  values, gates, _ = draw(2, 13, 3, 5, 4)
  _, pull = jax.vjp(functools.partial(shift_and_sum, implementation="matrix"), values, gates)
  kept = {x.shape for x in jax.tree.leaves(pull)}
  assert kept <= {values.shape, gates.shape}


def temporary_bytes(length, implementation):
  arrays = [
    jax.ShapeDtypeStruct((1, length, 2, size), jnp.float32) for size in (48, num_levels(length), 48)
  ]
  compiled = run.lower(*arrays, implementation=implementation).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_recompute_needs_memory_for_one_level():
  short, long = (temporary_bytes(length, "recompute") for length in (1024, 8192))
  assert short <= 0.4 * temporary_bytes(1024, "unrolled")
  # Of all levels it would grow by 8 * 13 / 10.
  assert long <= 8 * 1.1 * short


def test_the_kernels_are_to_be_had_by_name():
  arrays = draw(2, 13, 2, 3, 4)
  kept = jnp.asarray([True, False, True, True])
  assert_close(run(*arrays, kept, implementation="pallas"), expect(*arrays, kept))


def test_none_is_the_default_implementation():
  arrays = draw(2, 13, 3, 5, 4)
  text = run.lower(*arrays).as_text()
  assert text == run.lower(*arrays, implementation=DEFAULT_IMPLEMENTATION).as_text()


def zeros(*shape, dtype=jnp.float32):
  return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((zeros(2, 7, 3), zeros(2, 7, 3, 4)), "values: expected .* got float32 \\(2, 7, 3"),
    ((zeros(2, 7, 3, 5, dtype=jnp.int32), zeros(2, 7, 3, 4)), "values: .* got int32"),
    ((zeros(2, 7, 3, 5), zeros(2, 7, 5, 4)), r"gates: .*\(2, 7, 3\), got .*2, 7, 5, 4"),
    ((zeros(2, 7, 3, 5), zeros(2, 7, 3)), "gates: .* got float32"),
    ((zeros(2, 7, 3, 5), zeros(2, 7, 3, 4, dtype=bool)), "gates: .* got bool"),
  ],
)
def test_refuses_arrays_that_do_not_match(arguments, message):
  with pytest.raises(ValueError, match=message):
    shift_and_sum(*arguments)


@pytest.mark.parametrize("level_keep", [zeros(4), zeros(3, dtype=bool), True], ids=str)
def test_refuses_a_level_keep_that_does_not_match(level_keep):
  with pytest.raises(ValueError, match=r"level_keep: expected booleans \(4,\), got"):
    shift_and_sum(zeros(2, 7, 3, 5), zeros(2, 7, 3, 4), level_keep=level_keep)


def test_refuses_an_unknown_implementation():
  with pytest.raises(ValueError, match="'loop', 'unrolled', 'recompute'.*got 'fast'"):
    shift_and_sum(zeros(2, 7, 3, 5), zeros(2, 7, 3, 4), implementation="fast")


def test_refuses_a_matrix_of_wrong_gates():
  with pytest.raises(ValueError, match="gates: expected .* got shape"):
    dispatch_matrix(zeros(7, 3, 4))


def test_num_levels():
  pairs = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 512: 9, 513: 10}
  assert {length: num_levels(length) for length in pairs} == pairs
  with pytest.raises(ValueError, match="max_length: expected at least 1, got 0"):
    num_levels(0)


def test_needs_jax_alone():
  code = (
    "import sys, dpjax.ops; print([x for x in "
    "('flax', 'optax', 'orbax', 'chex', 'ml_collections') if x in sys.modules])"
  )
  printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert printed.stdout.strip() == "[]"
