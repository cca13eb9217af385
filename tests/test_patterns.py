"""Several mixers in turn: their settings, and whole runs as a user makes them."""

import copy
import json
import re
import sys

import pytest

import dpjax
from dpjax.analysis import curves
from dpjax.config import loading
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
call = helpers.command
SETTINGS = """model.width=16 model.feed_forward_width=20 model.max_length=19 model.num_layers=2
  train.batch_size=8 train.num_steps=4 train.eval_every_steps=4 train.log_every_steps=2
  eval.batch_size=8 data.tokenizer=characters train.schedule.warmup_steps=2
  model.mixer=we,attention model.mixer.0.adjustment=False model.mixer.0.implementation=scan"""


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory, standard_promotion):
  """The folder of a run of WE and attention in turn."""
  folder = tmp_path_factory.mktemp("pattern") / "run"
  settings = f"{SETTINGS} sample.prompt=cat data.path={text}".split()
  flags = [f"--config.{x}" for x in [*settings, f"data.data_dir={text.parent / 'data_dir'}"]]
  flags += ["--config=modern_transformer:small", f"--workdir={folder}"]
  assert call("train", *flags) is None
  return folder


def test_it_trains_scores_generates_and_exports(workdir, tmp_path, capsys):
  settings = json.loads((workdir / "config.json").read_text())["model"]["mixer"]
  assert [x["name"] for x in settings] == ["we", "attention"]
  # The configuration's own attention keeps its settings.
  assert settings[1]["num_heads"] == 4 and settings[1]["rotary_base"] == 1e4
  assert settings[0]["adjustment"] is False
  assert call("evaluate", f"--workdir={workdir}", "--split=valid") is None
  assert "bits per character" in capsys.readouterr().out
  assert call("generate", f"--workdir={workdir}", "--prompt=on a", "--length=9") is None
  assert capsys.readouterr().out.startswith("on a")
  assert call("export", str(workdir), str(tmp_path / "out")) is None
  run, exported = dpjax.load(workdir), dpjax.load(tmp_path / "out")
  assert run.name == "we,attention" and repr(run).startswith("Run(we,attention, ")
  assert exported.config.model == run.config.model
  helpers.assert_trees_close(exported.params, run.params, rtol=0)
  assert (tmp_path / "out/numpy_model.py").exists()
  record = curves.read_runs([workdir])
  assert curves.names(record) == ["WE, no adjustment + attention, 4 heads"]


@pytest.mark.parametrize(
  "flags, message",
  [
    ("mixer=we,attentoin", "model.mixer.1: expected one of .*; did you mean attention?"),
    ("mixer=we,attention mixer.num_heads=2", "model.mixer.num_heads: .* model.mixer.1.num_heads"),
    ("mixer.0.num_heads=2", "model.mixer.0.num_heads: expected a known setting"),
    ("mixer=we,attention mixer.1.num_heads=x", "--config.model.mixer.1.num_heads: .* int, got x"),
    ("boundaries=fixed,gumbel", "model.boundaries: expected one of .* got fixed,gumbel"),
  ],
)
def test_wrong_flags_are_named(flags, message):
  given = [f"--config.model.{flag}" for flag in flags.split()]
  with helpers.arguments("train", "--config=modern_transformer:tiny", *given):
    with pytest.raises(dpjax.UserError) as error:
      dpjax.config.check(loading.from_words(sys.argv[1:])[0])
  assert re.search(message, str(error.value)), error.value


def test_mixers_that_no_layer_has_are_told(text, tmp_path, caplog):
  config = helpers.small_config(text, num_steps=1, eval_every_steps=1)
  config.model.update(mixer="we,me,he", num_layers=1)
  assert dpjax.config.idle_mixers(config.model) == {"model": "me, he"}
  dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  assert "model.num_layers: fewer than mixers; no layer has me, he" in caplog.text
  config = in_turn()
  assert dpjax.config.idle_mixers(config.model) == {"model.last": "me, he"}
  config.model.first.num_layers = 1
  expected = {"model.first": "attention", "model.last": "me, he"}
  assert dpjax.config.idle_mixers(config.model) == expected


def in_turn():
  config = dpjax.config.default()
  config.model.mixer = ("we", dpjax.config.mixer("attention", num_heads=4))
  config.model.boundaries = "fixed"
  config.model.update(last=dict(num_layers=1, mixer="he,me,he"))
  return config


def test_several_mixers_are_a_tuple_of_sections():
  config = in_turn()
  assert isinstance(config.model.mixer, tuple) and isinstance(config.model.last.mixer, tuple)
  dpjax.config.check(config)
  flat = dpjax.config.flatten(config)
  assert flat["model.mixer.0.name"] == "we" and flat["model.mixer.1.num_heads"] == 4
  assert dpjax.config.get(config, "model.last.mixer.2.name") == "he"
  places = "mixer.0", "mixer.1", *(f"last.mixer.{i}" for i in range(3))
  assert {*dpjax.config.mixers_in(config.model)} == {f"model.{place}" for place in places}
  written = json.loads(json.dumps(config.to_dict()))
  assert [x["name"] for x in written["model"]["mixer"]] == ["we", "attention"]
  again = dpjax.config.from_dict(written)
  assert again == config and dpjax.config.differences(written, config) == []
  for other in (copy.deepcopy(config), config.copy_and_resolve_references(), again):
    other.model.mixer[1].num_heads = 8
    assert dpjax.config.differences(written, other) == ["model.mixer.1.num_heads: 4 there, 8 here"]
  assert config == in_turn()
  # One is one, and from several to one and back.
  config.model.mixer = ("we",)
  assert config.model.mixer == dpjax.config.mixer("we")
  config.model.last.mixer = None
  dpjax.config.check(config)
  assert dpjax.config.from_dict({"model": {"mixer": [{"name": "we"}]}}).model.mixer.name == "we"


@pytest.mark.parametrize(
  ("key", "value", "message"),
  [
    ("num_heads", 7, "model.mixer.1.num_heads: expected a divisor of the width 512, got 7"),
    ("num_head", 4, "model.mixer.1.num_head: expected a setting of attention, .* nearest"),
    ("name", "he", "model.mixer.1.[a-z_]+: expected a setting of he, got an unknown one"),
  ],
)
def test_one_of_several_mixers_is_refused_by_its_place(key, value, message):
  config = in_turn()
  with config.model.mixer[1].ignore_type():
    config.model.mixer[1][key] = value
  with pytest.raises(dpjax.UserError, match=f"^{message}"):
    dpjax.config.check(config)
  written = json.loads(json.dumps(config.to_dict()))
  with pytest.raises(dpjax.UserError, match=f"^{message}"):
    dpjax.config.from_dict(written)
  with pytest.raises(dpjax.UserError, match="^mixer.1: expected one of .*did you mean we[?]"):
    config.model.mixer = "attention,wee"
