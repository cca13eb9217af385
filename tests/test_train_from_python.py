"""`dpjax.train` with a model, an optimizer or callbacks that are made in Python."""

import contextlib
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax.errors import Interrupted
from tests import helpers


class Output(NamedTuple):
  logits: jax.Array


class Bigrams(nn.Module):
  """Somebody's own language model: each token tells the next one."""

  vocab_size: int

  @nn.compact
  def __call__(self, tokens, *, deterministic):
    x = nn.Embed(self.vocab_size, 9)(tokens)
    return Output(nn.Dense(self.vocab_size)(nn.Dropout(0.1)(x, deterministic)))


def make(settings):
  return Bigrams(settings.vocab_size)


@pytest.fixture(autouse=True)
def standard_promotion():
  # optax raises floats to integer powers, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return helpers.write_text(tmp_path_factory.mktemp("text") / "text.txt")


def test_a_model_takes_the_place_of_the_named_one(text, tmp_path):
  config = helpers.small_config(text)
  whole, scores = dpjax.train(config, tmp_path / "whole", model=make)
  assert repr(whole).startswith("Run(Bigrams, ")
  assert set(whole.params) == {"Embed_0", "Dense_0"}
  loaded = dpjax.load(tmp_path / "whole", model=make(whole.config.model))
  assert loaded.score_split("test") == pytest.approx(scores)
  text = loaded.generate("the cat", length=23, temperature=0)[0]  # beyond the window
  tokens = [*loaded.tokenizer.encode("the cat")]
  for _ in range(23):
    logits = loaded.model.apply(
      {"params": loaded.params}, np.array([tokens]), deterministic=True
    ).logits
    tokens.append(int(logits[0, -1].argmax()))
  assert text == loaded.tokenizer.decode(tokens[7:])

  # Stopped and taken up, it ends the same.
  with pytest.raises(Interrupted):
    asked = iter(range(99))
    dpjax.train(config, tmp_path / "parts", model=make, should_stop=lambda: next(asked) > 6)
  parts, _ = dpjax.train(config, tmp_path / "parts", model=make)
  jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)

  with pytest.raises(dpjax.UserError, match="Embed_0|embedding"):
    dpjax.load(tmp_path / "whole")
  with pytest.raises(dpjax.UserError, match="^model: expected a flax.linen.Module"):
    dpjax.train(config, tmp_path / "parts", model=lambda settings: 7)


def test_an_optimizer_takes_the_place_of_the_named_one(text, tmp_path):
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  frozen, _ = dpjax.train(config, tmp_path / "a", optimizer=optax.set_to_zero())
  config.train.optimizer = dpjax.config.optimizer("sgd")
  config.train.learning_rate = 0.0
  still, _ = dpjax.train(config, tmp_path / "b")
  jax.tree.map(np.testing.assert_array_equal, frozen.params, still.params)
  dpjax.train(config, tmp_path / "c", optimizer=optax.sgd(0.5))
  moved = dpjax.load(tmp_path / "c")  # Needs no optimizer.
  assert abs(moved.params["logits"]["kernel"] - still.params["logits"]["kernel"]).max() > 0


def test_callbacks_see_what_is_reported(text, tmp_path):
  seen, config = [], helpers.small_config(text)

  def watch(step, metrics, state):
    norm = float(optax.tree.norm(state.params))
    seen.append((step, dict(metrics), int(state.step), norm))

  dpjax.train(config, tmp_path, callbacks=[watch])
  lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [x[:2] for x in seen] == [
    (
      line["step"],
      {
        f"{line['split']}/{name}": pytest.approx(value, nan_ok=True)
        for name, value in line.items()
        if name not in ("step", "split", "time") and value is not None
      }
      | {name: x for name, x in seen[i][1].items() if not np.isfinite(x)},
    )
    for i, line in enumerate(lines)
  ]
  assert any("valid/nats_per_token" in metrics for _, metrics, _, _ in seen)
  assert all(step <= of_state <= step + 1 for step, _, of_state, _ in seen)
  assert len({norm for *_, norm in seen}) > 4


def test_callbacks_miss_no_report_where_the_run_is_stopped(text, tmp_path):
  config, told = helpers.small_config(text), []
  for stop_at in (5, 99):
    asked = iter(range(99))
    with contextlib.suppress(Interrupted):
      dpjax.train(
        config,
        tmp_path,
        should_stop=lambda: next(asked) == stop_at,  # noqa: B023
        callbacks=[lambda step, metrics, state: told.append((step, [*metrics]))],
      )
  steps = [step for step, names in told if "train/loss" in names]
  assert steps == [2, 4, 6, 8, 10, 12] and told[-1][0] == 12


def test_a_model_has_to_pool_as_the_configuration_says(text, tmp_path):
  config = helpers.pooled_config(text, "fixed")
  with pytest.raises(dpjax.UserError, match="^model.boundaries: .* none .* got fixed"):
    dpjax.train(config, tmp_path, model=make)
  pooled = config.model.copy_and_resolve_references()
  pooled.vocab_size = 18
  plain = helpers.small_config(text)
  with pytest.raises(dpjax.UserError, match="^model.boundaries: .* pools tokens, got none"):
    dpjax.train(plain, tmp_path, model=dpjax.build_model(pooled))
  assert not (tmp_path / "config.json").exists()


def test_it_begins_with_a_run_of_the_same_model(text, tmp_path):
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  first, _ = dpjax.train(config, tmp_path / "a", model=make)
  config.train.initial_run = str(tmp_path / "a")
  second, _ = dpjax.train(config, tmp_path / "b", model=make, optimizer=optax.set_to_zero())
  jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_a_callback_ends_the_training_early(text, tmp_path):
  """It is scored and saved there."""
  config = helpers.small_config(text)
  told = []

  def after_one_evaluation(step, metrics, state):
    told.append(step)
    return "valid/nats_per_token" in metrics and step < 12

  run, scores = dpjax.train(config, tmp_path / "run", callbacks=[after_one_evaluation])
  assert run.step == 6 == max(told) and scores["perplexity"] > 1
  assert dpjax.load(tmp_path / "run", 6).step == 6
  # It is over, but for more steps, or without callbacks.
  again, scores_again = dpjax.train(config, tmp_path / "run", callbacks=[after_one_evaluation])
  assert max(told) == 6 == again.step and scores_again == scores
  run, _ = dpjax.train(config, tmp_path / "run")
  whole, _ = dpjax.train(config, tmp_path / "whole")
  last = dpjax.load(tmp_path / "run", 12).params
  jax.tree.map(np.testing.assert_array_equal, last, dpjax.load(whole.workdir, 12).params)

  # Between two evaluations, there is one more.
  run, _ = dpjax.train(
    config, tmp_path / "between", callbacks=[lambda step, metrics, state: step == 2]
  )
  assert run.step == 3
  assert jnp.isfinite(run.score("the cat")["nats_per_token"])
