"""Dynamic token pooling: blocks on tokens, then on segments, then on tokens again.

  h   = first(x)                                  [B, T, D]
  b   = boundaries; b_t = 1: a segment ends with token t
  s   = [null, mean of each closed segment's h]   [B, S, D]
  s'  = middle(N(s))                              causal over segments
  u_t = s'[sum over i <= t of b_i]                index 0 is the null group
  y   = last(u + h)

B batch, T position, D width, S the segments and the null group, C position of a chunk. Without
dropout, the result of a row depends neither on the other rows nor on S.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3; PiotrNawrot/dynamic-pooling@1e6f360, where
fixed segments end at 0, k, ... (`Fixed.offset`) and Gumbel draws in evaluation (`Gumbel.sample`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers.boundaries import StageOutput
from dpjax.layers.common import Params
from dpjax.layers.mixer import Cache, Context
from dpjax.models.stack import Buckets, Stack, share_positions
from dpjax.models.stage import ChunkLevel, PoolingHints, Stage, StageCache
from dpjax.ops.segments import take_segments


class HourglassOutput(NamedTuple):
  """[B, T, D], and the boundaries of each stage, the outermost first."""

  hidden: jax.Array
  stages: tuple[StageOutput, ...]


class HourglassCache(NamedTuple):
  """The caches of the stages, the outermost first, and of the innermost layers."""

  stages: tuple[StageCache, ...]
  layers: tuple[Cache, ...]


# What a stage runs on its segments: (segments, cache, context) -> (results, cache).
InnerStep = Callable[[jax.Array, HourglassCache, Context], tuple[jax.Array, HourglassCache]]


class Hourglass(nn.Module):
  """Stages of pooling around a stack of layers; without stages it is that stack.

  Attributes:
    layers: the innermost layers, whose mixers' `max_length` is the tokens' plus one for each stage.
    stages: the poolings, the outermost first.
    shared_positions: the positions and biases that the relative attention of `layers` shares, from
      its `make_positions`; None: those of the innermost stage, if any.
  """

  layers: Stack
  stages: tuple[Stage, ...] = ()
  shared_positions: nn.Module | None = None

  def __call__(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None = None,
    context: Context | None = None,
    pooling: PoolingHints | None = None,
  ) -> HourglassOutput:
    """[B, T, D] -> [B, T, D], for whole rows.

    Args:
      inputs: [B, T, D].
      tokens: [B, T], ids, for boundaries that read them.
      context: see `dpjax.layers.Context`; None: whole rows, in evaluation.
      pooling: what the caller knows of the outermost segments.

    Raises:
      ValueError: an argument is not as above, or there is noise for boundaries that draw nothing.
    """
    x = inputs
    context = context or Context()
    pooling = pooling or PoolingHints()
    buckets = Buckets()
    levels = []  # what each stage needs for its way up
    for stage in self.stages:
      level = stage.down(x, tokens, context, pooling, buckets)
      levels.append((stage, level, buckets))
      x = level.segments
      context = level.inner
      buckets = level.buckets
      # Segments have no ids, and the caller knows nothing of them.
      tokens = None
      pooling = PoolingHints()
    length, width = x.shape[1:]
    shared = self._positions_of_layers()
    x = self.layers(x, share_positions(shared, self.layers, context, length, width), buckets)
    for stage, level, buckets in reversed(levels):
      x = stage.up(x, level, buckets)
    outputs = []
    for _, level, _ in levels:
      found = level.output
      starts = level.context.document_starts
      outputs.append(StageOutput(found.boundaries, found.logits, found.probabilities, starts))
    return HourglassOutput(x, tuple(outputs))

  def step(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None,
    cache: HourglassCache,
    context: Context | None = None,
    pooling: PoolingHints | None = None,
  ) -> tuple[jax.Array, HourglassCache]:
    """The outputs for the next C tokens of each row, [B, C, D], and the new cache.

    An inner stage runs only if a segment ends.
    """
    context = context or Context()
    if not self.stages:
      return self.step_layers(inputs, cache, context)
    hourglass, variables = self.unbind()

    def step(inputs, cache, context):
      return hourglass.bind(variables).step_layers(inputs, cache, context)

    for stage in reversed(self.stages[1:]):
      step = _StageStep(_rebinding(stage), step)
    outermost = _StageStep(lambda: self.stages[0], step)
    return outermost(inputs, cache, context, tokens, pooling)

  def step_layers(
    self, inputs: jax.Array, cache: HourglassCache, context: Context
  ) -> tuple[jax.Array, HourglassCache]:
    """The step of the innermost layers."""
    length = self.layers.max_length
    shared = self._positions_of_layers()
    context = share_positions(shared, self.layers, context, length, inputs.shape[2])
    outputs, layers = self.layers.step(inputs, cache.layers, context)
    return outputs, cache._replace(layers=layers)

  def _positions_of_layers(self) -> nn.Module | None:
    """The positions that the innermost layers share."""
    if self.shared_positions is not None or not self.stages:
      return self.shared_positions
    return self.stages[-1].shared_positions

  @property
  def has_cache(self) -> bool:
    """Whether all stages and the innermost layers have a cache."""
    return self.layers.has_cache and all(stage.has_cache for stage in self.stages)

  @property
  def bounded_parts(self) -> tuple[str, ...]:
    """See `Stack.bounded_parts`; of all stages and the innermost layers."""
    names = [name for stage in self.stages for name in stage.bounded_parts]
    return (*names, *self.layers.bounded_parts)

  def init_cache(self, batch: int, width: int) -> HourglassCache:
    """The cache of B rows of width D before the first token."""
    caches = []
    for stage in self.stages:
      caches.append(stage.init_cache(batch, width))
      width = stage.inner_width or width
    return HourglassCache(tuple(caches), self.layers.init_cache(batch, width))

  def unstack(self, params: Params) -> tuple["Hourglass", Params]:
    """The hourglass with unstacked layers, and its parameters; see `Stack.unstack`."""
    layers, layer_params = self.layers.unstack(params["layers"])
    params = {**params, "layers": layer_params}
    stages = []
    for i, stage in enumerate(self.stages):
      stage, params[f"stages_{i}"] = stage.unstack(params[f"stages_{i}"])
      stages.append(stage)
    return self.clone(layers=layers, stages=tuple(stages)), params


def _rebinding(stage: Stage) -> Callable[[], Stage]:
  """A function that binds a stage again, as control flow takes pure functions only."""
  free, variables = stage.unbind()
  return lambda: free.bind(variables)


class _StageStep(NamedTuple):
  """The step of a stage and all within it: an `InnerStep` for the stage around it.

  `bind` returns the stage, bound where the step is traced.
  """

  bind: Callable[[], Stage]
  inner: InnerStep

  def __call__(
    self,
    inputs: jax.Array,
    cache: HourglassCache,
    context: Context,
    tokens: jax.Array | None = None,
    pooling: PoolingHints | None = None,
  ) -> tuple[jax.Array, HourglassCache]:
    stage = self.bind()
    stage_cache = cache.stages[0]
    within = cache._replace(stages=cache.stages[1:])
    level = stage.down_step(inputs, tokens, stage_cache, context, pooling or PoolingHints())
    rebind = _rebinding(stage)

    def step(segments, within, lengths):
      outputs, within = self.inner(segments, within, Context(lengths=lengths))
      return rebind().narrow(outputs.astype(segments.dtype)), within

    read = _read_chunk if inputs.shape[1] > 1 else _read_token
    u_bcd, latest, within = read(step, level, stage, stage_cache.latest, within)
    outputs, stage_cache = stage.up_step(u_bcd, latest, level, stage_cache, context)
    return outputs, within._replace(stages=(stage_cache, *within.stages))


# (segments, cache, lengths) -> (results in the width of the stage, cache).
SegmentStep = Callable[[jax.Array, HourglassCache, jax.Array], tuple[jax.Array, HourglassCache]]


def _read_chunk(
  step: SegmentStep,
  level: ChunkLevel,
  stage: Stage,
  latest: jax.Array,
  cache: HourglassCache,
) -> tuple[jax.Array, jax.Array, HourglassCache]:
  """The results for the tokens of a chunk, [B, C, D]; for the last, [B, D]; the new cache."""
  chunk = level.index.shape[1]
  longest = level.queue.shape[1]
  sizes = ops.bucket_sizes(longest, min(stage.boundaries.num_buckets, 4, chunk // 8 + 1))

  def at_size(size, queue_bsd, cache):
    s_bsd, cache = step(queue_bsd[:, :size], cache, level.num_waiting)
    return jnp.pad(s_bsd, ((0, 0), (0, longest - size), (0, 0))), cache

  index = jnp.searchsorted(jnp.asarray(sizes), jnp.max(level.num_waiting))
  branches = [functools.partial(at_size, size) for size in sizes]
  s_bsd, cache = jax.lax.switch(index, branches, level.queue, cache)
  s_bsd = stage.reader.finish_step(s_bsd, level.probabilities, latest)
  s_bsd = jnp.concatenate([latest[:, None], s_bsd], axis=1)
  latest_bd = jnp.take_along_axis(s_bsd, level.num_waiting[:, None, None], axis=1)[:, 0]
  return take_segments(s_bsd, level.index), latest_bd, cache


def _read_token(
  step: SegmentStep,
  level: ChunkLevel,
  stage: Stage,
  latest: jax.Array,
  cache: HourglassCache,
) -> tuple[jax.Array, jax.Array, HourglassCache]:
  """The same for a single token; the inner stage runs only if a segment ends."""

  def advance(state):
    count, latest_bd, cache = state
    is_next_b = count < level.num_waiting
    next_b1d = jax.lax.dynamic_slice_in_dim(level.queue, count, 1, axis=1)
    s_b1d, cache = step(next_b1d, cache, is_next_b.astype(jnp.int32))
    s_b1d = stage.reader.finish_step(s_b1d, level.probabilities, latest_bd)
    return count + 1, jnp.where(is_next_b[:, None], s_b1d[:, 0], latest_bd), cache

  # A loop of zero to two iterations; `lax.cond` would copy the caches at every token.
  state = jnp.int32(0), latest, cache
  _, latest_bd, cache = jax.lax.while_loop(
    lambda state: state[0] < jnp.max(level.num_waiting), advance, state
  )
  return latest_bd[:, None], latest_bd, cache
