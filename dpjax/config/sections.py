"""The settings of a run: every key with its default.

A file of `configs/` starts from `default()`. Of each duration, set one unit: steps or epochs.
"""

import copy
import os
import re
from collections.abc import Mapping
from typing import Any

from dpjax import registry
from dpjax.errors import UserError, unknown_setting
from dpjax.registry import ConfigDict, in_turn

# The sections that are a component, with its settings.
COMPONENTS = {
  "model.mixer": registry.mixers,
  "model.first.mixer": registry.mixers,
  "model.last.mixer": registry.mixers,
  "model.boundaries": registry.boundaries,
  "train.optimizer": registry.optimizers,
  "train.schedule": registry.schedules,
}
# Settings that name files and folders.
_PATHS = """data.path data.data_dir data.manual_dir data.tokenizer_file train.initial_run
  model.boundaries.file model.boundaries.run""".split()
# Sections that may be None: mixers that are the model's, and no middle of its own.
OPTIONAL = ("model.first.mixer", "model.last.mixer", "model.middle")


class Section(ConfigDict):
  """Takes a component's name for its section: `mixer = "we"` is `mixer = mixer("we")`.

  Several mixers in turn are a tuple of sections: `mixer = ("we", mixer("attention"))`, or
  "we,attention".
  """

  def __setitem__(self, key, value):
    if key in _BY_NAME and isinstance(value, str | list | tuple):
      value = _section(_BY_NAME[key], value)
    elif isinstance(self.get(key), Section) and type(value) is ConfigDict:
      value = Section(value)
    if key == "mixer":  # from one to several, or back
      with self.ignore_type():
        super().__setitem__(key, value)
    else:
      super().__setitem__(key, value)

  def update(self, *other, **kwargs):
    """As of a ConfigDict; also takes components, by their names or sections."""
    for given in (*other, kwargs):
      kinds = str | ConfigDict | list | tuple
      whole = {key for key in _BY_NAME if isinstance(given.get(key), kinds)}
      for key in whole:
        self[key] = given[key]
      super().update({key: given[key] for key in given if key not in whole} if whole else given)

  def to_dict(self, *args, **kwargs):
    """As of a ConfigDict, with several mixers as a list of dicts."""
    plain = super().to_dict(*args, **kwargs)
    for key, value in plain.items():
      if key in _BY_NAME and isinstance(value, tuple):
        plain[key] = [dict(x) if _is_section(x) else x for x in value]
    return plain

  def __eq__(self, other):
    return isinstance(other, ConfigDict) and ConfigDict.__eq__(other, self)


def _section(known: registry.Registry, value: Any) -> Any:
  """The section of a name, and of several mixers a tuple of sections, copied."""
  if known is not registry.mixers:
    return known.defaults(value) if isinstance(value, str) else value
  several = value.split(",") if isinstance(value, str) else value
  # Copies, with the types of what is None.
  sections = tuple(
    known.defaults(x) if isinstance(x, str) else ConfigDict(x) if isinstance(x, dict) else x
    for x in map(copy.deepcopy, several)
  )
  return sections[0] if len(sections) == 1 else sections


def _is_section(value: Any) -> bool:
  return isinstance(value, Mapping | ConfigDict)


_BY_NAME = {key.rpartition(".")[2]: registry for key, registry in COMPONENTS.items()}


def mixer(name: str, **settings) -> ConfigDict:
  """The section of a token mixer: its name, and all of its settings.

    config.model.mixer = dpjax.config.mixer("dispatcher", num_levels=7)

  Layers may have several mixers in turn:

    config.model.mixer = ("we", dpjax.config.mixer("attention", num_heads=8))

  A `UserError` if the name or a setting is unknown, or a value has the wrong type.
  """
  return registry.mixers.section(name, **settings)


def boundaries(name: str, **settings) -> ConfigDict:
  """The section of boundaries, like `mixer`; "none" does not pool."""
  return registry.boundaries.section(name, **settings)


def optimizer(name: str, **settings) -> ConfigDict:
  """The section of an optimizer, like `mixer`."""
  return registry.optimizers.section(name, **settings)


def schedule(name: str, **settings) -> ConfigDict:
  """The section of a learning rate schedule, like `mixer`."""
  return registry.schedules.section(name, **settings)


def middle(kind: Any = "none", *, width: int = 0, **settings: Any) -> ConfigDict:
  """The section of a middle that has its own width or pools segments again.

    config.model.boundaries = dpjax.config.boundaries("routing", factor=3.0)
    config.model.middle = dpjax.config.middle(
      dpjax.config.boundaries("routing", factor=2.0), width=512
    )

  `model.mixer` and `model.num_layers` describe the innermost blocks.

  Args:
    kind: a section of `boundaries`, or a name.
    width: D; 0 is that of the stage around it.
    **settings: `feed_forward_width`, as `width`, and another `middle`.
  """
  section = Section({"width": 0, "feed_forward_width": 0})
  _add_pooling(section)
  kind = boundaries(kind) if isinstance(kind, str) else kind
  given = {"boundaries": kind, "width": width, **settings}
  check_keys({**section, **given}, section, "model.middle.")
  for name, value in given.items():
    section[name] = value
  return section


def _add_pooling(section: ConfigDict) -> None:
  section.boundaries = boundaries("none")
  for name in ("first", "last"):
    stack = section[name] = Section()
    stack.num_layers = 2  # blocks on tokens, before or after the pooling; with boundaries
    stack.mixer = None  # a mixer of their own; None: model.mixer
  # A width of its own, or more pooling: `dpjax.config.middle`; with boundaries.
  section.middle = None


def default_model() -> ConfigDict:
  """The settings of a model: the Dispatcher of its paper, Sec. 3.3."""
  model = Section()
  model.mixer = mixer("dispatcher")
  model.vocab_size = 0  # V, the entries of the vocabulary; 0: the tokenizer's
  model.num_layers = 6  # blocks; with token pooling, those on segments
  model.width = 512  # D, the features of a token's vector
  model.feed_forward_width = 512  # features within each feed-forward network
  # The window: the most tokens at once. For the Extractors also l, the number of taps.
  model.max_length = 512
  model.norm = "post"  # where a block has its norms: after or before each branch
  model.norm_kind = "layer_norm"  # with or without mean and bias
  model.norm_epsilon = 1e-5  # added to the variance, or to the mean square
  model.use_bias = True  # of norms, feed-forward networks and logits; a mixer has its own
  # "none": neither positions nor the scale sqrt(D), for mixers that know positions.
  model.positions = "sinusoidal"
  model.tie_embeddings = False  # logits by the token table: no matrix of their own
  # Of feed-forward networks: "gelu" by erf, "swiglu" with a third matrix.
  model.activation = "relu"
  model.dropout = 0.0  # rate, of embeddings and of each branch
  model.hidden_dropout = 0.0  # rate, within the feed-forward networks
  # Weights ~ N(0, init_std**2), and biases 0; 0: PyTorch's defaults.
  model.init_std = 0.0
  model.norm_init_std = 0.0  # gains of the norms ~ N(1, norm_init_std**2)
  model.scan_layers = True  # compile one layer and loop, or compile each
  model.remat = False  # recompute each layer in the gradient: less memory
  model.dtype = "float32"  # of the computation; parameters are float32
  # Token pooling: num_layers blocks on segments, between blocks on tokens.
  _add_pooling(model)
  return model


def default() -> ConfigDict:
  """Every setting of a run, by default as in the Dispatcher paper."""
  config = Section()
  config.seed = 0  # of parameters, batches and dropout; an integer below 2**32
  # The modules that registered its components, which --plugin imports; training writes them.
  config.plugins = ()
  config.model = default_model()

  data = config.data = ConfigDict()
  # A corpus by its name: `dpjax data list`, hf:OWNER/NAME of the Hugging Face Hub, or tfds:NAME.
  data.name = "python_manual"
  # Several corpora: SOURCE=WEIGHT,SOURCE=WEIGHT, with names and paths; wins over data.path. Each
  # has its share of the rows; with train.batches = random_windows.
  data.mixture = ""
  data.data_dir = "data"  # the folder of downloads, texts and tokens, shared by all runs
  data.manual_dir = ""  # the folder of files downloaded by hand; "": data_dir/manual
  # A text file, .jsonl or .parquet, a pattern of several, a folder with train/valid/test.txt, of
  # documents, or of tokens that were made elsewhere; wins over data.name.
  data.path = ""
  # "joined": one stream of all; "isolated": no document sees another, in training or evaluation.
  data.documents = "joined"
  data.text_field = "text"  # the text in a .jsonl or .parquet, which has a document a line or row
  data.separator = ""  # the line between two documents of a .txt
  data.split_fractions = (0.9, 0.05, 0.05)  # of a single file: train, valid, test
  # One of characters, bytes, wordpiece, bpe, sentencepiece_bpe, sentencepiece_unigram.
  data.tokenizer = "characters"
  # A vocabulary to load, "bert_base_cased", "gpt2", or the folder of a run, whose tokenizer is
  # taken; "": that of train.initial_run, or one that is trained on the train split.
  data.tokenizer_file = ""
  data.tokenizer_size = 8000  # entries of a vocabulary that is trained
  data.lower_text = False  # lower-case the text first; with wordpiece
  data.lower_pieces = False  # lower-case the pieces; with wordpiece
  data.restrict_vocabulary = False  # only the train split's pieces; with wordpiece

  train = config.train = Section()
  # Windows in order; at any offset, drawn; or of rows that are rolled and shuffled each epoch.
  train.batches = "contiguous"
  train.batch_size = 20  # rows of all devices together
  train.window = 0  # tokens a row; 0: model.max_length
  train.initial_run = ""  # the folder of a run whose best parameters to begin with
  # Parts of a batch, one after the other: less memory; a divisor of train.batch_size.
  train.accumulate_steps = 1
  train.num_steps = 0  # updates of the whole run; 0 with train.num_epochs
  train.num_epochs = 60.0  # passes over the train split; 0 with train.num_steps
  train.optimizer = optimizer("adam")
  train.learning_rate = 1e-4  # the peak of the schedule
  train.schedule = schedule("constant")
  train.clip_norm = 0.5  # the largest global norm of the gradient; 0: no clipping
  # What decays with a weight_decay: "matrices" leaves out norms, biases and tables.
  train.decay_mask = "all"
  # Of an average of the parameters that is scored, saved as the best and loaded; 0: none.
  train.ema_decay = 0.0
  train.log_every_steps = 20  # updates between reports of the loss
  train.eval_every_steps = 0  # updates between evaluations; 0 with train.eval_every_epochs
  train.eval_every_epochs = 1.0  # epochs between evaluations; 0 with train.eval_every_steps
  train.patience = 0  # evaluations without a new best that end the run; 0: it goes on
  train.checkpoint_every_steps = 500  # updates between checkpoints
  train.keep_checkpoints = 2  # the number of last ones; the best is kept beside them
  # The dtype of the factors of matrix products; bfloat16 is mixed precision: sums, norms, softmax
  # and what layers pass on stay in model.dtype.
  train.products = "float32"
  train.parameters = "replicated"  # on all devices, or each divided over them

  config.eval = ConfigDict()
  config.eval.window = 0  # tokens a row; 0: model.max_length
  config.eval.stride = 0  # new tokens a window; 0: the window, so without context
  config.eval.batch_size = 10  # rows
  # Of the validation split in training, in windows drawn once; 0: all. `evaluate` and the test
  # scores at the end take all. Without data.documents = isolated.
  config.eval.max_tokens = 0

  sample = config.sample = ConfigDict()
  sample.prompt = ""  # shown, continued, at the end of a run; "": nothing is
  sample.length = 300  # new tokens
  sample.temperature = 1.0  # divides the logits; 0: the most likely token
  sample.top_k = 0  # draw from the k most likely tokens; 0: from all
  sample.top_p = 1.0  # draw from the most likely tokens of this probability together
  sample.beyond_window = "slide"  # after the window: move it, go on where mixers can, or end
  return config


def apply_variant(config: ConfigDict, variant: str) -> ConfigDict:
  """Changes a configuration to its variant, "tiny", which trains in a minute on a CPU, or ""."""
  if variant not in ("", "tiny"):
    raise UserError(f"expected the variant tiny, or none, got {variant}")
  if variant:
    config.model.update(num_layers=2, width=32, feed_forward_width=64, max_length=64)
    config.train.update(num_steps=50, num_epochs=0.0, eval_every_steps=25, eval_every_epochs=0.0)
    config.train.update(batch_size=8, learning_rate=1e-3)
    if "warmup_steps" in config.train.schedule:
      config.train.schedule.warmup_steps = 5
    config.sample.length = 20
  return config


def is_pooled(model: Mapping) -> bool:
  """Whether a model pools its tokens."""
  return model["boundaries"]["name"] != "none"


def stages_in(model: Mapping) -> dict[str, Mapping]:
  """The settings of a model and of each middle, which inherits what it does not set."""
  stages, key = {"model": model}, "model"
  while stages[key]["middle"] is not None:
    own = {name: x for name, x in stages[key]["middle"].items() if x or x is None}
    stages[f"{key}.middle"] = {**stages[key], **own}
    key += ".middle"
  return stages


def mixers_in(model: Mapping) -> dict[str, ConfigDict]:
  """The mixers of a model by section: its own and, with pooling, those of first and last."""
  found = in_turn("model.mixer", model["mixer"])
  for key, stage in stages_in(model).items():
    if is_pooled(stage):
      for x in ("first", "last"):
        found |= in_turn(f"{key}.{x}.mixer", stage[x]["mixer"])
  return found


def plugins_in(config: ConfigDict) -> tuple[str, ...]:
  """The modules that registered the components of a configuration, for --plugin."""
  given = {
    x: y for key in component_keys(config) for x, y in in_turn(key, get(config, key)).items()
  }
  found = {COMPONENTS[place(key)].origin(section["name"]) for key, section in given.items()}
  return tuple(sorted(filter(None, found)))


def expand_paths(config: ConfigDict) -> ConfigDict:
  """The configuration with the user's folder for a path's ~."""
  flat, config = flatten(config), config.copy_and_resolve_references()
  for key in _PATHS:
    if isinstance(flat.get(key), str):
      parent, _, last = key.rpartition(".")
      get(config, parent)[last] = os.path.expanduser(flat[key])
  return config


def flatten(config: Mapping, prefix: str = "") -> dict:
  """Settings by their full names: {"model": {"width": 8}} -> {"model.width": 8}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, list | tuple) and any(map(_is_section, value)):
      for place, section in in_turn(f"{prefix}{key}", value).items():
        flat |= flatten(section, f"{place}.")
    elif isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = registry.as_tuple(value)
  return flat


def get(config, key: str) -> Any:
  """The setting of a full name, such as `model.mixer.num_heads`, or `model.mixer.1.num_heads`."""
  for part in key.split("."):
    config = config[int(part) if isinstance(config, tuple) else part]
  return config


def place(key: str) -> str:
  """The name in the model of a middle's setting: `model.middle.first` -> `model.first`.

  Also of one of several mixers: `model.mixer.1` -> `model.mixer`.
  """
  return re.sub(r"middle\.|\.\d+$", "", key)


def component_keys(config: Mapping, prefix: str = "") -> list[str]:
  """The full names of all sections that may hold a component, with those of middles."""
  keys = []
  for name, value in config.items():
    key = f"{prefix}{name}"
    if place(key) in COMPONENTS:
      keys.append(key)
    elif isinstance(value, ConfigDict):
      keys += component_keys(value, f"{key}.")
  return keys


def check_keys(config, known, prefix: str) -> None:
  """A `UserError` unless a section has the known settings, of the types of their defaults."""
  for name, value in config.items():
    key = f"{prefix}{name}"
    if name not in known:
      raise unknown_setting(key, flatten(known, prefix))
    is_middle = place(key) == "model.middle" and value is not None
    usual = middle() if is_middle else known[name]
    check_type(key, value, usual)
    if place(key) in COMPONENTS:
      for own, section in in_turn(key, value).items():
        COMPONENTS[place(key)].check(section, own)
    elif isinstance(usual, ConfigDict):
      check_keys(value, usual, f"{key}.")
  if missing := sorted(f"{prefix}{name}" for name in known if name not in config):
    raise UserError(f"{', '.join(missing)}: expected a value, got none")


def check_type(key: str, value, usual) -> None:
  """A `UserError` unless a value has the type of the default, `usual`."""
  if value is None and place(key) in OPTIONAL:
    return
  if place(key) not in COMPONENTS and not isinstance(usual, ConfigDict):
    registry.check_value(key, value, registry.Setting(type(usual), usual, False))
  elif COMPONENTS.get(place(key)) is registry.mixers and isinstance(value, list | tuple) and value:
    for own, section in in_turn(key, value).items():
      if not _is_section(section):
        raise UserError(f"{own}: expected a section of settings, got {section!r}")
  elif not isinstance(value, ConfigDict):
    last = key.rpartition(".")[2]
    is_made = isinstance(value, str) and (place(key) in COMPONENTS or last == "middle")
    by = f", by dpjax.config.{last}({value!r})" if is_made else ""
    raise UserError(f"{key}: expected a section of settings{by}, got {value!r}")
