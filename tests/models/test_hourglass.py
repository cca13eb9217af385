"""Token pooling: whatever the boundaries, the same function at every capacity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH = 3, 11, 7, 6
SPACE = 2
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH))
NOISE = np.random.default_rng(3).uniform(0.1, 0.9, (BATCH, LENGTH)).astype(np.float32)
# Far apart, the first of all none and the second all.
GIVEN = np.array([[0] * LENGTH, [1] * LENGTH, [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1]], np.int32)


def make(kind, **settings):
  usual = dict(
    boundaries=kind,
    vocab_size=VOCAB,
    width=WIDTH,
    feed_forward_width=10,
    num_layers=2,
    first_layers=1,
    last_layers=1,
    max_length=13,
    positions="none",
    activation="gelu",
    shortening_factor=3,
    num_capacities=3,
    space_ids=(SPACE,),
    mixer="relative_attention",
  )
  if settings.get("mixer", "relative_attention").endswith("attention"):
    usual |= dict(num_heads=2)
  return dpjax.build_model(helpers.set_model(config_lib.default_model(), **{**usual, **settings}))


def draw_params(model, seed=1):
  """Normal numbers in the place of the initial ones."""
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  generator = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(generator.standard_normal(x.shape) / 2, x.dtype), shapes
  )


def balance(params, logits):
  """Makes the predictor find a boundary at two tokens in five, and be sure of it."""
  if logits is not None:
    ranked = np.sort(np.asarray(logits), axis=None)
    places = np.arange(ranked.size // 2, 3 * ranked.size // 4)
    place = places[np.argmax(ranked[places] - ranked[places - 1])]
    middle, scale = (ranked[place - 1] + ranked[place]) / 2, 2 / ranked.std()
    out = params["hourglass"]["boundary_predictor"]["out"]
    out["bias"], out["kernel"] = (out["bias"] - middle) * scale, out["kernel"] * scale


def draw_vectors(seed=5):
  normal = np.random.default_rng(seed).standard_normal((BATCH, LENGTH, WIDTH))
  return jnp.asarray(normal, jnp.float32)


def sure(logits):
  """Rounding flips no boundary: |p - 0.5| > 0.001 everywhere."""
  assert abs(jax.nn.sigmoid(np.asarray(logits)) - 0.5).min() > 1e-3


def has_long_segments(boundaries):
  """Of several tokens, in every row with a segment; and not all rows alike."""
  counts = np.asarray(boundaries).sum(axis=1)
  assert 0 < counts.sum() < 0.7 * BATCH * LENGTH
  return True


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_is_what_its_parts_are(pooling):
  model = make("fixed", pooling=pooling, mixer="dispatcher", first_mixer="me")
  hourglass, params = model.make_hourglass(), draw_params(model)["hourglass"]

  def blocks(stack, name, x_btd):
    for index in range(stack.num_layers):
      each = jax.tree.map(lambda x, index=index: x[index], params[name])
      x_btd = jax.jit(stack.make_block().apply)({"params": each}, x_btd)
    return np.asarray(x_btd)

  x_btd = draw_vectors()
  h_btd = blocks(hourglass.first, "first", x_btd)
  ends = [2, 5, 8]
  each = [
    h_btd[:, end] if pooling == "last" else h_btd[:, end - 2 : end + 1].mean(axis=1) for end in ends
  ]
  null_bd = np.broadcast_to(params["null_group"], (BATCH, WIDTH))
  s_bsd = np.stack([null_bd, *each], axis=1)
  s_bsd = (s_bsd - s_bsd.mean(-1, keepdims=True)) / np.sqrt(s_bsd.var(-1, keepdims=True) + 1e-5)
  norm = jax.tree.map(np.asarray, params["middle_norm"])
  s_bsd = blocks(hourglass.middle, "middle", s_bsd * norm["scale"] + norm["bias"])
  which = [sum(end <= t for end in ends) for t in range(LENGTH)]
  expected = blocks(hourglass.last, "last", s_bsd[:, which] + h_btd)
  output = jax.jit(hourglass.apply)({"params": params}, x_btd, jnp.asarray(TOKENS))
  np.testing.assert_allclose(output.hidden, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(output.boundaries[1], np.isin(np.arange(LENGTH), ends))


def results(model, params, tokens=TOKENS, **options):
  """Logits, boundaries and gradients by all parameters."""

  def loss(params):
    output = model.apply({"params": params}, jnp.asarray(tokens), **options)
    return jnp.sum(jnp.sin(output.logits)), (output.logits, output.boundaries)

  grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
  return outputs, grads


def assert_close(got, expected, atol=2e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), got, expected)


def slow(*values):
  """The same with other settings: what it costs is to compile them."""
  return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("mixer", ["dispatcher", *slow("relative_attention", "he")])
def test_no_capacity_changes_values_or_gradients(mixer):
  reference = make("entropy", mixer=mixer, num_capacities=1)
  params = draw_params(reference)
  expected = results(reference, params, boundaries=GIVEN)
  for leaf in jax.tree.leaves(expected):
    assert np.isfinite(leaf).all()
  assert_close(results(make("entropy", mixer=mixer), params, boundaries=GIVEN), expected)
  sparse = GIVEN.copy()
  sparse[1, 4:] = 0
  expected = results(reference, params, boundaries=sparse)
  assert_close(results(reference, params, boundaries=sparse, capacity=5), expected)
  assert_close(results(make("entropy", mixer=mixer), params, boundaries=sparse), expected)


def test_no_segment_at_all():
  model = make("whitespace")
  params = draw_params(model)
  outputs, grads = results(model, params, np.full_like(TOKENS, SPACE + 1))
  assert not outputs[1].any()
  for leaf in jax.tree.leaves((outputs, grads)):
    assert np.isfinite(leaf).all()
  # The null group alone is read.
  assert np.abs(grads["hourglass"]["null_group"]).max() > 1e-3


def test_too_small_a_capacity_is_seen():
  model = make("whitespace")
  apply = jax.jit(model.apply, static_argnames="capacity")
  logits = apply(
    {"params": draw_params(model)}, jnp.asarray(TOKENS), boundaries=GIVEN, capacity=4
  ).logits
  is_lost = GIVEN.cumsum(axis=1) >= 4
  assert list(is_lost.any(axis=1)) == [False, True, True]
  assert np.isfinite(logits[0]).all() and np.isnan(logits[is_lost]).all()
  logits = apply(
    {"params": draw_params(model)}, jnp.asarray(TOKENS), boundaries=GIVEN, capacity=1
  ).logits
  assert np.isfinite(logits[0]).all() and np.isnan(logits[GIVEN.cumsum(axis=1) > 0]).all()


# The model of "entropy" is that of "unigram".
@pytest.mark.parametrize("kind", ["gumbel", *slow("fixed", "whitespace", "unigram")])
def test_rows_do_not_touch_each_other_nor_padding_the_text(kind):
  model = make(kind)
  params = draw_params(model)
  apply = jax.jit(model.apply)
  tokens = jnp.asarray(TOKENS)
  balance(params, apply({"params": params}, tokens).boundary_logits)
  whole = apply({"params": params}, tokens)
  if whole.boundary_logits is not None:
    sure(whole.boundary_logits)
  assert kind == "fixed" or len(set(np.asarray(whole.boundaries).sum(1))) > 1
  for row in range(BATCH):
    # The other rows become this one's copies with other ends.
    others = jnp.roll(tokens, row + 1, axis=1).at[row].set(tokens[row])
    output = apply({"params": params}, others)
    np.testing.assert_array_equal(output.boundaries[row], whole.boundaries[row])
    assert_close(output.logits[row], whole.logits[row])
  end = 6
  for filling in (SPACE, SPACE + 1):
    output = apply({"params": params}, tokens.at[:, end:].set(filling))
    np.testing.assert_array_equal(output.boundaries[:, :end], whole.boundaries[:, :end])
    assert_close(output.logits[:, :end], whole.logits[:, :end])
  short = apply({"params": params}, tokens[:, :end])
  assert_close(short.logits, whole.logits[:, :end])


@pytest.mark.parametrize("kind", ["gumbel", *slow("fixed", "whitespace", "unigram")])
def test_causal_by_gradient_and_by_perturbation(kind):
  params = draw_params(make(kind))
  hourglass = make(kind).make_hourglass()
  tokens = np.where(np.arange(LENGTH) % 4 == 2, SPACE, SPACE + 1)[None].repeat(BATCH, 0)
  options = dict(boundary_noise=NOISE) if kind == "gumbel" else {}
  x_btd = draw_vectors()
  weights_d = jnp.linspace(1, 2, WIDTH)

  def run(params, x_btd):
    variables = {"params": params["hourglass"]}
    return hourglass.apply(variables, x_btd, jnp.asarray(tokens), **options)

  def summed(x_btd):
    output = run(params, x_btd)
    logits = 0.0 if output.boundary_logits is None else output.boundary_logits
    return jnp.sum(output.hidden * weights_d[None, None], axis=(0, 2)) + jnp.sum(
      logits * jnp.ones((BATCH, 1)), axis=0
    )

  apply = jax.jit(run)
  balance(params, apply(params, x_btd).boundary_logits)
  whole = apply(params, x_btd)
  assert has_long_segments(whole.boundaries)
  if whole.boundary_logits is not None:
    sure(whole.boundary_logits)
  jacobian = np.asarray(jax.jit(jax.jacrev(summed))(x_btd))  # [T out, B, T in, D]
  reach = np.abs(jacobian).max(axis=(1, 3))
  np.testing.assert_array_equal(np.triu(reach, 1), 0)
  assert (np.diag(reach) > 1e-4).all() and reach[-1, 0] > 1e-6
  for place in (0, 4, LENGTH - 1):
    changed = apply(params, x_btd.at[:, place].add(3.0))
    before = slice(0, place)
    np.testing.assert_array_equal(changed.boundaries[:, before], whole.boundaries[:, before])
    assert_close(changed.hidden[:, before], whole.hidden[:, before])
    assert np.abs(changed.hidden[:, place:] - whole.hidden[:, place:]).max() > 1e-2


def test_the_loss_of_the_tokens_teaches_gumbels_predictor_alone():
  for kind in ("unigram", "entropy", "gumbel"):
    model = make(kind)
    params = draw_params(model)
    options = dict(boundary_noise=NOISE) if kind == "gumbel" else {}

    def loss(predictor, model=model, params=params, options=options):
      of_hourglass = params["hourglass"] | {"boundary_predictor": predictor}
      variables = {"params": params | {"hourglass": of_hourglass}}
      logits = model.apply(variables, jnp.asarray(TOKENS), **options).logits
      return jnp.sum(jnp.sin(logits))

    grads = jax.jit(jax.grad(loss))(params["hourglass"]["boundary_predictor"])
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    assert (largest > 1e-5) == (kind == "gumbel"), (kind, largest)
    assert kind == "gumbel" or not largest


def test_gumbel_draws_in_training_and_rounds_in_evaluation():
  model, drawing = make("gumbel"), make("gumbel", sample_boundaries=True)
  variables = {"params": draw_params(model)}
  tokens = jnp.asarray(TOKENS)

  @jax.jit
  def train(seed):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply(variables, tokens, deterministic=False, rngs=rngs).boundaries

  @jax.jit
  def sample(seed):
    rngs = {"dropout": jax.random.key(seed)}
    return drawing.apply(variables, tokens, rngs=rngs).boundaries

  rounded = jax.jit(model.apply)(variables, tokens)
  np.testing.assert_array_equal(rounded.boundaries, rounded.boundary_logits > 0)
  draws = np.stack([train(seed) for seed in range(40)])
  assert set(np.unique(draws)) == {0, 1}
  # In the mean p, by the symmetry of the noise: its logit's sign is that of p's.
  share = draws.mean(axis=0)
  expected = np.asarray(jax.nn.sigmoid(rounded.boundary_logits))
  assert np.abs(share - expected).max() < 0.35
  np.testing.assert_array_equal(train(3), train(3))
  np.testing.assert_array_equal(sample(3), train(3))


def test_boundaries_that_are_given_take_the_place_of_its_own():
  model = make("whitespace")
  variables = {"params": draw_params(model)}
  apply = jax.jit(model.apply)
  own = apply(variables, jnp.asarray(TOKENS))
  np.testing.assert_array_equal(own.boundaries, TOKENS == SPACE)
  given = apply(variables, jnp.asarray(TOKENS), boundaries=jnp.asarray(own.boundaries))
  # Two programs: their sums may differ in the last bit.
  np.testing.assert_allclose(given.logits, own.logits, rtol=1e-5, atol=1e-6)
  other = apply(variables, jnp.asarray(TOKENS), boundaries=jnp.asarray(GIVEN))
  np.testing.assert_array_equal(other.boundaries, GIVEN)


def test_the_biases_of_the_positions_are_those_of_all_layers():
  shapes = jax.eval_shape(make("unigram").init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))[
    "params"
  ]
  shared = shapes["hourglass"].pop("relative_positions")
  assert {name: leaf.shape for name, leaf in shared.items()} == {
    "content_bias": (2, 3),
    "position_bias": (2, 3),
  }
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]
  assert not [name for name in names if "content_bias" in name]


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_bfloat16():
  exact, rounded = make("whitespace"), make("whitespace", dtype="bfloat16")
  params = draw_params(exact)
  (expected, _), expected_grads = results(exact, params)
  (logits, _), grads = results(rounded, params)
  assert logits.dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  error = np.linalg.norm(logits.astype(jnp.float32) - expected)
  assert error < 0.03 * np.linalg.norm(expected)
  long, short = (
    np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (expected_grads, grads)
  )
  assert np.linalg.norm(long - short) < 0.1 * np.linalg.norm(long)


@pytest.mark.parametrize(
  "kind, options, message",
  [
    ("whitespace", dict(boundaries=GIVEN[:2]), r"boundaries: expected .*\(3, 11\)"),
    ("whitespace", dict(boundaries=GIVEN + 1), "boundaries: expected zeros and ones"),
    ("gumbel", dict(boundaries=GIVEN.T), "boundaries: expected"),
    ("entropy", dict(boundary_noise=NOISE), "boundary_noise: expected none"),
    ("fixed", dict(capacity=0), "capacity: expected 1 to T . 1 = 12, got 0"),
    ("fixed", dict(capacity=13), "capacity: expected 1 to T . 1 = 12, got 13"),
  ],
)
def test_refusals(kind, options, message):
  model = make(kind)
  variables = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(TOKENS))
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda v: model.apply(v, jnp.asarray(TOKENS), **options), variables)


def test_a_model_without_pooling_takes_no_boundaries():
  config = config_lib.default_model()
  config.update(vocab_size=VOCAB, width=WIDTH, num_layers=1)
  model = dpjax.build_model(config)
  with pytest.raises(ValueError, match="boundaries: expected none for a model without"):
    jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.asarray(TOKENS), boundaries=GIVEN))


def test_an_alphabet_without_a_space_is_refused():
  model = make("whitespace", space_ids=())
  with pytest.raises(ValueError, match="space_ids: expected"):
    jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(TOKENS))


def test_only_the_middle_is_compiled_for_each_capacity():
  model = make("whitespace", num_capacities=4)
  params = draw_params(model)
  jaxpr = str(
    jax.make_jaxpr(lambda p: model.apply({"params": p}, jnp.asarray(TOKENS)).logits)(params)
  )
  sizes = ops.capacities(LENGTH + 1, 4)
  for size in sizes:
    assert f"f32[{BATCH},2,{size},{size}]" in jaxpr  # scores of attention
  assert jaxpr.count("cond[") == 1
