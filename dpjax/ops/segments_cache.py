"""Pooling of segments in chunks, with the open segment in a cache.

B batch, C position in the chunk, D feature.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from dpjax.ops import checks, segments
from dpjax.ops.documents import starts_in_chunk
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


class SegmentCache(NamedTuple):
  """The open segment of each row.

  Attributes:
    total: [B, D], float32 or float64, the sum of its tokens.
    count: [B], int32, the number of its tokens.
  """

  total: jax.Array
  count: jax.Array


def init_segment_cache(batch: int, width: int, dtype: DTypeLike = jnp.float32) -> SegmentCache:
  """The cache before the first token: zeros.

  Args:
    batch: B, at least 1.
    width: D, at least 1.
    dtype: the dtype of the inputs; the total is float64 for float64, else float32.

  Raises:
    ValueError: a size is below 1, or the dtype is not a float.
  """
  checks.integers(batch=batch, width=width)
  checks.float_dtype(dtype)
  total_bd = jnp.zeros((batch, width), dtype)
  return SegmentCache(total_bd.astype(sum_dtype(total_bd)), jnp.zeros(batch, jnp.int32))


@automatic_axes
def pool_segments_cached(
  inputs: jax.Array,
  boundaries: ArrayLike,
  cache: SegmentCache,
  *,
  method: str = "mean",
  lengths: ArrayLike | None = None,
  is_start: ArrayLike | None = None,
) -> tuple[jax.Array, SegmentCache]:
  """Pools the segments that end within a chunk; the first may have begun before it.

  Equals `dpjax.ops.pool_segments` of whole rows, for any division into chunks. For one feature
  and a row whose open segment has the tokens 4 and 6:

    chunk  [2, 30, 50, 8], boundaries [1, 0, 1, 0]
    mean:  [4, 40, 0, 0],  cache total 8, count 1
    last:  [2, 50, 0, 0]

  Each boundary in the chunk fills a place; the others are zero. Sums are in float32, or in
  float64 for such inputs.

  Args:
    inputs: [B, C, D], floats, C >= 1.
    boundaries: [B, C], zeros and ones: 1 where a segment ends.
    cache: from `init_segment_cache` or the previous call.
    method: "mean" or "last".
    lengths: [B], int32, in 0 .. C: the number of real tokens in each row. The rest, with any
      inputs and boundaries, has no effect. None means all.
    is_start: [B, C], 1 where a document begins, else 0, for kinds of boundaries with a null
      group. Each such document has a place before its segments, for the caller's null group
      (`dpjax.ops.segment_starts`). None continues all documents.

  Returns:
    [B, C, D], with `is_start` [B, 2 C, D], in the dtype of `inputs`, and the cache after the chunk.

  Raises:
    ValueError: an argument is not as above, or the cache does not match the rows. Values are
      checked only outside of `jit`.

  Source: the pooling paper (Nawrot et al. 2023, arXiv:2211.09761), Sec. 3.
  """
  sizes: dict[str, int] = {}
  inputs, boundaries = checks.arrays(
    sizes, inputs=(inputs, "B C>=1 D"), boundaries=(boundaries, "B C", checks.ONES)
  )
  checks.choice("method", method, segments.METHODS)
  batch, chunk, _ = inputs.shape
  dtype = sum_dtype(inputs)
  checks.record("cache", cache, SegmentCache, sizes, total=("B D", dtype), count=("B", jnp.int32))
  b_bc = boundaries.astype(jnp.int32)
  x_bcd, real_bc = inputs.astype(dtype), jnp.ones_like(b_bc)
  if lengths is not None:
    lengths = check_lengths(lengths, batch, chunk)
    is_real_bc = is_real(lengths, chunk)
    real_bc, b_bc = is_real_bc.astype(jnp.int32), jnp.where(is_real_bc, b_bc, 0)
    x_bcd = jnp.where(is_real_bc[..., None], x_bcd, 0)
  ids_bc = jnp.cumsum(b_bc, axis=1, dtype=jnp.int32) - b_bc
  num_b, most = jnp.sum(b_bc, axis=1, dtype=jnp.int32), chunk
  if is_start is not None:
    is_start = starts_in_chunk(is_start, (batch, chunk), lengths)
    ids_bc += jnp.cumsum(is_start, axis=1, dtype=jnp.int32)
    num_b, most = num_b + jnp.sum(is_start, axis=1, dtype=jnp.int32), 2 * chunk
  is_closed_bs = jnp.arange(most, dtype=jnp.int32)[None] < num_b[:, None]
  # One more than can end: the segment that stays open.
  totals_bsd = segments.sum_of_segments(x_bcd, ids_bc, most + 1).at[:, 0].add(cache.total)
  counts_bs = segments.sum_of_segments(real_bc, ids_bc, most + 1).at[:, 0].add(cache.count)
  open_b1 = num_b[:, None]
  cache = SegmentCache(
    jnp.take_along_axis(totals_bsd, open_b1[..., None], axis=1)[:, 0],
    jnp.take_along_axis(counts_bs, open_b1, axis=1)[:, 0],
  )
  if method == "mean":
    counts_bs1 = jnp.maximum(counts_bs[:, :most], 1)[..., None]
    s_bcd = totals_bsd[:, :most] / counts_bs1.astype(dtype)
  else:
    last_bcd = jnp.where(b_bc[..., None] > 0, x_bcd, 0)
    s_bcd = segments.sum_of_segments(last_bcd, ids_bc, most)
  return jnp.where(is_closed_bs[..., None], s_bcd, 0).astype(inputs.dtype), cache
