"""The authors' PyTorch checkpoints -> (model configuration, parameters), by name.

Source: `DispatcherModel` of dispatcher/dispatcher_model.py and of
dispatcher/dispatcher_model_multihead.py, `TransformerModel` of dispatcher/msa_model.py,
all fractalego/dispatcher@239608c.

V vocabulary, D width, E feature of a head, F feed-forward width, K level.
"""

import re
from collections.abc import Mapping, Set

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax import config as config_lib
from dpjax.config import ConfigDict
from dpjax.layers import embeddings

_POSITIONS = "pos_encoder.pe"
_LAYER_NAME = re.compile(r"transformer_encoder\.layers\.(\d+)\.(.+)")

# The name there -> its shape there, its place here. Matrices are [out, in] there and
# [in, out] here.
_MODEL = {
  "encoder.weight": ("VD", "embedding/tokens/embedding"),
  "decoder.weight": ("VD", "logits/kernel"),
  "decoder.bias": ("V", "logits/bias"),
}
_LAYER = {
  "linear1.weight": ("FD", "feed_forward/hidden/kernel"),
  "linear1.bias": ("F", "feed_forward/hidden/bias"),
  "linear2.weight": ("DF", "feed_forward/out/kernel"),
  "linear2.bias": ("D", "feed_forward/out/bias"),
  "norm1.weight": ("D", "mixer_norm/scale"),
  "norm1.bias": ("D", "mixer_norm/bias"),
  "norm2.weight": ("D", "feed_forward_norm/scale"),
  "norm2.bias": ("D", "feed_forward_norm/bias"),
}
_DISPATCHER = {
  "self_attn.linear_in.weight": ("EE", "mixer/values/kernel"),
  "self_attn.internal_attention.weight": ("KE", "mixer/gates/kernel"),
  "self_attn.linear_out.weight": ("EE", "mixer/out/kernel"),
}
# Queries, keys and values are one matrix of 3D rows there, [D, 3, D] here.
_ATTENTION = {
  "self_attn.in_proj_weight": ("3D", "mixer/queries_keys_values/kernel"),
  "self_attn.in_proj_bias": ("3", "mixer/queries_keys_values/bias"),
  "self_attn.out_proj.weight": ("DD", "mixer/out/kernel"),
  "self_attn.out_proj.bias": ("D", "mixer/out/bias"),
}


def from_torch(
  state_dict: Mapping,
  *,
  num_heads: int = 1,
  variant: str = "paper",
  max_length: int | None = None,
) -> tuple[ConfigDict, dict]:
  """Converts a checkpoint of the authors' Dispatcher or self-attention model.

    model_config, params = from_torch(torch.load(path, map_location="cpu"))
    model = dpjax.build_model(model_config)
    logits = model.apply({"params": params}, tokens).logits

  Self-attention is known by its `in_proj_weight`. The conversion of the arrays is
  linear, so that a mapping of gradients goes the same way.

  Args:
    state_dict: names -> arrays (NumPy, or tensors of PyTorch), or a whole checkpoint
      that holds them under "model_state_dict".
    num_heads: of self-attention; no name or shape tells it.
    variant: "paper", or "multihead" for the authors' later file; with one head they
      differ in the sigmoid of the gates alone.
    max_length: the longest T; None is the number of rows of `pos_encoder.pe`.

  Returns:
    `model_config`, all keys of `dpjax.config.default_model()` without dropout, and
    `params`, float32, layers stacked to [num_layers, ...]. The Dispatcher's number of
    levels is read off its gates, so it does not depend on `max_length`.

  Raises:
    ValueError: names are missing or unknown, or shapes do not match; there is neither
      `pos_encoder.pe` nor `max_length`; the positions are not the sinusoidal ones; or
      it is a Dispatcher of several heads, which the authors' code computes by a
      reshape of [B, T, D] to [B * H, T, D / H] that cuts positions, not features.
  """
  if variant not in ("paper", "multihead"):
    raise ValueError(f"variant: expected paper or multihead, got {variant}")
  names = state_dict
  if isinstance(names, Mapping):
    names = names.get("model_state_dict", names)
  if not isinstance(names, Mapping):
    raise ValueError(
      f"state_dict: expected a mapping of names to arrays, got {type(names).__name__}"
    )
  is_attention = any(name.endswith(".in_proj_weight") for name in names)
  layers = _LAYER | (_ATTENTION if is_attention else _DISPATCHER)
  num_layers = _check_names(names.keys() - {_POSITIONS}, layers)
  arrays = {name: _as_array(value) for name, value in names.items()}
  sizes = _read_sizes(arrays, layers, num_layers)
  if not is_attention:
    _check_one_head(sizes, num_heads)
  table = arrays.get(_POSITIONS)
  if table is not None:
    _check_positions(table, sizes["D"])
  if max_length is None:
    if table is None:
      raise ValueError(f"max_length: expected a number where {_POSITIONS} is missing, "
                       "got None")
    max_length = len(table)

  model_config = config_lib.default_model()
  model_config.update(
    mixer=_mixer_name(is_attention, variant),
    vocab_size=sizes["V"],
    num_layers=num_layers,
    width=sizes["D"],
    feed_forward_width=sizes["F"],
    num_heads=num_heads,
    max_length=max_length,
    num_levels=sizes.get("K", 0),
  )
  config_lib.check_model(model_config)

  params = {path: _convert(arrays[name], path) for name, (_, path) in _MODEL.items()}
  for name, (_, path) in layers.items():
    each = [_convert(arrays[_full(index, name)], path) for index in range(num_layers)]
    params[f"layers/{path}"] = np.stack(each)
  params = {path: jnp.asarray(array) for path, array in params.items()}
  return model_config, traverse_util.unflatten_dict(params, sep="/")


def _as_array(value) -> np.ndarray:
  if hasattr(value, "detach"):
    value = value.detach().cpu()
  return np.asarray(value, np.float32)


def _full(index: int, name: str) -> str:
  return f"transformer_encoder.layers.{index}.{name}"


def _check_names(names: Set[str], layers: Mapping) -> int:
  """The number of layers, where all of their names and no others are there."""
  matches = [_LAYER_NAME.fullmatch(name) for name in names]
  num_layers = max(len({match[1] for match in matches if match}), 1)
  expected = {_full(index, name) for index in range(num_layers) for name in layers}
  expected |= _MODEL.keys()
  missing, unknown = sorted(expected - names), sorted(names - expected)
  if missing or unknown:
    raise ValueError(
      "state_dict: expected the names of the authors' DispatcherModel or "
      f"TransformerModel, got {unknown or 'none'} unknown, {missing or 'none'} missing"
    )
  return num_layers


def _read_sizes(arrays: Mapping, layers: Mapping, num_layers: int) -> dict[str, int]:
  """What each letter stands for; the first array with a letter says it."""
  shapes = {name: letters for name, (letters, _) in _MODEL.items()}
  for index in range(num_layers):
    shapes |= {_full(index, name): letters for name, (letters, _) in layers.items()}
  sizes = {}
  for name, letters in shapes.items():
    shape = arrays[name].shape
    for letter, size in zip(letters, shape, strict=False):
      sizes.setdefault(letter, 3 * sizes["D"] if letter == "3" else size)
    expected = tuple(sizes.get(letter) for letter in letters)
    if shape != expected:
      raise ValueError(f"{name}: expected the shape {expected}, got {shape}")
  return sizes


def _check_one_head(sizes: Mapping[str, int], num_heads: int) -> None:
  """Refuses a Dispatcher that has, or is said to have, several heads."""
  if num_heads != 1:
    got = f"num_heads = {num_heads}"
  elif sizes["E"] != sizes["D"]:
    got = f"matrices for {sizes['E']} of the {sizes['D']} features"
  elif not 1 <= sizes["K"] <= 12:
    # One row a level and head; the authors' 5000 positions have room for 12 levels.
    got = f"{sizes['K']} rows of gates, where 1 to 12 levels are possible"
  else:
    return
  raise ValueError(
    f"num_heads: expected a Dispatcher of one head, got {got}; with more the authors' "
    "code reshapes [B, T, D] to [B * H, T, D / H], which cuts positions instead of "
    "features, and no model here does that"
  )


def _check_positions(table: np.ndarray, width: int) -> None:
  if table.ndim != 3 or table.shape[1:] != (1, width):
    raise ValueError(
      f"{_POSITIONS}: expected the shape (max_length, 1, {width}), got {table.shape}"
    )
  # There the angles are rounded to float32, and they grow with the position.
  tolerance = 1e-5 + 2e-7 * np.arange(len(table))[:, None]
  here = embeddings.sinusoidal_positions(len(table), width)
  if not (np.abs(table[:, 0] - here) <= tolerance).all():
    raise ValueError(f"{_POSITIONS}: expected the sinusoidal positions, got others")


def _mixer_name(is_attention: bool, variant: str) -> str:
  if is_attention:
    return "attention"
  return "dispatcher" if variant == "paper" else "dispatcher_multihead"


def _convert(array: np.ndarray, path: str) -> np.ndarray:
  """One array there -> one array here: axes are cut and moved, nothing else."""
  if "queries_keys_values" in path:
    array = array.reshape(3, -1, *array.shape[1:])
    return array.transpose(2, 0, 1) if path.endswith("kernel") else array
  return array.T if path.endswith("kernel") else array
