"""The benchmark of causal convolution: its parts, and that they measure what they say."""

import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script that lies there.
from benchmarks import causal_convolution as benchmark  # noqa: E402


@pytest.fixture
def small(monkeypatch):
  for name, value in {
    "IMPLEMENTATIONS": ("plain", "toeplitz", "fft"),
    "RANKS": {2: "WE, HE"},
    "HEADS": (1, 2),
    "QUICK_SHAPES": [(2, 7, 6)],
    "QUICK_LENGTHS": [11],
  }.items():
    monkeypatch.setattr(benchmark, name, value)
  monkeypatch.setattr(benchmark.timing, "restart_with_quiet_allocator", lambda: None)
  # As in a script: JAX's attention of bfloat16, and the textbook's scan, need it.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def run(monkeypatch, path, *flags):
  arguments = ["causal_convolution.py", "--quick", f"--out={path}", *flags]
  monkeypatch.setattr(sys, "argv", arguments)
  benchmark.main()
  assert path.with_suffix(".png").stat().st_size > 0
  return json.loads(path.with_suffix(".json").read_text())


@pytest.mark.slow
def test_the_report(small, monkeypatch, tmp_path):
  report = run(monkeypatch, tmp_path / "report")
  (case,), (low,), (swept,) = (report[x] for x in ("cases", "cases_bfloat16", "sweep"))
  assert [case[x] for x in ("rank", "batch", "length", "width")] == [2, 2, 7, 6]
  assert [x["dtype"] for x in (case, low, swept)] == ["float32", "bfloat16", "float32"]
  for kind in benchmark.KINDS:
    assert list(case[kind]["implementations"]) == ["plain", "toeplitz", "fft"]
    assert list(low[kind]["implementations"]) == ["toeplitz", "fft"]
    assert list(case[kind]["attention"]) == ["attention_1", "attention_2"]
    assert swept[kind]["attention"] == {}
    ours = case[kind]["implementations"]["fft"]
    assert ours["milliseconds"] > 0 and ours["compile_seconds"] > 0
    assert {x for x in ours if x.startswith("ratio")} == {
      f"ratio_to_{x}" for x in ("plain", "toeplitz", "attention_1", "attention_2")
    }
    assert case[kind]["implementations"]["toeplitz"]["ratio_to_toeplitz"] == 1


def test_a_part_alone(small, monkeypatch, tmp_path):
  flags = "--parts=cases", "--dtypes=bfloat16"
  report = run(monkeypatch, tmp_path / "report", *flags)
  assert report["cases"] == report["sweep"] == []
  assert len(report["cases_bfloat16"]) == 1


def test_refuses_an_unknown_part(small, monkeypatch, tmp_path, capsys):
  with pytest.raises(SystemExit):
    run(monkeypatch, tmp_path / "report", "--parts=cases,swept")
  assert "expected some of cases,sweep, separated by commas, got 'cases,swept'" in (
    capsys.readouterr().err
  )


def test_what_takes_too_much_is_left_out(small, monkeypatch):
  make = functools.partial(benchmark.make_arrays, 1, 2, width=3, dtype="float32")
  function = functools.partial(benchmark.forward, implementation="toeplitz")
  left_out = benchmark.prepare(function, make, 512, max_seconds=0)
  assert left_out == "about 0 s a call, by a call of length 128"
  monkeypatch.setattr(benchmark, "MAX_BYTES", 0)
  left_out = benchmark.prepare(function, make, 7, max_seconds=math.inf)
  assert left_out == "needs 0.0 GiB of temporary memory"


def test_attention_is_masked_self_attention():
  queries, keys, values = (
    jnp.asarray(np.random.default_rng(i).standard_normal((2, 5, 6)), jnp.float32) for i in range(3)
  )
  result = jax.jit(benchmark.attend, static_argnums=3)(queries, keys, values, 2)
  q, k, v = (x.reshape(2, 5, 2, 3) for x in (queries, keys, values))
  scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(3)
  scores = np.exp(np.where(np.tri(5, dtype=bool), scores, -np.inf))
  shares = scores / scores.sum(axis=-1, keepdims=True)
  expected = np.einsum("bhts,bshe->bthe", shares, v).reshape(2, 5, 6)
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_the_textbook_scan_is_the_operator():
  inputs, filters, weights = benchmark.make_arrays(3, 2, 7, 3, "float32")
  ours = jax.jit(functools.partial(ops.causal_convolution, implementation="scan"))
  theirs = jax.jit(benchmark.plain)(inputs, filters)
  np.testing.assert_allclose(theirs, ours(inputs, filters), rtol=1e-5, atol=1e-5)
