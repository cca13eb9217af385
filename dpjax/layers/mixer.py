"""The contract of a token mixer. B batch, T position, D width."""

import dataclasses
import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.errors import UserError, unknown
from dpjax.ops import arrays


class Mixer(Protocol):
  """The interface of a token mixer, which replaces self-attention: [B, T, D] -> [B, T, D].

  A mixer is a Linen module. It is causal, treats the rows of a batch independently, and takes any
  1 <= T <= `max_length`. Random draws come from the "dropout" stream, and only if `deterministic`
  is False.

  With a cache, a pytree of arrays, it takes rows in chunks of any size:
  `outputs, cache = mixer(chunk, cache=cache)`. The outputs equal those of whole rows. Chunks may
  extend rows beyond `max_length`, unless the class sets `is_unbounded = False`. A mixer may lack
  `init_cache`, `cache` and `lengths`; generation then takes full passes.

  With `document_starts`, a row holds several documents, each with the outputs it would give alone.
  The row may then be longer than `max_length`; a document may not. A mixer may lack
  `document_starts`; the model then refuses documents. With a cache, a row is one document.

  Mixers may share positions across layers: the method `make_positions` returns a function that
  makes a module, whose result all such mixers of a model receive as `positions`.

  Attributes:
    max_length: the longest T; a longer input raises a `ValueError`.
  """

  max_length: int

  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: Any = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> Any:
    """Mixes the positions of [B, T, D].

    Args:
      inputs: [B, T, D]; with a cache, the next T positions.
      deterministic: False in training.
      cache: None, or from `init_cache` or the previous call.
      lengths: [B], int32, with a cache: the number of real positions in each row, before
        its padding; None means all.
      document_starts: [B, T], 1 where a document begins, else 0; not with a cache. None: rows are
        one document each.

    Returns:
      [B, T, D], and with a cache also the new cache; outputs of padding are meaningless.
    """
    ...

  def init_cache(self, batch: int, width: int) -> Any:
    """The cache of B rows before the first token; it needs no parameters."""
    ...


def check_input(
  inputs: jax.Array,
  *,
  max_length: int,
  num_heads: int = 1,
  document_starts: jax.Array | None = None,
  cache: Any = None,
  is_unbounded: bool = True,
) -> jax.Array:
  """Checks the input of a mixer, and returns it as an array.

  Raises:
    ValueError: `inputs` is not a float array [B, T, D], or is longer than `max_length` without
      `document_starts` or a cache; D is not a multiple of `num_heads`; or `document_starts`
      is not [B, T] or is given with a cache.
  """
  inputs = arrays.check("inputs", inputs, Float[Array, "B T D"])
  arrays.check_not_empty(inputs=inputs)
  length, width = inputs.shape[1:]
  if document_starts is not None:
    ops.check_starts(document_starts, inputs.shape[:2])
    if cache is not None:
      raise UserError(
        "document_starts: expected None with a cache, whose rows are one document each"
      )
  elif length > max_length and not (is_unbounded and cache is not None):
    raise ValueError(f"inputs: expected T <= max_length = {max_length}, got T = {length}")
  if width % num_heads:
    raise ValueError(f"num_heads: expected a divisor of the width {width}, got {num_heads}")
  return inputs


def takes_starts(module: Any) -> bool:
  """Whether a mixer or boundaries module takes `document_starts`."""
  parameters = inspect.signature(type(module).__call__).parameters.values()
  return any(x.name == "document_starts" or x.kind is x.VAR_KEYWORD for x in parameters)


def check_takes_starts(module: Any) -> None:
  """Raises a `ValueError` if a module does not take `document_starts`."""
  if not takes_starts(module):
    raise UserError(
      f"document_starts: expected none for a model with {type(module).__name__}, which does not "
      "keep documents apart (its __call__ takes no `document_starts`), got some"
    )


def check_settings(
  module: Any,
  *,
  sizes: Sequence[str] = (),
  rates: Sequence[str] = (),
  implementations: Collection[str] | None = None,
) -> None:
  """Raises `field: expected ..., got ...` if a field of a module is out of range.

  `sizes` name integers of at least 1, `rates` probabilities below 1; `implementations` are the
  values of the field `implementation` besides None. Every bool, `dtype`, standard deviation
  (`init_std`) and `epsilon` is checked.
  """
  arrays.integers(**{name: getattr(module, name) for name in sizes})
  for name in rates:
    arrays.rate(name, getattr(module, name))
  for field in dataclasses.fields(module):
    name, value = field.name, getattr(module, field.name)
    if field.type is bool and not isinstance(value, bool | np.bool_):
      raise ValueError(f"{name}: expected True or False, got {value!r}")
    if name == "dtype":
      arrays.float_dtype(value)
    if name.endswith(("_std", "_scale", "epsilon")):
      arrays.number(name, value, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
  if implementations is not None and module.implementation is not None:
    if str(module.implementation) not in implementations:
      raise unknown("implementation", ("None", *implementations), module.implementation)
