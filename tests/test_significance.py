"""t-tests of the scores of runs, without any training."""

import json
import math
import shutil

import pytest

from dpjax_papers import significance

NONE = {0: 1.25, 1: 1.5, 2: 1.0}
SCORES = {"none": NONE, "better": {2: 0.5, 0: 0.76, 1: 0.98}, "worse": {0: 1.5, 1: 1.6, 2: 1.3}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Writes the scores of runs, as `Run.score_split` does, and names their folder."""
  monkeypatch.chdir(tmp_path)

  def write(name, by_seed, step=12, kind="bits_per_character"):
    for seed, score in by_seed.items():
      run = tmp_path / name / f"seed_{seed}"
      meta = run / f"checkpoints/{step}/meta"
      meta.mkdir(parents=True, exist_ok=True)
      (meta / "metadata").write_text(json.dumps({"best": {"step": step}}))
      content = {"split": "test", "step": step, "scores": {"perplexity": 7.0, kind: score}}
      (run / f"scores_test_{step}.json").write_text(json.dumps(content))
    return name

  return write


def test_compare_is_the_paired_t_test():
  difference, low, high, p = significance.compare(SCORES["better"], NONE)
  # Differences -0.49, -0.52, -0.5: their squares from the mean add up to 14/30000.
  assert difference == pytest.approx(-1.51 / 3)
  error = math.sqrt(14 / 30000 / 2 / 3)
  t = (1.51 / 3) / error
  # With 2 degrees of freedom the distribution has a closed form; its quantile of 0.975 is 4.3027.
  assert p == pytest.approx(1 - t / math.sqrt(t**2 + 2), rel=1e-6)
  assert (low, high) == pytest.approx((-1.51 / 3 - 4.3027 * error, -1.51 / 3 + 4.3027 * error))
  for shift, p in ((0.0, 1.0), (0.25, 0.0)):  # no spread
    shifted = {seed: score + shift for seed, score in NONE.items()}
    assert significance.compare(shifted, NONE) == (shift, shift, shift, p)
  for ours, theirs in (({0: 1.0, 3: 2.0}, NONE), ({4: 1}, {4: 1})):
    with pytest.raises(ValueError, match="^seeds: expected those of the baseline, at least 2, "):
      significance.compare(ours, theirs)


def test_the_table(folder, capsys):
  for name, by_seed in SCORES.items():
    folder(f"runs/{name}", by_seed)
  significance.main(["runs/better/", "runs/none", "runs/worse", "--baseline=runs/none/"])
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert rows[0] == "bits_per_character of the test split, seeds [0, 1, 2]".split()
  assert rows[1][:2] == ["Paired", "t-test"]
  assert rows[3:-1] == [
    ["n", "mean", "deviation", "difference", "95%", "interval", "p"],
    ["runs/none", "3", "1.2500", "0.2500", "+0.0000", "+0.0000", "to", "+0.0000", "1.0000"],
    ["runs/better", "3", "0.7467", "0.2403", "-0.5033", "-0.5413", "to", "-0.4654", "0.0003"],
    ["runs/worse", "3", "1.4667", "0.1528", "+0.2167", "-0.0419", "to", "+0.4752", "0.0691"],
    [],
  ]
  assert rows[-1][:2] == ["3", "seeds:"]
  for arguments, message in (
    ("runs/worse --baseline=runs", "workdir: expected runs seed_<n> in runs, got none"),
    ("runs/worse --baseline=runs/none --score=beauty", "--score: expected one of .* got beauty"),
  ):
    with pytest.raises(SystemExit, match=message):
      significance.main(arguments.split())


def test_scores_are_those_of_the_best_checkpoint(folder, tmp_path):
  a = folder("a", {2: 1.5, 11: 2.5}, step=7)
  # Another checkpoint's, another window's, another split's; and what is no run.
  for name in ("scores_test_12", "scores_test_7_window5_stride3", "scores_valid_7"):
    for seed in (2, 11):
      file = tmp_path / f"a/seed_{seed}/{name}.json"
      file.write_text('{"scores": {"bits_per_character": 9.0}}')
  (tmp_path / "a/seed_best").mkdir()
  assert [*significance.read_scores(a).items()] == [(2, 1.5), (11, 2.5)]
  assert significance.read_scores(a, split="valid") == {2: 9.0, 11: 9.0}
  # Where checkpoints were thrown away, scores of one step are as good.
  shutil.rmtree(tmp_path / "a/seed_11/checkpoints")
  with pytest.raises(ValueError, match="scores_test_<best step>.json in .*11, got 3 of"):
    significance.read_scores(a)
  for name in ("scores_test_12", "scores_test_7_window5_stride3"):
    (tmp_path / f"a/seed_11/{name}.json").unlink()
  assert significance.read_scores(a) == {2: 1.5, 11: 2.5}
  # Those of another step are not.
  (tmp_path / "a/seed_2/scores_test_7.json").unlink()
  with pytest.raises(ValueError, match="scores_test_<best step>.json in .*2, got 0 of"):
    significance.read_scores(a)


@pytest.mark.parametrize("text", ["[3]", "{}"])
def test_damaged_scores(folder, tmp_path, text):
  a = folder("a", {0: 1.0, 1: 2.0})
  (tmp_path / "a/seed_1/scores_test_12.json").write_text(text)
  with pytest.raises(ValueError, match="^score: expected one of none .of a/seed_1/scores_test"):
    significance.read_scores(a)
