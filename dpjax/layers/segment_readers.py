"""How a model reads segments: the null group, or H-Net's smoothing.

B batch, T position, D width, D' width of the segments, S segment, N null groups.
"""

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.mixer import Context

if TYPE_CHECKING:
  from dpjax.layers.boundaries import BoundaryOutput


class SegmentReader(nn.Module):
  """What precedes the segments in the middle of a model, and what tokens read of its results.

    z   = middle(prepare(s))                  s: [B, S, D'], z: [B, N + S, D']
    e   = finish(narrowed z)                  [B, 1 + S, D]
    u_t = e[sum over i <= t of b_i]           index 0: before the first boundary
    x   = combine(u, residual(h))             [B, T, D], the input of the last stack

  A subclass is the `reader` of its `Boundaries`, whose `residual` gives what a token reads besides
  the segments. The parameters lie among those of the stage, under the names given here.

  Attributes:
    num_null: N, the number of null groups in each document, 0 or 1. Without one, the first token
      of each row and document must be a boundary.
    width: D'.
    inner_norm: the norm of the middle's input, for readers that have one.
  """

  num_null: ClassVar[int] = 0

  width: int
  inner_norm: nn.Module

  def prepare(self, segments: jax.Array, context: Context) -> jax.Array:
    """The input of the middle, [B, N + S, D'], from the segments, [B, S, D'].

    `context` is that of the result; a document begins with its null group if there are any.
    """
    raise NotImplementedError

  def finish(
    self, results: jax.Array, probabilities: jax.Array | None, context: Context
  ) -> jax.Array:
    """What tokens read, [B, 1 + S, D], from the results of the middle, [B, N + S, D].

    Args:
      results: [B, N + S, D], narrowed to the width of the tokens.
      probabilities: [B, N + S], those of `BoundaryOutput` at the boundaries that end segments 0, 1,
        ..., where null groups do not count.
      context: that of the middle, see `prepare`.
    """
    raise NotImplementedError

  def finish_step(
    self, results: jax.Array, probabilities: jax.Array | None, previous: jax.Array
  ) -> jax.Array:
    """`finish` of the next results of each row, without index 0: [B, N + S, D] -> the same.

    Args:
      results: [B, N + S, D].
      probabilities: [B, N + S], see `finish`.
      previous: [B, D], what the last token reads; zeros if there is none.
    """
    raise NotImplementedError

  def combine(self, read: jax.Array, residual: jax.Array, output: "BoundaryOutput") -> jax.Array:
    """The input of the last stack, from what each token reads and the residual, all [B, T, D]."""
    raise NotImplementedError

  def count(self, boundaries: jax.Array, context: Context) -> jax.Array:
    """[B], the number of null groups and of segments that end, from the context of the tokens."""
    num_segments_b = jnp.sum(boundaries.astype(jnp.int32), axis=1)
    starts_bt = context.document_starts
    num_documents = 1 if starts_bt is None else jnp.sum(starts_bt, axis=1, dtype=jnp.int32)
    return num_segments_b + self.num_null * num_documents


class NullGroup(SegmentReader):
  """A learned vector, the null group, precedes the segments of each document; then a norm.

    prepare: N([null, s])      combine: u + r

  Tokens before the first boundary read the null group's result.

  Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
  """

  num_null: ClassVar[int] = 1

  def setup(self):
    """Creates the null group."""
    init = nn.initializers.normal(1.0)
    self.null_d = self.param("null_group", init, (self.width,), jnp.float32)

  def prepare(self, segments, context):
    null_b1d = jnp.broadcast_to(
      self.null_d.astype(segments.dtype)[None, None], (segments.shape[0], 1, segments.shape[2])
    )
    s_bsd = jnp.concatenate([null_b1d, segments], axis=1)
    if context.document_starts is not None:
      s_bsd = jnp.where(context.document_starts[..., None] > 0, null_b1d, s_bsd)
    return self.inner_norm(s_bsd)

  def finish(self, results, probabilities, context):
    return results

  def finish_step(self, results, probabilities, previous):
    return results

  def combine(self, read, residual, output):
    return read + residual


class Smoothing(SegmentReader):
  """The results of the middle, smoothed by the probabilities of the boundaries, as in H-Net.

    finish: `dpjax.ops.smooth_segments`      combine: straight_through(p_t, b_t) u_t + r_t

  without a null group and a norm. The boundaries give probabilities.

  Source: Hwang et al. 2025, arXiv:2507.07955.
  """

  def prepare(self, segments, context):
    return segments

  def finish(self, results, probabilities, context):
    e_bsd = ops.smooth_segments(
      results, _required(probabilities), document_starts=context.document_starts
    )
    return jnp.concatenate([jnp.zeros_like(e_bsd[:, :1]), e_bsd], axis=1)

  def finish_step(self, results, probabilities, previous):
    return ops.smooth_segments(results, _required(probabilities), previous=previous)

  def combine(self, read, residual, output):
    probabilities = _required(output.probabilities)
    chosen = ops.straight_through(probabilities, output.boundaries)[..., None]
    return (chosen * read.astype(jnp.float32) + residual).astype(read.dtype)


def _required(probabilities: jax.Array | None) -> jax.Array:
  if probabilities is None:
    raise UserError("probabilities: expected those of the boundaries, to smooth segments, got None")
  return probabilities
