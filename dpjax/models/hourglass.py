"""Dynamic token pooling: blocks on tokens, on segments, on tokens again.

B batch, T position, D width, S shortened length, segments and the null group.

  h   = first(x)                                  [B, T, D]
  b   = boundaries; b_t = 1: a segment ends with token t
  s   = [null, mean of each closed segment's h]   [B, S, D]
  s'  = middle(LN(s))                             causal over segments
  u_t = s'[sum over i <= t of b_i]                index 0 is the null group
  y   = last(u + h)

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3; PiotrNawrot/dynamic-pooling@1e6f360.
Where this differs from the authors' code:
- the result does not depend on the other rows nor on S: what is computed at a capacity
  too large is never read (there S is the batch's largest; the same function). What
  dropout drops in training does: its draws have the shape of what is computed;
- fixed segments end at k - 1, 2k - 1, ... (Eq. 2), there at 0, k, ... (`boundary_offset`);
- gumbel rounds p in evaluation (Sec. 3.1), there it samples (`sample_boundaries`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import blocks
from dpjax.models.stack import Stack

PREDICTED = ("unigram", "entropy", "gumbel")


class HourglassOutput(NamedTuple):
  """What the hourglass returns.

  Attributes:
    hidden: [B, T, D].
    boundaries: [B, T], 0 or 1. Integers, but where gumbel draws them: floats through
      which a gradient passes.
    boundary_logits: [B, T], logits of a boundary's probability; None without a predictor.
  """

  hidden: jax.Array
  boundaries: jax.Array
  boundary_logits: jax.Array | None


class Hourglass(nn.Module):
  """Three stacks, of which the middle one runs on segments.

  Attributes:
    first: blocks before the pooling.
    middle: blocks on segments; their mixers' `max_length` is that of the tokens + 1.
    last: blocks after the up-sampling.
    kind: "fixed", "whitespace", or of a predictor "unigram", "entropy", "gumbel".
    predictor_width: hidden layer of the predictor, Linear, GELU, Linear.
    make_positions: called with `name`, gives the positions and biases that the relative
      attention of all three stacks shares; None where no stack has it.
    pooling: "mean", or "last" (sub-sampling).
    shortening_factor: k of "fixed".
    boundary_offset: place of the first boundary of "fixed"; None: k - 1.
    space_ids: tokens that end a segment of "whitespace".
    temperature: tau of "gumbel".
    sample_boundaries: draw the boundaries of "gumbel" in evaluation, too.
    num_capacities: lengths that the middle is compiled for where S is known on the device
      alone (`dpjax.ops.run_at_capacity`).
    init_std: of the predictor's weights; as `dpjax.layers.blocks.FeedForward`.
    norm_init_std: of the gains of the middle's LayerNorm.
    dtype: of the computation; parameters are float32.
  """

  first: Stack
  middle: Stack
  last: Stack
  kind: str
  predictor_width: int
  make_positions: Callable[..., nn.Module] | None = None
  pooling: str = "mean"
  shortening_factor: int = 2
  boundary_offset: int | None = None
  space_ids: tuple[int, ...] = ()
  temperature: float = 0.5
  sample_boundaries: bool = False
  num_capacities: int = 8
  init_std: float = 0.0
  norm_init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    tokens: jax.Array,
    *,
    deterministic: bool = True,
    boundaries: jax.Array | None = None,
    boundary_noise: jax.Array | None = None,
    capacity: int | None = None,
  ) -> HourglassOutput:
    """[B, T, D] -> [B, T, D].

    Args:
      inputs: [B, T, D].
      tokens: [B, T], ids, by which "whitespace" finds its boundaries.
      deterministic: False in training; gumbel draws from the "dropout" stream, too.
      boundaries: [B, T], 0 or 1, in place of the module's own.
      boundary_noise: [B, T] in (0, 1), the u of gumbel, in place of a draw.
      capacity: an S that holds every row, from the data, at most T + 1; None finds it on
        the device. Where it is too small the result is nan.

    Returns:
      `HourglassOutput`.

    Raises:
      ValueError: boundaries of another shape or not 0 or 1, a `capacity` out of range, or
        noise for boundaries that are not gumbel's.
    """
    batch, length, _ = inputs.shape
    if capacity is not None and not 1 <= capacity <= length + 1:
      raise ValueError(f"capacity: expected 1 to T + 1 = {length + 1}, got {capacity}")
    if boundary_noise is not None and self.kind != "gumbel":
      raise ValueError(
        f"boundary_noise: expected none for the boundaries {self.kind}, got some"
      )
    positions = None
    if self.make_positions is not None:
      positions = self.make_positions(name="relative_positions")
    common: dict[str, Any] = dict(positions=positions, deterministic=deterministic)
    h_btd = self.first.apply(inputs, name="first", **common)

    logits_bt = None
    if self.kind in PREDICTED:
      logits_bt = blocks.FeedForward(
        self.predictor_width,
        "gelu",
        init_std=self.init_std,
        dtype=self.dtype,
        out_width=1,
        name="boundary_predictor",
      )(h_btd)[..., 0]
    if boundaries is not None:
      ops.check_boundaries(boundaries, (batch, length))
    else:
      if self.kind == "fixed" and capacity is None:
        capacity = len(range(self._first_boundary(), length, self.shortening_factor)) + 1
      boundaries = self._find_boundaries(tokens, logits_bt, boundary_noise, deterministic)

    if capacity is None:
      sizes = ops.capacities(length + 1, self.num_capacities)
      needed = jnp.max(jnp.sum(boundaries.astype(jnp.int32), axis=1)) + 1
    else:
      sizes, needed = (capacity,), None
    null_d = self.param(
      "null_group", nn.initializers.normal(1.0), inputs.shape[2:], jnp.float32
    )
    null_b1d = jnp.broadcast_to(
      null_d.astype(h_btd.dtype)[None, None], (batch, 1, len(null_d))
    )
    s_bsd = ops.pool_segments(h_btd, boundaries, sizes[-1] - 1, method=self.pooling)
    s_bsd = jnp.concatenate([null_b1d, s_bsd], axis=1)
    s_bsd = blocks.layer_norm(self.dtype, "middle_norm", self.norm_init_std)(s_bsd)
    s_bsd = self.middle.apply(s_bsd, name="middle", sizes=sizes, needed=needed, **common)
    u_btd = ops.upsample_segments(s_bsd, boundaries)
    y_btd = self.last.apply(u_btd + h_btd, name="last", **common)
    return HourglassOutput(y_btd, boundaries, logits_bt)

  def _first_boundary(self) -> int:
    last = self.shortening_factor - 1
    return last if self.boundary_offset is None else self.boundary_offset

  def _find_boundaries(self, tokens, logits_bt, noise, deterministic: bool):
    if self.kind == "fixed":
      factor, first = self.shortening_factor, self._first_boundary()
      return ops.fixed_boundaries(tokens.shape, factor, first)
    if self.kind == "whitespace":
      return ops.whitespace_boundaries(tokens, self.space_ids)
    is_drawn = not deterministic or self.sample_boundaries or noise is not None
    if self.kind == "gumbel" and is_drawn:
      key = self.make_rng("dropout") if noise is None else None
      return ops.gumbel_sigmoid(logits_bt, self.temperature, key=key, noise=noise)
    return (logits_bt > 0).astype(jnp.int32)  # p > 0.5
