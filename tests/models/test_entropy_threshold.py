"""BLT's thresholds in the hourglass: a frozen model decides, in chunks as whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import ops
from dpjax.layers import dispatcher
from dpjax.models.build import with_frozen
from tests import helpers

BATCH, LENGTH, VOCAB = 3, 23, 11
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))
THETA_ADD = -0.1
ONE = dict(num_layers=1)


def make(theta):
  """A model, and the frozen one that it reads, which pools as well."""
  words = dpjax.config.boundaries("whitespace", space_ids=(2, 7), num_buckets=2)
  sizes = dict(width=4, feed_forward_width=7, max_length=31, positions="sinusoidal")
  reader = dpjax.build_model(
    helpers.model_settings("dispatcher", words, first=ONE, last=ONE, **sizes)
  )
  settings = dict(run="a", rule="combined", theta=theta, theta_add=THETA_ADD, num_buckets=2)
  section = dpjax.config.boundaries("entropy_threshold", **settings)
  config = helpers.model_settings("me", section, first=ONE, last=ONE, **ONE)
  return dpjax.build_model(config, reader), reader


@pytest.fixture(scope="module")
def parts():
  """The model, its parameters, a compiled pass, the frozen entropies and the threshold."""
  _, reader = make(0.0)
  frozen = helpers.draw_params(reader, 8, 1.0)
  h = ops.conditional_entropy(jax.jit(reader.apply)({"params": frozen}, TOKENS).logits)
  theta = ops.entropy_theta(h, 2.7, "combined", THETA_ADD)
  model, _ = make(theta)
  params = with_frozen(helpers.draw_params(model, 13, 1 / 2), frozen)
  return model, params, partial(jax.jit(model.apply), {"params": params}), h, theta


def test_boundaries_are_those_of_the_frozen_models_entropies(parts):
  _, _, run, h, theta = parts
  output = run(TOKENS)
  (stage,) = output.stages
  expected = ops.entropy_threshold(h, "combined", theta, THETA_ADD)
  assert stage.boundaries.dtype == jnp.int32 and 0.3 < expected.mean() < 0.45
  np.testing.assert_array_equal(stage.boundaries, expected)
  # Rounding flips none.
  assert abs(h - theta).min() > 1e-4 and abs(np.diff(h, axis=1) - THETA_ADD).min() > 1e-4
  # Nothing later has a part in anything.
  other = TOKENS.copy()
  other[:, 8:] = (other[:, 8:] + 3) % VOCAB
  logits = run(other).logits
  np.testing.assert_allclose(logits[:, :8], output.logits[:, :8], atol=1e-5)
  assert abs(logits[:, 8:] - output.logits[:, 8:]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", helpers.SCHEDULES)
def test_chunks_say_what_the_whole_says(parts, schedule):
  model, params, run, h, _ = parts
  output = run(TOKENS)

  def check_state(cache, seen):
    state, rows = cache.core.stages[0].boundaries, seen > 0
    for value, expected in ((state.entropy, h), (state.boundary, output.stages[0].boundaries)):
      last = np.take_along_axis(np.asarray(expected), seen[:, None] - 1, axis=1)[:, 0]
      np.testing.assert_allclose(value[rows], last[rows], atol=1e-5)

  if schedule == "steps":
    model, params = model.unstack(params)
  helpers.check_chunks(model, params, TOKENS, output, helpers.SCHEDULES[schedule], check_state)


def test_a_frozen_model_without_a_cache_leaves_none(monkeypatch):
  model, _ = make(0.0)
  assert model.has_cache
  monkeypatch.delattr(dispatcher.Dispatcher, "init_cache")
  assert not model.has_cache
