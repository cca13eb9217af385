"""What is minimised. B batch, T position, V vocabulary."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.layers.boundaries import Boundaries
from dpjax.ops.products import sum_dtype


def cross_entropy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Sums the nats of the targets that count.

    nats  = sum over b, t of -weights[b, t] log softmax(logits[b, t])[targets[b, t]]
    count = sum over b, t of weights[b, t]

  Sums, and not their quotient, so that parts of a batch add up to the whole. Reverse-mode
  derivatives only, which keep the logits as they are.

  Args:
    logits: [B, T, V], floats; the softmax is taken in float32, or float64 as they are.
    targets: [B, T], integers in [0, V).
    weights: [B, T], 1 where a target counts and 0 where it does not.

  Returns:
    nats and count, scalars.

  Raises:
    ValueError: the shapes do not match.
  """
  if not logits.shape[:-1] == targets.shape == weights.shape:
    raise ValueError(
      "logits, targets, weights: expected [B, T, V], [B, T], [B, T], got "
      f"{logits.shape}, {targets.shape}, {weights.shape}"
    )
  nats_bt = _nats_of_tokens(logits, targets)
  return jnp.sum(nats_bt * weights.astype(nats_bt.dtype)), jnp.sum(weights)


@jax.custom_vjp
def _nats_of_tokens(logits, targets) -> jax.Array:
  """[B, T], -log softmax(logits)[target]; of [B, T, V] it keeps the logits alone."""
  return _nats_forward(logits, targets)[0]


def _nats_forward(logits, targets):
  lse_bt = jax.nn.logsumexp(_wide(logits), axis=-1)
  return lse_bt - _pick(logits, targets), (logits, lse_bt, targets)


def _nats_backward(residuals, grad_bt):
  # dnats[b, t] / dlogits[b, t, v] = p[b, t, v] - [v = targets[b, t]]
  logits, lse_bt, targets = residuals
  p_btv = jnp.exp(_wide(logits) - lse_bt[..., None])
  grad_btv = (p_btv * grad_bt[..., None]).astype(logits.dtype)
  # In its place: a comparison with every v would have XLA make the gradient once for each
  # of those that read it.
  of_target_bt = jnp.expm1(_pick(logits, targets) - lse_bt) * grad_bt
  put = jax.vmap(jax.vmap(lambda row, target, value: row.at[target].set(value)))
  return put(grad_btv, targets, of_target_bt.astype(logits.dtype)), None


def _pick(logits, targets) -> jax.Array:
  picked_bt1 = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  return _wide(picked_bt1[..., 0])


def _wide(x) -> jax.Array:
  return x.astype(sum_dtype(x))


_nats_of_tokens.defvjp(_nats_forward, _nats_backward)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of the tokens, and those of the boundaries where a model pools them.

    loss = nats / count + boundary_nats / count

  Attributes:
    boundaries: the kinds, whose `loss` is the second term, the outermost first; (): no
      pooling. That of segments has a mean over segments in the place of that over tokens.
  """

  boundaries: Sequence[Boundaries] = ()

  def sums(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What a batch adds to the loss and to the scores.

    Args:
      output: `dpjax.models.language_model.LanguageModelOutput`.
      batch: "tokens", "targets", "weights", each [B, T], and what the boundaries need; where
        rows are several documents, "starts", [B, T], 1 at the first token of each.

    Returns:
      Float32 scalars that `add_sums` adds up: "nats" and "count" (`cross_entropy`);
      with token pooling also "boundary_nats", and what
      `dpjax.training.metrics.boundary_scores` reads.
    """
    weights = batch["weights"]
    nats, count = cross_entropy(output.logits, batch["targets"], weights)
    sums = {"nats": nats, "count": count}
    if not self.boundaries:
      return sums
    kind, *within = self.boundaries
    boundaries = output.boundaries.astype(jnp.float32)
    sums["boundary_nats"], targets = kind.loss(output, batch)
    starts = batch.get("starts")
    sums |= _count_segments(boundaries, weights, starts, kind.has_null_group)
    if targets is not None:
      targets = targets.astype(jnp.float32)
      sums["targets"] = jnp.sum(targets * weights)
      sums["hits"] = jnp.sum(boundaries * targets * weights)
      sums["agreements"] = jnp.sum((boundaries == targets).astype(jnp.float32) * weights)
    stage, is_real = output, _is_real(weights)
    for number, inner in enumerate(within, 2):
      segments_b = jnp.sum(jax.lax.stop_gradient(boundaries) * is_real, axis=1)
      if kind.has_null_group:
        segments_b += _null_groups(starts, is_real)
      kind, stage = inner, stage.inner
      starts = stage.starts
      boundaries = stage.boundaries.astype(jnp.float32)
      places = jnp.arange(boundaries.shape[1], dtype=jnp.float32)[None]
      is_real = (places < segments_b[:, None]).astype(jnp.float32)
      of_documents = {} if starts is None else {"starts": starts}
      inner_nats, _ = kind.loss(stage, {"weights": is_real, **of_documents})
      num_segments = jnp.sum(is_real)
      sums["boundary_nats"] += inner_nats * count / jnp.maximum(num_segments, 1)
      sums[f"segments_in_{number}"] = num_segments
      sums[f"boundaries_{number}"] = jnp.sum(boundaries * is_real)
    return sums


def add_sums(left: Mapping[str, jax.Array], right: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Sums of two batches together; of what ends in "_max", the larger."""
  return {
    name: jnp.maximum(value, right[name]) if name.endswith("_max") else value + right[name]
    for name, value in left.items()
  }


def _count_segments(boundaries, weights, starts, has_null_group: bool) -> dict[str, jax.Array]:
  is_real = _is_real(weights)
  segments_b = jnp.sum(boundaries * is_real, axis=1)
  places_b = segments_b
  if has_null_group:
    places_b += 1.0 if starts is None else _null_groups(starts, is_real)
  return {
    "boundaries": jnp.sum(boundaries * weights),
    "segments": jnp.sum(segments_b),
    "segments_max": jnp.max(segments_b),
    "rows": jnp.sum(is_real[:, 0]),
    "positions": jnp.float32(boundaries.shape[1]),
    "slots": jnp.max(places_b),  # S
  }


def _null_groups(starts, is_real) -> jax.Array:
  """[B], one for each document that has real tokens."""
  if starts is None:
    return is_real[:, 0]
  return jnp.sum(starts.astype(is_real.dtype) * is_real, axis=1)


def _is_real(weights) -> jax.Array:
  """[B, T]: a text's end is filled up behind the last target that counts."""
  return (jax.lax.cummax(weights, axis=1, reverse=True) > 0).astype(jnp.float32)
