"""Causal attention in chunks, with the keys and values of earlier tokens in a cache.

A chunk continues each row at its end; rows may have different lengths. For any division into
chunks the outputs are those of the whole sequence.

B batch, C position in the chunk, M slot of the cache, N key of a query, H head, E feature of a
head, R distance.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Integer, PyTree

from dpjax.ops import arrays
from dpjax.ops.arrays import typed
from dpjax.ops.attention import causal_attention, check_distances, rotary_angles, rotate
from dpjax.ops.backend import automatic_axes
from dpjax.ops.documents import check_lengths, is_real
from dpjax.ops.products import LOW, as_factor, low_product, product, row_product


class AttentionCache(NamedTuple):
  """Keys and values of the tokens so far, for one layer.

  Token t of a row is in slot t mod M. Slots from `length` on are ignored, but must be finite. So a
  smaller `length` restarts a row, or, up to M tokens, returns to an earlier token.

  Attributes:
    keys: their slots come last, those of values second to last: what a product sums over comes
      first, so that no step transposes the cache.
    values: likewise.
    length: the number of tokens so far in each row, including lost ones.
  """

  keys: Float[Array, "B H E M"]
  values: Float[Array, "B H M E"]
  length: Int32[Array, "B"]

  @property
  def slots(self) -> int:
    """M."""
    return self.values.shape[2]

  def resize(self, slots: int) -> "AttentionCache":
    """Copies rows to M = `slots`, if no row has more tokens than either cache has slots.

    A step reads all slots, filled or not, so a short cache is fast while rows are short.
    """
    change = slots - self.slots
    keys = jax.lax.pad(
      self.keys, jnp.zeros((), self.keys.dtype), [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, change, 0)]
    )
    values = jax.lax.pad(
      self.values,
      jnp.zeros((), self.values.dtype),
      [(0, 0, 0), (0, 0, 0), (0, change, 0), (0, 0, 0)],
    )
    return AttentionCache(keys, values, self.length)


def init_attention_cache(
  batch: int, max_length: int, num_heads: int, features: int, dtype: DTypeLike = jnp.float32
) -> AttentionCache:
  """An empty cache, 2 B M H E zeros.

  `batch` is B, `max_length` M, `num_heads` H and `features` E, all at least 1; `dtype`, a float, is
  that of keys and values.
  """
  arrays.integers(batch=batch, max_length=max_length, num_heads=num_heads, features=features)
  arrays.float_dtype(dtype)
  return AttentionCache(
    jnp.zeros((batch, num_heads, features, max_length), dtype),
    jnp.zeros((batch, num_heads, max_length, features), dtype),
    jnp.zeros(batch, jnp.int32),
  )


# Attention reads all slots of a cache. Caches above this many bytes double as rows grow; each size
# compiles once.
_SMALL_BYTES = 2**25
_LEAST_SLOTS = 128


def resize_caches(caches: PyTree, full: PyTree, slots: int) -> PyTree:
  """Gives every `AttentionCache` in a tree `slots` slots, or as many as it has in `full`."""

  def resize(cache, whole):
    if not isinstance(cache, AttentionCache):
      return cache
    return cache.resize(min(slots, whole.slots))

  return jax.tree.map(resize, caches, full, is_leaf=lambda x: isinstance(x, AttentionCache))


def num_slots(full: PyTree, longest: int, max_length: int) -> int:
  """The slots for the caches in a tree, of full sizes in `full`: all slots if they are small.

  Rows will have up to `longest` tokens. Some caches may have more slots than `max_length`, for null
  groups.
  """
  leaves = jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, AttentionCache))
  caches = [x for x in leaves if isinstance(x, AttentionCache)]
  most = max((cache.slots for cache in caches), default=0)
  if sum(2 * x.keys.size * x.keys.dtype.itemsize for x in caches) <= _SMALL_BYTES:
    return most
  needed = max(longest + max(0, most - max_length), _LEAST_SLOTS)
  return min(most, 1 << (needed - 1).bit_length())


@automatic_axes
@typed
def causal_attention_cached(
  queries: Float[Array, "B C H E"],
  keys: Float[Array, "B C H E"],
  values: Float[Array, "B C H E"],
  cache: AttentionCache,
  *,
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C H E"], AttentionCache]:
  """Attends from every token of a chunk to itself and to all tokens before it.

  Token c of the chunk is token t = cache.length[b] + c of row b. With the keys k and the
  values v of the row so far, including the chunk,

    weights[b, h, c, s] = softmax over s <= t of queries[b, c, h] . k[b, s, h] / sqrt(E)
    output[b, c, h]     = sum over s <= t of weights[b, h, c, s] v[b, s, h]

  Two rows of one feature, with M = 4 and equal weights; the first receives its third token, the
  second nothing:

    cache:  values [[6 4 . .] [5 . . .]]  length [2 1]
    chunk:  values [[2 9] [7 7]]          lengths [1 0]
    output: [[4 0] [0 0]]
    cache:  values [[6 4 2 .] [5 . . .]]  length [3 1]

  Keys and values are first rounded to the dtype of the cache.

  Args:
    queries: one for each token of a chunk, 1 <= C <= M.
    keys: likewise, in the dtype of `queries`.
    values: likewise.
    cache: the cache of the tokens before the chunk; if donated, updated in place.
    lengths: the number of valid tokens in each row, in 0 .. C. The rest is padding, which may
      be nan. None means all.

  Returns:
    The output, in the dtype of `values`, 0 at the padding; and the cache with the chunk.
    If traced, outputs from token M on are nan; the cache counts these tokens, but drops them.

  Raises:
    ValueError: shapes or dtypes do not match, or C > M. Unless traced, also if `lengths` are
      outside of 0 .. C, or a row exceeds M tokens.

  Source: see `causal_attention`.
  """
  lengths = _check(queries, keys, values, cache, lengths)
  chunk = queries.shape[1]
  max_length = cache.values.shape[2]
  new = chunk if lengths is None else lengths
  if arrays.is_concrete(cache.length) and arrays.is_concrete(new):
    longest = (np.asarray(cache.length) + np.asarray(new)).max(initial=0)
    if longest > max_length:
      raise ValueError(f"cache: expected rows of at most M = {max_length} tokens, got {longest}")
  token_bc = cache.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
  cache = _append(keys, values, cache, token_bc, lengths)
  sees_bcm = jnp.arange(max_length, dtype=jnp.int32)[None, None] <= token_bc[..., None]
  scores_bhcm = _scores(queries, cache.keys)
  outputs_bche = _attend(scores_bhcm, sees_bcm, [cache.values], values.dtype)
  outputs_bche = jnp.where((token_bc < max_length)[..., None, None], outputs_bche, jnp.nan)
  return _zero_padding(outputs_bche, lengths), cache


@automatic_axes
@typed
def relative_attention_cached(
  queries: Float[Array, "B C H E"],
  keys: Float[Array, "B C H E"],
  values: Float[Array, "B C H E"],
  positions: Float[Array, "R H E"],
  content_bias: Float[Array, "H E"],
  position_bias: Float[Array, "H E"],
  cache: AttentionCache,
  *,
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C H E"], AttentionCache]:
  """Attends from every token to itself and the last tokens, by content and by distance.

  In the notation of `causal_attention_cached`,

    score[b, h, c, s] = ((queries[b, c, h] + content_bias[h]) . k[b, s, h]
                       + (queries[b, c, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, c, h]   = sum over t - M < s <= t of softmax(score[b, h, c])[s] v[b, s, h]

  After M tokens the cache is a ring, and the output is that of `relative_attention` for the last M
  tokens. One row of one feature, with M = 4 and equal weights:

    cache:  values [[6 4 2 9]]  length [4]
    chunk:  values [[5 8]]
    output: [[5 6]], the means of 4 2 9 5 and of 2 9 5 8
    cache:  values [[5 8 2 9]]  length [6]

  R >= M. The other arguments, the results and the errors are those of `causal_attention_cached`,
  but chunks and rows may have any length.

  Source: see `relative_attention`; the ring is the memory of Sec. 3.2, for the last M tokens.
  """
  lengths = _check(queries, keys, values, cache, lengths, is_ring=True)
  chunk = queries.shape[1]
  max_length = cache.values.shape[2]
  check_distances(positions, max_length)
  index_c = jnp.arange(chunk, dtype=jnp.int32)
  token_bc = cache.length[:, None] + index_c[None]
  slot_m = jnp.arange(max_length, dtype=jnp.int32)
  if chunk == 1:
    # Written before it is read, or XLA would copy the cache at every step.
    cache = _append(keys, values, cache, token_bc % max_length, lengths)
    all_keys = [cache.keys]
    all_values = [cache.values]
    distance_bcn = ((cache.length[:, None] - 1 - slot_m[None]) % max_length)[:, None]
  else:
    # The chunk may take the slots of tokens that its first ones still see.
    new_keys = _zero_padding(keys, lengths).astype(cache.keys.dtype)
    new_values = _zero_padding(values, lengths).astype(cache.keys.dtype)
    all_keys = [cache.keys, new_keys.transpose(0, 2, 3, 1)]
    all_values = [cache.values, new_values.swapaxes(1, 2)]
    age_bm = (cache.length[:, None] - 1 - slot_m[None]) % max_length
    to_past_bcm = 1 + index_c[None, :, None] + age_bm[:, None]
    shape = token_bc.shape[0], chunk, chunk
    to_new_bcc = jnp.broadcast_to(index_c[:, None] - index_c[None], shape)
    distance_bcn = jnp.concatenate([to_past_bcm, to_new_bcc], axis=2)
    cache = _append_last(keys, values, cache, token_bc % max_length, lengths)
  q_bche = queries + content_bias[None, None]
  scores_bhcn = jnp.concatenate([_scores(q_bche, x) for x in all_keys], axis=3)
  q_bche = queries + position_bias[None, None]
  by_distance_bhcr = product("bche,rhe->bhcr", q_bche, positions[:max_length])
  index_bcn = jnp.clip(distance_bcn, 0, max_length - 1)[:, None]
  scores_bhcn += jnp.take_along_axis(by_distance_bhcr, index_bcn, 3, mode="promise_in_bounds")
  # Excludes later tokens, lost ones, and slots without a token yet.
  farthest_bc = jnp.minimum(token_bc, max_length - 1)
  sees_bcn = (distance_bcn >= 0) & (distance_bcn <= farthest_bc[..., None])
  outputs_bche = _attend(scores_bhcn, sees_bcn, all_values, values.dtype)
  return _zero_padding(outputs_bche, lengths), cache


@automatic_axes
@typed
def local_attention_cached(
  queries: Float[Array, "B C H E"],
  keys: Float[Array, "B C H E"],
  values: Float[Array, "B C H E"],
  cache: AttentionCache,
  *,
  lengths: Integer[Array, "B"] | None = None,
  rotary_base: float | None = None,
  rotary_features: int | None = None,
) -> tuple[Float[Array, "B C H E"], AttentionCache]:
  """Attends from every token to itself and the last tokens, M in all.

  In the notation of `causal_attention_cached`,

    weights[b, h, c, s] = softmax over t - M < s <= t of queries[b, c, h] . k[b, s, h] / sqrt(E)
    output[b, c, h]     = sum over t - M < s <= t of weights[b, h, c, s] v[b, s, h]

  which is `causal_attention` with a window of M. The cache is a ring; chunks and rows may have any
  length. One row of one feature, with M = 3 and equal weights:

    cache:  values [[6 4 2]]  length [3]
    chunk:  values [[9 1]]
    output: [[5 4]], the means of 4 2 9 and of 2 9 1
    cache:  values [[9 1 2]]  length [5]

  A `rotary_base` rotates queries and keys by their positions (`rotate`), of each head the first
  `rotary_features`, by default all. Scores depend only on distances, so the cache holds the keys
  rotated by their slots, and no angle grows however far a row goes: a query in slot m is rotated by
  m for the slots up to its own, and by m + M for those after it, whose keys are older.

  The other arguments, the results and the errors are those of `causal_attention_cached`.
  """
  lengths = _check(queries, keys, values, cache, lengths, is_ring=True)
  if rotary_base is not None:
    arrays.number("rotary_base", rotary_base, "None or a number above 0", lambda x: 0 < x < np.inf)
  chunk = queries.shape[1]
  window = cache.values.shape[2]
  index_c = jnp.arange(chunk, dtype=jnp.int32)
  slot_bc = (cache.length[:, None] + index_c[None]) % window

  def turn(x_bnhe, position_bn, from_bn=None):
    if rotary_base is None:
      return x_bnhe
    features = rotary_features or x_bnhe.shape[3]
    table = jnp.asarray(rotary_angles(window + max(window, chunk), features, rotary_base))
    angles = table[position_bn]
    return rotate(x_bnhe, angles if from_bn is None else angles - table[from_bn])

  turned_keys = turn(keys, slot_bc)
  if chunk == 1:
    # Written before it is read, or XLA would copy the cache at every step.
    cache_after = _append(turned_keys, values, cache, slot_bc, lengths)
    slot_m = jnp.arange(window, dtype=jnp.int32)
    scores_bh1m = _scores(turn(queries, slot_bc), cache_after.keys)
    if rotary_base is not None:
      from_next_bh1m = _scores(turn(queries, slot_bc + window), cache_after.keys)
      is_next_bm = slot_m[None] > slot_bc
      scores_bh1m = jnp.where(is_next_bm[:, None, None], from_next_bh1m, scores_bh1m)
    age_bm = (cache.length[:, None] - slot_m[None]) % window
    sees_b1m = (age_bm <= cache.length[:, None])[:, None]
    outputs = _attend(scores_bh1m, sees_b1m, [cache_after.values], values.dtype)
    return _zero_padding(outputs, lengths), cache_after
  num_past = window - 1
  past_bp = cache.length[:, None] - num_past + jnp.arange(num_past, dtype=jnp.int32)[None]

  def with_past(kept_bmhe, new_bche):
    past_bphe = jnp.take_along_axis(kept_bmhe, (past_bp % window)[..., None, None], axis=1)
    new_bche = _zero_padding(new_bche, lengths).astype(kept_bmhe.dtype)
    return jnp.concatenate([past_bphe, new_bche], axis=1).astype(queries.dtype)

  slot_bn = jnp.concatenate([past_bp % window, slot_bc], axis=1)
  position_n = jnp.arange(num_past + chunk, dtype=jnp.int32)[None]
  q_bnhe = jnp.pad(queries, ((0, 0), (num_past, 0), (0, 0), (0, 0)))
  # The row begins after the slots that no token has filled yet.
  first_b1 = num_past - jnp.minimum(cache.length, num_past)[:, None]
  document_starts = ((position_n == 0) | (position_n == first_b1)).astype(jnp.int32)
  outputs = causal_attention(
    turn(q_bnhe, position_n),
    turn(with_past(cache.keys.transpose(0, 3, 1, 2), turned_keys), position_n, slot_bn),
    with_past(cache.values.swapaxes(1, 2), values),
    document_starts=document_starts,
    window=window,
  )[:, num_past:]
  cache = _append_last(turned_keys, values, cache, slot_bc, lengths)
  return _zero_padding(outputs.astype(values.dtype), lengths), cache


def _check(queries, keys, values, cache: AttentionCache, lengths, is_ring: bool = False):
  """Checks what the types do not; returns the lengths as int32, or None."""
  arrays.check_not_empty(queries=queries, **{"cache.keys": cache.keys})
  arrays.check_dtype(queries.dtype, keys=keys, values=values)
  chunk = queries.shape[1]
  max_length = cache.values.shape[2]
  if chunk > max_length and not is_ring:
    raise ValueError(
      f"queries: expected a chunk of C = 1 .. {max_length} tokens, M of the cache, got {chunk}"
    )
  return None if lengths is None else check_lengths(lengths, chunk)


def _append_last(keys, values, cache: AttentionCache, slot_bc, lengths) -> AttentionCache:
  """`_append` to a ring, which keeps the last M tokens of a long chunk."""
  chunk = keys.shape[1]
  size = cache.values.shape[2]
  num_new = chunk if lengths is None else lengths[:, None]
  is_last_bc = jnp.arange(chunk, dtype=jnp.int32)[None] >= num_new - size
  return _append(keys, values, cache, jnp.where(is_last_bc, slot_bc, size), lengths)


def _append(keys, values, cache: AttentionCache, slot_bc, lengths) -> AttentionCache:
  """Writes the real tokens of the chunk into the cache, except those beyond its end."""
  chunk = keys.shape[1]
  if lengths is not None:
    slot_bc = jnp.where(is_real(lengths, chunk), slot_bc, cache.values.shape[2])
  head_h1 = jnp.arange(keys.shape[2], dtype=jnp.int32)[:, None]

  # Row by row, so that a batch may lie on several devices. Every head has an index: with [:, slot]
  # XLA copies a cache of one row.
  @jax.vmap
  def write_keys(old_hem, slot_c, new_che):
    new_hce = new_che.astype(old_hem.dtype).swapaxes(0, 1)
    return old_hem.at[head_h1, :, slot_c[None]].set(new_hce, mode="drop")

  @jax.vmap
  def write_values(old_hme, slot_c, new_che):
    new_hce = new_che.astype(old_hme.dtype).swapaxes(0, 1)
    return old_hme.at[head_h1, slot_c[None]].set(new_hce, mode="drop")

  return AttentionCache(
    write_keys(cache.keys, slot_bc, keys),
    write_values(cache.values, slot_bc, values),
    cache.length + (chunk if lengths is None else lengths),
  )


def _scores(queries_bche, keys_bhem) -> jax.Array:
  if queries_bche.shape[1] == 1:
    return row_product(as_factor(queries_bche[:, 0]), as_factor(keys_bhem))[:, :, None]
  return product("bche,bhem->bhcm", queries_bche, keys_bhem.astype(queries_bche.dtype))


def _attend(scores_bhcn, sees_bcn, values: list[jax.Array], dtype) -> jax.Array:
  """Softmax of the scores over sqrt(E), and the sum of values [B, H, M, E], array by array."""
  features = values[0].shape[3]
  scores_bhcn = jnp.where(sees_bcn[:, None], scores_bhcn * features**-0.5, -jnp.inf)
  weights_bhcn = jax.nn.softmax(scores_bhcn, axis=-1).astype(dtype)
  ends = np.cumsum([x.shape[2] for x in values])
  weights = jnp.split(weights_bhcn, ends[:-1], 3)
  outputs = [_sum_values(x, y) for x, y in zip(weights, values, strict=True)]
  return sum(outputs[1:], outputs[0]).astype(dtype)


def _sum_values(weights_bhcm, values_bhme) -> jax.Array:
  if weights_bhcm.shape[2] == 1:
    return row_product(weights_bhcm[:, :, 0], values_bhme)[:, None]
  values_bhme = values_bhme.astype(weights_bhcm.dtype)
  if values_bhme.dtype in LOW:
    return low_product(weights_bhcm, values_bhme, "bhcm,bhme->bche", values_bhme.dtype)
  # XLA:CPU takes half the time of "bhcm,bhme->bche", which its fast products do not include.
  return jnp.einsum("bhcm,bhme->bhce", weights_bhcm, values_bhme).swapaxes(1, 2)


def _zero_padding(x_bche, lengths) -> jax.Array:
  if lengths is None:
    return x_bche
  return jnp.where(is_real(lengths, x_bche.shape[1])[..., None, None], x_bche, 0)
