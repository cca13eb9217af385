"""`Run.dispatch_matrices`: what the layers of a trained Dispatcher multiply values by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.analysis import reading
from dpjax.models import build
from tests import helpers

TEXT = "the cat sat on"


def with_model(run, **settings):
  """A run whose model, with these settings, has parameters as they are drawn."""
  config = run.config.copy_and_resolve_references()
  config.model.update(settings)
  model = build.build_model(config.model)
  params = helpers.draw_params(model, seed=3, spread=0.2)
  return dataclasses.replace(run, config=config, model=model, params=params)


@pytest.mark.parametrize("mixer", ["dispatcher", "dispatcher_multihead"])
def test_they_are_the_derivatives_of_each_layer(finished, mixer):
  run = with_model(finished[1], mixer=dpjax.config.mixer(mixer, num_heads=3))
  assert run.tokenizer.decode([run.tokenizer.start_id]) == "\n"
  text = "\n" + TEXT
  matrices = run.dispatch_matrices(text)
  # The page of `dpjax look` shows their sizes, without the start token.
  for layer, m_hts in zip(reading.layers(run, TEXT), matrices, strict=True):
    assert m_hts.shape == (3, len(text), len(text))
    np.testing.assert_array_equal(np.triu(m_hts), np.tile(np.eye(len(text)), (3, 1, 1)))
    np.testing.assert_allclose(layer.weights, abs(m_hts[:, 1:, 1:]), rtol=1e-4, atol=1e-6)
  # The first layer, by its equations: y = W_out M W_in x.
  weights = jax.tree.map(lambda x: x[0], run.params["layers"]["blocks_0"]["mixer"])
  tokens = jnp.asarray(run.tokenizer.encode(text))[None]

  @jax.jit
  def first(params):
    _, seen = run.model.apply(
      {"params": params}, tokens, capture_intermediates=True, mutable=["intermediates"]
    )
    (x_btd,) = seen["intermediates"]["embedding"]["__call__"]
    return x_btd, run.model.core.layers.mixers[0].apply({"params": weights}, x_btd)

  x_btd, y_btd = first(run.params)
  heads = (*x_btd.shape[:2], 3, -1)
  # The later Dispatcher mixes heads before and after, the paper's does not.
  one = heads if mixer == "dispatcher" else x_btd.shape
  v_bthe = (x_btd.reshape(one) @ weights["values"]["kernel"]).reshape(heads)
  mixed = jnp.einsum("hts,bshe->bthe", matrices[0], v_bthe).reshape(one) @ weights["out"]["kernel"]
  np.testing.assert_allclose(mixed.reshape(x_btd.shape), y_btd, rtol=1e-4, atol=1e-5)


def test_other_models_and_texts_are_refused(finished):
  run = finished[1]
  for text in ("", "the cat " * 9):
    with pytest.raises(dpjax.UserError, match="text: expected 1 to 19 tokens, got"):
      run.dispatch_matrices(text)
  with pytest.raises(dpjax.UserError, match="of Dispatchers, got one of WE"):
    with_model(run, mixer=dpjax.config.mixer("we")).dispatch_matrices(TEXT)
  stacks = dict(first=dict(num_layers=1), last=dict(num_layers=1))
  pooled = with_model(run, boundaries=dpjax.config.boundaries("fixed"), **stacks)
  with pytest.raises(dpjax.UserError, match="without token pooling"):
    pooled.dispatch_matrices(TEXT)
