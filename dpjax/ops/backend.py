"""What operators do only because of how XLA and JAX compile them.

None of it changes an equation. Without it, programs are slower, take more memory, are refused or,
with two versions, hang. Each function names what is wrong and what shows its gain: a part of a
benchmark (`python benchmarks/NAME.py --parts=PART`), or a test. All were last tried with JAX
0.12.0.1, and are to be tried again with 0.13, unless they say otherwise.

Four workarounds are an order of lines or of axes, and stay where they are:

- Caches are written before they are read (`attention_cache`, `convolution`), and with an index for
  every head: else XLA copies them at every step. Benchmark: generation, part operators.
- `attention_cache` sums values as "bhcm,bhme->bhce", for which XLA:CPU has fast products; those of
  the order that it needs take twice as long. Benchmark: generation, part prompts.
- `products.dot_general` multiplies matrices: for a gradient that sums over two axes, XLA:CPU first
  transposes a factor. Benchmark: step, part paper.
- `convolution` replaces "fft" by "dft" for several devices: XLA computes the FFTs of a distributed
  batch on every device. The program's text shows it; there is no benchmark.
"""

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard, use_abstract_mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from dpjax.ops.placement import AXIS, is_symbolic, num_devices

_Function = TypeVar("_Function", bound=Callable)
_Result = TypeVar("_Result")
_Tree = TypeVar("_Tree")


# Platforms: the fastest program differs among them.


def by_platform(functions: Mapping[str, Callable[..., _Result]], *arrays: PyTree) -> _Result:
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


# Fusion: XLA computes an array again in each loop that reads it, or fuses too much into one loop.


def opaque(arrays: _Tree) -> _Tree:
  """The arrays, whose values and expressions XLA does not see (`lax.optimization_barrier`).

  XLA:CPU fuses an expression into each operation that reads it, and so computes it repeatedly: the
  random words of dropout four times, a tile's padded gradients twice, and, in shift-and-sum, a
  level once for every later level, which branches on values that it does not know prevent.

  Benchmark: backend, part opaque.
  """
  return lax.optimization_barrier(arrays)


def write_over(x: jax.Array, parts: Sequence[jax.Array], axis: int) -> jax.Array:
  """`jnp.concatenate(parts, axis)`, with the shape of `x`, whose memory it may take.

  XLA computes a concatenation again in each operation that reads it.

  Benchmark: backend, part opaque ("shift_and_sum_cached").
  """
  start = 0
  for part in parts:
    x = lax.dynamic_update_slice_in_dim(x, part, start, axis)
    start += part.shape[axis]
  return x


def to_stored(x: jax.Array) -> jax.Array:
  """`x` of 16 bits, as the forward pass should store it for the gradient; see `from_stored`.

  Before JAX 0.11, at every layer XLA:CPU converts all floats of 16 bits that a scan has stored so
  far to float32 and back, but not integers.

  Benchmark: step, part paper, with JAX 0.10.1. It goes with JAX 0.10.
  """
  if jax.__version_info__ < (0, 11):
    return lax.bitcast_convert_type(x, jnp.uint16)
  return x


def from_stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """The array that `to_stored` was applied to, of the dtype `dtype`."""
  return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


# Memory: XLA:CPU computes an operation for all rows before the next one.


def each_row(run: Callable[..., PyTree], *arrays: jax.Array) -> PyTree:
  """Applies `run` to one row per device at a time: what it computes stays in a CPU's caches.

  Benchmark: ops, parts attention ("default" beside "whole") and shift_and_sum ("recompute" beside
  "unrolled").
  """
  devices = num_devices()
  if is_symbolic(arrays[0]) or len(arrays[0]) % devices:
    devices = 1
  rows = [jnp.moveaxis(x.reshape(devices, -1, *x.shape[1:]), 1, 0) for x in arrays]
  results = lax.map(lambda x: run(*x), rows)
  return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(-1, *y.shape[2:]), results)


# Products: XLA:CPU multiplies few orders of axes in 16 bits, and single rows slowly.


def multiply_low(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """An einsum of two arrays of one dtype of 16 bits, with sums in float32."""
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=lax.Precision.DEFAULT)


def multiply_low_on_cpu(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """`multiply_low`, with the summed axes of `x` last in memory.

  XLA:CPU multiplies other orders in float32, even those of a transposition without the constraint,
  which then moves nothing. A single row takes a loop of 1 GB/s; with a second row of zeros, and
  sums over `_PART` terms at a time, it is faster than in float32.

  Benchmark: ops, part products ("product" beside "bfloat16"); for single rows backend, part row.
  """
  terms, result = spec.split("->")
  a, b = terms.split(",")
  shared = [c for c in a if c in b and c in result]
  summed = [c for c in a if c in b and c not in result]
  rows = [c for c in a if c not in b]
  columns = [c for c in b if c not in a]
  order = shared + rows + summed
  if order != [*a]:
    # Without the barrier, XLA:CPU fuses slices of what a scan stored, and takes four times as long.
    x = jnp.transpose(lax.optimization_barrier(x), [a.index(c) for c in order])
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  sums = [order.index(c) for c in summed], [b.index(c) for c in summed]
  batch = [order.index(c) for c in shared], [b.index(c) for c in shared]
  if math.prod(x.shape[order.index(c)] for c in rows) == 1:
    z = _multiply_row(x, y, sums, batch)
  else:
    z = _low_dot_general(x, y, sums, batch)
  # XLA may fold the transposition of the result into a product that XLA:CPU does not have.
  z = lax.optimization_barrier(z)
  return jnp.transpose(z, [(shared + rows + columns).index(c) for c in result])


_Axes = tuple[list[int], list[int]]  # of the first factor and of the second
_PART = 64  # terms of a sum of one row, by benchmarks/generation.py


def _multiply_row(x: jax.Array, y: jax.Array, sums: _Axes, batch: _Axes) -> jax.Array:
  """`lax.dot_general` of factors of 16 bits, x [shared.., 1.., summed..]."""
  sums_of_y = sums[1]
  batch_of_y = batch[1]
  num_summed = len(sums_of_y)
  num_shared = len(batch_of_y)
  columns = [n for i, n in enumerate(y.shape) if i not in (*sums_of_y, *batch_of_y)]
  shape = *x.shape[: x.ndim - num_summed], *columns
  x = x.reshape(*x.shape[:num_shared], 1, *x.shape[x.ndim - num_summed :])
  has_parts = not num_shared and sums_of_y == [0] and x.size % _PART == 0
  if has_parts:
    x = x.reshape(-1, 1, _PART)
    y = y.reshape(-1, _PART, *y.shape[1:])
    num_shared = 1
    batch_of_y = [0]
    sums_of_y = [1]
  x = jnp.pad(x, [(0, 1 if i == num_shared else 0) for i in range(x.ndim)])
  sums_of_x = [*range(num_shared + 1, x.ndim)]
  z = _low_dot_general(x, y, (sums_of_x, sums_of_y), ([*range(num_shared)], batch_of_y))
  z = lax.index_in_dim(z, 0, num_shared, keepdims=False)
  return (jnp.sum(z, axis=0) if has_parts else z).reshape(shape)


def _low_dot_general(x: jax.Array, y: jax.Array, sums: _Axes, batch: _Axes) -> jax.Array:
  return lax.dot_general(
    x, y, (sums, batch), preferred_element_type=jnp.float32, precision=lax.Precision.DEFAULT
  )


_MOST_PARTS = 16  # the fastest of 8, 16, 32 and 64, for 128 and 512 slots of 64 features


def sum_parts(
  x: jax.Array, y: jax.Array, dtype: DTypeLike, rows: jax.Array | None = None
) -> jax.Array:
  """Sums x * y over axis -2 in `dtype`, as a sum of products of parts of this axis, K.

  `rows` are those of `products.sum_products`. XLA:CPU multiplies rows of a batch on one core, and
  those of 16 bits at 1 GB/s; `jnp.sum(x * y)` over an axis can take thirty times as long. Sums of
  slices it fuses, for all cores. A prime K is one slice.

  Benchmark: backend, part row.
  """
  length = y.shape[-2]
  count = next(n for n in range(_MOST_PARTS, 0, -1) if length % n == 0)
  if rows is None:
    xs = jnp.split(x, count, axis=-2)
  else:  # Each part is read where it is added, without a copy.
    xs = [take_rows(x, part) for part in jnp.split(rows, count, axis=-1)]
  ys = jnp.split(y, count, axis=-2)
  terms = [a.astype(dtype) * b.astype(dtype) for a, b in zip(xs, ys, strict=True)]
  # Without the barrier, XLA:CPU would fuse all into loops that it does not vectorize.
  return jnp.sum(lax.optimization_barrier(sum(terms[1:], terms[0])), axis=-2)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  """x[b, rows[b, k]], [B, K, N]; the rows are not checked.

  By default JAX compares each index with the bounds, and selects.
  """
  return jax.vmap(lambda x, rows: x.at[rows].get(mode="promise_in_bounds"))(x, rows)


# Fourier transforms of XLA:CPU.

# An FFT of XLA:CPU waits for tasks that it gives to a pool of threads. With these versions it also
# does so on a thread of that pool, so that as many FFTs as there are threads wait for each other
# for ever (openxla/xla PR 46347). Before 0.11.1, such an FFT takes no other thread; from 0.12 on,
# programs run on threads of their own, and an FFT does itself what no thread has begun.
# Test: tests/ops/test_fft_deadlock.py. It goes with JAX 0.11.
FFT_CAN_DEADLOCK = metadata.version("jaxlib").split(".")[:3] in (
  ["0", "11", "1"],
  ["0", "11", "2"],
)


def transform_rows(transform: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a transform of the last axis, such as `jnp.fft.fft`, to x as a matrix.

  For a distributed batch, XLA:CPU rejects layouts that it chooses itself for more axes.

  Test: `test_all_operators.py`.
  """
  return transform(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def complex_einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """`jnp.einsum` of two complex arrays by four real ones: complex products are slow on a CPU.

  Benchmark: backend, part complex.
  """

  def multiply(x, y):
    return jnp.einsum(spec, x, y, precision="highest")

  return lax.complex(
    multiply(x.real, y.real) - multiply(x.imag, y.imag),
    multiply(x.real, y.imag) + multiply(x.imag, y.real),
  )


# Several devices: how XLA and JAX shard what an operator computes.


def divide_rows(x: jax.Array) -> jax.Array:
  """Keeps the first axis of an activation sharded over the devices of a run, like its batch.

  Otherwise XLA may shard the features, like parameters (`train.param_sharding=fsdp`), and move
  activations at every layer. Does nothing outside a run.

  Benchmark: compiled, with --scale.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or is_symbolic(x):
    return x
  return _constrain(x, AXIS) if x.shape[0] % mesh.size == 0 else x


def replicate(arrays: _Tree) -> _Tree:
  """Copies the arrays to each device of a run, once, before a loop that would gather repeatedly.

  Benchmark: compiled, with --scale.
  """
  return jax.tree.map(_constrain, arrays)


def _constrain(x: jax.Array, *axes: str) -> jax.Array:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.axis_names != (AXIS,) or mesh.manual_axes or mesh.size == 1:
    return x
  return lax.with_sharding_constraint(x, PartitionSpec(*axes))


def automatic_axes(function: _Function) -> _Function:
  """Lets a function take arrays on a mesh with explicit axes, where JAX refuses many reshapes.

  Within the function the compiler chooses shardings. An axis of a result is sharded like the same
  axis of the first argument if both have the same size, and otherwise not at all
  (`jax.sharding.auto_axes` needs the shardings of results before the call):

    causal_convolution(f32[16@data, 12, 6], f32[12, 6, 5]) -> f32[16@data, 12, 5]

  Test: `test_all_operators.py`.
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
    mesh = _mesh(example)
    axes = jax.typeof(first).sharding.spec
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


def _mesh(array: jax.Array):
  return jax.typeof(array).sharding.mesh
