"""Float64 arguments: every operator sums in float64, and so do its derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dpjax import ops
from dpjax.training import losses
from tests import helpers


def draw(*shape):
  return np.random.default_rng(len(shape)).uniform(0.1, 0.9, shape)


BOUNDARIES = np.asarray([[0, 1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1]], np.int32)
QKV = (draw(2, 7, 3, 5), draw(2, 7, 3, 5)[::-1].copy(), draw(2, 7, 3, 5)[:, ::-1].copy())
RELATIVE = (draw(7, 3, 5), draw(3, 5), 1 - draw(3, 5))
GATED = (draw(2, 7, 3, 5), draw(2, 7, 3, 4))
INPUTS = draw(2, 7, 5)


def in_chunks(operator, init, *arrays, last=()):
  """A cached operator on four tokens, on two and on one."""
  cache, outputs = init(), []
  for part in (slice(0, 4), slice(4, 6), slice(6, 7)):
    output, cache = operator(*(x[:, part] for x in arrays), *last, cache)
    outputs.append(output)
  return jnp.concatenate(outputs, axis=1)


def relative_cached(*arrays):
  init = partial(ops.init_attention_cache, 2, 7, 3, 5, jnp.float64)
  return in_chunks(ops.relative_attention_cached, init, *arrays[:3], last=arrays[3:])


def convolution_cached(init, inputs, taps):
  return in_chunks(ops.causal_convolution_cached, init, inputs, last=(taps,))


def pool_cached(inputs):
  cache, outputs = ops.init_segment_cache(2, 5, jnp.float64), []
  for part in (slice(0, 4), slice(4, 7)):
    boundaries = BOUNDARIES[:, part]
    output, cache = ops.pool_segments_cached(inputs[:, part], boundaries, cache)
    outputs.append(output)
  return jnp.concatenate([*outputs, cache.total[:, None]], axis=1)


def nats(logits):
  targets = np.arange(14).reshape(2, 7) % 5
  return losses.cross_entropy(logits, targets, np.ones((2, 7), np.float32))[0]


def cases():
  for name in ("loop", "unrolled", "recompute", "matrix"):
    yield f"shift_and_sum {name}", partial(ops.shift_and_sum, implementation=name), GATED
  yield "dispatch_matrix", ops.dispatch_matrix, GATED[1:]
  init = partial(ops.init_shift_and_sum_cache, 2, 3, 5, 4, jnp.float64)
  yield "shift_and_sum_cached", partial(in_chunks, ops.shift_and_sum_cached, init), GATED
  for size in (3, 7):
    yield f"causal_attention {size}", partial(ops.causal_attention, block_size=size), QKV
    attend = partial(ops.relative_attention, block_size=size)
    yield f"relative_attention {size}", attend, (*QKV, *RELATIVE)
  init = partial(ops.init_attention_cache, 2, 7, 3, 5, jnp.float64)
  attend = partial(in_chunks, ops.causal_attention_cached, init)
  yield "causal_attention_cached", attend, QKV
  yield "relative_attention_cached", relative_cached, (*QKV, *RELATIVE)
  for name in ("scan", "conv", "toeplitz", "fft", "dft"):
    for taps in (draw(7), draw(7, 5), draw(7, 5, 3)):
      operator = partial(ops.causal_convolution, implementation=name)
      yield f"causal_convolution {name} {taps.ndim}", operator, (INPUTS, taps)
  init = partial(ops.init_convolution_cache, 2, 7, 5, jnp.float64)
  for taps in (draw(7), draw(7, 5), draw(7, 5, 3)):
    convolve = partial(convolution_cached, init)
    yield f"causal_convolution_cached {taps.ndim}", convolve, (INPUTS, taps)
  init = partial(ops.init_online_convolution_cache, 2, 7, 5, jnp.float64, block=2)
  yield "online convolution", partial(convolution_cached, init), (INPUTS, draw(7, 5))
  for method in ("mean", "last"):
    pool = partial(ops.pool_segments, boundaries=BOUNDARIES, capacity=4, method=method)
    yield f"pool_segments {method}", pool, (INPUTS,)
  yield "pool_segments_cached", pool_cached, (INPUTS,)
  upsample = partial(ops.upsample_segments, boundaries=BOUNDARIES)
  yield "upsample_segments", upsample, (INPUTS[:, :4],)
  yield "conditional_entropy", ops.conditional_entropy, (INPUTS,)
  yield "binomial_prior_loss", partial(ops.binomial_prior_loss, alpha=0.2), (draw(2, 7),)
  yield "cross_entropy", nats, (INPUTS,)


# Of each operator one form; CI runs the others.
DEFAULT = {
  *("shift_and_sum recompute", "dispatch_matrix", "causal_attention 3", "relative_attention 7"),
  *("causal_convolution fft 1", "causal_convolution dft 2", "causal_convolution_cached 3"),
  *("pool_segments mean", "upsample_segments", "conditional_entropy", "binomial_prior_loss"),
  *("cross_entropy", "shift_and_sum_cached", "causal_attention_cached"),
}


@pytest.mark.parametrize(
  "operator, arrays",
  [helpers.slow_unless(name in DEFAULT, f, x, id=name) for name, f, x in cases()],
)
def test_results_and_gradients_have_the_precision_of_float64(operator, arrays):
  with jax.enable_x64(True):
    arrays = [jnp.asarray(x) for x in arrays]
    operator = jax.jit(operator)
    assert operator(*arrays).dtype == jnp.float64
    # Differences of results: sums in float32 would have errors of 1e-7 / 1e-5.
    check_grads(operator, arrays, 1, ["rev"], atol=1e-6, rtol=1e-6, eps=1e-5)


def test_gumbel_sigmoid_has_the_gradient_of_float64():
  with jax.enable_x64(True):
    logits, noise = jnp.asarray(draw(2, 7)), jnp.asarray(1 - draw(2, 7))
    sample = partial(ops.gumbel_sigmoid, temperature=0.5, noise=noise)
    boundaries, pull = jax.vjp(sample, logits)
    soft = 1 / (1 + np.exp(-2 * (logits + np.log(noise) - np.log1p(-noise))))
    assert boundaries.dtype == jnp.float64
    expected = 2 * soft * (1 - soft)
    np.testing.assert_allclose(pull(jnp.ones((2, 7)))[0], expected, rtol=1e-12)
