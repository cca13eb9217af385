"""A causal convolution of a few taps, and its cache. B batch, T position, D feature, k taps."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.backend import automatic_axes
from dpjax.ops.documents import document_positions, mask_padding
from dpjax.ops.products import sum_dtype


@automatic_axes
@typed
def short_convolution(
  inputs: Float[Array, "B T D"],
  taps: Float[Array, "k D"],
  *,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
  """Adds to each input the ones before it, times the taps.

    y[b, t] = sum over j < k of taps[j] inputs[b, t - j]

  with zeros before the row. For the taps 2, 3 the inputs 1, 10, 100 become 2, 23, 230. It costs
  O(T k D); `causal_convolution` is for as many taps as positions.

  With `document_starts`, 1 at the first token of each document, else 0, zeros precede each
  document. Sums are in float32, or in float64 for float64 arrays; the result has the dtype of
  `inputs`.

  Raises:
    ValueError: shapes or dtypes do not match.
  """
  dtype = sum_dtype(inputs, taps)
  position_bt = None if document_starts is None else document_positions(document_starts)

  @jax.checkpoint  # The gradient would keep the inputs once for each tap.
  def convolve(inputs, taps):
    x_btd = inputs.astype(dtype)
    y_btd = jnp.zeros(inputs.shape, dtype)
    length = inputs.shape[1]
    for lag, tap_d in enumerate(taps.astype(dtype)[:length]):
      past_btd = jnp.pad(x_btd, ((0, 0), (lag, 0), (0, 0)))[:, :length]
      if position_bt is not None:
        past_btd = jnp.where((position_bt >= lag)[..., None], past_btd, 0)
      y_btd += past_btd * tap_d[None, None]
    return y_btd.astype(inputs.dtype)

  return convolve(inputs, taps)


def init_short_convolution_cache(
  batch: int, num_taps: int, width: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, "B k-1 D"]:
  """The cache before the first token: k - 1 inputs, zeros in a float dtype."""
  arrays.integers(batch=batch, num_taps=num_taps, width=width)
  arrays.float_dtype(dtype)
  return jnp.zeros((batch, num_taps - 1, width), dtype)


@automatic_axes
@typed
def short_convolution_cached(
  inputs: Float[Array, "B C D"],
  taps: Float[Array, "k D"],
  cache: Float[Array, "B k-1 D"],
  *,
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C D"], Float[Array, "B k-1 D"]]:
  """Continues every row of a short convolution: the outputs equal those of whole rows.

  Args:
    inputs: a chunk, C at least 1.
    taps: the same in every call.
    cache: the inputs before the chunk, the latest last.
    lengths: see `causal_attention_cached`; outputs of the padding are meaningless.

  Returns:
    The outputs, in the dtype of `inputs`, and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, lengths are outside of 0 .. C.
  """
  arrays.check_not_empty(inputs=inputs)
  inputs, lengths_b = mask_padding(inputs, lengths)
  num_past = len(taps) - 1
  joined_bnd = jnp.concatenate([cache.astype(inputs.dtype), inputs], axis=1)
  y_bcd = short_convolution(joined_bnd, taps)[:, num_past:]
  last_bp = lengths_b[:, None] + jnp.arange(num_past, dtype=jnp.int32)[None]
  kept_bpd = jnp.take_along_axis(joined_bnd, last_bp[..., None], axis=1)
  return y_bcd, kept_bpd.astype(cache.dtype)
