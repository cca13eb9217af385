"""The rules between the settings of a run: one place to look for the cause of an error."""

import inspect
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from dpjax import registry
from dpjax.config import sections
from dpjax.errors import UserError, unknown
from dpjax.registry import ConfigDict

CHOICES = {
  "data.documents": ("joined", "isolated"),
  "model.norm": ("post", "pre"),
  "model.norm_kind": ("layer_norm", "rms_norm"),
  "model.positions": ("sinusoidal", "learned", "none"),
  "model.activation": ("relu", "gelu", "swiglu"),
  "model.dtype": ("float32", "bfloat16"),
  "train.batches": ("contiguous", "random_windows", "shuffled_windows"),
  "train.decay_mask": ("all", "matrices"),
  "train.parameters": ("replicated", "sharded"),
  "train.products": ("float32", "bfloat16"),
  "sample.beyond_window": ("slide", "continue", "refuse"),
}
_AT_LEAST_1 = """model.num_layers model.max_length data.tokenizer_size train.batch_size
  train.accumulate_steps train.log_every_steps
  train.checkpoint_every_steps train.keep_checkpoints eval.batch_size""".split()
_AT_LEAST_0 = """model.vocab_size model.init_std model.norm_init_std train.window train.num_steps
  train.clip_norm train.learning_rate train.patience eval.window eval.stride
  eval.max_tokens""".split()


def check(config: ConfigDict) -> None:
  """A `UserError` for the first key that is unknown, has a wrong type, or contradicts another."""
  sections.check_keys(config, sections.default(), "")
  check_model(config.model)
  for section in ("data.", "train.", "eval."):
    _check_ranges(config, section)
  check_seed(config.seed)
  _check_training(config.train)
  longest = config.model.max_length
  # A level reads 2**k tokens back, which within M tokens are none from 2**k = M on.
  levels = max(1, (longest - (not sections.is_pooled(config.model))).bit_length())
  for key, section in sections.mixers_in(config.model).items():
    found, expected = section.get("num_levels"), f"at most {levels}, which reach over the window"
    is_ours = registry.mixers.component(section["name"]).__module__.startswith("dpjax.")
    _expect(not is_ours or (found or 1) <= levels, f"{key}.num_levels", expected, found)
  for key in ("train.window", "eval.window"):
    window = sections.get(config, key)
    _expect(window <= longest, key, f"at most model.max_length = {longest}", window)
  window, stride = config.eval.window or longest, config.eval.stride
  _expect(stride <= window, "eval.stride", f"at most the window {window}", stride)
  _check_data(config.data)
  mixture, is_valid = config.data.mixture, config.train.batches == "random_windows"
  expected = "'' unless train.batches = random_windows"
  _expect(is_valid or not mixture, "data.mixture", expected, mixture)
  most = config.eval.max_tokens
  is_isolated = config.data.documents == "isolated"
  _expect(not (is_isolated and most), "eval.max_tokens", "0 with data.documents = isolated", most)
  check_sampling(config.sample, "sample.")


def check_model(model: Mapping) -> None:
  """Checks the settings of a model, as `check`."""
  config = ConfigDict({"model": dict(model)})
  sections.check_keys(config.model, sections.default_model(), "model.")
  _check_ranges(config, "model.")
  epsilon = config.model.norm_epsilon
  _expect(epsilon > 0, "model.norm_epsilon", "a number above 0", epsilon)
  for key in ("dropout", "hidden_dropout"):
    rate = config.model[key]
    _expect(0 <= rate < 1, f"model.{key}", "a probability in [0, 1)", rate)
  given = dict(init_std=config.model.init_std, dtype=config.model.dtype)
  given |= dict(max_length=config.model.max_length, position_dropout=config.model.dropout)
  for key, section in sections.mixers_in(config.model).items():
    registry.mixers.build(section, key, **given)
  for key, section in sections.stages_in(config.model).items():
    _check_stage(key, section)
  check_ids(config.model)


def check_ids(model: Mapping) -> None:
  """Checks that the vocabulary has the tokens that boundaries know, as `check`."""
  size = model["vocab_size"] or math.inf
  for name in ("space_ids", "end_ids"):
    ids = model["boundaries"].get(name, ())
    expected = f"token ids below model.vocab_size = {size}"
    _expect(max(ids, default=0) < size, f"model.boundaries.{name}", expected, ids)


def _check_stage(key: str, stage: Mapping) -> None:
  """Checks one stage of pooling, or a model without pooling."""
  for name in ("width", "feed_forward_width"):
    least = 1 if key == "model" else 0
    _expect(stage[name] >= least, f"{key}.{name}", f"at least {least}", stage[name])
  for place in ("first", "last"):
    number = stage[place]["num_layers"]
    _expect(number >= 1, f"{key}.{place}.num_layers", "at least 1", number)
  name, known = stage["boundaries"]["name"], registry.boundaries
  given = {name: stage[name] for name in ("width", "init_std", "dtype")}
  given["predictor_width"] = stage["feed_forward_width"]
  kind = known.build(stage["boundaries"], f"{key}.boundaries", **given)
  suited = [x for x in known.names() if x == "none" or known.component(x).suits_segments]
  expected = f"one of {', '.join(suited)} for segments, none of which draws in evaluation"
  is_valid = key == "model" or name in suited and not kind.samples_in_eval
  _expect(is_valid, f"{key}.boundaries", expected, name)
  is_pooled = sections.is_pooled(stage)
  mixers = {f"{key}.{x}.mixer": stage[x]["mixer"] for x in ("first", "last") if is_pooled}
  if stage["middle"] is None or None in mixers.values():
    mixers["model.mixer"] = stage["mixer"]
  for name, mixer in mixers.items():
    for own, section in registry.in_turn(name, mixer).items():
      _check_mixer(own, section, f"{key}.width", stage["width"])
  if is_pooled:
    return
  unused = {f"{x}.num_layers": (stage[x]["num_layers"], 2) for x in ("first", "last")}
  unused |= {f"{x}.mixer": (stage[x]["mixer"], None) for x in ("first", "last")}
  for name, (value, usual) in unused.items():
    expected = f"{usual} with {key}.boundaries = none"
    got = value if value is None or type(value) is int else registry.mixer_names(value)
    _expect(value == usual, f"{key}.{name}", expected, got)
  expected = f"None with {key}.boundaries = none"
  _expect(stage["middle"] is None, f"{key}.middle", expected, "a section")


def _check_mixer(key: str, mixer: Mapping, width_key: str, width: int) -> None:
  if not registry.mixers.component(mixer["name"]).__module__.startswith("dpjax."):
    return  # Of another's, these names may mean anything.
  heads = mixer.get("num_heads") or 1
  _expect(width % heads == 0, f"{key}.num_heads", f"a divisor of {width_key} = {width}", heads)
  expected = "None where a head has an odd number of features"
  is_valid = mixer.get("rotary_base") is None or width // heads % 2 == 0
  got = f"{width} // {heads} = {width // heads} of them"
  _expect(is_valid, f"{key}.rotary_base", expected, got)


def _check_training(train: ConfigDict) -> None:
  for name in ("num", "eval_every"):
    steps_in(train, name, steps_per_epoch=1)
  rows, parts = train.batch_size, train.accumulate_steps
  expected = f"a divisor of train.batch_size = {rows}"
  _expect(rows % parts == 0, "train.accumulate_steps", expected, parts)
  registry.optimizers.build(train.optimizer, "train.optimizer", learning_rate=1.0)
  num_steps = train.num_steps or 2**31
  registry.schedules.build(train.schedule, "train.schedule", peak=1.0, num_steps=num_steps)
  name, rate = train.optimizer.name, train.ema_decay
  known = inspect.signature(registry.optimizers.component(name)).parameters
  expected = f"all with train.optimizer = {name}, which takes no mask"
  is_valid = train.decay_mask == "all" or "mask" in known
  _expect(is_valid, "train.decay_mask", expected, train.decay_mask)
  _expect(0 <= rate < 1, "train.ema_decay", "a number in [0, 1)", rate)
  if name not in ("adam", "adamw", "lion", "sgd", "muon"):
    return  # Others may want other ranges.
  for key, value in train.optimizer.items():
    if key in ("b1", "b2", "beta", "momentum", "adam_b1", "adam_b2") and value is not None:
      _expect(0 <= value < 1, f"train.optimizer.{key}", "a number in [0, 1)", value)
    elif key in ("eps", "eps_root", "weight_decay") and value is not None:
      _expect(value >= 0, f"train.optimizer.{key}", "at least 0", value)


def _check_data(data: ConfigDict) -> None:
  fractions = data.split_fractions
  is_valid = len(fractions) == 3 and all(type(x) in (int, float) and x > 0 for x in fractions)
  is_valid = is_valid and abs(sum(fractions) - 1) < 1e-6
  _expect(is_valid, "data.split_fractions", "three positive numbers with the sum 1", fractions)


def idle_mixers(model: Mapping) -> dict[str, str]:
  """The mixers that no layer has, by stack, where these are more than the layers."""
  stacks = {"model": (model["mixer"], model["num_layers"])}
  for key, stage in sections.stages_in(model).items():
    for x in ("first", "last") if sections.is_pooled(stage) else ():
      stacks[f"{key}.{x}"] = stage[x]["mixer"] or stage["mixer"], stage[x]["num_layers"]
  idle = {
    key: registry.mixer_names(mixer).split(",")[number:] for key, (mixer, number) in stacks.items()
  }
  return {key: ", ".join(names) for key, names in idle.items() if names}


def check_seed(seed: int) -> None:
  """Checks that JAX can make a random key from a seed, as `check`."""
  _expect(type(seed) is int and 0 <= seed < 2**32, "seed", "an integer in [0, 2**32)", repr(seed))


def check_sampling(sample: Mapping, prefix: str = "") -> None:
  """Checks `config.sample`, as `check`; messages begin with `prefix`."""
  most = registry.LARGEST_FLOAT
  for name, kind, is_valid, expected in (
    ("length", int, lambda x: 1 <= x < 2**31, "an integer of at least 1 below 2**31"),
    ("temperature", Real, lambda x: 0 <= x <= most, "a finite number of at least 0 (0 is greedy)"),
    ("top_k", int, lambda x: x >= 0, "an integer of at least 0 (0 is all)"),
    ("top_p", Real, lambda x: 0 < x <= 1, "a number in (0, 1]"),
  ):
    x = sample[name]
    is_number = isinstance(x, kind) and not isinstance(x, bool)
    _expect(is_number and is_valid(x), f"{prefix}{name}", expected, x)
  check_choice("sample.beyond_window", sample["beyond_window"], f"{prefix}beyond_window")


def steps_in(settings: Mapping, name: str, *, steps_per_epoch: int) -> int:
  """The duration given as `name_steps` or as `name_epochs`, whichever is not 0, in steps.

    {"num_steps": 0, "num_epochs": 1.5}, 100 steps an epoch  ->  150

  A `UserError` unless exactly one is given, and the steps fit 32 bits.
  """
  steps, epochs = settings[f"{name}_steps"], settings[f"{name}_epochs"]
  is_one = min(steps, epochs) >= 0 and (steps > 0) != (epochs > 0)
  if not (is_one and math.isfinite(epochs)):
    raise UserError(
      f"train.{name}_steps, train.{name}_epochs: expected one of them above 0 and the "
      f"other 0, got {steps} steps and {epochs} epochs"
    )
  count, key = steps or epochs * steps_per_epoch, f"train.{name}_{'steps' if steps else 'epochs'}"
  _expect(count < 2**31, key, "fewer than 2**31 steps", count)
  return max(1, round(count))


def check_choice(key: str, value, shown: str = "") -> None:
  """Checks that a value is one of a setting's `CHOICES`; messages name `shown`."""
  if value not in CHOICES[key]:
    raise unknown(shown or key, CHOICES[key], value)


def _check_ranges(config, section: str) -> None:
  for key in CHOICES:
    if key.startswith(section):
      check_choice(key, sections.get(config, key))
  for least, keys in enumerate((_AT_LEAST_0, _AT_LEAST_1)):
    for key in keys:
      if key.startswith(section):
        value = sections.get(config, key)
        _expect(value >= least, key, f"at least {least}", value)


def _expect(is_true: Any, key: str, expected: str, got: Any) -> None:
  if not is_true:
    raise UserError(f"{key}: expected {expected}, got {got}")
