"""Trains the model of a configuration."""

import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from dpjax.config import rules, schema, sections
from dpjax.config.setting import ConfigDict
from dpjax.data import batches, mixture
from dpjax.data.token_files import Tokens
from dpjax.errors import UserError
from dpjax.generation import generator
from dpjax.layers.common import Params
from dpjax.models import build
from dpjax.runs import prepare, run_files
from dpjax.runs.run import Run, load, saved_frozen
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import checkpoints, evaluation, loop, losses, optimizers, sharding
from dpjax.training.trainer import Trainer

_log = logging.getLogger(__name__)


def train(
  config: ConfigDict,
  workdir: str | Path,
  *,
  model: build.CustomModel = None,
  optimizer: optax.GradientTransformation | None = None,
  callbacks: Sequence[loop.Callback] = (),
  should_stop: Callable[[], bool] | None = None,
  profile: tuple[int, int] | None = None,
) -> tuple[Run, dict[str, float]]:
  """Trains the model of a configuration, or resumes the run in the folder.

    dpjax.train(config, "runs/mine", model=lambda settings: Mine(settings.vocab_size))
    dpjax.load("runs/mine", model=lambda settings: Mine(settings.vocab_size))

  Args:
    config: from `dpjax.config`.
    workdir: the run's folder, created if missing.
    model: replaces that of `config.model`: a module, or a function of `config.model` that makes
      one. `apply({"params": params}, tokens, deterministic=..., rngs=...)` must return an object
      with `logits`, [B, T, V]. Pass the same model to resume or load the run.
    optimizer: replaces the optimizer, learning rate, schedule and clipping of `config.train`: any
      Optax optimizer that needs only the gradients, the parameters and the `value` of the loss.
      Pass the same one to resume the run: the names, shapes and dtypes of its state must be those
      of the checkpoint, but its numbers, such as a learning rate, are in no file and cannot be
      compared.
    callbacks: called with each report; training ends if one returns True.
    should_stop: called after every update; training also stops at signals.
    profile: START and STOP, to trace updates START + 1 to STOP into `workdir`/profile.

  Returns:
    The run with the best parameters by validation, and their test scores.

  Raises:
    ValueError: `setting: expected ..., got ...`.
    dpjax.training.NonFiniteError: the training diverged.
    dpjax.errors.Interrupted: a signal or `should_stop` stopped training after a checkpoint.
  """
  workdir = Path(os.path.expanduser(workdir))
  prepare.check_settings_and_files(config, workdir)
  settings = sections.expand_paths(config)
  rules.check(settings)
  for key, names in rules.idle_mixers(settings.model).items():
    _log.warning("%s.num_layers: fewer than mixers; no layer has %s", key, names)
  with run_files.lock(workdir):
    data = prepare.open_data(settings, workdir)
    config = build.with_vocabulary(settings, data.tokenizer)
    run_files.check_saved(workdir, settings, config)
    frozen = _frozen_run(config, workdir, data.tokenizer)
    frozen_model = saved_frozen(config, workdir) if frozen is None else frozen.model
    module = build.make_model(config, model, frozen_model)
    # Its parameters are those of the best checkpoint, after `fit`.
    run = Run(
      config, module, params={}, tokenizer=data.tokenizer, step=0, data=data, workdir=workdir
    )
    train_batches = make_batches(config, data)
    num_steps = rules.steps_in(
      config.train.num_steps,
      config.train.num_epochs,
      "num",
      steps_per_epoch=train_batches.steps_per_epoch,
    )
    initial = _initial(run, frozen, model)
    trainer = make_trainer(config, module, num_steps, optimizer, initial)
    num_parameters = _check(run, trainer)
    run_files.write_config(workdir, settings, None if frozen is None else frozen.config.model)
    _print_start(run, data, num_parameters, num_steps)
    folder = loop.RunFolder(workdir, _meta(run), _origin(data))
    hooks = loop.Hooks(callbacks, should_stop, profile)
    loop.fit(trainer, train_batches, run.validate, folder, hooks)
    best = run.at_step()
    return best, best.score_split("test", progress=True, folder=workdir)


def make_batches(config: ConfigDict, data: Tokens) -> batches.TrainingWindows:
  """The batches of `config.train`."""
  settings = config.train
  documents = None
  if data.documents is not None and config.data.isolate_documents:
    documents = evaluation.document_starts(data.documents["train"], data.tokenizer)
  boundaries = None if data.boundaries is None else data.boundaries["train"]
  pad_id = build.pad_id(config.model)
  stream = batches.TokenStream(data.splits["train"], boundaries, documents, pad_id)
  window = settings.window or config.model.max_length
  if config.data.mixture:
    shares = list(mixture.parse(config.data.mixture).values())
    sizes = data.counts["train"].get("sources", [])
    return mixture.MixedWindows(
      stream, settings.batch_size, window, config.seed, sizes=sizes, shares=shares
    )
  make = {
    "sequential": batches.ContiguousRows,
    "random_windows": batches.RandomWindows,
    "shuffled_windows": batches.ShuffledWindows,
  }[settings.sampling]
  return make(stream, settings.batch_size, window, config.seed)


def make_trainer(
  config: ConfigDict,
  model: nn.Module,
  num_steps: int,
  optimizer: optax.GradientTransformation | None = None,
  initial: Callable[[Params], Params] | None = None,
) -> Trainer:
  """The trainer of a configuration; for `optimizer` and `initial` see `Trainer`."""
  settings = {**config.train, "stage_multipliers": rules.stage_multipliers(config)}
  return Trainer(
    model,
    schema.Train(**settings),
    num_steps,
    optimizer,
    losses.Objective(build.build_boundaries(config.model)),
    config.seed,
    initial,
  )


def _check(run: Run, trainer: Trainer) -> int:
  """The number of parameters; a `UserError` if the run cannot train."""
  config = run.config
  sample = config.sample
  samples = generator.Generator(config.model, sample, run.model, run.tokenizer)
  samples.check_prompt(sample.prompt, sample, "sample.prompt")
  key = jax.random.key(0)
  shapes = jax.eval_shape(lambda: build.init_params(run.model, key))
  name = "train.optimizer" if trainer.optimizer is None else "optimizer"
  opt_state = optimizers.check(trainer.update_rule, shapes, name)
  average = shapes if config.train.ema_decay else ()
  _check_memory(jax.tree.leaves((shapes, opt_state, average)), config.train.param_sharding)
  if config.data.isolate_documents:
    try:
      _check_takes_starts(run.model)
      starts = jnp.ones((1, 1), jnp.int32)
      jax.eval_shape(lambda: build.init_params(run.model, key, document_starts=starts))
    except UserError as error:
      raise UserError(f"data.isolate_documents: expected False, got True ({error})") from error
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _check_takes_starts(model: nn.Module) -> None:
  """Raises a `UserError` if a model, perhaps the user's, takes no `document_starts`."""
  parameters = inspect.signature(type(model).__call__).parameters.values()
  if not any(x.name == "document_starts" or x.kind is x.VAR_KEYWORD for x in parameters):
    raise UserError(
      f"document_starts: expected none for a model with {type(model).__name__}, which does not "
      "keep documents apart (its __call__ takes no `document_starts`), got some"
    )


def _check_memory(arrays: Sequence[jax.ShapeDtypeStruct], param_sharding: str) -> None:
  """Raises a `UserError` if a state exceeds the memory of a CPU, since XLA may then hang."""
  memory = sharding.machine_memory()
  if sharding.make_mesh().devices.flat[0].platform != "cpu" or not memory:
    return
  copies = jax.local_device_count() / (jax.device_count() if param_sharding == "fsdp" else 1)
  required = copies * sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
  if required > memory:
    raise UserError(
      "model.num_layers, model.width, model.feed_forward_width: expected parameters that, with "
      f"the optimizer's state, fit the {memory / 2**30:.1f} GiB of memory, got "
      f"{required / 2**30:,.1f} GiB"
    )


def _meta(run: Run) -> dict[str, Any]:
  """What checkpoints record besides the state: the settings and the method of validation."""
  window, stride = run.scorer.sizes()
  validation = {"window": window, "stride": stride}
  if run.config.eval.max_tokens:
    validation["max_tokens"] = run.config.eval.max_tokens
  return {"config": run.config.to_dict(), "validation": validation}


def _origin(data: Tokens) -> dict[str, str]:
  """Values besides the settings that must not change on resume."""
  origin = {"tokenizer": data.tokenizer.to_json(), "training text": data.counts["train"]["sha256"]}
  if data.fitted:
    origin["unigram model"] = hashlib.sha256(data.fitted).hexdigest()
  return origin


def _print_start(run: Run, data: Tokens, size: int, num_steps: int) -> None:
  if jax.process_index() != 0:
    return
  config = run.config
  print(
    f"{run.name}, {size:,} parameters; {data.name}, {data.counts['train']['tokens']:,} training "
    f"tokens, vocabulary of {config.model.vocab_size:,}; {num_steps:,} steps on "
    f"{jax.device_count()} {jax.devices()[0].platform} device(s)"
  )
  tokenizer = data.tokenizer.name
  if not data.tokenizer.lossless:
    print(f"tokens of {tokenizer} do not hold the whole text: no bits per character or byte")
  # A vocabulary of the train split's own characters covers it.
  source = config.data.tokenizer.file or config.train.init_from
  splits = [x for x in data.splits if x != "train" or source or tokenizer != "characters"]
  if unknown := data.tokenizer.describe_unknown({x: data.splits[x] for x in splits}):
    print(unknown)


def _initial(
  run: Run, frozen: Run | None, model: build.CustomModel
) -> Callable[[Params], Params] | None:
  """A function that reads the initial parameters; None if they are drawn."""
  folder = run.config.train.init_from
  if frozen is None and not folder:
    return None

  def read(drawn: Params) -> Params:
    params = drawn
    if folder:
      key = "train.init_from"
      other = _load_other(folder, key, run.tokenizer, model)
      params = other.params
      message = f"{key}: expected parameters of this model, got others in {folder}"
      expected = optimizers.describe_arrays(drawn)
      checkpoints.check_arrays(optimizers.describe_arrays(params), expected, message)
    return params if frozen is None else build.with_frozen(params, frozen.params)

  return read


def _load_other(
  folder: str, key: str, tokenizer: Tokenizer, model: build.CustomModel = None
) -> Run:
  """The run that a setting names, which must have the same vocabulary."""
  try:
    other = load(folder, model=model)
  except UserError as error:
    raise UserError(f"{key}: expected a run that can be read, got {folder} ({error})") from error
  if other.tokenizer.to_json() != tokenizer.to_json():
    got = f"another ({other.tokenizer.name}, {other.tokenizer.vocab_size:,} entries)"
    raise UserError(
      f"{key}: expected a run with the vocabulary of this one, got {folder} with {got}; "
      f"data.tokenizer.file = {folder} takes that one"
    )
  return other


def _frozen_run(config: ConfigDict, workdir: Path, tokenizer: Tokenizer) -> Run | None:
  """The run whose model the boundaries use, unless the folder already has it."""
  if not run_files.needs_run(config) or run_files.has_saved(workdir):
    return None
  key = "model.boundaries.run"
  other = _load_other(config.model.boundaries.run, key, tokenizer)
  check_frozen(other, key)
  return other


def check_frozen(run: Run, key: str = "run") -> None:
  """Raises a `UserError` if a run's boundaries are drawn in evaluation, or use another model."""
  boundaries = build.build_boundaries(run.config.model)
  if any(each.needs_run or each.samples_in_eval for each in boundaries):
    raise UserError(
      f"{key}: expected a run whose boundaries are neither drawn in evaluation nor of "
      f"another run, got {run.config.model.boundaries.name} in {run.workdir}"
    )
