"""Learning rates and update rules, for the names in `dpjax.config.registry`."""

import functools
import itertools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import traverse_util
from optax import contrib

from dpjax.config import registry
from dpjax.config.schema import Train
from dpjax.errors import UserError
from dpjax.layers.common import Params
from dpjax.models.build import frozen_path, init_params

_UNDECAYED = ("scale", "gain", "bias", "a_log", "skip", "null_group")  # suffixes of names


def build_schedule(settings: Train, num_steps: int) -> optax.Schedule:
  """The learning rate of each update, counted from 0."""
  return registry.schedules.build(
    settings.schedule, "train.schedule", peak=settings.learning_rate, num_steps=num_steps
  )


def build_optimizer(
  settings: Train, num_steps: int, model: nn.Module | None = None
) -> optax.GradientTransformation:
  """The update rule that settings describe, for `num_steps` updates in total.

  It reads optimizer, learning_rate, schedule, grad_clip_norm and weight_decay_mask. `model` is for
  optimizers that ask for it: `muon`.
  """
  rate = build_schedule(settings, num_steps)
  mask = {"mask": decays} if settings.weight_decay_mask == "matrices" else {}
  optimizer = registry.optimizers.build(
    settings.optimizer, "train.optimizer", learning_rate=rate, model=model, **mask
  )
  return _clip(optimizer, settings.grad_clip_norm)


def decays(params: Params) -> Params:
  """The mask for weight decay of matrices: a tree of bools.

  False for norms and biases (names that end with "scale", "gain" or "bias"), for Mamba-2's decays
  and skip, for the tables of tokens and positions, tied or not, and for the null group. True for
  all others, including convolution taps.
  """

  def is_decayed(path, leaf):
    names = _names(path)
    is_table = "embedding" in (names[0], names[-1])
    return not (is_table or names[-1].endswith(_UNDECAYED))

  return jax.tree.map_with_path(is_decayed, params)


def _names(path) -> list[str]:
  return [str(getattr(key, "key", key)) for key in path]


def make_optimizer(
  name: str,
  rate: optax.ScalarOrSchedule,
  *,
  model: nn.Module | None = None,
  grad_clip_norm: float = 0.0,
  **settings: Any,
) -> optax.GradientTransformation:
  """An update rule by its name in `dpjax.config.registry.optimizers`, with settings such as `b1`.

  Gradients are first clipped to the global norm `grad_clip_norm`, unless it is 0. `rate` may be a
  function of the update's number; `model` is for `muon`. An unknown name or setting raises a
  `UserError`.
  """
  section = registry.optimizers.section(name, **settings)
  optimizer = registry.optimizers.build(section, "optimizer", learning_rate=rate, model=model)
  return _clip(optimizer, grad_clip_norm)


def _clip(
  optimizer: optax.GradientTransformation, grad_clip_norm: float
) -> optax.GradientTransformation:
  if not grad_clip_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(grad_clip_norm), optimizer)


def for_model(
  optimizer: optax.GradientTransformation, model: nn.Module
) -> optax.GradientTransformationExtraArgs:
  """Wraps any Optax optimizer to accept the loss as `value`.

  The parameters at `dpjax.models.build.frozen_path` are excluded from updates, norms and moments.
  """
  path = frozen_path(model)

  def split(tree: Params, is_frozen: bool):
    flat = traverse_util.flatten_dict(tree)
    return {key: x for key, x in flat.items() if (key[: len(path)] == path) == is_frozen}

  def trained(tree):
    return traverse_util.unflatten_dict(split(tree, False)) if tree and path else tree

  def update_trained(updates, state, params=None, **extra):
    inputs = (trained(updates), state, trained(params))
    try:
      outputs, state = optimizer.update(*inputs, **extra)
    except TypeError as error:
      # Types do not show which rules take it: MultiSteps does, sam in a chain does not.
      if "unexpected keyword argument 'value'" not in str(error):
        raise
      outputs, state = optimizer.update(*inputs)
    if path:
      zeros = jax.tree.map(jnp.zeros_like, split(updates, True))
      outputs = traverse_util.unflatten_dict(traverse_util.flatten_dict(outputs) | zeros)
    return outputs, state

  return optax.GradientTransformationExtraArgs(
    lambda params: optimizer.init(trained(params)), update_trained
  )


def scale_by_stage(
  optimizer: optax.GradientTransformation, multipliers: Sequence[float]
) -> optax.GradientTransformationExtraArgs:
  """Multiplies the updates of an optimizer by one number for each stage of a model.

    scale_by_stage(optax.adamw(1e-3), (3.0, 1.7, 0.9))

  Where updates are proportional to the learning rate, these scale that rate. The first number is
  for the embedding, the logits and all else outside of a middle; the second for the middle and the
  null group, norm and projections around it; the third for the middle's middle. Boundaries belong
  to the stage whose vectors they read. The state is that of `optimizer`.

  Raises:
    UserError: a multiplier is negative or not finite, or, at the first update, there are more or
      fewer than stages.

  Source: Hwang et al. 2025, arXiv:2507.07955; goombalab/hnet@3673fe1.
  """
  if not all(0 <= x < math.inf for x in multipliers):
    raise UserError(f"multipliers: expected finite numbers of at least 0, got {multipliers}")

  def update_scaled(updates, state, params=None, **extra):
    num_stages = sum(name.startswith("stages_") for name in updates)
    stages = jax.tree.map_with_path(lambda path, _: _stage(_names(path), num_stages), updates)
    if (count := 1 + max(jax.tree.leaves(stages), default=0)) != len(multipliers):
      raise UserError(f"multipliers: expected {count}, one for each stage, got {multipliers}")
    updates, state = optimizer.update(updates, state, params, **extra)
    return jax.tree.map(lambda x, stage: x * multipliers[stage], updates, stages), state

  return optax.GradientTransformationExtraArgs(optimizer.init, update_scaled)


def _stage(names: Sequence[str], num_stages: int) -> int:
  """The stage of a parameter, 0 for the outermost of `num_stages`, around the innermost layers."""
  if names[0] in ("layers", "shared_positions"):
    return num_stages
  if not names[0].startswith("stages_"):
    return 0
  stage = int(names[0].removeprefix("stages_"))
  is_within = names[1] in ("null_group", "inner_norm", "widen", "narrow", "padding")
  return stage + 1 if is_within else stage


def check(
  optimizer: optax.GradientTransformationExtraArgs, params: Params, key: str = "optimizer"
) -> optax.OptState:
  """Checks by shapes an update rule for a model's parameters; returns the shapes of its state.

  Raises:
    UserError: it needs more than gradients, parameters and the value of the loss (such as the
      loss as a function); the structure of its state changes; or a checkpoint cannot store it.
  """

  def step(params, state):
    updates, state = optimizer.update(params, state, params, value=jnp.float32(0))
    return optax.apply_updates(params, updates), state

  try:
    state = jax.eval_shape(optimizer.init, params)
    after = jax.eval_shape(step, params, state)
  except Exception as error:  # any type: the update rule may be user code
    reason = str(error).partition("\n")[0]
    raise UserError(
      f"{key}: expected one that needs only the gradients, the parameters and the value of the "
      f"loss, got {type(error).__name__}: {reason}"
    ) from error
  old, new = (describe_arrays(tree, key) for tree in ((params, state), after))
  if wrong := [name for name in sorted(old | new) if old.get(name) != new.get(name)]:
    raise UserError(
      f"{key}: expected an update to keep the form of the state, got {new.get(wrong[0])} for "
      f"{old.get(wrong[0])} in {wrong[0]}"
    )
  return state


def describe_arrays(tree: Any, key: str = "") -> dict[str, str]:
  """The dtype and shape of each array by checkpoint name; `UserError` if it cannot be saved."""
  import tensorstore

  arrays = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name in arrays:
      raise UserError(f"{key}: expected one array for each name, got two of {name}")
    if not hasattr(tensorstore, str(leaf.dtype)):
      raise UserError(f"{key}: expected a dtype that checkpoints have, got {name} of {leaf.dtype}")
    arrays[name] = f"{np.dtype(leaf.dtype)} {list(leaf.shape)}"
  return arrays


def constant(peak: float, *, warmup_steps: int = 0) -> optax.Schedule:
  """The learning rate of update k, counted from 0: peak k / warmup_steps, then peak.

  Args:
    peak: the highest rate.
    warmup_steps: the number of updates until the peak. A negative one raises a `ValueError`.
  """
  return _warm_up(optax.constant_schedule(peak), peak, warmup_steps)


def cosine(
  peak: float, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
  """The warm-up of `constant`, then half a cosine down to the lowest rate.

    peak (m + (1 - m) (1 + cos(pi x)) / 2),  m = min_ratio,
    x = (k - warmup_steps) / (num_steps - warmup_steps)

  and peak m from num_steps on.

  Args:
    peak: the highest rate.
    num_steps: the total number of updates.
    warmup_steps: the number of updates until the peak.
    min_ratio: the lowest rate divided by the peak.

  Raises:
    ValueError: the warm-up leaves no steps for the decay, or a ratio is outside of [0, 1].
  """
  _check_decay(num_steps, warmup_steps, min_ratio)
  decay = optax.cosine_decay_schedule(peak, num_steps - warmup_steps, min_ratio)
  return _warm_up(decay, peak, warmup_steps)


def linear(
  peak: float, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
  """The warm-up of `constant`, then a straight line down to the lowest rate.

    peak (1 - (1 - min_ratio) x),  x = (k - warmup_steps) / (num_steps - warmup_steps)

  Args:
    peak: see `cosine`, also for the errors.
    num_steps: see `cosine`.
    warmup_steps: see `cosine`.
    min_ratio: see `cosine`.
  """
  _check_decay(num_steps, warmup_steps, min_ratio)
  decay = optax.linear_schedule(peak, peak * min_ratio, num_steps - warmup_steps)
  return _warm_up(decay, peak, warmup_steps)


def warmup_stable_decay(
  peak: float,
  num_steps: int,
  *,
  warmup_steps: int = 0,
  decay_fraction: float = 0.2,
  min_ratio: float = 0.0,
) -> optax.Schedule:
  """The warm-up and peak of `constant`; the last updates decrease as in `linear`.

  The decrease takes max(1, round(decay_fraction num_steps)) updates.

  Args:
    peak: see `cosine`.
    num_steps: see `cosine`.
    warmup_steps: see `cosine`.
    decay_fraction: the share of updates in the final decrease.
    min_ratio: see `cosine`.

  Raises:
    ValueError: see `cosine`; the fraction is outside of (0, 1]; or the warm-up overlaps the end.

  Source: Hu et al. 2024, arXiv:2404.06395, Sec. 4; the line: Haegele et al. 2024, arXiv:2405.18392.
  """
  if not 0 < decay_fraction <= 1:
    raise ValueError(f"decay_fraction: expected a number in (0, 1], got {decay_fraction}")
  decay_steps = max(1, round(decay_fraction * num_steps))
  before = num_steps - decay_steps
  if warmup_steps > before:
    raise ValueError(
      f"warmup_steps: expected at most the {before} steps before the decay, got {warmup_steps}"
    )
  _check_decay(num_steps, warmup_steps, min_ratio)
  # `_warm_up` counts from its end.
  decay = optax.linear_schedule(peak, peak * min_ratio, decay_steps, before - warmup_steps)
  return _warm_up(decay, peak, warmup_steps)


def _check_decay(num_steps: int, warmup_steps: int, min_ratio: float) -> None:
  if warmup_steps >= num_steps:
    raise ValueError(
      f"warmup_steps: expected fewer than the {num_steps} steps of the run, got {warmup_steps}"
    )
  if not 0 <= min_ratio <= 1:
    raise ValueError(f"min_ratio: expected a number in [0, 1], got {min_ratio}")


def _warm_up(after: optax.Schedule, peak: float, warmup_steps: int) -> optax.Schedule:
  if warmup_steps < 0:
    raise ValueError(f"warmup_steps: expected at least 0, got {warmup_steps}")
  if not warmup_steps:
    return after
  warmup = optax.linear_schedule(0.0, peak, warmup_steps)
  return optax.join_schedules([warmup, after], [warmup_steps])


def muon(
  learning_rate: optax.ScalarOrSchedule,
  model: nn.Module | None,
  *,
  ns_steps: int = 5,
  beta: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  nesterov: bool = True,
  adaptive: bool = False,
  adam_b1: float = 0.9,
  adam_b2: float = 0.999,
  adam_weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """`optax.contrib.muon` for the kernels within a model, Adam for everything else.

  These are the kernels of linear layers, see `kernel_axes`; those of a loop over layers,
  [layers, in, out], are one matrix for each layer. Adam updates the embedding, the output layer,
  kernels of one row or column, biases, gains and convolution taps.

  Args:
    learning_rate: the learning rate of both optimizers.
    model: the model, whose layers know the axes of their kernels.
    ns_steps: Newton-Schulz iterations.
    beta: the decay of the momentum.
    eps: the epsilon of norms and of Adam.
    weight_decay: the weight decay of the matrices.
    nesterov: whether to use Nesterov momentum.
    adaptive: whether to scale by the dual norm of the gradient.
    adam_b1: Adam's first decay.
    adam_b2: Adam's second decay.
    adam_weight_decay: Adam's weight decay.

  Raises:
    ValueError: there is no model.

  Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
  """
  settings = locals()
  model = settings.pop("model")
  if model is None:
    raise ValueError("model: expected the model whose kernels muon updates, got None")
  find_axes = functools.cache(lambda: kernel_axes(model))

  def of(params: Params) -> optax.GradientTransformation:
    axes = find_axes()
    # In parts of its update, `contrib.muon` would call a function with only some of the arrays.
    numbers = jax.tree.map_with_path(lambda path, _: axes.get(tuple(_names(path))), params)
    return contrib.muon(**settings, muon_weight_dimension_numbers=numbers)

  return optax.GradientTransformation(
    lambda params: of(params).init(params),
    lambda updates, state, params=None: of(updates).update(updates, state, params),
  )


def kernel_axes(model: nn.Module) -> dict[tuple[str, ...], contrib.MuonDimensionNumbers]:
  """The input and output axes of the kernels of linear layers within a model, by their paths.

    ("layers", "blocks_0", "mixer", "out", "kernel"), [layers, in, out]  ->  (1,), (2,)

  The axes are those that the layer itself sees: Flax's `Dense`, `DenseGeneral` or another module
  with a kernel [in, out]. The axes before them, which a scan or vmap of Flax adds to its
  parameters, number matrices. Left out are the layers `embedding` and `logits` of the model, and
  kernels of one row or column.
  """
  seen: dict[tuple[str, ...], tuple[tuple[int, ...], int]] = {}

  def look(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
    result = call(*args, **kwargs)
    module = context.module
    if module.scope is not None and module.is_initializing():
      kernel = module.get_variable("params", "kernel")
      if isinstance(module, nn.DenseGeneral):
        features = module.features
        num_outputs = 1 if isinstance(features, int) else len(features)
        seen[(*module.path, "kernel")] = kernel.shape, num_outputs
      elif getattr(kernel, "ndim", 0) == 2:
        seen[(*module.path, "kernel")] = kernel.shape, 1
    return result

  with nn.intercept_methods(look):
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
  arrays = {tuple(_names(path)): x for path, x in jax.tree.leaves_with_path(params)}
  axes = {}
  for full_path, (shape, num_outputs) in seen.items():
    path = _find_path(full_path, arrays)
    if path is None or path[0] in ("embedding", "logits"):
      continue
    x = arrays[path]
    first = x.ndim - len(shape)
    last = x.ndim - num_outputs
    sizes = math.prod(x.shape[first:last]), math.prod(x.shape[last:])
    if x.shape[first:] == shape and 1 not in sizes:
      axes[path] = contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(first, last)), output_axis=tuple(range(last, x.ndim))
      )
  return axes


def _find_path(path: tuple[str, ...], arrays: Container[tuple[str, ...]]) -> tuple[str, ...] | None:
  """The path of an array, which `nn.share_scope` shortens; None if there is no such array."""
  for size in range(len(path), 0, -1):
    for shorter in itertools.combinations(path, size):
      if shorter in arrays:
        return shorter
  return None
