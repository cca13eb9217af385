"""Settings -> model: the only place where a name becomes a class."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from dpjax import config as config_lib
from dpjax.layers import attention, blocks, dispatcher
from dpjax.models.language_model import LanguageModel


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
    raise ValueError("model.vocab_size: expected the tokenizer's size, got 0")
  dtype = jnp.dtype(model["dtype"])
  norm = model["norm"]
  make_block = partial(
    blocks.Block,
    make_mixer=_mixer(model, dtype),
    hidden_width=model["feed_forward_width"],
    norm=norm,
    activation=model["activation"],
    dropout=model["dropout"],
    hidden_dropout=model["hidden_dropout"],
    dtype=dtype,
  )
  return LanguageModel(
    vocab_size=model["vocab_size"],
    width=model["width"],
    num_layers=model["num_layers"],
    max_length=model["max_length"],
    make_block=make_block,
    positions=model["positions"],
    dropout=model["dropout"],
    final_norm=norm == "pre",
    scan_layers=model["scan_layers"],
    remat=model["remat"],
    dtype=dtype,
  )


def _mixer(model: Mapping, dtype: jnp.dtype) -> partial[nn.Module]:
  shared = dict(
    num_heads=model["num_heads"], max_length=model["max_length"], dtype=dtype
  )
  if model["mixer"] == "attention":
    return partial(attention.SelfAttention, dropout=model["mixer_dropout"], **shared)
  layers = {
    "dispatcher": dispatcher.Dispatcher,
    "dispatcher_multihead": dispatcher.MultiHeadDispatcher,
  }
  return partial(
    layers[model["mixer"]],
    num_levels=model["num_levels"] or None,
    level_dropout=model["mixer_dropout"],
    implementation=model["implementation"] or None,
    **shared,
  )
