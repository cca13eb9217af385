from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax import config as config_lib
from dpjax.models.build import build_boundaries
from dpjax.models.language_model import LanguageModel
from dpjax.training import losses, optimizer, sharding, step
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH = 16, 7, 13, 24


pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_model(mixer="dispatcher", boundaries="none", **settings):
  usual = dict(vocab_size=VOCAB, num_layers=1, width=WIDTH, feed_forward_width=20, max_length=11)
  usual |= dict(dropout=0.0, hidden_dropout=0.0, positions="learned")
  config = helpers.model_settings(mixer, boundaries, **{**usual, **settings})
  return dpjax.build_model(config)


def draw_batch(seed=0):
  generator = np.random.default_rng(seed)
  tokens = generator.integers(VOCAB, size=(BATCH, LENGTH + 1)).astype(np.int32)
  # Rows of different numbers of targets, and one of none.
  lengths = generator.integers(1, LENGTH + 1, size=BATCH)
  lengths[3] = 0
  weights = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
  return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


def draw_state(model, update):
  """A state with normal numbers for parameters, which takes no compiling."""
  shapes = jax.eval_shape(lambda: step.init_state(model, update, 3)).params
  draw = np.random.default_rng(1).standard_normal
  params = jax.tree.map(lambda x: jnp.asarray(draw(x.shape) / 3, x.dtype), shapes)
  zero = jnp.zeros((), jnp.int32)
  return step.TrainState(zero, params, update.init(params), jax.random.key(3))


def jit_update(model, update, grad_accum_steps=1, **settings):
  return jax.jit(partial(step.train_step, model, update, grad_accum_steps, **settings))


@pytest.fixture(scope="module")
def plain_update():
  """The model without dropout, a state, and the state and metrics after one step."""
  model, update = make_model(), optax.sgd(0.1)
  state = draw_state(model, update)
  return model, state, *jit_update(model, update)(state, draw_batch())


def test_is_the_gradient_of_the_mean_over_the_targets_that_count(plain_update):
  model, before, after, metrics = plain_update
  batch = draw_batch()

  @jax.jit
  @jax.value_and_grad
  def mean_loss(params):
    logits = jax.nn.log_softmax(model.apply({"params": params}, batch["tokens"]).logits)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * batch["weights"]) / batch["weights"].sum()

  loss, grads = mean_loss(before.params)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(metrics["grad_norm"], length, rtol=1e-5)
  expected = jax.tree.map(lambda x, g: x - 0.1 * g, before.params, grads)
  helpers.assert_trees_close(after.params, expected, rtol=1e-5, atol=1e-6)
  assert (before.step, after.step) == (0, 1)
  assert before.key == after.key


def test_parts_of_a_batch_give_the_update_of_the_whole_and_its_norm_before_clipping(plain_update):
  model, before, whole, whole_metrics = plain_update
  update = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(0.1))
  state = before.replace(opt_state=update.init(before.params))
  parts, metrics = jit_update(model, update, 4)(state, draw_batch())
  helpers.assert_trees_close(metrics, whole_metrics, rtol=1e-5, atol=1e-6)
  moved, of_whole = (jax.tree.map(jnp.subtract, x.params, before.params) for x in (parts, whole))
  scale = 1e-2 / metrics["grad_norm"]
  assert scale < 0.5
  expected = jax.tree.map(lambda x: x * scale, of_whole)
  helpers.assert_trees_close(moved, expected, rtol=1e-3, atol=1e-6)


LOGITS = f"f32[{BATCH},{LENGTH},{VOCAB}]", f"f32[{BATCH * LENGTH},{VOCAB}]"


@pytest.mark.parametrize(
  "boundaries, is_whole", [("none", False), pytest.param("entropy", True, marks=pytest.mark.slow)]
)
def test_the_logits_never_lie_in_memory_whole(monkeypatch, boundaries, is_whole):
  monkeypatch.setattr(losses, "_PIECE_BYTES", 1)
  model, update = make_model("attention", boundaries, positions="none"), optax.sgd(0.1)
  objective = helpers.objective(boundaries)
  state = jax.eval_shape(lambda: step.init_state(model, update, 3))
  mesh = sharding.make_mesh(jax.devices()[:1])
  places = sharding.state_sharding(state, mesh)
  train = step.jit_train_step(model, update, places, mesh, objective=objective)
  evaluate = step.jit_eval_step(model, mesh, objective)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), draw_batch())
  for lowered in (train.lower(state, batch), evaluate.lower(state.params, batch, 0)):
    text = lowered.compile().as_text()
    assert any(shape in text for shape in LOGITS) == is_whole
    assert (f"f32[{BATCH},1,{VOCAB}]" in text or f"f32[{BATCH},{VOCAB}]" in text) != is_whole


class Flat(LanguageModel):
  """A model that gives every token the same probability, whatever its last layer says."""

  @nn.compact
  def __call__(self, *args, **kwargs):
    output = super().__call__(*args, **kwargs)
    return output._replace(logits=0 * output.logits)


def test_a_model_that_changes_its_logits_is_trained_by_them():
  model = Flat(VOCAB, WIDTH, 11, make_model().layers)
  state = draw_state(model, optax.sgd(0.1))
  _, metrics = jit_update(model, optax.sgd(0.1))(state, draw_batch())
  np.testing.assert_allclose(metrics["loss"], np.log(VOCAB), rtol=1e-6)


def test_each_part_and_each_step_drops_out_anew():
  # A rate of 0: only the dropout can change the loss.
  model, update = helpers.Bigrams(VOCAB), optax.sgd(0.0)
  state = draw_state(model, update)
  half = jax.tree.map(lambda x: x[:8], draw_batch())
  # Both parts of the batch are that half.
  batch = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), half)
  run = jit_update(model, update, 2)
  after, first = run(state, batch)
  _, again = run(state, batch)
  _, second = run(after, batch)
  assert first["loss"] == again["loss"] != second["loss"]

  @jax.jit
  def loss_of_part(index):
    key = jax.random.split(jax.random.fold_in(state.key, 0), 2)[index]
    output = model.apply(
      {"params": state.params}, half["tokens"], deterministic=False, rngs={"dropout": key}
    )
    nats, count = losses.cross_entropy(output.logits, half["targets"], half["weights"])
    return nats / count

  parts = [loss_of_part(index) for index in range(2)]
  assert abs(parts[0] - parts[1]) > 1e-3
  np.testing.assert_allclose(first["loss"], np.mean(parts), rtol=1e-5)


class Wide(nn.Module):
  """A model that is compiled at once, with parameters that 8 devices divide."""

  @nn.compact
  def __call__(self, tokens, *, deterministic):
    x = nn.Dropout(0.1)(nn.Embed(VOCAB, WIDTH)(tokens), deterministic)
    return helpers.Output(nn.Dense(VOCAB)(x))


@pytest.fixture(scope="module")
def runs(standard_promotion):
  """`runs(num_devices, parameters)`: 7 steps with dropout, as that many devices take them."""
  model = Wide()
  update = optimizer.make_optimizer("adam", 1e-3, grad_clip_norm=0.5)

  @cache
  def run(num_devices, parameters):
    mesh = sharding.make_mesh(jax.devices()[:num_devices])
    abstract = step.abstract_state(model, update, 5, mesh, parameters)
    first = step.jit_init(model, update, 5, abstract)
    state, seen = jax.tree.map(jnp.copy, first), []
    shardings = sharding.state_sharding(state, mesh, parameters)
    train = step.jit_train_step(model, update, shardings, mesh)
    for index in range(7):
      given = state
      state, metrics = train(given, sharding.put_batch(draw_batch(index % 3), mesh))
      seen.append(float(metrics["loss"]))
    return first, given, state, seen

  return run


@pytest.mark.parametrize("parameters", [pytest.param("replicated", marks=pytest.mark.slow), "fsdp"])
def test_eight_devices_train_as_one(runs, parameters):
  first, given, last, seen = runs(8, parameters)
  expected_first, _, expected, expected_seen = runs(1, "replicated")
  jax.tree.map(np.testing.assert_array_equal, first.params, expected_first.params)
  # Sums over the batch are rounded in another order: 1.2e-7 was measured, of parameters
  # of size 1 that 20 steps of Adam had moved by up to 0.02.
  helpers.assert_trees_close(last.params, expected.params, rtol=0, atol=2e-6)
  np.testing.assert_allclose(seen, expected_seen, rtol=1e-5)
  assert last.step == 7 and seen[-1] < seen[0]
  keys = [jax.device_get(jax.random.key_data(x.key)) for x in (last, expected)]
  np.testing.assert_array_equal(*keys)
  # The state that went in is used up.
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given.params, given.opt_state)))
  shape = (3, VOCAB) if parameters == "fsdp" else (WIDTH, VOCAB)
  for params in (last.params, last.opt_state[1][0].mu, last.opt_state[1][0].nu):
    array = params["Dense_0"]["kernel"]
    assert array.shape == (WIDTH, VOCAB) and len(array.sharding.device_set) == 8
    assert {shard.data.shape for shard in array.addressable_shards} == {shape}


def test_evaluation_sums_the_nats_without_dropout(plain_update):
  _, state, _, metrics = plain_update
  mesh = sharding.make_mesh()
  params = jax.device_put(state.params, sharding.state_sharding(state.params, mesh))
  batch = draw_batch()
  evaluate = step.jit_eval_step(make_model(dropout=0.1, hidden_dropout=0.2), mesh)
  nats = evaluate(params, sharding.put_batch(batch, mesh), 0)["nats"]
  np.testing.assert_allclose(nats, metrics["loss"] * batch["weights"].sum(), rtol=1e-5)


def test_bfloat16_trains_float32_parameters():
  model, update = make_model(dtype="bfloat16"), optax.adam(1e-3)
  train = partial(step.train_step, model, update, 2)
  after, metrics = jax.eval_shape(train, draw_state(model, update), draw_batch())
  dtypes = {x.dtype for x in jax.tree.leaves((after.params, metrics))}
  assert dtypes == {jnp.dtype("float32")}


@cache
def make_staged(kinds):
  """A model that pools by one kind or two, and its objective."""
  settings = {"fixed": {}, "routing": dict(num_buckets=1, weight=1.0)}
  outer, *within = [
    config_lib.boundaries(name, **settings.get(name, dict(num_buckets=1))) for name in kinds.split()
  ]
  config = helpers.model_settings(boundaries=outer, vocab_size=VOCAB, num_layers=1)
  stages = [config]
  if within:
    config.middle = config_lib.middle(*within, width=10)
    stages.append(config.middle)
  for stage in stages:
    stage.first.num_layers = stage.last.num_layers = 1
  return dpjax.build_model(config), losses.Objective(build_boundaries(config))


@partial(jax.jit, static_argnums=(0, 1))
def gradient_of_whole(kinds, num_parts, state, batch):
  """The gradient of one loss of all rows, whose outputs were drawn part by part."""
  model, objective = make_staged(kinds)
  keys = jax.random.split(jax.random.fold_in(state.key, state.step), num_parts)
  order = np.arange(BATCH).reshape(-1, num_parts).T
  own = jax.tree.map(lambda x: x[order.ravel()], batch)

  def mean_loss(params):
    def apply(given):
      tokens, key = given
      return model.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": key})

    of_parts = jax.lax.map(apply, (batch["tokens"][order], keys))
    output = jax.tree.map(lambda x: x.reshape(BATCH, *x.shape[2:]), of_parts)
    sums = objective.sums(output, own)
    return (sums["nats"] + sums["boundary_nats"]) / sums["count"], sums

  return jax.grad(mean_loss, has_aux=True)(state.params)


@partial(jax.jit, static_argnums=(0, 1))
def gradient_of_parts(kinds, num_parts, state, batch):
  model, objective = make_staged(kinds)
  train = partial(step.train_step, model, optax.sgd(1.0), num_parts, objective=objective)
  after, metrics = train(state, batch)
  return jax.tree.map(jnp.subtract, state.params, after.params), metrics


def check_parts(kinds, num_parts, seed):
  """Parts, of which one has no target that counts, give the gradient of the whole."""
  model, _ = make_staged(kinds)
  params = jax.tree.map_with_path(  # Without a direction that all vectors have in common.
    lambda path, x: x * float(path[-1].key != "bias"), helpers.draw_params(model, seed, 1 / 2)
  )
  state = draw_state(model, optax.sgd(1.0)).replace(params=params)
  generator = np.random.default_rng([7, seed])
  batch = draw_batch(seed)
  if seed % 3:
    batch["weights"][generator.integers(num_parts) :: num_parts] = 0
  batch["boundaries"] = generator.integers(2, size=(BATCH, LENGTH), dtype=np.int32)
  found, metrics = gradient_of_parts(kinds, num_parts, state, batch)
  expected, sums = gradient_of_whole(kinds, num_parts, state, batch)
  if any(metrics[name] != sums[name] for name in ("boundaries", "targets") if name in sums):
    return False  # An entropy that nearly ties with its threshold falls to the other side.
  error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected))
  assert error < 2e-5 * optax.tree.norm(expected)
  for name in sums.keys() - {"positions", "slots"}:
    np.testing.assert_allclose(metrics[name], sums[name], rtol=1e-5, err_msg=name)
  return bool(0 < sums["boundaries"] < sums["count"])


@pytest.mark.slow
def test_parts_of_a_routed_batch_give_the_gradient_of_the_whole():
  assert check_parts("routing", 4, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kinds",
  [
    *("routing", "unigram", "entropy", "gumbel", "routing routing", "fixed routing"),
    *("unigram routing", "entropy gumbel", "gumbel routing"),
  ],
)
def test_parts_of_any_batch_give_the_gradient_of_the_whole(kinds):
  assert sum(check_parts(kinds, 4, seed) for seed in range(12)) > 9


def test_the_average_is_that_of_optax_without_its_bias():
  model, update = helpers.Bigrams(VOCAB), optax.sgd(0.5)
  state = draw_state(model, update)
  state = state.replace(average=jax.tree.map(jnp.copy, state.params))
  train = jit_update(model, update, ema_decay=0.7, learning_rate=lambda k: 0.5 / (k + 1))
  ema = optax.ema(0.7, debias=True)
  ema_state = ema.init(state.params)
  for k in range(5):
    state, measured = train(state, draw_batch(k))
    expected, ema_state = ema.update(state.params, ema_state)
    helpers.assert_trees_close(state.average, expected, rtol=2e-6, atol=2e-6)
    assert measured["learning_rate"] == np.float32(0.5 / (k + 1))
  assert state.scored is state.average
  frozen = average = {"a": jnp.float32([0.1, 1e-7, 3e9])}
  for k in range(9):  # What stays the same is its own average.
    average = step.add_to_average(average, frozen, jnp.int32(k), 0.999)
  np.testing.assert_array_equal(average["a"], frozen["a"])
