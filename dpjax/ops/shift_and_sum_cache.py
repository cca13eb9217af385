"""Shift-and-sum token by token, with a cache.

Level k reads its input 2**k positions before, so a cache of the last 2**k inputs of each level
suffices.

Letters: B batch, C position in a chunk, H head, E feature of a head, K level, S place
of the rings, M place that a chunk touches.

Source: Alg. 1 of aclanthology.org/2022.clasp-1.3. The paper and the authors' code have no
cache and recompute the whole window for every token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax.ops import checks
from dpjax.ops.documents import document_length, document_places, starts_in_chunk
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


class ShiftAndSumCache(NamedTuple):
  """The cache of `shift_and_sum_cached`: the inputs v_k of each level at the last tokens.

  Attributes:
    ring: [B, S, H, E], S = 2**K - 1, float32 or float64: the last 2**k values v_k of level k
      begin at place 2**k - 1; among them, position t has place t mod 2**k. Zero before the
      first token.
    length: [B], int32: the number of tokens so far in each row.
  """

  ring: jax.Array
  length: jax.Array


def init_shift_and_sum_cache(
  batch: int,
  num_heads: int,
  features: int,
  num_levels: int,
  dtype: DTypeLike = jnp.float32,
) -> ShiftAndSumCache:
  """The cache before the first token: zeros.

  It takes 4 * B * (2**K - 1) * H * E bytes and does not grow: 1 MB for K = 9 levels
  (512 positions) of one head of 512 features.

  Args:
    batch: B, the number of rows.
    num_heads: H.
    features: E, the features of a head.
    num_levels: K, the levels of the gates; 0 for an empty cache.
    dtype: the dtype of values and gates; the ring is float64 for float64, else float32.

  Returns:
    ring [B, 2**K - 1, H, E] and length [B].

  Raises:
    ValueError: a number is below 1, `num_levels` is below 0 or above 30, or the dtype is not a
      float.
  """
  checks.integers(batch=batch, num_heads=num_heads, features=features)
  checks.integer("num_levels", num_levels, 0, 30)
  checks.float_dtype(dtype)
  ring = jnp.zeros((batch, 2**num_levels - 1, num_heads, features), dtype)
  ring = ring.astype(sum_dtype(ring))
  return ShiftAndSumCache(ring, jnp.zeros(batch, jnp.int32))


@automatic_axes
def shift_and_sum_cached(
  values: jax.Array,
  gates: jax.Array,
  cache: ShiftAndSumCache,
  *,
  lengths: ArrayLike | None = None,
  is_start: ArrayLike | None = None,
) -> tuple[jax.Array, ShiftAndSumCache]:
  """`shift_and_sum` of a chunk that continues each row where its cache ended.

  For k = 0 .. K-1, t the position in the whole row, and v_k[t] zero for t < 0:

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  where v_k of positions before the chunk comes from the cache. The outputs of all chunks
  together are those of `shift_and_sum` on the whole row, for any division into chunks. A row
  may have any length; position t always depends on t - 2**K + 1 .. t. Sums are in float32, or
  in float64 if an argument is.

  For one head of one feature and two levels whose gates are 1, the row 1, 10, 100,
  1000 in chunks of three tokens and one:

    [1, 10, 100] -> [1, 11, 111], ring [100 | 110, 11],   length 3
    [1000]       -> [1111],       ring [1000 | 110, 1100], length 4

  The first place of the ring is v_0 of the last position, the two others are v_1 of
  the last even and the last odd position.

  A chunk of one token takes O(H * E * K) work, a chunk of C tokens at most C times that. Jit it
  with the cache donated (`jax.jit(..., donate_argnums=2)`) to update the ring in place; a
  `lax.scan` that carries the cache does so by itself.

  Args:
    values: [B, C, H, E], floats, C >= 1.
    gates: [B, C, H, K], floats without unit; the paper's are in (0, 1).
    cache: from `init_shift_and_sum_cache` or the previous call. Its rows may have different
      lengths.
    lengths: [B], integers in 0 .. C: the number of real tokens in each row, before its
      padding. Padding, even nan, does not affect the cache, and its outputs are zero. None
      means all. Under `jit`, the values are not checked.
    is_start: [B, C], 1 where a document begins, else 0: it sees nothing before its start, as if
      its row began there. None continues all documents.

  Returns:
    The outputs [B, C, H, E], in the dtype of `values`, and the cache after the real
    tokens of the chunk.

  Raises:
    ValueError: the shapes do not match each other or the cache, with its number of levels;
      an array has the wrong kind of dtype; `lengths` are not in 0 .. C, or `is_start` is not 0
      or 1.
  """
  values, gates = _check(values, gates, cache)
  if lengths is not None:
    lengths = check_lengths(lengths, *values.shape[:2])
  chunk, levels = values.shape[1], gates.shape[3]
  dtype = cache.ring.dtype
  v_bche, c_bchk = (jnp.asarray(x, dtype) for x in (values, gates))
  real_bc11 = None
  if lengths is not None:
    real_bc11 = is_real(lengths, chunk)[..., None, None]
    v_bche = jnp.where(real_bc11, v_bche, 0)
    c_bchk = jnp.where(real_bc11, c_bchk, 0)

  shifts = 2 ** np.arange(levels, dtype=np.int32)
  if is_start is not None:
    is_start = starts_in_chunk(is_start, values.shape[:2], lengths)
    # What the ring holds of documents before is 0, so a row counts as all one so far.
    place_bc = document_places(is_start, cache.length)
    is_within_bck = place_bc[..., None] >= shifts[None, None]
    c_bchk = jnp.where(is_within_bck[:, :, None], c_bchk, 0)

  new_length = cache.length + (chunk if lengths is None else lengths)
  if levels == 0:
    return v_bche.astype(values.dtype), ShiftAndSumCache(cache.ring, new_length)

  # Of level k a chunk reads 2**k places and writes them again, or as many as it has
  # tokens. All levels are read by one gather and written by one scatter: read and
  # written one by one, every level would cost a copy of the ring.
  sizes = [min(chunk, 2**k) for k in range(levels)]
  places_bm = _places(cache.length, sizes)
  read_bmhe = jax.vmap(_read)(cache.ring, places_bm)
  written = []
  for k, past_bmhe in enumerate(jnp.split(read_bmhe, np.cumsum(sizes)[:-1], axis=1)):
    size, c_bche = 2**k, c_bchk[..., k, None]
    if chunk <= size:
      is_all = real_bc11 is None
      written.append(v_bche if is_all else jnp.where(real_bc11, v_bche, past_bmhe))
      v_bche += c_bche * past_bmhe
      continue
    written.append(_newest(v_bche, past_bmhe, lengths))
    first = v_bche[:, :size] + c_bche[:, :size] * past_bmhe
    rest = v_bche[:, size:] + c_bche[:, size:] * v_bche[:, :-size]
    # XLA would fuse a concatenation into the levels that follow and compute it again
    # in each of them.
    v_bche = lax.dynamic_update_slice_in_dim(v_bche, first, 0, axis=1)
    v_bche = lax.dynamic_update_slice_in_dim(v_bche, rest, size, axis=1)
  ring = jax.vmap(_write)(cache.ring, places_bm, jnp.concatenate(written, axis=1))
  if is_start is not None:
    place_s = np.concatenate([np.arange(size, dtype=np.int32) for size in shifts])
    age_bs = (new_length[:, None] - 1 - place_s[None]) & np.repeat(shifts - 1, shifts)[None]
    is_own_bs = age_bs < document_length(is_start, cache.length, lengths)[:, None]
    ring = jnp.where(is_own_bs[..., None, None], ring, 0)
  return v_bche.astype(values.dtype), ShiftAndSumCache(ring, new_length)


def _places(length, sizes):
  """The places [B, M] of the next `sizes[k]` positions, at most 2**k, of every level."""
  token_m = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
  # Both the place where a level begins and, as bits, what is left of a position there.
  ones_m = np.repeat(2 ** np.arange(len(sizes), dtype=np.int32) - 1, sizes)
  return ones_m[None] + ((length[:, None] + token_m[None]) & ones_m[None])


def _read(ring, places):
  return ring.at[places].get(mode="promise_in_bounds")


def _write(ring, places, values):
  return ring.at[places].set(values, mode="promise_in_bounds", unique_indices=True)


def _newest(v_bche, past_bmhe, lengths):
  """The last M real values of past and chunk, each at its position modulo M.

  Args:
    v_bche: [B, C, H, E], the values of the chunk, C > M.
    past_bmhe: [B, M, H, E], the M values before them; M is a power of two.
    lengths: [B], the number of real values in the chunk, or None for all.

  Returns:
    [B, M, H, E].
  """
  chunk, size = v_bche.shape[1], past_bmhe.shape[1]
  if lengths is None:
    return jnp.roll(v_bche[:, -size:], chunk % size, axis=1)
  index_m = jnp.arange(size, dtype=jnp.int32)[None]
  # The last real token of that index: the bits of -size take the largest multiple of
  # `size`, also of a negative number, as where the chunk has no such token.
  token_bm = index_m + ((lengths[:, None] - 1 - index_m) & -size)
  newest_bmhe = jax.vmap(_read)(v_bche, jnp.maximum(token_bm, 0))
  return jnp.where((token_bm >= 0)[..., None, None], newest_bmhe, past_bmhe)


def _check(values, gates, cache):
  sizes: dict[str, int] = {}
  values, gates = checks.arrays(
    sizes, values=(values, "B>=1 C>=1 H>=1 E>=1"), gates=(gates, "B C H K")
  )
  ring = f"B {2 ** sizes['K'] - 1} H E", sum_dtype(values, gates)
  checks.record("cache", cache, ShiftAndSumCache, sizes, ring=ring, length=("B", jnp.int32))
  return values, gates
