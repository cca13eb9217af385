"""Sections of settings: filled from a table, walked, changed and compared.

`default()` gives all settings; a file of `configs/` starts from it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from dpjax.config import registry
from dpjax.config.registry import ConfigDict, Registry, Setting, as_tuple
from dpjax.config.schema import (
  FREE_NAMES,
  LENGTH_KEYS,
  MIDDLE,
  MODEL,
  PATHS,
  RENAMED,
  SCHEMA,
  Component,
  Middle,
)
from dpjax.errors import UserError, unknown_setting

_REGISTRIES = {"mixer": registry.mixers, "boundaries": registry.boundaries}
_REGISTRIES |= {"optimizer": registry.optimizers, "schedule": registry.schedules}
_REGISTRIES["tokenizer"] = registry.tokenizers


class Section(ConfigDict):
  """Accepts a component's name as its section: `mixer = "we"` is `mixer = mixer("we")`.

  Mixers that alternate are a tuple of sections: `mixer = ("we", mixer("attention"))`, or
  "we,attention".
  """

  def __setitem__(self, key, value):
    if key in _REGISTRIES and isinstance(value, str | list | tuple):
      value = component(_REGISTRIES[key], value, key)
    elif type(value) is ConfigDict and key in self and isinstance(self[key], Section):
      value = Section(value)
    if key in ("mixer", "stage_multipliers"):  # from one to several, or back
      with self.ignore_type():
        super().__setitem__(key, value)
    else:
      super().__setitem__(key, value)

  def update(self, *other, **kwargs):
    """Like that of ConfigDict; also accepts components, as names or sections."""
    for values in (*other, kwargs):
      types = str | ConfigDict | list | tuple
      names = {key for key in _REGISTRIES if isinstance(values.get(key), types)}
      for key in names:
        self[key] = values[key]
      super().update({key: values[key] for key in values if key not in names})

  def to_dict(self, *args, **kwargs):
    """Like that of ConfigDict, with several mixers as a list of dicts."""
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
  """All settings of a run; the defaults follow the Dispatcher paper, Sec. 3.3."""
  return fill({})


def default_model() -> ConfigDict:
  """`default().model`, the settings of a model."""
  return fill({}, MODEL, "model.")


def mixer(name: str, **settings) -> ConfigDict:
  """The section of a token mixer: its name, and all of its settings.

    config.model.mixer = dpjax.config.mixer("dispatcher", num_levels=7)

  Layers may alternate between several mixers:

    config.model.mixer = ("we", dpjax.config.mixer("attention", num_heads=8))

  Raises a `UserError` if the name or a setting is unknown, or a value has the wrong type.
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


def tokenizer(name: str, **settings) -> ConfigDict:
  """The section of a tokenizer, like `mixer`."""
  return registry.tokenizers.section(name, **settings)


def middle(boundaries: Any = "none", *, width: int = 0, **settings: Any) -> ConfigDict:
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
  return fill(values, MIDDLE, "model.middle.")


def fill(
  values: Any, schema: Mapping[str, Any] = SCHEMA, prefix: str = "", *, is_complete: bool = False
) -> ConfigDict:
  """Completes `values`, a configuration, JSON or some settings, with the defaults.

    fill({"model": {"mixer": "we", "width": 64}}).model.mixer.adjustment  ->  True

  Args:
    values: settings by section. A component is a section with its name, or only its name.
    schema: the table of known settings.
    prefix: the beginning of their full names.
    is_complete: whether to reject missing settings, and names in place of sections.

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
  """The error for an unknown setting; it suggests the new name or the nearest one."""
  return unknown_setting(key, [RENAMED[key]] if key in RENAMED else names, owner)


def component(components: Registry, value: Any, key: str, is_complete: bool = False) -> Any:
  """The section for a component's name or section; for several mixers, a tuple of sections."""
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
  """Returns the value; a `UserError` if it is not a section."""
  if not _is_section(value):
    raise UserError(f"{key}: expected a section of settings, got {value!r}")
  return value


def _nodes(config: Any, schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
  """Yields the full name, value and node of each setting, component and absent middle."""
  for name, node in schema.items():
    key, value = f"{prefix}{name}", config[name]
    if isinstance(node, Setting | Component) or value is None:
      yield key, value, node
    else:
      yield from _nodes(value, node.schema if isinstance(node, Middle) else node, f"{key}.")


def walk(
  config: Any, schema: Mapping[str, Any] = SCHEMA, prefix: str = ""
) -> Iterator[tuple[str, Any, Setting]]:
  """Yields the full name, value and `Setting` of each setting of a complete configuration."""
  for key, value, node in _nodes(config, schema, prefix):
    if isinstance(node, Setting):
      yield key, value, node
    elif value is None:
      yield key, None, Setting(None, node.meaning, type=ConfigDict, is_optional=True)
    else:
      for path, section in in_turn(key, value).items():
        yield f"{path}.name", section["name"], Setting(node.default, type=str)
        for field, setting in node.components.settings(section["name"]).items():
          is_free = field in FREE_NAMES
          yield f"{path}.{field}", section[field], setting._replace(is_free=is_free)


def component_keys(config: Any) -> dict[str, Component]:
  """The sections that may hold a component, by full name, including those of middles."""
  nodes = _nodes(config, SCHEMA, "")
  return {key: node for key, _, node in nodes if isinstance(node, Component)}


def in_turn(key: str, mixer: Any) -> dict[str, Any]:
  """The sections of a mixer setting by key: `key.0`, `key.1`, ... if several; {} for None."""
  if isinstance(mixer, list | tuple):
    return {f"{key}.{i}": section for i, section in enumerate(mixer)}
  return {} if mixer is None else {key: mixer}


def mixer_names(mixer: Any) -> str:
  """The name of a mixer setting: "we", or "we,attention" for two that alternate."""
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
  """A copy of a configuration with ~ expanded in its paths; raises like `fill`."""
  config = fill(config, is_complete=True)
  for key, value, _ in [*walk(config)]:
    if key in PATHS and value:
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
  """The setting with a full name, such as `model.mixer.num_heads` or `model.mixer.1.num_heads`."""
  for name in filter(None, key.split(".")):
    config = config[int(name) if isinstance(config, tuple) else name]
  return config


def set_value(config: Any, key: str, value: Any) -> None:
  """Changes the setting with a full name (see `get`), whatever its type."""
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
