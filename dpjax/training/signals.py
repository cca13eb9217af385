"""Signals that ask a run to stop."""

import contextlib
import signal
import threading

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_signal():
  """Yields a function of the step that returns the signal to stop, or None."""
  if jax.process_count() > 1:
    # All processes have to stop at one step; JAX agrees on it for them. It takes SIGTERM.
    def agreed(step: int) -> int | None:
      is_asked = multihost_utils.reached_preemption_sync_point(step)
      return signal.SIGTERM if is_asked else None

    yield agreed
    return
  if threading.current_thread() is not threading.main_thread():
    yield lambda step: None
    return
  asked = []

  def ask(number, frame):
    asked.append(number)
    signal.signal(number, before[number])  # A second one ends it at once.

  numbers = (signal.SIGTERM, signal.SIGINT)
  before = {number: signal.signal(number, ask) for number in numbers}
  try:
    yield lambda step: asked[0] if asked else None
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
