"""Causal attention in chunks, with the keys and values of earlier tokens in a cache.

A cache has a fixed number of places for every row. Rows may have different lengths; a chunk
continues each row at its end. A chunk may be a prompt or a single token. The outputs are those
of `causal_attention` and `relative_attention` for the whole sequence, for any division into
chunks. Padding never affects a cache, and shapes never change, so one compilation serves all
steps.

With M places, absolute attention ends with token M - 1. Relative attention continues: its
cache is a ring of the last M tokens.

B batch, C position in the chunk, M place in the cache, N key of a query, H head, E feature of a
head, R distance.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.typing import ArrayLike, DTypeLike

from dpjax.ops import checks
from dpjax.ops.documents import document_length, document_places, starts_in_chunk
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


class AttentionCache(NamedTuple):
  """Keys and values of the tokens so far, for one layer.

  Token t of a row is at place t mod M. Places from `length` on are ignored, but must be
  finite. So a smaller `length` restarts a row, or returns to an earlier token:

    cache._replace(length=jnp.zeros_like(cache.length))

  A row longer than M has lost its first tokens and can only be restarted.

  Attributes:
    keys: [B, H, M, E], floats; heads come first, so that no step transposes the cache.
    values: [B, H, M, E], floats.
    length: [B], int32, the number of tokens so far in each row's last document, including
      lost ones.
  """

  keys: jax.Array
  values: jax.Array
  length: jax.Array


def init_attention_cache(
  batch: int,
  max_length: int,
  num_heads: int,
  features: int,
  dtype: DTypeLike = jnp.float32,
) -> AttentionCache:
  """An empty cache.

  Args:
    batch: B.
    max_length: M, the longest sequence in the cache, or the number of last tokens that it
      keeps of a longer one.
    num_heads: H.
    features: E, of one head.
    dtype: the dtype of keys and values, a float.

  Returns:
    Zeros; 2 B M H E floats and B integers, whatever the number of tokens.

  Raises:
    ValueError: a size is below 1, or the dtype is not a float.
  """
  checks.integers(batch=batch, max_length=max_length, num_heads=num_heads, features=features)
  checks.float_dtype(dtype)
  shape = (batch, num_heads, max_length, features)
  # An array each: one that two leaves share could not be donated.
  return AttentionCache(
    jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32)
  )


@automatic_axes
def causal_attention_cached(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  cache: AttentionCache,
  *,
  lengths: ArrayLike | None = None,
  is_start: ArrayLike | None = None,
) -> tuple[jax.Array, AttentionCache]:
  """Attends from every token of a chunk to itself and to all tokens before it.

  Token c of the chunk is token t = cache.length[b] + c of row b. With the keys k and the
  values v of the whole row so far, including the chunk,

    weights[b, h, c, s] = softmax over s <= t of queries[b, c, h] . k[b, s, h] / sqrt(E)
    output[b, c, h]     = sum over s <= t of weights[b, h, c, s] v[b, s, h]

  An example with two rows, one feature, M = 4 and keys of 0, so that all weights are equal.
  The first row receives its third token, the second nothing:

    cache:  values [[6 4 . .] [5 . . .]]  length [2 1]
    chunk:  values [[2 9] [7 7]]          lengths [1 0]
    output: [[4 0] [0 0]]
    cache:  values [[6 4 2 .] [5 . . .]]  length [3 1]

  Takes O(B C M H E) time and O(B H C M) memory. The softmax is in float32, or in float64 if
  the queries are. Equals `causal_attention` up to rounding; keys and values are first rounded
  to the dtype of the cache.

  Args:
    queries: [B, C, H, E], floats, 1 <= C <= M.
    keys: [B, C, H, E], floats.
    values: [B, C, H, E], floats.
    cache: the cache of the tokens before the chunk. If donated under `jit`, its memory holds
      the new one.
    lengths: [B], integers in 0 .. C, the number of real tokens in each row. The rest is
      padding, of any value, even nan. None means all.
    is_start: [B, C], 1 where a document begins, else 0: its tokens count from 0 and attend only
      to each other. A chunk may then be longer than M. None continues all documents.

  Returns:
    [B, C, H, E] in the dtype of `values`, 0 at the padding; and the cache with the chunk.
    A row, or a document, must not exceed M tokens. Under `jit`, where this cannot raise an
    error, outputs from token M on are nan; the cache drops these tokens, but `length` counts
    them.

  Raises:
    ValueError: shapes or dtypes do not match, or C > M without `is_start`. Unless traced, also
      if `lengths` are outside of 0 .. C, `is_start` is not 0 or 1, or, without them, a row
      exceeds M tokens.

  Source: see `causal_attention`.
  """
  queries, keys, values, lengths = _check(queries, keys, values, cache, lengths, is_start)
  chunk, max_length = queries.shape[1], cache.keys.shape[2]
  if is_start is None:
    _check_room(cache, chunk if lengths is None else lengths)
  token_bc, place_bc, length_b = _tokens(queries, cache, lengths, is_start, is_ring=False)
  if is_start is None or chunk == 1:
    cache = _append(keys, values, cache, place_bc, length_b)
    keys_met, values_met = [cache.keys], [cache.values]
    place_m = jnp.arange(max_length, dtype=jnp.int32)
    is_met_bcn = place_m[None, None] <= token_bc[..., None]
  else:
    # The chunk's last document takes the places of the one before.
    own_keys, own_values = (_as_kept(x, cache, lengths) for x in (keys, values))
    keys_met, values_met = [cache.keys, own_keys], [cache.values, own_values]
    distance_bcn = _distances(cache, *token_bc.shape)
    is_met_bcn = (distance_bcn >= 0) & (distance_bcn <= token_bc[..., None])
    cache = _append(keys, values, cache, place_bc, length_b)
  scores_bhcn = jnp.concatenate([_scores(queries, x) for x in keys_met], axis=3)
  outputs_bche = _attend(scores_bhcn, is_met_bcn, values_met, values.dtype)
  has_place_bc = token_bc < max_length
  outputs_bche = jnp.where(has_place_bc[..., None, None], outputs_bche, jnp.nan)
  return _zero_padding(outputs_bche, lengths), cache


@automatic_axes
def relative_attention_cached(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  positions: jax.Array,
  content_bias: jax.Array,
  position_bias: jax.Array,
  cache: AttentionCache,
  *,
  lengths: ArrayLike | None = None,
  is_start: ArrayLike | None = None,
) -> tuple[jax.Array, AttentionCache]:
  """Attends from every token to itself and the last tokens, by content and by distance.

  Token c of the chunk is token t = cache.length[b] + c of row b. It attends to the last M
  tokens, itself included: t - M < s <= t. With the keys k and the values v of the whole row
  so far, including the chunk,

    score[b, h, c, s] = ((queries[b, c, h] + content_bias[h]) . k[b, s, h]
                       + (queries[b, c, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, c, h]   = sum over t - M < s <= t of softmax(score[b, h, c])[s] v[b, s, h]

  A row may have any length. Up to M tokens, the output equals `relative_attention` up to
  rounding, as in `causal_attention_cached`. From then on the cache is a ring, and the output
  equals the last output of `relative_attention` for the last M tokens. An example with one
  row, one feature, M = 4, and keys, positions and biases of 0, so that all weights are equal:

    cache:  values [[6 4 2 9]]  length [4]
    chunk:  values [[5 8]]
    output: [[5 6]], the means of 4 2 9 5 and of 2 9 5 8
    cache:  values [[5 8 2 9]]  length [6]

  The next token, t = 6, goes to place 2; the places 0 .. 3 are then at the distances
  (t - m) mod M = [2 1 0 3] from it.

  Takes O(B C (M + C) H E) time and O(B H C (M + C)) memory, and for a single token M in place
  of M + C: a query computes every distance once, and each row selects from these. The softmax
  is in float32.

  Args:
    queries: [B, C, H, E], floats, 1 <= C <= M.
    keys: [B, C, H, E], floats.
    values: [B, C, H, E], floats.
    positions: [R, H, E], R >= M; row r is for the distance r = t - s.
    content_bias: [H, E], u of the source.
    position_bias: [H, E], v of the source.
    cache: see `causal_attention_cached`.
    lengths: see `causal_attention_cached`.
    is_start: see `causal_attention_cached`.

  Returns:
    [B, C, H, E] in the dtype of `values`, 0 at the padding; and the cache with the last M
    tokens of each row.

  Raises:
    ValueError: shapes or dtypes do not match, C > M without `is_start`, or there are too few
      positions. Unless traced, also if `lengths` are outside of 0 .. C or `is_start` is not 0
      or 1.

  Source: see `relative_attention`; the ring is the memory of Dai et al. 2019,
  arXiv:1901.02860, Sec. 3.2, for the last M tokens, updated with every token.
  """
  queries, keys, values, lengths = _check(queries, keys, values, cache, lengths, is_start)
  max_length, sizes = cache.keys.shape[2], dict(zip("BCHE", queries.shape, strict=True))
  positions, content_bias, position_bias = checks.arrays(
    sizes | dict(M=max_length),
    positions=(positions, "R>=M H E"),
    content_bias=(content_bias, "H E"),
    position_bias=(position_bias, "H E"),
  )
  token_bc, place_bc, length_b = _tokens(queries, cache, lengths, is_start, is_ring=True)
  if queries.shape[1] == 1:
    # Written before it is read, or XLA would copy the cache at every step.
    cache = _append(keys, values, cache, place_bc, length_b)
    keys_met, values_met = [cache.keys], [cache.values]
    distance_bcn = _ages(cache)[:, None]
  else:
    # The chunk may take the places of tokens that its own first ones still meet.
    own_keys, own_values = (_as_kept(x, cache, lengths) for x in (keys, values))
    keys_met, values_met = [cache.keys, own_keys], [cache.values, own_values]
    distance_bcn = _distances(cache, *place_bc.shape)
    cache = _append(keys, values, cache, place_bc, length_b)
  scores_bhcn = jnp.concatenate(
    [_scores(queries + content_bias[None, None], x) for x in keys_met], axis=3
  )
  by_distance_bhcr = jnp.einsum(
    "bche,rhe->bhcr",
    queries + position_bias[None, None],
    positions[:max_length],
    preferred_element_type=sum_dtype(queries),
  )
  scores_bhcn += jnp.take_along_axis(
    by_distance_bhcr,
    jnp.clip(distance_bcn, 0, max_length - 1)[:, None],
    axis=3,
    mode="promise_in_bounds",
  )
  # Not what comes later, nor what is gone, nor another document's, nor places where there
  # was no token yet.
  farthest_bc = jnp.minimum(token_bc, max_length - 1)
  is_met_bcn = (distance_bcn >= 0) & (distance_bcn <= farthest_bc[..., None])
  outputs_bche = _attend(scores_bhcn, is_met_bcn, values_met, values.dtype)
  return _zero_padding(outputs_bche, lengths), cache


def _check(queries, keys, values, cache: AttentionCache, lengths, is_start) -> tuple:
  """Checks the arguments and returns all but the cache as arrays, the lengths as int32."""
  sizes: dict[str, int] = {}
  (queries,) = checks.arrays(sizes, queries=(queries, "B C>=1 H E>=1"))
  keys, values = checks.arrays(
    sizes, keys=(keys, "B C H E", queries.dtype), values=(values, "B C H E", queries.dtype)
  )
  checks.record(
    "cache",
    cache,
    AttentionCache,
    sizes,
    keys="B H M E",
    values="B H M E",
    length=("B", jnp.int32),
  )
  chunk, max_length = sizes["C"], sizes["M"]
  if chunk > max_length and is_start is None:
    raise ValueError(
      f"queries: expected a chunk of C = 1 .. {max_length} tokens, M of the cache, got {chunk}"
    )
  if lengths is not None:
    lengths = check_lengths(lengths, sizes["B"], chunk)
  return queries, keys, values, lengths


def _check_room(cache: AttentionCache, new) -> None:
  """Raises if a row grows longer than the cache, unless traced."""
  if isinstance(cache.length, core.Tracer) or isinstance(new, core.Tracer):
    return
  longest = (np.asarray(cache.length) + np.asarray(new)).max()
  if longest > cache.keys.shape[2]:
    raise ValueError(
      f"cache: expected rows of at most M = {cache.keys.shape[2]} tokens, got {longest}"
    )


def _tokens(queries, cache: AttentionCache, lengths, is_start, *, is_ring: bool):
  """The positions of a chunk's tokens and their places in the cache.

  Returns:
    The position of every token in its row or document, [B, C]; its place in the cache,
    [B, C], beyond the end for tokens that a scatter must drop; and the new length, [B].
  """
  batch, chunk = queries.shape[:2]
  max_length = cache.keys.shape[2]
  index_c = jnp.arange(chunk, dtype=jnp.int32)
  is_kept_bc = None if lengths is None else is_real(lengths, chunk)
  if is_start is None:
    token_bc = cache.length[:, None] + index_c[None]
    length_b = cache.length + (chunk if lengths is None else lengths)
  else:
    is_start = starts_in_chunk(is_start, (batch, chunk), lengths)
    token_bc = document_places(is_start, cache.length)
    length_b = document_length(is_start, cache.length, lengths)
    # Of the last document, and of that the last tokens.
    ago_bc = (chunk if lengths is None else lengths[:, None]) - index_c[None]
    is_last_bc = (ago_bc + token_bc == length_b[:, None]) & (ago_bc <= max_length)
    is_kept_bc = is_last_bc if is_kept_bc is None else is_kept_bc & is_last_bc
  place_bc = token_bc % max_length if is_ring else token_bc
  if is_kept_bc is not None:
    place_bc = jnp.where(is_kept_bc, place_bc, max_length)
  return token_bc, place_bc, length_b


def _append(keys, values, cache: AttentionCache, place_bc, length_b) -> AttentionCache:
  """Writes the tokens of the chunk into the cache."""
  head_h = jnp.arange(keys.shape[2], dtype=jnp.int32)

  @jax.vmap  # Rows apart, so that a batch may lie on several devices.
  def write(old_hme, place_c, new_che):
    new_hce = new_che.astype(old_hme.dtype).swapaxes(0, 1)
    # Every head by its number: with [:, place] XLA copies a cache of one row.
    return old_hme.at[head_h[:, None], place_c[None]].set(new_hce, mode="drop")

  return AttentionCache(
    write(cache.keys, place_bc, keys),
    write(cache.values, place_bc, values),
    length_b,
  )


def _as_kept(new_bche, cache: AttentionCache, lengths) -> jax.Array:
  """Keys or values of a chunk in the cache's layout, [B, H, C, E], with padding of 0."""
  new_bche = _zero_padding(new_bche, lengths)
  return new_bche.astype(cache.keys.dtype).swapaxes(1, 2)


def _ages(cache: AttentionCache) -> jax.Array:
  """The distance of each place of a ring from the last token, [B, M]."""
  place_m = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)
  return (cache.length[:, None] - 1 - place_m[None]) % len(place_m)


def _distances(cache: AttentionCache, batch: int, chunk: int) -> jax.Array:
  """Distances from the tokens of a chunk to earlier tokens and to each other, [B, C, M + C]."""
  token_c = jnp.arange(chunk, dtype=jnp.int32)
  to_past_bcm = 1 + token_c[None, :, None] + _ages(cache)[:, None]
  to_own_cc = token_c[:, None] - token_c[None]
  to_own_bcc = jnp.broadcast_to(to_own_cc, (batch, chunk, chunk))
  return jnp.concatenate([to_past_bcm, to_own_bcc], axis=2)


def _scores(queries_bche, keys_bhme) -> jax.Array:
  keys_bhme = keys_bhme.astype(queries_bche.dtype)
  dtype = sum_dtype(queries_bche)
  if queries_bche.shape[1] == 1:
    # With an axis of one XLA would lay the cache out anew.
    return jnp.einsum(
      "bhe,bhme->bhm",
      queries_bche[:, 0],
      keys_bhme,
      preferred_element_type=dtype,
    )[:, :, None]
  return jnp.einsum("bche,bhme->bhcm", queries_bche, keys_bhme, preferred_element_type=dtype)


def _attend(scores_bhcn, is_met_bcn, values: list[jax.Array], dtype) -> jax.Array:
  """Softmax of the scores over sqrt(E), and the sum of the values [B, H, M, E].

  N runs over the places of all arrays of values, one array after another.
  """
  features = values[0].shape[3]
  scores_bhcn = jnp.where(is_met_bcn[:, None], scores_bhcn * features**-0.5, -jnp.inf)
  weights_bhcn = jax.nn.softmax(scores_bhcn, axis=-1).astype(dtype)
  ends = np.cumsum([x.shape[2] for x in values])
  split = jnp.split(weights_bhcn, ends[:-1], axis=3)
  outputs = [
    jnp.einsum("bhcm,bhme->bche", weights_bhcm, values_bhme.astype(dtype))
    for weights_bhcm, values_bhme in zip(split, values, strict=True)
  ]
  return sum(outputs[1:], outputs[0])


def _zero_padding(x_bche, lengths) -> jax.Array:
  if lengths is None:
    return x_bche
  return jnp.where(is_real(lengths, x_bche.shape[1])[..., None, None], x_bche, 0)
