"""What the scripts share: flags, and errors without a traceback."""

import contextlib
import importlib.util
import logging as std_logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from dpjax import config as config_lib
from dpjax.errors import UserError, exit_on_user_error

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, for a run of several processes"
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "how many there are", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "which one this is, from 0", lower_bound=0
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "several processes, found by themselves (Slurm, TPU pods)"
)
_JOIN_SECONDS = flags.DEFINE_integer(
  "join_seconds", 300, "how long to wait for the other processes", lower_bound=1
)
_CACHE = flags.DEFINE_string(
  "compilation_cache", None, "a folder for what was compiled, of up to 2 GiB; empty: none; "
  "by default JAX_COMPILATION_CACHE_DIR, or ~/.cache/dpjax/compiled, and on CPU none"
)
_CACHE_BYTES = 2**31


def define_config(required: bool) -> flags.FlagHolder:
  """The flag --config=FILE[:VARIANT], after which --config.KEY=VALUE changes a setting."""
  holder = config_flags.DEFINE_config_file(
    "config", None, "a file of configs/, with :variant where it has some"
  )
  if required:
    flags.mark_flag_as_required("config")
  return holder


def start(main: Callable[[Sequence[str]], None]) -> None:
  """Parses the flags, joins the other processes, and runs `main`.

  What a user can set right ends the script with a message and status 1.
  """
  app.run(lambda argv: _run(main, argv), flags_parser=_parse)


def _parse(argv: Sequence[str]) -> Sequence[str]:
  try:
    _check_config_file(argv)
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(f"flags: expected --name=value, got {' '.join(rest[1:])}")
    # An error within the file shows when the configuration is first looked at.
    config = flags.FLAGS.config if "config" in flags.FLAGS else None
    if config is not None and not isinstance(config, config_lib.ConfigDict):
      if type(config).__module__.startswith("ml_collections"):
        config.is_locked  # noqa: B018  (raises what went wrong within the file)
      raise TypeError(f"get_config() gave a value of type {type(config).__name__}")
    return rest
  except UserError as error:
    sys.exit(str(error))
  except flags.Error as error:
    # An error within the configuration's file comes as the text of a traceback.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    in_file = any(line.startswith("Traceback") for line in lines)
    sys.exit(f"{lines[0]} {lines[-1]}" if in_file else " ".join(lines))
  except (AttributeError, KeyError) as error:
    sys.exit(str(_unknown_setting(argv) or _in_config_file(error)))
  # The file of the configuration is a program of the user's, with errors of any type.
  except Exception as error:
    if os.environ.get("DPJAX_TRACEBACK"):
      raise
    sys.exit(_in_config_file(error))


def _check_config_file(argv: Sequence[str]) -> None:
  for argument, after in zip(argv, [*argv[1:], ""], strict=True):
    name, is_joined, value = argument.partition("=")
    path = Path((value if is_joined else after).partition(":")[0])
    if name in ("-config", "--config") and path.exists() and not path.is_file():
      raise UserError(f"--config: expected a Python file, got {path}")


def _in_config_file(error: Exception) -> str:
  """The message of what went wrong while the configuration's file was read and run."""
  before = "Configuration is not available because of an earlier failure to load: "
  text = " ".join(str(error).removeprefix(before).split())
  frame = traceback.extract_tb(error.__traceback__)[-1]
  places = [value for value in sys.argv if Path(frame.filename).name in value]
  where = f" ({frame.filename}, line {frame.lineno})" if places else ""
  return (
    "--config: expected a Python file whose get_config() gives a ConfigDict, got "
    f"{type(error).__name__}: {text}{where}"
  )


def _unknown_setting(argv: Sequence[str]) -> UserError | None:
  """What is wrong with the first --config.KEY that is not in the configuration."""
  known = config_lib.known_keys()
  for argument in argv:
    name = argument.lstrip("-").partition("=")[0]
    for prefix in ("config.", "noconfig."):
      if name.startswith(prefix) and name.removeprefix(prefix) not in known:
        return config_lib.unknown_key(name.removeprefix(prefix), known)
  return None


def _run(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
  # Orbax tells its every move at INFO.
  logging.set_verbosity(logging.WARNING)
  std_logging.getLogger("jax").setLevel(std_logging.WARNING)
  try:
    with exit_on_user_error(), exit_out_of_memory():
      _join_processes()
      check_platform()
      _set_compilation_cache()
      main(argv)
  except KeyboardInterrupt:
    sys.stdout.flush()
    print("\nInterrupted", file=sys.stderr, flush=True)
    # Threads of XLA that compile or compute would not outlive Python's own end unharmed.
    os._exit(130)


@contextlib.contextmanager
def exit_out_of_memory() -> Iterator[None]:
  """Ends the program with one message and status 1 where the memory is not enough."""
  try:
    yield
  except (MemoryError, RuntimeError) as error:
    is_it = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    if not is_it or os.environ.get("DPJAX_TRACEBACK"):
      raise
    (what, *_) = str(error).splitlines() or [type(error).__name__]
    sys.exit(
      f"memory: expected enough of it, got: {what[:200]} Less is needed with a smaller "
      "train.batch_size, more train.accumulate_steps or model.remat in training; with a "
      "smaller eval.batch_size, or --num_samples, afterwards; and with a smaller model"
    )


def check_platform() -> None:
  """Starts JAX's backend.

  Raises:
    ValueError: there is none of the platform that is asked for.
  """
  import jax

  try:
    jax.default_backend()
  except (AssertionError, RuntimeError) as error:  # The former: there is no CUDA.
    name = os.environ.get("JAX_PLATFORMS", "")
    raise UserError(
      f"JAX_PLATFORMS: expected a platform that JAX finds here, got {name!r} "
      f"({' '.join(str(error).split()) or 'which is none'})"
    ) from error


def _join_processes() -> None:
  given = {"coordinator": _COORDINATOR.value, "num_processes": _NUM_PROCESSES.value,
           "process_id": _PROCESS_ID.value}
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == 3 and not _DISTRIBUTED.value:
    return
  if missing and not _DISTRIBUTED.value:
    raise UserError(
      "--coordinator, --num_processes, --process_id: expected all three, or "
      f"--distributed, got no {', no '.join(missing)}"
    )
  host, _, port = (_COORDINATOR.value or "host:1").rpartition(":")
  if not (host and port.isdecimal() and 1 <= int(port[:6]) < 2**16):
    raise UserError(f"--coordinator: expected host:port, got {_COORDINATOR.value}")
  if not missing and given["process_id"] >= given["num_processes"]:
    raise UserError(f"--process_id: expected 0 to {given['num_processes'] - 1} of "
                    f"--num_processes={given['num_processes']}, got {given['process_id']}")
  import jax

  seconds = _JOIN_SECONDS.value
  known = [f"--{name}={value}" for name, value in given.items() if value is not None]
  shown = " ".join(known) or "--distributed"
  try:
    with _time_limit(seconds, f"{shown}: expected all processes to meet "
                     f"within {seconds} s (--join_seconds), got no answer of some"):
      jax.distributed.initialize(
        _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value,
        # At its own limit, JAX aborts the process (signal 6).
        initialization_timeout=seconds + 60,
      )
  except (KeyError, RuntimeError, ValueError) as error:
    expected = "process 0 to be able to listen there"
    if missing:
      expected = "a scheduler that JAX knows, as Slurm, Open MPI or a TPU pod's"
    raise UserError(f"{shown}: expected {expected}, got: {error}") from error
  check_platform()
  if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)


@contextlib.contextmanager
def _time_limit(seconds: float, message: str) -> Iterator[None]:
  """Ends the process with a message and status 1 where the work takes longer."""

  def end() -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # What waits in C++ hears of nothing else.

  timer = threading.Timer(seconds, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _set_compilation_cache() -> None:
  """Has JAX keep what it compiles in a folder, where a later start finds it."""
  import jax

  if _CACHE.value == "":
    jax.config.update("jax_enable_compilation_cache", False)
    return
  folder = _CACHE.value
  if folder is None:
    # Code for a CPU is not checked well when it is read: with some processors each program
    # is called one of another machine, on standard error, and a folder that different
    # machines share has code that not all of them can run (jax-ml/jax#38445).
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() == "cpu":
      return
    folder = _cache_home() / "dpjax" / "compiled"
  try:
    folder = Path(folder).expanduser().absolute()
    # What lies there is run: it is for nobody else to write.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except (OSError, RuntimeError) as error:  # The latter: of a user without a home.
    print(
      f"compilation_cache: expected a folder that can be written, got {folder} "
      f"({getattr(error, 'strerror', None) or error}); what is compiled is not kept",
      file=sys.stderr,
    )
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  is_unlimited = jax.config.values["jax_compilation_cache_max_size"] == -1
  # JAX locks a limited folder by a package that it does not itself bring.
  if is_unlimited and importlib.util.find_spec("filelock"):
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)


def _cache_home() -> Path:
  given = Path(os.environ.get("XDG_CACHE_HOME", ""))
  return given if given.is_absolute() else Path("~/.cache")
