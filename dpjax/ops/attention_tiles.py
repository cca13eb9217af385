"""Attention in tiles, with O(T) memory, also for the gradient; used by `dpjax.ops.attention`.

H head, B batch, T position, E feature of a head; Q query, S key and R distance of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.ops import arrays
from dpjax.ops.backend import opaque, replicate
from dpjax.ops.dropout import dropout
from dpjax.ops.placement import pvary_like
from dpjax.ops.products import product, sum_dtype


class Inputs(NamedTuple):
  """Queries, keys and values; `relative` is positions and the two biases, [H, E], or None.

  `tiled` takes [B, T, H, E], and positions [T, H, E]. It cuts tiles from [H, B, T, E], where T is a
  multiple of the block. Heads come first, so that each needs one product with the positions,
  [H, T + S, E], shared by all rows, the farthest first and S future ones last.
  """

  queries: jax.Array
  keys: jax.Array
  values: jax.Array
  relative: tuple[jax.Array, ...] | None = None


def tiled(inputs: Inputs, reach_bt, dropout_rate, key, size: int) -> jax.Array:
  """Attention by tiles of size x size."""
  length = inputs.queries.shape[1]
  missing = -length % size
  # Padding keys come after every query, so the causal mask hides them.
  padding = (0, 0), (0, 0), (0, missing), (0, 0)
  q, k, v = (jnp.pad(x.transpose(2, 0, 1, 3), padding) for x in inputs[:3])
  relative = None
  if inputs.relative is not None:
    positions, content_bias, position_bias = inputs.relative
    farthest_first_hre = positions[::-1].swapaxes(0, 1)
    positions_hre = jnp.pad(farthest_first_hre, ((0, 0), (missing, size), (0, 0)))
    relative = replicate((positions_hre, content_bias, position_bias))
  tiles = pvary_like(Inputs(q, k, v, relative))
  if reach_bt is not None:
    reach_bt = jnp.pad(reach_bt, ((0, 0), (0, missing)))
  with arrays.reverse_mode(f"block_size: expected {length} or more"):
    y_hbte = jnp.asarray(_attend_tiles(dropout_rate, size, tiles, reach_bt, key))
  return y_hbte[:, :, :length].transpose(1, 2, 0, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_tiles(dropout_rate, size, inputs: Inputs, reach_bt, key) -> jax.Array:
  return _attend_tiles_forward(dropout_rate, size, inputs, reach_bt, key)[0]


def _attend_tiles_forward(dropout_rate, size, inputs: Inputs, reach_bt, key):
  values_hbte = inputs.values

  def tile(state, i, j):
    old_hbq, sum_hbq, y_hbqe = (_block(x, i, size) for x in state)
    scores_hbqs, _ = _tile_scores(inputs, reach_bt, i, j, size)
    top_hbq = jnp.maximum(old_hbq, scores_hbqs.max(axis=-1))
    weights_hbqs = jnp.exp(scores_hbqs - top_hbq[..., None])
    shrink_hbq = jnp.exp(old_hbq - top_hbq)
    sum_hbq = sum_hbq * shrink_hbq + weights_hbqs.sum(axis=-1)
    if dropout_rate:
      weights_hbqs = dropout(weights_hbqs, dropout_rate, _tile_key(key, i, j))
    weights_hbqs = weights_hbqs.astype(values_hbte.dtype)
    more_hbqe = product("hbqs,hbse->hbqe", weights_hbqs, _block(values_hbte, j, size))
    y_hbqe = y_hbqe * shrink_hbq[..., None] + more_hbqe
    new = top_hbq, sum_hbq, y_hbqe
    return tuple(_put(x, block, i, size) for x, block in zip(state, new, strict=True))

  zeros_hbte = jnp.zeros_like(values_hbte, sum_dtype(*jax.tree.leaves(inputs)))
  zeros_hbt = zeros_hbte[..., 0]
  state = zeros_hbt - jnp.inf, zeros_hbt, zeros_hbte
  top_hbt, sum_hbt, y_hbte = _for_tiles(tile, state, values_hbte.shape[2] // size, reach_bt)
  y_hbte = (y_hbte / sum_hbt[..., None]).astype(values_hbte.dtype)
  return y_hbte, (inputs, reach_bt, key, y_hbte, top_hbt + jnp.log(sum_hbt))


def _attend_tiles_backward(dropout_rate, size, residuals, grad_hbte):
  inputs, reach_bt, key, y_hbte, log_sum_hbt = residuals
  scale = y_hbte.shape[3] ** -0.5
  dtype = log_sum_hbt.dtype
  # The mean gradient of the weights equals that of the output along it, dropout or not.
  mean_hbt = jnp.sum(grad_hbte.astype(dtype) * y_hbte.astype(dtype), axis=-1)

  def tile(grads, i, j):
    scores_hbqs, factors = _tile_scores(inputs, reach_bt, i, j, size)
    g_hbqe, log_sum_hbq, mean_hbq = (_block(x, i, size) for x in (grad_hbte, log_sum_hbt, mean_hbt))
    weights_hbqs = jnp.exp(scores_hbqs - log_sum_hbq[..., None])
    by_weights_hbqs = product("hbqe,hbse->hbqs", g_hbqe, _block(inputs.values, j, size))
    kept_hbqs = weights_hbqs
    if dropout_rate:
      mask_hbqs = dropout(jnp.ones_like(weights_hbqs), dropout_rate, _tile_key(key, i, j))
      kept_hbqs, by_weights_hbqs = (x * mask_hbqs for x in (kept_hbqs, by_weights_hbqs))
    by_values_hbse = product("hbqs,hbqe->hbse", kept_hbqs.astype(g_hbqe.dtype), g_hbqe)
    by_scores_hbqs = weights_hbqs * (by_weights_hbqs - mean_hbq[..., None]) * scale
    by_scores_hbqs = by_scores_hbqs.astype(inputs.queries.dtype)
    by_queries_hbqe = product("hbqs,hbse->hbqe", by_scores_hbqs, factors.keys)
    by_keys_hbse = product("hbqs,hbqe->hbse", by_scores_hbqs, factors.content_queries)
    by_relative = grads.relative
    if inputs.relative is not None and factors.relative is not None:
      position_queries, positions = factors.relative
      by_distance_hbqr = _align_back(by_scores_hbqs)
      more_hbqe = product("hbqr,hre->hbqe", by_distance_hbqr, positions)
      more_hbre = product("hbqr,hbqe->hbre", by_distance_hbqr, position_queries)
      by_positions, by_content, by_position = grads.relative
      start = _first_distance(inputs.relative[0], i, j, size)
      more_hbre += lax.dynamic_slice_in_dim(by_positions, start, 2 * size, 2)
      by_relative = (
        lax.dynamic_update_slice_in_dim(by_positions, more_hbre, start, 2),
        by_content + by_queries_hbqe.sum(axis=2),
        by_position + more_hbqe.sum(axis=2),
      )
      by_queries_hbqe += more_hbqe
    return Inputs(
      _put(grads.queries, _block(grads.queries, i, size) + by_queries_hbqe, i, size),
      _put(grads.keys, _block(grads.keys, j, size) + by_keys_hbse, j, size),
      _put(grads.values, _block(grads.values, j, size) + by_values_hbse, j, size),
      by_relative,
    )

  # Rows may lie on several devices, so their shares of `relative` are summed at the end.
  batch = y_hbte.shape[1]
  grads = jax.tree.map(lambda x: jnp.zeros_like(x, dtype), inputs)
  per_row = jax.tree.map(
    lambda x: jnp.zeros_like(x, dtype, shape=(len(x), batch, *x.shape[1:])), inputs.relative
  )
  grads = grads._replace(relative=per_row)
  grads = _for_tiles(tile, grads, y_hbte.shape[2] // size, reach_bt)
  grads = grads._replace(relative=jax.tree.map(lambda x: x.sum(axis=1), grads.relative))
  return jax.tree.map(lambda x, like: x.astype(like.dtype), grads, inputs), None, None


_attend_tiles.defvjp(_attend_tiles_forward, _attend_tiles_backward)


class _Factors(NamedTuple):
  """The factors of a tile's scores."""

  content_queries: jax.Array
  keys: jax.Array
  relative: tuple[jax.Array, jax.Array] | None = None  # queries [H, B, Q, E], positions [H, R, E]


def _tile_scores(inputs: Inputs, reach_bt, i, j, size: int) -> tuple[jax.Array, _Factors]:
  """Scores of block i of queries and block j of keys, [H, B, Q, S]; -inf for invisible keys."""
  queries_hbqe = _block(inputs.queries, i, size)
  keys_hbse = _block(inputs.keys, j, size)
  if inputs.relative is None:
    factors = _Factors(queries_hbqe, keys_hbse)
  else:
    positions, content_bias, position_bias = inputs.relative
    start = _first_distance(positions, i, j, size)
    content_queries = queries_hbqe + content_bias[:, None, None]
    position_queries = queries_hbqe + position_bias[:, None, None]
    positions_hre = lax.dynamic_slice_in_dim(positions, start, 2 * size, 1)
    factors = _Factors(content_queries, keys_hbse, (position_queries, positions_hre))
  scores_hbqs = product("hbqe,hbse->hbqs", factors.content_queries, factors.keys)
  if factors.relative is not None:
    by_distance_hbqr = product("hbqe,hre->hbqr", *factors.relative)
    scores_hbqs += _align_tile(by_distance_hbqr)
  index = jnp.arange(size, dtype=jnp.int32)
  lag_qs = index[:, None] + (i - j) * size - index[None]
  sees_bqs = (lag_qs >= 0)[None]
  if reach_bt is not None:
    reach_bq = lax.dynamic_slice_in_dim(reach_bt, i * size, size, 1)
    sees_bqs &= lag_qs[None] <= reach_bq[..., None]
  scores_hbqs *= queries_hbqe.shape[3] ** -0.5
  return jnp.where(sees_bqs[None], scores_hbqs, -jnp.inf), factors


def _for_tiles(tile, state, blocks: int, reach_bt):
  """Folds state = tile(state, i, j) over all tiles in which a query sees a key."""
  i, j = (jnp.asarray(x, jnp.int32) for x in np.tril_indices(blocks))
  if reach_bt is None:
    return lax.scan(lambda state, i_j: (tile(state, *i_j), None), state, (i, j))[0]
  # The tiles on the diagonal, where a query sees at least its key, go first, so that no maximum is
  # -inf.
  j = i - j
  size = reach_bt.shape[1] // blocks
  first_bi = jnp.arange(0, reach_bt.shape[1], size, dtype=jnp.int32)[None] - reach_bt[:, ::size]
  # If a query of a block sees the block of keys, the first one does.
  is_seen = jnp.any(first_bi[:, i] < (j[None] + 1) * size, axis=0)
  order = jnp.argsort(~is_seen)
  i = i[order]
  j = j[order]
  number = jnp.sum(is_seen, dtype=jnp.int32)
  return lax.fori_loop(0, number, lambda n, state: tile(state, i[n], j[n]), state)


def _tile_key(key, i, j):
  return jax.random.fold_in(jax.random.fold_in(key, i), j)


def _block(x, i, size: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(x, i * size, size, 2)


def _put(x, block, i, size: int) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(x, block, i * size, 2)


def _first_distance(positions_hre, i, j, size: int):
  return positions_hre.shape[1] - (2 + i - j) * size


def _align_tile(by_distance_hbqr: jax.Array) -> jax.Array:
  """Row q of [Q, 2 Q] moves left by Q - 1 - q: [a b c d], [e f g h]  ->  [b c], [e f]."""
  *lead, size, width = by_distance_hbqr.shape
  # With one column less, a row of the flat array begins one element later each time.
  flat = by_distance_hbqr.reshape(*lead, -1)[..., size - 1 : -1]
  return flat.reshape(*lead, size, width - 1)[..., :size]


def _align_back(by_scores_hbqs: jax.Array) -> jax.Array:
  """Undoes `_align_tile`, with 0 elsewhere: [b c], [e f]  ->  [. b c .], [e f . .]."""
  *lead, size, _ = by_scores_hbqs.shape
  padding = [(0, 0)] * len(lead) + [(1, 1), (0, size - 1)]
  rows = opaque(jnp.pad(by_scores_hbqs, padding))  # Two products read them.
  flat = rows.reshape(*lead, -1)[..., size : size + 2 * size**2]
  return flat.reshape(*lead, size, 2 * size)
