import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import registry
from dpjax.training import optimizer

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
  update = optimizer.make_optimizer(rate=0.1, clip_norm=0.5, **settings)
  trained = stacked_params()
  params = trained | {"boundaries": {"out": PARAMS["a"], "frozen": dict(trained)}}
  grads = jax.tree.map(lambda x: x**2 - 0.5, params)
  without = {**trained, "boundaries": {"out": PARAMS["a"]}}
  state, expected_state = update.init(params), update.init(without)
  for _ in range(2):
    chex.assert_trees_all_equal(state, expected_state)  # no moments
    got, state = update.update(grads, state, params)
    frozen = got["boundaries"].pop("frozen")
    chex.assert_trees_all_equal_structs(frozen, trained)
    assert not any(x.any() for x in jax.tree.leaves(frozen))
    own = {**grads, "boundaries": {"out": grads["boundaries"]["out"]}}
    expected, expected_state = update.update(own, expected_state, without)
    # Nor in the norm that clipping measures.
    chex.assert_trees_all_equal(got, expected)


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
