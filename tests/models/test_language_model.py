"""Whole models without pooling: their parts, forms that change nothing, and their randomness."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import dpjax
from dpjax import layers, models
from dpjax.runs import numpy_model
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, LAYERS = 2, 7, 13, 6, 2
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))


def configure(mixer="dispatcher", boundaries="none", **changes):
  defaults = dict(vocab_size=VOCAB, num_layers=LAYERS, max_length=11)
  defaults |= dict(positions="sinusoidal", activation="relu")
  return helpers.model_settings(mixer, boundaries, **defaults | changes)


def make(mixer="dispatcher", boundaries="none", **changes):
  return dpjax.build_model(configure(mixer, boundaries, **changes))


# Of the generator that is compiled fastest; with it, training keeps some level of a Dispatcher.
KEY = jax.random.key(4, impl="unsafe_rbg")


def draw_params(model):
  return helpers.draw_params(model, 1, 1 / 2)


@pytest.mark.slow
def test_scan_and_remat_change_nothing():
  levels = dpjax.config.mixer("dispatcher", num_heads=2, level_dropout=0.4)
  settings = dict(mixer=("me", levels), num_layers=3, dropout=0.2, hidden_dropout=0.3)
  params = draw_params(make(**settings))

  def run(**changes):
    model = make(**settings, **changes)

    def loss(params):
      options = dict(deterministic=False, rngs={"dropout": KEY})
      return jnp.mean(jnp.sin(model.apply({"params": params}, TOKENS, **options).logits))

    return jax.jit(jax.value_and_grad(loss))(params)

  expected = run()
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(expected[1]["layers"]))
  for changes in (dict(remat=True), dict(scan_layers=False)):
    helpers.assert_trees_close(run(**changes), expected, rtol=1e-5, atol=1e-6)


def make_block():
  return layers.Block(layers.WE(max_length=7), layers.FeedForward(5), layers.Norm(), layers.Norm())


def test_a_stack_by_hand():
  for blocks in ((make_block(),), (make_block(), make_block())):
    core = models.Hourglass(models.Stack(3, blocks))
    model = models.LanguageModel(VOCAB, 6, 7, core)
    params = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    assert model.has_cache and len(params["layers"]) == len(blocks)
    params = jax.eval_shape(lambda params, model=model: model.unstack(params)[1], params)
    assert [*params["layers"]] == ["blocks_0", "blocks_1", "blocks_2"]
  for blocks in ((), (3,), (None,), (layers.FeedForward(5),)):
    with pytest.raises(ValueError, match="^blocks: expected a tuple of layers.Block, got"):
      models.Stack(3, blocks)
  with pytest.raises(ValueError, match="^num_layers: expected at least 1, got 0"):
    models.Stack(0, (make_block(),))


def test_fewer_layers_than_mixers_take_the_first():
  shapes = [
    jax.eval_shape(make(mixers, num_layers=2).init, KEY, TOKENS)["params"]["layers"]
    for mixers in (("dispatcher", "we", "me"), ("dispatcher", "we"))
  ]
  assert {*shapes[0]} == {"blocks_0", "blocks_1"}
  assert shapes[0] == shapes[1]


def test_scan_and_remat_are_what_is_compiled():
  def lower(num_layers, **settings):
    """The program, and whether it computes layers again."""
    mixers = tuple(dpjax.config.mixer("attention", num_heads=heads) for heads in (2, 3))
    model = make(mixers, num_layers=num_layers, **settings)
    shapes = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    loss = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, TOKENS).logits))
    traced = jax.jit(loss).trace(shapes)
    return traced.lower().as_text(), "remat" in str(traced.jaxpr)

  texts, is_remat = zip(*map(lower, (4, 5, 6)), strict=True)
  four, five, six = (text.count("\n") for text in texts)
  assert abs(six - four) < 10 < five - four and not any(is_remat)
  unrolled, is_remat = lower(4, scan_layers=False, remat=True)
  assert "stablehlo.while" in texts[0] and "stablehlo.while" not in unrolled and is_remat


def test_both_forms_begin_with_the_same_parameters_and_each_layer_with_its_own():
  first, second = (
    jax.jit(make("we", scan_layers=scan_layers).init)(KEY, TOKENS)["params"]
    for scan_layers in (True, False)
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)
  for path, stack in jax.tree.leaves_with_path(first["layers"]):
    assert stack.shape[0] == LAYERS, jax.tree_util.keystr(path)
    if "norm" not in jax.tree_util.keystr(path):
      assert len(np.unique(stack)) == stack.size, jax.tree_util.keystr(path)
  # The output layer begins as the paper's.
  kernel = np.asarray(first["logits"]["kernel"])
  assert kernel.shape == (WIDTH, VOCAB)
  assert 0.09 < abs(kernel).max() <= 0.1 and not first["logits"]["bias"].any()


ROTARY = dpjax.config.mixer("attention", num_heads=3, use_bias=False, rotary_base=30.0)
BARE = dpjax.config.mixer("he", adjustment=False, output_projection=False)
# Of five layers, two are left after a whole period.
THREE = "dispatcher", "we", dpjax.config.mixer("relative_attention", num_heads=3)
EQUATIONS = {
  "in turn": dict(mixer=THREE, num_layers=5, positions="learned", activation="gelu"),
  "extractors": dict(mixer=("she", "he", "we", "me", BARE), num_layers=5, norm_position="pre"),
  "modern": dict(mixer=ROTARY, width=12, norm_position="pre", positions="none")
  | dict(norm_type="rms_norm", activation="swiglu", tie_embeddings=True, use_bias=False),
}


@pytest.mark.parametrize("case", EQUATIONS)
def test_a_model_is_its_equations_and_causal(case):
  config = configure(**EQUATIONS[case])
  model = dpjax.build_model(config)
  params = helpers.draw_params(model, 8, 1 / 3)
  assert ("final_norm" in params) == (config.norm_position == "pre")
  apply = partial(jax.jit(model.apply), {"params": params})
  settings = json.loads(json.dumps(config.to_dict()))
  exact = {name: np.float64(x) for name, x in flatten_dict(params, sep=".").items()}
  full = apply(TOKENS).logits
  expected = [numpy_model.forward(row, exact, settings) for row in TOKENS]
  np.testing.assert_allclose(full, expected, rtol=2e-5, atol=2e-5)
  for position in (0, 3):
    changed = TOKENS.copy()
    changed[0, position] = (changed[0, position] + 1) % VOCAB
    differs_bt = (abs(apply(changed).logits - full) > 1e-5).any(axis=-1)
    np.testing.assert_array_equal(differs_bt[0], np.arange(LENGTH) >= position)
    assert not differs_bt[1].any()


@pytest.mark.parametrize(
  "settings",
  [dict(use_bias=False), dict(tie_embeddings=True, norm_position="pre", boundaries="fixed")],
)
def test_the_output_layer_makes_the_logits(settings):
  model = make("we", num_layers=1, **settings)
  params = draw_params(model)
  output = jax.jit(model.apply)({"params": params}, TOKENS)
  kernel, bias = model.output_layer(params)
  assert kernel.shape == (WIDTH, VOCAB) and bias is None
  np.testing.assert_allclose(output.logits, output.hidden @ kernel, rtol=1e-5, atol=1e-5)


def test_a_batch_on_a_mesh_with_explicit_axes():
  model = make("he", num_layers=1)
  params = draw_params(model)
  tokens = np.random.default_rng(2).integers(VOCAB, size=(16, 5))

  def loss(params, tokens):
    logits = model.apply({"params": params}, tokens).logits
    return jnp.mean(jnp.sin(logits)), logits

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  expected = run(params, tokens)
  mesh = jax.make_mesh((8,), ("rows",))
  assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
  rows, full = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("rows",), ()))
  got = run(jax.device_put(params, full), jax.device_put(tokens, rows))
  assert jax.typeof(got[0][1]).sharding.spec == jax.P("rows", None, None)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, expected)
