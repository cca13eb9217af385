"""Where a program runs: the platform that it is compiled for, and the devices of its arrays."""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import core, export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard, use_abstract_mesh

AXIS = "data"  # the mesh axis of a run's devices
_Function = TypeVar("_Function", bound=Callable)


def by_platform(functions: Mapping[str, Callable], *arrays: Any) -> Any:
  """Applies the function for the platform compiled for (`jax.lax.platform_dependent`).

  Keys are the platforms "cpu", "cuda", "rocm" or "tpu", and "default" for all others.
  """
  if len(functions) == 1:
    return functions["default"](*arrays)
  others = dict(functions)
  return lax.platform_dependent(*arrays, default=others.pop("default"), **others)


def has_cuda() -> bool:
  """Whether JAX's compiler for NVIDIA GPUs is installed, with or without a GPU."""
  return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def has_triton() -> bool:
  """Whether JAX can compile Pallas kernels for GPUs with Triton, which it will drop."""
  return has_cuda() and bool(importlib.util.find_spec("jax.experimental.pallas.triton"))


def num_devices() -> int:
  """The size of the current mesh (`jax.sharding.use_abstract_mesh`), or JAX's device count."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.device_count() if mesh.empty else mesh.size


def is_symbolic(x: jax.Array) -> bool:
  """Whether the first axis has a symbolic size, like a symbolic batch in `jax.export`."""
  return export.is_symbolic_dim(x.shape[0])


def each_row(run: Callable, *arrays: jax.Array) -> Any:
  """Applies `run` to one row per device at a time: what it computes stays in a CPU's caches."""
  devices = num_devices()
  if is_symbolic(arrays[0]) or len(arrays[0]) % devices:
    devices = 1
  rows = [jnp.moveaxis(x.reshape(devices, -1, *x.shape[1:]), 1, 0) for x in arrays]
  results = lax.map(lambda x: run(*x), rows)
  return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(-1, *y.shape[2:]), results)


def divide_rows(x: jax.Array) -> jax.Array:
  """Keeps the first axis of an activation sharded over the devices of a run, like its batch.

  Otherwise XLA may shard the features, like parameters (`train.param_sharding=fsdp`), and move
  activations at every layer. Does nothing outside a run.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or is_symbolic(x):
    return x
  return _constrain(x, AXIS) if x.shape[0] % mesh.size == 0 else x


def replicate(arrays: Any) -> Any:
  """Copies the arrays to each device of a run, once, before a loop that would gather repeatedly."""
  return jax.tree.map(_constrain, arrays)


def _constrain(x: jax.Array, *axes: str) -> jax.Array:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.axis_names != (AXIS,) or mesh.manual_axes or mesh.size == 1:
    return x
  return lax.with_sharding_constraint(x, PartitionSpec(*axes))


def pvary_like(arrays: Any) -> Any:
  """Within `jax.shard_map`, makes the arrays vary over all devices over which one of them does.

  JAX then sums the gradients of a `jax.custom_vjp` for arrays that devices share.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return arrays
  leaves = jax.tree.leaves(arrays)
  zero = sum((jnp.zeros_like(x, jnp.float32, shape=()) for x in leaves), jnp.float32(0))
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)


def automatic_axes(function: _Function) -> _Function:
  """Lets a function take arrays on a mesh with explicit axes, where JAX refuses many reshapes.

  Within the function the compiler chooses shardings. An axis of a result is sharded like the same
  axis of the first argument if both have the same size, and otherwise not at all
  (`jax.sharding.auto_axes` needs the shardings of results before the call):

    causal_convolution(f32[16@data, 12, 6], f32[12, 6, 5]) -> f32[16@data, 12, 5]
  """
  name = next(iter(inspect.signature(function).parameters))

  @functools.wraps(function)
  def run(*args, **kwargs):
    leaves, structure = jax.tree.flatten((args, kwargs))
    explicit = (x for x in leaves if isinstance(x, jax.Array) and _mesh(x).explicit_axes)
    example = next(explicit, None)
    if example is None:
      return function(*args, **kwargs)
    first = args[0] if args else kwargs[name]
    mesh, axes = _mesh(example), [*jax.typeof(first).sharding.spec]
    # Outside of `jit`, JAX needs the devices for a result that is not on the mesh yet.
    is_concrete = not isinstance(example, core.Tracer)
    devices = cast(NamedSharding, example.sharding).mesh if is_concrete else mesh

    def like_first(x):
      sizes = zip(axes, first.shape, x.shape, strict=False)
      spec = PartitionSpec(*(axis if a == b else None for axis, a, b in sizes))
      return reshard(x, NamedSharding(devices, spec))

    automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
    with use_abstract_mesh(automatic):
      leaves = [reshard(x, PartitionSpec()) if isinstance(x, jax.Array) else x for x in leaves]
      args, kwargs = jax.tree.unflatten(structure, leaves)
      result = function(*args, **kwargs)
    return jax.tree.map(like_first, result)

  return cast(_Function, run)


def _mesh(array):
  return jax.typeof(array).sharding.mesh
