"""minGRU keeps the contract of a mixer, and is the recurrence of its paper."""

import jax
import numpy as np
import pytest
from my_mixer import MinGRU, linear_recurrence

from dpjax import testing


@pytest.mark.parametrize("relation", testing.RELATIONS)
def test_keeps_the_contract(relation):
  testing.check_mixer(MinGRU, relations=[relation])


def test_the_scan_is_the_loop():
  generator = np.random.default_rng(0)
  decay = generator.uniform(size=(2, 7, 5)).astype(np.float32)
  update = generator.standard_normal((2, 7, 5)).astype(np.float32)
  state = generator.standard_normal((2, 5)).astype(np.float32)
  scanned = jax.jit(linear_recurrence)(decay, update, state)
  for t in range(7):
    state = decay[:, t] * state + update[:, t]
    np.testing.assert_allclose(scanned[:, t], state, rtol=1e-5, atol=1e-6)


def test_the_module_is_the_papers_equations():
  inputs = np.random.default_rng(1).standard_normal((2, 7, 3)).astype(np.float32)
  outputs, variables = MinGRU(max_length=11, expansion=2).init_with_output(
    jax.random.key(0), inputs
  )

  def dense(name, x):
    return x @ variables["params"][name]["kernel"] + variables["params"][name]["bias"]

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  state = np.zeros((2, 6))
  for t in range(7):
    gate, value = sigmoid(dense("gates", inputs[:, t])), dense("values", inputs[:, t])
    value = np.where(value >= 0, value + 0.5, sigmoid(value))
    state = (1 - gate) * state + gate * value
    np.testing.assert_allclose(outputs[:, t], dense("out", state), rtol=1e-4, atol=1e-5)


def test_settings_out_of_range():
  with pytest.raises(ValueError, match="^expansion: expected at least 1, got 0"):
    MinGRU(max_length=13, expansion=0)
