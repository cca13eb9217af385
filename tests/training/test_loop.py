"""What the loop reads of a step, when, and what it moves between host and device."""

import contextlib
import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax.errors import Interrupted
from dpjax.training import checkpoints, loop, reporting
from dpjax.training.trainer import Trainer
from tests import helpers

ROWS, LENGTH, VOCAB = 8, 10, 13
SCORES = dict(nats_per_token=2.0, perplexity=7.4, bits_per_character=1.5)


pytestmark = pytest.mark.usefixtures("standard_promotion")


class Batches:
  """Rows with padding, as many targets in each as are drawn for the step."""

  batch_size, window, steps_per_epoch = ROWS, LENGTH, 1

  def batch(self, step, rows):
    draw = np.random.default_rng(step)
    tokens = draw.integers(VOCAB, size=(ROWS, LENGTH + 1)).astype(np.int32)
    weights = (np.arange(LENGTH) < draw.integers(1, LENGTH, size=(ROWS, 1))).astype(np.float32)
    full = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
    return {name: value[rows] for name, value in full.items()}


TRAINER = Trainer(helpers.Bigrams(VOCAB), dpjax.config.Train(), 4, optax.sgd(0.5))


def fit(workdir, num_steps=4, trainer=TRAINER, evaluate=lambda params: SCORES, **options):
  """Trains; evaluates and saves after `every` steps, reports after each."""
  every = options.pop("every", 99)
  settings = dataclasses.replace(
    trainer.settings,
    eval_every_steps=every,
    eval_every_epochs=0.0,
    log_every_steps=options.pop("log", 1),
    checkpoint_every_steps=options.pop("save", every),
  )
  trainer = dataclasses.replace(trainer, settings=settings, num_steps=num_steps)
  workdir.mkdir(exist_ok=True)
  loop.fit(trainer, Batches(), evaluate, loop.RunFolder(workdir), loop.Hooks(**options))


def test_rows_that_the_devices_cannot_share_are_refused(tmp_path):
  with pytest.raises(dpjax.UserError, match="^train.batch_size: .* multiple of 24 .* got 8"):
    settings = dataclasses.replace(TRAINER.settings, grad_accum_steps=3)
    fit(tmp_path, trainer=dataclasses.replace(TRAINER, settings=settings))


def replace_step(monkeypatch, call):
  """Has `call(step, state, batch)` take the place of the jitted step."""
  make = Trainer.jit_step

  def make_replaced(trainer, mesh):
    step = make(trainer, mesh)
    return lambda state, batch, capacity: call(step, state, batch)

  monkeypatch.setattr(Trainer, "jit_step", make_replaced)


def test_what_moves_unasked_is_refused(tmp_path, monkeypatch):
  def double(step, state, batch):
    state, measured = step(state, batch)
    # Compiled and run for itself, with a 2 from the host, and then waited for.
    return state, measured | dict(loss=measured["loss"] * 2)

  for replace in (
    lambda patch: replace_step(patch, double),
    lambda patch: patch.setattr(loop.sharding, "put_batch", lambda batch, mesh: dict(batch)),
  ):
    with monkeypatch.context() as patch:
      replace(patch)
      with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
        fit(tmp_path)


def test_a_step_is_read_when_the_next_one_was_started(tmp_path, monkeypatch):
  events, device_get, started = [], jax.device_get, {}

  def call(step, state, batch):
    number = len(started) + 1
    events.append(f"start {number}")
    state, measured = step(state, batch)
    started[id(measured["loss"])] = number, measured
    return state, measured

  def get(tree):
    if isinstance(tree, dict) and id(tree.get("loss")) in started:
      events.append(f"read {started[id(tree['loss'])][0]}")
    return device_get(tree)

  replace_step(monkeypatch, call)
  monkeypatch.setattr(jax, "device_get", get)
  fit(tmp_path)
  # The last is waited for, to evaluate and to save.
  expected = "start 1, start 2, read 1, start 3, read 2, start 4, read 3, read 4"
  assert ", ".join(events) == expected


class Clock:
  """A device that takes 2 seconds a step, and all else that takes much longer."""

  def __init__(self, monkeypatch):
    self.now, self.free_at = 0.0, 0.0
    self._advance = jax.jit(lambda state: state.replace(step=state.step + 1))
    self._ends, self._compiled = {}, set()
    monkeypatch.setattr(Trainer, "jit_step", lambda *_: self.step)
    monkeypatch.setattr(loop.checkpoints.Checkpoints, "save", self.save)

  def step(self, state, batch, capacity):
    if capacity not in self._compiled:
      self._compiled.add(capacity)
      self.now += 500
    self.free_at = max(self.now, self.free_at) + 2
    loss = jax.device_put(np.float32(3))
    self._ends[id(loss)] = self.free_at, loss
    count = jax.device_put(np.float32(50))
    return self._advance(state), {"loss": loss, "grad_norm": loss, "count": count}

  def device_get(self, tree):
    end, _ = self._ends.get(id(tree["loss"]), (0, None))
    self.now = max(self.now, end)
    return {name: np.asarray(value) for name, value in tree.items()}

  def evaluate(self, params):
    self.now += 1000
    return SCORES

  def save(self, *_, **__):
    self.now += 70


@pytest.mark.parametrize(
  "settings, speeds",
  [
    # Steps 1 and 5 are compiled first. 50 tokens in 2 seconds.
    (dict(every=3, save=5), [None, 25, 25, 25, None, *[25] * 7]),
    (dict(every=1, log=3), [25, 25, 25, 25]),
  ],
)
def test_the_speed_is_that_of_the_steps_alone(tmp_path, monkeypatch, settings, speeds):
  clock, capacities = Clock(monkeypatch), iter([5, 5, 5, 5, 9, 5, 5, 9, 9, 5, 5, 9])
  monkeypatch.setattr(
    reporting, "time", types.SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 0.0)
  )
  monkeypatch.setattr(loop.jax, "device_get", clock.device_get)
  monkeypatch.setattr(loop, "batch_capacity", lambda boundaries, batch: next(capacities))
  fit(tmp_path, 12, evaluate=clock.evaluate, **settings)
  assert [line["tokens_per_second"] for line in helpers.reports(tmp_path, "train")] == speeds


def test_a_trace_is_of_the_updates_that_are_asked_for(tmp_path, monkeypatch, capsys):
  questions, calls = iter(range(1, 99)), []
  Clock(monkeypatch)

  @contextlib.contextmanager
  def trace(folder):
    calls.append(folder)
    try:
      yield
    finally:
      calls.append(next(questions))

  monkeypatch.setattr(jax.profiler, "trace", trace)
  # Each update is followed by the question whether to stop.
  should_stop = lambda: next(questions) == 7  # noqa: E731
  fit(tmp_path, 6, profile=(2, 4), should_stop=should_stop)
  assert calls == [tmp_path / "profile", 4]
  assert f"xprof --logdir={calls[0]}" in capsys.readouterr().out
  for updates in ((5, 5), (11, 13), (-1, 2)):
    with pytest.raises(dpjax.UserError, match="^profile: .* with 0 <= START < STOP <= 12"):
      fit(tmp_path / "other", 12, profile=updates)


def spoiled_at(step: int) -> optax.GradientTransformation:
  """SGD whose update number `step` is nan; the loss of that step is still finite."""

  def update(updates, count, params=None):
    scale = jnp.where(count == step - 1, jnp.nan, -0.5)
    return jax.tree.map(lambda x: x * scale, updates), count + 1

  return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


# What would save the state of step 3.
SAVES = {
  "checkpoint": dict(save=1),
  "evaluation": dict(every=3, save=2),
  "last": dict(num_steps=3, save=2),
  "stop": dict(save=2, should_stop=iter([False, False, True]).__next__),
}


@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, options):
  trainer = dataclasses.replace(TRAINER, optimizer=spoiled_at(3))
  message = (
    r"^Step 3: expected finite parameters, got nan or infinity in \w+\.\w+\. "
    "The newest checkpoint is of step 2, before it"
  )
  with pytest.raises(reporting.NonFiniteError, match=message):
    fit(tmp_path, trainer=trainer, **{"num_steps": 5, **options})
  with checkpoints.Checkpoints(tmp_path / "checkpoints") as saved:
    assert saved.steps()[-1] == 2


def with_state(scale: float) -> optax.GradientTransformation:
  """SGD with a state that it never reads: ones, multiplied by `scale` at each update."""

  def update(updates, state, params=None):
    return jax.tree.map(lambda x: -0.5 * x, updates), {"unread": state["unread"] * scale}

  return optax.GradientTransformation(lambda params: {"unread": jnp.ones(3)}, update)


def test_an_optimizer_with_nan_is_never_saved_and_one_with_infinity_is(tmp_path):
  fit(tmp_path, 3, trainer=dataclasses.replace(TRAINER, optimizer=with_state(math.inf)), save=2)
  message = r"^Step 2: expected an optimizer's state without nan, got nan in unread\. No checkpoint"
  with pytest.raises(reporting.NonFiniteError, match=message):
    trainer = dataclasses.replace(TRAINER, optimizer=with_state(math.nan))
    fit(tmp_path / "other", 3, trainer=trainer, save=2)


def test_a_division_of_zero_by_zero_is_noticed_before_the_first_checkpoint(tmp_path):
  # Tokens that no batch has get a gradient of 0, and the loss stays finite.
  trainer = dataclasses.replace(
    TRAINER, model=helpers.Bigrams(VOCAB + 9), optimizer=optax.adam(1e-3, eps=0.0)
  )
  message = r"^Step 1: .* in Embed_0\.embedding\. No checkpoint was saved before it"
  with pytest.raises(reporting.NonFiniteError, match=message):
    fit(tmp_path, trainer=trainer, save=1)


def test_the_tokens_seen_are_targets_also_after_a_stop(tmp_path):
  questions = iter(range(99))
  for stop_at in (4, 99):
    with contextlib.suppress(Interrupted):
      fit(tmp_path, 8, log=2, should_stop=lambda: next(questions) == stop_at)  # noqa: B023
  counts = [Batches().batch(step, slice(None))["weights"].sum() for step in range(8)]
  seen = [line["tokens_seen"] for line in helpers.reports(tmp_path, "train")]
  assert seen == [*np.cumsum(counts)[1::2]] and seen[-1] < 8 * ROWS * LENGTH
