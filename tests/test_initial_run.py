"""A run that begins with the parameters of another."""

import shutil

import jax
import numpy as np
import pytest

from dpjax import run as run_lib
from tests import helpers


@pytest.fixture(scope="module", autouse=True)
def promotion():
  """Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def first(tmp_path_factory):
  folder = tmp_path_factory.mktemp("first")
  text = helpers.write_text(folder / "text.txt")
  run_lib.train(helpers.small_config(text, num_steps=6), folder / "run")
  return folder


def leaves(run):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(run.params)]


def test_it_begins_with_the_best_parameters(first, tmp_path):
  # Nothing is learned, so what it began with is still there at the end.
  config = helpers.small_config(
    first / "text.txt",
    num_steps=2,
    learning_rate=0.0,
    initial_run=str(first / "run"),
    eval_every_steps=2,
  )
  run, _ = run_lib.train(config, tmp_path / "run")
  other = helpers.small_config(
    first / "text.txt", num_steps=2, learning_rate=0.0, eval_every_steps=2
  )
  drawn, _ = run_lib.train(other, tmp_path / "drawn")
  expected = leaves(run_lib.load(first / "run"))
  for found, leaf in zip(leaves(run), expected, strict=True):
    np.testing.assert_array_equal(found, leaf)
  assert not all(map(np.array_equal, leaves(drawn), expected))


def test_it_goes_on_from_its_own_checkpoint(first, tmp_path):
  shutil.copytree(first / "run", tmp_path / "other")
  settings = dict(initial_run=str(tmp_path / "other"), eval_every_steps=4)
  whole = helpers.small_config(first / "text.txt", num_steps=8, **settings)
  expected, _ = run_lib.train(whole, tmp_path / "whole")
  part = helpers.small_config(first / "text.txt", num_steps=4, **settings)
  run_lib.train(part, tmp_path / "part")
  # The other run may be gone by then, but not another in its place.
  shutil.rmtree(tmp_path / "other")
  part.train.update(num_steps=8)
  wrong = part.copy_and_resolve_references()
  wrong.train.initial_run = str(first / "run")
  with pytest.raises(ValueError, match="workdir: .*train.initial_run"):
    run_lib.train(wrong, tmp_path / "part")
  found, _ = run_lib.train(part, tmp_path / "part")
  for x, y in zip(leaves(found), leaves(expected), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(width=18), r"train.initial_run: expected parameters of this model, .* got "),
    (dict(num_layers=3), r"train.initial_run: expected parameters of this model"),
  ],
)
def test_other_sizes_are_refused(first, tmp_path, change, message):
  config = helpers.small_config(first / "text.txt", initial_run=str(first / "run"))
  config.model.update(change)
  with pytest.raises(ValueError, match=message):
    run_lib.train(config, tmp_path / "run")


def test_another_vocabulary_and_no_run_are_refused(first, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text((first / "text.txt").read_text().replace("cat", "zoo"))
  config = helpers.small_config(text, initial_run=str(first / "run"))
  with pytest.raises(ValueError, match="train.initial_run: .* the vocabulary of this one"):
    run_lib.train(config, tmp_path / "run")
  config = helpers.small_config(text, initial_run=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="^train.initial_run: expected the folder of a run"):
    run_lib.train(config, tmp_path / "other")
  # Before the data is prepared.
  assert not (tmp_path / "other" / "data").exists()
