"""Joins the processes of a run, starts JAX, and keeps what it compiles."""

import contextlib
import os
import re
import socket
import sys
import tempfile
import threading
import traceback
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from dpjax import files
from dpjax.errors import UserError, is_lost_process, not_writable

_MAX_JOIN_SECONDS = 10**6
# The flags in which the processes of a run may differ, and the settings.
_OWN = ("config", "coordinator", "process_id", "join_seconds", "compilation_cache", "flagfile")


def check_platform() -> None:
  """Starts JAX's backend; `UserError` if the requested platform has none."""
  import jax

  # JAX sees no TPU; libtpu, where it is installed to compile, would complain.
  if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
    from dpjax.analysis.devices import NO_TPU

    os.environ.update(NO_TPU | os.environ)
  try:
    jax.default_backend()
  except (AssertionError, RuntimeError) as error:  # The former: there is no CUDA.
    name = os.environ.get("JAX_PLATFORMS")
    if not name:
      raise
    raise UserError(
      f"JAX_PLATFORMS: expected a platform that JAX finds here, got {name!r} "
      f"({' '.join(str(error).split()) or 'which is none'})"
    ) from error


def join(options: Namespace) -> None:
  """Joins the other processes that the flags of a command name, if any."""
  flags = {
    "--coordinator": options.coordinator,
    "--num_processes": options.num_processes,
    "--process_id": options.process_id,
  }
  given = {flag: value for flag, value in flags.items() if value is not None}
  if not given and not options.distributed:
    return
  missing = [flag.removeprefix("--") for flag in flags if flag not in given]
  if missing and not options.distributed:
    expected = f"{', '.join(flags)}: expected all three, or --distributed"
    raise UserError(f"{expected}, got no {', no '.join(missing)}")
  address = options.coordinator
  if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
    raise UserError(f"--coordinator: expected host:port, got {address}")
  if not missing and not 0 <= options.process_id < options.num_processes:
    expected = f"0 to {options.num_processes - 1} of --num_processes={options.num_processes}"
    raise UserError(f"--process_id: expected {expected}, got {options.process_id}")
  if not 1 <= options.join_seconds <= _MAX_JOIN_SECONDS:
    expected = f"1 to {_MAX_JOIN_SECONDS:,} seconds"
    raise UserError(f"--join_seconds: expected {expected}, got {options.join_seconds}")
  subject = " ".join(f"{flag}={value}" for flag, value in given.items()) or "--distributed"
  _initialize(options, subject, has_scheduler=bool(missing))
  check_platform()
  import jax

  if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)
  _check_same_flags(options)


def _check_same_flags(options: Namespace) -> None:
  """Raises a `UserError` in all processes unless their command lines ask for the same.

  The settings are compared by those that read them.
  """
  from dpjax.runs import processes

  values = {}
  for name, value in vars(options).items():
    if name not in _OWN:
      is_folder = name in ("run", "workdir") and value and not files.refusal(value)
      values[f"--{name}"] = os.path.realpath(value) if is_folder else str(value)
  processes.check_same(values)


@contextlib.contextmanager
def ending_with_others() -> Iterator[None]:
  """Ends this process at once, with one line, if another process of its run does not answer.

  JAX would wait for that process at the exit, and then print what its threads saw.
  """
  try:
    yield
  except RuntimeError as error:
    if not is_lost_process(error):
      raise
    if os.environ.get("DPJAX_TRACEBACK"):
      traceback.print_exc()
    sys.stdout.flush()
    reason = str(error).splitlines()[0][:200]
    # What is being saved in the background stays incomplete, as after a kill.
    _end_at_once(
      "processes: expected all to go on, but another one has ended or cannot be reached, got: "
      f"{reason}. Start all of them again; training resumes."
    )


def _end_at_once(message: str) -> NoReturn:
  """Prints a message and ends the process, though threads wait in C++, which react to nothing."""
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def _initialize(options: Namespace, subject: str, has_scheduler: bool) -> None:
  """Starts `jax.distributed`; ends the process if the others do not come in time.

  `subject` is what messages begin with; `has_scheduler`: JAX asks one for what flags do not say.
  """
  import jax

  address = options.coordinator
  seconds = options.join_seconds

  def give_up() -> None:
    expected = f"all processes to meet within {seconds} s (--join_seconds)"
    _end_at_once(f"{subject}: expected {expected}, but some did not answer")

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    # If JAX cannot listen, it may crash (signal 11).
    if not has_scheduler and options.process_id == 0:
      socket.create_server(("", int(address.rpartition(":")[2]))).close()
    # At its own limit, JAX aborts the process (signal 6).
    jax.distributed.initialize(
      address,
      options.num_processes,
      options.process_id,
      initialization_timeout=seconds + 60,
      # A process that gives no sign of life for so long is taken to have ended.
      heartbeat_timeout_seconds=25,
    )
  except (KeyError, OSError, OverflowError, RuntimeError, ValueError) as error:
    expected = "process 0 to be able to listen there"
    if has_scheduler:
      expected = "a scheduler that JAX knows, such as Slurm, Open MPI or a TPU pod's"
    raise UserError(f"{subject}: expected {expected}, got: {error}") from error
  finally:
    timer.cancel()


def set_compilation_cache(folder: str | Path | None) -> None:
  """Keeps compiled programs in a folder; "": nowhere; None: the default one."""
  import jax

  if folder is None:
    # CPU code may come from another machine, and crash (jax-ml/jax#38445).
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() == "cpu":
      return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dpjax", "compiled")
  if folder:
    files.check_local("--compilation_cache", folder)
  try:
    if folder:
      folder = Path(folder).expanduser().absolute()
      # Files there are executed: nobody else may write them.
      folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=folder).close()
  except (OSError, RuntimeError) as error:  # The latter: the user has no home.
    message = not_writable("compilation_cache", folder, error)
    print(f"{message}; what is compiled is not kept", file=sys.stderr)
    folder = ""
  if not folder:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  if jax.config.values["jax_compilation_cache_max_size"] == -1:
    jax.config.update("jax_compilation_cache_max_size", 2**31)
