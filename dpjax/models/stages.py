"""Outputs and caches of an hourglass, and an hourglass within another."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import ops
from dpjax.ops.documents import document_length, starts_in_chunk


class HourglassCache(NamedTuple):
  """The cache of an hourglass.

  Attributes:
    first: caches of the first stack's layers.
    middle: caches of the middle stack, which has seen the null group and all closed segments.
    last: caches of the last stack.
    segment: the open segment.
    latest: [B, D], the middle stack's output for the last closed segment, for tokens until
      the next one closes.
    boundaries: the state of `dpjax.layers.boundaries.Boundaries.init_state`.
  """

  first: tuple
  middle: tuple
  last: tuple
  segment: ops.SegmentCache
  latest: jax.Array
  boundaries: Any


class StageBoundaries(NamedTuple):
  """The boundaries of a second pooling, of the S segments of the outer one.

  Attributes:
    boundaries: [B, S]; see `HourglassOutput`.
    boundary_logits: see `HourglassOutput`.
    boundary_probabilities: see `HourglassOutput`.
    inner: the stage within this one, or None.
    is_start: [B, S], 1 where a document begins; None for one document.
  """

  boundaries: jax.Array
  boundary_logits: jax.Array | None
  boundary_probabilities: jax.Array | None
  inner: "StageBoundaries | None" = None
  is_start: jax.Array | None = None


class HourglassOutput(NamedTuple):
  """The output of an hourglass.

  Attributes:
    hidden: [B, T, D].
    boundaries: [B, T], 0 or 1. Integers, or, if gumbel draws them, floats that pass a gradient.
    boundary_logits: [B, T], the logits of boundaries; None without a predictor.
    cache: the new cache, if one was given.
    boundary_probabilities: [B, T], if the kind of boundaries has them.
    inner: the boundaries of a pooling in the middle; None without one, or with a cache.
  """

  hidden: jax.Array
  boundaries: jax.Array
  boundary_logits: jax.Array | None
  cache: HourglassCache | None = None
  boundary_probabilities: jax.Array | None = None
  inner: StageBoundaries | None = None


@dataclasses.dataclass(frozen=True)
class PooledMiddle:
  """An hourglass in place of a middle stack, with segments for tokens.

  It has the methods of `dpjax.models.stack.Stack`. Its cache is the number of segments so far
  in each row's document, [B], and the hourglass's own cache.

  Attributes:
    make_hourglass: makes an `Hourglass`, with boundaries that suit segments, from its `name`.
  """

  make_hourglass: Callable[..., Any]

  def __call__(self, x_bsd, *, name: str, lengths: jax.Array, **options):
    """Like `Stack.__call__`, and returns the `StageBoundaries`; `lengths`, [B], counts segments."""
    del options["positions"]
    output = self.make_hourglass(name=name)(x_bsd, None, lengths=lengths, **options)
    return output.hidden, StageBoundaries(
      *output[1:3], *output[4:], is_start=options.get("is_start")
    )

  def with_caches(self, width: int, *, name: str, positions=None) -> Callable:
    """As that of a stack."""
    del width, positions
    hourglass = self.make_hourglass(name=name)
    params, free = hourglass.variables["params"], hourglass.clone(parent=None)

    def function(x_bsd, caches, lengths=None, is_start=None):
      num_before, cache = caches
      output: Any = free.apply(
        {"params": params},
        x_bsd,
        None,
        cache=cache,
        num_before=num_before,
        lengths=lengths,
        is_start=is_start,
      )
      if is_start is None:
        num_before += x_bsd.shape[1] if lengths is None else lengths
      else:
        is_start = starts_in_chunk(is_start, x_bsd.shape[:2], lengths)
        num_before = document_length(is_start, num_before, lengths)
      return output.hidden, (num_before, output.cache)

    return function

  def unstack(self, params: Mapping) -> dict:
    """As that of a stack."""
    return self._hourglass.unstack(params)

  @property
  def has_cache(self) -> bool:
    """As that of a stack."""
    return self._hourglass.has_cache

  def init_caches(self, batch: int, width: int) -> tuple:
    """As those of a stack."""
    return jnp.zeros(batch, jnp.int32), self._hourglass.init_cache(batch, width)

  @property
  def _hourglass(self) -> Any:
    return self.make_hourglass(parent=None)
