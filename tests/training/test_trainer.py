import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax.config import registry
from dpjax.models.build import build_boundaries
from dpjax.models.language_model import LanguageModel
from dpjax.training import evaluation, losses, sharding, trainer
from dpjax.training.trainer import Trainer
from tests import helpers

BATCH, LENGTH, VOCAB, WIDTH = 16, 7, 13, 24


pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_model(**settings):
  defaults = dict(vocab_size=VOCAB, num_layers=1, width=WIDTH, feed_forward_width=20, max_length=11)
  defaults |= dict(dropout=0.0, hidden_dropout=0.0, positions="learned")
  config = helpers.model_settings("short_convolution", **defaults | settings)
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
  shapes = trainer.abstract_params(model)
  draw = np.random.default_rng(1).standard_normal
  params = jax.tree.map(lambda x: jnp.asarray(draw(x.shape) / 3, x.dtype), shapes)
  zero = jnp.zeros((), jnp.int32)
  return trainer.TrainState(zero, params, update.init(params), jax.random.key(3))


def make_trainer(model, update=None, grad_accum_steps=1, objective=None, **settings):
  settings = dpjax.config.Train(grad_accum_steps=grad_accum_steps, **settings)
  return Trainer(model, settings, 10, update, objective or losses.Objective())


def jit_update(model, update, grad_accum_steps=1, **settings):
  return jax.jit(make_trainer(model, update, grad_accum_steps, **settings).step)


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
  model, before, after, whole_metrics = plain_update
  update = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(0.1))
  state = before.replace(opt_state=update.init(before.params))
  parts, metrics = jit_update(model, update, 4)(state, draw_batch())
  helpers.assert_trees_close(metrics, whole_metrics, rtol=1e-5, atol=1e-6)
  moved, of_whole = (jax.tree.map(jnp.subtract, x.params, before.params) for x in (parts, after))
  scale = 1e-2 / metrics["grad_norm"]
  assert scale < 0.5
  expected = jax.tree.map(lambda x: x * scale, of_whole)
  helpers.assert_trees_close(moved, expected, rtol=1e-3, atol=1e-6)


def test_no_step_holds_all_logits(monkeypatch):
  monkeypatch.setattr(losses, "_PIECE_BYTES", 1)
  model, update = make_model(), optax.sgd(0.1)
  mesh = sharding.make_mesh(jax.devices()[:1])
  state = make_trainer(model, update).abstract_state(mesh)
  train = make_trainer(model, update).jit_step(mesh)
  evaluate = evaluation.jit_eval_step(model, mesh, losses.Objective())
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), draw_batch())
  for lowered in (train.lower(state, batch), evaluate.lower(state.params, batch, 0)):
    text = lowered.compile().as_text()
    assert f"f32[{BATCH},{LENGTH},{VOCAB}]" not in text
    assert f"f32[{BATCH * LENGTH},{VOCAB}]" not in text
    assert f"f32[{BATCH},1,{VOCAB}]" in text or f"f32[{BATCH},{VOCAB}]" in text


class Flat(LanguageModel):
  """A model that gives every token the same probability, whatever its last layer says."""

  @nn.compact
  def __call__(self, *args, **kwargs):
    output = super().__call__(*args, **kwargs)
    return output._replace(logits=0 * output.logits)


def test_evaluation_sums_the_nats_of_the_logits_without_dropout(plain_update):
  _, state, _, metrics = plain_update
  mesh, batch = sharding.make_mesh(), draw_batch()
  params = jax.device_put(state.params, sharding.state_sharding(state.params, mesh))
  model, count = make_model(dropout=0.1, hidden_dropout=0.2), batch["weights"].sum()
  flat = Flat(VOCAB, WIDTH, 11, model.core, positions="learned")
  for each, mean in ((model, metrics["loss"]), (flat, np.log(VOCAB))):
    step = evaluation.jit_eval_step(each, mesh, losses.Objective())
    sums = step(params, sharding.put_batch(batch, mesh), 0)
    np.testing.assert_allclose(sums["nats"], mean * count, rtol=1e-5)


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


def test_eight_devices_train_as_one():
  model = Wide()

  def run(num_devices, param_sharding):
    mesh = sharding.make_mesh(jax.devices()[:num_devices])
    updates = make_trainer(model, learning_rate=1e-3, param_sharding=param_sharding)
    updates = dataclasses.replace(updates, seed=5)
    first = updates.init(mesh)
    state, seen = jax.tree.map(jnp.copy, first), []
    train = updates.jit_step(mesh)
    for index in range(7):
      before = state
      state, metrics = train(before, sharding.put_batch(draw_batch(index % 3), mesh))
      seen.append(float(metrics["loss"]))
    # The state that went in is used up.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))
    return first, state, seen

  first, last, seen = run(8, "fsdp")
  expected_first, expected, expected_seen = run(1, "replicated")
  jax.tree.map(np.testing.assert_array_equal, first.params, expected_first.params)
  # Sums over the batch are rounded in another order: 1.2e-7 was measured, of parameters
  # of size 1 that 20 steps of Adam had moved by up to 0.02.
  helpers.assert_trees_close(last.params, expected.params, rtol=0, atol=2e-6)
  np.testing.assert_allclose(seen, expected_seen, rtol=1e-5)
  assert last.step == 7 and seen[-1] < seen[0]
  keys = [jax.device_get(jax.random.key_data(x.key)) for x in (last, expected)]
  np.testing.assert_array_equal(*keys)
  for params in (last.params, last.opt_state[1][0].mu, last.opt_state[1][0].nu):
    array = params["Dense_0"]["kernel"]
    assert array.shape == (WIDTH, VOCAB) and len(array.sharding.device_set) == 8
    assert {shard.data.shape for shard in array.addressable_shards} == {(WIDTH // 8, VOCAB)}


def test_bfloat16_trains_float32_parameters():
  model, update = make_model(dtype="bfloat16"), optax.adam(1e-3)
  train = make_trainer(model, update, 2).step
  after, metrics = jax.eval_shape(train, draw_state(model, update), draw_batch())
  dtypes = {x.dtype for x in jax.tree.leaves((after.params, metrics))}
  assert dtypes == {jnp.dtype("float32")}


# Losses that read what all rows of a batch share: of the first stage, of a second one.
@pytest.mark.slow
@pytest.mark.parametrize("names", [("routing",), ("gumbel", "routing")])
def test_parts_of_a_pooled_batch_give_the_gradient_of_the_whole(names):
  outer, *inner = (
    helpers.component(registry.boundaries, name, num_buckets=1, weight=1.0) for name in names
  )
  one = dict(num_layers=1)
  config = helpers.model_settings(
    boundaries=outer, vocab_size=VOCAB, num_layers=1, first=one, last=one
  )
  if inner:
    config.middle = dpjax.config.middle(*inner, width=10)
    config.middle.first.num_layers = config.middle.last.num_layers = 1
  model, objective = dpjax.build_model(config), losses.Objective(build_boundaries(config))
  order = np.arange(BATCH).reshape(-1, 4).T  # Row b goes to part b % 4.

  @jax.jit
  def run_parts(state, batch):
    train = make_trainer(model, optax.sgd(1.0), 4, objective).step
    after, metrics = train(state, batch)
    return jax.tree.map(jnp.subtract, state.params, after.params), metrics

  @jax.jit
  def run_whole(state, batch):
    """One loss of all rows, whose outputs are drawn part by part."""
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), 4)

    def mean_loss(params):
      def apply(part):
        tokens, key = part
        return model.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": key})

      outputs = jax.lax.map(apply, (batch["tokens"][order], keys))
      output = jax.tree.map(lambda x: x.reshape(BATCH, *x.shape[2:]), outputs)
      sums = objective.sums(output, jax.tree.map(lambda x: x[order.ravel()], batch))
      return (sums["nats"] + sums["boundary_nats"]) / sums["count"], sums

    return jax.grad(mean_loss, has_aux=True)(state.params)

  state = draw_state(model, optax.sgd(1.0))
  for seed in (4, 5):
    params = jax.tree.map_with_path(  # Without a direction that all vectors have in common.
      lambda path, x: x * float(path[-1].key != "bias"), helpers.draw_params(model, seed, 1 / 2)
    )
    batch = draw_batch(seed)
    batch["weights"][seed % 4 :: 4] = 0  # A part without a target.
    grads, metrics = run_parts(state.replace(params=params), batch)
    expected, sums = run_whole(state.replace(params=params), batch)
    assert 0 < sums["boundaries"] < sums["count"]
    error = optax.tree.norm(jax.tree.map(jnp.subtract, grads, expected))
    assert error < 2e-5 * optax.tree.norm(expected)
    for name in sums.keys() - {"positions", "slots"}:
      np.testing.assert_allclose(metrics[name], sums[name], rtol=1e-5, err_msg=name)


def test_the_average_is_that_of_optax_without_its_bias():
  model, update = helpers.Bigrams(VOCAB), optax.sgd(0.5)
  state = draw_state(model, update)
  state = state.replace(average=jax.tree.map(jnp.copy, state.params))
  train = jit_update(model, update, ema_decay=0.7)
  ema = optax.ema(0.7, debias=True)
  ema_state = ema.init(state.params)
  for k in range(5):
    state, _ = train(state, draw_batch(k))
    expected, ema_state = ema.update(state.params, ema_state)
    helpers.assert_trees_close(state.average, expected, rtol=2e-6, atol=2e-6)
  assert state.scored is state.average
  frozen = average = {"a": jnp.float32([0.1, 1e-7, 3e9])}
  for k in range(9):  # What stays the same is its own average.
    average = trainer.add_to_average(average, frozen, jnp.int32(k), 0.999)
  np.testing.assert_array_equal(average["a"], frozen["a"])


def test_the_settings_say_how_an_update_is_made():
  settings = dpjax.config.Train(
    optimizer=dpjax.config.optimizer("sgd", momentum=0.5),
    learning_rate=0.3,
    schedule=dpjax.config.schedule("linear", warmup_steps=2),
    grad_clip_norm=1e-2,
  )
  updates = Trainer(helpers.Bigrams(VOCAB), settings, num_steps=5)
  rate = optax.join_schedules(
    [optax.linear_schedule(0, 0.3, 2), optax.linear_schedule(0.3, 0, 3)], [2]
  )
  update = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(rate, momentum=0.5))
  state, train = updates.init(), jax.jit(updates.step)
  expected = state.replace(opt_state=update.init(state.params))
  train_expected = jax.jit(Trainer(updates.model, settings, 5, update).step)
  for k in range(5):
    state, metrics = train(state, draw_batch(k))
    expected, expected_metrics = train_expected(expected, draw_batch(k))
    np.testing.assert_allclose(metrics.pop("learning_rate"), rate(k), rtol=1e-6)
    chex.assert_trees_all_equal(metrics, expected_metrics)
    assert metrics["grad_norm"] > 2e-2
  chex.assert_trees_all_equal(state.params, expected.params)


def test_the_initial_parameters_and_their_average_are_those_of_a_function():
  initial = lambda params: jax.tree.map(lambda x: 2 * np.asarray(x) + 1, params)  # noqa: E731
  updates = make_trainer(Wide(), ema_decay=0.9, param_sharding="fsdp")
  drawn = updates.init().params
  updates = dataclasses.replace(updates, initial=initial)
  for state in (updates.init(), updates.init(sharding.make_mesh())):
    chex.assert_trees_all_close(state.params, initial(drawn), rtol=1e-6)
    chex.assert_trees_all_equal(state.average, state.params)
  assert len(state.average["Dense_0"]["kernel"].sharding.device_set) == 8


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(num_steps=7), "^num_steps: expected the settings' 7, got 10"),
    (dict(stage_multipliers="auto"), "^train.stage_multipliers: expected numbers, .* got auto"),
  ],
)
def test_settings_that_a_trainer_cannot_follow_are_refused(settings, message):
  with pytest.raises(dpjax.UserError, match=message):
    make_trainer(Wide(), **settings).init()


def test_a_pooled_model_needs_the_loss_of_its_boundaries():
  model = make_model(boundaries=dpjax.config.boundaries("fixed"))
  with pytest.raises(dpjax.UserError, match="^objective: expected one with the boundaries of"):
    make_trainer(model)


def test_a_schedule_that_makes_arrays_is_built_outside_of_a_trace():
  def falling(peak, num_steps):
    rates = jnp.linspace(peak, 0, num_steps)
    return lambda update: rates[update]

  dpjax.register_schedule("falling_for_test", falling)
  settings = dpjax.config.Train(schedule=dpjax.config.schedule("falling_for_test"))
  trainer = Trainer(helpers.Bigrams(7), settings, num_steps=5)
  state, metrics = jax.jit(trainer.step)(trainer.init(), draw_batch())
  assert metrics["learning_rate"] == np.float32(settings.learning_rate)


def test_the_initial_parameters_stay_the_callers(plain_update):
  model, before, _, _ = plain_update
  mine = jax.tree.map(jnp.copy, before.params)
  trainer = Trainer(model, dpjax.config.Train(), num_steps=5, initial=lambda drawn: mine)
  mesh = sharding.make_mesh(jax.devices()[:1])
  trainer.jit_step(mesh)(trainer.init(mesh), draw_batch())
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
