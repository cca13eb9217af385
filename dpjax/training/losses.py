"""Losses. B batch, T position, V vocabulary."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.errors import UserError
from dpjax.layers.boundaries import Boundaries, StageOutput
from dpjax.ops.backend import by_platform, replicate
from dpjax.ops.placement import num_devices, pvary_like
from dpjax.ops.products import dot_general, product, sum_dtype


def cross_entropy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Sums the nats of all targets that count.

    nats  = sum over b, t of -weights[b, t] log softmax(logits[b, t])[targets[b, t]]
    count = sum over b, t of weights[b, t]

  Sums over parts of a batch add up. Supports only reverse mode, which stores the logits.

  Args:
    logits: [B, T, V], floats; the softmax is in float32, or in float64 for float64 logits.
    targets: [B, T], integers in [0, V).
    weights: [B, T], 1 where a target counts, else 0; where it is 0, logits may be nan.

  Raises:
    ValueError: the shapes do not match.
  """
  _check_shapes("logits", "V", logits, targets, weights)
  nats_bt = _nats_of_tokens(logits, targets)
  # A product alone does not suffice: logits may be nan where weights are 0.
  nats_bt = jnp.where(weights == 0, 0, nats_bt * weights.astype(nats_bt.dtype))
  return jnp.sum(nats_bt), jnp.sum(weights)


def _check_shapes(name: str, axis: str, array, targets, weights) -> None:
  if not array.shape[:-1] == targets.shape == weights.shape:
    raise ValueError(
      f"{name}, targets, weights: expected [B, T, {axis}], [B, T], [B, T], got "
      f"{array.shape}, {targets.shape}, {weights.shape}"
    )


@jax.custom_vjp
def _nats_of_tokens(logits, targets) -> jax.Array:
  """[B, T], -log softmax(logits)[target]; stores only the logits for the gradient."""
  return _nats_forward(logits, targets)[0]


def _nats_forward(logits, targets):
  # The maximum is subtracted first: added to a large one, the logarithm would lose digits.
  max_bt = jnp.max(_wide(logits), axis=-1)
  log_sum_bt = jnp.log(jnp.sum(jnp.exp(_wide(logits) - max_bt[..., None]), axis=-1))
  nats_bt = log_sum_bt - (_pick(logits, targets) - max_bt)
  return nats_bt, (logits, max_bt, log_sum_bt, targets)


def _nats_backward(residuals, grad_bt):
  # dnats[b, t] / dlogits[b, t, v] = p[b, t, v] - [v = targets[b, t]]
  logits, max_bt, log_sum_bt, targets = residuals
  p_btv = jnp.exp(_wide(logits) - max_bt[..., None] - log_sum_bt[..., None])
  is_0_bt = grad_bt == 0  # Also where p is nan.
  grad_btv = jnp.where(is_0_bt[..., None], 0, p_btv * grad_bt[..., None]).astype(logits.dtype)
  of_target_bt = jnp.expm1(_pick(logits, targets) - max_bt - log_sum_bt) * grad_bt
  of_target_bt = jnp.where(is_0_bt, 0, of_target_bt).astype(logits.dtype)
  # In place: with a comparison, XLA:CPU would recompute the gradient for each consumer.
  put = jax.vmap(jax.vmap(lambda row, target, value: row.at[target].set(value)))
  runs = {"cpu": put, "default": _put_by_comparison}
  return by_platform(runs, grad_btv, targets, of_target_bt), None


def _put_by_comparison(rows_btv, targets, values_bt) -> jax.Array:
  is_target_btv = jnp.arange(rows_btv.shape[-1])[None, None] == targets[..., None]
  return jnp.where(is_target_btv, values_bt[..., None], rows_btv)


def _pick(logits, targets) -> jax.Array:
  return _wide(jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])


def _wide(x) -> jax.Array:
  return x.astype(sum_dtype(x))


_nats_of_tokens.defvjp(_nats_forward, _nats_backward)

_PIECE_BYTES = 2**26  # size of a piece's logits on each device
_CACHED_BYTES = 2**24  # the same, to fit a CPU's caches


def output_nats(
  hidden: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  targets: jax.Array,
  weights: jax.Array,
) -> jax.Array:
  """The nats of `cross_entropy` for hidden @ kernel + bias, without storing all [B, T, V] logits.

  Logits are computed once, in pieces of positions. With derivatives, so are the gradients of each
  piece, which the backward pass only scales: reverse mode, only for hidden, kernel and bias.

  Args:
    hidden: [B, T, D], floats; factors are in this dtype, logits and sums in float32 or float64.
    kernel: [D, V], floats.
    bias: [V], or None.
    targets: see `cross_entropy`, also for the errors.
    weights: see `cross_entropy`.
  """
  _check_shapes("hidden", "D", hidden, targets, weights)
  hidden = jnp.where((weights == 0)[..., None], 0, hidden)  # It may be nan there.
  hidden, kernel, bias = pvary_like((hidden, *replicate((kernel, bias))))
  return _output_nats(hidden, kernel, bias, targets, weights)


@jax.custom_vjp
def _output_nats(*arrays) -> jax.Array:
  return _by_platform(_sum_pieces, *arrays)


def _by_platform(function, *arrays):
  return by_platform({"cpu": partial(function, True), "default": partial(function, False)}, *arrays)


def _sum_pieces(is_cached, hidden, kernel, bias, targets, weights):
  def add_piece(nats, piece):
    return nats + cross_entropy(_logits(piece[0], kernel, bias), *piece[1:])[0], None

  pieces = _cut(is_cached, hidden, kernel, targets, weights)
  return lax.scan(add_piece, jnp.zeros_like(hidden, sum_dtype(hidden), shape=()), pieces)[0]


def _differentiate_pieces(is_cached, hidden, kernel, bias, targets, weights):
  dtype = sum_dtype(hidden)

  def add_piece(sums, piece):
    h_btd, *others = piece
    nats_of = jax.value_and_grad(lambda logits_btv: cross_entropy(logits_btv, *others)[0])
    nats, g_btv = nats_of(_logits(h_btd, kernel, bias))
    wide_rv = g_btv.reshape(-1, g_btv.shape[-1])
    g_rv = wide_rv.astype(h_btd.dtype)
    h_rd = h_btd.reshape(-1, h_btd.shape[-1])
    of_hidden = product("rv,dv->rd", g_rv, kernel.astype(h_btd.dtype)).astype(h_btd.dtype)
    of_kernel = product("rd,rv->dv", h_rd, g_rv)
    added = nats, of_kernel, None if bias is None else jnp.sum(wide_rv, 0, dtype)
    return jax.tree.map(jnp.add, sums, added), of_hidden.reshape(h_btd.shape)

  nothing = jnp.zeros_like(hidden, shape=())
  zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype), (nothing, kernel, bias))
  zeros = replicate(zeros)
  (nats, of_kernel, of_bias), pieces = lax.scan(
    add_piece, zeros, _cut(is_cached, hidden, kernel, targets, weights)
  )
  of_hidden = jnp.moveaxis(pieces, 0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])
  of_layer = jax.tree.map(lambda x, y: x.astype(y.dtype), (of_kernel, of_bias), (kernel, bias))
  return nats, (of_hidden[:, : hidden.shape[1]], *of_layer)


def _output_backward(residuals, grad):
  of_hidden, of_kernel, of_bias = jax.tree.map(lambda x: x * grad.astype(x.dtype), residuals)
  return of_hidden, of_kernel, of_bias, None, None


_output_nats.defvjp(lambda *x: _by_platform(_differentiate_pieces, *x), _output_backward)


def _logits(h_btd, kernel, bias):
  # Rounded to 16 bits, logits would cost a few hundredths of a nat (docs/faithful.md).
  dtype = sum_dtype(h_btd)
  options = {} if h_btd.dtype == dtype else {"preferred_element_type": dtype}
  kernel = kernel.astype(h_btd.dtype)
  logits_btv = dot_general(h_btd, kernel, (((2,), (0,)), ((), ())), **options)
  return logits_btv if bias is None else logits_btv + bias.astype(dtype)[None, None]


def _cut(is_cached, hidden, kernel, targets, weights):
  """Pieces of positions, [pieces, B, t, ...]; the last one is padded with weight 0."""
  # Pieces of positions, unlike rows, are distributed over the devices like the batch.
  batch, length = targets.shape
  width, vocab_size = kernel.shape
  row_bytes = vocab_size * sum_dtype(hidden).itemsize
  piece_bytes = _PIECE_BYTES
  if is_cached:  # With fewer rows than features, adding the kernel's gradients takes longest.
    piece_bytes = min(piece_bytes, max(_CACHED_BYTES, width * row_bytes))
  num_pieces = min(length, max(1, -(-batch * length * row_bytes // (piece_bytes * num_devices()))))
  size = -(-length // num_pieces)
  if size > 8:  # A TPU tiles by eight positions; merging other sizes with rows would copy them.
    size = min(length, -(-size // 8) * 8)
  num_pieces = -(-length // size)

  def cut(x):
    pad = [(0, 0), (0, num_pieces * size - length)] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, pad).reshape(batch, num_pieces, size, *x.shape[2:]), 1, 0)

  return cut(hidden), cut(targets), cut(weights)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of the tokens and, with token pooling, of the boundaries.

    loss = nats / count + boundary_nats / count

  `boundaries` are the boundary modules, the outermost first; () without pooling. Inner ones add the
  mean of their loss over segments instead of tokens.
  """

  boundaries: Sequence[Boundaries] = ()

  @property
  def counts(self) -> tuple[str, ...]:
    """The sums of a full batch that the loss of each part needs; () if parts simply add up."""
    inner = range(2, len(self.boundaries) + 1)
    if not inner and not any(module.reads_share for module in self.boundaries):
      return ()
    names = [f"{name}_{number}" for number in inner for name in ("segments_in", "boundaries")]
    return "count", "boundaries", *names

  def sums(
    self,
    output: Any,
    batch: Mapping[str, jax.Array],
    output_layer: tuple[jax.Array, jax.Array | None] | None = None,
    counts: Mapping[str, jax.Array] | None = None,
    scores_starts: bool = False,
  ) -> dict[str, jax.Array]:
    """A batch's contribution to the loss and to the scores.

    Args:
      output: the model's; from a user's model, any object with `logits`.
      batch: see `dpjax.training.Trainer.step`.
      output_layer: the kernel and bias for `output_nats` of `output.hidden`; ignored if the
        boundaries read the logits anyway.
      counts: for a part of a batch, the sums `Objective.counts` of the full batch.
      scores_starts: whether to add "start_nats", the nats of tokens after a boundary.

    Returns:
      Float32 scalars for `add_sums`: "nats" and "count" (`cross_entropy`); with token pooling
      also "boundary_nats", and the sums for `dpjax.training.metrics.boundary_scores`.
    """
    weights = batch["weights"]

    def nats_of(weights):
      if output_layer is None or any(module.reads_logits for module in self.boundaries):
        return cross_entropy(output.logits, batch["targets"], weights)[0]
      return output_nats(output.hidden, *output_layer, batch["targets"], weights)

    sums = {"nats": nats_of(weights), "count": jnp.sum(weights)}
    if not self.boundaries:
      return sums
    stages = output.stages
    if len(stages) != len(self.boundaries):
      raise UserError(
        f"objective: expected boundaries for each of the model's {len(stages)} stages, got "
        f"{len(self.boundaries)}"
      )
    module, *inner_modules = self.boundaries
    stage = stages[0]
    boundaries = stage.boundaries.astype(jnp.float32)
    sums |= _count_segments(module, stage, weights)
    if scores_starts:
      sums["start_nats"] = nats_of(weights * boundaries)
    totals = counts or sums
    share = _share(totals["boundaries"], totals["count"])
    sums["boundary_nats"], targets = module.loss(
      stage, {**batch, "boundary_share": share}, output.logits
    )
    sums |= _count_drawn(module, stage, weights)
    if targets is not None:
      targets = targets.astype(jnp.float32)
      sums["targets"] = jnp.sum(targets * weights)
      sums["hits"] = jnp.sum(boundaries * targets * weights)
      sums["agreements"] = jnp.sum((boundaries == targets).astype(jnp.float32) * weights)
    is_real = _is_real(weights)
    for number, inner_module in enumerate(inner_modules, 2):
      segments_b = jnp.sum(jax.lax.stop_gradient(boundaries) * is_real, axis=1)
      if module.reader.num_null:
        segments_b += _null_groups(stage, is_real)
      module = inner_module
      stage = stages[number - 1]
      boundaries = stage.boundaries.astype(jnp.float32)
      positions = jnp.arange(boundaries.shape[1], dtype=jnp.float32)[None]
      is_real = (positions < segments_b[:, None]).astype(jnp.float32)
      sums[f"segments_in_{number}"] = jnp.sum(is_real)
      sums[f"boundaries_{number}"] = jnp.sum(boundaries * is_real)
      num_segments = totals[f"segments_in_{number}"]
      share = _share(totals[f"boundaries_{number}"], num_segments)
      segments = {"weights": is_real, "boundary_share": share}
      if "update" in batch:
        segments["update"] = batch["update"]
      inner_nats, _ = module.loss(stage, segments)
      sums |= _count_drawn(module, stage, is_real, f"_{number}")
      sums["boundary_nats"] += inner_nats * totals["count"] / jnp.maximum(num_segments, 1)
    return sums


def add_sums(left: Mapping[str, jax.Array], right: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Adds the sums of two batches; for names that end in "_max", takes the larger value."""
  return {
    name: (jnp.maximum if name.endswith("_max") else jnp.add)(value, right[name])
    for name, value in left.items()
  }


def _count_segments(module: Boundaries, stage: StageOutput, weights) -> dict[str, jax.Array]:
  is_real = _is_real(weights)
  boundaries = stage.boundaries.astype(jnp.float32)
  segments_b = jnp.sum(boundaries * is_real, axis=1)
  slots_b = segments_b
  if module.reader.num_null:
    slots_b = segments_b + _null_groups(stage, is_real)
  return {
    "boundaries": jnp.sum(boundaries * weights),
    "segments": jnp.sum(segments_b),
    "segments_max": jnp.max(segments_b),
    "rows": jnp.sum(is_real[:, 0]),
    "positions": jnp.float32(boundaries.shape[1]),
    "slots": jnp.max(slots_b),  # S
  }


def _count_drawn(
  module: Boundaries, stage: StageOutput, weights, suffix: str = ""
) -> dict[str, jax.Array]:
  """The expected number of drawn boundaries, and that of rounded ones if evaluation rounds."""
  logits_bt = stage.logits
  if not module.is_stochastic or module.samples_in_eval or logits_bt is None:
    return {}
  logits_bt = jnp.where(weights == 0, 0, logits_bt.astype(jnp.float32))
  counts = {"drawn": jax.nn.sigmoid(logits_bt), "rounded": (logits_bt > 0).astype(jnp.float32)}
  return {f"{name}{suffix}": jnp.sum(x_bt * weights) for name, x_bt in counts.items()}


def _share(boundaries, count) -> jax.Array:
  return lax.stop_gradient(boundaries) / jnp.where(count == 0, 1, count)


def _null_groups(stage: StageOutput, is_real) -> jax.Array:
  """[B], the number of documents with real tokens; a row of padding has none."""
  starts_bt = stage.document_starts
  if starts_bt is None:
    return is_real[:, 0]
  return jnp.sum(starts_bt.astype(is_real.dtype) * is_real, axis=1)


def _is_real(weights) -> jax.Array:
  """[B, T], whether a position is real, up to the last target that counts."""
  return (jax.lax.cummax(weights, axis=1, reverse=True) > 0).astype(jnp.float32)
