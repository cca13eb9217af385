"""Averages of parameters, early stopping, parts of a split: what a run makes of them."""

import contextlib
import json
import math

import chex
import numpy as np
import optax
import pytest

import dpjax
from dpjax.data import batches
from dpjax.errors import Interrupted
from dpjax.training import checkpoints, trainer
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
DECAY = 0.6


def train(config, workdir, **settings):
  """With a model that is there at once."""
  return dpjax.train(config, workdir, model=helpers.bigrams, **settings)[0]


def load(workdir, step=None):
  return dpjax.load(workdir, step, model=helpers.bigrams)


def states(workdir, step):
  """The parameters and their average in a checkpoint."""
  abstract = load(workdir).params
  with checkpoints.Checkpoints(workdir / "checkpoints") as saved:
    return [saved.restore_step(abstract, step, field=x)[1] for x in ("params", "average")]


def settings(text, **changes):
  config = helpers.small_config(text, log_every_steps=1, patience=1, **changes)
  config.train.schedule = dpjax.config.schedule("linear", warmup_steps=2, min_ratio=0.1)
  return config


@pytest.fixture(scope="module")
def averaged(text, tmp_path_factory):
  return train(settings(text, ema_decay=DECAY), tmp_path_factory.mktemp("averaged") / "run")


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
  return train(settings(text), tmp_path_factory.mktemp("plain") / "run")


def test_the_average_is_scored_saved_loaded_and_exported(averaged, tmp_path):
  params, average = states(averaged.workdir, averaged.step)
  chex.assert_trees_all_equal(averaged.params, average)
  assert not np.allclose(params["Dense_0"]["bias"], average["Dense_0"]["bias"], rtol=1e-3)
  (reported,) = (
    x for x in helpers.reports(averaged.workdir, "valid") if x["step"] == averaged.step
  )
  assert averaged.score_split("valid")["nats_per_token"] == pytest.approx(
    reported["nats_per_token"]
  )
  averaged.save(tmp_path / "exported")
  chex.assert_trees_all_equal(load(tmp_path / "exported").params, average)


def test_training_is_that_without_an_average(averaged, plain):
  losses = [(x.workdir / "losses.f32").read_bytes() for x in (averaged, plain)]
  assert losses[0] == losses[1] and len(losses[0]) == 48
  chex.assert_trees_all_equal(plain.params, states(averaged.workdir, plain.step)[0])


def test_the_rate_and_the_tokens_seen_are_reported(plain):
  rate = optax.join_schedules(
    [optax.linear_schedule(0, 3e-3, 2), optax.linear_schedule(3e-3, 3e-4, 10)], [2]
  )
  lines = helpers.reports(plain.workdir, "train")
  assert [x["tokens_seen"] for x in lines] == [8 * 19 * step for step in range(1, 13)]
  expected = [float(rate(step)) for step in range(12)]
  np.testing.assert_allclose([x["learning_rate"] for x in lines], expected, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.999, 1 - 1e-9])
def test_a_slow_average_keeps_its_weight(decay):
  ones, zeros = {"a": np.ones(3, np.float32)}, {"a": np.zeros(3, np.float32)}
  for step in (0, 1, 10**9):
    result = trainer.add_to_average(zeros, ones, np.int32(step), decay)["a"]
    expected = (1 - decay) / -math.expm1((step + 1) * math.log(decay))
    np.testing.assert_allclose(result, expected, 1e-5)


def test_a_run_begins_with_the_average_of_another(averaged, text, tmp_path):
  config = helpers.small_config(text, init_from=str(averaged.workdir), ema_decay=DECAY)
  config.train.update(dict(learning_rate=0.0, num_steps=3))
  chex.assert_trees_all_equal(train(config, tmp_path / "run").params, averaged.params)


def valid_steps(workdir):
  return [x["step"] for x in helpers.reports(workdir, "valid")]


def test_a_run_ends_where_validation_is_no_longer_better(text, tmp_path, capsys):
  # Without a step by the gradient, the first evaluation is the best.
  config = helpers.small_config(text, learning_rate=0.0, eval_every_steps=2, patience=2)
  run = train(config, tmp_path / "run")
  assert valid_steps(run.workdir) == [2, 4, 6] and run.step == 2
  said = "since step 2 was better (train.patience = 2): the training ends at step 6.\n"
  assert said in capsys.readouterr().out
  train(config, tmp_path / "run")
  assert valid_steps(run.workdir) == [2, 4, 6]
  config.train.patience = 3
  train(config, tmp_path / "run")
  assert valid_steps(run.workdir) == [2, 4, 6, 8]


def test_patience_counts_evaluations_also_where_their_interval_changes(text, tmp_path):
  config = helpers.small_config(text, learning_rate=0.0, eval_every_steps=4, patience=2)
  asked = iter(range(99))
  with contextlib.suppress(Interrupted):
    train(config, tmp_path / "run", should_stop=lambda: next(asked) == 6)
  config.train.eval_every_steps = 1
  run = train(config, tmp_path / "run")
  assert valid_steps(run.workdir) == [4, 8, 9] and run.step == 4


def test_a_part_of_the_split_stands_for_it_in_training_alone(plain, text, tmp_path):
  config = settings(text)
  config.eval.max_tokens = 150
  run = train(config, tmp_path / "run")
  data, start = run.data, batches.DocumentStarts.of_one(run.tokenizer.start_id)
  stream = batches.TokenStream(data.splits["valid"], None, start)
  windows = batches.EvaluationWindows(stream, 19, 19, 8, max_tokens=150)
  nats = count = 0
  for batch in map(windows.batch, range(len(windows))):
    output = run.model.apply({"params": run.params}, batch["tokens"], deterministic=True)
    each = optax.softmax_cross_entropy_with_integer_labels(output.logits, batch["targets"])
    nats += float((each * batch["weights"]).sum())
    count += int(batch["weights"].sum())
  assert 133 < count <= 152 < data.counts["valid"]["tokens"] / 3
  (reported,) = (x for x in helpers.reports(run.workdir, "valid") if x["step"] == run.step)
  assert reported["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
  # Afterwards all is scored.
  tests = [json.loads((x.workdir / f"scores_test_{x.step}.json").read_text()) for x in (run, plain)]
  assert tests[0] == tests[1]
  assert run.score_split("valid")["perplexity"] != pytest.approx(reported["perplexity"], rel=1e-4)
