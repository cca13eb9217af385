"""Token pooling with a cache: whatever the chunks, what the parallel pass says."""

from functools import cache, partial

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

# Sizes of chunks, and of each row how many tokens are real. Prompts of different lengths,
# rows that have none for a while, a row that begins with a step or with a later chunk.
LATE_BY_A_STEP = [(9, (9, 4, 0)), (1, (1, 1, 0)), (1, (1, 0, 0)), (1, (0, 1, 1)), (9, (3, 9, 9))]
LATE_BY_A_STEP += [(9, (0, 8, 2)), (1, (1, 0, 1)), (9, (8, 0, 9)), (1, (0, 0, 1))]
LATE_BY_A_CHUNK = [(1, (1, 0, 0)), (17, (0, 11, 0)), (17, (17, 3, 8))]
LATE_BY_A_CHUNK += [(1, (0, 1, 1)), (1, (1, 1, 1)), (17, (4, 7, 13))]
SPACES_ARE = dict(space_ids=(SPACE,))
CASES = {
  "fixed": (LATE_BY_A_CHUNK, dict(shortening_factor=3)),
  "fixed, offset 0": (
    LATE_BY_A_STEP,
    dict(boundaries="fixed", shortening_factor=3, boundary_offset=0, pooling="last")
    | dict(mixer="we", last_mixer="attention", positions="sinusoidal"),
  ),
  "whitespace": (
    LATE_BY_A_CHUNK,
    dict(
      first_mixer="attention", mixer="dispatcher", last_mixer="relative_attention", **SPACES_ARE
    ),
  ),
  "spacebyte": (
    LATE_BY_A_STEP,
    dict(mixer="dispatcher", space_ids=(SPACE, 5, 9), end_ids=(SPACE, 7)),
  ),
  "unigram": (
    LATE_BY_A_STEP,
    dict(first_mixer="dispatcher_multihead", mixer="he", last_mixer="me", norm="pre")
    | dict(positions="learned", scan_layers=False),
  ),
  "entropy": (
    LATE_BY_A_STEP,
    dict(first_mixer="she", last_mixer="dispatcher", first_layers=2, last_layers=2, pooling="last"),
  ),
  "gumbel": (LATE_BY_A_STEP, dict(num_capacities=1, **SPACES_ARE)),
}
BY_LAYER = ("fixed", "unigram", "entropy")  # steps with `unstack`ed parameters


def make(boundaries, **settings):
  usual = dict(boundaries=boundaries, first_layers=1, last_layers=1, num_capacities=2)
  return dpjax.build_model(helpers.tiny_model(**{**usual, **settings}))


def balance(params, output):
  """Tokens come about as often as each other, and so do boundaries; all are far apart."""
  mean, out = output.logits.mean(axis=(0, 1)), params["logits"]
  scale = 1 / (output.logits - mean[None, None]).std()
  out["bias"], out["kernel"] = (out["bias"] - mean) * scale, out["kernel"] * scale
  helpers.balance(params, output.boundary_logits)


def make_step(model):
  """Jitted with its cache donated."""

  def step(params, cache, tokens, lengths, given):
    return model.apply({"params": params}, tokens, cache=cache, lengths=lengths, **given)

  return jax.jit(step, donate_argnums=1)


@cache
def prepare(case):
  """The model, its parameters, the whole pass and a step, both compiled once."""
  _, settings = CASES[case]
  model = make(**{"boundaries": case, **settings})
  # Draws of which nothing is nearly a tie, and whose text does not repeat one token.
  params = helpers.draw_params(model, 2 if case == "gumbel" else 13, 1 / 2)
  whole = jax.jit(model.apply)
  balance(params, whole({"params": params}, TOKENS))
  of_step = model.unstack(params) if case in BY_LAYER else params
  return model, partial(whole, {"params": params}), partial(make_step(model), of_step)


def kinds(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def by_chunks(step, cache, tokens, schedule, **given):
  """What the steps say of every token, in whatever chunks they come."""
  seen, garbage = np.zeros(BATCH, int), np.random.default_rng(7)
  found = {}
  for size, lengths in schedule:
    # Padding is any tokens, spaces among them; so is what else is given.
    chunk = garbage.integers(SPACE + 2, size=(BATCH, size))
    parts = {key: chunk.astype(x.dtype) % 2 / 2 + 0.25 for key, x in given.items()}
    if "boundaries" in given:
      parts["boundaries"] = chunk % 2
    for row, length in enumerate(lengths):
      part = slice(seen[row], seen[row] + length)
      chunk[row, :length] = tokens[row, part]
      for key, array in given.items():
        parts[key][row, :length] = array[row, part]
    before, places = kinds(cache), helpers.pointers(cache)
    output = step(cache, chunk, jnp.asarray(lengths, jnp.int32), parts)
    cache = output.cache
    # It does not grow, and lies where it lay.
    assert kinds(cache) == before and helpers.pointers(cache) == places
    for key in ("logits", "boundaries", "boundary_logits"):
      values = getattr(output, key)
      if values is not None:
        values = np.asarray(values)
        shape = (BATCH, tokens.shape[1], *values.shape[2:])
        rows = found.setdefault(key, np.full(shape, np.nan, np.float32))
        for row, length in enumerate(lengths):
          rows[row, seen[row] : seen[row] + length] = values[row, :length]
    seen += lengths
    np.testing.assert_array_equal(cache.length, seen)
  np.testing.assert_array_equal(seen, tokens.shape[1])
  return found


def assert_close(found, expected):
  expected = {key: x for key, x in expected._asdict().items() if x is not None and key != "cache"}
  assert found.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_allclose(found[key], x, atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_chunks_are_the_whole(case):
  model, whole, step = prepare(case)
  expected = whole(TOKENS)
  helpers.assert_sure(expected.boundary_logits)
  counts = np.asarray(expected.boundaries).sum(axis=1)
  assert 0 < counts.sum() < 0.7 * TOKENS.size
  if case == "whitespace":
    np.testing.assert_array_equal(expected.boundaries, SPACES)
  assert expected.logits.std() > 0.7
  found = by_chunks(step, model.init_cache(BATCH), TOKENS, CASES[case][0])
  assert_close(found, expected)
  assert step.func._cache_size() == 2  # one program a size


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_whole_passes(case):
  model, whole, step = prepare(case)
  size, rows = max(CASES[case][0])[0], np.arange(BATCH)
  ends = np.array([5, 2, 7])
  text = np.where(np.arange(LENGTH) < ends[:, None], TOKENS, VOCAB - 1)
  output = step(model.init_cache(BATCH), text[:, :size], jnp.asarray(ends, jnp.int32), {})
  logits = np.asarray(output.logits)[rows, ends - 1]
  num_boundaries = 0
  for _ in range(LENGTH - ends.max()):
    expected = whole(text)
    if expected.boundary_logits is not None:
      helpers.assert_sure(np.asarray(expected.boundary_logits)[np.arange(LENGTH) < ends[:, None]])
    by_whole = np.asarray(expected.logits)[rows, ends - 1]
    np.testing.assert_allclose(logits, by_whole, atol=1e-5, rtol=1e-5)
    ranked = np.sort(by_whole, axis=1)
    assert (ranked[:, -1] - ranked[:, -2]).min() > 1e-3
    new = logits.argmax(axis=1)
    np.testing.assert_array_equal(new, by_whole.argmax(axis=1))
    text[rows, ends] = new
    ends += 1
    output = step(output.cache, new[:, None], jnp.ones(BATCH, jnp.int32), {})
    logits = np.asarray(output.logits)[:, 0]
    num_boundaries += np.asarray(output.boundaries).sum()
  # Of several tokens, and of segments that end.
  assert 4 < num_boundaries < 0.8 * BATCH * (LENGTH - 7)
  assert len(np.unique(text[:, 7:])) > 3
  assert step.func._cache_size() == 2


def test_boundaries_may_be_given_or_drawn_chunk_by_chunk():
  model = make("gumbel", mixer="dispatcher", num_layers=1, num_capacities=1)
  params = helpers.draw_params(model, 2, 1 / 2)
  step, whole = partial(make_step(model), params), jax.jit(model.apply)
  given = np.asarray(SPACES)[:, ::-1].copy()
  given[2, 0] = 1
  schedule = [(9, (9, 4, 0)), (9, (1, 1, 9)), (9, (4, 9, 5)), (9, (9, 9, 9))]
  for options in (dict(boundaries=given), dict(boundary_noise=NOISE)):
    found = by_chunks(step, model.init_cache(BATCH), TOKENS, schedule, **options)
    expected = whole({"params": params}, TOKENS, **options)
    assert_close(found, expected)
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


@pytest.mark.parametrize("mixers, is_online", [("dispatchers", False), ("extractors", True)])
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
  step = partial(make_step(short), params)
  assert_close(by_chunks(step, caches, tokens, SHORT_CHUNKS), expected)


def test_where_attention_is_absolute_it_cannot_go_on_and_says_so():
  model = make("fixed", mixer="attention", positions="sinusoidal", max_length=8, num_layers=1)
  step = partial(make_step(model), helpers.draw_params(model, 3, 1 / 2))
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
  refused("cache: expected", batch=2)
  refused("boundary_noise: expected none", boundary_noise=NOISE[:, :5])
