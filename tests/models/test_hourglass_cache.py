"""Token pooling with a cache: whatever the chunks, what the parallel pass says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import ops
from dpjax.layers import extractors
from tests import helpers

BATCH, LENGTH, MAX_LENGTH, VOCAB, WIDTH = 3, 23, 29, 11, 6
SPACE = 2
# Rows of many spaces, two of them at once; of none; and of one at the very first token.
SPACES = (
  [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1],
  [0] * LENGTH,
  [1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
)
WORDS = np.random.default_rng(0).integers(SPACE + 1, VOCAB, (BATCH, LENGTH))
TOKENS = np.where(SPACES, SPACE, WORDS)
NOISE = np.random.default_rng(3).uniform(0.1, 0.9, (BATCH, LENGTH)).astype(np.float32)

SPACES_ARE = dict(space_ids=(SPACE,))
CASES = {
  "fixed": ("chunks", dict(shortening_factor=3)),
  "fixed, offset 0": (
    "steps",
    dict(boundaries="fixed", shortening_factor=3, boundary_offset=0, pooling="last")
    | dict(mixer="we", last_mixer="attention", positions="sinusoidal"),
  ),
  "whitespace": (
    "chunks",
    dict(
      first_mixer="attention", mixer="dispatcher", last_mixer="relative_attention", **SPACES_ARE
    ),
  ),
  "spacebyte": (
    "steps",
    dict(mixer="dispatcher", space_ids=(SPACE, 5, 9), end_ids=(SPACE, 7)),
  ),
  "unigram": (
    "steps",
    dict(first_mixer="dispatcher_multihead", mixer="he", last_mixer="me", norm="pre")
    | dict(positions="learned", scan_layers=False),
  ),
  "entropy": (
    "steps",
    dict(first_mixer="she", last_mixer="dispatcher", first_layers=2, last_layers=2, pooling="last"),
  ),
  "gumbel": ("steps", dict(num_capacities=1, **SPACES_ARE)),
}


def make(boundaries, **settings):
  usual = dict(boundaries=boundaries, first_layers=1, last_layers=1, num_capacities=2)
  return dpjax.build_model(helpers.tiny_model(**{**usual, **settings}))


def balance(params, output):
  """Tokens come about as often as each other, and so do boundaries; all are far apart."""
  mean, out = output.logits.mean(axis=(0, 1)), params["logits"]
  scale = 1 / (output.logits - mean[None, None]).std()
  out["bias"], out["kernel"] = (out["bias"] - mean) * scale, out["kernel"] * scale
  helpers.balance(params, output.boundary_logits)


BY_LAYER = ("fixed", "unigram", "entropy")  # steps with `unstack`ed parameters


def kinds(tree):
  return jax.tree.map(jax.typeof, tree)


@pytest.mark.parametrize("case", [helpers.slow_unless(x == "whitespace", x) for x in CASES])
def test_chunks_are_the_whole(case):
  schedule, settings = CASES[case]
  model = make(**{"boundaries": case, **settings})
  # Draws of which nothing is nearly a tie.
  params = helpers.draw_params(model, 2 if case == "gumbel" else 13, 1 / 2)
  whole = jax.jit(model.apply)
  balance(params, whole({"params": params}, TOKENS))
  expected = whole({"params": params}, TOKENS)
  helpers.assert_sure(expected.boundary_logits)
  counts = np.asarray(expected.boundaries).sum(axis=1)
  assert 0 < counts.sum() < 0.7 * TOKENS.size and expected.logits.std() > 0.7
  if case == "whitespace":
    np.testing.assert_array_equal(expected.boundaries, SPACES)
  of_step = model.unstack(params) if case in BY_LAYER else params
  helpers.check_chunks(model, of_step, TOKENS, expected, helpers.SCHEDULES[schedule])


def test_boundaries_may_be_given_or_drawn_chunk_by_chunk():
  model = make("gumbel", mixer="dispatcher", num_layers=1, num_capacities=1)
  params = helpers.draw_params(model, 2, 1 / 2)
  step, whole = helpers.make_step(model, params), jax.jit(model.apply)
  given = np.asarray(SPACES)[:, ::-1].copy()
  given[2, 0] = 1
  schedule = [(9, (9, 4, 0)), (9, (1, 1, 9)), (9, (4, 9, 5)), (9, (9, 9, 9))]
  for options in (dict(boundaries=given), dict(boundary_noise=NOISE)):
    found = helpers.by_chunks(step, model.init_cache(BATCH), TOKENS, schedule, **options)
    expected = whole({"params": params}, TOKENS, **options)
    helpers.assert_found(found, expected)
    if "boundaries" in options:
      np.testing.assert_array_equal(expected.boundaries, given)
  logits = np.asarray(expected.boundary_logits)
  helpers.assert_sure(logits + np.log(NOISE / (1 - NOISE)))
  assert (np.asarray(expected.boundaries) != (logits > 0)).any()


# Of chunks no longer than the window.
SHORT_CHUNKS = [(5, (5, 3, 0)), (1, (1, 1, 0)), (1, (0, 1, 1)), (5, (5, 2, 5)), (5, (3, 5, 5))]
SHORT_CHUNKS += [(1, (1, 0, 0)), (5, (5, 5, 4)), (5, (0, 5, 5)), (5, (3, 1, 3))]
BEYOND = {
  "dispatchers": dict(num_levels=3, last_mixer="dispatcher_multihead"),
  "extractors": dict(first_mixer="me", mixer="he", last_mixer="we"),
}


@pytest.mark.parametrize(
  "mixers, is_online",
  [pytest.param("dispatchers", False, marks=pytest.mark.slow), ("extractors", True)],
)
def test_beyond_the_window_it_goes_on_as_a_longer_one_would(mixers, is_online, monkeypatch):
  if is_online:
    monkeypatch.setattr(extractors, "ONLINE_LENGTH", 8)
    few = partial(ops.init_online_convolution_cache, block=4)
    monkeypatch.setattr(ops, "init_online_convolution_cache", few)
  settings = dict(boundaries="whitespace", space_ids=(SPACE,), mixer="dispatcher")
  settings |= dict(positions="sinusoidal", num_capacities=1) | BEYOND[mixers]
  short, long = make(max_length=8, **settings), make(max_length=LENGTH, **settings)
  params = helpers.draw_params(short, 4, 1 / 2)
  caches = short.init_cache(BATCH)
  kind = ops.OnlineConvolutionCache if is_online else ops.ConvolutionCache
  if mixers == "extractors":
    layers = [*caches.layers.first, *caches.layers.middle, *caches.layers.last]
    assert [type(x) for x in layers] == [kind] * 4
  # More segments than the window of the middle has places.
  tokens = np.where(np.arange(LENGTH) % 7 < 4, SPACE, TOKENS)
  expected = jax.jit(long.apply)({"params": helpers.lengthen(params, long)}, tokens)
  step = helpers.make_step(short, params)
  found = helpers.by_chunks(step, caches, tokens, SHORT_CHUNKS)
  helpers.assert_found(found, expected)


def test_where_attention_is_absolute_it_cannot_go_on_and_says_so():
  model = make("fixed", mixer="attention", positions="sinusoidal", max_length=8, num_layers=1)
  step = helpers.make_step(model, helpers.draw_params(model, 3, 1 / 2))
  cache, is_nan = model.init_cache(BATCH), []
  for place in range(11):
    lengths = jnp.asarray([1, place % 2, 1], jnp.int32)
    output = step(cache, TOKENS[:, place : place + 1], lengths, {})
    cache = output.cache
    is_nan.append(np.isnan(output.logits[:, 0]))
  is_nan = np.asarray(is_nan)  # [T, B, V]
  assert is_nan[8:, [0, 2]].all() and not is_nan[:8].any() and not is_nan[:, 1].any()


@jax.numpy_dtype_promotion("standard")
def test_a_cache_of_bfloat16_stays_what_it_is():
  model = make(**CASES["fixed, offset 0"][1], dtype="bfloat16")
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS[:, :2])["params"]
  cache = model.init_cache(BATCH)
  assert cache.layers.latest.dtype == jnp.bfloat16
  for size in (1, 9):
    step = partial(model.apply, cache=cache)
    output = jax.eval_shape(step, {"params": params}, TOKENS[:, :size])
    assert output.logits.dtype == jnp.bfloat16
    assert kinds(output.cache) == kinds(cache)


def test_refusals():
  model = make("whitespace", space_ids=(SPACE,))
  params, cache = helpers.draw_params(model, 3, 1 / 2), model.init_cache(BATCH)

  def refused(message, batch=BATCH, **options):
    def run(params):
      tokens = TOKENS[:batch, :5]
      return model.apply({"params": params}, tokens, cache=cache, **options)

    with pytest.raises(ValueError, match=message):
      jax.eval_shape(run, params)

  refused("capacity: expected none with a cache, got 3", capacity=3)
  refused(r"boundaries: expected .*\(3, 5\)", boundaries=np.zeros((BATCH, 4), int))
  refused(r"cache.length: .*\(2,\), got int32 \(3,\)", batch=2)
  refused("boundary_noise: expected none", boundary_noise=NOISE[:, :5])
