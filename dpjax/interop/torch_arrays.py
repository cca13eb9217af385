"""Converts named arrays of PyTorch to parameters of dpjax, and back, by a table.

A table has an entry for every parameter of dpjax:

  path in dpjax -> (shape in PyTorch, name in PyTorch)
  path in dpjax -> (shape of each layer in PyTorch, tuple of the layers' names)

The second form stacks equal layers to [num_layers, ...]. A shape is a string with a letter
for the size of each axis; "3" stands for 3 D, "1" for itself. Matrices are [out, in] in
PyTorch and [in, out] here. A name ending in ":0" or ":1" refers to that half of the rows.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax.errors import UserError

Names = str | tuple[str, ...]
Table = Mapping[str, tuple[str, Names]]
MATRICES = "kernel", "boundaries/query", "boundaries/key"


def find_state(content: Mapping) -> dict:
  """A checkpoint's arrays by name, without the prefix "module." of parallel training."""
  state = content
  if isinstance(content, Mapping):
    state = content.get("model_state_dict", content.get("model_state", content))
  if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
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

  {"out/bias": ("D", "o.bias")}, "layers/blocks_0", ["h.0", "h.1"]
    ->  {"layers/blocks_0/out/bias": ("D", ("h.0.o.bias", "h.1.o.bias"))}
  """
  prefixes = tuple(prefixes)
  return {
    f"{prefix_path}/{path}": (letters, tuple(f"{prefix}.{name}" for prefix in prefixes))
    for path, (letters, name) in lines.items()
  }


def check_names(names: Iterable[str], table: Table, models: str) -> None:
  """Checks that the names are exactly those of the table of the authors' `models`."""
  expected = {name.partition(":")[0] for _, each in table.values() for name in _tuple(each)}
  unknown, missing = sorted({*names} - expected), sorted(expected - {*names})
  if missing or unknown:
    raise UserError(
      f"state_dict: expected the names of the authors' {models}, got "
      f"{_first(unknown)} unknown, {_first(missing)} missing"
    )


def _first(names: list[str]) -> str:
  return f"{names[:4] or 'none'}{f' and {len(names) - 4} more' if names[4:] else ''}"


def find_shapes(params: Mapping, table: Table) -> dict[str, tuple[int, ...]]:
  """The shapes in PyTorch by name; `params` maps paths to a model's arrays, perhaps abstract."""
  shapes = {}
  for path, (_, names) in table.items():
    is_stack = not isinstance(names, str)
    part = jax.ShapeDtypeStruct(params[path].shape[is_stack:], jnp.float32)
    shape = jax.eval_shape(functools.partial(_convert_back, path=path), part).shape
    for name, _, half in (name.partition(":") for name in _tuple(names)):
      shapes[name] = (2 * shape[0], *shape[1:]) if half else shape
  return shapes


def read_arrays(state: Mapping) -> dict[str, np.ndarray]:
  """Converts tensors, or anything that NumPy reads, to float32."""
  return {name: _read(x) for name, x in state.items()}


def _read(x: Any) -> np.ndarray:
  x = x.detach().cpu() if hasattr(x, "detach") else x
  return np.asarray(x.float() if hasattr(x, "float") else x, np.float32)  # NumPy has no bfloat16.


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


def to_params(state: Mapping, table: Table, dtypes: Mapping[str, Any] | None = None) -> dict:
  """The parameters as a tree; axes are only split, moved and stacked.

  Arrays are read one at a time. `dtypes` maps paths to dtypes other than float32.

  Raises:
    UserError: an array has nan or infinity.
  """
  params = {}
  for path, (_, names) in table.items():
    dtype, stack = (dtypes or {}).get(path, jnp.float32), None
    for i, (name, _, half) in enumerate(name.partition(":") for name in _tuple(names)):
      array = _read(state[name])
      if not np.isfinite(array).all():
        raise UserError(f"{name}: expected finite numbers, got nan or infinity")
      array = np.split(array, 2)[int(half)] if half else array
      array = _convert(array, path)
      if isinstance(names, str):
        params[path] = jnp.array(array, dtype)
        continue
      if stack is None:
        stack = jnp.zeros((len(names), *array.shape), dtype)
      params[path] = stack = _put(stack, array, i)
  return traverse_util.unflatten_dict(params, sep="/")


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack, array, i):
  return jax.lax.dynamic_update_index_in_dim(stack, array.astype(stack.dtype), i, 0)


def from_params(params: Mapping, table: Table) -> dict[str, np.ndarray]:
  """The arrays by their names in PyTorch, the inverse of `to_params`."""
  flat, arrays = traverse_util.flatten_dict(params, sep="/"), {}
  for path, (_, names) in table.items():
    array = np.asarray(flat[path])
    each = [array] if isinstance(names, str) else array
    for name, part in zip(_tuple(names), each, strict=True):
      part, (name, _, half) = _convert_back(part, path), name.partition(":")
      part = np.concatenate([arrays[name], part]) if half == "1" else part
      arrays[name] = np.ascontiguousarray(part)
  return arrays


def _convert(array: Any, path: str) -> Any:
  if path.endswith("null_group"):
    return array.reshape(-1)
  if "queries_keys_values" in path:  # one matrix of 3D rows there, [D, 3, D] here
    array = array.reshape(3, -1, *array.shape[1:])
  if path.endswith("mixer/taps"):  # [F, 1, k] there, the token's own last; [k, F] here
    return array[:, 0, ::-1].T
  return array.transpose(-1, *range(array.ndim - 1)) if path.endswith(MATRICES) else array


def _convert_back(array: Any, path: str) -> Any:
  if path.endswith("null_group"):
    return array.reshape(1, 1, -1)
  if path.endswith("mixer/taps"):
    return array[::-1].T[:, None]
  array = array.transpose(*range(1, array.ndim), 0) if path.endswith(MATRICES) else array
  return array.reshape(-1, *array.shape[2:]) if "queries_keys_values" in path else array


def _tuple(names: Names) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else names
