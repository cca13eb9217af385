"""Runs whose boundaries read with the model of another run, and the theta they need."""

import shutil

import chex
import jax
import numpy as np
import pytest

import dpjax
from dpjax.analysis import calibrate
from dpjax.commands import calibrate as calibrate_command
from dpjax.config import sections
from dpjax.errors import Interrupted
from dpjax.models.build import with_frozen
from dpjax.training import loop
from tests import helpers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture(scope="module")
def first(text, tmp_path_factory):
  """A text, two runs of small models, "a" and "b", and a theta of the first."""
  folder = tmp_path_factory.mktemp("first")
  text = shutil.copy(text, folder / "text.txt")
  for name, seed in (("a", 0), ("b", 5)):
    config = helpers.small_config(text, num_steps=8, learning_rate=0.03)
    config.seed, config.model.num_layers, config.model.max_length = seed, 1, 23
    config.model.feed_forward_width = 24  # cut over 8 devices, where parameters are
    run, _ = dpjax.train(config, folder / name)
    if name == "a":
      h = calibrate.entropies(run, run.data.splits["valid"], 19)
      theta = dpjax.ops.entropy_theta(h, 3.7)
  return folder, theta


def pooled_config(first, run="a", **train):
  folder, theta = first
  config = helpers.pooled_config(folder / "text.txt", "fixed", **{"num_steps": 8, **train})
  config.train.optimizer = dpjax.config.optimizer("adamw", weight_decay=0.5)
  config.model.boundaries = dpjax.config.boundaries(
    "entropy_threshold", run=str(folder / run), theta=theta, num_buckets=2
  )
  return config


@pytest.fixture(scope="module")
def pooled(first, tmp_path_factory):
  """A run whose boundaries read with "a", and its test scores."""
  workdir = tmp_path_factory.mktemp("pooled")
  return workdir, *dpjax.train(pooled_config(first), workdir)


def frozen(run):
  return run.params["stages_0"]["boundaries"]["frozen"]


def assert_same_bits(one, other):
  chex.assert_trees_all_equal_structs(one, other)
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_training_changes_all_but_the_frozen_model(first, pooled):
  workdir, run, scores = pooled
  assert_same_bits(frozen(run), dpjax.load(first[0] / "a").params)
  drawn = run.model.init(jax.random.key(0), np.zeros((2, 3), int))["params"]
  trained = run.params["stages_0"]["last"]["blocks_0"]["feed_forward"]
  before = drawn["stages_0"]["last"]["blocks_0"]["feed_forward"]
  assert not any(
    np.allclose(x, y, atol=1e-4)
    for x, y in zip(jax.tree.leaves(trained), jax.tree.leaves(before), strict=True)
  )
  assert scores["shortening_factor"] == pytest.approx(3.7, rel=0.1)
  # A start token goes first, and makes other windows.
  assert run.score_split("valid")["shortening_factor"] == pytest.approx(3.7, rel=0.05)
  text = run.score("the cat sat on a mat and saw no rat")
  assert np.isfinite(text["bits_per_character"])


def test_a_run_needs_the_other_until_its_first_checkpoint_alone(first, pooled, tmp_path):
  _, whole, _ = pooled
  folder, _ = first
  shutil.copytree(folder / "a", tmp_path / "other")
  config, steps = pooled_config(first), iter(range(5))
  config.model.boundaries.run = str(tmp_path / "other")
  with pytest.raises(Interrupted):
    dpjax.train(config, tmp_path / "run", should_stop=lambda: next(steps) == 4)
  shutil.rmtree(tmp_path / "other")
  run, _ = dpjax.train(config, tmp_path / "run")
  assert_same_bits(run.params, whole.params)
  loaded = dpjax.load(tmp_path / "run")
  prompts = ["the cat", "on a mat and saw"]
  # Beyond the window of 19, too: by the cache, and then by passes over the window.
  assert [len(text) for (text,) in loaded.generate(prompts, length=17)] == [17, 17]
  loaded.save(tmp_path / "out")
  assert_same_bits(dpjax.load(tmp_path / "out").params, whole.params)
  assert (tmp_path / "out/numpy_model.py").exists()
  with pytest.raises(ValueError, match="slide or error, as EntropyThreshold boundaries cannot"):
    loaded.generate(prompts, length=17, overflow="continue")


def test_a_run_killed_in_its_first_save_takes_the_model_again(first, pooled, tmp_path):
  _, whole, _ = pooled
  config, folder = pooled_config(first), tmp_path / "checkpoints"

  def kill(state, *_, **__):
    raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.checkpoints.Checkpoints, "save", kill)
    with pytest.raises(KeyboardInterrupt):
      dpjax.train(config, tmp_path)
  (folder / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  run, _ = dpjax.train(config, tmp_path)
  assert_same_bits(run.params, whole.params)


def test_an_initial_run_gives_the_rest_also_of_sharded_parameters(first, pooled, tmp_path):
  workdir, whole, _ = pooled
  folder, _ = first
  settings = dict(num_steps=2, learning_rate=0.0, param_sharding="fsdp")
  config = pooled_config(first, "b", init_from=str(workdir), **settings)
  run, _ = dpjax.train(config, tmp_path / "run")
  assert any(not x.is_fully_replicated for x in jax.tree.leaves(frozen(run)))
  assert_same_bits(run.params, with_frozen(whole.params, dpjax.load(folder / "b").params))
  config.train.init_from = str(folder / "a")
  with pytest.raises(ValueError, match="^train.init_from: expected parameters of this"):
    dpjax.train(config, tmp_path / "wrong")


def test_other_runs_are_refused(first, pooled, tmp_path):
  folder, _ = first
  other = tmp_path / "other.txt"
  other.write_text((folder / "text.txt").read_text().replace("cat", "zoo"))
  for key, value, message in (
    ("model.boundaries.run", f"{tmp_path}/none", f"the folder of a run, got {tmp_path}/none"),
    (
      "model.boundaries.run",
      str(pooled[0]),
      "a run whose .* nor of another run, got entropy_thresh",
    ),
    ("model.max_length", 24, "a run whose model.max_length is at least this one's, 24, .* 23"),
    ("data.path", str(other), "a run with the vocabulary of this one, got .*another"),
  ):
    config = pooled_config(first)
    sections.set_value(config, key, value)
    with pytest.raises(dpjax.UserError, match=f"^model.boundaries.run: expected {message}"):
      dpjax.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
  run = dpjax.load(folder / "a")
  run.config.model.boundaries = dpjax.config.boundaries("gumbel", sample=True)
  with pytest.raises(dpjax.UserError, match="^run: .* neither drawn in evaluation"):
    dpjax.runs.check_frozen(run)


def test_a_command_finds_theta(first, capsys):
  folder, _ = first
  calibrate_command.main([str(folder / "a"), "--factor=3.7", "--window=19"])
  said, flags = capsys.readouterr().out.splitlines()
  length = float(said.split()[2])
  assert length == pytest.approx(3.7, rel=0.01)
  assert said.endswith(f": {length} characters a segment, of 513 characters in windows of 19")
  theta = float(said.split()[1].rstrip(":"))
  assert theta == pytest.approx(first[1], rel=1e-5)
  assert flags == (
    "--config.model.boundaries=entropy_threshold "
    f"--config.model.boundaries.run={folder / 'a'} --config.model.boundaries.rule=global "
    f"--config.model.boundaries.theta={theta:.6g}"
  )
  options = "--factor=5 --rule=combined --theta_add=-0.1 --split=test".split()
  calibrate_command.main([str(folder / "a"), *options])
  said, flags = capsys.readouterr().out.splitlines()
  assert said.endswith("in windows of 23")
  assert flags.endswith("--config.model.boundaries.theta_add=-0.1")


def test_a_command_measures_the_rates_of_words_and_of_a_models_boundaries(first, pooled, capsys):
  run = dpjax.load(first[0] / "a")
  calibrate_command.main([str(first[0] / "a"), "--rates", "--window=19"])
  said, flags = capsys.readouterr().out.splitlines()
  tokens = run.data.splits["valid"]
  rows = tokens[: len(tokens) // 19 * 19].reshape(-1, 19)
  words = np.isin(rows, run.tokenizer.space_ids).mean(1)
  rate, deviation = f"{words.mean():.4g}", f"{words.std():.4g}"
  assert said.startswith(f"rate {rate}, with a deviation of {deviation}: boundaries for each of")
  assert said.endswith(f"over {len(rows)} rows of 19")
  assert f"boundaries.prior={rate} --config.model.boundaries.deviation={deviation}" in flags
  assert calibrate.rates(pooled[1], tokens, 19).mean() == pytest.approx(1 / 3.7, rel=0.05)
  with pytest.raises(SystemExit, match="rates: expected neither --rule nor --theta_add"):
    calibrate_command.main([str(first[0] / "a"), "--rates", "--theta_add=0.1"])
