import inspect
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dpjax
from dpjax import config as config_lib
from dpjax import registry
from dpjax.training import checkpoint_files, checkpoints, optimizer, sharding
from dpjax.training import step as step_lib
from tests import helpers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


pytestmark = pytest.mark.usefixtures("standard_promotion")


def rates(schedule, steps, **settings):
  rate = optimizer.learning_rate(schedule, 0.5, **settings)
  return [float(rate(step)) for step in steps]


def test_constant():
  assert rates("constant", (0, 1, 99), warmup_steps=0, num_steps=7) == [0.5, 0.5, 0.5]
  got = rates("constant", (0, 1, 2, 3, 4, 5, 99), warmup_steps=4, num_steps=7)
  np.testing.assert_allclose(got, [0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_cosine():
  got = rates("cosine", (0, 1, 2, 4, 5, 6, 10, 11), warmup_steps=2, num_steps=10)
  steps = np.array([2, 4, 5, 6, 10, 10]) - 2
  expected = [0, 0.25, *(0.25 * (1 + np.cos(np.pi * steps / 8)))]
  np.testing.assert_allclose(got, expected, atol=1e-7)
  assert rates("cosine", (0, 10), warmup_steps=0, num_steps=10) == [0.5, 0]


def test_cosine_and_line_end_at_the_lowest_rate():
  steps = (0, 1, 2, 4, 5, 6, 10, 99)
  settings = dict(warmup_steps=2, num_steps=10, min_ratio=0.2)
  x = np.array([2, 4, 5, 6, 10, 10])
  expected = optax.warmup_cosine_decay_schedule(0.0, 0.5, 2, 10, end_value=0.1)
  np.testing.assert_allclose(rates("cosine", steps, **settings), [*map(expected, steps)], rtol=1e-6)
  line = [0, 0.25, *(0.5 - 0.4 * (x - 2) / 8)]
  np.testing.assert_allclose(rates("linear", steps, **settings), line, rtol=1e-6)
  np.testing.assert_allclose(rates("linear", (0, 5, 10), num_steps=10), [0.5, 0.25, 0], atol=1e-8)


def test_warm_up_stable_decay():
  settings = dict(warmup_steps=2, num_steps=10, decay_fraction=0.4, min_ratio=0.2)
  got = rates("warmup_stable_decay", range(12), **settings)
  line = [0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
  np.testing.assert_allclose(got, line, rtol=1e-6)
  got = rates("warmup_stable_decay", range(7), num_steps=5, decay_fraction=0.01)
  np.testing.assert_allclose(got, [0.5] * 5 + [0, 0])
  with pytest.raises(ValueError, match="warmup_steps: expected at most the 6 steps before"):
    rates("warmup_stable_decay", (0,), **{**settings, "warmup_steps": 7})
  rates("warmup_stable_decay", (0,), **{**settings, "warmup_steps": 6})


def test_is_the_authors_from_the_second_update():
  golden = json.loads((GOLDEN / "H_lr_schedule.json").read_text())
  settings = golden["config"]
  rate = optimizer.learning_rate(
    "cosine", settings["lr"], warmup_steps=settings["warmup_step"], num_steps=settings["max_step"]
  )
  # Their first update is at the full rate, and past the end their cosine rises again.
  last = settings["max_step"] + 1
  expected = golden["lr_used_by_update"][1:last]
  got = [float(rate(step)) for step in range(1, last)]
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-10)
  assert rate(0) == 0 and rate(last) == 0


def test_refusals():
  with pytest.raises(ValueError, match="schedule: expected one of .* got lineal"):
    optimizer.learning_rate("lineal", 0.5, warmup_steps=0, num_steps=7)
  with pytest.raises(ValueError, match="schedule.warmup_steps: expected fewer than the 7"):
    optimizer.learning_rate("cosine", 0.5, warmup_steps=7, num_steps=7)
  with pytest.raises(ValueError, match="expected one of .* got sdg; did you mean sgd"):
    optimizer.make_optimizer("sdg", 0.5)


PARAMS = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([[4.0, 0.5]])}
GRADS = [
  {"a": jnp.array([3.0, 0.0, -4.0]), "b": jnp.array([[0.0, 12.0]])},
  {"a": jnp.array([0.3, 0.1, 0.2]), "b": jnp.array([[-0.2, 0.1]])},
]


def run(update):
  params, state = PARAMS, update.init(PARAMS)
  for grads in GRADS:
    updates, state = update.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("clip_norm", [0.0, 2.0])
def test_updates_are_those_of_the_papers(name, clip_norm):
  b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.03
  rate = lambda step: 0.1 / (1 + step)  # noqa: E731
  settings = dict(b1=b1, b2=b2, eps=eps, clip_norm=clip_norm)
  if name == "adamw":
    settings["weight_decay"] = decay
  got = run(optimizer.make_optimizer(name, rate, **settings))
  for key, x in PARAMS.items():
    x = np.float64(x)
    mean, square = 0.0, 0.0
    for step, grads in enumerate(GRADS):
      norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
      scale = min(1, clip_norm / norm) if clip_norm else 1
      grad = scale * np.float64(grads[key])
      mean = b1 * mean + (1 - b1) * grad
      square = b2 * square + (1 - b2) * grad**2
      direction = mean / (1 - b1 ** (step + 1)) / (np.sqrt(square / (1 - b2 ** (step + 1))) + eps)
      direction += decay * x if name == "adamw" else 0
      x = x - rate(step) * direction
    np.testing.assert_allclose(got[key], x, rtol=1e-5)


def test_the_first_update_of_a_warm_up_changes_nothing():
  rate = optimizer.learning_rate("constant", 0.5, warmup_steps=3, num_steps=7)
  update = optimizer.make_optimizer("adam", rate)
  updates, _ = update.update(GRADS[0], update.init(PARAMS), PARAMS)
  assert not any(x.any() for x in jax.tree.leaves(updates))


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
    },
    "logits": {"kernel": draw(6, 5, 7), "bias": draw(7, 7)},
  }


def test_muon_takes_each_layers_matrix_and_leaves_the_rest_to_adam():
  params = stacked_params()
  grads = jax.tree.map(lambda x: x**2 - 0.5, params)
  update = optimizer.make_optimizer("muon", 0.1)
  adam = optimizer.make_optimizer("adam", 0.1, nesterov=True)
  got, _ = update.update(grads, update.init(params), params)
  of_adam, _ = adam.update(grads, adam.init(params), params)
  same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-6)), got, of_adam)
  mixer = same["layers"].pop("mixer")
  assert not mixer["out"]["kernel"] and not mixer["queries_keys_values"].pop("kernel")
  del mixer["out"]
  assert all(jax.tree.leaves((same, mixer)))
  # Each layer alone: an orthogonal matrix has singular values of about one size.
  for layer in range(3):
    values = np.linalg.svd(got["layers"]["mixer"]["out"]["kernel"][layer])[1]
    assert values.max() < 2 * values.min(), values
  alone = jax.tree.map(lambda x: x[:1], params["layers"])
  one, _ = update.update(
    jax.tree.map(lambda x: x**2 - 0.5, {"layers": alone}),
    update.init({"layers": alone}),
    {"layers": alone},
  )
  np.testing.assert_allclose(
    one["layers"]["mixer"]["out"]["kernel"][0],
    got["layers"]["mixer"]["out"]["kernel"][0],
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  "settings",
  [dict(name="adamw", weight_decay=0.3), dict(name="muon", weight_decay=0.3), dict(name="lion")],
  ids=lambda settings: settings["name"],
)
def test_what_is_frozen_stays_and_has_no_part_in_the_others(settings):
  config = helpers.tiny_model(num_layers=1, first_layers=1, last_layers=1)
  config.boundaries = config_lib.boundaries("entropy_threshold", run="a", theta=0.5)
  reader = dpjax.build_model(helpers.tiny_model())
  model = dpjax.build_model(config, reader)
  update = optimizer.make_optimizer(rate=0.1, clip_norm=0.5, **settings)
  update, of_others = optimizer.for_model(update, model), optimizer.for_model(update, reader)
  # What else has that name is trained.
  trained = stacked_params() | {"frozen": {"frozen": PARAMS["b"]}}
  params = trained | {
    "hourglass": {"boundary_predictor": {"out": PARAMS["a"], "frozen": dict(trained)}}
  }
  grads = jax.tree.map(lambda x: x**2 - 0.5, params)
  without = {**trained, "hourglass": {"boundary_predictor": {"out": PARAMS["a"]}}}
  state, expected_state = update.init(params), of_others.init(without)
  for _ in range(2):
    chex.assert_trees_all_equal(state, expected_state)  # no moments
    got, state = update.update(grads, state, params)
    frozen = got["hourglass"]["boundary_predictor"].pop("frozen")
    chex.assert_trees_all_equal_structs(frozen, trained)
    assert not any(x.any() for x in jax.tree.leaves(frozen))
    own = {"boundary_predictor": {"out": grads["hourglass"]["boundary_predictor"]["out"]}}
    own = {**grads, "hourglass": own}
    expected, expected_state = of_others.update(own, expected_state, without)
    # Nor in the norm that clipping measures.
    chex.assert_trees_all_equal(got, expected)
    assert all(x.all() for x in jax.tree.leaves(got["frozen"]))


def test_weight_decay_of_matrices_alone_is_that_of_optax_with_a_mask():
  params = stacked_params()
  params["embedding"]["positions"] = jnp.ones((11, 5))
  params["hourglass"] = {"null_group": jnp.ones(5), "middle_in": jnp.ones((5, 6))}
  params["relative_positions"] = {"content_bias": jnp.ones((3, 2))}
  kept = {name: False for name in ("bias", "scale", "null_group", "content_bias")}
  kept |= {name: True for name in ("kernel", "taps", "middle_in")}
  mask = jax.tree.map_with_path(
    lambda path, x: path[0].key != "embedding" and kept[path[-1].key], params
  )
  settings = dict(b1=0.8, b2=0.9, weight_decay=0.3)
  train = dict(learning_rate=0.1, clip_norm=0.0, decay_mask="matrices")
  train["schedule"] = {"name": "constant", "warmup_steps": 0}
  train["optimizer"] = registry.optimizers.section("adamw", **settings)
  grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
  found, expected, everywhere = (
    update.update(grads, update.init(params), params)[0]
    for update in (
      optimizer.build_optimizer(train, 7),
      optax.adamw(0.1, **settings, mask=mask),
      optimizer.build_optimizer({**train, "decay_mask": "all"}, 7),
    )
  )
  chex.assert_trees_all_equal(found, expected)
  is_alike = jax.tree.map(lambda x, y: bool((x == y).all()), found, everywhere)
  assert is_alike == mask


def constructors():
  """Those of Optax that make an update rule, by name, each with the arguments it asks for."""
  found = {}
  for module in (optax, contrib):
    for name, make in vars(module).items():
      kind = str(getattr(make, "__annotations__", {}).get("return"))
      if inspect.isfunction(make) and "GradientTransf" in kind and name[0] != "_":
        wanted = [
          x.name
          for x in inspect.signature(make).parameters.values()
          if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD
        ]
        found[f"contrib.{name}" if module is contrib else name] = make, wanted
  return found


def is_kernel(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


def halves(params):
  return {name: "a.b" if "Dense" in name else "c/d" for name in params}


def any_state(*leaves):
  """An update rule with this state, which it counts up."""

  def step(updates, state, params=None):
    return updates, (state[0] + 1, *state[1:])

  return optax.GradientTransformation(lambda params: (jnp.int32(0), *leaves), step)


ADAM, SGD, CONSTRUCTORS = optax.adam(0.1), optax.sgd(0.1), constructors()
# How those are made that ask for more than a learning rate.
MADE = {
  "adaptive_grad_clip": lambda make: make(0.1),
  "add_noise": lambda make: make(0.1, 0.5, jax.random.key(3)),
  "apply_if_finite": lambda make: make(ADAM, 3),
  "chain": lambda make: make(optax.clip(0.5), ADAM),
  "clip": lambda make: make(0.1),
  "clip_by_block_rms": lambda make: make(0.1),
  "clip_by_global_norm": lambda make: make(0.1),
  "conditionally_mask": lambda make: make(ADAM, lambda step: step > 1),
  "conditionally_transform": lambda make: make(ADAM, lambda step: step > 1),
  "contrib.dpsgd": lambda make: make(0.1, 0.5, 0.3, 7),
  "contrib.differentially_private_aggregate": lambda make: make(0.5, 0.3, 7),
  "contrib.mechanize": lambda make: make(ADAM),
  "contrib.sam": lambda make: make(SGD, optax.sgd(0.01)),
  "contrib.schedule_free": lambda make: make(ADAM, 0.1),
  "contrib.split_real_and_imaginary": lambda make: make(ADAM),
  "ema": lambda make: make(0.9),
  "inject_hyperparams": lambda make: make(optax.adam)(learning_rate=optax.linear_schedule(1, 2, 3)),
  "inject_stateful_hyperparams": lambda make: make(optax.adam)(learning_rate=0.1),
  "flatten": lambda make: make(ADAM),
  "freeze": lambda make: make(is_kernel),
  "lookahead": lambda make: make(SGD, 3, 0.2),
  "masked": lambda make: make(ADAM, is_kernel),
  "measure_with_ema": lambda make: make(lambda updates, **more: jax.tree.map(abs, updates), 0.9),
  "noisy_sgd": lambda make: make(0.1, key=jax.random.key(5)),
  "multi_transform": lambda make: make({"a.b": ADAM, "c/d": SGD}, halves),
  "named_chain": lambda make: make(("a.b", ADAM), ("c/d", optax.trace(0.9))),
  "partition": lambda make: make({"a.b": ADAM, "c/d": SGD}, halves),
  "scale": lambda make: make(-0.1),
  "scale_by_backtracking_linesearch": lambda make: make(5),
  "scale_by_schedule": lambda make: make(lambda step: 0.1 / (1 + step)),
  "scale_by_zoom_linesearch": lambda make: make(5),
  "selective_transform": lambda make: make(ADAM, freeze_mask=is_kernel),
  "snapshot": lambda make: make("norm", lambda updates, **more: optax.tree.norm(updates)),
  "stateless": lambda make: make(lambda updates, params: updates),
  "stateless_with_tree_map": lambda make: make(lambda update, param: -update),
  "trace": lambda make: make(0.9),
  "with_extra_args_support": lambda make: make(ADAM),
}
# Others, and what else a state may hold.
MORE = {
  "MultiSteps": lambda: optax.MultiSteps(contrib.momo(), 2),
  "sam in a chain": lambda: optax.chain(optax.clip(0.1), contrib.sam(SGD, optax.sgd(0.01))),
  "MultiSteps with a skip": lambda: optax.MultiSteps(
    ADAM, 2, should_skip_update_fn=optax.skip_not_finite
  ),
  "monitor": lambda: optax.monitor({"norm": lambda updates, **more: optax.tree.norm(updates)}),
  "bfloat16": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
  "all types": lambda: any_state(
    *(jnp.arange(1, 6).astype(name) for name in "int8 uint16 float16 float8_e5m2 bool".split()),
    *(jnp.array([5, -3], name) for name in ("int4", "complex64")),
    *(jnp.zeros((3, 0), bool), jax.random.split(jax.random.key(5), 3)),
    *(jax.random.PRNGKey(3), jax.random.key(2, impl="rbg")),
  ),
  "a type that files do not have": lambda: any_state(jnp.ones(5, jnp.uint4)),
  "two names in one": lambda: optax.named_chain(
    ("a.b", ADAM), ("a", optax.named_chain(("b", ADAM)))
  ),
}
REFUSED = {
  "lbfgs": "^optimizer: expected one that updates with .* 'value_fn'",
  "scale_by_backtracking_linesearch": "^optimizer: .* 'value_fn'",
  "scale_by_zoom_linesearch": "^optimizer: .* 'value_fn'",
  "contrib.sophia": "^optimizer: .* obj_fn must be provided",
  "contrib.dpsgd": "^optimizer: .* batch dimension",
  "contrib.differentially_private_aggregate": "^optimizer: .* batch dimension",
  "contrib.scale_by_muon": "^optimizer: .* ValueError: Expected dict, got None",
  "lookahead": "^optimizer: .* no attribute 'fast'",
  "monitor": "^optimizer: .* to keep the form of the state, got float32 .* for .*norm",
  "a type that files do not have": "^optimizer: .* can be saved, got 1 of uint4$",
  "two names in one": "^optimizer: .* differ, got a.b.0.count twice$",
}
# The kinds that failed before: a bool, an empty array, a value, a function of the value.
BY_DEFAULT = "apply_if_finite contrib.galore contrib.momo lbfgs lookahead".split() + [
  *("MultiSteps", "all types", "two names in one", "a type that files do not have")
]


def made(name):
  if name in MORE:
    return MORE[name]()
  make, wanted = CONSTRUCTORS[name]
  if name in MADE:
    return MADE[name](make)
  if wanted not in ([], ["learning_rate"]):
    pytest.skip("of a later Optax: it needs a row in MADE")
  return make(*(0.01 for _ in wanted))


@pytest.fixture
def rank_promotion():
  """Some of Optax needs it."""
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
  "name", [helpers.slow_unless(x in BY_DEFAULT, x) for x in (*CONSTRUCTORS, *MORE)]
)
def test_every_optimizer_of_optax_trains_and_resumes_bit_for_bit_or_is_refused(
  name, rank_promotion, tmp_path
):
  model, mesh, update = helpers.Bigrams(7), sharding.make_mesh(jax.devices()[:2]), made(name)
  params = step_lib.abstract_state(model, optax.identity(), 0, mesh).params

  def check():
    state = optimizer.check(update, model, params)
    checkpoint_files.check_can_save({"params": params, "opt_state": state})

  if name in REFUSED:
    with pytest.raises(dpjax.UserError, match=REFUSED[name]):
      check()
    return
  check()
  abstract = step_lib.abstract_state(model, update, 0, mesh, "sharded")
  places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  train = step_lib.jit_train_step(model, update, places, mesh)
  tokens = np.arange(40, dtype=np.int32).reshape(8, 5) * 3 % 7
  batch = dict(tokens=tokens, targets=(tokens + 2) % 7, weights=np.ones((8, 5), np.float32))
  batch = sharding.put_batch(batch, mesh)
  state = step_lib.jit_init(model, update, 0, mesh, "sharded")
  for _ in range(2):
    state, _ = train(state, batch)
  with checkpoints.Checkpoints(tmp_path, keep=2) as saved:
    saved.save(state, {})
  state, _ = train(state, batch)
  with checkpoints.Checkpoints(tmp_path, keep=2) as saved:
    found = saved.restore(abstract)
    assert found.step == 2
    resumed, _ = train(found.state, batch)
  with_keys = jax.tree.map(
    lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
    (resumed, state),
  )
  assert jax.tree.structure(resumed) == jax.tree.structure(state)
  pairs = zip(*map(jax.tree.leaves_with_path, with_keys), strict=True)
  for (path, got), (_, expected) in pairs:
    assert got.dtype == expected.dtype, path
    assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), path
