"""One pooling of an hourglass: tokens to segments, and back.

B batch, T position, D width, S the segments and the null group, C position of a chunk, N 1 with a
null group, else 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers import common
from dpjax.layers.boundaries import Boundaries, BoundaryOutput
from dpjax.layers.common import Params, check_settings
from dpjax.layers.mixer import Cache, Context, check_documents
from dpjax.models.stack import Buckets, Stack, share_positions


class PoolingHints(NamedTuple):
  """What a caller knows of the outermost segments.

  Attributes:
    capacity: an S that fits all rows, at most T + 1, or 2 T with documents; None finds it on the
      device. If it is too small, the result is nan.
    boundaries: [B, T], 0 or 1, instead of the module's. Without a null group, as with `Routing`,
      the first token of each row and document must be 1.
    noise: [B, T] in (0, 1), instead of the boundaries' draws.
  """

  capacity: int | None = None
  boundaries: jax.Array | None = None
  noise: jax.Array | None = None


class Level(NamedTuple):
  """What a stage keeps of its way down for its way up.

  Attributes:
    hidden: [B, T, D], the output of the first stack.
    output: the boundaries.
    context: that of the stage's positions.
    segments: [B, S, D'], the input of the inner stage.
    inner: the context of the segments.
    buckets: the lengths that the inner stage is compiled for.
  """

  hidden: jax.Array
  output: BoundaryOutput
  context: Context
  segments: jax.Array
  inner: Context
  buckets: Buckets


class StageCache(NamedTuple):
  """The cache of a stage.

  Attributes:
    length: [B], the number of positions so far in each row.
    first: one for each layer.
    last: likewise.
    segment: the open segment.
    latest: [B, D], the result of the inner stage for the last closed segment.
    boundaries: from `Boundaries.init_cache`.
  """

  length: jax.Array
  first: tuple[Cache, ...]
  last: tuple[Cache, ...]
  segment: ops.SegmentCache
  latest: jax.Array
  boundaries: Cache


class ChunkLevel(NamedTuple):
  """What a stage keeps of a chunk, and the segments that wait for the inner stage.

  Attributes:
    hidden: [B, C, D], the output of the first stack.
    output: the boundaries.
    first: the caches of the first stack.
    segment: the open segment.
    queue: [B, N + C, D'], the null group, in a new row, and the segments that end in the chunk.
    index: [B, C], the number of vectors in the queue up to the one that each token reads.
    probabilities: [B, C], those at the boundaries that end the segments, or None.
  """

  hidden: jax.Array
  output: BoundaryOutput
  first: tuple[Cache, ...]
  segment: ops.SegmentCache
  queue: jax.Array
  index: jax.Array
  probabilities: jax.Array | None

  @property
  def num_waiting(self) -> jax.Array:
    """[B], the number of vectors in the queue."""
    return self.index[:, -1]


class Stage(nn.Module):
  """Blocks on tokens, their boundaries and segments, and blocks on tokens again.

  Attributes:
    width: D.
    first: blocks before the pooling.
    boundaries: `dpjax.layers.Boundaries`.
    last: blocks after the upsampling.
    inner_norm: the norm of the boundaries' `reader`, such as `dpjax.layers.Norm()`.
    shared_positions: the positions and biases that the relative attention of `first` and `last`
      shares, from its `make_positions`; None without relative attention.
    inner_width: the width of the segments, with a matrix in each direction; None means D.
    pads: whether a learned vector, appended to each segment, fills a wider one, whose first D
      features are the result, without matrices.
    init_std: the standard deviation of the matrices; see `dpjax.layers.FeedForward`.
    dtype: the dtype of the computation; parameters are float32.
  """

  width: int
  first: Stack
  boundaries: Boundaries
  last: Stack
  inner_norm: nn.Module
  shared_positions: nn.Module | None = None
  inner_width: int | None = None
  pads: bool = False
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Creates the reader of segments and the maps to their width and back."""
    sizes = ("width",) if self.inner_width is None else ("width", "inner_width")
    check_settings(self, sizes=sizes)
    self.reader = self.boundaries.reader(self.inner_width or self.width, self.inner_norm)
    nn.share_scope(self, self.reader)
    if self.inner_width is None:
      return
    if self.pads:
      size = self.inner_width - self.width
      if size < 0:
        expected = f"at least the width {self.width} with pads"
        raise ValueError(f"inner_width: expected {expected}, got {self.inner_width}")
      self.padding_p = self.param("padding", nn.initializers.zeros, (size,), jnp.float32)
    else:
      init = common.weights(self.init_std, common.linear_kernel)
      shape = (self.width, self.inner_width)
      self.widen_df = self.param("widen", init, shape, jnp.float32)
      self.narrow_fd = self.param("narrow", init, shape[::-1], jnp.float32)

  def down(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None,
    context: Context,
    pooling: PoolingHints,
    buckets: Buckets,
  ) -> Level:
    """From [B, T, D] to the segments.

    `tokens` are ids, [B, T], or None if the inputs are segments; their number in each row is
    `context.lengths`.
    """
    self._check(inputs.shape[1], pooling.capacity, context)
    h_btd = self._run(self.first, inputs, context, buckets)
    output = self._find(h_btd, tokens, context, None, pooling)
    if context.lengths is not None:
      is_real_bt = jnp.arange(inputs.shape[1])[None] < context.lengths[:, None]
      b_bt = output.boundaries * is_real_bt.astype(output.boundaries.dtype)
      output = output._replace(boundaries=b_bt)
    num_segments_b = self.reader.count(output.boundaries, context)
    inner_buckets = self._inner_buckets(inputs.shape[1], num_segments_b, context, pooling)
    size = inner_buckets.sizes[-1]
    pooled_bsd = ops.pool_segments(
      h_btd,
      output.boundaries,
      size - self.reader.num_null,
      method=self.boundaries.pooling,
      document_starts=self._null_starts(context),
    )
    starts_bs = None
    if context.document_starts is not None:
      starts_bs = ops.segment_starts(
        output.boundaries,
        context.document_starts,
        size,
        has_null_group=self.reader.num_null > 0,
      )
    inner = Context(
      deterministic=context.deterministic,
      document_starts=starts_bs,
      lengths=num_segments_b,
    )
    s_bsd = self.reader.prepare(self.widen(pooled_bsd), inner)
    return Level(h_btd, output, context, s_bsd, inner, inner_buckets)

  def up(self, segments: jax.Array, level: Level, buckets: Buckets) -> jax.Array:
    """From the result of the inner stage, [B, S, D'], to [B, T, D]."""
    s_bsd = self.narrow(segments.astype(level.segments.dtype))
    output = level.output
    p_bs = pool_probabilities(output, s_bsd.shape[1])
    u_btd = ops.upsample_segments(
      self.reader.finish(s_bsd, p_bs, level.inner),
      output.boundaries,
      document_starts=self._null_starts(level.context),
    )
    x_btd = self.reader.combine(u_btd, self.boundaries.residual(level.hidden), output)
    return self._run(self.last, x_btd, level.context, buckets)

  def down_step(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None,
    cache: StageCache,
    context: Context,
    pooling: PoolingHints,
  ) -> ChunkLevel:
    """`down` for the next C positions of each row."""
    context = context.replace(num_before=cache.length)
    h_bcd, first = self._step(self.first, inputs, cache.first, context)
    output = self._find(h_bcd, tokens, context, cache.boundaries, pooling)
    pooled_bsd, segment = ops.pool_segments_cached(
      h_bcd,
      output.boundaries,
      cache.segment,
      method=self.boundaries.pooling,
      lengths=context.lengths,
    )
    s_bsd = self.reader.prepare(self.widen(pooled_bsd), Context())
    b_bc = output.boundaries.astype(jnp.int32)
    batch, chunk = b_bc.shape
    lengths = context.lengths
    if lengths is None:
      lengths = jnp.full(batch, chunk, jnp.int32)
    b_bc = jnp.where(jnp.arange(chunk)[None] < lengths[:, None], b_bc, 0)
    is_new_b = (cache.length == 0) & (lengths > 0)
    num_null = self.reader.num_null
    num_null_b1 = jnp.where(is_new_b, num_null, 0)[:, None]
    return ChunkLevel(
      hidden=h_bcd,
      output=output,
      first=first,
      segment=segment,
      # In a row that continues, the null group moves to the end, where nothing reads it.
      queue=jnp.where(is_new_b[:, None, None], s_bsd, jnp.roll(s_bsd, -num_null, axis=1)),
      index=num_null_b1 + jnp.cumsum(b_bc, axis=1, dtype=jnp.int32),
      probabilities=pool_probabilities(output._replace(boundaries=b_bc), chunk),
    )

  def up_step(
    self, read: jax.Array, latest: jax.Array, level: ChunkLevel, cache: StageCache, context: Context
  ) -> tuple[jax.Array, StageCache]:
    """`up` from the upsampled segments, [B, C, D]; `latest`, [B, D], is that of the last token."""
    x_bcd = self.reader.combine(read, self.boundaries.residual(level.hidden), level.output)
    y_bcd, last = self._step(self.last, x_bcd, cache.last, context)
    num_new = read.shape[1] if context.lengths is None else context.lengths
    new = StageCache(
      cache.length + num_new, level.first, last, level.segment, latest, level.output.cache
    )
    return y_bcd, new

  def widen(self, x: jax.Array) -> jax.Array:
    """From the width of the stage to that of its segments."""
    if self.inner_width is None:
      return x
    if not self.pads:
      return x @ self.widen_df.astype(self.dtype)
    padding = self.padding_p.astype(x.dtype)
    rest = jnp.broadcast_to(padding, (*x.shape[:-1], padding.size))
    return jnp.concatenate([x, rest], axis=-1)

  def narrow(self, x: jax.Array) -> jax.Array:
    """From the width of the segments to that of the stage."""
    if self.inner_width is None:
      return x
    if self.pads:
      return x[..., : self.width]
    return x @ self.narrow_fd.astype(self.dtype)

  @property
  def has_cache(self) -> bool:
    """Whether all mixers and the boundaries have a cache."""
    return self.first.has_cache and self.last.has_cache and self.boundaries.has_cache

  @property
  def bounded_parts(self) -> tuple[str, ...]:
    """See `Stack.bounded_parts`; also the boundaries, if they cannot go beyond the window."""
    names = (*self.first.bounded_parts, *self.last.bounded_parts)
    if self.boundaries.is_unbounded:
      return names
    return (*names, f"{type(self.boundaries).__name__} boundaries")

  def init_cache(self, batch: int, width: int) -> StageCache:
    """The cache of B rows of width D before the first position."""
    return StageCache(
      jnp.zeros(batch, jnp.int32),
      self.first.init_cache(batch, width),
      self.last.init_cache(batch, width),
      ops.init_segment_cache(batch, width, self.dtype),
      jnp.zeros((batch, width), self.dtype),
      self.boundaries.init_cache(batch, width),
    )

  def unstack(self, params: Params) -> tuple["Stage", Params]:
    """The stage with unstacked layers, and its parameters; see `Stack.unstack`."""
    first, first_params = self.first.unstack(params["first"])
    last, last_params = self.last.unstack(params["last"])
    stage = self.clone(first=first, last=last)
    params = {**params, "first": first_params, "last": last_params}
    if self.boundaries.needs_run:
      frozen, frozen_params = self.boundaries.frozen.unstack(params["boundaries"]["frozen"])
      stage = stage.clone(boundaries=self.boundaries.clone(frozen=frozen))
      params["boundaries"] = {**params["boundaries"], "frozen": frozen_params}
    return stage, params

  def _run(self, stack: Stack, x_btd: jax.Array, context: Context, buckets: Buckets) -> jax.Array:
    length, width = x_btd.shape[1:]
    context = share_positions(self.shared_positions, stack, context, length, width)
    return stack(x_btd, context, buckets).astype(x_btd.dtype)

  def _step(
    self, stack: Stack, x_bcd: jax.Array, caches: tuple[Cache, ...], context: Context
  ) -> tuple[jax.Array, tuple[Cache, ...]]:
    width = x_bcd.shape[2]
    context = share_positions(self.shared_positions, stack, context, stack.max_length, width)
    y_bcd, caches = stack.step(x_bcd, caches, context)
    return y_bcd.astype(x_bcd.dtype), caches

  def _find(
    self,
    h_btd: jax.Array,
    tokens: jax.Array | None,
    context: Context,
    cache: Cache,
    pooling: PoolingHints,
  ) -> BoundaryOutput:
    """The boundaries of the module, or those of the caller."""
    module = self.boundaries
    noise = pooling.noise
    shape = h_btd.shape[:2]
    if pooling.boundaries is not None and noise is None and module.is_stochastic:
      noise = jnp.full(shape, 0.5)  # The draws are not used.
    if cache is None:
      output = module(h_btd, tokens, context, noise=noise)
    else:
      output = module.step(h_btd, tokens, cache, context, noise=noise)
    if pooling.boundaries is None:
      return output
    ops.check_boundaries(pooling.boundaries, shape)
    return output._replace(boundaries=pooling.boundaries)

  def _inner_buckets(
    self, length: int, num_segments: jax.Array, context: Context, pooling: PoolingHints
  ) -> Buckets:
    """The lengths that the inner stage is compiled for."""
    has_documents = context.document_starts is not None
    capacity = pooling.capacity
    if capacity is None and pooling.boundaries is None and not has_documents:
      max_segments = self.boundaries.max_segments(length)
      capacity = None if max_segments is None else max_segments + 1
    if capacity is not None:
      return Buckets((capacity,))
    sizes = segment_buckets(self.boundaries, length, has_documents)
    return Buckets(sizes, jnp.max(num_segments, initial=0))

  def _null_starts(self, context: Context) -> jax.Array | None:
    """[B, T], 1 where a null group precedes a token; None if at most one precedes the row."""
    return context.document_starts if self.reader.num_null else None

  def _check(self, length: int, capacity: int | None, context: Context) -> None:
    has_documents = context.document_starts is not None
    most = max(2 * length, 1) if has_documents else length + 1
    if capacity is not None and not 1 <= capacity <= most:
      formula = "2 T" if has_documents else "T + 1"
      raise ValueError(f"capacity: expected 1 to {formula} = {most}, got {capacity}")
    if not has_documents:
      return
    check_documents(self.boundaries)
    if not self.reader.num_null and self.boundaries.pooling != "last":
      raise UserError(
        f"document_starts: expected none for {type(self.boundaries).__name__}, whose segments are "
        "means but have no null group, got some"
      )


def segment_buckets(module: Boundaries, length: int, has_documents: bool) -> tuple[int, ...]:
  """The lengths for which the inner stage is compiled."""
  max_segments = module.max_segments(length)
  num_null = module.reader.num_null
  if has_documents and max_segments is not None:
    # Each document needs one more: sizes for few documents, and for many.
    sizes = {max_segments + 1 + length // 64, max_segments + 1 + length // 8}
  else:
    sizes = {*ops.bucket_sizes(length + num_null, module.num_buckets)}
  if has_documents:
    sizes.add(max(*sizes, length * (1 + num_null)))
  return tuple(sorted(sizes))


def pool_probabilities(output: BoundaryOutput, size: int) -> jax.Array | None:
  """[B, S], the probabilities at the boundaries that end the segments."""
  if output.probabilities is None:
    return None
  p_bt1 = output.probabilities[..., None]
  return ops.pool_segments(p_bt1, output.boundaries, size, method="last")[..., 0]
