import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers, ops
from dpjax.config import registry
from dpjax.layers.boundaries import StageOutput
from dpjax.models.language_model import LanguageModelOutput
from dpjax.training import losses
from tests import helpers
from tests.reference import pooling as reference

BATCH, LENGTH, VOCAB = 2, 5, 7


def draw():
  generator = np.random.default_rng(0)
  logits = jnp.asarray(3 * generator.standard_normal((BATCH, LENGTH, VOCAB)), jnp.float32)
  targets = jnp.asarray(generator.integers(VOCAB, size=(BATCH, LENGTH)))
  weights = jnp.asarray([[1, 0, 1, 1, 0], [0, 0.5, 1, 0, 1]], jnp.float32)
  return logits, targets, weights


def exact(logits, targets, weights):
  """Nats, their gradient by the logits, and the count: in float64, from the formula."""
  logits, weights = np.float64(logits), np.float64(weights)
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  one_hot = np.eye(VOCAB)[np.asarray(targets)]
  nats = -(weights * np.log((probabilities * one_hot).sum(-1))).sum()
  return nats, weights[..., None] * (probabilities - one_hot), weights.sum()


STEPS = np.random.default_rng(9).integers(-2, 3, size=(BATCH, LENGTH, VOCAB))
IMPOSSIBLE = np.arange(VOCAB) == (np.asarray(draw()[1])[..., None] + 3) % VOCAB  # no target
# Logits, and for float64 what has the same softmax.
LOGITS = {
  "drawn": (draw()[0], draw()[0]),
  "all large": (-1e8 + 8 * STEPS, 8 * STEPS),
  "the largest": (np.full(STEPS.shape, 2e38), 0 * STEPS),
  "impossible tokens": (np.where(IMPOSSIBLE, -np.inf, STEPS), np.where(IMPOSSIBLE, -1e3, STEPS)),
}


@pytest.mark.parametrize("case", LOGITS)
def test_cross_entropy_is_the_formula_and_so_is_its_gradient(case):
  logits, small = LOGITS[case]
  _, *others = draw()
  run = jax.jit(jax.value_and_grad(losses.cross_entropy, has_aux=True))
  (nats, count), grad = run(jnp.asarray(logits, jnp.float32), *others)
  for got, expected in zip((nats, grad, count), exact(small, *others), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert nats.dtype == count.dtype == jnp.float32
  assert not grad[np.isneginf(logits)].any()


def test_nan_where_nothing_counts_does_not_matter():
  output, batch = draw_pooled()
  targets, weights = batch["targets"], batch["weights"]

  @jax.jit
  @jax.value_and_grad
  def run(values):
    p = values[..., 0] / 20 + 0.5
    stage = StageOutput((p > 0.5).astype(jnp.int32), values[..., 0], p)
    nats = losses.cross_entropy(values, targets, weights)[0]
    nats += losses.output_nats(values, jnp.ones((VOCAB, 9)) / 7, None, targets, weights)
    return nats + sum(x.loss(stage, batch)[0] for x in (layers.Unigram(3), layers.Routing(3)))

  expected, expected_grad = run(output.logits)
  nats, grad = run(jnp.where(COUNTED[..., None], output.logits, jnp.nan))
  assert nats == expected > 0
  np.testing.assert_array_equal(grad, expected_grad)
  assert not grad[~COUNTED].any()


def test_the_gradient_keeps_the_logits_alone_in_their_dtype():
  logits, targets, weights = draw()
  logits = logits.astype(jnp.bfloat16)
  _, pull = jax.vjp(lambda x: losses.cross_entropy(x, targets, weights)[0], logits)
  kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= logits.size]
  assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(logits.shape, jnp.bfloat16)]
  (grad,) = pull(jnp.float32(2))
  expected = 2 * exact(logits.astype(jnp.float32), targets, weights)[1]
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float64(grad), expected, rtol=2**-4, atol=1e-6)


WIDTH = 3


def draw_layer(has_bias=True):
  """What gives the logits: hidden [B, T, D], kernel [D, V] and bias [V]."""
  generator = np.random.default_rng(6)
  shapes = (BATCH, LENGTH, WIDTH), (WIDTH, VOCAB), (VOCAB,)
  hidden, kernel, bias = (jnp.asarray(generator.standard_normal(x), jnp.float32) for x in shapes)
  return hidden, kernel, bias if has_bias else None


@pytest.mark.parametrize(
  "piece_bytes, pieces, has_bias", [(2**20, [5], True), (18, [3, 3], True), (1, [1] * 5, False)]
)
def test_pieces_give_the_nats_and_gradients_of_the_whole(
  monkeypatch, piece_bytes, pieces, has_bias
):
  monkeypatch.setattr(losses, "_PIECE_BYTES", piece_bytes)
  _, targets, weights = draw()
  layer = draw_layer(has_bias)

  def all_at_once(hidden, kernel, bias):
    logits = hidden @ kernel + (0 if bias is None else bias[None, None])
    return 2 * losses.cross_entropy(logits, targets, weights)[0]

  def in_pieces(*layer):
    return 2 * losses.output_nats(*layer, targets, weights)

  result = jax.jit(jax.value_and_grad(in_pieces, (0, 1, 2)))(*layer)
  expected = jax.value_and_grad(all_at_once, (0, 1, 2))(*layer)
  helpers.assert_trees_close(result, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(in_pieces(*layer), expected[0], rtol=1e-6)
  jaxpr = str(jax.make_jaxpr(jax.grad(in_pieces))(*layer))
  assert f"f32[{BATCH},{pieces[0]},{VOCAB}]" in jaxpr and f"length={len(pieces)}" in jaxpr


def test_pieces_of_bfloat16_sum_in_float32(monkeypatch):
  monkeypatch.setattr(losses, "_PIECE_BYTES", 1)
  _, targets, weights = draw()
  hidden, kernel, bias = draw_layer()
  # The factors of the logits are rounded, the logits are not.
  rounded = hidden.astype(jnp.bfloat16), kernel, bias
  factors = *(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (hidden, kernel)), bias
  run = jax.jit(jax.value_and_grad(losses.output_nats, (0, 1, 2)))
  nats, grads = run(*rounded, targets, weights)
  expected_nats, expected_grads = run(*factors, targets, weights)
  assert nats.dtype == jnp.float32
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
  np.testing.assert_allclose(nats, expected_nats, rtol=1e-6)
  for grad, expected in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(grad.astype(jnp.float32), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("width, size", [(3, 5), (14, 7), (100, 50)])
def test_pieces_have_as_many_rows_as_the_caches_of_a_cpu_hold_or_the_kernel_has(
  monkeypatch, width, size
):
  row_bytes = 4 * 2 * 17
  monkeypatch.setattr(losses, "_CACHED_BYTES", 5 * row_bytes)
  monkeypatch.setattr(losses, "_PIECE_BYTES", 50 * row_bytes)
  hidden, kernel = jnp.zeros((2, 50, width)), jnp.zeros((width, 17))
  targets, mesh = jnp.zeros((2, 50), int), jax.make_mesh((1,), ("data",))

  def piece_size(platform):
    grad = jax.grad(lambda h: losses.output_nats(h, kernel, None, targets, jnp.ones((2, 50))))
    text = jax.jit(grad).trace(hidden).lower(lowering_platforms=(platform,)).as_text()
    return {int(x) for x in re.findall(r"tensor<2x(\d+)x17xf32>", text)}

  with jax.set_mesh(mesh):
    assert (piece_size("cpu"), piece_size("tpu")) == ({size}, {50})
    # Elsewhere, pieces are tiles of eight positions.
    monkeypatch.setattr(losses, "_PIECE_BYTES", 13 * row_bytes)
    assert piece_size("tpu") == {16}


def test_shapes_that_do_not_match_are_refused():
  logits, targets, weights = draw()
  with pytest.raises(ValueError, match=r"expected \[B, T, V\], \[B, T\], \[B, T\]"):
    losses.cross_entropy(logits, targets[:1], weights)
  hidden, *layer = draw_layer()
  with pytest.raises(ValueError, match=r"expected \[B, T, D\], \[B, T\], \[B, T\]"):
    losses.output_nats(hidden, *layer, targets, weights[0])


# What counts of three rows of 11: the end of a window whose first two targets are context
# and whose last two places are filled up; all of it; nothing.
COUNTED = np.zeros((3, 11), bool)
COUNTED[0, 2:9] = COUNTED[1] = True
WEIGHTS = COUNTED.astype(np.float32)
SPACES = (2, 5)


def draw_pooled():
  """What a model with token pooling gives, and its batch."""
  generator = np.random.default_rng(4)
  boundaries = generator.integers(2, size=(3, 11))
  boundaries[0, 9:] = boundaries[2] = 1
  logits = jnp.asarray(2 * generator.standard_normal((3, 11, VOCAB)), jnp.float32)
  boundary_logits = jnp.asarray(generator.standard_normal((3, 11)), jnp.float32)
  stage = StageOutput(jnp.asarray(boundaries, jnp.int32), boundary_logits)
  output = LanguageModelOutput(logits, jnp.zeros((3, 11, 1)), (stage,))
  batch = dict(
    tokens=jnp.asarray(generator.integers(VOCAB, size=(3, 11)), jnp.int32),
    targets=jnp.asarray(generator.integers(VOCAB, size=(3, 11)), jnp.int32),
    weights=jnp.asarray(WEIGHTS),
    boundaries=jnp.asarray(generator.integers(2, size=(3, 11)), jnp.int32),
  )
  return output, batch


def with_stage(output, **values):
  """The output, with other values of its one stage."""
  (stage,) = output.stages
  return output._replace(stages=(stage._replace(**values),))


def spikes(output, left):
  """Eq. 6 of each row's counted tokens, as if there were no others."""
  result = np.zeros(COUNTED.shape)
  for row, is_counted in enumerate(COUNTED):
    entropies = reference.entropy(output.logits)[row, is_counted]
    result[row, is_counted] = reference.spikes(entropies[None], left)[0]
  return result


def binary_cross_entropy(logits, targets, double_sigmoid):
  """The sum over what counts, and its gradient by the logits."""
  logits = np.float64(logits)
  p = 1 / (1 + np.exp(-logits))
  slope = p * (1 - p) if double_sigmoid else np.ones_like(p)
  if double_sigmoid:
    p = 1 / (1 + np.exp(-p))
  nats = -np.where(targets, np.log(p), np.log(1 - p))
  return (nats * COUNTED).sum(), (p - targets) * slope * COUNTED


@pytest.mark.parametrize(
  "settings", [dict(boundaries="unigram", double_sigmoid=True), dict(boundaries="entropy", left=3)]
)
def test_the_predictor_learns_its_targets_by_cross_entropy(settings):
  output, batch = draw_pooled()
  objective = helpers.objective(**settings)

  def boundary_nats(floats):
    logits, boundary_logits = floats
    changed = with_stage(output._replace(logits=logits), logits=boundary_logits)
    sums = objective.sums(changed, batch)
    return sums["boundary_nats"], sums

  run = jax.jit(jax.grad(boundary_nats, has_aux=True))
  (grad_logits, grad), sums = run((output.logits, output.stages[0].logits))
  targets = np.asarray(batch["boundaries"])
  if settings["boundaries"] == "entropy":
    targets = spikes(output, 3)
    # The first of the tokens that count has none before it.
    assert targets[0, 2] == targets[1, 0] == 1
    assert (targets != spikes(output, 2)).any()
  double = settings.get("double_sigmoid", False)
  expected, gradient = binary_cross_entropy(output.stages[0].logits, targets, double)
  np.testing.assert_allclose(sums["boundary_nats"], expected, rtol=1e-5)
  np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-6)
  # No gradient passes through the targets.
  np.testing.assert_array_equal(grad_logits, np.zeros_like(grad_logits))
  boundaries = np.asarray(output.stages[0].boundaries)
  expected = dict(
    targets=(targets * COUNTED).sum(),
    hits=(targets * boundaries * COUNTED).sum(),
    agreements=((targets == boundaries) * COUNTED).sum(),
  )
  assert {name: float(sums[name]) for name in expected} == expected
  nats, _, count = exact(output.logits, batch["targets"], WEIGHTS)
  np.testing.assert_allclose([sums["nats"], sums["count"]], [nats, count], rtol=1e-5)


@pytest.mark.parametrize(
  "name, settings, of_rows",
  [
    ("gumbel", dict(prior=0.3), partial(ops.binomial_prior_loss, alpha=0.3)),
    (
      "flexitokens",
      dict(prior=0.45, deviation=0.05, num_deviations=2.0),
      partial(ops.rate_bounds_loss, highest=0.45, lowest=0.35),
    ),
  ],
)
def test_the_number_of_boundaries_costs_each_row_as_much_as_it_is_long(name, settings, of_rows):
  output, batch = draw_pooled()
  objective = helpers.objective(name, **settings)

  def boundary_nats(boundaries):
    return objective.sums(with_stage(output, boundaries=boundaries), batch)["boundary_nats"]

  def nats_of_rows(boundaries):
    return of_rows(boundaries, weights=WEIGHTS) @ WEIGHTS.sum(axis=1)

  boundaries = output.stages[0].boundaries.astype(jnp.float32)
  nats, grad = jax.jit(jax.value_and_grad(boundary_nats))(boundaries)
  expected, expected_grad = jax.jit(jax.value_and_grad(nats_of_rows))(boundaries)
  np.testing.assert_allclose(nats, expected, rtol=1e-5)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(np.asarray(grad) != 0, COUNTED)


@pytest.mark.parametrize(
  "name, field, first, last", [("gumbel", "prior", 0.6, 0.3), ("routing", "factor", 2.0, 5.0)]
)
def test_an_aim_moves_from_one_value_to_another_by_update(name, field, first, last):
  output, batch = draw_pooled()
  chances = jax.nn.sigmoid(output.stages[0].logits.astype(jnp.float32))
  output = with_stage(output, probabilities=chances)

  def make_nats(**settings):
    arguments = {"width": 1} if name == "routing" else {}
    section = registry.boundaries.section(name, **settings)
    module = registry.boundaries.build(section, "boundaries", predictor_width=1, **arguments)
    sums = jax.jit(losses.Objective([module]).sums)
    return lambda **inputs: sums(output, {**batch, **inputs})["boundary_nats"]

  moving = make_nats(**{field: last, "target_schedule": (first, 8)})
  middle = first + (last - first) / 4
  constant = {x: make_nats(**{field: x})() for x in (first, middle, last)}
  for update, target in ((0, first), (2, middle), (8, last), (99, last)):
    np.testing.assert_allclose(moving(update=jnp.int32(update)), constant[target], rtol=1e-5)
  # Evaluation has no update, and takes the last.
  np.testing.assert_array_equal(moving(), constant[last])
  assert abs(constant[first] / constant[last] - 1) > 0.01
  for wrong in ((0.4,), (0.4, 0), (0.4, 2.5), ("a", 3), (math.nan, 3), (-1.0, 3)):
    with pytest.raises(ValueError, match="^boundaries.target_schedule: expected"):
      make_nats(**{field: last, "target_schedule": wrong})


def test_gumbel_is_compared_with_the_spaces_and_counts_what_it_draws_and_rounds():
  output, batch = draw_pooled()
  plain, spaced, sampled = (
    jax.jit(helpers.objective("gumbel", **settings).sums)(output, batch)
    for settings in (dict(), dict(space_ids=SPACES), dict(sample=True))
  )
  assert "hits" not in plain and "drawn" not in sampled
  is_space = np.isin(batch["tokens"], SPACES) & COUNTED
  assert float(spaced["targets"]) == is_space.sum() > 0
  assert float(spaced["hits"]) == (is_space & np.asarray(output.stages[0].boundaries)).sum()
  # Training draws, evaluation rounds.
  p = 1 / (1 + np.exp(-np.float64(output.stages[0].logits)))
  assert float(plain["drawn"]) == pytest.approx((p * COUNTED).sum())
  assert float(plain["rounded"]) == ((p > 0.5) * COUNTED).sum()


def test_boundaries_by_a_rule_cost_nothing_and_are_counted():
  output, batch = draw_pooled()
  output, b = with_stage(output, logits=None), np.asarray(output.stages[0].boundaries)
  run = jax.jit(helpers.objective("whitespace").sums, static_argnames="scores_starts")
  sums = run(output, batch)
  # Context has segments, too; what is filled up, and a row of nothing, has none.
  of_rows = [b[0, :9].sum(), b[1].sum()]
  assert b[0, 9:].any() and b[2].sum() > max(of_rows)
  expected = dict(boundary_nats=0, boundaries=(b * COUNTED).sum(), segments=sum(of_rows), rows=2)
  expected |= dict(segments_max=max(of_rows), positions=11, slots=max(of_rows) + 1)
  assert {name: float(sums[name]) for name in expected} == expected
  assert sums.keys() == expected.keys() | {"nats", "count"}
  assert {leaf.dtype for leaf in sums.values()} == {jnp.dtype("float32")}
  with_starts = run(output, batch, scores_starts=True)
  nats, _, count = exact(output.logits, batch["targets"], b * WEIGHTS)
  np.testing.assert_allclose(with_starts.pop("start_nats"), nats, rtol=1e-5)
  assert count == sums["boundaries"] and with_starts == sums


@pytest.mark.parametrize("weights", [WEIGHTS, 0 * WEIGHTS], ids=["one row of nothing", "nothing"])
def test_rows_without_documents_count_like_rows_of_one(weights):
  output, batch = draw_pooled()
  batch["weights"] = jnp.asarray(weights)
  run = jax.jit(helpers.objective("whitespace").sums)
  starts = jnp.zeros((3, 11), jnp.int32).at[:, 0].set(1)
  sums = run(with_stage(output, logits=None), batch)
  assert sums == run(with_stage(output, logits=None, document_starts=starts), batch)
  assert (sums["slots"] > sums["segments_max"]) == weights.any()


def test_sums_of_parts_are_those_of_the_whole_but_for_the_largest():
  left = dict(nats=jnp.float32(2.5), segments_max=jnp.float32(3))
  right = dict(nats=jnp.float32(1.25), segments_max=jnp.float32(7))
  for pair in ((left, right), (right, left)):
    assert losses.add_sums(*pair) == dict(nats=3.75, segments_max=7)
