"""Layers and models exported for several platforms, with a batch that is still open."""

import importlib

import jax
import numpy as np
import pytest
from jax import export

import dpjax
from dpjax import layers
from tests import helpers
from tests.layers.test_hostile_layers import LAYERS, TOKENS

(BATCH,) = export.symbolic_shape("b")


def check(function, params, *inputs):
  """The exported function gives the outputs of the function."""

  def open_batch(x):
    shape = (BATCH, *x.shape[1:]) if x.shape[:1] == (2,) else x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype)

  jitted, platforms = jax.jit(function), ["cpu", "cuda", "tpu"]
  with pytest.MonkeyPatch.context() as patch:
    # Even where kernels could be compiled.
    for place in ("shift_and_sum.has_triton", "attention.has_cuda"):
      module, name = place.split(".")
      patch.setattr(importlib.import_module(f"dpjax.ops.{module}"), name, lambda: True)
    exported = export.export(jitted, platforms=platforms)(params, *jax.tree.map(open_batch, inputs))
  expected, actual = jitted(params, *inputs), exported.call(params, *inputs)
  for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Those that choose by the platform.
DEFAULT = {"Dispatcher", "HE"}


@pytest.mark.parametrize(
  "layer, fields, inputs",
  [helpers.slow_unless(x[0].__name__ in DEFAULT, *x, id=x[0].__name__) for x in LAYERS],
)
def test_every_layer(layer, fields, inputs):
  module = layer(**fields)
  inputs = {name: jax.numpy.asarray(x) for name, x in inputs.items()}
  params = module.init(jax.random.key(0), **inputs)
  check(lambda params, inputs: module.apply(params, **inputs), params, inputs)
  if isinstance(module, layers.Mixer):
    x, lengths = inputs["inputs"], np.array([3, 7], np.int32)

    def continued(params, x, cache, lengths):
      return module.apply(params, x, cache, lengths=lengths, method="step")

    check(continued, params, x, module.init_cache(*x.shape[::2]), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("mixer, boundaries", [("dispatcher", "gumbel"), ("attention", "routing")])
def test_models(mixer, boundaries):
  kind = helpers.component(dpjax.config.registry.boundaries, boundaries, num_buckets=2)
  model = dpjax.build_model(helpers.model_settings(mixer, kind))
  params = model.init(jax.random.key(0), TOKENS)
  check(lambda params, tokens: model.apply(params, tokens).logits, params, np.int32(TOKENS))

  def continued(params, tokens, cache):
    output, cache = model.apply(params, tokens, cache, method="step")
    return output.logits, cache

  check(continued, params, np.int32(TOKENS), model.init_cache(2))
