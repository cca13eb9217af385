"""What the loop reads of a step, and when."""

import contextlib
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dpjax.errors import Interrupted
from dpjax.training import loop, profiling
from tests import helpers


def measure(loss, count=35):
  return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(0.5), "count": jnp.float32(count)}


def test_a_step_is_read_while_the_next_one_runs():
  read, reports = [], []
  reporter = types.SimpleNamespace(
    advance=read.append,
    report=lambda step, split, scores: reports.append((step, scores)),
    median=lambda num_steps: (sorted(read[-num_steps:])[num_steps // 2], num_steps),
  )
  batches = types.SimpleNamespace(batch_size=5, window=7)
  meter = loop._Meter(reporter, batches, log_every_steps=2, median_every=3)
  for step, loss in enumerate((3.0, 2.0, 4.0), 1):
    # The step was just started: only those before it have been read.
    meter.read_previous(step, measure(loss))
    assert read == [3.0, 2.0, 4.0][: step - 1]
  meter.read_pending()
  assert read == [3.0, 2.0, 4.0] and meter.mean == 4.0
  (step, scores), median = reports
  assert (step, scores["loss"], scores["mean_over_steps"]) == (2, 2.5, 2)
  assert median == (3, {"median_loss": 3.0, "median_over_steps": 3})
  meter.read_previous(4, measure("nan"))
  with pytest.raises(loop.NonFiniteError, match="Step 4: expected a finite loss, got nan"):
    meter.read_pending()


class Model(nn.Module):
  @nn.compact
  def __call__(self, tokens, *, deterministic):
    return nn.Embed(3, 5)(tokens)


class Batches:
  batch_size, window = 8, 7

  def batch(self, step, rows):
    return {"tokens": np.full((8, 7), step, np.int32)[rows]}


class Clock:
  """A device that takes 2 seconds a step, and all else that takes much longer."""

  def __init__(self):
    self.now, self.free_at = 0.0, 0.0
    self._advance = jax.jit(lambda state: state.replace(step=state.step + 1))
    self._ends, self._compiled = {}, set()

  def step(self, state, batch, capacity):
    if capacity not in self._compiled:
      self._compiled.add(capacity)
      self.now += 500
    self.free_at = max(self.now, self.free_at) + 2
    loss = jax.device_put(np.float32(3))
    self._ends[id(loss)] = self.free_at, loss
    return self._advance(state), {
      "loss": loss,
      "grad_norm": loss,
      "count": jax.device_put(np.float32(50)),
    }

  def device_get(self, tree):
    end, _ = self._ends.get(id(tree["loss"]), (0, None))
    self.now = max(self.now, end)
    return {name: np.asarray(value) for name, value in tree.items()}

  def evaluate(self, params):
    self.now += 1000
    return dict(nats_per_token=2.0, perplexity=7.4, bits_per_character=1.5)

  def save(self, *_, **__):
    self.now += 70


@pytest.mark.parametrize(
  "changes",
  [
    dict(eval_every_steps=3, checkpoint_every_steps=5),
    dict(eval_every_steps=1, checkpoint_every_steps=100),
  ],
)
def test_the_speed_is_that_of_the_steps_alone(tmp_path, monkeypatch, changes):
  clock, capacities = Clock(), [5, 5, 5, 5, 9, 5, 5, 9, 9, 5, 5, 9]
  monkeypatch.setattr(loop.step_lib, "jit_train_step", lambda *_, **__: clock.step)
  monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
  monkeypatch.setattr(loop.checkpoints.Checkpoints, "save", clock.save)
  monkeypatch.setattr(loop.jax, "device_get", clock.device_get)
  trainer = loop.Trainer(
    Model(), optax.sgd(0.5), capacity=lambda batch: capacities[batch["tokens"][0, 0]]
  )
  durations = loop.Durations(num_steps=12, log_every_steps=1, median_every_steps=50, **changes)
  loop.fit(trainer, Batches(), clock.evaluate, durations, workdir=tmp_path)
  lines = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
  speeds = [line["tokens_per_second"] for line in lines if line["split"] == "train"]
  # Steps 1 and 5 are compiled first.
  assert speeds == [None, 25, 25, 25, None] + [25] * 7  # 50 tokens in 2 seconds


def fit(tmp_path, monkeypatch, **given):
  """12 updates of a device that computes nothing; evaluations and checkpoints after each 6."""
  clock = Clock()
  monkeypatch.setattr(loop.step_lib, "jit_train_step", lambda *_, **__: clock.step)
  monkeypatch.setattr(loop.checkpoints.Checkpoints, "save", clock.save)
  durations = loop.Durations(12, 6, 1, 50, 6)
  trainer = loop.Trainer(Model(), optax.sgd(0.5))
  loop.fit(trainer, Batches(), clock.evaluate, durations, workdir=tmp_path, **given)
  return clock


def test_a_trace_is_of_the_updates_that_are_asked_for(tmp_path, monkeypatch, capsys):
  asked, calls = [], []

  def should_stop():
    asked.append(True)
    return len(asked) == stop_after

  monkeypatch.setattr(jax.profiler, "start_trace", lambda x: calls.append((x, len(asked))))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(len(asked)))
  folder = tmp_path / "profile"
  stop_after = 99
  fit(tmp_path, monkeypatch, profile=(3, 5), should_stop=should_stop)
  # Each update is followed by the question.
  assert calls == [(folder, 3), 4]
  assert f"xprof --logdir={folder}" in capsys.readouterr().out
  # A run that ends before the trace does, ends that.
  asked, calls, stop_after = [], [], 2
  with pytest.raises(loop.Interrupted):
    fit(tmp_path, monkeypatch, profile=(1, 9), should_stop=should_stop)
  assert calls == [(folder, 1), 2]


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_share_of_products_is_reported_where_it_is_asked_for(tmp_path, monkeypatch, is_asked):
  monkeypatch.setattr(loop, "product_rate", lambda dtype: 1e9)
  fit(tmp_path, monkeypatch, measure_products=is_asked)
  lines = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
  for line in lines:
    is_there = is_asked and line["split"] == "train"
    assert ("model_flops_utilisation" in line) == ("model_flops_per_second" in line) == is_there


@pytest.mark.parametrize("updates", [(5, 5), (7, 6), (11, 13), (-1, 2)])
def test_a_trace_of_other_updates_is_refused(tmp_path, monkeypatch, updates):
  with pytest.raises(
    ValueError, match="^profile: expected START:STOP with 0 <= START < STOP <= 12"
  ):
    fit(tmp_path, monkeypatch, profile=updates)


def test_a_trace_is_written(tmp_path):
  said = []
  with profiling.Profiler((2, 3), tmp_path, 0, 5, said.append) as profiler:
    for step in range(4):
      profiler.begin(step)
      profiler.end(step + 1, jax.jit(lambda x: x * 2)(jnp.ones(3)))
  assert [*tmp_path.rglob("*.xplane.pb")] and [*tmp_path.rglob("*trace.json.gz")]
  assert len(said) == 1


def test_a_report_over_several_steps_leaves_out_the_one_that_was_compiled(monkeypatch):
  now, reports = [10.0], []
  monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
  reporter = types.SimpleNamespace(
    advance=lambda loss: None, report=lambda step, split, scores: reports.append(scores)
  )
  meter = loop._Meter(reporter, Batches(), log_every_steps=3, median_every=50)
  for step, (seconds, count) in enumerate([(100, 31), (4, 17), (10, 25)], 1):
    meter.start()
    meter.read_previous(step, measure(3, count), is_timed=step > 1)
    now[0] += seconds
  meter.read_pending()
  assert reports[0]["tokens_per_second"] == (17 + 25) / 14 and reports[0]["tokens_seen"] == 73
  assert reports[0]["mean_over_steps"] == 3


class Ragged:
  """Rows with padding, as many targets in each as are drawn for the step."""

  batch_size, window = 8, 7

  def batch(self, step, rows):
    lengths = np.random.default_rng(step).integers(1, 8, size=(8, 1))
    tokens = np.full((8, 7), step % 3, np.int32)
    weights = (np.arange(7) < lengths).astype(np.float32)
    return {"tokens": tokens[rows], "targets": tokens[rows], "weights": weights[rows]}


def test_the_tokens_seen_are_targets_also_after_a_stop(tmp_path):
  trainer = loop.Trainer(helpers.Bigrams(3), optax.sgd(0.5))
  asked = iter(range(99))
  for stop_at in (4, 99):
    with contextlib.suppress(Interrupted):
      loop.fit(
        trainer,
        Ragged(),
        lambda params: dict(nats_per_token=2.0, perplexity=7.4),
        loop.Durations(8, 50, 2, 50, 50),
        workdir=tmp_path,
        should_stop=lambda: next(asked) == stop_at,  # noqa: B023
      )
  counts = [Ragged().batch(step, slice(None))["weights"].sum() for step in range(8)]
  seen = [line["tokens_seen"] for line in helpers.reports(tmp_path, "train")]
  assert seen == [*np.cumsum(counts)[1::2]] and seen[-1] < 8 * 8 * 7
