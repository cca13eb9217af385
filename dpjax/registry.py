"""Components by name, with their settings.

A component is a class or a function: a Linen module, a kind of boundaries, an `optax`
optimizer. Its settings are its fields (or arguments) with simple values. Fields that a model or
a run supplies, such as `max_length`, are no settings, and filled in when it is built.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import config_dict

from dpjax import errors
from dpjax.errors import UserError

if TYPE_CHECKING:

  class ConfigDict(dict[str, Any]):
    """Its attributes are the settings, which no type checker knows."""

    def __init__(self, settings: Mapping | None = None): ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value) -> None: ...

    def to_dict(self, *args, **kwargs) -> dict[str, Any]:
      """The settings as plain dicts."""
      ...

else:
  from ml_collections import ConfigDict

_log = logging.getLogger(__name__)

_SIMPLE = (float, int, str, bool, tuple)
LARGEST_FLOAT = float.fromhex("0x1.fffffep+127")  # of float32
_REQUIRED = inspect.Parameter.empty


class Setting(NamedTuple):
  """One setting: float, int, str, bool or tuple; `is_optional`: it may be None."""

  kind: type
  default: Any
  is_optional: bool


class Registry:
  """The components of one kind, by name.

  Args:
    kind: "mixer" and the like, for messages.
    given: fields that the builder supplies.
    known: components by name, as "module:attribute", imported at first use.
    needs: a field that every component has, or "".
  """

  def __init__(self, kind: str, given: Collection[str], known: Mapping[str, str], needs: str = ""):
    self._kind, self._needs = kind, needs
    self._given = frozenset(given) | {"parent", "name"}
    self._components: dict[str, str | Callable] = dict(known)
    self._origins: dict[str, str] = {}

  def names(self) -> tuple[str, ...]:
    """All names, in the order in which they were registered."""
    return tuple(self._components)

  def register(self, name: str, component: Callable) -> None:
    """Registers a class or a function under a name for configurations.

    Raises:
      ValueError: the name is taken or no identifier, or the component lacks a field.
    """
    if not name.isidentifier() or not callable(component):
      expected = "expected a name of letters, digits and underscores and a class or function"
      raise ValueError(f"{self._kind}: {expected}, got {name!r}, {component!r}")
    known = self._components.get(name)
    # A module that is imported again registers another object of the same name.
    if known not in (None, component) and _full_name(component) != _full_name(known):
      raise ValueError(f"{self._kind}: expected a name that is free, got {name}")
    fields = inspect.signature(component).parameters
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    if self._needs and self._needs not in fields and not takes_any:
      got = f"{component!r}, which takes {', '.join(fields) or 'nothing'}"
      expected = f"expected a class or function that takes {self._needs}"
      raise ValueError(f"{self._kind}: {expected}, got {got}")
    self._components[name] = component
    # The module that calls, which may be another than the component's.
    self._origins[name] = sys._getframe(1).f_globals.get("__name__", "__main__")

  def origin(self, name: str) -> str | None:
    """The module that registered a component, for --plugin; None for dpjax and the program."""
    origin = self._origins.get(name)
    return None if origin == "__main__" else origin

  def component(self, name: Any, key: str = "") -> Callable:
    """The component of a name; a `UserError` that lists the known names if there is none."""
    name = name if isinstance(name, str) else repr(name)
    if name not in self._components:
      load_plugins()
    if name not in self._components:
      note = f" (dpjax.register_{self._kind} adds another, in a module that --plugin names)"
      raise errors.unknown(key or self._kind, self._components, name, note)
    found = self._components[name]
    if isinstance(found, str):
      module, _, attribute = found.partition(":")
      found = self._components[name] = getattr(importlib.import_module(module), attribute)
    return typing.cast(Callable, found)

  def settings(self, name: str) -> dict[str, Setting]:
    """The settings of a component, in the order of its fields."""
    component, found = self.component(name), {}
    try:
      hints = typing.get_type_hints(component)
    except Exception:  # Annotations that only a type checker can read.
      hints = {}
    for field, parameter in inspect.signature(component).parameters.items():
      is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
      setting = _setting(parameter.default, hints.get(field))
      if setting is not None and not is_open and field not in self._given:
        found[field] = setting
    return found

  def defaults(self, name: str, key: str = "") -> ConfigDict:
    """The section of a component by default, unchecked: what has no default is None."""
    self.component(name, key)
    section = ConfigDict({"name": name})
    for field, setting in self.settings(name).items():
      is_open = setting.default in (None, _REQUIRED)
      section[field] = config_dict.placeholder(setting.kind) if is_open else setting.default
    return section

  def section(self, name: str, **values) -> ConfigDict:
    """The checked section of a component: its name, and all settings."""
    return self._filled(self.defaults(name), values, self._kind)

  def from_dict(self, values: Mapping, key: str) -> ConfigDict:
    """Reads a section, whose key is `key`, from JSON values; others take their defaults."""
    given = {name: as_tuple(value) for name, value in values.items()}
    return self._filled(self.defaults(given.pop("name", None), f"{key}.name"), given, key)

  def _filled(self, section: ConfigDict, values: Mapping, key: str) -> ConfigDict:
    # Checked before they are put in: a ConfigDict has errors of its own.
    self.check({**section.to_dict(), **values}, key)
    section.update(values)
    return section

  def check(self, section: Mapping, key: str) -> None:
    """A `UserError` unless a section, whose key is `key`, has a component's settings alone."""
    values = dict(section)
    name = values.pop("name", None)
    self.component(name, f"{key}.name")
    known = self.settings(name)
    for field, value in values.items():
      if field not in known:
        keys = [f"{key}.{each}" for each in known]
        raise errors.unknown_setting(f"{key}.{field}", keys, name)
      check_value(f"{key}.{field}", value, known[field])
    for field in known:
      if field not in values:
        raise UserError(f"{key}.{field}: expected a value, got none")

  def maker(self, section: Mapping, **given) -> partial:
    """A function that makes the component of a section, with those of `given` that it takes."""
    values = dict(section)
    component = self.component(values.pop("name"))
    declared = inspect.signature(component).parameters
    return partial(component, **values, **{key: given[key] for key in given if key in declared})

  def build(self, section: Mapping, key: str, **given) -> Any:
    """Makes the component of a section, as `maker`; a `UserError` where it rejects a setting."""
    try:
      return self.maker(section, **given)()
    except ValueError as error:
      raise UserError(f"{key}.{error}") from error
    except TypeError as error:  # A field without a default that nobody fills in.
      raise UserError(f"{key}: expected a component that can be made, got {error}") from error


@functools.cache
def load_plugins() -> None:
  """Imports the entry points "dpjax.plugins" of installed packages, once."""
  for entry_point in importlib.metadata.entry_points(group="dpjax.plugins"):
    try:
      entry_point.load()
    except Exception as error:  # A program of somebody else's.
      reason = f"{type(error).__name__}: {error}"
      _log.warning("dpjax.plugins: %s cannot be imported (%s)", entry_point.value, reason)


def import_plugin(module: str) -> None:
  """Imports a module that registers components; a `UserError` if it cannot."""
  try:
    importlib.import_module(module)
  except (Exception, SystemExit) as error:  # A program of the user's, with errors of any type.
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    expected = "expected a module that can be imported"
    raise UserError(f"--plugin: {expected}, got {module} ({reason})") from error


def as_tuple(value: Any) -> Any:
  """Lists, as JSON stores tuples, as tuples, also nested ones."""
  return tuple(map(as_tuple, value)) if isinstance(value, (list, tuple)) else value


def in_turn(key: str, mixer: Any) -> dict[str, Any]:
  """The sections of a mixer's setting by key: of several `key.0`, `key.1`, ...; of None, none."""
  if isinstance(mixer, list | tuple):
    return {f"{key}.{i}": section for i, section in enumerate(mixer)}
  return {} if mixer is None else {key: mixer}


def mixer_names(mixer: Any) -> str:
  """The name of a mixer's setting: "we", or "we,attention" of two in turn."""
  return ",".join(section["name"] for section in in_turn("", mixer).values())


def _full_name(component: Any) -> Any:
  return getattr(component, "__module__", component), getattr(component, "__qualname__", "")


def _setting(default: Any, hint: Any) -> Setting | None:
  """The setting of a field, or None if a configuration cannot express its value."""
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  members = typing.get_args(hint) if is_union else (hint,)
  is_optional = types.NoneType in members or default is None
  if type(default) in _SIMPLE:
    return Setting(type(default), default, is_optional)
  kinds = [typing.get_origin(member) or member for member in members]
  kind = next((kind for kind in _SIMPLE if kind in kinds), None)
  if kind is None or default not in (None, _REQUIRED):
    return None
  return Setting(kind, default, is_optional)


def check_value(key: str, value: Any, setting: Setting) -> None:
  """Raises a `UserError` unless a value has the type of its setting and fits into 32 bits."""
  if value is None and setting.is_optional:
    return
  kinds = (float, int) if setting.kind is float else (setting.kind,)
  if value is None or type(value) not in kinds:
    none = " or None" if setting.is_optional else ""
    raise UserError(f"{key}: expected a value of type {setting.kind.__name__}{none}, got {value!r}")
  if setting.kind is float and not abs(value) <= LARGEST_FLOAT:
    raise UserError(f"{key}: expected a number of float32 that is finite, got {value}")
  if setting.kind is int and not abs(value) < 2**31 and key != "seed":
    raise UserError(f"{key}: expected an integer below 2**31, got {value}")


_LAYERS = "dpjax.layers"
mixers = Registry(
  "mixer",
  given=("max_length", "position_dropout", "init_std", "dtype"),
  known={
    "dispatcher": f"{_LAYERS}.dispatcher:Dispatcher",
    "dispatcher_multihead": f"{_LAYERS}.dispatcher:MultiHeadDispatcher",
    "attention": f"{_LAYERS}.attention:SelfAttention",
    "relative_attention": f"{_LAYERS}.attention:RelativeAttention",
    "local_attention": f"{_LAYERS}.attention:LocalAttention",
    "short_convolution": f"{_LAYERS}.short_convolution:ShortConvolution",
    **{name: f"{_LAYERS}.extractors:{name.upper()}" for name in ("she", "he", "we", "me")},
  },
  needs="max_length",
)
boundaries = Registry(
  "boundaries",
  given=("width", "predictor_width", "init_std", "dtype", "frozen"),
  known={
    "none": f"{_LAYERS}.boundaries:NoBoundaries",
    "fixed": f"{_LAYERS}.boundaries:Fixed",
    "whitespace": f"{_LAYERS}.boundaries:Whitespace",
    "spacebyte": f"{_LAYERS}.boundaries:SpaceByte",
    "unigram": f"{_LAYERS}.learned_boundaries:Unigram",
    "entropy": f"{_LAYERS}.learned_boundaries:EntropySpikes",
    "gumbel": f"{_LAYERS}.learned_boundaries:Gumbel",
    "flexitokens": f"{_LAYERS}.learned_boundaries:FlexiTokens",
    "routing": f"{_LAYERS}.learned_boundaries:Routing",
    "entropy_threshold": f"{_LAYERS}.learned_boundaries:EntropyThreshold",
  },
)
_OPTIMIZER = "dpjax.training.optimizer"
optimizers = Registry(
  "optimizer",
  given=("learning_rate", "mask"),
  known={name: f"optax:{name}" for name in ("adam", "adamw", "lion", "sgd")}
  | {"muon": f"{_OPTIMIZER}:muon"},
)
schedules = Registry(
  "schedule",
  given=("peak", "num_steps"),
  known={x: f"{_OPTIMIZER}:{x}" for x in "constant cosine linear warmup_stable_decay".split()},
)
register_mixer, register_boundaries = mixers.register, boundaries.register
register_optimizer, register_schedule = optimizers.register, schedules.register
