"""Operators on batches spread over devices: explicit axes, and `jax.shard_map`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dpjax import ops
from tests import helpers

ROWS = PartitionSpec("rows")
BATCH, LENGTH = 16, 6


def draw(*shape):
  return np.random.default_rng(len(shape)).uniform(0.1, 0.9, shape).astype(np.float32)


GATED = (draw(BATCH, LENGTH, 2, 3), draw(BATCH, LENGTH, 2, 3)[:, ::-1].copy())
QKV = tuple(draw(BATCH, LENGTH, 2, 3) ** power for power in (1, 2, 3))
RELATIVE = (draw(LENGTH, 2, 3), draw(2, 3), 1 - draw(2, 3))
INPUTS = draw(BATCH, LENGTH, 5)
BOUNDARIES = (draw(BATCH, LENGTH) > 0.6).astype(np.int32)


def cached(operator, init, last=()):
  """The outputs of the operator on two chunks."""

  def run(*arrays):
    cache, outputs = init(), []
    for part in (slice(0, 4), slice(4, LENGTH)):
      output, cache = operator(*(x[:, part] for x in arrays), *last, cache)
      outputs.append(output)
    return jnp.concatenate(outputs, axis=1)

  return run


def pool_cached(inputs, boundaries):
  cache = ops.init_segment_cache(BATCH, 5)
  return ops.pool_segments_cached(inputs, boundaries, cache)[0]


def cases():
  """(name, operator, arrays by rows, arrays that all rows share)."""
  for name in ("loop", "unrolled", "recompute", "matrix", "pallas"):
    operator = partial(ops.shift_and_sum, implementation=name)
    yield f"shift_and_sum {name}", operator, GATED, ()
  yield "dispatch_matrix", ops.dispatch_matrix, GATED[1:], ()
  for size in (4, LENGTH):
    attend = partial(ops.causal_attention, block_size=size)
    yield f"causal_attention {size}", attend, QKV, ()
    attend = partial(ops.relative_attention, block_size=size)
    yield f"relative_attention {size}", attend, QKV, RELATIVE
  for name in ("scan", "conv", "toeplitz", "fft", "dft"):
    for taps in (draw(LENGTH), draw(LENGTH, 5), draw(LENGTH, 5, 3)):
      operator = partial(ops.causal_convolution, implementation=name)
      yield f"causal_convolution {name} {taps.ndim}", operator, (INPUTS,), (taps,)
  for method in ("mean", "last"):
    pool = partial(ops.pool_segments, capacity=4, method=method)
    yield f"pool_segments {method}", pool, (INPUTS, BOUNDARIES), ()
  yield "upsample_segments", ops.upsample_segments, (INPUTS, BOUNDARIES), ()
  yield "conditional_entropy", ops.conditional_entropy, (INPUTS,), ()


def cached_cases():
  init = partial(ops.init_shift_and_sum_cache, BATCH, 2, 3, 3)
  yield "shift_and_sum_cached", cached(ops.shift_and_sum_cached, init), GATED, ()
  init = partial(ops.init_attention_cache, BATCH, LENGTH, 2, 3)
  yield "causal_attention_cached", cached(ops.causal_attention_cached, init), QKV, ()
  attend = cached(ops.relative_attention_cached, init, RELATIVE)
  yield "relative_attention_cached", attend, QKV, ()
  for init in (ops.init_convolution_cache, ops.init_online_convolution_cache):
    last, init = (draw(LENGTH),), partial(init, BATCH, LENGTH, 5)
    operator = cached(ops.causal_convolution_cached, init, last)
    yield f"causal_convolution_cached {init.func.__name__}", operator, (INPUTS,), ()
  yield "pool_segments_cached", pool_cached, (INPUTS, BOUNDARIES), ()


def with_gradients(operator):
  """(arrays) -> the result, and the gradients of a sum by the floats."""

  def run(*arrays):
    floats = [i for i, x in enumerate(arrays) if x.dtype == jnp.float32]

    def loss(*arrays):
      result = operator(*arrays)
      weights = jnp.cos(jnp.arange(result.shape[-1], dtype=jnp.float32))
      return jnp.sum(result @ weights), result

    by_arrays, result = jax.grad(loss, argnums=floats, has_aux=True)(*arrays)
    return result, *by_arrays

  return run


def assert_close(actual, expected):
  for x, y in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


CASES = [*cases(), *cached_cases()]
OUTSIDE_OF_JIT = ("shift_and_sum recompute", "causal_attention 6", "causal_convolution fft 1")
# One of each operator.
DEFAULT = {
  *("shift_and_sum recompute", "dispatch_matrix", "causal_attention 6", "relative_attention 4"),
  *("causal_convolution fft 1", "causal_convolution scan 3", "pool_segments mean"),
  *("upsample_segments", "conditional_entropy", "shift_and_sum_cached"),
  "relative_attention_cached",
}


@pytest.mark.parametrize(
  "name, operator, by_rows, shared",
  [helpers.slow_unless(case[0] in DEFAULT, *case, id=case[0]) for case in CASES],
)
def test_explicit_axes_and_shard_map(name, operator, by_rows, shared):
  arrays, run = (*by_rows, *shared), with_gradients(operator)
  expected = jax.jit(run)(*arrays)
  mesh = jax.make_mesh((8,), ("rows",))
  assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
  specs = tuple(ROWS if i < len(by_rows) else PartitionSpec() for i in range(len(arrays)))
  placed = [jax.device_put(x, NamedSharding(mesh, y)) for x, y in zip(arrays, specs, strict=True)]
  actual = jax.jit(run)(*placed)
  assert_close(actual, expected)
  results = [actual[0]]
  if name in OUTSIDE_OF_JIT:
    results.append(operator(*placed[: len(by_rows)], *shared))  # Shared: on one device.
    with jax.set_mesh(mesh):
      results.append(operator(*placed[: len(by_rows)], *shared))
  for result in results:
    np.testing.assert_allclose(result, expected[0], rtol=1e-5, atol=1e-5)
    assert jax.typeof(result).sharding.spec[0] == "rows"
  if "cached" not in name and "pallas" not in name:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    by_floats = [s for s, x in zip(specs, arrays, strict=True) if x.dtype == np.float32]
    each = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(ROWS, *by_floats))
    assert_close(jax.jit(each)(*arrays), expected)


@pytest.mark.parametrize(
  "name, operator, by_rows, shared",
  [
    helpers.slow_unless(
      case[0] in {"shift_and_sum recompute", "relative_attention 4"}, *case, id=case[0]
    )
    for case in CASES
    if "fft" not in case[0] and "pallas" not in case[0]
  ],
)
def test_rows_on_several_devices_exchange_gradients_of_what_they_share_alone(
  name, operator, by_rows, shared
):
  rows, everywhere = helpers.over_devices()
  run = jax.jit(with_gradients(operator))
  placed = [jax.device_put(x, rows) for x in by_rows]
  placed += [jax.device_put(x, everywhere) for x in shared]
  compiled = run.lower(*placed).compile()
  assert_close(compiled(*placed), run(*by_rows, *shared))
  assert helpers.collectives(compiled) == ({"all-reduce"} if shared else set())
