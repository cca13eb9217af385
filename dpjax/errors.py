"""Errors that the user of dpjax can correct, and how a script ends with one."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(ValueError):
  """A setting, a file or a flag is wrong; the message is for the person who gave it.

  The message reads `setting: expected ..., got ...`. The scripts print it without a
  traceback and exit with status 1. Every other exception, a plain `ValueError` from JAX
  among them, keeps its traceback: it may be a defect of dpjax.
  """


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
  """Ends the program with one message and status 1 where the user can correct the error.

  That is a `UserError`, and an `OSError` that names a file. With the environment variable
  DPJAX_TRACEBACK set, both keep their traceback, too.
  """
  try:
    yield
  except (UserError, OSError) as error:
    file = getattr(error, "filename", None)
    if os.environ.get("DPJAX_TRACEBACK") or (isinstance(error, OSError) and file is None):
      raise
    if isinstance(error, OSError):
      sys.exit(f"{file}: expected to read and write it, got: {error.strerror}")
    sys.exit(str(error))
