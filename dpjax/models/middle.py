"""The middle of an hourglass: the lengths to compile it for, and its steps.

B batch, S the segments and the null group, C position of a chunk, D width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import ops
from dpjax.layers.boundaries import Boundaries, BoundaryOutput
from dpjax.ops.segments import take_segments


class HourglassCache(NamedTuple):
  """The caches of an hourglass's stacks and boundaries."""

  first: tuple
  middle: tuple  # after the null group and all closed segments; see `Hourglass.init_cache`
  last: tuple
  segment: ops.SegmentCache  # the open segment
  latest: jax.Array  # [B, D], the middle's output for the last closed segment
  boundaries: Any  # the state of `Boundaries.init_state`


def segment_buckets(predictor: Boundaries, length: int, has_documents: bool) -> tuple[int, ...]:
  """The lengths for which the middle is compiled."""
  max_segments, num_null = predictor.max_segments(length), int(predictor.has_null_group)
  if has_documents and max_segments is not None:
    # Each document needs one more: sizes for few documents, and for many.
    sizes = {max_segments + 1 + length // 64, max_segments + 1 + length // 8}
  else:
    sizes = {*ops.bucket_sizes(length + num_null, predictor.num_buckets)}
  if has_documents:
    sizes.add(max(*sizes, length * (1 + num_null)))
  return tuple(sorted(sizes))


def pool_probabilities(output: BoundaryOutput, size: int) -> jax.Array | None:
  """[B, S], the probabilities at the boundaries that end the segments."""
  if output.probabilities is None:
    return None
  p_bt1 = output.probabilities[..., None]
  return ops.pool_segments(p_bt1, output.boundaries, size, method="last")[..., 0]


def read_segments(
  step: Callable,
  queue_bsd: jax.Array,
  predictor: Boundaries,
  output: BoundaryOutput,
  cache: HourglassCache,
  num_before: jax.Array,
  lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array, tuple]:
  """The upsampled segments for the tokens of a chunk.

  `step` is the middle, (segments, caches, lengths) -> (segments, caches); `queue_bsd`, of
  S = 1 + C entries, holds the null group and the segments that end in the chunk.

  Returns [B, C, D]; the vector for the last real token of each row, [B, D]; the middle's caches.
  """
  b_bc, has_null = output.boundaries.astype(jnp.int32), predictor.has_null_group
  batch, chunk = b_bc.shape
  if lengths is None:
    lengths = jnp.full(batch, chunk, jnp.int32)
  b_bc = jnp.where(jnp.arange(chunk)[None] < lengths[:, None], b_bc, 0)
  p_bc = pool_probabilities(output._replace(boundaries=b_bc), chunk)
  # The null group goes first in a new row.
  is_new_b = (num_before == 0) & (lengths > 0) & has_null
  # Number of queue entries consumed by each token; includes the null group if it is new.
  index_bc = is_new_b.astype(jnp.int32)[:, None] + jnp.cumsum(b_bc, axis=1, dtype=jnp.int32)
  waiting_b = index_bc[:, -1]

  if chunk > 1:
    queue_bsd = jnp.where(is_new_b[:, None, None], queue_bsd, jnp.roll(queue_bsd, -1, axis=1))
    sizes = ops.bucket_sizes(chunk + 1, min(predictor.num_buckets, 4, chunk // 8 + 1))

    def at_capacity(size, queue_bsd, middle):
      s_bsd, middle = step(queue_bsd[:, :size], middle, waiting_b)
      return jnp.pad(s_bsd, ((0, 0), (0, chunk + 1 - size), (0, 0))), middle

    index = jnp.searchsorted(jnp.asarray(sizes), jnp.max(waiting_b))
    branches = [functools.partial(at_capacity, size) for size in sizes]
    s_bsd, middle = jax.lax.switch(index, branches, queue_bsd, cache.middle)
    if not has_null:
      s_bsd = predictor.smooth(s_bsd[:, :-1], p_bc, cache.latest)
    s_bsd = jnp.concatenate([cache.latest[:, None], s_bsd], axis=1)
    latest_bd = jnp.take_along_axis(s_bsd, waiting_b[:, None, None], axis=1)[:, 0]
    return take_segments(s_bsd, index_bc), latest_bd, middle

  def advance(state):
    count, latest_bd, middle = state
    is_next_b = count < waiting_b
    next_b = jnp.where(is_new_b, count, 1)
    next_b1d = jnp.take_along_axis(queue_bsd, next_b[:, None, None], axis=1)
    s_b1d, middle = step(next_b1d, middle, is_next_b.astype(jnp.int32))
    if not has_null:
      s_b1d = predictor.smooth(s_b1d, p_bc, latest_bd)
    return count + 1, jnp.where(is_next_b[:, None], s_b1d[:, 0], latest_bd), middle

  # A loop of zero to two iterations; `lax.cond` would copy the caches at every token.
  state = jnp.int32(0), cache.latest, cache.middle
  _, latest_bd, middle = jax.lax.while_loop(
    lambda state: state[0] < jnp.max(waiting_b), advance, state
  )
  return latest_bd[:, None], latest_bd, middle
