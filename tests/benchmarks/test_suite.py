"""The suite runs every benchmark, and says what the reports do not keep."""

import json
import sys

import pytest

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import suite  # noqa: E402


def test_every_bar_and_every_gain_is_read_from_a_report_that_is_there():
  rows = suite.compare_with_bars()
  assert len(rows) == len(suite.BARS)
  assert not [row for row in rows if row["found"] is None]
  assert all(row["found"] > 0 for row in rows)
  assert all((suite.FOLDER / f"{name}.py").exists() for name in suite.NAMES)
  assert not [row for row in suite.gains() if "?" in row]


def test_without_reports_nothing_is_claimed(tmp_path, capsys):
  rows = suite.compare_with_bars(tmp_path)
  assert {row["found"] for row in rows} == {None}
  suite.print_table(rows)
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == len(rows)
  assert all(line.endswith("not measured") for line in printed)
  assert all(row.endswith(("| ? | ? |", "| ? | - |")) for row in suite.gains(tmp_path))


def test_a_bar_is_met_up_to_itself(tmp_path, capsys):
  stack = {"mixers": {"recompute": {"temporary_mib_ratio": 0.35}}}
  path = tmp_path / "shift_and_sum.json"
  for ratio, verdict in ((0.35, " met"), (0.3501, "NOT MET")):
    stack["mixers"]["recompute"]["temporary_mib_ratio"] = ratio
    path.write_text(json.dumps({"stack": stack, "cases": []}))
    rows = suite.compare_with_bars(tmp_path)
    found = [row for row in rows if row["found"] is not None]
    assert [row["bar"] for row in found] == [0.35]
    suite.print_table(found)
    assert capsys.readouterr().out.strip().endswith(verdict)


def test_a_gpu_has_bars_of_its_own(tmp_path):
  times = {"copy": {"milliseconds": 3.0}, "loop": {"milliseconds": 9.0}}
  case = {
    "batch": 8,
    "length": 4096,
    "forward": times | {"pallas": {"milliseconds": 4.5}},
    "gradient": {"loop": {"milliseconds": 12.0}, "pallas": {"temporary_mib": 1.0}},
  }
  report = {"machine": {"device": "a GPU"}, "cases": [case], "implementations": ["loop", "pallas"]}
  (tmp_path / "shift_and_sum.json").write_text(json.dumps(report))
  rows = suite.compare_with_bars(tmp_path)
  assert len(rows) == len(suite.GPU_BARS)
  assert [row["found"] for row in rows[:2]] == [1.5, 4.0]


@pytest.mark.parametrize("is_quick", [True, False])
def test_runs_what_is_asked_for_and_goes_on_after_a_failure(
  is_quick, tmp_path, monkeypatch, capsys
):
  commands = []

  def start(command, check):
    commands.append(command[1:])
    status = 3 if "pooling" in command[1] else 0
    return type("Done", (), {"returncode": status})()

  monkeypatch.setattr(suite.subprocess, "run", start)
  options = ["--only=pooling,training_step", f"--folder={tmp_path}"]
  monkeypatch.setattr(sys, "argv", ["suite.py", *options, *["--quick"] * is_quick])
  with pytest.raises(SystemExit, match="failed: pooling"):
    suite.main()
  names = [command[0].rpartition("/")[2] for command in commands]
  assert names == ["pooling.py", "training_step.py"]
  assert commands[1][1].startswith("--parts=dispatcher,")
  for command, name in zip(commands, ("pooling", "training_step"), strict=True):
    assert ("--quick" in command) == is_quick
    assert (str(tmp_path / name) in command) != is_quick
  assert ("not measured" in capsys.readouterr().out) != is_quick


def test_refuses_a_benchmark_that_it_does_not_know(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["suite.py", "--only=speed"])
  with pytest.raises(SystemExit):
    suite.main()
  assert "--only: expected some of shift_and_sum" in capsys.readouterr().err
