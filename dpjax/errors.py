"""Errors that the user of dpjax can correct, interruptions, and how a script ends."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator


class UserError(ValueError):
  """A setting, a file or a flag is wrong; the message is for the person who gave it.

  The message reads `setting: expected ..., got ...`. The scripts print it without a
  traceback and exit with status 1, and so they do with an `OSError` that names a file.
  Every other exception, a plain `ValueError` from JAX among them, keeps its traceback: it
  may be a defect of dpjax.
  """


class Interrupted(Exception):  # noqa: N818
  """The run was asked to stop, and has saved.

  Args:
    step: updates made.
    num_steps: updates of the whole run.
    signal: the number of the signal that asked; None where `should_stop` did.
  """

  def __init__(self, step: int, num_steps: int, signal: int | None = None):
    super().__init__(f"Stopped at step {step} of {num_steps}, which is saved.")
    self.step, self.num_steps, self.signal = step, num_steps, signal


@contextlib.contextmanager
def exit_on_user_error(flags: Collection[str] = ()) -> Iterator[None]:
  """Ends the program with one message and status 1 where the user can correct the error.

  That is a `UserError`, and an `OSError` that names a file. With the environment variable
  DPJAX_TRACEBACK set, both keep their traceback, too. `Interrupted` ends it as its signal
  would have, with status 128 + its number, so that what waits for the run does not take
  it for complete.

  Args:
    flags: names that get their two dashes where the message of a `UserError` begins so.
  """
  try:
    yield
  except Interrupted as error:
    import jax

    if jax.process_index() == 0:
      print(f"{error} The same command goes on from there.", flush=True)
    sys.exit(1 if error.signal is None else 128 + error.signal)
  except (UserError, OSError) as error:
    file = getattr(error, "filename", None)
    if os.environ.get("DPJAX_TRACEBACK") or (isinstance(error, OSError) and file is None):
      raise
    if isinstance(error, OSError):
      sys.exit(f"{file}: expected to read or write it, got: {error.strerror}")
    is_flag = str(error).partition(":")[0] in flags
    sys.exit(f"--{error}" if is_flag else str(error))
