"""The capacities: the same numbers as the whole, for the work of the needed part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops.bucketing import bucket_sizes, run_in_bucket
from tests import helpers
from tests.reference.exact import normal

# A row a device.
BATCH, LENGTH, WIDTH, OUT = 8, 11, 5, 7
SIZES = (4, 8, LENGTH)
ROUNDING = dict(rtol=1e-5, atol=1e-5)


def mix(inputs_btd, params, row_ids, key):
  """Causal; gains differ by the row, and are drawn anew for every call."""
  x_btd = jnp.cumsum(jnp.tanh(inputs_btd @ params["kernel"]), axis=1)
  gain_d = params["gains"][row_ids] + jax.random.normal(key, x_btd.shape[2:])[None]
  return x_btd * gain_d[:, None] + params["nested"][0] ** 2


def draw():
  """Inputs, the other arguments, and the weights of a scalar to differentiate."""
  params = {"kernel": normal(WIDTH, OUT), "gains": normal(3, OUT), "nested": [normal()]}
  row_ids = jnp.arange(BATCH, dtype=jnp.int32) * 2 % 3
  others = params, row_ids, jax.random.key(5)
  return normal(BATCH, LENGTH, WIDTH), others, normal(BATCH, LENGTH, OUT)


def first_ones(needed):
  return (np.arange(LENGTH) < needed)[None, :, None].astype(np.float32)


@jax.jit
def capped(inputs, others, weights, needed):
  """The result and its gradients by inputs and parameters."""

  def operator(inputs, params):
    return run_in_bucket(mix, SIZES, needed, inputs, params, *others[1:])

  result, pull = jax.vjp(operator, inputs, others[0])
  return result, *pull(weights)


@jax.jit
def whole(inputs, others, weights):
  result, pull = jax.vjp(lambda x, params: mix(x, params, *others[1:]), inputs, others[0])
  return result, *pull(weights)


def assert_close(actual, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), actual, expected)


@pytest.mark.parametrize("needed", [0, 1, 4, 5, LENGTH])
def test_values_and_gradients_are_those_of_the_whole(needed):
  inputs, others, weights = draw()
  expected, *expected_gradients = whole(inputs, others, weights * first_ones(needed))
  capacity = min(size for size in SIZES if size >= needed)
  # Nothing beyond the capacity gets in.
  weights = (weights * first_ones(needed)).at[:, capacity:].set(jnp.nan)
  spoilt = inputs.at[:, capacity:].set(jnp.nan)
  result, *gradients = capped(spoilt, others, weights, needed)
  np.testing.assert_allclose(result[:, :capacity], expected[:, :capacity], **ROUNDING)
  np.testing.assert_array_equal(result[:, capacity:], 0)
  assert_close(gradients, expected_gradients)
  if needed:
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(gradients))


def test_inputs_have_any_number_of_axes():
  inputs = np.ones((3, 7, 2, 5), np.float32)
  result = run_in_bucket(lambda x: 2 * x, (4, 7), jnp.int32(3), inputs)
  assert (result[:, :4] == 2).all() and not result[:, 4:].any()


def tanhs(lowered):
  """Lengths of the arrays that the lowered function takes the tanh of."""
  return sorted(map(int, re.findall(r"tanh .*tensor<8x(\d+)x", lowered.as_text())))


def test_each_branch_works_at_its_size_and_the_backward_pass_again():
  inputs, others, weights = draw()

  @jax.jit
  def forward(inputs, others, needed):
    return run_in_bucket(mix, SIZES, needed, inputs, *others)

  lowered = forward.lower(inputs, others, 5)
  assert lowered.as_text().count("stablehlo.case") == 1
  assert tanhs(lowered) == [*SIZES]
  lowered = capped.lower(inputs, others, weights, 5)
  assert lowered.as_text().count("stablehlo.case") == 2
  assert tanhs(lowered) == sorted(2 * SIZES)


def test_a_batch_over_devices():
  inputs, others, weights = draw()
  by_rows, everywhere = helpers.over_devices()
  placed = jax.device_put(
    (inputs, others, weights, jnp.int32(5)),
    (by_rows, (everywhere, by_rows, everywhere), by_rows, everywhere),
  )
  compiled = capped.lower(*placed).compile()
  result = compiled(*placed)
  assert_close(result, capped(inputs, others, weights, 5))
  for x in result[:2]:
    assert x.sharding.is_equivalent_to(by_rows, x.ndim)
  # The parameters' gradients are summed; no row travels.
  assert helpers.collectives(compiled) == {"all-reduce"}


def test_capacities_rise_evenly_to_half_of_the_longest():
  assert bucket_sizes(9, 4) == (2, 3, 5, 9) and bucket_sizes(3, 5) == (1, 2, 3)
  for longest in (1, 2, 13, 2049):
    for number in (1, 2, 5):
      *sizes, last = bucket_sizes(longest, number)
      assert last == longest and len(sizes) == min(number - 1, -(-longest // 2), longest - 1)
      if sizes:
        steps = np.diff([0, *sizes])
        assert sizes[-1] == -(-longest // 2) and steps.max() - steps.min() <= 1 <= steps.min()
