"""Learning rates and update rules by name."""

import optax

from dpjax.errors import UserError


def learning_rate(
  schedule: str, peak: float, *, warmup_steps: int, num_steps: int
) -> optax.Schedule:
  """The learning rate of each update, counted from 0.

    k < warmup_steps:  peak * k / warmup_steps
    "constant":        peak, ever after
    "cosine":          peak * (1 + cos(pi x)) / 2, and 0 from num_steps on, with
                       x = (k - warmup_steps) / (num_steps - warmup_steps)

  Args:
    schedule: "constant" or "cosine".
    peak: the highest rate.
    warmup_steps: updates until it is reached.
    num_steps: updates in all.

  Returns:
    A function of the update's number.

  Raises:
    ValueError: the warm-up leaves no step to a cosine, or the schedule is unknown.
  """
  if schedule not in ("constant", "cosine"):
    raise UserError(f"train.schedule: expected constant or cosine, got {schedule}")
  if schedule == "cosine" and warmup_steps >= num_steps:
    raise UserError(
      f"train.warmup_steps: expected fewer than the {num_steps} steps of the run, got "
      f"{warmup_steps}"
    )
  after = (
    optax.constant_schedule(peak)
    if schedule == "constant"
    else optax.cosine_decay_schedule(peak, num_steps - warmup_steps)
  )
  if not warmup_steps:
    return after
  warmup = optax.linear_schedule(0.0, peak, warmup_steps)
  return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
  name: str,
  rate: optax.Schedule | float,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float = 0.0,
) -> optax.GradientTransformation:
  """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), after clipping.

  Args:
    name: "adam" or "adamw".
    rate: learning rate, or a function of the update's number.
    b1: decay of the mean of the gradients.
    b2: decay of the mean of their squares.
    eps: added to the root of the latter.
    weight_decay: of "adamw", times the learning rate, as PyTorch has it.
    clip_norm: longest gradient, all parameters taken as one vector; 0: no limit.

  Returns:
    The transformation of gradients into updates.

  Raises:
    ValueError: the name is unknown.
  """
  if name == "adam":
    update = optax.adam(rate, b1, b2, eps)
  elif name == "adamw":
    update = optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay)
  else:
    raise UserError(f"train.optimizer: expected adam or adamw, got {name}")
  return optax.chain(optax.clip_by_global_norm(clip_norm), update) if clip_norm else update
