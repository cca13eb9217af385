"""The harness takes turns and reports; each benchmark runs when small."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script there.
import books  # noqa: E402
import compiled  # noqa: E402
import harness  # noqa: E402

NEEDS_JLA = pytest.mark.skipif(
  importlib.util.find_spec("jla") is None, reason="jla is not installed"
)


def program(log, name, seconds):
  """Takes these seconds, and says when it ran."""

  def run():
    log.append(name)
    return seconds(len(log))

  return harness.Program(run, {"temporary_mib": 3.0})


def test_programs_take_turns_and_ratios_are_medians_of_pairs():
  log = []
  programs = {
    "base": program(log, "base", lambda n: 2.0 + n),
    "ours": program(log, "ours", lambda n: 1.0 + n / 2),
    "slow": program(log, "slow", lambda n: 99.0),
    "large": "needs 80 GiB",
  }
  case = harness.Case("a case", "base", programs)
  entry = harness.compare(case, rounds=5, max_seconds=30, conditions=["quiet"])
  assert log[:3] == ["base", "ours", "slow"]  # Once each, before rounds begin.
  assert log[3:] == ["base", "ours", "ours", "base"] * 2 + ["base", "ours"]
  pairs = {
    name: np.array([2.0 + n for n, x in enumerate(log, 1) if x == name])
    for name in ("base", "ours")
  }
  rows = entry["rows"]
  ratio = np.median(pairs["ours"][1:] / 2 / pairs["base"][1:])
  assert rows["ours"]["quiet"]["ratio"] == pytest.approx(ratio)
  assert rows["base"]["quiet"]["ratio"] == 1 and rows["base"]["temporary_mib"] == 3
  assert rows["slow"]["left_out"] == "a run takes 99.0 s"
  assert rows["large"] == {"left_out": "needs 80 GiB"}
  table = harness.table(entry)
  assert "| ours | " in table and "| large | needs 80 GiB |" in table


def test_without_its_base_a_case_is_no_case():
  case = harness.Case("a case", "base", {"base": "needs 80 GiB"})
  with pytest.raises(RuntimeError, match="a case: base needs 80 GiB"):
    harness.compare(case, rounds=3, max_seconds=1)


@pytest.mark.parametrize(
  ("name", "parts"),
  [
    ("ops", "shift_and_sum,lengths,attention,state_space,local,pooling"),
    ("backend", "opaque,row,complex"),
    ("step", "hourglass"),
    ("generation", "operators,models,pooling"),
    ("long_rows", "layers,steps,tokens"),
    pytest.param("ops", "peers", marks=NEEDS_JLA),
  ],
)
def test_each_part_runs_and_is_reported(name, parts, tmp_path):
  out = tmp_path / "folder/report"
  out.parent.mkdir()
  before = {"parts": {"earlier": {"cases": []}}}
  out.with_suffix(".json").write_text(json.dumps(before))
  command = [sys.executable, f"benchmarks/{name}.py", "--quick", f"--parts={parts}", f"--out={out}"]
  done = subprocess.run(
    command,
    cwd=helpers.ROOT,
    env=helpers.environment(XLA_FLAGS=os.environ["XLA_FLAGS"]),  # Compiles quickly.
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  report = json.loads(out.with_suffix(".json").read_text())
  assert [*report["parts"]] == ["earlier", *parts.split(",")]
  for part in parts.split(","):
    found = report["parts"][part]
    assert found["machine"]["cores"] >= 1 and f"--parts={parts}" in found["command"]
    assert found["cases"]
    for entry in found["cases"]:
      for program, row in entry["rows"].items():
        if row.get("left_out") == "PyTorch is not installed":
          assert program == "attention, PyTorch"
          continue
        assert row["quiet"]["milliseconds"] > 0
        # Long rows take too long to be measured twice.
        assert name == "long_rows" or row["busy"]["ratio"] > 0
  assert out.with_suffix(".png").stat().st_size > 9_000


def test_the_report_of_compiled_programs_keeps_the_link_that_it_is_written_through(
  tmp_path, monkeypatch
):
  link = tmp_path / "report.json"
  file = tmp_path / "file"
  file.write_text(json.dumps({"earlier": {"failed": "before"}}))
  link.symlink_to("file")
  monkeypatch.setattr(compiled, "run", lambda *_: {"failed": "not compiled"})
  words = ["compiled.py", "--topologies=h100", "--only=quickstart", f"--out={link}"]
  monkeypatch.setattr(sys, "argv", words)
  compiled.main()
  assert link.is_symlink() and [*json.loads(file.read_text())] == ["earlier", "quickstart, h100"]


@pytest.mark.slow
def test_mixers_are_compared_on_books(text, tmp_path):
  folder = tmp_path / "books"
  folder.mkdir()
  words = text.read_text()
  for split in ("train", "valid", "test"):
    (folder / f"{split}.txt").write_text(words)
  out = tmp_path / "report"

  def run(*added):
    command = [sys.executable, "benchmarks/books.py", f"--books={folder}", "--updates=5"]
    command += [f"--workdir={tmp_path / 'runs'}", f"--out={out}", "--mixers=we", *added]
    return subprocess.run(
      command, cwd=helpers.ROOT, env=helpers.environment(), capture_output=True, text=True
    )

  assert "--updates: expected at least 1, got 0" in run("--updates=0").stderr
  done = run()
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(out.with_suffix(".json").read_text())["rows"]
  assert row["interval"] > 0 and len(row["bits_at_rates"]) == 3
  assert f"| we | {row['parameters'] / 1e6:.2f}M |" in done.stdout
  assert out.with_suffix(".png").exists()
  logs = [*(tmp_path / "runs").rglob("seed_*.log")]
  assert len(logs) == 5
  for log in logs:
    log.unlink()
  again = run().stdout
  assert again.splitlines()[-3:] == done.stdout.splitlines()[-3:]  # The table.
  assert not any(log.exists() for log in logs)
  (folder / "test.txt").write_text(f"{words}and more\n")
  done = run()
  assert done.returncode == 1
  assert "--workdir: expected runs with these texts and settings, got " in done.stderr


def test_runs_on_books_are_ranked_by_the_parameters_that_they_keep():
  valid = {"we": {"5": 2.5, "9": 2.0}, "he": {"5": 1.9, "9": 2.1}, "me": {"5": 2.6, "9": 2.2}}
  entries = [
    {"mixer": name, "seed": 0, "learning_rate": 0.004, "valid": scores}
    for name, scores in valid.items()
  ]
  entries += [
    {"mixer": "me", "seed": 1, "learning_rate": 0.004, "valid": {"9": 1.0}},
    {"mixer": "we", "seed": 0, "learning_rate": 0.008, "valid": {"9": 2.3}},
  ]
  ranked = books.rank(entries)
  assert [entry["mixer"] for entry in ranked] == ["he", "we", "me"]
  assert ranked[1]["learning_rate"] == 0.004


def test_the_page_of_results_has_the_table_of_mixers_on_books():
  report = json.loads((helpers.ROOT / "results/books_relatives.json").read_text())
  assert books.table(report) in (helpers.ROOT / "docs/results.md").read_text()
