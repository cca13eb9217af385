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

ROUNDING = dict(rtol=1e-5, atol=1e-5)
LOOP = functools.partial(shift_and_sum, implementation="loop")
# JAX 0.11 and 0.12 still have the backend, and say that a later one will not.
OLD_BACKEND = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="compiles for a GPU")
CUSTOM_CALL = "__gpu$xla.gpu.triton"


def kernels(values, gates, level_keep=None, **options):
  return shift_and_sum_gpu.shift_and_sum(values, gates, level_keep, **options)


@functools.cache
def small(tile=8, backward_tile=4):
  """Interpreted, on tiles so small that a short sequence takes several passes."""
  return functools.partial(kernels, interpret=True, tile=tile, backward_tile=backward_tile)


def draw(batch, length, heads, features, levels, dtype=jnp.float32):
  """Values, gates in (0, 1), and the weights of a scalar to differentiate."""
  generator = np.random.default_rng(length)
  values = generator.standard_normal((batch, length, heads, features))
  gates = generator.uniform(size=(batch, length, heads, levels))
  weights = generator.standard_normal(values.shape)
  return tuple(jnp.asarray(x, dtype) for x in (values, gates, weights))


@functools.partial(jax.jit, static_argnums=0)
def run(operator, values, gates, weights, level_keep=None):
  """The result and its gradients by values and gates."""
  result, pull = jax.vjp(lambda *x: operator(*x, level_keep=level_keep), values, gates)
  return result, *pull(weights)


def assert_close(actual, expected, **tolerance):
  for name, a, b in zip(("result", "values", "gates"), actual, expected, strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    np.testing.assert_allclose(a, b, **(tolerance or ROUNDING), err_msg=name)


SHAPE = (2, 13, 3, 5, 4)


# Shapes, and the tiles of the forward and the backward pass.
TILED = [
  ((2, 15, 3, 5, 4), 8, 8),  # The first pass has one level; T is padded.
  ((2, 37, 1, 20, 6), 8, 4),  # Two passes of 3 levels, backward three.
  ((1, 8, 2, 40, 3), 8, 2),  # Two blocks of features; passes of one level.
  ((2, 29, 3, 5, 2), 4, 4),  # Halos alone: the levels do not reach across T.
  ((2, 2, 3, 5, 1), 64, 16),
  ((2, 13, 3, 5, 4), 64, 16),  # One pass of one tile.
  ((3, 16, 2, 8, 4), 4, 16),  # Two passes.
  ((2, 17, 1, 5, 5), 8, 8),  # One row more than two tiles.
  ((2, 23, 1, 5, 3), 4, 2),  # A last pass of several tiles.
]


@pytest.mark.parametrize(
  "shape, tile, backward_tile",
  [TILED[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in TILED[1:])],
  ids=str,
)
def test_equals_the_algorithm(shape, tile, backward_tile):
  arrays = draw(*shape)
  operator = small(tile, backward_tile)
  assert_close(run(operator, *arrays), run(LOOP, *arrays))


@pytest.mark.slow
@pytest.mark.parametrize("level_keep", [[True, False, True, False], [False] * 4], ids=str)
def test_a_dropped_level_is_a_level_of_zero_gates(level_keep):
  arrays = draw(*SHAPE)
  keep = jnp.asarray(level_keep)
  kept = run(small(), *arrays, keep)
  assert_close(kept, run(LOOP, *arrays, keep))
  np.testing.assert_array_equal(kept[2][..., ~np.asarray(keep)], 0)
  not_a_number = run(small(), arrays[0], jnp.where(keep, arrays[1], jnp.nan), arrays[2], keep)
  assert_close(not_a_number, kept)


def test_keeps_no_level_for_the_backward_pass():
  values, gates, _ = draw(*SHAPE)
  pull = jax.eval_shape(lambda *x: jax.vjp(small(), *x)[1], values, gates)
  sizes = sorted(x.size for x in jax.tree.leaves(pull))
  assert sizes == sorted([values.size, gates.size])


@OLD_BACKEND
def test_lowers_without_the_device():
  """Two passes of three levels; backward, all but one of three again, and three."""
  shapes = (2, 37, 3, 20), (2, 37, 3, 6), (2, 37, 3, 20)
  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  operator = functools.partial(kernels, interpret=False, tile=8, backward_tile=4)
  # From JAX 0.11 on, Triton's lowering asks for the type of the GPU.
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(operator).trace(*arrays[:2]), run.trace(operator, *arrays)
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
  values, gates, weights = draw(*shape)
  arrays = values, 0.3 * gates, weights
  compiled = run.lower(kernels, *arrays).compile()
  assert CUSTOM_CALL in compiled.as_text()
  for a, b in zip(compiled(*arrays), run(LOOP, *arrays), strict=True):
    scale = float(jnp.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(
  "axes", ["vmap", *(pytest.param(x, marks=pytest.mark.slow) for x in ("auto", "explicit"))]
)
def test_rows_are_mapped_or_on_several_devices(axes):
  draw = np.random.default_rng(0).standard_normal
  values, gates = (jnp.asarray(draw((8, 5, 2, size)), jnp.float32) for size in (4, 3))

  def run(implementation, values, gates):
    def total(values, gates):
      return jnp.sum(jnp.sin(shift_and_sum(values, gates, implementation=implementation)))

    return jax.grad(total, (0, 1))(values, gates)

  expected = run("unrolled", values, gates)
  if axes == "vmap":
    mapped = jax.vmap(functools.partial(run, "pallas"), (0, None))(
      jnp.stack([-values, values]), gates
    )
    result = jax.tree.map(lambda x: x[1], mapped)
  else:
    axis = getattr(jax.sharding.AxisType, axes.title())
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(axis,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    placed = jax.device_put((values, gates), rows)
    with jax.set_mesh(mesh):
      compiled = jax.jit(functools.partial(run, "pallas")).lower(*placed).compile()
    result = compiled(*placed)
    assert axes == "explicit" or "all-gather" not in compiled.as_text()
  for ours, theirs in zip(result, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)
