"""Builds models from settings: the only place where names of components become modules."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import config as config_lib
from dpjax import ops
from dpjax.config import registry
from dpjax.config.registry import ConfigDict
from dpjax.errors import UserError
from dpjax.layers import blocks
from dpjax.layers.boundaries import Boundaries
from dpjax.models.hourglass import Hourglass, PooledMiddle
from dpjax.models.language_model import LanguageModel
from dpjax.models.stack import Stack

# A model made in Python, or a function of `config.model` that makes one; None: the settings'.
Given = nn.Module | Callable[[ConfigDict], nn.Module] | None


def build_model(model_config: Mapping, frozen: LanguageModel | None = None) -> LanguageModel:
  """Builds the model that `config.model`, with the tokenizer's `vocab_size`, describes.

  `frozen` is the model of another run, for boundaries that use one. Wrong settings raise a
  `ValueError`, `key: expected ..., got ...`.
  """
  config_lib.check_model(model_config)
  return assemble(model_config, frozen)


def assemble(model_config: Mapping, frozen: LanguageModel | None = None) -> LanguageModel:
  """`build_model` for settings that have been checked."""
  model = dict(model_config)
  if not model["vocab_size"]:
    raise UserError("model.vocab_size: expected the tokenizer's size, got 0")
  _check_frozen(model, frozen)
  names = ("vocab_size", "width", "max_length", "positions", "dropout", "tie_embeddings")
  common = _common(model, *names) | dict(final_norm=model["norm_position"] == "pre")
  core = _core(list(config_lib.stages_in(model).values()), frozen)
  if isinstance(core, Stack):
    return LanguageModel(layers=core, make_positions=_make_positions([core]), **common)
  return LanguageModel(make_hourglass=core.make_hourglass, **common)


def _core(
  stages: Sequence[Mapping], frozen: LanguageModel | None = None, extra_length: int = 0
) -> Stack | PooledMiddle:
  """The blocks of a model or of a middle, with any pooling within."""
  model, *within = stages
  if not config_lib.is_pooled(model):
    return _stack(model, model["mixer"], model["num_layers"], extra_length)
  first, last = (
    _stack(model, model[name]["mixer"], model[name]["num_layers"], extra_length)
    for name in ("first", "last")
  )
  inner = within or [{**model, "boundaries": {"name": "none"}}]
  middle = _core(inner, extra_length=extra_length + 1)  # with the null group
  has_own_width = inner[0]["width"] != model["width"]
  blocks_within = [middle] if isinstance(middle, Stack) else []
  shares = [first, last, *([] if has_own_width else blocks_within)]
  make_hourglass = partial(
    Hourglass,
    first=first,
    middle=middle,
    last=last,
    make_boundaries=_boundaries_maker(model, frozen),
    make_positions=_make_positions(shares),
    middle_width=inner[0]["width"] if has_own_width else None,
    make_middle_positions=_make_positions(blocks_within) if has_own_width else None,
    **_common(model),
  )
  return PooledMiddle(make_hourglass)


def _common(model: Mapping, *others: str) -> dict[str, Any]:
  """The settings that all modules of a model share, and `others`, as arguments."""
  names = ("norm_init_std", "init_std", "norm_type", "use_bias", "norm_epsilon", *others)
  return {**{name: model[name] for name in names}, "dtype": jnp.dtype(model["dtype"])}


def build_boundaries(model_config: Mapping) -> tuple[Boundaries, ...]:
  """The kinds of boundaries of `config.model`, the outermost first."""
  stages = config_lib.stages_in(model_config).values()
  return tuple(_boundaries_maker(x)() for x in stages if config_lib.is_pooled(x))


def _boundaries_maker(model: Mapping, frozen: LanguageModel | None = None) -> partial[Boundaries]:
  return registry.boundaries.maker(
    model["boundaries"],
    width=model["width"],
    predictor_width=model["feed_forward_width"],
    init_std=model["init_std"],
    dtype=jnp.dtype(model["dtype"]),
    frozen=frozen,
  )


def _check_frozen(model: Mapping, frozen: LanguageModel | None) -> None:
  key, name = "model.boundaries.run", model["boundaries"]["name"]
  needs_run = registry.boundaries.component(name).needs_run
  if needs_run != (frozen is not None):
    expected, got = ("the model of", "none") if needs_run else ("none without", "one")
    raise UserError(f"frozen: expected {expected} a {key}, got {got}")
  if frozen is None:
    return
  if frozen.max_length < model["max_length"]:
    raise UserError(
      f"{key}: expected a run whose model.max_length is at least this one's, "
      f"{model['max_length']}, got one with {frozen.max_length}"
    )
  if frozen.vocab_size != model["vocab_size"]:
    raise UserError(
      f"{key}: expected a run with the vocabulary of this one, {model['vocab_size']:,} "
      f"entries, got one with {frozen.vocab_size:,}"
    )


def _stack(model: Mapping, mixer: Any, num_layers: int, extra_length: int) -> Stack:
  given: dict[str, Any] = dict(
    max_length=model["max_length"] + extra_length,
    position_dropout=model["dropout"],
    init_std=model["init_std"],
    dtype=jnp.dtype(model["dtype"]),
  )
  common = _common(model, "norm_position", "activation", "dropout", "hidden_dropout")
  make_blocks = [
    partial(
      blocks.Block,
      make_mixer=registry.mixers.maker(section, **given),
      hidden_width=model["feed_forward_width"],
      **common,
    )
    for section in config_lib.in_turn("", mixer or model["mixer"]).values()
  ]
  make_block = make_blocks[0] if len(make_blocks) == 1 else tuple(make_blocks)
  return Stack(num_layers, make_block, scan_layers=model["scan_layers"], remat=model["remat"])


def _make_positions(stacks: Sequence[Stack]) -> partial | None:
  """Makes the positions that mixers share, if there are such mixers."""
  mixers = [mixer for stack in stacks for mixer in stack.make_mixers()]
  made = [mixer.make_positions() for mixer in mixers if hasattr(mixer, "make_positions")]
  for other in made[1:]:
    if other(parent=None) != made[0](parent=None):
      raise UserError(
        "model.mixer, model.first.mixer, model.last.mixer: expected mixers "
        "that can share their positions, got other settings"
      )
  return made[0] if made else None


def pad_id(settings: ConfigDict) -> int:
  """The id for padding: if possible a token that ends no word and so adds no segments."""
  known = settings.boundaries.get("space_ids", ())
  return next((i for i in range(settings.vocab_size) if i not in known), 0)


def frozen_path(model: Any) -> tuple[str, ...]:
  """The path, in a model's parameters, of those of the frozen model; () without one."""
  if not isinstance(model, LanguageModel) or model.make_hourglass is None:
    return ()
  kind = model.make_hourglass(parent=None).make_boundaries(parent=None)
  return ("hourglass", "boundary_predictor", "frozen") if kind.needs_run else ()


def with_frozen(params: Mapping, frozen: Mapping) -> dict:
  """A model's parameters, with these for the frozen model that its boundaries use."""
  inner = params["hourglass"]
  boundaries = {**inner["boundary_predictor"], "frozen": frozen}
  return {**params, "hourglass": {**inner, "boundary_predictor": boundaries}}


def with_vocabulary(config: ConfigDict, tokenizer: Any) -> ConfigDict:
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
  config_lib.check_ids(config.model)
  return config


def make_model(config: ConfigDict, model: Given, frozen: LanguageModel | None) -> Any:
  """The model of a configuration, or the given one instead."""
  if model is None:
    return assemble(config.model, frozen)
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


def batch_capacity(model: ConfigDict) -> Callable[[Mapping[str, np.ndarray]], int | None]:
  """A function that maps a batch to its capacity, or to None if the tokens do not determine it."""
  kinds = build_boundaries(model)

  def of_tokens(batch: Mapping[str, np.ndarray]) -> int | None:
    # Several processes would have to agree on it; documents have null groups of their own.
    if not kinds or jax.process_count() > 1 or "document_starts" in batch:
      return None
    counts = kinds[0].count_in(batch["tokens"])
    length = batch["tokens"].shape[1]
    return None if counts is None else capacity_for(kinds[0], length, counts.max())

  return of_tokens


def capacity_for(kind: Boundaries, length: int, most: int) -> int:
  """The smallest capacity of a kind for rows of T tokens with at most so many segments."""
  return next(size for size in ops.capacities(length + 1, kind.num_buckets) if size > most)
