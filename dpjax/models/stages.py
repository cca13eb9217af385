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
    middle: caches of the middle stack, which has seen the null group and the segments that
      have ended.
    last: caches of the last stack.
    segment: the open segment's vectors.
    latest: [B, D], what the middle stack made of the last segment that has ended: what
      tokens read until the next one has.
    boundaries: from `dpjax.layers.boundaries.Boundaries.init_state`.
  """

  first: tuple
  middle: tuple
  last: tuple
  segment: ops.SegmentCache
  latest: jax.Array
  boundaries: Any


class Stage(NamedTuple):
  """Where a second pooling, of segments, has its boundaries: S segments of the one outside.

  Attributes:
    boundaries: [B, S], as in `HourglassOutput`.
    boundary_logits: as in `HourglassOutput`.
    boundary_probabilities: as in `HourglassOutput`.
    inner: the stage within this one, or None.
    starts: [B, S], where documents begin; None: a row is one.
  """

  boundaries: jax.Array
  boundary_logits: jax.Array | None
  boundary_probabilities: jax.Array | None
  inner: "Stage | None" = None
  starts: jax.Array | None = None


class HourglassOutput(NamedTuple):
  """The output of an hourglass.

  Attributes:
    hidden: [B, T, D].
    boundaries: [B, T], 0 or 1. Integers, but where gumbel draws them: floats through
      which a gradient passes.
    boundary_logits: [B, T], logits of a boundary's probability; None without a predictor.
    cache: after these tokens, where one was given.
    boundary_probabilities: [B, T], where the kind of boundaries gives them.
    inner: the boundaries of a pooling in the middle; None without one, or with a cache.
  """

  hidden: jax.Array
  boundaries: jax.Array
  boundary_logits: jax.Array | None
  cache: HourglassCache | None = None
  boundary_probabilities: jax.Array | None = None
  inner: Stage | None = None


@dataclasses.dataclass(frozen=True)
class Inner:
  """An hourglass in place of a middle stack: its tokens are segments.

  Its methods are those of `dpjax.models.stack.Stack`; a cache is the number of segments
  of each row's document so far, [B], and the hourglass's own.

  Attributes:
    make_hourglass: called with `name`, gives an `Hourglass` whose boundaries suit segments.
  """

  make_hourglass: Callable[..., Any]

  def __call__(self, x_bsd, *, name: str, lengths: jax.Array, **options):
    """As `Stack.__call__`, and the `Stage`; `lengths`, [B], is the number of segments."""
    del options["positions"]
    output = self.make_hourglass(name=name)(x_bsd, None, lengths=lengths, **options)
    return output.hidden, Stage(*output[1:3], *output[4:], starts=options.get("starts"))

  def with_caches(self, width: int, *, name: str, positions=None) -> Callable:
    """As that of a stack."""
    del width, positions
    hourglass = self.make_hourglass(name=name)
    params, free = hourglass.variables["params"], hourglass.clone(parent=None)

    def function(x_bsd, caches, lengths=None, starts=None):
      start, cache = caches
      output: Any = free.apply(
        {"params": params}, x_bsd, None, cache=cache, start=start, lengths=lengths, starts=starts
      )
      if starts is None:
        start += x_bsd.shape[1] if lengths is None else lengths
      else:
        starts = starts_in_chunk(starts, x_bsd.shape[:2], lengths)
        start = document_length(starts, start, lengths)
      return output.hidden, (start, output.cache)

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
