"""RMSNorm, rotary positions, SwiGLU, tied embeddings, no biases: the model that has them all."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.models import language_model
from tests import helpers
from tests.reference import transformer

VOCAB, WIDTH, HEADS, LAYERS, HIDDEN, LENGTH, BASE = 13, 12, 3, 2, 10, 7, 30.0
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH))
MODERN = dict(norm_kind="rms_norm", activation="swiglu", tie_embeddings=True, use_bias=False)


def settings(mixer="attention", **changes):
  model = config_lib.default_model()
  own = dict(num_heads=HEADS, use_bias=False, rotary_base=BASE) if mixer == "attention" else {}
  model.mixer = config_lib.mixer(mixer, **own)
  sizes = dict(vocab_size=VOCAB, width=WIDTH, num_layers=LAYERS, feed_forward_width=HIDDEN)
  model.update(sizes | dict(max_length=23, norm="pre", positions="none") | MODERN | changes)
  return model


def build(**changes):
  model = dpjax.build_model(settings(**changes))
  return model, helpers.draw_params(model, 8, 1 / 3)


def test_is_what_the_equations_say():
  model, params = build()
  names = {path[-1].key for path, _ in jax.tree.leaves_with_path(params)}
  assert names == {"embedding", "kernel", "scale"} and "logits" not in params
  exact = jax.tree.map(np.float64, params)
  table = exact["embedding"]["tokens"]["embedding"]
  x = table[TOKENS]
  for i in range(LAYERS):
    layer = jax.tree.map(lambda leaf: leaf[i], exact["layers"])  # noqa: B023

    def mix(x):
      return transformer.rotary_attention(x, layer["mixer"], HEADS, BASE)  # noqa: B023

    x = transformer.block(x, layer, mix, "pre", "swiglu", transformer.rms_norm)
  expected = transformer.rms_norm(x, exact["final_norm"]) @ table.T
  output = jax.jit(model.apply)({"params": params}, TOKENS)
  np.testing.assert_allclose(output.logits, expected, rtol=2e-5, atol=2e-5)


def test_chunks_are_the_whole():
  model, params = build()
  tokens = np.random.default_rng(1).integers(VOCAB, size=(2, 19))
  chunks = [(7, (7, 4)), (1, (1, 1)), (1, (1, 0)), (7, (3, 7)), (1, (0, 1)), (7, (7, 6))]
  whole = jax.jit(model.apply)({"params": params}, tokens)
  helpers.check_chunks(model, params, tokens, whole, chunks)


def test_the_table_learns_from_tokens_and_from_logits():
  model, params = build()

  # Token 12 is not read: its row has a gradient by its logit alone.
  tokens = TOKENS.copy()
  tokens[tokens == 12] = 3
  grads = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, tokens).logits[..., 12]))(params)
  table = grads["embedding"]["tokens"]["embedding"]
  assert np.abs(table[12]).min() > 0
  unread = np.array(sorted({*range(12)} - {*tokens.flat}))
  assert unread.size
  np.testing.assert_array_equal(table[unread], 0)
  assert np.abs(table[tokens[0, 0]]).max() > 0


@pytest.mark.parametrize("mixer", ["dispatcher", "we", "relative_attention"])
def test_other_mixers_take_the_frame(mixer):
  model, params = build(mixer=mixer)
  assert "logits" not in params and "bias" not in str(jax.tree.structure(params["final_norm"]))
  output = jax.jit(model.apply)({"params": params}, TOKENS)
  assert output.logits.shape == (2, LENGTH, VOCAB) and np.isfinite(output.logits).all()


# As flax normalises.
@jax.numpy_dtype_promotion("standard")
def test_bfloat16_logits_are_of_bfloat16():
  model, params = build(dtype="bfloat16")
  shapes = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS), params)
  assert shapes.logits.dtype == jnp.bfloat16


def test_without_them_a_model_is_what_it_was():
  config = settings("dispatcher", norm="post", positions="sinusoidal")
  usual = config_lib.default_model()
  config.update({key: usual[key] for key in MODERN})
  model = dpjax.build_model(config)
  block: Any = model.layers.make_block
  new = ("norm_kind", "use_bias")
  old_block = partial(block.func, **{k: v for k, v in block.keywords.items() if k not in new})
  layers = dataclasses.replace(model.layers, make_block=old_block)
  sizes = dict(vocab_size=VOCAB, width=WIDTH, max_length=23, final_norm=False)
  old = language_model.LanguageModel(layers=layers, **sizes)
  traced = [jax.make_jaxpr(x.init_with_output)(jax.random.key(0), TOKENS) for x in (model, old)]
  assert str(traced[0]) == str(traced[1])


def test_a_pooled_model_takes_the_frame():
  plain = settings(boundaries=config_lib.boundaries("fixed", shortening_factor=3))
  params = helpers.draw_params(dpjax.build_model(plain), 8, 1 / 3)
  assert {*params["hourglass"]["middle_norm"]} == {"scale"} and "logits" not in params
