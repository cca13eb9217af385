"""`dpjax.ops.selective_state_space` beside the recurrence in float64, position by position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests.reference import exact
from tests.reference.state_space import selective_state_space

BATCH, LENGTH, HEADS, WIDTH, GROUPS, STATE = 2, 23, 4, 3, 2, 5
# Documents of 4, 1, ... tokens, and one row of one document.
STARTS = np.zeros((BATCH, LENGTH), np.int32)
STARTS[:, 0] = STARTS[0, [4, 5, 16]] = 1


def arguments(length: int = LENGTH) -> list[np.ndarray]:
  """inputs, dt, a, b, c: dt from 0.001 to 2, a from -16 to -1."""
  rng = np.random.default_rng(0)
  dt = np.exp(rng.uniform(np.log(1e-3), np.log(2), (BATCH, length, HEADS)))
  a = -rng.uniform(1, 16, HEADS)
  normal = rng.standard_normal
  b, c = (normal((BATCH, length, GROUPS, STATE)) for _ in range(2))
  return [x.astype(np.float32) for x in (normal((BATCH, length, HEADS, WIDTH)), dt, a, b, c)]


def assert_near(output, expected, limit):
  """Within a share of the largest."""
  scale = np.abs(expected).max()
  np.testing.assert_allclose(np.asarray(output) / scale, np.asarray(expected) / scale, atol=limit)


@pytest.mark.parametrize(
  "document_starts, chunk_size", [(None, 8), (None, 100), (STARTS, 4), (STARTS, 1)]
)
def test_selective_state_space_equals_the_recurrence(document_starts, chunk_size):
  settings = dict(document_starts=document_starts, chunk_size=chunk_size)
  actual, expected = exact.both(
    partial(ops.selective_state_space, **settings),
    partial(selective_state_space, starts=document_starts),
    arguments(),
  )
  assert_near(actual[0], expected[0], 5e-6)
  for grad, by_argument in zip(actual[1:], expected[1:], strict=True):
    assert_near(grad, by_argument, 2e-5)


def test_chunks_with_a_cache_equal_the_recurrence():
  x, dt, a, b, c = arguments()
  state, outputs = ops.init_selective_state(BATCH, HEADS, WIDTH, STATE), []
  step = jax.jit(partial(ops.selective_state_space_cached, chunk_size=4))
  for part in (slice(13), slice(13, 14), slice(14, None)):
    y, state = step(x[:, part], dt[:, part], a, b[:, part], c[:, part], state)
    outputs.append(y)
  assert_near(np.concatenate(outputs, 1), exact.run(selective_state_space, (x, dt, a, b, c)), 5e-6)


# Two documents of each row begin with the pattern.
@pytest.mark.parametrize("document_starts", [None, STARTS])
@pytest.mark.parametrize("steps", [(1e-3, 100), (1e-3, 1e-3, 1e4), (100, 0.05, 0.05), (1e-4, 3, 0)])
def test_small_steps_keep_their_digits_beside_large_ones(steps, document_starts):
  x, _, a, b, c = arguments()
  dt = np.resize(np.float32(steps), (BATCH, LENGTH, HEADS))
  a[:] = -16, -1, -0.1, -3
  args = [np.abs(x), dt, a, np.abs(b), np.abs(c)]  # no output is small beside its terms
  actual, expected = exact.both(
    partial(ops.selective_state_space, document_starts=document_starts, chunk_size=8),
    partial(selective_state_space, starts=document_starts),
    args,
  )
  np.testing.assert_allclose(actual[0], expected[0], rtol=2e-6)
  for grad, by_argument in zip(actual[1:], expected[1:], strict=True):
    assert_near(grad, by_argument, 2e-5)


@pytest.mark.parametrize("lengths, chunk", [((1, 0), 1), ((2, 0), 3), ((3, 1), 3)])
def test_padding_may_hold_anything(lengths, chunk):
  x, dt, a, b, c = (z[:, :chunk] if z.ndim > 1 else z for z in arguments())
  state = np.full((BATCH, HEADS, WIDTH, STATE), 0.5, np.float32)
  is_padding = np.arange(chunk) >= np.array(lengths)[:, None]
  spoilt = [
    np.where(is_padding.reshape(is_padding.shape + (1,) * (z.ndim - 2)), bad, z)
    for z, bad in ((x, np.nan), (dt, np.inf), (b, np.inf), (c, np.nan))
  ]
  run = partial(ops.selective_state_space_cached, lengths=np.array(lengths), chunk_size=2)
  expected, end = run(x, dt, a, b, c, state)
  actual, actual_end = run(*spoilt[:2], a, *spoilt[2:], state)
  np.testing.assert_array_equal(actual_end, end)
  np.testing.assert_array_equal(actual[~is_padding], expected[~is_padding])
  np.testing.assert_array_equal(np.asarray(end)[np.array(lengths) == 0], 0.5)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, None])
def test_chunk_sizes_are_checked(chunk_size):
  x, dt, a, b, c = arguments()
  state = ops.init_selective_state(BATCH, HEADS, WIDTH, STATE)
  with pytest.raises(ValueError, match="^chunk_size: expected"):
    ops.selective_state_space_cached(x, dt, a, b, c, state, chunk_size=chunk_size)


def test_large_decays_and_steps_of_zero_have_finite_gradients():
  x, dt, a, b, c = arguments()
  dt = dt * np.where(np.arange(LENGTH) % 3 == 0, 0, 100)[None, :, None]
  y, grads = jax.value_and_grad(
    lambda *args: jnp.sum(ops.selective_state_space(*args, chunk_size=8) ** 2), range(5)
  )(x, dt.astype(np.float32), a, b, c)
  assert all(np.isfinite(z).all() for z in jax.tree.leaves((y, grads)))


def test_products_in_bfloat16_stay_near():
  args = arguments()
  with ops.product_dtype("bfloat16"):
    low = ops.selective_state_space(*args)
  whole = ops.selective_state_space(*args)
  assert 1e-6 < np.abs(low - whole).max() / np.abs(whole).max() < 2e-2


def test_the_gradient_keeps_the_arguments_alone():
  args = arguments(length=64)

  def residuals(*args):
    return jax.vjp(lambda *z: ops.selective_state_space(*z, chunk_size=8), *args)[1]

  kept = jax.tree.leaves(jax.eval_shape(residuals, *args))
  state = BATCH * HEADS * WIDTH * STATE
  assert sum(x.size for x in kept) <= sum(x.size for x in args) + state
