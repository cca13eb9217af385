"""The updates of a model, and its evaluation. B batch, T position, V vocabulary."""

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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dpjax import ops
from dpjax.config.schema import Train
from dpjax.models.language_model import LanguageModel
from dpjax.training import losses, optimizers, sharding

_TOKENS_ONLY = losses.Objective()
Batch = Mapping[str, jax.Array]
Params = dict[str, Any]
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
  params: Any
  opt_state: optax.OptState
  key: jax.Array
  average: Any = None

  @property
  def scored(self) -> Any:
    """The parameters to score and return: the average if there is one."""
    return self.params if self.average is None else self.average


def any_capacity(batch: Mapping[str, np.ndarray]) -> int | None:
  """The capacity of a batch of which nothing is known."""
  return None


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """Makes the updates of a model.

    trainer = Trainer(model, optax.adam(1e-3))
    state, metrics = trainer.step(trainer.init(), batch)

  Attributes:
    model: takes [B, T] tokens, `deterministic` and the random stream "dropout".
    optimizer: any `optax` rule that needs only gradients, parameters and the loss as `value`.
    settings: of `config.train`, those that tell how an update is made.
    objective: the loss to minimise.
    seed: the seed of parameters and dropout.
    learning_rate: maps an update to the optimizer's learning rate, for the report.
    capacity: maps a batch to the `capacity` of `dpjax.models.hourglass.Hourglass`, or to None if
      the data do not determine it.
    initial: maps drawn parameters to those to start from.
  """

  model: nn.Module
  optimizer: optax.GradientTransformation
  settings: Train = dataclasses.field(default_factory=Train)
  objective: losses.Objective = _TOKENS_ONLY
  seed: int = 0
  learning_rate: optax.Schedule | None = None
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = any_capacity
  initial: Callable[[Params], Params] | None = None

  def init(self) -> TrainState:
    """The drawn state before the first update; it does not depend on the number of devices."""
    init_key, dropout_key = jax.random.split(jax.random.key(self.seed))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = self.model.init(init_key, tokens, deterministic=True)["params"]
    average = jax.tree.map(jnp.copy, params) if self.settings.ema_decay else None
    opt_state = self._update_rule().init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, dropout_key, average)

  def abstract_state(self, mesh: Mesh) -> TrainState:
    """The shapes, dtypes and shardings (`sharding.state_sharding`) of a state."""
    return _placed(jax.eval_shape(self.init), mesh, self.settings.param_sharding)

  def init_on_devices(self, abstract: TrainState) -> TrainState:
    """`init` on the devices of an `abstract_state`, with the `initial` parameters."""
    state = jax.jit(self.init, out_shardings=_shardings(abstract))()
    if self.initial is None:
      return state
    params = jax.device_put(self.initial(state.params), _shardings(abstract.params))
    average = None if abstract.average is None else jax.tree.map(jnp.copy, params)
    return state.replace(params=params, average=average)

  def jit_step(self, abstract: TrainState) -> Callable[..., tuple[TrainState, Sums]]:
    """`step`, compiled for the devices of an `abstract_state`: (state, batch, capacity=None).

    The input state is donated. Each capacity is compiled separately.
    """
    shardings = _shardings(abstract)
    assert isinstance(shardings.step, NamedSharding)
    mesh = shardings.step.mesh
    return jax.jit(
      _on_mesh(self.step, mesh),
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
      capacity: of this batch.

    Returns:
      The new state, and "loss" (nats per token), "grad_norm" (before clipping), "learning_rate"
      if known, and the objective's sums.
    """
    with ops.product_dtype(self.settings.matmul_dtype):
      grads, sums = self._summed_gradient(state, batch, capacity)
    count = sums["count"]
    grads = jax.tree.map(lambda g: g / count, grads)
    value = (sums["nats"] + sums.get("boundary_nats", 0.0)) / count
    updates, opt_state = self._update_rule().update(
      grads, state.opt_state, state.params, value=value
    )
    metrics = {"loss": sums["nats"] / count, "grad_norm": optax.tree.norm(grads), **sums}
    if self.learning_rate is not None:
      metrics["learning_rate"] = jnp.asarray(self.learning_rate(state.step), jnp.float32)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
      average = add_to_average(average, params, state.step, self.settings.ema_decay)
    return TrainState(state.step + 1, params, opt_state, state.key, average), metrics

  def _update_rule(self) -> optax.GradientTransformationExtraArgs:
    return optimizers.for_model(self.optimizer, self.model)

  def _summed_gradient(self, state: TrainState, batch: Batch, capacity: int | None):
    """The gradient of the loss, summed over the targets, and the objective's sums."""

    def loss(params: Params, part: Batch, key: jax.Array, counts: Sums | None = None):
      output = _apply(self.model, params, part, key, capacity, deterministic=False)
      part = {**part, "update": state.step}
      sums = self.objective.sums(output, part, _output_layer(self.model, params), counts)
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

  def _sum_parts(self, loss: Callable, params: Params, parts: Batch, keys: jax.Array):
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


def add_to_average(average: Any, params: Any, step: jax.Array, decay: float) -> Any:
  """Adds the parameters after update `step`, counted from 0, to their average.

    average + (params - average) (1 - decay) / (1 - decay**(step + 1))

  The weight of each earlier update falls by `decay`, and the weights sum to 1: `optax.ema` with
  `debias`, without a final correction. Constant (frozen) parameters stay bit-identical.
  """
  log_decay = jnp.float32(math.log(decay))  # As float32, a decay near 1 would be 1.
  weight = jnp.expm1(log_decay) / jnp.expm1((step + 1).astype(jnp.float32) * log_decay)
  return optax.tree.add_scale(average, weight, optax.tree.sub(params, average))


def jit_eval_step(
  model: nn.Module, mesh: Mesh, objective: losses.Objective = _TOKENS_ONLY
) -> Callable[..., Sums]:
  """Compiles (parameters, batch, index, capacity=None) -> the objective's sums.

  Random draws in evaluation depend only on the batch's index and shape.
  """

  def step(params, batch, index, capacity=None):
    key = jax.random.fold_in(jax.random.key(0), index)
    output = _apply(model, params, batch, key, capacity, deterministic=True)
    return objective.sums(output, batch, _output_layer(model, params), scores_starts=True)

  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(_on_mesh(step, mesh), static_argnames="capacity", out_shardings=replicated)


def abstract_params(model: nn.Module, param_sharding: str = "replicated") -> Params:
  """The shapes, dtypes and shardings of a model's parameters on all devices."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = functools.partial(model.init, deterministic=True)
  shapes = jax.eval_shape(init, jax.random.key(0), tokens)["params"]
  return _placed(shapes, sharding.make_mesh(), param_sharding)


def _placed(shapes: Any, mesh: Mesh, param_sharding: str) -> Any:
  """Shapes with their shardings."""
  shardings = sharding.state_sharding(shapes, mesh, param_sharding)
  return jax.tree.map(
    lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), shapes, shardings
  )


def _apply(
  model: nn.Module,
  params: Params,
  batch: Batch,
  key: jax.Array,
  capacity: int | None,
  deterministic: bool,
) -> Any:
  """The model's output for a batch; user models need not accept capacities and documents."""
  inputs: dict[str, Any] = {}
  if "document_starts" in batch:
    inputs["document_starts"] = batch["document_starts"]
  if capacity is not None:
    inputs["capacity"] = capacity
  return model.apply(
    {"params": params},
    batch["tokens"],
    deterministic=deterministic,
    rngs={"dropout": key},
    **inputs,
  )


def _output_layer(model: nn.Module, params: Any) -> Any:
  """The kernel and bias of the logits; None for models other than `LanguageModel`."""
  return model.output_layer(params) if type(model) is LanguageModel else None


def _on_mesh(function: Callable, mesh: Mesh | AbstractMesh) -> Callable:
  """Wraps a function to be traced under the mesh."""

  @functools.wraps(function)
  def run(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return run


def _shardings(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.sharding, tree)
