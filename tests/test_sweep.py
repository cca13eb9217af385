"""`dpjax sweep`: the runs that it plans, its table, and that the same command resumes."""

import functools
import json
import math
import re
from types import SimpleNamespace

import pytest

import dpjax
from dpjax.commands import sweep
from dpjax.training import reporting
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")

EXPERIMENT = """
from pathlib import Path
from tests import helpers

def get_config():
  config = helpers.small_config(Path({text!r}))
  config.sample.prompt = ""
  return config
"""


@pytest.fixture
def experiment(text, tmp_path):
  """The argument of an experiment that trains in a second."""
  (tmp_path / "experiment.py").write_text(EXPERIMENT.format(text=str(text)), encoding="utf-8")
  return f"--config={tmp_path / 'experiment.py'}"


def test_all_combinations_are_planned_in_order(experiment):
  words = [experiment, "--config.model.width=6,24", "--config.train.learning_rate=1e-3,3e-3"]
  runs = [*sweep.plan([*words, "--config.train.batch_size=7", "--noconfig.model.use_bias"], [5, 0])]
  combinations = [(w, r, s) for w in (6, 24) for r in ("1e-3", "3e-3") for s in (5, 0)]
  folders = [f"width={w},learning_rate={r}/seed_{s}" for w, r, s in combinations]
  assert [run.folder for run in runs] == folders
  seen = [(run.config.model.width, run.config.train.learning_rate, run.config.seed) for run in runs]
  assert seen == [(w, float(r), s) for w, r, s in combinations]
  assert {(run.config.train.batch_size, run.config.model.use_bias) for run in runs} == {(7, False)}
  (alone,) = sweep.plan([experiment], ())
  assert (alone.name, alone.folder) == ("", "seed_0")


def test_folders_have_the_values_that_differ(experiment):
  # Semicolons part values that have commas; settings of one name have their full one.
  words = ["--config.sample.prompt=the cat, a;mat", "--config.data.split_fractions=(0.8,0.1,0.1);"]
  words += [f"--config.{x}" for x in ("model.mixer=we,he", "eval.batch_size=3,4")]
  runs = [*sweep.plan([experiment, *words, "--config.train.batch_size=5,6"], [1])]
  first = "prompt=the-cat-a,mixer=we,config.eval.batch_size=3,config.train.batch_size=5/seed_1"
  assert len(runs) == 16 and runs[0].folder == first
  assert {(run.config.sample.prompt, run.config.model.mixer.name) for run in runs} == {
    (prompt, name) for prompt in ("the cat, a", "mat") for name in ("we", "he")
  }
  assert {run.config.data.split_fractions for run in runs} == {(0.8, 0.1, 0.1)}


def test_settings_that_go_together(experiment):
  words = ["--config.model.width=6,9,15", "--config.train.batch_size=8,16", "--config.seed=2"]
  words += ["--config.model.num_layers=1,2,3", "--config.train.learning_rate=1e-3,1e-2"]
  groups = ["model.num_layers,model.width", "train.learning_rate,train.batch_size"]
  runs = [*sweep.plan([experiment, *words], (), groups)]
  seen = [(run.config.model.width, run.config.model.num_layers) for run in runs]
  assert seen == [(w, n) for w, n in ((6, 1), (9, 2), (15, 3)) for _ in range(2)]
  seen = [(run.config.train.batch_size, run.config.train.learning_rate) for run in runs]
  assert seen == [(8, 1e-3), (16, 1e-2)] * 3
  assert runs[1].folder == "width=6,batch_size=16,num_layers=1,learning_rate=1e-2/seed_2"
  with pytest.raises(dpjax.UserError, match="--zip: .* equal .*'model.width': 3, 'seed': 1"):
    [*sweep.plan([experiment, *words], (), ["model.width,seed"])]


def test_equal_values_are_one_run(experiment):
  words = [experiment, "--config.train.learning_rate=1e-3,1e-03,0.001,2e-3"]
  folders = [run.folder for run in sweep.plan(words, [1, 1])]
  assert folders == ["learning_rate=1e-3/seed_1", "learning_rate=2e-3/seed_1"]


def test_a_dry_run_plans_each_run_and_trains_none(experiment, tmp_path, capsys):
  (tmp_path / "flags").write_text("--config.model.width=6,24")
  words = [experiment, f"--flagfile={tmp_path / 'flags'}", "--config.train.batch_size=16"]
  assert helpers.command("sweep", *words, f"--workdir={tmp_path / 'runs'}", "--dry_run") is None
  shown = capsys.readouterr().out
  assert f"Run 2 of 2: {tmp_path / 'runs/width=24/seed_0'}\n12 updates of 16 x 19 tokens" in shown
  words = [*words, "--config.model.vocab_size=3", f"--workdir={tmp_path / 'runs'}", "--dry_run"]
  assert helpers.command("sweep", *words).startswith("model.vocab_size: expected 0 or ")
  assert not (tmp_path / "runs").exists()


def test_values_may_follow_their_setting_as_in_train(experiment, tmp_path, monkeypatch):
  planned = []

  def train(config, workdir):
    planned.append(config)
    return None, {}

  monkeypatch.setattr(dpjax.runs, "train", train)
  words = ["--config.train.weight_decay_mask", "all", "--noconfig.model.tie_embeddings"]
  words += ["--config.model.width", "6,24", "--config.model.use_bias", "--seeds", "5,0"]
  words += ["--config", experiment.partition("=")[2], "--workdir", str(tmp_path / "runs")]
  assert "expected a finite loss" in helpers.command("sweep", *words)
  assert [(config.model.width, config.seed) for config in planned] == [
    (width, seed) for width in (6, 24) for seed in (5, 0)
  ]
  assert all(x.model.use_bias and not x.model.tie_embeddings for x in planned)


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--config.train.learning_rate=1e-3,fast"], "fast"),
    (["--config.train.learning_rate", "1e-3,fast"], "^--config.train.learning_rate: .* got fast"),
    (["--config.train.learning_rate", "-1e-3,1"], "^train.learning_rate: .* got -0.001"),
    (["--config.train.learning_rat=1e-3"], "nearest known is train.learning_rate"),
    (
      ["--config.sample.prompt=a-b,a b"],
      "expected values with different .* prompt=a-b/seed_0 twice",
    ),
    (["--config.model.width=6"], "^sweep: expected a setting with several values, .* got none"),
    ([], "^sweep: expected a setting with several values, .* got none"),
    (["--zip=train.batch_size,model.width"], "--zip: expected settings .* got .* with none"),
    (["--seeds=1,a"], "--seeds: expected integers with commas between them, got 1,a"),
    (["--seeds=1,-1"], "seed: expected .*-1"),
  ],
)
def test_what_is_wrong_is_named_before_a_run_begins(experiment, words, message, tmp_path):
  found = helpers.command("sweep", experiment, *words, f"--workdir={tmp_path / 'runs'}")
  assert re.search(message, str(found)) and "\n" not in found
  assert not (tmp_path / "runs").exists()


RATES = "--config.train.learning_rate=3e-3,1e30,2e-2"


def sweep_rates(experiment, folder):
  """Sweeps three rates and two seeds."""
  words = [experiment, RATES, "--config.train.checkpoint_every_steps=5", "--seeds=3,0"]
  return helpers.command("sweep", *words, f"--workdir={folder}")


def test_table_of_scores(experiment, tmp_path, monkeypatch, capsys):
  folders = []

  def train(config, workdir):
    """Bits are 9 less the rate, a hundredth less by seed."""
    folders.append(str(workdir.relative_to(tmp_path / "runs")))
    if config.train.learning_rate > 1:
      raise reporting.NonFiniteError("Step 2: expected a finite loss")
    bits = 9 - config.train.learning_rate - config.seed / 100
    workdir.mkdir(parents=True)
    lines = [{"step": step, "split": "valid", "bits_per_character": bits + step} for step in (0, 4)]
    (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return SimpleNamespace(), {"bits_per_character": bits + 1, "perplexity": math.inf}

  monkeypatch.setattr(dpjax.runs, "train", train)
  assert sweep_rates(experiment, tmp_path / "runs") is None
  rates = ("3e-3", "1e30", "2e-2")
  assert folders == [f"learning_rate={rate}/seed_{seed}" for rate in rates for seed in (3, 0)]
  printed = capsys.readouterr()
  assert printed.err.count("Step 2: expected a finite loss") == 2
  rows = [line.split() for line in printed.out[printed.out.index("runs  valid") :].splitlines()]
  assert rows[0] == ["runs", "valid/bits_per_character", "test/bits_per_character", "deviation"]
  assert rows[1] == ["learning_rate=2e-2", "2", "8.9650", "9.9650", "0.0212"]
  assert rows[2][:3] == ["learning_rate=3e-3", "2", "8.9820"]
  assert rows[3:] == [[f"{tmp_path}/runs/{x}", "1", "not", "finite"] for x in folders[2:4]]
  words = [experiment, "--config.train.learning_rate=1e30,1e31", f"--workdir={tmp_path / 'runs'}"]
  message = helpers.command("sweep", *words)
  assert message == "train.learning_rate: expected a finite loss of a run, got none"


@pytest.mark.slow
def test_a_stopped_sweep_resumes(experiment, tmp_path, capsys, monkeypatch):
  begun, train = [], functools.partial(dpjax.train, model=helpers.bigrams)

  def stopped(config, workdir):
    begun.append(workdir)
    checks = iter(range(99))
    stops = len(begun) == 5
    return train(config, workdir, should_stop=lambda: stops and next(checks) == 5)

  def losses(folder):
    paths = sorted((tmp_path / folder).rglob("losses.f32"))
    return {str(path.relative_to(tmp_path / folder)): path.read_bytes() for path in paths}

  # Two runs, two that diverge, and one that is stopped.
  monkeypatch.setattr(dpjax.runs, "train", stopped)
  assert sweep_rates(experiment, tmp_path / "runs") == 1 and len(losses("runs")) == 5
  before = capsys.readouterr()
  assert "Stopped at step 6 of 12" in before.out and "Step 2: expected a finite" in before.err
  monkeypatch.setattr(dpjax.runs, "train", train)
  for folder in ("runs", "others"):
    assert sweep_rates(experiment, tmp_path / folder) is None
  assert losses("runs") == losses("others") and len(losses("runs")) == 6
