"""Attention against float64, and by tiles against at once: values, gradients, dropout, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.layers import embeddings
from tests.reference import attention as reference
from tests.reference import exact

BATCH, HEADS, FEATURES, BLOCK = 2, 3, 5, 8
ATTENTIONS = {"causal": ops.causal_attention, "relative": ops.relative_attention}
ROUNDING = dict(rtol=1e-5, atol=1e-5)


def draw(name, length, dtype=jnp.float32, heads=HEADS, features=FEATURES):
  """The arguments, and the gradient of the result."""
  shapes = [(BATCH, length, heads, features)] * 4
  if name == "relative":
    # Two distances more than there are.
    shapes += [(length + 2, heads, features), (heads, features), (heads, features)]
  generator = np.random.default_rng(5)
  weights, *arguments = (generator.standard_normal(shape) for shape in shapes)
  return [jnp.asarray(x, dtype) for x in arguments], jnp.asarray(weights, dtype)


def with_gradients(name, **settings):
  """(arguments, weights) -> the result and the gradients of its sum times the weights."""

  def run(arguments, weights):
    function = functools.partial(ATTENTIONS[name], **settings)
    result, pull = jax.vjp(function, *arguments)
    return result, *pull(weights)

  return run


def whole(name, length, **settings):
  return with_gradients(name, block_size=length, **settings)


def assert_alike(found, expected, **tolerance):
  for i, (x, y) in enumerate(zip(found, expected, strict=True)):
    assert x.shape == y.shape and x.dtype == y.dtype
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    np.testing.assert_allclose(x, y, **tolerance, err_msg=f"number {i}")


@pytest.mark.parametrize("length", [1, 7])
def test_relative_attention_is_the_equation(length):
  arguments, weights = draw("relative", length)
  found = jax.jit(whole("relative", length))(arguments, weights)
  expected = exact.run(reference.relative_attention, arguments, weights)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, **ROUNDING)
  np.testing.assert_array_equal(found[4][length:], 0)


def local_loop(window, queries, keys, values):
  """Position by position: the softmax over the last `window` keys."""
  outputs = []
  for t in range(queries.shape[1]):
    first = max(0, t - window + 1)
    scores_bhs = jnp.einsum("bhe,bshe->bhs", queries[:, t], keys[:, first : t + 1])
    weights_bhs = jax.nn.softmax(scores_bhs / queries.shape[3] ** 0.5)
    outputs.append(jnp.einsum("bhs,bshe->bhe", weights_bhs, values[:, first : t + 1]))
  return jnp.stack(outputs, axis=1)


@pytest.mark.parametrize(
  "length, window, block", [(19, 11, BLOCK), (9, 3, 4), (5, 1, 2), (7, 5, 7)]
)
def test_local_attention_is_the_loop_over_the_band(length, window, block):
  arguments, weights = draw("causal", length)
  found = jax.jit(with_gradients("causal", window=window, block_size=block))(arguments, weights)
  expected = exact.run(functools.partial(local_loop, window), arguments, weights)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, **ROUNDING)


def test_a_window_of_all_positions_is_no_window():
  arguments, weights = draw("causal", 29)
  found = jax.jit(with_gradients("causal", window=29, block_size=BLOCK))(arguments, weights)
  expected = jax.jit(with_gradients("causal", block_size=BLOCK))(arguments, weights)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_array_equal(x, y)


def test_tiles_outside_of_the_band_are_not_computed():
  # A tile that reads nan gives nan, wherever its weights are 0.
  length, place = 5 * BLOCK, 2 * BLOCK
  (q, k, v), weights = draw("causal", length)
  v = v.at[:, :BLOCK].set(jnp.nan)
  run = jax.jit(with_gradients("causal", window=BLOCK - 1, block_size=BLOCK))
  y, *grads = run((q, k, v), weights.at[:, :place].set(0))
  assert np.isfinite(y[:, place:]).all() and not np.isfinite(y[:, place - 1]).any()
  assert all(np.isfinite(grad[:, place:]).all() for grad in grads)
  # Of full attention every later position does.
  assert not np.isfinite(jax.jit(whole("causal", length))((q, k, v), weights)[0]).any()


@pytest.mark.parametrize("length, width", [(7, 6), (13, 5), (1, 2), (3, 1)])
def test_relative_positions(length, width):
  table = ops.relative_positions(length, width)
  assert table.dtype == np.float32
  np.testing.assert_allclose(table, reference.relative_positions(length, width), atol=1e-6)
  by_turns = embeddings.sinusoidal_positions(length, width)
  sines_first = np.concatenate([by_turns[:, ::2], by_turns[:, 1::2]], axis=1)
  np.testing.assert_array_equal(table, sines_first)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("length, block", [(2 * BLOCK, BLOCK), (29, BLOCK), (3, 1)])
def test_tiles_give_what_all_at_once_gives(name, length, block):
  arguments, weights = draw(name, length)
  run = with_gradients(name, block_size=block)
  assert "scan" in str(jax.make_jaxpr(run)(arguments, weights))
  found = jax.jit(run)(arguments, weights)
  expected = jax.jit(whole(name, length))(arguments, weights)
  assert all(np.abs(x).max() > 0.1 for x in found)
  assert_alike(found, expected, **ROUNDING)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_large_scores_are_finite_and_bfloat16_keeps_its_dtype(name):
  arguments, weights = draw(name, 19)
  run, exact = (jax.jit(f) for f in (with_gradients(name, block_size=BLOCK), whole(name, 19)))
  large = [100 * x for x in arguments]
  found = run(large, weights)
  assert all(np.isfinite(x).all() for x in found)
  assert_alike(found[:1], exact(large, weights)[:1], **ROUNDING)
  half = [x.astype(jnp.bfloat16) for x in (*arguments, weights)]
  found = run(half[:-1], half[-1])
  *wide, wide_weights = (x.astype(jnp.float32) for x in half)
  for x, y in zip(found, exact(wide, wide_weights), strict=True):
    assert x.dtype == jnp.bfloat16
    # A bfloat16 has 8 bits: 0.4% each, over a few roundings.
    np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=0, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize("size", [None, BLOCK])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_arguments_of_several_dtypes(name, size):
  (q, k, v, *others), weights = draw(name, 19)
  half = v.astype(jnp.bfloat16)
  run = jax.jit(with_gradients(name, block_size=size))
  found = run((q, k, half, *others), weights.astype(jnp.bfloat16))
  expected = run((q, k, half.astype(jnp.float32), *others), weights)
  assert [x.dtype for x in found[:4]] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16]
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=0, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_comes_later_does_not_count_even_nan(name):
  length, place = 3 * BLOCK - 2, 2 * BLOCK
  arguments, weights = draw(name, length)
  run = jax.jit(with_gradients(name, block_size=BLOCK))
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


@pytest.mark.parametrize("name", ATTENTIONS)
def test_dropout_is_of_the_weights(name):
  length, rate = 29, 0.3
  exact = jax.jit(functools.partial(weights_of, name, length, length, 0.0))(None)
  train = jax.jit(functools.partial(weights_of, name, length, BLOCK, rate))
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


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_gradient_drops_what_the_result_dropped(name):
  length, settings = 19, dict(dropout_rate=0.3, dropout_key=jax.random.key(2), block_size=BLOCK)
  arguments, weights = draw(name, length)
  kept = jax.jit(functools.partial(weights_of, name, length, BLOCK, 0.3))
  factors_bths = np.float32(kept(jax.random.key(2)) != 0) / 0.7

  def expected(*arguments):
    # The same mask over weights that are built at once.
    values = jnp.broadcast_to(jnp.eye(length)[None, :, None], (BATCH, length, HEADS, length))
    lead = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - FEATURES)]) for x in arguments]
    scale = (length / FEATURES) ** 0.5
    lead[0] *= scale
    if name == "relative":
      lead[4:] = [x * scale for x in lead[4:]]
    weights_bths = ATTENTIONS[name](*lead[:2], values, *lead[3:], block_size=length)
    return jnp.einsum("bths,bshe->bthe", weights_bths * factors_bths, arguments[2])

  @jax.jit
  def reference(arguments, weights):
    result, pull = jax.vjp(expected, *arguments)
    return result, *pull(weights)

  found = jax.jit(with_gradients(name, **settings))(arguments, weights)
  assert_alike(found, reference(arguments, weights), rtol=1e-4, atol=2e-5)


def compile_training(name, length, **settings):
  settings = dict(dropout_rate=0.1, dropout_key=jax.random.key(0)) | settings
  arguments, weights = draw(name, length, heads=2, features=8)
  return jax.jit(with_gradients(name, **settings)).lower(arguments, weights).compile()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_memory_grows_as_the_length(name):
  compiled = [compile_training(name, length, block_size=32) for length in (256, 512)]
  compiled.append(compile_training(name, 512, block_size=512))
  short, long, at_once = (x.memory_analysis().temp_size_in_bytes for x in compiled)
  assert long < 2.6 * short and long < at_once / 5
  # By default, of 600 positions, there are five blocks, all alike.
  arguments, weights = draw(name, 600, heads=2, features=8)
  text = jax.jit(with_gradients(name)).lower(arguments, weights).compile().as_text()
  assert "2,2,120,120" in text and "600,600" not in text
