"""What the scripts share: flags, and errors without a traceback."""

import importlib.util
import logging as std_logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from dpjax import config as config_lib
from dpjax.errors import UserError, exit_on_user_error

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, for a run of several processes"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many there are")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "which one this is, from 0")
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "several processes, found by themselves (Slurm, TPU pods)"
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
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(f"flags: expected --name=value, got {' '.join(rest[1:])}")
    # An error within the file shows when the configuration is first looked at.
    config = flags.FLAGS.config if "config" in flags.FLAGS else None
    if config is not None and not isinstance(config, config_lib.ConfigDict):
      if type(config).__module__.startswith("ml_collections"):
        config.is_locked  # noqa: B018  (raises what went wrong within the file)
      raise UserError("expected a file whose get_config() gives a ConfigDict")
    return rest
  except flags.Error as error:
    # An error within the configuration's file comes as the text of a traceback.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    in_file = any(line.startswith("Traceback") for line in lines)
    sys.exit(f"{lines[0]} {lines[-1]}" if in_file else " ".join(lines))
  except (AttributeError, KeyError) as error:
    sys.exit(str(_unknown_setting(argv) or f"--config: {error}"))
  except (ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
    sys.exit(f"--config: {' '.join(str(error).split())}")


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
  _join_processes()
  _set_compilation_cache()
  try:
    with exit_on_user_error():
      main(argv)
  except KeyboardInterrupt:
    sys.stdout.flush()
    print("\nInterrupted", file=sys.stderr, flush=True)
    # Threads of XLA that compile or compute would not outlive Python's own end unharmed.
    os._exit(130)


def _join_processes() -> None:
  if not (_DISTRIBUTED.value or _COORDINATOR.value):
    return
  import jax

  given = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if not _DISTRIBUTED.value and None in given:
    sys.exit(
      "--coordinator, --num_processes, --process_id: expected all three, or "
      f"--distributed, got {given}"
    )
  jax.distributed.initialize(*given)
  if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)


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
