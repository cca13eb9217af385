import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.training import losses

BATCH, LENGTH, VOCAB = 2, 5, 7


def draw():
  generator = np.random.default_rng(0)
  logits = jnp.asarray(3 * generator.standard_normal((BATCH, LENGTH, VOCAB)), jnp.float32)
  targets = jnp.asarray(generator.integers(VOCAB, size=(BATCH, LENGTH)))
  weights = jnp.asarray([[1, 0, 1, 1, 0], [0, 0.5, 1, 0, 1]], jnp.float32)
  return logits, targets, weights


def exact(logits, targets, weights):
  """Nats, their gradient by the logits, and the count: in float64, from the formula."""
  logits, weights = np.float64(logits), np.float64(weights)
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  one_hot = np.eye(VOCAB)[np.asarray(targets)]
  nats = -(weights * np.log((probabilities * one_hot).sum(-1))).sum()
  return nats, weights[..., None] * (probabilities - one_hot), weights.sum()


def test_is_the_formula_and_so_is_its_gradient():
  inputs = draw()
  run = jax.value_and_grad(losses.cross_entropy, has_aux=True)
  (nats, count), grad = jax.jit(run)(*inputs)
  for got, expected in zip((nats, grad, count), exact(*inputs), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert nats.dtype == count.dtype == jnp.float32


def test_targets_without_weight_do_not_matter():
  logits, targets, weights = draw()
  expected = losses.cross_entropy(logits, targets, weights)
  others = jnp.where(weights > 0, targets, (targets + 1) % VOCAB)
  wild = jnp.where(weights[..., None] > 0, logits, 100.0)
  np.testing.assert_array_equal(losses.cross_entropy(wild, others, weights), expected)
  nats, count = losses.cross_entropy(logits, targets, jnp.zeros_like(weights))
  assert nats == count == 0


def test_parts_add_up_to_the_whole():
  inputs = draw()
  parts = [losses.cross_entropy(*(x[row : row + 1] for x in inputs)) for row in range(2)]
  np.testing.assert_allclose(
    np.sum(parts, axis=0), losses.cross_entropy(*inputs), rtol=1e-6
  )


def test_equal_logits_cost_ln_v():
  _, targets, weights = draw()
  nats, count = losses.cross_entropy(jnp.zeros((BATCH, LENGTH, VOCAB)), targets, weights)
  np.testing.assert_allclose(nats / count, np.log(VOCAB), rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
  logits, targets, weights = draw()
  rounded = logits.astype(jnp.bfloat16)
  nats, count = losses.cross_entropy(rounded, targets, weights)
  expected, _, _ = exact(rounded.astype(jnp.float32), targets, weights)
  np.testing.assert_allclose(nats, expected, rtol=1e-6)
  assert nats.dtype == count.dtype == jnp.float32


def test_shapes_that_do_not_match_are_refused():
  logits, targets, weights = draw()
  for wrong in (
    (logits[:, 1:], targets, weights),
    (logits, targets[:1], weights),
    (logits, targets, weights[0]),
  ):
    with pytest.raises(ValueError, match=r"expected \[B, T, V\], \[B, T\], \[B, T\]"):
      losses.cross_entropy(*wrong)
