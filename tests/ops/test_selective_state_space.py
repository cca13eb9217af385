"""`dpjax.ops.selective_state_space` beside the recurrence in float64, position by position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from tests import helpers

BATCH, LENGTH, HEADS, WIDTH, GROUPS, STATE = 2, 23, 4, 3, 2, 5


def arguments(seed: int = 0, length: int = LENGTH, groups: int = GROUPS) -> list[np.ndarray]:
  """inputs, dt, a, b, c: dt from 0.001 to 2, a from -16 to -1."""
  rng = np.random.default_rng(seed)
  dt = np.exp(rng.uniform(np.log(1e-3), np.log(2), (BATCH, length, HEADS)))
  a = -rng.uniform(1, 16, HEADS)
  normal = rng.standard_normal
  b, c = (normal((BATCH, length, groups, STATE)) for _ in range(2))
  return [x.astype(np.float32) for x in (normal((BATCH, length, HEADS, WIDTH)), dt, a, b, c)]


@jax.numpy_rank_promotion("allow")
def recurrence(x, dt, a, b, c, starts=None):
  """The outputs [B, T, H, P], and the last state, in float64."""
  repeats = x.shape[2] // b.shape[2]
  keep = jnp.ones(x.shape[:2]) if starts is None else 1.0 - starts

  def step(s, now):
    x, dt, b, c, keep = now
    b, c = (jnp.repeat(z, repeats, axis=1) for z in (b, c))
    decay = jnp.exp(dt * a) * keep[:, None]
    s = decay[..., None, None] * s + (dt[..., None] * x)[..., None] * b[:, :, None]
    return s, jnp.einsum("bhpn,bhn->bhp", s, c)

  first = jnp.zeros((*x.shape[::2], x.shape[3], b.shape[3]))
  s, y = jax.lax.scan(step, first, [jnp.moveaxis(z, 1, 0) for z in (x, dt, b, c, keep)])
  return jnp.moveaxis(y, 0, 1), s


def starts(length: int = LENGTH) -> np.ndarray:
  """Documents of 4, 1, ... tokens, and one row of one document."""
  array = np.zeros((BATCH, length), np.int32)
  array[:, 0] = array[0, 4] = array[0, 5] = array[0, 16] = 1
  return array


def assert_near(output, expected, limit: float = 5e-6):
  """Within a share of the largest."""
  scale = np.abs(expected).max()
  np.testing.assert_allclose(np.asarray(output) / scale, np.asarray(expected) / scale, atol=limit)


@pytest.mark.parametrize(
  "has_documents, chunk_size",
  [
    helpers.slow_unless((x, size) in ((False, 8), (True, 4), (False, 100)), x, size)
    for x in (False, True)
    for size in (1, 4, 8, 23, 100)
  ],
)
def test_selective_state_space_equals_the_recurrence(has_documents, chunk_size):
  args = arguments()
  given = starts() if has_documents else None
  weights = np.random.default_rng(9).standard_normal(args[0].shape).astype(np.float32)

  def run(*args):
    y = ops.selective_state_space(*args, document_starts=given, chunk_size=chunk_size)
    return jnp.sum(jnp.asarray(weights, y.dtype) * y), y

  grads, y = jax.jit(jax.grad(run, range(5), has_aux=True))(*args)
  with jax.enable_x64(True):
    wide = [jnp.asarray(x, jnp.float64) for x in args]

    def loop(*args):
      y = recurrence(*args, given)[0]
      return jnp.sum(jnp.asarray(weights, y.dtype) * y), y

    expected_grads, expected = jax.jit(jax.grad(loop, range(5), has_aux=True))(*wide)
    expected_grads, expected = jax.device_get((expected_grads, expected))
  assert_near(y, expected)
  for grad, expected in zip(grads, expected_grads, strict=True):
    assert_near(grad, expected, 2e-5)


def test_selective_state_space_in_float64_is_exact():
  with jax.enable_x64(True):
    wide = [jnp.asarray(x, jnp.float64) for x in arguments()]
    y = ops.selective_state_space(*wide, document_starts=starts(), chunk_size=8)
    assert_near(y, recurrence(*wide, starts())[0], 1e-14)


def test_chunks_with_a_cache_equal_the_row():
  args = arguments()
  whole = ops.selective_state_space(*args)
  x, dt, a, b, c = args
  done = np.zeros(BATCH, int)
  outputs = np.zeros_like(whole)
  state = ops.init_selective_state(BATCH, HEADS, WIDTH, STATE)
  step = jax.jit(partial(ops.selective_state_space_cached, chunk_size=4))
  for size, lengths in ((13, (7, 3)), (1, (1, 1)), (1, (0, 1)), (13, (2, 9)), (13, (13, 9))):
    rows = [np.minimum(done[i] + np.arange(size), LENGTH - 1) for i in range(BATCH)]
    part = [np.stack([z[i, rows[i]] for i in range(BATCH)]) for z in (x, dt, b, c)]
    y, state = step(*part[:2], a, *part[2:], state, lengths=np.asarray(lengths))
    for i, length in enumerate(lengths):
      outputs[i, done[i] : done[i] + length] = y[i, :length]
      done[i] += length
  assert [*done] == [LENGTH, LENGTH]
  np.testing.assert_allclose(outputs, whole, rtol=1e-5, atol=2e-5)
  with jax.enable_x64(True):
    assert_near(state, recurrence(*(jnp.asarray(z, jnp.float64) for z in args))[1])


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


@pytest.mark.parametrize(
  "change, message",
  [
    ({1: np.ones((2, 22, 4), np.float32)}, "dt: expected"),
    ({2: np.ones(3, np.float32)}, "a: expected"),
    ({3: np.ones((2, 23, 3, 5), np.float32)}, "[bc]: expected"),
    ({4: np.ones((2, 23, 2, 5), np.int32)}, "c: expected"),
  ],
)
def test_wrong_arguments_are_refused(change, message):
  args = [change.get(i, x) for i, x in enumerate(arguments())]
  with pytest.raises(ValueError, match=message):
    ops.selective_state_space(*args)


def test_groups_that_do_not_divide_the_heads_are_refused():
  with pytest.raises(ValueError, match="G that divides H = 4, got G = 3"):
    ops.selective_state_space(*arguments(groups=3))
