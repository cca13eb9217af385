"""Components by name, with their settings: the one place where a name becomes a class.

A component is a class or a function: a Linen module, boundaries, an `optax` optimizer.
Its settings are its fields (or arguments) with simple values. Fields that a model or a run
supplies, such as `max_length`, are not settings; they are filled in when it is built.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dpjax import errors
from dpjax.config.setting import ConfigDict, Setting, Settings, TypedSection, Value, as_tuple
from dpjax.config.supplied import BoundariesFields, MixerFields
from dpjax.errors import UserError

if TYPE_CHECKING:
  import optax

  from dpjax.layers.boundaries import Boundaries
  from dpjax.layers.mixer import Mixer
  from dpjax.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SIMPLE = (float, int, str, bool, tuple)
_REQUIRED = inspect.Parameter.empty
T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Registry(Generic[T]):
  """The components of one kind, by name: functions that make a T, or subclasses of T.

  Attributes:
    kind: such as "mixer", for messages.
    make_builtins: makes the table of dpjax's components; called at first use, as it imports them.
      A name with None stands for no component; it has no settings.
    supplied: fields that the builder supplies, and that therefore are no settings.
    required: a field that every component has, or "".
    free: settings that a run may change when it resumes.
    paths: settings that name files or folders.
    of_builder: additional settings of every component, read only by the builder.
    is_open: whether a plugin may register others.
  """

  kind: str
  make_builtins: Callable[[], Mapping[str, Callable[..., T] | None]]
  supplied: tuple[str, ...]
  required: str = ""
  free: tuple[str, ...] = ()
  paths: tuple[str, ...] = ()
  of_builder: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
  is_open: bool = True

  def __post_init__(self):
    self._registered: dict[str, Callable[..., T]] = {}
    self._origins: dict[str, str] = {}
    self._numpy_functions: dict[str, Callable | None] = {}

  @functools.cached_property
  def _builtins(self) -> Mapping[str, Callable[..., T] | None]:
    return self.make_builtins()

  def names(self) -> tuple[str, ...]:
    """All names, in the order of registration."""
    return (*self._builtins, *self._registered)

  def register(
    self, name: str, component: Callable[..., T], numpy_function: Callable | None = None
  ) -> None:
    """Registers a class or a function under a name for configurations.

    Args:
      name: the name.
      component: the class or function.
      numpy_function: what computes it in an export's `numpy_model.py`, if anything.

    Raises:
      ValueError: the name is taken or not an identifier, or the component lacks a field.
    """
    if not name.isidentifier() or not callable(component):
      expected = "expected a name of letters, digits and underscores and a class or function"
      raise ValueError(f"{self.kind}: {expected}, got {name!r}, {component!r}")
    known = {**self._builtins, **self._registered}
    # A module that is imported again registers another object of the same name.
    if name in known and _name(known[name]) != _name(component):
      raise ValueError(f"{self.kind}: expected a name that is free, got {name}")
    fields = inspect.signature(component).parameters
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    if self.required and self.required not in fields and not takes_any:
      got = f"{component!r}, which takes {', '.join(fields) or 'nothing'}"
      expected = f"expected a class or function that takes {self.required}"
      raise ValueError(f"{self.kind}: {expected}, got {got}")
    if name not in self._builtins:
      self._registered[name] = component
    self._numpy_functions[name] = numpy_function
    self._origins[name] = _module_in_execution()

  def is_builtin(self, name: str) -> bool:
    """Whether the component is dpjax's."""
    return name in self._builtins

  def numpy_function(self, name: str) -> Callable | None:
    """What computes a plugin's component in an export's `numpy_model.py`, if anything."""
    return self._numpy_functions.get(name)

  def origin(self, name: str) -> str | None:
    """The module that --plugin names for a component; None for dpjax's and the program's."""
    origin = self._origins.get(name)
    return None if origin == "__main__" else origin

  def component(self, name: str, key: str = "") -> Callable[..., T]:
    """The component with a name; a `UserError` that lists all names if there is none."""
    if name not in self.names():
      load_plugins()
    component = self._builtins.get(name) or self._registered.get(name)
    if component is None:
      note = f" (dpjax.register_{self.kind} adds another, in a module that --plugin names)"
      raise errors.unknown(key or self.kind, self.names(), name, note if self.is_open else "")
    return component

  def settings(self, name: str, key: str = "") -> dict[str, Setting]:
    """The settings of a component, in the order of its fields."""
    if name in self._builtins and self._builtins[name] is None:
      return {}
    component = self.component(name, key)
    try:
      hints = typing.get_type_hints(component)
    except Exception:  # Annotations that only a type checker can read.
      hints = {}
    settings = {}
    for field, parameter in inspect.signature(component).parameters.items():
      setting = _setting(parameter, hints.get(field))
      if setting is not None and field not in self.supplied and field not in ("parent", "name"):
        settings[field] = dataclasses.replace(
          setting, is_free=field in self.free, is_path=field in self.paths
        )
    return settings | dict(self.of_builder)

  def fill(self, values: Settings, key: str, *, is_complete: bool = False) -> ConfigDict:
    """The section of a component: its name and all settings, from `values` or by default.

    Args:
      values: the name, and some settings.
      key: the section's full name, for messages.
      is_complete: whether every setting must be in `values`.

    Raises:
      UserError: an unknown name or setting, a value of the wrong type, or a missing value.
    """
    name = values.get("name")
    if not isinstance(name, str):
      name = repr(name)  # for the message: no component has it
    settings = self.settings(name, key)
    for field in values:
      if field not in settings and field != "name":
        known = [f"{key}.{x}" for x in settings]
        raise errors.unknown_setting(f"{key}.{field}", known, name)
    section = TypedSection({"name": name})
    for field, setting in settings.items():
      if field in values:
        section[field] = setting.check(f"{key}.{field}", as_tuple(values[field]))
      elif is_complete:
        raise UserError(f"{key}.{field}: expected a value, got none")
      else:
        section[field] = None if setting.default is _REQUIRED else setting.default
    return section

  def section(self, name: str, **values: Value) -> ConfigDict:
    """The section of a component, made by `fill`."""
    return self.fill({"name": name, **values}, self.kind)

  def walk(self, section: Settings, key: str) -> Iterator[tuple[str, Value, Setting]]:
    """Yields the full name, value and `Setting` of a section's name and settings."""
    yield f"{key}.name", section["name"], Setting(section["name"], explicit_type=str)
    for field, setting in self.settings(section["name"]).items():
      yield f"{key}.{field}", section[field], setting

  def maker(self, section: Settings, **supplied: Any) -> partial[T]:
    """A function that makes the component of a section; it passes the `supplied` it accepts."""
    values = {field: x for field, x in section.items() if field not in self.of_builder}
    component = self.component(values.pop("name"))
    fields = inspect.signature(component).parameters
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    accepted = {field: x for field, x in supplied.items() if takes_any or field in fields}
    return partial(component, **values, **accepted)

  def build(self, section: Settings, key: str, **supplied: Any) -> T:
    """Makes the component of a section, like `maker`; a `UserError` if it rejects a setting.

    A component does so with a `ValueError` whose message begins with the setting's name.
    """
    make = self.maker(section, **supplied)
    try:
      inspect.signature(make.func).bind(**make.keywords)
    except TypeError as error:  # A field without a default is missing.
      raise UserError(f"{key}: expected a component that can be made, got {error}") from error
    try:
      return make()
    except ValueError as error:
      field = str(error).partition(":")[0]
      separator = "." if field in section or field in supplied else ": "
      raise UserError(f"{key}{separator}{error}") from error


def _name(component: object) -> tuple[str, str]:
  return getattr(component, "__module__", ""), getattr(component, "__qualname__", "")


def _setting(parameter: inspect.Parameter, hint: object) -> Setting | None:
  """The setting of a field, or None if a configuration cannot express its value."""
  if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
    return None
  default = parameter.default
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  members = typing.get_args(hint) if is_union else (hint,)
  value_type = type(default)
  if value_type not in _SIMPLE:
    member_types = [typing.get_origin(member) or member for member in members]
    value_type = next((x for x in _SIMPLE if x in member_types), None)
    if value_type is None or default not in (None, _REQUIRED):
      return None
  if value_type is int and isinstance(default, int) and float in members and int not in members:
    default = float(default)  # `rate: float = 1` may be 0.5
    value_type = float
  # A required setting is None until it is set.
  is_optional = types.NoneType in members or default is None
  return Setting(default, explicit_type=value_type, is_optional=is_optional)


def _module_in_execution() -> str:
  """The module whose import called this, perhaps through functions of others."""
  frame = inspect.currentframe()
  while frame is not None and frame.f_code.co_name != "<module>":
    frame = frame.f_back
  return "__main__" if frame is None else frame.f_globals.get("__name__", "__main__")


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


def _mixers() -> "dict[str, Callable[..., Mixer]]":
  from dpjax.layers import attention, dispatcher, extractors, mamba2, short_convolution

  return {
    "dispatcher": dispatcher.Dispatcher,
    "dispatcher_multihead": dispatcher.MultiHeadDispatcher,
    "attention": attention.SelfAttention,
    "relative_attention": attention.RelativeAttention,
    "local_attention": attention.LocalAttention,
    "short_convolution": short_convolution.ShortConvolution,
    "mamba2": mamba2.Mamba2,
    "she": extractors.SHE,
    "he": extractors.HE,
    "we": extractors.WE,
    "me": extractors.ME,
  }


def _boundaries() -> "dict[str, Callable[..., Boundaries] | None]":
  from dpjax.layers import learned_boundaries
  from dpjax.layers.boundaries import Fixed, SpaceByte, Whitespace

  return {
    "none": None,
    "fixed": Fixed,
    "whitespace": Whitespace,
    "spacebyte": SpaceByte,
    "unigram": learned_boundaries.Unigram,
    "entropy": learned_boundaries.EntropySpikes,
    "gumbel": learned_boundaries.Gumbel,
    "flexitokens": learned_boundaries.FlexiTokens,
    "routing": learned_boundaries.Routing,
    "entropy_threshold": learned_boundaries.EntropyThreshold,
  }


def _optimizers() -> "dict[str, Callable[..., optax.GradientTransformation]]":
  import optax

  from dpjax.training.optimizers import muon

  return {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": optax.lion,
    "sgd": optax.sgd,
    "muon": muon,
  }


def _schedules() -> "dict[str, Callable[..., optax.Schedule]]":
  from dpjax.training.optimizers import constant, cosine, linear, warmup_stable_decay

  return {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
  }


def _tokenizers() -> "dict[str, Callable[..., Tokenizer]]":
  from dpjax.text.tokenizer import tokenizer_classes

  return {name: each.train for name, each in tokenizer_classes().items()}


mixers = Registry(
  "mixer",
  _mixers,
  supplied=MixerFields._fields,
  required="max_length",
  free=("implementation",),
  of_builder={"has_feed_forward": Setting(True, "whether a feed-forward network follows")},
)
boundaries = Registry(
  "boundaries",
  _boundaries,
  supplied=BoundariesFields._fields,
  free=("num_buckets",),
  paths=("file", "run"),
)
optimizers = Registry("optimizer", _optimizers, supplied=("learning_rate", "mask", "model"))
schedules = Registry("schedule", _schedules, supplied=("peak", "num_steps"))
# `dpjax.text` has the table of their classes, to read a tokenizer.json without this package.
tokenizers = Registry(
  "tokenizer", _tokenizers, supplied=("chunks",), paths=("file",), is_open=False
)
KINDS = {each.kind: each for each in (mixers, boundaries, optimizers, schedules, tokenizers)}


def register_mixer(
  name: str, component: "Callable[..., Mixer]", *, numpy_function: Callable | None = None
) -> None:
  """Registers a subclass of `dpjax.layers.Mixer`, or a function that makes a mixer, under a name.

  Args:
    name: the name for configurations.
    component: the class, or a function that makes a mixer.
    numpy_function: the mixer in NumPy, `function(p, x, mixer)`, for the program of an export: `p`
      has its arrays by name, x is [T, D], and `mixer` its settings. It may use what
      `dpjax.runs.numpy_model` has, such as `np`, `linear` and `part`; an export refuses a function
      that uses others. Without it, an export has no program.

  Raises:
    ValueError: the name is taken or not an identifier, the class is no mixer, or the function does
      not take `max_length`.
  """
  from dpjax.layers.mixer import Mixer

  if isinstance(component, type):
    is_mixer = issubclass(component, Mixer) and component.mix is not Mixer.mix
    if not is_mixer:
      expected = "expected a subclass of dpjax.layers.Mixer that writes `mix`"
      raise UserError(f"mixer: {expected}, got {component!r}")
  mixers.register(name, component, numpy_function)


def register_boundaries(
  name: str, component: "type[Boundaries]", *, numpy_function: Callable | None = None
) -> None:
  """Registers a subclass of `dpjax.layers.Boundaries` under a name.

  Args:
    name: the name for configurations.
    component: the class.
    numpy_function: the boundaries in NumPy, `function(p, x, tokens, boundaries)`, for the program
      of an export: from x, [T, D], and the tokens, [T], the chance that a segment ends, [T]. See
      `register_mixer`.

  Raises:
    ValueError: the name is taken or not an identifier, or the class does not find boundaries.
  """
  from dpjax.layers.boundaries import Boundaries

  is_kind = isinstance(component, type) and issubclass(component, Boundaries)
  if not is_kind or component.find is Boundaries.find:
    expected = "expected a subclass of dpjax.layers.Boundaries that writes `find`"
    raise UserError(f"boundaries: {expected}, got {component!r}")
  boundaries.register(name, component, numpy_function)


register_optimizer = optimizers.register
register_schedule = schedules.register
