"""What the benchmark of pooling compares is the same thing, and so is what it writes."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import helpers
from tests.reference import pooling as reference

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script that lies there.
from benchmarks import pooling  # noqa: E402

BOUNDARIES = np.array([[0, 1, 0, 0, 1, 0, 0], [0] * 7, [1, 0, 1, 1, 0, 0, 1]])
BATCH, LENGTH = BOUNDARIES.shape
WIDTH, PLACES = 5, 4
TINY = dict(num_layers=2, num_heads=2, hidden_width=10)


def draw(*shape):
  return np.random.default_rng(shape[1]).standard_normal(shape).astype(np.float32)


def run(name, kind, vectors, boundaries, weights, is_dense):
  operator = getattr(pooling, name)
  settings = dict(operator=operator, kind=kind, num_places=PLACES, is_dense=is_dense)
  return jax.jit(lambda *x: pooling.run_operator(*x, **settings))(vectors, boundaries, weights)


@pytest.mark.parametrize("is_dense", [False, True])
def test_pooling_is_that_of_the_paper(is_dense):
  vectors, weights = draw(BATCH, LENGTH, WIDTH), draw(BATCH, PLACES, WIDTH)
  result = reference.pool_mean(vectors, BOUNDARIES, PLACES)
  gradients = reference.pool_mean_gradients(vectors, BOUNDARIES, PLACES, weights)
  expected = {
    "forward": [result],
    "backward": gradients[:1],
    "gradient": [result, gradients[0]],
    "gradient_boundaries": [result, *gradients],
  }
  assert (*expected,) == pooling.KINDS["pool"]
  for kind, arrays in expected.items():
    boundaries = BOUNDARIES.astype(np.float32 if "boundaries" in kind else np.int32)
    found = run("pool", kind, vectors, boundaries, weights, is_dense)
    for x, y in zip(found, arrays, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_dense", [False, True])
def test_up_sampling_is_that_of_the_paper(is_dense):
  # One place more than the fullest row has segments: the null group.
  segments = draw(BATCH, BOUNDARIES.sum(axis=1).max() + 1, WIDTH)
  weights = draw(BATCH, LENGTH, WIDTH)
  result = reference.upsample(segments, BOUNDARIES)
  gradient = reference.upsample_gradient(segments.shape[1], BOUNDARIES, weights)
  expected = {"forward": [result], "backward": [gradient], "gradient": [result, gradient]}
  assert (*expected,) == pooling.KINDS["upsample"]
  for kind, arrays in expected.items():
    operator = dict(operator=pooling.upsample, kind=kind, num_places=segments.shape[1])
    found = jax.jit(
      lambda *x, operator=operator: pooling.run_operator(*x, **operator, is_dense=is_dense)
    )(segments, BOUNDARIES.astype(np.int32), weights)
    for x, y in zip(found, arrays, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["pool", "upsample"])
def test_the_backward_pass_computes_no_result(name):
  sizes = (PLACES, LENGTH) if name == "upsample" else (LENGTH, PLACES)
  vectors, weights = (jnp.asarray(draw(BATCH, size, WIDTH)) for size in sizes)
  boundaries = BOUNDARIES.astype(np.int32)
  found = run(name, "backward", vectors * jnp.nan, boundaries, weights, True)
  expected = run(name, "gradient", vectors, boundaries, weights, True)[1:]
  np.testing.assert_array_equal(found, expected)


def test_differences_count_where_both_have_a_place():
  found, expected = (np.ones((2, 3, 5)),), (np.ones((2, 4, 5)),)
  found[0][1, 2, 3] += 2e-2
  with pytest.raises(RuntimeError, match="the forms differ by 0.02 "):
    pooling.difference(found, expected)
  assert pooling.difference(found, expected, "bfloat16") == pytest.approx(2e-2)
  expected[0][0, 3] = 100  # Has no counterpart.
  assert pooling.difference(found, expected, "bfloat16") == pytest.approx(2e-2)


def main(monkeypatch, *options):
  monkeypatch.setattr(sys, "argv", ["pooling.py", "--quick", *options])
  monkeypatch.setattr(pooling.timing, "restart_with_quiet_allocator", lambda: None)
  monkeypatch.setattr(pooling, "QUICK_SHAPES", [(2, 9, 6)])
  monkeypatch.setattr(pooling, "QUICK_OPERATORS_SHAPES", [(3, 7, 6), (2, 11, 6)])
  monkeypatch.setattr(pooling, "QUICK_MIDDLE", TINY)
  monkeypatch.setattr(pooling, "QUICK_CAPACITIES", 2)
  pooling.main()


@pytest.mark.slow
def test_quick_run(monkeypatch, tmp_path, capsys):
  kinds = {"pool": ("backward", "gradient_boundaries"), "upsample": ("forward",)}
  monkeypatch.setattr(pooling, "KINDS", kinds)
  main(monkeypatch, "--out", str(tmp_path / "pooling"))
  report = json.loads((tmp_path / "pooling.json").read_text())
  assert (tmp_path / "pooling.png").stat().st_size
  cases = [
    (case["batch"], case["length"], case["dtype"], case["middle"] is not None)
    for case in report["cases"]
  ]
  assert cases == [
    (2, 9, "float32", True),
    (3, 7, "float32", False),
    (2, 11, "float32", False),
    (2, 11, "bfloat16", False),
  ]
  for case in report["cases"]:
    for name in kinds:
      assert (*case["operators"][name],) == kinds[name]
      for rows in case["operators"][name].values():
        assert rows["dense"]["ratio"] == 1 and rows["dense"]["difference"] == 0
        assert all(rows[form]["compile_seconds"] > 0 for form in pooling.FORMS)
  middle = report["cases"][0]["middle"]
  assert middle["capacities"] == [5, 10] and not middle["left_out"]
  assert middle["capacity"] == (5 if middle["slots"] <= 5 else 10)
  rows = middle["implementations"]
  assert (*rows,) == pooling.MIDDLES
  assert rows["padded"]["ratio"] == rows["known"]["ratio_known"] == 1
  table = capsys.readouterr().out
  assert "B2 T11 D6 bfloat16" in table and "run_at_capacity" in table


def test_one_part_alone(monkeypatch, tmp_path):
  def no_middle(*_, **__):
    raise AssertionError

  monkeypatch.setattr(pooling, "compare_middles", no_middle)
  row = {"compile_seconds": 1, "milliseconds": 1, "ratio": 1, "temporary_mib": 1}
  rows = dict.fromkeys(pooling.FORMS, row)
  monkeypatch.setattr(pooling, "compare_operators", lambda *_, **__: rows)
  main(monkeypatch, "--parts=operators", "--dtypes=bfloat16", "--out", f"{tmp_path}/x")
  (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
  assert case["operators"]["pool"]["backward"] == rows and case["middle"] is None
  assert (case["length"], case["dtype"]) == (11, "bfloat16")


@pytest.mark.parametrize(
  "options, message",
  [
    (["--parts=operators,rest"], r"--parts: expected some of \['operators', 'middle'\]"),
    (["--dtypes=float16"], r"--dtypes: expected some of \[.*\], got float16"),
    (["--parts=middle", "--dtypes=bfloat16"], "--dtypes: expected float32 for the middle"),
  ],
)
def test_refuses_what_there_is_not(monkeypatch, capsys, options, message):
  with pytest.raises(SystemExit):
    main(monkeypatch, *options)
  assert re.search(message, capsys.readouterr().err)
