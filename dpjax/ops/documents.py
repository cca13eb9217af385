"""Documents that follow one another in a row, and the valid tokens of a chunk.

`document_starts` [B, T] is 1 at the first token of each document, else 0; token t sees only the
tokens t - o_t .. t:

    document_starts   1 0 0 1 0 1
    o                 0 1 2 0 1 0

B batch, T position, C position of a chunk.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed


def check_starts(document_starts: ArrayLike, shape: Sequence[int]) -> Int32[Array, "B T"]:
  """The starts as int32; raises `ValueError` unless they are 0 or 1 [B, T] and rows begin with 1.

  If they are traced, only the shape and the dtype are checked. `shape` is (B, T).
  """
  starts_bt = arrays.check("document_starts", document_starts, Starts[Array, arrays.dims(shape)])
  return starts_bt.astype(jnp.int32)


@typed
def document_positions(document_starts: Starts[Array, "B T"]) -> Int32[Array, "B T"]:
  """The position of each token within its document.

  o_t = t - (position of the last start at or before t)
  """
  position_bt = jnp.arange(document_starts.shape[1], dtype=jnp.int32)[None]
  return position_bt - lax.cummax(jnp.where(document_starts.astype(bool), position_bt, 0), axis=1)


def check_lengths(lengths: Integer[Array, "B"], chunk: int, least: int = 0) -> Int32[Array, "B"]:
  """The number of valid tokens in each row, as int32; in `least` .. C, unless it is traced."""
  if arrays.is_concrete(lengths):
    values = np.asarray(lengths)
    is_wrong = (values < least) | (values > chunk)
    if is_wrong.any():
      raise ValueError(f"lengths: expected {least} .. {chunk}, got {values[is_wrong][0]}")
  return jnp.asarray(lengths, jnp.int32)


def mask_padding(
  inputs: Float[Array, "B C *dims"], lengths: Integer[Array, "B"] | None
) -> tuple[Float[Array, "B C *dims"], Int32[Array, "B"]]:
  """The inputs with zeros at the padding, and the number of valid positions in each row."""
  batch, chunk = inputs.shape[:2]
  if lengths is None:
    return inputs, jnp.full(batch, chunk, jnp.int32)
  lengths_b = check_lengths(lengths, chunk)
  is_real_bc = is_real(lengths_b, chunk)
  is_real_like = is_real_bc.reshape(batch, chunk, *(1,) * (inputs.ndim - 2))
  return jnp.where(is_real_like, inputs, 0), lengths_b


def is_real(lengths: jax.Array, chunk: int) -> Bool[Array, "B C"]:
  """Whether each position is valid: [2, 0], C = 3  ->  [[1, 1, 0], [0, 0, 0]]."""
  return jnp.arange(chunk, dtype=jnp.int32)[None] < lengths[:, None]
