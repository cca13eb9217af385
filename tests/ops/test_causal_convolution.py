"""Causal convolution: every implementation against a loop over pairs, and its relations."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import causal_convolution
from dpjax.ops.causal_convolution import choose_implementation
from tests import helpers
from tests.reference import exact
from tests.reference import extractors as reference

IMPLEMENTATIONS = ("scan", "conv", "toeplitz", "fft", "dft")
DIRECT = ("scan", "conv", "toeplitz")
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
    functools.partial(causal_convolution, implementation=implementation),
    inputs,
    filters,
  )
  return result, *pull(weights)


@functools.partial(jax.jit, static_argnums=2)
def convolve(inputs, filters, implementation=None):
  return causal_convolution(inputs, filters, implementation=implementation)


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


def test_the_past_does_not_see_what_comes_later(rank, implementation):
  inputs, filters, _ = draw(rank)
  later = jnp.nan if implementation == "scan" else 17
  changed = convolve(inputs.at[:, 4:].set(later), filters, implementation)
  unchanged = convolve(inputs, filters, implementation)
  rounding = 0 if implementation in DIRECT else 1e-4
  np.testing.assert_allclose(changed[:, :4], unchanged[:, :4], rtol=0, atol=rounding)


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


PRODUCTS = {("scan", 3), *((name, rank) for name in ("conv", "toeplitz") for rank in RANKS)}


def operands_on_a_gpu(name, *arrays):
  """The dtypes that products have there: left, right and result of each."""
  traced = run.trace(*arrays, implementation=name)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  lines = [x for x in text.splitlines() if re.search("dot_general|convolution[(]", x)]
  return [re.findall(r"tensor<[0-9x]*x(\w+)>", x.rsplit(" : ", 1)[1]) for x in lines]


@pytest.mark.parametrize("name", DIRECT)
def test_direct_products_take_low_dtypes_as_they_are_and_mixed_ones_in_float32(rank, name):
  for dtype, short in ((jnp.bfloat16, "bf16"), (jnp.float16, "f16")):
    products = operands_on_a_gpu(name, *draw(rank, dtype=dtype))
    result = short if name == "conv" else "f32"
    expected = 3 * [[short, short, result]] if (name, rank) in PRODUCTS else []
    assert products == expected
  inputs, filters, weights = draw(rank)
  products = operands_on_a_gpu(
    name, inputs.astype(jnp.bfloat16), filters, weights.astype(jnp.bfloat16)
  )
  assert {x for product in products for x in product} <= {"f32"}
  assert bool(products) == ((name, rank) in PRODUCTS)


@pytest.mark.parametrize("name", ["fft", "dft"])
def test_transforms_of_bfloat16_are_in_float32(rank, name):
  for product in operands_on_a_gpu(name, *draw(rank, dtype=jnp.bfloat16)):
    assert product == 3 * ["f32"]
  length = 64
  inputs, filters, _ = draw(rank, 1, length, length, dtype=jnp.bfloat16)
  changed = inputs.at[:, length // 2 :].multiply(-3)
  before, after = (convolve(x, filters, name) for x in (inputs, changed))
  before, after = (np.asarray(x[:, : length // 2], np.float32) for x in (before, after))
  # A rounding of the result to bfloat16 that tips over, nothing else.
  np.testing.assert_allclose(before, after, rtol=2**-7, atol=1e-5)
  assert (before == after).mean() > 0.98


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
    # "conv" is slow within a loop over layers, and "plain" is the benchmark's own.
    measured = {x: rows[x]["milliseconds"] for x in rows if x not in ("conv", "plain")}
    name = choose_implementation(case["rank"], case["batch"], case["length"], "cpu", 1)
    assert name in measured, (case, name)
    over.append(measured[name] / min(measured.values()))
    assert over[-1] <= 1.35, (case, name)  # Two runs differ by about as much.
  assert sum(over) / len(over) < 1.1
