"""Settings -> model: the only place where a name becomes a class."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from dpjax import config as config_lib
from dpjax.layers import attention, blocks, dispatcher, extractors
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
    init_std=model["init_std"],
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
    init_std=model["init_std"],
    dtype=dtype,
  )


def _mixer(model: Mapping, dtype: jnp.dtype) -> partial[nn.Module]:
  name, heads, dropout = model["mixer"], model["num_heads"], model["mixer_dropout"]
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
