"""The rules between the settings, and what a configuration is read back from."""

import json

import pytest

from dpjax import config as config_lib


def changed(**settings):
  """The default configuration with `section__key=value` changed, whatever its type."""
  config = config_lib.default()
  for name, value in settings.items():
    section = config
    *parents, key = name.split("__")
    for parent in parents:
      section = section[parent]
    with section.unlocked(), section.ignore_type():
      section[key] = value
  return config


def test_the_default_is_valid():
  config_lib.check(config_lib.default())


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(model__layers=3), "model.layers: .* the nearest known is model.num_layers"),
    (dict(seeds=3), "seeds: expected a known setting, .* nearest known is seed"),
    (dict(model=3), "model: expected a known setting"),
    (dict(train__batch_size=2.5), "train.batch_size: expected a value of type int, got 2.5"),
    (dict(train__batch_size=True), "train.batch_size: expected a value of type int"),
    (dict(train__learning_rate="fast"), "train.learning_rate: .* type float, got 'fast'"),
    (dict(data__lower_text=1), "data.lower_text: expected a value of type bool, got 1"),
    (dict(model__mixer=None), "model.mixer: expected a value of type str, got None"),
    (dict(model__mixer="dispacher"), "model.mixer: .* dispacher; did you mean dispatcher?"),
    (dict(model__norm="none"), "model.norm: expected one of post, pre, got none"),
    (dict(model__positions="fixed"), "model.positions: expected one of sinusoidal, learned"),
    (dict(model__activation="tanh"), "model.activation: expected one of relu, gelu"),
    (dict(model__dtype="float16"), "model.dtype: expected one of float32, bfloat16"),
    (dict(train__optimizer="sgd"), "train.optimizer: expected one of adam, adamw, got sgd"),
    (dict(train__schedule="linear"), "train.schedule: expected one of constant, cosine"),
    (dict(train__parameters="split"), "train.parameters: .* replicated, sharded, got split"),
    (dict(model__num_layers=0), "model.num_layers: expected at least 1, got 0"),
    (dict(model__width=0), "model.width: expected at least 1"),
    (dict(model__feed_forward_width=0), "model.feed_forward_width: expected at least 1"),
    (dict(model__num_heads=0), "model.num_heads: expected at least 1, got 0"),
    (dict(model__max_length=0), "model.max_length: expected at least 1, got 0"),
    (dict(model__vocab_size=-1), "model.vocab_size: expected at least 0, got -1"),
    (dict(model__num_levels=-1), "model.num_levels: expected at least 0, got -1"),
    (dict(model__width=20, model__num_heads=3), "model.num_heads: .* model.width = 20, got 3"),
    (dict(model__dropout=1.0), r"model.dropout: expected a probability in \[0, 1\), got 1"),
    (dict(model__hidden_dropout=-0.1), "model.hidden_dropout: expected a probability"),
    (dict(model__mixer_dropout=float("nan")), "model.mixer_dropout: expected a probab"),
    (dict(data__split_fractions=(0.5, 0.5)), "data.split_fractions: expected three positive"),
    (dict(data__split_fractions=(0.5, 0.5, 0.0)), "data.split_fractions: expected three"),
    (dict(data__split_fractions=(0.5, 0.5, 0.1)), "data.split_fractions: expected three"),
    (dict(data__split_fractions=("a", "b", "c")), "data.split_fractions: expected three"),
    (dict(data__tokenizer_size=0), "data.tokenizer_size: expected at least 1, got 0"),
    (dict(train__batch_size=0), "train.batch_size: expected at least 1, got 0"),
    (dict(train__accumulate_steps=0), "train.accumulate_steps: expected at least 1"),
    (dict(train__accumulate_steps=3), "train.accumulate_steps: .* train.batch_size = 20, got 3"),
    (dict(train__log_every_steps=0), "train.log_every_steps: expected at least 1"),
    (dict(train__checkpoint_every_steps=0), "train.checkpoint_every_steps: .* at least 1"),
    (dict(train__keep_checkpoints=0), "train.keep_checkpoints: expected at least 1"),
    (dict(train__window=-1), "train.window: expected at least 0, got -1"),
    (dict(train__window=513), "train.window: expected at most model.max_length = 512, got 513"),
    (dict(train__num_steps=-1), "train.num_steps: expected at least 0, got -1"),
    (dict(train__warmup_steps=-1), "train.warmup_steps: expected at least 0"),
    (dict(train__clip_norm=-0.5), "train.clip_norm: expected at least 0, got -0.5"),
    (dict(train__weight_decay=-0.1), "train.weight_decay: expected at least 0"),
    (dict(train__learning_rate=-1e-3), "train.learning_rate: expected at least 0"),
    (dict(train__learning_rate=float("nan")), "train.learning_rate: expected at least 0, got n"),
    (dict(train__eps=-1e-8), "train.eps: expected at least 0"),
    (dict(train__b1=1.0), r"train.b1: expected a number in \[0, 1\), got 1.0"),
    (dict(train__b2=-0.1), r"train.b2: expected a number in \[0, 1\), got -0.1"),
    (dict(train__num_steps=5), "train.num_steps, train.num_epochs: .* got 5 steps and 60.0"),
    (dict(train__eval_every_steps=5), "train.eval_every_steps, train.eval_every_epochs: exp"),
    (dict(eval__window=513), "eval.window: expected at most model.max_length = 512, got 513"),
    (dict(eval__window=-1), "eval.window: expected at least 0, got -1"),
    (dict(eval__stride=-1), "eval.stride: expected at least 0, got -1"),
    (dict(eval__stride=513), "eval.stride: expected at most the window 512, got 513"),
    (dict(eval__window=9, eval__stride=10), "eval.stride: expected at most the window 9, got 10"),
    (dict(eval__batch_size=0), "eval.batch_size: expected at least 1, got 0"),
    (dict(seed=-1), "seed: expected at least 0, got -1"),
    (dict(sample__length=0), "sample.length: expected at least 1, got 0"),
  ],
)
def test_what_cannot_run_is_refused(settings, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    config_lib.check(changed(**settings))


def test_a_missing_setting_is_refused():
  config = config_lib.default()
  del config.model["width"]
  with pytest.raises(ValueError, match="^model.width: expected a value, got none"):
    config_lib.check(config)
  with pytest.raises(ValueError, match="^model.width: expected a value, got none"):
    config_lib.check_model(config.model)


def test_a_model_is_checked_by_itself():
  config_lib.check_model(config_lib.default_model())
  config_lib.check_model(dict(config_lib.default_model()))
  model = {**config_lib.default_model(), "num_heads": 7}
  with pytest.raises(ValueError, match="^model.num_heads: .* divisor of model.width = 512"):
    config_lib.check_model(model)
  with pytest.raises(ValueError, match="^model.depth: .* the nearest known is model.width"):
    config_lib.check_model({**config_lib.default_model(), "depth": 7})


@pytest.mark.parametrize(
  ("name", "value", "expected"),
  [
    ("length", 0, "at least 1"),
    ("temperature", -0.1, r"at least 0 \(0 is greedy\)"),
    ("temperature", float("nan"), "at least 0"),
    ("top_k", -1, r"at least 0 \(0 is all\)"),
    ("top_p", 0.0, r"a number in \(0, 1\]"),
    ("top_p", 1.01, r"a number in \(0, 1\]"),
  ],
)
def test_sampling_is_checked(name, value, expected):
  sample = dict(length=1, temperature=0.0, top_k=0, top_p=1.0)
  config_lib.check_sampling(sample)
  with pytest.raises(ValueError, match=f"^sample.{name}: expected {expected}.*, got {value}"):
    config_lib.check_sampling({**sample, name: value})


def test_durations_have_one_unit():
  def steps(num_steps, num_epochs):
    settings = dict(num_steps=num_steps, num_epochs=num_epochs)
    return config_lib.steps_in(settings, "num", steps_per_epoch=100)

  assert steps(0, 1.5) == 150
  assert steps(37, 0.0) == 37
  assert steps(0, 0.001) == 1  # never none at all
  for both in ((3, 1.0), (0, 0.0), (-1, 0.0), (-1, 2.0), (0, -2.0), (3, -1.0)):
    with pytest.raises(ValueError, match="^train.num_steps, train.num_epochs: expected one"):
      steps(*both)
  for epochs in (float("inf"), float("nan")):
    with pytest.raises(ValueError, match=f"got 0 steps and {epochs} epochs"):
      steps(0, epochs)


def test_json_and_back_is_equal():
  config = changed(data__split_fractions=(0.7, 0.2, 0.1), train__learning_rate=3.1e-4)
  back = config_lib.from_dict(json.loads(json.dumps(config.to_dict())))
  assert back == config and back.data.split_fractions == (0.7, 0.2, 0.1)
  assert config_lib.differences(json.loads(json.dumps(config.to_dict())), config) == []


def test_settings_added_later_take_their_defaults():
  config = changed(train__batch_size=30)
  old = config.to_dict()
  del old["model"]["remat"], old["train"]["eps"], old["eval"]
  assert config_lib.from_dict(old) == config
  assert config_lib.differences(old, config) == []
  assert config_lib.differences(old, changed(train__batch_size=30, train__eps=1e-3)) == [
    "train.eps: 1e-08 there, 0.001 here"
  ]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"train": {"batchsize": 3}}, "train.batchsize: .* nearest known is train.batch_size"),
    ({"train": {"batch_size": 2.5}}, "train.batch_size: expected a value of type int, got 2"),
    ({"train": {"optimizer": 3}}, "train.optimizer: expected a value of type str, got 3"),
    ({"train": {"optimizer": None}}, "train.optimizer: expected a value of type str"),
    ({"train": {"batch_size": -20}}, "train.batch_size: expected at least 1, got -20"),
    ({"model": 3}, "model: expected a known setting"),
  ],
)
def test_settings_that_cannot_be_read_are_refused(settings, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    config_lib.from_dict(settings)


def test_only_what_changes_no_trained_number_may_differ():
  config = config_lib.default()
  free = changed(
    train__num_steps=7,
    train__num_epochs=0.0,
    train__log_every_steps=3,
    train__checkpoint_every_steps=9,
    train__keep_checkpoints=5,
    train__parameters="sharded",
    sample__prompt="A",
    sample__top_k=3,
  )
  assert config_lib.differences(config, free) == []
  other = changed(seed=5, model__width=7, train__clip_norm=0.25, data__path="a.txt")
  assert config_lib.differences(config, other) == [
    "data.path: '' there, 'a.txt' here",
    "model.width: 512 there, 7 here",
    "seed: 0 there, 5 here",
    "train.clip_norm: 0.5 there, 0.25 here",
  ]
  for key in config_lib.known_keys():
    section, _, name = key.rpartition(".")
    new = config_lib.default().to_dict()
    (new[section] if section else new)[name] = "other"
    found = config_lib.differences(config, new)
    is_free = key.startswith(config_lib.FREE_KEYS + config_lib.LENGTH_KEYS)
    assert len(found) == (not is_free), key


def test_a_schedule_that_ends_with_the_run_fixes_its_length():
  there = changed(train__schedule="cosine")
  here = changed(train__schedule="cosine", train__num_epochs=61.0)
  assert config_lib.differences(there, here) == [
    "train.num_epochs: 60.0 there, 61.0 here"
  ]


def test_an_unknown_key_is_answered_with_the_nearest():
  error = config_lib.unknown_key("model.widht", config_lib.known_keys())
  assert str(error) == (
    "model.widht: expected a known setting, got an unknown one; the nearest known is "
    "model.width"
  )
  assert "nearest" not in str(config_lib.unknown_key("a", []))


def test_variants():
  config = config_lib.default()
  assert config_lib.apply_variant(config, "") == config_lib.default()
  assert config_lib.apply_variant(config, "tiny") is config
  config_lib.check(config)
  assert config.model.width == 32 and config.train.num_steps == 50
  with pytest.raises(ValueError, match="expected the variant tiny, or none, got tinny"):
    config_lib.apply_variant(config, "tinny")
