"""Runs the relations of a contract, and names the one that does not hold."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax.layers.common import Params
from dpjax.ops import arrays

T = TypeVar("T")


def choose(names: Collection[str] | None, table: Mapping[str, Callable[[T], None]]) -> list[str]:
  """The names of relations, or all of the table; a `ValueError` if one is unknown."""
  chosen = [*(table if names is None else names)]
  for name in chosen:
    arrays.choice("relations", name, table)
  return chosen


def check(case: T, names: Collection[str], table: Mapping[str, Callable[[T], None]]) -> None:
  """Checks relations of a case; an `AssertionError` begins with the name and docstring of one."""
  for name in names:
    try:
      table[name](case)
    except Exception as error:
      error_type = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
      statement = inspect.getdoc(table[name])
      raise AssertionError(f"{name}: {statement}\n{error_type}{error}") from error


def expect(condition: ArrayLike, message: str) -> None:
  """Raises an `AssertionError` with the message unless the condition holds."""
  np.testing.assert_(condition, message)


def draw_zeros(params: Params) -> Params:
  """The parameters, with N(0, 0.01) in place of arrays of zeros, which would hide their effect."""
  normal = np.random.default_rng(1).standard_normal
  return jax.tree.map(
    lambda x: x if x.any() else jnp.asarray(normal(x.shape) / 10, x.dtype), params
  )


def close_in_bfloat16(output: jax.Array, expected: jax.Array, message: str) -> None:
  """Checks equality up to the rounding of a few numbers of 8 bits, 0.4% each."""
  got = np.asarray(output, np.float32)
  want = np.asarray(expected, np.float32)
  np.testing.assert_allclose(got, want, rtol=0, atol=0.03 * np.abs(want).max(), err_msg=message)
