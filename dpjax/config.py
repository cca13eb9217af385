"""The settings of a run: every key with its default, and the rules between them.

A file of `configs/` starts from `default()` and changes what its experiment needs.
Durations carry their unit in the key; of two units of one duration, one is set.
"""

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpjax import old_settings, registry
from dpjax.errors import UserError
from dpjax.registry import ConfigDict

CHOICES = {
  "model.norm": ("post", "pre"),
  "model.positions": ("sinusoidal", "learned", "none"),
  "model.activation": ("relu", "gelu"),
  "model.dtype": ("float32", "bfloat16"),
  "train.batches": ("contiguous", "random_windows", "shuffled_windows"),
  "train.parameters": ("replicated", "sharded"),
  "sample.beyond_window": ("slide", "continue", "refuse"),
}
# The sections that are a component, with its settings.
COMPONENTS = {
  "model.mixer": registry.mixers,
  "model.first.mixer": registry.mixers,
  "model.last.mixer": registry.mixers,
  "model.boundaries": registry.boundaries,
  "train.optimizer": registry.optimizers,
  "train.schedule": registry.schedules,
}
# Sections that may be None: mixers that are the model's, and no middle of its own.
OPTIONAL = ("model.first.mixer", "model.last.mixer", "model.middle")
# Settings that may change on resume: they change the order of sums and the random numbers
# of dropout at most (in bfloat16 an implementation also rounds in other places), and which
# checkpoint is the best. The length may change only where the schedule does not depend on
# it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
FREE_KEYS = (
  "data.data_dir",
  "data.manual_dir",
  "model.remat",
  "model.scan_layers",
  "train.accumulate_steps",
  "train.checkpoint_every_steps",
  "train.eval_every_",
  "train.keep_checkpoints",
  "train.log_every_steps",
  "train.median_every_steps",
  "train.parameters",
  "eval.",
  "sample.",
)
FREE_NAMES = ("implementation", "num_capacities")  # of components
# Sizes above these fit no machine, and float32 counts positions no further.
LARGEST = 2**24
_MOST_LAYERS = 10_000
_LARGEST_ARRAY = 2**40  # numbers


def mixer(name: str, **settings) -> ConfigDict:
  """The section of a token mixer: its name, and all of its settings.

    config.model.mixer = dpjax.config.mixer("dispatcher", num_levels=7)

  Raises:
    UserError: the name or a setting is unknown, or a value is of a wrong type.
  """
  return registry.mixers.section(name, **settings)


def boundaries(name: str, **settings) -> ConfigDict:
  """The section of a kind of boundaries, as `mixer`; "none" is a model without pooling."""
  return registry.boundaries.section(name, **settings)


def optimizer(name: str, **settings) -> ConfigDict:
  """The section of an optimizer, as `mixer`."""
  return registry.optimizers.section(name, **settings)


def schedule(name: str, **settings) -> ConfigDict:
  """The section of a learning rate schedule, as `mixer`."""
  return registry.schedules.section(name, **settings)


def middle(kind: Any = "none", *, width: int = 0, **settings) -> ConfigDict:
  """The section of a middle with a width of its own, or that pools segments again.

    config.model.boundaries = dpjax.config.boundaries("routing", factor=3.0)
    config.model.middle = dpjax.config.middle(
      dpjax.config.boundaries("routing", factor=2.0), width=512
    )

  `model.mixer` and `model.num_layers` are those of the innermost blocks.

  Args:
    kind: a section of `boundaries`, or a name; "none": it does not pool.
    width: D; 0: that of the tokens, and so the other settings.
    **settings: `feed_forward_width`, of all its blocks, and another `middle`.

  Raises:
    UserError: a setting is unknown, or of a wrong type.
  """
  section = ConfigDict({"width": 0, "feed_forward_width": 0})
  _add_pooling(section)
  if isinstance(kind, str):
    kind = boundaries(kind)
  given = {"boundaries": kind, "width": width, **settings}
  _check_keys({**section, **given}, section, "model.middle.")
  for name, value in given.items():
    section[name] = value
  return section


def _add_pooling(section: ConfigDict) -> None:
  section.boundaries = boundaries("none")
  for name in ("first", "last"):
    stack = section[name] = ConfigDict()
    stack.num_layers = 2
    stack.mixer = None  # None: model.mixer
  section.middle = None  # None: num_layers blocks of the tokens' width; or `middle`


def default_model() -> ConfigDict:
  """The settings of a model: the Dispatcher of its paper, Sec. 3.3."""
  model = ConfigDict()
  model.mixer = mixer("dispatcher")
  model.vocab_size = 0  # V; 0: the tokenizer's
  model.num_layers = 6
  model.width = 512  # D
  model.feed_forward_width = 512
  model.max_length = 512  # longest T, tokens; l of the Extractors
  model.norm = "post"  # LayerNorm after ("post") or before ("pre") each branch
  model.positions = "sinusoidal"  # or "learned"; "none": neither they nor a scale
  model.activation = "relu"  # or "gelu" (by erf)
  model.dropout = 0.0  # of embeddings and of each branch
  model.hidden_dropout = 0.0  # within the feed-forward network
  model.init_std = 0.0  # weights ~ N(0, init_std**2), biases 0; 0: PyTorch's defaults
  model.norm_init_std = 0.0  # gains of the norms ~ N(1, norm_init_std**2)
  model.scan_layers = True  # compile one layer and loop, or compile each
  model.remat = False  # recompute each layer in the gradient: less memory
  model.dtype = "float32"  # of the computation; parameters are float32
  # Token pooling: num_layers blocks on segments, between blocks on tokens.
  _add_pooling(model)
  return model


def default() -> ConfigDict:
  """Every setting of a run, with the values of the Dispatcher paper where it has any."""
  config = ConfigDict()
  config.seed = 0
  config.model = default_model()

  data = config.data = ConfigDict()
  data.name = "python_manual"  # a corpus by its name: `python -m dpjax.data list`
  data.language = ""  # of a corpus that has several, and of `clean`
  data.data_dir = "data"  # of downloads, texts and tokens, shared by all runs
  data.manual_dir = ""  # files downloaded by hand; "": data_dir/manual
  data.clean = False  # as text8: the language's letters in lower case, digits spelt out
  data.max_characters = (0, 0, 0)  # of train, valid, test, once clean; 0: all
  data.path = ""  # or a text file, or a folder with train/valid/test.txt; wins over name
  data.split_fractions = (0.9, 0.05, 0.05)  # of a single file: train, valid, test
  data.tokenizer = "characters"
  # A vocabulary to load, or "bert_base_cased", "gpt2"; "": train one on the train split.
  data.tokenizer_file = ""
  data.tokenizer_size = 8000  # entries of a vocabulary that is trained
  data.lower_text = False  # WordPiece: lower-case the text first
  data.lower_pieces = False  # WordPiece: lower-case the pieces
  data.restrict_vocabulary = False  # WordPiece: only the train split's pieces

  train = config.train = ConfigDict()
  # In order; or "random_windows", at any offset; or "shuffled_windows", of rolled rows.
  train.batches = "contiguous"
  train.batch_size = 20  # rows of all devices together
  train.window = 0  # tokens a row; 0: model.max_length
  train.initial_run = ""  # the folder of a run whose best parameters to begin with
  train.accumulate_steps = 1  # parts of a batch, one after the other: less memory
  train.num_steps = 0
  train.num_epochs = 60.0
  train.optimizer = optimizer("adam")
  train.learning_rate = 1e-4  # the peak of the schedule
  train.schedule = schedule("constant")
  train.clip_norm = 0.5  # of the gradient's global norm; 0: no clipping
  train.log_every_steps = 20
  train.median_every_steps = 2000  # between reports of the median loss of as many
  train.eval_every_steps = 0
  train.eval_every_epochs = 1.0
  train.checkpoint_every_steps = 500
  train.keep_checkpoints = 2  # of the last; the best is kept beside them
  train.parameters = "replicated"  # or "sharded" over the devices

  config.eval = ConfigDict()
  config.eval.window = 0  # tokens; 0: model.max_length
  config.eval.stride = 0  # new tokens a window; 0: the window, so without context
  config.eval.batch_size = 10

  sample = config.sample = ConfigDict()
  sample.prompt = ""  # shown, continued, at the end of a run; "": nothing is
  sample.length = 300  # new tokens
  sample.temperature = 1.0
  sample.top_k = 0  # 0: all
  sample.top_p = 1.0
  sample.beyond_window = "slide"  # or "continue", "refuse": `dpjax.generation` has what
  return config


def apply_variant(config: ConfigDict, variant: str) -> ConfigDict:
  """Makes an experiment's `tiny` variant, a minute's work on a CPU; "" leaves it whole.

  Args:
    config: changed in place.
    variant: what stood after the colon in --config=FILE:VARIANT.

  Returns:
    `config`.

  Raises:
    ValueError: the variant is neither "tiny" nor "".
  """
  if variant not in ("", "tiny"):
    raise UserError(f"expected the variant tiny, or none, got {variant}")
  if variant:
    config.model.update(dict(num_layers=2, width=32, feed_forward_width=64, max_length=64))
    config.train.update(
      dict(
        batch_size=8,
        num_steps=50,
        num_epochs=0.0,
        eval_every_steps=25,
        eval_every_epochs=0.0,
        learning_rate=1e-3,
      )
    )
    if "warmup_steps" in config.train.schedule:
      config.train.schedule.warmup_steps = 5
    config.sample.length = 20
  return config


def check(config: ConfigDict, *, limits: bool = True) -> None:
  """Refuses a configuration that cannot run, before anything is compiled.

  Args:
    config: all settings.
    limits: whether to refuse numbers and sizes beyond any machine's, too. An earlier
      version did not, and its runs are to be read.

  Raises:
    ValueError: `key: expected ..., got ...`, for the first key that is unknown, of the
      wrong type, or at odds with another.
  """
  _check_keys(config, default(), "", limits)
  check_model(config.model)
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
    "train.clip_norm",
    "train.learning_rate",
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
        (section.get("num_levels") or 0) <= levels,
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
  """Refuses the settings of a model that cannot be built.

  Raises:
    ValueError: as `check`.
  """
  config = ConfigDict({"model": dict(model)})
  _check_keys(config.model, default_model(), "model.")
  _check_choices(config, "model.")
  for key in ("num_layers", "max_length"):
    _at_least(config, f"model.{key}", 1)
  for key in ("max_length", "vocab_size"):
    _at_most(config, f"model.{key}", LARGEST)
  _at_most(config, "model.num_layers", _MOST_LAYERS)
  for key in ("vocab_size", "init_std", "norm_init_std"):
    _at_least(config, f"model.{key}", 0)
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
  """The widths of one stage of pooling, or of the model without, and its boundaries."""
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
    heads = section.get("num_heads", 1) if section else 1
    _expect(
      stage["width"] % heads == 0,
      f"{name}.num_heads",
      f"a divisor of {key}.width = {stage['width']}",
      heads,
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


def _check_training(train: ConfigDict) -> None:
  """What optimizers and schedules do not refuse by themselves."""
  registry.optimizers.build(train.optimizer, "train.optimizer", learning_rate=1.0)
  registry.schedules.build(
    train.schedule, "train.schedule", peak=1.0, num_steps=train.num_steps or 2**31
  )
  # Others may want other ranges.
  is_ours = train.optimizer.name in ("adam", "adamw", "lion", "sgd", "muon")
  for key, value in train.optimizer.items() if is_ours else ():
    if key in ("b1", "b2", "beta", "momentum", "adam_b1", "adam_b2") and value is not None:
      _expect(0 <= value < 1, f"train.optimizer.{key}", "a number in [0, 1)", value)
    elif key in ("eps", "eps_root", "weight_decay") and value is not None:
      _expect(value >= 0, f"train.optimizer.{key}", "at least 0", value)


def is_pooled(model: Mapping) -> bool:
  """Whether a model pools its tokens."""
  return model["boundaries"]["name"] != "none"


def stages_in(model: Mapping) -> dict[str, Mapping]:
  """The settings of a model, and as it were of each "middle" within, by their names.

  What a middle does not set is as around it.
  """
  stages, key = {"model": model}, "model"
  while stages[key]["middle"] is not None:
    own = {name: x for name, x in stages[key]["middle"].items() if x or x is None}
    stages[f"{key}.middle"] = {**stages[key], **own}
    key += ".middle"
  return stages


def mixers_in(model: Mapping) -> dict[str, ConfigDict]:
  """The mixers of a model, by the name of their section: one, or also first and last."""
  sections = {"model.mixer": model["mixer"]}
  for key, stage in stages_in(model).items():
    if is_pooled(stage):
      sections |= {f"{key}.{x}.mixer": stage[x]["mixer"] for x in ("first", "last")}
  return {key: section for key, section in sections.items() if section is not None}


def check_seed(seed: int) -> None:
  """Refuses what no random key can be made of.

  Raises:
    ValueError: as `check`.
  """
  _expect(type(seed) is int and 0 <= seed < 2**32, "seed", "an integer in [0, 2**32)", repr(seed))


def check_sampling(sample: Mapping, prefix: str = "") -> None:
  """Refuses settings no sampler can follow.

  Args:
    sample: length, temperature, top_k, top_p and beyond_window.
    prefix: of their names, for messages.

  Raises:
    ValueError: as `check`.
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
    settings: has both keys; 0 is "not given".
    name: the keys without their unit.
    steps_per_epoch: optimiser steps that one pass over the train split takes.

  Returns:
    Steps, at least 1.

  Raises:
    ValueError: both units are given, or none, or one is negative or not finite, or the
      steps are too many to be counted in 32 bits.
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


def from_dict(settings: Mapping) -> ConfigDict:
  """A configuration from what JSON made of it, of this version or an earlier one.

  Settings that were added since it was written take their defaults.

  Raises:
    ValueError: as `check`.
  """
  config = default()
  _fill(config, old_settings.to_sections(settings), "")
  check(config, limits=False)
  return config


def _fill(config: ConfigDict, settings: Mapping, prefix: str) -> None:
  for name, value in settings.items():
    key = f"{prefix}{name}"
    if name not in config:
      raise unknown_key(key, flatten(default()))
    if place(key) == "model.middle" and isinstance(value, Mapping):
      config[name] = middle()
    if place(key) in COMPONENTS and isinstance(value, Mapping):
      config[name] = COMPONENTS[place(key)].from_dict(value, key)
    elif isinstance(config[name], ConfigDict) and isinstance(value, Mapping):
      _fill(config[name], value, f"{key}.")
    else:
      value = registry.as_tuple(value)
      _check_type(key, value, config[name], limits=False)
      config[name] = value


def differences(old: Mapping, new: Mapping) -> list[str]:
  """What keeps `new` from continuing a run of `old`: lines `key: old there, new here`.

  A setting that was added since `old` was written has its default there.
  """
  there, here = flatten(from_dict(old)), flatten(new)
  is_endless = here.get("train.schedule.name") == "constant"
  free = FREE_KEYS + LENGTH_KEYS if is_endless else FREE_KEYS
  return [
    f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
    for key in sorted(there.keys() | here.keys())
    if there.get(key) != here.get(key)
    and not key.startswith(free)
    and key.rpartition(".")[2] not in FREE_NAMES
  ]


def unknown_key(key: str, known: Iterable[str]) -> UserError:
  """The error for a key that does not exist, with the nearest one that does."""
  near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
  hint = f"; the nearest known is {near[0]}" if near else ""
  return UserError(f"{key}: expected a known setting, got an unknown one{hint}")


def known_keys() -> list[str]:
  """Every setting by its full name, `model.width` for one."""
  return sorted(flatten(default()))


def flatten(config: Mapping, prefix: str = "") -> dict:
  """Settings by their full names: {"model": {"width": 8}} -> {"model.width": 8}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, (Mapping, ConfigDict)):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = registry.as_tuple(value)
  return flat


def _check_keys(config, known, prefix: str, limits: bool = True) -> None:
  for name, value in config.items():
    key = f"{prefix}{name}"
    if name not in known:
      raise unknown_key(key, flatten(known, prefix))
    is_middle = place(key) == "model.middle" and value is not None
    usual = middle() if is_middle else known[name]
    _check_type(key, value, usual, limits)
    if place(key) in COMPONENTS and value is not None:
      COMPONENTS[place(key)].check(value, key)
    elif isinstance(usual, ConfigDict):
      _check_keys(value, usual, f"{key}.", limits)
  missing = sorted(f"{prefix}{name}" for name in known if name not in config)
  _expect(not missing, ", ".join(missing), "a value", "none")


def place(key: str) -> str:
  """The name of a setting of the model, also for one of a middle: they have the same."""
  return key.replace("middle.", "")


def _check_type(key: str, value, usual, limits: bool) -> None:
  if value is None and place(key) in OPTIONAL:
    return
  if type(usual) is float and value == math.inf and not limits:
    return
  if place(key) not in COMPONENTS and not isinstance(usual, ConfigDict):
    registry.check_value(key, value, registry.Setting(type(usual), usual, False))
  elif not isinstance(value, ConfigDict):
    raise UserError(f"{key}: expected a section of settings, got {value!r}")


def _check_arrays(config) -> None:
  """Refuses what is too large for any machine: the weights, or the numbers of one pass."""
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
  for key, choices in CHOICES.items():
    if key.startswith(section):
      _check_choice(key, get(config, key), choices)


def _check_choice(key: str, value, choices: Sequence[str]) -> None:
  near = difflib.get_close_matches(str(value), choices, n=1)
  hint = f"; did you mean {near[0]}?" if near else ""
  known = ", ".join(choice or repr(choice) for choice in choices)
  _expect(value in choices, key, f"one of {known}", f"{value}{hint}")


def _is_whole(value, least: int) -> bool:
  return type(value) is int and value >= least


def _is_number(value) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _at_least(config, key: str, least: int) -> None:
  _expect(get(config, key) >= least, key, f"at least {least}", get(config, key))


def _at_most(config, key: str, most: int) -> None:
  _expect(get(config, key) <= most, key, f"at most {most:,}", get(config, key))


def component_keys(config: ConfigDict) -> list[str]:
  """The names of all sections that are, or may be, a component, those of middles too."""
  keys = list(COMPONENTS)
  is_known = "middle" in config.get("model", {})  # A file may give any settings.
  for stage in stages_in(config.model) if is_known else ():
    keys += [
      f"{stage}.{key.removeprefix('model.')}"
      for key in COMPONENTS
      if stage != "model" and key.startswith("model.") and key != "model.mixer"
    ]
  return keys


def get(config, key: str) -> Any:
  """The setting of a full name, `model.mixer.num_heads` for one."""
  for part in key.split("."):
    config = config[part]
  return config


def _expect(is_true, key: str, expected: str, got) -> None:
  if not is_true:
    raise UserError(f"{key}: expected {expected}, got {got}")
