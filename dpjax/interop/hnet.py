"""H-Net's checkpoints: the authors' JSON and arrays to (settings, parameters), and back.

A layout is ["m4", ["T1m4", ["T26"], "m4T1"], "m4"]: layers of Mamba-2 (m) and attention (t) before,
within and after each pooling; capitals have a feed-forward network.

Source: Hwang et al. 2025, arXiv:2507.07955; goombalab/hnet@3673fe1.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from dpjax import files
from dpjax.config import ConfigDict, rules, sections
from dpjax.errors import UserError
from dpjax.interop import torch_arrays, torch_files
from dpjax.interop.torch_arrays import Table

MAX_LENGTH = 8192  # bytes of a row in the authors' training
_KEYS = ("arch_layout", "d_model", "d_intermediate", "vocab_size", "ssm_cfg", "attn_cfg")
# Common to the authors' models.
_FRAME: dict[str, Any] = dict(
  positions="none",
  norm_position="pre",
  norm_type="rms_norm",
  norm_epsilon=1e-5,
  stack_norms=True,
  residual_dtype="float32",
  middle_resize="padding",
  use_bias=False,
  tie_embeddings=False,
  activation="swiglu",
)
_DRAWN = dict(init_std=0.02, embedding_std=1.0, scale_outputs=True)
_MIXERS: Mapping[str, Mapping[str, str]] = {
  "m": {
    "mixer/in/kernel": "mixer.in_proj.weight",
    "mixer/taps": "mixer.conv1d.weight",
    "mixer/taps_bias": "mixer.conv1d.bias",
    "mixer/dt_bias": "mixer.dt_bias",
    "mixer/a_log": "mixer.A_log",
    "mixer/skip": "mixer.D",
    "mixer/gain": "mixer.norm.weight",
    "mixer/out/kernel": "mixer.out_proj.weight",
  },
  "t": {
    "mixer/queries_keys_values/kernel": "mixer.Wqkv.weight",
    "mixer/out/kernel": "mixer.out_proj.weight",
  },
}
_NETWORK = {
  "feed_forward_norm/scale": "norm2.weight",
  "feed_forward/hidden/kernel": "mlp.fc1.weight:0",
  "feed_forward/gate/kernel": "mlp.fc1.weight:1",
  "feed_forward/out/kernel": "mlp.fc2.weight",
}
_STAGE = {
  "boundaries/query": "routing_module.q_proj_layer.weight",
  "boundaries/key": "routing_module.k_proj_layer.weight",
  "boundaries/residual/kernel": "residual_proj.weight",
  "boundaries/residual/bias": "residual_proj.bias",
  "first/out_norm/scale": "encoder.rmsnorm.weight",
  "last/out_norm/scale": "decoder.rmsnorm.weight",
}


def from_torch(
  state_dict: Mapping, config: Mapping, *, max_length: int = MAX_LENGTH, dtype: str = "float32"
) -> tuple[ConfigDict, dict]:
  """Converts a checkpoint of H-Net's authors to (`config.model`, parameters).

  Arrays in a file (`dpjax.interop.torch_files.open_arrays`) are read one at a time.

  Args:
    state_dict: names -> arrays, see `dpjax.interop.from_torch`.
    config: the authors' JSON.
    max_length: the longest row, which sets the size of full attention's caches.
    dtype: the dtype of the computation; "bfloat16" also of matrices (not W_r) and embeddings.

  Raises:
    ValueError: a name or a shape does not match the JSON's model, an array is not finite, or the
      JSON describes another model.
  """
  model = make_settings(config, max_length=max_length)
  model.dtype = dtype
  rules.check_model(model)
  table = find_table(model)
  assert table is not None
  state = torch_arrays.find_state(state_dict)
  torch_arrays.check_names(state, table, "H-Net of that layout")
  for name, shape in shapes_of(model).items():
    if (got := tuple(getattr(state[name], "shape", ("no array",)))) != shape:
      raise UserError(f"{name}: expected the shape {shape}, got {got}")
  narrow = [path for path in table if path.endswith((*torch_arrays.MATRICES, "embedding"))]
  narrow = {path: jnp.dtype(dtype) for path in narrow if "/residual/" not in path}
  return model, torch_arrays.to_params(state, table, narrow)


def make_settings(
  config: Mapping, *, max_length: int = MAX_LENGTH, factors: Sequence[float] = ()
) -> ConfigDict:
  """`config.model` for the authors' JSON; by default with the paper's routing targets N.

  Raises:
    ValueError: the JSON lacks a setting or has a value of the wrong type, or the model has no
      pooling or has tied embeddings.
  """
  if not isinstance(config, Mapping):
    raise UserError(f"config: expected the JSON object of an H-Net, got {config!r:.60}")
  if missing := [key for key in _KEYS if key not in config]:
    raise UserError(f"config: expected the JSON of an H-Net, got one without {', '.join(missing)}")
  layout, outer = config["arch_layout"], []
  while isinstance(layout, list) and len(layout) == 3:
    outer.append((layout[0], layout[2]))
    layout = layout[1]
  is_nested = outer and isinstance(layout, list) and len(layout) == 1
  strings = [*itertools.chain(*outer), *layout] if is_nested else [""]
  if not all(re.fullmatch(r"([mMtT][1-9]\d{0,3})+", str(x)) for x in strings):
    expected = 'a layout such as ["m4", ["T22"], "m4"]'
    raise UserError(f"arch_layout: expected {expected}, got {config['arch_layout']}")
  if config.get("tie_embeddings"):
    raise UserError("tie_embeddings: expected false, as of every released model, got true")
  _check_sizes(config, len(outer) + 1)
  # Multiples of 128; 0 where no layer has a feed-forward network.
  widths = [-(-width // 128) * 128 for width in config["d_intermediate"]]
  model = sections.default_model()
  model.update(**_FRAME, **_DRAWN, vocab_size=config["vocab_size"], max_length=max_length)
  model.update(width=config["d_model"][0], feed_forward_width=widths[0] or 1)
  factors = factors or ((6.0,) if len(outer) == 1 else (3.0,) * len(outer))
  stage = model
  for depth, (first, last) in enumerate(outer):
    stage.boundaries = sections.boundaries("routing", factor=factors[depth])
    for section, string in ((stage.first, first), (stage.last, last)):
      section.update(_make_stack(config, depth, string))
    sizes = dict(width=config["d_model"][depth + 1], feed_forward_width=widths[depth + 1])
    stage.middle = sections.middle(**sizes)
    stage = stage.middle
  model.update(_make_stack(config, len(outer), layout[0]))
  return model


def _check_sizes(config: Mapping, num_stages: int) -> None:
  """Checks the settings of each stage, and that the others have values that a model can have."""
  for name in ("attn_cfg", "ssm_cfg"):
    if not isinstance(config[name], Mapping):
      raise UserError(f"{name}: expected a JSON object, got {config[name]!r:.60}")
  # The least value of each stage; a window of -1 has no end.
  least = dict(d_model=1, d_intermediate=0, num_heads=0, rotary_emb_dim=0, window_size=-1)
  for name, minimum in least.items():
    values = config.get(name, config["attn_cfg"].get(name))
    is_list = isinstance(values, list | tuple) and len(values) == num_stages
    if not is_list or any(type(x) is not int or x < minimum for x in values):
      expected = f"{num_stages} integers of at least {minimum}, one for each stage"
      raise UserError(f"{name}: expected {expected}, got {values!r:.60}")
  if type(config["vocab_size"]) is not int:
    raise UserError(f"vocab_size: expected an integer, got {config['vocab_size']!r:.60}")


def _make_stack(config: Mapping, depth: int, layout: str) -> dict[str, Any]:
  """The sequence of mixers and the number of layers of "T1m4"."""
  letters = "".join(x * int(n) for x, n in re.findall(r"([mMtT])(\d+)", layout))
  period = next(
    n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters)).startswith(letters)
  )
  mixers = [_make_mixer(config, depth, letter) for letter in letters[:period]]
  return dict(num_layers=len(letters), mixer=mixers[0] if period == 1 else tuple(mixers))


def _make_mixer(config: Mapping, depth: int, letter: str) -> ConfigDict:
  options: dict[str, Any] = dict(has_feed_forward=letter.isupper())
  if letter in "mM":
    names = dict(d_state="state_width", d_conv="num_taps", expand="expand", headdim="head_width")
    options |= {names[key]: x for key, x in config["ssm_cfg"].items() if key in names}
    return sections.mixer("mamba2", **options)
  keys = ("num_heads", "rotary_emb_dim", "window_size")
  heads, rotated, window = (config["attn_cfg"][key][depth] for key in keys)
  rotary = dict(rotary_base=10_000.0, rotary_features=rotated) if rotated else {}
  options |= dict(num_heads=heads, use_bias=False, **rotary)
  if window < 0:
    return sections.mixer("attention", **options)
  return sections.mixer("local_attention", window=window + 1, **options)


def shapes_of(model: Mapping) -> dict[str, tuple[int, ...]]:
  """The shapes of the authors' arrays by name, for `config.model` of an H-Net."""
  from dpjax.models.build import assemble

  table, tokens = find_table(model), jax.ShapeDtypeStruct((1, 1), jnp.int32)
  assert table is not None
  params = jax.eval_shape(assemble(model).init, jax.random.key(0), tokens)["params"]
  return torch_arrays.find_shapes(traverse_util.flatten_dict(params, sep="/"), table)


def find_table(model: Mapping) -> Table | None:
  """The authors' names for the parameters of `config.model`, if it is an H-Net like theirs."""
  stages = [*sections.stages_in(model).values()]
  outer = [stage for stage in stages if sections.is_pooled(stage)]
  names = {section["name"] for section in sections.mixers_in(model).values()}
  is_theirs = all(model[key] == value for key, value in _FRAME.items())
  is_theirs &= {stage["boundaries"]["name"] for stage in outer} == {"routing"}
  if not is_theirs or not names <= {"mamba2", "attention", "local_attention"}:
    return None
  table = {"embedding/tokens/embedding": "embeddings.weight", "logits/kernel": "lm_head.weight"}
  name = "backbone"
  for depth, (stage, inner) in enumerate(itertools.zip_longest(outer, stages[1:])):
    path = f"stages_{depth}"
    table |= {f"{path}/{x}": f"{name}.{y}" for x, y in _STAGE.items()}
    for x, y in (("first", "encoder"), ("last", "decoder")):
      mixer = stage[x]["mixer"] or stage["mixer"]
      table |= _name_stack(f"{path}/{x}", f"{name}.{y}", mixer, stage[x]["num_layers"])
    if inner and inner["width"] != stage["width"]:
      table[f"{path}/padding"] = f"{name}.main_network.pad_dimension"
    name = f"{name}.main_network"
  name = f"{name}.main_network"
  table |= _name_stack("layers", name, model["mixer"], model["num_layers"])
  table["layers/out_norm/scale"] = f"{name}.rmsnorm.weight"
  return {path: ("", names) for path, names in table.items()}


def _name_stack(path: str, name: str, mixer: Any, num_layers: int) -> dict[str, Any]:
  """The names of the layers' arrays, by the paths of a `dpjax.models.Stack`."""
  mixers = [*sections.in_turn("", mixer).values()]
  table = {}
  for p, section in enumerate(mixers[:num_layers]):
    lines = {"mixer_norm/scale": "norm1.weight"}
    lines |= _MIXERS["m" if section["name"] == "mamba2" else "t"]
    lines |= _NETWORK if section["has_feed_forward"] else {}
    layers = range(p, num_layers, len(mixers))
    for line, inner in lines.items():
      table[f"{path}/blocks_{p}/{line}"] = tuple(f"{name}.layers.{i}.{inner}" for i in layers)
  return table


def find(path: Path) -> tuple[Path, Path] | None:
  """Finds the arrays and the JSON of a released model in a file or folder; None if absent.

  The JSON is named like the arrays' file, or is the config.json beside it. The arrays of a model in
  several files are those of their index, model.safetensors.index.json.

  Raises:
    ValueError: there are several models, or the arrays have no JSON.
  """
  patterns = [f"{folder}*{suffix}" for folder in ("", "*/") for suffix in torch_files.SUFFIXES]
  is_file = path.is_file() and path.name.endswith(torch_files.SUFFIXES)
  arrays = [path] if is_file else sorted(x for pattern in patterns for x in path.glob(pattern))
  indices = [x for x in arrays if x.name.endswith(torch_files.INDEX)]
  shards = {shard for index in indices for shard in torch_files.shards_of(index).values()}
  arrays = [x for x in arrays if x not in shards]
  stems = {x: _stem(x) for x in arrays}
  pairs = [(x, x.with_name(name)) for x in arrays for name in (f"{stems[x]}.json", "config.json")]
  pairs = {x: y for x, y in reversed(pairs) if "arch_layout" in files.read_json(y)}
  if len(pairs) > 1:
    names = ", ".join(sorted(map(str, pairs)))
    raise UserError(f"{path}: expected one released model, got {names}; take the path of one")
  if is_file and not pairs:
    expected = f"an H-Net's JSON beside it, {_stem(path)}.json or config.json"
    raise UserError(f"{path}: expected {expected}, with arch_layout, got none")
  return next(iter(pairs.items()), None)


def _stem(path: Path) -> str:
  """The name of an arrays' file without its suffix."""
  suffix = next(x for x in torch_files.SUFFIXES if path.name.endswith(x))
  return path.name.removesuffix(suffix)


def names_in(folder: Path) -> list[str]:
  """The names that H-Net arrays may have, relative to a folder with only their JSON."""
  names = [x.relative_to(folder) for x in (*folder.glob("*.json"), *folder.glob("*/*.json"))]
  names = [x for x in names if "arch_layout" in files.read_json(folder / x)]
  stems = [x.with_name("*") if x.name == "config.json" else x.with_suffix("") for x in names]
  suffixes = (*torch_files.SUFFIXES, "-*.safetensors")  # the last of a model in several files
  return [f"{x.as_posix()}{suffix}" for x in stems for suffix in suffixes]


def read(arrays: Path, config: Path, **options: Any) -> tuple[ConfigDict, dict]:
  """Applies `from_torch` to the files of a released model."""
  state = torch_files.open_arrays(arrays)
  try:
    return from_torch(state, files.load_json(config), **options)
  except UserError as error:
    raise UserError(f"{arrays}: {error}") from error
