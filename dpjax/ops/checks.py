"""Until layers and models are annotated: checks of arrays by letters. See `dpjax.ops.arrays`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.ops.arrays import choice as choice
from dpjax.ops.arrays import float_dtype as float_dtype
from dpjax.ops.arrays import ids as ids
from dpjax.ops.arrays import integer as integer
from dpjax.ops.arrays import integers as integers
from dpjax.ops.arrays import is_concrete as is_known
from dpjax.ops.arrays import number as number
from dpjax.ops.arrays import rate as rate

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
