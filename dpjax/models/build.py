"""Settings -> model: the only place where a name becomes a class."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import config as config_lib
from dpjax.errors import UserError
from dpjax.layers import attention, blocks, dispatcher, extractors
from dpjax.models.hourglass import Hourglass
from dpjax.models.language_model import LanguageModel
from dpjax.models.stack import Stack


def build_model(model_config: Mapping) -> LanguageModel:
  """Builds the model that `config.model` describes.

  Args:
    model_config: the keys of `dpjax.config.default_model()`, all of them, with the
      `vocab_size` of the tokenizer.

  Returns:
    A Linen module: `model.init(key, tokens)` and
    `model.apply({"params": params}, tokens).logits`, [B, T] -> [B, T, V].

  Raises:
    ValueError: `key: expected ..., got ...`.
  """
  config_lib.check_model(model_config)
  model = dict(model_config)
  if not model["vocab_size"]:
    raise UserError("model.vocab_size: expected the tokenizer's size, got 0")
  dtype = jnp.dtype(model["dtype"])
  is_pooled = model["boundaries"] != "none"
  make_positions = None
  if "relative_attention" in config_lib.mixers_in(model):
    make_positions = partial(
      attention.SharedPositions,
      num_heads=model["num_heads"],
      dropout=model["dropout"],
      init_std=model["init_std"],
      dtype=dtype,
    )
  common: dict[str, Any] = dict(
    vocab_size=model["vocab_size"],
    width=model["width"],
    max_length=model["max_length"],
    positions=model["positions"],
    dropout=model["dropout"],
    final_norm=model["norm"] == "pre",
    init_std=model["init_std"],
    norm_init_std=model["norm_init_std"],
    dtype=dtype,
  )
  if not is_pooled:
    layers = _stack(model, model["mixer"], model["num_layers"], dtype)
    return LanguageModel(layers=layers, make_positions=make_positions, **common)
  middle = {**model, "max_length": model["max_length"] + 1}  # with the null group
  offset = model["boundary_offset"]
  make_hourglass = partial(
    Hourglass,
    first=_stack(model, model["first_mixer"], model["first_layers"], dtype),
    middle=_stack(middle, model["mixer"], model["num_layers"], dtype),
    last=_stack(model, model["last_mixer"], model["last_layers"], dtype),
    kind=model["boundaries"],
    predictor_width=model["feed_forward_width"],
    make_positions=make_positions,
    pooling=model["pooling"],
    shortening_factor=model["shortening_factor"],
    boundary_offset=None if offset < 0 else offset,
    space_ids=tuple(model["space_ids"]),
    temperature=model["boundary_temperature"],
    sample_boundaries=model["sample_boundaries"],
    num_capacities=model["num_capacities"],
    init_std=model["init_std"],
    norm_init_std=model["norm_init_std"],
    dtype=dtype,
  )
  return LanguageModel(make_hourglass=make_hourglass, **common)


def check_memory(shapes: Any, num_parts: int = 1) -> None:
  """Refuses a model whose training state is larger than the memory of a device.

  The state is the parameters and the two moments of Adam. Whether the rest of a step fits,
  nobody knows before it is compiled; but on a CPU, arrays of a state that do not fit can
  leave XLA waiting for ever.

  Args:
    shapes: of the parameters.
    num_parts: over how many devices each is divided.

  Raises:
    ValueError: it is larger.
  """
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
  stats = jax.local_devices()[0].memory_stats() or {}
  memory = stats.get("bytes_limit") or _host_memory()
  needed = 3 * size // num_parts
  if memory and needed > memory:
    raise UserError(
      "model.num_layers, model.width, model.feed_forward_width: expected parameters that "
      f"fit, with Adam's moments, the {memory / 2**30:.1f} GiB of a device, got "
      f"{needed / 2**30:,.1f} GiB; train.parameters = sharded divides them"
    )


def _host_memory() -> int:
  """Bytes; 0 where the system does not tell."""
  try:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  except (AttributeError, OSError, ValueError):
    return 0


def _stack(model: Mapping, mixer: str, num_layers: int, dtype: jnp.dtype) -> Stack:
  mixer = mixer or model["mixer"]
  make_block = partial(
    blocks.Block,
    make_mixer=_mixer(model, mixer, dtype),
    hidden_width=model["feed_forward_width"],
    norm=model["norm"],
    activation=model["activation"],
    dropout=model["dropout"],
    hidden_dropout=model["hidden_dropout"],
    init_std=model["init_std"],
    norm_init_std=model["norm_init_std"],
    dtype=dtype,
  )
  return Stack(
    num_layers,
    make_block,
    has_positions=mixer == "relative_attention",
    scan_layers=model["scan_layers"],
    remat=model["remat"],
  )


def _mixer(model: Mapping, name: str, dtype: jnp.dtype) -> partial[nn.Module]:
  heads, dropout = model["num_heads"], model["mixer_dropout"]
  shared = dict(
    max_length=model["max_length"], init_std=model["init_std"], dtype=dtype
  )
  implementation = model["implementation"] or None
  if name == "attention":
    return partial(
      attention.SelfAttention,
      num_heads=heads,
      dropout=dropout,
      use_bias=model["attention_bias"],
      **shared,
    )
  if name == "relative_attention":
    return partial(
      attention.RelativeAttention,
      num_heads=heads,
      dropout=dropout,
      position_dropout=model["dropout"],
      **shared,
    )
  dispatchers = {
    "dispatcher": dispatcher.Dispatcher,
    "dispatcher_multihead": dispatcher.MultiHeadDispatcher,
  }
  if name in dispatchers:
    return partial(
      dispatchers[name],
      num_heads=heads,
      num_levels=model["num_levels"] or None,
      level_dropout=dropout,
      implementation=implementation,
      **shared,
    )
  shared |= dict(implementation=implementation)
  if name == "me":
    return partial(extractors.ME, **shared)
  layers = {"she": extractors.SHE, "he": extractors.HE, "we": extractors.WE}
  return partial(
    layers[name],
    adjustment=model["adjustment"],
    output_projection=model["output_projection"],
    **shared,
  )
