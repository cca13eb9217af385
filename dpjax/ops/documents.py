"""Documents that follow one another in a row and do not see each other.

`document_starts` [B, T] is 1 at the first token of each document, else 0; token t sees t - o_t ..
t:

    document_starts   1 0 0 1 0 1
    o          0 1 2 0 1 0
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax.errors import UserError
from dpjax.ops import checks


def check_starts(document_starts: ArrayLike, shape: Sequence[int]) -> jax.Array:
  """[B, T], int32: starts as given; a `ValueError` unless they are 0 or 1 and rows begin with 1.

  If they are traced, only the shape and the dtype are checked.
  """
  batch, length = checks.shape(shape)
  try:
    array = checks.array(
      "document_starts", document_starts, "B T", checks.STARTS, B=batch, T=length
    )
  except ValueError as error:
    raise UserError(str(error)) from None
  if array.size and checks.is_known(array):
    is_first = np.asarray(array)[:, 0] != 0
    if not is_first.all():
      row = int(np.argmin(is_first))
      raise UserError(f"document_starts: expected every row to begin with 1, got 0 in row {row}")
  return jnp.asarray(array, jnp.int32)


def document_places(document_starts: ArrayLike) -> jax.Array:
  """The place of each token within its document, [B, T], int32.

    o_t = t - (place of the last start at or before t)

  Takes [B, T], 0 or 1.
  """
  document_starts = checks.array("document_starts", document_starts, "B T", checks.STARTS)
  place_bt = jnp.arange(document_starts.shape[1], dtype=jnp.int32)[None]
  return place_bt - lax.cummax(jnp.where(document_starts.astype(bool), place_bt, 0), axis=1)
