"""Trains one row of a table with one seed, within a time limit if there is one."""

import contextlib
import dataclasses
import math
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dpjax
from dpjax import __version__
from dpjax.analysis import curves
from dpjax.config import ConfigDict
from dpjax.data import batches as batches_lib
from dpjax.errors import Interrupted, UserError
from dpjax.models import build
from dpjax.runs import launch
from dpjax.training import checkpoints, sharding
from dpjax.training.reporting import NonFiniteError
from reproduce import scales

MEASURED = 30  # updates timed to estimate a row's time
SAVE_SECONDS = 0.5  # estimated time to save a checkpoint
LAST_SECONDS = 10.0  # reserved for the last checkpoint and the test split
POINTS = 100  # points of a training curve
AUTHORS = "perplexity_authors_protocol"


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run before it begins: its configuration with its vocabulary, batches and length."""

  config: ConfigDict
  batches: Any
  num_steps: int
  num_saves: int  # after evaluations and in between
  evaluation_updates: float  # updates that take as long as all evaluations

  @classmethod
  def make(cls, config: ConfigDict, folder: Path) -> "Plan":
    """Opens the tokens of a run, and makes them if they are missing."""
    data = dpjax.runs.tokenize_only(config, folder)
    config = build.with_vocabulary(config, data.tokenizer)
    batches = launch.make_batches(config, data)
    train = config.train
    epoch = batches.steps_per_epoch
    num_steps = dpjax.config.steps_in(
      train.num_steps, train.num_epochs, "num", steps_per_epoch=epoch
    )
    every = dpjax.config.steps_in(
      train.eval_every_steps, train.eval_every_epochs, "eval_every", steps_per_epoch=epoch
    )
    evaluations = -(-num_steps // every)
    saves = evaluations + num_steps // config.train.checkpoint_every_steps
    tokens = config.eval.max_tokens or data.counts["valid"]["tokens"]
    window = config.eval.window or config.model.max_length
    tokens *= window / (config.eval.stride or window)
    # Without a backward pass, a token costs a third of what it costs in training.
    updates = evaluations * tokens / (batches.batch_size * batches.window) / 3
    return cls(config, batches, num_steps, saves, updates)

  def compile(self) -> None:
    """Compiles an update into JAX's persistent cache."""
    model = build.build_model(self.config.model)
    trainer = launch.make_trainer(self.config, model, self.num_steps)
    mesh = sharding.make_mesh()
    state, batch = trainer.abstract_state(mesh), self.batches.batch(0)
    size = build.batch_capacity(trainer.objective.boundaries, batch)
    placed = sharding.put_batch(batch, mesh)
    trainer.jit_step(mesh).lower(state, placed, capacity=size).compile()


class Clock:
  """Tells `dpjax.train` to stop (`should_stop`) a run that does not fit into the time left.

  After the first update, which compiles, `MEASURED` updates are timed; then

    expected = seconds so far + median * (updates + evaluations, in updates) + save * saves

  Updates, evaluations and saves are the remaining ones; compiling the evaluation is not counted.

  Args:
    end: when the time is up, by `time.perf_counter`; infinity without a limit.
    plan: the run.
    done: the number of updates that an earlier session made.
    measured: called when the updates are timed and the run fits.
  """

  def __init__(self, end: float, plan: Plan, done: int, measured: Callable[[], None]):
    self.begin, self.facts = time.perf_counter(), {}
    self._end, self._plan, self._measured = end - LAST_SECONDS, plan, measured
    self._to_come, self._times = plan.num_steps - done, []

  def __call__(self) -> bool:
    """Whether to stop; called after every update."""
    now = time.perf_counter()
    if len(self._times) < MEASURED + 2:
      self._times.append(now)
      if len(self._times) == MEASURED + 2:
        update = float(np.median(np.diff(self._times[1:])))
        share = self._to_come / self._plan.num_steps
        updates = self._to_come - len(self._times) + share * self._plan.evaluation_updates
        rest = updates * update + share * self._plan.num_saves * SAVE_SECONDS
        expected = now - self.begin + rest + LAST_SECONDS
        self.facts = {"update_seconds": update, "expected_seconds": expected}
        if now + rest > self._end:
          return True
        self._measured()
    return now > self._end


def train(
  config: ConfigDict,
  folder: Path,
  end: float,
  scores: tuple[str, ...] = (),
  following: Callable[[], Plan | None] = lambda: None,
) -> dict[str, Any]:
  """Trains one run, and returns its entry in the report.

  Args:
    config: the configuration.
    folder: the run's folder.
    end: the deadline; see `Clock`.
    scores: the scores that the report shows.
    following: makes the plan of the next run, whose update is compiled while this one trains.

  Returns:
    "scores" of the test split, "step", "best_step", "parameters", "curve" and, unless the run was
    resumed, "seconds"; or "left_out", the reason. With both "settings", "device", "products",
    "versions" and, if the run was long enough to be timed, "update_seconds" and "expected_seconds".
  """
  threads: list[threading.Thread] = []

  def compile_following() -> None:
    # Useful only with a deadline and the persistent cache: else the run compiles again.
    if end < math.inf and jax.config.values["jax_compilation_cache_dir"]:
      threads.append(threading.Thread(target=_compile, args=(following,)))
      threads[0].start()

  clock: Any = None
  try:
    plan = Plan.make(config, folder)
    saved = checkpoints.find_complete(folder / "checkpoints")
    done = int(saved[0].name) if saved else 0
    clock = Clock(end, plan, done, compile_following)
    run, found = dpjax.runs.train(config, folder, should_stop=clock)
    losses = curves.read_losses(folder)
    found["median_cost"] = curves.last_median(losses, median_every(losses))
    if AUTHORS in scores:
      with contextlib.suppress(UserError):  # if the text is too short for ten rows
        found[AUTHORS] = authors_perplexity(run)
    sizes = [leaf.size for leaf in jax.tree.leaves(run.params)]
    return {
      "scores": found,
      "step": len(losses),
      "best_step": run.step,
      "parameters": sum(sizes),
      **({} if done else {"seconds": time.perf_counter() - clock.begin}),
      **clock.facts,
      **describe(config),
      "curve": curve(folder),
    }
  except Interrupted as error:
    if error.signal is not None:
      raise
    needs = clock.facts.get("expected_seconds")
    reason = f"needs about {needs:.0f} seconds, more than were left; " if needs else "out of time; "
    reason += f"stopped at update {error.step:,} of {error.num_steps:,}"
    print(reason, file=sys.stderr, flush=True)
    return {"left_out": reason, **clock.facts, **describe(config)}
  except (UserError, NonFiniteError, OSError, jax.errors.JaxRuntimeError) as error:
    print(error, file=sys.stderr, flush=True)
    return {"left_out": " ".join(str(error).split())[:500]}
  finally:
    for thread in threads:
      thread.join()
    jax.clear_caches()  # Otherwise a process keeps the programs of all its models.


def _compile(following: Callable[[], Plan | None]) -> None:
  """Compiles the next run's update; an error is only printed, since that run raises it."""
  try:
    if plan := following():
      plan.compile()
  except Exception:
    traceback.print_exc()


def describe(config: ConfigDict) -> dict[str, Any]:
  """The settings, the device, the precision of products and the versions."""
  device = jax.devices()[0]
  products = config.train.matmul_dtype
  if device.platform == "gpu" and products == "float32":
    products = jax.config.values["jax_default_matmul_precision"] or "float32, as TF32"
  versions = {x: sys.modules[x].__version__ for x in ("jax", "flax", "optax")}
  return {
    "settings": scales.settings(config),
    "device": f"{jax.device_count()} {device.device_kind}",
    "products": products,
    "versions": {"dpjax": __version__, **versions},
  }


def median_every(losses: Any) -> int:
  """The updates in a median: 2,000, as in the Extractors' paper, or a fifth of a short run."""
  return max(1, min(2000, len(losses) // 5))


def curve(folder: Path) -> dict[str, Any]:
  """The costs of a run by update: `POINTS` means, and validation, in nats per token."""
  losses, logged = curves.read_losses(folder), curves.read_scores(folder)
  every = max(1, len(losses) // POINTS)
  window = median_every(losses)
  medians = map(float, curves.medians(losses, window))
  parts = (losses[i : i + every] for i in range(0, len(losses), every))

  def rounded(values: Mapping[int, float]) -> dict[str, float]:
    return {str(step): round(value, 4) for step, value in values.items()}

  return {
    "every": every,
    "loss": [round(statistics.fmean(map(float, part)), 4) for part in parts],
    "median_loss": rounded({window * i: x for i, x in enumerate(medians, 1)}),
    "valid": rounded(logged.get("valid/nats_per_token", {})),
  }


def authors_perplexity(run: Any, split: str = "test") -> float:
  """Perplexity of a split by the protocol of the Dispatcher authors' code.

  The text is split into ten rows, and each row into windows that are scored independently. The
  first token of each row is not scored.

  Raises:
    ValueError: the text is too short for ten windows.
  """
  stream = batches_lib.TokenStream(run.data.splits[split])
  text = batches_lib.ContiguousRows(stream, 10, run.config.model.max_length)
  mesh = sharding.make_mesh()
  nats = count = 0.0
  for index in range(text.steps_per_epoch):
    rows = ((0, -text.batch_size % mesh.size), (0, 0))  # empty rows to fill the devices
    batch = {name: np.pad(array, rows) for name, array in text.batch(index).items()}
    sums = run.scorer.step(run.params, sharding.put_batch(batch, mesh), index)
    nats, count = nats + float(sums["nats"]), count + float(sums["count"])
  return math.exp(nats / count)
