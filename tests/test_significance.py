"""Runs of several seeds, and t-tests of their scores, without any training."""

import json
import math
import runpy
import shutil
import signal
import sys

import numpy as np
import pytest
from absl import flags
from scipy import stats

from dpjax import run as run_lib
from dpjax.analysis import significance
from dpjax.commands import flags as command_line
from dpjax.errors import Interrupted, UserError
from dpjax.training import loop
from tests import helpers

SCORES = {
  "none": {0: 1.25, 1: 1.5, 2: 1.0},
  "better": {2: 0.5, 0: 0.76, 1: 0.98},
  "worse": {0: 1.5, 1: 1.6, 2: 1.3},
}


def ended(*arguments):
  """The message that the command exits with."""
  with pytest.raises(SystemExit) as end:
    significance.main([*arguments])
  return end.value.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Writes the scores of runs, as `Run.write_scores` does, and names their folder."""
  monkeypatch.chdir(tmp_path)

  def write(name, by_seed, step=12, split="test", kind="bits_per_character"):
    for seed, score in by_seed.items():
      run = tmp_path / name / f"seed_{seed}"
      meta = run / f"checkpoints/{step}/meta"
      meta.mkdir(parents=True, exist_ok=True)
      (meta / "metadata").write_text(json.dumps({"best": {"step": step}}))
      content = {"split": split, "step": step, "scores": {"perplexity": 7.0, kind: score}}
      (run / f"scores_{split}_{step}.json").write_text(json.dumps(content))
    return name

  return write


def test_compare_is_the_paired_t_test():
  none, better, worse = significance.compare(SCORES, "none", alpha=0.15)
  assert none == ("none", 1.25, 0.25, 0.0, 1.0, "")
  # Differences -0.49, -0.52, -0.5: their squares from the mean add up to 14/30000.
  assert better.name == "better" and better.verdict == "lower"
  assert better.mean == pytest.approx(2.24 / 3)
  assert better.difference == pytest.approx(-1.51 / 3)
  t = (1.51 / 3) / math.sqrt(14 / 30000 / 2 / 3)
  # Of 2 degrees of freedom the distribution has a closed form.
  assert better.p_value == pytest.approx(1 - t / math.sqrt(t**2 + 2), rel=1e-6)
  assert worse.verdict == "higher"
  squares = [(0.76 - 2.24 / 3) ** 2, (0.98 - 2.24 / 3) ** 2, (0.5 - 2.24 / 3) ** 2]
  assert better.deviation == pytest.approx(math.sqrt(sum(squares) / 2))
  strict = significance.compare(SCORES, "none", alpha=1e-4)
  assert [row.verdict for row in strict] == ["", "", ""]
  assert [row.p_value for row in strict] == [1.0, better.p_value, worse.p_value]


@pytest.mark.parametrize("num_seeds", [2, 3, 7])
def test_p_values_are_scipys(num_seeds):
  draw = np.random.default_rng(num_seeds)
  a, b = draw.normal(size=(2, num_seeds))
  rows = significance.compare({"b": dict(enumerate(b)), "a": dict(enumerate(a))}, "b")
  expected = stats.ttest_rel(a, b)
  assert rows[1].p_value == pytest.approx(expected.pvalue, rel=1e-9)
  assert (rows[1].difference > 0) == (expected.statistic > 0)


def test_differences_without_spread():
  for shift, p_value, verdict in ((0.0, 1.0, ""), (0.25, 0.0, "higher"), (-0.5, 0.0, "lower")):
    shifted = {seed: score + shift for seed, score in SCORES["none"].items()}
    row = significance.compare({"none": SCORES["none"], "x": shifted}, "none")[1]
    assert (row.difference, row.p_value, row.verdict) == (shift, p_value, verdict)


@pytest.mark.parametrize(
  "change, baseline, alpha, message",
  [
    ({}, "none", 0.0, r"alpha: expected a number in \(0, 1\), got 0.0"),
    ({}, "nona", 0.05, "baseline: expected one of none, better, worse, got nona"),
    ({"none": {4: 1.0}}, "none", 0.05, r"seeds: expected at least 2 of none, got \[4\]"),
    ({"worse": {0: 1.0, 3: 2.0}}, "none", 0.05, r"seeds: .*\[0, 1, 2\] of worse, got \[0, 3\]"),
    ({"worse": {}}, "none", 0.05, r"seeds: expected .* of worse, got \[\]"),
  ],
)
def test_what_cannot_be_compared(change, baseline, alpha, message):
  with pytest.raises(ValueError, match=f"^{message}$"):
    significance.compare(SCORES | change, baseline, alpha)


def test_the_table(folder, capsys):
  for name, by_seed in SCORES.items():
    folder(f"runs/{name}", by_seed)
  arguments = ["compare", "runs/better/", "runs/none", "runs/worse"]
  significance.main([*arguments, "--baseline=runs/none/"])
  assert (
    capsys.readouterr().out
    == """\
bits_per_character of the test split, seeds [0, 1, 2]

                 mean  deviation  difference         p
runs/none      1.2500     0.2500     +0.0000    1.0000
runs/better    0.7467     0.2403     -0.5033    0.0003  lower
runs/worse     1.4667     0.1528     +0.2167    0.0691

lower, higher: than runs/none, p < 0.05
"""
  )
  significance.main([*arguments, "--baseline=runs/worse", "--alpha=0.1"])
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert ["runs/none", "1.2500", "0.2500", "-0.2167", "0.0691", "lower"] in rows


def test_scores_are_those_of_the_best_checkpoint(folder, tmp_path):
  a = folder("a", {2: 1.5, 11: 2.5}, step=7)
  # Another checkpoint's, another window's, another split's; and what is no run.
  for name in ("scores_test_12", "scores_test_7_window5_stride3", "scores_valid_7"):
    for seed in (2, 11):
      file = tmp_path / f"a/seed_{seed}/{name}.json"
      file.write_text('{"scores": {"bits_per_character": 9.0}}')
  (tmp_path / "a/seed_best").mkdir()
  assert significance.read_scores(a) == {2: 1.5, 11: 2.5}
  assert [*significance.read_scores(a)] == [2, 11]
  assert significance.read_scores(a, "perplexity") == {2: 7.0, 11: 7.0}
  assert significance.read_scores(a, split="valid") == {2: 9.0, 11: 9.0}
  # Where checkpoints were thrown away, scores of one step are as good.
  shutil.rmtree(tmp_path / "a/seed_11/checkpoints")
  with pytest.raises(ValueError, match="scores_test_<best step>.json in .*11, got 2 of"):
    significance.read_scores(a)
  (tmp_path / "a/seed_11/scores_test_12.json").unlink()
  assert significance.read_scores(a) == {2: 1.5, 11: 2.5}
  # Those of another step are not.
  (tmp_path / "a/seed_2/scores_test_7.json").unlink()
  with pytest.raises(ValueError, match="scores_test_<best step>.json in .*2, got 0 of"):
    significance.read_scores(a)


def test_wrong_flags(folder):
  folder("a", SCORES["none"])
  folder("two", {0: 1.0, 1: 2.0})
  folder("infinite", {0: None, 1: 2.0, 2: 3.0})
  for arguments, message in (
    ("two", "seeds: expected [0, 1, 2] of two, got [0, 1]"),
    (
      "a --split=valid",
      "--split: expected scores_valid_<best step>.json in a/seed_0, got 0 of them; "
      "dpjax evaluate --split=valid writes one",
    ),
    (
      "infinite",
      "--score: expected one of perplexity (of infinite/seed_0/scores_test_12.json), got "
      "bits_per_character",
    ),
  ):
    assert ended("compare", "--baseline=a", *arguments.split()) == message


def test_damaged_scores(folder, tmp_path):
  a = folder("a", {0: 1.0, 1: 2.0})
  for text in ("{", "[3]", "{}", '{"scores": 3}', '{"scores": [3]}'):
    (tmp_path / "a/seed_1/scores_test_12.json").write_text(text)
    with pytest.raises(ValueError, match="^split: expected scores in a/seed_1/scores_test"):
      significance.read_scores(a)


class Stub:
  """In place of `dpjax.run.train`: keeps what it is called with."""

  def __init__(self, error=None):
    self.error, self.calls = error, []

  def __call__(self, config, workdir):
    self.calls.append((config.seed, config.model.num_layers, str(workdir)))
    if self.error and len(self.calls) == 2:
      raise self.error
    run = run_lib.Run(config, None, {}, None, step=5)  # pyright: ignore
    return run, {"bits_per_character": 1.5 + config.seed}


def train(monkeypatch, error, *arguments):
  """Runs the command's training without any; gives the calls and the exit's message."""
  stub = Stub(error)
  monkeypatch.setattr(run_lib, "train", stub)
  # What is left of the command once its flags are read, without the ends of absl's `run`.
  monkeypatch.setattr(
    command_line, "start", lambda main: command_line._run(main, command_line._parse(sys.argv))
  )
  quickstart = f"--config={helpers.ROOT / 'configs/quickstart.py'}:tiny"
  with helpers.arguments("significance"):
    try:
      significance.main(["train", quickstart, *arguments])
      return stub.calls, None
    except SystemExit as end:
      return stub.calls, end.code


def test_a_run_is_trained_for_each_seed(monkeypatch, capsys):
  calls, message = train(
    monkeypatch, None, "--seeds=4,0", "--workdir=runs/a", "--config.model.num_layers=3"
  )
  assert calls == [(4, 3, "runs/a/seed_4"), (0, 3, "runs/a/seed_0")]
  assert message is None
  printed = capsys.readouterr().out
  assert "runs/a/seed_4, the test split, by step 5 (best by validation):" in printed
  assert printed.index("5.5") < printed.index("seed_0") < printed.index("1.5\n")
  calls, _ = train(monkeypatch, None, "--workdir=runs/b")
  assert [call[0] for call in calls] == [0, 1, 2]


@pytest.mark.parametrize(
  "error",
  [
    loop.NonFiniteError("Step 3: expected a finite loss"),
    UserError("workdir: expected an empty folder"),
  ],
)
def test_what_stops_a_run_stops_all(monkeypatch, error):
  calls, message = train(monkeypatch, error, "--workdir=a")
  assert len(calls) == 2
  own = isinstance(error, UserError)
  assert message == (str(error) if own else f"a/seed_1: {error}")


def test_a_signal_stops_all_with_its_status(monkeypatch, capsys):
  error = Interrupted(3, 7, signal.SIGTERM)
  calls, status = train(monkeypatch, error, "--workdir=a")
  assert len(calls) == 2 and status == 143
  assert "a/seed_1: Stopped at step 3 of 7, which is saved. The" in capsys.readouterr().out


def test_wrong_seeds_are_told_before_any_is_trained(monkeypatch):
  for seeds in ("", "1,x", "0,1,0", "-1", "1.5", "1,01"):
    calls, message = train(monkeypatch, None, "--workdir=a", f"--seeds={seeds}")
    assert message == f"seeds: expected whole numbers, each once, got {seeds}"
    assert not calls


def test_importing_it_defines_no_flags():
  before = set(flags.FLAGS)
  runpy.run_path(significance.__file__, run_name="imported")
  assert set(flags.FLAGS) == before
