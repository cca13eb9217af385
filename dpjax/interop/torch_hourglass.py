"""Converts the authors' dynamic token pooling in PyTorch to (model configuration, parameters).

Source: `MemTransformerLM` of hourglass.py, PiotrNawrot/dynamic-pooling@1e6f360.

V vocabulary, D width, H head, E feature of a head, F feed-forward width.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpjax import config as config_lib
from dpjax import registry
from dpjax.config import ConfigDict
from dpjax.errors import UserError
from dpjax.interop import torch_arrays
from dpjax.interop.torch_arrays import Table

_FREQUENCIES = "pos_emb.inv_freq"
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(\d+)\..+")
_PREDICTOR = "boundary_predictor.boundary_predictor"

_MODEL: Table = {
  "embedding/tokens/embedding": ("VD", "word_emb.weight"),
  **torch_arrays.linear("logits", "VD", "final_cast"),
}
_POSITIONS: Table = {
  "relative_positions/content_bias": ("HE", "r_w_bias"),
  "relative_positions/position_bias": ("HE", "r_r_bias"),
}
_LAYER: Table = {
  **torch_arrays.linear("mixer/queries_keys_values", "3D", "dec_attn.qkv_net"),
  **torch_arrays.linear("mixer/distances", "DD", "dec_attn.r_net"),
  **torch_arrays.linear("mixer/out", "DD", "dec_attn.o_net"),
  **torch_arrays.norm("mixer_norm", "dec_attn.layer_norm"),
  **torch_arrays.linear("feed_forward/hidden", "FD", "pos_ff.CoreNet.0"),
  **torch_arrays.linear("feed_forward/out", "DF", "pos_ff.CoreNet.3"),
  **torch_arrays.norm("feed_forward_norm", "pos_ff.layer_norm"),
}
_POOLING: Table = {
  "hourglass/null_group": ("11D", "null_group"),
  **torch_arrays.norm("hourglass/middle_norm", "down_ln"),
}
_PREDICTION: Table = {
  **torch_arrays.linear("hourglass/boundary_predictor/hidden", "FD", f"{_PREDICTOR}.0"),
  **torch_arrays.linear("hourglass/boundary_predictor/out", "1F", f"{_PREDICTOR}.2"),
}
# Settings of boundaries as in the authors' code.
USUAL = dict(shortening_factor=None, offset=0, space_ids=(), temperature=0.5, sample=False)


def convert(
  content: Mapping,
  state: Mapping,
  boundaries: str | None,
  num_heads: int | None,
  max_length: int | None,
  settings: Mapping[str, Any],
) -> tuple[ConfigDict, dict]:
  """`dpjax.interop.from_torch` for an hourglass; `content` is the whole checkpoint."""
  recorded = content.get("model_config", {})
  has_predictor = any(name.startswith("boundary_predictor.") for name in state)
  layers = {(match[1], match[2]) for name in state if (match := _LAYER_NAME.fullmatch(name))}
  is_pooled = "null_group" in state or any(stack == "1" for stack, _ in layers)
  possible = ("none",)
  if is_pooled:
    possible = ("unigram", "entropy", "gumbel") if has_predictor else ("fixed", "whitespace")
  in_file = recorded.get("boundaries_type", "").removesuffix("s")
  possible = (in_file,) if in_file in possible else possible
  if boundaries is None and len(possible) == 1:
    boundaries = possible[0]
  if boundaries is None or boundaries not in possible:
    raise UserError(
      f"boundaries: expected {' or '.join(possible)} by what the file holds, got {boundaries}"
    )
  depths = [
    max(sum(stack == str(number) for stack, _ in layers), 1)
    for number in range(1 if boundaries == "none" else 3)
  ]
  table = lines(depths, has_predictor)
  torch_arrays.check_names(state.keys() - {_FREQUENCIES}, table, "MemTransformerLM")
  arrays = torch_arrays.read_arrays(state)
  sizes = torch_arrays.read_sizes(arrays, table)
  if num_heads not in (None, sizes["H"]):
    raise UserError(f"num_heads: expected the {sizes['H']} of r_w_bias, got {num_heads}")
  if sizes["H"] * sizes["E"] != sizes["D"]:
    raise UserError(
      f"r_w_bias: expected heads of {sizes['D']} features together, got the shape "
      f"{(sizes['H'], sizes['E'])}"
    )
  if max_length is None:
    raise UserError(
      "max_length: expected a number, as a MemTransformerLM has no table of positions, got None"
    )

  model_config = config_lib.default_model()
  model_config.mixer = config_lib.mixer("relative_attention", num_heads=sizes["H"])
  model_config.update(
    vocab_size=sizes["V"],
    width=sizes["D"],
    feed_forward_width=sizes["F"],
    max_length=max_length,
    positions="none",
    activation=recorded.get("activation_function", "gelu"),
    num_layers=depths[len(depths) // 2],
  )
  if len(depths) == 3:
    model_config.first.num_layers, _, model_config.last.num_layers = depths
  if boundaries == "fixed" and settings["shortening_factor"] is None:
    raise UserError("shortening_factor: expected k of the fixed boundaries, got None")
  if boundaries == "whitespace" and not settings["space_ids"]:
    raise UserError("space_ids: expected the space's for whitespace, got none")
  known = registry.boundaries.settings(boundaries)
  own = {name: x for name, x in settings.items() if name in known or x != USUAL[name]}
  model_config.boundaries = config_lib.boundaries(boundaries, **own)
  config_lib.check_model(model_config)
  return model_config, torch_arrays.to_params(arrays, table)


def lines(depths: Sequence[int], has_predictor: bool) -> Table:
  """The table of a model by the number of blocks in each stack, of one or three stacks."""
  places, table = ("layers",), {**_MODEL, **_POSITIONS}
  if len(depths) == 3:
    places = ("hourglass/first", "hourglass/middle", "hourglass/last")
    positions = {f"hourglass/{path}": line for path, line in _POSITIONS.items()}
    table = {**_MODEL, **positions, **_POOLING}
  for stack, (place, depth) in enumerate(zip(places, depths, strict=True)):
    prefixes = (f"layers.{stack}.{index}" for index in range(depth))
    table |= torch_arrays.of_layers(_LAYER, place, prefixes)
  return {**table, **(_PREDICTION if has_predictor else {})}
