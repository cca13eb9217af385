"""Two stages of pooling, and a middle with a width of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import ops
from dpjax.models.build import build_boundaries
from dpjax.models.stage import PoolingHints
from dpjax.training import losses, metrics
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, INNER = 3, 23, 11, 6, 10
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))


def settings(outer, inner, width=INNER):
  config = helpers.model_settings("relative_attention", outer, feed_forward_width=14)
  config.middle = dpjax.config.middle(inner, width=width)
  for section in (config, config.middle):
    section.first.num_layers = section.last.num_layers = 1
  config.first.mixer = dpjax.config.mixer("dispatcher", num_heads=3)
  return config


# Segments without a null group within the tokens, and with one within the segments.
CONFIG = settings(
  dpjax.config.boundaries("routing", num_buckets=2),
  dpjax.config.boundaries("gumbel", prior=0.3, num_buckets=3),
)


@pytest.fixture(scope="module")
def pooled():
  """The model, its parameters, a compiled pass, and its output."""
  model = dpjax.build_model(CONFIG)
  params = helpers.draw_params(model, 6, 1 / 2)
  for name in ("mixer_norm", "feed_forward_norm"):
    # Without a direction that all vectors have in common.
    norm = params["stages_0"]["first"]["blocks_0"][name]
    norm["bias"] = jnp.zeros_like(norm["bias"])
  apply = jax.jit(model.apply)
  _, inner = apply({"params": params}, TOKENS).stages
  # Of the segments that there are, as many end one more as do not.
  logits = np.sort(np.asarray(inner.logits)[:, :8], axis=None)
  out = params["stages_1"]["boundaries"]["out"]
  out["bias"] -= logits[len(logits) // 2 - 1 : len(logits) // 2 + 1].mean()
  output = apply({"params": params}, TOKENS)
  outer, inner = output.stages
  assert (outer.boundaries.sum(1) > 4).all()
  # Some of each in both stages, and rounding flips none.
  assert 0 < int(inner.boundaries.sum()) < 0.8 * int(outer.boundaries.sum())
  for distance in (outer.probabilities - 0.5, inner.logits):
    assert (abs(distance[distance != 0]) > 1e-4).all()  # 0: no segment.
  return model, params, partial(apply, {"params": params}), output


def test_two_stages_are_causal_and_the_same_in_any_batch(pooled):
  _, _, apply, full = pooled
  for place in (0, 7, 15):
    other = TOKENS.copy()
    other[:, place + 1 :] = (other[:, place + 1 :] + 3) % VOCAB
    logits = apply(other).logits
    np.testing.assert_allclose(logits[:, : place + 1], full.logits[:, : place + 1], atol=1e-5)
    assert abs(logits - full.logits).max() > 1e-2
  others = np.roll(TOKENS, 5, axis=1)
  others[1] = TOKENS[1]
  np.testing.assert_allclose(apply(others).logits[1], full.logits[1], atol=1e-5)
  # What is no segment has no boundary, for which the innermost blocks would make room.
  outer, inner = (np.asarray(stage.boundaries) for stage in full.stages)
  segments = outer.sum(axis=1)
  assert not inner[np.arange(inner.shape[1]) >= segments[:, None]].any()


@pytest.mark.parametrize("chunk", [5, 1])
def test_a_cached_step_of_two_stages_keeps_the_shapes(pooled, chunk):
  model, params, *_ = pooled
  cache = model.init_cache(BATCH)
  step = partial(model.apply, method="step")
  output, new = jax.eval_shape(step, {"params": params}, TOKENS[:, :chunk], cache)
  assert output.logits.shape == (BATCH, chunk, VOCAB)
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, cache)


@pytest.mark.slow
def test_the_least_capacity_and_chunks_give_the_same(pooled):
  model, params, _, full = pooled
  least = PoolingHints(capacity=int(full.stages[0].boundaries.sum(1).max()) + 1)
  at_least = jax.jit(partial(model.apply, pooling=least))({"params": params}, TOKENS)
  np.testing.assert_allclose(at_least.logits, full.logits, atol=1e-5)
  unstacked = model.unstack(params)
  for schedule in helpers.SCHEDULES.values():
    helpers.check_chunks(*unstacked, TOKENS, full, schedule)


def test_the_loss_of_each_stage_is_a_mean_over_its_own(pooled):
  *_, output = pooled
  weights = np.ones((BATCH, LENGTH), np.float32)
  weights[1, 15:] = 0
  batch = dict(tokens=TOKENS, targets=TOKENS, weights=jnp.asarray(weights))
  sums = losses.Objective(build_boundaries(CONFIG)).sums(output, batch)
  outer, inner = output.stages
  segments = (np.asarray(outer.boundaries) * weights).sum(axis=1)
  is_segment = np.arange(inner.boundaries.shape[1]) < segments[:, None]
  ratio = ops.ratio_loss(outer.boundaries, outer.probabilities, 4.5, weights=jnp.asarray(weights))
  of_rows = ops.binomial_prior_loss(inner.boundaries, 0.3, weights=is_segment)
  expected = 0.03 * ratio + of_rows @ segments / segments.sum()
  assert float(sums["boundary_nats"]) == pytest.approx(float(expected * weights.sum()))
  scores = metrics.boundary_scores({name: float(x) for name, x in sums.items()})
  ends = np.asarray(inner.boundaries)[is_segment].sum()
  assert scores["shortening_factor_2"] == pytest.approx(segments.sum() / ends)
  for kinds in (build_boundaries(CONFIG)[:1], build_boundaries(CONFIG) * 2):
    with pytest.raises(ValueError, match="^objective: .* each of the model's 2 stages, got [14]"):
      losses.Objective(kinds).sums(output, batch)


def test_a_middle_of_its_own_width():
  """Of the tokens' width, with the identity for its matrices, it is one without them."""
  outer = dpjax.config.boundaries("fixed", shortening_factor=3)
  wide = settings(outer, "none")
  wide.middle.first.num_layers = wide.middle.last.num_layers = 2
  model = dpjax.build_model(wide)
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
  stage = params["stages_0"]
  assert stage["widen"].shape == (WIDTH, INNER) and stage["null_group"].shape == (INNER,)
  assert params["shared_positions"]["content_bias"].shape == (2, INNER // 2)
  narrow = settings(outer, "none", width=0)
  narrow.middle = None
  plain = dpjax.build_model(narrow)
  params = helpers.draw_params(plain, 3, 1 / 2)
  core = plain.core
  (stage,) = core.stages
  shared = core.layers.mixers[0].make_positions()
  same = core.clone(stages=(stage.clone(inner_width=WIDTH),), shared_positions=shared)
  matrices = dict(widen=jnp.eye(WIDTH), narrow=jnp.eye(WIDTH))
  more = params | dict(stages_0=params["stages_0"] | matrices)
  more |= dict(shared_positions=params["stages_0"]["shared_positions"])
  x = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH)), "f4")
  hidden, expected = (
    jax.jit(module.apply)({"params": params}, x, TOKENS).hidden
    for module, params in ((same, more), (core, params))
  )
  np.testing.assert_allclose(hidden, expected, atol=1e-5)
