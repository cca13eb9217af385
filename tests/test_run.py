"""Whole runs, in this process: train, stop, go on, score, generate."""

import json
import math
import shutil
import signal

import chex
import jax
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import run as run_lib
from dpjax import workdir as workdir_lib
from dpjax.data import batches
from dpjax.training import loop
from dpjax.training.checkpoints import Checkpoints
from tests import helpers


@pytest.fixture(scope="module", autouse=True)
def promotion():
  """Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return helpers.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
  """A run of 12 steps that was never stopped, and its test scores."""
  workdir = tmp_path_factory.mktemp("finished")
  run, scores = dpjax.train(helpers.small_config(text), workdir)
  return workdir, run, scores


def reports(workdir, split):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [line for line in map(json.loads, lines) if line["split"] == split]


def medians(workdir):
  lines = [line for line in reports(workdir, "train") if "median_loss" in line]
  return [(line["step"], line["median_loss"]) for line in lines]


def test_training_learns_reports_and_scores(finished):
  workdir, run, scores = finished
  train, valid = reports(workdir, "train"), reports(workdir, "valid")
  train = [line for line in train if "loss" in line]
  assert [line["step"] for line in train] == [2, 4, 6, 8, 10, 12]
  assert [line["step"] for line in valid] == [6, 12]
  assert train[-1]["loss"] < train[0]["loss"]
  assert run.step == min(valid, key=lambda line: line["nats_per_token"])["step"]
  written = json.loads((workdir / f"scores_test_{run.step}.json").read_text())
  assert written["scores"] == scores
  losses = np.fromfile(workdir / "losses.f32", "<f4")
  assert medians(workdir) == [
    (step, pytest.approx(np.median(losses[step - 5 : step]))) for step in (5, 10)
  ]
  assert losses[:2].mean() == pytest.approx(train[0]["loss"], rel=1e-6)
  # Characters are tokens here.
  assert scores["bits_per_character"] == pytest.approx(
    scores["nats_per_token"] / math.log(2)
  )
  assert list((workdir / "tensorboard").iterdir())


def test_score_of_the_text_is_the_score_of_the_split(finished):
  _, run, scores = finished
  text = run.tokenizer.decode(run.data.splits["test"])
  assert run.score(text) == pytest.approx(scores)
  # Context helps to no lower a score than the model's own; it only has to differ.
  assert run.score(text, stride=3)["perplexity"] != scores["perplexity"]
  with pytest.raises(ValueError, match="text: expected at least one token"):
    run.score("")
  with pytest.raises(ValueError, match="eval.window: expected 1 to .* 19, got 20"):
    run.score(text, window=20)
  with pytest.raises(ValueError, match="split: expected one of train, valid, test"):
    run.score_split("dev")


def test_score_is_the_mean_of_what_the_model_says(finished):
  _, run, _ = finished
  text = "the cat sat on a mat\nno"
  ids = run.tokenizer.encode(text)
  inputs = np.concatenate([[run.tokenizer.start_id], ids[:-1]])
  nats = 0.0
  for begin in range(0, len(ids), 19):
    window = inputs[None, begin : begin + 19]
    logits = run.model.apply({"params": run.params}, window).logits
    log_p = jax.nn.log_softmax(logits[0])
    targets = ids[begin : begin + 19]
    nats -= float(log_p[np.arange(len(targets)), targets].sum())
  assert run.score(text)["nats_per_token"] == pytest.approx(nats / len(ids), rel=1e-5)


def test_loading_gives_the_same_model(finished):
  workdir, run, scores = finished
  loaded = dpjax.load(workdir)
  chex.assert_trees_all_equal(loaded.params, run.params)
  assert loaded.score_split("test") == scores
  last = dpjax.load(workdir, step=12)
  assert last.step == 12
  with pytest.raises(ValueError, match="step: expected one of"):
    dpjax.load(workdir, step=11)


def test_generation(finished):
  _, run, _ = finished
  texts = run.generate("the ", length=30, num_samples=3, seed=5)
  assert [len(text) for text in texts] == [30] * 3 and len(set(texts)) == 3
  # A sample depends on its number and the seed alone.
  assert run.generate("the ", length=30, num_samples=2, seed=5) == texts[:2]
  greedy = run.generate("the ", length=25, temperature=0.0)
  assert greedy == run.generate("the ", length=25, top_k=1, seed=9)
  assert len(run.generate("", length=3)[0]) == 3
  with pytest.raises(ValueError, match=r"prompt: expected 1 to 19 tokens .* got 20"):
    run.generate("x" * 20)
  with pytest.raises(ValueError, match=r"sample.top_p: expected a number in \(0, 1\]"):
    run.generate("the ", top_p=0.0)
  for wrong in (dict(num_samples=0), dict(seed=2**32), dict(length=2.5), dict(top_k=-1)):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected an integer"):
      run.generate("the ", **wrong)


def test_models_of_a_seed_get_the_same_random_windows():
  tokens = np.arange(500, dtype=np.uint16)

  def windows(seed, **model):
    config = config_lib.default()
    config.seed = seed
    config.model.update(model)
    config.train.update(batches="random_windows", batch_size=6, window=9)
    return run_lib._train_batches(config, tokens).batch(3)

  expected = batches.RandomWindows(tokens, 6, 9, seed=5).batch(3)
  for mixer in ("she", "attention"):
    chex.assert_trees_all_equal(windows(5, mixer=mixer), expected)
  assert (windows(6)["tokens"] != expected["tokens"]).any()


def stop_at(monkeypatch, step):
  """SIGTERM arrives while the batch of that step is read."""
  from dpjax.data.batches import ContiguousRows

  read = ContiguousRows.batch

  def batch(self, number, rows=slice(None)):
    if number == step:
      signal.raise_signal(signal.SIGTERM)
    return read(self, number, rows)

  monkeypatch.setattr(ContiguousRows, "batch", batch)


@pytest.mark.parametrize("step", [2, 5, 8])
def test_stopped_and_taken_up_ends_bit_for_bit_as_never_stopped(
  text, finished, tmp_path, monkeypatch, step
):
  workdir, _, scores = finished
  config = helpers.small_config(text)
  with monkeypatch.context() as patch:
    stop_at(patch, step)
    with pytest.raises(loop.Interrupted, match=f"Stopped at step {step + 1} of 12"):
      dpjax.train(config, tmp_path)
  # A line that was being written when the run was killed, and one that is written again.
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": 12, "split": "train", "loss": 0.0}) + '\n{"step": 3')
  _, again = dpjax.train(config, tmp_path)
  assert again == scores
  chex.assert_trees_all_equal(
    dpjax.load(tmp_path, 12).params, dpjax.load(workdir, 12).params
  )
  valid = [(line["step"], line["nats_per_token"]) for line in reports(tmp_path, "valid")]
  assert valid == [
    (line["step"], line["nats_per_token"]) for line in reports(workdir, "valid")
  ]
  steps = [line["step"] for line in reports(tmp_path, "train") if "loss" in line]
  assert steps == sorted(set(steps)) and steps[-1] == 12
  # Medians of 5 steps, from before and after the stop.
  assert medians(tmp_path) == medians(workdir)
  losses = (tmp_path / "losses.f32").read_bytes()
  assert losses == (workdir / "losses.f32").read_bytes() and len(losses) == 4 * 12


def test_ended_between_the_best_and_the_last_checkpoint(
  text, finished, tmp_path, monkeypatch
):
  workdir, run, scores = finished
  save = Checkpoints._save

  def save_or_end(self, manager, step, *arguments):
    if manager is self._last and step == 6:
      raise InterruptedError
    save(self, manager, step, *arguments)

  config = helpers.small_config(text)
  with monkeypatch.context() as patch:
    patch.setattr(Checkpoints, "_save", save_or_end)
    with pytest.raises(InterruptedError):
      dpjax.train(config, tmp_path)
  best, last = (tmp_path / f"checkpoints/{name}/6" for name in ("best", "last"))
  assert best.exists() and not last.exists()
  again, scores_again = dpjax.train(config, tmp_path)
  assert (again.step, scores_again) == (run.step, scores)
  chex.assert_trees_all_equal(again.params, run.params)


def test_signals_are_given_back(text, tmp_path, monkeypatch):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  stop_at(monkeypatch, 1)
  with pytest.raises(loop.Interrupted):
    dpjax.train(helpers.small_config(text), tmp_path)
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_finished_run_goes_on_to_more_steps(text, tmp_path):
  dpjax.train(helpers.small_config(text, num_steps=4), tmp_path)
  run, _ = dpjax.train(helpers.small_config(text, num_steps=7), tmp_path)
  assert reports(tmp_path, "valid")[-1]["step"] == 7
  assert run.workdir == tmp_path


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
  # Adam's first update has the size of the learning rate: step 1 is finite, step 2 is not.
  config = helpers.small_config(text, learning_rate=1e30, checkpoint_every_steps=1)
  with pytest.raises(loop.NonFiniteError, match=r"Step 2: expected a finite"):
    dpjax.train(config, tmp_path)
  assert dpjax.load(tmp_path).step == 1


def test_another_configuration_is_refused(text, finished):
  workdir, _, _ = finished
  config = helpers.small_config(text)
  config.model.num_layers = 3
  before = (workdir / "config.json").read_bytes()
  with pytest.raises(ValueError, match="model.num_layers: 2 there, 3 here"):
    dpjax.train(config, workdir)
  assert (workdir / "config.json").read_bytes() == before


def test_accumulated_and_sharded_runs_train(text, finished, tmp_path):
  workdir, _, _ = finished
  config = helpers.small_config(text, parameters="sharded", num_steps=8)
  dpjax.train(config, tmp_path / "sharded")
  one, other = dpjax.load(workdir, 8), dpjax.load(tmp_path / "sharded", 8)
  chex.assert_trees_all_close(one.params, other.params, atol=1e-5)
  config = helpers.small_config(text, accumulate_steps=2, batch_size=16, num_steps=3)
  _, scores = dpjax.train(config, tmp_path / "accumulated")
  assert math.isfinite(scores["perplexity"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"batch_size": 12}, r"train.batch_size: expected a multiple of 8 \(8 devices x 1"),
    ({"batch_size": 8000}, "train.window: expected at most"),
    ({"schedule": "cosine", "warmup_steps": 20}, "train.warmup_steps: expected fewer than"),
  ],
)
def test_training_that_cannot_be(text, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    dpjax.train(helpers.small_config(text, **changes), tmp_path)
  assert not (tmp_path / "config.json").exists()


def test_after_a_refusal_the_folder_is_free_for_other_settings(text, tmp_path):
  with pytest.raises(ValueError, match="train.batch_size"):
    dpjax.train(helpers.small_config(text, batch_size=12), tmp_path)
  config = helpers.small_config(text, num_steps=2)
  config.data.tokenizer = "bytes"
  run, _ = dpjax.train(config, tmp_path)
  assert run.tokenizer.vocab_size == 256


def test_a_folder_that_is_not_a_run_is_left_alone(text, tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "train.txt").write_text("mine")
  with pytest.raises(ValueError, match="workdir: expected room for prepared data"):
    dpjax.train(helpers.small_config(text), tmp_path)
  assert (tmp_path / "data" / "train.txt").read_text() == "mine"
  (tmp_path / "other" / "checkpoints").mkdir(parents=True)
  with pytest.raises(ValueError, match="has checkpoints and no config.json"):
    dpjax.train(helpers.small_config(text), tmp_path / "other")


@pytest.mark.parametrize(
  ("old", "new", "what"), [("c", "b", "tokenizer"), ("bat", "tab", "training text")]
)
def test_going_on_with_another_text_is_refused(text, tmp_path, old, new, what):
  mine = tmp_path / "mine.txt"
  mine.write_text(text.read_text())
  config = helpers.small_config(mine, num_steps=2)
  dpjax.train(config, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "data")
  mine.write_text(text.read_text().replace(old, new))
  config.train.num_steps = 4
  with pytest.raises(ValueError, match=f"workdir: expected the {what} that its checkp"):
    dpjax.train(config, tmp_path / "run")
  if what == "tokenizer":
    with pytest.raises(ValueError, match="workdir: expected the tokenizer"):
      dpjax.load(tmp_path / "run")


def test_a_prompt_that_will_be_too_long_is_refused_before_training(text, tmp_path):
  config = helpers.small_config(text)
  config.sample.prompt = "x" * 20
  with pytest.raises(ValueError, match="sample.prompt: expected 1 to 19 tokens"):
    dpjax.train(config, tmp_path)
  assert not (tmp_path / "config.json").exists()


def test_scores_of_another_window_have_a_file_of_their_own(finished):
  workdir, run, scores = finished
  run.write_scores("test", {"perplexity": math.inf}, window=7, stride=3)
  name = f"scores_test_{run.step}_window7_stride3.json"
  written = json.loads((workdir / name).read_text())
  assert (written["window"], written["stride"]) == (7, 3)
  assert written["scores"] == {"perplexity": None}
  written = json.loads((workdir / f"scores_test_{run.step}.json").read_text())
  assert written["scores"] == scores and written["window"] == written["stride"] == 19


def test_a_workdir_that_is_a_file(text):
  with pytest.raises(ValueError, match="workdir: expected a folder that can be written"):
    dpjax.train(helpers.small_config(text), text)


def test_a_folder_without_a_run(tmp_path):
  with pytest.raises(ValueError, match="workdir: expected the folder of a run"):
    dpjax.load(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="workdir: expected a readable"):
    workdir_lib.read_config(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
