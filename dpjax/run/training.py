"""Trains the model of a configuration."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from dpjax import config as config_lib
from dpjax.config import sections
from dpjax.data.tokens import Tokens
from dpjax.errors import UserError
from dpjax.generation import generator
from dpjax.layers import mixer
from dpjax.models.build import build_boundaries, check_memory, with_frozen
from dpjax.registry import ConfigDict
from dpjax.run import build, tokens
from dpjax.run import workdir as workdir_lib
from dpjax.run.run import Run, load
from dpjax.text.tokens import Tokenizer
from dpjax.training import loop, sharding
from dpjax.training import optimizer as optimizers


def prepare(config: ConfigDict, workdir: str | Path) -> Tokens:
  """Prepares the tokens of a run, the first step of `train`.

  Args:
    config: from `dpjax.config`.
    workdir: the run's folder, created if missing.

  Returns:
    The tokens.

  Raises:
    ValueError: `setting: expected ..., got ...`.
  """
  config, workdir = sections.expand_paths(config), Path(os.path.expanduser(workdir))
  config_lib.check(config)
  with workdir_lib.hold(workdir):
    data = _prepare(config, workdir)
    workdir_lib.claim(workdir, config)
  return data


def train(
  config: ConfigDict,
  workdir: str | Path,
  *,
  model: nn.Module | Callable[[ConfigDict], nn.Module] | None = None,
  optimizer: optax.GradientTransformation | None = None,
  callbacks: Sequence[loop.Callback] = (),
  should_stop: Callable[[], bool] = lambda: False,
  profile: tuple[int, int] | None = None,
  measure_products: bool = False,
) -> tuple[Run, dict[str, float]]:
  """Trains the model of a configuration, or resumes the run in the folder.

    dpjax.train(config, "runs/mine", model=lambda settings: Mine(settings.vocab_size))
    dpjax.load("runs/mine", model=lambda settings: Mine(settings.vocab_size))

  Args:
    config: from `dpjax.config`.
    workdir: the run's folder, created if missing.
    model: replaces the model of `config.model`: a module, or a function that makes one from
      `config.model` with its `vocab_size`. `apply({"params": params}, tokens,
      deterministic=..., rngs=...)` must return an object with `logits`, [B, T, V]. Pass the
      same model to resume or load the run.
    optimizer: replaces the optimizer of `config.train`, with its schedule and clipping: any of
      Optax that needs the gradients, the parameters and the `value` of the loss alone.
    callbacks: functions of each report; training ends if one returns True.
    should_stop: called after every update; training also stops at signals.
    profile: START and STOP, to trace updates START + 1 to STOP into `workdir`/profile.
    measure_products: whether to measure the speed of matrix products, for about a second, and
      to report training's share of it as `model_flops_utilisation`.

  Returns:
    The run with the best parameters by validation, and their test scores.

  Raises:
    ValueError: `setting: expected ..., got ...`.
    dpjax.training.loop.NonFiniteError: the training diverged.
    dpjax.errors.Interrupted: a signal or `should_stop` stopped training, which was saved.
  """
  config, workdir = sections.expand_paths(config), Path(os.path.expanduser(workdir))
  config_lib.check(config)
  with workdir_lib.hold(workdir):
    extras = dict(
      callbacks=callbacks,
      should_stop=should_stop,
      profile=profile,
      measure_products=measure_products,
    )
    return _train(config, workdir, model, optimizer, extras)


def _train(
  config, workdir: Path, model, optimizer, extras: dict[str, Any]
) -> tuple[Run, dict[str, float]]:
  data = _prepare(config, workdir)
  given, config = config, build.with_vocabulary(config, data.tokenizer)
  frozen = _frozen_run(config, workdir, data.tokenizer)
  reader: Any = frozen.model if frozen else build.saved_frozen(config, workdir)
  settings, built = config.train, build.model(config, model, reader)
  train_batches = build.train_batches(config, data)
  durations = build.durations(settings, train_batches.steps_per_epoch)
  rate = None
  key = "optimizer"
  if optimizer is None:
    key = "train.optimizer"
    rate = optimizers.build_schedule(settings, durations.num_steps)
    optimizer = optimizers.build_optimizer(settings, durations.num_steps)
  trainer = loop.Trainer(
    built,
    optimizer,
    build.objective(config.model),
    settings.accumulate_steps,
    settings.parameters,
    build.capacity(config.model),
    config.seed,
    settings.ema_decay,
    rate,
  )
  run = Run(config, built, {}, data.tokenizer, 0, data, workdir)
  sharding.check_rows(settings.batch_size, settings.accumulate_steps)
  generator.check_prompt(
    config.model, data.tokenizer, config.sample.prompt, "sample.prompt", config.sample
  )
  shapes = _shapes(built, config.data.documents == "isolated")
  check_memory(shapes, jax.device_count() if settings.parameters == "sharded" else 1)
  optimizers.check(optimizer, built, shapes["params"], key)
  workdir_lib.claim(workdir, given, frozen and frozen.config.model)
  if jax.process_index() == 0:
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(
      f"{run.name}, {size:,} parameters; {data.name}, "
      f"{data.counts['train']['tokens']:,} training tokens, vocabulary of "
      f"{config.model.vocab_size:,}; {durations.num_steps:,} steps on "
      f"{jax.device_count()} {jax.devices()[0].platform} device(s)"
    )
    _print_unknown(config, data)
  most = config.eval.max_tokens
  validation: dict[str, int] = dict(zip(("window", "stride"), run._scorer.sizes(), strict=True))
  if most:
    validation["max_tokens"] = most
  loop.fit(
    trainer,
    train_batches,
    lambda params: run._score_split(params, "valid", data, max_tokens=most),
    durations,
    workdir=workdir,
    keep_checkpoints=settings.keep_checkpoints,
    patience=settings.patience,
    initial=_initial(settings.initial_run, shapes["params"], data, frozen, model),
    meta={
      "config": config.to_dict(),
      "validation": validation,
    },
    origin=build.origin(data),
    **extras,
  )
  best = load(workdir, model=model)
  # What validation was compiled for: the same model, with other parameters.
  best.__dict__["_scorer"] = run._scorer
  scores = best.score_split("test", progress=True)
  best.write_scores("test", scores)
  return best, scores


def _print_unknown(config: ConfigDict, data: Tokens) -> None:
  """Says how much of a text a vocabulary that was not learned from it does not know."""
  if not (config.data.tokenizer_file or config.train.initial_run):
    return
  counts = {split: data.tokenizer.count_unknown(ids) for split, ids in data.splits.items()}
  if any(counts.values()):
    shown = ", ".join(f"{count:,} in {split}" for split, count in counts.items())
    print(f"tokens for what the vocabulary does not know: {shown}")


def _shapes(model: Any, has_documents: bool) -> Any:
  """The shapes of the parameters; checks that the model keeps documents apart."""
  ids = jnp.zeros((1, 1), jnp.int32)
  known = {"is_start": ids + 1} if has_documents else {}
  try:
    if has_documents:
      mixer.check_takes_starts(model)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), ids, deterministic=True, **known))
  except UserError as error:
    if not has_documents:
      raise
    raise UserError(f"data.documents: expected joined, got isolated ({error})") from error


def _prepare(config: ConfigDict, workdir: Path) -> Tokens:
  """Checks the settings, then prepares the tokens of a run unless it resumes."""
  goes_on = workdir_lib.check(workdir, config)
  others = {"train.initial_run": config.train.initial_run}
  if build.needs_run(config):
    others["model.boundaries.run"] = config.model.boundaries.run
  for key, folder in others.items():
    if folder and not goes_on and not workdir_lib.is_run(Path(folder)):
      raise UserError(f"{key}: expected the folder of a run, got {folder}")
  own, shared = (workdir / "data").resolve(), Path(config.data.data_dir).resolve()
  if own == shared or own in shared.parents:
    raise UserError(
      f"data.data_dir: expected a folder that is not the run's own {own}, got {shared}"
    )
  # Without a checkpoint, its tokens may be those of other settings.
  is_begun = goes_on and workdir_lib.has_saved(workdir)
  return tokens.prepare_data(config, workdir / "data", anew=not is_begun)


def _initial(
  folder: str, shapes, data: Tokens, frozen: Run | None, model
) -> Callable[[dict], dict] | None:
  """Reads the initial parameters, if they are not drawn at random."""
  if frozen is None and not folder:
    return None

  def read(drawn: dict) -> dict:
    params = drawn
    if folder:
      params = _initial_params(folder, shapes, data, model)
    return params if frozen is None else with_frozen(params, frozen.params)

  return read


def _initial_params(folder: str, shapes, data: Tokens, model) -> dict:
  """The parameters of another run, if they fit this one."""
  other = _load_other(folder, "train.initial_run", data.tokenizer, model)
  expected, found = (
    {
      jax.tree_util.keystr(path): tuple(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    for params in (shapes, other.params)
  )
  wrong = [key for key in sorted(expected | found) if expected.get(key) != found.get(key)]
  if wrong:
    raise UserError(
      f"train.initial_run: expected parameters of this model, {wrong[0]} of the shape "
      f"{expected.get(wrong[0])}, got {found.get(wrong[0])} in {other.workdir}"
    )
  return other.params


def _load_other(folder: str, key: str, tokenizer: Tokenizer, model=None) -> Run:
  """The run that a setting names, which must have the same vocabulary."""
  try:
    other = load(folder, model=model)
  except UserError as error:
    raise UserError(f"{key}: expected a run that can be read, got {folder} ({error})") from error
  if other.tokenizer.to_json() != tokenizer.to_json():
    raise UserError(
      f"{key}: expected a run with the vocabulary of this one, got {folder} "
      f"with another ({other.tokenizer.kind}, {other.tokenizer.vocab_size:,} entries); "
      f"data.tokenizer_file = {folder} takes that one"
    )
  return other


def _frozen_run(config: ConfigDict, workdir: Path, tokenizer: Tokenizer) -> Run | None:
  """The run whose model the boundaries use; None without one, or if the folder has it."""
  if not build.needs_run(config) or workdir_lib.has_saved(workdir):
    return None
  key = "model.boundaries.run"
  other = _load_other(config.model.boundaries.run, key, tokenizer)
  check_frozen(other, key)
  return other


def check_frozen(run: Run, key: str = "run") -> None:
  """Checks that the boundaries of another run can use a run's model.

  Args:
    run: from `load`.
    key: the setting that names the run.

  Raises:
    ValueError: its boundaries are drawn at random, or use a model themselves.
  """
  kinds = build_boundaries(run.config.model)
  if any(kind.needs_run or kind.draws_in_evaluation for kind in kinds):
    raise UserError(
      f"{key}: expected a run whose boundaries are neither drawn in evaluation nor of "
      f"another run, got {run.config.model.boundaries.name} in {run.workdir}"
    )
