"""Reads named arrays of a `.pt` or `.safetensors` file one at a time, without PyTorch."""

import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dpjax import files
from dpjax.errors import UserError

INDEX = ".safetensors.index.json"  # of a model in several files
SUFFIXES = (".pt", ".safetensors", INDEX)
_STORAGES = {"Float": "float32", "BFloat16": "bfloat16", "Half": "float16"}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class StoredArray(NamedTuple):
  """An array in a file, which `np.asarray` reads."""

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    try:
      return np.asarray(self.read(), dtype)
    except (ValueError, LookupError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
      reason = f"{type(error).__name__}: {error}"
      raise UserError(f"expected a complete array, got {reason}") from error


def open_arrays(path: Path) -> Mapping[str, Any]:
  """The content of a file: a mapping from names to `StoredArray`, in a `.pt` perhaps nested.

  An index, model.safetensors.index.json, stands for the files that it names.

  Raises:
    UserError: the file is damaged or compressed, or holds objects other than 16- or 32-bit arrays.
  """
  files.check_plain(path)
  try:
    if path.name.endswith(INDEX):
      return _open_shards(path)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pt(path)
  except UserError:
    raise
  except Exception as error:  # A damaged file may raise any of several types.
    if isinstance(error, OSError) and error.errno:
      raise
    reason = f"{type(error).__name__}: {error}"
    raise UserError(f"{path}: expected a complete file of arrays, got {reason}") from error


def _open_safetensors(path: Path) -> dict[str, StoredArray]:
  def reader(name):
    # Opened for each array: the pages of one that stays mapped would count as memory.
    def read():
      with safe_open(path, "flax") as file:
        return np.asarray(file.get_tensor(name))

    return read

  arrays = {}
  with safe_open(path, "flax") as file:
    for name in file.keys():
      about = file.get_slice(name)
      if about.get_dtype() not in _DTYPES:
        raise SafetensorError(f"{name} of {about.get_dtype()}")
      arrays[name] = StoredArray(tuple(about.get_shape()), reader(name))
  return arrays


def shards_of(index: Path) -> dict[str, Path]:
  """The file of each array that an index names, beside it.

  Raises:
    UserError: the index has no such names.
  """
  places = files.read_json(index).get("weight_map")
  if not isinstance(places, dict) or not all(
    isinstance(x, str) and x == Path(x).name and x.endswith(".safetensors") for x in places.values()
  ):
    expected = "a weight_map from names of arrays to .safetensors files beside it"
    raise UserError(f"{index}: expected {expected}, got another JSON")
  return {name: index.with_name(x) for name, x in places.items()}


def _open_shards(index: Path) -> dict[str, StoredArray]:
  places = shards_of(index)
  content = {}
  for path in sorted(set(places.values())):
    files.check_plain(path)
    content[path] = _open_safetensors(path)
  return {name: content[path][name] for name, path in places.items()}


def _open_pt(path: Path) -> Mapping[str, Any]:
  """Opens a zip archive with a pickle and the uncompressed storages that it names."""
  with zipfile.ZipFile(path) as archive:
    for about in archive.infolist():
      if about.compress_type != zipfile.ZIP_STORED or about.compress_size != about.file_size:
        expected = "entries without compression, as torch.save writes them"
        raise UserError(f"{path}: expected {expected}, got {about.filename} compressed")
    sizes = {about.filename: about.file_size for about in archive.infolist()}
    entry = next(x for x in sizes if x.endswith("data.pkl"))
    with archive.open(entry) as file:
      return _Unpickler(file, path, entry.removesuffix("data.pkl"), sizes).load()


class _Names(dict):
  """An ordered dictionary of PyTorch."""

  def __setstate__(self, state: Any) -> None:
    """Ignores attributes, which could replace the methods of the dictionary."""


class _Storage(NamedTuple):
  """Where numbers of one dtype lie in the archive."""

  dtype: Any
  entry: str
  count: int


class _Unpickler(pickle.Unpickler):
  """Allows only the classes and functions that a dictionary of arrays needs."""

  def __init__(self, file, path: Path, prefix: str, sizes: Mapping[str, int]):
    super().__init__(file)
    self._path = path
    self._prefix = prefix
    self._sizes = sizes

  def find_class(self, module: str, name: str) -> Any:
    storage = name.removesuffix("Storage")
    if module == "torch" and storage in _STORAGES:
      return _STORAGES[storage]
    classes = {
      ("collections", "OrderedDict"): _Names,
      ("torch._utils", "_rebuild_tensor_v2"): self._array,
      ("torch._utils", "_rebuild_parameter"): lambda array, *_: array,
    }
    if (module, name) not in classes:
      raise pickle.UnpicklingError(f"an object of {module}.{name}")
    return classes[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    _, name, key, _, count = pid
    dtype = jnp.dtype(name)
    entry = f"{self._prefix}data/{key}"
    if (size := self._sizes[entry]) != count * dtype.itemsize:
      raise pickle.UnpicklingError(f"{size} bytes for {count} numbers of {name} in {entry}")
    return _Storage(dtype, entry, count)

  def _array(self, storage: _Storage, offset, shape, strides, *_) -> StoredArray:
    dtype, entry, count = storage
    if min(offset, *shape) < 0 or offset + math.prod(shape) > count:
      raise pickle.UnpicklingError(f"an array {shape} at {offset} of {count} numbers")
    contiguous = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(x != y for x, y, size in zip(strides, contiguous, shape, strict=True) if size > 1):
      raise pickle.UnpicklingError(f"an array of strides {strides}")

    def read() -> np.ndarray:
      with zipfile.ZipFile(self._path) as archive:
        content = archive.read(entry)
      start = offset * dtype.itemsize
      return np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)

    return StoredArray(tuple(shape), read)
