"""Components by name, with their settings.

A component is a class or a function: a Linen module, boundaries, an `optax` optimizer.
Its settings are its fields (or arguments) with simple values. Fields that a model or a run
supplies, such as `max_length`, are not settings; they are filled in when it is built.
"""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import logging
import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import errors
from dpjax.errors import UserError

if TYPE_CHECKING:

  class ConfigDict(dict[str, Any]):
    """Settings as attributes, whose names type checkers cannot know."""

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
_REQUIRED = inspect.Parameter.empty
_MAX_FLOAT = float.fromhex("0x1.fffffep+127")  # the maximum of float32
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


class Setting(NamedTuple):
  """One setting: its default, meaning and range.

  Attributes:
    minimum, above, maximum, below: limits; `above` and `below` are exclusive.
    choices: the allowed values, if limited; for a tuple, strings accepted in its place.
    is_free: whether a run may resume with another value.
    type: float, int, str, bool or tuple; None: the type of the default.
    is_optional: whether it may be None.
  """

  default: Any
  meaning: str = ""
  minimum: float | None = None
  above: float | None = None
  maximum: float | None = None
  below: float | None = None
  choices: tuple[str, ...] = ()
  is_free: bool = False
  type: Any = None
  is_optional: bool = False

  @property
  def value_type(self) -> Any:
    """The type of its values."""
    return self.type or type(self.default)

  def check(self, key: str, value: Any) -> Any:
    """Returns the value; an integer becomes a float if the setting is a float.

    Raises:
      UserError: the value has another type or is out of range; `key` is the setting's full name.
    """
    if value is None:
      if self.is_optional:
        return None
      raise self._wrong_type(key, "None")
    expected_type = self.value_type
    is_number = expected_type is float and _is_real(value)
    if self.choices and isinstance(value, str):
      if value not in self.choices:
        raise errors.unknown(key, self.choices, value)
      return value
    if type(value) is not expected_type and not is_number:
      raise self._wrong_type(key, repr(value))
    if is_number and not abs(value) <= _MAX_FLOAT:
      raise UserError(f"{key}: expected a number of float32 that is finite, got {value}")
    if expected_type is int and self.below is None and not abs(value) < 2**31:
      raise UserError(f"{key}: expected an integer below 2**31, got {value}")
    for limit, is_within, words in (
      (self.minimum, operator.ge, "at least"),
      (self.above, operator.gt, "above"),
      (self.maximum, operator.le, "at most"),
      (self.below, operator.lt, "below"),
    ):
      if limit is not None and not is_within(value, limit):
        raise UserError(f"{key}: expected {words} {limit}, got {value}")
    return float(value) if is_number else value

  def parse(self, key: str, text: str) -> Any:
    """Parses a value from the command line; raises like `check`."""
    try:
      if self.is_optional and text == "None":
        return None
      if text in self.choices:
        return text
      if self.value_type is bool:
        return _BOOLS[text.lower()]
      if self.value_type is tuple:
        value = as_tuple(ast.literal_eval(text))
        return value if isinstance(value, tuple) else (value,)
      return self.value_type(text)
    except (ValueError, SyntaxError, KeyError) as error:
      several = " (dpjax sweep trains a run for each of several values)"
      is_list = self.value_type is not tuple and not {",", ";"}.isdisjoint(text)
      raise self._wrong_type(key, text + several * is_list) from error

  def _wrong_type(self, key: str, value: str) -> UserError:
    none = " or None" if self.is_optional else ""
    return UserError(
      f"{key}: expected a value of type {self.value_type.__name__}{none}, got {value}"
    )


def _is_real(value: Any) -> bool:
  return isinstance(value, Real) and not isinstance(value, bool)


class Registry:
  """The components of one type, by name.

  Args:
    type_name: such as "mixer", for messages.
    supplied: fields that the builder supplies.
    targets: components by name, as "module:attribute", imported at first use.
    required: a field that every component has, or "".
    of_builder: additional settings of every component, read only by the builder.
  """

  def __init__(
    self,
    type_name: str,
    supplied: Collection[str],
    targets: Mapping[str, str | Callable],
    required: str = "",
    of_builder: Mapping[str, Setting] = types.MappingProxyType({}),
  ):
    self.type_name, self._required, self._of_builder = type_name, required, of_builder
    self._supplied = frozenset(supplied) | {"parent", "name"}
    self._components: dict[str, str | Callable] = dict(targets)
    self._origins: dict[str, str] = {}

  def names(self) -> tuple[str, ...]:
    """All names, in the order of registration."""
    return tuple(self._components)

  def register(self, name: str, component: Callable) -> None:
    """Registers a class or a function under a name for configurations.

    Raises:
      ValueError: the name is taken or not an identifier, or the component lacks a field.
    """
    if not name.isidentifier() or not callable(component):
      expected = "expected a name of letters, digits and underscores and a class or function"
      raise ValueError(f"{self.type_name}: {expected}, got {name!r}, {component!r}")
    other = self._components.get(name)
    # A module that is imported again registers another object of the same name.
    if other not in (None, component) and _full_name(component) != _full_name(other):
      raise ValueError(f"{self.type_name}: expected a name that is free, got {name}")
    fields = inspect.signature(component).parameters
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    if self._required and self._required not in fields and not takes_any:
      got = f"{component!r}, which takes {', '.join(fields) or 'nothing'}"
      expected = f"expected a class or function that takes {self._required}"
      raise ValueError(f"{self.type_name}: {expected}, got {got}")
    self._components[name] = component
    # The calling module, which may differ from the component's.
    self._origins[name] = sys._getframe(1).f_globals.get("__name__", "__main__")

  def origin(self, name: str) -> str | None:
    """The module that registered a component, for --plugin; None for dpjax and the program."""
    origin = self._origins.get(name)
    return None if origin == "__main__" else origin

  def component(self, name: Any, key: str = "") -> Callable:
    """The component with a name; a `UserError` that lists all names if there is none."""
    name = name if isinstance(name, str) else repr(name)
    if name not in self._components:
      load_plugins()
    if name not in self._components:
      note = f" (dpjax.register_{self.type_name} adds another, in a module that --plugin names)"
      note *= self is not tokenizers  # `dpjax.text` must know their classes
      raise errors.unknown(key or self.type_name, self._components, name, note)
    component = self._components[name]
    if isinstance(component, str):
      module, _, attribute = component.partition(":")
      component = self._components[name] = operator.attrgetter(attribute)(
        importlib.import_module(module)
      )
    return typing.cast(Callable, component)

  def settings(self, name: str, key: str = "") -> dict[str, Setting]:
    """The settings of a component, in the order of its fields."""
    component = self.component(name, key)
    try:
      hints = typing.get_type_hints(component)
    except Exception:  # Annotations that only a type checker can read.
      hints = {}
    settings = {
      field: _setting(parameter, hints.get(field))
      for field, parameter in inspect.signature(component).parameters.items()
      if field not in self._supplied
    }
    settings = {field: setting for field, setting in settings.items() if setting is not None}
    return settings | dict(self._of_builder)

  def fill(self, values: Mapping, key: str, *, is_complete: bool = False) -> ConfigDict:
    """The section of a component: its name and all settings, from `values` or by default.

    Args:
      values: the name, and any settings.
      key: the section's full name, for messages.
      is_complete: whether every setting must be in `values`.

    Raises:
      UserError: an unknown name or setting, a value of the wrong type, or a missing value.
    """
    name: Any = values.get("name")
    settings = self.settings(name, key)
    for field in values:
      if field not in settings and field != "name":
        raise errors.unknown_setting(f"{key}.{field}", [f"{key}.{x}" for x in settings], name)
    section = ConfigDict({"name": name})
    for field, setting in settings.items():
      if field in values:
        section[field] = setting.check(f"{key}.{field}", as_tuple(values[field]))
      elif is_complete:
        raise UserError(f"{key}.{field}: expected a value, got none")
      else:
        section[field] = None if setting.default is _REQUIRED else setting.default
    return section

  def section(self, name: str, **values) -> ConfigDict:
    """The section of a component, made by `fill`."""
    return self.fill({"name": name, **values}, self.type_name)

  def maker(self, section: Mapping, **supplied) -> partial:
    """A function that makes the component of a section; it passes the `supplied` it accepts."""
    values = {field: x for field, x in section.items() if field not in self._of_builder}
    component = self.component(values.pop("name"))
    fields = inspect.signature(component).parameters
    return partial(component, **values, **{x: supplied[x] for x in supplied if x in fields})

  def build(self, section: Mapping, key: str, **supplied) -> Any:
    """Makes the component of a section, like `maker`; a `UserError` if it rejects a setting."""
    try:
      return self.maker(section, **supplied)()
    except ValueError as error:
      raise UserError(f"{key}.{error}") from error
    except TypeError as error:  # A field without a default is missing.
      raise UserError(f"{key}: expected a component that can be made, got {error}") from error


def _full_name(component: Any) -> Any:
  return getattr(component, "__module__", component), getattr(component, "__qualname__", "")


def _setting(parameter: inspect.Parameter, hint: Any) -> Setting | None:
  """The setting of a field, or None if a configuration cannot express its value."""
  default, is_union = parameter.default, typing.get_origin(hint) in (typing.Union, types.UnionType)
  members = typing.get_args(hint) if is_union else (hint,)
  if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
    return None
  value_type = type(default)
  if value_type not in _SIMPLE:
    member_types = [typing.get_origin(member) or member for member in members]
    value_type = next((x for x in _SIMPLE if x in member_types), None)
    if value_type is None or default not in (None, _REQUIRED):
      return None
  # A required setting is None until it is set.
  is_optional = types.NoneType in members or default is None
  return Setting(default, type=value_type, is_optional=is_optional)


@functools.cache
def load_plugins() -> None:
  """Imports the entry points "dpjax.plugins" of installed packages, once."""
  for entry_point in importlib.metadata.entry_points(group="dpjax.plugins"):
    try:
      entry_point.load()
    except Exception as error:  # Third-party code can raise any error.
      reason = f"{type(error).__name__}: {error}"
      _log.warning("dpjax.plugins: %s cannot be imported (%s)", entry_point.value, reason)


def import_plugin(module: str) -> None:
  """Imports a module that registers components; a `UserError` if it cannot."""
  try:
    importlib.import_module(module)
  except (Exception, SystemExit) as error:  # User code can raise any error.
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    expected = "expected a module that can be imported"
    raise UserError(f"--plugin: {expected}, got {module} ({reason})") from error


def as_tuple(value: Any) -> Any:
  """Converts lists, JSON's form of tuples, to tuples, recursively."""
  return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


_LAYERS, _OPTIMIZER = "dpjax.layers", "dpjax.training.optimizer"
mixers = Registry(
  "mixer",
  supplied=("max_length", "position_dropout", "init_std", "dtype", "out_scale"),
  targets={
    "dispatcher": f"{_LAYERS}.dispatcher:Dispatcher",
    "dispatcher_multihead": f"{_LAYERS}.dispatcher:MultiHeadDispatcher",
    "attention": f"{_LAYERS}.attention:SelfAttention",
    "relative_attention": f"{_LAYERS}.attention:RelativeAttention",
    "local_attention": f"{_LAYERS}.attention:LocalAttention",
    "short_convolution": f"{_LAYERS}.short_convolution:ShortConvolution",
    "mamba2": f"{_LAYERS}.mamba2:Mamba2",
    **{name: f"{_LAYERS}.extractors:{name.upper()}" for name in ("she", "he", "we", "me")},
  },
  required="max_length",
  of_builder={"has_feed_forward": Setting(True, "whether a feed-forward network follows")},
)
boundaries = Registry(
  "boundaries",
  supplied=("width", "predictor_width", "init_std", "dtype", "frozen"),
  targets={
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
optimizers = Registry(
  "optimizer",
  supplied=("learning_rate", "mask"),
  targets={name: f"optax:{name}" for name in ("adam", "adamw", "lion", "sgd")}
  | {"muon": f"{_OPTIMIZER}:muon"},
)
schedules = Registry(
  "schedule",
  supplied=("peak", "num_steps"),
  targets={x: f"{_OPTIMIZER}:{x}" for x in ("constant", "cosine", "linear", "warmup_stable_decay")},
)
_TEXT = "dpjax.text"
tokenizers = Registry(
  "tokenizer",
  supplied=("chunks",),
  targets={
    "characters": f"{_TEXT}.characters:Characters.train",
    "bytes": f"{_TEXT}.characters:Bytes.train",
    "bytes_with_ends": f"{_TEXT}.characters:BytesWithEnds.train",
    "wordpiece": f"{_TEXT}.pieces:WordPiece.train",
    "bpe": f"{_TEXT}.pieces:BytePairs.train",
    "sentencepiece_bpe": f"{_TEXT}.sentencepiece:SentencePieceBpe.train",
    "sentencepiece_unigram": f"{_TEXT}.sentencepiece:SentencePieceUnigram.train",
  },
)
register_mixer, register_boundaries = mixers.register, boundaries.register
register_optimizer, register_schedule = optimizers.register, schedules.register
