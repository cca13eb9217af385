"""The training loop: restore, step, report, evaluate, save."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax.errors import Interrupted
from dpjax.training import checkpoints, losses, metrics, reporting, sharding
from dpjax.training import step as step_lib
from dpjax.training.operations import Utilisation, product_rate
from dpjax.training.profiling import Profiler
from dpjax.training.signals import stop_signal

# What validation is judged by; the lower the better.
BEST_BY = "nats_per_token"


class TrainBatches(Protocol):
  """Batches as a function of the step alone (`dpjax.data.batches`).

  Attributes:
    batch_size: the number of rows in a batch.
    window: the number of tokens in a row.
  """

  batch_size: int
  window: int

  def batch(self, step: int, rows: slice) -> Mapping[str, np.ndarray]:
    """The given rows of the batch of update `step`."""
    ...


class NonFiniteError(RuntimeError):
  """The loss or the gradient of a step was not finite; the message names the step."""


class Callback(Protocol):
  """A function that receives each report: an experiment tracker, or early stopping."""

  def __call__(
    self, step: int, metrics: Mapping[str, float], state: step_lib.TrainState
  ) -> bool | None:
    """Takes a report.

    Args:
      step: the step of the report.
      metrics: as in metrics.jsonl, with the split before the name: "train/loss",
        "valid/nats_per_token".
      state: the newest state, of this step or the next one. The next update donates it.

    Returns:
      True to end the training here as at its last step: it is scored and saved, and the same
      call trains no further (a call with more steps, or without callbacks, does). All
      processes must return the same.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The model, optimizer and settings of an update.

  Attributes:
    model: takes [B, T] tokens.
    optimizer: from `dpjax.training.optimizer`.
    objective: the loss to minimise.
    accumulate_steps: the number of parts of a batch.
    parameters: "replicated" or "sharded".
    capacity: maps a batch to the `capacity` of `dpjax.models.hourglass.Hourglass`, or None.
    seed: the seed of parameters and dropout.
    ema_decay: the decay of an average of the parameters, which is then scored; 0 for none.
    learning_rate: maps an update to the optimizer's learning rate, for reports; None if
      unknown.
  """

  model: nn.Module
  optimizer: optax.GradientTransformation
  objective: losses.Objective = losses.Objective()
  accumulate_steps: int = 1
  parameters: str = "replicated"
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None
  seed: int = 0
  ema_decay: float = 0.0
  learning_rate: optax.Schedule | None = None


@dataclasses.dataclass(frozen=True)
class Durations:
  """The number of updates in total, and between reports, evaluations and checkpoints.

  Attributes:
    num_steps: the total number of updates.
    eval_every_steps: updates between evaluations; the last update is followed by one, too.
    log_every_steps: updates between reports, each of the mean loss since the last.
    median_every_steps: updates between reports of their median loss.
    checkpoint_every_steps: updates between checkpoints; the best by validation and the end
      are saved, too.
  """

  num_steps: int
  eval_every_steps: int
  log_every_steps: int
  median_every_steps: int
  checkpoint_every_steps: int


def fit(
  trainer: Trainer,
  batches: TrainBatches,
  evaluate: Callable[[dict], Mapping[str, float]],
  durations: Durations,
  *,
  workdir: str | Path,
  keep_checkpoints: int = 2,
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

  The state after step n depends only on the seed and the batches before it. So a run that
  was stopped or killed ends like one that never stopped (on the same machine, bit for bit).
  The metrics of a step are read while the next one runs. Except for batches and metrics, a
  step that transfers data to the device, or from an accelerator, raises an error
  (`jax.transfer_guard`). SIGTERM and SIGINT finish the step, save, and raise `Interrupted`.

  Args:
    trainer: the model and the settings of an update.
    batches: the training batches.
    evaluate: maps parameters to scores of the validation split, including "nats_per_token"
      and "perplexity".
    durations: the durations in updates.
    workdir: the run's folder, which exists.
    keep_checkpoints: the number of last checkpoints to keep.
    patience: training ends after this number of evaluations without a new best; 0 means never.
    initial: maps the drawn parameters to the initial ones, if there is no checkpoint; None
      keeps the drawn ones.
    meta: values saved with each checkpoint. If its "validation", the method of scoring,
      differs from the checkpoint's, the search for the best restarts.
    origin: values saved with each checkpoint, which must match on resume: the vocabulary, or
      a hash of the text.
    callbacks: functions of each report, called in order.
    should_stop: called after every update; training also stops at signals. All processes
      must get the same answer.
    profile: START and STOP, to trace updates START + 1 to STOP into `workdir`/profile.
    measure_products: whether to measure the speed of matrix products, for about a second, and
      to report training's share of it.

  Raises:
    NonFiniteError: a loss is not finite. The last checkpoint is from before.
    Interrupted: a signal or `should_stop` stopped training.
    ValueError: the batch does not divide over the devices, no checkpoint is intact, a
      checkpoint has another origin or model, or updates of `profile` lie outside of the run.
    OSError: a file cannot be read or written.
  """
  sharding.check_rows(batches.batch_size, trainer.accumulate_steps)
  mesh = sharding.make_mesh()
  has_average = trainer.ema_decay > 0
  of_state = trainer.model, trainer.optimizer, trainer.seed, mesh, trainer.parameters, has_average
  abstract = step_lib.abstract_state(*of_state)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  train_step = step_lib.jit_train_step(
    trainer.model,
    trainer.optimizer,
    shardings,
    mesh,
    accumulate_steps=trainer.accumulate_steps,
    objective=trainer.objective,
    ema_decay=trainer.ema_decay,
    learning_rate=trainer.learning_rate,
  )
  num_steps, is_over = durations.num_steps, False
  rows = sharding.process_rows(batches.batch_size)
  with (
    checkpoints.Checkpoints(Path(workdir) / "checkpoints", keep_checkpoints) as saved,
    stop_signal() as find_signal,
  ):
    found = saved.restore(abstract, origin)
    none_yet = {"step": 0, BEST_BY: math.inf, "since": 0}
    if found is None:
      state = step_lib.jit_init(*of_state)
      if initial is not None:
        params = jax.device_put(initial(state.params), shardings.params)
        average = jax.tree.map(jnp.copy, params) if has_average else None
        state = dataclasses.replace(state, params=params, average=average)
      best = none_yet
    else:
      state, best = found.state, found.meta["best"]
      ours = (meta or {}).get("validation")
      if found.meta.get("validation", ours) != ours:
        best = none_yet  # By other scores than those to come.

    def is_exhausted() -> bool:
      return 0 < patience <= best.get("since", 0)  # A run of before did not count them.

    start = int(state.step)
    if found is not None and found.meta.get("ended") == num_steps:
      is_over = bool(callbacks) or is_exhausted()

    with (
      reporting.Reporter(workdir, start, num_steps) as reporter,
      Profiler(profile, Path(workdir) / "profile", start, num_steps, reporter.say) as profiler,
    ):
      if found is not None:
        reporter.say(f"Going on from the checkpoint of step {start}.")
      utilisation = None
      if measure_products:
        rate = product_rate(getattr(trainer.model, "dtype", jnp.float32)) * mesh.size
        has_pooling = bool(trainer.objective.boundaries)
        utilisation = Utilisation(trainer.model, abstract.params, batches.window, has_pooling, rate)
        reporter.say(f"The largest matrix products reach {rate / 1e9:,.0f} Gflop/s here.")
      meter = _Meter(
        reporter, batches, durations.log_every_steps, durations.median_every_steps, utilisation
      )
      padded = start * batches.batch_size * batches.window  # for a run of an earlier version
      meter.tokens_seen = (found.meta if found else {}).get("tokens_seen", padded)
      compiled, is_enough = set(), False

      def tell() -> None:
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
          # Else the step before would be timed with the compilation.
          meter.read_pending()
          compiled.add(size)
        # Placing a batch over several processes counts as unasked: outside of the guard.
        placed = sharding.put_batch(batch, mesh)
        profiler.begin(step)
        with jax.transfer_guard("disallow"):
          state, measured = train_step(state, placed, capacity=size)
          meter.read_previous(step + 1, measured, is_timed=not compiles)
        done = step + 1
        profiler.end(done, measured)
        number = find_signal(done)
        stopping = number is not None or should_stop()
        is_due = stopping or done % durations.checkpoint_every_steps == 0
        at_eval = done == num_steps or done % durations.eval_every_steps == 0
        if at_eval or is_due:
          meter.read_pending()
        tell()
        # Decided before the evaluation, so that an ended run has been validated.
        at_end = done == num_steps or is_enough
        if at_end or at_eval:
          meter.read_pending()
          scores = evaluate(state.scored)
          reporter.report(done, "valid", scores)
          is_best = scores[BEST_BY] < best[BEST_BY]
          if is_best:
            best = {"step": done, BEST_BY: scores[BEST_BY], "since": 0}
          else:
            best = {**best, "since": best.get("since", 0) + 1}
          bits = scores.get("bits_per_character")
          reporter.say(
            f"step {done}: nats per token {meter.mean:.4f} in training, "
            f"{scores[BEST_BY]:.4f} in validation; perplexity {scores['perplexity']:.2f}"
            f"{f', bits per character {bits:.4f}' if bits is not None else ''}"
            f"{' (best so far)' if is_best else ''}"
          )
          tell()
          if is_exhausted() and not at_end:
            is_enough = True
            reporter.say(
              f"No evaluation since step {best['step']} was better (train.patience = "
              f"{patience}): the training ends at step {done}."
            )
          at_end |= is_enough
        else:
          is_best = False
        if is_best or at_end or is_due:
          kept = {**(meta or {}), "best": best, "tokens_seen": meter.tokens_seen}
          if is_enough:
            kept["ended"] = num_steps
          saved.save(state, kept, origin=origin, best=is_best)
        if at_end:
          break
        if stopping:
          saved.wait()
          raise Interrupted(done, num_steps, number)


class _Meter:
  """Reads the metrics of a step while the next one runs; reports means and medians.

  The time of a step is measured between the reading of the previous step and its own. After
  an evaluation or a checkpoint, with no step running, it is measured from `start`.
  """

  def __init__(
    self,
    reporter: reporting.Reporter,
    batches: TrainBatches,
    log_every_steps: int,
    median_every: int,
    utilisation: Utilisation | None = None,
  ):
    self._reporter = reporter
    self._log_every_steps, self._median_every = log_every_steps, median_every
    self._utilisation = utilisation
    self._places_each = batches.batch_size * batches.window
    self._pending, self._losses, self._sums = None, [], {}
    self._since, self._seconds, self._num_timed, self._tokens_timed = 0.0, 0.0, 0, 0
    self.tokens_seen = 0  # the targets that counted, since the beginning of the run
    self.mean = math.nan  # of the losses since the report before

  def start(self) -> None:
    """Marks the beginning of a step, which excludes earlier work."""
    if self._pending is None:
      self._since = time.perf_counter()

  def read_previous(
    self, step: int, measured: Mapping[str, jax.Array], is_timed: bool = True
  ) -> None:
    """Takes the pending metrics of step `step`, and reads those of the step before.

    The speed excludes an untimed step, which included compilation.
    """
    previous, self._pending = self._pending, (step, measured, is_timed)
    self._read(previous)

  def read_pending(self) -> None:
    """Waits for the newest step, and so verifies that the state is finite."""
    pending, self._pending = self._pending, None
    self._read(pending)

  def _read(self, pending: tuple[int, Mapping[str, jax.Array], bool] | None) -> None:
    if pending is None:
      return
    step, measured, is_timed = pending
    values = {name: float(value) for name, value in jax.device_get(measured).items()}
    now, tokens = time.perf_counter(), round(values["count"])
    if is_timed:
      self._seconds += now - self._since
      self._num_timed += 1
      self._tokens_timed += tokens
    self._since = now
    self.tokens_seen += tokens
    loss, grad_norm = values.pop("loss"), values.pop("grad_norm")
    rate = values.pop("learning_rate", None)
    for name, value in (("loss", loss), ("grad_norm", grad_norm)):
      if not math.isfinite(value):
        raise NonFiniteError(
          f"Step {step}: expected a finite {name}, got {value}. The checkpoints are from "
          "before it. A lower train.learning_rate, a warm-up or a tighter "
          "train.clip_norm may help, in a new workdir."
        )
    self._losses.append(loss)
    self._sums = metrics.add(self._sums, values)
    self.mean = sum(self._losses) / len(self._losses)
    self._reporter.advance(loss)
    if step % self._log_every_steps == 0:
      boundaries, shares = metrics.boundary_scores(self._sums), {}
      # Of the steps that are timed; not known where there are none.
      seconds = self._seconds or math.nan
      if self._utilisation is not None:  # Padding takes as many operations as tokens.
        places = self._places_each * self._num_timed
        shares = self._utilisation.scores(places / seconds, boundaries)
      self._reporter.report(
        step,
        "train",
        {
          "loss": self.mean,
          # Fewer than usual where the run was taken up in between.
          "mean_over_steps": len(self._losses),
          "grad_norm": grad_norm,
          **({} if rate is None else {"learning_rate": rate}),
          "tokens_seen": self.tokens_seen,
          "tokens_per_second": self._tokens_timed / seconds,
          **shares,
          **boundaries,
        },
      )
      self._losses, self._sums = [], {}
      self._seconds, self._num_timed, self._tokens_timed = 0.0, 0, 0
    if step % self._median_every == 0:
      median, known = self._reporter.median(self._median_every)
      scores = {"median_loss": median, "median_over_steps": known}
      self._reporter.report(step, "train", scores)
