"""What an operator computes depends on the platform that it is compiled for."""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import ops
from dpjax.ops.backend import by_platform

X = jnp.zeros((3, 200, 1, 4))
CASES = {  # and what their text has on a CPU, and on a TPU
  "shift_and_sum": (partial(ops.shift_and_sum, X), jnp.zeros((3, 200, 1, 5)), "while", "pad"),
  "causal_convolution": (
    partial(ops.causal_convolution, X[:2, :9, 0]),
    X[0, :9, 0],
    "while",
    "dot",
  ),
  "causal_attention": (lambda x: ops.causal_attention(x, x, x), X, "while", "exponential"),
}


def lower(function, x, platform: str) -> str:
  return jax.jit(function).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("case", CASES)
def test_each_platform_has_its_own(case):
  function, x, on_cpu, elsewhere = CASES[case]
  cpu, tpu = (lower(function, x, platform) for platform in ("cpu", "tpu"))
  assert f"stablehlo.{on_cpu}" in cpu
  assert f"stablehlo.{elsewhere}" in tpu
  assert "while" not in tpu


def test_the_platform_is_that_of_the_program():
  double = partial(by_platform, {"cpu": lambda x: 2 * x, "default": lambda x: x - 7})
  assert jax.jit(double)(3.0) == 6
  assert "subtract" in lower(double, 3.0, "tpu") and "multiply" in lower(double, 3.0, "cpu")
  assert by_platform({"default": abs}, -2) == 2


def test_no_operator_asks_for_the_machine_that_compiles():
  files = [*pathlib.Path(dpjax.__file__).parent.joinpath("ops").rglob("*.py")]
  assert len(files) > 10
  assert not [file.name for file in files if "default_backend" in file.read_text()]
