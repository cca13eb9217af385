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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers import common
from dpjax.layers.boundaries import Boundaries, BoundaryOutput
from dpjax.layers.mixer import check_settings, check_takes_starts
from dpjax.models.middle import HourglassCache, pool_probabilities, read_segments, segment_buckets
from dpjax.models.stack import Stack


class InnerBoundaries(NamedTuple):
  """The boundaries of a second pooling, [B, S], as in `HourglassOutput`."""

  boundaries: jax.Array
  boundary_logits: jax.Array | None
  boundary_probabilities: jax.Array | None
  inner: "InnerBoundaries | None" = None  # the stage within this one
  document_starts: jax.Array | None = None  # [B, S], 1 where a document begins; None: one document


class HourglassOutput(NamedTuple):
  """The output of an hourglass; for the boundaries, see `BoundaryOutput`."""

  hidden: jax.Array  # [B, T, D]
  boundaries: jax.Array
  boundary_logits: jax.Array | None
  cache: HourglassCache | None = None  # the new cache of a step
  boundary_probabilities: jax.Array | None = None
  inner: InnerBoundaries | None = None  # a pooling in the middle; None in a step


class Hourglass(nn.Module):
  """Three stacks of blocks; the middle one runs on segments.

  Attributes:
    width: D.
    first: blocks before the pooling.
    middle: blocks on segments, whose mixers' `max_length` is the tokens' plus 1, or an hourglass.
    last: blocks after the upsampling.
    boundary_predictor: `dpjax.layers.boundaries.Boundaries`.
    middle_norm: N, such as `dpjax.layers.Norm()`; not used without a null group.
    relative_positions: see `dpjax.models.LanguageModel`; for all three stacks.
    middle_width: the width of the middle, with a matrix in each direction; None means D.
    pads_middle: whether a learned vector, appended to each segment, fills a wider middle, whose
      first D features are the result, without matrices.
    middle_positions: like `relative_positions`, for a middle with a width of its own.
    init_std: the standard deviation of the `middle_width` matrices; see `dpjax.layers.FeedForward`.
    dtype: the dtype of the computation; parameters are float32.
    first_out_norm: a norm after `first`, or None.
    middle_out_norm: a norm after a middle that is not an hourglass, of its width, or None.
    last_out_norm: a norm after `last`, or None.
  """

  width: int
  first: Stack
  middle: Union[Stack, "Hourglass"]
  last: Stack
  boundary_predictor: Boundaries
  middle_norm: nn.Module
  relative_positions: nn.Module | None = None
  middle_width: int | None = None
  middle_positions: nn.Module | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  pads_middle: bool = False
  first_out_norm: nn.Module | None = None
  middle_out_norm: nn.Module | None = None
  last_out_norm: nn.Module | None = None

  def setup(self):
    """Creates the null group and the maps to the width of the middle and back."""
    check_settings(self, sizes=("width",) if self.middle_width is None else ("middle_width",))
    if self.boundary_predictor.has_null_group:
      shape = (self.middle_width or self.width,)
      self.null_d = self.param("null_group", nn.initializers.normal(1.0), shape, jnp.float32)
    if self.middle_width is not None and self.pads_middle:
      size = self.middle_width - self.width
      if size < 0:
        expected = f"at least the width {self.width} with pads_middle"
        raise ValueError(f"middle_width: expected {expected}, got {self.middle_width}")
      self.padding_p = self.param("middle_padding", nn.initializers.zeros, (size,), jnp.float32)
    elif self.middle_width is not None:
      init = common.weights(self.init_std, common.linear_kernel)
      shape = (self.width, self.middle_width)
      self.widen_df = self.param("middle_in", init, shape, jnp.float32)
      self.narrow_fd = self.param("middle_out", init, shape[::-1], jnp.float32)

  def __call__(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None = None,
    *,
    deterministic: bool = True,
    boundaries: jax.Array | None = None,
    boundary_noise: jax.Array | None = None,
    capacity: int | None = None,
    lengths: jax.Array | None = None,
    bucket_sizes: Sequence[int] = (),
    required_length: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> HourglassOutput:
    """[B, T, D] -> [B, T, D].

    Args:
      inputs: [B, T, D].
      tokens: [B, T], ids; None if the inputs are segments.
      deterministic: False in training.
      boundaries: [B, T], 0 or 1, instead of the module's own.
      boundary_noise: [B, T] in (0, 1), instead of the boundaries' own draws.
      capacity: an S that fits all rows, at most T + 1, or 2 T with `document_starts`; None finds it
        on the device. If it is too small, the result is nan.
      lengths: [B], int32: the number of real tokens in each row; None means all.
      bucket_sizes: the lengths for which the outer stacks are compiled; see `Stack`.
      required_length: see `Stack`.
      document_starts: [B, T], 1 where a document begins, else 0.

    Raises:
      ValueError: an argument is not as above, or noise is given for boundaries that draw nothing.
    """
    predictor: Any = self.boundary_predictor
    length, has_null, options = inputs.shape[1], predictor.has_null_group, {}
    self._check_capacity(capacity, length, document_starts)
    if document_starts is not None:
      options = {"document_starts": document_starts}
    run: Any = functools.partial(self._run, deterministic=deterministic)
    h_btd = run(
      self.first, inputs, bucket_sizes=bucket_sizes, required_length=required_length, **options
    )

    options |= dict(deterministic=deterministic, lengths=lengths)
    output = self._predict(h_btd, tokens, boundaries, boundary_noise, **options)
    b_bt = output.boundaries
    if lengths is not None:
      b_bt = b_bt * (jnp.arange(length)[None] < lengths[:, None]).astype(b_bt.dtype)
      output = output._replace(boundaries=b_bt)
    num_null, null_starts = int(has_null), document_starts if has_null else None
    num_segments_b = jnp.sum(b_bt.astype(jnp.int32), axis=1)
    num_segments_b += num_null if null_starts is None else jnp.sum(null_starts, 1, dtype=jnp.int32)

    if capacity is None and boundaries is None and document_starts is None:
      max_segments = predictor.max_segments(length)
      capacity = None if max_segments is None else max_segments + 1
    middle_sizes, middle_length = (capacity,), None
    if capacity is None:
      middle_sizes = segment_buckets(predictor, length, document_starts is not None)
      middle_length = jnp.max(num_segments_b, initial=0)
    size: Any = middle_sizes[-1]
    pooled_bsd = ops.pool_segments(
      h_btd, b_bt, size - num_null, method=predictor.pooling, document_starts=null_starts
    )
    widen, narrow = self._projections()
    s_bsd, middle_starts = widen(pooled_bsd), None
    if document_starts is not None:
      middle_starts = ops.segment_starts(b_bt, document_starts, size, has_null_group=has_null)
    if has_null:
      s_bsd = self.middle_norm(self._with_null(s_bsd, middle_starts))

    at_sizes: Any = dict(
      bucket_sizes=middle_sizes, required_length=middle_length, document_starts=middle_starts
    )
    inner = None
    if isinstance(self.middle, Hourglass):
      at_sizes |= dict(lengths=num_segments_b, deterministic=deterministic)
      stage = self.middle(s_bsd, **at_sizes)
      s_bsd = stage.hidden
      inner = InnerBoundaries(*stage[1:3], *stage[4:], document_starts=middle_starts)
    else:
      s_bsd = run(self.middle, s_bsd, **at_sizes)
    s_bsd = narrow(s_bsd)
    if not has_null:
      p_bs = pool_probabilities(output, size)
      s_bsd = predictor.smooth(s_bsd, p_bs, None, middle_starts)
      s_bsd = jnp.concatenate([jnp.zeros_like(s_bsd[:, :1]), s_bsd], axis=1)

    u_btd = ops.upsample_segments(s_bsd, b_bt, document_starts=null_starts)
    x_btd = predictor.combine(u_btd, h_btd, output)
    y_btd = run(
      self.last,
      x_btd,
      bucket_sizes=bucket_sizes,
      required_length=required_length,
      document_starts=document_starts,
    )
    return HourglassOutput(y_btd, b_bt, output.logits, None, output.probabilities, inner)

  def step(
    self,
    inputs: jax.Array,
    tokens: jax.Array | None,
    cache: HourglassCache,
    *,
    num_before: jax.Array,
    lengths: jax.Array | None = None,
    boundaries: jax.Array | None = None,
    boundary_noise: jax.Array | None = None,
  ) -> HourglassOutput:
    """Returns the outputs for the next C tokens of each row, [B, C, D], and the new cache.

    The middle runs only if a segment ends. `num_before`, [B], int32, is the number of earlier
    tokens in each row; for the other arguments see `__call__`.
    """
    predictor: Any = self.boundary_predictor
    h_bcd, first = self._step(self.first, inputs, cache.first, lengths)
    options: Any = dict(num_before=num_before, state=cache.boundaries, lengths=lengths)
    output = self._predict(h_bcd, tokens, boundaries, boundary_noise, **options)
    pooled_bsd, segment = ops.pool_segments_cached(
      h_bcd, output.boundaries, cache.segment, method=predictor.pooling, lengths=lengths
    )
    widen, narrow = self._projections()
    queue_bsd = self._with_null(widen(pooled_bsd))
    if predictor.has_null_group:
      queue_bsd = self.middle_norm(queue_bsd)

    middle, variables = self.middle.unbind()
    params = variables["params"] if inputs.shape[1] > 1 else middle.unstack(variables["params"])
    step = functools.partial(middle.apply, {"params": params}, method="step")
    shared = {} if isinstance(middle, Hourglass) else self._positions(self.middle)
    norm: Any = self.middle_out_norm
    if norm is not None:
      norm, variables = norm.unbind()
      norm = functools.partial(norm.apply, variables)

    def step_middle(s_bsd, caches, lengths) -> Any:
      if isinstance(middle, Hourglass):
        num_segments, cache = caches
        stage: Any = step(s_bsd, None, cache, num_before=num_segments, lengths=lengths)
        return narrow(stage.hidden), (num_segments + lengths, stage.cache)
      y_bsd, caches = step(s_bsd, caches, lengths, **shared)  # pyright: ignore
      y_bsd = y_bsd if norm is None else norm(y_bsd)
      return narrow(y_bsd.astype(s_bsd.dtype)), caches

    u_bcd, latest, middle_cache = read_segments(
      step_middle, queue_bsd, predictor, output, cache, num_before, lengths
    )
    y_bcd, last = self._step(
      self.last, predictor.combine(u_bcd, h_bcd, output), cache.last, lengths
    )
    cache = HourglassCache(first, middle_cache, last, segment, latest, output.state)
    return HourglassOutput(y_bcd, output.boundaries, output.logits, cache, output.probabilities)

  def unstack(self, params: Mapping) -> dict:
    """Splits the parameters by layer; see `Stack.unstack`."""
    stacks = {name: getattr(self, name) for name in ("first", "middle", "last")}
    params = {**params, **{name: x.unstack(params[name]) for name, x in stacks.items()}}
    frozen = getattr(self.boundary_predictor, "frozen", None)
    if frozen is not None:
      predictor = params["boundary_predictor"]
      frozen_params = frozen.unstack(predictor["frozen"])
      params["boundary_predictor"] = {**predictor, "frozen": frozen_params}
    return params

  @property
  def has_cache(self) -> bool:
    """Whether all mixers and the boundaries have a cache."""
    parts = self.first, self.middle, self.last, self.boundary_predictor
    return all(part.has_cache for part in parts)

  def init_cache(self, batch: int, width: int) -> HourglassCache:
    """The cache of B rows of width D before the first token.

    For an inner hourglass it holds the number of segments so far in each row, [B], and its cache.
    """
    middle = self.middle.init_cache(batch, self.middle_width or width)
    if isinstance(self.middle, Hourglass):
      middle = jnp.zeros(batch, jnp.int32), middle
    return HourglassCache(
      self.first.init_cache(batch, width),
      middle,
      self.last.init_cache(batch, width),
      ops.init_segment_cache(batch, width, self.dtype),
      jnp.zeros((batch, width), self.dtype),
      self.boundary_predictor.init_state(batch, width),
    )

  def _check_capacity(self, capacity: int | None, length: int, document_starts: Any) -> None:
    predictor = self.boundary_predictor
    max_capacity = length + 1 if document_starts is None else max(2 * length, 1)
    if capacity is not None and not 1 <= capacity <= max_capacity:
      formula = "T + 1" if document_starts is None else "2 T"
      raise ValueError(f"capacity: expected 1 to {formula} = {max_capacity}, got {capacity}")
    if document_starts is None:
      return
    check_takes_starts(predictor)
    if not predictor.has_null_group and predictor.pooling != "last":
      raise UserError(
        f"document_starts: expected none for {type(predictor).__name__}, whose segments are means "
        "but have no null group, got some"
      )

  def _predict(self, h_btd, tokens, boundaries, noise, **options) -> BoundaryOutput:
    """The boundaries of the module, or those given instead."""
    predictor, shape = self.boundary_predictor, h_btd.shape[:2]
    if noise is not None and not predictor.is_stochastic:
      raise ValueError(f"boundary_noise: expected none for {type(predictor).__name__}, got some")
    if boundaries is not None and noise is None and predictor.is_stochastic:
      noise = jnp.full(shape, 0.5)  # The draws are not used.
    output = predictor(h_btd, tokens, noise=noise, **options)
    if boundaries is None:
      return output
    ops.check_boundaries(boundaries, shape)
    return output._replace(boundaries=boundaries)

  def _with_null(self, s_bsd: jax.Array, middle_starts: jax.Array | None = None) -> jax.Array:
    """Segments after the null group, which also precedes every further document."""
    null_b1d = jnp.zeros_like(s_bsd, shape=(s_bsd.shape[0], 1, s_bsd.shape[2]))
    if self.boundary_predictor.has_null_group:
      null_b1d = jnp.broadcast_to(self.null_d.astype(s_bsd.dtype)[None, None], null_b1d.shape)
    s_bsd = jnp.concatenate([null_b1d, s_bsd], axis=1)
    return (
      s_bsd if middle_starts is None else jnp.where(middle_starts[..., None] > 0, null_b1d, s_bsd)
    )

  def _projections(self) -> tuple[Callable, Callable]:
    """Pure functions that map to the width of the middle, and back."""
    if self.middle_width is None:
      return lambda x: x, lambda x: x
    if self.pads_middle:

      def pad(x):
        padding = self.padding_p.astype(x.dtype)
        return jnp.concatenate(
          [x, jnp.broadcast_to(padding, (*x.shape[:-1], padding.size))], axis=-1
        )

      return pad, lambda x: x[..., : self.width]
    widen, narrow = (x.astype(self.dtype) for x in (self.widen_df, self.narrow_fd))
    return lambda x: x @ widen, lambda x: x @ narrow

  def _run(self, stack, x_btd, *, deterministic, **options) -> jax.Array:
    positions = self._positions(stack, x_btd.shape[1], deterministic=deterministic)
    y_btd = stack(x_btd, deterministic=deterministic, **positions, **options)
    return self._close(stack, y_btd, x_btd.dtype)

  def _step(self, stack, x_bcd, caches, lengths) -> tuple[jax.Array, tuple]:
    y_bcd, caches = stack.step(x_bcd, caches, lengths, **self._positions(stack))
    return self._close(stack, y_bcd, x_bcd.dtype), caches

  def _close(self, stack, x_btd, dtype) -> jax.Array:
    """Applies the norm after a stack, if it has one."""
    norms = (self.first_out_norm, self.middle_out_norm, self.last_out_norm)
    norm: Any = norms[[stack is x for x in (self.first, self.middle, self.last)].index(True)]
    return (x_btd if norm is None else norm(x_btd)).astype(dtype)

  def _positions(self, stack: Any, length: int | None = None, **options) -> dict[str, Any]:
    """The positions that the mixers of a stack share, if any."""
    module, width = self.relative_positions, self.width
    if stack is self.middle:
      width = self.middle_width or width
      module = module if self.middle_positions is None else self.middle_positions
    if module is None or not stack.shares_positions:
      return {}
    return {"positions": module(length or stack.num_distances, width, **options)}
