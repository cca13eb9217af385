"""The training loop: restore, step, report, evaluate, save."""

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dpjax.errors import Interrupted, UserError
from dpjax.training import checkpoints, losses, reporting, sharding
from dpjax.training import step as step_lib
from dpjax.training.reporting import NonFiniteError as NonFiniteError

BEST_BY = "nats_per_token"  # the validation score that selects the best checkpoint; lower is better


# Called with each report, for example to track experiments or stop early; see `fit`.
Callback = Callable[[int, Mapping[str, float], step_lib.TrainState], bool | None]


@dataclasses.dataclass(frozen=True)
class TrainStepSpec:
  """The model, optimizer and settings of an update; see `dpjax.training.train_step`.

  Attributes:
    grad_accum_steps: the number of parts that a batch is split into.
    param_sharding: "replicated" or "fsdp".
    capacity: maps a batch to the `capacity` of `dpjax.models.hourglass.Hourglass`, or None.
    seed: the seed of parameters and dropout.
    ema_decay: the decay of the parameters' moving average, which is then scored; 0 disables it.
    matmul_dtype: the dtype of the factors of float32 products, "float32" or "bfloat16".
  """

  model: nn.Module
  optimizer: optax.GradientTransformation
  objective: losses.Objective = losses.Objective()
  grad_accum_steps: int = 1
  param_sharding: str = "replicated"
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None
  seed: int = 0
  ema_decay: float = 0.0
  learning_rate: optax.Schedule | None = None
  matmul_dtype: str = "float32"

  def abstract_state(self, mesh: Mesh) -> step_lib.TrainState:
    """The shapes, dtypes and shardings of its state."""
    return step_lib.abstract_state(
      self.model, self.optimizer, self.seed, mesh, self.param_sharding, self.ema_decay > 0
    )

  def jit_step(self, abstract: step_lib.TrainState, mesh: Mesh) -> Callable[..., Any]:
    """`dpjax.training.jit_train_step` for a state like `abstract`."""
    return step_lib.jit_train_step(
      self.model,
      self.optimizer,
      jax.tree.map(lambda leaf: leaf.sharding, abstract),
      mesh,
      grad_accum_steps=self.grad_accum_steps,
      objective=self.objective,
      ema_decay=self.ema_decay,
      learning_rate=self.learning_rate,
      matmul_dtype=self.matmul_dtype,
    )


@dataclasses.dataclass(frozen=True)
class Intervals:
  """The number of updates in total, and between evaluations, reports and checkpoints.

  Reports give the mean loss since the previous report. The last update is also followed by an
  evaluation; the best and the final state are also saved.
  """

  num_steps: int
  eval_every_steps: int
  log_every_steps: int
  checkpoint_every_steps: int


def fit(
  spec: TrainStepSpec,
  batches: Any,
  evaluate: Callable[[dict], Mapping[str, float]],
  intervals: Intervals,
  *,
  workdir: str | Path,
  max_to_keep: int = 2,
  patience: int = 0,
  initial: Callable[[dict], dict] | None = None,
  meta: Mapping | None = None,
  origin: Mapping[str, str] | None = None,
  callbacks: Sequence[Callback] = (),
  should_stop: Callable[[], bool] = lambda: False,
  profile: tuple[int, int] | None = None,
) -> None:
  """Trains to the last step, from the newest checkpoint in `workdir` if there is one.

  The state after step n depends only on the seed and the batches before it: a run that was
  stopped or killed ends like one that never stopped (on the same machine, bit for bit). The
  metrics of a step are read while the next one runs. Except for batches and metrics, a step that
  transfers data to the device, or from an accelerator, raises an error (`jax.transfer_guard`).

  Args:
    spec: the model and the settings of an update.
    batches: has `batch_size`, `window` and `batch(step, rows)`; see `dpjax.data.ContiguousRows`.
    evaluate: maps parameters to validation scores, with "nats_per_token" and "perplexity".
    intervals: when to evaluate, report, save and stop.
    workdir: the run's folder, which must exist.
    max_to_keep: the number of recent checkpoints to keep.
    patience: training ends after this number of evaluations without a new best; 0 disables it.
    initial: maps newly initialized parameters to those to start from, without a checkpoint.
    meta: values saved with each checkpoint. If its "validation", the method of scoring,
      differs from the checkpoint's, the search for the best restarts.
    origin: values saved with each checkpoint, which must match on resume.
    callbacks: called in order with each report's step, metrics and state. Metrics are those of
      metrics.jsonl, with the split as a prefix: "valid/nats_per_token". The state is the latest,
      of this step or the next one; the next update donates it. If one returns True in all
      processes, training ends: the run is scored and saved, and does not train further unless
      resumed with more steps or without callbacks.
    should_stop: called after every update; must return the same value in all processes.
    profile: START and STOP, to trace updates START + 1 to STOP into `workdir`/profile.

  Raises:
    NonFiniteError: a loss is not finite. The last checkpoint precedes it.
    Interrupted: SIGTERM, SIGINT or `should_stop` stopped training; the step is finished and saved.
    ValueError: the devices do not divide the batch, updates of `profile` lie outside of
      the run, or see `Checkpoints.restore`.
    OSError: a file cannot be read or written.
  """
  sharding.check_rows(batches.batch_size, spec.grad_accum_steps)
  num_steps = intervals.num_steps
  with contextlib.ExitStack() as stack:
    find_signal = stack.enter_context(_stop_signal(num_steps))
    saved = checkpoints.Checkpoints(Path(workdir, "checkpoints"), max_to_keep)
    stack.enter_context(saved)
    loop = _Loop(spec, batches, intervals, saved, callbacks, patience, meta or {}, origin or {})
    start = loop.restore(initial, workdir)
    stack.enter_context(loop.reporter)
    trace_start, trace_stop = profile or (None, None)
    if profile and not start <= profile[0] < profile[1] <= num_steps:
      raise UserError(
        f"profile: expected START:STOP with {start} <= START < STOP <= {num_steps}, the "
        f"updates that remain, got {trace_start}:{trace_stop}"
      )
    trace = stack.enter_context(contextlib.ExitStack())
    if start:
      loop.reporter.print(f"Resuming from the checkpoint of step {start}.")
    for step in range(num_steps if loop.has_ended else start, num_steps):
      done = step + 1
      if step == trace_start:
        trace.enter_context(_trace(Path(workdir, "profile"), loop.reporter))
      loop.train_one(step)
      if done == trace_stop:
        jax.block_until_ready(loop.state)
        trace.close()
      number = find_signal(done)
      stops = number is not None or should_stop()
      saves = stops or done % intervals.checkpoint_every_steps == 0
      evaluates = done == num_steps or done % intervals.eval_every_steps == 0
      if saves or evaluates:
        loop.reader.read()
      loop.call_back()
      # Known before the evaluation, so that a run that ends has been validated.
      is_best = (evaluates or loop.is_enough) and loop.validate(done, evaluate)
      ends = done == num_steps or loop.is_enough
      if is_best or ends or saves:
        loop.save()
      if ends and number is None:
        break
      if stops:
        raise Interrupted(done, num_steps, number)


class _Loop:
  """The parts of `fit`, and the state that it carries between steps."""

  def __init__(
    self,
    spec: TrainStepSpec,
    batches: Any,
    intervals: Intervals,
    saved: checkpoints.Checkpoints,
    callbacks: Sequence[Callback],
    patience: int,
    meta: Mapping,
    origin: Mapping[str, str],
  ):
    self.spec, self.batches, self.intervals = spec, batches, intervals
    self.saved, self.callbacks, self.patience = saved, callbacks, patience
    self.meta, self.origin = meta, origin
    self.mesh = sharding.make_mesh()
    self.rows = sharding.process_rows(batches.batch_size)
    self.abstract = spec.abstract_state(self.mesh)
    self.train_step = spec.jit_step(self.abstract, self.mesh)
    self.compiled: set[int | None] = set()  # the capacities
    self.best: dict[str, Any] = {"step": 0, BEST_BY: math.inf, "since": 0}
    self.has_ended = False
    self.is_enough = False  # A callback or the patience ends the training before its last step.

  def restore(self, initial: Callable[[dict], dict] | None, workdir: str | Path) -> int:
    """Restores the newest checkpoint or the initial state, and opens the reports at its step."""
    restored, tokens_seen = self.saved.restore(self.abstract, self.origin), 0
    if restored is None:
      self.state = _initial_state(self.spec, self.abstract, initial)
    else:
      self.state, saved_meta = restored
      tokens_seen = saved_meta["tokens_seen"]
      if saved_meta.get("validation") == self.meta.get("validation"):
        self.best = saved_meta["best"]
      has_ended = saved_meta.get("ended") == self.intervals.num_steps
      self.has_ended = has_ended and (bool(self.callbacks) or self.is_exhausted())
    start = int(self.state.step)
    self.reporter = reporting.Reporter(workdir, start, self.intervals.num_steps)
    every = self.intervals.log_every_steps
    self.reader = reporting.MetricsReader(self.reporter, every, tokens_seen)
    return start

  def train_one(self, step: int) -> None:
    """Runs an update, and meanwhile reads the metrics of the previous one."""
    self.reader.start()
    batch = self.batches.batch(step, self.rows)
    capacity = self.spec.capacity(batch)
    compiles = capacity not in self.compiled
    if compiles:
      self.reader.read()  # Otherwise the previous step's time would include compilation.
      self.compiled.add(capacity)
    # Placing a batch over several processes counts as an implicit transfer: outside of the guard.
    batch = sharding.put_batch(batch, self.mesh)
    with jax.transfer_guard("disallow"):
      self.state, metrics = self.train_step(self.state, batch, capacity=capacity)
      self.reader.read((step + 1, metrics, not compiles))

  def call_back(self) -> None:
    """Calls the callbacks with the new reports."""
    for done, scores in self.reporter.new_reports():
      for callback in self.callbacks:
        self.is_enough |= bool(callback(done, scores, self.state))

  def is_exhausted(self) -> bool:
    """Whether `patience` evaluations have passed without a new best."""
    return 0 < self.patience <= self.best["since"]

  def validate(self, done: int, evaluate: Callable[[dict], Mapping[str, float]]) -> bool:
    """Scores the validation split; returns whether the score is the best so far."""
    self.reader.read()
    scores = evaluate(self.state.scored)
    self.reporter.report(done, "valid", scores)
    is_best = scores[BEST_BY] < self.best[BEST_BY]
    if is_best:
      self.best = {"step": done, BEST_BY: scores[BEST_BY], "since": 0}
    else:
      self.best = {**self.best, "since": self.best["since"] + 1}
    bits = scores.get("bits_per_character")
    self.reporter.print(
      f"step {done}: nats per token {self.reader.mean:.4f} in training, "
      f"{scores[BEST_BY]:.4f} in validation; perplexity {scores['perplexity']:.2f}"
      f"{f', bits per character {bits:.4f}' if bits is not None else ''}"
      f"{' (best so far)' if is_best else ''}"
    )
    ends = done == self.intervals.num_steps or self.is_enough
    self.call_back()
    if self.is_exhausted() and not ends:
      self.is_enough = True
      self.reporter.print(
        f"No evaluation since step {self.best['step']} was better (train.patience = "
        f"{self.patience}): the training ends at step {done}."
      )
    return is_best

  def save(self) -> None:
    """Saves the state, and whatever else a resumed run needs."""
    meta = {**self.meta, "best": self.best, "tokens_seen": self.reader.tokens_seen}
    if self.is_enough:
      meta["ended"] = self.intervals.num_steps
    self.reporter.check_there()  # Orbax would recreate the folder.
    self.saved.save(self.state, meta, origin=self.origin)


@contextlib.contextmanager
def _trace(folder: Path, reporter: reporting.Reporter) -> Iterator[None]:
  """Traces the block into a folder, and reports how to open the trace."""
  try:
    with jax.profiler.trace(folder):
      yield
  finally:
    reporter.print(
      f"A trace is in {folder}: open it with xprof --logdir={folder}, or its "
      "trace.json.gz at https://ui.perfetto.dev."
    )


def _initial_state(
  spec: TrainStepSpec, abstract: step_lib.TrainState, initial: Callable[[dict], dict] | None
) -> step_lib.TrainState:
  """The newly initialized state, with `initial` applied to its parameters."""
  state = step_lib.jit_init(spec.model, spec.optimizer, spec.seed, abstract)
  if initial is None:
    return state
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
  params = jax.device_put(initial(state.params), shardings)
  average = None if abstract.average is None else jax.tree.map(jnp.copy, params)
  return state.replace(params=params, average=average)


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
  received, before, step = [], {}, num_steps

  def note(number, frame):
    received.append(number)
    signal.signal(number, before[number])  # A second signal ends it at once.

  def find(now):
    nonlocal step
    step = now
    return received[0] if received else None

  before |= {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield find
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if received:
    raise Interrupted(step, num_steps, received[0])
