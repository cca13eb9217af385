"""Two stages of pooling, and a middle with a width of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops
from dpjax.models.build import build_boundaries
from dpjax.training import losses, metrics
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, INNER = 3, 23, 11, 6, 10
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))
SMALL = dict(num_buckets=2)
KINDS = {
  "routing": (dict(name="routing", **SMALL), dict(name="routing", factor=2.0, **SMALL)),
  "gumbel": (dict(name="fixed"), dict(name="gumbel", num_buckets=3)),
  "fixed": (dict(name="gumbel", **SMALL), dict(name="fixed", shortening_factor=3)),
}
every_kind = pytest.mark.parametrize(
  "kind", ["routing", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gumbel", "fixed"))]
)


def settings(outer, inner, width=INNER):
  kind = config_lib.boundaries(**outer)
  config = helpers.model_settings("relative_attention", kind, feed_forward_width=14)
  config.middle = config_lib.middle(config_lib.boundaries(**inner), width=width)
  for section in (config, config.middle):
    section.first.num_layers = section.last.num_layers = 1
  config.first.mixer = config_lib.mixer("dispatcher", num_heads=3)
  return config


@functools.cache
def prepare(kind):
  """The configuration, the model, its parameters, a pass compiled, and its output."""
  config = settings(*KINDS[kind])
  model = dpjax.build_model(config)
  params = helpers.draw_params(model, 6, 1 / 2)
  stages = params["hourglass"], params["hourglass"]["middle"]
  for stage in stages:
    for name in ("mixer_norm", "feed_forward_norm"):
      # Without a direction that all vectors have in common.
      stage["first"][name]["bias"] = jnp.zeros_like(stage["first"][name]["bias"])
  apply = jax.jit(model.apply)
  for index, stage in enumerate(stages):
    output = apply({"params": params}, TOKENS)
    found = (output, output.inner)[index]
    if found.boundary_logits is not None:
      # Of the segments that there are, as many end one more as do not.
      logits = np.sort(np.asarray(found.boundary_logits)[:, :8], axis=None)
      out = stage["boundary_predictor"]["out"]
      out["bias"] -= logits[len(logits) // 2 - 1 : len(logits) // 2 + 1].mean()
  output = apply({"params": params}, TOKENS)
  assert (output.boundaries.sum(1) > 4).all()
  # Some of each in both stages, and rounding flips none.
  assert 0 < int(output.inner.boundaries.sum()) < 0.8 * int(output.boundaries.sum())
  for stage in (output, output.inner):
    for sure, middle in ((stage.boundary_probabilities, 0.5), (stage.boundary_logits, 0)):
      distance = abs(np.asarray(middle if sure is None else sure) - middle)
      assert (distance[distance > 0] > 1e-4).all()  # 0: no segment.
  return config, model, params, functools.partial(apply, {"params": params}), output


@every_kind
def test_causal_and_the_same_in_any_batch(kind):
  config, _, _, apply, whole = prepare(kind)
  for place in (0, 7, 15):
    other = TOKENS.copy()
    other[:, place + 1 :] = (other[:, place + 1 :] + 3) % VOCAB
    logits = apply(other).logits
    np.testing.assert_allclose(logits[:, : place + 1], whole.logits[:, : place + 1], atol=1e-5)
    assert abs(logits - whole.logits).max() > 1e-2
  others = np.roll(TOKENS, 5, axis=1)
  others[1] = TOKENS[1]
  np.testing.assert_allclose(apply(others).logits[1], whole.logits[1], atol=1e-5)
  # What is no segment has no boundary, for which the innermost blocks would make room.
  segments = np.asarray(whole.boundaries).sum(axis=1)
  segments += build_boundaries(config)[0].has_null_group
  inner = np.asarray(whole.inner.boundaries)
  assert not inner[np.arange(inner.shape[1]) >= segments[:, None]].any()


@pytest.mark.slow
@every_kind
def test_the_least_capacity_and_chunks_give_the_same(kind):
  _, model, params, _, whole = prepare(kind)
  least = int(whole.boundaries.sum(1).max()) + 1
  at_least = jax.jit(functools.partial(model.apply, capacity=least))({"params": params}, TOKENS)
  np.testing.assert_allclose(at_least.logits, whole.logits, atol=1e-5)
  schedule = helpers.SCHEDULES["chunks" if kind == "gumbel" else "steps"]
  helpers.check_chunks(model, model.unstack(params), TOKENS, whole, schedule)


@pytest.mark.slow
@every_kind
def test_every_parameter_has_a_gradient(kind):
  config, model, params, *_ = prepare(kind)
  objective = losses.Objective(build_boundaries(config))
  batch = dict(tokens=TOKENS, targets=TOKENS, weights=jnp.ones(TOKENS.shape))

  @jax.jit
  def grads(params):
    def loss(params):
      rngs = {"dropout": jax.random.key(4)}
      output = model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)
      sums = objective.sums(output, batch)
      return sums["nats"] + sums["boundary_nats"]

    return jax.grad(loss)(params)

  for path, grad in jax.tree.leaves_with_path(grads(params)):
    name = jax.tree_util.keystr(path)
    assert np.isfinite(grad).all(), name
    # A bias of all keys moves every score of a query alike: no effect.
    assert grad.any() or "distances" in name, name


def test_the_loss_of_each_stage_is_a_mean_over_its_own():
  config, *_, output = prepare("routing")
  weights = np.ones((BATCH, LENGTH), np.float32)
  weights[1, 15:] = 0
  batch = dict(tokens=TOKENS, targets=TOKENS, weights=jnp.asarray(weights))
  sums = losses.Objective(build_boundaries(config)).sums(output, batch)
  segments = (np.asarray(output.boundaries) * weights).sum(axis=1)
  inner = output.inner
  is_segment = np.arange(inner.boundaries.shape[1]) < segments[:, None]
  expected = sum(
    float(
      ops.ratio_loss(
        stage.boundaries, stage.boundary_probabilities, factor, weights=jnp.asarray(w, jnp.float32)
      )
    )
    for stage, factor, w in ((output, 4.5, weights), (inner, 2.0, is_segment))
  )
  assert float(sums["boundary_nats"]) == pytest.approx(0.03 * expected * weights.sum())
  scores = metrics.boundary_scores({name: float(x) for name, x in sums.items()})
  found = np.asarray(inner.boundaries)[is_segment].sum()
  assert scores["shortening_factor_2"] == pytest.approx(segments.sum() / found)


def test_a_loss_of_other_stages_than_the_models_is_refused():
  config = settings(*KINDS["routing"])
  model, kinds = dpjax.build_model(config), build_boundaries(config)
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
  output = jax.eval_shape(model.apply, params, TOKENS)
  batch = dict(tokens=TOKENS, targets=TOKENS, weights=np.ones(TOKENS.shape, np.float32))
  for number in (1, 3):
    objective = losses.Objective((kinds * 2)[:number])
    with pytest.raises(ValueError, match=f"^model.middle: expected the 2 stages .*, got {number}"):
      jax.eval_shape(lambda output: objective.sums(output, batch), output)  # noqa: B023


def test_a_middle_of_its_own_width():
  """Of the tokens' width, with the identity for its matrices, it is one without them."""
  kind = dict(name="fixed", shortening_factor=3)
  wide = settings(kind, dict(name="none"))
  wide.middle.first.num_layers = wide.middle.last.num_layers = 2
  model = dpjax.build_model(wide)
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]["hourglass"]
  assert params["middle_in"].shape == (WIDTH, INNER) and params["null_group"].shape == (INNER,)
  assert params["middle_positions"]["content_bias"].shape == (2, INNER // 2)
  narrow = settings(kind, dict(name="none"), width=0)
  narrow.middle = None
  plain = dpjax.build_model(narrow)
  own = helpers.draw_params(plain, 3, 1 / 2)["hourglass"]
  hourglass = plain.hourglass
  shared = hourglass.middle.mixers[0].make_positions()()
  same = hourglass.clone(middle_width=WIDTH, middle_positions=shared)
  more = own | dict(middle_in=jnp.eye(WIDTH), middle_out=jnp.eye(WIDTH))
  more |= dict(middle_positions=own["relative_positions"])
  x = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH)), "f4")
  found, expected = (
    jax.jit(module.apply)({"params": params}, x, TOKENS).hidden
    for module, params in ((same, more), (hourglass, own))
  )
  np.testing.assert_allclose(found, expected, atol=1e-5)
