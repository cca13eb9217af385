"""What every operator does: explicit axes, `jax.shard_map`, several devices, float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from dpjax import ops
from dpjax.ops import norms, products
from dpjax.training import losses
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


def cached(operator, init, num_parts, **options):
  """The outputs of the operator on two chunks; the last arguments are shared."""

  def run(*arrays):
    cache, outputs = init(dtype=arrays[0].dtype), []
    for part in (slice(0, 4), slice(4, LENGTH)):
      parts = [x[:, part] for x in arrays[:num_parts]]
      output, cache = operator(*parts, *arrays[num_parts:], cache, **options)
      outputs.append(output)
    return jnp.concatenate(outputs, axis=1)

  return run


def nats(logits):
  targets, weights = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 5, np.ones_like(BOUNDARIES)
  return losses.cross_entropy(logits, targets, weights.astype(np.float32))[0]


def cases():
  """(name, operator, arrays by rows, arrays that all rows share)."""
  for name in ("loop", "unrolled", "recompute", "pallas"):
    operator = partial(ops.shift_and_sum, implementation=name)
    yield f"shift_and_sum {name}", operator, GATED, ()

  def with_shared_gates(values, gates):
    return ops.shift_and_sum(values, jnp.broadcast_to(gates, (len(values), *gates.shape)))

  yield "shift_and_sum of shared gates", with_shared_gates, GATED[:1], (draw(LENGTH, 2, 3),)
  yield "layer_norm", norms.layer_norm, (INPUTS,), (draw(5), 1 - draw(5))
  yield "dispatch_matrix", ops.dispatch_matrix, GATED[1:], ()
  for size in (4, LENGTH):
    attend = partial(ops.causal_attention, block_size=size)
    yield f"causal_attention {size}", attend, QKV, ()
    attend = partial(ops.relative_attention, block_size=size)
    yield f"relative_attention {size}", attend, QKV, RELATIVE
  attend = partial(ops.causal_attention, block_size=4, window=3)
  yield "local attention", attend, QKV, ()
  yield "rotate", ops.rotate, (draw(BATCH, LENGTH, 2, 4),), (draw(1, LENGTH, 2),)
  for name, *shape in (("scan", 5, 3), ("toeplitz", 5), ("fft",), ("dft", 5, 3)):
    operator = partial(ops.causal_convolution, implementation=name)
    yield f"causal_convolution {name}", operator, (INPUTS,), (draw(LENGTH, *shape),)
  yield "short_convolution", ops.short_convolution, (INPUTS,), (draw(3, 5),)

  def state_space(inputs, dt, b, c, decay):
    return ops.selective_state_space(inputs, dt, -decay, b, c, chunk_size=4)

  b = QKV[1][:, :, :1]  # of one group
  by_rows = QKV[0], draw(BATCH, LENGTH, 2), b, 1 - b
  yield "selective_state_space", state_space, by_rows, (draw(2),)

  def low_product(inputs, matrix):
    with ops.product_dtype("bfloat16"):
      return products.product("btd,de->bte", inputs, matrix)

  yield "product in bfloat16", low_product, (INPUTS,), (draw(5, 3),)
  for method in ("mean", "last"):
    pool = partial(ops.pool_segments, capacity=4, method=method)
    yield f"pool_segments {method}", pool, (INPUTS, BOUNDARIES), ()
  yield "upsample_segments", ops.upsample_segments, (INPUTS, BOUNDARIES), ()
  yield "conditional_entropy", ops.conditional_entropy, (INPUTS,), ()
  init = partial(ops.init_shift_and_sum_cache, BATCH, 2, 3, 3)
  yield "shift_and_sum_cached", cached(ops.shift_and_sum_cached, init, 2), GATED, ()
  init = partial(ops.init_attention_cache, BATCH, LENGTH, 2, 3)
  yield "causal_attention_cached", cached(ops.causal_attention_cached, init, 3), QKV, ()
  few = partial(ops.init_attention_cache, BATCH, 3, 2, 3)
  yield "local_attention_cached", cached(ops.local_attention_cached, few, 3), QKV, ()
  attend = cached(ops.relative_attention_cached, init, 3)
  yield "relative_attention_cached", attend, QKV, RELATIVE
  init = partial(ops.init_convolution_cache, BATCH, LENGTH, 5)
  operator = cached(ops.causal_convolution_cached, init, 1)
  yield "causal_convolution_cached", operator, (INPUTS,), (draw(LENGTH),)
  init = partial(ops.init_segment_cache, BATCH, 5)
  operator = cached(ops.pool_segments_cached, init, 2)
  yield "pool_segments_cached", operator, (INPUTS, BOUNDARIES), ()


CASES = [*cases()]
# One of each way to share arrays and to cut them.
DEFAULT = {
  *("shift_and_sum recompute", "shift_and_sum of shared gates", "shift_and_sum_cached"),
  *("relative_attention 4", "local attention", "causal_convolution fft", "product in bfloat16"),
  *("pool_segments mean", "upsample_segments", "selective_state_space", "layer_norm"),
}


def parametrize(cases, default):
  return pytest.mark.parametrize(
    "name, operator, by_rows, shared",
    [helpers.slow_unless(case[0] in default, *case, id=case[0]) for case in cases],
  )


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


@parametrize(CASES, DEFAULT)
def test_rows_on_several_devices(name, operator, by_rows, shared):
  arrays, run = (*by_rows, *shared), with_gradients(operator)
  expected = jax.jit(run)(*arrays)
  specs = [ROWS] * len(by_rows) + [PartitionSpec()] * len(shared)

  def place(mesh):
    return [jax.device_put(x, NamedSharding(mesh, y)) for x, y in zip(arrays, specs, strict=True)]

  explicit = jax.make_mesh((8,), ("rows",))
  assert explicit.axis_types == (jax.sharding.AxisType.Explicit,)
  actual = jax.jit(run)(*place(explicit))
  assert_close(actual, expected)
  results = [actual[0]]
  if name in ("shift_and_sum recompute", "causal_attention 6", "causal_convolution fft"):
    placed = *place(explicit)[: len(by_rows)], *shared  # Shared: on one device.
    results.append(operator(*placed))
    with jax.set_mesh(explicit):
      results.append(operator(*placed))
  for result in results:
    np.testing.assert_allclose(result, expected[0], rtol=1e-5, atol=1e-5)
    assert jax.typeof(result).sharding.spec[0] == "rows"
  if "pallas" in name:
    return
  mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  if "cached" not in name:
    by_floats = [s for s, x in zip(specs, arrays, strict=True) if x.dtype == np.float32]
    each = jax.shard_map(run, mesh=mesh, in_specs=(*specs,), out_specs=(ROWS, *by_floats))
    assert_close(jax.jit(each)(*arrays), expected)
  if "fft" not in name:
    compiled = jax.jit(run).lower(*place(mesh)).compile()
    assert_close(compiled(*place(mesh)), expected)
    if name != "product in bfloat16":  # JAX 0.10 gathers factors of 16 bits.
      # Devices exchange the gradients of shared arrays alone.
      assert helpers.collectives(compiled) == ({"all-reduce"} if shared else set())


def test_a_loss_in_pieces_within_shard_map():
  targets, kernel, bias = BOUNDARIES + 1, draw(5, 7) - 0.5, draw(7)
  arrays = INPUTS, targets, np.ones(targets.shape, np.float32), kernel, bias

  def run(hidden, targets, weights, kernel, bias):
    def nats(*arrays):
      return losses.output_nats(*arrays, targets, weights)

    value, grads = jax.value_and_grad(nats, argnums=(0, 1, 2))(hidden, kernel, bias)
    return value[None], *grads

  mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  everywhere = PartitionSpec()
  specs = dict(in_specs=(ROWS,) * 3 + (everywhere,) * 2, out_specs=(ROWS, ROWS) + (everywhere,) * 2)
  value, *grads = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(*arrays)
  assert_close((value.sum(keepdims=True), *grads), jax.jit(run)(*arrays))


# Of a row that does not count, too.
prior = partial(ops.binomial_prior_loss, alpha=0.2, weights=np.tri(3, 7, -1, bool))
LOSSES = [
  ("cross_entropy", nats, (INPUTS,), ()),
  ("binomial_prior_loss", prior, (draw(3, 7),), ()),
]


@parametrize(
  [case for case in CASES if "pallas" not in case[0]] + LOSSES,
  DEFAULT | {"conditional_entropy", "dispatch_matrix"} | {name for name, *_ in LOSSES},
)
def test_results_and_gradients_have_the_precision_of_float64(name, operator, by_rows, shared):
  with jax.enable_x64(True):
    arrays = [*by_rows, *shared]
    floats = [i for i, x in enumerate(arrays) if x.dtype == np.float32]

    @jax.jit
    def run(*wide):
      given = dict(zip(floats, wide, strict=True))
      return operator(*(given.get(i, x) for i, x in enumerate(arrays)))

    wide = [jnp.asarray(arrays[i], jnp.float64) for i in floats]
    assert run(*wide).dtype == jnp.float64
    # Differences of results: sums in float32 would have errors of 1e-7 / 1e-5.
    check_grads(run, wide, 1, ["rev"], atol=1e-6, rtol=1e-6, eps=1e-5)
