"""Causal convolution: every implementation against a loop over pairs, and its relations."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import CAUSAL_CONVOLUTION, causal_convolution, short_convolution
from dpjax.ops.convolution import choose_implementation
from tests import helpers
from tests.reference import exact
from tests.reference import extractors as reference


def draw(rank, length=7, taps=11, width=3, written=5, dtype=jnp.float32):
  """Inputs and filters."""
  arrays = exact.normal(2, length, width), exact.normal(*(taps, width, written)[:rank])
  return [x.astype(dtype) for x in arrays]


def assert_close(actual, expected, tolerance=1e-5):
  """Errors, in units of the expected array's root mean square: largest, and that."""
  for name, a, b in zip(("result", "inputs", "filters"), actual, expected, strict=False):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    error = np.abs(a - b) / np.sqrt(np.mean(b**2))
    assert error.max() < tolerance, name
    assert np.sqrt(np.mean(error**2)) < tolerance / 5, name


CASES = [(name, rank) for name in CAUSAL_CONVOLUTION for rank in (1, 2, 3)]


# In two steps, or of an even size, where T is neither; one position.
@pytest.mark.parametrize(
  "implementation, sizes",
  [(name, (rank, 37, 41)) for name, rank in CASES]
  + [(name, (2, 1, 5)) for name in CAUSAL_CONVOLUTION],
)
def test_equals_the_sum_over_all_pairs(implementation, sizes):
  operator = functools.partial(causal_convolution, implementation=implementation)
  assert_close(*exact.both(operator, reference.causal_convolution, draw(*sizes)))


def test_a_short_one_is_one_of_few_taps():
  inputs, filters = draw(2)
  few = filters.at[3:].set(0)
  expected = exact.run(reference.causal_convolution, (inputs, few))
  np.testing.assert_allclose(short_convolution(inputs, few[:3]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation, rank", CASES)
def test_low_dtypes_are_summed_in_float32(implementation, rank):
  operator = functools.partial(causal_convolution, implementation=implementation)
  arrays = draw(rank, 37, 41, dtype=jnp.bfloat16)
  for x, y in zip(*exact.both(operator, reference.causal_convolution, arrays), strict=True):
    # Rounded once, at the end: the same but where a sum is close to a tie.
    assert x.dtype == jnp.bfloat16 and (x == y.astype(jnp.bfloat16)).mean() > 0.99
    assert_close([x], [y], 5 * float(jnp.finfo(jnp.bfloat16).eps))


def test_several_devices_and_other_platforms_have_a_choice_of_their_own():
  assert choose_implementation(2, 2, 600, "cpu", 1) == "fft"
  assert choose_implementation(2, 2, 600, "gpu", 1) == "fft"
  assert choose_implementation(2, 2, 600, "gpu", 2) == "dft"
  assert choose_implementation(3, 2, 7, "cpu", 1) == "scan"
  assert choose_implementation(3, 2, 7, "gpu", 1) == "dft"


REPORT = json.loads((helpers.ROOT / "results/causal_convolution.json").read_text(encoding="utf-8"))


def test_the_default_was_measured_and_is_fast():
  over = []
  for case in REPORT["cases"] + REPORT["sweep"]:
    rows = case["gradient"]["implementations"]
    # "conv" is no longer there, and "plain" is the benchmark's.
    measured = {x: rows[x]["milliseconds"] for x in rows if x not in ("conv", "plain")}
    name = choose_implementation(case["rank"], case["batch"], case["length"], "cpu", 1)
    assert name in measured, (case, name)
    over.append(measured[name] / min(measured.values()))
    assert over[-1] <= 1.35, (case, name)  # Two runs differ by about as much.
  assert sum(over) / len(over) < 1.1
