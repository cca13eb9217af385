import dataclasses
import json
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax import contrib

import dpjax
from dpjax.config import registry
from dpjax.runs import launch
from dpjax.training import checkpoints, optimizers, sharding
from dpjax.training.trainer import Trainer, abstract_params
from tests import helpers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


pytestmark = pytest.mark.usefixtures("standard_promotion")


def schedule(name, peak=0.5, num_steps=10, **settings):
  section = registry.schedules.section(name, **settings)
  settings = dpjax.config.Train(schedule=section, learning_rate=peak)
  return optimizers.build_schedule(settings, num_steps)


COS = [0, 0.25, *(0.25 * (1 + np.cos(np.pi * np.array([0, 2, 3, 4, 8, 8]) / 8)))]
LINE = [0, 0.25, *(0.5 - 0.4 * np.array([0, 2, 3, 4, 8, 8]) / 8)]


@pytest.mark.parametrize(
  "name, settings, steps, expected",
  [
    ("constant", dict(), (0, 1, 99), [0.5] * 3),
    ("constant", dict(warmup_steps=4), (0, 1, 2, 3, 4, 5, 99), [0, 0.125, 0.25, 0.375] + [0.5] * 3),
    ("cosine", dict(warmup_steps=2), (0, 1, 2, 4, 5, 6, 10, 11), COS),
    ("cosine", dict(min_ratio=0.2), (0, 5, 10, 99), [0.5, 0.3, 0.1, 0.1]),
    ("linear", dict(warmup_steps=2, min_ratio=0.2), (0, 1, 2, 4, 5, 6, 10, 11), LINE),
    (
      "warmup_stable_decay",
      dict(warmup_steps=2, decay_fraction=0.4, min_ratio=0.2),
      range(12),
      [0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    ),
    ("warmup_stable_decay", dict(decay_fraction=0.01), range(8, 12), [0.5, 0.5, 0, 0]),
    ("warmup_stable_decay", dict(warmup_steps=6, decay_fraction=0.4), (6, 8, 10), [0.5, 0.25, 0]),
  ],
)
def test_schedules(name, settings, steps, expected):
  rate = schedule(name, **settings)
  np.testing.assert_allclose([rate(step) for step in steps], expected, rtol=1e-6, atol=1e-7)


def test_is_the_authors_from_the_second_update():
  golden = json.loads((GOLDEN / "H_lr_schedule.json").read_text())
  settings = golden["config"]
  rate = schedule(
    "cosine", settings["lr"], settings["max_step"], warmup_steps=settings["warmup_step"]
  )
  # Their first update is at the full rate, and past the end their cosine rises again.
  last = settings["max_step"] + 1
  expected = golden["lr_used_by_update"][1:last]
  got = [float(rate(step)) for step in range(1, last)]
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-10)
  assert rate(0) == 0 and rate(last) == 0


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: schedule("cosine", warmup_steps=10), "warmup_steps: expected fewer than the 10"),
    (
      lambda: schedule("warmup_stable_decay", warmup_steps=7, decay_fraction=0.4),
      "warmup_steps: expected at most the 6 steps before",
    ),
    (lambda: optimizers.make_optimizer("sdg", 0.5), "expected one of .* got sdg; did you mean sgd"),
  ],
)
def test_refusals(make, message):
  with pytest.raises(dpjax.UserError, match=message):
    make()


def stacked_params():
  """As a model has them, with 3 stacked layers."""
  draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
  return {
    "embedding": {"tokens": {"embedding": draw(0, 7, 5)}},
    "layers": {
      "mixer": {
        "out": {"kernel": draw(1, 3, 5, 5)},
        "queries_keys_values": {"kernel": draw(2, 3, 5, 3, 5), "bias": draw(3, 3, 3, 5)},
        "taps": draw(4, 3, 11, 5),
      },
      "mixer_norm": {"scale": draw(5, 3, 5)},
      "feed_forward": {"hidden": {"kernel": draw(8, 3, 5, 11)}},
    },
    "logits": {"kernel": draw(6, 5, 7), "bias": draw(7, 7)},
  }


def test_muon_takes_each_layers_matrix_and_leaves_the_rest_to_adam():
  model = dpjax.build_model(helpers.model_settings("attention", num_layers=3))
  params = helpers.draw_params(model, seed=3, spread=0.3)
  grads = jax.tree.map(lambda x: jnp.cos(9 * x), params)

  def update_once(name, **settings):
    rule = optimizers.make_optimizer(name, 0.1, model=model, **settings)
    return jax.jit(lambda grads: rule.update(grads, rule.init(params), params)[0])(grads)

  updates, of_adam = update_once("muon"), update_once("adam", nesterov=True)
  same = jax.tree.map(lambda a, b: bool(np.allclose(a, b, atol=1e-6)), updates, of_adam)
  mixer = same["layers"]["blocks_0"].pop("mixer")
  assert not mixer.pop("out").pop("kernel")
  assert not mixer["queries_keys_values"].pop("kernel")
  network = same["layers"]["blocks_0"]["feed_forward"]
  assert not network["hidden"].pop("kernel") and not network["out"].pop("kernel")
  assert all(jax.tree.leaves((same, mixer)))
  # Each layer alone: an orthogonal matrix has singular values of about one size.
  for layer in range(3):
    kernel = updates["layers"]["blocks_0"]["mixer"]["out"]["kernel"][layer]
    values = np.linalg.svd(kernel)[1]
    assert values.max() < 2 * values.min(), values


class ScannedModel(nn.Module):
  """A user's model, with the names of dpjax's: a scan over layers, and attention in a list."""

  def setup(self):
    scan = nn.scan(Linear, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    self.embedding = nn.Embed(11, 24)
    self.layers = Attentions()
    self.scanned = scan()

  def __call__(self, tokens, *, deterministic):
    x, _ = self.scanned(self.layers(self.embedding(tokens)), None)
    return helpers.Output(x)


class Attentions(nn.Module):
  def setup(self):
    self.blocks = [nn.MultiHeadDotProductAttention(4), nn.Conv(24, (5,))]

  def __call__(self, x):
    return self.blocks[1](self.blocks[0](x))


class Linear(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.Dense(24, name="linear")(x), None


def test_the_layers_of_a_users_model_know_the_axes_of_their_kernels():
  inputs, outputs = ((0,), (1, 2)), ((0, 1), (2,))  # [D, H, E], and back
  expected = {("layers", "blocks_0", name, "kernel"): inputs for name in ("query", "key", "value")}
  expected |= {("layers", "blocks_0", "out", "kernel"): outputs}
  expected |= {("scanned", "linear", "kernel"): ((1,), (2,))}  # [layers, in, out]
  axes = optimizers.kernel_axes(ScannedModel())
  assert {name: tuple(x) for name, x in axes.items()} == expected


STAGE = r"stages_\d/"
STACK = rf"({STAGE}(first|last)|layers)/blocks_\d+/"
# Of a model with everything: the first of the axes that Muon takes, or None; whether it decays.
MASKS = [
  ("embedding/.*", None, False),
  ("logits/kernel", None, True),
  (f"{STACK}(mixer|feed_forward)/[a-z_]+/kernel", 1, True),
  (f"{STACK}mixer/taps", None, True),
  (f"{STAGE}boundaries/(hidden|residual)/kernel", 0, True),
  (f"{STAGE}boundaries/(out/kernel|query|key)", None, True),  # out: [F, 1]
  (f"{STAGE}(widen|narrow)", None, True),
  (".*(scale|gain|bias|a_log|skip|null_group)", None, False),
]


def test_masks_of_a_model_with_everything():
  outer, inner = (dpjax.config.boundaries(name, num_buckets=2) for name in ("gumbel", "routing"))
  names = helpers.builtin(registry.mixers)
  sizes = dict(num_heads=2, head_width=4)
  every = [helpers.component(registry.mixers, x, **sizes) for x in names]
  config = helpers.model_settings(
    tuple(every), outer, activation="swiglu", positions="learned", num_layers=len(every) + 1
  )
  config.middle = dpjax.config.middle(inner, width=8)
  config.first.mixer = every[3]
  model = dpjax.build_model(config)
  params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
  arrays = {
    jax.tree_util.keystr(path, simple=True, separator="/"): x
    for path, x in jax.tree.leaves_with_path(params)
  }
  rows = {name: next(x for x in MASKS if re.fullmatch(x[0], name)) for name in arrays}
  assert {*rows.values()} == {*MASKS}
  axes = optimizers.kernel_axes(model)
  decays = jax.tree.leaves(optimizers.decays(params))
  for (name, x), is_decayed in zip(arrays.items(), decays, strict=True):
    _, first, expected = rows[name]
    others = None if first is None else ((first,), tuple(range(first + 1, x.ndim)))
    of_muon = axes.get(tuple(name.split("/")))
    assert (of_muon and tuple(of_muon)) == others, name
    assert is_decayed == expected, name


def test_what_is_frozen_stays_and_has_no_part_in_the_others():
  boundaries = dpjax.config.boundaries("entropy_threshold", run="a", theta=0.5)
  reader = dpjax.build_model(helpers.model_settings())
  model = dpjax.build_model(helpers.model_settings(boundaries=boundaries), reader)
  update = optimizers.make_optimizer("adamw", 0.1, grad_clip_norm=0.5, weight_decay=0.3)
  update, of_others = optimizers.for_model(update, model), optimizers.for_model(update, reader)
  # What else has that name is trained.
  out, trained = jnp.array([1.0, -2.0, 3.0]), stacked_params()
  trained |= {"frozen": {"frozen": jnp.array([[4.0, 0.5]])}}
  params = trained | {"stages_0": {"boundaries": {"out": out, "frozen": dict(trained)}}}
  without = trained | {"stages_0": {"boundaries": {"out": out}}}
  states = update.init(params), of_others.init(without)
  for _ in range(2):
    chex.assert_trees_all_equal(*states)  # no moments
    updates, state = jax.jit(update.update)(params, states[0], params)
    frozen = updates["stages_0"]["boundaries"].pop("frozen")
    chex.assert_trees_all_equal(frozen, jax.tree.map(jnp.zeros_like, trained))
    expected, other_state = jax.jit(of_others.update)(without, states[1], without)
    # Nor in the norm that clipping measures.
    chex.assert_trees_all_equal(updates, expected)
    assert all(x.all() for x in jax.tree.leaves(updates["frozen"]))
    states = state, other_state


def test_weight_decay_of_matrices_alone_is_that_of_optax_with_a_mask():
  params, settings = stacked_params(), dict(b1=0.8, b2=0.9, weight_decay=0.3)
  train = dpjax.config.Train(
    optimizer=dpjax.config.optimizer("adamw", **settings), learning_rate=0.1, grad_clip_norm=0.0
  )
  grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
  for name, mask in (("matrices", optimizers.decays), ("all", None)):
    updates, expected = (
      jax.jit(update.update)(grads, update.init(params), params)[0]
      for update in (
        optimizers.build_optimizer(dataclasses.replace(train, weight_decay_mask=name), 7),
        optax.adamw(0.1, **settings, mask=mask),
      )
    )
    chex.assert_trees_all_equal(updates, expected)


def staged_params():
  """Two stages of pooling, as models have them, with the stage of each parameter."""
  inner = {"first": {"k": 1}, "boundaries": {"query": 1}, "null_group": 2, "padding": 2}
  inner |= {"widen": 2, "last": {"widen": 1}, "shared_positions": {"bias": 1}}
  outer = {"inner_norm": {"scale": 1}, "narrow": 1, "first": {"kernel": 0}}
  outer |= {"boundaries": {"residual": {"kernel": 0}}, "null_group": 1, "last": {"layers": 0}}
  stages = {"stages_0": outer, "stages_1": inner, "layers": {"blocks_0": {"kernel": 2}}}
  stages |= {"shared_positions": {"bias": 2}, "logits": {"kernel": 0}, "embedding": {"narrow": 0}}
  return jax.tree.map(lambda _: jnp.ones((3, 5)), stages), stages


MULTIPLIERS = (3.0, 0.5, 0.125)


def test_stage_multipliers_multiply_the_updates_of_each_stage():
  config = dpjax.config.default()
  config.model = helpers.model_settings(boundaries=dpjax.config.boundaries("fixed"))
  config.model.middle = dpjax.config.middle("routing", width=8)
  config.train.optimizer = dpjax.config.optimizer("adamw", weight_decay=0.3)
  plain = launch.make_trainer(config, None, 7).update_rule
  config.train.stage_multipliers = MULTIPLIERS
  scaled = launch.make_trainer(config, None, 7).update_rule
  params, stages = staged_params()
  grads = jax.tree.map_with_path(
    lambda path, x: jnp.cos(len(str(path)) + jnp.arange(15.0).reshape(x.shape)), params
  )
  expected, plain_state = jax.jit(plain.update)(grads, plain.init(params), params)
  updates, state = jax.jit(scaled.update)(grads, scaled.init(params), params)
  chex.assert_trees_all_equal(state, plain_state)
  expected = jax.tree.map(lambda x, stage: x * MULTIPLIERS[stage], expected, stages)
  chex.assert_trees_all_close(updates, expected, rtol=1e-6)
  for wrong in ((1.0, float("nan"), 1.0), (1.0, -1.0, 1.0), (float("inf"), 1.0, 1.0)):
    with pytest.raises(
      ValueError, match="^multipliers: expected finite numbers of at least 0, got"
    ):
      optimizers.scale_by_stage(plain, wrong)
  for wrong in (MULTIPLIERS[:2], (*MULTIPLIERS, 1.0)):
    with pytest.raises(ValueError, match="^multipliers: expected 3, one for each stage, got"):
      optimizers.scale_by_stage(plain, wrong).update(grads, plain_state, params)


def any_state(*leaves):
  """An update rule with this state, which it counts up."""

  def step(updates, state, params=None):
    return updates, (state[0] + 1, *state[1:])

  return optax.GradientTransformation(lambda params: (jnp.int32(0), *leaves), step)


ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
REFUSED = [
  (optax.lbfgs, "expected one that needs only .* 'value_fn'"),
  (lambda: optax.lookahead(SGD, 3, 0.2), ".* no attribute 'fast'"),
  (
    lambda: optax.monitor({"norm": lambda updates, **more: optax.tree.norm(updates)}),
    ".* to keep the form of the state, got float32 .* for .*norm",
  ),
  (
    lambda: any_state(jnp.ones(5, jnp.uint4)),
    "expected a dtype that checkpoints have, got 1.1 of uint4",
  ),
  (
    lambda: optax.named_chain(("a.b", ADAM), ("a", optax.named_chain(("b", ADAM)))),
    "expected one array for each name, got two of 1.a.b.0.count$",
  ),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make, message", REFUSED)
def test_optimizers_that_need_more_or_cannot_be_saved_are_refused(make, message):
  model = helpers.Bigrams(7)
  params = abstract_params(model)
  with pytest.raises(dpjax.UserError, match=f"^optimizer: {message}"):
    optimizers.check(optimizers.for_model(make(), model), params)


def halves(params):
  return {name: "a.b" if "Dense" in name else "c/d" for name in params}


def make_of_all_types():
  """An update rule whose state has names with dots and whatever arrays there are."""
  injected = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1, 2, 3))
  arrays = any_state(
    *(jnp.arange(1, 6).astype(name) for name in "int8 uint16 float16 float8_e5m2 bool".split()),
    *(jnp.array([5, -3], name) for name in ("int4", "complex64")),
    *(jnp.zeros((3, 0), bool), jax.random.split(jax.random.key(5), 3)),
    *(jax.random.PRNGKey(3), jax.random.key(2, impl="rbg")),
  )
  return optax.chain(arrays, optax.partition({"a.b": injected, "c/d": SGD}, halves))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
  "make",
  [
    make_of_all_types,
    lambda: optax.MultiSteps(contrib.momo(), 2),
    lambda: optax.chain(optax.clip(0.1), contrib.sam(SGD, optax.sgd(0.01))),
  ],
  ids=["all types", "MultiSteps", "sam"],
)
def test_any_optimizer_of_optax_trains_and_resumes_bit_for_bit(make, tmp_path):
  model, mesh, update = helpers.Bigrams(7), sharding.make_mesh(jax.devices()[:2]), make()
  trainer = Trainer(model, dpjax.config.Train(param_sharding="fsdp"), 9, update)
  abstract = trainer.abstract_state(mesh)
  optimizers.check(trainer.update_rule, abstract.params)
  train = trainer.jit_step(mesh)
  tokens = np.arange(40, dtype=np.int32).reshape(8, 5) * 3 % 7
  batch = dict(tokens=tokens, targets=(tokens + 2) % 7, weights=np.ones((8, 5), np.float32))
  batch = sharding.put_batch(batch, mesh)
  state = trainer.init(mesh)
  with jax.numpy_rank_promotion("allow"):  # Some of Optax needs it.
    state, _ = train(train(state, batch)[0], batch)
  with checkpoints.Checkpoints(tmp_path, keep=2) as saved:
    saved.save(state, {})
  expected, _ = train(state, batch)
  with checkpoints.Checkpoints(tmp_path) as saved:
    restored, _ = saved.restore(abstract)
  assert restored.step == 2
  resumed, _ = train(restored, batch)
  chex.assert_trees_all_equal_structs(resumed, expected)
  pairs = zip(jax.tree.leaves_with_path(resumed), jax.tree.leaves(expected), strict=True)
  for (path, array), want in pairs:
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
      array, want = map(jax.random.key_data, (array, want))
    assert array.dtype == want.dtype, path
    assert np.asarray(array).tobytes() == np.asarray(want).tobytes(), path
