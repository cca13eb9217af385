"""Causal attention a chunk at a time: keys and values of the past lie in a cache.

A cache has a fixed number of places for every row, and rows may be of different lengths:
a chunk goes on in each row where that row ended. A chunk of T tokens is a prompt, one of
one token a step. What comes out is what `causal_attention` and `relative_attention` say
of the whole sequence, however it is cut into chunks. Nothing in a cache depends on the
values of padding, and shapes never change, so one compilation serves all steps.

B batch, C position in the chunk, M place in the cache, H head, E feature of a head,
R distance.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.typing import ArrayLike, DTypeLike


class AttentionCache(NamedTuple):
  """Keys and values of the tokens so far, for one layer.

  Token t of a row lies at place t. What lies from `length` on counts for nothing, if only
  it is finite. So a row is begun anew, or taken back to an earlier token, by a smaller
  `length`:

    cache._replace(length=jnp.zeros_like(cache.length))

  Attributes:
    keys: [B, H, M, E], floats; heads go first, as the products want them, or every step
      would make a transposed copy of the cache.
    values: as `keys`.
    length: [B], int32, the tokens so far of each row.
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
  """A cache of no tokens.

  Args:
    batch: B.
    max_length: M, the longest sequence that it can hold.
    num_heads: H.
    features: E, of one head.
    dtype: in which keys and values are kept, a float.

  Returns:
    Zeros; 2 B M H E floats and B integers, whatever the number of tokens.

  Raises:
    ValueError: a size is below 1, or the dtype is not a float.
  """
  sizes = dict(
    batch=batch, max_length=max_length, num_heads=num_heads, features=features
  )
  for name, size in sizes.items():
    if size < 1:
      raise ValueError(f"{name}: expected at least 1, got {size}")
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"dtype: expected a float, got {jnp.dtype(dtype)}")
  shape = (batch, num_heads, max_length, features)
  # An array each: one that two leaves share could not be donated.
  return AttentionCache(
    jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32)
  )


def causal_attention_cached(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  cache: AttentionCache,
  *,
  lengths: ArrayLike | None = None,
) -> tuple[jax.Array, AttentionCache]:
  """Attends from every token of a chunk to itself and to those before it.

  Token c of the chunk is token t = cache.length[b] + c of row b. With the keys k and the
  values v of the whole row so far, those of the chunk among them,

    weights[b, h, c, s] = softmax over s <= t of queries[b, c, h] . k[b, s, h] / sqrt(E)
    output[b, c, h]     = sum over s <= t of weights[b, h, c, s] v[b, s, h]

  Of two rows of one feature, M = 4 and keys of 0, so that all weights are alike, the
  first is at its third token, and the second, a token behind, has none in this chunk:

    cache:  values [[6 4 . .] [5 . . .]]  length [2 1]
    chunk:  values [[2 9] [7 7]]          lengths [1 0]
    output: [[4 0] [0 0]]
    cache:  values [[6 4 2 .] [5 . . .]]  length [3 1]

  Takes O(B C M H E) time, for a step as for a prompt, and O(B H C M) memory. The softmax
  is taken in float32. Equal to `causal_attention` up to rounding; keys and values are
  rounded to the dtype of the cache before anything reads them.

  Args:
    queries: [B, C, H, E], floats, 1 <= C <= M.
    keys: as `queries`.
    values: as `queries`.
    cache: of the tokens before the chunk. Where it is donated under `jit`, the new one
      lies in the same memory.
    lengths: [B], integers in 0 .. C, of each row the tokens that are real; what comes
      after them is padding, of any value, even nan. None: all are real.

  Returns:
    [B, C, H, E] in the dtype of `values`, 0 at the padding; and the cache with the chunk.
    A row must not grow longer than M. Under `jit` nobody can tell: tokens from M on are
    dropped, and none sees them, not even itself; `length` counts them all the same.

  Raises:
    ValueError: shapes or dtypes do not match, or C > M; where they are not traced, also
      if `lengths` are outside of 0 .. C or a row grows longer than M.

  Source: as `causal_attention`.
  """
  lengths = _check(queries, keys, values, cache, lengths)
  place_bc = _places(queries, cache)
  cache = _append(keys, values, cache, place_bc, lengths)
  scores_bhcm = jnp.einsum(
    "bche,bhme->bhcm",
    queries,
    cache.keys.astype(queries.dtype),
    preferred_element_type=jnp.float32,
  )
  return _attend(scores_bhcm, cache, place_bc, lengths, values.dtype), cache


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
) -> tuple[jax.Array, AttentionCache]:
  """Attends to oneself and the past, by content and by distance.

  Token c of the chunk is token t = cache.length[b] + c of row b. With the keys k and the
  values v of the whole row so far, those of the chunk among them,

    score[b, h, c, s] = ((queries[b, c, h] + content_bias[h]) . k[b, s, h]
                       + (queries[b, c, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, c, h]   = sum over s <= t of softmax(score[b, h, c])[s] v[b, s, h]

  The example of `causal_attention_cached` holds here too, where positions and biases are
  0. In its next chunk, the distances that count at the first token, t = 3 and t = 1, are
  [3 2 1 0] and [1 0 . .] for the places s = 0 .. 3.

  Takes O(B C M H E) time and O(B H C M) memory: a query meets every distance once, and
  each row picks those that it needs. The softmax is taken in float32. Equal to
  `relative_attention` up to rounding, as in `causal_attention_cached`.

  Args:
    queries: [B, C, H, E], floats, 1 <= C <= M.
    keys: as `queries`.
    values: as `queries`.
    positions: [R, H, E], R >= M; row r is for the distance r = t - s.
    content_bias: [H, E], u of the source.
    position_bias: [H, E], v of the source.
    cache: as in `causal_attention_cached`.
    lengths: likewise.

  Returns:
    As `causal_attention_cached`.

  Raises:
    ValueError: as in `causal_attention_cached`, or there are too few positions.

  Source: as `relative_attention`.
  """
  lengths = _check(queries, keys, values, cache, lengths)
  max_length, heads = cache.keys.shape[2], queries.shape[2:]
  if positions.shape[1:] != heads or len(positions) < max_length:
    raise ValueError(
      f"positions: expected [R, H, E] = [at least {max_length}, {heads[0]}, {heads[1]}], "
      f"got the shape {positions.shape}"
    )
  if not content_bias.shape == position_bias.shape == heads:
    raise ValueError(
      f"content_bias, position_bias: expected [H, E] = {heads}, got "
      f"{content_bias.shape}, {position_bias.shape}"
    )
  place_bc = _places(queries, cache)
  cache = _append(keys, values, cache, place_bc, lengths)
  scores_bhcm = jnp.einsum(
    "bche,bhme->bhcm",
    queries + content_bias[None, None],
    cache.keys.astype(queries.dtype),
    preferred_element_type=jnp.float32,
  )
  by_distance_bhcr = jnp.einsum(
    "bche,rhe->bhcr",
    queries + position_bias[None, None],
    positions[:max_length],
    preferred_element_type=jnp.float32,
  )
  # Places of the future have no distance; the mask takes away what they get here.
  distance_bcm = place_bc[..., None] - jnp.arange(max_length, dtype=jnp.int32)[None, None]
  distance_bcm = jnp.clip(distance_bcm, 0, max_length - 1)
  scores_bhcm += jnp.take_along_axis(
    by_distance_bhcr, distance_bcm[:, None], axis=3, mode="promise_in_bounds"
  )
  return _attend(scores_bhcm, cache, place_bc, lengths, values.dtype), cache


def _check(queries, keys, values, cache: AttentionCache, lengths) -> jax.Array | None:
  """Raises unless the arguments match; the lengths as int32."""
  if not (queries.ndim == 4 and queries.shape == keys.shape == values.shape):
    raise ValueError(
      "queries, keys, values: expected one shape [B, C, H, E], got "
      f"{queries.shape}, {keys.shape}, {values.shape}"
    )
  dtypes = {x.dtype for x in (queries, keys, values)}
  if len(dtypes) > 1 or not jnp.issubdtype(queries.dtype, jnp.floating):
    raise ValueError(
      "queries, keys, values: expected floats of one dtype, got "
      f"{queries.dtype}, {keys.dtype}, {values.dtype}"
    )
  batch, chunk, *heads = queries.shape
  if not (
    cache.keys.ndim == 4
    and cache.keys.shape == cache.values.shape
    and cache.keys.shape == (batch, heads[0], cache.keys.shape[2], heads[1])
  ):
    raise ValueError(
      f"cache: expected keys and values [B, H, M, E] = [{batch}, {heads[0]}, M, "
      f"{heads[1]}], got {cache.keys.shape}, {cache.values.shape}"
    )
  if cache.length.shape != (batch,) or cache.length.dtype != jnp.int32:
    raise ValueError(
      f"cache: expected length [B] = ({batch},) of int32, got "
      f"{cache.length.dtype} {cache.length.shape}"
    )
  max_length = cache.keys.shape[2]
  if not 1 <= chunk <= max_length:
    raise ValueError(
      f"queries: expected a chunk of C = 1 .. {max_length} tokens, M of the cache, got "
      f"{chunk}"
    )
  if lengths is not None:
    lengths = _check_lengths(lengths, batch, chunk)
  _check_room(cache, chunk if lengths is None else lengths)
  return lengths


def _check_lengths(lengths, batch: int, chunk: int) -> jax.Array:
  array = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
  if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(
      f"lengths: expected integers [B] = ({batch},), got {array.dtype} {array.shape}"
    )
  if not isinstance(array, core.Tracer):
    found = np.asarray(array)
    is_wrong = (found < 0) | (found > chunk)
    if is_wrong.any():
      raise ValueError(f"lengths: expected 0 .. C = {chunk}, got {found[is_wrong][0]}")
  return jnp.asarray(array, jnp.int32)


def _check_room(cache: AttentionCache, new) -> None:
  """Raises if a row is known to grow longer than the cache."""
  if isinstance(cache.length, core.Tracer) or isinstance(new, core.Tracer):
    return
  longest = (np.asarray(cache.length) + np.asarray(new)).max()
  if longest > cache.keys.shape[2]:
    raise ValueError(
      f"cache: expected rows of at most M = {cache.keys.shape[2]} tokens, got {longest}"
    )


def _places(queries, cache: AttentionCache) -> jax.Array:
  """The place of every token, [B, C]: its number in the row."""
  return cache.length[:, None] + jnp.arange(queries.shape[1], dtype=jnp.int32)[None]


def _is_real(lengths, chunk: int) -> jax.Array:
  return jnp.arange(chunk, dtype=jnp.int32)[None] < lengths[:, None]


def _append(keys, values, cache: AttentionCache, place_bc, lengths) -> AttentionCache:
  """The cache with the real tokens of the chunk at their places."""
  batch, chunk = place_bc.shape
  max_length = cache.keys.shape[2]
  added = chunk
  if lengths is not None:
    # Padding goes beyond the end, where a scatter drops it.
    place_bc = jnp.where(_is_real(lengths, chunk), place_bc, max_length)
    added = lengths

  @jax.vmap  # Rows apart, so that a batch may lie on several devices.
  def write(old_hme, place_c, new_che):
    new_hce = new_che.astype(old_hme.dtype).swapaxes(0, 1)
    return old_hme.at[:, place_c].set(new_hce, mode="drop")

  return AttentionCache(
    write(cache.keys, place_bc, keys),
    write(cache.values, place_bc, values),
    cache.length + added,
  )


def _attend(scores_bhcm, cache: AttentionCache, place_bc, lengths, dtype) -> jax.Array:
  """Causal softmax of the scores over sqrt(E), and the sum of the values."""
  max_length, features = cache.values.shape[2:]
  place_m = jnp.arange(max_length, dtype=jnp.int32)
  is_past_bcm = place_m[None, None] <= place_bc[..., None]
  scores_bhcm = jnp.where(is_past_bcm[:, None], scores_bhcm * features**-0.5, -jnp.inf)
  weights_bhcm = jax.nn.softmax(scores_bhcm, axis=-1)
  outputs_bche = jnp.einsum(
    "bhcm,bhme->bche", weights_bhcm.astype(dtype), cache.values.astype(dtype)
  )
  if lengths is None:
    return outputs_bche
  is_real_bc = _is_real(lengths, place_bc.shape[1])
  return jnp.where(is_real_bc[..., None, None], outputs_bche, jnp.zeros((), dtype))
