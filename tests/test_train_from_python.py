"""`dpjax.train` with what is made in Python, and from the parameters of another run."""

import json
import shutil

import chex
import jax
import numpy as np
import optax
import pytest

import dpjax
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


def train(config, workdir, **settings):
  """With a model that is there at once."""
  return dpjax.train(config, workdir, model=helpers.bigrams, **settings)


def load(workdir, step=None):
  return dpjax.load(workdir, step, model=helpers.Bigrams(18))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
  """A configuration of 12 steps, the run of `Bigrams` it makes, its scores, what was told."""
  told, config = [], helpers.small_config(text)

  def watch(step, metrics, state):
    told.append((step, dict(metrics), int(state.step), float(optax.tree.norm(state.params))))

  return config, *train(config, tmp_path_factory.mktemp("whole"), callbacks=[watch]), told


def test_a_model_takes_the_place_of_the_named_one(whole, tmp_path):
  config, run, scores, _ = whole
  assert repr(run).startswith("Run(Bigrams, ") and set(run.params) == {"Embed_0", "Dense_0"}
  loaded = load(run.workdir)
  assert loaded.score_split("test") == pytest.approx(scores)
  text = loaded.generate("the cat", length=23, temperature=0)[0]  # beyond the window
  logits = loaded.model.apply({"params": loaded.params}, np.arange(18), deterministic=True).logits
  tokens = [*loaded.tokenizer.encode("the cat")]
  for _ in range(23):
    tokens.append(int(logits.argmax(1)[tokens[-1]]))
  assert text == loaded.tokenizer.decode(tokens[7:])
  with pytest.raises(dpjax.UserError, match="Embed_0|embedding"):
    dpjax.load(run.workdir)
  with pytest.raises(dpjax.UserError, match="^model: expected a flax.linen.Module"):
    dpjax.train(config, tmp_path / "none", model=lambda settings: 7)


def test_callbacks_see_what_is_reported(whole):
  _, run, _, told = whole
  lines = [json.loads(x) for x in (run.workdir / "metrics.jsonl").read_text().splitlines()]
  for (step, metrics, of_state, _), line in zip(told, lines, strict=True):
    assert step == line.pop("step") <= of_state + 1 <= step + 2
    split = line.pop("split")
    finite = {name: x for name, x in metrics.items() if np.isfinite(x)}
    written = {f"{split}/{x}": line[x] for x in line if x not in ("time", "mean_over_steps")}
    assert finite == pytest.approx({name: x for name, x in written.items() if x is not None})
  assert any("valid/nats_per_token" in metrics for _, metrics, *_ in told)
  assert len({norm for *_, norm in told}) > 4


def test_a_callback_ends_the_training_early(whole, tmp_path):
  """It is scored and saved there."""
  config, run, _, _ = whole
  told = []

  def after_one_evaluation(step, metrics, state):
    told.append(step)
    return "valid/nats_per_token" in metrics and step < 12

  part, scores = train(config, tmp_path / "run", callbacks=[after_one_evaluation])
  assert part.step == 6 == max(told) and scores["perplexity"] > 1
  assert load(tmp_path / "run", 6).step == 6
  # It is over, but for more steps, or without callbacks.
  again, scores_again = train(config, tmp_path / "run", callbacks=[after_one_evaluation])
  assert max(told) == 6 == again.step and scores_again == scores
  train(config, tmp_path / "run")
  chex.assert_trees_all_equal(*(load(x, 12).params for x in (tmp_path / "run", run.workdir)))


# Between two evaluations, at a checkpoint, and where training was to stop.
@pytest.mark.parametrize("end, stop_at, last", [(2, 99, 3), (4, 99, 4), (2, 2, 2)])
def test_a_callback_ends_the_training_between_evaluations(whole, tmp_path, end, stop_at, last):
  """It is validated first."""
  config, asked = whole[0], iter(range(1, 99))
  options = dict(
    callbacks=[lambda step, metrics, state: step == end], should_stop=lambda: next(asked) == stop_at
  )
  part, scores = train(config, tmp_path, **options)
  assert part.step == last == helpers.reports(tmp_path, "valid")[-1]["step"]
  again, scores_again = train(config, tmp_path, **options)
  assert again.step == last and scores_again == scores


def test_an_optimizer_takes_the_place_of_the_named_one(whole, text, tmp_path):
  whole[1].save(tmp_path / "exported")
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  config.train.init_from = str(tmp_path / "exported")
  # It begins with the best parameters of a run of the same model.
  frozen, _ = train(config, tmp_path / "a", optimizer=optax.set_to_zero())
  chex.assert_trees_all_equal(frozen.params, whole[1].params)
  # It may ask for the loss.
  values, sgd = [], optax.sgd(0.5)

  def update(updates, state, params=None, *, value):
    jax.debug.callback(lambda x: values.append(float(x)), value)
    return sgd.update(updates, state, params)

  train(config, tmp_path / "b", optimizer=optax.GradientTransformation(sgd.init, update))
  losses = np.fromfile(tmp_path / "b" / "losses.f32", "<f4")
  np.testing.assert_allclose(np.reshape(values, (2, -1)).mean(1), losses, rtol=1e-6)
  moved = load(tmp_path / "b")  # Needs no optimizer.
  kernels = (x.params["Dense_0"]["kernel"] for x in (moved, frozen))
  assert not np.allclose(*kernels)


def test_an_optimizer_resumes_a_run_of_the_same_states(text, tmp_path):
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  train(config, tmp_path, optimizer=optax.adam(1e-2))
  config.train.num_steps = 4
  # The rate is a number in a function, which no file holds.
  train(config, tmp_path, optimizer=optax.adam(1e-4))
  config.train.num_steps = 6
  others = {
    "opt_state.* is float32.*, in the model None": optax.sgd(1e-2),  # has no moments
    "opt_state.* is None, in the model float32": optax.chain(optax.adam(1e-2), optax.ema(0.5)),
    "opt_state.*mu.* is float32.*, in the model bfloat16": optax.adam(1e-2, mu_dtype="bfloat16"),
  }
  for message, optimizer in others.items():
    with pytest.raises(dpjax.UserError, match=message):
      train(config, tmp_path, optimizer=optimizer)
  assert len(np.fromfile(tmp_path / "losses.f32", "<f4")) == 4


def test_a_model_has_to_pool_as_the_configuration_says(text, tmp_path):
  config = helpers.pooled_config(text, "fixed")
  with pytest.raises(dpjax.UserError, match="^model.boundaries: .* none .* got fixed"):
    train(config, tmp_path)
  pooled = config.model.copy_and_resolve_references()
  pooled.vocab_size = 18
  plain = helpers.small_config(text)
  with pytest.raises(dpjax.UserError, match="^model.boundaries: .* pools tokens, got none"):
    dpjax.train(plain, tmp_path, model=dpjax.build_model(pooled))
  assert not (tmp_path / "config.json").exists()


def test_an_initial_run_matters_until_the_first_checkpoint(whole, text, tmp_path):
  shutil.copytree(whole[1].workdir, tmp_path / "other")
  settings = dict(init_from=str(tmp_path / "other"), num_steps=8, eval_every_steps=4)
  config = helpers.small_config(text, **settings)
  expected, _ = train(config, tmp_path / "whole")
  config.train.num_steps = 4
  train(config, tmp_path / "part")
  # The other run may be gone by then, but not another in its place.
  shutil.rmtree(tmp_path / "other")
  config.train.num_steps = 8
  wrong = config.copy_and_resolve_references()
  wrong.train.init_from = str(whole[1].workdir)
  with pytest.raises(ValueError, match="workdir: .*train.init_from"):
    train(wrong, tmp_path / "part")
  result, _ = train(config, tmp_path / "part")
  chex.assert_trees_all_equal(result.params, expected.params)


def test_an_initial_run_gives_its_tokenizer(whole, text, tmp_path, capsys):
  """To another text; what it does not know is counted."""
  new = tmp_path / "text.txt"
  new.write_text(text.read_text().replace("cat", "zoo").replace("rat", "dog"))
  settings = dict(init_from=str(whole[1].workdir), num_steps=2, eval_every_steps=2)
  config = helpers.small_config(new, **settings)
  run, _ = train(config, tmp_path / "run")
  assert run.tokenizer.to_json() == whole[1].tokenizer.to_json()
  texts = helpers.load_corpus(path=new).splits
  unknown = set("zdg") - set(text.read_text())
  counts = [sum(part.count(x) for part in texts[split] for x in unknown) for split in texts]
  shown = "tokens for what the vocabulary does not know: {:,} in train, {:,} in valid, {:,} in test"
  assert min(counts) > 7 and shown.format(*counts) in capsys.readouterr().out


def test_the_settings_of_a_run_are_a_configuration(finished, tmp_path):
  folder, run, _ = finished
  config = dpjax.config.load(str(folder))
  assert config.data.path == run.config.data.path and config.model.vocab_size == 0
  config.model.vocab_size = run.config.model.vocab_size
  assert config.to_json() == run.config.to_json()
  for content in ("{", "[]", '{"plugins": 5}', '{"train": {"batch_size": "8"}}', "[" * 10**5):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(dpjax.UserError, match="^(workdir|plugins|train.batch_size): ") as error:
      dpjax.config.load(str(tmp_path))
    assert "\n" not in str(error.value)


def test_an_initial_run_of_another_vocabulary_and_none_are_refused(finished, text, tmp_path):
  other = tmp_path / "text.txt"
  other.write_text(text.read_text().replace("cat", "zoo"))
  config = helpers.small_config(other, init_from=str(finished[0]))
  dpjax.runs.tokenize_only(helpers.small_config(other), tmp_path / "vocabulary")
  config.data.tokenizer.file = str(tmp_path / "vocabulary")
  message = f"train.init_from: .* the vocabulary of this one.*; data.tokenizer.file = {finished[0]}"
  with pytest.raises(ValueError, match=message):
    dpjax.train(config, tmp_path / "run")
  config.data.tokenizer = "bytes"
  with pytest.raises(ValueError, match="^data.tokenizer: expected characters, as in .* got bytes"):
    dpjax.train(config, tmp_path / "run")
  config.train.init_from = str(tmp_path / "none")
  with pytest.raises(ValueError, match="^train.init_from: expected the folder of a run"):
    dpjax.train(config, tmp_path / "other")
  # Before the data is prepared.
  assert not (tmp_path / "other" / "data").exists()
