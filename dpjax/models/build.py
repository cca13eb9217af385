"""Builds models from settings: the only place where names of components become modules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import ops
from dpjax.config import registry, rules, sections
from dpjax.config.setting import ConfigDict
from dpjax.config.supplied import boundaries_fields, mixer_fields, module_fields
from dpjax.errors import UserError
from dpjax.layers.block import Block, FeedForward
from dpjax.layers.boundaries import Boundaries
from dpjax.layers.common import Norm, Params
from dpjax.models.hourglass import Hourglass
from dpjax.models.language_model import LanguageModel
from dpjax.models.stack import Stack
from dpjax.models.stage import Stage

# A model, or a function that makes one from `config.model`; None builds the settings' model.
CustomModel = nn.Module | Callable[[ConfigDict], nn.Module] | None


def build_model(model_config: Mapping, frozen: LanguageModel | None = None) -> LanguageModel:
  """Builds the model that `config.model`, with the tokenizer's `vocab_size`, describes.

  `frozen` is the model of another run, for boundaries that use one. Wrong settings raise a
  `ValueError`, `key: expected ..., got ...`.
  """
  rules.check_model(model_config)
  return assemble(model_config, frozen)


def assemble(model_config: Mapping, frozen: LanguageModel | None = None) -> LanguageModel:
  """`build_model` for settings that have been checked."""
  model = dict(model_config)
  if not model["vocab_size"]:
    raise UserError("model.vocab_size: expected the tokenizer's size, got 0")
  _check_frozen(model, frozen)
  core = _core([*sections.stages_in(model).values()], frozen)
  # The last stack of an hourglass may have its own norm.
  has_final_norm = model["norm_position"] == "pre" and not (core.stages and model["stack_norms"])
  return LanguageModel(
    vocab_size=model["vocab_size"],
    width=model["width"],
    max_length=model["max_length"],
    core=core,
    positions=model["positions"],
    dropout=model["dropout"],
    final_norm=_norm(model) if has_final_norm else None,
    use_bias=model["use_bias"],
    tie_embeddings=model["tie_embeddings"],
    embedding_std=model["embedding_std"],
    **module_fields(model)._asdict(),
  )


def _core(stages: Sequence[Mapping], frozen: LanguageModel | None) -> Hourglass:
  """The layers of a model, within a stage for each section that pools, the outermost first."""
  pooled = [model for model in stages if sections.is_pooled(model)]
  modules = []
  num_branches = 0
  for depth, model in enumerate(pooled):
    for name in ("first", "last"):
      num_branches += _count_branches(_mixer_of(model, name), model[name]["num_layers"])
    inner_width = stages[depth + 1]["width"] if depth + 1 < len(stages) else model["width"]
    place = _Place(depth, num_branches)
    modules.append(_stage(model, place, inner_width, frozen if depth == 0 else None))
  # Of a model whose innermost section pools, the layers within have the same settings.
  model = stages[-1]
  num_branches += _count_branches(model["mixer"], model["num_layers"])
  place = _Place(len(pooled), num_branches)
  has_norm = bool(pooled) and pooled[-1]["stack_norms"]
  layers = _stack(model, model["mixer"], model["num_layers"], place, has_norm)
  innermost = modules[-1] if modules else None
  if innermost is None or innermost.inner_width is not None:
    return Hourglass(layers, tuple(modules), _relative_positions([layers]))
  # The layers share the positions of the stage around them.
  shared = _relative_positions([innermost.first, innermost.last, layers])
  modules[-1] = innermost.clone(shared_positions=shared)
  return Hourglass(layers, tuple(modules))


class _Place(NamedTuple):
  """Where a stack is: within how many stages, and with how many branches up to its stage."""

  depth: int
  num_branches: int


def _stage(model: Mapping, place: _Place, inner_width: int, frozen: LanguageModel | None) -> Stage:
  has_norm = model["stack_norms"]
  sizes = model["first"]["num_layers"], model["last"]["num_layers"]
  first = _stack(model, _mixer_of(model, "first"), sizes[0], place, has_norm)
  last = _stack(model, _mixer_of(model, "last"), sizes[1], place, has_norm)
  return Stage(
    width=model["width"],
    first=first,
    boundaries=_build_boundaries(model, frozen),
    last=last,
    inner_norm=_norm(model),
    shared_positions=_relative_positions([first, last]),
    inner_width=None if inner_width == model["width"] else inner_width,
    pads=model["middle_resize"] == "padding",
    **module_fields(model)._asdict(),
  )


def _mixer_of(model: Mapping, name: str) -> Any:
  """The mixers of the stack `first` or `last`."""
  return model[name]["mixer"] or model["mixer"]


def _norm(model: Mapping) -> Norm:
  names = "norm_init_std", "use_bias", "norm_epsilon"
  return Norm(model["norm_type"], jnp.dtype(model["dtype"]), *(model[name] for name in names))


def build_boundaries(model_config: Mapping) -> tuple[Boundaries, ...]:
  """The boundaries of each stage of `config.model`, the outermost first."""
  stages = sections.stages_in(model_config).values()
  return tuple(_build_boundaries(x) for x in stages if sections.is_pooled(x))


def _build_boundaries(model: Mapping, frozen: LanguageModel | None = None) -> Boundaries:
  fields = boundaries_fields(model, frozen)._asdict()
  return registry.boundaries.maker(model["boundaries"], **fields)()


def _check_frozen(model: Mapping, frozen: LanguageModel | None) -> None:
  key = "model.boundaries.run"
  name = model["boundaries"]["name"]
  needs_run = sections.is_pooled(model) and registry.boundaries.component(name).needs_run
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


def _count_branches(mixer: Any, num_layers: int) -> int:
  """The mixers and feed-forward networks of a stack."""
  mixers = [*sections.in_turn("", mixer).values()]
  layers = (mixers[i % len(mixers)] for i in range(num_layers))
  return sum(1 + section["has_feed_forward"] for section in layers)


def _stack(model: Mapping, mixer: Any, num_layers: int, place: _Place, has_norm: bool) -> Stack:
  blocks = [_block(model, section, place) for section in sections.in_turn("", mixer).values()]
  return Stack(
    num_layers,
    tuple(blocks[:num_layers]),
    out_norm=_norm(model) if has_norm else None,
    scan_layers=model["scan_layers"],
    remat=model["remat"],
    residual_dtype=jnp.float32 if model["residual_dtype"] == "float32" else None,
  )


def _block(model: Mapping, section: Mapping, place: _Place) -> Block:
  out_scale = place.num_branches**-0.5 if model["scale_outputs"] else 1.0
  fields = mixer_fields(model, depth=place.depth, out_scale=out_scale)._asdict()
  mixer = registry.mixers.maker(section, **fields)
  network = None
  if section["has_feed_forward"]:
    network = FeedForward(
      model["feed_forward_width"],
      model["activation"],
      model["hidden_dropout"],
      use_bias=model["use_bias"],
      out_scale=out_scale,
      **module_fields(model)._asdict(),
    )
  return Block(
    mixer(),
    network,
    mixer_norm=_norm(model),
    feed_forward_norm=_norm(model) if network else None,
    is_pre_norm=model["norm_position"] == "pre",
    dropout=model["dropout"],
  )


def _relative_positions(stacks: Sequence[Stack]) -> nn.Module | None:
  """The positions that mixers share, if any."""
  made = [mixer.make_positions() for stack in stacks for mixer in stack.mixers]
  shared = [module for module in made if module is not None]
  for other in shared:
    if other != shared[0]:
      raise UserError(
        "model.mixer, model.first.mixer, model.last.mixer: expected mixers that share their "
        f"positions to make equal ones, got {_describe(shared[0])} and {_describe(other)}"
      )
  return shared[0] if shared else None


def _describe(module: nn.Module) -> str:
  """A module's class and fields, in one line."""
  fields = [field for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
  values = [f"{field.name}={getattr(module, field.name)}" for field in fields]
  return f"{type(module).__name__}({', '.join(values)})"


def pad_id(settings: ConfigDict) -> int:
  """The id for padding: if possible, a token that does not end a word, and so adds no segments."""
  space_ids = settings.boundaries.get("space_ids", ())
  return next((i for i in range(settings.vocab_size) if i not in space_ids), 0)


def frozen_path(model: Any) -> tuple[str, ...]:
  """The path of the frozen model's parameters within a model's; () without a frozen model."""
  if not isinstance(model, LanguageModel) or not model.core.stages:
    return ()
  needs_run = model.core.stages[0].boundaries.needs_run
  return ("stages_0", "boundaries", "frozen") if needs_run else ()


def with_frozen(params: Mapping, frozen: Mapping) -> dict:
  """Replaces the parameters of the frozen model that a model's boundaries use."""
  stage = params["stages_0"]
  return {**params, "stages_0": {**stage, "boundaries": {**stage["boundaries"], "frozen": frozen}}}


def with_vocabulary(config: ConfigDict, tokenizer: Any) -> ConfigDict:
  """A copy of the configuration with the settings that follow from the tokenizer."""
  size = config.model.vocab_size
  if size not in (0, tokenizer.vocab_size):
    raise UserError(
      f"model.vocab_size: expected 0 or the tokenizer's {tokenizer.vocab_size}, got {size}"
    )
  config = config.copy_and_resolve_references()
  config.model.vocab_size = tokenizer.vocab_size
  for boundaries in build_boundaries(config.model)[:1]:
    config.model.boundaries.update(boundaries.resolve(tokenizer))
  rules.check_ids(config.model)
  return config


def make_model(config: ConfigDict, model: CustomModel, frozen: LanguageModel | None) -> Any:
  """The model of a configuration, or `model` instead."""
  if model is None:
    return assemble(config.model, frozen)
  built = model if isinstance(model, nn.Module) else model(config.model)
  if not isinstance(built, nn.Module):
    raise UserError(
      "model: expected a flax.linen.Module, or a function of config.model "
      f"that gives one, got {built!r}"
    )
  pools = isinstance(built, LanguageModel) and bool(built.core.stages)
  if pools != sections.is_pooled(config.model):
    raise UserError(
      f"model.boundaries: expected {'those of the' if pools else 'none for a'} model that "
      f"is given, which pools {'tokens' if pools else 'none'}, got "
      f"{config.model.boundaries.name}"
    )
  return built


def init_params(model: nn.Module, key: jax.Array, **inputs: Any) -> Params:
  """Draws the parameters of a model; `inputs` are arguments of its call, for tokens of [1, 1]."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return dict(model.init(key, tokens, deterministic=True, **inputs)["params"])


def batch_capacity(boundaries: Sequence[Boundaries], batch: Mapping[str, np.ndarray]) -> int | None:
  """The `capacity` of a model for a batch, or None if the tokens do not determine it.

  `boundaries` are those of the model's stages, the outermost first.
  """
  # Several processes would have to agree on it; documents have null groups of their own.
  if not boundaries or jax.process_count() > 1 or "document_starts" in batch:
    return None
  counts = boundaries[0].count_segments(batch["tokens"])
  length = batch["tokens"].shape[1]
  return None if counts is None else capacity_for(boundaries[0], length, counts.max())


def capacity_for(boundaries: Boundaries, length: int, max_segments: int) -> int:
  """The smallest capacity for rows of T tokens with at most so many segments."""
  sizes = ops.bucket_sizes(length + 1, boundaries.num_buckets)
  return next(size for size in sizes if size > max_segments)
