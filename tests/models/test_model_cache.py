"""Models with a cache: what they say by chunks is what the parallel pass says."""

from functools import cache, partial

import jax
import numpy as np
import pytest

from dpjax import ops, registry
from dpjax.layers import extractors
from dpjax.models.build import build_model
from tests import helpers

VOCAB, LENGTH, MAX_LENGTH = 31, 19, 23
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH))
WAYS = (
  dict(positions="sinusoidal", norm="post", scan_layers=True),
  dict(positions="learned", norm="pre", scan_layers=False),
)


def make(mixer, **settings):
  usual = dict(mixer=mixer, vocab_size=VOCAB, num_layers=3, width=12, feed_forward_width=20)
  usual |= dict(num_heads=3, max_length=MAX_LENGTH, positions="sinusoidal", activation="relu")
  return build_model(helpers.tiny_model(**{**usual, **settings}))


@cache
def prepare(mixer):
  """The model, the whole pass and a step. Each way with every other mixer."""
  way = registry.mixers.names().index(mixer) % 2
  model = make(mixer, **WAYS[way])
  # A draw of which nothing is nearly a tie, and whose text does not repeat one token.
  params, whole = helpers.draw_params(model, 8, 1 / 3), jax.jit(model.apply)
  # All tokens come about as often.
  mean = whole({"params": params}, TOKENS).logits.mean(axis=(0, 1))
  params["logits"]["bias"] -= mean
  # A step takes its parameters in either form.
  of_step = model.unstack(params) if mixer in ("dispatcher", "attention", "he") else params
  return model, partial(whole, {"params": params}), of_step


# A prompt, tokens, longer chunks; the second row is behind the first, the prompt of which
# is the longer one.
CHUNKS = [(7, (7, 4)), (1, (1, 1)), (1, (1, 0)), (7, (3, 7)), (1, (0, 1)), (7, (7, 6))]


def logits_by_chunks(model, params, schedule=CHUNKS):
  step = helpers.make_step(model, params)
  return helpers.by_chunks(step, model.init_cache(2), TOKENS, schedule)["logits"]


@pytest.mark.parametrize(
  "mixer",
  [
    helpers.slow_unless(name in ("dispatcher", "relative_attention", "we"), name)
    for name in registry.mixers.names()
  ],
)
def test_chunks_are_the_whole(mixer):
  model, whole, params = prepare(mixer)
  expected = whole(TOKENS)
  assert expected.logits.std() > 0.5
  helpers.check_chunks(model, params, TOKENS, expected, CHUNKS)


@pytest.mark.parametrize("mixer", ["dispatcher_multihead", "we"])
def test_beyond_the_window_it_goes_on_as_a_longer_one_would(mixer):
  settings = dict(num_layers=2, num_levels=3)
  short, long = (make(mixer, max_length=x, **settings) for x in (7, LENGTH))
  params = helpers.draw_params(short, 1, 1 / 3)
  expected = jax.jit(long.apply)({"params": helpers.lengthen(params, long)}, TOKENS).logits
  found = logits_by_chunks(short, params)
  np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_beyond_the_window_relative_attention_sees_the_last_tokens():
  model = make("relative_attention", max_length=7, num_layers=1, positions="none")
  params = helpers.draw_params(model, 1, 1 / 3)
  found = logits_by_chunks(model, params)
  # Further layers would see a token that theirs did not: what it said of earlier ones.
  windows = np.concatenate([TOKENS[:, i : i + 7] for i in range(LENGTH - 6)])
  last = jax.jit(model.apply)({"params": params}, windows).logits[:, -1]
  for i, logits in enumerate(last.reshape(-1, 2, VOCAB)):
    np.testing.assert_allclose(found[:, 6 + i], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
  "mixer, positions", [("attention", "sinusoidal"), ("dispatcher", "learned")]
)
def test_where_there_is_no_going_on_it_says_nan(mixer, positions):
  model = make(mixer, max_length=7, num_layers=1, positions=positions)
  found = logits_by_chunks(model, helpers.draw_params(model, 1, 1 / 3))
  assert np.isnan(found[:, 7:]).all() and np.isfinite(found[:, :7]).all()


@pytest.mark.parametrize("mixer", ["she", "he", "we", "me"])
def test_long_windows_of_extractors_are_online(mixer):
  for length in (extractors.ONLINE_LENGTH - 1, extractors.ONLINE_LENGTH):
    model = make(mixer, max_length=length)
    layers = jax.eval_shape(lambda: model.init_cache(2)).layers  # noqa: B023
    is_online = mixer != "she" and length == extractors.ONLINE_LENGTH
    kind = ops.OnlineConvolutionCache if is_online else ops.ConvolutionCache
    assert [type(x) for x in layers] == [kind] * 3


def test_online_chunks_are_the_whole(monkeypatch):
  """Blocks of 2, 4 and so on, which the steps begin and end at will."""
  model, whole, _ = prepare("we")
  monkeypatch.setattr(extractors, "ONLINE_LENGTH", 8)
  few = partial(ops.init_online_convolution_cache, block=2)
  monkeypatch.setattr(ops, "init_online_convolution_cache", few)
  assert isinstance(model.init_cache(2).layers[0], ops.OnlineConvolutionCache)
  both, second = (1, (1, 1)), (1, (0, 1))
  schedule = [(7, (3, 1)), *[both] * 5, second, *[both] * 4, (7, (7, 5)), *[second] * 3]
  found = logits_by_chunks(model, whole.args[0]["params"], schedule)
  np.testing.assert_allclose(found, whole(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_a_cache_is_not_for_training():
  model = make("dispatcher")
  with pytest.raises(ValueError, match="deterministic: expected True with a cache"):
    jax.eval_shape(lambda: model.apply({}, TOKENS, cache=model.init_cache(2), deterministic=False))
