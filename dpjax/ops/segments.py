"""Pooling of tokens into segments of any length, and upsampling back.

A boundary of 1 means that a segment ends with that token. Shapes are static; results depend
neither on the capacity nor on the other rows.

    h                  [B, T, D]   a vector for each token
    s = pool_segments  [B, S-1, D] a vector for each segment
    null, s            [B, S, D]   with a learned vector, the null group, in front
    upsample_segments  [B, T, D]   the vector of the last closed segment

No future leaks: a token that closes a segment sees it; other tokens see the segment before, or
the null group. An open segment at the end of a row is never used. Each document
(`document_starts`, 1 at the first token of each) has its own null group, and its last segment
ends with it:

    h                a  b  c  d  e  f
    document_starts  1  0  0  1  0  0
    boundaries       0  1  0  0  0  1
    segments         null, ab, null, def
    read             0  1  1  2  2  3

B batch, T position (token), C position in a chunk, S segments and the null group, D feature.

Source: the pooling paper (Nawrot et al. 2023, arXiv:2211.09761), Sec. 3;
PiotrNawrot/dynamic-pooling@1e6f360:shortening.py. It uses a matrix [B, T, S] of weights; here
every token is added to its segment, with the same values and gradients.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Binary, Starts, typed
from dpjax.ops.backend import automatic_axes
from dpjax.ops.documents import check_lengths, is_real
from dpjax.ops.products import sum_dtype

METHODS = ("mean", "last")


def check_boundaries(boundaries: ArrayLike, shape: Sequence[int]) -> None:
  """Checks that boundaries are zeros and ones, of any real dtype, of the shape (B, T)."""
  arrays.check("boundaries", boundaries, Binary[Array, arrays.dims(shape)])


@typed
def segment_ids(boundaries: Binary[Array, "B T"]) -> Int32[Array, "B T"]:
  """The segment that every token belongs to, counted from 0 in every row.

    id_t = sum over i < t of b_i = cumsum(b)_t - b_t
    [[0, 1, 0, 0, 1, 0]] -> [[0, 0, 1, 1, 1, 2]]

  It has no gradient.
  """
  return _ids(boundaries)


@automatic_axes
@typed
def pool_segments(
  inputs: Float[Array, "B T D"],
  boundaries: Binary[Array, "B T"],
  capacity: int,
  *,
  method: str = "mean",
  document_starts: Starts[Array, "B T"] | None = None,
) -> Float[Array, "B capacity D"]:
  """Pools every segment into one vector: the mean of its tokens, or its last token.

    mean: s_m = (sum over l with id_l = m of h_l) / n_m,  n_m = number of those l
    last: s_m = h_l of the l with id_l = m and b_l = 1

  with id from `segment_ids`. For one feature and the boundaries [0, 1, 0, 0, 1, 0], `capacity` 4:

    mean: [1, 3, 10, 20, 60, 7] -> [2, 30, 7, 0]
    last: [1, 3, 10, 20, 60, 7] -> [3, 60, 0, 0]

  Vectors without a segment are zero. An open segment at the end has a mean if there is room, but
  no last token. Segments from `capacity` on are dropped. Sums are in float32.

  With "mean", float boundaries get a (reverse-mode) gradient, as in the authors' code: token l has
  the weight w_l = 1 + (id_l - stop_gradient(id_l)), and s_m = sum w h / sum w, so that

    ds_m / dw_l = (h_l - s_m) / n_m,   dw_l / db_i = 1 for i < l, else 0.

  Args:
    inputs: h, a vector for each token.
    boundaries: 1 where a segment ends, else 0.
    capacity: the maximum number of segments in a row, at least 0; T is always enough.
    method: "mean" or "last".
    document_starts: each document except the first then has a vector of zeros before its segments,
      for the caller's null group (`segment_starts`, one further). None: a row is one document.

  Returns s, in the dtype of `inputs`.

  Source: the pooling paper, Sec. 3 (mean) and Table 2 (last: sub-sampling).
  """
  capacity = arrays.integer("capacity", capacity, 0)
  arrays.choice("method", method, METHODS)
  if not capacity or not inputs.size:
    return jnp.zeros((inputs.shape[0], capacity, inputs.shape[2]), inputs.dtype)
  if method == "mean" and jnp.issubdtype(boundaries.dtype, jnp.floating):
    return _mean_by_boundaries(inputs, boundaries, document_starts, capacity)
  ids_bt = _ids(boundaries, document_starts)
  if method == "mean":
    return _mean(inputs, ids_bt, capacity)[0].astype(inputs.dtype)
  # All terms but one are zero, so the sum is exact in any dtype.
  last_btd = jnp.where(boundaries[..., None] != 0, inputs, jnp.zeros_like(inputs))
  return sum_of_segments(last_btd, ids_bt, capacity)


@automatic_axes
@typed
def upsample_segments(
  segments: Float[Array, "B S D"],
  boundaries: Binary[Array, "B T"],
  *,
  document_starts: Starts[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
  """Gives every token the vector of the last closed segment.

    u_t = segments[sum over i <= t of b_i]

  Index 0 is the null group, for tokens before the first boundary. For one feature, null group 9,
  and the boundaries [0, 1, 0, 0, 1, 0]:

    [9, 2, 30] -> [9, 2, 2, 2, 30, 30]

  If S is too small for a token's segment, this raises; under `jit`, the token gets nan. The
  gradient of a segment is the sum over its readers, in float32; boundaries get zero gradient.

  Args:
    segments: null group and segments in order, for each document in turn.
    boundaries: see `pool_segments`.
    document_starts: see `pool_segments`.

  Returns u, in the dtype of `segments`.
  """
  arrays.check_not_empty(segments=segments)
  index_bt = _ids(boundaries, document_starts) + boundaries.astype(jnp.int32)
  if index_bt.size and arrays.is_concrete(index_bt):
    last = int(np.asarray(index_bt).max())
    if last >= segments.shape[1]:
      raise ValueError(
        f"segments: expected S of at least {last + 1} of [B, S, D], with the null group, got "
        f"{arrays.describe(segments)}"
      )
  return take_segments(segments, index_bt)


def take_segments(segments: jax.Array, index: jax.Array) -> jax.Array:
  """segments[b, index[b, t]], and nan if the index, nondecreasing in t, is too large."""
  # The cast makes the gradient sum in float32.
  wide_bsd = segments.astype(sum_dtype(segments))
  return _take(wide_bsd, index, jnp.nan).astype(segments.dtype)


@typed
def segment_starts(
  boundaries: Binary[Array, "B T"],
  document_starts: Starts[Array, "B T"],
  capacity: int,
  *,
  has_null_group: bool = True,
) -> Int32[Array, "B capacity"]:
  """The starts of documents among segments, 0 or 1.

  A document begins with its null group, or, without one, with its first segment, which its first
  token must end. For the boundaries [0, 1, 0, 0, 0, 1] and the starts [1, 0, 0, 1, 0, 0], the
  result is [1, 0, 1, 0], for null, ab, null, def.
  """
  arrays.integer("capacity", capacity, 0)
  starts_bt = document_starts.astype(jnp.int32)
  ids_bt = _ids(boundaries, starts_bt if has_null_group else None)
  return sum_of_segments(starts_bt, ids_bt, capacity)


def _ids(boundaries, document_starts=None):
  """The index of each token's segment; with `document_starts`, null groups also count."""
  ones_bt = boundaries.astype(jnp.int32)
  ids_bt = jnp.cumsum(ones_bt, axis=1, dtype=jnp.int32) - ones_bt
  if document_starts is None:
    return ids_bt
  return ids_bt + jnp.cumsum(document_starts, axis=1, dtype=jnp.int32) - 1


def sum_of_segments(values, ids, capacity):
  """Sums row by row: over all rows at once, surplus segments would spill into the next row."""
  return jax.vmap(
    functools.partial(jax.ops.segment_sum, num_segments=capacity, indices_are_sorted=True)
  )(values, ids)


def _take(vectors, index, fill_value):
  """vectors[b, index[b, t]], and `fill_value` if the index is too large."""
  return jax.vmap(
    lambda row, i: row.at[i].get(mode="fill", fill_value=fill_value, indices_are_sorted=True)
  )(vectors, index)


def _mean(inputs, ids, capacity):
  """The means [B, S, D] and the sizes [B, S, 1], with 1 for empty segments."""
  wide_btd = inputs.astype(sum_dtype(inputs))
  sums_bsd = sum_of_segments(wide_btd, ids, capacity)
  sizes_bs = sum_of_segments(jnp.ones_like(ids), ids, capacity)
  sizes_bs1 = jnp.maximum(sizes_bs, 1)[..., None].astype(sums_bsd.dtype)
  return sums_bsd / sizes_bs1, sizes_bs1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mean_by_boundaries(inputs, boundaries, document_starts, capacity):
  return _mean(inputs, _ids(boundaries, document_starts), capacity)[0].astype(inputs.dtype)


def _mean_forward(inputs, boundaries, document_starts, capacity):
  means_bsd, sizes_bs1 = _mean(inputs, _ids(boundaries, document_starts), capacity)
  return means_bsd.astype(inputs.dtype), (inputs, boundaries, document_starts, means_bsd, sizes_bs1)


def _mean_backward(_, residuals, by_means):
  inputs, boundaries, document_starts, means_bsd, sizes_bs1 = residuals
  ids_bt = _ids(boundaries, document_starts)
  by_means_bsd = by_means.astype(means_bsd.dtype) / sizes_bs1
  by_inputs_btd = _take(by_means_bsd, ids_bt, 0)
  # Deviations before sums: a large common value must not cost precision.
  deviations_btd = inputs.astype(means_bsd.dtype) - _take(means_bsd, ids_bt, 0)
  by_weights_bt = jnp.sum(deviations_btd * by_inputs_btd, axis=2)
  # A boundary affects the weights of the tokens after it, in its document.
  later_bt = jnp.pad(by_weights_bt, ((0, 0), (0, 1)))[:, 1:]
  if document_starts is None:
    by_boundaries_bt = lax.cumsum(later_bt, axis=1, reverse=True)
  else:
    continues_bt = jnp.pad(document_starts == 0, ((0, 0), (0, 1)))[:, 1:]
    by_boundaries_bt = _sum_to_end(later_bt, continues_bt)
  return by_inputs_btd.astype(inputs.dtype), by_boundaries_bt.astype(boundaries.dtype), None


def _sum_to_end(values, continues):
  """s_t = values_t + s_{t+1} if the document continues at t + 1, else 0; [B, T]."""

  def join(later, earlier):
    more = jnp.where(earlier[1], later[0], 0)
    return earlier[0] + more, earlier[1] & later[1]

  sums = jnp.where(continues, values, 0)
  return lax.associative_scan(join, (sums, continues), reverse=True, axis=1)[0]


_mean_by_boundaries.defvjp(_mean_forward, _mean_backward)


class SegmentCache(NamedTuple):
  """The open segment of each row: the sum and the number of its tokens."""

  total: Float[Array, "B D"]
  count: Int32[Array, "B"]


def init_segment_cache(batch: int, width: int, dtype: DTypeLike = jnp.float32) -> SegmentCache:
  """The cache before the first token: zeros, for B rows of width D and inputs of this dtype."""
  arrays.integers(batch=batch, width=width)
  arrays.float_dtype(dtype)
  total_bd = jnp.zeros((batch, width), dtype)
  return SegmentCache(total_bd.astype(sum_dtype(total_bd)), jnp.zeros(batch, jnp.int32))


@automatic_axes
@typed
def pool_segments_cached(
  inputs: Float[Array, "B C D"],
  boundaries: Binary[Array, "B C"],
  cache: SegmentCache,
  *,
  method: str = "mean",
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C D"], SegmentCache]:
  """`pool_segments` of the segments that end within a chunk; the first may have begun before it.

  For one feature and an open segment of the tokens 4 and 6:

    chunk  [2, 30, 50, 8], boundaries [1, 0, 1, 0]
    mean:  [4, 40, 0, 0],  cache total 8, count 1
    last:  [2, 50, 0, 0]

  Args:
    inputs: a vector for each token of a chunk, C >= 1.
    boundaries: 1 where a segment ends, else 0.
    cache: from `init_segment_cache` or the previous call.
    method: "mean" or "last".
    lengths: the number of valid tokens in each row, in 0 .. C; None means all.

  Returns the segments, in the dtype of `inputs`, and the cache after the chunk.
  """
  arrays.check_not_empty(inputs=inputs)
  arrays.choice("method", method, METHODS)
  dtype = sum_dtype(inputs)
  arrays.check_dtype(dtype, **{"cache.total": cache.total})
  chunk = inputs.shape[1]
  b_bc = boundaries.astype(jnp.int32)
  x_bcd = inputs.astype(dtype)
  real_bc = jnp.ones_like(b_bc)
  if lengths is not None:
    is_real_bc = is_real(check_lengths(lengths, chunk), chunk)
    real_bc = is_real_bc.astype(jnp.int32)
    b_bc = jnp.where(is_real_bc, b_bc, 0)
    x_bcd = jnp.where(is_real_bc[..., None], x_bcd, 0)
  ids_bc = _ids(b_bc)
  num_b1 = jnp.sum(b_bc, axis=1, keepdims=True, dtype=jnp.int32)
  # One more than can end, for the segment that stays open.
  totals_bsd = sum_of_segments(x_bcd, ids_bc, chunk + 1).at[:, 0].add(cache.total)
  counts_bs = sum_of_segments(real_bc, ids_bc, chunk + 1).at[:, 0].add(cache.count)
  cache = SegmentCache(
    jnp.take_along_axis(totals_bsd, num_b1[..., None], axis=1)[:, 0],
    jnp.take_along_axis(counts_bs, num_b1, axis=1)[:, 0],
  )
  if method == "mean":
    counts_bs1 = jnp.maximum(counts_bs[:, :chunk], 1)[..., None]
    s_bcd = totals_bsd[:, :chunk] / counts_bs1.astype(dtype)
  else:
    s_bcd = sum_of_segments(jnp.where(b_bc[..., None] > 0, x_bcd, 0), ids_bc, chunk)
  is_closed_bc = jnp.arange(chunk, dtype=jnp.int32)[None] < num_b1
  return jnp.where(is_closed_bc[..., None], s_bcd, 0).astype(inputs.dtype), cache
