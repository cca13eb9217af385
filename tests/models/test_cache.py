"""Models with a cache: whatever the chunks, the outputs are those of the parallel pass."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.config import registry
from dpjax.models import PoolingHints
from tests import helpers

BATCH, LENGTH, VOCAB = 3, 23, 11
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
IDS = dict(space_ids=(SPACE,))


def mixer(name, **settings):
  return helpers.component(registry.mixers, name, **dict(num_heads=2) | settings)


def plain(name, **changes):
  return helpers.model_settings(name, **dict(positions="sinusoidal") | changes)


def pooled(boundaries, middle="relative_attention", first=None, last=None, outer=1, **changes):
  """Settings of a pooled model; `boundaries` are a name and its settings."""
  section = helpers.component(registry.boundaries, **dict(num_buckets=2) | boundaries)
  stacks = {
    name: dict(num_layers=outer)
    | ({} if x is None else dict(mixer=mixer(x) if isinstance(x, str) else x))
    for name, x in (("first", first), ("last", last))
  }
  return helpers.model_settings(middle, section, **stacks, **changes)


def modern():
  settings = mixer("attention", use_bias=False, rotary_base=30.0)
  frame = dict(norm_type="rms_norm", activation="swiglu", tie_embeddings=True, use_bias=False)
  return plain(settings, width=8, norm_position="pre", positions="none", **frame)


FIXED_0 = dict(name="fixed", shortening_factor=3, offset=0, pooling="last")
BYTES = dict(name="spacebyte", space_ids=(SPACE, 5, 9), end_ids=(SPACE, 7))
# Settings, and the schedule of chunks.
CASES = {
  "modern": (modern(), "chunks"),
  "in turn in the middle": (
    pooled(
      dict(name="fixed", shortening_factor=3),
      ("short_convolution", mixer("attention")),
      ("dispatcher", mixer("local_attention", window=3)),
      num_layers=3,
    ),
    "steps",
  ),
  "offset 0": (pooled(FIXED_0, "we", last="attention", positions="sinusoidal"), "steps"),
  "whitespace": (
    pooled(dict(name="whitespace", **IDS), "dispatcher", "attention", "relative_attention"),
    "chunks",
  ),
  "spacebyte": (pooled(BYTES, "dispatcher"), "steps"),
  "unigram": (
    pooled(
      dict(name="unigram"),
      *("he", "dispatcher_multihead", "me"),
      **dict(norm_position="pre", scan_layers=False, positions="learned"),
    ),
    "steps",
  ),
  "entropy": (
    pooled(dict(name="entropy", pooling="last"), first="she", last="dispatcher", outer=2),
    "steps",
  ),
  "routing": (pooled(dict(name="routing"), num_layers=1), "chunks"),
}
DEFAULT = ("modern", "in turn in the middle")
# With these parameters no boundary is close to a tie, and rounding stays small.
SEEDS = {"offset 0": 14, "entropy": 14, "routing": 6}
BY_LAYER = ("in turn in the middle", "unigram", "entropy")  # steps with `unstack`ed parameters


def balance(params, output):
  """Tokens come about as often as each other, and so do boundaries; all are far apart."""
  if "logits" in params:
    mean, out = output.logits.mean(axis=(0, 1)), params["logits"]
    scale = 1 / (output.logits - mean[None, None]).std()
    out["bias"], out["kernel"] = (out["bias"] - mean) * scale, out["kernel"] * scale
  for stage in output.stages:
    helpers.balance(params, stage.logits)


@pytest.mark.parametrize("case", [helpers.slow_unless(x in DEFAULT, x) for x in CASES])
def test_chunks_are_the_whole(case):
  config, schedule = CASES[case]
  model = dpjax.build_model(config)
  params = helpers.draw_params(model, SEEDS.get(case, 13), 1 / 2)
  if case == "routing":
    for name in ("mixer_norm", "feed_forward_norm"):
      # Without a direction that all vectors have in common.
      norm = params["stages_0"]["first"]["blocks_0"][name]
      norm["bias"] = jnp.zeros_like(norm["bias"])
  full = jax.jit(model.apply)
  balance(params, full({"params": params}, TOKENS))
  expected = full({"params": params}, TOKENS)
  assert expected.logits.std() > 0.5
  for stage in expected.stages:
    helpers.assert_sure(stage.logits)
    assert 0 < np.asarray(stage.boundaries).sum() < 0.7 * TOKENS.size
    if case == "routing":
      assert abs(np.asarray(stage.probabilities) - 0.5).min() > 1e-3
    if case == "whitespace":
      np.testing.assert_array_equal(stage.boundaries, SPACES)
  if case in BY_LAYER:
    model, params = model.unstack(params)
  helpers.check_chunks(model, params, TOKENS, expected, helpers.SCHEDULES[schedule])


def test_a_chunk_does_not_copy_the_parameters_of_all_layers():
  model = dpjax.build_model(modern())
  params, cache = helpers.draw_params(model, 1, 1.0), model.init_cache(BATCH)

  def logits(params, tokens):
    return model.apply({"params": params}, tokens, cache, method="step")[0].logits

  run = jax.make_jaxpr(logits)
  kernel = params["layers"]["blocks_0"]["feed_forward"]["out"]["kernel"]
  shape = str(kernel.shape)[1:-1].replace(" ", "")
  assert f"f32[{shape}]" in (jaxpr := str(run(params, TOKENS[:, :5])))
  assert not re.search(rf"{re.escape(f'f32[{shape}]')} = (stack|concatenate)", jaxpr)


@pytest.mark.slow
def test_boundaries_may_be_given_or_drawn_chunk_by_chunk():
  config = pooled(dict(name="gumbel", num_buckets=1), "dispatcher", num_layers=1)
  model = dpjax.build_model(config)
  params = helpers.draw_params(model, 2, 1 / 2)
  step, full = helpers.make_step(model, params), jax.jit(model.apply)
  boundaries_bt = np.asarray(SPACES)[:, ::-1].copy()
  boundaries_bt[2, 0] = 1
  schedule = [(9, (9, 4, 0)), (9, (1, 1, 9)), (9, (4, 9, 5)), (9, (9, 9, 9))]
  for hints in (dict(boundaries=boundaries_bt), dict(noise=NOISE)):
    outputs = helpers.by_chunks(step, model.init_cache(BATCH), TOKENS, schedule, **hints)
    expected = full({"params": params}, TOKENS, pooling=PoolingHints(**hints))
    helpers.assert_found(outputs, expected)
  logits = np.asarray(expected.stages[0].logits)
  helpers.assert_sure(logits + np.log(NOISE / (1 - NOISE)))
  assert (np.asarray(expected.stages[0].boundaries) != (logits > 0)).any()


# Of chunks shorter and longer than the window.
CHUNKS = [(5, (5, 3, 0)), (1, (1, 1, 0)), (1, (0, 1, 1)), (5, (5, 2, 5)), (11, (11, 11, 11))]
CHUNKS += [(5, (1, 5, 5)), (1, (0, 0, 1))]


@pytest.mark.slow
def test_beyond_the_window_it_goes_on_as_a_longer_one_would():
  levels = mixer("dispatcher", num_levels=3), mixer("dispatcher_multihead", num_levels=3)
  short, long = (
    dpjax.build_model(
      pooled(
        dict(name="whitespace", num_buckets=1, **IDS),
        *(levels[0], "we", levels[1]),
        max_length=max_length,
        positions="sinusoidal",
      )
    )
    for max_length in (8, LENGTH)
  )
  params = helpers.draw_params(short, 4, 1 / 2)
  # More segments than the window of the middle has places.
  tokens = np.where(np.arange(LENGTH) % 7 < 4, SPACE, TOKENS)
  expected = jax.jit(long.apply)({"params": helpers.lengthen(params, long)}, tokens)
  step, cache = helpers.make_step(short, params), short.init_cache(BATCH)
  helpers.assert_found(helpers.by_chunks(step, cache, tokens, CHUNKS), expected)


@pytest.mark.parametrize(
  "lengths, wrong", [([1, 5, 1], 5), ([1, -1, 0], -1), ([2**40 + 1, 1, 1], 2**40 + 1)]
)
def test_lengths_that_a_chunk_does_not_have_are_refused(lengths, wrong):
  model = dpjax.build_model(plain("dispatcher", num_layers=2))
  params = helpers.draw_params(model, 3, 1 / 2)
  words = TOKENS[:3, :4], model.init_cache(3)
  with pytest.raises(ValueError, match=f"^lengths: expected 0 .. 4, got {wrong}(\n|$)"):
    model.apply({"params": params}, *words, lengths=np.array(lengths), method="step")


@pytest.mark.parametrize(
  "config",
  [
    plain("dispatcher", positions="learned", max_length=8, num_layers=1),
    pooled(dict(name="fixed"), "attention", positions="sinusoidal", max_length=8, num_layers=1),
  ],
  ids=["learned positions", "attention"],
)
def test_where_there_is_no_going_on_it_says_nan(config):
  model = dpjax.build_model(config)
  step = helpers.make_step(model, helpers.draw_params(model, 3, 1 / 2))
  cache, is_nan = model.init_cache(BATCH), []
  for place in range(11):
    lengths = jnp.asarray([1, place % 2, 1], jnp.int32)
    output, cache = step(cache, TOKENS[:, place : place + 1], lengths, {})
    is_nan.append(np.isnan(output.logits[:, 0]))
  is_nan = np.asarray(is_nan)  # [T, B, V]
  assert is_nan[8:, [0, 2]].all() and not is_nan[:8].any() and not is_nan[:, 1].any()


REFUSED = [
  (dict(pooling=PoolingHints(capacity=3)), "capacity: expected none with a cache, got 3"),
  (dict(pooling=PoolingHints(boundaries=np.zeros((BATCH, 4), int))), "boundaries: expected .*3 5"),
  (dict(tokens=TOKENS[:2, :5]), "cache.length: expected 2 rows, got 3"),
  (dict(pooling=PoolingHints(noise=NOISE[:, :5])), "noise: expected none"),
]


def test_refusals():
  model = dpjax.build_model(CASES["whitespace"][0])
  params, cache = jax.eval_shape(model.init, jax.random.key(0), TOKENS), model.init_cache(BATCH)
  for changes, message in REFUSED:
    call = partial(model.apply, cache=cache, method="step", **dict(tokens=TOKENS[:, :5]) | changes)
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(call, params)
