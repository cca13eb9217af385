"""The rules between the settings of a run.

The file is long because every rule is here: one place to look for the cause of an error.
"""

import inspect
import math
import numbers
from collections.abc import Mapping

from dpjax import registry
from dpjax.config.sections import (
  check_keys,
  default,
  default_model,
  flatten,
  get,
  is_pooled,
  mixers_in,
  stages_in,
)
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
  "sample.beyond_window": ("slide", "continue", "refuse"),
}
# Sizes above these fit no machine, and float32 counts positions no further.
LARGEST = 2**24
_MOST_LAYERS = 10_000
_LARGEST_ARRAY = 2**40  # numbers


def check(config: ConfigDict, *, limits: bool = True) -> None:
  """Checks that a configuration can run, before anything is compiled.

  Args:
    config: all settings.
    limits: whether to refuse numbers and sizes beyond any machine's, too. False reads the
      runs of versions that had no such limits.

  Raises:
    ValueError: `key: expected ..., got ...`, for the first key that is unknown, has the
      wrong type, or contradicts another.
  """
  check_keys(config, default(), "", limits)
  check_model(config.model)
  _check_choices(config, "data.")
  _check_choices(config, "train.")
  for key in ("train.batch_size", "eval.batch_size", "data.tokenizer_size"):
    _at_most(config, key, LARGEST)
  for key in (
    "train.batch_size",
    "train.accumulate_steps",
    "train.log_every_steps",
    "train.median_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "eval.batch_size",
    "data.tokenizer_size",
  ):
    _at_least(config, key, 1)
  check_seed(config.seed)
  for key in (
    "train.window",
    "train.num_steps",
    "eval.window",
    "eval.stride",
    "eval.max_tokens",
    "train.clip_norm",
    "train.learning_rate",
    "train.patience",
  ):
    _at_least(config, key, 0)
  _check_training(config.train)
  longest = config.model.max_length
  for key in ("train.window", "eval.window"):
    _expect(
      get(config, key) <= longest, key, f"at most model.max_length = {longest}", get(config, key)
    )
  window = config.eval.window or longest
  _expect(
    config.eval.stride <= window, "eval.stride", f"at most the window {window}", config.eval.stride
  )
  rows, parts = config.train.batch_size, config.train.accumulate_steps
  _expect(
    rows % parts == 0, "train.accumulate_steps", f"a divisor of train.batch_size = {rows}", parts
  )
  if limits:
    _check_arrays(config)
    # A level reads 2**k tokens back, which within M tokens are none from 2**k = M on.
    levels = max(1, (longest - (not is_pooled(config.model))).bit_length())
    for key, section in mixers_in(config.model).items():
      _expect(
        (_of_ours(section, "num_levels") or 0) <= levels,
        f"{key}.num_levels",
        f"at most {levels}, which reach over model.max_length = {longest}",
        section.get("num_levels"),
      )
  fractions = config.data.split_fractions
  are_numbers = all(type(fraction) in (int, float) for fraction in fractions)
  _expect(
    are_numbers and len(fractions) == 3 and min(fractions) > 0 and abs(sum(fractions) - 1) < 1e-6,
    "data.split_fractions",
    "three positive numbers with the sum 1",
    fractions,
  )
  most = config.data.max_characters
  are_numbers = all(type(number) is int and number >= 0 for number in most)
  _expect(
    are_numbers and len(most) == 3, "data.max_characters", "three integers of at least 0", most
  )
  language, clean = config.data.language, config.data.clean
  is_isolated = config.data.documents == "isolated"
  _expect(not (is_isolated and clean), "data.clean", "False with data.documents = isolated", clean)
  most = config.eval.max_tokens
  _expect(not (is_isolated and most), "eval.max_tokens", "0 with data.documents = isolated", most)
  _expect(
    bool(language) or not clean,
    "data.language",
    "the language of the text that data.clean is to clean",
    repr(language),
  )
  _expect(
    not language or clean or not config.data.path,
    "data.language",
    "'' with a data.path, unless data.clean is True",
    repr(language),
  )
  steps_in(config.train, "num", steps_per_epoch=1)
  steps_in(config.train, "eval_every", steps_per_epoch=1)
  check_sampling(config.sample, "sample.")


def check_model(model: Mapping) -> None:
  """Checks that a model can be built from its settings.

  Raises:
    ValueError: see `check`.
  """
  config = ConfigDict({"model": dict(model)})
  check_keys(config.model, default_model(), "model.")
  _check_choices(config, "model.")
  for key in ("num_layers", "max_length"):
    _at_least(config, f"model.{key}", 1)
  for key in ("max_length", "vocab_size"):
    _at_most(config, f"model.{key}", LARGEST)
  _at_most(config, "model.num_layers", _MOST_LAYERS)
  for key in ("vocab_size", "init_std", "norm_init_std"):
    _at_least(config, f"model.{key}", 0)
  epsilon = config.model.norm_epsilon
  _expect(epsilon > 0, "model.norm_epsilon", "a number above 0", epsilon)
  for key in ("dropout", "hidden_dropout"):
    rate = config.model[key]
    _expect(0 <= rate < 1, f"model.{key}", "a probability in [0, 1)", rate)
  given = dict(init_std=config.model.init_std, dtype=config.model.dtype)
  for key, section in mixers_in(config.model).items():
    registry.mixers.build(
      section,
      key,
      max_length=config.model.max_length,
      position_dropout=config.model.dropout,
      **given,
    )
  for key, section in stages_in(config.model).items():
    _check_stage(config, key, section)
  size = config.model.vocab_size or math.inf
  for name in ("space_ids", "end_ids"):
    ids = config.model.boundaries.get(name, ())
    _expect(
      max(ids, default=0) < size,
      f"model.boundaries.{name}",
      f"token ids below model.vocab_size = {size}",
      ids,
    )


def _check_stage(config, key: str, stage: Mapping) -> None:
  """Checks the widths and boundaries of one stage of pooling, or of a model without pooling."""
  for name in ("width", "feed_forward_width"):
    _at_least(config, f"{key}.{name}", 1 if key == "model" else 0)
    _at_most(config, f"{key}.{name}", LARGEST)
  for place in ("first", "last"):
    _at_least(config, f"{key}.{place}.num_layers", 1)
    _at_most(config, f"{key}.{place}.num_layers", _MOST_LAYERS)
  for name, value in flatten(stage["boundaries"], f"{key}.boundaries.").items():
    if type(value) is int:
      _at_most(config, name, LARGEST)
  kind = registry.boundaries.build(
    stage["boundaries"],
    f"{key}.boundaries",
    width=stage["width"],
    predictor_width=stage["feed_forward_width"],
    init_std=stage["init_std"],
    dtype=stage["dtype"],
  )
  name = stage["boundaries"]["name"]
  suited = [
    x
    for x in registry.boundaries.names()
    if x == "none" or registry.boundaries.component(x).suits_segments
  ]
  _expect(
    key == "model" or name in suited and not kind.draws_in_evaluation,
    f"{key}.boundaries",
    f"one of {', '.join(suited)} for segments, none of which draws in evaluation",
    name,
  )
  mixers = {}
  if is_pooled(stage):
    mixers = {f"{key}.{x}.mixer": stage[x]["mixer"] for x in ("first", "last")}
  if stage["middle"] is None or None in mixers.values():
    mixers["model.mixer"] = stage["mixer"]
  for name, section in mixers.items():
    heads = _of_ours(section, "num_heads") or 1
    _expect(
      stage["width"] % heads == 0,
      f"{name}.num_heads",
      f"a divisor of {key}.width = {stage['width']}",
      heads,
    )
    _expect(
      _of_ours(section, "rotary_base") is None or stage["width"] // heads % 2 == 0,
      f"{name}.rotary_base",
      "None where a head has an odd number of features",
      f"{stage['width']} // {heads} = {stage['width'] // heads} of them",
    )
  if is_pooled(stage):
    return
  for place, name, usual in (
    ("first", "num_layers", 2),
    ("first", "mixer", None),
    ("last", "num_layers", 2),
    ("last", "mixer", None),
  ):
    value = stage[place][name]
    _expect(
      value == usual,
      f"{key}.{place}.{name}",
      f"{usual} with {key}.boundaries = none",
      getattr(value, "name", value),
    )
  _expect(
    stage["middle"] is None, f"{key}.middle", f"None with {key}.boundaries = none", "a section"
  )


def _of_ours(mixer: Mapping | None, name: str):
  """A setting of a mixer of dpjax; None of another's, where the name may mean anything."""
  if mixer is None or not registry.mixers.component(mixer["name"]).__module__.startswith("dpjax."):
    return None
  return mixer.get(name)


def _check_training(train: ConfigDict) -> None:
  """Checks settings that optimizers and schedules do not check themselves."""
  registry.optimizers.build(train.optimizer, "train.optimizer", learning_rate=1.0)
  registry.schedules.build(
    train.schedule, "train.schedule", peak=1.0, num_steps=train.num_steps or 2**31
  )
  name, rate = train.optimizer.name, train.ema_decay
  _expect(
    train.decay_mask == "all"
    or "mask" in inspect.signature(registry.optimizers.component(name)).parameters,
    "train.decay_mask",
    f"all with train.optimizer = {name}, which takes no mask",
    train.decay_mask,
  )
  _expect(0 <= rate < 1, "train.ema_decay", "a number in [0, 1)", rate)
  # Others may want other ranges.
  is_ours = train.optimizer.name in ("adam", "adamw", "lion", "sgd", "muon")
  for key, value in train.optimizer.items() if is_ours else ():
    if key in ("b1", "b2", "beta", "momentum", "adam_b1", "adam_b2") and value is not None:
      _expect(0 <= value < 1, f"train.optimizer.{key}", "a number in [0, 1)", value)
    elif key in ("eps", "eps_root", "weight_decay") and value is not None:
      _expect(value >= 0, f"train.optimizer.{key}", "at least 0", value)


def check_seed(seed: int) -> None:
  """Checks that JAX can make a random key from a seed.

  Raises:
    ValueError: see `check`.
  """
  _expect(type(seed) is int and 0 <= seed < 2**32, "seed", "an integer in [0, 2**32)", repr(seed))


def check_sampling(sample: Mapping, prefix: str = "") -> None:
  """Checks the settings of a sampler.

  Args:
    sample: length, temperature, top_k, top_p and beyond_window.
    prefix: what messages put before these names.

  Raises:
    ValueError: see `check`.
  """
  for key, is_valid, expected in (
    (
      "length",
      lambda x: _is_whole(x, 1) and x <= LARGEST,
      f"an integer of at least 1 and at most {LARGEST:,}",
    ),
    (
      "temperature",
      lambda x: _is_number(x) and 0 <= x <= registry.LARGEST_FLOAT,
      "a finite number of at least 0 (0 is greedy)",
    ),
    ("top_k", lambda x: _is_whole(x, 0), "an integer of at least 0 (0 is all)"),
    ("top_p", lambda x: _is_number(x) and 0 < x <= 1, "a number in (0, 1]"),
    (
      "beyond_window",
      lambda x: x in CHOICES["sample.beyond_window"],
      f"one of {', '.join(CHOICES['sample.beyond_window'])}",
    ),
  ):
    _expect(is_valid(sample[key]), f"{prefix}{key}", expected, sample[key])


def steps_in(settings: Mapping, name: str, *, steps_per_epoch: int) -> int:
  """Reads the duration `name`, given as `name_steps` or as `name_epochs`.

    {"num_steps": 0, "num_epochs": 1.5}, 100 steps an epoch  ->  150

  Args:
    settings: has both keys; 0 means "not given".
    name: the keys without their unit.
    steps_per_epoch: optimizer steps in one pass over the train split.

  Returns:
    Steps, at least 1.

  Raises:
    ValueError: both units are given, or neither, or one is negative or not finite, or the
      number of steps exceeds 32 bits.
  """
  steps, epochs = settings[f"{name}_steps"], settings[f"{name}_epochs"]
  is_one = min(steps, epochs) >= 0 and (steps > 0) != (epochs > 0)
  if not (is_one and math.isfinite(epochs)):
    raise UserError(
      f"train.{name}_steps, train.{name}_epochs: expected one of them above 0 and the "
      f"other 0, got {steps} steps and {epochs} epochs"
    )
  count = steps or epochs * steps_per_epoch
  _expect(
    count < 2**31, f"train.{name}_{'steps' if steps else 'epochs'}", "fewer than 2**31 steps", count
  )
  return max(1, round(count))


def _check_arrays(config) -> None:
  """Checks that weights and activations are not too large for any machine."""
  model, train = config.model, config.train
  layers, width, hidden = model.num_layers, model.width, model.feed_forward_width
  rows, length = train.batch_size // train.accumulate_steps, model.max_length
  for keys, sizes in (
    ("model.num_layers, model.width, model.feed_forward_width", (layers, width, hidden)),
    (
      "train.batch_size, train.window, model.width, model.feed_forward_width",
      (rows, train.window or length, max(width, hidden)),
    ),
    (
      "eval.batch_size, eval.window, model.width, model.feed_forward_width",
      (config.eval.batch_size, config.eval.window or length, max(width, hidden)),
    ),
  ):
    _expect(
      math.prod(sizes) <= _LARGEST_ARRAY,
      keys,
      f"at most {_LARGEST_ARRAY:,} numbers in an array of their sizes",
      " x ".join(f"{size:,}" for size in sizes),
    )


def _check_choices(config, section: str) -> None:
  for key in CHOICES:
    if key.startswith(section):
      check_choice(key, get(config, key))


def check_choice(key: str, value) -> None:
  """Checks that a value is one of a setting's `CHOICES`.

  Raises:
    ValueError: see `check`.
  """
  if value not in CHOICES[key]:
    raise unknown(key, CHOICES[key], value)


def _is_whole(value, least: int) -> bool:
  return type(value) is int and value >= least


def _is_number(value) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _at_least(config, key: str, least: int) -> None:
  _expect(get(config, key) >= least, key, f"at least {least}", get(config, key))


def _at_most(config, key: str, most: int) -> None:
  _expect(get(config, key) <= most, key, f"at most {most:,}", get(config, key))


def _expect(is_true, key: str, expected: str, got) -> None:
  if not is_true:
    raise UserError(f"{key}: expected {expected}, got {got}")
