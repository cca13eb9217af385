"""Points of the figures of step times: which there are, what they hold, what is left out.

Most tests have steps that only say how long they took; nothing here is about speed.
"""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.models.build import build_model
from dpjax.training import step as step_lib
from reproduce import step_times
from reproduce.step_times import ATTENTION, DISPATCHER, FIXED, VANILLA

NAMES = ("dispatcher-fig2", "pooling-fig5")


class FakeStep:
  """Takes as long as `seconds` says, or raises what it says; so does compiling."""

  made = []
  alive = 0
  most_alive = 0
  seconds = staticmethod(lambda config: 1.0)
  compiles = staticmethod(lambda config: None)

  def __init__(self, config):
    self.config = config
    if (error := type(self).compiles(config)) is not None:
      raise error
    kind = type(self)
    model = config.model
    kind.made.append((model.mixer.name, model.boundaries.name, model.max_length))
    kind.alive += 1
    kind.most_alive = max(kind.most_alive, kind.alive)
    self.temporary_mib = 8.0 / model.boundaries.get("shortening_factor", 2)

  def __del__(self):
    type(self).alive -= hasattr(self, "temporary_mib")

  def __call__(self):
    seconds = type(self).seconds(self.config)
    if isinstance(seconds, Exception):
      raise seconds
    return seconds


@pytest.fixture
def fake(monkeypatch):
  kind = type("Fake", (FakeStep,), {"made": []})
  monkeypatch.setattr(step_times, "Step", kind)
  return kind


def measure(name, scale="tiny", known=(), stop_after=math.inf):
  points = []
  step_times.measure(
    name, scale, known, put=points.append, should_stop=lambda: len(points) >= stop_after
  )
  return points


def of(points, model, key):
  return [point[key] for point in points if point["model"] == model]


# Optax raises floats to its integer count.
with_optax = jax.numpy_dtype_promotion("standard")


@with_optax
@pytest.mark.parametrize("name, count", [(NAMES[0], 8), (NAMES[1], 3)])
def test_all_points_are_there_with_all_that_a_report_needs(name, count):
  before = len(jax.live_arrays())
  points = measure(name)
  assert len(jax.live_arrays()) == before
  places = step_times.places(name, "tiny")
  assert len(points) == len(places) == count
  assert all(sum(map(place.is_at, points)) == 1 for place in places)
  for point in json.loads(json.dumps(points)):
    assert point["left_out"] == "" and point["seconds"] > 0
    assert point["temporary_mib"] > 0
    baseline = {DISPATCHER: ATTENTION, FIXED: VANILLA}.get(point["model"])
    assert point["baseline"] == baseline
    assert (point["ratio"] is None) == (point["memory_ratio"] is None) == (not baseline)
    if baseline:
      place = 1 if baseline == VANILLA else point["place"]
      (other,) = (
        x
        for x in points
        if x["model"] == baseline and x["place"] == place and x["dtype"] == point["dtype"]
      )
      quotient = point["temporary_mib"] / other["temporary_mib"]
      assert point["memory_ratio"] == pytest.approx(quotient)
      assert point["ratio"] > 0
  turns = {VANILLA: 6}  # three beside each of two factors
  assert all(x["repetitions"] == turns.get(x["model"], 3) for x in points)


@pytest.mark.parametrize("scale", ["tiny", "cpu", "paper"])
def test_the_models_differ_in_what_the_figure_is_about_alone(scale):
  places = step_times.places(NAMES[0], scale)
  for ours, theirs in zip(places[::2], places[1::2], strict=True):
    assert (ours.model, theirs.model) == (DISPATCHER, ATTENTION)
    assert ours.settings == theirs.settings and ours.dtype == theirs.dtype
    assert ours.place == ours.config.model.max_length == ours.settings["tokens"]
    model = dict(theirs.config.model) | {"mixer": ours.config.model.mixer}
    assert model == dict(ours.config.model)
    dispatcher, attention = ours.config.model.mixer, theirs.config.model.mixer
    assert (dispatcher.name, attention.name) == ("dispatcher", "attention")
    assert dispatcher.num_heads == attention.num_heads == 1
    assert model["dropout"] == model["hidden_dropout"] == 0.2
    assert dispatcher.level_dropout == attention.dropout == 0.2
    assert model["dtype"] == ours.dtype
  vanilla, *pooled = (x for x in step_times.places(NAMES[1], scale) if x.dtype == "float32")
  assert vanilla.config.model.boundaries.name == "none" and vanilla.place == 1
  for place in pooled:
    assert place.settings == vanilla.settings
    assert place.config.model.boundaries.name == "fixed"
    assert place.place == place.config.model.boundaries.shortening_factor
    assert place.config.model.dropout == place.settings["dropout"] == 0.1


def test_the_papers_sizes():
  found = step_times.places(NAMES[0], "paper")
  assert len(found) == 2 * 2 * 8
  assert [x.place for x in found[:16:2]] == [512 * 2**i for i in range(8)]
  assert dict(found[0].settings) == dict(
    batch=1,
    tokens=512,
    layers=6,
    width=512,
    feed_forward_width=512,
    vocab_size=20_044,
    dropout=0.2,
    repetitions=7,
  )
  found = step_times.places(NAMES[1], "paper")
  assert len(found) == 2 * 6 and {x.dtype for x in found} == {"float32", "bfloat16"}
  assert [x.place for x in found[:6]] == [1, 2, 3, 4, 6, 8]
  assert dict(found[0].settings) == dict(
    batch=8,
    tokens=2048,
    layers=12,
    width=512,
    feed_forward_width=2048,
    vocab_size=27,
    dropout=0.1,
    repetitions=7,
  )
  for place in found:
    assert place.config.train.batch_size == 8


@with_optax
def test_a_step_is_the_update_of_training():
  place = step_times.places(NAMES[0], "tiny")[0]
  taken = step_times.Step(place.config)
  model = build_model(place.config.model)
  optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-4))
  state = step_lib.init_state(model, optimizer, 0)
  step = jax.jit(functools.partial(step_lib.train_step, model, optimizer, 1))
  assert taken.batch["tokens"].shape == (1, 16)
  np.testing.assert_array_equal(taken.batch["tokens"][:, 1:], taken.batch["targets"][:, :-1])
  np.testing.assert_array_equal(taken.batch["weights"], jnp.ones((1, 16)))
  batch = jax.tree.map(np.asarray, taken.batch)
  for i in range(2):
    assert taken() > 0
    state, _ = step(state, batch)
    assert int(taken.state.step) == i + 1
  for mine, theirs in zip(
    jax.tree.leaves(taken.state.params), jax.tree.leaves(state.params), strict=True
  ):
    np.testing.assert_allclose(mine, theirs, atol=2e-6)
  taken.compiled = lambda state, batch: (state, {"loss": jnp.float32(jnp.nan)})
  with pytest.raises(RuntimeError, match="the loss is nan"):
    taken()


@with_optax
def test_what_the_machine_cannot_hold_is_refused_before_it_runs(monkeypatch):
  place = step_times.places(NAMES[0], "tiny")[0]
  plan = step_times.Step(place.config).temporary_mib * 2**20
  pages = {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": int(plan / 0.61 / 8)}
  monkeypatch.setattr(step_times.os, "sysconf", pages.get)
  with pytest.raises(MemoryError, match="of the machine's"):
    step_times.Step(place.config)
  pages["SC_PHYS_PAGES"] = int(plan / 0.59 / 8)
  step_times.Step(place.config)


def test_a_ratio_is_the_median_of_paired_ratios():
  # The quotient of the medians would be 4 / 3.
  assert step_times.paired_ratio([4.0, 10.0, 1.0], [2.0, 20.0, 3.0]) == 0.5
  with pytest.raises(ValueError):
    step_times.paired_ratio([4.0], [2.0, 1.0])


def test_ratios_of_points_are_paired(fake):
  turns = {
    "dispatcher": itertools.cycle([99.0, 99.0, 4.0, 10.0, 1.0]),
    "attention": itertools.cycle([77.0, 77.0, 2.0, 20.0, 3.0]),
  }
  fake.seconds = staticmethod(lambda config: next(turns[config.model.mixer.name]))
  points = measure(NAMES[0])
  assert of(points, DISPATCHER, "ratio") == [0.5] * 4
  assert of(points, DISPATCHER, "seconds") == [4.0] * 4
  assert of(points, ATTENTION, "seconds") == [3.0] * 4


@pytest.mark.parametrize("seconds, turns", [(1.0, 7), (2.6, 4), (6.0, 3), (50.0, 3)])
def test_steps_take_turns_until_they_have_taken_long_enough(seconds, turns):
  calls = []

  def step(name):
    calls.append(name)
    return 1000.0 if calls.count(name) <= step_times.WARM_UPS else seconds

  steps = {name: functools.partial(step, name) for name in "ab"}
  found, reasons = step_times.time_by_turns(steps, 7)
  assert found == {"a": [seconds] * turns, "b": [seconds] * turns} and not reasons
  assert "".join(calls) == ("abba" * 5)[: 2 * (2 + turns)]


def test_what_is_known_is_not_measured_again(fake):
  points = measure(NAMES[0])
  known = json.loads(json.dumps(points))
  fake.made.clear()
  assert not measure(NAMES[0], known=known) and not fake.made
  # Of a pair attention is measured alone, the Dispatcher beside it.
  for gone in (known[0], known[1]):
    again = measure(NAMES[0], known=[x for x in known if x is not gone])
    assert again == [gone]
  mixers = [mixer for mixer, *_ in fake.made]
  assert mixers == ["dispatcher", "attention", "attention"]
  other = [x | {"settings": x["settings"] | {"width": 17}} for x in known]
  assert len(measure(NAMES[0], known=other)) == 8


def test_a_factor_that_is_missing_is_measured_beside_no_pooling(fake):
  points = measure(NAMES[1])
  assert [x["place"] for x in points] == [2, 4, 1]
  assert [kind for _, kind, _ in fake.made] == ["none", "fixed", "fixed"]
  assert fake.most_alive == 2 and fake.alive == 0
  fake.made.clear()
  again = measure(NAMES[1], known=points[:1] + points[2:])
  assert again == [points[1]] and again[0]["memory_ratio"] == 0.5
  alone = measure(NAMES[1], known=points[:2])
  assert alone == [points[2] | {"repetitions": 3}]
  assert not measure(NAMES[1], known=points)


def test_it_stops_between_points(fake):
  points = measure(NAMES[0], stop_after=1)
  assert [(x["model"], x["place"]) for x in points] == [(DISPATCHER, 16), (ATTENTION, 16)]
  rest = measure(NAMES[0], known=points)
  assert len(rest) == 6 and not [x for x in rest if x in points]
  points = measure(NAMES[1], stop_after=1)
  assert [x["place"] for x in points] == [2, 1]
  assert [x["place"] for x in measure(NAMES[1], known=points)] == [4]
  fake.made.clear()
  for name in NAMES:
    assert not measure(name, stop_after=0)
  assert not fake.made


@pytest.mark.parametrize("when", ["compiles", "seconds"])
def test_a_model_out_of_memory_is_left_out_and_the_other_goes_on(fake, when):
  tried = []

  def answer(config):
    is_out = config.model.mixer.name == "attention" and config.model.max_length >= 1024
    if is_out:
      tried.append(config.model.max_length)
      return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")
    return 1.0 if when == "seconds" else None

  setattr(fake, when, staticmethod(answer))
  points = measure(NAMES[0], "cpu")
  assert tried == [1024] and fake.most_alive == 2
  reason = "1,024 tokens: out of memory, RESOURCE_EXHAUSTED: Out of memory"
  assert of(points, ATTENTION, "left_out") == ["", reason, reason, reason]
  assert of(points, ATTENTION, "seconds") == [1.0, None, None, None]
  assert of(points, DISPATCHER, "left_out") == [""] * 4
  assert of(points, DISPATCHER, "seconds") == [1.0] * 4
  assert of(points, DISPATCHER, "ratio") == [1.0, None, None, None]
  # Nor is it tried by one that goes on from here.
  again = measure(NAMES[0], "cpu", known=points[:4])
  assert again == points[4:] and tried == [1024]


def test_no_pooling_without_memory_leaves_the_others(fake):
  tried = []

  def compiles(config):
    tried.append(config.model.boundaries.name)
    return MemoryError("9 GiB") if tried[-1] == "none" else None

  fake.compiles = staticmethod(compiles)
  points = measure(NAMES[1])
  assert tried == ["none", "fixed", "fixed"]
  assert [x["place"] for x in points] == [2, 4, 1]
  assert [x["left_out"] for x in points] == ["", "", "out of memory, 9 GiB"]
  assert [x["ratio"] for x in points] == [None] * 3
  assert measure(NAMES[1], known=points[1:]) == points[:1]
  assert tried[3:] == ["fixed"]


def test_no_pooling_that_fails_later_keeps_what_it_took(fake):
  seconds = itertools.chain([2.0] * 5, [jax.errors.JaxRuntimeError("CUDA_OUT_OF_MEMORY")])
  fake.seconds = staticmethod(
    lambda config: next(seconds) if config.model.boundaries.name == "none" else 3.0
  )
  first, second, vanilla = measure(NAMES[1])
  assert (first["ratio"], second["ratio"]) == (1.5, None)
  assert vanilla["seconds"] == 2.0 and vanilla["left_out"] == ""


def test_a_backend_without_plans_has_times_alone(fake):
  fake.temporary_mib = property(lambda step: None, lambda step, value: None)
  for point in measure(NAMES[0]):
    assert point["temporary_mib"] is None and point["memory_ratio"] is None
    assert point["seconds"] == 1.0


def test_no_pooling_is_timed_by_all_of_its_turns(fake):
  seconds = itertools.chain([50.0, 50.0, 1.0, 1.0, 2.0], [50.0, 50.0, 3.0, 8.0, 9.0])
  fake.seconds = staticmethod(
    lambda config: next(seconds) if config.model.boundaries.name == "none" else 2.0
  )
  *pooled, vanilla = measure(NAMES[1])
  assert [x["ratio"] for x in pooled] == [2.0, 0.25]
  assert vanilla["seconds"] == 2.5 and vanilla["repetitions"] == 6


@pytest.mark.parametrize(
  "mixer, model, growth", [("attention", ATTENTION, 4.0), ("dispatcher", DISPATCHER, 2.2)]
)
def test_steps_that_would_take_minutes_are_not_tried(fake, mixer, model, growth):
  for first, places in ((59.0 / growth, 2), (61.0 / growth, 1)):
    fake.seconds = staticmethod(
      lambda config, first=first: (
        1.0
        if config.model.mixer.name != mixer
        else first * (growth if config.model.max_length > 512 else 1.0)
      )
    )
    points = measure(NAMES[0], "cpu")
    out = of(points, model, "left_out")
    assert out[:places] == [""] * places and all(out[places:])
    about = "1,024 tokens: a step of about 61 s" if places == 1 else "2,048 tokens: a step"
    assert all(x.startswith(about) for x in out[places:])
    other = DISPATCHER if model == ATTENTION else ATTENTION
    assert of(points, other, "left_out") == [""] * 4


def test_other_errors_are_not_hidden(fake):
  fake.seconds = staticmethod(lambda config: jax.errors.JaxRuntimeError("INTERNAL: no"))
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    measure(NAMES[0])


def test_every_point_has_a_line_that_counts_those_left(fake, capsys):
  measure(NAMES[1])
  lines = capsys.readouterr().out.splitlines()
  assert [line.rpartition("; ")[2] for line in lines] == ["2 left", "1 left", "0 left"]
  assert lines[0].startswith("fixed segments, float32, 2: 1 s, 4.0 MiB, 1 of the time")


def test_unknown_names_are_refused():
  for refuse in (step_times.places, measure):
    with pytest.raises(ValueError, match="table: expected one of dispatcher-fig2, .* fig3"):
      refuse("fig3", "tiny")
    with pytest.raises(ValueError, match="scale: expected one of tiny, cpu, .* got huge"):
      refuse("pooling-fig5", "huge")
