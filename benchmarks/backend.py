"""What each workaround of `dpjax.ops.backend` gains, beside the program without it.

  python benchmarks/backend.py --parts=opaque --out results/backend

"plain" is the base: the same program with the workaround replaced by what it stands for. Where
"ours" is no longer faster, the workaround can go. The parts:

  opaque   arrays that several operations read: dropout, shift-and-sum and relative attention
  row      products of single rows, as in a step of generation
  complex  products of Fourier transforms with matrices
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import ops
from dpjax.ops import attention_tiles, backend, products

dropout_module = importlib.import_module("dpjax.ops.dropout")
shift_and_sum_module = importlib.import_module("dpjax.ops.shift_and_sum")


def draw(*shape: int, dtype: str = "float32") -> jax.Array:
  return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


def without(module: ModuleType, name: str, plain: Callable, run: Callable) -> Callable:
  """`run`, traced with another function under a name of a module."""

  def run_without(*arguments):
    with mock.patch.object(module, name, plain):
      return run(*arguments)

  return run_without


def case(name: str, ours: Callable, plain: Callable, *arguments: jax.Array) -> harness.Case:
  programs = harness.compile_all({"plain": plain, "ours": ours}, *arguments)
  return harness.Case(name, "plain", programs)


def gradients(run: Callable) -> Callable:
  """The gradients of the sum of the result by all arguments."""

  def pull(*arguments):
    result, transpose = jax.vjp(run, *arguments)
    return transpose(jnp.ones_like(result))

  return pull


def opaque(quick: bool) -> Iterator[harness.Case]:
  batch, length, width = (2, 32, 16) if quick else (8, 512, 512)

  def identity(x):
    return x

  def drop(x):
    return ops.dropout(x, 0.1, jax.random.key(0))

  x = draw(batch, length, width)
  yield case(f"dropout, {x.shape}", drop, without(dropout_module, "opaque", identity, drop), x)

  values = draw(batch, length, 1, width)
  gates = jax.nn.sigmoid(draw(batch, length, 1, ops.num_levels(length)))
  pull = gradients(functools.partial(ops.shift_and_sum, implementation="recompute"))
  plain = without(shift_and_sum_module, "opaque", identity, pull)
  yield case(f"shift_and_sum, {values.shape}, gradient", pull, plain, values, gates)

  def in_chunks(values, gates):
    cache = ops.init_shift_and_sum_cache(batch, 1, width, gates.shape[3])
    return ops.shift_and_sum_cached(values, gates, cache)

  def concatenate(x, parts, axis):
    return jnp.concatenate(parts, axis)

  plain = without(shift_and_sum_module, "write_over", concatenate, in_chunks)
  yield case(f"shift_and_sum_cached, {values.shape}", in_chunks, plain, values, gates)

  heads, features, size = (2, 8, 16) if quick else (8, 64, 128)
  qkv = [draw(1, 2 * length, heads, features) + i for i in range(3)]
  positions = draw(2 * length, heads, features)
  biases = [draw(heads, features) + i for i in range(2)]
  pull = gradients(functools.partial(ops.relative_attention, block_size=size))
  plain = without(attention_tiles, "opaque", identity, pull)
  name = f"relative attention in tiles, {qkv[0].shape}, gradient"
  yield case(name, pull, plain, *qkv, positions, *biases)


def row(quick: bool) -> Iterator[harness.Case]:
  batch, heads, slots, features = (2, 2, 32, 8) if quick else (16, 8, 512, 64)
  for dtype in ("float32", "bfloat16"):
    x = draw(batch, heads, slots, dtype=dtype)
    y = draw(batch, heads, slots, features, dtype=dtype)
    plain = functools.partial(
      jnp.einsum, "bhk,bhkn->bhn", preferred_element_type=products.sum_dtype(x, y)
    )
    yield case(f"row_product, {y.shape}, {dtype}", products.row_product, plain, x, y)
  x = draw(batch, slots, features)
  y = draw(1, slots, features)
  indices = np.random.default_rng(0).integers(0, slots, (batch, slots))

  def add(x, y):
    return products.sum_products(x, y, jnp.asarray(indices))

  def add_plainly(x, y):
    return jnp.sum(backend.take_rows(x, jnp.asarray(indices)) * y, axis=-2)

  yield case(f"sum_products, {x.shape}", add, add_plainly, x, y)
  width = 64 if quick else 512
  x = draw(1, width, dtype="bfloat16")
  y = draw(width, width, dtype="bfloat16")
  ours = functools.partial(backend.multiply_low_on_cpu, "rk,kn->rn")
  plain = functools.partial(backend.multiply_low, "rk,kn->rn")
  yield case(f"a row times {y.shape}, bfloat16", ours, plain, x, y)


def complex_products(quick: bool) -> Iterator[harness.Case]:
  batch, width, frequencies = (2, 4, 8) if quick else (16, 128, 256)
  x = jax.lax.complex(draw(batch, width, frequencies), draw(batch, width, frequencies) + 1)
  w = jax.lax.complex(draw(width, width, frequencies), draw(width, width, frequencies) + 1)
  ours = functools.partial(backend.complex_einsum, "bdf,def->bef")
  plain = functools.partial(jnp.einsum, "bdf,def->bef", precision="highest")
  yield case(f"{x.shape} times {w.shape}", ours, plain, x, w)


if __name__ == "__main__":
  PARTS = {"opaque": opaque, "row": row, "complex": complex_products}
  harness.main(__doc__, PARTS, name="backend")
