"""The settings of a run: one table with each one's default, meaning and range.

`default()` gives all of them; a file of `configs/` starts from it. Of each duration, set one unit:
steps or epochs.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from dpjax.config import registry
from dpjax.config.registry import ConfigDict, Registry, Setting, as_tuple
from dpjax.errors import UserError, unknown_setting


class Component(NamedTuple):
  """A section of a component's name and settings.

  Attributes:
    components: those that it may be.
    default: the name by default; None: the setting may be None.
    meaning: what it is for.
  """

  components: Registry
  default: str | None
  meaning: str


class Middle(NamedTuple):
  """A section that is None unless `middle` makes one."""

  schema: Mapping[str, Any]
  meaning: str
  default: None = None


S, FREE = Setting, partial(Setting, is_free=True)


def choice(names: str, meaning: str, is_free: bool = False) -> Setting:
  """A setting with a few values, the first by default."""
  choices = tuple(names.split())
  return Setting(choices[0], meaning, choices=choices, is_free=is_free)


_STACK = {
  "num_layers": S(2, "token-level blocks before or after the pooling; only with boundaries", 1),
  "mixer": Component(registry.mixers, None, "a mixer of their own; None: model.mixer"),
}
_POOLING: dict[str, Any] = {
  "boundaries": Component(registry.boundaries, "none", "where segments end"),
  "first": _STACK,
  "last": _STACK,
}
_MIDDLE: dict[str, Any] = {
  "width": S(0, "D; 0: that of the stage around it", 0),
  "feed_forward_width": S(0, "0: that of the stage around it", 0),
  **_POOLING,
}
_ABOUT_MIDDLE = "a width of its own, or more pooling: `dpjax.config.middle`; with boundaries"
_POOLING["middle"] = _MIDDLE["middle"] = Middle(_MIDDLE, _ABOUT_MIDDLE)
_MODEL: dict[str, Any] = {
  "mixer": Component(registry.mixers, "dispatcher", "takes the place of self-attention"),
  "vocab_size": S(0, "V, the entries of the vocabulary; 0: the tokenizer's", 0),
  "num_layers": S(6, "blocks; with token pooling, those on segments", 1),
  "width": S(512, "D, the features of a token's vector", 1),
  "feed_forward_width": S(512, "features within each feed-forward network", 1),
  "max_length": S(
    512, "the window: tokens in the context, at most; for Extractors also the number of taps l", 1
  ),
  "norm_position": choice("post pre", "norms after or before each branch"),
  "norm_type": choice("layer_norm rms_norm", "with or without mean and bias"),
  "norm_epsilon": S(1e-5, "added to the variance, or to the mean square", above=0),
  "use_bias": S(True, "of norms, feed-forward networks and logits; a mixer has its own"),
  "positions": choice("sinusoidal learned none", "of tokens; none also drops the scale sqrt(D)"),
  "tie_embeddings": S(False, "reuse the token embedding as the output layer"),
  "activation": choice(
    "relu gelu swiglu", "of feed-forward layers: gelu by erf, swiglu with a third matrix"
  ),
  "dropout": S(0.0, "rate, of embeddings and of each branch", 0, below=1),
  "hidden_dropout": S(0.0, "rate, within the feed-forward networks", 0, below=1),
  "init_std": S(0.0, "weights ~ N(0, init_std**2), and biases 0; 0: PyTorch's defaults", 0),
  "norm_init_std": S(0.0, "gains of the norms ~ N(1, norm_init_std**2)", 0),
  "scan_layers": FREE(True, "compile one layer and loop, or compile each"),
  "remat": FREE(False, "recompute each layer in the gradient: less memory"),
  "dtype": choice("float32 bfloat16", "of the computation; parameters are float32"),
  **_POOLING,
}
_DATA = {
  "name": S("python_manual", "a corpus: `dpjax data list`, hf:OWNER/NAME at the Hub, or tfds:NAME"),
  "mixture": S(
    "",
    "several corpora: SOURCE=WEIGHT,SOURCE=WEIGHT, with names and paths; wins over data.path. Each "
    "has its share of the rows; with train.sampling = random_windows",
  ),
  "data_dir": FREE("data", "the folder of downloads, texts and tokens, shared by all runs"),
  "manual_dir": FREE("", 'the folder of files downloaded by hand; "": data_dir/manual'),
  "path": S(
    "",
    "a text file, .jsonl or .parquet, a pattern of several, a folder with train/valid/test.txt, of "
    "documents, or of tokens that were made elsewhere; wins over data.name",
  ),
  "documents": choice("joined isolated", "one stream of all, or no document sees another"),
  "text_field": S("text", "the text in a .jsonl or .parquet, with a document a line or row"),
  "separator": S("", "the line between two documents of a .txt"),
  "split_fractions": S((0.9, 0.05, 0.05), "of a single file: train, valid, test"),
  "tokenizer": S(
    "characters", "or bytes, wordpiece, bpe, sentencepiece_bpe, sentencepiece_unigram"
  ),
  "tokenizer_file": S(
    "",
    'a vocabulary to load, "bert_base_cased", "gpt2", or the folder of a run, whose tokenizer is '
    'taken; "": that of train.init_from, or one that is trained on the train split',
  ),
  "tokenizer_size": S(8000, "entries of a vocabulary that is trained", 1),
  "lower_text": S(False, "lower-case the text first; with wordpiece"),
  "lower_pieces": S(False, "lower-case the pieces; with wordpiece"),
  "restrict_vocabulary": S(False, "only the train split's pieces; with wordpiece"),
}
_TRAIN = {
  "sampling": choice(
    "sequential random_windows shuffled_windows",
    "windows in order; at random offsets; or of rows that are rolled and shuffled each epoch",
  ),
  "batch_size": S(20, "rows of all devices together", 1),
  "window": S(0, "tokens a row; 0: model.max_length", 0),
  "init_from": S("", "the folder of a run whose best parameters initialize this one"),
  "grad_accum_steps": FREE(1, "parts of a batch, in turn, for less memory; divides batch_size", 1),
  "num_steps": S(0, "updates of the whole run; 0 with train.num_epochs", 0),
  "num_epochs": S(60.0, "passes over the train split; 0 with train.num_steps"),
  "optimizer": Component(registry.optimizers, "adam", "the update rule"),
  "learning_rate": S(1e-4, "the peak of the schedule", 0),
  "schedule": Component(registry.schedules, "constant", "of the learning rate"),
  "grad_clip_norm": S(0.5, "the largest global norm of the gradient; 0: no clipping", 0),
  "weight_decay_mask": choice(
    "all matrices",
    "which parameters get weight decay; matrices excludes norms, biases and embedding tables",
  ),
  "ema_decay": S(0.0, "of averaged parameters that are scored and kept; 0: none", 0, below=1),
  "log_every_steps": FREE(20, "updates between reports of the loss", 1),
  "eval_every_steps": FREE(0, "updates between evaluations; 0 with train.eval_every_epochs"),
  "eval_every_epochs": FREE(1.0, "epochs between evaluations; 0 with train.eval_every_steps"),
  "patience": FREE(0, "evaluations without a new best that end the run; 0: never", 0),
  "checkpoint_every_steps": FREE(500, "updates between checkpoints", 1),
  "max_to_keep": FREE(2, "recent checkpoints to keep, in addition to the best", 1),
  "matmul_dtype": choice(
    "float32 bfloat16",
    "of the operands of matrix products; bfloat16 is mixed precision: sums, norms, softmax and "
    "what layers pass on stay in model.dtype",
  ),
  "param_sharding": choice(
    "replicated fsdp", "replicate parameters on all devices, or shard each over them", True
  ),
}
_EVAL = {
  "window": FREE(0, "tokens a row; 0: model.max_length", 0),
  "stride": FREE(0, "new tokens a window; 0: equal to the window, so windows do not overlap", 0),
  "batch_size": FREE(10, "rows", 1),
  "max_tokens": FREE(0, "of the validation split in training, in windows drawn once; 0: all", 0),
}
_SAMPLE = {
  "prompt": FREE("", 'a prompt that is continued and printed when training ends; "": none'),
  "length": FREE(300, "new tokens", 1),
  "temperature": FREE(1.0, "divides the logits; 0: the most likely token", 0),
  "top_k": FREE(0, "draw from the k most likely tokens; 0: from all", 0),
  "top_p": FREE(1.0, "draw from the most likely tokens of this probability", above=0, maximum=1),
  "overflow": choice(
    "slide continue error", "past the window: move it, continue where mixers can, or refuse", True
  ),
  "dtype": choice("model bfloat16", "of weights and computation; model: model.dtype", True),
}
SCHEMA: dict[str, Any] = {
  "seed": S(0, "of parameters, batches and dropout", 0, below=2**32),
  "plugins": FREE(
    (), "modules that --plugin imports; training records those that its components need"
  ),
  "model": _MODEL,
  "data": _DATA,
  "train": _TRAIN,
  "eval": _EVAL,
  "sample": _SAMPLE,
}
# Settings that name files and folders, those of components too.
_PATHS = """data.path data.data_dir data.manual_dir data.tokenizer_file train.init_from
  model.boundaries.file model.boundaries.run""".split()
# The length of a run may change on resume where the schedule does not depend on it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
# New names that are not the nearest of the old ones.
_RENAMED = {
  "train.products": "train.matmul_dtype",
  "train.parameters": "train.param_sharding",
  "train.batches": "train.sampling",
  "train.keep_checkpoints": "train.max_to_keep",
  "model.norm": "model.norm_position",
  "model.norm_kind": "model.norm_type",
}
_FREE_NAMES = ("implementation", "num_buckets")  # of components
_REGISTRIES = {"mixer": registry.mixers, "boundaries": registry.boundaries}
_REGISTRIES |= {"optimizer": registry.optimizers, "schedule": registry.schedules}


class Section(ConfigDict):
  """Takes a component's name for its section: `mixer = "we"` is `mixer = mixer("we")`.

  Several mixers in turn are a tuple of sections: `mixer = ("we", mixer("attention"))`, or
  "we,attention".
  """

  def __setitem__(self, key, value):
    if key in _REGISTRIES and isinstance(value, str | list | tuple):
      value = component(_REGISTRIES[key], value, key)
    elif isinstance(self.get(key), Section) and type(value) is ConfigDict:
      value = Section(value)
    if key == "mixer":  # from one to several, or back
      with self.ignore_type():
        super().__setitem__(key, value)
    else:
      super().__setitem__(key, value)

  def update(self, *other, **kwargs):
    """As of a ConfigDict; also takes components, by their names or sections."""
    for values in (*other, kwargs):
      types = str | ConfigDict | list | tuple
      names = {key for key in _REGISTRIES if isinstance(values.get(key), types)}
      for key in names:
        self[key] = values[key]
      super().update({key: values[key] for key in values if key not in names})

  def to_dict(self, *args, **kwargs):
    """As of a ConfigDict, with several mixers as a list of dicts."""
    plain = super().to_dict(*args, **kwargs)
    for key, value in plain.items():
      if key == "mixer" and isinstance(value, tuple):
        plain[key] = [dict(x) if _is_section(x) else x for x in value]
    return plain

  def __eq__(self, other):
    return isinstance(other, ConfigDict) and ConfigDict.__eq__(other, self)


def _is_section(value: Any) -> TypeGuard[Mapping]:
  return isinstance(value, Mapping | ConfigDict)


def default() -> ConfigDict:
  """Every setting of a run, by default as in the Dispatcher paper, Sec. 3.3."""
  return fill({})


def default_model() -> ConfigDict:
  """`default().model`, the settings of a model."""
  return fill({}, _MODEL, "model.")


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


def middle(boundaries: Any = "none", *, width: int = 0, **settings: Any) -> ConfigDict:
  """The section of a middle that has its own width or pools segments again.

    config.model.boundaries = dpjax.config.boundaries("routing", factor=3.0)
    config.model.middle = dpjax.config.middle(
      dpjax.config.boundaries("routing", factor=2.0), width=512
    )

  `model.mixer` and `model.num_layers` describe the innermost blocks.

  Args:
    boundaries: a section, or a name.
    width: D; 0 is that of the stage around it.
    **settings: `feed_forward_width`, as `width`, and another `middle`.
  """
  values = {"boundaries": boundaries, "width": width, **settings}
  return fill(values, _MIDDLE, "model.middle.")


def fill(
  values: Any, schema: Mapping[str, Any] = SCHEMA, prefix: str = "", *, is_complete: bool = False
) -> ConfigDict:
  """All settings, by default or from `values`: a configuration, JSON, or some settings.

    fill({"model": {"mixer": "we", "width": 64}}).model.mixer.adjustment  ->  True

  Args:
    values: settings by section. A component is a section with its name, or its name alone.
    schema: the settings that there are.
    prefix: of their full names.
    is_complete: refuses what is missing, and names in place of sections.

  Raises:
    UserError: an unknown setting, a wrong type, or a value out of range.
  """
  for name in _section(values, prefix[:-1]):
    if name not in schema:
      settings = walk(fill({}, schema, prefix), schema, prefix)
      raise unknown(f"{prefix}{name}", [key for key, *_ in settings])
  if is_complete and (missing := [f"{prefix}{name}" for name in schema if name not in values]):
    raise UserError(f"{', '.join(missing)}: expected a value, got none")
  config = Section()
  for name, node in schema.items():
    key, default = f"{prefix}{name}", {} if isinstance(node, Mapping) else node.default
    value = values.get(name, default)
    if isinstance(node, Setting):
      config[name] = node.check(key, as_tuple(value)) if name in values else value
    elif value is None and default is None:
      config[name] = None
    elif isinstance(node, Component):
      config[name] = component(node.components, value, key, is_complete)
    else:
      inner = node.schema if isinstance(node, Middle) else node
      config[name] = fill(value, inner, f"{key}.", is_complete=is_complete)
  return config


def unknown(key: str, names: Iterable[str], owner: str = "") -> UserError:
  """The error for an unknown setting, which names the nearest or its new name."""
  return unknown_setting(key, [_RENAMED[key]] if key in _RENAMED else names, owner)


def component(components: Registry, value: Any, key: str, is_complete: bool = False) -> Any:
  """The section of a component's name or section; of several mixers, a tuple of sections."""
  if isinstance(value, str) and not is_complete:
    is_several = components is registry.mixers and "," in value
    value = value.split(",") if is_several else {"name": value}
  if isinstance(value, list | tuple) and len(value) == 1:
    return component(components, value[0], key, is_complete)
  if isinstance(value, list | tuple) and value and components is registry.mixers:
    sections = in_turn(key, value).items()
    return tuple(component(components, x, name, is_complete) for name, x in sections)
  return components.fill(_section(value, key), key, is_complete=is_complete)


def _section(value: Any, key: str) -> Mapping:
  """The value, if it is a section."""
  if not _is_section(value):
    raise UserError(f"{key}: expected a section of settings, got {value!r}")
  return value


def _nodes(config: Any, schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
  """The full name, the value and the node of each setting and component, or absent middle."""
  for name, node in schema.items():
    key, value = f"{prefix}{name}", config[name]
    if isinstance(node, Setting | Component) or value is None:
      yield key, value, node
    else:
      yield from _nodes(value, node.schema if isinstance(node, Middle) else node, f"{key}.")


def walk(
  config: Any, schema: Mapping[str, Any] = SCHEMA, prefix: str = ""
) -> Iterator[tuple[str, Any, Setting]]:
  """The full name and the value of each setting of a complete configuration, and the `Setting`."""
  for key, value, node in _nodes(config, schema, prefix):
    if isinstance(node, Setting):
      yield key, value, node
    elif value is None:
      yield key, None, Setting(None, node.meaning, type=ConfigDict, is_optional=True)
    else:
      for path, section in in_turn(key, value).items():
        yield f"{path}.name", section["name"], Setting(node.default, type=str)
        for field, setting in node.components.settings(section["name"]).items():
          is_free = field in _FREE_NAMES
          yield f"{path}.{field}", section[field], setting._replace(is_free=is_free)


def component_keys(config: Any) -> dict[str, Component]:
  """The sections that may hold a component, by full name, with those of middles."""
  nodes = _nodes(config, SCHEMA, "")
  return {key: node for key, _, node in nodes if isinstance(node, Component)}


def in_turn(key: str, mixer: Any) -> dict[str, Any]:
  """The sections of a mixer's setting by key: of several `key.0`, `key.1`, ...; of None, none."""
  if isinstance(mixer, list | tuple):
    return {f"{key}.{i}": section for i, section in enumerate(mixer)}
  return {} if mixer is None else {key: mixer}


def mixer_names(mixer: Any) -> str:
  """The name of a mixer's setting: "we", or "we,attention" of two in turn."""
  return ",".join(section["name"] for section in in_turn("", mixer).values())


def is_pooled(model: Mapping) -> bool:
  """Whether a model pools its tokens."""
  return model["boundaries"]["name"] != "none"


def stages_in(model: Mapping) -> dict[str, Mapping]:
  """The settings of a model and of each middle, which inherits what it does not set."""
  stages, key = {"model": model}, "model"
  while stages[key]["middle"] is not None:
    changes = {name: x for name, x in stages[key]["middle"].items() if x or x is None}
    stages[f"{key}.middle"] = {**stages[key], **changes}
    key += ".middle"
  return stages


def mixers_in(model: Mapping) -> dict[str, ConfigDict]:
  """The mixers of a model by section: its own and, with pooling, those of first and last."""
  sections = in_turn("model.mixer", model["mixer"])
  for key, stage in stages_in(model).items():
    if is_pooled(stage):
      for x in ("first", "last"):
        sections |= in_turn(f"{key}.{x}.mixer", stage[x]["mixer"])
  return sections


def plugins_in(config: ConfigDict) -> tuple[str, ...]:
  """The modules that registered the components of a configuration, for --plugin."""
  origins = {
    node.components.origin(section["name"])
    for key, node in component_keys(config).items()
    for section in in_turn(key, get(config, key)).values()
  }
  return tuple(sorted(filter(None, origins)))


def expand_paths(config: ConfigDict) -> ConfigDict:
  """A copy of a configuration, with the user's folder for a path's ~; raises as `fill`."""
  config = fill(config, is_complete=True)
  for key, value, _ in [*walk(config)]:
    if key in _PATHS and value:
      set_value(config, key, os.path.expanduser(value))
  return config


def flatten(config: Mapping, prefix: str = "") -> dict:
  """Settings by their full names: {"model": {"width": 8}} -> {"model.width": 8}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, list | tuple) and any(map(_is_section, value)):
      for path, section in in_turn(f"{prefix}{key}", value).items():
        flat |= flatten(section, f"{path}.")
    elif _is_section(value):
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = as_tuple(value)
  return flat


def get(config: Any, key: str) -> Any:
  """The setting of a full name, such as `model.mixer.num_heads`, or `model.mixer.1.num_heads`."""
  for name in filter(None, key.split(".")):
    config = config[int(name) if isinstance(config, tuple) else name]
  return config


def set_value(config: Any, key: str, value: Any) -> None:
  """Changes the setting of a full name, as `get`, whatever its type."""
  parent, _, name = key.rpartition(".")
  section = get(config, parent)
  with section.ignore_type():
    section[name] = value


def differences(old: Mapping, new: Mapping) -> list[str]:
  """The settings that keep `new` from resuming a run of `old`: `key: old there, new here`."""
  before, after = ({key: (x, y) for key, x, y in walk(fill(z))} for z in (old, new))
  is_unbounded = after["train.schedule.name"][0] == "constant"
  lines = []
  for key in sorted(before.keys() | after.keys()):
    there, here = (values.get(key, (None, None))[0] for values in (before, after))
    is_free = (after.get(key) or before[key])[1].is_free or is_unbounded and key in LENGTH_KEYS
    if there != here and not is_free:
      lines.append(f"{key}: {there!r} there, {here!r} here")
  return lines
