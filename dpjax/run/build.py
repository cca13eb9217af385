"""Builds the objects that the sections of a configuration describe."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from dpjax import config as config_lib
from dpjax import ops, registry
from dpjax.data import batches
from dpjax.data.tokens import Tokens
from dpjax.errors import UserError
from dpjax.generation import Generator
from dpjax.models.build import build_boundaries, build_model, pad_id
from dpjax.models.language_model import LanguageModel
from dpjax.registry import ConfigDict
from dpjax.run import workdir as workdir_lib
from dpjax.text.tokens import Tokenizer
from dpjax.training import evaluation, loop, losses


def with_vocabulary(config: ConfigDict, tokenizer: Tokenizer) -> ConfigDict:
  """A copy of the configuration with the settings that follow from the tokenizer."""
  size = config.model.vocab_size
  if size not in (0, tokenizer.vocab_size):
    raise UserError(
      f"model.vocab_size: expected 0 or the tokenizer's {tokenizer.vocab_size}, got {size}"
    )
  config = config.copy_and_resolve_references()
  config.model.vocab_size = tokenizer.vocab_size
  for kind in build_boundaries(config.model)[:1]:
    config.model.boundaries.update(kind.settings_for(tokenizer))
  config_lib.check_model(config.model)
  return config


def model(config: ConfigDict, model, frozen: LanguageModel | None) -> Any:
  """The model of a configuration, or the given model instead."""
  if model is None:
    return build_model(config.model, frozen)
  built = model if isinstance(model, nn.Module) else model(config.model)
  if not isinstance(built, nn.Module):
    raise UserError(
      "model: expected a flax.linen.Module, or a function of config.model "
      f"that gives one, got {built!r}"
    )
  pools = isinstance(built, LanguageModel) and built.make_hourglass is not None
  if pools != config_lib.is_pooled(config.model):
    raise UserError(
      f"model.boundaries: expected {'those of the' if pools else 'none for a'} model that "
      f"is given, which pools {'tokens' if pools else 'none'}, got "
      f"{config.model.boundaries.name}"
    )
  return built


def durations(settings: ConfigDict, steps_per_epoch: int) -> loop.Durations:
  """The durations of `config.train`, in updates."""
  num_steps, eval_every_steps = (
    config_lib.steps_in(settings, name, steps_per_epoch=steps_per_epoch)
    for name in ("num", "eval_every")
  )
  return loop.Durations(
    num_steps,
    eval_every_steps,
    settings.log_every_steps,
    settings.median_every_steps,
    settings.checkpoint_every_steps,
  )


def objective(settings: ConfigDict) -> losses.Objective:
  """The loss of a model of `config.model`."""
  return losses.Objective(build_boundaries(settings))


def scorer(config: ConfigDict, model: nn.Module, tokenizer: Tokenizer) -> evaluation.Scorer:
  """The scorer of `config.eval`."""
  settings = config.eval
  return evaluation.Scorer(
    model,
    objective(config.model),
    tokenizer,
    config.model.max_length,
    settings.window,
    settings.stride,
    settings.batch_size,
    pad_id(config.model),
    capacity(config.model),
  )


def generator(config: ConfigDict, model: Any, tokenizer: Tokenizer) -> Generator:
  """The generator, with the defaults of `config.sample`."""
  return Generator(config.model, config.sample, model, tokenizer)


def capacity(settings: ConfigDict) -> Callable[[Mapping[str, np.ndarray]], int | None]:
  """A function that maps a batch to its capacity, or to None if the tokens do not determine it."""
  kinds = build_boundaries(settings)
  # Several processes would have to agree on it.
  if not kinds or jax.process_count() > 1:
    return lambda batch: None
  boundaries = kinds[0]

  def from_tokens(batch: Mapping[str, np.ndarray]) -> int | None:
    tokens = batch["tokens"]
    if "is_start" in batch:  # Documents have null groups, and boundaries, of their own.
      return None
    counts = boundaries.count_in(tokens)
    if counts is None:
      return None
    sizes = ops.capacities(tokens.shape[1] + 1, boundaries.num_capacities)
    return next(size for size in sizes if size > counts.max())

  return from_tokens


def train_batches(config: ConfigDict, data: Any):
  """The batches of `config.train` of a `Tokens`, by its rule."""
  settings, tokens = config.train, data.splits["train"]
  boundaries = None if data.boundaries is None else data.boundaries["train"]
  size = settings.batch_size, settings.window or config.model.max_length
  options: dict[str, Any] = dict(boundaries=boundaries)
  if config.data.documents == "isolated":
    options["documents"] = evaluation.document_starts(data.documents["train"], data.tokenizer)
  if settings.batches == "random_windows":
    return batches.RandomWindows(tokens, *size, config.seed, **options)
  options["pad_id"] = pad_id(config.model)
  if settings.batches == "shuffled_windows":
    return batches.ShuffledWindows(tokens, *size, config.seed, **options)
  return batches.ContiguousRows(tokens, *size, **options)


def text_boundaries(config: ConfigDict) -> Any:
  """The kind of boundaries, if it needs the text; else None."""
  kinds = build_boundaries(config.model)
  return kinds[0] if kinds and kinds[0].needs_text else None


def needs_run(config: ConfigDict) -> bool:
  """Whether the boundaries use the model of another run."""
  return registry.boundaries.component(config.model.boundaries.name).needs_run


def origin(data: Tokens) -> dict[str, str]:
  """Inputs of a run, besides its settings, that must not change on resume."""
  origin = {
    "tokenizer": data.tokenizer.to_json(),
    "training text": data.counts["train"]["sha256"],
  }
  if data.learned:
    origin["unigram model"] = hashlib.sha256(data.learned).hexdigest()
  return origin


def saved_frozen(config: ConfigDict, workdir: Path) -> LanguageModel | None:
  """The frozen model of a saved run's boundaries, if they use one."""
  return build_model(workdir_lib.read_frozen(workdir)) if needs_run(config) else None
