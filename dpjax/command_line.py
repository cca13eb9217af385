"""What the scripts share: flags, and errors without a traceback."""

import logging as std_logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from dpjax import config as config_lib

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, for a run of several processes"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many there are")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "which one this is, from 0")
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "several processes, found by themselves (Slurm, TPU pods)"
)


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
      raise ValueError(f"flags: expected --name=value, got {' '.join(rest[1:])}")
    # An error within the file shows when the configuration is first looked at.
    config = flags.FLAGS.config if "config" in flags.FLAGS else None
    if config is not None and not isinstance(config, config_lib.ConfigDict):
      if type(config).__module__.startswith("ml_collections"):
        config.is_locked  # noqa: B018  (raises what went wrong within the file)
      raise ValueError("expected a file whose get_config() gives a ConfigDict")
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


def _unknown_setting(argv: Sequence[str]) -> ValueError | None:
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
  try:
    main(argv)
  except ValueError as error:
    if os.environ.get("DPJAX_TRACEBACK"):
      raise
    sys.exit(str(error))
  except OSError as error:
    sys.exit(f"{error.filename}: expected to read and write it, got: {error.strerror}")
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
