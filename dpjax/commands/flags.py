"""Flags and error handling shared by the scripts."""

import argparse
import contextlib
import logging as std_logging
import math
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from dpjax import config as config_lib
from dpjax import registry
from dpjax.errors import UserError, exit_on_user_error, not_writable, unknown_setting

_ABOUT_PLUGIN = "a module that registers mixers, boundaries or optimizers when imported"
_ABOUT_CACHE = (
  "a folder for what was compiled, of up to 2 GiB; empty: none; "
  "by default JAX_COMPILATION_CACHE_DIR, or ~/.cache/dpjax/compiled, and on CPU none"
)
flags.DEFINE_string("coordinator", None, "host:port of process 0, for a run of several processes")
flags.DEFINE_integer("num_processes", None, "number of processes", lower_bound=1)
flags.DEFINE_integer("process_id", None, "number of this process, from 0", lower_bound=0)
flags.DEFINE_bool("distributed", False, "processes that find each other (Slurm, TPU pods)")
flags.DEFINE_integer("join_seconds", 300, "how long to wait for the other processes", lower_bound=1)
flags.DEFINE_multi_string("plugin", [], _ABOUT_PLUGIN)
flags.DEFINE_string("compilation_cache", None, _ABOUT_CACHE)


# What libtpu would ask a TPU's machine for.
NO_TPU = {
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}


class _Path(flags.ArgumentParser):
  def parse(self, argument):
    return os.path.expanduser(argument)  # A shell leaves the ~ of --name=~/file as it is.


PATH = _Path()


def define_config() -> flags.FlagHolder:
  """Defines --config=NAME[:VARIANT] or FILE; --config.KEY=VALUE changes a setting.

  A component is chosen by name: --config.model.mixer=we --config.model.mixer.adjustment=False.
  Several mixers in turn: --config.model.mixer=we,attention --config.model.mixer.1.num_heads=4.
  """
  about = "an experiment's name or file, with :VARIANT if it has variants; or a run's folder"
  return flags.DEFINE_string("config", None, about)


def start(main: Callable[[Sequence[str]], None], about: str | None = None) -> None:
  """Parses sys.argv, joins the other processes, and runs `main`; user errors exit with 1."""
  if {"-h", "--help", "--helpfull"} & {*sys.argv[1:]}:
    modules = [x for x in [*flags.FLAGS.flags_by_module_dict()][::-1] if not x.startswith("absl")]
    print(about or sys.modules["__main__"].__doc__)
    print(*map(flags.FLAGS.module_help, modules), sep="\n")
    return
  with exit_on_user_error():
    argv = _parse(sys.argv)
    logging.use_absl_handler()
    plain = std_logging.Formatter("%(levelname)s: %(message)s")  # without W1127 and a file's line
    logging.get_absl_handler().setFormatter(plain)
    # Orbax tells its every move at INFO.
    logging.set_verbosity(logging.WARNING)
    std_logging.getLogger("jax").setLevel(std_logging.WARNING)
    _join_processes()
    check_platform()
    _set_compilation_cache()
    main(argv)


def exit_unless_finite(**nats: float) -> None:
  """Ends with status 1 if the nats per token of a text are not finite: all scores are then none."""
  for name, value in nats.items():
    if not math.isfinite(value):
      sys.exit(f"{name}: expected finite scores, got {value} nats per token")


@contextlib.contextmanager
def parsed(
  parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> Iterator[argparse.Namespace]:
  """Parses arguments without flags of absl, and --plugin; user errors in the block exit with 1."""
  parser.add_argument("--plugin", metavar="MODULE", action="append", default=[], help=_ABOUT_PLUGIN)
  given = parser.parse_args(arguments)
  with exit_on_user_error(vars(given)):
    for module in given.plugin:
      registry.import_plugin(module)
    yield given


def _parse(argv: Sequence[str]) -> Sequence[str]:
  try:
    argv = flags.FLAGS.read_flags_from_files(list(argv))
    # A configuration may name what a plugin registers.
    _, plugins = take(argv, "plugin")
    for module in plugins:
      registry.import_plugin(module)
    rest = flags.FLAGS(_with_config(argv))
  except (UserError, flags.Error) as error:
    message = " ".join(re.sub(r"mixer\[(\d+)\]", r"mixer.\1", str(error)).split())
    lists = [re.match(r"--?config\.[^=]*=([^()]*[,;][^()]*)$", argument) for argument in argv]
    if any(found and found[1] in message for found in lists):
      message += " (dpjax sweep trains a run for each of several values)"
    raise UserError(message) from error
  if len(rest) > 1:
    raise UserError(f"flags: expected --name=value, got {' '.join(rest[1:])}")
  return rest


def read_config(arguments: Sequence[str]) -> config_lib.ConfigDict:
  """The configuration of --config and --config.KEY=VALUE, which are no flags of the command."""
  own = flags.FlagValues()
  flags.DEFINE_string("config", None, "", flag_values=own)
  try:
    own(_with_config(["", *arguments], own))
  except (UserError, flags.Error) as error:
    raise UserError(" ".join(str(error).split())) from error
  return own.config


def _with_config(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """Turns --config into a flag; returns the arguments without it."""
  if "config" not in values:
    return argv
  others, files = take(argv, "config")
  if not files:
    return argv
  config = config_lib.load(files[-1])
  others = _choose_components(config, others)
  known = config_lib.flatten(config)
  for argument in others:
    setting = re.match(r"--?(?:no)?config\.([^=]*)", argument)
    if setting and setting[1] not in known:
      key, _, name = setting[1].rpartition(".")
      registry = config_lib.COMPONENTS.get(config_lib.place(key))
      if registry is not None and f"{key}.name" in known:
        registry.check({**config_lib.get(config, key), name: None}, key)  # Names it.
      raise unknown_setting(setting[1], known)
  # Of several mixers, model.mixer.1 is model.mixer[1] for ml_collections.
  others = [re.sub(r"^(--?(?:no)?config\.[\w.]*mixer)\.(\d+)\.", r"\1[\2].", x) for x in others]
  delattr(values, "config")
  settings: Any = config
  config_flags.DEFINE_config_dict("config", settings, flag_values=values, sys_argv=others)
  return others


def _choose_components(config: config_lib.ConfigDict, argv: list[str]) -> list[str]:
  """Puts named components into the configuration; returns the other arguments."""
  others, values = take(argv, "config.model.middle")
  if values:
    expected = "expected it in a configuration file, by dpjax.config.middle"
    raise UserError(f"--config.model.middle: {expected}, got {values[-1]}")
  for key in config_lib.component_keys(config):
    others, names = take(others, f"config.{key}", f"config.{key}.name")
    parent, _, last = key.rpartition(".")
    place = config_lib.place(key)
    for name in names[-1:]:
      known = config_lib.COMPONENTS[place]
      if name == "none" and place in config_lib.OPTIONAL:
        section = None
      elif last == "mixer" and "," in name:
        # A mixer that the configuration has keeps its settings.
        old = {x["name"]: x for x in config_lib.in_turn(key, config_lib.get(config, key)).values()}
        section = tuple(old.get(x) or known.defaults(x, key) for x in name.split(","))
      else:
        section = known.defaults(name, key)
      config_lib.get(config, parent)[last] = section
  return others


def take(argv: list[str], *names: str) -> tuple[list[str], list[str]]:
  """The arguments without --NAME=VALUE and --NAME VALUE, and the values."""
  others, values, rest = [], [], iter(argv)
  for argument in rest:
    flag, is_joined, value = argument.partition("=")
    if flag.startswith("-") and flag.removeprefix("-").removeprefix("-") in names:
      values.append(value if is_joined else next(rest, ""))
    else:
      others.append(argument)
  return others, values


def check_platform() -> None:
  """Starts JAX's backend; a `UserError` if there is none of the requested platform."""
  import jax

  # JAX sees no TPU; libtpu, where it is installed to compile, would complain.
  if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
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


def _join_processes() -> None:
  names = ("coordinator", "num_processes", "process_id")
  given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
  missing = [name for name, value in given.items() if value is None]
  if missing and not flags.FLAGS.distributed:
    if len(missing) == 3:
      return
    expected = "--coordinator, --num_processes, --process_id: expected all three, or --distributed"
    raise UserError(f"{expected}, got no {', no '.join(missing)}")
  address, number, index = given.values()
  host, _, port = (address or "host:1").rpartition(":")
  if not (host and port.isdecimal() and 1 <= int(port[:6]) < 2**16):
    raise UserError(f"--coordinator: expected host:port, got {address}")
  if not missing and index >= number:
    expected = f"expected 0 to {number - 1} of --num_processes={number}"
    raise UserError(f"--process_id: {expected}, got {index}")
  import jax

  seconds = flags.FLAGS.join_seconds
  known = [f"--{name}={value}" for name, value in given.items() if value is not None]
  shown = " ".join(known) or "--distributed"

  def give_up() -> None:
    expected = f"all processes to meet within {seconds} s (--join_seconds)"
    print(f"{shown}: expected {expected}, got no answer of some", file=sys.stderr, flush=True)
    os._exit(1)  # What waits in C++ hears of nothing else.

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    if index == 0 and not missing:  # Where JAX cannot listen, it may crash (signal 11).
      socket.create_server(("", int(port))).close()
    # At its own limit, JAX aborts the process (signal 6).
    jax.distributed.initialize(address, number, index, initialization_timeout=seconds + 60)
  except (KeyError, OSError, RuntimeError, ValueError) as error:
    expected = "process 0 to be able to listen there"
    if missing:
      expected = "a scheduler that JAX knows, as Slurm, Open MPI or a TPU pod's"
    raise UserError(f"{shown}: expected {expected}, got: {error}") from error
  finally:
    timer.cancel()
  check_platform()
  if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)


def _set_compilation_cache() -> None:
  import jax

  folder = flags.FLAGS.compilation_cache
  if folder is None:
    # Code for a CPU may be another machine's, and crash (jax-ml/jax#38445).
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() == "cpu":
      return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dpjax", "compiled")
  try:
    if folder:
      folder = Path(folder).expanduser().absolute()
      # What lies there is run: it is for nobody else to write.
      folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=folder).close()
  except (OSError, RuntimeError) as error:  # The latter: of a user without a home.
    told = not_writable("compilation_cache", folder, error)
    print(f"{told}; what is compiled is not kept", file=sys.stderr)
    folder = ""
  if not folder:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  if jax.config.values["jax_compilation_cache_max_size"] == -1:
    jax.config.update("jax_compilation_cache_max_size", 2**31)
