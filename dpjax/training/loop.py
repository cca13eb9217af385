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
from dpjax.training.profiling import Utilisation, product_rate
from dpjax.training.reporting import NonFiniteError as NonFiniteError

BEST_BY = "nats_per_token"  # what validation is judged by; the lower the better


# A function of each report, such as an experiment tracker or early stopping; see `fit`.
Callback = Callable[[int, Mapping[str, float], step_lib.TrainState], bool | None]


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The model, optimizer and settings of an update; see `dpjax.training.train_step`.

  Attributes:
    grad_accum_steps: the number of parts of a batch.
    parameters: "replicated" or "fsdp".
    capacity: maps a batch to the `capacity` of `dpjax.models.hourglass.Hourglass`, or None.
    seed: the seed of parameters and dropout.
    ema_decay: the decay of an average of the parameters, which is then scored; 0 for none.
    products: the dtype in which float32 is multiplied, "float32" or "bfloat16".
  """

  model: nn.Module
  optimizer: optax.GradientTransformation
  objective: losses.Objective = losses.Objective()
  grad_accum_steps: int = 1
  parameters: str = "replicated"
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None
  seed: int = 0
  ema_decay: float = 0.0
  learning_rate: optax.Schedule | None = None
  products: str = "float32"

  def abstract_state(self, mesh: Mesh) -> step_lib.TrainState:
    """The shapes, dtypes and shardings of its state."""
    model, has_average = (self.model, self.optimizer, self.seed), self.ema_decay > 0
    return step_lib.abstract_state(*model, mesh, self.parameters, has_average)

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
      products=self.products,
    )


@dataclasses.dataclass(frozen=True)
class Durations:
  """The number of updates in total, and between evaluations, reports and checkpoints.

  Reports are of the mean or median loss since the last. The last update is also followed by an
  evaluation; the best and the end are also saved.
  """

  num_steps: int
  eval_every_steps: int
  log_every_steps: int
  median_every_steps: int
  checkpoint_every_steps: int


def fit(
  trainer: Trainer,
  batches: Any,
  evaluate: Callable[[dict], Mapping[str, float]],
  durations: Durations,
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
  measure_products: bool = False,
) -> None:
  """Trains to the last step, from the newest checkpoint in `workdir` if there is one.

  The state after step n depends only on the seed and the batches before it: a run that was
  stopped or killed ends like one that never stopped (on the same machine, bit for bit). The
  metrics of a step are read while the next one runs. Except for batches and metrics, a step that
  transfers data to the device, or from an accelerator, raises an error (`jax.transfer_guard`).

  Args:
    trainer: the model and the settings of an update.
    batches: with `batch_size`, `window` and `batch(step, rows)`; see `dpjax.data.ContiguousRows`.
    evaluate: maps parameters to validation scores, with "nats_per_token" and "perplexity".
    durations: the durations in updates.
    workdir: the run's folder, which exists.
    max_to_keep: the number of last checkpoints to keep.
    patience: training ends after this number of evaluations without a new best; 0 means never.
    initial: maps the drawn parameters to the initial ones, if there is no checkpoint.
    meta: values saved with each checkpoint. If its "validation", the method of scoring,
      differs from the checkpoint's, the search for the best restarts.
    origin: values saved with each checkpoint, which must match on resume.
    callbacks: functions of each report's step, metrics and state, called in order. Metrics are as
      in metrics.jsonl, with the split before the name: "valid/nats_per_token". The state is the
      newest, of this step or the next one; the next update donates it. One that returns True, in
      all processes, ends the training: the run is scored and saved, and trains no further unless
      with more steps or without callbacks.
    should_stop: called after every update, with the same answer in all processes.
    profile: START and STOP, to trace updates START + 1 to STOP into `workdir`/profile.
    measure_products: whether to report training's share of the speed of matrix products.

  Raises:
    NonFiniteError: a loss is not finite. The last checkpoint is from before.
    Interrupted: SIGTERM, SIGINT or `should_stop` stopped training; the step is finished and saved.
    ValueError: the batch does not divide over the devices, updates of `profile` lie outside of
      the run, or see `Checkpoints.restore`.
    OSError: a file cannot be read or written.
  """
  sharding.check_rows(batches.batch_size, trainer.grad_accum_steps)
  mesh, meta = sharding.make_mesh(), dict(meta or {})
  abstract = trainer.abstract_state(mesh)
  train_step = trainer.jit_step(abstract, mesh)
  num_steps, rows = durations.num_steps, sharding.process_rows(batches.batch_size)
  best, tokens_seen = {"step": 0, BEST_BY: math.inf, "since": 0}, 0

  def is_exhausted() -> bool:
    return 0 < patience <= best["since"]

  with contextlib.ExitStack() as stack:
    folder = Path(workdir)
    find_signal = stack.enter_context(_stop_signal(num_steps))
    saved = checkpoints.Checkpoints(folder / "checkpoints", max_to_keep)
    stack.enter_context(saved)
    found, is_over = saved.restore(abstract, origin), False
    if found is None:
      state = step_lib.jit_init(trainer.model, trainer.optimizer, trainer.seed, abstract)
      if initial:
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
        params = jax.device_put(initial(state.params), places)
        average = None if abstract.average is None else jax.tree.map(jnp.copy, params)
        state = dataclasses.replace(state, params=params, average=average)
    else:
      state, known = found
      tokens_seen = known["tokens_seen"]
      if known.get("validation") == meta.get("validation"):
        best = known["best"]
      is_over = known.get("ended") == num_steps and (bool(callbacks) or is_exhausted())
    start = int(state.step)
    reporter = stack.enter_context(reporting.Reporter(workdir, start, num_steps))
    trace, folder = stack.enter_context(contextlib.ExitStack()), folder / "profile"
    trace_from, trace_to = profile or (None, None)
    if profile and not start <= profile[0] < profile[1] <= num_steps:
      raise UserError(
        f"profile: expected START:STOP with {start} <= START < STOP <= {num_steps}, the updates "
        f"that are to come, got {trace_from}:{trace_to}"
      )
    if found:
      reporter.print(f"Going on from the checkpoint of step {start}.")
    utilisation = None
    if measure_products:
      rate = product_rate(getattr(trainer.model, "dtype", jnp.float32)) * mesh.size
      has_pooling = bool(trainer.objective.boundaries)
      utilisation = Utilisation(trainer.model, abstract.params, batches.window, has_pooling, rate)
      reporter.print(f"The largest matrix products reach {rate / 1e9:,.0f} Gflop/s here.")
    every = durations.log_every_steps, durations.median_every_steps
    places = batches.batch_size * batches.window
    meter = reporting.Meter(reporter, *every, places, utilisation, tokens_seen)
    compiled, is_enough = set(), False

    def call_back() -> None:
      nonlocal is_enough
      for done, scores in reporter.new_reports():
        for callback in callbacks:
          is_enough |= bool(callback(done, scores, state))

    for step in range(num_steps if is_over else start, num_steps):
      meter.start()
      batch = batches.batch(step, rows)
      size = trainer.capacity(batch)
      compiles = size not in compiled
      if compiles:
        meter.read()  # Else the step before would be timed with the compilation.
        compiled.add(size)
      # Placing a batch over several processes counts as unasked: outside of the guard.
      placed = sharding.put_batch(batch, mesh)
      if step == trace_from:
        trace.callback(
          reporter.print,
          f"A trace is in {folder}: open it with xprof --logdir={folder}, or its "
          "trace.json.gz at https://ui.perfetto.dev.",
        )
        trace.enter_context(jax.profiler.trace(folder))
      with jax.transfer_guard("disallow"):
        state, measured = train_step(state, placed, capacity=size)
        meter.read((step + 1, measured, not compiles))
      done = step + 1
      if done == trace_to:
        jax.block_until_ready(measured)
        trace.close()
      number = find_signal(done)
      stopping = number is not None or should_stop()
      is_due = stopping or done % durations.checkpoint_every_steps == 0
      at_eval = done == num_steps or done % durations.eval_every_steps == 0
      if at_eval or is_due:
        meter.read()
      call_back()
      # Decided before the evaluation, so that an ended run has been validated.
      at_end, is_best = done == num_steps or is_enough, False
      if at_end or at_eval:
        meter.read()
        scores = evaluate(state.scored)
        reporter.report(done, "valid", scores)
        best = {**best, "since": best["since"] + 1}
        if is_best := scores[BEST_BY] < best[BEST_BY]:
          best = {"step": done, BEST_BY: scores[BEST_BY], "since": 0}
        bits = scores.get("bits_per_character")
        reporter.print(
          f"step {done}: nats per token {meter.mean:.4f} in training, "
          f"{scores[BEST_BY]:.4f} in validation; perplexity {scores['perplexity']:.2f}"
          f"{f', bits per character {bits:.4f}' if bits is not None else ''}"
          f"{' (best so far)' if is_best else ''}"
        )
        call_back()
        if is_exhausted() and not at_end:
          is_enough = True
          reporter.print(
            f"No evaluation since step {best['step']} was better (train.patience = "
            f"{patience}): the training ends at step {done}."
          )
        at_end |= is_enough
      if is_best or at_end or is_due:
        kept = {**meta, "best": best, "tokens_seen": meter.tokens_seen}
        kept |= {"ended": num_steps} if is_enough else {}
        reporter.check_there()  # Orbax would make the folder again.
        saved.save(state, kept, origin=origin)
      if at_end and number is None:
        break
      if stopping:
        raise Interrupted(done, num_steps, number)


@contextlib.contextmanager
def _stop_signal(num_steps: int) -> Iterator[Callable[[int], int | None]]:
  """Yields a function of the step that returns the signal to stop, or None.

  Raises `Interrupted` at the end if a signal came too late for that.
  """
  if jax.process_count() > 1:  # JAX agrees on one step for all. It takes SIGTERM.
    sync = multihost_utils.reached_preemption_sync_point
    yield lambda step: signal.SIGTERM if sync(step) else None
    return
  if threading.current_thread() is not threading.main_thread():
    yield lambda step: None
    return
  received, before, step = [], {}, num_steps

  def note(number, frame):
    received.append(number)
    signal.signal(number, before[number])  # A second one ends it at once.

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
