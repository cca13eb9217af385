"""A causal convolution of a few taps, and its cache. B batch, T position, D feature, k taps."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from dpjax.ops import checks
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


@automatic_axes
def short_convolution(
  inputs: jax.Array, taps: jax.Array, *, document_starts: jax.Array | None = None
) -> jax.Array:
  """Adds to each input the ones before it, times the taps.

    y[b, t] = sum over j < k of taps[j] inputs[b, t - j]

  with zeros before the row. For the taps 2, 3 the inputs 1, 10, 100 become 2, 23, 230. It costs
  O(T k D); `causal_convolution` is for as many taps as positions.

  Args:
    inputs: [B, T, D], floats.
    taps: [k, D], floats.
    document_starts: [B, T], 1 at the first token of each document, else 0: zeros stand before each
      document. None means that each row is one document.

  Returns:
    [B, T, D], in the dtype of `inputs`; sums are in float32, or in float64 for such arrays.

  Raises:
    ValueError: shapes or dtypes do not match.
  """
  inputs, taps = checks.arrays(inputs=(inputs, "B T D"), taps=(taps, "k>=1 D"))
  length, dtype = inputs.shape[1], sum_dtype(inputs, taps)
  place_bt = None
  if document_starts is not None:
    place_bt = document_places(check_starts(document_starts, inputs.shape[:2]))
  x_btd, y_btd = inputs.astype(dtype), jnp.zeros(inputs.shape, dtype)
  for lag, tap_d in enumerate(taps.astype(dtype)[:length]):
    past_btd = jnp.pad(x_btd, ((0, 0), (lag, 0), (0, 0)))[:, :length]
    if place_bt is not None:
      past_btd = jnp.where((place_bt >= lag)[..., None], past_btd, 0)
    y_btd += past_btd * tap_d[None, None]
  return y_btd.astype(inputs.dtype)


def init_short_convolution_cache(
  batch: int, num_taps: int, width: int, dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """The last k - 1 inputs before the first token, [B, k - 1, D] zeros of a float dtype."""
  checks.integers(batch=batch, num_taps=num_taps, width=width)
  checks.float_dtype(dtype)
  return jnp.zeros((batch, num_taps - 1, width), dtype)


@automatic_axes
def short_convolution_cached(
  inputs: jax.Array, taps: jax.Array, cache: jax.Array, *, lengths: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
  """Continues every row of a short convolution: the outputs are those of whole rows.

  Args:
    inputs: [B, C, D], floats.
    taps: [k, D], floats, the same in every call.
    cache: [B, k - 1, D], the inputs before the chunk, the last one last.
    lengths: [B], see `causal_attention_cached`; outputs of the padding are meaningless.

  Returns:
    [B, C, D], and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, lengths are outside of 0 .. C.
  """
  sizes: dict[str, int] = {}
  inputs, taps = checks.arrays(sizes, inputs=(inputs, "B>=1 C>=1 D"), taps=(taps, "k>=1 D"))
  chunk, num_past = sizes["C"], sizes["k"] - 1
  cache = checks.array("cache", cache, "B P D", B=sizes["B"], P=num_past, D=sizes["D"])
  if lengths is None:
    lengths_b = jnp.full(inputs.shape[0], chunk, jnp.int32)
  else:
    lengths_b = check_lengths(lengths, inputs.shape[0], chunk)
    inputs = jnp.where(is_real(lengths_b, chunk)[..., None], inputs, 0)
  joined_bnd = jnp.concatenate([cache.astype(inputs.dtype), inputs], axis=1)
  y_bcd = short_convolution(joined_bnd, taps)[:, num_past:]
  last_bp = lengths_b[:, None] + jnp.arange(num_past, dtype=jnp.int32)[None]
  kept_bpd = jnp.take_along_axis(joined_bnd, last_bp[..., None], axis=1)
  return y_bcd, kept_bpd.astype(cache.dtype)
