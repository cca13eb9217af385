"""Rules between the settings of a run, in one place."""

import inspect
import math

from dpjax.config import registry, schema, sections
from dpjax.config.setting import MAX_FLOAT, ConfigDict, Settings
from dpjax.config.supplied import boundaries_fields, mixer_fields
from dpjax.errors import UserError

_BYTES_PER_TOKEN = 4.6  # for GPT-2


def check(config: Settings) -> None:
  """Raises a `UserError` for the first unknown, out-of-range or contradictory setting."""
  config = sections.fill(config, is_complete=True)
  model = config.model
  check_model(model)
  _check_training(config.train)
  stage_multipliers(config)
  max_length = model.max_length
  # Level k reads 2**k tokens back: with 2**k >= M, there is none within M tokens.
  farthest = max_length if sections.is_pooled(model) else max_length - 1
  max_levels = max(1, farthest.bit_length())
  for key, section in sections.mixers_in(model).items():
    num_levels = section.get("num_levels")
    expected = f"at most {max_levels}, which reach over the window"
    is_valid = not _is_ours(section) or (num_levels or 1) <= max_levels
    _expect(is_valid, f"{key}.num_levels", expected, num_levels)
  expected = f"at most model.max_length = {max_length}"
  for key in ("train.window", "eval.window"):
    window = sections.get(config, key)
    _expect(window <= max_length, key, expected, window)
  stride = config.eval.stride
  window = config.eval.window or max_length
  _expect(stride <= window, "eval.stride", f"at most the window {window}", stride)
  _check_data(config.data)
  is_valid = all(isinstance(name, str) and name for name in config.plugins)
  _expect(is_valid, "plugins", "names of modules", config.plugins)
  if config.train.sampling != "random_windows":
    expected = "'' unless train.sampling = random_windows"
    mixture = config.data.mixture
    _expect(not mixture, "data.mixture", expected, mixture)
  if config.data.isolate_documents:
    max_tokens = config.eval.max_tokens
    _expect(not max_tokens, "eval.max_tokens", "0 with data.isolate_documents", max_tokens)


def check_model(model: Settings) -> None:
  """Checks the settings of a model, like `check`."""
  model = sections.fill(model, schema.Model, "model.", is_complete=True)
  for name, value in (("residual_dtype", "model"), ("stack_norms", False)):
    is_valid = model.norm_position == "pre" or model[name] == value
    _expect(is_valid, f"model.{name}", f"{value} with model.norm_position = post", model[name])
  expected = "matrices without a model.middle, which alone has another width"
  is_valid = model.middle is not None or model.middle_resize == "matrices"
  _expect(is_valid, "model.middle_resize", expected, model.middle_resize)
  for key, section in sections.stages_in(model).items():
    _check_stage(key, section)
    if section["middle"] and model.middle_resize == "padding":
      width = section["width"]
      inner = section["middle"]["width"]
      expected = f"0 or at least the {width} around it with model.middle_resize = padding"
      _expect(inner == 0 or inner >= width, f"{key}.middle.width", expected, inner)
  check_ids(model)


def check_ids(model: Settings) -> None:
  """Checks that the vocabulary has the token ids that boundaries use, like `check`."""
  size = model["vocab_size"] or math.inf
  for name in ("space_ids", "end_ids"):
    ids = model["boundaries"].get(name, ())
    expected = f"token ids below model.vocab_size = {size}"
    _expect(max(ids, default=0) < size, f"model.boundaries.{name}", expected, ids)


def _check_stage(key: str, stage: Settings) -> None:
  """Checks one stage of pooling, or a model without pooling."""
  is_pooled = sections.is_pooled(stage)
  boundaries = _build_boundaries(key, stage) if is_pooled else None
  if boundaries is not None and key != "model":
    name = stage["boundaries"]["name"]
    component = registry.boundaries.component
    suited = [x for x in registry.boundaries.names() if x == "none" or component(x).suits_segments]
    expected = f"one of {', '.join(suited)} for segments, none of which draws in evaluation"
    is_valid = name in suited and not boundaries.samples_in_eval
    _expect(is_valid, f"{key}.boundaries", expected, name)
  mixers = {f"{key}.{x}.mixer": stage[x]["mixer"] for x in ("first", "last") if is_pooled}
  if stage["middle"] is None or None in mixers.values():
    mixers["model.mixer"] = stage["mixer"]
  for name, mixer in mixers.items():
    for path, section in sections.in_turn(name, mixer).items():
      _check_mixer(path, section, stage)
  if is_pooled:
    return
  unpooled = f"with {key}.boundaries = none"
  default = schema.OuterLayers.num_layers
  for x in ("first", "last"):
    num_layers = stage[x]["num_layers"]
    _expect(num_layers == default, f"{key}.{x}.num_layers", f"{default} {unpooled}", num_layers)
  for x in ("first", "last"):
    mixer = sections.mixer_names(stage[x]["mixer"])
    _expect(not mixer, f"{key}.{x}.mixer", f"None {unpooled}", mixer)
  _expect(stage["middle"] is None, f"{key}.middle", f"None {unpooled}", "a section")


def _build_boundaries(key: str, stage: Settings):
  fields = boundaries_fields(stage)._asdict()
  return registry.boundaries.build(stage["boundaries"], f"{key}.boundaries", **fields)


def stage_multipliers(config: Settings) -> tuple[float, ...]:
  """The learning rate factor of each stage, outermost first; () for no factors.

  With "auto" they are, for stages s = 0 .. S of width D^s, N^s vectors per segment and N^S = 1,

    sqrt(N_GPT (prod over i >= s of N^i) / (prod over i of N^i) (D^S / D^s))

  where N_GPT = 4.6 is the number of bytes in a token of GPT-2. An inner stage has fewer vectors in
  a batch, and so a lower rate. The rule is for tokens that are bytes or characters.

  Raises:
    UserError: there are more or fewer factors than stages, or, with "auto", the settings of some
      boundaries do not determine their rate (`dpjax.layers.Boundaries.segment_length`).

  Source: Hwang et al. 2025, arXiv:2507.07955.
  """
  name = "train.stage_multipliers"
  value = config["train"]["stage_multipliers"]
  stages = sections.stages_in(config["model"])
  pooled = {key: stage for key, stage in stages.items() if sections.is_pooled(stage)}
  if not value:
    return ()
  if value != "auto":
    is_valid = len(value) == len(pooled) + 1
    is_valid = is_valid and all(type(x) in (int, float) and 0 <= x <= MAX_FLOAT for x in value)
    expected = f"() or auto or {len(pooled) + 1} numbers of at least 0, one for each stage"
    _expect(is_valid, name, expected, value)
    return tuple(map(float, value))
  _expect(bool(pooled), name, "() without token pooling, which has one stage", value)
  widths = [stage["width"] for stage in stages.values()]
  if len(widths) == len(pooled):  # The innermost has no section of its own.
    widths.append(widths[-1])
  lengths = [1.0]  # bytes per vector in each stage
  for key, stage in pooled.items():
    length = _build_boundaries(key, stage).segment_length
    if not length:
      without = f"{key}.boundaries = {stage['boundaries']['name']}, which have no rate"
      raise UserError(f"{name}: expected numbers with {without}, got {value}")
    lengths.append(lengths[-1] * length)
  pairs = zip(lengths, widths, strict=True)
  return tuple(math.sqrt(_BYTES_PER_TOKEN / n * widths[-1] / width) for n, width in pairs)


def _is_ours(mixer: Settings) -> bool:
  """Whether a mixer is dpjax's; the settings of other mixers may mean anything."""
  return registry.mixers.component(mixer["name"]).__module__.startswith("dpjax.")


def _check_mixer(key: str, mixer: Settings, stage: Settings) -> None:
  """Builds a mixer, which checks its settings, and asks it whether it suits the stage's width."""
  built = registry.mixers.build(mixer, key, **mixer_fields(stage)._asdict())
  if not hasattr(built, "check_width"):  # No mixer: the model refuses it.
    return
  try:
    built.check_width(stage["width"])
  except ValueError as error:
    raise UserError(f"{key}.{error}") from error


def _check_training(train: ConfigDict) -> None:
  steps_in(train.num_steps, train.num_epochs, "num", steps_per_epoch=1)
  steps_in(train.eval_every_steps, train.eval_every_epochs, "eval_every", steps_per_epoch=1)
  num_parts = train.grad_accum_steps
  expected = f"a divisor of train.batch_size = {train.batch_size}"
  _expect(train.batch_size % num_parts == 0, "train.grad_accum_steps", expected, num_parts)
  registry.optimizers.build(train.optimizer, "train.optimizer", learning_rate=1.0)
  num_steps = train.num_steps or 2**31
  registry.schedules.build(train.schedule, "train.schedule", peak=1.0, num_steps=num_steps)
  name = train.optimizer.name
  fields = inspect.signature(registry.optimizers.component(name)).parameters
  expected = f"all with train.optimizer = {name}, which takes no mask"
  is_valid = train.weight_decay_mask == "all" or "mask" in fields
  _expect(is_valid, "train.weight_decay_mask", expected, train.weight_decay_mask)
  if not registry.optimizers.is_builtin(name):
    return  # Other optimizers may allow other ranges.
  for key, value in train.optimizer.items():
    if key in ("b1", "b2", "beta", "momentum", "adam_b1", "adam_b2") and value is not None:
      _expect(0 <= value < 1, f"train.optimizer.{key}", "a number in [0, 1)", value)
    elif key in ("eps", "eps_root", "weight_decay") and value is not None:
      _expect(value >= 0, f"train.optimizer.{key}", "at least 0", value)


def _check_data(data: ConfigDict) -> None:
  fractions = data.split_fractions
  is_valid = len(fractions) == 3 and all(type(x) in (int, float) and 0 < x < 1 for x in fractions)
  is_valid = is_valid and abs(sum(fractions) - 1) < 1e-6
  _expect(is_valid, "data.split_fractions", "three positive numbers with the sum 1", fractions)


def idle_mixers(model: Settings) -> dict[str, str]:
  """The mixers that no layer uses, by stack, where there are more mixers than layers."""
  mixers = {"model": model["mixer"]}
  sizes = {"model": model["num_layers"]}
  for key, stage in sections.stages_in(model).items():
    if sections.is_pooled(stage):
      for x in ("first", "last"):
        mixers[f"{key}.{x}"] = stage[x]["mixer"] or stage["mixer"]
        sizes[f"{key}.{x}"] = stage[x]["num_layers"]
  idle = {key: sections.mixer_names(mixers[key]).split(",")[sizes[key] :] for key in mixers}
  return {key: ", ".join(names) for key, names in idle.items() if names}


def check_seed(seed: int) -> None:
  """Checks that JAX can make a random key from a seed, like `check`."""
  schema.settings_of(schema.Config)["seed"].check("seed", seed)


def check_sampling(sample: Settings, prefix: str = "") -> None:
  """Checks settings of `config.sample`, like `check`; messages begin with `prefix`."""
  settings = schema.settings_of(schema.Sample)
  for name, value in sample.items():
    settings[name].check(f"{prefix}{name}", value)


def steps_in(steps: int, epochs: float, name: str, *, steps_per_epoch: int) -> int:
  """The duration in steps of the settings `name_steps` and `name_epochs`, one of which is 0.

    0 steps, 1.5 epochs, 100 steps an epoch  ->  150

  Raises a `UserError` unless exactly one is given and the steps fit in 32 bits.
  """
  is_one = min(steps, epochs) >= 0 and (steps > 0) != (epochs > 0)
  if not (is_one and math.isfinite(epochs)):
    raise UserError(
      f"train.{name}_steps, train.{name}_epochs: expected one of them above 0 and the "
      f"other 0, got {steps} steps and {epochs} epochs"
    )
  count = steps or epochs * steps_per_epoch
  unit = "steps" if steps else "epochs"
  _expect(count < 2**31, f"train.{name}_{unit}", "fewer than 2**31 steps", count)
  return max(1, round(count))


def _expect(is_true: bool, key: str, expected: str, got: object) -> None:
  if not is_true:
    raise UserError(f"{key}: expected {expected}, got {got}")
