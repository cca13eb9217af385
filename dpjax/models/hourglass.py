"""Dynamic token pooling: blocks on tokens, then on segments, then on tokens again.

  h   = first(x)                                  [B, T, D]
  b   = boundaries; b_t = 1: a segment ends with token t
  s   = [null, mean of each closed segment's h]   [B, S, D]
  s'  = middle(N(s))                              causal over segments
  u_t = s'[sum over i <= t of b_i]                index 0 is the null group
  y   = last(u + h)

B batch, T position, D width, S the segments and the null group. Without dropout, the result of a
row depends neither on the other rows nor on S.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3; PiotrNawrot/dynamic-pooling@1e6f360, where
fixed segments end at 0, k, ... (`Fixed.offset`) and Gumbel draws in evaluation (`Gumbel.sample`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers import blocks, initializers
from dpjax.layers.boundaries import Boundaries
from dpjax.layers.mixer import check_settings, check_takes_starts
from dpjax.models.hourglass_cache import HourglassCache, pool_at_boundaries, read_segments
from dpjax.models.stack import Stack
from dpjax.ops import checks


class StageBoundaries(NamedTuple):
  """The boundaries of a second pooling, [B, S], as of `HourglassOutput`."""

  boundaries: jax.Array
  boundary_logits: jax.Array | None
  boundary_probabilities: jax.Array | None
  inner: "StageBoundaries | None" = None  # the stage within this one
  document_starts: jax.Array | None = (
    None  # [B, S], 1 where a document begins; None for one document
  )


class HourglassOutput(NamedTuple):
  """The output of an hourglass; for the boundaries, see `BoundaryOutput`."""

  hidden: jax.Array  # [B, T, D]
  boundaries: jax.Array
  boundary_logits: jax.Array | None
  cache: HourglassCache | None = None  # the new cache, if one was given
  boundary_probabilities: jax.Array | None = None
  inner: StageBoundaries | None = None  # of a pooling in the middle; None with a cache


@dataclasses.dataclass(frozen=True)
class PooledMiddle:
  """An hourglass in place of a middle `Stack`, with segments for tokens, and its methods.

  Its cache is the number of segments so far in each row, [B], and the hourglass's own cache.
  """

  make_hourglass: Callable[..., Any]

  def __call__(self, x_bsd, *, name: str, lengths: jax.Array, **options):
    """[B, S, D] and `StageBoundaries`; `lengths`, [B], counts the segments."""
    del options["positions"]
    output = self.make_hourglass(name=name)(x_bsd, None, lengths=lengths, **options)
    stage = StageBoundaries(*output[1:3], *output[4:], document_starts=options["document_starts"])
    return output.hidden, stage

  def with_caches(self, width: int, *, name: str, positions=None) -> Callable:
    """See `Stack`."""
    del width, positions
    hourglass = self.make_hourglass(name=name)
    params, free = hourglass.variables["params"], hourglass.clone(parent=None)

    def function(x_bsd, caches, lengths):
      num_before, cache = caches
      given = dict(cache=cache, num_before=num_before, lengths=lengths)
      output: Any = free.apply({"params": params}, x_bsd, None, **given)
      return output.hidden, (num_before + lengths, output.cache)

    return function

  def unstack(self, params: Mapping) -> dict:
    """See `Stack`."""
    return self.make_hourglass(parent=None).unstack(params)

  @property
  def has_cache(self) -> bool:
    """See `Stack`."""
    return self.make_hourglass(parent=None).has_cache

  def init_cache(self, batch: int, width: int) -> tuple:
    """See `Stack`."""
    hourglass = self.make_hourglass(parent=None)
    return jnp.zeros(batch, jnp.int32), hourglass.init_cache(batch, width)


class Hourglass(nn.Module):
  """Three stacks of blocks; the middle one runs on segments.

  Attributes:
    first: blocks before the pooling.
    middle: blocks on segments, whose mixers' `max_length` is the tokens' plus 1, or an hourglass.
    last: blocks after the upsampling.
    make_boundaries: makes the `dpjax.layers.boundaries.Boundaries` from their `name`.
    make_positions: see `dpjax.models.LanguageModel`; for all three stacks.
    middle_width: the width of the middle, with a matrix each way; None means D.
    make_middle_positions: like `make_positions`, for a middle with a width of its own.
    norm_init_std, norm_type, use_bias, norm_epsilon: see `dpjax.layers.blocks.Norm`.
    init_std: of the matrices of `middle_width`; see `dpjax.layers.blocks.FeedForward`.
    dtype: the dtype of the computation; parameters are float32.
  """

  first: Stack
  middle: Stack | PooledMiddle
  last: Stack
  make_boundaries: Callable[..., Boundaries]
  make_positions: Callable[..., nn.Module] | None = None
  middle_width: int | None = None
  make_middle_positions: Callable[..., nn.Module] | None = None
  norm_init_std: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  norm_type: str = "layer_norm"
  use_bias: bool = True
  norm_epsilon: float = 1e-5

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None,
    *,
    deterministic: bool = True,
    boundaries: jax.Array | None = None,
    boundary_noise: jax.Array | None = None,
    capacity: int | None = None,
    cache: HourglassCache | None = None,
    num_before: jax.Array | None = None,
    lengths: jax.Array | None = None,
    sizes: Sequence[int] = (),
    needed: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> HourglassOutput:
    """[B, T, D] -> [B, T, D]; with a cache, the middle runs only if a segment ends.

    Args:
      inputs: [B, T, D].
      tokens: [B, T], ids; None if the inputs are segments.
      deterministic: False in training.
      boundaries: [B, T], 0 or 1, instead of the module's own.
      boundary_noise: [B, T] in (0, 1), instead of the boundaries' own draws.
      capacity: an S that holds every row, at most T + 1, with `document_starts` 2 T; None finds it
        on the device. If it is too small, the result is nan.
      cache: None, or from `init_cache` or the previous output.
      num_before: [B], int32, with a cache: the number of earlier tokens in each row.
      lengths: [B], int32: the number of real tokens in each row; None means all.
      sizes: the lengths for which the outer stacks are compiled; see `Stack`.
      needed: see `Stack`.
      document_starts: [B, T], without a cache: 1 where a document begins, else 0.

    Raises:
      ValueError: an argument is not as above, or noise is given for boundaries that draw nothing.
    """
    check_settings(self, sizes=() if self.middle_width is None else ("middle_width",))
    inputs = checks.array("inputs", inputs, "B T D")
    batch, length, width = inputs.shape
    if cache is not None and capacity is not None:
      raise ValueError(f"capacity: expected none with a cache, got {capacity}")
    most_places = length + 1 if document_starts is None else max(2 * length, 1)
    if capacity is not None and not 1 <= capacity <= most_places:
      known = "T + 1" if document_starts is None else "2 T"
      raise ValueError(f"capacity: expected 1 to {known} = {most_places}, got {capacity}")
    kind = self.make_boundaries(name="boundary_predictor")
    if document_starts is not None:
      check_takes_starts(kind)
      if not kind.has_null_group and kind.pooling != "last":
        raise UserError(
          f"document_starts: expected none for {type(kind).__name__}, whose segments are means "
          "but have no null group, got some"
        )
    if boundary_noise is not None and not kind.takes_noise:
      raise ValueError(f"boundary_noise: expected none for {type(kind).__name__}, got some")
    make, make_middle = self.make_positions, self.make_middle_positions
    positions = None if make is None else make(name="relative_positions")
    middle_positions = positions if make_middle is None else make_middle(name="middle_positions")
    common: dict[str, Any] = dict(positions=positions, deterministic=deterministic)
    outer: dict[str, Any] = common | dict(
      sizes=sizes, needed=needed, document_starts=document_starts
    )
    if cache is None:
      h_btd = self.first(inputs, name="first", **outer)
    else:
      step_first = self.first.with_caches(width, name="first", positions=positions)
      h_btd, first = step_first(inputs, cache.first, lengths)

    if boundaries is not None and boundary_noise is None and kind.takes_noise:
      boundary_noise = jnp.full((batch, length), 0.5)  # What it finds is not used.
    found = kind(
      h_btd,
      tokens,
      deterministic=deterministic,
      noise=boundary_noise,
      num_before=num_before,
      state=None if cache is None else cache.boundaries,
      lengths=lengths,
      **({} if document_starts is None else {"document_starts": document_starts}),
    )
    if boundaries is None:
      boundaries = found.boundaries
      most = kind.most_segments(length) if document_starts is None else None
      if capacity is None and most is not None:
        capacity = most + 1
    else:
      ops.check_boundaries(boundaries, (batch, length))
    if lengths is not None and cache is None:
      is_real_bt = jnp.arange(length)[None] < lengths[:, None]
      boundaries = boundaries * is_real_bt.astype(boundaries.dtype)
    found = found._replace(boundaries=boundaries)
    null_b1d = jnp.zeros((batch, 1, self.middle_width or width), h_btd.dtype)
    if kind.has_null_group:
      null_d = self.param(
        "null_group", nn.initializers.normal(1.0), null_b1d.shape[2:], jnp.float32
      )
      null_b1d = jnp.broadcast_to(null_d.astype(h_btd.dtype)[None, None], null_b1d.shape)
    widen, narrow = self._projections(width)
    of_norm = self.norm_type, self.dtype, self.norm_init_std, self.use_bias, self.norm_epsilon
    norm = blocks.Norm(*of_norm, name="middle_norm")
    if cache is not None:
      assert num_before is not None
      pooled_bsd, segment = ops.pool_segments_cached(
        h_btd, boundaries, cache.segment, method=kind.pooling, lengths=lengths
      )
      queue_bsd = jnp.concatenate([null_b1d, widen(pooled_bsd)], axis=1)
      if kind.has_null_group:
        queue_bsd = norm(queue_bsd)
      middle_width = self.middle_width or width
      step = self.middle.with_caches(middle_width, name="middle", positions=middle_positions)

      def step_middle(x_bsd, caches, lengths):
        s_bsd, caches = step(x_bsd, caches, lengths)
        return narrow(s_bsd), caches

      u_btd, latest, middle = read_segments(
        step_middle, queue_bsd, kind, found, cache, num_before, lengths
      )
      step_last = self.last.with_caches(width, name="last", positions=positions)
      y_btd, last = step_last(kind.join(u_btd, h_btd, found), cache.last, lengths)
      cache = HourglassCache(first, middle, last, segment, latest, found.state)
      return HourglassOutput(y_btd, boundaries, found.logits, cache, found.probabilities)

    num_null, null_starts = (1, document_starts) if kind.has_null_group else (0, None)
    segments_b = jnp.sum(boundaries.astype(jnp.int32), axis=1)
    segments_b += num_null if null_starts is None else jnp.sum(null_starts, 1, dtype=jnp.int32)
    if capacity is None:
      middle_sizes = _capacities(kind, length, document_starts is not None)
      num_read = jnp.max(segments_b, initial=0)
    else:
      middle_sizes, num_read = (capacity,), None
    size = middle_sizes[-1]
    pooled_bsd = ops.pool_segments(
      h_btd, boundaries, size - num_null, method=kind.pooling, document_starts=null_starts
    )
    s_bsd, middle_starts = widen(pooled_bsd), None
    if document_starts is not None:
      middle_starts = ops.segment_starts(
        boundaries, document_starts, size, has_null_group=kind.has_null_group
      )
    if kind.has_null_group:
      s_bsd = jnp.concatenate([null_b1d, s_bsd], axis=1)
      if middle_starts is not None:
        s_bsd = jnp.where(middle_starts[..., None] > 0, null_b1d, s_bsd)
      s_bsd = norm(s_bsd)
    of_middle: dict[str, Any] = common | dict(
      name="middle",
      positions=middle_positions,
      document_starts=middle_starts,
      sizes=middle_sizes,
      needed=num_read,
    )
    inner = None
    if isinstance(self.middle, PooledMiddle):
      s_bsd, inner = self.middle(s_bsd, lengths=segments_b, **of_middle)
    else:
      s_bsd = self.middle(s_bsd, **of_middle)
    s_bsd = narrow(s_bsd)
    if not kind.has_null_group:
      s_bsd = kind.blend(s_bsd, pool_at_boundaries(found, size), None, middle_starts)
      s_bsd = jnp.concatenate([jnp.zeros_like(s_bsd[:, :1]), s_bsd], axis=1)
    u_btd = ops.upsample_segments(s_bsd, boundaries, document_starts=null_starts)
    y_btd = self.last(kind.join(u_btd, h_btd, found), name="last", **outer)
    return HourglassOutput(y_btd, boundaries, found.logits, None, found.probabilities, inner)

  def _projections(self, width: int) -> tuple[Callable, Callable]:
    """Pure functions that project to the width of the middle, and back."""
    if self.middle_width is None:
      return lambda x: x, lambda x: x
    init = initializers.weights(self.init_std, initializers.linear_kernel)
    widen, narrow = (
      self.param(name, init, shape, jnp.float32).astype(self.dtype)
      for name, shape in (
        ("middle_in", (width, self.middle_width)),
        ("middle_out", (self.middle_width, width)),
      )
    )
    return lambda x: x @ widen, lambda x: x @ narrow

  @nn.nowrap
  def unstack(self, params: Mapping) -> dict:
    """The parameters, separate for each layer; see `Stack.unstack`."""
    stacks = {name: getattr(self, name) for name in ("first", "middle", "last")}
    params = {**params, **{name: x.unstack(params[name]) for name, x in stacks.items()}}
    frozen = getattr(self.make_boundaries(parent=None), "frozen", None)
    if frozen is None:
      return params
    own = params["boundary_predictor"]
    return {**params, "boundary_predictor": {**own, "frozen": frozen.unstack(own["frozen"])}}

  @property
  def has_cache(self) -> bool:
    """Whether all mixers and the boundaries have a cache."""
    parts = self.first, self.middle, self.last, self.make_boundaries(parent=None)
    return all(part.has_cache for part in parts)

  def init_cache(self, batch: int, width: int) -> HourglassCache:
    """The cache of B rows of width D before the first token."""
    return HourglassCache(
      self.first.init_cache(batch, width),
      self.middle.init_cache(batch, self.middle_width or width),
      self.last.init_cache(batch, width),
      ops.init_segment_cache(batch, width, self.dtype),
      jnp.zeros((batch, width), self.dtype),
      self.make_boundaries(parent=None).init_state(batch, width),
    )


def _capacities(kind: Boundaries, length: int, has_documents: bool) -> tuple[int, ...]:
  """The lengths for which the middle is compiled."""
  most, num_null = kind.most_segments(length), int(kind.has_null_group)
  if has_documents and most is not None:
    # One a document more than of a row: room for few documents, and for many.
    sizes = {most + 1 + length // 64, most + 1 + length // 8}
  else:
    sizes = {*ops.capacities(length + num_null, kind.num_buckets)}
  if has_documents:
    sizes.add(max(*sizes, length * (1 + num_null)))
  return tuple(sorted(sizes))
