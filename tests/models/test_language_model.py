import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import registry
from dpjax.layers import blocks, embeddings
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH, LAYERS = 2, 7, 13, 6, 3
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))


def make(**settings):
  usual = dict(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    width=WIDTH,
    num_heads=2,
    feed_forward_width=10,
    max_length=11,
  )
  return dpjax.build_model(helpers.set_model(config_lib.default_model(), **{**usual, **settings}))


def draw_params(model):
  """Normal numbers in the place of the initial ones, so that no bias is zero."""
  tokens = jnp.asarray(TOKENS)
  shapes = jax.eval_shape(model.init, random_key(0), tokens)["params"]
  generator = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(generator.standard_normal(x.shape) / 2, x.dtype), shapes
  )


def random_key(seed):
  """Of the generator that is compiled fastest."""
  return jax.random.key(seed, impl="unsafe_rbg")


def loss_and_grads(model, params):
  """With dropout where the model has it, always from the same key."""

  def loss(params):
    output = model.apply(
      {"params": params}, TOKENS, deterministic=False, rngs={"dropout": random_key(2)}
    )
    logits = output.logits.astype(jnp.float32)
    return jnp.mean(jnp.sin(logits)), logits

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize("mixer", ["dispatcher", "attention"])
def test_scan_and_remat_change_nothing(mixer):
  settings = dict(num_layers=2, dropout=0.2, hidden_dropout=0.3, mixer_dropout=0.4)
  reference = make(mixer=mixer, **settings)
  params = draw_params(reference)
  expected = loss_and_grads(reference, params)
  for scan_layers, remat in ((True, True), (False, False)):
    model = make(mixer=mixer, scan_layers=scan_layers, remat=remat, **settings)
    got = loss_and_grads(model, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, expected)


def test_scan_and_remat_are_what_is_compiled():
  def texts(**settings):
    model = make(mixer="attention", **settings)
    params = draw_params(model)
    loss = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, TOKENS).logits))
    return jax.jit(loss).lower(params).as_text(), str(jax.make_jaxpr(loss)(params))

  lowered, jaxpr = texts()
  assert "stablehlo.while" in lowered and "remat" not in jaxpr
  lowered, jaxpr = texts(scan_layers=False, remat=True)
  assert "stablehlo.while" not in lowered and "remat" in jaxpr


def test_both_forms_begin_with_the_same_parameters_and_each_layer_with_its_own():
  tokens = jnp.asarray(TOKENS)
  first, second = (
    jax.jit(make(scan_layers=scan_layers).init)(random_key(3), tokens)["params"]
    for scan_layers in (True, False)
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)
  for path, stack in jax.tree.leaves_with_path(first["layers"]):
    assert stack.shape[0] == LAYERS, jax.tree_util.keystr(path)
    if "norm" not in jax.tree_util.keystr(path):
      assert len(np.unique(stack)) == stack.size, jax.tree_util.keystr(path)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_is_embedding_then_blocks_then_logits(norm):
  model = make(norm=norm, positions="learned")
  params = draw_params(model)
  layer = embeddings.TokenAndPosition(VOCAB, WIDTH, 11, "learned")
  x_btd = layer.apply({"params": params["embedding"]}, TOKENS)
  block = jax.jit(model.layers.make_block().apply)
  for index in range(LAYERS):
    each = jax.tree.map(lambda x, index=index: x[index], params["layers"])
    x_btd = block({"params": each}, x_btd)
  assert ("final_norm" in params) == (norm == "pre")
  if norm == "pre":
    norm_layer = blocks.layer_norm(jnp.float32, "final_norm")
    x_btd = norm_layer.apply({"params": params["final_norm"]}, x_btd)
  expected = x_btd @ params["logits"]["kernel"] + params["logits"]["bias"][None, None]
  logits = jax.jit(model.apply)({"params": params}, TOKENS).logits
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_output_layer_begins_as_the_papers():
  params = jax.jit(make().init)(random_key(0), jnp.asarray(TOKENS))["params"]
  kernel = np.asarray(params["logits"]["kernel"])
  assert kernel.shape == (WIDTH, VOCAB)
  assert 0.09 < abs(kernel).max() <= 0.1 and not params["logits"]["bias"].any()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("mixer", registry.mixers.names())
def test_a_token_changes_its_own_logits_and_the_later_ones_alone(mixer, norm):
  model = make(mixer=mixer, norm=norm)
  params = draw_params(model)

  @jax.jit
  def logits_with(position):
    tokens = jnp.asarray(TOKENS)
    changed = (tokens[:, position] + 1) % VOCAB
    tokens = tokens.at[0, position].set(changed[0])
    return model.apply({"params": params}, tokens).logits

  expected = logits_with(LENGTH)  # Beyond the end: no change.
  for position in range(LENGTH):
    differs_bt = (logits_with(position) != expected).any(axis=-1)
    np.testing.assert_array_equal(differs_bt[0], np.arange(LENGTH) >= position)
    assert not differs_bt[1].any()


# One of each operator: the contract's tests have all mixers in bfloat16.
@pytest.mark.parametrize("mixer", ["dispatcher", "attention", "she"])
# Flax's LayerNorm and jax.nn.dot_product_attention mix the two dtypes themselves.
@jax.numpy_dtype_promotion("standard")
def test_bfloat16(mixer):
  exact, rounded = make(mixer=mixer), make(mixer=mixer, dtype="bfloat16")
  params = jax.jit(exact.init)(random_key(0), jnp.asarray(TOKENS))["params"]
  output = jax.eval_shape(rounded.apply, {"params": params}, TOKENS)
  assert output.logits.dtype == jnp.bfloat16
  (_, expected), expected_grads = loss_and_grads(exact, params)
  (_, logits), grads = loss_and_grads(rounded, params)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=0.03)
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  long, short = (
    np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (expected_grads, grads)
  )
  assert np.linalg.norm(long - short) < 0.03 * np.linalg.norm(long)


def test_dropout_needs_training_and_a_key():
  model = make(dropout=0.3)
  params = draw_params(model)
  still = jax.jit(model.apply)({"params": params}, TOKENS).logits
  expected = jax.jit(make().apply)({"params": params}, TOKENS).logits
  np.testing.assert_array_equal(still, expected)

  @jax.jit
  def train(seed):
    rngs = {"dropout": random_key(seed)}
    return model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs).logits

  np.testing.assert_array_equal(train(4), train(4))
  assert (train(4) != train(5)).any() and (train(4) != still).any()


def test_layers_drop_levels_apart():
  # Each of 5 layers adds 1 + keep / 2 to feature 0, and feature 1 remains as it was, so
  # that the logits count the kept levels. Were the draws one, there would be 0 or 5.
  model = make(norm="pre", num_heads=1, num_layers=5, num_levels=1, mixer_dropout=0.5)
  params = jax.tree.map(jnp.zeros_like, draw_params(model))
  mixer = params["layers"]["mixer"]
  params["layers"]["mixer_norm"]["bias"] = jnp.ones((5, WIDTH))
  mixer["values"]["kernel"] = jnp.tile(jnp.eye(WIDTH), (5, 1, 1))
  mixer["out"]["kernel"] = mixer["out"]["kernel"].at[:, 0, 0].set(1)
  params["embedding"]["tokens"]["embedding"] = jnp.tile(jnp.eye(WIDTH)[1], (VOCAB, 1))
  params["final_norm"]["scale"] = jnp.ones(WIDTH)
  params["logits"]["kernel"] = params["logits"]["kernel"].at[0].set(1)

  @jax.jit
  def train(seed):
    rngs = {"dropout": random_key(seed)}
    return model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs).logits

  counts = {round(float(train(seed)[0, 1, 0]), 4) for seed in range(23)}
  assert 3 <= len(counts) <= 6


def test_too_long_an_input_is_refused():
  model = make()
  with pytest.raises(ValueError, match="max_length = 11, got the shape"):
    jax.eval_shape(model.init, random_key(0), jnp.zeros((2, 12), jnp.int32))


@pytest.mark.parametrize(
  "settings",
  [
    dict(mixer="dispatcher"),
    dict(mixer="he"),
    dict(mixer="relative_attention", positions="none"),
    pytest.param(
      dict(boundaries="gumbel", first_layers=1, last_layers=1, num_capacities=2),
      marks=pytest.mark.slow,
    ),
  ],
  ids=["dispatcher", "he", "relative_attention", "gumbel"],
)
def test_a_batch_on_a_mesh_with_explicit_axes(settings):
  model = make(num_layers=1, **settings)
  params = draw_params(model)
  tokens = np.random.default_rng(2).integers(VOCAB, size=(16, 5))

  def loss(params, tokens):
    logits = model.apply({"params": params}, tokens).logits
    return jnp.mean(jnp.sin(logits)), logits

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  expected = run(params, tokens)
  mesh = jax.make_mesh((8,), ("rows",))
  assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
  rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("rows",), ()))
  got = run(jax.device_put(params, whole), jax.device_put(tokens, rows))
  assert jax.typeof(got[0][1]).sharding.spec == jax.P("rows", None, None)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, expected)
