"""Dropout: its rate, its scale, its gradient, and that draws are independent."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import ops


def test_rate_and_scale():
  rate, shape = 0.37, (7, 101, 113)
  inputs = jax.random.normal(jax.random.key(1), shape) + 3
  outputs = np.asarray(ops.dropout(inputs, rate, jax.random.key(2)))
  is_kept = outputs != 0
  expected = np.asarray(inputs)[is_kept] / (1 - rate)
  np.testing.assert_allclose(outputs[is_kept], expected, rtol=1e-6)
  # 5 standard deviations of the mean of so many.
  spread = 5 * (rate * (1 - rate) / is_kept.size) ** 0.5
  assert abs(is_kept.mean() - (1 - rate)) < spread
  # Two elements share a word of 32 bits: the second must not follow the first.
  first, second = is_kept[..., 0:-1:2], is_kept[..., 1::2]
  both = (first & second).mean()
  assert abs(both - (1 - rate) ** 2) < 2 * 5 * (rate / first.size) ** 0.5
  for axis in range(3):
    means = is_kept.mean(axis=tuple({0, 1, 2} - {axis}))
    spread = 6 * (rate * (1 - rate) * shape[axis] / is_kept.size) ** 0.5
    assert np.all(abs(means - (1 - rate)) < spread)


def test_thresholds(monkeypatch):
  """Of the 2**16 values of the bits, as many are kept as the rate says."""
  every = np.arange(2**16, dtype=np.uint16).view(np.uint32)
  monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(every))
  kept_of = {0.1: 58982, 0.2: 52429, 0.5: 2**15, 1e-6: 2**16, 0.999999: 1}
  for rate, kept in kept_of.items():
    outputs = ops.dropout(jnp.ones(2**16), rate, jax.random.key(0))
    assert int((np.asarray(outputs) > 0).sum()) == kept


def test_gradient_is_the_mask():
  inputs = jax.random.normal(jax.random.key(3), (3, 5, 11))
  key = jax.random.key(4)
  outputs, pull = jax.vjp(lambda x: ops.dropout(x, 0.3, key), inputs)
  np.testing.assert_allclose(
    pull(jnp.ones_like(inputs))[0], np.where(outputs != 0, 1 / 0.7, 0), rtol=1e-6
  )


def test_after_relu_is_both_and_keeps_its_output_alone():
  inputs = jax.random.normal(jax.random.key(3), (3, 5, 11))
  key = jax.random.key(4)
  plain = jax.jit(lambda x: ops.dropout(jax.nn.relu(x), 0.3, key))
  expected, expected_pull = jax.vjp(plain, inputs)
  outputs, pull = jax.vjp(jax.jit(lambda x: ops.relu_dropout(x, 0.3, key)), inputs)
  np.testing.assert_array_equal(outputs, expected)
  np.testing.assert_array_equal(pull(inputs)[0], expected_pull(inputs)[0])
  assert [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= inputs.size] == [jnp.float32]
