"""The settings of a run: every key with its default, and the rules between them.

A file of `configs/` starts from `default()` and changes what its experiment needs.
Durations carry their unit in the key; of two units of one duration, one is set.
"""

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpjax.errors import UserError

if TYPE_CHECKING:

  class ConfigDict(dict[str, Any]):
    """Its attributes are the settings, which no type checker knows."""

    def __init__(self, settings: Mapping | None = None): ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value) -> None: ...
else:
  from ml_collections import ConfigDict

SHIFT_AND_SUM = ("loop", "unrolled", "recompute", "matrix", "pallas")
CAUSAL_CONVOLUTION = ("scan", "conv", "toeplitz", "fft", "dft")
# The mixers, each with the implementations of its operator.
MIXERS = {
  "dispatcher": SHIFT_AND_SUM,
  "dispatcher_multihead": SHIFT_AND_SUM,
  "attention": (),
  "relative_attention": (),
  "she": CAUSAL_CONVOLUTION,
  "he": CAUSAL_CONVOLUTION,
  "we": CAUSAL_CONVOLUTION,
  "me": CAUSAL_CONVOLUTION,
}
# Settings that only some mixers have; for the others they stay as they are by default.
ONLY_FOR = {
  "num_heads": (
    "dispatcher", "dispatcher_multihead", "attention", "relative_attention"
  ),
  "num_levels": ("dispatcher", "dispatcher_multihead"),
  "mixer_dropout": (
    "dispatcher", "dispatcher_multihead", "attention", "relative_attention"
  ),
  "attention_bias": ("attention",),
  "adjustment": ("she", "he", "we"),
  "output_projection": ("she", "he", "we"),
}
# Where the segments of a model with token pooling end.
BOUNDARIES = ("fixed", "whitespace", "unigram", "entropy", "gumbel")
# Settings that only some boundaries have; for the others they stay as they are by default.
ONLY_FOR_BOUNDARIES = {
  "model.first_layers": BOUNDARIES,
  "model.last_layers": BOUNDARIES,
  "model.first_mixer": BOUNDARIES,
  "model.last_mixer": BOUNDARIES,
  "model.pooling": ("fixed", "whitespace", "unigram", "entropy"),
  "model.num_capacities": ("whitespace", "unigram", "entropy", "gumbel"),
  "model.shortening_factor": ("fixed",),
  "model.boundary_offset": ("fixed",),
  "model.space_ids": ("whitespace", "gumbel"),
  "model.boundary_temperature": ("gumbel",),
  "model.sample_boundaries": ("gumbel",),
  "data.unigram_file": ("unigram",),
  "data.unigram_size": ("unigram",),
  "train.boundary_prior": ("gumbel",),
  "train.entropy_left": ("entropy",),
  "train.double_sigmoid": ("unigram", "entropy"),
}
CHOICES = {
  "model.mixer": tuple(MIXERS),
  "model.first_mixer": ("", *MIXERS),
  "model.last_mixer": ("", *MIXERS),
  "model.boundaries": ("none", *BOUNDARIES),
  "model.pooling": ("mean", "last"),
  "model.norm": ("post", "pre"),
  "model.positions": ("sinusoidal", "learned", "none"),
  "model.activation": ("relu", "gelu"),
  "model.dtype": ("float32", "bfloat16"),
  "train.batches": ("contiguous", "random_windows", "shuffled_windows"),
  "train.optimizer": ("adam", "adamw"),
  "train.schedule": ("constant", "cosine"),
  "train.parameters": ("replicated", "sharded"),
  "sample.beyond_window": ("slide", "continue", "refuse"),
}
# Settings that may change on resume: they change the order of sums and the random numbers
# of dropout at most (in bfloat16 an implementation also rounds in other places), and which
# checkpoint is the best. The length may change only where the schedule does not depend on
# it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
FREE_KEYS = (
  "data.data_dir",
  "data.manual_dir",
  "model.implementation",
  "model.num_capacities",
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
# Sizes above these fit no machine, and float32 counts positions no further.
LARGEST = 2**24
_MOST_LAYERS = 10_000
_LARGEST_ARRAY = 2**40  # numbers
_LARGEST_FLOAT = float.fromhex("0x1.fffffep+127")  # of float32


def default_model() -> ConfigDict:
  """The settings of a model: the Dispatcher of its paper, Sec. 3.3."""
  model = ConfigDict()
  model.mixer = "dispatcher"  # one of MIXERS
  model.vocab_size = 0  # V; 0: the tokenizer's
  model.num_layers = 6
  model.width = 512  # D
  model.feed_forward_width = 512
  model.num_heads = 1  # H, a divisor of the width
  model.max_length = 512  # longest T, tokens; l of the Extractors
  model.num_levels = 0  # K of the Dispatcher; 0: ceil(log2(max_length))
  model.attention_bias = True  # biases of the mixer "attention"
  model.adjustment = True  # Eq. 24 of she, he and we: times x W_adj
  model.output_projection = True  # their Eq. 25: W_out
  model.norm = "post"  # LayerNorm after ("post") or before ("pre") each branch
  model.positions = "sinusoidal"  # or "learned"; "none": neither they nor a scale
  model.activation = "relu"  # or "gelu" (by erf)
  model.dropout = 0.0  # of embeddings and of each branch
  model.hidden_dropout = 0.0  # within the feed-forward network
  model.mixer_dropout = 0.0  # of levels (Dispatcher) or of attention weights
  model.init_std = 0.0  # weights ~ N(0, init_std**2), biases 0; 0: PyTorch's defaults
  model.norm_init_std = 0.0  # gains of the norms ~ N(1, norm_init_std**2)
  model.implementation = ""  # of the mixer's operator; "": the measured best
  model.scan_layers = True  # compile one layer and loop, or compile each
  model.remat = False  # recompute each layer in the gradient: less memory
  model.dtype = "float32"  # of the computation; parameters are float32
  # Token pooling: num_layers blocks on segments, between blocks on tokens.
  model.boundaries = "none"  # or one of BOUNDARIES
  model.first_layers = 2
  model.last_layers = 2
  model.first_mixer = ""  # "": model.mixer
  model.last_mixer = ""
  model.pooling = "mean"  # of a segment; or "last", its last token
  model.shortening_factor = 2  # k of fixed boundaries
  model.boundary_offset = -1  # place of their first; -1: k - 1
  model.space_ids = ()  # tokens that end a word; (): the tokenizer's
  model.boundary_temperature = 0.5  # tau of gumbel
  model.sample_boundaries = False  # gumbel: draw them in evaluation, too
  model.num_capacities = 8  # lengths that the middle blocks are compiled for
  return model


def default() -> ConfigDict:
  """Every setting of a run, with the values of the Dispatcher paper where it has any."""
  config = ConfigDict()
  config.seed = 0
  config.model = default_model()

  data = config.data = ConfigDict()
  data.name = "python_manual"  # a corpus by its name: `python -m dpjax.data list`
  data.language = ""  # of a corpus that has several, and of `clean`
  data.data_dir = "data"  # where corpora that have a name are kept, and their tokens
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
  data.unigram_file = ""  # the .model of unigram boundaries; "": train one
  data.unigram_size = 10_000  # its pieces, where it is trained

  train = config.train = ConfigDict()
  # In order; or "random_windows", at any offset; or "shuffled_windows", of rolled rows.
  train.batches = "contiguous"
  train.batch_size = 20  # rows of all devices together
  train.window = 0  # tokens a row; 0: model.max_length
  train.initial_run = ""  # the folder of a run whose best parameters to begin with
  train.accumulate_steps = 1  # parts of a batch, one after the other: less memory
  train.num_steps = 0
  train.num_epochs = 60.0
  train.optimizer = "adam"
  train.learning_rate = 1e-4  # the peak, where there is a schedule
  train.b1 = 0.9
  train.b2 = 0.999
  train.eps = 1e-8
  train.weight_decay = 0.01  # of adamw
  train.clip_norm = 0.5  # of the gradient's global norm; 0: no clipping
  train.boundary_prior = 0.2  # alpha of gumbel: boundaries a token
  train.entropy_left = 2  # k of entropy: places before that a spike exceeds
  train.double_sigmoid = False  # unigram, entropy: the loss as in the authors' code
  train.schedule = "constant"  # after the warm-up; or "cosine", to 0 at the end
  train.warmup_steps = 0
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
    config.model.update(
      dict(num_layers=2, width=32, feed_forward_width=64, max_length=64)
    )
    config.train.update(dict(batch_size=8, num_steps=50, num_epochs=0.0, warmup_steps=5,
                             eval_every_steps=25, eval_every_epochs=0.0,
                             learning_rate=1e-3))
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
  for key in ("train.batch_size", "eval.batch_size", "data.tokenizer_size",
              "data.unigram_size"):
    _at_most(config, key, LARGEST)
  for key in ("train.batch_size", "train.accumulate_steps", "train.log_every_steps",
              "train.median_every_steps", "train.checkpoint_every_steps",
              "train.keep_checkpoints", "eval.batch_size", "data.tokenizer_size",
              "data.unigram_size", "train.entropy_left"):
    _at_least(config, key, 1)
  check_seed(config.seed)
  for key in ("train.window", "train.num_steps", "train.warmup_steps",
              "eval.window", "eval.stride", "train.clip_norm", "train.weight_decay",
              "train.learning_rate", "train.eps"):
    _at_least(config, key, 0)
  for key in ("train.b1", "train.b2"):
    _expect(0 <= _get(config, key) < 1, key, "a number in [0, 1)", _get(config, key))
  prior = config.train.boundary_prior
  _expect(0 < prior < 1, "train.boundary_prior", "a number in (0, 1)", prior)
  _check_only_for_boundaries(config, default(), ("data.", "train."))
  longest = config.model.max_length
  for key in ("train.window", "eval.window"):
    _expect(_get(config, key) <= longest, key, f"at most model.max_length = {longest}",
            _get(config, key))
  window = config.eval.window or longest
  _expect(config.eval.stride <= window, "eval.stride", f"at most the window {window}",
          config.eval.stride)
  rows, parts = config.train.batch_size, config.train.accumulate_steps
  _expect(rows % parts == 0, "train.accumulate_steps",
          f"a divisor of train.batch_size = {rows}", parts)
  if limits:
    _check_arrays(config)
    # A level reads 2**k tokens back, which within M tokens are none from 2**k = M on.
    levels = max(1, (longest - (config.model.boundaries == "none")).bit_length())
    _expect(config.model.num_levels <= levels, "model.num_levels",
            f"at most {levels}, which reach over model.max_length = {longest}",
            config.model.num_levels)
  fractions = config.data.split_fractions
  are_numbers = all(type(fraction) in (int, float) for fraction in fractions)
  _expect(are_numbers and len(fractions) == 3 and min(fractions) > 0
          and abs(sum(fractions) - 1) < 1e-6,
          "data.split_fractions", "three positive numbers with the sum 1", fractions)
  most = config.data.max_characters
  are_numbers = all(type(number) is int and number >= 0 for number in most)
  _expect(are_numbers and len(most) == 3,
          "data.max_characters", "three integers of at least 0", most)
  language, clean = config.data.language, config.data.clean
  _expect(bool(language) or not clean, "data.language",
          "the language of the text that data.clean is to clean", repr(language))
  _expect(not language or clean or not config.data.path, "data.language",
          "'' with a data.path, unless data.clean is True", repr(language))
  steps_in(config.train, "num", steps_per_epoch=1)
  steps_in(config.train, "eval_every", steps_per_epoch=1)
  steps, warmup = config.train.num_steps, config.train.warmup_steps
  if steps and config.train.schedule == "cosine":
    _expect(warmup < steps, "train.warmup_steps",
            f"fewer than the {steps} steps of the run", warmup)
  check_sampling(config.sample, "sample.")


def check_model(model: Mapping) -> None:
  """Refuses the settings of a model that cannot be built.

  Raises:
    ValueError: as `check`.
  """
  config = ConfigDict({"model": dict(model)})
  _check_keys(config.model, default_model(), "model.")
  _check_choices(config, "model.")
  for key in ("num_layers", "width", "feed_forward_width", "num_heads", "max_length",
              "first_layers", "last_layers", "shortening_factor", "num_capacities"):
    _at_least(config, f"model.{key}", 1)
  for key in ("width", "feed_forward_width", "max_length", "vocab_size", "num_capacities"):
    _at_most(config, f"model.{key}", LARGEST)
  for key in ("num_layers", "first_layers", "last_layers"):
    _at_most(config, f"model.{key}", _MOST_LAYERS)
  # A model of the Dispatcher's authors may have more than its length needs.
  _at_most(config, "model.num_levels", (LARGEST - 1).bit_length())
  for key in ("vocab_size", "num_levels", "init_std", "norm_init_std"):
    _at_least(config, f"model.{key}", 0)
  for key in ("dropout", "hidden_dropout", "mixer_dropout"):
    rate = config.model[key]
    _expect(0 <= rate < 1, f"model.{key}", "a probability in [0, 1)", rate)
  usual = default_model()
  mixers = mixers_in(config.model)
  for key, owners in ONLY_FOR.items():
    is_known = any(mixer in owners for mixer in mixers)
    _expect(is_known or config.model[key] == usual[key], f"model.{key}",
            f"{usual[key]!r} with the mixer {', '.join(mixers)}", repr(config.model[key]))
  implementations = [MIXERS[mixer] for mixer in mixers if MIXERS[mixer]] or [()]
  of_all = [name for name in implementations[0]
            if all(name in names for names in implementations)]
  _check_choice("model.implementation", config.model.implementation, ("", *of_all))
  _check_pooling(config)
  width, heads = config.model.width, config.model.num_heads
  _expect(width % heads == 0, "model.num_heads",
          f"a divisor of model.width = {width}", heads)


def mixers_in(model: Mapping) -> tuple[str, ...]:
  """The mixers of a model, each once: that of its layers, first and last blocks."""
  if model["boundaries"] == "none":
    return (model["mixer"],)
  names = (model["mixer"], model["first_mixer"], model["last_mixer"])
  return tuple(dict.fromkeys(name for name in names if name))


def check_seed(seed: int) -> None:
  """Refuses what no random key can be made of.

  Raises:
    ValueError: as `check`.
  """
  _expect(type(seed) is int and 0 <= seed < 2**32, "seed", "an integer in [0, 2**32)",
          repr(seed))


def check_sampling(sample: Mapping, prefix: str = "") -> None:
  """Refuses settings no sampler can follow.

  Args:
    sample: length, temperature, top_k, top_p and beyond_window.
    prefix: of their names, for messages.

  Raises:
    ValueError: as `check`.
  """
  for key, is_valid, expected in (
    ("length", lambda x: _is_whole(x, 1) and x <= LARGEST,
     f"an integer of at least 1 and at most {LARGEST:,}"),
    ("temperature", lambda x: _is_number(x) and 0 <= x <= _LARGEST_FLOAT,
     "a finite number of at least 0 (0 is greedy)"),
    ("top_k", lambda x: _is_whole(x, 0), "an integer of at least 0 (0 is all)"),
    ("top_p", lambda x: _is_number(x) and 0 < x <= 1, "a number in (0, 1]"),
    ("beyond_window", lambda x: x in CHOICES["sample.beyond_window"],
     f"one of {', '.join(CHOICES['sample.beyond_window'])}"),
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
  _expect(count < 2**31, f"train.{name}_{'steps' if steps else 'epochs'}",
          "fewer than 2**31 steps", count)
  return max(1, round(count))


def from_dict(settings: Mapping) -> ConfigDict:
  """A configuration from what JSON made of it.

  Settings that were added since it was written take their defaults, so that a later
  version reads it.

  Raises:
    ValueError: as `check`.
  """
  config = default()
  known = flatten(config)
  for key, value in flatten(settings).items():
    _check_value(key, value, known, limits=False)
    *parents, name = key.split(".")
    section = config
    for parent in parents:
      section = section[parent]
    section[name] = value
  check(config, limits=False)
  return config


def differences(old: Mapping, new: Mapping) -> list[str]:
  """What keeps `new` from continuing a run of `old`: lines `key: old there, new here`.

  A setting that was added since `old` was written has its default there.
  """
  there, here = {**flatten(default()), **flatten(old)}, flatten(new)
  is_endless = here.get("train.schedule") == "constant"
  free = FREE_KEYS + LENGTH_KEYS if is_endless else FREE_KEYS
  return [
    f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
    for key in sorted(there.keys() | here.keys())
    if there.get(key) != here.get(key) and not key.startswith(free)
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
      flat[prefix + key] = tuple(value) if isinstance(value, list) else value
  return flat


def _check_keys(config, known, prefix: str, limits: bool = True) -> None:
  flat, known = flatten(config, prefix), flatten(known, prefix)
  for key, value in flat.items():
    _check_value(key, value, known, limits)
  missing = sorted(known.keys() - flat.keys())
  _expect(not missing, ", ".join(missing), "a value", "none")


def _check_value(key: str, value, known: Mapping, limits: bool = True) -> None:
  if key not in known:
    raise unknown_key(key, known)
  kind = type(known[key])
  is_number = kind is float and type(value) in (int, float)
  _expect(is_number or type(value) is kind, key, f"a value of type {kind.__name__}",
          repr(value))
  if kind is float and (limits or value != math.inf):
    _expect(abs(value) <= _LARGEST_FLOAT, key, "a number of float32 that is finite", value)
  elif kind is int and key != "seed":
    _expect(value < 2**31, key, "an integer below 2**31", value)


def _check_arrays(config) -> None:
  """Refuses what is too large for any machine: the weights, or the numbers of one pass."""
  model, train = config.model, config.train
  layers, width, hidden = model.num_layers, model.width, model.feed_forward_width
  rows, length = train.batch_size // train.accumulate_steps, model.max_length
  for keys, sizes in (
    ("model.num_layers, model.width, model.feed_forward_width", (layers, width, hidden)),
    ("train.batch_size, train.window, model.width, model.feed_forward_width",
     (rows, train.window or length, max(width, hidden))),
    ("eval.batch_size, eval.window, model.width, model.feed_forward_width",
     (config.eval.batch_size, config.eval.window or length, max(width, hidden))),
  ):
    _expect(math.prod(sizes) <= _LARGEST_ARRAY, keys,
            f"at most {_LARGEST_ARRAY:,} numbers in an array of their sizes",
            " x ".join(f"{size:,}" for size in sizes))


def _check_pooling(config) -> None:
  model = config.model
  _check_only_for_boundaries(config, ConfigDict({"model": default_model()}), ("model.",))
  temperature = model.boundary_temperature
  _expect(0 < temperature < math.inf, "model.boundary_temperature", "above 0 and finite",
          temperature)
  factor, offset = model.shortening_factor, model.boundary_offset
  _expect(-1 <= offset < factor, "model.boundary_offset",
          f"-1 (which is the last) to model.shortening_factor - 1 = {factor - 1}", offset)
  size = model.vocab_size or math.inf
  below = f" below model.vocab_size = {size}" if model.vocab_size else ""
  _expect(all(_is_whole(i, 0) and i < size for i in model.space_ids), "model.space_ids",
          f"token ids{below}", model.space_ids)


def _check_only_for_boundaries(config, usual, sections: tuple[str, ...]) -> None:
  kind = config.model.boundaries
  for key, kinds in ONLY_FOR_BOUNDARIES.items():
    if key.startswith(sections) and kind not in kinds:
      value, default_value = _get(config, key), _get(usual, key)
      _expect(value == default_value, key,
              f"{default_value!r} with model.boundaries = {kind}", repr(value))


def _check_choices(config, section: str) -> None:
  for key, choices in CHOICES.items():
    if key.startswith(section):
      _check_choice(key, _get(config, key), choices)


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
  _expect(_get(config, key) >= least, key, f"at least {least}", _get(config, key))


def _at_most(config, key: str, most: int) -> None:
  _expect(_get(config, key) <= most, key, f"at most {most:,}", _get(config, key))


def _get(config, key: str) -> Any:
  for part in key.split("."):
    config = config[part]
  return config


def _expect(is_true, key: str, expected: str, got) -> None:
  if not is_true:
    raise UserError(f"{key}: expected {expected}, got {got}")
