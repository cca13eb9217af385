"""Sections of settings: filled from `dpjax.config.schema`, walked, changed and compared.

`default()` gives all settings; a file of `configs/` starts from it.
"""

import inspect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from dpjax.config import registry, schema
from dpjax.config.registry import Registry
from dpjax.config.schema import ComponentSetting, Declaration, Subsection, declared
from dpjax.config.setting import ConfigDict, Setting, Settings, TypedSection, Value, as_tuple
from dpjax.errors import UserError, unknown_setting

T = TypeVar("T", bound=Settings)


class Section(TypedSection):
  """Accepts a component's name as its section: `mixer = "we"` is `mixer = mixer("we")`.

  Mixers that alternate are a tuple of sections: `mixer = ("we", mixer("attention"))`, or
  "we,attention".
  """

  def __setitem__(self, key, value):
    if key in registry.KINDS and isinstance(value, str | list | tuple):
      value = fill_component(registry.KINDS[key], value, key)
    elif type(value) is ConfigDict and key in self and isinstance(self[key], TypedSection):
      value = type(self[key])(value)
    if key in ("mixer", "stage_multipliers"):  # from one to several, or back
      with self.ignore_type():
        super().__setitem__(key, value)
      return
    super().__setitem__(key, value)

  def update(self, *other, **kwargs):
    """Like that of ConfigDict; also accepts components, as names or sections."""
    for values in (*other, kwargs):
      rest = {}
      for key in values:
        if key in registry.KINDS and isinstance(values[key], str | ConfigDict | list | tuple):
          self[key] = values[key]
        else:
          rest[key] = values[key]
      super().update(rest)

  def to_dict(self, *args, **kwargs):
    """Like that of ConfigDict, with several mixers as a list of dicts."""
    plain = super().to_dict(*args, **kwargs)
    for key, value in plain.items():
      if key == "mixer" and isinstance(value, tuple):
        plain[key] = [dict(x) if _is_section(x) else x for x in value]
    return plain


def _is_section(value: object) -> TypeGuard[Settings]:
  return isinstance(value, Mapping | ConfigDict)


def default() -> ConfigDict:
  """All settings of a run; the defaults follow the Dispatcher paper, Sec. 3.3."""
  return fill({})


def default_model() -> ConfigDict:
  """`default().model`, the settings of a model."""
  return fill({}, schema.Model, "model.")


def mixer(name: str, **settings: Value) -> ConfigDict:
  """The section of a token mixer: its name, and all of its settings.

    config.model.mixer = dpjax.config.mixer("dispatcher", num_levels=7)

  Layers may alternate between several mixers:

    config.model.mixer = ("we", dpjax.config.mixer("attention", num_heads=8))

  Raises a `UserError` if the name or a setting is unknown, or a value has the wrong type.
  """
  return registry.mixers.section(name, **settings)


def boundaries(name: str, **settings: Value) -> ConfigDict:
  """The section of boundaries, like `mixer`; "none" does not pool."""
  return registry.boundaries.section(name, **settings)


def optimizer(name: str, **settings: Value) -> ConfigDict:
  """The section of an optimizer, like `mixer`."""
  return registry.optimizers.section(name, **settings)


def schedule(name: str, **settings: Value) -> ConfigDict:
  """The section of a learning rate schedule, like `mixer`."""
  return registry.schedules.section(name, **settings)


def tokenizer(name: str, **settings: Value) -> ConfigDict:
  """The section of a tokenizer, like `mixer`."""
  return registry.tokenizers.section(name, **settings)


def middle(
  boundaries: str | Settings = "none", *, width: int = 0, **settings: Value | Settings
) -> ConfigDict:
  """The section of a middle that has its own width or pools segments again.

    config.model.boundaries = dpjax.config.boundaries("routing", factor=3.0)
    config.model.middle = dpjax.config.middle(
      dpjax.config.boundaries("routing", factor=2.0), width=512
    )

  `model.mixer` and `model.num_layers` describe the innermost blocks.

  Args:
    boundaries: a section, or a name.
    width: D; 0: as in the enclosing stage.
    **settings: `feed_forward_width`, like `width`, and another `middle`.
  """
  values = {"boundaries": boundaries, "width": width, **settings}
  return fill(values, schema.Middle, "model.middle.")


def fill(
  values: Settings, section: type = schema.Config, prefix: str = "", *, is_complete: bool = False
) -> ConfigDict:
  """Completes `values`, a configuration, JSON or some settings, with the defaults.

    fill({"model": {"mixer": "we", "width": 64}}).model.mixer.adjustment  ->  True

  Args:
    values: settings by section. A component is a section with its name, or only its name.
    section: the class that declares the settings.
    prefix: the beginning of their full names.
    is_complete: whether to reject missing settings, and names in place of sections.

  Raises:
    UserError: an unknown setting, a wrong type, or a value out of range.
  """
  nodes = declared(section)
  for name in _check_section(values, prefix[:-1]):
    if name not in nodes:
      settings = walk(fill({}, section, prefix), section, prefix)
      raise unknown_setting(f"{prefix}{name}", [key for key, *_ in settings])
  if is_complete and (missing := [f"{prefix}{name}" for name in nodes if name not in values]):
    raise UserError(f"{', '.join(missing)}: expected a value, got none")
  config = Section()
  for name, node in nodes.items():
    key = f"{prefix}{name}"
    if isinstance(node, Setting):
      is_set = name in values
      config[name] = node.check(key, as_tuple(values[name])) if is_set else node.default
    elif node.is_optional and values.get(name) is None:
      config[name] = None
    elif isinstance(node, ComponentSetting):
      value = values.get(name, node.default)
      config[name] = fill_component(node.registry, value, key, is_complete=is_complete)
    else:
      value = values.get(name, {})
      config[name] = fill(value, node.section(), f"{key}.", is_complete=is_complete)
  return config


def fill_component(
  components: Registry, value: Any, key: str, *, is_complete: bool = False
) -> ConfigDict | tuple:
  """The section for a component's name or section; for several mixers, a tuple of sections."""
  are_mixers = components is registry.mixers
  if isinstance(value, str) and not is_complete:
    value = value.split(",") if are_mixers and "," in value else {"name": value}
  if isinstance(value, list | tuple) and len(value) == 1:
    return fill_component(components, value[0], key, is_complete=is_complete)
  if isinstance(value, list | tuple) and value and are_mixers:
    return tuple(
      fill_component(components, each, name, is_complete=is_complete)
      for name, each in in_turn(key, value).items()
    )
  return components.fill(_check_section(value, key), key, is_complete=is_complete)


def _check_section(value: object, key: str) -> Settings:
  """Returns the value; a `UserError` if it is not a section."""
  if not _is_section(value):
    raise UserError(f"{key}: expected a section of settings, got {value!r}")
  return value


def _nodes(config: Settings, section: type, prefix: str) -> Iterator[tuple[str, Any, Declaration]]:
  """Yields the full name, value and declaration of each setting, component and absent middle."""
  for name, node in declared(section).items():
    key = f"{prefix}{name}"
    value = config[name]
    if isinstance(node, Subsection) and value is not None:
      yield from _nodes(value, node.section(), f"{key}.")
    else:
      yield key, value, node


def walk(
  config: Settings, section: type = schema.Config, prefix: str = ""
) -> Iterator[tuple[str, Value, Setting]]:
  """Yields the full name, value and `Setting` of each setting of a complete configuration."""
  for key, value, node in _nodes(config, section, prefix):
    if isinstance(node, Setting):
      yield key, value, node
    elif isinstance(node, ComponentSetting) and value is not None:
      for path, part in in_turn(key, value).items():
        yield from node.registry.walk(part, path)
    else:
      yield key, None, Setting(None, node.meaning, explicit_type=ConfigDict, is_optional=True)


def component_keys(config: Settings) -> dict[str, ComponentSetting]:
  """The settings that may hold a component, by full name, including those of middles."""
  nodes = _nodes(config, schema.Config, "")
  return {key: node for key, _, node in nodes if isinstance(node, ComponentSetting)}


def in_turn(key: str, mixer: T | list[T] | tuple[T, ...] | None) -> dict[str, T]:
  """The sections of a mixer setting by key: `key.0`, `key.1`, ... if several; {} for None."""
  if isinstance(mixer, list | tuple):
    return {f"{key}.{i}": section for i, section in enumerate(mixer)}
  return {} if mixer is None else {key: mixer}


def mixer_names(mixer: Settings | list[Settings] | tuple[Settings, ...] | None) -> str:
  """The name of a mixer setting: "we", or "we,attention" for two that alternate."""
  return ",".join(section["name"] for section in in_turn("", mixer).values())


def describe_model(model: Settings) -> str:
  """The mixers of a model, from the innermost stack out, and its boundaries.

  Such as "we", "dispatcher (gumbel boundaries)" or, with two equal stages, "attention within mamba2
  (2 x routing boundaries)".
  """
  inner = mixer_names(model["mixer"])
  text = inner
  stages = reversed([stage for stage in stages_in(model).values() if is_pooled(stage)])
  for (around, kind), equal in itertools.groupby(map(_mixers_and_boundaries, stages)):
    if around != inner:
      text += f" within {around}"
    count = len([*equal])
    text += f" ({count} x {kind} boundaries)" if count > 1 else f" ({kind} boundaries)"
    inner = around
  return text


def _mixers_and_boundaries(stage: Settings) -> tuple[str, str]:
  """The names of the mixers and of the boundaries of a stage."""
  outer = (mixer_names(stage[x]["mixer"] or stage["mixer"]) for x in ("first", "last"))
  return " and ".join(dict.fromkeys(outer)), stage["boundaries"]["name"]


def is_pooled(model: Settings) -> bool:
  """Whether a model pools its tokens."""
  return model["boundaries"]["name"] != "none"


def stages_in(model: Settings) -> dict[str, Settings]:
  """The settings of a model and of each middle, which inherits what it does not set."""
  stages = {"model": model}
  key = "model"
  while stages[key]["middle"] is not None:
    changes = {name: x for name, x in stages[key]["middle"].items() if x or x is None}
    stages[f"{key}.middle"] = {**stages[key], **changes}
    key += ".middle"
  return stages


def mixers_in(model: Settings) -> dict[str, ConfigDict]:
  """The mixers of a model by section: its own and, with pooling, those of first and last."""
  sections = in_turn("model.mixer", model["mixer"])
  for key, stage in stages_in(model).items():
    if is_pooled(stage):
      for x in ("first", "last"):
        sections |= in_turn(f"{key}.{x}.mixer", stage[x]["mixer"])
  return sections


def component_names(model: Settings) -> dict[Registry, set[str]]:
  """The names of the mixers and of the boundaries of a model, by their registry."""
  boundaries = {stage["boundaries"]["name"] for stage in stages_in(model).values()}
  return {
    registry.mixers: {section["name"] for section in mixers_in(model).values()},
    registry.boundaries: boundaries - {"none"},
  }


def plugins_in(config: ConfigDict) -> tuple[str, ...]:
  """The modules that registered the components of a configuration, for --plugin."""
  origins = {
    node.registry.origin(section["name"])
    for key, node in component_keys(config).items()
    for section in in_turn(key, get(config, key)).values()
  }
  return tuple(sorted(filter(None, origins)))


def expand_paths(config: ConfigDict) -> ConfigDict:
  """A copy of a configuration with ~ expanded in its paths; raises like `fill`."""
  config = fill(config, is_complete=True)
  for key, value, setting in list(walk(config)):
    if setting.is_path and isinstance(value, str):
      set_value(config, key, os.path.expanduser(value))
  return config


def flatten(config: Settings, prefix: str = "") -> dict[str, Value]:
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


def get(config: Settings | tuple[Settings, ...], key: str) -> Any:
  """The setting with a full name, such as `model.mixer.num_heads` or `model.mixer.1.num_heads`."""
  for name in filter(None, key.split(".")):
    config = config[int(name)] if isinstance(config, tuple) else config[name]
  return config


def set_value(config: ConfigDict, key: str, value: Value | Settings | Sequence[Settings]) -> None:
  """Changes the setting with a full name (see `get`), whatever its type."""
  parent, _, name = key.rpartition(".")
  section = get(config, parent)
  with section.ignore_type():
    section[name] = value


def differences(old: Settings, new: Settings) -> list[str]:
  """The settings that keep `new` from resuming a run of `old`: `key: old there, new here`."""
  old = fill(old)
  new = fill(new)
  before = {key: value for key, value, _ in walk(old)}
  after = {key: value for key, value, _ in walk(new)}
  settings = {key: setting for config in (old, new) for key, _, setting in walk(config)}
  schedule = registry.schedules.component(new.train.schedule.name)
  has_fixed_length = "num_steps" in inspect.signature(schedule).parameters
  lines = []
  for key in sorted(settings):
    there = before.get(key)
    here = after.get(key)
    is_free = settings[key].is_free or (settings[key].is_length and not has_fixed_length)
    if there != here and not is_free:
      lines.append(f"{key}: {there!r} there, {here!r} here")
  return lines
