"""Whole runs, in this process: train, stop, go on, score, generate."""

import dataclasses
import json
import math
import pickle
import shutil
import signal

import chex
import numpy as np
import pytest

import dpjax
from dpjax.config import sections
from dpjax.data import batches
from dpjax.data.token_files import Tokens
from dpjax.errors import UserError
from dpjax.models import build
from dpjax.runs import launch, prepare
from dpjax.text.characters import Bytes
from dpjax.training import checkpoints, evaluation, loop, reporting
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
reports = helpers.reports


def test_training_learns_reports_and_scores(finished):
  workdir, run, scores = finished
  train, valid = reports(workdir, "train"), reports(workdir, "valid")
  assert [line["step"] for line in train] == [2, 4, 6, 8, 10, 12]
  assert [line["step"] for line in valid] == [6, 12]
  assert train[-1]["loss"] < train[0]["loss"]
  assert run.step == min(valid, key=lambda line: line["nats_per_token"])["step"]
  written = json.loads((workdir / f"scores_test_{run.step}.json").read_text())
  assert written["scores"] == scores
  losses = np.fromfile(workdir / "losses.f32", "<f4")
  assert losses[:2].mean() == pytest.approx(train[0]["loss"], rel=1e-6)
  # Characters are tokens here.
  assert scores["bits_per_character"] == pytest.approx(scores["nats_per_token"] / math.log(2))
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
  for wrong in (None, 5, b"the "):
    with pytest.raises(ValueError, match=f"^prompt: expected a text, or several, got {wrong!r}"):
      run.generate(wrong)
    with pytest.raises(dpjax.UserError, match=f"^text: expected a text, or several, got {wrong!r}"):
      run.score(wrong)
  with pytest.raises(dpjax.UserError, match="^text: expected a text, got 3"):
    run.score(["the", 3])
  assert run.score([text, "the cat"]) == [run.score(text), run.score("the cat")]


def test_bits_of_a_text_with_unknown_characters_are_nan(finished, caplog):
  _, run, _ = finished
  scores = run.score("the \u6f22 cat")
  assert math.isnan(scores["bits_per_character"]) and math.isnan(scores["bits_per_byte"])
  (record,) = caplog.records
  assert "the vocabulary does not know: 1 in it" in record.getMessage()
  assert "no bits per character" in dpjax.runs.table(scores)
  caplog.clear()
  assert math.isfinite(run.score("the cat")["bits_per_character"]) and not caplog.records


def test_another_step_of_a_run_has_its_parameters_and_is_scored_by_the_same_program(finished):
  workdir, run, _ = finished
  with checkpoints.Checkpoints(workdir / "checkpoints") as saved:
    steps = saved.steps()
  assert len(steps) > 1
  for step in steps:
    other = run.at_step(step)
    assert other.step == step and other.scorer is run.scorer
    chex.assert_trees_all_equal(other.params, dpjax.load(workdir, step).params)
  with pytest.raises(dpjax.UserError, match="^step: expected one of .*, got 7"):
    run.at_step(7)
  with pytest.raises(dpjax.UserError, match="^run: expected one with a folder, got one without"):
    dataclasses.replace(run, workdir=None).at_step()


def test_loading_gives_the_same_model(finished):
  workdir, run, scores = finished
  loaded = dpjax.load(workdir)
  chex.assert_trees_all_equal(loaded.params, run.params)
  assert loaded.score_split("test") == scores
  assert dpjax.load(workdir, step=12).step == 12


def test_models_of_a_seed_get_the_same_random_windows():
  tokens = np.arange(500, dtype=np.uint16)
  config = dpjax.config.default()
  config.seed, config.model.mixer = 5, "attention"
  config.train.update(sampling="random_windows", batch_size=6, window=9)
  made = launch.make_batches(config, Tokens("numbers", Bytes(), {"train": tokens}, {}))
  expected = batches.RandomWindows(batches.TokenStream(tokens), 6, 9, seed=5)
  chex.assert_trees_all_equal(made.batch(3), expected.batch(3))


def test_a_signal_after_the_last_update_stops_before_the_test_split(text, tmp_path):
  config, sent = helpers.small_config(text, num_steps=4), []

  def call_back(step, metrics, state):
    if step == 4 and not sent:  # A second signal would end it at once.
      sent.append(signal.raise_signal(signal.SIGTERM))

  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(loop.Interrupted, match="Stopped at step 4 of 4") as error:
    dpjax.train(config, tmp_path, model=helpers.bigrams, callbacks=[call_back])
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
  assert error.value.signal == signal.SIGTERM and not [*tmp_path.glob("scores_*")]
  run, scores = dpjax.train(config, tmp_path, model=helpers.bigrams)
  assert run.step == 4 and scores


def test_tokens_that_are_gone_are_made_again(text, tmp_path):
  config = helpers.small_config(text, num_steps=2)
  config.data.data_dir = str(tmp_path / "tokens")
  run, scores = dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  for take in (lambda run: run.score_split("test") == scores, lambda run: run.tokens().size > 0):
    shutil.rmtree(tmp_path / "tokens")
    assert take(dpjax.load(tmp_path / "run", model=run.model))


def test_a_folder_for_scores_is_tried_before_they_are_made(finished, tmp_path, monkeypatch):
  _, run, _ = finished
  monkeypatch.setattr(evaluation.Scorer, "score", None)
  (tmp_path / "file").touch()
  with pytest.raises(OSError, match="file"):
    run.score_split("test", folder=tmp_path / "file")


@pytest.mark.slow
def test_a_run_goes_on_with_other_settings_of_memory_and_more_steps(text, tmp_path):
  config = helpers.small_config(text, batch_size=16, num_steps=6)
  config.model.update(dropout=0.0, hidden_dropout=0.0, mixer=dict(level_dropout=0.0))
  dpjax.train(config, tmp_path / "run")
  shutil.copytree(tmp_path / "run", tmp_path / "other")
  config.train.num_steps = 12
  dpjax.train(config, tmp_path / "run")
  config.model.mixer.implementation, config.model.scan_layers = "loop", False
  config.train.grad_accum_steps = 2
  dpjax.train(config, tmp_path / "other")
  run, other = (dpjax.load(tmp_path / x, step=12) for x in ("run", "other"))
  assert other.config.model.mixer.implementation == "loop" and not other.config.model.scan_layers
  chex.assert_trees_all_close(other.params, run.params, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "best"), [(2, 12), (0, 6)])
def test_another_protocol_of_validation_begins_a_best_of_its_own(
  text, tmp_path, monkeypatch, window, best
):
  config = helpers.small_config(text, num_steps=6)
  dpjax.train(config, tmp_path, model=helpers.bigrams)
  worse = {"nats_per_token": 9.0, "perplexity": 8103.0}
  monkeypatch.setattr(evaluation.Scorer, "score", lambda *_, **__: worse)
  config.train.num_steps, config.eval.window = 12, window
  run, _ = dpjax.train(config, tmp_path, model=helpers.bigrams)
  assert run.step == best


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
  # Adam's first update has the size of the learning rate: step 1 is finite, step 2 is not.
  config = helpers.small_config(text, learning_rate=1e30, checkpoint_every_steps=1)
  with pytest.raises(reporting.NonFiniteError, match=r"Step 2: expected a finite"):
    dpjax.train(config, tmp_path, model=helpers.bigrams)
  assert dpjax.load(tmp_path, model=helpers.Bigrams(18)).step == 1


SCHEDULE = dpjax.config.schedule("cosine", warmup_steps=20)
# Kind of boundaries, a setting, its value, and what is said.
REFUSED = [
  (
    "fixed",
    "train.schedule",
    SCHEDULE,
    "warmup_steps: expected fewer than the 12 steps of the run",
  ),
  ("whitespace", "data.tokenizer", "bpe", "expected one with a space .* got bpe without"),
  ("spacebyte", "data.tokenizer", "bpe", ".* bytes with SpaceByte boundaries, got bpe"),
  ("spacebyte", "model.boundaries.end_ids", (2, 18), "expected token ids below .* = 18, got"),
]


@pytest.mark.parametrize(("boundaries", "key", "value", "message"), REFUSED)
def test_training_that_cannot_be_leaves_the_folder_free(
  text, tmp_path, boundaries, key, value, message
):
  config = helpers.pooled_config(text, boundaries)
  sections.set_value(config, key, value)
  if key == "data.tokenizer":
    config.data.tokenizer.vocab_size = 300
  with pytest.raises(ValueError, match=message):
    dpjax.train(config, tmp_path)
  assert not (tmp_path / "config.json").exists()


def test_a_folder_that_is_not_a_run_is_left_alone(text, tmp_path):
  (tmp_path / "data" / "mine").mkdir(parents=True)
  with pytest.raises(ValueError, match="expected a folder that dpjax can replace"):
    dpjax.train(helpers.small_config(text), tmp_path)
  assert (tmp_path / "data" / "mine").exists()
  (tmp_path / "other" / "checkpoints" / "mine").mkdir(parents=True)
  with pytest.raises(ValueError, match="has checkpoints and no config.json"):
    dpjax.train(helpers.small_config(text), tmp_path / "other")


@pytest.mark.parametrize(
  ("old", "new", "what"), [("c", "b", "tokenizer"), ("bat", "tab", "training text")]
)
def test_going_on_with_another_text_is_refused(text, tmp_path, old, new, what):
  mine = tmp_path / "mine.txt"
  mine.write_text(text.read_text())
  config = helpers.small_config(mine, num_steps=2)
  dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  shutil.rmtree(tmp_path / "run" / "data")
  mine.write_text(text.read_text().replace(old, new))
  config.train.num_steps = 4
  with pytest.raises(ValueError, match=f"workdir: expected the {what} that its checkp"):
    dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  if what == "tokenizer":
    with pytest.raises(ValueError, match="workdir: expected the tokenizer"):
      dpjax.load(tmp_path / "run")


def test_scores_of_another_window_have_a_file_of_their_own(finished, tmp_path, monkeypatch):
  workdir, run, scores = finished
  workdir = shutil.copytree(workdir, tmp_path / "run", symlinks=True)
  monkeypatch.setattr(evaluation.Scorer, "score", lambda *_, **__: {"perplexity": math.inf})
  run.score_split("test", window=7, stride=3, folder=workdir)
  written = json.loads((workdir / f"scores_test_{run.step}_window7_stride3.json").read_text())
  assert (written["window"], written["stride"]) == (7, 3)
  assert written["scores"] == {"perplexity": None}
  written = json.loads((workdir / f"scores_test_{run.step}.json").read_text())
  assert written["scores"] == scores and written["window"] == written["stride"] == 19


@pytest.fixture(scope="module")
def spaced(text, tmp_path_factory):
  """A run whose segments are words, with random parameters."""
  config = helpers.pooled_config(text, "whitespace")
  data = prepare.prepare_tokens(config, tmp_path_factory.mktemp("data") / "data")
  config = build.with_vocabulary(config, data.tokenizer)
  model = dpjax.build_model(config.model)
  params = helpers.draw_params(model, seed=6, spread=0.3)
  return dpjax.runs.Run(config, model, params, data.tokenizer, 0, data)


@pytest.mark.slow
def test_a_run_on_words_scores(spaced):
  space_ids = spaced.config.model.boundaries.space_ids
  assert space_ids == spaced.tokenizer.space_ids != ()
  tokens = spaced.data.splits["test"]
  scores = spaced.score_split("test")
  # The first token is predicted from the line end.
  inputs = [spaced.tokenizer.start_id, *tokens[:-1]]
  assert scores["p_ones"] == pytest.approx(np.isin(inputs, space_ids).mean())
  assert scores["shortening_factor"] == pytest.approx(1 / scores["p_ones"])
  assert 1 < scores["shortening_factor_padded"] < scores["shortening_factor"]
  assert 0 < scores["segments_mean"] <= scores["segments_max"] < 19
  # Context has segments, too.
  longer = spaced.score(spaced.tokenizer.decode(tokens), stride=5)
  assert longer["p_ones"] == scores["p_ones"] and longer["segments_mean"] > scores["segments_mean"]


def test_the_capacity_is_the_smallest_that_holds_the_words(spaced):
  boundaries = spaced.scorer.objective.boundaries
  space, letter = spaced.tokenizer.encode(" a")
  tokens = np.full((3, 19), letter)
  for number, expected in ((0, 10), (9, 10), (10, 20), (19, 20)):
    tokens[1, :number] = space
    assert build.batch_capacity(boundaries, {"tokens": tokens}) == expected
  other = spaced.config.copy_and_resolve_references()
  other.model.boundaries = dpjax.config.boundaries("gumbel")
  boundaries = build.build_boundaries(other.model)
  assert build.batch_capacity(boundaries, {"tokens": tokens}) is None


def test_a_run_is_pickled_without_what_is_compiled(finished):
  _, run, _ = finished
  scores, texts = run.score("the cat"), run.generate("the", length=3, seed=2)
  other = pickle.loads(pickle.dumps(run))
  assert other.score("the cat") == scores
  assert other.generate("the", length=3, seed=2) == texts


@pytest.mark.parametrize("boundaries", ["unigram", "fixed"])
def test_a_record_that_contradicts_the_boundaries_is_refused(text, tmp_path, boundaries):
  config = helpers.pooled_config(text, boundaries)
  prepare.tokenize_only(config, tmp_path)
  path = tmp_path / "data" / "data.json"
  content = json.loads(path.read_text())
  path.write_text(json.dumps({**content, "unigram": not content["unigram"]}))
  said = {
    "unigram": "expected boundaries of the text, as in the run's settings, got none",
    "fixed": "expected no boundaries of the text, as in the run's settings, got some",
  }
  with pytest.raises(dpjax.UserError, match=f"^{path}: {said[boundaries]}"):
    prepare.read_tokens(config, tmp_path / "data")


@pytest.mark.slow
def test_a_run_taught_by_unigram_scores_any_text(text, tmp_path):
  config = helpers.pooled_config(text, "unigram", sampling="shuffled_windows")
  run, scores = dpjax.train(config, tmp_path)
  names = {"precision", "recall", "f1", "accuracy"}
  train = reports(tmp_path, "train")
  for line in (*train, *reports(tmp_path, "valid"), scores):
    assert names < line.keys() and 0 < line["boundary_loss"]
  assert train[-1]["boundary_loss"] < train[0]["boundary_loss"]
  # A new text is taught by the same model.
  assert run.score(run.tokenizer.decode(run.data.splits["test"])) == pytest.approx(scores)


def test_ids_of_spaces_are_those_of_the_vocabulary_or_given(text):
  config = helpers.pooled_config(text, "gumbel")
  assert build.with_vocabulary(config, Bytes()).model.boundaries.space_ids == Bytes().space_ids
  config.model.boundaries.space_ids = (3, 7)
  filled = build.with_vocabulary(config, Bytes())
  assert filled.model.boundaries.space_ids == (3, 7) and filled.model.vocab_size == 256


def test_settings_of_scores_and_samples_may_change_after_a_run_is_loaded(finished):
  run = dpjax.load(finished[0])
  run.config.eval.window = 5
  run.config.sample.length = 3
  assert run.scorer.sizes()[0] == 5
  (text,) = run.generate("the cat", temperature=0.0)
  assert len(run.tokenizer.encode(text)) == 3


@pytest.mark.parametrize(
  "key, value", [("train.learning_rate", 0.5), ("model.norm_epsilon", 0.5), ("train.batch_size", 3)]
)
def test_settings_that_were_changed_in_the_folder_are_named(key, value, finished, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(finished[0], workdir)
  path = workdir / "config.json"
  settings = json.loads(path.read_text())
  section, name = key.split(".")
  before = settings[section][name]
  settings[section][name] = value
  path.write_text(json.dumps(settings))
  message = (
    rf"config.json: expected the settings with .*, got others: {key}: {before} there, {value}"
  )
  with pytest.raises(UserError, match=message):
    dpjax.load(workdir)
  with pytest.raises(UserError, match=message):
    dpjax.train(dpjax.config.from_dict(settings), workdir)
