"""Documents that follow one another in a row and do not see each other.

`is_start` [B, T] is 1 at the first token of each document and 0 elsewhere. All masks come
from the place of each token within its document: token t sees tokens t - o_t .. t.

    is_start   1 0 0 1 0 1
    o        0 1 2 0 1 0

B batch, T position (in a chunk, where rows go on).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax.errors import UserError
from dpjax.ops import checks
from dpjax.ops.lengths import is_real


def check_starts(is_start: ArrayLike, shape: Sequence[int], *, goes_on: bool = False) -> jax.Array:
  """Checks that starts are 0 or 1, and that rows begin with 1.

  Under `jit` and other transformations the values are unknown, and only the shape and the
  dtype are checked.

  Args:
    is_start: [B, T], integers or bools.
    shape: (B, T).
    goes_on: whether rows may begin with 0, to continue the document before.

  Returns:
    [B, T], int32.

  Raises:
    ValueError: the starts are wrong.
  """
  batch, length = checks.shape(shape)
  try:
    array = checks.array("is_start", is_start, "B T", checks.STARTS, B=batch, T=length)
  except ValueError as error:
    raise UserError(str(error)) from None
  if not goes_on and array.size and checks.is_known(array):
    is_begun = np.asarray(array)[:, 0] != 0
    if not is_begun.all():
      row = int(np.argmin(is_begun))
      raise UserError(f"is_start: expected every row to begin with 1, got 0 in row {row}")
  return jnp.asarray(array, jnp.int32)


def document_places(is_start: ArrayLike, before: jax.Array | None = None) -> jax.Array:
  """The place of each token within its document.

    o_t = t - (place of the last start at or before t)

  Args:
    is_start: [B, T], 0 or 1.
    before: [B], integers, the number of earlier tokens in each row's document; None means 0.

  Returns:
    [B, T], int32.

  Raises:
    ValueError: an argument is not as above.
  """
  is_start, before = checks.arrays(
    is_start=(is_start, "B T", checks.STARTS), before=(before, "B | None", checks.INTEGERS)
  )
  place_bt = jnp.arange(is_start.shape[1], dtype=jnp.int32)[None]
  is_start_bt = is_start.astype(bool)
  begin_b1 = 0 if before is None else -before.astype(jnp.int32)[:, None]
  return place_bt - lax.cummax(jnp.where(is_start_bt, place_bt, begin_b1), axis=1)


def starts_in_chunk(
  is_start: ArrayLike, shape: Sequence[int], lengths: jax.Array | None
) -> jax.Array:
  """The starts of a chunk's real tokens, [B, C], int32.

  Args:
    is_start: [B, C], 0 or 1.
    shape: (B, C).
    lengths: [B], from `dpjax.ops.lengths.check_lengths`; None means all.

  Raises:
    ValueError: see `check_starts`.
  """
  starts_bc = check_starts(is_start, shape, goes_on=True)
  return starts_bc if lengths is None else jnp.where(is_real(lengths, shape[1]), starts_bc, 0)


def document_length(is_start: jax.Array, before: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """The number of tokens in each row's last document after a chunk, [B], int32.

  Args:
    is_start: [B, C], from `starts_in_chunk`.
    before: [B], int32, the number before the chunk.
    lengths: see `starts_in_chunk`.
  """
  place_bc = jnp.arange(is_start.shape[1], dtype=jnp.int32)[None]
  begin_b = jnp.max(jnp.where(is_start > 0, place_bc, -before[:, None]), axis=1)
  return (is_start.shape[1] if lengths is None else lengths) - begin_b
