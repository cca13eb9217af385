"""The parser of all commands: their flags, their run, and their errors."""

import argparse
import itertools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from dpjax import files
from dpjax.commands import processes
from dpjax.config import loading, registry
from dpjax.errors import UserError, exit_on_user_error, nearest

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
    is_distributed: whether the command can run in several processes, one on each host. Adds the
      flags of processes and of compiled programs; `start` joins the processes.
  """

  def __init__(
    self, name: str, about: str | None, *, has_config: bool = False, is_distributed: bool = True
  ):
    super().__init__(
      f"dpjax {name}",
      description=about,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )
    self.has_config = has_config
    self.is_distributed = is_distributed
    self.takes_run_config = False
    if has_config:
      self.add_argument("--config", metavar="NAME", help=_CONFIG)
    add = self.add_argument_group("of all commands").add_argument
    add("--plugin", metavar="MODULE", action="append", default=[], help=_PLUGIN)
    add("--flagfile", metavar="FILE", help="a file with more flags, one a line")
    if is_distributed:
      self._add_processes()

  def _add_processes(self) -> None:
    add = self.add_argument_group("of all commands that train or load a model").add_argument
    add("--compilation_cache", metavar="FOLDER", help=_CACHE)
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--num_processes", type=int, metavar="N", help="number of processes")
    add("--process_id", type=int, metavar="N", help="number of this process, from 0")
    about = "let processes find each other (Slurm, TPU pods)"
    add("--distributed", action="store_true", help=about)
    about = "seconds to wait for the other processes (default: 300)"
    add("--join_seconds", type=int, default=300, metavar="N", help=about)

  def add_run(self) -> None:
    """Adds RUN, the folder of a run; --workdir=RUN says the same. See `find_run`."""
    self.add_argument("run", metavar="RUN", nargs="?", type=path, help="the folder of a run")
    self.add_argument("--workdir", metavar="RUN", type=path, help="another way to say RUN")

  def add_run_as_config(self) -> None:
    """Adds RUN, the folder of a run with the configuration; --config=RUN says the same."""
    about = "the folder of a run, whose configuration it takes; another way to say --config=RUN"
    self.add_argument("run", metavar="RUN", nargs="?", type=path, help=about)
    self.takes_run_config = True

  def add_run_to_resume(self) -> None:
    """Adds --workdir and RUN, the folder of a run, which has the configuration without --config."""
    about = "the folder of a run to resume, with its configuration or with changes of it"
    self.add_argument("run", metavar="RUN", nargs="?", type=path, help=about)
    self.add_argument("--workdir", type=local_path, help="the run's folder, a new one or RUN")
    self.takes_run_config = True

  def flags(self) -> list[str]:
    """The names of all flags, without dashes."""
    return re.findall(r"--([\w-]+)", self.format_usage())

  def error(self, message: str) -> NoReturn:
    """Raises a `UserError` instead of printing the usage."""
    if match := re.fullmatch(r"argument (--\w+|[A-Z]+): (expected .*)", message, re.DOTALL):
      raise UserError(f"{match[1]}: {match[2]}")
    message = message.replace("unrecognized arguments:", "expected --name=value, got")
    raise UserError(f"flags: {message} ({self.prog} --help lists them)")

  def parse(self, words: Sequence[str]) -> argparse.Namespace:
    """The arguments.

    `config` is the configuration with its changes: that of --config, or, where a command takes
    it, of the run that the words name; None if there is none. `experiment` is the value of
    --config, if given.
    """
    words = list(with_flagfiles(words))
    if "-h" in words or "--help" in words:
      self.parse_args(["--help"])
    # A configuration may name what a plugin registers.
    for module in loading.take(words, "plugin")[1]:
      registry.import_plugin(module)
    if not self.has_config:
      return self._parse_flags(words)
    _, experiments = loading.take(words, "config")
    folder = None
    if self.takes_run_config and not experiments:
      folder = self._find_run_with_config(words)
    if folder is not None:
      config, words = loading.override(loading.of_run(folder), words)
    else:
      config, words = loading.from_words(words)
    # What is left of them where there is no configuration.
    changes = [word for word in words if re.match(r"--?(no)?config\.", word)]
    options = self._parse_flags([word for word in words if word not in changes])
    if changes:
      expected = f"expected an experiment, of which to change {changes[0]}"
      raise UserError(f"--config: {expected}, got none")
    options.experiment = experiments[-1] if experiments else None
    options.config = config
    return options

  def _find_run_with_config(self, words: Sequence[str]) -> Path | None:
    """The folder of a run with its configuration that words name, as RUN or by --workdir."""
    _, folders = loading.take(words, "workdir")
    for folder in (*folders, *self._positions(words)):
      if folder and (Path(path(folder)) / "config.json").is_file():
        return Path(path(folder))
    return None

  def _positions(self, words: Sequence[str]) -> Iterator[str]:
    """Yields the words that are neither flags nor, perhaps, their values."""
    switches = re.findall(r"\[--([\w-]+)\]", self.format_usage())
    before = ""
    for word in words:
      takes_value = before.startswith("-") and "=" not in before and before[2:] not in switches
      if not word.startswith("-") and not takes_value:
        yield word
      before = word

  def _parse_flags(self, words: Sequence[str]) -> argparse.Namespace:
    """The arguments; an unknown flag is named before any other error."""
    flags = self.flags()
    for word in itertools.takewhile(lambda word: word != "--", words):
      match = re.match(r"(--?)([A-Za-z][\w.-]*)(=|$)", word)
      if not match or word == "-h" or (match[1] == "--" and match[2] in flags):
        continue
      name = match[2]
      near = next((flag for flag in flags if flag.startswith(name)), None) or nearest(name, flags)
      hint = f"; did you mean --{near}?" if near else f" ({self.prog} --help lists them)"
      message = f"expected a flag of {self.prog}, got an unknown one{hint}"
      raise UserError(f"{match[1]}{name}: {message}")
    return self.parse_args(words)


def path(text: str) -> str:
  """A path, not empty; expands ~, which a shell does not in --name=~/file."""
  if not text:
    raise argparse.ArgumentTypeError("expected a path, got none")
  return os.path.expanduser(text)


def local_path(text: str) -> str:
  """A path to write to, like `path`, and no address."""
  expanded = path(text)
  if reason := files.refusal(expanded):
    raise argparse.ArgumentTypeError(reason)
  return expanded


def natural(text: str) -> int:
  """An integer of at least 0."""
  if (number := int(text)) < 0:
    raise ValueError
  return number


def find_run(options: argparse.Namespace) -> str | None:
  """The folder given as RUN or --workdir, if any; a `UserError` if both are."""
  if options.run is not None and options.workdir is not None:
    got = f"{options.run} and {options.workdir}"
    raise UserError(f"RUN, --workdir: expected one of them, got {got}")
  return options.workdir if options.run is None else options.run


def require_run(options: argparse.Namespace) -> str:
  """Like `find_run`; a `UserError` if there is none."""
  run = find_run(options)
  if not run:
    raise UserError("RUN, --workdir: expected the folder of a run, got none")
  return run


def with_flagfiles(words: Iterable[str], within: tuple[str, ...] = ()) -> Iterator[str]:
  """The words, with --flagfile=FILE replaced by those in the lines of FILE.

  Args:
    words: those of the command line, or of a file.
    within: the file of the words, and those that led to it.

  Raises:
    UserError: a file is missing or not a text, or leads to itself.
  """
  rest = iter(words)
  for word in rest:
    flag, equals, name = word.partition("=")
    if flag not in ("-flagfile", "--flagfile"):
      yield word
      continue
    name = os.path.expanduser(name if equals else next(rest, ""))
    if not name:
      raise UserError("--flagfile: expected a file, got none")
    file = os.path.realpath(name)
    if file in within:
      raise UserError(f"--flagfile: expected a file that does not lead to itself, got {name}")
    yield from with_flagfiles(_read_flags(name), (*within, file))


def _read_flags(name: str) -> list[str]:
  """The flags in a file, one a line; lines with # or // are comments."""
  try:
    lines = files.read_file(name).decode("utf-8-sig").splitlines()
  except (OSError, ValueError) as error:
    expected = "expected a text in UTF-8 with a flag on each line"
    raise UserError(f"--flagfile: {expected}, got {name} ({error})") from error
  return [x for x in map(str.strip, lines) if x and not x.startswith(("#", "//"))]


Command = Callable[[argparse.Namespace], None]


def start(parser: Parser, command: Command, words: Sequence[str] | None = None) -> None:
  """Parses words (None: sys.argv) and runs a command; user errors exit with 1.

  A distributed command first joins the other processes and starts JAX.
  """
  with exit_on_user_error():
    options = parser.parse(sys.argv[1:] if words is None else words)
    # Orbax logs each of its steps at INFO.
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
    if parser.is_distributed:
      with processes.ending_with_others():
        processes.join(options)
        processes.check_platform()
        processes.set_compilation_cache(options.compilation_cache)
        command(options)
    else:
      # Arguments of functions are named like the flags.
      with exit_on_user_error(parser.flags()):
        command(options)


def exit_unless_finite(**nats: float) -> None:
  """Ends with status 1 if the nats per token of a text are not finite, and so no score is."""
  for name, value in nats.items():
    if not math.isfinite(value):
      sys.exit(f"{name}: expected finite scores, got {value} nats per token")
