"""Shift-and-sum in chunks, with the inputs of every level at the last tokens in a cache.

B batch, C position in a chunk, H head, E feature of a head, K level, M place of the rings that a
chunk touches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax.ops import checks
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


class ShiftAndSumCache(NamedTuple):
  """The cache of `shift_and_sum_cached`: the inputs v_k of each level at the last tokens.

  Attributes:
    ring: [B, 2**K - 1, H, E], float32 or float64: the last 2**k values v_k of level k begin at
      place 2**k - 1; among them, position t has place t mod 2**k. At first zeros.
    length: [B], int32: the number of tokens so far in each row.
  """

  ring: jax.Array
  length: jax.Array


def init_shift_and_sum_cache(
  batch: int, num_heads: int, features: int, num_levels: int, dtype: DTypeLike = jnp.float32
) -> ShiftAndSumCache:
  """The cache before the first token: 4 * B * (2**K - 1) * H * E bytes of zeros, never more.

  B rows, H heads of E features, K <= 30 levels; `dtype`, a float, is that of values and gates.
  """
  checks.integers(batch=batch, num_heads=num_heads, features=features)
  checks.integer("num_levels", num_levels, 0, 30)
  checks.float_dtype(dtype)
  ring = jnp.zeros((batch, 2**num_levels - 1, num_heads, features), dtype)
  return ShiftAndSumCache(ring.astype(sum_dtype(ring)), jnp.zeros(batch, jnp.int32))


@automatic_axes
def shift_and_sum_cached(
  values: jax.Array, gates: jax.Array, cache: ShiftAndSumCache, *, lengths: ArrayLike | None = None
) -> tuple[jax.Array, ShiftAndSumCache]:
  """`shift_and_sum` of a chunk that continues each row where its cache ended.

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  with t the position in the whole row, of any length, for any division into chunks; v_k of
  positions before the chunk comes from the cache. For one head of one feature and two levels whose
  gates are 1, the row 1, 10, 100, 1000 in chunks of three tokens and one:

    [1, 10, 100] -> [1, 11, 111], ring [100 | 110, 11],   length 3
    [1000]       -> [1111],       ring [1000 | 110, 1100], length 4

  A token takes O(H * E * K) work. A donated cache is updated in place.

  Args:
    values: [B, C, H, E], floats, C >= 1.
    gates: [B, C, H, K], floats.
    cache: from `init_shift_and_sum_cache` or the previous call.
    lengths: [B], see `causal_attention_cached`.

  Returns:
    [B, C, H, E], in the dtype of `values`, 0 at the padding, and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, `lengths` are not in 0 .. C.
  """
  sizes: dict[str, int] = {}
  values, gates = checks.arrays(
    sizes, values=(values, "B>=1 C>=1 H>=1 E>=1"), gates=(gates, "B C H K")
  )
  chunk, levels = values.shape[1], gates.shape[3]
  ring = f"B {2**levels - 1} H E", sum_dtype(values, gates)
  checks.record("cache", cache, ShiftAndSumCache, sizes, ring=ring, length=("B", jnp.int32))
  v_bche, c_bchk = (jnp.asarray(x, cache.ring.dtype) for x in (values, gates))
  real_bc11 = None
  if lengths is not None:
    lengths = check_lengths(lengths, values.shape[0], chunk)
    real_bc11 = is_real(lengths, chunk)[..., None, None]
    v_bche, c_bchk = (jnp.where(real_bc11, x, 0) for x in (v_bche, c_bchk))
  new_length = cache.length + (chunk if lengths is None else lengths)
  if levels == 0:
    return v_bche.astype(values.dtype), ShiftAndSumCache(cache.ring, new_length)

  # Of level k a chunk reads and writes 2**k places, or as many as it has tokens: all levels in
  # one gather and one scatter, since each one alone would copy the ring.
  touched = [min(chunk, 2**k) for k in range(levels)]
  token_m = np.concatenate([np.arange(size, dtype=np.int32) for size in touched])
  # Both the first place of a level and the bits of t mod 2**k.
  ones_m = np.repeat(2 ** np.arange(levels, dtype=np.int32) - 1, touched)
  places_bm = ones_m[None] + ((cache.length[:, None] + token_m[None]) & ones_m[None])
  read_bmhe = jax.vmap(_read)(cache.ring, places_bm)
  written = []
  for k, past_bmhe in enumerate(jnp.split(read_bmhe, np.cumsum(touched)[:-1], axis=1)):
    size, c_bche = 2**k, c_bchk[..., k, None]
    if chunk <= size:
      kept = v_bche if real_bc11 is None else jnp.where(real_bc11, v_bche, past_bmhe)
      written.append(kept)
      v_bche += c_bche * past_bmhe
      continue
    written.append(_newest(v_bche, past_bmhe, lengths))
    first = v_bche[:, :size] + c_bche[:, :size] * past_bmhe
    rest = v_bche[:, size:] + c_bche[:, size:] * v_bche[:, :-size]
    # XLA would compute a concatenation again in each of the levels that follow.
    v_bche = lax.dynamic_update_slice_in_dim(v_bche, first, 0, axis=1)
    v_bche = lax.dynamic_update_slice_in_dim(v_bche, rest, size, axis=1)

  @jax.vmap
  def write(ring, places, new):
    return ring.at[places].set(new, mode="promise_in_bounds", unique_indices=True)

  ring = write(cache.ring, places_bm, jnp.concatenate(written, axis=1))
  if real_bc11 is not None:
    v_bche = jnp.where(real_bc11, v_bche, 0)  # Zero gates do not stop an inf.
  return v_bche.astype(values.dtype), ShiftAndSumCache(ring, new_length)


def _read(ring, places):
  return ring.at[places].get(mode="promise_in_bounds")


def _newest(v_bche, past_bmhe, lengths):
  """The last M < C real values of past and chunk, each at its position modulo M."""
  chunk, size = v_bche.shape[1], past_bmhe.shape[1]
  if lengths is None:
    return jnp.roll(v_bche[:, -size:], chunk % size, axis=1)
  index_m = jnp.arange(size, dtype=jnp.int32)[None]
  # The last real token of that index, negative if the chunk has none.
  token_bm = index_m + ((lengths[:, None] - 1 - index_m) & -size)
  newest_bmhe = jax.vmap(_read)(v_bche, jnp.maximum(token_bm, 0))
  return jnp.where((token_bm >= 0)[..., None, None], newest_bmhe, past_bmhe)
