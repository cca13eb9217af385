"""The benchmark of attention compares what it says, and writes where it is told to."""

import json
import sys

import pytest

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script that lies there.
from benchmarks import attention  # noqa: E402

SHAPE = 2, 19, 3, 5


@pytest.mark.parametrize("name", attention.SHAPES)
@pytest.mark.parametrize("rate", attention.DROPOUT_RATES)
def test_forms_are_compared_in_time_and_memory(name, rate):
  case = attention.compare(name, SHAPE, rate, (8,), repetitions=3)
  assert case["repetitions"] == 3 and not case["left_out"]
  assert case["forms"].keys() == {"whole", "blocks 8"}
  for row in case["forms"].values():
    assert row["milliseconds"] > 0 and row["temporary_mib"] > 0
    assert ("difference" in row) == (rate == 0)
  for key in ("ratio", "temporary_mib_ratio", "compile_seconds_ratio"):
    assert case["forms"]["whole"][key] == 1


def test_forms_that_differ_are_an_error(monkeypatch):
  monkeypatch.setattr(attention, "MAX_DIFFERENCE", 1e-12)
  with pytest.raises(RuntimeError, match="the forms differ by"):
    attention.compare("relative", SHAPE, 0.0, (8,), repetitions=1)


def test_a_quick_run_writes_where_it_is_told(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(attention.timing, "restart_with_quiet_allocator", lambda: None)
  monkeypatch.setattr(attention, "QUICK_SHAPES", {"relative": [SHAPE]})
  monkeypatch.setattr(attention, "DROPOUT_RATES", (0.0,))
  out = tmp_path / "here" / "attention"
  monkeypatch.setattr(sys, "argv", ["", "--quick", f"--out={out}"])
  attention.main()
  (case,) = json.loads(out.with_suffix(".json").read_text())["cases"]
  assert [case[x] for x in ("batch", "length", "heads", "features")] == list(SHAPE)
  assert out.with_suffix(".png").stat().st_size > 10_000
  printed = capsys.readouterr().out
  assert "relative B2 T19 H3 E5, dropout 0.0" in printed and "blocks 16" in printed
