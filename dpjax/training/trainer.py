"""The updates of a model. B batch, T position, V vocabulary."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import ops
from dpjax.config.schema import Train
from dpjax.errors import UserError
from dpjax.layers.common import Params
from dpjax.models.build import init_params
from dpjax.models.language_model import LanguageModel, LanguageModelOutput
from dpjax.models.stage import PoolingHints
from dpjax.training import losses, optimizers, sharding

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
  """The state of a run, sufficient to resume it.

  Attributes:
    step: the number of updates made, int32; batch `step` is the next.
    params: the model's parameters, float32.
    opt_state: the state of the optimizer.
    key: the random key; dropout of update `step` draws from fold_in(key, step).
    average: the exponential moving average of the parameters, or None.
  """

  step: jax.Array
  params: Params
  opt_state: optax.OptState
  key: jax.Array
  average: Params | None = None

  @property
  def scored(self) -> Params:
    """The parameters to score and return: the average if there is one."""
    return self.params if self.average is None else self.average


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """Makes the updates of a model.

    trainer = Trainer(model, Train(learning_rate=1e-3), num_steps=1000)
    state = trainer.init()
    state, metrics = trainer.step(state, batch)

  The trainer reads all settings but these. `fit` reads log_every_steps, eval_every_steps,
  eval_every_epochs, patience, checkpoint_every_steps and max_to_keep. `dpjax.train` makes batches
  from sampling, batch_size and window, `num_steps` from num_steps or num_epochs, and `initial` from
  init_from.

  Attributes:
    model: any Flax module. `model.apply({"params": params}, tokens, deterministic=..., rngs=...)`
      maps [B, T] tokens to an object with `logits`, [B, T, V]; dropout draws from the random
      stream "dropout".
    settings: of `config.train`.
    num_steps: the number of updates in total, at which the schedule and `fit` end.
    optimizer: replaces the optimizer, learning_rate, schedule, grad_clip_norm and
      weight_decay_mask of the settings; their stage_multipliers scale its updates. Any Optax
      optimizer that needs only gradients, parameters and the loss as `value`.
    objective: the loss to minimise; for a model with token pooling, that of its boundaries, too:
      `Objective(dpjax.models.build.build_boundaries(config.model))`.
    seed: the seed of parameters and dropout.
    initial: maps the drawn parameters to those to start from, such as a checkpoint's.

  Raises:
    UserError: the settings have another num_steps, or the objective lacks the model's boundaries.
  """

  model: nn.Module
  settings: Train
  num_steps: int
  optimizer: optax.GradientTransformation | None = None
  objective: losses.Objective = dataclasses.field(default_factory=losses.Objective)
  seed: int = 0
  initial: Callable[[Params], Params] | None = None

  def __post_init__(self):
    if self.settings.num_steps not in (0, self.num_steps):
      raise UserError(
        f"num_steps: expected the settings' {self.settings.num_steps}, got {self.num_steps}"
      )
    pools = isinstance(self.model, LanguageModel) and bool(self.model.core.stages)
    if pools and not self.objective.boundaries:
      raise UserError("objective: expected one with the boundaries of the model, got none")
    # Made outside of a trace, whose arrays must not be kept.
    _ = self.update_rule

  @functools.cached_property
  def update_rule(self) -> optax.GradientTransformationExtraArgs:
    """The optimizer with `stage_multipliers`, for the parameters that are not frozen."""
    rule = self.optimizer
    if rule is None:
      rule = optimizers.build_optimizer(self.settings, self.num_steps, self.model)
    multipliers = self.settings.stage_multipliers
    if isinstance(multipliers, str):
      raise UserError(
        "train.stage_multipliers: expected numbers, such as dpjax.config.stage_multipliers(config)"
        f", got {multipliers}"
      )
    if multipliers:
      rule = optimizers.scale_by_stage(rule, multipliers)
    return optimizers.for_model(rule, self.model)

  def init(self, mesh: Mesh | None = None) -> TrainState:
    """Makes the state before the first update, with the `initial` parameters.

    Its values do not depend on the number of devices. It lies on the devices of `mesh`, as
    `param_sharding` says; None: on JAX's default device.
    """
    shardings = None
    if mesh is not None:
      shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state(mesh))
    state = jax.jit(self._draw, out_shardings=shardings)()
    if self.initial is None:
      return state
    params = self.initial(state.params)
    # Copied, since an update gives its memory away.
    place = None if shardings is None else shardings.params
    params = jax.device_put(params, place, may_alias=False)
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state.replace(params=params, average=average)

  def _draw(self) -> TrainState:
    init_key, dropout_key = jax.random.split(jax.random.key(self.seed))
    params = init_params(self.model, init_key)
    average = jax.tree.map(jnp.copy, params) if self.settings.ema_decay else None
    opt_state = self.update_rule.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, dropout_key, average)

  @functools.cached_property
  def _shapes(self) -> TrainState:
    return jax.eval_shape(self._draw)

  def abstract_state(self, mesh: Mesh) -> TrainState:
    """The shapes, dtypes and shardings (`sharding.state_sharding`) of a state."""
    return sharding.place(self._shapes, mesh, self.settings.param_sharding)

  def jit_step(self, mesh: Mesh) -> Callable[..., tuple[TrainState, Sums]]:
    """`step`, compiled for the devices of a mesh: (state, batch, capacity=None).

    The input state is donated. Each capacity is compiled separately.
    """
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state(mesh))
    return jax.jit(
      sharding.on_mesh(self.step, mesh),
      donate_argnums=0,
      static_argnames="capacity",
      out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )

  def step(
    self, state: TrainState, batch: Batch, capacity: int | None = None
  ) -> tuple[TrainState, Sums]:
    """Performs one update on the mean loss of the batch's tokens.

    The batch is processed in A = `grad_accum_steps` sequential parts, and the summed gradients are
    divided by the summed weights. Except for rounding, dropout and drawn boundaries, the result
    equals that of A = 1.

    Args:
      state: the state before the update.
      batch: "tokens", "targets", "weights", each [B, T], and any inputs of the objective; for
        rows of several documents also "document_starts", [B, T], 1 at the first token of each.
      capacity: the `capacity` of `dpjax.models.PoolingHints` for this batch.

    Returns:
      The new state, and "loss" (nats per token), "grad_norm" (before clipping), "learning_rate"
      unless the trainer has an `optimizer`, and the objective's sums.
    """
    with ops.product_dtype(self.settings.matmul_dtype):
      grads, sums = self._summed_gradient(state, batch, capacity)
    count = sums["count"]
    grads = jax.tree.map(lambda g: g / count, grads)
    value = (sums["nats"] + sums.get("boundary_nats", 0.0)) / count
    updates, opt_state = self.update_rule.update(grads, state.opt_state, state.params, value=value)
    metrics = {"loss": sums["nats"] / count, "grad_norm": optax.tree.norm(grads), **sums}
    if self.optimizer is None:
      learning_rate = optimizers.build_schedule(self.settings, self.num_steps)
      metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
    params: Any = optax.apply_updates(state.params, updates)  # Optax's types are wider.
    average = state.average
    if average is not None:
      average = add_to_average(average, params, state.step, self.settings.ema_decay)
    return TrainState(state.step + 1, params, opt_state, state.key, average), metrics

  def _summed_gradient(
    self, state: TrainState, batch: Batch, capacity: int | None
  ) -> tuple[Params, Sums]:
    """The gradient of the loss, summed over the targets, and the objective's sums."""

    def loss(
      params: Params, part: Batch, key: jax.Array, counts: Sums | None = None
    ) -> tuple[jax.Array, Sums]:
      output = apply_model(self.model, params, part, key, capacity, deterministic=False)
      part = {**part, "update": state.step}
      sums = self.objective.sums(output, part, output_layer(self.model, params), counts)
      return sums["nats"] + sums.get("boundary_nats", 0.0), sums

    key = jax.random.fold_in(state.key, state.step)
    num_parts = self.settings.grad_accum_steps
    if num_parts == 1:
      return jax.grad(loss, has_aux=True)(state.params, batch, key)
    # Row b goes to part b % A, so that each part lies on all devices.
    parts = jax.tree.map(
      lambda x: jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0), batch
    )
    keys = jax.random.split(key, num_parts)
    return self._sum_parts(loss, state.params, parts, keys)

  def _sum_parts(
    self, loss: Callable, params: Params, parts: Batch, keys: jax.Array
  ) -> tuple[Params, Sums]:
    """The sums of the gradients and of the objective's sums over the parts of a batch.

    If the loss of the boundaries is not a sum over rows (`losses.Objective.counts`), a pass
    without gradients first counts the boundaries of all parts.
    """
    counts = None
    if self.objective.counts:

      def count_part(_, part_and_key):
        _, sums = loss(params, *part_and_key)
        return None, {name: sums[name] for name in self.objective.counts}

      _, counts_of_parts = jax.lax.scan(count_part, None, (parts, keys))
      counts = jax.tree.map(lambda x: jnp.sum(x, axis=0), counts_of_parts)
    gradient = jax.grad(loss, has_aux=True)
    first = jax.tree.map(lambda x: x[0], (parts, keys))
    shapes = jax.eval_shape(gradient, params, *first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add_part(carry, part_and_key):
      grads, sums = gradient(params, *part_and_key, counts)
      return (jax.tree.map(jnp.add, carry[0], grads), losses.add_sums(carry[1], sums)), None

    (grads, sums), _ = jax.lax.scan(add_part, zeros, (parts, keys))
    return grads, sums


def add_to_average(average: Params, params: Params, step: jax.Array, decay: float) -> Params:
  """Adds the parameters after update `step`, counted from 0, to their average.

    average + (params - average) (1 - decay) / (1 - decay**(step + 1))

  The weight of each earlier update falls by `decay`, and the weights sum to 1: `optax.ema` with
  `debias`, without a final correction. Constant (frozen) parameters stay bit-identical.
  """
  log_decay = jnp.float32(math.log(decay))  # As float32, a decay near 1 would be 1.
  weight = jnp.expm1(log_decay) / jnp.expm1((step + 1).astype(jnp.float32) * log_decay)
  return optax.tree.add_scale(average, weight, optax.tree.sub(params, average))


def abstract_params(model: nn.Module, param_sharding: str = "replicated") -> Params:
  """The shapes, dtypes and shardings of a model's parameters on all devices."""
  shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
  return sharding.place(shapes, sharding.make_mesh(), param_sharding)


def find_non_finite(params: Params) -> str | None:
  """The name of the first array with nan or infinity; all processes get the same answer."""
  return _find(params, lambda array: not np.isfinite(array).all(), _has_non_finite)


def find_nan(opt_state: Any) -> str | None:
  """The name of an optimizer state's first array with nan; all processes get the same answer.

  Infinity is right there: Optax's line searches and `reduce_on_plateau` begin with it.
  """
  # `np.min` propagates nan, and is faster than `np.isnan` of every number.
  return _find(opt_state, lambda array: np.isnan(np.min(array, initial=0)), _has_nan)


def _find(
  tree: Any, in_numpy: Callable[[np.ndarray], Any], compiled: Callable[[jax.Array], jax.Array]
) -> str | None:
  """The name of the first array for which a check holds: `in_numpy` on a CPU, else `compiled`."""
  for path, array in jax.tree.leaves_with_path(tree):
    if not jnp.issubdtype(array.dtype, jnp.inexact):
      continue
    # NumPy is slow with bfloat16, and would copy from an accelerator.
    suits_numpy = (
      all(device.platform == "cpu" for device in array.devices())
      and (array.is_fully_addressable or array.is_fully_replicated)
      and array.dtype != jnp.bfloat16
    )
    if suits_numpy:
      holds = in_numpy(np.asarray(array))
    else:
      holds = compiled(array)
    if holds:
      return jax.tree_util.keystr(path, simple=True, separator=".")
  return None


_has_non_finite = jax.jit(lambda array: ~jnp.isfinite(array).all())
_has_nan = jax.jit(lambda array: jnp.isnan(array).any())


def apply_model(
  model: nn.Module,
  params: Params,
  batch: Batch,
  key: jax.Array,
  capacity: int | None,
  deterministic: bool,
) -> LanguageModelOutput:
  """The model's output for a batch; user models need not accept capacities and documents."""
  inputs: dict[str, Any] = {}
  if "document_starts" in batch:
    inputs["document_starts"] = batch["document_starts"]
  if capacity is not None:
    inputs["pooling"] = PoolingHints(capacity)
  output: Any = model.apply(
    {"params": params},
    batch["tokens"],
    deterministic=deterministic,
    rngs={"dropout": key},
    **inputs,
  )
  return output


def output_layer(model: nn.Module, params: Params) -> tuple[jax.Array, jax.Array | None] | None:
  """The kernel and bias of the logits; None for models other than `LanguageModel`."""
  return model.output_layer(params) if type(model) is LanguageModel else None
