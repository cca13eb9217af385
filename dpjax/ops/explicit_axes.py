"""Support for meshes with explicit axes, the default of `jax.make_mesh`."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar, cast

import jax
from jax import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard, use_abstract_mesh

_Function = TypeVar("_Function", bound=Callable)


def automatic_axes(function: _Function) -> _Function:
  """Lets a function take arrays on a mesh with explicit axes, where JAX refuses many reshapes.

  Within the function the compiler places the arrays. An axis of a result is sharded like the same
  axis of the first argument if both have the same size, and otherwise not at all
  (`jax.sharding.auto_axes` needs the shardings of results before the call):

    causal_convolution(f32[16@data, 12, 6], f32[12, 6, 5]) -> f32[16@data, 12, 5]
  """
  name = next(iter(inspect.signature(function).parameters))

  @functools.wraps(function)
  def run(*args, **kwargs):
    leaves, structure = jax.tree.flatten((args, kwargs))
    placed = (x for x in leaves if isinstance(x, jax.Array) and _mesh(x).explicit_axes)
    example = next(placed, None)
    if example is None:
      return function(*args, **kwargs)
    first = args[0] if args else kwargs[name]
    mesh, axes = _mesh(example), [*jax.typeof(first).sharding.spec]
    # Outside of `jit`, JAX needs the devices for a result that is not on the mesh yet.
    is_known = not isinstance(example, core.Tracer)
    devices = cast(NamedSharding, example.sharding).mesh if is_known else mesh

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
