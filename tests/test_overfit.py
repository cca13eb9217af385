"""Every mixer can learn, and token pooling: a fixed random batch is learnt by heart."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax.config import registry
from dpjax.models.build import build_boundaries
from dpjax.training import losses, optimizer, sharding, step
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


def learn(batch, names, mixer, boundaries="none", **settings):
  """What 300 updates by one batch measure, of these names."""
  sizes = dict(vocab_size=29, width=48, feed_forward_width=96, max_length=17)
  mixer = helpers.component(registry.mixers, mixer, num_heads=3)
  config = helpers.model_settings(mixer, boundaries, positions="learned", **sizes, **settings)
  model, objective = dpjax.build_model(config), losses.Objective(build_boundaries(config))
  update = optimizer.make_optimizer("adam", 3e-3, grad_clip_norm=1.0)
  mesh = sharding.make_mesh(jax.devices()[:1])
  state = step.jit_init(model, update, 0, step.abstract_state(model, update, 0, mesh))
  places = sharding.state_sharding(state, mesh)
  train_step = step.jit_train_step(model, update, places, mesh, objective=objective)
  tokens = np.random.default_rng(7).integers(29, size=(5, 18), dtype=np.int32)
  batch |= {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch = sharding.put_batch(batch | {"weights": np.ones((5, 17), np.float32)}, mesh)
  seen = []
  for _ in range(300):
    state, measured = train_step(state, batch)
    seen.append([float(measured[name]) for name in names])
  return seen[0], seen[-1]


@pytest.mark.parametrize(
  "mixer", [helpers.slow_unless(mixer == "dispatcher", mixer) for mixer in registry.mixers.names()]
)
def test_one_batch_is_learnt_by_heart(mixer):
  (first,), (last,) = learn({}, ["loss"], mixer)
  # The first token of each row is given, the rest follow from it alone.
  assert first > 3.0 and last < 0.02


@pytest.mark.slow
def test_one_batch_and_its_boundaries_are_learnt_by_heart():
  boundaries = np.random.default_rng(8).integers(2, size=(5, 17), dtype=np.int32)
  boundaries[:, 0] = 1  # Two rows begin with one token.
  one = dict(num_layers=1)
  names = ["loss", "agreements"]
  first, last = learn(
    {"boundaries": boundaries}, names, "attention", "unigram", first=one, last=one, **one
  )
  assert first[0] > 3.0 and last[0] < 0.02
  assert first[1] < 5 * 17 == last[1]
