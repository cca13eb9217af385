"""BLT's thresholds in the hourglass: a frozen model decides, in chunks as whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops
from dpjax.layers import dispatcher
from dpjax.models.build import with_frozen
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, SEED = 3, 23, 11, 6, 8
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))
RULES = {"global": 0.0, "monotonic": 0.0, "combined": -0.1}  # and theta_add
ONE = dict(num_layers=1)
WORDS = config_lib.boundaries("whitespace", space_ids=(2, 7), num_buckets=2)
FROZEN = {
  "plain": dict(mixer="attention", positions="sinusoidal"),
  "pooled": dict(mixer="he", boundaries=WORDS, first=ONE, last=ONE, positions="sinusoidal"),
}


def make_frozen(mixer="dispatcher", boundaries="none", **changes):
  sizes = dict(width=4, feed_forward_width=7, max_length=31)
  model = dpjax.build_model(helpers.model_settings(mixer, boundaries, **sizes | changes))
  return model, helpers.draw_params(model, SEED, 1.0)


def make(frozen, **own):
  own = dict(run="a", theta=0.0, num_buckets=2) | own
  kind = config_lib.boundaries("entropy_threshold", **own)
  config = helpers.model_settings("me", kind, first=ONE, last=ONE, **ONE)
  return dpjax.build_model(config, frozen)


@pytest.fixture(
  scope="module",
  params=[
    ("combined", "plain"),
    *(
      pytest.param(x, marks=pytest.mark.slow)
      for x in (("monotonic", "plain"), ("global", "pooled"))
    ),
  ],
  ids="-".join,
)
def parts(request):
  """The model, its parameters, a pass compiled, the frozen entropies and the rule."""
  name, kind = request.param
  reader, frozen = make_frozen(**FROZEN[kind])
  h = ops.conditional_entropy(jax.jit(reader.apply)({"params": frozen}, TOKENS).logits)
  rule = name, ops.entropy_theta(h, 2.7, name, RULES[name]), RULES[name]
  model = make(reader, **dict(zip(("rule", "theta", "theta_add"), rule, strict=True)))
  params = with_frozen(helpers.draw_params(model, 13, 1 / 2), frozen)
  return model, params, partial(jax.jit(model.apply), {"params": params}), h, rule


def test_boundaries_are_those_of_the_frozen_models_entropies(parts):
  _, _, run, h, rule = parts
  whole = run(TOKENS)
  expected = ops.entropy_threshold(h, *rule)
  assert whole.boundaries.dtype == jnp.int32 and 0.3 < expected.mean() < 0.45
  np.testing.assert_array_equal(whole.boundaries, expected)
  # Rounding flips none.
  name, theta, theta_add = rule
  rises = np.diff(h, axis=1)
  compared = [(rises if name == "monotonic" else h, theta)]
  compared += [(rises, theta_add)] if name == "combined" else []
  assert all(abs(values - limit).min() > 1e-4 for values, limit in compared)
  # Nothing later has a part in anything.
  other = TOKENS.copy()
  other[:, 8:] = (other[:, 8:] + 3) % VOCAB
  logits = run(other).logits
  np.testing.assert_allclose(logits[:, :8], whole.logits[:, :8], atol=1e-5)
  assert abs(logits[:, 8:] - whole.logits[:, 8:]).max() > 0.1


@pytest.mark.slow
def test_no_gradient_reaches_the_frozen_model(parts):
  model, params, *_ = parts

  def loss(params):
    return jnp.sum(jnp.sin(model.apply({"params": params}, TOKENS).logits))

  grads = jax.jit(jax.grad(loss))(params)["hourglass"]
  frozen = grads["boundary_predictor"]["frozen"]
  assert not any(leaf.any() for leaf in jax.tree.leaves(frozen))
  assert all(leaf.any() for leaf in jax.tree.leaves(grads["middle"]["feed_forward"]))


@pytest.mark.slow
def test_chunks_say_what_the_whole_says(parts):
  model, params, run, h, rule = parts
  assert model.has_cache
  whole = run(TOKENS)
  if rule[0] == "monotonic":
    params = model.unstack(params)

  def check_state(cache, seen):
    state, rows = cache.layers.boundaries, seen > 0
    for found, expected in ((state.entropy, h), (state.boundary, whole.boundaries)):
      last = np.take_along_axis(np.asarray(expected), seen[:, None] - 1, axis=1)[:, 0]
      np.testing.assert_allclose(found[rows], last[rows], atol=1e-5)

  schedule = helpers.SCHEDULES["chunks" if rule[0] == "global" else "steps"]
  helpers.check_chunks(model, params, TOKENS, whole, schedule, check_state)


def test_a_frozen_model_without_a_cache_leaves_none(monkeypatch):
  model = make(make_frozen()[0])
  assert model.has_cache
  monkeypatch.delattr(dispatcher.Dispatcher, "init_cache")
  assert not model.has_cache
