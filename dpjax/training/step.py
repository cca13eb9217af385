"""One update and one evaluation, pure and jitted. B batch, T position, V vocabulary."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import ops
from dpjax.models.language_model import LanguageModel
from dpjax.training import losses, sharding
from dpjax.training import optimizer as optimizers

Batch = dict[str, jax.Array]
_TOKENS_ONLY = losses.Objective()


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
  params: Any
  opt_state: optax.OptState
  key: jax.Array
  average: Any = None

  @property
  def scored(self) -> Any:
    """The parameters to score and return: the average if there is one."""
    return self.params if self.average is None else self.average


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  seed: int,
  has_average: bool = False,
) -> TrainState:
  """Creates the state before the first update; it does not depend on the number of devices.

  `seed` is for parameters and dropout; `has_average` adds an average of the parameters.
  """
  init_key, dropout_key = jax.random.split(jax.random.key(seed))
  params = model.init(init_key, jnp.zeros((1, 1), jnp.int32), deterministic=True)["params"]
  average = jax.tree.map(jnp.copy, params) if has_average else None
  opt_state = optimizers.for_model(optimizer, model).init(params)
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state, dropout_key, average)


def train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  grad_accum_steps: int,
  state: TrainState,
  batch: Batch,
  *,
  objective: losses.Objective = _TOKENS_ONLY,
  capacity: int | None = None,
  ema_decay: float = 0.0,
  learning_rate: optax.Schedule | None = None,
  matmul_dtype: str = "float32",
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Performs one update on the mean loss of the batch's tokens.

  The batch is processed in A = `grad_accum_steps` sequential parts, and the summed gradients are
  divided by the summed weights. If the loss of the boundaries is not a sum over rows
  (`losses.Objective.counts`), a pass without gradients first counts the boundaries of all parts.
  Except for rounding, dropout and drawn boundaries, the result equals that of A = 1.

  Args:
    model: takes [B, T] tokens, `deterministic` and the random stream "dropout".
    optimizer: from `dpjax.training.optimizer`.
    grad_accum_steps: A, a divisor of B.
    state: the state before the update.
    batch: "tokens", "targets", "weights", each [B, T], and any inputs of the objective; for
      rows of several documents also "document_starts", [B, T], 1 at the first token of each.
    objective: the loss to minimise.
    capacity: see `dpjax.models.hourglass.Hourglass`; None if the data do not determine it.
    ema_decay: the decay of the state's average, if it has one; see `add_to_average`.
    learning_rate: maps an update to the optimizer's learning rate, for the report.
    matmul_dtype: the dtype of the factors of float32 products, "float32" or "bfloat16"; see
      `dpjax.ops.product_dtype`.

  Returns:
    The new state, and "loss" (nats per token), "grad_norm" (before clipping), "learning_rate"
    if given, and the objective's sums.
  """
  with ops.product_dtype(matmul_dtype):
    grads, sums = _summed_gradient(model, grad_accum_steps, state, batch, objective, capacity)
  count = sums["count"]
  grads = jax.tree.map(lambda g: g / count, grads)
  value = (sums["nats"] + sums.get("boundary_nats", 0.0)) / count
  update = optimizers.for_model(optimizer, model)
  updates, opt_state = update.update(grads, state.opt_state, state.params, value=value)
  metrics = {"loss": sums["nats"] / count, "grad_norm": optax.tree.norm(grads), **sums}
  if learning_rate is not None:
    metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
  params = optax.apply_updates(state.params, updates)
  average = state.average
  if average is not None:
    average = add_to_average(average, params, state.step, ema_decay)
  return TrainState(state.step + 1, params, opt_state, state.key, average), metrics


def _summed_gradient(model, grad_accum_steps: int, state, batch: Batch, objective, capacity):
  """The gradient of the loss, summed over the targets, and the objective's sums."""
  key = jax.random.fold_in(state.key, state.step)

  def total(params, part: Batch, part_key, counts=None):
    output = _apply(model, params, part, part_key, capacity, deterministic=False)
    part = {**part, "update": state.step}
    sums = objective.sums(output, part, _output_layer(model, params), counts)
    return sums["nats"] + sums.get("boundary_nats", 0.0), sums

  gradient = jax.grad(total, has_aux=True)
  if grad_accum_steps == 1:
    return gradient(state.params, batch, key)
  # Row b goes to part b % A, so that each part lies on all devices.
  parts = jax.tree.map(
    lambda x: jnp.moveaxis(x.reshape(-1, grad_accum_steps, *x.shape[1:]), 1, 0), batch
  )
  keys, counts = jax.random.split(key, grad_accum_steps), None
  if objective.counts:

    def count_part(_, part_and_key):
      _, sums = total(state.params, *part_and_key)
      return None, {name: sums[name] for name in objective.counts}

    _, counts_of_parts = jax.lax.scan(count_part, None, (parts, keys))
    counts = jax.tree.map(lambda x: jnp.sum(x, axis=0), counts_of_parts)
  shapes = jax.eval_shape(gradient, state.params, *jax.tree.map(lambda x: x[0], (parts, keys)))
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  def add_part(carry, part_and_key):
    grads, sums = gradient(state.params, *part_and_key, counts)
    return (jax.tree.map(jnp.add, carry[0], grads), losses.add_sums(carry[1], sums)), None

  (grads, sums), _ = jax.lax.scan(add_part, zeros, (parts, keys))
  return grads, sums


def add_to_average(average: Any, params: Any, step: jax.Array, decay: float) -> Any:
  """Adds the parameters after update `step`, counted from 0, to their average.

    average + (params - average) (1 - decay) / (1 - decay**(step + 1))

  The weight of each earlier update falls by `decay`, and the weights sum to 1: `optax.ema` with
  `debias`, without a final correction. Constant (frozen) parameters stay bit-identical.
  """
  log_decay = jnp.float32(math.log(decay))  # As float32, a decay near 1 would be 1.
  weight = jnp.expm1(log_decay) / jnp.expm1((step + 1).astype(jnp.float32) * log_decay)
  return optax.tree.add_scale(average, weight, optax.tree.sub(params, average))


def _apply(
  model: nn.Module, params: Any, batch: Batch, key, capacity: int | None, deterministic: bool
) -> Any:
  """The model's output for a batch; user models need not accept capacities and documents."""
  inputs: dict[str, Any] = {name: batch[name] for name in ("document_starts",) if name in batch}
  if capacity is not None:
    inputs["capacity"] = capacity
  rngs = {"dropout": key}
  return model.apply(
    {"params": params}, batch["tokens"], deterministic=deterministic, rngs=rngs, **inputs
  )


def _output_layer(model: nn.Module, params: Any) -> Any:
  """The kernel and bias of the logits; None for models other than `LanguageModel`."""
  return model.output_layer(params) if type(model) is LanguageModel else None


def jit_train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  state_shardings,
  mesh: Mesh,
  *,
  grad_accum_steps: int = 1,
  **settings: Any,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
  """`train_step`, compiled for a mesh: (state, batch, capacity=None).

  The input state is donated. Each capacity is compiled separately.
  """
  step = functools.partial(train_step, model, optimizer, grad_accum_steps, **settings)
  return jax.jit(
    _on_mesh(step, mesh),
    donate_argnums=0,
    static_argnames="capacity",
    out_shardings=(state_shardings, NamedSharding(mesh, PartitionSpec())),
  )


def jit_eval_step(
  model: nn.Module, mesh: Mesh, objective: losses.Objective = _TOKENS_ONLY
) -> Callable[..., dict[str, jax.Array]]:
  """Compiles (parameters, batch, index, capacity=None) -> the objective's sums.

  Random draws in evaluation depend only on the batch's index and shape.
  """

  def step(params, batch, index, capacity=None):
    key = jax.random.fold_in(jax.random.key(0), index)
    output = _apply(model, params, batch, key, capacity, deterministic=True)
    return objective.sums(output, batch, _output_layer(model, params), scores_starts=True)

  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(_on_mesh(step, mesh), static_argnames="capacity", out_shardings=replicated)


def _on_mesh(function: Callable, mesh: Mesh) -> Callable:
  """Wraps a function to be traced under the mesh."""

  @functools.wraps(function)
  def run(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return run


def abstract_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  seed: int,
  mesh: Mesh,
  param_sharding: str = "replicated",
  has_average: bool = False,
) -> TrainState:
  """The shapes, dtypes and shardings (`sharding.state_sharding`) of a state."""
  shapes = jax.eval_shape(lambda: init_state(model, optimizer, seed, has_average))
  shardings = sharding.state_sharding(shapes, mesh, param_sharding)
  return jax.tree.map(
    lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), shapes, shardings
  )


def jit_init(
  model: nn.Module, optimizer: optax.GradientTransformation, seed: int, abstract: TrainState
) -> TrainState:
  """`init_state`, computed on the devices of `abstract_state`."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  init = functools.partial(init_state, model, optimizer, seed, abstract.average is not None)
  return jax.jit(init, out_shardings=shardings)()
