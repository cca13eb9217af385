"""What the loop moves between host and device, and when."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops
from dpjax.models.build import build_boundaries
from dpjax.training import loop, losses, optimizer
from tests import helpers

ROWS, LENGTH, VOCAB, STEPS = 8, 10, 13, 4
SPACE = 3
SCORES = dict(nats_per_token=2.0, perplexity=7.4, bits_per_character=1.5)


pytestmark = pytest.mark.usefixtures("standard_promotion")


class Batches:
  batch_size, window = ROWS, LENGTH

  def batch(self, step, rows):
    tokens = np.random.default_rng(step).integers(VOCAB, size=(ROWS, LENGTH + 1))
    tokens = tokens.astype(np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    whole = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
    return {name: value[rows] for name, value in whole.items()}


def from_spaces(batch):
  """The capacity as the run's configuration has it told by the tokens."""
  needed = int((batch["tokens"] == SPACE).sum(axis=1).max()) + 1
  return next(size for size in ops.capacities(LENGTH + 1, 2) if size >= needed)


def fit(workdir, boundaries="none", capacity=lambda batch: None, **model):
  config = config_lib.default_model()
  usual = dict(vocab_size=VOCAB, num_layers=1, width=12, num_heads=3, feed_forward_width=20)
  usual |= dict(max_length=11, dropout=0.1, hidden_dropout=0.0, mixer_dropout=0.0)
  usual |= dict(boundaries=boundaries, num_capacities=2, space_ids=(SPACE,))
  if boundaries != "none":
    usual |= dict(first_layers=1, last_layers=1)
  helpers.set_model(config, **{**usual, **model})
  trainer = loop.Trainer(
    dpjax.build_model(config),
    optimizer.make_optimizer("adam", 1e-3, clip_norm=0.5),
    losses.Objective(build_boundaries(config)),
    capacity=capacity,
  )
  durations = loop.Durations(
    num_steps=STEPS,
    eval_every_steps=STEPS,
    log_every_steps=1,
    median_every_steps=2,
    checkpoint_every_steps=STEPS,
  )
  loop.fit(trainer, Batches(), lambda params: SCORES, durations, workdir=workdir)


@pytest.mark.parametrize(
  "settings",
  [
    dict(),
    pytest.param(
      dict(boundaries="whitespace", capacity=from_spaces, mixer="me", num_heads=1),
      marks=pytest.mark.slow,
    ),
    pytest.param(dict(boundaries="gumbel"), marks=pytest.mark.slow),
    pytest.param(dict(boundaries="entropy", mixer="relative_attention"), marks=pytest.mark.slow),
    *(
      pytest.param(dict(num_heads=1, mixer=mixer, implementation=name), marks=pytest.mark.slow)
      for mixer, name in (("we", "fft"), ("she", "dft"), ("me", "toeplitz"))
    ),
  ],
  ids=["plain", "whitespace", "gumbel", "entropy-relative", "we", "she", "me"],
)
def test_nothing_moves_unasked(settings, tmp_path):
  fit(tmp_path, **settings)
  losses_of_steps = np.fromfile(tmp_path / "losses.f32", "<f4")
  assert losses_of_steps.shape == (STEPS,) and np.isfinite(losses_of_steps).all()


def count_starts(monkeypatch, call):
  """Has `call(step, state, batch, capacity)` take the place of the jitted step."""
  make, count = loop.step_lib.jit_train_step, iter(range(1, STEPS + 1))

  def make_counted(*arguments, **settings):
    step = make(*arguments, **settings)
    return lambda state, batch, capacity: call(next(count), step, state, batch)

  monkeypatch.setattr(loop.step_lib, "jit_train_step", make_counted)


def test_a_batch_that_moves_unasked_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(loop.sharding, "put_batch", lambda batch, mesh: dict(batch))
  with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
    fit(tmp_path)


def test_a_number_that_moves_unasked_is_refused(tmp_path, monkeypatch):
  def call(number, step, state, batch):
    state, measured = step(state, batch)
    # Compiled and run for itself, with a 2 from the host, and then waited for.
    return state, measured | dict(loss=measured["loss"] * 2)

  count_starts(monkeypatch, call)
  with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
    fit(tmp_path)


def test_a_step_is_read_when_the_next_one_was_started(tmp_path, monkeypatch):
  events, device_get = [], jax.device_get
  started = {}

  def call(number, step, state, batch):
    events.append(f"start {number}")
    state, measured = step(state, batch)
    started[id(measured["loss"])] = number, measured
    return state, measured

  def get(tree):
    if isinstance(tree, dict) and id(tree.get("loss")) in started:
      events.append(f"read {started[id(tree['loss'])][0]}")
    return device_get(tree)

  count_starts(monkeypatch, call)
  monkeypatch.setattr(jax, "device_get", get)
  fit(tmp_path)
  expected = ["start 1"]
  for number in range(2, STEPS + 1):
    expected += [f"start {number}", f"read {number - 1}"]
  # The last is waited for, to evaluate and to save.
  assert events == [*expected, f"read {STEPS}"]
