"""Arguments, processes and errors of the commands."""

import argparse
import contextlib
import logging
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

from dpjax.config import loading, registry
from dpjax.errors import UserError, exit_on_user_error, not_writable, unknown

# What libtpu would query from a TPU's machine.
NO_TPU = {
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}
_PLUGIN = "a module that registers mixers, boundaries or optimizers when imported"
_CONFIG = """an experiment's name or file, with :VARIANT if it has variants; or a run's folder.
--config.KEY=VALUE changes a setting. A component is chosen by name: --config.model.mixer=we
--config.model.mixer.adjustment=False. Several mixers in turn: --config.model.mixer=we,attention
--config.model.mixer.1.num_heads=4"""
_CACHE = """a folder for compiled programs, up to 2 GiB; empty: none; by default
JAX_COMPILATION_CACHE_DIR, or ~/.cache/dpjax/compiled, and on CPU none"""


class Parser(argparse.ArgumentParser):
  """The parser of a command; a wrong argument raises a `UserError`.

  Args:
    name: the name of the command.
    about: its description, whose line breaks are kept.
    has_config: adds --config.
  """

  def __init__(self, name: str, about: str | None, *, has_config: bool = False):
    super().__init__(
      f"dpjax {name}",
      description=about,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )
    self.has_config = has_config
    if has_config:
      self.add_argument("--config", metavar="NAME", help=_CONFIG)
    add = self.add_argument_group("of all commands that train or load a model").add_argument
    add("--plugin", metavar="MODULE", action="append", default=[], help=_PLUGIN)
    add("--flagfile", metavar="FILE", help="a file with more flags, one a line")
    add("--compilation_cache", metavar="FOLDER", help=_CACHE)
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--num_processes", type=int, metavar="N", help="number of processes")
    add("--process_id", type=int, metavar="N", help="number of this process, from 0")
    about = "let processes find each other (Slurm, TPU pods)"
    add("--distributed", action="store_true", help=about)
    about = "seconds to wait for the other processes (default: 300)"
    add("--join_seconds", type=int, default=300, metavar="N", help=about)

  def error(self, message: str) -> Any:
    """Raises a `UserError` instead of printing the usage."""
    message = message.replace("unrecognized arguments:", "expected --name=value, got")
    raise UserError(f"flags: {message} (dpjax {self.prog.split()[-1]} --help lists them)")

  def parse(self, words: Sequence[str]) -> argparse.Namespace:
    """The arguments; `config` is the configuration with its changes, or None."""
    words = list(_with_flagfiles(words))
    if {"-h", "--help"} & {*words}:
      self.parse_args(["--help"])
    # A configuration may name what a plugin registers.
    for module in loading.take(words, "plugin")[1]:
      registry.import_plugin(module)
    config = None
    if self.has_config:
      config, words = loading.from_words(words)
    names = [name for name in self._option_string_actions if name != "-h"]
    for word in words:
      name = word.partition("=")[0]
      if re.fullmatch(r"--[\w.]+", name) and name not in names:
        raise unknown("flags", names, name)
    options = self.parse_args(words)
    options.config = config
    return options


def path(text: str) -> str:
  """A path; expands ~, which a shell does not in --name=~/file."""
  return os.path.expanduser(text)


def natural(text: str) -> int:
  """An integer of at least 0."""
  if (number := int(text)) < 0:
    raise ValueError
  return number


def _with_flagfiles(words: Sequence[str]) -> Iterator[str]:
  """The words, with --flagfile=FILE replaced by those in the lines of FILE."""
  for word in words:
    flag, _, file = word.partition("=")
    if flag in ("-flagfile", "--flagfile"):
      lines = map(str.strip, Path(path(file)).read_text(encoding="utf-8").splitlines())
      yield from _with_flagfiles([x for x in lines if x and not x.startswith(("#", "//"))])
    else:
      yield word


def start(parser: Parser, main: Callable[[argparse.Namespace], None]) -> None:
  """Parses sys.argv, joins the other processes, and runs `main`; user errors exit with 1."""
  with exit_on_user_error():
    options = parser.parse(sys.argv[1:])
    # Orbax logs each of its steps at INFO.
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
    _join_processes(options)
    check_platform()
    _set_compilation_cache(options.compilation_cache)
    main(options)


@contextlib.contextmanager
def parsed(
  parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> Iterator[argparse.Namespace]:
  """Parses the arguments of a command of one process; user errors in the block exit with 1."""
  parser.add_argument("--plugin", metavar="MODULE", action="append", default=[], help=_PLUGIN)
  options = parser.parse_args(arguments)
  with exit_on_user_error(vars(options)):
    for module in options.plugin:
      registry.import_plugin(module)
    yield options


def exit_unless_finite(**nats: float) -> None:
  """Ends with status 1 if the nats per token of a text are not finite, and so no score is."""
  for name, value in nats.items():
    if not math.isfinite(value):
      sys.exit(f"{name}: expected finite scores, got {value} nats per token")


def check_platform() -> None:
  """Starts JAX's backend; `UserError` if the requested platform has none."""
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


def _join_processes(options: argparse.Namespace) -> None:
  names = ("coordinator", "num_processes", "process_id")
  values: list[Any] = [getattr(options, name) for name in names]
  address, number, index = values
  if None in values and not options.distributed:
    if values == [None] * 3:
      return
    missing = ", no ".join(x for x, value in zip(names, values, strict=True) if value is None)
    expected = "--coordinator, --num_processes, --process_id: expected all three, or --distributed"
    raise UserError(f"{expected}, got no {missing}")
  if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
    raise UserError(f"--coordinator: expected host:port, got {address}")
  if None not in values and not 0 <= index < number:
    expected = f"expected 0 to {number - 1} of --num_processes={number}"
    raise UserError(f"--process_id: {expected}, got {index}")
  import jax

  flags = [f"--{x}={value}" for x, value in zip(names, values, strict=True) if value is not None]
  subject, seconds = " ".join(flags) or "--distributed", options.join_seconds

  def give_up() -> None:
    expected = f"all processes to meet within {seconds} s (--join_seconds)"
    print(f"{subject}: expected {expected}, got no answer of some", file=sys.stderr, flush=True)
    os._exit(1)  # Threads that wait in C++ react to nothing else.

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    if None not in values and index == 0:  # If JAX cannot listen, it may crash (signal 11).
      socket.create_server(("", int(str(address).rpartition(":")[2]))).close()
    # At its own limit, JAX aborts the process (signal 6).
    jax.distributed.initialize(address, number, index, initialization_timeout=seconds + 60)
  except (KeyError, OSError, OverflowError, RuntimeError, ValueError) as error:
    expected = "process 0 to be able to listen there"
    if None in values:
      expected = "a scheduler that JAX knows, as Slurm, Open MPI or a TPU pod's"
    raise UserError(f"{subject}: expected {expected}, got: {error}") from error
  finally:
    timer.cancel()
  check_platform()
  if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)


def _set_compilation_cache(folder: Any) -> None:
  import jax

  if folder is None:
    # CPU code may come from another machine, and crash (jax-ml/jax#38445).
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() == "cpu":
      return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dpjax", "compiled")
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
