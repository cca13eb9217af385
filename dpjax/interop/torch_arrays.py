"""Converts named arrays of PyTorch to parameters of dpjax, and back, by a table.

A table has an entry for every parameter of dpjax:

  path in dpjax -> (shape in PyTorch, name in PyTorch)
  path in dpjax -> (shape of each layer in PyTorch, tuple of the layers' names)

The second form stacks equal layers to [num_layers, ...]. A shape is a string with a letter
for the size of each axis; "3" stands for 3 D, "1" for itself. Matrices are [out, in] in
PyTorch and [in, out] here.
"""

from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax.errors import UserError

Names = str | tuple[str, ...]
Table = Mapping[str, tuple[str, Names]]


def find_state(content: Mapping) -> dict:
  """The names, without "module." of parallel training, and the arrays of a checkpoint."""
  state = content
  if isinstance(content, Mapping):
    state = content.get("model_state_dict", content.get("model_state", content))
  if not isinstance(state, Mapping):
    got = type(state).__name__
    raise UserError(f"state_dict: expected a mapping of names to arrays, got {got}")
  is_parallel = all(name.startswith("module.") for name in state)
  return {name.removeprefix("module.") if is_parallel else name: x for name, x in state.items()}


def linear(path: str, letters: str, name: str) -> Table:
  """The table of a kernel, [out, in] in PyTorch, and its bias."""
  return {
    f"{path}/kernel": (letters, f"{name}.weight"),
    f"{path}/bias": (letters[0], f"{name}.bias"),
  }


def norm(path: str, name: str) -> Table:
  """The table of a LayerNorm."""
  return {f"{path}/scale": ("D", f"{name}.weight"), f"{path}/bias": ("D", f"{name}.bias")}


def of_layers(lines: Table, prefix_path: str, prefixes: Iterable[str]) -> Table:
  """The table of equal layers from the table of one.

  {"out/bias": ("D", "o.bias")}, "layers", ["h.0", "h.1"]
    ->  {"layers/out/bias": ("D", ("h.0.o.bias", "h.1.o.bias"))}
  """
  prefixes = tuple(prefixes)
  return {
    f"{prefix_path}/{path}": (letters, tuple(f"{prefix}.{name}" for prefix in prefixes))
    for path, (letters, name) in lines.items()
  }


def check_names(names: Iterable[str], table: Table, models: str) -> None:
  """Checks that the names are exactly those of the table of the authors' `models`."""
  expected = {name for _, each in table.values() for name in _tuple(each)}
  unknown, missing = sorted({*names} - expected), sorted(expected - {*names})
  if missing or unknown:
    raise UserError(
      f"state_dict: expected the names of the authors' {models}, got "
      f"{unknown or 'none'} unknown, {missing or 'none'} missing"
    )


def read_arrays(state: Mapping) -> dict[str, np.ndarray]:
  """Converts tensors, or anything that NumPy reads, to float32."""
  return {
    name: np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, np.float32)
    for name, x in state.items()
  }


def read_sizes(arrays: Mapping[str, np.ndarray], table: Table) -> dict[str, int]:
  """The size of each letter, from the first array with it; a `ValueError` if shapes disagree."""
  sizes = {"1": 1}
  for letters, names in table.values():
    for name in _tuple(names):
      shape = arrays[name].shape
      for letter, size in zip(letters, shape, strict=False):
        sizes.setdefault(letter, 3 * sizes["D"] if letter == "3" else size)
      expected = tuple(sizes.get(letter) for letter in letters)
      if shape != expected:
        raise UserError(f"{name}: expected the shape {expected}, got {shape}")
  return sizes


def to_params(arrays: Mapping[str, np.ndarray], table: Table) -> dict:
  """The parameters as a tree; axes are only split, moved and stacked."""
  params = {}
  for path, (_, names) in table.items():
    each = [_convert(arrays[name], path) for name in _tuple(names)]
    params[path] = jnp.asarray(each[0] if isinstance(names, str) else np.stack(each))
  return traverse_util.unflatten_dict(params, sep="/")


def from_params(params: Mapping, table: Table) -> dict[str, np.ndarray]:
  """The arrays by their names in PyTorch, the inverse of `to_params`."""
  flat, arrays = traverse_util.flatten_dict(params, sep="/"), {}
  for path, (_, names) in table.items():
    array = np.asarray(flat[path])
    each = [array] if isinstance(names, str) else array
    for name, part in zip(_tuple(names), each, strict=True):
      arrays[name] = np.ascontiguousarray(_convert_back(part, path))
  return arrays


def _convert(array: np.ndarray, path: str) -> np.ndarray:
  if path.endswith("null_group"):
    return array.reshape(-1)
  if "queries_keys_values" in path:  # one matrix of 3D rows there, [D, 3, D] here
    array = array.reshape(3, -1, *array.shape[1:])
  return np.moveaxis(array, -1, 0) if path.endswith("kernel") else array


def _convert_back(array: np.ndarray, path: str) -> np.ndarray:
  if path.endswith("null_group"):
    return array.reshape(1, 1, -1)
  array = np.moveaxis(array, 0, -1) if path.endswith("kernel") else array
  return array.reshape(-1, *array.shape[2:]) if "queries_keys_values" in path else array


def _tuple(names: Names) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else names
