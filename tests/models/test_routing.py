"""H-Net's routing in the hourglass: causal, the same in chunks as whole, and its loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.models.build import build_boundaries
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, SEED = 3, 23, 11, 6, 6
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))


def make(**own):
  one = dict(num_layers=1)
  kind = config_lib.boundaries("routing", num_buckets=2, **own)
  config = helpers.model_settings("relative_attention", kind, first=one, last=one)
  return config, dpjax.build_model(config)


@pytest.fixture(scope="module")
def parts():
  """The model, its parameters, a pass compiled, and its output."""
  _, model = make()
  params = helpers.draw_params(model, SEED, 1 / 2)
  # Without a direction that all vectors have in common.
  norms = params["hourglass"]["first"]
  for name in ("mixer_norm", "feed_forward_norm"):
    norms[name]["bias"] = jnp.zeros_like(norms[name]["bias"])
  apply = partial(jax.jit(model.apply), {"params": params})
  output = apply(TOKENS)
  p = np.asarray(output.boundary_probabilities)
  # Some of each, in every row, and rounding flips none.
  assert (output.boundaries.sum(1) > 2).all() and (output.boundaries.sum(1) < 20).all()
  assert abs(p - 0.5).min() > 1e-3 and (output.boundaries[:, 0] == 1).all()
  return model, params, apply, output


def test_it_begins_with_cosines_and_without_a_residual():
  config, model = make()
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]["hourglass"]
  assert params.keys() == {"first", "middle", "last", "boundary_predictor", "relative_positions"}
  (kind,), h = build_boundaries(config), jnp.ones((BATCH, LENGTH, WIDTH))
  found, routing = kind.init_with_output(jax.random.key(0), h, TOKENS)
  for name in ("query", "key"):
    np.testing.assert_array_equal(routing["params"][name], np.eye(WIDTH))
  joined, residual = kind.init_with_output(jax.random.key(0), h, h, found, method="join")
  np.testing.assert_array_equal(joined, h)
  assert not residual["params"]["residual"]["kernel"].any()


def test_chunks_say_what_the_whole_says(parts):
  model, params, _, whole = parts
  helpers.check_chunks(model, params, TOKENS, whole, helpers.SCHEDULES["chunks"])
