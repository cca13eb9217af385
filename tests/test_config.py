"""The table of settings, the rules between them, and what a configuration is read back from."""

import copy
import json
import math
import re

import ml_collections
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.config import loading, schema, sections


def changed(settings: dict):
  """The default configuration with settings changed, whatever their types."""
  config = config_lib.default()
  for key, value in settings.items():
    sections.set_value(config, key, value)
  return config


def test_the_name_of_a_component_is_its_section():
  config, expected = config_lib.default(), config_lib.default()
  expected.model.mixer = config_lib.mixer("we")
  expected.model.last.mixer = config_lib.mixer("he")
  expected.model.boundaries = config_lib.boundaries("fixed")
  expected.train.optimizer = config_lib.optimizer("adamw")
  expected.train.schedule = config_lib.schedule("cosine")
  copies = (config, copy.deepcopy(config), config.copy_and_resolve_references())
  for mine in copies:
    mine.model.mixer, mine.model.last.mixer, mine.model.boundaries = "we", "he", "fixed"
    mine.train.optimizer, mine.train.schedule = "adamw", "cosine"
    assert mine == expected and expected == mine
    config_lib.check(mine)
    with pytest.raises(dpjax.UserError, match="^mixer: expected one of .*did you mean we[?]"):
      mine.model.mixer = "wee"
  plain = ml_collections.ConfigDict(expected.to_dict())
  assert plain == expected and expected == plain
  config.model = plain.model
  config.model.mixer = "me"
  assert config.model.mixer == config_lib.mixer("me")
  train = {**expected.train.to_dict(), "optimizer": "adamw"}
  plain = ml_collections.ConfigDict({**expected.to_dict(), "train": train})
  with pytest.raises(dpjax.UserError, match="^train.optimizer: .*section.*, got 'adamw'"):
    config_lib.check(plain)


def test_paths_may_begin_with_a_tilde(monkeypatch):
  monkeypatch.setenv("HOME", "/home/somebody")
  keys = "data.path data.data_dir data.manual_dir data.tokenizer.file train.init_from"
  paths = {key: f"~/{key}" for key in [*keys.split(), "model.boundaries.file"]}
  config = changed({"model.boundaries": "unigram", "data.separator": "~/x", **paths})
  expanded = config_lib.flatten(sections.expand_paths(config))
  before = config_lib.flatten(config)
  changes = {key: x for key, x in expanded.items() if x != before[key]}
  assert changes == {key: f"/home/somebody/{key}" for key in paths}
  config.model.boundaries = config_lib.boundaries("entropy_threshold", run="~/f", theta=1.5)
  assert sections.expand_paths(config).model.boundaries.run == "/home/somebody/f"


def pooled():
  """A configuration with settings of every section."""
  return changed({"model.boundaries": "gumbel", "model.middle": config_lib.middle()})


def wrong_values(setting: schema.Setting):
  """Values that a setting refuses, and what the message expects."""
  yield b"x", f"a value of type {setting.value_type.__name__}"
  if setting.value_type in (int, float):
    yield True, f"a value of type {setting.value_type.__name__}"
  limits = zip(("minimum", "above", "maximum", "below"), (-1, 0, 1, 0), strict=True)
  for name, offset in limits:
    if (limit := getattr(setting, name)) is not None:
      words = {"minimum": "at least", "maximum": "at most"}.get(name, name)
      yield setting.value_type(limit + offset), f"{words} {limit}"
  if setting.choices:
    yield f"{setting.choices[0]}s", f"one of {', '.join(setting.choices)}"
  if setting.value_type is float:
    for value in (math.nan, math.inf, -math.inf, 1e39):
      yield value, "a number of float32 that is finite"
  if setting.value_type is int and setting.below is None:
    yield 2**31, "an integer below 2**31"


ALL = [(key, setting) for key, _, setting in config_lib.walk(pooled())]


def test_every_setting_has_a_meaning_and_a_default_that_it_accepts():
  for key, value, setting in config_lib.walk(config_lib.default()):
    is_of_component = re.match(
      r"model\.(mixer|boundaries)|data.tokenizer|train\.(optimizer|schedule)", key
    )
    assert setting.meaning or is_of_component, key
    if value is not None:
      assert setting.check(key, value) == value


@pytest.mark.parametrize("key, setting", [(key, x) for key, x in ALL if x.default is not None])
def test_every_setting_refuses_other_types_and_what_is_out_of_range(key, setting):
  config = pooled()
  for value, expected in wrong_values(setting):
    sections.set_value(config, key, value)
    if key.endswith(".name") and key != "data.name":
      expected = "one of "
    message = f"^{re.escape(key.removesuffix('.name'))}[.a-z]*: expected {re.escape(expected)}"
    with pytest.raises(dpjax.UserError, match=message) as error:
      config_lib.check(config)
    assert "\n" not in str(error.value)


REFUSED = [
  ("model.layers", 3, "expected a known setting, .* nearest known is model.num_layers"),
  ("seeds", 3, "expected a known setting, .* the nearest known is seed"),
  ("model", 3, "expected a section of settings, got 3"),
  ("model.middle", "fixed", "expected a section of settings, got 'fixed'"),
  ("model.mixer", None, "expected a section of settings, got None"),
  ("model.mixer.num_level", 3, "expected a setting of dispatcher, .* nearest known is"),
  ("train.optimizer.b3", 0.5, "expected a setting of adam, .* is train.optimizer.b"),
  ("model.mixer.num_levels", 2.0, "expected a value of type int or None, got 2.0"),
  ("train.products", "bfloat16", "expected a known setting, .* is train.matmul_dtype"),
  ("data.tokenizer_size", 300, "expected a known setting, .* is data.tokenizer.vocab_size"),
  ("data.documents", "isolated", "expected a known setting, .* is data.isolate_documents"),
  ("data.tokenizer.vocab_size", 300, "expected a setting of characters, got an unknown"),
  # Names.
  ("model.mixer", {"name": "dispacher"}, "expected .* got dispacher; did you mean dispatcher?"),
  ("train.schedule", {"name": "lineal"}, "expected one of constant, .* did you mean linear?"),
  ("train.weight_decay_mask", "matrices", "expected all with train.optimizer = adam, .* got"),
  ("model.mixer.implementation", "loob", "expected one of None, .* did you mean loop?"),
  # Numbers.
  ("model.mixer.num_heads", 3, "expected a divisor of model.width = 512, got 3"),
  ("model.mixer.num_levels", 10, "expected at most 9, which reach over .*, got 10"),
  ("model.mixer.num_levels", 40, "expected at most 24, got 40"),
  ("model.mixer.level_dropout", 1.0, r"expected a probability in \[0, 1\), got 1.0"),
  ("data.split_fractions", (0.5, 0.5, 0.0), "expected three positive numbers"),
  ("data.split_fractions", (0.5, 0.5, 0.1), "expected .* with the sum 1"),
  ("train.grad_accum_steps", 3, "expected a divisor of train.batch_size = 20, got 3"),
  ("train.window", 513, "expected at most model.max_length = 512, got 513"),
  ("train.num_epochs", 1e38, r"expected fewer than 2\*\*31 steps, got 1e\+38"),
  ("train.eval_every_epochs", 2.0**31, r"expected fewer than 2\*\*31 steps, got 2147"),
  ("eval.stride", 513, "expected at most the window 512, got 513"),
  ("data.mixture", "a=1", "expected '' unless train.sampling = random_windows, got a=1"),
  # Rates by stage.
  ("train.stage_multipliers", (3.0, 1.5), r"expected \(\) or auto or 1 numbers of .*, got \(3.0, "),
  ("train.stage_multipliers", (-1.0,), "expected .* 1 numbers of at least 0, one for each stage"),
  ("train.stage_multipliers", "aut", "expected one of auto, got aut; did you mean auto?"),
  # Of a component by its name.
  ("train.schedule=cosine min_ratio", 1.5, r"expected a number in \[0, 1\], got 1.5"),
  ("train.schedule=constant min_ratio", 0.1, "expected a setting of constant, got an unkn"),
  ("train.schedule=warmup_stable_decay decay_fraction", 0.0, r"expected .* \(0, 1\], got 0"),
  ("model.mixer=attention rotary_base", 1.0, "expected None or a number above 1, got 1.0"),
  ("train.optimizer=adamw weight_decay", -0.1, "expected at least 0, got -0.1"),
  ("train.optimizer=sgd momentum", 1.0, r"expected a number in \[0, 1\), got 1.0"),
  ("model.mixer=we implementation", "ftt", "expected one of None, .* did you mean fft?"),
  ("model.boundaries=fixed ofset", 1, ".* the nearest known is model.boundaries.offset"),
  ("model.boundaries=fixed pooling", "first", r"expected one of \['mean', 'last'\], got 'first'"),
  ("model.boundaries=fixed offset", 2, "expected at most 1, got 2"),
  ("model.boundaries=gumbel num_buckets", 0, "expected at least 1, got 0"),
  ("model.boundaries=gumbel temperature", 0.0, "expected above 0, got 0.0"),
  ("model.boundaries=gumbel prior", 1.0, r"expected a number in \(0, 1\), got 1.0"),
  ("model.boundaries=entropy left", 0, "expected at least 1, got 0"),
  ("model.boundaries=whitespace space_ids", (True,), r"expected token ids, got \(True,\)"),
  ("model.boundaries=whitespace space_ids", (3, -1), r"expected token ids, got \(3, -1\)"),
]
# Without token pooling there are no blocks around it.
REFUSED += [
  (f"model.{key}", value, f"expected {expected} with model.boundaries = none, got {value}$")
  for stack in ("first", "last")
  for key, value, expected in ((f"{stack}.num_layers", 3, 2), (f"{stack}.mixer", "he", None))
]


@pytest.mark.parametrize(("where", "value", "message"), REFUSED)
def test_what_cannot_run_is_refused(where, value, message):
  component, _, key = where.rpartition(" ")
  settings = {key: value}
  if component:
    section, _, name = component.partition("=")
    around = {"model.boundaries": "fixed"} if section.endswith("t.mixer") else {}
    key = f"{section}.{key}"
    settings = {**around, section: name, key: value}
  with pytest.raises(ValueError, match=f"^{key}: {message}"):
    config_lib.check(changed(settings))


def test_stage_multipliers_auto_is_the_rule_of_the_paper():
  config = changed({"model.boundaries": "routing", "model.boundaries.factor": 3.0})
  config.train.stage_multipliers = "auto"
  config.model.width, n = 40, 4.6
  assert config_lib.stage_multipliers(config) == pytest.approx((n**0.5, (n / 3) ** 0.5))
  config.model.middle = config_lib.middle(config_lib.boundaries("gumbel", prior=0.5), width=60)
  config.model.middle.middle = config_lib.middle(width=100)
  # D^S / D^s is 100 / 40, 100 / 60 and 1.
  expected = [(n * 2.5) ** 0.5, (n / 3 * 100 / 60) ** 0.5, (n / 6) ** 0.5]
  config = config_lib.from_dict(config.to_dict())
  assert config_lib.stage_multipliers(config) == pytest.approx(expected)
  config, _ = loading.override(config, ["--config.train.stage_multipliers=3,1.5,0.5"])
  assert config_lib.stage_multipliers(config) == (3.0, 1.5, 0.5)
  config, _ = loading.override(config, ["--config.train.stage_multipliers=auto"])
  assert config.train.stage_multipliers == "auto"


ODD_HEADS = {"model.width": 21, "model.mixer": "attention", "model.mixer.num_heads": 3}
MIXED = {
  "model.boundaries": "fixed",
  "model.mixer": config_lib.mixer("he", adjustment=False, implementation="fft"),
  "model.first.mixer": config_lib.mixer("attention", num_heads=4, use_bias=False),
  # Each has the names of its own operator.
  "model.last.mixer": config_lib.mixer("dispatcher", implementation="loop"),
}
# Settings that can run, one that cannot beside them, and what is said.
TOGETHER = [
  (ODD_HEADS, {"model.mixer.rotary_base": 1e4}, "model.mixer.rotary_base: .* None .* 21 // 3 = 7"),
  (MIXED, {"model.last.mixer.implementation": "fft"}, "model.last.mixer.implementation: .*fft"),
  (
    {"model.boundaries": config_lib.boundaries("gumbel", space_ids=(8,)), "model.vocab_size": 9},
    {"model.vocab_size": 8},
    "model.boundaries.space_ids: .* = 8, got",
  ),
  (
    {"model.boundaries": "whitespace"},
    {"train.stage_multipliers": "auto"},
    "train.stage_multipliers: expected numbers with model.boundaries = whitespace, which have no",
  ),
  ({"data.isolate_documents": True}, {"eval.max_tokens": 50}, "eval.max_tokens: .* 0 .*, got 50"),
  ({}, {"train.num_steps": 5}, "train.num_steps, train.num_epochs: .* 5 steps and 60.0 epochs"),
  ({}, {"train.eval_every_epochs": 0.0}, "train.eval_every_steps, .* 0 steps and 0.0 epochs"),
]


@pytest.mark.parametrize(("fine", "change", "message"), TOGETHER)
def test_settings_that_contradict_each_other_are_refused(fine, change, message):
  config_lib.check(changed(fine))
  with pytest.raises(ValueError, match=f"^{message}"):
    config_lib.check(changed({**fine, **change}))


def test_the_mixers_of_a_model_are_found():
  names = [(key, x.name) for key, x in config_lib.mixers_in(changed(MIXED).model).items()]
  of_stacks = [("model.first.mixer", "attention"), ("model.last.mixer", "dispatcher")]
  assert sorted(names) == sorted([("model.mixer", "he"), *of_stacks])
  without = changed({**MIXED, "model.boundaries": "none"}).model
  assert [*config_lib.mixers_in(without)] == ["model.mixer"]


def test_a_missing_setting_is_refused():
  config = config_lib.default()
  del config.model["width"]
  for check, settings in ((config_lib.check, config), (config_lib.check_model, config.model)):
    with pytest.raises(ValueError, match="^model.width: expected a value, got none"):
      check(settings)


def test_a_model_is_checked_by_itself():
  mixer = config_lib.mixer("attention", num_heads=7)
  model = {**config_lib.default_model(), "mixer": mixer}
  with pytest.raises(ValueError, match="^model.mixer.num_heads: .* divisor of model.width = 512"):
    config_lib.check_model(json.loads(config_lib.ConfigDict(model).to_json()))
  with pytest.raises(ValueError, match="^model.depth: .* the nearest known is model.width"):
    config_lib.check_model({**config_lib.default_model(), "depth": 7})


@pytest.mark.parametrize(
  ("name", "value", "expected"),
  [
    ("length", 0, "at least 1"),
    ("temperature", "warm", "a value of type float"),
    ("top_p", True, "a value of type float"),
    ("overflow", "stop", "one of slide, continue, error"),
  ],
)
def test_sampling_is_checked_with_names_of_its_own(name, value, expected):
  config_lib.check_sampling(dict(length=1, temperature=0, top_p=1.0))
  for prefix in ("", "sample."):
    with pytest.raises(ValueError, match=f"^{prefix}{name}: expected {expected}.*, got '?{value}"):
      config_lib.check_sampling({name: value}, prefix)


def test_durations_have_one_unit():
  def steps(num_steps, num_epochs):
    settings = dict(num_steps=num_steps, num_epochs=num_epochs)
    return config_lib.steps_in(settings, "num", steps_per_epoch=100)

  assert steps(0, 1.5) == 150
  assert steps(37, 0.0) == 37
  assert steps(0, 0.001) == 1  # never none at all
  for both in ((3, 1.0), (0, 0.0), (-1, 0.0), (-1, 2.0), (0, -2.0), (3, -1.0)):
    with pytest.raises(ValueError, match="^train.num_steps, train.num_epochs: expected"):
      steps(*both)
  for epochs in (float("inf"), float("nan")):
    with pytest.raises(ValueError, match=f"got 0 steps and {epochs} epochs"):
      steps(0, epochs)


def test_json_and_back_is_equal_and_what_is_missing_has_its_default():
  config = changed({"data.split_fractions": (0.7, 0.2, 0.1), "train.learning_rate": 3.1e-4})
  written = json.loads(json.dumps(config.to_dict()))
  for missing in ([], ["train", "eval"]):
    for section in missing:
      del written[section]["batch_size"]
    assert config_lib.from_dict(written) == config
    assert config_lib.differences(written, config) == []


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"train": {"optimizer": 3}}, "train.optimizer: expected a section of settings, got 3"),
    ({"train": {"optimizer": None}}, "train.optimizer: expected a section .* got None"),
    ({"model": 3}, "model: expected a section of settings, got 3"),
    ({"model": {"first": 3}}, "model.first: expected a section of settings, got 3"),
    ({"model": {"mixer": []}}, r"model.mixer: expected a section .* got \[\]"),
    ({"model": {"mixer": [{"name": "we"}, 3]}}, "model.mixer.1: expected a section .* got 3"),
    ({"model": {"mixer": [{"name": "we"}, {"a": 1}]}}, "model.mixer.1: expected one of"),
    ({"model": {"boundaries": ["fixed", "none"]}}, "model.boundaries: expected a section"),
    ({"model": {"mixer": {"adjustment": True}}}, "model.mixer: expected one of"),
    ({"train": {"num_epochs": 10**400}}, "train.num_epochs: expected .* finite, got 1000"),
  ],
)
def test_settings_that_cannot_be_read_are_refused(settings, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    config_lib.from_dict(settings)


def test_only_what_changes_no_trained_number_may_differ():
  config = config_lib.default()
  assert config_lib.differences(config, changed({"model.mixer.implementation": "loop"})) == []
  other = changed({"seed": 5, "model.width": 7, "train.grad_clip_norm": 0.25, "data.path": "a.txt"})
  assert config_lib.differences(config, other) == [
    "data.path: '' there, 'a.txt' here",
    "model.width: 512 there, 7 here",
    "seed: 0 there, 5 here",
    "train.grad_clip_norm: 0.5 there, 0.25 here",
  ]
  for key, value, setting in config_lib.walk(config):
    is_free = setting.is_free or key in schema.LENGTH_KEYS
    if value is None or key.endswith(".name") and key != "data.name":
      continue
    others = {bool: not value, tuple: (0.8, 0.1, 0.1), str: "other"}
    other = others.get(setting.value_type, 1 if value != 1 else 2)
    other = next((x for x in setting.choices if x != value), other)
    if setting.value_type is float:
      other = 0.25 if value != 0.25 else 0.5
    expected = [f"{key}: {value!r} there, {sections.get(changed({key: other}), key)!r} here"]
    result = config_lib.differences(config, changed({key: other}))
    assert result == [] if is_free else result == expected, key
  cosine = changed({"train.schedule": "cosine"})
  longer = changed({"train.schedule": "cosine", "train.num_epochs": 61.0})
  assert config_lib.differences(cosine, longer) == ["train.num_epochs: 60.0 there, 61.0 here"]
  assert config_lib.differences(config, cosine) == [
    "train.schedule.min_ratio: None there, 0.0 here",
    "train.schedule.name: 'constant' there, 'cosine' here",
  ]
