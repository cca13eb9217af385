import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers
from dpjax.config import registry
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


def test_is_the_formula_and_so_is_its_gradient():
  inputs = draw()
  run = jax.value_and_grad(losses.cross_entropy, has_aux=True)
  (nats, count), grad = jax.jit(run)(*inputs)
  for got, expected in zip((nats, grad, count), exact(*inputs), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert nats.dtype == count.dtype == jnp.float32


@pytest.mark.parametrize("offset, scale", [(1e5, 3), (-1e8, 8), (2e38, 0)])
def test_a_number_that_all_logits_share_changes_nothing(offset, scale):
  _, targets, weights = draw()
  steps = np.random.default_rng(9).integers(-2, 3, size=(BATCH, LENGTH, VOCAB))
  logits = jnp.asarray(offset + scale * steps, jnp.float32)  # Without rounding, but 2e38.
  run = jax.value_and_grad(lambda x: losses.cross_entropy(x, targets, weights)[0])
  nats, grad = jax.jit(run)(logits)
  expected = exact(scale * steps, targets, weights)
  np.testing.assert_allclose(nats, expected[0], rtol=1e-6)
  np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-7)


def nats_of_logits(logits, batch):
  return losses.cross_entropy(logits, batch["targets"], batch["weights"])[0]


def nats_of_hidden(hidden, batch):
  return losses.output_nats(
    hidden, jnp.ones((VOCAB, 9)) / 7, None, batch["targets"], batch["weights"]
  )


def nats_of_predictor(logits, batch):
  output = LanguageModelOutput(logits, None, logits[..., 0])
  return layers.Unigram(3).loss(output, batch)[0]


def nats_of_router(values, batch):
  p = values[..., 0] / 20 + 0.5
  found = (p > 0.5).astype(jnp.int32)
  output = LanguageModelOutput(values, found, boundary_probabilities=p)
  return layers.Routing(3).loss(output, batch)[0]


@pytest.mark.parametrize(
  "nats", [nats_of_logits, nats_of_hidden, nats_of_predictor, nats_of_router]
)
def test_nan_where_nothing_counts_does_not_matter(nats):
  output, batch = draw_pooled()
  run = jax.jit(jax.value_and_grad(lambda x: nats(x, batch)))
  expected, expected_grad = run(output.logits)
  assert expected > 0
  is_counted = COUNTED[..., None]
  found, grad = run(jnp.where(is_counted, output.logits, jnp.nan))
  assert found == expected
  np.testing.assert_array_equal(grad, expected_grad)
  np.testing.assert_array_equal(np.where(is_counted, 0, grad), 0)


def test_a_token_that_cannot_be_has_no_gradient():
  logits, targets, weights = draw()
  impossible = np.arange(VOCAB) == (np.asarray(targets)[..., None] + 3) % VOCAB
  logits = jnp.where(impossible, -jnp.inf, logits)
  nats, grad = jax.jit(jax.value_and_grad(lambda x: losses.cross_entropy(x, targets, weights)[0]))(
    logits
  )
  expected = exact(jnp.where(impossible, -1e3, logits), targets, weights)
  np.testing.assert_allclose(nats, expected[0], rtol=1e-5)
  np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(grad[impossible], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_one_size_with_the_logits_it_keeps_them_alone(dtype):
  logits, targets, weights = draw()
  logits = logits.astype(dtype)
  _, pull = jax.vjp(lambda x: losses.cross_entropy(x, targets, weights)[0], logits)
  kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= logits.size]
  assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(logits.shape, dtype)]
  (grad,) = pull(jnp.float32(2))
  expected = 2 * exact(logits.astype(jnp.float32), targets, weights)[1]
  assert grad.dtype == dtype
  rounding = float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(np.float64(grad), expected, rtol=8 * rounding, atol=1e-6)


WIDTH = 3


def draw_layer(has_bias=True, dtype=jnp.float32):
  """What gives the logits: hidden [B, T, D], kernel [D, V] and bias [V]."""
  generator = np.random.default_rng(6)
  shapes = (BATCH, LENGTH, WIDTH), (WIDTH, VOCAB), (VOCAB,)
  hidden, kernel, bias = (jnp.asarray(generator.standard_normal(x), jnp.float32) for x in shapes)
  return hidden.astype(dtype), kernel, bias if has_bias else None


@pytest.mark.parametrize(
  "piece_bytes, pieces, has_bias", [(2**20, [5], True), (18, [3, 3], True), (1, [1] * 5, False)]
)
def test_pieces_give_the_nats_and_gradients_of_the_whole(
  monkeypatch, piece_bytes, pieces, has_bias
):
  monkeypatch.setattr(losses, "_PIECE_BYTES", piece_bytes)
  _, targets, weights = draw()
  layer = draw_layer(has_bias)

  def whole(hidden, kernel, bias):
    logits = hidden @ kernel + (0 if bias is None else bias[None, None])
    return 2 * losses.cross_entropy(logits, targets, weights)[0]

  def in_pieces(*layer):
    return 2 * losses.output_nats(*layer, targets, weights)

  found = jax.jit(jax.value_and_grad(in_pieces, (0, 1, 2)))(*layer)
  expected = jax.value_and_grad(whole, (0, 1, 2))(*layer)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)
  np.testing.assert_allclose(in_pieces(*layer), expected[0], rtol=1e-6)
  jaxpr = str(jax.make_jaxpr(jax.grad(in_pieces))(*layer))
  assert f"f32[{BATCH},{pieces[0]},{VOCAB}]" in jaxpr and f"length={len(pieces)}" in jaxpr


def test_pieces_of_bfloat16_sum_in_float32(monkeypatch):
  monkeypatch.setattr(losses, "_PIECE_BYTES", 1)
  _, targets, weights = draw()
  exact_layer, rounded = draw_layer(), draw_layer(dtype=jnp.bfloat16)
  run = jax.jit(jax.value_and_grad(losses.output_nats, (0, 1, 2)))
  nats, grads = run(*rounded, targets, weights)
  expected_nats, expected_grads = run(*exact_layer, targets, weights)
  assert nats.dtype == jnp.float32
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
  np.testing.assert_allclose(nats, expected_nats, rtol=0.02)
  for grad, expected in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(grad.astype(jnp.float32), expected, rtol=0, atol=0.05)
  # The logits are not rounded, their factors are.
  hidden, kernel, bias = rounded
  factors = hidden.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32), bias
  of_factors = losses.output_nats(*factors, targets, weights)
  np.testing.assert_allclose(nats, of_factors, rtol=1e-6)


def test_pieces_are_tiles_of_eight_positions(monkeypatch):
  bytes_of_13 = 4 * 2 * 17 * 13
  monkeypatch.setattr(losses, "_PIECE_BYTES", bytes_of_13 // jax.device_count())
  hidden, kernel = jnp.zeros((2, 50, 3)), jnp.zeros((3, 17))
  weights = jnp.ones((2, 50))
  pieces, *_ = losses._cut(False, hidden, kernel, weights.astype(jnp.int32), weights)
  assert pieces.shape == (4, 2, 16, 3)


@pytest.mark.parametrize("width, size", [(3, 5), (14, 7), (100, 50)])
def test_pieces_on_a_cpu_have_as_many_rows_as_the_caches_hold_or_the_kernel_has(
  monkeypatch, width, size
):
  monkeypatch.setattr(losses, "_CACHED_BYTES", 4 * 2 * 17 * 5)
  hidden, kernel = jnp.zeros((2, 50, width)), jnp.zeros((width, 17))
  targets, mesh = jnp.zeros((2, 50), int), jax.make_mesh((1,), ("data",))
  with jax.set_mesh(mesh):
    grad = jax.grad(lambda h: losses.output_nats(h, kernel, None, targets, jnp.ones((2, 50))))
    for platform, expected in (("cpu", size), ("tpu", 50)):
      lowered = jax.jit(grad).trace(hidden).lower(lowering_platforms=(platform,)).as_text()
      assert f"2x{expected}x17xf32" in lowered


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
  output = LanguageModelOutput(
    jnp.asarray(2 * generator.standard_normal((3, 11, VOCAB)), jnp.float32),
    jnp.asarray(boundaries, jnp.int32),
    jnp.asarray(generator.standard_normal((3, 11)), jnp.float32),
  )
  batch = dict(
    tokens=jnp.asarray(generator.integers(VOCAB, size=(3, 11)), jnp.int32),
    targets=jnp.asarray(generator.integers(VOCAB, size=(3, 11)), jnp.int32),
    weights=jnp.asarray(WEIGHTS),
    boundaries=jnp.asarray(generator.integers(2, size=(3, 11)), jnp.int32),
  )
  return output, batch


def spikes(output, left):
  """Eq. 6 of each row's counted tokens, as if there were no others."""
  found = np.zeros(COUNTED.shape)
  for row, is_counted in enumerate(COUNTED):
    entropies = reference.entropy(output.logits)[row, is_counted]
    found[row, is_counted] = reference.spikes(entropies[None], left)[0]
  return found


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
  "settings",
  [
    dict(boundaries="unigram"),
    dict(boundaries="unigram", double_sigmoid=True),
    dict(boundaries="entropy", left=3),
  ],
  ids=str,
)
def test_the_predictor_learns_its_targets_by_cross_entropy(settings):
  output, batch = draw_pooled()
  objective = helpers.objective(**settings)

  def boundary_nats(floats):
    logits, boundary_logits = floats
    given = output._replace(logits=logits, boundary_logits=boundary_logits)
    sums = objective.sums(given, batch)
    return sums["boundary_nats"], sums

  run = jax.jit(jax.grad(boundary_nats, has_aux=True))
  (grad_logits, grad), sums = run((output.logits, output.boundary_logits))
  targets = np.asarray(batch["boundaries"])
  if settings["boundaries"] == "entropy":
    targets = spikes(output, 3)
    # The first of the tokens that count has none before it.
    assert targets[0, 2] == targets[1, 0] == 1
    assert (targets != spikes(output, 2)).any()
  double = settings.get("double_sigmoid", False)
  expected, gradient = binary_cross_entropy(output.boundary_logits, targets, double)
  np.testing.assert_allclose(sums["boundary_nats"], expected, rtol=1e-5)
  np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-6)
  # No gradient passes through the targets.
  np.testing.assert_array_equal(grad_logits, np.zeros_like(grad_logits))
  found = np.asarray(output.boundaries)
  expected = dict(
    targets=(targets * COUNTED).sum(),
    hits=(targets * found * COUNTED).sum(),
    agreements=((targets == found) * COUNTED).sum(),
  )
  assert {name: float(sums[name]) for name in expected} == expected
  nats, _, count = exact(output.logits, batch["targets"], WEIGHTS)
  np.testing.assert_allclose([sums["nats"], sums["count"]], [nats, count], rtol=1e-5)


def test_gumbel_pays_for_an_unlikely_number_of_boundaries():
  output, batch = draw_pooled()
  objective = helpers.objective("gumbel", prior=0.3)

  def boundary_nats(boundaries):
    return objective.sums(output._replace(boundaries=boundaries), batch)["boundary_nats"]

  run = jax.jit(jax.value_and_grad(boundary_nats))
  found = output.boundaries.astype(jnp.float32)
  nats, grad = run(found)
  # The mean of the rows by Eq. 7, each as long as it is.
  of_rows = reference.binomial_prior(found, 0.3, WEIGHTS)
  np.testing.assert_allclose(nats, of_rows @ WEIGHTS.sum(axis=1), rtol=1e-5)
  np.testing.assert_array_equal(np.asarray(grad) != 0, COUNTED)
  for row in range(2):  # Each boundary of a row costs as much as another.
    np.testing.assert_allclose(grad[row, COUNTED[row]], grad[row, 5], rtol=1e-6)
    assert grad[row, 5] > 0  # There are more of them than alpha.


def test_flexitokens_pays_outside_of_its_bounds_alone():
  output, batch = draw_pooled()
  found = output.boundaries.astype(jnp.float32)
  rates = (np.asarray(found) * WEIGHTS).sum(axis=1) / np.maximum(WEIGHTS.sum(axis=1), 1)
  # The first row's rate is between, above or below the bounds.
  for prior in (rates[0] + 0.05, rates[0] - 0.01, rates[0] + 0.2):
    own = dict(prior=float(prior), deviation=0.05, num_deviations=2.0)

    def boundary_nats(boundaries, own=own):
      sums = helpers.objective("flexitokens", **own).sums(
        output._replace(boundaries=boundaries), batch
      )
      return sums["boundary_nats"]

    nats, grad = jax.jit(jax.value_and_grad(boundary_nats))(found)
    of_rows, slopes = reference.rate_bounds(found, prior, prior - 0.1, WEIGHTS)
    totals = WEIGHTS.sum(axis=1)
    np.testing.assert_allclose(nats, of_rows @ totals, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, slopes * totals[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "name, field, first, last", [("gumbel", "prior", 0.6, 0.3), ("routing", "factor", 2.0, 5.0)]
)
def test_an_aim_moves_from_one_value_to_another_by_update(name, field, first, last):
  output, batch = draw_pooled()
  chances = jax.nn.sigmoid(output.boundary_logits.astype(jnp.float32))
  output = output._replace(boundary_probabilities=chances)

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


def test_the_nats_of_tokens_behind_boundaries():
  output, batch = draw_pooled()
  objective = helpers.objective("whitespace")
  output = output._replace(boundary_logits=None)
  sums = jax.jit(partial(objective.sums, scores_starts=True))(output, batch)
  behind = np.asarray(output.boundaries) * WEIGHTS
  nats, _, count = exact(output.logits, batch["targets"], behind)
  np.testing.assert_allclose([sums["start_nats"], sums["boundaries"]], [nats, count], rtol=1e-5)
  plain = jax.jit(objective.sums)(output, batch)
  assert "start_nats" not in plain and float(plain["nats"]) == float(sums["nats"])


def test_gumbel_is_compared_with_the_spaces_and_counts_what_it_draws_and_rounds():
  output, batch = draw_pooled()
  plain, spaced, sampled = (
    jax.jit(helpers.objective("gumbel", **settings).sums)(output, batch)
    for settings in (dict(), dict(space_ids=SPACES), dict(sample=True))
  )
  assert "hits" not in plain and "drawn" not in sampled
  is_space = np.isin(batch["tokens"], SPACES) & COUNTED
  assert float(spaced["targets"]) == is_space.sum() > 0
  assert float(spaced["hits"]) == (is_space & np.asarray(output.boundaries)).sum()
  # Training draws, evaluation rounds.
  p = 1 / (1 + np.exp(-np.float64(output.boundary_logits)))
  assert float(plain["drawn"]) == pytest.approx((p * COUNTED).sum())
  assert float(plain["rounded"]) == ((p > 0.5) * COUNTED).sum()


def test_boundaries_by_a_rule_cost_nothing_and_are_counted():
  output, batch = draw_pooled()
  b = np.asarray(output.boundaries)
  run = jax.jit(helpers.objective("whitespace").sums)
  sums = run(output._replace(boundary_logits=None), batch)
  # Context has segments, too; what is filled up, and a row of nothing, has none.
  of_rows = [b[0, :9].sum(), b[1].sum()]
  assert b[0, 9:].any() and b[2].sum() > max(of_rows)
  expected = dict(boundary_nats=0, boundaries=(b * COUNTED).sum(), segments=sum(of_rows), rows=2)
  expected |= dict(segments_max=max(of_rows), positions=11, slots=max(of_rows) + 1)
  assert {name: float(sums[name]) for name in expected} == expected
  assert sums.keys() == expected.keys() | {"nats", "count"}
  assert {leaf.dtype for leaf in sums.values()} == {jnp.dtype("float32")}


def test_sums_of_parts_are_those_of_the_whole_but_for_the_largest():
  left = dict(nats=jnp.float32(2.5), segments_max=jnp.float32(3))
  right = dict(nats=jnp.float32(1.25), segments_max=jnp.float32(7))
  for pair in ((left, right), (right, left)):
    assert losses.add_sums(*pair) == dict(nats=3.75, segments_max=7)
