"""Boundaries: each rule against its equation, and the samples' gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.ops import (
  binomial_prior_loss,
  conditional_entropy,
  entropy_spikes,
  entropy_theta,
  entropy_threshold,
  fixed_boundaries,
  gumbel_sigmoid,
  rate_bounds_loss,
  spacelike_boundaries,
  whitespace_boundaries,
)
from dpjax.ops.entropies import RULES
from tests.reference import exact
from tests.reference import pooling as reference

ROUNDING = dict(rtol=1e-5, atol=1e-6)
INF = np.inf


@pytest.mark.parametrize(
  "factor, offset, expected",
  [
    (3, None, [0, 0, 1, 0, 0, 1, 0]),
    (3, 0, [1, 0, 0, 1, 0, 0, 1]),
    (11, None, [0] * 7),
  ],
)
def test_fixed(factor, offset, expected):
  result = fixed_boundaries((2, 7), factor, offset)
  assert result.dtype == jnp.int32
  np.testing.assert_array_equal(result, [expected] * 2)
  whole, start = fixed_boundaries((2, 19), factor, offset), np.array([4, 11], np.int32)
  part = jax.jit(lambda x: fixed_boundaries((2, 7), factor, offset, num_before=x))(start)
  assert part.dtype == jnp.int32
  np.testing.assert_array_equal(part, [whole[0, 4:11], whole[1, 11:18]])


def test_whitespace():
  tokens = np.array([[5, 3, 0, 7, 0, 0], [0, 7, 7, 5, 2, 3]])
  result = whitespace_boundaries(tokens, (0,))
  assert result.dtype == jnp.int32
  np.testing.assert_array_equal(result, [[0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]])
  result = whitespace_boundaries(jnp.asarray(tokens, jnp.uint8), [0, 7])
  np.testing.assert_array_equal(result, [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def test_spacelike():
  tokens = np.array([[5, 3, 0, 7, 0, 0], [0, 7, 7, 5, 2, 3]])
  result = spacelike_boundaries(tokens, (0, 7))
  assert result.dtype == jnp.int32
  np.testing.assert_array_equal(result, [[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
  # 7 begins with a spacelike byte and ends with another kind.
  result = spacelike_boundaries(tokens, (7, 0), (0,))
  np.testing.assert_array_equal(result, [[0, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 0]])
  part = spacelike_boundaries(tokens[:, 4:], (0,), previous=np.array([True, False]))
  np.testing.assert_array_equal(part, [[0, 0], [0, 0]])


def entropies(*shape):
  """Of a text with runs of high ones, and some that are the same."""
  draw = np.random.default_rng(5).gamma(4.0, 0.5, size=shape)
  return jnp.asarray(np.round(draw, 1), jnp.float32)


@pytest.mark.parametrize(
  "settings", [("global", 2.0), ("monotonic", 0.3), ("combined", 1.2, 0.4), ("combined", 1.2, -0.9)]
)
def test_thresholds(settings):
  h = entropies(3, 41)

  @jax.jit
  def rule(h, previous=None):
    return entropy_threshold(h, *settings, previous=previous)

  result = rule(h)
  expected = reference.entropy_threshold(h, *settings)
  assert result.dtype == jnp.int32 and 0.1 < expected.mean() < 0.6
  np.testing.assert_array_equal(result, expected)
  previous = None
  for t in range(41):
    part = rule(h[:, t : t + 1], previous)
    np.testing.assert_array_equal(part[:, 0], expected[:, t])
    previous = h[:, t], part[:, 0]
  part = rule(h[:, 16:], (h[:, 15], result[:, 15]))
  np.testing.assert_array_equal(part, expected[:, 16:])
  assert not jax.grad(lambda h: rule(h).astype(jnp.float32).sum())(h).any()


@pytest.mark.parametrize("rule", RULES)
def test_theta_gives_the_wanted_length(rule):
  theta_add = -0.2 * (rule == "combined")
  h = jnp.asarray(np.random.default_rng(7).gamma(4.0, 0.5, size=(5, 211)), jnp.float32)
  for factor in (2.9, 11.0):
    theta = entropy_theta(h, factor, rule, theta_add)
    count = int(entropy_threshold(h, rule, theta, theta_add).sum())
    assert abs(count - h.size / factor) <= 1
    # Rounding of what it is compared with changes nothing.
    near = entropy_threshold(h * (1 + 1e-6), rule, theta, theta_add)
    assert int(near.sum()) == count


def test_theta_is_a_quantile():
  h = jnp.arange(1.0, 13.0).reshape(2, 6)
  assert entropy_theta(h, 3.0) == 8.5
  assert entropy_theta(h, 1.0) == 0 and entropy_theta(h, 100.0) == 12
  # Ties are boundaries together: of 2 and 7 among 8, 2 is nearer to 4.
  assert entropy_theta(jnp.float32([[1, 3, 3, 3, 3, 3, 5, 5]]), 2.0) == 4
  # Neighbouring floats, and a middle that bfloat16 does not hold.
  for low, high, dtype in ((1 + 2**-23, 1 + 2**-22, "float32"), (2.015625, 2.03125, "bfloat16")):
    near = jnp.asarray([[low, high] * 4], dtype)
    assert entropy_threshold(near, "global", entropy_theta(near, 2.0)).sum() == 4


def test_samples_are_hard_and_their_gradient_is_that_of_the_soft_ones():
  logits, temperature = 3 * exact.normal(3, 7), 0.7
  noise = jnp.asarray(np.random.default_rng(3).uniform(size=(3, 7)), jnp.float32)
  weights = exact.normal(3, 7, seed=1)

  def sample(logits):
    return gumbel_sigmoid(logits, temperature, noise=noise)

  hard, by_logits = exact.with_gradients(sample, [logits], weights)
  x, u = np.asarray(logits, np.float64), np.asarray(noise, np.float64)
  soft = 1 / (1 + np.exp(-(x + np.log(u) - np.log(1 - u)) / temperature))
  assert hard.dtype == jnp.float32
  np.testing.assert_array_equal(hard, soft > 0.5)
  assert 0 < hard.mean() < 1
  expected = np.asarray(weights) * soft * (1 - soft) / temperature
  np.testing.assert_allclose(by_logits, expected, **ROUNDING)
  _, tangent = jax.jit(lambda *x: jax.jvp(sample, x[:1], x[1:]))(logits, weights)
  np.testing.assert_allclose(tangent, expected, **ROUNDING)


def test_a_sample_is_one_with_its_probability():
  logits = jnp.repeat(jnp.asarray([-2.0, 0.0, 1.0]), 20_000)[None]
  sample = jax.jit(lambda seed, tau: gumbel_sigmoid(logits, tau, key=jax.random.key(seed)))
  hard = sample(5, 3.0)
  assert np.isin(hard, [0, 1]).all()
  # Three standard deviations of the mean are 0.0106.
  means = np.asarray(hard).reshape(3, -1).mean(axis=1)
  np.testing.assert_allclose(means, [0.1192, 0.5, 0.7311], atol=0.0106)
  np.testing.assert_array_equal(sample(5, 1e9), hard)
  assert 0.1 < np.mean(np.asarray(hard) != np.asarray(sample(7, 3.0))) < 0.9


def test_samples_are_finite_at_the_ends_of_everything(monkeypatch):
  # What JAX draws are multiples of 2**-23.
  ends = jnp.asarray([[0, 2.0**-23, 0.5, 1 - 2.0**-23]] * 3)
  monkeypatch.setattr(jax.random, "uniform", lambda *_: ends)
  logits = jnp.asarray([[0.0], [INF], [-INF]]) + jnp.zeros((3, 4))
  hard, gradient = exact.with_gradients(
    lambda x: gumbel_sigmoid(x, 0.5, key=jax.random.key(0)), [logits], jnp.ones((3, 4))
  )
  np.testing.assert_array_equal(hard, [[0, 0, 1, 1], [1] * 4, [0] * 4])
  assert np.isfinite(gradient).all() and gradient[0, 0] > 0
  np.testing.assert_array_equal(gradient[1:], 0)


def test_entropy():
  logits = np.array(3 * exact.normal(2, 5, 7))
  logits[0, 1, 3] = logits[1, 2, 1:] = -INF
  value, gradient = exact.with_gradients(conditional_entropy, [logits], np.ones((2, 5), "f"))
  np.testing.assert_allclose(value, reference.entropy(logits), **ROUNDING)
  assert np.isfinite(gradient).all()
  assert value[1, 2] == 0
  half = jax.jit(conditional_entropy)(jnp.zeros((2, 3, 7), jnp.bfloat16))
  assert half.dtype == jnp.float32
  np.testing.assert_allclose(half, np.full((2, 3), math.log(7)), rtol=1e-6)
  # A certain prediction far from 0 has no entropy, and is no nan.
  np.testing.assert_array_equal(jax.jit(conditional_entropy)(1e4 * logits), 0)
  # What all logits share is no matter, however large.
  uncertain = jnp.round(4 * logits) / 4
  np.testing.assert_allclose(
    conditional_entropy(uncertain + 8192), conditional_entropy(uncertain), rtol=1e-5
  )


def test_spikes():
  np.testing.assert_array_equal(
    entropy_spikes(jnp.asarray([[3.0, 2, 4, 4, 5, 1]])), [[1, 0, 1, 0, 1, 0]]
  )
  entropies = np.random.default_rng(5).integers(0, 7, (3, 13)).astype(np.float32)  # Ties.
  for left in (1, 3, 29):
    result = entropy_spikes(jnp.asarray(entropies), left)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, reference.spikes(entropies, left))
  slope = jax.grad(lambda x: entropy_spikes(x).astype(float).sum())(entropies)
  np.testing.assert_array_equal(slope, np.zeros((3, 13)))


def test_prior():
  boundaries = np.array(
    [[0] * 7, [1] * 7, [0, 1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 1, 0, 1]]
  )
  weights = np.ones((5, 7))
  weights[3, :4], weights[4] = 0, 0  # The fifth row counts nowhere.
  value = jax.jit(binomial_prior_loss)(boundaries, 0.75, weights=weights.astype(bool))
  np.testing.assert_allclose(value, reference.binomial_prior(boundaries, 0.75, weights), **ROUNDING)


def test_the_rate_of_a_row_is_the_mean_of_its_documents():
  rates = np.array([[0] * 7, [0, 1, 0, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1, 0]])
  bounds = dict(highest=0.375, lowest=0.25)
  document_starts = np.eye(7, dtype=np.int32)[[0] * 3] + np.eye(7, dtype=np.int32)[[3] * 3]
  alone = [
    reference.rate_bounds(rates[:, part], **bounds, weights=np.ones((3, n)))[0] * n
    for part, n in ((slice(3), 3), (slice(3, 7), 4))
  ]
  # The bounds may be traced.
  packed = jax.jit(rate_bounds_loss)(rates, **bounds, document_starts=document_starts)
  np.testing.assert_allclose(packed, sum(alone) / 7, **ROUNDING)


def test_rates_outside_of_two_bounds_cost_how_far_they_are():
  # Below, between, above, above among few that count, and a row of which none counts.
  rates = [[0] * 7, [0, 1, 0, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1], [1] * 7]
  weights = np.ones((5, 7))
  weights[3, :4], weights[4] = 0, 0
  weights[3, 4:] = (1, 0, 1)
  bounds = dict(highest=0.375, lowest=0.25)
  value, gradient = exact.with_gradients(
    lambda b: rate_bounds_loss(b, **bounds, weights=weights),
    [np.float32(rates)],
    np.ones(5, np.float32),
  )
  expected, slopes = reference.rate_bounds(rates, **bounds, weights=weights)
  np.testing.assert_allclose(value, expected, **ROUNDING)
  np.testing.assert_allclose(gradient, slopes, **ROUNDING)
  assert [*np.sign(slopes.sum(axis=1))] == [-1, 0, 1, 1, 0] and expected[1] == 0
