"""The capacities: the same numbers as the whole, for the work of the needed part."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dpjax.ops.capacity import capacities, run_at_capacity

# A row a device.
BATCH, LENGTH, WIDTH, OUT, LAYERS = 8, 11, 5, 7, 3
SIZES = (4, 8, LENGTH)
ROUNDING = dict(rtol=1e-5, atol=1e-5)


def mix(inputs_btd, params, row_ids, key):
  """Causal; gains differ by the row, and are drawn anew for every call."""
  x_btd = jnp.cumsum(jnp.tanh(inputs_btd @ params["kernel"]), axis=1)
  gain_d = params["gains"][row_ids] + jax.random.normal(key, x_btd.shape[2:])[None]
  return x_btd * gain_d[:, None] + params["nested"][0] ** 2


def draw(out=OUT, layers=()):
  """Inputs, the other arguments, and the weights of a scalar to differentiate."""
  generator = np.random.default_rng(3)

  def normal(*shape):
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)

  params = {
    "kernel": normal(*layers, WIDTH, out),
    "gains": normal(*layers, 3, out),
    "nested": [normal(*layers)],
  }
  row_ids = jnp.arange(BATCH, dtype=jnp.int32) * 2 % 3
  others = params, row_ids, jax.random.key(5)
  return normal(BATCH, LENGTH, WIDTH), others, normal(BATCH, LENGTH, out)


def first_ones(needed):
  return (np.arange(LENGTH) < needed)[None, :, None].astype(np.float32)


@jax.jit
def capped(inputs, others, weights, needed):
  """The result and its gradients by inputs and parameters."""

  def operator(inputs, params):
    return run_at_capacity(mix, SIZES, needed, inputs, params, *others[1:])

  result, pull = jax.vjp(operator, inputs, others[0])
  return result, *pull(weights)


@jax.jit
def whole(inputs, others, weights):
  result, pull = jax.vjp(lambda x, params: mix(x, params, *others[1:]), inputs, others[0])
  return result, *pull(weights)


def assert_close(actual, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), actual, expected)


@pytest.mark.parametrize("needed", [0, 1, 4, 5, 8, 9, LENGTH])
def test_values_and_gradients_are_those_of_the_whole(needed):
  inputs, others, weights = draw()
  weights *= first_ones(needed)
  result, *gradients = capped(inputs, others, weights, needed)
  expected, *expected_gradients = whole(inputs, others, weights)
  capacity = min(size for size in SIZES if size >= needed)
  np.testing.assert_allclose(result[:, :capacity], expected[:, :capacity], **ROUNDING)
  np.testing.assert_array_equal(result[:, capacity:], 0)
  assert_close(gradients, expected_gradients)
  if needed:
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("needed", [3, 8])
def test_nothing_beyond_the_capacity_gets_in(needed):
  inputs, others, weights = draw()
  capacity = min(size for size in SIZES if size >= needed)
  spoilt = [x.at[:, capacity:].set(jnp.nan) for x in (inputs, weights)]
  result, *gradients = capped(spoilt[0], others, spoilt[1], needed)
  clean = [x.at[:, capacity:].set(0) for x in (inputs, weights)]
  expected, *expected_gradients = capped(clean[0], others, clean[1], needed)
  assert np.isfinite(expected).all()
  np.testing.assert_array_equal(result, expected)
  jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)
  np.testing.assert_array_equal(gradients[0][:, capacity:], 0)


def tanhs(lowered):
  """Lengths of the arrays that the lowered function takes the tanh of."""
  return sorted(map(int, re.findall(r"tanh .*tensor<8x(\d+)x", lowered.as_text())))


def test_each_branch_works_at_its_size_and_the_backward_pass_again():
  inputs, others, weights = draw()

  @jax.jit
  def forward(inputs, others, needed):
    return run_at_capacity(mix, SIZES, needed, inputs, *others)

  lowered = forward.lower(inputs, others, 5)
  assert lowered.as_text().count("stablehlo.case") == 1
  assert tanhs(lowered) == [*SIZES]
  lowered = capped.lower(inputs, others, weights, 5)
  assert lowered.as_text().count("stablehlo.case") == 2
  assert tanhs(lowered) == sorted(2 * SIZES)


@pytest.mark.parametrize("sizes, needed", [((LENGTH,), 5), (SIZES, None)], ids=str)
def test_no_switch_where_there_is_no_choice(sizes, needed):
  inputs, others, _ = draw()

  @jax.jit
  def forward(inputs, others):
    return run_at_capacity(mix, sizes, needed, inputs, *others)

  lowered = forward.lower(inputs, others)
  assert "stablehlo.case" not in lowered.as_text() and tanhs(lowered) == [LENGTH]
  # With JAX's own gradient: that of the operator itself has no forward mode.
  arguments = (inputs, others), (inputs, tangents(others))
  jax.jit(lambda: jax.jvp(forward, *arguments)).lower()


def tangents(tree):
  """The zeros that a forward mode wants of a pytree of floats and others."""

  def zeros(x):
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if is_float else np.zeros(x.shape, jax.dtypes.float0)

  return jax.tree.map(zeros, tree)


def plain_switch(needed, inputs, *others):
  """The operator with JAX's own gradient."""

  def branch(size):
    rest = ((0, 0), (0, LENGTH - size), (0, 0))
    return lambda: jnp.pad(mix(inputs[:, :size], *others), rest)

  return jax.lax.switch(needed // 4, [branch(size) for size in SIZES])


def test_between_the_passes_the_arguments_alone_are_kept():
  inputs, others, _ = draw()

  def kept(operator):
    def residuals(inputs, others, needed):
      call = functools.partial(operator, needed)
      _, pull = jax.vjp(lambda x, params: call(x, params, *others[1:]), inputs, others[0])
      return [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.float32]

    return sum(leaf.size for leaf in jax.eval_shape(residuals, inputs, others, 5))

  arguments = inputs.size + sum(leaf.size for leaf in jax.tree.leaves(others[0]))
  assert kept(functools.partial(run_at_capacity, mix, SIZES)) == arguments
  assert kept(plain_switch) > 2 * arguments


@functools.partial(jax.jit, static_argnames=("operator", "wrap"))
def run_layers(inputs, others, weights, needed, operator, wrap):
  """A scan over layers of stacked parameters, and its gradients."""
  params, row_ids, key = others

  def layer(x, of_layer):
    return x + operator(needed, x, of_layer[0], row_ids, of_layer[1]), None

  def stack(inputs, params):
    layers = params, jax.random.split(key, LAYERS)
    return jax.lax.scan(wrap(layer), inputs, layers)[0]

  result, pull = jax.vjp(stack, inputs, params)
  return result, *pull(weights)


def no_wrap(function):
  return function


@pytest.mark.parametrize("wrap", [no_wrap, jax.checkpoint])
def test_within_a_scan_of_layers(wrap):
  inputs, others, weights = draw(out=WIDTH, layers=(LAYERS,))
  needed = 6
  weights *= first_ones(needed)
  operator = functools.partial(run_at_capacity, mix, SIZES)
  result, *gradients = run_layers(inputs, others, weights, needed, operator=operator, wrap=wrap)
  expected, *expected_gradients = run_layers(
    inputs, others, weights, needed, operator=lambda needed, *x: mix(*x), wrap=no_wrap
  )
  np.testing.assert_allclose(result[:, :needed], expected[:, :needed], **ROUNDING)
  assert_close(gradients, expected_gradients)


def test_layers_take_no_more_memory_than_those_of_the_whole_length():
  inputs, others, weights = draw(out=WIDTH, layers=(LAYERS,))

  def temporary(operator):
    lowered = run_layers.lower(inputs, others, weights, 6, operator=operator, wrap=no_wrap)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  padded = temporary(lambda needed, *x: mix(*x))
  assert temporary(functools.partial(run_at_capacity, mix, SIZES)) <= 1.1 * padded
  assert temporary(plain_switch) > 1.1 * padded


def test_a_batch_over_devices():
  inputs, others, weights = draw()
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
  by_row, everywhere = (NamedSharding(mesh, PartitionSpec(*x)) for x in (["batch"], []))
  placed = jax.device_put(
    (inputs, others, weights, jnp.int32(5)),
    (by_row, (everywhere, by_row, everywhere), by_row, everywhere),
  )
  compiled = capped.lower(*placed).compile()
  result = compiled(*placed)
  assert_close(result, capped(inputs, others, weights, 5))
  for x in result[:2]:
    assert x.sharding.is_equivalent_to(by_row, x.ndim)
  # The parameters' gradients are summed; no row travels.
  assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
  "sizes", [(), (4, 8), (4, 4, LENGTH), (8, 4, LENGTH), (0, LENGTH), (4, LENGTH + 1)]
)
def test_refuses_wrong_sizes(sizes):
  inputs, others, _ = draw()
  with pytest.raises(ValueError, match=r"sizes: expected rising .*11.*, got \("):
    run_at_capacity(mix, sizes, jnp.int32(3), inputs, *others)


def test_refuses_inputs_without_positions():
  with pytest.raises(ValueError, match="sizes: expected rising"):
    run_at_capacity(jnp.tanh, (3, LENGTH), jnp.int32(3), jnp.zeros(LENGTH))


@pytest.mark.parametrize(
  "longest, number, expected",
  [
    (9, 4, (3, 5, 7, 9)),
    (LENGTH, 3, (4, 8, 11)),
    (7, 1, (7,)),
    (3, 5, (1, 2, 3)),
    (1, 1, (1,)),
  ],
)
def test_capacities(longest, number, expected):
  assert capacities(longest, number) == expected


@pytest.mark.parametrize("longest", [1, 2, 13, 2049])
@pytest.mark.parametrize("number", [1, 2, 8])
def test_capacities_rise_evenly_to_the_longest(longest, number):
  sizes = capacities(longest, number)
  assert sizes[-1] == longest and len(sizes) == min(number, longest)
  steps = np.diff([0, *sizes])
  assert steps.min() >= 1 and steps.max() - steps.min() <= 1


def test_refuses_capacities_below_one():
  with pytest.raises(ValueError, match="longest: expected at least 1, got 0"):
    capacities(0, 3)
  with pytest.raises(ValueError, match="number: expected at least 1, got 0"):
    capacities(3, 0)
