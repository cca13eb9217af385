"""Relative attention against a float64 loop over pairs of positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.layers import embeddings
from tests.reference import attention as reference

BATCH, LENGTH, HEADS, FEATURES, DISTANCES = 2, 7, 3, 5, 9
NAMES = ("queries", "keys", "values", "positions", "content_bias", "position_bias")
ROUNDING = dict(rtol=1e-5, atol=1e-5)


def draw(length=LENGTH, distances=DISTANCES, dtype=jnp.float32):
  """The six arguments; prefixes of one array, whatever the length."""
  shapes = [(BATCH, LENGTH, HEADS, FEATURES)] * 3
  shapes += [(DISTANCES, HEADS, FEATURES), (HEADS, FEATURES), (HEADS, FEATURES)]
  generator = np.random.default_rng(4)
  arrays = [generator.standard_normal(shape) for shape in shapes]
  arrays[:4] = *(x[:, :length] for x in arrays[:3]), arrays[3][:distances]
  return [jnp.asarray(x, dtype) for x in arrays]


attend = jax.jit(ops.relative_attention)


@jax.jit
def run(arguments, weights):
  result, pull = jax.vjp(ops.relative_attention, *arguments)
  return result, pull(weights)


@pytest.mark.parametrize("length", [1, LENGTH])
def test_values_and_gradients(length):
  arguments = draw(length)
  weights = draw()[2][:, ::-1][:, :length]
  result, gradients = run(arguments, weights)
  np.testing.assert_allclose(result, reference.relative_attention(*arguments), **ROUNDING)
  expected = reference.relative_attention_gradients(*arguments, weights)
  for name, found, exact in zip(NAMES, gradients, expected, strict=True):
    np.testing.assert_allclose(found, exact, **ROUNDING, err_msg=name)
  # One position attends to itself alone, whatever the scores.
  assert all((np.abs(x).max() > 0.1) == (length > 1 or i == 2) for i, x in enumerate(gradients))
  np.testing.assert_array_equal(gradients[3][length:], 0)


def test_further_distances_change_nothing():
  exact = attend(*draw(distances=LENGTH))
  np.testing.assert_allclose(attend(*draw()), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 4])
def test_a_longer_input_begins_with_the_outputs_of_the_shorter(length):
  shorter, longer = attend(*draw(length)), attend(*draw())
  np.testing.assert_allclose(shorter, longer[:, :length], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changed", NAMES[:4])
def test_the_past_alone_is_seen_and_all_of_it(changed):
  place = 3
  arguments = draw()
  before, index = attend(*arguments), NAMES.index(changed)
  at = arguments[index].at
  changes = at[place] if changed == "positions" else at[:, place]
  arguments[index] = changes.add(0.7)
  moved = np.abs(attend(*arguments) - before).max(axis=(0, 3)).min(axis=1)
  np.testing.assert_array_equal(moved[:place], 0)
  seen = moved[place : place + 1] if changed == "queries" else moved[place:]
  assert seen.min() > 1e-4
  np.testing.assert_array_equal(moved[place + len(seen) :], 0)


def test_only_distances_count():
  # What comes before is made invisible: its keys meet queries that are all alike in one
  # feature. So the rest is seen as if it stood at the beginning.
  queries, keys, values, positions, u, v = draw()
  queries, u = queries.at[..., 0].set(1), u.at[:, 0].set(0)
  expected = attend(queries, keys, values, positions, u, v)
  moved = [jnp.roll(x, 2, axis=1) for x in (queries, keys, values)]
  moved[1] = moved[1].at[:, :2, :, 0].set(-1e4)
  result = attend(*moved, positions, u, v)
  np.testing.assert_allclose(result[:, 2:], expected[:, :-2], **ROUNDING)


def test_without_positions_and_biases_it_is_causal_attention():
  arguments = draw()
  arguments[3:] = [jnp.zeros_like(x) for x in arguments[3:]]
  expected = jax.jit(ops.causal_attention)(*arguments[:3])
  np.testing.assert_allclose(attend(*arguments), expected, **ROUNDING)


def test_large_scores_are_finite():
  arguments = [1e3 * x for x in draw()]
  for leaf in jax.tree.leaves(run(arguments, arguments[2])):
    assert np.isfinite(leaf).all()


def test_bfloat16():
  arguments = draw(dtype=jnp.bfloat16)
  result = attend(*arguments)
  assert result.dtype == jnp.bfloat16
  expected = reference.relative_attention(*(x.astype(jnp.float32) for x in arguments))
  np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=0, atol=0.05)


def test_dropout_is_of_the_weights():
  rate = 0.4
  queries, keys, *_, positions, u, v = draw()
  # Values of which position s has feature s alone: the outputs are the weights.
  arguments = [
    jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, LENGTH - FEATURES)])
    for x in (queries, keys, positions, u, v)
  ]
  values = jnp.broadcast_to(jnp.eye(LENGTH)[None, :, None], arguments[0].shape)
  arguments.insert(2, values)
  weights = attend(*arguments)
  np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)

  @jax.jit
  def train(key):
    return ops.relative_attention(*arguments, dropout_rate=rate, dropout_key=key)

  keys = jax.random.split(jax.random.key(0), 5)
  dropped = np.stack([train(key) for key in keys])
  np.testing.assert_array_equal(dropped[2], train(keys[2]))
  exact = np.broadcast_to(weights, dropped.shape)
  is_past = exact > 0
  is_kept = dropped != 0
  assert not (is_kept & ~is_past).any()
  np.testing.assert_allclose(dropped[is_kept], exact[is_kept] / (1 - rate), rtol=1e-5)
  # Five times the deviation of the share.
  count = is_past.sum()
  assert count == 5 * BATCH * HEADS * LENGTH * (LENGTH + 1) // 2
  assert abs(is_kept.sum() / count - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5


def test_dropout_needs_a_key():
  with pytest.raises(ValueError, match="dropout_key: .*dropout_rate = 0.4, got None"):
    jax.eval_shape(functools.partial(ops.relative_attention, dropout_rate=0.4), *draw())


@pytest.mark.parametrize(
  "index, array, message",
  [
    (1, draw(6)[1], r"queries, keys, values: .*\(2, 6, 3, 5\)"),
    (0, draw()[0][0], r"queries, keys, values: expected one shape \[B, T, H, E\]"),
    (3, draw(distances=6)[3], r"positions: .*at least 7, 3, 5\], got .*\(6, 3, 5\)"),
    (3, draw()[3][:, :2], r"positions: .*got the shape \(9, 2, 5\)"),
    (4, draw()[4][:, :1], r"content_bias, position_bias: .*\(3, 5\), got \(3, 1\), \(3"),
    (5, draw()[5][0], r"content_bias, position_bias: .*\(3, 5\), got \(3, 5\), \(5,\)"),
  ],
)
def test_refuses_shapes_that_do_not_match(index, array, message):
  arguments = draw()
  arguments[index] = array
  with pytest.raises(ValueError, match=message):
    ops.relative_attention(*arguments)


@pytest.mark.parametrize("length, width", [(7, 6), (13, 5), (1, 2), (3, 1)])
def test_relative_positions(length, width):
  table = ops.relative_positions(length, width)
  assert table.dtype == np.float32
  np.testing.assert_allclose(table, reference.relative_positions(length, width), atol=1e-6)
  by_turns = embeddings.sinusoidal_positions(length, width)
  sines_first = np.concatenate([by_turns[:, ::2], by_turns[:, 1::2]], axis=1)
  np.testing.assert_array_equal(table, sines_first)
