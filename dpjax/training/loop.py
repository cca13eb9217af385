"""The training loop: restore, step, report, evaluate, save."""

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax.config.rules import steps_in
from dpjax.errors import Interrupted, UserError
from dpjax.layers.common import Params
from dpjax.models.build import batch_capacity
from dpjax.training import checkpoints, reporting, sharding
from dpjax.training.trainer import Trainer, TrainState, find_nan, find_non_finite

BEST_BY = "nats_per_token"  # the validation score that selects the best checkpoint; lower is better


# Called with each report, for example to track experiments or stop early; see `Hooks`.
Callback = Callable[[int, Mapping[str, float], TrainState], bool | None]


class Batches(Protocol):
  """The batches of a run, such as `dpjax.data.ContiguousRows`."""

  batch_size: int
  steps_per_epoch: int

  def batch(self, step: int, rows: slice) -> dict[str, np.ndarray]:
    """The given rows of the batch for a step >= 0."""
    ...


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """The folder of a run, and what its checkpoints record.

  Attributes:
    path: the folder, which must exist.
    meta: JSON values saved with each checkpoint. If its "validation", the method of scoring,
      differs from the checkpoint's, the search for the best restarts.
    origin: values saved with each checkpoint, which must match on resume.
  """

  path: Path
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  origin: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Hooks:
  """What watches a run.

  Attributes:
    callbacks: called in order with each report's step, metrics and state. Metrics are those of
      metrics.jsonl, with the split as a prefix: "valid/nats_per_token". The state is the latest,
      of this step or the next one; the next update donates it. If one returns True in all
      processes, training ends: the run is scored and saved, and does not train further unless
      resumed with more steps or without callbacks.
    should_stop: called after every update; must return the same value in all processes.
    profile: START and STOP, to trace updates START + 1 to STOP into the run's folder/profile.
  """

  callbacks: Sequence[Callback] = ()
  should_stop: Callable[[], bool] | None = None
  profile: tuple[int, int] | None = None


def fit(
  trainer: Trainer,
  batches: Batches,
  validate: Callable[[Params], Mapping[str, float]],
  folder: RunFolder,
  hooks: Hooks = Hooks(),
) -> None:
  """Trains to `trainer.num_steps`, from the newest checkpoint in the folder if there is one.

  The state after step n depends only on the seed and the batches before it: a run that was
  stopped or killed ends like one that never stopped (on the same machine, bit for bit). The
  metrics of a step are read while the next one runs. Except for batches and metrics, a step that
  transfers data to the device, or from an accelerator, raises an error (`jax.transfer_guard`).

  Args:
    trainer: makes the updates; its settings also say when to evaluate, report, save and stop.
    batches: one for each step.
    validate: maps parameters to validation scores, with "nats_per_token" and "perplexity".
    folder: receives reports and checkpoints.
    hooks: watch the run.

  Raises:
    NonFiniteError: a loss, or parameters to score or save, are not finite, or the optimizer's state
      has nan. The checkpoints precede them; the message names the newest.
    Interrupted: SIGTERM, SIGINT or `should_stop` stopped training; the step is finished and saved.
    ValueError: the devices do not divide the batch, updates of `profile` lie outside of
      the run, or see `Checkpoints.restore`.
    OSError: a file cannot be read or written.
  """
  sharding.check_rows(batches.batch_size, trainer.settings.grad_accum_steps)
  num_steps = trainer.num_steps
  with contextlib.ExitStack() as stack:
    find_signal = stack.enter_context(_stop_signal(num_steps))
    loop = _Loop(trainer, batches, validate, folder, hooks.callbacks)
    start = loop.restore(stack)
    stack.enter_context(loop.naming_checkpoint())
    trace = stack.enter_context(_Trace(hooks.profile, folder.path, loop.reporter))
    trace.check(start, num_steps)
    for step in range(num_steps if loop.has_ended else start, num_steps):
      trace.begin(step)
      loop.train_one(step)
      trace.end(step + 1, loop.state)
      number = find_signal(step + 1)
      is_stopped = number is not None or (hooks.should_stop is not None and hooks.should_stop())
      ends = loop.after_update(step + 1, is_stopped)
      if ends and number is None:
        break
      if is_stopped:
        raise Interrupted(step + 1, num_steps, number)


class _Loop:
  """The parts of `fit`, and the state that it carries between steps."""

  def __init__(
    self,
    trainer: Trainer,
    batches: Batches,
    validate: Callable[[Params], Mapping[str, float]],
    folder: RunFolder,
    callbacks: Sequence[Callback],
  ):
    self.trainer = trainer
    self.settings = trainer.settings
    self.batches = batches
    self.validate = validate
    self.folder = folder
    self.callbacks = callbacks
    self.eval_every_steps = steps_in(
      trainer.settings.eval_every_steps,
      trainer.settings.eval_every_epochs,
      "eval_every",
      steps_per_epoch=batches.steps_per_epoch,
    )
    self.mesh = sharding.make_mesh()
    self.rows = sharding.process_rows(batches.batch_size)
    self.train_step = trainer.jit_step(self.mesh)
    self.compiled: set[int | None] = set()  # the capacities
    self.best: dict[str, float] = {"step": 0, BEST_BY: math.inf, "since": 0}
    self.newest: int | None = None  # the step of the newest checkpoint
    self.has_ended = False  # An earlier process ended the training before its last step.
    self.is_enough = False  # A callback or the patience ends it.

  def restore(self, stack: contextlib.ExitStack) -> int:
    """Restores the newest checkpoint or the initial state, and opens the reports at its step.

    The stack closes checkpoints and reports.
    """
    path = self.folder.path / "checkpoints"
    self.saved = stack.enter_context(checkpoints.Checkpoints(path, self.settings.max_to_keep))
    restored = self.saved.restore(self.trainer.abstract_state(self.mesh), self.folder.origin)
    tokens_seen = 0
    if restored is None:
      self.state = self.trainer.init(self.mesh)
    else:
      self.state, meta = restored
      self.newest = int(self.state.step)
      tokens_seen = meta["tokens_seen"]
      if meta.get("validation") == self.folder.meta.get("validation"):
        self.best = meta["best"]
      has_ended = meta.get("ended") == self.trainer.num_steps
      self.has_ended = has_ended and (bool(self.callbacks) or self.is_exhausted())
    start = int(self.state.step)
    reporter = reporting.Reporter(self.folder.path, start, self.trainer.num_steps)
    self.reporter = stack.enter_context(reporter)
    self.reader = reporting.MetricsReader(reporter, self.settings.log_every_steps, tokens_seen)
    if start:
      self.reporter.print(f"Resuming from the checkpoint of step {start}.")
    return start

  @contextlib.contextmanager
  def naming_checkpoint(self) -> Iterator[None]:
    """Adds to a `NonFiniteError` which checkpoint precedes it, and what may help."""
    try:
      yield
    except reporting.NonFiniteError as error:
      checkpoint = f"The newest checkpoint is of step {self.newest}, before it."
      if self.newest is None:
        checkpoint = "No checkpoint was saved before it."
      raise reporting.NonFiniteError(
        f"{error}. {checkpoint} A lower train.learning_rate, a warm-up or a tighter "
        "train.grad_clip_norm may help, in a new workdir."
      ) from None

  def train_one(self, step: int) -> None:
    """Runs an update, and meanwhile reads the metrics of the previous one."""
    self.reader.start()
    batch = self.batches.batch(step, self.rows)
    capacity = batch_capacity(self.trainer.objective.boundaries, batch)
    compiles = capacity not in self.compiled
    if compiles:
      self.reader.read()  # Otherwise the previous step's time would include compilation.
      self.compiled.add(capacity)
    # Placing a batch over several processes counts as an implicit transfer: outside of the guard.
    placed = sharding.put_batch(batch, self.mesh)
    with jax.transfer_guard("disallow"):
      self.state, metrics = self.train_step(self.state, placed, capacity=capacity)
      self.reader.read((step + 1, metrics, not compiles))

  def after_update(self, done: int, is_stopped: bool) -> bool:
    """Reports, evaluates and saves as is due after an update; returns whether it was the last."""
    is_last = done == self.trainer.num_steps
    saves = is_stopped or done % self.settings.checkpoint_every_steps == 0
    evaluates = is_last or done % self.eval_every_steps == 0
    if saves or evaluates:
      self.reader.read()
    self.call_back()
    # Known before the evaluation, so that a run that ends has been validated.
    evaluates = evaluates or self.is_enough
    if saves or evaluates:
      self.check_finite(done)
    is_best = evaluates and self.evaluate(done)
    ends = is_last or self.is_enough
    if is_best or ends or saves:
      self.save()
    return ends

  def check_finite(self, done: int) -> None:
    """Raises a `NonFiniteError` for a state that cannot go on, though the loss was finite."""
    for params in filter(None, (self.state.params, self.state.average)):
      if (name := find_non_finite(params)) is not None:
        raise reporting.NonFiniteError(
          f"Step {done}: expected finite parameters, got nan or infinity in {name}"
        )
    if (name := find_nan(self.state.opt_state)) is not None:
      raise reporting.NonFiniteError(
        f"Step {done}: expected an optimizer's state without nan, got nan in {name}"
      )

  def call_back(self) -> None:
    """Calls the callbacks with the new reports."""
    for done, scores in self.reporter.new_reports():
      for callback in self.callbacks:
        if callback(done, scores, self.state):
          self.is_enough = True

  def is_exhausted(self) -> bool:
    """Whether `patience` evaluations have passed without a new best."""
    return 0 < self.settings.patience <= self.best["since"]

  def evaluate(self, done: int) -> bool:
    """Scores the validation split; returns whether the score is the best so far."""
    self.reader.read()
    scores = self.validate(self.state.scored)
    self.reporter.report(done, "valid", scores)
    is_best = scores[BEST_BY] < self.best[BEST_BY]
    if is_best:
      self.best = {"step": done, BEST_BY: scores[BEST_BY], "since": 0}
    else:
      self.best = {**self.best, "since": self.best["since"] + 1}
    self.reporter.print(_validation_line(done, self.reader.mean, scores, is_best))
    is_over = done == self.trainer.num_steps or self.is_enough
    self.call_back()
    if self.is_exhausted() and not is_over:
      self.is_enough = True
      self.reporter.print(
        f"No evaluation since step {self.best['step']} was better (train.patience = "
        f"{self.settings.patience}): the training ends at step {done}."
      )
    return is_best

  def save(self) -> None:
    """Saves the state, and whatever else a resumed run needs."""
    meta = {**self.folder.meta, "best": self.best, "tokens_seen": self.reader.tokens_seen}
    if self.is_enough:
      meta["ended"] = self.trainer.num_steps
    self.reporter.check_there()  # Orbax would recreate the folder.
    self.saved.save(self.state, meta, origin=self.folder.origin)
    self.newest = int(self.state.step)


def _validation_line(
  done: int, train_mean: float, scores: Mapping[str, float], is_best: bool
) -> str:
  line = (
    f"step {done}: nats per token {train_mean:.4f} in training, "
    f"{scores[BEST_BY]:.4f} in validation; perplexity {scores['perplexity']:.2f}"
  )
  if "bits_per_character" in scores:
    line += f", bits per character {scores['bits_per_character']:.4f}"
  if is_best:
    line += " (best so far)"
  return line


class _Trace(contextlib.AbstractContextManager):
  """Traces the updates START + 1 to STOP into a folder, and reports how to open the trace."""

  def __init__(self, updates: tuple[int, int] | None, workdir: Path, reporter: reporting.Reporter):
    self._updates = updates
    self._folder = workdir / "profile"
    self._reporter = reporter
    self._open = contextlib.ExitStack()

  def __exit__(self, *_) -> None:
    self._open.close()

  def check(self, start: int, num_steps: int) -> None:
    """Raises a `UserError` unless the updates are among those that remain."""
    if self._updates is None:
      return
    first, last = self._updates
    if not start <= first < last <= num_steps:
      raise UserError(
        f"profile: expected START:STOP with {start} <= START < STOP <= {num_steps}, the "
        f"updates that remain, got {first}:{last}"
      )

  def begin(self, step: int) -> None:
    """Begins the trace if it begins with this update."""
    if self._updates is not None and step == self._updates[0]:
      self._open.callback(
        self._reporter.print,
        f"A trace is in {self._folder}: open it with xprof --logdir={self._folder}, or its "
        "trace.json.gz at https://ui.perfetto.dev.",
      )
      self._open.enter_context(jax.profiler.trace(self._folder))

  def end(self, done: int, state: TrainState) -> None:
    """Ends the trace if it ends with this update."""
    if self._updates is not None and done == self._updates[1]:
      jax.block_until_ready(state)
      self._open.close()


@contextlib.contextmanager
def _stop_signal(num_steps: int) -> Iterator[Callable[[int], int | None]]:
  """Yields a function of the step that returns the signal to stop, or None.

  Raises `Interrupted` at the end if a signal came too late for that.
  """
  if jax.process_count() > 1:  # JAX agrees on one step for all, and handles SIGTERM.
    sync = multihost_utils.reached_preemption_sync_point
    yield lambda step: signal.SIGTERM if sync(step) else None
    return
  if threading.current_thread() is not threading.main_thread():
    yield lambda step: None
    return
  received: list[int] = []
  before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  step = num_steps

  def note(number, frame):
    received.append(number)
    signal.signal(number, before[number])  # A second signal ends it at once.

  def find(now):
    nonlocal step
    step = now
    return received[0] if received else None

  for number in before:
    signal.signal(number, note)
  try:
    yield find
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if received:
    raise Interrupted(step, num_steps, received[0])
