"""Converts the authors' PyTorch checkpoints to (model configuration, parameters), and back.

Source: `DispatcherModel` of dispatcher/dispatcher_model.py and of
dispatcher/dispatcher_model_multihead.py, `TransformerModel` of dispatcher/msa_model.py,
all fractalego/dispatcher@239608c; `MemTransformerLM` of hourglass.py,
PiotrNawrot/dynamic-pooling@1e6f360. For H-Net see `dpjax.interop.hnet`.

V vocabulary, D width, H head, E feature of a head, F feed-forward width, K level.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

from dpjax.config import ConfigDict, registry, rules, sections
from dpjax.errors import UserError
from dpjax.interop import hnet, torch_arrays
from dpjax.interop.torch_arrays import Table
from dpjax.layers import embeddings

_POSITIONS = "pos_encoder.pe"
_LAYERS = "transformer_encoder.layers"
_LAYER_NAME = re.compile(rf"{re.escape(_LAYERS)}\.(\d+)\..+")

_MODEL: Table = {
  "embedding/tokens/embedding": ("VD", "encoder.weight"),
  **torch_arrays.linear("logits", "VD", "decoder"),
}
_LAYER: Table = {
  **torch_arrays.linear("feed_forward/hidden", "FD", "linear1"),
  **torch_arrays.linear("feed_forward/out", "DF", "linear2"),
  **torch_arrays.norm("mixer_norm", "norm1"),
  **torch_arrays.norm("feed_forward_norm", "norm2"),
}
_DISPATCHER: Table = {
  "mixer/values/kernel": ("EE", "self_attn.linear_in.weight"),
  "mixer/gates/kernel": ("KE", "self_attn.internal_attention.weight"),
  "mixer/out/kernel": ("EE", "self_attn.linear_out.weight"),
}
_ATTENTION: Table = {
  "mixer/queries_keys_values/kernel": ("3D", "self_attn.in_proj_weight"),
  "mixer/queries_keys_values/bias": ("3", "self_attn.in_proj_bias"),
  **torch_arrays.linear("mixer/out", "DD", "self_attn.out_proj"),
}

_FREQUENCIES = "pos_emb.inv_freq"
_POOLED_NAME = re.compile(r"layers\.(\d+)\.(\d+)\..+")
_PREDICTOR = "boundary_predictor.boundary_predictor"

_POOLED_MODEL: Table = {
  "embedding/tokens/embedding": ("VD", "word_emb.weight"),
  **torch_arrays.linear("logits", "VD", "final_cast"),
}
_POOLED_POSITIONS: Table = {
  "shared_positions/content_bias": ("HE", "r_w_bias"),
  "shared_positions/position_bias": ("HE", "r_r_bias"),
}
_POOLED_LAYER: Table = {
  **torch_arrays.linear("mixer/queries_keys_values", "3D", "dec_attn.qkv_net"),
  **torch_arrays.linear("mixer/distances", "DD", "dec_attn.r_net"),
  **torch_arrays.linear("mixer/out", "DD", "dec_attn.o_net"),
  **torch_arrays.norm("mixer_norm", "dec_attn.layer_norm"),
  **torch_arrays.linear("feed_forward/hidden", "FD", "pos_ff.CoreNet.0"),
  **torch_arrays.linear("feed_forward/out", "DF", "pos_ff.CoreNet.3"),
  **torch_arrays.norm("feed_forward_norm", "pos_ff.layer_norm"),
}
_POOLING: Table = {
  "stages_0/null_group": ("11D", "null_group"),
  **torch_arrays.norm("stages_0/inner_norm", "down_ln"),
}
_PREDICTION: Table = {
  **torch_arrays.linear("stages_0/boundaries/hidden", "FD", f"{_PREDICTOR}.0"),
  **torch_arrays.linear("stages_0/boundaries/out", "1F", f"{_PREDICTOR}.2"),
}
# Settings of boundaries as in the authors' code.
_DEFAULTS = dict(shortening_factor=None, space_ids=(), temperature=0.5, sample=False)


def from_torch(
  state_dict: Mapping,
  *,
  num_heads: int | None = None,
  variant: str = "paper",
  max_length: int | None = None,
  boundaries: str | None = None,
  shortening_factor: int | None = None,
  space_ids: tuple[int, ...] = (),
  temperature: float = 0.5,
  sample_boundaries: bool = False,
  config: Mapping | None = None,
) -> tuple[ConfigDict, dict]:
  """Converts a checkpoint of the papers' authors: Dispatcher, self-attention, pooling, H-Net.

    model_config, params = from_torch(torch.load(path, map_location="cpu"))
    model = dpjax.build_model(model_config)
    logits = model.apply({"params": params}, tokens).logits

  The model is recognized by its names. The conversion is linear, so it also converts gradients.

  Args:
    state_dict: names -> arrays (NumPy, or tensors of PyTorch), or a whole checkpoint with them
      under "model_state_dict" or "model_state". The latter's "model_config" is also read:
      the type of boundaries and the activation, GELU if missing.
    num_heads: heads of self-attention, which names and shapes do not show (None: 1).
    variant: "paper", or "multihead" for the Dispatcher authors' later file; with one head
      they differ only in the sigmoid of the gates.
    max_length: the longest T; None: the rows of `pos_encoder.pe`, which the pooling model lacks,
      and 8,192 for an H-Net.
    boundaries: for the pooling model: "none", "fixed", "whitespace", "unigram", "entropy" or
      "gumbel"; None if the file shows it, as without pooling.
    shortening_factor: k of fixed boundaries; the first is at 0, as in the authors' code.
    space_ids: the tokens that end a segment for whitespace, or in the reference of gumbel's scores.
    temperature: tau of gumbel.
    sample_boundaries: whether gumbel also draws boundaries in evaluation, like the authors.
    config: the JSON of an H-Net, which its arrays need; see `dpjax.interop.hnet.from_torch`.

  Returns:
    `config.model`, without dropout, and the parameters, float32.

  Raises:
    ValueError: names or shapes are not the authors', a setting contradicts the file or is
      missing, or it is a Dispatcher with several heads: the authors' code cuts its positions.
  """
  if variant not in ("paper", "multihead"):
    raise UserError(f"variant: expected paper or multihead, got {variant}")
  state = torch_arrays.find_state(state_dict)
  if (config is not None) != any(name.startswith("backbone.") for name in state):
    expected = "none without an H-Net" if config else "the JSON of the H-Net"
    raise UserError(f"config: expected {expected}, got {'one' if config else 'none'}")
  if config is not None:
    return hnet.from_torch(state, config, max_length=max_length or hnet.MAX_LENGTH)
  if "word_emb.weight" in state or "r_w_bias" in state:  # MemTransformerLM
    if variant != "paper":
      raise UserError(f"variant: expected paper for a MemTransformerLM, got {variant}")
    settings = dict(shortening_factor=shortening_factor, temperature=temperature)
    settings |= dict(space_ids=tuple(space_ids), sample=sample_boundaries)
    return _convert_pooled(state_dict, state, boundaries, num_heads, max_length, settings=settings)
  if boundaries not in (None, "none"):
    raise UserError(f"boundaries: expected none for a file without token pooling, got {boundaries}")
  num_heads = 1 if num_heads is None else num_heads
  is_attention = any(name.endswith(".in_proj_weight") for name in state)
  num_layers = max(len({match[1] for name in state if (match := _LAYER_NAME.fullmatch(name))}), 1)
  table = _table(_ATTENTION if is_attention else _DISPATCHER, num_layers)
  models = "DispatcherModel or TransformerModel"
  torch_arrays.check_names(state.keys() - {_POSITIONS}, table, models)
  arrays = torch_arrays.read_arrays(state)
  sizes = torch_arrays.read_sizes(arrays, table)
  positions = arrays.get(_POSITIONS)
  if positions is not None:
    _check_positions(positions, sizes["D"])
  if max_length is None:
    if positions is None:
      raise UserError(f"max_length: expected a number where {_POSITIONS} is missing, got None")
    max_length = len(positions)

  mixer = sections.mixer("attention", num_heads=num_heads)
  if not is_attention:
    _check_one_head(sizes, num_heads)
    name = "dispatcher" if variant == "paper" else "dispatcher_multihead"
    mixer = sections.mixer(name, num_heads=num_heads, num_levels=sizes["K"])
  model_config = sections.default_model()
  model_config.update(
    mixer=mixer,
    vocab_size=sizes["V"],
    num_layers=num_layers,
    width=sizes["D"],
    feed_forward_width=sizes["F"],
    max_length=max_length,
  )
  rules.check_model(model_config)
  return model_config, torch_arrays.to_params(arrays, table)


def _table(mixer: Table, num_layers: int) -> Table:
  prefixes = (f"{_LAYERS}.{index}" for index in range(num_layers))
  return {**_MODEL, **torch_arrays.of_layers({**_LAYER, **mixer}, "layers/blocks_0", prefixes)}


def _convert_pooled(
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
  layers = {(match[1], match[2]) for name in state if (match := _POOLED_NAME.fullmatch(name))}
  is_pooled = "null_group" in state or any(stack == "1" for stack, _ in layers)
  possible = ("none",)
  if is_pooled:
    possible = ("unigram", "entropy", "gumbel") if has_predictor else ("fixed", "whitespace")
  in_file = recorded.get("boundaries_type", "").removesuffix("s")
  possible = (in_file,) if in_file in possible else possible
  if boundaries is None and len(possible) == 1:
    boundaries = possible[0]
  if boundaries is None or boundaries not in possible:
    expected = f"{' or '.join(possible)} by what the file holds"
    raise UserError(f"boundaries: expected {expected}, got {boundaries}")
  stacks = ("0",) if boundaries == "none" else ("0", "1", "2")
  depths = [max(sum(each == stack for each, _ in layers), 1) for stack in stacks]
  table = _pooled_table(depths, has_predictor)
  torch_arrays.check_names(state.keys() - {_FREQUENCIES}, table, "MemTransformerLM")
  arrays = torch_arrays.read_arrays(state)
  sizes = torch_arrays.read_sizes(arrays, table)
  if num_heads not in (None, sizes["H"]):
    raise UserError(f"num_heads: expected the {sizes['H']} of r_w_bias, got {num_heads}")
  if sizes["H"] * sizes["E"] != sizes["D"]:
    expected, shape = f"heads of {sizes['D']} features together", (sizes["H"], sizes["E"])
    raise UserError(f"r_w_bias: expected {expected}, got the shape {shape}")
  if max_length is None:
    expected = "a number, as a MemTransformerLM has no table of positions"
    raise UserError(f"max_length: expected {expected}, got None")

  model_config = sections.default_model()
  model_config.update(
    mixer=sections.mixer("relative_attention", num_heads=sizes["H"]),
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
  if boundaries == "whitespace" and not settings["space_ids"]:
    raise UserError("space_ids: expected the space's for whitespace, got none")
  names = registry.boundaries.settings(boundaries)
  options = {name: x for name, x in settings.items() if name in names or x != _DEFAULTS[name]}
  options |= {"offset": 0} if boundaries == "fixed" else {}
  model_config.boundaries = sections.boundaries(boundaries, **options)
  rules.check_model(model_config)
  return model_config, torch_arrays.to_params(arrays, table)


def _pooled_table(depths: Sequence[int], has_predictor: bool) -> Table:
  """The table of a model with one or three stacks, given the number of blocks in each."""
  paths = ("layers",)
  table = {**_POOLED_MODEL, **_POOLED_POSITIONS}
  if len(depths) == 3:
    paths = ("stages_0/first", "layers", "stages_0/last")
    positions = {f"stages_0/{path}": line for path, line in _POOLED_POSITIONS.items()}
    table = {**_POOLED_MODEL, **positions, **_POOLING}
  for stack, (path, depth) in enumerate(zip(paths, depths, strict=True)):
    prefixes = (f"layers.{stack}.{index}" for index in range(depth))
    table |= torch_arrays.of_layers(_POOLED_LAYER, f"{path}/blocks_0", prefixes)
  return {**table, **(_PREDICTION if has_predictor else {})}


def to_torch(model_config: Mapping, params: Mapping) -> dict[str, np.ndarray]:
  """The parameters of a model by the authors' names, the inverse of `from_torch`.

    state = dpjax.interop.to_torch(run.config.model, run.params)
    torch.save({name: torch.from_numpy(x) for name, x in state.items()}, "model.pt")

  Settings that the file does not hold (attention's heads, the offset of fixed boundaries) must be
  given to `from_torch` again. Models other than the authors' keep dpjax's names, joined by dots.
  """
  flat = traverse_util.flatten_dict(params, sep="/")
  table = _table_of(model_config)
  if table is not None and table.keys() == flat.keys():
    return torch_arrays.from_params(params, table)
  return {name.replace("/", "."): np.asarray(x) for name, x in flat.items()}


def _table_of(model: Mapping) -> Table | None:
  """The table for the authors' model with the same settings, if there is one."""
  if (table := hnet.find_table(model)) is not None:
    return table
  mixer, *others = {section["name"] for section in sections.mixers_in(model).values()}
  boundaries, depths = model["boundaries"]["name"], [model["num_layers"]]
  has_predictor = boundaries in ("unigram", "entropy", "gumbel")
  if others or isinstance(model["mixer"], tuple) or model["middle"] is not None:
    return None
  if mixer == "relative_attention" and model["positions"] == "none":
    if boundaries != "none":
      depths = [model["first"]["num_layers"], *depths, model["last"]["num_layers"]]
    is_theirs = has_predictor or boundaries in ("none", "fixed", "whitespace")
    return _pooled_table(depths, has_predictor) if is_theirs else None
  frame = boundaries, model["positions"], model["activation"], model["mixer"].get("rotary_base")
  if frame != ("none", "sinusoidal", "relu", None):
    return None
  if mixer == "attention":
    return _table(_ATTENTION, *depths)
  is_theirs = mixer.startswith("dispatcher") and model["mixer"]["num_heads"] == 1
  return _table(_DISPATCHER, *depths) if is_theirs else None


def _check_one_head(sizes: Mapping[str, int], num_heads: int) -> None:
  # One row of gates per level and head; their 5000 positions have 12 levels.
  if num_heads == 1 and sizes["E"] == sizes["D"] and 1 <= sizes["K"] <= 12:
    return
  shape = f"{sizes['K']} rows of gates, matrices for {sizes['E']} of the {sizes['D']} features"
  raise UserError(
    f"num_heads: expected a Dispatcher of one head, got num_heads = {num_heads}, {shape}; with "
    "more the authors' code reshapes [B, T, D] to [B * H, T, D / H], which cuts positions instead "
    "of features"
  )


def _check_positions(table: np.ndarray, width: int) -> None:
  here = embeddings.sinusoidal_positions(len(table), width)[:, None]
  # Their angles are rounded to float32: they are off by up to 5e-4 after 5000 positions.
  if table.shape != here.shape or not np.allclose(table, here, rtol=0, atol=1e-3):
    expected = f"the sinusoidal positions, [max_length, 1, {width}]"
    raise UserError(f"{_POSITIONS}: expected {expected}, got others, {[*table.shape]}")
