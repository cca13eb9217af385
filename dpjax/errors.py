"""Errors that users can correct, interruptions, and the exit of scripts."""

import contextlib
import difflib
import errno
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any


class UserError(ValueError):
  """A wrong setting, file or flag, which the user can correct: `setting: expected ..., got ...`.

  The scripts print it without a traceback; other exceptions may be bugs in dpjax and keep it.
  """


def unknown(key: str, names: Iterable[str], got: Any, note: str = "") -> UserError:
  """The error for a value that is not in `names`; it suggests a close match, if any."""
  names = list(names)
  near = nearest(str(got), names)
  hint = f"; did you mean {near}?" if near else ""
  choices = ", ".join(name or repr(name) for name in names)
  return UserError(f"{key}: expected one of {choices}, got {got or repr(got)}{hint}{note}")


def nearest(got: str, names: Iterable[str]) -> str | None:
  """The name that is most similar, if any is similar at all."""
  return next(iter(difflib.get_close_matches(got, list(names), n=1)), None)


def unknown_setting(key: str, names: Iterable[str], owner: str = "") -> UserError:
  """The error for a setting that does not exist; it names the nearest ones that do.

  These are up to three whose initials contain its letters in order, as `learning_rate` does for
  `lr`, or else the most similar name.
  """

  def abbreviates(name: str) -> bool:
    initials = iter([word[:1] for word in name.rpartition(".")[2].split("_")])
    return all(letter in initials for letter in key.rpartition(".")[2])

  names = list(names)
  near = difflib.get_close_matches(key, filter(abbreviates, names), n=3, cutoff=0.0)
  near = near or difflib.get_close_matches(key, names, n=1, cutoff=0.0)
  verb = "are" if len(near) > 1 else "is"
  hint = f"; the nearest known {verb} {', '.join(near)}" if near else ""
  expected = f"a setting of {owner}" if owner else "a known setting"
  return UserError(f"{key}: expected {expected}, got an unknown one{hint}")


def not_writable(key: str, folder: Any, error: Any) -> UserError:
  """The error for a folder that cannot be written."""
  reason = getattr(error, "strerror", None) or error
  return UserError(f"{key}: expected a folder that can be written, got {folder} ({reason})")


# What errors say where another process does not answer: of Gloo, which joins CPUs, NCCL, GPUs, and
# JAX's coordination service.
_LOST = re.compile("Gloo|NCCL|BarrierError|heartbeat timeout|[Cc]oordination service")


def is_lost_process(error: BaseException | None) -> bool:
  """Whether an error says that another process of a distributed run does not answer."""
  import jax

  is_of_jax = isinstance(error, jax.errors.JaxRuntimeError) and jax.distributed.is_initialized()
  return is_of_jax and _LOST.search(str(error)) is not None


class Interrupted(Exception):  # noqa: N818
  """A signal, or `should_stop` (signal None), stopped the run after it saved a checkpoint."""

  def __init__(self, step: int, num_steps: int, signal: int | None = None):
    super().__init__(f"Stopped at step {step} of {num_steps}, which is saved.")
    self.step, self.num_steps, self.signal = step, num_steps, signal


@contextlib.contextmanager
def exit_on_user_error(flags: Collection[str] = ()) -> Iterator[None]:
  """Turns errors that users can correct into one message and exit status 1.

  These are a `UserError`, an `OSError` that names a file, a full disk, and running out of memory.
  The environment variable DPJAX_TRACEBACK keeps their traceback. `Interrupted` exits with 128 + its
  signal, so that a scheduler does not consider the run complete, and Ctrl-C with 130. A message
  that begins with one of `flags` gets two leading dashes.
  """
  try:
    yield
  except Interrupted as error:
    import jax

    if jax.process_index() == 0:
      print(f"{error} The same command resumes the run.", flush=True)
    sys.exit(1 if error.signal is None else 128 + error.signal)
  except KeyboardInterrupt:
    sys.stdout.flush()
    print("\nInterrupted", file=sys.stderr, flush=True)
    os._exit(130)  # XLA's threads may crash when Python exits normally.
  except Exception as error:
    message = _message(error)
    if message is None or os.environ.get("DPJAX_TRACEBACK"):
      raise
    # A path may have line breaks, or control a terminal.
    message = re.sub(r"[\x00-\x1f\x7f]", lambda match: repr(match[0])[1:-1], message)
    sys.exit(f"--{message}" if message.partition(":")[0] in flags else message)


def _message(error: Exception) -> str | None:
  """The message for users; None for an error that may be a bug."""
  if isinstance(error, UserError):
    return str(error)
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: expected to read or write it, got: {error.strerror}"
  if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
    return f"disk: expected room to write, got: {error.strerror}"
  is_full = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
  if not is_full and not isinstance(error, MemoryError):
    return None
  (reason, *_) = str(error).splitlines() or [type(error).__name__]
  return (
    f"Out of memory: {reason[:200]} (try a smaller train.batch_size, eval.batch_size, "
    "--num_samples or model, more train.grad_accum_steps, or model.remat)"
  )
