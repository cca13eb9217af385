"""Dynamic token pooling: blocks on tokens, then on segments, then on tokens again.

B batch, T position, D width, S shortened length, segments and the null group.

  h   = first(x)                                  [B, T, D]
  b   = boundaries; b_t = 1: a segment ends with token t
  s   = [null, mean of each closed segment's h]   [B, S, D]
  s'  = middle(N(s))                              causal over segments
  u_t = s'[sum over i <= t of b_i]                index 0 is the null group
  y   = last(u + h)

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3; PiotrNawrot/dynamic-pooling@1e6f360.
Differences from the authors' code:
- The result of a row does not depend on the other rows or on S: surplus capacity is never
  read. (The authors take the batch's largest S; the function is the same.) Dropout does depend
  on S, as its draws have the shape of the array.
- Fixed segments end at k - 1, 2k - 1, ... (Eq. 2), not at 0, k, ... (`boundary_offset`).
- Gumbel rounds p in evaluation (Sec. 3.1) instead of sampling (`sample_boundaries`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers import blocks, initializers
from dpjax.layers.boundaries import Boundaries, BoundaryOutput
from dpjax.layers.mixer import check_takes_starts
from dpjax.models.stack import Stack
from dpjax.models.stages import HourglassCache, HourglassOutput, PooledMiddle
from dpjax.ops.documents import starts_in_chunk
from dpjax.ops.segments import take_segments


class Hourglass(nn.Module):
  """Three stacks of blocks; the middle one runs on segments.

  Attributes:
    first: blocks before the pooling.
    middle: blocks on segments, or another hourglass; their mixers' `max_length` is that of the
      tokens plus 1.
    last: blocks after the upsampling.
    make_boundaries: makes the `dpjax.layers.boundaries.Boundaries` from their `name`.
    make_positions: makes, from a `name`, the positions and biases that the relative
      attention of all three stacks shares; None without relative attention.
    middle_width: the width of the middle, with a matrix each way; None means D.
    make_middle_positions: like `make_positions`, for a middle with a width of its own.
    norm_init_std: standard deviation of the gains of the middle's norm.
    init_std: standard deviation of the matrices of `middle_width`; see
      `dpjax.layers.blocks.FeedForward`.
    dtype: the dtype of the computation; parameters are float32.
    norm_kind: the kind of the middle's norm; see `dpjax.layers.blocks.Norm`.
    use_bias: whether the middle's norm has biases.
    norm_epsilon: that of the middle's norm.
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
  norm_kind: str = "layer_norm"
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
    is_start: jax.Array | None = None,
  ) -> HourglassOutput:
    """[B, T, D] -> [B, T, D].

    With a cache, the tokens continue from it. A single token then costs a step of the outer
    stacks, and a step of the middle if a segment ends with it in any row.

    Args:
      inputs: [B, T, D].
      tokens: [B, T], ids; None if the inputs are segments.
      deterministic: False in training.
      boundaries: [B, T], 0 or 1, instead of the module's own.
      boundary_noise: [B, T] in (0, 1), instead of the boundaries' own draws.
      capacity: an S that holds every row, from the data, at most T + 1, with `is_start` 2 T;
        None finds it on the device. If it is too small, the result is nan.
      cache: None, or from `init_cache` or the previous output.
      num_before: [B], int32, with a cache: the number of earlier tokens in each row's document.
      lengths: [B], int32: the number of real tokens in each row; None means all.
      sizes: the lengths for which the outer stacks are compiled; see
        `dpjax.models.stack.Stack`.
      needed: see `dpjax.models.stack.Stack`.
      is_start: [B, T], 1 where a document begins, else 0. Each document has a null group, or
        begins with a boundary, and the middle receives the starts. None means that each row is
        one document.

    Returns:
      `HourglassOutput`.

    Raises:
      ValueError: boundaries have another shape or are not 0 or 1, a `capacity` is out of range
        or given with a cache, or noise is given for boundaries that draw nothing.
    """
    batch, length, width = inputs.shape
    if cache is not None and capacity is not None:
      raise ValueError(f"capacity: expected none with a cache, got {capacity}")
    most_places = length + 1 if is_start is None else max(2 * length, 1)
    if capacity is not None and not 1 <= capacity <= most_places:
      known = "T + 1" if is_start is None else "2 T"
      raise ValueError(f"capacity: expected 1 to {known} = {most_places}, got {capacity}")
    kind = self.make_boundaries(name="boundary_predictor")
    if is_start is not None:
      _check_documents(kind)
    if boundary_noise is not None and not kind.takes_noise:
      raise ValueError(f"boundary_noise: expected none for {type(kind).__name__}, got some")
    positions = None
    if self.make_positions is not None:
      positions = self.make_positions(name="relative_positions")
    middle_positions = positions
    if self.make_middle_positions is not None:
      middle_positions = self.make_middle_positions(name="middle_positions")
    common: dict[str, Any] = dict(
      positions=positions,
      deterministic=deterministic,
      sizes=sizes,
      needed=needed,
      is_start=is_start,
    )
    steps: dict[str, Any] = {}
    if cache is None:
      h_btd = self.first(inputs, name="first", **common)
    else:
      for name in ("first", "last"):
        steps[name] = getattr(self, name).with_caches(width, name=name, positions=positions)
      steps["middle"] = self.middle.with_caches(
        self.middle_width or width, name="middle", positions=middle_positions
      )
      if is_start is not None:
        is_start = starts_in_chunk(is_start, (batch, length), lengths)
      h_btd, first_caches = steps["first"](inputs, cache.first, lengths, is_start)

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
      **({} if is_start is None else {"is_start": is_start}),
    )
    if boundaries is None:
      boundaries = found.boundaries
      most = kind.most_segments(length) if is_start is None else None
      if capacity is None and most is not None:
        capacity = most + 1
    else:
      ops.check_boundaries(boundaries, (batch, length))
      found = found._replace(boundaries=boundaries)
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
    of_norm = self.norm_kind, self.dtype, self.norm_init_std, self.use_bias, self.norm_epsilon
    norm = blocks.Norm(*of_norm, name="middle_norm")
    if cache is not None:
      new, segment = ops.pool_segments_cached(
        h_btd,
        boundaries,
        cache.segment,
        method=kind.pooling_method,
        lengths=lengths,
        is_start=is_start if kind.has_null_group else None,
      )
      queue_bsd = widen(new)
      if is_start is None or not kind.has_null_group:
        queue_bsd = jnp.concatenate([null_b1d, queue_bsd], axis=1)
      else:
        is_null_bs = ops.segment_starts(found.boundaries, is_start, queue_bsd.shape[1])
        queue_bsd = jnp.where(is_null_bs[..., None] > 0, null_b1d, queue_bsd)

      def step_middle(x_bsd, caches, lengths, is_start):
        s_bsd, caches = steps["middle"](x_bsd, caches, lengths, is_start)
        return narrow(s_bsd), caches

      u_btd, latest, middle_caches = _read_segments(
        step_middle,
        norm(queue_bsd) if kind.has_null_group else queue_bsd,
        kind,
        found,
        cache,
        num_before,
        lengths,
        is_start,
      )
      x_btd = kind.join(u_btd, h_btd, found)
      y_btd, last_caches = steps["last"](x_btd, cache.last, lengths, is_start)
      cache = HourglassCache(first_caches, middle_caches, last_caches, segment, latest, found.state)
      return HourglassOutput(y_btd, boundaries, found.logits, cache, found.probabilities)

    num_null = int(kind.has_null_group)
    null_starts = is_start if kind.has_null_group else None
    segments_b = jnp.sum(boundaries.astype(jnp.int32), axis=1)
    segments_b += num_null if null_starts is None else jnp.sum(null_starts, 1, dtype=jnp.int32)
    if capacity is None:
      inner_sizes = _capacities(kind, length, is_start is not None)
      of_middle: dict[str, Any] = dict(sizes=inner_sizes, needed=jnp.max(segments_b))
    else:
      of_middle = dict(sizes=(capacity,), needed=None)
    size = of_middle["sizes"][-1]
    pooled_bsd = ops.pool_segments(
      h_btd, boundaries, size - num_null, method=kind.pooling_method, is_start=null_starts
    )
    s_bsd, middle_starts = widen(pooled_bsd), None
    if kind.has_null_group:
      s_bsd = jnp.concatenate([null_b1d, s_bsd], axis=1)
    if is_start is not None:
      middle_starts = ops.segment_starts(
        boundaries, is_start, size, has_null_group=kind.has_null_group
      )
      if kind.has_null_group:
        s_bsd = jnp.where(middle_starts[..., None] > 0, null_b1d, s_bsd)
    if kind.has_null_group:
      s_bsd = norm(s_bsd)
    of_middle |= dict(
      name="middle",
      positions=middle_positions,
      deterministic=deterministic,
      is_start=middle_starts,
    )
    inner = None
    if isinstance(self.middle, PooledMiddle):
      s_bsd, inner = self.middle(s_bsd, lengths=segments_b, **of_middle)
    else:
      s_bsd = self.middle(s_bsd, **of_middle)
    s_bsd = narrow(s_bsd)
    if not kind.has_null_group:
      of_documents = {} if is_start is None else {"is_start": middle_starts}
      s_bsd = kind.blend(s_bsd, _at_boundaries(found, size), None, **of_documents)
      s_bsd = jnp.concatenate([jnp.zeros_like(s_bsd[:, :1]), s_bsd], axis=1)
    u_btd = ops.upsample_segments(s_bsd, boundaries, is_start=null_starts)
    y_btd = self.last(kind.join(u_btd, h_btd, found), name="last", **common)
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
      self.first.init_caches(batch, width),
      self.middle.init_caches(batch, self.middle_width or width),
      self.last.init_caches(batch, width),
      ops.init_segment_cache(batch, width, self.dtype),
      jnp.zeros((batch, width), self.dtype),
      self.make_boundaries(parent=None).init_state(batch, width),
    )


def _check_documents(kind: Boundaries) -> None:
  check_takes_starts(kind)
  if not kind.has_null_group and kind.pooling_method != "last":
    raise UserError(
      f"is_start: expected none for {type(kind).__name__}, whose segments are means but have no "
      "null group, got some"
    )


def _capacities(kind: Boundaries, length: int, has_documents: bool) -> tuple[int, ...]:
  """The lengths for which the middle is compiled."""
  most = kind.most_segments(length)
  if has_documents and most is not None:
    # One a document more than of a row: room for few documents, and for many.
    sizes = {most + 1 + length // 64, most + 1 + length // 8}
  else:
    sizes = {*ops.capacities(length + int(kind.has_null_group), kind.num_capacities)}
  if has_documents:
    sizes.add(max(sizes | {length * (1 + int(kind.has_null_group))}))
  return tuple(sorted(sizes))


def _at_boundaries(found: BoundaryOutput, size: int) -> jax.Array | None:
  """[B, S], the probabilities at the boundaries that end the segments."""
  if found.probabilities is None:
    return None
  p_bt1 = found.probabilities[..., None]
  return ops.pool_segments(p_bt1, found.boundaries, size, method="last")[..., 0]


def _read_segments(
  step,
  queue_bsd,
  kind: Boundaries,
  found: BoundaryOutput,
  cache: HourglassCache,
  num_before,
  lengths,
  is_start,
):
  """The upsampled segments for the tokens of a chunk, and the new cache.

  Args:
    step: the step of the middle stack, from `Stack.with_caches`.
    queue_bsd: [B, 1 + C, D], the null group, and the segments that end in the chunk; with
      `is_start` and null groups [B, 2 C, D], those of each document.
    kind: the kind of the boundaries.
    found: the boundaries, [B, C].
    cache: the cache before the chunk.
    num_before: [B], the number of tokens before the chunk.
    lengths: [B], the number of real tokens in the chunk, or None for all.
    is_start: [B, C], from `starts_in_chunk`, or None.

  Returns:
    [B, C, D]; the vector for the last real token of each row, [B, D]; the middle's caches.
  """
  b_bc = found.boundaries.astype(jnp.int32)
  batch, chunk = b_bc.shape
  if lengths is None:
    lengths = jnp.full(batch, chunk, jnp.int32)
  b_bc = jnp.where(jnp.arange(chunk)[None] < lengths[:, None], b_bc, 0)
  p_bc = _at_boundaries(found._replace(boundaries=b_bc), chunk)
  num_places = queue_bsd.shape[1]
  is_new_b = (num_before == 0) & (lengths > 0)  # the null group goes first
  if not kind.has_null_group or is_start is not None:
    is_new_b = jnp.zeros_like(is_new_b)
  # How many of the queue have come in turn by each token, and whether its place 0 has.
  index_bc = is_new_b.astype(jnp.int32)[:, None] + jnp.cumsum(b_bc, axis=1, dtype=jnp.int32)
  is_first_b, middle_starts = is_new_b, None
  if is_start is not None:
    middle_starts = ops.segment_starts(
      b_bc, is_start, num_places, has_null_group=kind.has_null_group
    )
    if kind.has_null_group:
      index_bc += jnp.cumsum(is_start, axis=1, dtype=jnp.int32)
      is_first_b = jnp.ones_like(is_new_b)
  waiting_b = index_bc[:, -1]

  def blend(s_bsd, previous_bd, is_start):
    of_documents = {} if is_start is None else {"is_start": is_start}
    return kind.blend(s_bsd, p_bc, previous_bd, **of_documents)

  if chunk > 1:
    begun_bsd = jnp.where(is_first_b[:, None, None], queue_bsd, jnp.roll(queue_bsd, -1, axis=1))
    most = min(kind.num_capacities, 4, chunk // 8 + 1)
    sizes = (*ops.capacities(chunk + 1, most), *([num_places] if num_places > chunk + 1 else []))

    def at_capacity(size, begun_bsd, middle, is_start):
      is_start = None if is_start is None else is_start[:, :size]
      s_bsd, middle = step(begun_bsd[:, :size], middle, waiting_b, is_start)
      return jnp.pad(s_bsd, ((0, 0), (0, num_places - size), (0, 0))), middle

    index = jnp.searchsorted(jnp.asarray(sizes), jnp.max(waiting_b))
    branches = [partial(at_capacity, size) for size in sizes]
    s_bsd, middle = jax.lax.switch(index, branches, begun_bsd, cache.middle, middle_starts)
    if not kind.has_null_group:
      s_bsd = blend(
        s_bsd[:, :-1], cache.latest, None if middle_starts is None else middle_starts[:, :-1]
      )
    known_bsd = jnp.concatenate([cache.latest[:, None], s_bsd], axis=1)
    latest_bd = jnp.take_along_axis(known_bsd, waiting_b[:, None, None], axis=1)[:, 0]
    return take_segments(known_bsd, index_bc), latest_bd, middle

  def advance(state):
    place, latest_bd, middle = state
    is_next_b = place < waiting_b
    next_b = jnp.where(is_first_b, place, 1)
    next_b1d = jnp.take_along_axis(queue_bsd, next_b[:, None, None], axis=1)
    starts_b1 = None
    if middle_starts is not None:
      starts_b1 = jax.lax.dynamic_slice_in_dim(middle_starts, place, 1, axis=1)
    s_b1d, middle = step(next_b1d, middle, is_next_b.astype(jnp.int32), starts_b1)
    if not kind.has_null_group:
      s_b1d = blend(s_b1d, latest_bd, starts_b1)
    return place + 1, jnp.where(is_next_b[:, None], s_b1d[:, 0], latest_bd), middle

  # A loop of no, one or two rounds; `lax.cond` would copy the caches at every token.
  state = jnp.int32(0), cache.latest, cache.middle
  _, latest_bd, middle = jax.lax.while_loop(
    lambda state: state[0] < jnp.max(waiting_b), advance, state
  )
  return latest_bd[:, None], latest_bd, middle
