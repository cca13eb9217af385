"""Runs that leave their place: moved without their data, exported, and loaded again."""

import json
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import dpjax
from dpjax import config as config_lib
from dpjax.commands import export
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def run(finished):
  return finished[1]


@pytest.fixture(scope="module")
def unigram(text, tmp_path_factory):
  """A run in shards, whose boundaries need a model of their own."""
  config = helpers.pooled_config(text, "unigram", num_steps=2, eval_every_steps=2)
  config.train.parameters = "sharded"
  return dpjax.train(config, tmp_path_factory.mktemp("runs") / "run")[0]


def assert_same_params(one, other):
  chex.assert_trees_all_equal(one.params, other.params)


@pytest.mark.parametrize("kind", ["run", pytest.param("unigram", marks=pytest.mark.slow)])
def test_an_exported_run_is_the_run_to_the_bit(kind, request, tmp_path, capsys, monkeypatch):
  run = request.getfixturevalue(kind)
  export.main([str(run.workdir), str(tmp_path / "out")])
  assert "MiB" in capsys.readouterr().out
  shutil.move(tmp_path / "out", tmp_path / "elsewhere")
  loaded = dpjax.load(tmp_path / "elsewhere")
  assert loaded.step == run.step and loaded.config == dpjax.load(run.workdir).config
  assert_same_params(loaded, run)
  assert loaded.score("the cat sat") == run.score("the cat sat")
  if kind == "run":
    assert loaded.generate("the ", length=5) == run.generate("the ", length=5)
  flat = load_file(tmp_path / "elsewhere/model.safetensors")
  np.testing.assert_array_equal(flat["logits.kernel"], run.params["logits"]["kernel"])
  card = (tmp_path / "elsewhere/README.md").read_text()
  assert f"for {run.step} updates" in card and "| test | perplexity |" in card
  code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
  monkeypatch.chdir(tmp_path)
  exec(code.replace('"out"', '"elsewhere"').replace('"..."', '"the "').replace("100", "5"), {})
  modes = {path.stat().st_mode for path in (tmp_path / "elsewhere").iterdir() if path.is_file()}
  assert len(modes) == 1
  assert not any((tmp_path / "elsewhere").rglob("*.bin"))
  # The tokens are found in data_dir.
  assert loaded.score_split("test") == run.score_split("test")


def test_scores_go_into_an_exported_folder_only_where_asked(run, tmp_path, capsys):
  run.save(tmp_path / "out")
  before = sorted((tmp_path / "out").rglob("*"))
  for more in ([], [f"--out={tmp_path / 'scores'}"]):
    assert not helpers.command("evaluate", f"--workdir={tmp_path / 'out'}", *more)
  assert sorted((tmp_path / "out").rglob("*")) == before
  assert [x.name for x in (tmp_path / "scores").iterdir()] == [f"scores_test_{run.step}.json"]


def test_bfloat16_halves_it(run, tmp_path):
  run.save(tmp_path / "whole")
  run.save(tmp_path / "half", dtype="bfloat16")
  sizes = [(tmp_path / x / "model.safetensors").stat().st_size for x in ("whole", "half")]
  assert 0.5 < sizes[1] / sizes[0] < 0.7
  loaded = dpjax.load(tmp_path / "half")
  for x, y in zip(*(jax.tree.leaves(r.params) for r in (loaded, run)), strict=True):
    assert x.dtype == jnp.float32
    np.testing.assert_array_equal(x, y.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_run_that_is_moved_needs_no_data(run, tmp_path):
  shutil.copytree(run.workdir, tmp_path / "moved", symlinks=True)
  for path in (tmp_path / "moved").rglob("*.bin"):
    path.unlink()
  moved = dpjax.load(tmp_path / "moved")
  assert_same_params(moved, run)
  assert moved.score("the cat sat") == run.score("the cat sat")


def test_training_begins_with_it_and_leaves_it_whole(run, tmp_path):
  run.save(tmp_path / "out")
  before = {x: x.read_bytes() for x in (tmp_path / "out").rglob("*") if x.is_file()}
  config = dpjax.load(run.workdir).config
  config.train.num_steps = 1
  config.train.eval_every_steps = 1
  wider = config.copy_and_resolve_references()
  wider.model.width = 24
  for other in (config, wider):
    with pytest.raises(dpjax.UserError, match="^workdir: .* exported one; .*initial_run"):
      dpjax.train(other, tmp_path / "out")
  config.train.initial_run = str(tmp_path / "out")
  new, _ = dpjax.train(config, tmp_path / "new", optimizer=optax.set_to_zero())
  assert_same_params(new, run)
  after = {x: x.read_bytes() for x in (tmp_path / "out").rglob("*") if x.is_file()}
  assert after == before


def test_what_is_wrong(run, tmp_path, capsys):
  run.save(tmp_path / "out")
  file = tmp_path / "out/model.safetensors"
  with pytest.raises(dpjax.UserError, match="^folder: expected a new or an empty one"):
    run.save(tmp_path / "out")
  with pytest.raises(dpjax.UserError, match="^dtype: expected one of float32, bfloat16"):
    run.save(tmp_path / "other", dtype="float16")
  assert not (tmp_path / "other").exists()
  with pytest.raises(dpjax.UserError, match="^step: expected None or .* got 77"):
    dpjax.load(tmp_path / "out", 77)
  config = json.loads((tmp_path / "out/config.json").read_text())
  config["model"]["width"] = 24
  shutil.copytree(tmp_path / "out", tmp_path / "wider")
  (tmp_path / "wider/config.json").write_text(json.dumps(config))
  with pytest.raises(dpjax.UserError, match=r"of the shape \(18, 24\), got \(18, 12\)"):
    dpjax.load(tmp_path / "wider")
  file.write_bytes(file.read_bytes()[:500])
  with pytest.raises(dpjax.UserError, match="expected a whole file of safetensors"):
    dpjax.load(tmp_path / "out")
  with pytest.raises(SystemExit):
    export.main([str(tmp_path / "none"), str(tmp_path / "new")])
  with pytest.raises(SystemExit):
    export.main([str(run.workdir), str(tmp_path / "new"), "--dtype=int8"])
  assert not (tmp_path / "new").exists()
  assert config_lib.from_dict(config).model.width == 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dispatcher", "we", "whitespace", "routing"])
def test_a_trained_model_of_the_clone_scores_and_generates(name):
  folder = helpers.ROOT / f"models/{name}-books"
  files = [path for path in folder.rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) < 5_000_000
  for path in ("config.json", "data/data.json"):
    assert not re.search(r'"[^"]*[/\\\\][^"]*"', (folder / path).read_text()), "a path of a machine"
  run = dpjax.load(folder)
  text = "Once upon a time there was a little girl who lived with her mother in the wood. "
  assert run.score(text)["bits_per_character"] < 2.2
  assert run.score(text[::-1])["bits_per_character"] > 3
  (found,) = run.generate(text, length=20, temperature=0)
  assert len(found) >= 20
