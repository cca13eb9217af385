"""Every mixer can learn, and token pooling: a fixed random batch is learnt by heart."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import registry
from dpjax.models.build import build_boundaries
from dpjax.training import losses, optimizer, sharding, step
from tests import helpers

# One of each operator by default.
FIRST = ("dispatcher", "attention", "she")


@pytest.mark.parametrize(
  "mixer",
  [
    pytest.param(mixer, marks=() if mixer in FIRST else pytest.mark.slow)
    for mixer in registry.mixers.names()
  ],
)
@jax.numpy_dtype_promotion("standard")  # Optax raises floats to its integer count.
def test_one_batch_is_learnt_by_heart(mixer):
  config = config_lib.default_model()
  helpers.set_model(
    config,
    mixer=mixer,
    vocab_size=29,
    num_layers=2,
    width=48,
    feed_forward_width=96,
    num_heads=3,
    max_length=17,
  )
  model = dpjax.build_model(config)
  update = optimizer.make_optimizer("adam", 3e-3, clip_norm=1.0)
  mesh = sharding.make_mesh(jax.devices()[:1])
  state = step.jit_init(model, update, 0, mesh)
  places = sharding.state_sharding(state, mesh)
  train_step = step.jit_train_step(model, update, places, mesh)
  tokens = np.random.default_rng(7).integers(29, size=(5, 18), dtype=np.int32)
  batch = sharding.put_batch(
    {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((5, 17), np.float32)},
    mesh,
  )
  losses = []
  for _ in range(300):
    state, measured = train_step(state, batch)
    losses.append(float(measured["loss"]))
  # The first token of each row is given, the rest follow from it alone.
  assert losses[0] > 3.0 and losses[-1] < 0.02, losses[::50]


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_one_batch_and_its_boundaries_are_learnt_by_heart():
  config = config_lib.default_model()
  helpers.set_model(
    config,
    mixer="attention",
    vocab_size=29,
    width=48,
    num_heads=3,
    feed_forward_width=96,
    max_length=17,
    boundaries="unigram",
    num_layers=1,
    first_layers=1,
    last_layers=1,
    num_capacities=2,
  )
  model, objective = dpjax.build_model(config), losses.Objective(build_boundaries(config))
  update = optimizer.make_optimizer("adam", 3e-3, clip_norm=1.0)
  mesh = sharding.make_mesh(jax.devices()[:1])
  state = step.jit_init(model, update, 0, mesh)
  places = sharding.state_sharding(state, mesh)
  train_step = step.jit_train_step(model, update, places, mesh, objective=objective)
  draw = np.random.default_rng(7)
  tokens = draw.integers(29, size=(5, 18), dtype=np.int32)
  boundaries = draw.integers(2, size=(5, 17), dtype=np.int32)
  boundaries[:, 0] = 1  # Two rows begin with one token.
  batch = sharding.put_batch(
    {
      "tokens": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "weights": np.ones((5, 17), np.float32),
      "boundaries": boundaries,
    },
    mesh,
  )
  seen = []
  for _ in range(300):
    state, measured = train_step(state, batch)
    seen.append(tuple(float(measured[name]) for name in ("loss", "agreements")))
  assert seen[0][0] > 3.0 and seen[-1][0] < 0.02, seen[::50]
  assert seen[0][1] < 5 * 17 == seen[-1][1], seen[::50]
