"""Token pooling: whatever the boundaries, the same function at every capacity."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import layers, ops
from dpjax.config import registry
from dpjax.models.stage import PoolingHints
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH = 3, 11, 7, 6
SPACE = 2
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))
NOISE = np.random.default_rng(3).uniform(0.1, 0.9, (BATCH, LENGTH)).astype(np.float32)
# Far apart, the first of all none and the second all.
GIVEN = np.array([[0] * LENGTH, [1] * LENGTH, [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1]], np.int32)


def make(name, mixer="me", num_buckets=3, changes=None, **pooling):
  """A pooled model of one block a stack; `pooling` are the settings of its boundaries."""
  pooling = dict(shortening_factor=3, space_ids=(SPACE,), num_buckets=num_buckets) | pooling
  section = helpers.component(registry.boundaries, name, **pooling)
  one = dict(num_layers=1)
  defaults = dict(vocab_size=VOCAB, max_length=13, first=one, last=one, **one)
  return dpjax.build_model(helpers.model_settings(mixer, section, **defaults | (changes or {})))


def draw_params(model):
  return helpers.draw_params(model, 1, 1 / 2)


def assert_close(got, expected, atol=2e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), got, expected)


@pytest.mark.slow
def test_no_capacity_changes_values_or_gradients():
  one, three = (make("entropy", "relative_attention", number) for number in (1, 3))
  params = draw_params(one)

  def make_run(model):
    """(boundaries) -> gradients by all parameters, and logits."""

    def loss(params, boundaries):
      logits = model.apply(
        {"params": params}, TOKENS, pooling=PoolingHints(boundaries=boundaries)
      ).logits
      return jnp.sum(jnp.sin(logits)), logits

    return partial(jax.jit(jax.grad(loss, has_aux=True)), params)

  whole, at_capacity = map(make_run, (one, three))
  sparse = GIVEN.copy()
  sparse[1, 4:] = 0
  for boundaries in (GIVEN, sparse):
    expected = whole(boundaries)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    assert_close(at_capacity(boundaries), expected)
  # Without any segment the null group alone is read.
  grads, _ = results = at_capacity(0 * GIVEN)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
  assert np.abs(grads["stages_0"]["null_group"]).max() > 1e-3


def test_routing_begins_with_cosines_and_without_a_residual():
  model = make("routing")
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
  assert params.keys() >= {"layers", "stages_0"}
  assert params["stages_0"].keys() == {"first", "last", "boundaries"}
  predictor = model.core.stages[0].boundaries
  h = jnp.ones((BATCH, LENGTH, WIDTH))
  output, routing = predictor.init_with_output(jax.random.key(0), h, TOKENS)
  for name in ("query", "key"):
    np.testing.assert_array_equal(routing["params"][name], np.eye(WIDTH))
  added, residual = predictor.init_with_output(jax.random.key(0), h, method="residual")
  combined = layers.Smoothing(WIDTH, layers.Norm()).combine(h, added, output)
  np.testing.assert_array_equal(combined, h)
  assert not residual["params"]["residual"]["kernel"].any()


@pytest.mark.parametrize("name", ["routing", "fixed"])
def test_a_batch_without_rows(name):
  model = make(name)
  params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
  assert jax.eval_shape(model.apply, params, TOKENS[:0]).logits.shape == (0, LENGTH, VOCAB)


def test_boundaries_of_the_caller_and_too_small_a_capacity():
  model = make("whitespace", num_buckets=1)
  apply = partial(jax.jit(model.apply), {"params": draw_params(model)}, TOKENS)
  by_rule = apply()
  boundaries = by_rule.stages[0].boundaries
  np.testing.assert_array_equal(boundaries, TOKENS == SPACE)
  # Two programs: their sums may differ in the last bit.
  assert_close(apply(pooling=PoolingHints(boundaries=boundaries)).logits, by_rule.logits)

  @jax.jit
  def at_capacity(params, boundaries):
    pooling = PoolingHints(capacity=4, boundaries=boundaries)
    return model.apply({"params": params}, TOKENS, pooling=pooling)

  output = at_capacity(draw_params(model), GIVEN)
  np.testing.assert_array_equal(output.stages[0].boundaries, GIVEN)
  is_lost = GIVEN.cumsum(axis=1) >= 4
  assert list(is_lost.any(axis=1)) == [False, True, True]
  assert np.isnan(output.logits[is_lost]).all()
  whole = apply(pooling=PoolingHints(boundaries=GIVEN))
  assert_close(output.logits[0], whole.logits[0])


def test_gumbel_draws_in_training_and_rounds_in_evaluation():
  model, drawing = make("gumbel"), make("gumbel", sample=True)
  variables = {"params": draw_params(model)}

  @jax.jit
  def evaluate():
    (stage,) = model.apply(variables, TOKENS).stages
    return stage.boundaries, stage.logits

  @partial(jax.jit, static_argnames="deterministic")
  def draw(seed, deterministic=False):
    rngs = {"dropout": jax.random.key(seed)}
    module = drawing if deterministic else model
    output = module.apply(variables, TOKENS, deterministic=deterministic, rngs=rngs)
    return output.stages[0].boundaries

  boundaries, logits = evaluate()
  np.testing.assert_array_equal(boundaries, logits > 0)
  draws = np.stack([draw(seed) for seed in range(40)])
  assert set(np.unique(draws)) == {0, 1}
  # In the mean p, by the symmetry of the noise: its logit's sign is that of p's.
  assert np.abs(draws.mean(axis=0) - jax.nn.sigmoid(logits)).max() < 0.35
  np.testing.assert_array_equal(draws[3], draw(3))
  np.testing.assert_array_equal(draws[3], draw(3, deterministic=True))


@pytest.mark.parametrize(
  "name, options, message",
  [
    ("whitespace", dict(boundaries=GIVEN[:2]), "boundaries: expected .*3 11"),
    ("whitespace", dict(boundaries=GIVEN + 1), "boundaries: expected zeros and ones"),
    ("entropy", dict(noise=NOISE), "noise: expected none"),
    ("fixed", dict(capacity=13), "capacity: expected 1 to T . 1 = 12, got 13"),
    ("none", dict(boundaries=GIVEN), "boundaries: expected none for a model without"),
  ],
)
def test_refusals(name, options, message):
  two = dict(num_layers=2)
  pooling = PoolingHints(**options)
  model = make(name, changes=dict(first=two, last=two) if name == "none" else {})
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda key: model.init(key, TOKENS, pooling=pooling), jax.random.key(0))


class EveryOther(layers.Boundaries):
  """Somebody's boundaries, at each document's first token and every other one after it."""

  has_probabilities: bool = True

  def find(self, hidden, tokens, context, cache, noise):
    before = 0 if context.num_before is None else context.num_before[:, None]
    position = before + jnp.arange(tokens.shape[1])[None] + 0 * tokens
    probabilities = 0.5 + 0.4 * jnp.cos(position) if self.has_probabilities else None
    return layers.BoundaryOutput(1 - position % 2, probabilities=probabilities)

  def init_cache(self, batch, width):
    return ()


class Doubled(layers.NullGroup):
  def combine(self, read, residual, output):
    return 2 * read + residual


def with_reader(reader, **settings):
  model = make("whitespace")
  variant = type("Variant", (EveryOther,), {"reader": reader})(**settings)
  stage = model.core.stages[0].clone(boundaries=variant)
  return model.clone(core=model.core.clone(stages=(stage,)))


@pytest.mark.parametrize("reader", [Doubled, layers.Smoothing])
def test_boundaries_of_somebody_elses_choose_how_segments_are_read(reader):
  model = with_reader(reader)
  params = draw_params(model)
  has_null = "null_group" in params["stages_0"], "inner_norm" in params["stages_0"]
  assert has_null == (reader.num_null == 1,) * 2 and "reader" not in params["stages_0"]
  expected = jax.jit(model.apply)({"params": params}, TOKENS).logits
  if reader is Doubled:
    once = with_reader(layers.NullGroup).apply({"params": params}, TOKENS).logits
    assert not np.allclose(once, expected, atol=1e-2)
  step = jax.jit(partial(model.apply, method="step"))
  cache = model.init_cache(BATCH)
  for begin, end in itertools.pairwise((0, 4, 5, 6, 7, LENGTH)):
    output, cache = step({"params": params}, TOKENS[:, begin:end], cache)
    assert_close(output.logits, expected[:, begin:end])


def test_smoothing_asks_for_probabilities():
  model = with_reader(layers.Smoothing, has_probabilities=False)
  with pytest.raises(dpjax.UserError, match="^probabilities: expected those of the boundaries"):
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)


def test_only_the_middle_is_compiled_for_each_capacity():
  model = make("whitespace", "relative_attention", num_buckets=4)
  params = draw_params(model)
  jaxpr = str(jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS).logits)(params))
  for size in ops.bucket_sizes(LENGTH + 1, 4):
    assert f"f32[{BATCH},2,{size},{size}]" in jaxpr  # scores of attention
  assert jaxpr.count("cond[") == 1
