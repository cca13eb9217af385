"""Checks of arguments, by name and before anything is computed.

They read types, shapes and dtypes, and values only of arrays that are not traced, and so add
nothing to a traced function. Messages read `name: expected ..., got ...`.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, export

FLOATS, INTEGERS, BOOLEANS = "floats", "integers", "booleans"
NUMBERS, ANY = "real numbers", "numbers"
ONES, STARTS = "zeros and ones", "integers 0 or 1"  # of arrays whose values are 0 and 1

_REAL = (jnp.bool_, jnp.integer, jnp.floating)
_DTYPES = {
  FLOATS: (jnp.floating,),
  INTEGERS: (jnp.integer,),
  BOOLEANS: (jnp.bool_,),
  NUMBERS: _REAL,
  ANY: (*_REAL, jnp.complexfloating),
  ONES: _REAL,
  STARTS: (jnp.bool_, jnp.integer),
}
_MOST = 2**31 - 1  # places are int32
_LARGEST = float(np.finfo(np.float32).max)


def arrays(sizes: dict[str, int] | None = None, /, **arguments: tuple) -> list[jax.Array]:
  """Checks arrays, and returns them; what is no array yet becomes one.

    x, y, z = arrays(x=(x, "B T D"), y=(y, "L>=T | L>=T D"), z=(z, "B | None", ONES))

  An argument is a value, the axes that it may have, and a kind (by default `FLOATS`) or a dtype. A
  letter has one size in all arguments; "L>=T" is a new letter with the least size; a first or
  last "..." is any number of axes, and "None" allows None. `sizes` are the sizes of letters that
  are known; it receives those of the others.
  """
  sizes = {} if sizes is None else sizes
  return [_array(sizes, name, *argument) for name, argument in arguments.items()]


def array(name: str, value: Any, axes: str, kind: Any = FLOATS, **sizes: int) -> jax.Array:
  """Checks one array; see `arrays`."""
  return _array(sizes, name, value, axes, kind)


def _array(sizes: dict[str, int], name: str, value: Any, axes: str, kind: Any = FLOATS) -> Any:
  choices = [choice.split() for choice in axes.split("|")]
  if ["None"] in choices:
    if value is None:
      return None
    choices.remove(["None"])
  found = _as_array(value)
  expected = kind if isinstance(kind, str) else jnp.dtype(kind).name
  is_kind = _is_of(found, _DTYPES[kind]) if isinstance(kind, str) else found.dtype == kind
  fits = next((x for axes in choices if (x := _fit(axes, found.shape, sizes)) is not None), None)
  if fits is None or not is_kind:
    is_array = _is_of(found, _DTYPES[ANY])
    got = f"{found.dtype} {found.shape}" if is_array else type(value).__name__
    raise ValueError(f"{name}: expected {expected} {_show(choices, sizes)}, got {got}")
  sizes |= fits
  if expected in (ONES, STARTS) and is_known(found):
    values = np.asarray(found)
    is_wrong = (values != 0) & (values != 1)
    if is_wrong.any():
      raise ValueError(f"{name}: expected {expected}, got {values[is_wrong][0]}")
  return jnp.asarray(found)


def _is_of(array: Any, kinds: Sequence[Any]) -> bool:
  return any(jnp.issubdtype(array.dtype, kind) for kind in kinds)


def _as_array(value: Any) -> Any:
  if isinstance(value, jax.Array):
    return value
  try:
    return np.asarray(value)
  except Exception:  # whatever an object of the user's raises
    return np.asarray(None)


def is_known(array: Any) -> bool:
  """Whether the values of an array can be read: it is not traced, and all of it is here."""
  return not isinstance(array, core.Tracer) and getattr(array, "is_fully_addressable", True)


def _fit(axes: list[str], shape: tuple, sizes: dict[str, int]) -> dict[str, int] | None:
  """The sizes of all letters if a shape has these axes, else None."""
  if axes[:1] == ["..."]:
    axes = axes[1:]
    shape = shape[max(len(shape) - len(axes), 0) :]
  elif axes[-1:] == ["..."]:
    axes, shape = axes[:-1], shape[: len(axes) - 1]
  if len(axes) != len(shape):
    return None
  found = dict(sizes)
  for axis, size in zip(axes, shape, strict=True):
    letter, _, least = axis.partition(">=")
    if size != _size(letter, found, size) or size < _size(least or "0", found):
      return None
    found[letter] = size
  return found


def _size(letter: str, sizes: dict[str, int], default: int = 0) -> int:
  return int(letter) if letter.isdigit() else sizes.get(letter, default)


def _show(choices: list[list[str]], sizes: dict[str, int]) -> str:
  """The axes in letters, and where sizes are known, in numbers: [B, T, D] = (2, 7, D)."""

  def size(axis: str) -> str:
    letter, _, least = axis.partition(">=")
    if letter in sizes or not least:
      return str(sizes.get(letter, letter))
    return f"at least {_size(least, sizes)}"

  letters = [[axis.partition(">=")[0] for axis in axes] for axes in choices]
  known = [[size(axis) for axis in axes] for axes in choices]
  shown = " or ".join(f"[{', '.join(axes)}]" for axes in letters)
  if known == letters:
    return shown
  tuples = (f"({', '.join(axes)}{',' * (len(axes) == 1)})" for axes in known)
  return f"{shown} = {' or '.join(tuples)}"


def record(name: str, value: Any, kind: type, sizes: dict[str, int], /, **fields: Any) -> None:
  """Checks the type of a cache and its arrays, with axes and kinds as in `arrays`."""
  if not isinstance(value, kind):
    raise ValueError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
  for field, axes in fields.items():
    _array(
      sizes, f"{name}.{field}", getattr(value, field), *[axes] if isinstance(axes, str) else axes
    )


def key(name: str, value: Any, reason: str = "") -> None:
  """Checks that a value is one random key, of the new or the old style."""
  dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
  is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  if not is_new and not (dtype == jnp.uint32 and shape in ((2,), (4,))):
    got = None if value is None else f"{type(value).__name__} {shape or ''}".strip()
    raise ValueError(f"{name}: expected a random key{reason}, got {got}")


def integer(name: str, value: Any, least: int = 1, most: int = _MOST) -> int:
  """Checks that a value is an integer of a range."""
  if not _is_integer(value):
    raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
  if not least <= value <= most:
    bound = f"least {least}" if value < least else f"most {most}"
    raise ValueError(f"{name}: expected at {bound}, got {value}")
  return int(value)


def _is_integer(value: Any) -> bool:
  if isinstance(value, bool | np.bool_ | core.Tracer):
    return False
  is_scalar = np.ndim(value) == 0 and jnp.issubdtype(getattr(value, "dtype", object), jnp.integer)
  return isinstance(value, int) or is_scalar


def integers(**values: Any) -> None:
  """Checks that values are integers of at least 1."""
  for name, value in values.items():
    integer(name, value)


def number(
  name: str,
  value: Any,
  expected: str = "a finite number",
  is_right: Callable[[Any], bool] = math.isfinite,
  *,
  traced: bool = False,
  error: type[ValueError] = ValueError,
) -> Any:
  """Checks that a value is a real number for which `is_right` holds, or, if allowed, is traced.

  Returns it as a float of Python, since an integer of Python may exceed those of JAX.
  """
  found = _as_array(value)
  if found.shape == () and _is_of(found, (jnp.integer, jnp.floating)):
    if isinstance(found, core.Tracer):
      if traced:
        return found
    elif is_right(x := float(found.item())) and (abs(x) <= _LARGEST or not math.isfinite(x)):
      return x
  raise error(f"{name}: expected {expected}, got {value!r}")


def rate(name: str, value: Any) -> None:
  """Checks that a value is the probability of a dropout."""
  number(name, value, "a probability in [0, 1)", lambda x: 0 <= x < 1)


def choice(name: str, value: Any, known: Collection[str], *, or_none: bool = False) -> None:
  """Checks that a value is one of the known names."""
  if not (value is None and or_none or isinstance(value, str) and value in known):
    raise ValueError(f"{name}: expected one of {[*known]}{' or None' * or_none}, got {value!r}")


def float_dtype(value: Any) -> None:
  """Checks that the argument `dtype` is one of floats."""
  try:
    found = jnp.dtype("object" if value is None else value)
  except TypeError:
    found = jnp.dtype("object")
  if not jnp.issubdtype(found, jnp.floating):
    raise ValueError(f"dtype: expected a float, got {value if found.hasobject else found.name}")


def ids(name: str, values: Any, expected: str = "token ids") -> tuple[int, ...]:
  """Checks that values are integers of int32 of at least 0, such as ids of tokens."""
  found: tuple = tuple(values) if np.iterable(values) else (None,)
  if not all(_is_integer(x) and 0 <= x <= _MOST for x in found):
    raise ValueError(f"{name}: expected {expected}, got {values!r}")
  return tuple(map(int, found))


def shape(value: Any) -> tuple[Any, Any]:
  """Checks that the argument `shape` is (B, T)."""
  if not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
    raise ValueError(f"shape: expected (B, T), got {value!r}")
  batch, length = (x if export.is_symbolic_dim(x) else integer("shape", x, 0) for x in value)
  return batch, length


@contextlib.contextmanager
def reverse_mode(advice: str) -> Iterator[None]:
  """Adds to JAX's error about forward-mode derivatives what else can be done."""
  try:
    yield
  except TypeError as error:
    if "forward-mode" not in str(error):
      raise
    raise TypeError(f"{advice} for forward-mode derivatives: {error}") from error
