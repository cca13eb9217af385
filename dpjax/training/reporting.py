"""Reports a run's scores to the terminal or a log, metrics.jsonl, losses.f32 and TensorBoard."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.training import metrics
from dpjax.training.profiling import Utilisation

LOSSES = "losses.f32"
# Over how many losses a mean or median is: of use beside it, and no curve.
_NO_CURVES = ("mean_over_steps", "median_over_steps")


class NonFiniteError(RuntimeError):
  """The loss or the gradient of a step was not finite; the message names the step."""


class Reporter(contextlib.AbstractContextManager):
  """Writes scores into the run's folder, on the first process only.

  `metrics.jsonl` has a line for each report, {"step": 20, "split": "train", "time": (seconds since
  1970), "loss": ...}. `losses.f32` has the loss of every update, as little-endian float32 (NaN if
  unknown). A run that resumes at `step` first drops later ones; lines that cannot be read move to
  `metrics.jsonl.damaged`. Without a terminal, reports of training are lines, not a progress bar.
  """

  def __init__(self, workdir: str | Path, step: int, num_steps: int):
    self._is_first, self._new, self._num_steps = jax.process_index() == 0, [], num_steps
    hidden = None if self._is_first else True  # None: hidden where there is no terminal
    self._bar = tqdm(total=num_steps, initial=step, unit="step", desc="training", disable=hidden)
    if self._is_first:
      path = Path(workdir) / "metrics.jsonl"
      _drop_lines_after(path, step)
      self._losses = _open_losses(Path(workdir) / LOSSES, step)
      self._file = files.open_plain(path, "a", encoding="utf-8")
      self._tensorboard = _import_writer()(str(Path(workdir) / "tensorboard"), purge_step=step + 1)

  def __exit__(self, *_) -> None:
    self._bar.close()
    if self._is_first:
      self._file.close()
      self._losses.close()
      self._tensorboard.close()

  def advance(self, loss: float) -> None:
    """Counts one more step."""
    self._bar.update()
    self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    if self._is_first:
      self._losses.write(np.array([loss], "<f4").tobytes())

  def median(self, num_steps: int) -> tuple[float, int]:
    """The median of the known losses of the last steps, and their number."""
    if not self._is_first:
      return math.nan, 0
    self._losses.seek(-4 * num_steps, os.SEEK_END)
    losses = np.frombuffer(self._losses.read(), "<f4").astype(np.float64)
    known = losses[~np.isnan(losses)]
    return float(np.median(known)), len(known)

  def report(self, step: int, split: str, scores: Mapping[str, float]) -> None:
    """Writes scores of a split at a step to the files; a `UserError` if their folder is gone."""
    self.check_there()
    curves = {name: x for name, x in scores.items() if name not in _NO_CURVES}
    self._new.append((step, {f"{split}/{name}": x for name, x in curves.items()}))
    if not self._is_first:
      return
    line = {"step": step, "split": split, "time": round(time.time(), 3), **metrics.for_json(scores)}
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()
    if self._bar.disable and "loss" in scores:
      speed = scores.get("tokens_per_second", math.nan)
      shown = f", {speed:,.0f} tokens/s" if math.isfinite(speed) else ""
      loss = f"loss {scores['loss']:.4f}{shown}"
      print(f"step {step:,} of {self._num_steps:,}: {loss}", file=sys.stderr, flush=True)
    for name, value in curves.items():
      if math.isfinite(value):
        self._tensorboard.add_scalar(f"{split}/{name}", value, step)

  def check_there(self) -> None:
    """A `UserError` if the run's folder was removed or moved."""
    if self._is_first:
      files.check_there(self._losses, Path(self._losses.name))

  def new_reports(self) -> list[tuple[int, dict[str, float]]]:
    """The reports since the last call, each with its step."""
    new, self._new = self._new, []
    return new

  def print(self, message: str) -> None:
    """Prints a line above the progress bar."""
    if self._is_first:
      self._bar.write(message)


def _import_writer():
  """The `SummaryWriter` of tensorboardX, without PyTorch, which it imports and does not need."""
  modules: dict[str, Any] = sys.modules
  is_there = "torch" in modules
  modules.setdefault("torch", None)  # An import then says that there is none.
  try:
    from tensorboardX import SummaryWriter

    return SummaryWriter
  finally:
    if not is_there:
      del modules["torch"]


def _open_losses(path: Path, step: int):
  """The file with the losses of `step` updates, unbuffered: they outlive a kill."""
  file = files.open_plain(path, "r+b" if path.exists() else "w+b", buffering=0)
  known = file.seek(0, os.SEEK_END) // 4
  file.truncate(4 * min(known, step))
  file.seek(0, os.SEEK_END)
  file.write(np.full(max(0, step - known), math.nan, "<f4").tobytes())
  return file


def _drop_lines_after(path: Path, step: int) -> None:
  lines = []
  if path.exists():
    with files.open_plain(path) as file:
      lines = file.read().split(b"\n")
  known = [(line + b"\n", _step_of(line)) for line in filter(None, lines)]
  if damaged := [line for line, found in known if found is None]:
    with files.open_plain(path.with_name(path.name + ".damaged"), "ab") as file:
      file.writelines(damaged)
  kept = [line for line, found in known if found is not None and found <= step]
  with files.replacing_file(path) as file:
    file.writelines(kept)


def _step_of(line: bytes) -> int | None:
  """The step of a line of `metrics.jsonl`; None for a damaged line."""
  try:
    step = json.loads(line)["step"]
  except (ValueError, LookupError, TypeError):
    return None
  return step if isinstance(step, int) else None


@dataclasses.dataclass
class Meter:
  """Reads the metrics of a step while the next one runs; reports means and medians.

  The time of a step is that between the readings of the previous step and its own, or, after an
  evaluation or a checkpoint, with no step running, that since `start`.
  """

  reporter: Reporter
  log_every: int
  median_every: int
  places_each: int  # of a batch, with padding
  utilisation: Utilisation | None
  tokens_seen: int  # the targets that counted, since the beginning of the run
  mean: float = math.nan  # of the losses since the report before
  _pending: tuple[int, Mapping[str, jax.Array], bool] | None = None
  _since: float = 0.0

  def __post_init__(self):
    self._losses, self._sums = [], {}
    self._seconds, self._num_timed, self._tokens_timed = 0.0, 0, 0

  def start(self) -> None:
    """Marks the beginning of a step."""
    if self._pending is None:
      self._since = time.perf_counter()

  def read(self, pending: tuple[int, Mapping[str, jax.Array], bool] | None = None) -> None:
    """Reads the step taken before, and takes another: number, metrics, whether it is timed.

    Raises:
      NonFiniteError: the loss or the gradient of the step before is not finite.
    """
    previous, self._pending = self._pending, pending
    if previous is None:
      return
    step, measured, is_timed = previous
    values = {name: float(value) for name, value in jax.device_get(measured).items()}
    now, tokens = time.perf_counter(), round(values["count"])
    if is_timed:
      self._seconds += now - self._since
      self._num_timed += 1
      self._tokens_timed += tokens
    self._since = now
    self.tokens_seen += tokens
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise NonFiniteError(
          f"Step {step}: expected a finite {name}, got {values[name]}. The checkpoints are from "
          "before it. A lower train.learning_rate, a warm-up or a tighter "
          "train.grad_clip_norm may help, in a new workdir."
        )
    loss, grad_norm = values.pop("loss"), values.pop("grad_norm")
    rate = {"learning_rate": values.pop("learning_rate")} if "learning_rate" in values else {}
    self._losses.append(loss)
    self._sums = metrics.add(self._sums, values)
    self.mean = sum(self._losses) / len(self._losses)
    self.reporter.advance(loss)
    if step % self.log_every == 0:
      scores = {
        "loss": self.mean,
        "mean_over_steps": len(self._losses),  # Fewer than usual after a resume.
        "grad_norm": grad_norm,
        **rate,
        "tokens_seen": self.tokens_seen,
        "tokens_per_second": self._tokens_timed / (self._seconds or math.nan),
      }
      boundaries = metrics.boundary_scores(self._sums)
      if self.utilisation is not None:  # Padding takes as many operations as tokens.
        speed = self.places_each * self._num_timed / (self._seconds or math.nan)
        scores |= self.utilisation.scores(speed, boundaries)
      self.reporter.report(step, "train", scores | boundaries)
      self.__post_init__()
    if step % self.median_every == 0:
      median, known = self.reporter.median(self.median_every)
      self.reporter.report(step, "train", {"median_loss": median, "median_over_steps": known})
