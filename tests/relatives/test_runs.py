"""Models with mixers of `dpjax_relatives` train and generate."""

import chex
import jax
import numpy as np
import pytest

import dpjax
from dpjax.config import registry
from dpjax.errors import Interrupted
from dpjax.models import build
from dpjax_relatives import MIXERS
from tests import helpers

pytest.importorskip("jla")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
  """The mixers by name; nothing of them is left in the registry."""
  monkeypatch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
  for name, mixer in MIXERS.items():
    dpjax.register_mixer(name, mixer)


def train(config, workdir):
  config.train.update(dict(num_steps=4, eval_every_steps=4, checkpoint_every_steps=4))
  run, _ = dpjax.train(config, workdir)
  return run


def assert_cached_steps_give_the_logits_of_whole_rows(run):
  tokens = run.tokens("test")[: 3 * 17].reshape(3, 17)
  params = jax.device_get(run.params)  # They are on several devices.
  whole = jax.jit(run.model.apply)({"params": params}, tokens)
  step = helpers.make_step(run.model, params)
  schedule = [(9, (9, 4, 0)), (1, (1, 1, 1)), (9, (7, 9, 7)), (9, (0, 3, 9))]
  logits = helpers.by_chunks(step, run.model.init_cache(3), tokens, schedule)
  helpers.assert_found(logits, whole)


@pytest.mark.parametrize("name", MIXERS)
def test_a_run_stops_and_goes_on_as_if_it_had_not(name, text, tmp_path):
  config = helpers.small_config(text)
  sizes = dict(head_width=4) if name == "log_linear_mamba2" else dict(num_heads=3)
  config.model.mixer = dpjax.config.mixer(name, **sizes)
  whole = train(config, tmp_path / "whole")
  assert_cached_steps_give_the_logits_of_whole_rows(whole)
  stops = iter([False, True])
  with pytest.raises(Interrupted, match="step 2 of 4"):
    dpjax.train(config, tmp_path / "parts", should_stop=stops.__next__)
  resumed = train(config, tmp_path / "parts")
  losses = [(tmp_path / x / "losses.f32").read_bytes() for x in ("parts", "whole")]
  assert losses[0] == losses[1]
  chex.assert_trees_all_equal(resumed.params, whole.params)
  assert resumed.score_split("test") == whole.score_split("test")


def test_a_pattern_of_mixers(text, tmp_path):
  config = helpers.small_config(text)
  kda = dpjax.config.mixer("kda", num_heads=3)
  config.model.mixer = (kda, dpjax.config.mixer("attention", num_heads=3))
  run = train(config, tmp_path / "run")
  assert_cached_steps_give_the_logits_of_whole_rows(run)
  loaded = dpjax.load(tmp_path / "run")
  continuations = [each.generate("the cat", length=9, temperature=0.0) for each in (run, loaded)]
  assert continuations[0] == continuations[1]


def test_the_middle_of_an_hourglass(text, tmp_path):
  config = helpers.pooled_config(text, "whitespace")
  config.model.first.mixer = config.model.last.mixer = config.model.mixer
  config.model.mixer = dpjax.config.mixer("gated_deltanet", num_heads=3)
  run = train(config, tmp_path / "run")
  assert len(run.generate("the cat", length=9)[0]) > 0
  assert_cached_steps_give_the_logits_of_whole_rows(run)


def test_export_and_look_say_what_they_leave_out(text, tmp_path, caplog):
  config = helpers.small_config(text)
  config.model.mixer = dpjax.config.mixer("deltanet", num_heads=3)
  run = train(config, tmp_path / "run")
  run.save(tmp_path / "out")
  assert "out: exported without numpy_model.py, which does not support deltanet" in caplog.text
  assert not (tmp_path / "out/numpy_model.py").exists()
  loaded = dpjax.load(tmp_path / "out")
  assert loaded.score("the cat sat") == run.score("the cat sat")
  caplog.clear()
  dpjax.look(run, "the cat sat")
  assert "no weights for layers that do not report them, 1 DeltaNet, 2 DeltaNet" in caplog.text


def test_documents_in_a_row_train(text, tmp_path):
  path = tmp_path / "documents.txt"
  path.write_text("\n---\n".join(text.read_text().splitlines()))
  config = helpers.small_config(path)
  config.model.mixer = dpjax.config.mixer("log_linear_mamba2", state_width=5, head_width=4)
  config.data.update(separator="---", isolate_documents=True)
  run = train(config, tmp_path / "run")
  assert np.isfinite(run.score("the cat sat")["nats_per_token"])
  assert build.build_model(run.config.model) == run.model
