"""The Pallas kernels of shift-and-sum against Alg. 1, interpreted, and their lowering.

The suite runs on a CPU; on a GPU, which compiles the kernels,

  pytest --noconftest -n 0 tests/ops/test_shift_and_sum_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import shift_and_sum, shift_and_sum_gpu
from tests.ops.test_shift_and_sum import SHAPE, assert_close, draw
from tests.reference import dispatcher as reference
from tests.reference import exact

# JAX 0.11 and 0.12 still have the backend, and say that a later one will not.
OLD_BACKEND = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="compiles for a GPU")
CUSTOM_CALL = "__gpu$xla.gpu.triton"


def kernels(values, gates, level_keep=None, **options):
  return shift_and_sum_gpu.shift_and_sum(values, gates, level_keep, **options)


def small(tile=8, backward_tile=4):
  """Interpreted, on tiles so small that a short sequence takes several passes."""
  return functools.partial(kernels, interpret=True, tile=tile, backward_tile=backward_tile)


# Shapes, and the tiles of the forward and the backward pass.
TILED = [
  ((2, 15, 3, 5, 4), 8, 8),  # The first pass has one level; T is padded.
  ((2, 37, 1, 20, 6), 8, 4),  # Two passes of 3 levels, backward three.
  ((1, 8, 2, 40, 3), 8, 2),  # Two blocks of features; passes of one level.
  ((2, 29, 3, 5, 2), 4, 4),  # Halos alone: the levels do not reach across T.
  ((2, 13, 3, 5, 4), 64, 16),  # One pass of one tile.
  ((2, 17, 1, 5, 5), 8, 8),  # One row more than two tiles.
]


@pytest.mark.parametrize(
  "shape, tile, backward_tile",
  [TILED[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in TILED[1:])],
  ids=str,
)
def test_equals_the_algorithm(shape, tile, backward_tile):
  assert_close(*exact.both(small(tile, backward_tile), reference.shift_and_sum, draw(*shape)))


@pytest.mark.slow
def test_a_dropped_level_is_a_level_of_zero_gates():
  (values, gates), keep = draw(*SHAPE), np.array([True, False, True, False])
  operator = functools.partial(small(), level_keep=keep)
  equation = functools.partial(reference.shift_and_sum, level_keep=keep)
  found, expected = exact.both(operator, equation, (values, gates))
  assert_close(found, expected)
  np.testing.assert_array_equal(found[2][..., ~keep], 0)
  not_a_number = values, jnp.where(keep, gates, jnp.nan)
  assert_close(exact.both(operator, equation, not_a_number)[0], found)


def test_keeps_no_level_for_the_backward_pass():
  values, gates = draw(*SHAPE)
  pull = jax.eval_shape(lambda *x: jax.vjp(small(), *x)[1], values, gates)
  sizes = sorted(x.size for x in jax.tree.leaves(pull))
  assert sizes == sorted([values.size, gates.size])


@OLD_BACKEND
def test_lowers_without_the_device():
  """Two passes of three levels; backward, all but one of three again, and three."""
  shapes = (2, 37, 3, 20), (2, 37, 3, 6), (2, 37, 3, 20)
  values, gates, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
  operator = functools.partial(kernels, interpret=False, tile=8, backward_tile=4)
  # From JAX 0.11 on, Triton's lowering asks for the type of the GPU.
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    train = jax.jit(functools.partial(exact.with_gradients, operator))
    traced = jax.jit(operator).trace(values, gates), train.trace((values, gates), weights)
    texts = [x.lower(lowering_platforms=("cuda",)).as_text() for x in traced]
  assert [text.count(CUSTOM_CALL) for text in texts] == [2, 2 + 2 + 3]
  # Kernels are where the levels are: nothing else runs over the values.
  assert "stablehlo.while" not in texts[1] and "stablehlo.case" not in texts[1]


@ON_GPU
@OLD_BACKEND
@pytest.mark.parametrize(
  "shape", [(2, 512, 3, 20, 9), (1, 4096, 1, 480, 12), (2, 1000, 1, 160, 10)], ids=str
)
def test_the_compiled_kernels_equal_the_algorithm(shape):
  values, gates = draw(*shape)
  arrays = values, 0.3 * gates
  assert CUSTOM_CALL in jax.jit(kernels).lower(*arrays).compile().as_text()
  for a, b in zip(*exact.both(kernels, reference.shift_and_sum, arrays), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("way", ["vmap", pytest.param("devices", marks=pytest.mark.slow)])
def test_rows_are_mapped_or_on_several_devices(way):
  draw = np.random.default_rng(0).standard_normal
  values, gates = (jnp.asarray(draw((8, 5, 2, size)), jnp.float32) for size in (4, 3))

  def run(implementation, values, gates):
    def total(values, gates):
      return jnp.sum(jnp.sin(shift_and_sum(values, gates, implementation=implementation)))

    return jax.grad(total, (0, 1))(values, gates)

  expected, run = run("unrolled", values, gates), functools.partial(run, "pallas")
  if way == "vmap":
    mapped = jax.vmap(run, (0, None))(jnp.stack([-values, values]), gates)
    result = jax.tree.map(lambda x: x[1], mapped)
  else:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    placed = jax.device_put((values, gates), rows)
    with jax.set_mesh(mesh):
      compiled = jax.jit(run).lower(*placed).compile()
    result = compiled(*placed)
    assert "all-gather" not in compiled.as_text()
  for ours, theirs in zip(result, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)
