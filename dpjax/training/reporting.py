"""Reports a run's scores to the terminal or a log, metrics.jsonl, losses.f32 and TensorBoard."""

import contextlib
import json
import math
import os
import socket
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

LOSSES = "losses.f32"
_COUNT = "mean_over_steps"  # the number of losses in a mean, not plotted as a curve


class NonFiniteError(RuntimeError):
  """A step's loss, gradient or parameters were not finite, or its optimizer's state had nan.

  From `fit`, the message names the step and the newest checkpoint, which precedes it.
  """


class Reporter(contextlib.AbstractContextManager):
  """Writes scores into the run's folder, on the first process only.

  `metrics.jsonl` has a line for each report, {"step": 20, "split": "train", "time": (seconds since
  1970), "loss": ...}. `losses.f32` has the loss of every update, as little-endian float32 (NaN if
  unknown). A run that resumes at `step` first drops later entries; unreadable lines are moved to
  `metrics.jsonl.damaged`. Without a terminal, training prints lines instead of a progress bar.
  """

  def __init__(self, workdir: str | Path, step: int, num_steps: int):
    self._is_first = jax.process_index() == 0
    self._new: list[tuple[int, dict[str, float]]] = []
    self._num_steps = num_steps
    disable = None if self._is_first else True  # None: hidden without a terminal
    self._bar = tqdm(total=num_steps, initial=step, unit="step", desc="training", disable=disable)
    with contextlib.ExitStack() as stack:  # which closes what is open if one of them fails
      stack.callback(self._bar.close)
      if self._is_first:
        path = Path(workdir) / "metrics.jsonl"
        _drop_lines_after(path, step)
        keep = stack.enter_context
        self._losses = keep(_open_losses(Path(workdir) / LOSSES, step))
        self._file = keep(files.open_plain(path, "a", encoding="utf-8"))
        self._events = keep(_EventFile(Path(workdir) / "tensorboard", step + 1))
      self._open = stack.pop_all()

  def __exit__(self, *_) -> None:
    self._open.close()

  def advance(self, loss: float) -> None:
    """Counts one more step."""
    self._bar.update()
    self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    if self._is_first:
      self._losses.write(np.array([loss], "<f4").tobytes())

  def report(self, step: int, split: str, scores: Mapping[str, float]) -> None:
    """Writes a split's scores at a step to the files; `UserError` if their folder is gone."""
    self.check_there()
    curves = {name: x for name, x in scores.items() if name != _COUNT}
    self._new.append((step, {f"{split}/{name}": x for name, x in curves.items()}))
    if not self._is_first:
      return
    line = {"step": step, "split": split, "time": round(time.time(), 3), **metrics.for_json(scores)}
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()
    if self._bar.disable and "loss" in scores:
      speed = scores.get("tokens_per_second", math.nan)
      speed = f", {speed:,.0f} tokens/s" if math.isfinite(speed) else ""
      text = f"step {step:,} of {self._num_steps:,}: loss {scores['loss']:.4f}{speed}"
      print(text, file=sys.stderr, flush=True)
    finite = {f"{split}/{name}": x for name, x in curves.items() if math.isfinite(x)}
    self._events.add(step, finite)

  def check_there(self) -> None:
    """Raises a `UserError` if the run's folder was removed or moved."""
    if self._is_first:
      files.check_there(self._losses, Path(self._losses.name))

  def new_reports(self) -> list[tuple[int, dict[str, float]]]:
    """The reports since the last call, each with its step."""
    new = self._new
    self._new = []
    return new

  def print(self, message: str) -> None:
    """Prints a line above the progress bar."""
    if self._is_first:
      self._bar.write(message)


class _EventFile(contextlib.AbstractContextManager):
  """A new file of curves in TensorBoard's folder of a run, flushed after every event.

  TensorBoard forgets what earlier files have from step `start` on. Its own writer is not used: it
  writes in a thread, and so an error, as of a full disk, would reach the run late or not at all.
  """

  def __init__(self, folder: Path, start: int):
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    messages: Any = event_pb2  # It makes its classes when imported, unseen by type checkers.
    self._event_type = messages.Event
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in the order of their names.
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
    self._records = RecordWriter(files.open_plain(folder / name, "xb"))
    self._write(self._event_type(file_version="brain.Event:2"))
    event = self._event_type(step=start)
    event.session_log.status = event.session_log.START
    self._write(event)

  def __exit__(self, *_) -> None:
    self._records.close()

  def add(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes a point of each curve, by name."""
    event = self._event_type(step=step)
    for name, value in scalars.items():
      event.summary.value.add(tag=name, simple_value=value)
    self._write(event)

  def _write(self, event: Any) -> None:
    event.wall_time = time.time()
    self._records.write(event.SerializeToString())
    self._records.flush()


def _open_losses(path: Path, step: int):
  """Opens the file with the losses of `step` updates, unbuffered so that they survive a kill."""
  file = files.open_plain(path, "r+b" if path.exists() else "w+b", buffering=0)
  count = file.seek(0, os.SEEK_END) // 4
  file.truncate(4 * min(count, step))
  file.seek(0, os.SEEK_END)
  file.write(np.full(max(0, step - count), math.nan, "<f4").tobytes())
  return file


def _drop_lines_after(path: Path, step: int) -> None:
  lines = []
  if path.exists():
    with files.open_plain(path) as file:
      lines = file.read().split(b"\n")
  pairs = [(line + b"\n", _step_of(line)) for line in filter(None, lines)]
  if damaged := [line for line, line_step in pairs if line_step is None]:
    with files.open_plain(path.with_name(path.name + ".damaged"), "ab") as file:
      file.writelines(damaged)
  with files.replacing_file(path) as file:
    file.writelines(line for line, line_step in pairs if line_step in range(step + 1))


def _step_of(line: bytes) -> int | None:
  """The step of a line of `metrics.jsonl`; None for a damaged line."""
  try:
    step = json.loads(line)["step"]
  except (ValueError, LookupError, TypeError):
    return None
  return step if isinstance(step, int) else None


class MetricsReader:
  """Reads the metrics of a step while the next one runs, and reports means.

  A step's time is measured from the reading of the previous step to its own, or, after an
  evaluation or a checkpoint, when no step is running, from `start`.

  Attributes:
    mean: the mean loss since the last report.
    tokens_seen: the number of targets that counted since the run began.
  """

  def __init__(self, reporter: Reporter, log_every: int, tokens_seen: int):
    self._reporter = reporter
    self._log_every = log_every
    self.tokens_seen = tokens_seen
    self.mean = math.nan
    self._start_time = 0.0
    self._pending: tuple[int, Mapping[str, jax.Array], bool] | None = None
    self._clear()

  def _clear(self) -> None:
    self._losses: list[float] = []
    self._sums: dict[str, float] = {}
    self._seconds = 0.0
    self._timed_tokens = 0

  def start(self) -> None:
    """Marks the beginning of a step."""
    if self._pending is None:
      self._start_time = time.perf_counter()

  def read(self, pending: tuple[int, Mapping[str, jax.Array], bool] | None = None) -> None:
    """Reads the pending step and stores the next: its number, metrics, whether it is timed.

    Raises:
      NonFiniteError: the loss or the gradient of the pending step is not finite.
    """
    previous = self._pending
    self._pending = pending
    if previous is None:
      return
    step, metrics_of_step, is_timed = previous
    values = {name: float(value) for name, value in jax.device_get(metrics_of_step).items()}
    now = time.perf_counter()
    tokens = round(values["count"])
    if is_timed:
      self._seconds += now - self._start_time
      self._timed_tokens += tokens
    self._start_time = now
    self.tokens_seen += tokens
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise NonFiniteError(f"Step {step}: expected a finite {name}, got {values[name]}")
    loss = values.pop("loss")
    grad_norm = values.pop("grad_norm")
    rate = {"learning_rate": values.pop("learning_rate")} if "learning_rate" in values else {}
    self._losses.append(loss)
    self._sums = metrics.add(self._sums, values)
    self.mean = sum(self._losses) / len(self._losses)
    self._reporter.advance(loss)
    if step % self._log_every == 0:
      scores = {
        "loss": self.mean,
        _COUNT: len(self._losses),  # fewer after a resume
        "grad_norm": grad_norm,
        **rate,
        "tokens_seen": self.tokens_seen,
        "tokens_per_second": self._timed_tokens / (self._seconds or math.nan),
      }
      self._reporter.report(step, "train", scores | metrics.boundary_scores(self._sums))
      self._clear()
