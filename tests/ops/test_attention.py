"""Attention beside float64, at once and in tiles: values, gradients, dropout, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.layers import embeddings
from tests.reference import attention as reference
from tests.reference import exact
from tests.reference.exact import normal

BATCH, HEADS, FEATURES, BLOCK = 2, 3, 5, 8
ATTENTIONS = {"causal": ops.causal_attention, "relative": ops.relative_attention}


def draw(name, length, heads=HEADS, features=FEATURES):
  """The arguments, and the gradient of the result."""
  shapes = [(BATCH, length, heads, features)] * 4
  if name == "relative":
    # Two distances more than there are.
    shapes += [(length + 2, heads, features), (heads, features), (heads, features)]
  generator = np.random.default_rng(5)
  weights, *arguments = (jnp.float32(generator.standard_normal(shape)) for shape in shapes)
  return arguments, weights


def with_gradients(name, **settings):
  """(arguments, weights) -> the result and the gradients of its sum times the weights."""

  def run(arguments, weights):
    function = functools.partial(ATTENTIONS[name], **settings)
    result, pull = jax.vjp(function, *arguments)
    return result, *pull(weights)

  return run


def assert_close(actual, expected, tolerance=1e-5):
  for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=f"number {i}")


@pytest.mark.parametrize(
  "name, length, window, block",
  [
    ("causal", 7, None, 7),
    ("causal", 29, None, BLOCK),
    ("causal", 7, 5, 7),
    ("causal", 19, 11, BLOCK),
    ("causal", 5, 1, 2),
    ("relative", 1, None, 1),
    ("relative", 7, None, 7),
    ("relative", 2 * BLOCK, None, BLOCK),
    ("relative", 29, None, BLOCK),
  ],
)
def test_attention_is_the_equation(name, length, window, block):
  arguments, weights = draw(name, length)
  settings = {} if window is None else dict(window=window)
  run = with_gradients(name, block_size=block, **settings)
  program = str(jax.make_jaxpr(run)(arguments, weights))
  assert ("scan" in program or "while" in program) == (block < length)
  equation = functools.partial(reference.attention, **settings)
  assert_close(jax.jit(run)(arguments, weights), exact.run(equation, arguments, weights))


STARTS = np.zeros((BATCH, 5 * BLOCK), np.int32)
STARTS[:, [0, 2 * BLOCK, 2 * BLOCK + 3]] = 1


@pytest.mark.parametrize(
  "settings", [dict(window=BLOCK - 1), dict(document_starts=STARTS)], ids=["window", "documents"]
)
def test_tiles_in_which_no_query_sees_a_key_are_not_computed(settings):
  # A tile that reads nan gives nan, wherever its weights are 0.
  place = 2 * BLOCK
  (q, k, v), weights = draw("causal", 5 * BLOCK)
  v = v.at[:, :BLOCK].set(jnp.nan)
  run = jax.jit(with_gradients("causal", block_size=BLOCK, **settings))
  y, *grads = run((q, k, v), weights.at[:, :place].set(0))
  assert np.isfinite(y[:, place:]).all() and not np.isfinite(y[:, place - 1]).any()
  assert all(np.isfinite(grad[:, place:]).all() for grad in grads)


@pytest.mark.parametrize("length, width", [(7, 6), (13, 5), (3, 1)])
def test_relative_positions_are_those_of_tokens_with_the_sines_first(length, width):
  by_turns = embeddings.sinusoidal_positions(length, width)
  sines_first = np.concatenate([by_turns[:, ::2], by_turns[:, 1::2]], axis=1)
  np.testing.assert_array_equal(ops.relative_positions(length, width), sines_first)


def test_large_scores_are_finite():
  arguments, weights = draw("relative", 19)
  large = [100 * x for x in arguments]
  actual = jax.jit(with_gradients("relative", block_size=BLOCK))(large, weights)
  assert all(np.isfinite(x).all() for x in actual)
  assert_close(actual[:1], [exact.run(reference.attention, large)])


@pytest.mark.parametrize("low", [("values",), ("queries", "keys", "values")], ids=len)
@pytest.mark.parametrize("name, block", [("causal", 19), ("causal", BLOCK), ("relative", BLOCK)])
def test_arguments_of_16_bits(name, block, low):
  arguments, weights = draw(name, 19)
  is_low = [len(low) == 3 or i == 2 for i in range(len(arguments))]
  dtypes = [jnp.bfloat16 if x else jnp.float32 for x in is_low]
  rounded = [x.astype(dtype) for x, dtype in zip(arguments, dtypes, strict=True)]
  rounded = rounded, weights.astype(jnp.bfloat16)
  run = jax.jit(with_gradients(name, block_size=block))
  actual = run(*rounded)
  assert [x.dtype for x in actual] == [jnp.bfloat16, *dtypes]
  expected = run(*jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
  for x, y in zip(actual, expected, strict=True):
    # A bfloat16 has 8 bits: 0.4% each, over a few roundings.
    np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=0, atol=0.02 * np.abs(y).max())


def test_what_comes_later_does_not_count_even_nan():
  length, place = 3 * BLOCK - 2, 2 * BLOCK
  arguments, weights = draw("relative", length)
  run = jax.jit(with_gradients("relative", block_size=BLOCK))
  # The gradient of what comes first is 0 at all that comes later, and at nothing before.
  before, *grads = run(arguments, weights.at[:, place:].set(0))
  for grad in grads[:3]:
    np.testing.assert_array_equal(grad[:, place:], 0)
    assert (np.abs(grad[:, 1:place]).max(axis=3) > 0).all()
  changed = [x.at[:, place:].set(jnp.nan) for x in arguments[:3]] + arguments[3:]
  np.testing.assert_array_equal(run(changed, weights)[0][:, :place], before[:, :place])


def weights_of(name, length, block_size, rate, key):
  """[B, T, H, S]: values of which position s has feature s alone."""
  arguments, _ = draw(name, length, features=length)
  arguments[2] = jnp.broadcast_to(jnp.eye(length)[None, :, None], arguments[2].shape)
  return ATTENTIONS[name](*arguments, dropout_rate=rate, dropout_key=key, block_size=block_size)


def test_dropout_is_of_the_weights():
  length, rate = 29, 0.3
  exact = jax.jit(functools.partial(weights_of, "causal", length, length, 0.0))(None)
  train = jax.jit(functools.partial(weights_of, "causal", length, BLOCK, rate))
  keys = jax.random.split(jax.random.key(0), 3)
  dropped = np.stack([train(key) for key in keys])
  np.testing.assert_array_equal(dropped[1], train(keys[1]))
  is_past = np.tril(np.ones((length, length), bool))[None, None, :, None]
  is_past = np.broadcast_to(is_past, dropped.shape)
  is_kept = dropped != 0
  assert not (is_kept & ~is_past).any()
  exact = np.broadcast_to(exact, dropped.shape)
  np.testing.assert_allclose(dropped[is_kept], exact[is_kept] / (1 - rate), rtol=1e-5)
  # Five times the deviation of the share.
  count = is_past.sum()
  assert abs(is_kept.sum() / count - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5
  # No two tiles, rows, heads or keys drop the same.
  blocks = [np.s_[i * BLOCK : (i + 1) * BLOCK] for i in range(3)]
  tiles = [is_kept[:, :, blocks[i], :, blocks[j]] for i in range(3) for j in range(i)]
  tiles = np.moveaxis(np.stack(tiles), 4, 3).reshape(-1, BLOCK**2)
  assert len(np.unique(tiles, axis=0)) == len(tiles) == 3 * 3 * BATCH * HEADS


def test_the_gradient_drops_what_the_result_dropped():
  length, key = 19, jax.random.key(2)
  arguments, weights = draw("relative", length)
  kept = jax.jit(functools.partial(weights_of, "relative", length, BLOCK, 0.3))(key)
  factors_bths = np.float32(kept != 0) / 0.7

  def expected(queries, keys, values, *relative):
    # The same mask over weights that the values of a unit matrix give.
    unit = jnp.broadcast_to(jnp.eye(length)[:, None], (BATCH, length, HEADS, length))
    weights_bths = reference.attention(queries, keys, unit, *relative)
    return jnp.einsum("bths,bshe->bthe", weights_bths * factors_bths, values)

  run = with_gradients("relative", dropout_rate=0.3, dropout_key=key, block_size=BLOCK)
  actual = jax.jit(run)(arguments, weights)
  assert_close(actual, exact.run(expected, arguments, weights), 2e-5)


@pytest.mark.parametrize("batch,length,heads", [(17, 128, 8), (51, 240, 3)], ids=["whole", "tiles"])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_large_batch_is_its_rows(window, has_documents, batch, length, heads):
  """A CPU computes 8.4 MiB of scores, all or of a tile, row by row, those of three rows at once."""
  *qkv, weights = (normal(batch, length, heads, 2, seed=i) for i in range(4))
  starts = (normal(batch, length) > 1.7).astype(jnp.int32).at[:, 0].set(1)

  def run(rows):
    documents = dict(document_starts=starts[rows]) if has_documents else {}
    attend = functools.partial(ops.causal_attention, window=window, **documents)
    return exact.with_gradients(attend, [x[rows] for x in qkv], weights[rows])

  rows = np.array([0, 5, 16])
  assert_close([x[rows] for x in run(np.arange(batch))], run(rows))
  for of_rows, is_mapped in ((np.arange(batch), True), (rows, False)):
    mapped = f"f32[{len(of_rows)},1,{length},{heads},2]"  # What a map over the rows reads.
    assert (mapped in str(jax.make_jaxpr(run)(of_rows))) == is_mapped


@pytest.mark.parametrize("block_size", [8, 19])
def test_gradients_of_biases_are_summed_in_float32(block_size):
  arguments = [normal(2, 19, 3, 4, seed=i) for i in range(3)]
  arguments += [normal(19, 3, 4, seed=3), normal(3, 4, seed=4), normal(3, 4, seed=5)]

  def total(*arguments):
    output = ops.relative_attention(*arguments, block_size=block_size)
    return jnp.sum(output.astype(jnp.float32))

  arguments = [x.astype(jnp.bfloat16) for x in arguments]
  text = jax.jit(jax.grad(total, (4, 5))).lower(*arguments).as_text()
  sums = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
  assert sums and not [line for line in sums if "xbf16>" in line]


def test_a_large_batch_on_several_devices():
  mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  qkv = [normal(16, 128, 8, 2, seed=i) for i in range(3)]
  whole = jax.jit(ops.causal_attention)(*qkv)
  rows = jax.NamedSharding(mesh, jax.P("rows"))
  with jax.set_mesh(mesh):
    attend = jax.jit(ops.causal_attention).lower(*jax.device_put(qkv, rows)).compile()
  assert "all-gather" not in attend.as_text()
  np.testing.assert_allclose(attend(*jax.device_put(qkv, rows)), whole, rtol=1e-5, atol=1e-5)


def compile_training(name, length, **settings):
  arguments, weights = draw(name, length, heads=2, features=8)
  return jax.jit(with_gradients(name, **settings)).lower(arguments, weights).compile()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_memory_grows_as_the_length(name):
  dropout = dict(dropout_rate=0.1, dropout_key=jax.random.key(0))
  compiled = [compile_training(name, length, block_size=32, **dropout) for length in (256, 512)]
  compiled.append(compile_training(name, 512, block_size=512, **dropout))
  short, long, at_once = (x.memory_analysis().temp_size_in_bytes for x in compiled)
  assert long < 2.6 * short and long < at_once / 5
  # By default, of 600 positions, there are five blocks, all alike.
  text = compile_training(name, 600).as_text()
  assert "2,2,120,120" in text and "600,600" not in text
