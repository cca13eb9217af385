"""Causal convolution: every implementation against a loop over pairs, and its relations."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import causal_convolution
from dpjax.ops.convolution import choose_implementation
from tests import helpers
from tests.reference import exact
from tests.reference import extractors as reference

IMPLEMENTATIONS = ("scan", "toeplitz", "fft", "dft")
RANKS = (1, 2, 3)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
  return request.param


@pytest.fixture(params=RANKS, ids="rank{}".format)
def rank(request):
  return request.param


def draw(rank, batch=2, length=7, taps=11, width=3, written=5, dtype=jnp.float32):
  """Inputs, filters, and the weights of a scalar to differentiate."""
  generator = np.random.default_rng(length)
  inputs = generator.standard_normal((batch, length, width))
  filters = generator.standard_normal((taps, width, written)[:rank])
  weights = generator.standard_normal((batch, length, written if rank == 3 else width))
  return tuple(jnp.asarray(x, dtype) for x in (inputs, filters, weights))


@functools.partial(jax.jit, static_argnames="implementation")
def run(inputs, filters, weights, implementation=None):
  """The result and its gradients by inputs and filters, one compilation."""
  result, pull = jax.vjp(
    functools.partial(causal_convolution, implementation=implementation), inputs, filters
  )
  return result, *pull(weights)


@functools.cache
def expect(*sizes):
  """By all pairs of positions, of what `draw` gives."""
  *arrays, weights = draw(*sizes)
  return exact.run(reference.causal_convolution, arrays, weights)


def assert_close(actual, expected, tolerance=1e-5):
  """Errors, in units of the expected array's root mean square: largest, and that."""
  for name, a, b in zip(("result", "inputs", "filters"), actual, expected, strict=False):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    assert a.shape == b.shape, name
    error = np.abs(a - b) / np.sqrt(np.mean(b**2))
    assert error.max() < tolerance, name
    assert np.sqrt(np.mean(error**2)) < tolerance / 5, name


@pytest.mark.parametrize(
  "sizes",
  [
    (3, 13, 13, 5, 2),
    (2, 1, 5, 3, 7),
    (2, 37, 41, 3, 5),  # In two steps, or of an even size, where T is neither.
  ],
  ids=str,
)
def test_equals_the_sum_over_all_pairs(rank, implementation, sizes):
  assert_close(run(*draw(rank, *sizes), implementation=implementation), expect(rank, *sizes))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_low_dtypes_are_summed_in_float32(rank, implementation, dtype):
  arrays = draw(rank, length=37, taps=41, dtype=dtype)
  outputs = run(*arrays, implementation=implementation)
  assert [x.dtype for x in outputs] == [dtype] * 3
  in_float32 = run(*(x.astype(jnp.float32) for x in arrays), implementation=implementation)
  for x, y in zip(outputs, in_float32, strict=True):
    # Rounded once, at the end: the same but where a sum is close to a tie.
    assert (x == y.astype(dtype)).mean() > 0.99
    assert_close([x], [y], 5 * float(jnp.finfo(dtype).eps))


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
