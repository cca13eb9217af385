"""Argument checks, by name and before anything is computed.

`@typed` checks the arrays of a function against its signature. Checks read dtypes and shapes, and
values only of concrete arrays, so they add nothing to a traced function. Messages read
`name: expected ..., got ...`.
"""

import contextlib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax import core, export
from jaxtyping import AbstractArray, AbstractDtype

_Function = TypeVar("_Function", bound=Callable)
_MAX_INT = 2**31 - 1  # positions are int32
_MAX_FLOAT = float(np.finfo(np.float32).max)

if TYPE_CHECKING:
  from typing import Annotated as Binary
  from typing import Annotated as Real
  from typing import Annotated as Starts
else:

  class Real(AbstractDtype):
    """Booleans, integers and floats."""

    dtypes = [*jaxtyping.Real.dtypes, *jaxtyping.Bool.dtypes]

  class Binary(AbstractDtype):
    """Real numbers 0 and 1, such as boundaries."""

    dtypes = Real.dtypes

  class Starts(AbstractDtype):
    """Starts of documents [B, T]: 1 at the first token of each document, else 0."""

    dtypes = [*jaxtyping.Integer.dtypes, *jaxtyping.Bool.dtypes]


def typed(function: _Function) -> _Function:
  """Raises a `ValueError` for an array whose dtype or shape does not match its annotation.

    @typed
    def shift_and_sum(
      values: Float[Array, "B T H E"],
      gates: Float[Array, "B T H K"],
      cache: ShiftAndSumCache | None = None,
    )

  A letter has the same size in all arguments. A `NamedTuple` is checked by its fields. Array-likes
  are converted.
  """
  signature = inspect.signature(function)

  @functools.wraps(function)
  def run(*args, **kwargs):
    bound = signature.bind(*args, **kwargs)
    with jaxtyping.jaxtyped("context"):
      # At call time, as annotations may name classes that are defined later.
      for name, hint in _array_hints(function).items():
        if name in bound.arguments:
          bound.arguments[name] = _check(name, bound.arguments[name], hint)
    return function(*bound.args, **bound.kwargs)

  return cast(_Function, run)


def check(name: str, value: object, hint: object) -> Any:
  """Checks a value against an annotation, and returns it with arrays in place of array-likes."""
  with jaxtyping.jaxtyped("context"):
    return _check(name, value, hint)


def _check(name: str, value: object, hint: object) -> Any:
  choices = _choices(hint)
  is_array = isinstance(value, jax.Array) or not any(map(_is_array, choices))
  array = value if is_array else _as_array(value)
  for choice in choices:
    if value is None and choice is types.NoneType:
      return None
    if _is_record(choice) and isinstance(value, choice):
      fields = cast(Any, value)._asdict()
      fields |= {x: _check(f"{name}.{x}", fields[x], y) for x, y in _array_hints(choice).items()}
      return choice(**fields)
    if typing.get_origin(choice) is tuple and isinstance(value, tuple | list):
      inner = typing.get_args(choice)
      if inner[1:] == (Ellipsis,):  # Each has sizes of its own, such as the width of a stage.
        return tuple(check(name, x, inner[0]) for x in value)
      if len(value) == len(inner):
        return tuple(_check(name, x, y) for x, y in zip(value, inner, strict=True))
    if _is_array(choice) and isinstance(array, choice):
      _check_values(name, value, choice.dtype)  # A converted array may be a tracer.
      return array
  expected = " or ".join(_name(choice) for choice in choices)
  raise ValueError(f"{name}: expected {expected}{_sizes()}, got {describe(value)}")


def describe(value: object) -> str:
  """The dtype and shape of an array, as in float32[2, 7]; else the value or its type, in short."""
  array = value if isinstance(value, jax.Array) else _as_array(value)
  if array is None:
    return f"{value!r:.60}" if value is None or isinstance(value, str) else type(value).__name__
  return f"{array.dtype}{[*array.shape]}"


@functools.cache
def _array_hints(annotated: Callable) -> dict[str, object]:
  hints = typing.get_type_hints(annotated)
  return {x: y for x, y in hints.items() if x != "return" and any(map(_has_array, _choices(y)))}


def _choices(hint: object) -> tuple:
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if is_union else (hint,)


def _is_array(hint: object) -> TypeGuard[type[AbstractArray]]:
  return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _is_record(hint: object) -> TypeGuard[type]:
  return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _has_array(hint: object) -> bool:
  inner = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
  return _is_array(hint) or _is_record(hint) or any(map(_has_array, inner))


def _name(hint: object) -> str:
  if _is_array(hint):  # Its `__name__` includes the module of `Array` in some versions of JAX.
    return f"{hint.dtype.__name__}[Array, {hint.dim_str!r}]"
  if typing.get_origin(hint) is tuple:
    return f"tuple[{', '.join(map(_name, typing.get_args(hint)))}]"
  return "None" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def _sizes() -> str:
  """The sizes of letters that earlier arguments have fixed."""
  try:
    from jaxtyping._storage import get_shape_memo
  except ImportError:  # It is not public, and only messages need it.
    return ""
  sizes = get_shape_memo()[0]
  return f" with {', '.join(f'{name}={size}' for name, size in sizes.items())}" if sizes else ""


def _as_array(value: object) -> jax.Array | None:
  try:
    return None if value is None else jnp.asarray(np.asarray(value))
  except Exception:  # A user's object may raise anything.
    return None


def _check_values(name: str, array: object, dtype: type) -> None:
  if dtype not in (Binary, Starts) or not is_concrete(array):
    return
  values = np.asarray(array)
  is_wrong = (values != 0) & (values != 1)
  if is_wrong.any():
    raise ValueError(f"{name}: expected zeros and ones, got {values[is_wrong][0]}")
  if dtype is Starts and values.size and not values[:, 0].all():
    row = int(np.argmin(values[:, 0]))
    raise ValueError(f"{name}: expected every row to begin with 1, got 0 in row {row}")


def is_concrete(array: object) -> bool:
  """Whether the values of an array can be read: it is not traced, and fully addressable."""
  return not isinstance(array, core.Tracer) and getattr(array, "is_fully_addressable", True)


def check_not_empty(**arrays: jax.Array) -> None:
  """Checks that no axis of the arrays except the first is empty."""
  for name, x in arrays.items():
    if 0 in x.shape[1:]:
      raise ValueError(f"{name}: expected sizes of at least 1, got {describe(x)}")


def check_dtype(dtype: jnp.dtype, /, **arrays: jax.Array) -> None:
  """Checks the dtype of arrays."""
  for name, x in arrays.items():
    if x.dtype != dtype:
      raise ValueError(f"{name}: expected {dtype}, got {describe(x)}")


def key(name: str, value: object, rate: float) -> None:
  """Checks that a random key is given if the dropout rate needs one."""
  if rate and value is None:
    raise ValueError(f"{name}: expected a random key for a dropout of {rate}, got None")


def integer(name: str, value: object, least: int = 1, most: int = _MAX_INT) -> int:
  """Checks that a value is an integer in a range."""
  if not _is_integer(value):
    raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
  if not least <= value <= most:
    bound = f"least {least}" if value < least else f"most {most}"
    raise ValueError(f"{name}: expected at {bound}, got {value}")
  return int(value)


def _is_integer(value: object) -> TypeGuard[int]:
  if isinstance(value, bool | np.bool_ | core.Tracer):
    return False
  if isinstance(value, int):
    return True
  # What has no dtype is no array, whatever else it is.
  dtype = getattr(value, "dtype", object)
  return getattr(value, "ndim", None) == 0 and jnp.issubdtype(dtype, jnp.integer)


def integers(**values: object) -> None:
  """Checks that values are integers of at least 1."""
  for name, value in values.items():
    integer(name, value)


def number(
  name: str,
  value: Any,
  expected: str = "a finite number",
  is_right: Callable[[float], bool] = math.isfinite,
  *,
  traced: bool = False,
  error: type[ValueError] = ValueError,
) -> Any:
  """Checks that a value is a real number for which `is_right` holds, or, if allowed, is traced.

  Returns it as a Python float, since a Python integer may exceed JAX's.
  """
  scalar = np.asarray(value) if isinstance(value, int | float) else value
  dtypes = jnp.integer, jnp.floating
  is_scalar = hasattr(scalar, "dtype") and np.shape(scalar) == ()
  if is_scalar and any(jnp.issubdtype(scalar.dtype, x) for x in dtypes):
    if isinstance(scalar, core.Tracer):
      if traced:
        return scalar
    elif is_right(x := float(scalar.item())) and (abs(x) <= _MAX_FLOAT or not math.isfinite(x)):
      return x
  raise error(f"{name}: expected {expected}, got {value!r}")


def rate(name: str, value: object) -> None:
  """Checks that a value is a dropout rate."""
  number(name, value, "a probability in [0, 1)", lambda x: 0 <= x < 1)


def choice(name: str, value: object, names: Collection[str], *, or_none: bool = False) -> None:
  """Checks that a value is one of some names."""
  if not (value is None and or_none or isinstance(value, str) and value in names):
    none = " or None" if or_none else ""
    raise ValueError(f"{name}: expected one of {[*names]}{none}, got {value!r}")


def float_dtype(value: Any) -> None:
  """Checks that the argument `dtype` is a float dtype."""
  try:
    dtype = jnp.dtype("object" if value is None else value)
  except TypeError:
    dtype = jnp.dtype("object")
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"dtype: expected a float, got {value if dtype.hasobject else dtype.name}")


def ids(name: str, values: Any, expected: str = "token ids") -> tuple[int, ...]:
  """Checks that values are nonnegative int32 integers, such as token ids."""
  items: tuple = tuple(values) if np.iterable(values) else (None,)
  if not all(_is_integer(x) and 0 <= x <= _MAX_INT for x in items):
    raise ValueError(f"{name}: expected {expected}, got {values!r}")
  return tuple(map(int, items))


def shape(value: Any) -> tuple[Any, Any]:
  """Checks that the argument `shape` is (B, T)."""
  if not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
    raise ValueError(f"shape: expected (B, T), got {value!r}")
  batch, length = (x if export.is_symbolic_dim(x) else integer("shape", x, 0) for x in value)
  return batch, length


def dims(value: Any) -> str:
  """The argument `shape` in an annotation: (2, 7) -> "2 7", with "_" for a symbolic size."""
  return " ".join("_" if export.is_symbolic_dim(x) else str(x) for x in shape(value))


@contextlib.contextmanager
def reverse_mode(advice: str) -> Iterator[None]:
  """Adds advice to JAX's error about forward-mode derivatives."""
  try:
    yield
  except TypeError as error:
    if "forward-mode" not in str(error):
      raise
    raise TypeError(f"{advice} for forward-mode derivatives: {error}") from error
