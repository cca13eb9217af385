"""Dropout: its rate, its scale, its gradient, and that draws are independent."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from dpjax import ops

module = importlib.import_module("dpjax.ops.dropout")


def test_rate_scale_and_gradient():
  rate, shape = 0.37, (7, 101, 113)
  inputs = np.asarray(jax.random.normal(jax.random.key(1), shape) + 3)
  outputs, pull = jax.vjp(lambda x: ops.dropout(x, rate, jax.random.key(2)), inputs)
  is_kept = np.asarray(outputs != 0)
  np.testing.assert_allclose(outputs, is_kept * inputs / (1 - rate), rtol=1e-5)
  np.testing.assert_allclose(pull(inputs)[0], outputs, rtol=1e-5)
  # 5 standard deviations of the mean of so many.
  spread = 5 * (rate * (1 - rate) / is_kept.size) ** 0.5
  assert abs(is_kept.mean() - (1 - rate)) < spread
  # Of 113 elements in quarters of 29, those a quarter apart share a word, those two a block of two
  # words: the second must not follow the first.
  for distance in (1, 29, 58):
    both = (is_kept[..., distance:] & is_kept[..., :-distance]).mean()
    assert abs(both - (1 - rate) ** 2) < 2 * 5 * (rate / (is_kept.size / 2)) ** 0.5
  for axis in range(3):
    means = is_kept.mean(axis=tuple({0, 1, 2} - {axis}))
    spread = 6 * (rate * (1 - rate) * shape[axis] / is_kept.size) ** 0.5
    assert np.all(abs(means - (1 - rate)) < spread)


# Of all 2**16 values of the bits as many are kept; some rates are not exact in 16 bits.
@pytest.mark.parametrize(
  "rate, kept",
  [(0.1, 58982), (0.2, 52429), (0.5, 2**15), (1e-6, 2**16), (0.9999, 7), (1 - 1e-6, 1)],
)
def test_keeps_the_mean(rate, kept, monkeypatch):
  every = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(np.uint32))
  monkeypatch.setattr(module, "threefry", lambda key, high, low: jnp.split(every, 2))
  key = jax.random.key(0)
  for operator in (ops.dropout, ops.relu_dropout):
    outputs, pull = jax.vjp(partial(operator, rate=rate, key=key), jnp.ones(2**16))
    assert int((np.asarray(outputs) > 0).sum()) == kept
    np.testing.assert_allclose([outputs.mean(), pull(jnp.ones(2**16))[0].mean()], 1, rtol=1e-5)


def test_threefry():
  # The known answers of the authors' Random123, for counts and keys of 0 and of ones.
  known = {
    13: ((0x9D1C5EC6, 0x8BD50731), (0xFD36D048, 0x2D17272C)),
    20: ((0x6B200159, 0x99BA4EFE), (0x1CB996FC, 0xBB002BE7)),
  }
  for rounds, answers in known.items():
    for word, expected in zip((0, 2**32 - 1), answers, strict=True):
      x = jnp.asarray(word, jnp.uint32)
      assert tuple(map(int, module.threefry(jnp.stack([x, x]), x, x, rounds=rounds))) == expected
  key = jax.random.bits(jax.random.key(7), (2,), jnp.uint32)
  high, low = jax.random.bits(jax.random.key(8), (2, 5, 3), jnp.uint32)
  expected = threefry_2x32(key, jnp.concatenate([high.ravel(), low.ravel()]))
  actual = jnp.stack(module.threefry(key, high, low, rounds=20)).ravel()
  np.testing.assert_array_equal(actual, expected)


def test_after_relu_is_both_and_keeps_its_output_alone():
  inputs = jax.random.normal(jax.random.key(3), (3, 5, 11))
  key = jax.random.key(4)
  plain = jax.jit(lambda x: ops.dropout(jax.nn.relu(x), 0.3, key))
  expected, expected_pull = jax.vjp(plain, inputs)
  outputs, pull = jax.vjp(jax.jit(lambda x: ops.relu_dropout(x, 0.3, key)), inputs)
  np.testing.assert_array_equal(outputs, expected)
  np.testing.assert_array_equal(pull(inputs)[0], expected_pull(inputs)[0])
  assert [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= inputs.size] == [jnp.float32]
