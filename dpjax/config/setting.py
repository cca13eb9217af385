"""One setting: its default, meaning and range, and how its values are checked and parsed."""

import ast
import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
  from ml_collections import ConfigDict as ConfigDict

T = TypeVar("T")
Value = float | int | str | bool | tuple | None
# Values and sections by name: a configuration, a section of one, or JSON.
Settings = Mapping[str, Any]

MAX_FLOAT = float.fromhex("0x1.fffffep+127")  # the maximum of float32
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Setting(Generic[T]):
  """One setting.

  Attributes:
    default: the value if no other is set.
    meaning: for the page of settings and the command line's help.
    minimum, above, maximum, below: limits; `above` and `below` are exclusive.
    choices: the allowed values, if limited; for a tuple, strings accepted in its place.
    is_free: whether a run may resume with another value.
    is_length: whether it is the length of a run, free unless the schedule depends on it.
    is_path: whether it names a file or a folder, in which ~ is expanded.
    is_optional: whether it may be None.
    explicit_type: float, int, str, bool, tuple or ConfigDict; None: the type of the default.
  """

  default: T
  meaning: str = ""
  minimum: float | None = None
  above: float | None = None
  maximum: float | None = None
  below: float | None = None
  choices: tuple[str, ...] = ()
  is_free: bool = False
  is_length: bool = False
  is_path: bool = False
  is_optional: bool = False
  explicit_type: type | None = None

  @property
  def value_type(self) -> type:
    """The type of its values."""
    return self.explicit_type or type(self.default)

  @property
  def limits(self) -> dict[str, float]:
    """Its limits, by the words for them: {"at least": 0, "below": 1}."""
    limits = {
      "at least": self.minimum,
      "above": self.above,
      "at most": self.maximum,
      "below": self.below,
    }
    return {words: limit for words, limit in limits.items() if limit is not None}

  def check(self, key: str, value: Any) -> Value:
    """Returns the value; an integer becomes a float if the setting is a float.

    Raises:
      UserError: the value has another type or is out of range; `key` is the setting's full name.
    """
    if value is None:
      if self.is_optional:
        return None
      raise self._wrong_type(key, "None")
    if self.choices and isinstance(value, str):
      if value not in self.choices:
        raise errors.unknown(key, self.choices, value)
      return value
    if self.value_type is float and _is_number(value):
      if not abs(value) <= MAX_FLOAT:
        expected = "expected a finite number within the range of float32"
        raise UserError(f"{key}: {expected}, got {value}")
      self._check_limits(key, value)
      return float(value)
    if type(value) is not self.value_type:
      raise self._wrong_type(key, repr(value))
    if self.value_type is int:
      if self.below is None and not abs(value) < 2**31:
        raise UserError(f"{key}: expected an integer between -2**31 and 2**31, got {value}")
      self._check_limits(key, value)
    return value

  def _check_limits(self, key: str, number: float) -> None:
    expected = ""
    if self.minimum is not None and number < self.minimum:
      expected = f"at least {self.minimum}"
    elif self.above is not None and number <= self.above:
      expected = f"above {self.above}"
    elif self.maximum is not None and number > self.maximum:
      expected = f"at most {self.maximum}"
    elif self.below is not None and number >= self.below:
      expected = f"below {self.below}"
    if expected:
      raise UserError(f"{key}: expected {expected}, got {number}")

  def parse(self, key: str, text: str) -> Value:
    """Parses a value from the command line; raises like `check`."""
    if self.is_optional and text == "None":
      return None
    if text in self.choices:
      return text
    try:
      if self.value_type is bool:
        return _BOOLS[text.lower()]
      if self.value_type is tuple:
        value = as_tuple(ast.literal_eval(text))
        return value if isinstance(value, tuple) else (value,)
      return self.value_type(text)
    # The last three are those of `literal_eval`, of a key without a hash or of deep nesting.
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
      if self.value_type is not tuple and ("," in text or ";" in text):
        text = f"{text} (dpjax sweep trains a run for each of several values)"
      raise self._wrong_type(key, text) from error

  def _wrong_type(self, key: str, value: str) -> UserError:
    expected = self.value_type.__name__
    if self.is_optional:
      expected = f"{expected} or None"
    got = value or repr(value)
    return UserError(f"{key}: expected a value of type {expected}, got {got}")


def _is_number(value: object) -> bool:
  return isinstance(value, Real) and not isinstance(value, bool)


class TypedSection(ConfigDict):
  """A `ConfigDict` that raises a `UserError` if a new value has another type than the old one."""

  def __setitem__(self, key, value):
    try:
      super().__setitem__(key, value)
    except TypeError as error:
      is_section = isinstance(self[key], ConfigDict)
      expected = "a section" if is_section else f"a value of type {type(self[key]).__name__}"
      raise UserError(f"{key}: expected {expected}, got {value!r:.60}") from error

  # That of ConfigDict is False with a plain ConfigDict on the right, which is no subclass of this.
  def __eq__(self, other):
    return isinstance(other, ConfigDict) and ConfigDict.__eq__(other, self)


def as_tuple(value: T) -> T | tuple:
  """Converts lists, JSON's form of tuples, to tuples, recursively."""
  if isinstance(value, list | tuple):
    return tuple(as_tuple(x) for x in value)
  return value
