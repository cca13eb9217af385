"""The table of settings, the rules between them, and what a configuration is read back from."""

import ast
import copy
import json
import math
import re

import ml_collections
import pytest

import dpjax
from dpjax.config import loading, schema, sections
from dpjax.config.setting import Setting
from tests import helpers


def changed(settings: dict):
  """The default configuration with settings changed, whatever their types."""
  config = dpjax.config.default()
  for key, value in settings.items():
    sections.set_value(config, key, value)
  return config


def test_the_name_of_a_component_is_its_section():
  expected = changed({"model.mixer": dpjax.config.mixer("we")})
  expected.model.boundaries = dpjax.config.boundaries("fixed")
  expected.train.optimizer = dpjax.config.optimizer("adamw")
  config = dpjax.config.default()
  for mine in (config, copy.deepcopy(config), config.copy_and_resolve_references()):
    mine.model.mixer, mine.model.boundaries, mine.train.optimizer = "we", "fixed", "adamw"
    assert mine == expected and expected == mine
    with pytest.raises(dpjax.UserError, match="^mixer: expected one of .*did you mean we[?]"):
      mine.model.mixer = "wee"
  plain = ml_collections.ConfigDict(expected.to_dict())
  assert plain == expected and expected == plain
  config.model = plain.model
  config.model.mixer = "me"
  assert config.model.mixer == dpjax.config.mixer("me")
  with plain.train.ignore_type():
    plain.train.optimizer = "adamw"
  with pytest.raises(dpjax.UserError, match="^train.optimizer: .*section.*, got 'adamw'"):
    dpjax.config.check(plain)


def test_a_value_of_another_type_is_refused_where_it_is_set():
  config = dpjax.config.default()
  message = "^width: expected a value of type int, got '128'"
  with pytest.raises(dpjax.UserError, match=message):
    config.model.width = "128"
  with pytest.raises(dpjax.UserError, match=message):
    config.model.update(width="128")
  with pytest.raises(dpjax.UserError, match="^model: expected a section, got 3"):
    config.model = 3


def test_a_value_of_another_type_is_refused_where_it_is_set_in_a_component():
  config = pooled()
  config.model.first.mixer = "we"
  config.train.schedule = "linear"
  config.data.tokenizer = ml_collections.ConfigDict(config.data.tokenizer.to_dict())
  cases = {
    "model.mixer.num_heads": ("int", "3"),
    "model.boundaries.prior": ("float", "3"),
    "model.middle.boundaries.name": ("str", 3),
    "model.first.mixer.adjustment": ("bool", "3"),
    "train.optimizer.b1": ("float", "3"),
    "train.schedule.warmup_steps": ("int", 0.5),
    "data.tokenizer.file": ("str", 3),
  }
  for key, (expected, value) in cases.items():
    parent, _, name = key.rpartition(".")
    section = sections.get(config, parent)
    message = f"^{name}: expected a value of type {expected}, got {value!r}$"
    with pytest.raises(dpjax.UserError, match=message):
      section[name] = value
    with pytest.raises(dpjax.UserError, match=message):
      section.update({name: value})
    assert sections.get(config, key) != value


def test_paths_may_begin_with_a_tilde(monkeypatch):
  monkeypatch.setenv("HOME", "/home/somebody")
  keys = "data.path data.data_dir data.manual_dir data.tokenizer.file train.init_from"
  paths = {key: f"~/{key}" for key in [*keys.split(), "model.boundaries.file"]}
  config = changed({"model.boundaries": "unigram", "data.separator": "~/x", **paths})
  expanded = dpjax.config.flatten(sections.expand_paths(config))
  before = dpjax.config.flatten(config)
  changes = {key: x for key, x in expanded.items() if x != before[key]}
  assert changes == {key: f"/home/somebody/{key}" for key in paths}
  config.model.boundaries = dpjax.config.boundaries("entropy_threshold", run="~/f", theta=1.5)
  assert sections.expand_paths(config).model.boundaries.run == "/home/somebody/f"


def pooled():
  """A configuration with settings of every section."""
  return changed({"model.boundaries": "gumbel", "model.middle": dpjax.config.middle()})


def wrong_values(setting: Setting):
  """Values that a setting refuses, and what the message expects."""
  yield b"x", f"a value of type {setting.value_type.__name__}"
  if setting.value_type in (int, float):
    yield True, f"a value of type {setting.value_type.__name__}"
  offsets = {"at least": -1, "above": 0, "at most": 1, "below": 0}
  for words, limit in setting.limits.items():
    yield setting.value_type(limit + offsets[words]), f"{words} {limit}"
  if setting.choices:
    yield f"{setting.choices[0]}s", f"one of {', '.join(setting.choices)}"
  if setting.value_type is float:
    for value in (math.nan, math.inf, -math.inf, 1e39):
      yield value, "a finite number within the range of float32"
  if setting.value_type is int and setting.below is None:
    yield 2**31, "an integer between -2**31 and 2**31"


ALL = [(key, setting) for key, _, setting in dpjax.config.walk(pooled())]


@pytest.mark.parametrize("section", [schema.Data, schema.Train, schema.Eval, schema.Sample])
def test_a_section_as_a_class_has_the_values_of_the_configuration(section):
  config = dpjax.config.default()[section.__name__.lower()]
  assert {**config} == vars(section())
  assert section(**config) == section()


def test_every_setting_has_a_meaning():
  of_component = re.compile(r"model\.(mixer|boundaries)|data.tokenizer|train\.(optimizer|schedule)")
  for key, _, setting in dpjax.config.walk(dpjax.config.default()):
    assert setting.meaning or of_component.match(key), key


@pytest.mark.parametrize("key, setting", [(key, x) for key, x in ALL if x.default is not None])
def test_every_setting_refuses_other_types_and_what_is_out_of_range(key, setting):
  config = pooled()
  for value, expected in wrong_values(setting):
    sections.set_value(config, key, value)
    if key.endswith(".name") and key != "data.name":
      expected = "one of "
    message = f"^{re.escape(key.removesuffix('.name'))}[.a-z]*: expected {re.escape(expected)}"
    with pytest.raises(dpjax.UserError, match=message) as error:
      dpjax.config.check(config)
    assert "\n" not in str(error.value)


# Settings of which the last is wrong, and what is said of it.
REFUSED = helpers.cases(r"""
  model.layers=3 | expected a known setting, .* nearest known is model.num_layers
  model.mixer.num_level=3 | expected a setting of dispatcher, .* nearest known is
  train.schedule.min_ratio=0.1 | expected a setting of constant, got an unkn
  model.mixer.num_levels=2.0 | expected a value of type int or None, got 2.0
  model.mixer.implementation=loob | expected one of None, .* did you mean loop?
  train.weight_decay_mask=matrices | expected all with train.optimizer = adam, .* got
  # Numbers.
  model.mixer.num_heads=3 | expected a divisor of the width 512, got 3
  model.mixer=mamba2 model.mixer.head_width=7 | expected a divisor of expand \* D = 1024, got 7
  model.mixer=mamba2 model.mixer.state_width=2147483647 | expected .* fewer than 2\*\*31 columns
  model.mixer=attention model.mixer.rotary_features=514 | expected None or at most the 512 features
  model.boundaries=gumbel model.boundaries.num_buckets=2147483647 | expected at most 65536, got 2147
  model.mixer.num_levels=40 | expected at most 24, got 40
  model.mixer.num_levels=10 | expected at most 9, which reach over .*, got 10
  model.width=21 model.mixer=attention model.mixer.num_heads=3 model.mixer.rotary_base=1e4 | .* None
  data.split_fractions=(0.5,0.5,0.0) | expected three positive numbers
  data.split_fractions=(0.5,0.5,0.1) | expected .* with the sum 1
  train.grad_accum_steps=3 | expected a divisor of train.batch_size = 20, got 3
  train.window=513 | expected at most model.max_length = 512, got 513
  train.num_epochs=1e38 | expected fewer than 2\*\*31 steps, got 1e\+38
  eval.stride=513 | expected at most the window 512, got 513
  data.mixture=a=1 | expected '' unless train.sampling = random_windows, got a=1
  data.isolate_documents=True eval.max_tokens=50 | expected 0 with .*, got 50
  train.stage_multipliers=(3.0,1.5) | expected \(\) or auto or 1 numbers of .*, got \(3.0,
  train.stage_multipliers=(-1.0,) | expected .* 1 numbers of at least 0, one for each stage
  model.boundaries=whitespace train.stage_multipliers=auto | .* whitespace, which have no rate
  data.split_fractions=(9e400,0.5,0.5) | expected three positive numbers
  plugins=(3,) | expected names of modules, got \(3,\)
  plugins=('',) | expected names of modules, got \(''
  model.middle_resize=padding | expected matrices without a model.middle, .* got padding
  model.mixer=attention model.mixer.rotary_features=4 | expected None without .*rotary_base, got 4
  train.stage_multipliers=auto | expected \(\) without token pooling, .* got auto
  # Of a component.
  train.schedule=cosine train.schedule.min_ratio=1.5 | expected a number in \[0, 1\], got 1.5
  train.schedule=warmup_stable_decay train.schedule.decay_fraction=0.0 | expected .* \(0, 1\], got 0
  train.optimizer.eps=-0.1 | expected at least 0, got -0.1
  train.optimizer=sgd train.optimizer.momentum=1.0 | expected a number in \[0, 1\), got 1.0
  model.boundaries=fixed model.boundaries.offset=2 | expected at most 1, got 2
  model.boundaries=gumbel model.boundaries.prior=1.0 | expected a number in \(0, 1\), got 1.0
  model.boundaries=gumbel model.boundaries.temperature=0.0 | expected above 0, got 0.0
  model.boundaries=whitespace model.boundaries.space_ids=(True,) | expected token ids, got
  model.boundaries=gumbel model.vocab_size=8 model.boundaries.space_ids=(8,) | .* = 8, got
  model.boundaries=fixed model.last.mixer=me model.last.mixer.implementation=ftt | .* mean fft
  # Without token pooling there are no blocks around it.
  model.first.num_layers=3 | expected 2 with model.boundaries = none, got 3
  model.last.mixer=he | expected None with model.boundaries = none, got he
""")


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_run_is_refused(settings, message):
  config = dpjax.config.default()
  for setting in settings.split():
    before = copy.deepcopy(config)
    key, _, text = setting.partition("=")
    try:
      sections.set_value(config, key, ast.literal_eval(text))
    except (SyntaxError, ValueError):
      sections.set_value(config, key, text)
  dpjax.config.check(before)
  with pytest.raises(ValueError, match=f"^{key}: {message}"):
    dpjax.config.check(config)


@pytest.mark.parametrize("text", ["{[]: 1}", "-" * 50_000 + "1"])
def test_a_word_that_python_cannot_read_is_refused(text):
  with pytest.raises(dpjax.UserError, match="^data.x: expected a value of type tuple, got "):
    Setting((0.5,)).parse("data.x", text)


def test_numbers_beyond_every_float_are_refused():
  for key, value in (
    ("train.stage_multipliers", (10**400,)),
    ("data.split_fractions", (10**400, 0.5, 0.5)),
  ):
    config = dpjax.config.default()
    sections.set_value(config, key, value)
    with pytest.raises(dpjax.UserError, match=f"^{key}: expected"):
      dpjax.config.check(config)


def test_stage_multipliers_auto_is_the_rule_of_the_paper():
  config = changed({"model.boundaries": "routing", "model.boundaries.factor": 3.0})
  config.train.stage_multipliers = "auto"
  config.model.width, n = 40, 4.6
  assert dpjax.config.stage_multipliers(config) == pytest.approx((n**0.5, (n / 3) ** 0.5))
  config.model.middle = dpjax.config.middle(dpjax.config.boundaries("gumbel", prior=0.5), width=60)
  config.model.middle.middle = dpjax.config.middle(width=100)
  # D^S / D^s is 100 / 40, 100 / 60 and 1.
  expected = [(n * 2.5) ** 0.5, (n / 3 * 100 / 60) ** 0.5, (n / 6) ** 0.5]
  config = dpjax.config.from_dict(config.to_dict())
  assert dpjax.config.stage_multipliers(config) == pytest.approx(expected)
  config, _ = loading.override(config, ["--config.train.stage_multipliers=3,1.5,0.5"])
  assert dpjax.config.stage_multipliers(config) == (3.0, 1.5, 0.5)
  config, _ = loading.override(config, ["--config.train.stage_multipliers=auto"])
  assert config.train.stage_multipliers == "auto"


def test_the_mixers_of_a_model_are_found():
  blocks = {"model.boundaries": "fixed", "model.mixer": "he", "model.first.mixer": "attention"}
  model = changed({**blocks, "model.last.mixer": "we"}).model
  names = {key: section.name for key, section in dpjax.config.mixers_in(model).items()}
  of_stacks = {"model.first.mixer": "attention", "model.last.mixer": "we"}
  assert names == {"model.mixer": "he"} | of_stacks
  model.boundaries = "none"
  assert [*dpjax.config.mixers_in(model)] == ["model.mixer"]


def test_a_model_says_what_it_is():
  def describe(name):
    return sections.describe_model(dpjax.config.load(name).model)

  assert describe("hnet:mamba2,tiny") == "attention within mamba2 (routing boundaries)"
  model = changed({"model.mixer": "we", "model.boundaries": "gumbel"}).model
  assert sections.describe_model(model) == "we (gumbel boundaries)"
  model.last.mixer = "she,he"
  model.middle = dpjax.config.middle("fixed")
  expected = "we (fixed boundaries) within we and she,he (gumbel boundaries)"
  assert sections.describe_model(model) == expected
  model.middle = dpjax.config.middle("gumbel", middle=dpjax.config.middle("fixed"))
  expected = "we (fixed boundaries) (gumbel boundaries) within we and she,he (gumbel boundaries)"
  assert sections.describe_model(model) == expected
  model.last.mixer = "we"
  assert sections.describe_model(model) == "we (fixed boundaries) (2 x gumbel boundaries)"
  model.boundaries = "none"
  assert sections.describe_model(changed({"model.mixer": "we,he"}).model) == "we,he"


def test_a_model_is_checked_by_itself():
  mixer = dpjax.config.mixer("attention", num_heads=7)
  model = dpjax.config.ConfigDict({**dpjax.config.default_model(), "mixer": mixer}).to_json()
  with pytest.raises(ValueError, match="^model.mixer.num_heads: .* divisor of the width 512"):
    dpjax.config.check_model(json.loads(model))
  config = dpjax.config.default()
  del config.model["width"]
  for check, settings in ((dpjax.config.check, config), (dpjax.config.check_model, config.model)):
    with pytest.raises(ValueError, match="^model.width: expected a value, got none"):
      check(settings)


def test_sampling_is_checked_with_names_of_its_own():
  dpjax.config.check_sampling(dict(length=1, temperature=0, top_p=1.0))
  for prefix in ("", "sample."):
    with pytest.raises(ValueError, match=f"^{prefix}overflow: expected one of slide, .*, got stop"):
      dpjax.config.check_sampling({"overflow": "stop"}, prefix)


def test_durations_have_one_unit():
  def steps(num_steps, num_epochs):
    return dpjax.config.steps_in(num_steps, num_epochs, "num", steps_per_epoch=100)

  assert steps(0, 1.5) == 150
  assert steps(37, 0.0) == 37
  assert steps(0, 0.001) == 1  # never none at all
  for both in ((3, 1.0), (0, 0.0), (-1, 2.0), (0, -2.0), (3, -1.0), (0, math.inf), (0, math.nan)):
    with pytest.raises(ValueError, match="^train.num_steps, train.num_epochs: expected"):
      steps(*both)


def test_json_and_back_is_equal_and_what_is_missing_has_its_default():
  config = changed({"data.split_fractions": (0.7, 0.2, 0.1), "train.learning_rate": 3.1e-4})
  written = json.loads(json.dumps(config.to_dict()))
  for missing in ([], ["train", "eval"]):
    for section in missing:
      del written[section]["batch_size"]
    assert dpjax.config.from_dict(written) == config
    assert dpjax.config.differences(written, config) == []


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"model": 3}, "model: expected a section of settings, got 3"),
    ({"train": {"optimizer": None}}, "train.optimizer: expected a section .* got None"),
    ({"model": {"mixer": []}}, r"model.mixer: expected a section .* got \[\]"),
    ({"model": {"mixer": [{"name": "we"}, {"a": 1}]}}, "model.mixer.1: expected one of"),
    ({"model": {"boundaries": ["fixed", "none"]}}, "model.boundaries: expected a section"),
    ({"train": {"num_epochs": 10**400}}, "train.num_epochs: expected a finite number .*, got 1000"),
  ],
)
def test_settings_that_cannot_be_read_are_refused(settings, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    dpjax.config.from_dict(settings)


def another(value, choices):
  """Another value of its type."""
  match value:
    case bool():
      return not value
    case int():
      return value + 1
    case float():
      return value / 2 + 0.1
    case tuple():
      return 0.8, 0.1, 0.1
  return next((x for x in choices if x != value), "other")


def test_only_what_changes_no_trained_number_may_differ():
  config = dpjax.config.default()
  assert dpjax.config.differences(config, changed({"model.mixer.implementation": "loop"})) == []
  other = changed({"seed": 5, "model.width": 7, "train.grad_clip_norm": 0.25, "data.path": "a.txt"})
  assert dpjax.config.differences(config, other) == [
    "data.path: '' there, 'a.txt' here",
    "model.width: 512 there, 7 here",
    "seed: 0 there, 5 here",
    "train.grad_clip_norm: 0.5 there, 0.25 here",
  ]
  for key, value, setting in dpjax.config.walk(config):
    if value is None or key.endswith(".name") and key != "data.name":
      continue
    other = another(value, setting.choices)
    is_free = setting.is_free or key in schema.LENGTHS
    expected = [] if is_free else [f"{key}: {value!r} there, {other!r} here"]
    assert dpjax.config.differences(config, changed({key: other})) == expected, key
  cosine = changed({"train.schedule": "cosine"})
  longer = changed({"train.schedule": "cosine", "train.num_epochs": 61.0})
  assert dpjax.config.differences(cosine, longer) == ["train.num_epochs: 60.0 there, 61.0 here"]
  assert dpjax.config.differences(config, cosine) == [
    "train.schedule.min_ratio: None there, 0.0 here",
    "train.schedule.name: 'constant' there, 'cosine' here",
  ]


@pytest.mark.parametrize(
  "experiment, key, value, today",
  [
    ("hnet:mamba2,tiny", "model.middle_resize", "padding", "matrices"),  # as it once was
    ("quickstart", "model.mixer.rotary_features", 4, None),
    ("quickstart", "train.stage_multipliers", "auto", ()),
  ],
)
def test_an_earlier_run_may_have_a_setting_without_effect(tmp_path, experiment, key, value, today):
  config = loading.load(experiment)
  if "rotary" in key:
    config.model.mixer = dpjax.config.mixer("attention", num_heads=2)
  with pytest.raises(dpjax.UserError, match=key):
    sections.set_value(config, key, value)
    dpjax.config.check(config)
  (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
  assert dpjax.config.get(loading.load(str(tmp_path)), key) == today
