"""Routing of H-Net: segments end where neighbouring vectors differ.

    p, b = route(h, W_q, W_k)       a boundary where the cosine is negative
    z    = pool_segments(h, b, S, method="last")
    e    = smooth_segments(middle(z), p at the boundaries)
    u    = upsample_segments([null, e], b) * straight_through(p, b)

The first token of a row is always a boundary, so that no token reads the null group.

B batch, T position (token), S segment, D feature, E feature of the projections.

Source: Hwang et al. 2025, arXiv:2507.07955; goombalab/hnet@3673fe1:hnet/modules/dc.py and
hnet/utils/train.py. The numbers are the same; an associative scan replaces their kernel.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Binary, Real, Starts, typed
from dpjax.ops.products import sum_dtype

MIN_PROBABILITY = 1e-4  # the scan clips probabilities this far from 0 and 1


@typed
def route(
  hidden: Float[Array, "B T D"],
  query_kernel: Float[Array, "D E"],
  key_kernel: Float[Array, "D E"],
  *,
  previous: Float[Array, "B D"] | None = None,
  num_before: Integer[Array, "B"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Int32[Array, "B T"]]:
  """The probability of a boundary at each token, and the boundaries (the routing module).

    p_t = clip((1 - cos(h_{t-1} W_q, h_t W_k)) / 2, 0, 1),  p_0 = 1
    b_t = [p_t > 1/2]

  Args:
    hidden: h, a vector for each token.
    query_kernel: W_q, for the vector of the token before.
    key_kernel: W_k, for the vector of the token itself.
    previous: the vector before each row's first, to continue rows; None means zeros.
    num_before: the number of earlier tokens in each row; None means 0.
    document_starts: 1 at the first token of each document, else 0; p is 1 there.

  Returns p, in float32 or the wider dtype of `hidden`; b.
  """
  arrays.check_not_empty(hidden=hidden)
  if previous is None:
    previous = jnp.zeros_like(hidden[:, 0])
  before = jnp.concatenate([previous[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
  cosine = jnp.sum(_unit(before @ query_kernel) * _unit(hidden @ key_kernel), axis=-1)
  probabilities = jnp.clip((1 - cosine) / 2, 0, 1)
  is_first = jnp.arange(hidden.shape[1])[None] == 0
  if num_before is not None:
    is_first &= num_before[:, None] == 0
  if document_starts is not None:
    is_first |= document_starts.astype(bool)
  probabilities = jnp.where(is_first, 1, probabilities)
  return probabilities, (probabilities > 0.5).astype(jnp.int32)


@typed
def smooth_segments(
  segments: Float[Array, "B S D"],
  probabilities: Float[Array, "B S"],
  *,
  previous: Float[Array, "B D"] | None = None,
  document_starts: Starts[Array, "B S"] | None = None,
) -> Float[Array, "B S D"]:
  """Smooths segments, weighted by the probabilities of their boundaries (the smoothing module).

    q_m = clip(p_m, 1e-4, 1 - 1e-4)
    e_m = q_m z_m + (1 - q_m) e_{m-1},  e_{-1} = 0

  Args:
    segments: z.
    probabilities: p, of the boundaries that end them.
    previous: e_{-1}, to continue rows; None means zeros.
    document_starts: 1 at the first segment of each document, else 0; e_{m-1} is 0 there.

  Returns e, in the dtype of `segments`, computed in at least float32.
  """
  arrays.check_not_empty(segments=segments)
  dtype = sum_dtype(segments, probabilities)
  q = jnp.clip(probabilities.astype(dtype), MIN_PROBABILITY, 1 - MIN_PROBABILITY)[..., None]
  added = q * segments.astype(dtype)
  kept = 1 - q
  if document_starts is not None:
    kept = jnp.where(document_starts.astype(bool)[..., None], 0, kept)
  if previous is not None:
    added = added.at[:, 0].add(kept[:, 0] * previous.astype(dtype))
  kept = jnp.broadcast_to(kept, added.shape)

  def join(left, right):
    return left[0] * right[0], left[1] * right[0] + right[1]

  return jax.lax.associative_scan(join, (kept, added), axis=1)[1].astype(segments.dtype)


@typed
def straight_through(
  probabilities: Float[Array, "B T"], boundaries: Binary[Array, "B T"]
) -> Float[Array, "B T"]:
  """Ones that pass the gradient to the probability of each decision (the confidence score).

  c_t = p_t if b_t else 1 - p_t;  the result is 1, with the gradient of c_t
  """
  chosen = jnp.where(boundaries > 0, probabilities, 1 - probabilities)
  return chosen + jax.lax.stop_gradient(1 - chosen)


@typed
def ratio_loss(
  boundaries: Real[Array, "B T"],
  probabilities: Float[Array, "B T"],
  factor: jax.Array | float,
  *,
  weights: Real[Array, "B T"] | None = None,
  share: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
  """Pulls the share of boundaries towards 1 / N, where the loss has its minimum, 1.

    L = N / (N - 1) ((N - 1) F G + (1 - F) (1 - G)),  F = mean b (no gradient), G = mean p

  Args:
    boundaries: b, 0 or 1.
    probabilities: p.
    factor: N, the target number of tokens per segment, above 1; it may be traced.
    weights: 1 where a token counts, else 0; None means that all count.
    share: F of the global batch, if this is a shard; None means that of these tokens. With the
      same F, L times the number of tokens adds up over shards.

  Returns L, at least float32.
  """
  factor = arrays.number(
    "factor", factor, "a factor above 1", lambda x: 1 < x < math.inf, traced=True
  )
  dtype = sum_dtype(probabilities)
  ones = jnp.ones(boundaries.shape, dtype) if weights is None else weights.astype(dtype)
  count = jnp.sum(ones)
  count = jnp.where(count == 0, 1, count)
  if share is None:
    share = jnp.sum(boundaries.astype(dtype) * ones) / count
  share = jax.lax.stop_gradient(share)
  probabilities = jnp.where(ones == 0, 0, probabilities.astype(dtype))
  mean = jnp.sum(probabilities * ones) / count
  return factor / (factor - 1) * ((factor - 1) * share * mean + (1 - share) * (1 - mean))


def _unit(vectors: jax.Array) -> jax.Array:
  """Normalises vectors to length 1, in at least float32; zeros stay zeros."""
  vectors = vectors.astype(sum_dtype(vectors))
  squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
