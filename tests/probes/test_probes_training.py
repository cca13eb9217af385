"""Models of the probes: equal sizes, reach, tests by distance, and that one can learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax import registry
from dpjax.models.build import build_model
from dpjax.probes import tasks, training
from tests import helpers

TINY = training.Settings(
  length=16, window=4, width=16, num_steps=10, batch_size=8, num_test_rows=32
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def size_of_attention():
  return training.equal_model(training.Settings(), "attention")[1]


QUICK = ("dispatcher",)


@pytest.mark.parametrize(
  "mixer", [helpers.slow_unless(name in QUICK, name) for name in registry.mixers.names()]
)
def test_sizes_are_equal_and_reach_is_what_a_change_reaches(mixer, size_of_attention):
  size = training.equal_model(training.Settings(), mixer)[1]
  assert size == pytest.approx(size_of_attention, rel=0.02)
  config, size = training.equal_model(TINY, mixer)
  model = build_model(config)
  tokens = np.random.default_rng(2).integers(3, 60, size=(1, 29)).astype(np.int32)
  known = {}
  if mixer in training.EXTRACTORS:
    known["is_start"] = jnp.zeros((1, 29), jnp.int32).at[:, 0].set(1)
  variables = jax.jit(model.init)(jax.random.key(1), jnp.asarray(tokens[:, :2]))
  assert size == sum(leaf.size for leaf in jax.tree.leaves(variables))

  @jax.jit
  def last(tokens):
    return model.apply(variables, tokens, **known).logits[0, -1]

  usual = last(tokens)
  changed = np.repeat(tokens, 29, axis=0)
  changed[np.arange(29), np.arange(29)] += 1
  moves = [bool((last(row[None]) != usual).any()) for row in changed]
  expected = training.reach(config)
  assert expected == (None if "attention" in mixer else 6)
  assert moves == [expected is None or 28 - i <= expected for i in range(29)]


def test_reach_is_that_of_any_plain_stack():
  model = config_lib.default_model()
  model.update(dict(num_layers=3, max_length=11))
  assert training.reach(model) == 3 * 15
  model.mixer = config_lib.mixer("we")
  assert training.reach(model) == 3 * 10
  model.boundaries = config_lib.boundaries("whitespace")
  assert training.reach(model) is None


def test_hits_are_counted_by_distance():
  trainee = training.Trainee(TINY, "me")

  def predict(params, tokens, known):
    """Finds what followed the trigger within the last 5 tokens alone."""
    assert known["is_start"].sum() == len(tokens)
    found = np.zeros(tokens.shape, np.int32)
    for row, ids in enumerate(tokens):
      place = np.flatnonzero(ids == tasks.TRIGGER)[0] + 1
      found[row, -1] = ids[place] if len(ids) - 1 - place <= 5 else 0
    return found

  trainee._predict = predict
  scores = trainee.test({}, "induction", 31, seed=7)
  assert sum(scores["counts"]) == TINY.num_test_rows and len(scores["counts"]) == 31
  assert scores["hits"][:6] == scores["counts"][:6] and not any(scores["hits"][6:])
  assert sum(scores["hits"]) > 0 == scores["counts"][0]


@pytest.mark.slow
def test_a_seed_gives_the_same_numbers_again_and_another_gives_others():
  trainee = training.Trainee(TINY, "dispatcher")
  found = [trainee.run("recall", seed) for seed in (0, 0, 1)]
  for record in found:
    assert record.pop("seconds") >= 0
  assert found[0] == found[1] != found[2]
  assert [*found[0]["tests"]] == ["16", "32", "64"]


@pytest.mark.slow
def test_attention_learns_to_recall():
  settings = dataclasses.replace(
    TINY, width=32, num_steps=260, batch_size=16, learning_rate=1e-2, num_test_rows=64
  )
  scores = training.Trainee(settings, "attention").run("recall", 0)["tests"]["16"]
  assert sum(scores["hits"]) > 0.9 * sum(scores["counts"])


def test_a_divergence_is_no_result():
  trainee, seeds = training.Trainee(TINY, "me"), []
  init = trainee._init

  def init_without_numbers(seed):
    seeds.append(seed)
    return jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, init(seed))

  trainee._init = init_without_numbers
  with pytest.raises(FloatingPointError, match="^recall, me, seed 3: loss nan$"):
    trainee.run("recall", 3)
  assert seeds == [3]
