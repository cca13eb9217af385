"""Traces a few updates for xprof or Perfetto."""

from collections.abc import Callable
from pathlib import Path

import jax

from dpjax.errors import UserError


class Profiler:
  """A context that traces updates START + 1 to STOP; leaving it ends an open trace.

  Args:
    updates: START and STOP; None for no trace.
    folder: the folder for the trace.
    first: the number of updates already made.
    num_steps: the total number of updates.
    say: prints a line.

  Raises:
    ValueError: some of these updates lie outside of the run.
  """

  def __init__(
    self,
    updates: tuple[int, int] | None,
    folder: Path,
    first: int,
    num_steps: int,
    say: Callable[[str], None],
  ):
    self._start, self._stop = updates or (-1, -1)
    self._folder, self._say, self._is_tracing = folder, say, False
    if updates is not None and not first <= self._start < self._stop <= num_steps:
      raise UserError(
        f"profile: expected START:STOP with {first} <= START < STOP <= {num_steps}, the updates "
        f"that are to come, got {self._start}:{self._stop}"
      )

  def __enter__(self) -> "Profiler":
    return self

  def __exit__(self, *_) -> None:
    if self._is_tracing:
      self._end()

  def begin(self, done: int) -> None:
    """Marks the beginning of the update after `done` updates."""
    if done == self._start:
      jax.profiler.start_trace(self._folder)
      self._is_tracing = True

  def end(self, done: int, result) -> None:
    """Marks the end of update `done`, which returns the arrays in `result`."""
    if self._is_tracing and done == self._stop:
      jax.block_until_ready(result)
      self._end()

  def _end(self) -> None:
    self._is_tracing = False
    jax.profiler.stop_trace()
    self._say(
      f"A trace is in {self._folder}: open it with xprof --logdir={self._folder}, or its "
      "trace.json.gz at https://ui.perfetto.dev."
    )
