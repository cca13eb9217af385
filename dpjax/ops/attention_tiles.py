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
  """Queries, keys and values, [B, T, H, E].

  `relative` is positions, [T, H, E], and the two biases, [H, E], of `relative_attention`; or ().
  """

  queries: jax.Array
  keys: jax.Array
  values: jax.Array
  relative: tuple[jax.Array, ...] = ()


class _Operands(NamedTuple):
  """Queries with the content bias, keys and values, [H, B, T, E]; T is a multiple of a tile's size.

  Heads come first, so that each needs one product with the positions, shared by all rows.
  `distance`: None, or the factors of the scores by distance, which are queries with the position
  bias, and positions, [H, T + S, E], the farthest first and S future ones last.
  """

  queries: jax.Array
  keys: jax.Array
  values: jax.Array
  distance: tuple[jax.Array, jax.Array] | None = None


def add_bias(queries: jax.Array, bias: jax.Array) -> jax.Array:
  """Adds a bias [H, E] to queries; its gradient, a sum over them, is in float32 or float64."""
  dtype = sum_dtype(queries, bias)
  biased = queries.astype(dtype) + bias.astype(dtype)[None, None]
  return biased.astype(jnp.promote_types(queries.dtype, bias.dtype))


def tiled(inputs: Inputs, reach_bt, dropout_rate, key, size: int) -> jax.Array:
  """Attention by tiles of size x size; `reach_bt` is how far back a query sees, or None."""
  queries, keys, values, relative = inputs
  length = queries.shape[1]
  missing = -length % size

  def heads_first(x):
    # Padding keys come after every query, so the causal mask hides them.
    return jnp.pad(x.transpose(2, 0, 1, 3), ((0, 0), (0, 0), (0, missing), (0, 0)))

  distance = None
  if relative:
    positions, content_bias, position_bias = relative
    farthest_first_hre = positions[::-1].swapaxes(0, 1)
    positions_hre = jnp.pad(farthest_first_hre, ((0, 0), (missing, size), (0, 0)))
    distance = heads_first(add_bias(queries, position_bias)), replicate(positions_hre)
    queries = add_bias(queries, content_bias)
  operands = pvary_like(
    _Operands(heads_first(queries), heads_first(keys), heads_first(values), distance)
  )
  if reach_bt is not None:
    reach_bt = jnp.pad(reach_bt, ((0, 0), (0, missing)))
  with arrays.reverse_mode(f"block_size: expected {length} or more"):
    y_hbte = jnp.asarray(_attend_tiles(dropout_rate, size, operands, reach_bt, key))
  return y_hbte[:, :, :length].transpose(1, 2, 0, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_tiles(dropout_rate, size, operands: _Operands, reach_bt, key) -> jax.Array:
  return _attend_tiles_forward(dropout_rate, size, operands, reach_bt, key)[0]


def _attend_tiles_forward(dropout_rate, size, operands: _Operands, reach_bt, key):
  values_hbte = operands.values
  scale = values_hbte.shape[3] ** -0.5

  def tile(state, i, j, is_whole):
    old_hbq, sum_hbq, y_hbqe = (_block(x, i, size) for x in state)
    queries_hbqe = _block(operands.queries, i, size)
    scores_hbqs = product("hbqe,hbse->hbqs", queries_hbqe, _block(operands.keys, j, size))
    if operands.distance is not None:
      scores_hbqs += _scores_by_distance(operands.distance, i, j, size)
    if not is_whole:
      scores_hbqs = jnp.where(_sees(reach_bt, i, j, size)[None], scores_hbqs, -jnp.inf)
    top_hbq = jnp.maximum(old_hbq, scores_hbqs.max(axis=-1))
    weights_hbqs = jnp.exp((scores_hbqs - top_hbq[..., None]) * scale)
    shrink_hbq = jnp.exp((old_hbq - top_hbq) * scale)
    sum_hbq = sum_hbq * shrink_hbq + weights_hbqs.sum(axis=-1)
    if dropout_rate:
      weights_hbqs = dropout(weights_hbqs, dropout_rate, _tile_key(key, i, j))
    weights_hbqs = weights_hbqs.astype(values_hbte.dtype)
    more_hbqe = product("hbqs,hbse->hbqe", weights_hbqs, _block(values_hbte, j, size))
    y_hbqe = y_hbqe * shrink_hbq[..., None] + more_hbqe
    new = top_hbq, sum_hbq, y_hbqe
    return tuple(_put(x, block, i, size) for x, block in zip(state, new, strict=True))

  zeros_hbte = jnp.zeros_like(values_hbte, sum_dtype(*jax.tree.leaves(operands)))
  zeros_hbt = zeros_hbte[..., 0]
  state = zeros_hbt - jnp.inf, zeros_hbt, zeros_hbte
  top_hbt, sum_hbt, y_hbte = _for_tiles(tile, state, values_hbte.shape[2] // size, reach_bt)
  y_hbte = (y_hbte / sum_hbt[..., None]).astype(values_hbte.dtype)
  return y_hbte, (operands, reach_bt, key, y_hbte, top_hbt * scale + jnp.log(sum_hbt))


def _attend_tiles_backward(dropout_rate, size, residuals, grad_hbte):
  operands, reach_bt, key, y_hbte, log_sum_hbt = residuals
  scale = y_hbte.shape[3] ** -0.5
  dtype = log_sum_hbt.dtype
  # The mean of the weights' gradients by the weights, with dropout or without.
  mean_hbt = jnp.sum(grad_hbte.astype(dtype) * y_hbte.astype(dtype), axis=-1)

  # Tiles are [S, Q] here, and the gradient of the queries is [H, B, E, T]: XLA:CPU multiplies up to
  # twice as fast where it sums over the last axis of the first factor.
  keys_hbet = operands.keys.swapaxes(2, 3)

  def tile(grads, i, j, is_whole):
    queries_hbqe = _block(operands.queries, i, size)
    g_hbqe = _block(grad_hbte, i, size)
    scores_hbsq = product("hbse,hbqe->hbsq", _block(operands.keys, j, size), queries_hbqe)
    if operands.distance is not None:
      scores_hbsq += _scores_by_distance(operands.distance, i, j, size).swapaxes(2, 3)
    weights_hbsq = jnp.exp(scores_hbsq * scale - _block(log_sum_hbt, i, size)[:, :, None])
    if not is_whole:
      sees_bsq = _sees(reach_bt, i, j, size).swapaxes(1, 2)
      weights_hbsq = jnp.where(sees_bsq[None], weights_hbsq, 0)
    by_weights_hbsq = product("hbse,hbqe->hbsq", _block(operands.values, j, size), g_hbqe)
    kept_hbsq = weights_hbsq
    if dropout_rate:
      ones_hbqs = jnp.ones_like(weights_hbsq).swapaxes(2, 3)
      mask_hbqs = dropout(ones_hbqs, dropout_rate, _tile_key(key, i, j))
      mask_hbsq = mask_hbqs.swapaxes(2, 3)
      kept_hbsq *= mask_hbsq
      by_weights_hbsq *= mask_hbsq
    by_values_hbse = product("hbsq,hbqe->hbse", kept_hbsq.astype(g_hbqe.dtype), g_hbqe)
    above_mean_hbsq = by_weights_hbsq - _block(mean_hbt, i, size)[:, :, None]
    by_scores_hbsq = (weights_hbsq * above_mean_hbsq * scale).astype(operands.queries.dtype)
    by_keys_hbse = product("hbsq,hbqe->hbse", by_scores_hbsq, queries_hbqe)
    by_queries_hbeq = product("hbes,hbsq->hbeq", _block(keys_hbet, j, size, 3), by_scores_hbsq)
    by_distance = grads.distance
    if operands.distance is not None and by_distance is not None:
      queries_hbte, positions_hre = operands.distance
      by_distance_hbqr = _align_back(by_scores_hbsq.swapaxes(2, 3))
      start = _first_distance(positions_hre, i, j, size)
      near_hre = lax.dynamic_slice_in_dim(positions_hre, start, 2 * size, 1)
      more_hbqe = product("hbqr,hre->hbqe", by_distance_hbqr, near_hre)
      more_hbre = product("hbqr,hbqe->hbre", by_distance_hbqr, _block(queries_hbte, i, size))
      more_hbre += lax.dynamic_slice_in_dim(by_distance[1], start, 2 * size, 2)
      by_distance = (
        _put(by_distance[0], _block(by_distance[0], i, size) + more_hbqe, i, size),
        lax.dynamic_update_slice_in_dim(by_distance[1], more_hbre, start, 2),
      )
    return _Operands(
      _put(grads.queries, _block(grads.queries, i, size, 3) + by_queries_hbeq, i, size, 3),
      _put(grads.keys, _block(grads.keys, j, size) + by_keys_hbse, j, size),
      _put(grads.values, _block(grads.values, j, size) + by_values_hbse, j, size),
      by_distance,
    )

  grads = jax.tree.map(lambda x: jnp.zeros_like(x, dtype), operands)
  grads = grads._replace(queries=grads.queries.swapaxes(2, 3))
  if operands.distance is not None and grads.distance is not None:
    # Rows may lie on several devices, so their shares of the positions are summed at the end.
    positions_hre = operands.distance[1]
    per_row = (len(positions_hre), y_hbte.shape[1], *positions_hre.shape[1:])
    zeros_hbre = jnp.zeros_like(positions_hre, dtype, shape=per_row)
    grads = grads._replace(distance=(grads.distance[0], zeros_hbre))
  grads = _for_tiles(tile, grads, y_hbte.shape[2] // size, reach_bt)
  grads = grads._replace(queries=grads.queries.swapaxes(2, 3))
  if grads.distance is not None:
    grads = grads._replace(distance=(grads.distance[0], grads.distance[1].sum(axis=1)))
  return jax.tree.map(lambda x, like: x.astype(like.dtype), grads, operands), None, None


_attend_tiles.defvjp(_attend_tiles_forward, _attend_tiles_backward)


def _scores_by_distance(distance, i, j, size: int) -> jax.Array:
  """The products of block i of queries and the positions of the keys of block j, [H, B, Q, S]."""
  queries_hbte, positions_hre = distance
  start = _first_distance(positions_hre, i, j, size)
  near_hre = lax.dynamic_slice_in_dim(positions_hre, start, 2 * size, 1)
  return _align_tile(product("hbqe,hre->hbqr", _block(queries_hbte, i, size), near_hre))


def _sees(reach_bt, i, j, size: int) -> jax.Array:
  """Whether a query of block i sees a key of block j, [B or 1, Q, S]."""
  index = jnp.arange(size, dtype=jnp.int32)
  lag_qs = index[:, None] + (i - j) * size - index[None]
  sees_bqs = (lag_qs >= 0)[None]
  if reach_bt is None:
    return sees_bqs
  reach_bq = lax.dynamic_slice_in_dim(reach_bt, i * size, size, 1)
  return sees_bqs & (lag_qs[None] <= reach_bq[..., None])


def _for_tiles(tile, state, blocks: int, reach_bt):
  """Applies state = tile(state, i, j, is_whole) to each tile in which a query sees a key.

  `is_whole`: every query of the tile sees every key. For each block of queries, the tile on the
  diagonal goes first: there each query sees its own key, so that no maximum stays -inf.
  """
  if reach_bt is None:
    diagonal = jnp.arange(blocks, dtype=jnp.int32)
    state, _ = lax.scan(lambda state, i: (tile(state, i, i, False), None), state, diagonal)
    below = np.tril_indices(blocks, -1)
    i, j = (jnp.asarray(x, jnp.int32) for x in below)
    return lax.scan(lambda state, i_j: (tile(state, *i_j, True), None), state, (i, j))[0]
  i, lag = (jnp.asarray(x, jnp.int32) for x in np.tril_indices(blocks))
  j = i - lag
  size = reach_bt.shape[1] // blocks
  first_bi = jnp.arange(0, reach_bt.shape[1], size, dtype=jnp.int32)[None] - reach_bt[:, ::size]
  # If a query of a block sees the block of keys, the first one does.
  is_seen = jnp.any(first_bi[:, i] < (j[None] + 1) * size, axis=0)
  order = jnp.argsort(~is_seen)  # stable, so that the diagonal stays first
  i = i[order]
  j = j[order]
  number = jnp.sum(is_seen, dtype=jnp.int32)
  return lax.fori_loop(0, number, lambda n, state: tile(state, i[n], j[n], False), state)


def _tile_key(key, i, j):
  return jax.random.fold_in(jax.random.fold_in(key, i), j)


def _block(x, i, size: int, axis: int = 2) -> jax.Array:
  return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(x, block, i, size: int, axis: int = 2) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(x, block, i * size, axis)


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
