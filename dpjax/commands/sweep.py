r"""Trains an experiment with several values of its settings, one run after the other.

  dpjax sweep --config=quickstart --config.train.learning_rate=1e-3,3e-3,1e-2 --seeds=0,1 \
    --workdir=runs/rates

Commas separate the values of a setting, or semicolons if it has one: "we;we,attention" has two
values, "(1,2,3);" has one. All combinations are trained as by dpjax train, but values of settings
in one --zip=model.width,model.num_layers are paired. Each run has its own folder:

  runs/rates/learning_rate=1e-3/seed_0

At the end, a table shows their scores. The same command resumes a sweep: finished runs are only
scored. dpjax plots draws the folders.
"""

import itertools
import math
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpjax.analysis import curves, plots, style
from dpjax.commands import train
from dpjax.commands.command_line import Parser, local_path, start, with_flagfiles
from dpjax.config import loading, rules, setting
from dpjax.errors import UserError, exit_on_user_error


class Planned(NamedTuple):
  """A run of a sweep.

  Attributes:
    name: the settings that vary, "learning_rate=1e-3"; "" if none do.
    folder: the run's folder, below the sweep's.
    config: its settings.
  """

  name: str
  folder: str
  config: setting.ConfigDict


def main(words: Sequence[str] | None = None) -> None:
  """Trains the runs given on the command line, then prints their table."""
  parser = Parser("sweep", __doc__)
  parser.add_argument("--workdir", type=local_path, help="a folder for the runs")
  about = "settings whose values are paired, model.width,model.num_layers; may be repeated"
  parser.add_argument("--zip", action="append", default=[], help=about)
  about = "print the runs, each with its updates, parameters and memory, and train none"
  parser.add_argument("--dry_run", action="store_true", help=about)
  about = "comma-separated seeds; default: the configuration's"
  parser.add_argument("--seeds", type=lambda x: x.split(","), default=[], help=about)
  with exit_on_user_error():
    settings, others = _split([*with_flagfiles(sys.argv[1:] if words is None else words)])
  start(parser, lambda options: _sweep(settings, options), others)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits the arguments into those of the configuration, as --NAME=VALUES, and others.

  A word behind a setting is its value, unless it is a flag: a sweep has no other such words.
  """
  settings = []
  others = []
  rest = list(arguments)
  while rest:
    word = rest.pop(0)
    is_setting = re.fullmatch(r"--?config\.[^=]*", word) is not None
    is_followed = bool(rest) and not re.match(r"--?[A-Za-z]", rest[0])
    if word in ("-config", "--config") or (is_setting and is_followed):
      value = rest.pop(0) if rest else ""
      settings.append(f"{word}={value}")
    elif re.match(r"--?(no)?config[.=]", word):
      settings.append(word)
    else:
      others.append(word)
  return settings, others


def plan(
  settings: Sequence[str], seeds: Sequence[int], zipped: Sequence[str] = ()
) -> Iterator[Planned]:
  """The runs of a sweep, each once, also where values are equal, as 1e-3 and 0.001.

    --config=quickstart --config.model.width=8,16   ->  width=8/seed_0, width=16/seed_0

  Args:
    settings: arguments of `dpjax train` for its configuration, with several values.
    seeds: the seeds of each combination; if empty, its configuration's.
    zipped: groups of settings whose values go together, "model.width,model.num_layers".

  Raises:
    UserError: a configuration is wrong, two different runs have the same name, or settings of a
      group are missing or differ in the number of values.
  """
  keys = [word.partition("=")[0] for word in settings]
  values = [_values(word) for word in settings]
  names = [key.lstrip("-").removeprefix("config.") for key in keys]
  groups: dict[str | int, list[int]] = {}  # the indices of settings that vary together
  for i, name in enumerate(names):
    group = next((group for group in zipped if name in group.split(",")), i)
    groups.setdefault(group, []).append(i)
  for group in zipped:
    counts = {names[i]: len(values[i]) for i in groups.get(group, ())}
    if len(counts) < len(group.split(",")) or len({*counts.values()}) > 1:
      expected = "expected settings of the command line with equal numbers of values"
      raise UserError(f"--zip: {expected}, got {group} with {counts or 'none'}")
  last = [name.rpartition(".")[2] for name in names]
  labels = [key.lstrip("-") if last.count(x) > 1 else x for key, x in zip(keys, last, strict=True)]
  digests = set()  # of the configurations so far
  folders = set()
  for choice in itertools.product(*(range(len(values[i])) for i, *_ in groups.values())):
    choices = {i: at for members, at in zip(groups.values(), choice, strict=True) for i in members}
    chosen = [values[i][choices[i]] for i in range(len(keys))]
    config, _ = loading.from_words([key + x for key, x in zip(keys, chosen, strict=True)])
    if config is None:
      raise UserError("--config: expected an experiment, got none")
    name = ",".join(
      label + re.sub(r"[^\w.+=-]+", "-", value)  # valid on any file system
      for label, value, several in zip(labels, chosen, values, strict=True)
      if len(several) > 1
    )
    for seed in seeds or [config.seed]:
      config = config.copy_and_resolve_references()
      config.seed = seed
      rules.check(config)
      folder = f"{name}/seed_{seed}".lstrip("/")
      digest = loading.digest(config.to_dict())
      if digest in digests:
        continue
      if folder in folders:
        expected = "expected values with different names of folders"
        raise UserError(f"--config, --seeds: {expected}, got {folder} twice")
      digests.add(digest)
      folders.add(folder)
      yield Planned(name, folder, config)


def _values(word: str) -> list[str]:
  """The values of a setting, each with its "="; [""] for an argument without a value."""
  key, equals, text = word.partition("=")
  if key.endswith("-config"):  # Variants have commas.
    return [f"={text}"]
  values = [value for value in text.split(";" if ";" in text else ",") if value]
  return [f"={value}" for value in values or [text]] if equals else [""]


def _sweep(settings: Sequence[str], arguments: Namespace) -> None:
  import jax

  from dpjax import runs
  from dpjax.runs import prepare
  from dpjax.training import reporting

  if not arguments.workdir:
    raise UserError("--workdir: expected a folder for the runs, got none")
  try:
    seeds = [*map(int, arguments.seeds)]
  except ValueError as error:
    got = ",".join(arguments.seeds)
    raise UserError(f"--seeds: expected integers with commas between them, got {got}") from error
  # All are checked before any is trained.
  planned = [*plan(settings, seeds, arguments.zip)]
  if len(seeds) < 2 and all(len(_values(word)) < 2 for word in settings):
    expected = (
      "expected a setting with several values, as --config.model.width=8,16, or several seeds"
    )
    raise UserError(f"sweep: {expected}, got none (dpjax train trains one run)")
  if arguments.dry_run:
    for number, (_, folder, config) in enumerate(planned, 1):
      workdir = Path(arguments.workdir, folder)
      print(f"\nRun {number} of {len(planned)}: {workdir}")
      train.print_plan(config, prepare.find_or_make_tokens(config, workdir))
    return
  results = []
  for number, (name, folder, config) in enumerate(planned, 1):
    workdir = Path(arguments.workdir, folder)
    if jax.process_index() == 0:
      print(f"\nRun {number} of {len(planned)}: {workdir}", flush=True)
    try:
      _, scores = runs.train(config, workdir)
      results.append((name, workdir, scores))
    except reporting.NonFiniteError as error:  # The other runs may succeed.
      print(error, file=sys.stderr, flush=True)
      results.append((name, workdir, {}))
    jax.clear_caches()
  if jax.process_index() == 0:
    print(f"\n{_table(results)}")


def _table(results: Sequence[tuple[str, Path, Mapping[str, float]]]) -> str:
  """A row for each combination of values, with means over its seeds, the best first."""
  finite = [result for result in results if result[2]]
  if not finite:
    raise UserError("train.learning_rate: expected a finite loss of a run, got none")

  def is_known(score: str) -> bool:
    return all(math.isfinite(scores.get(score, math.nan)) for *_, scores in finite)

  score = next(filter(is_known, plots.SCORES))
  rows = []
  for name, group in curves.group([name for name, *_ in finite], finite).items():
    logged = [curves.read_scores(workdir)[f"valid/{score}"] for _, workdir, _ in group]
    valid = statistics.fmean(min(by_step.values()) for by_step in logged)
    tests = [scores[score] for *_, scores in group]
    mean = f"{statistics.fmean(tests):.4f}"
    spread = f"{statistics.stdev(tests):.4f}" if len(tests) > 1 else "-"
    rows.append((valid, name or "all", len(tests), f"{valid:.4f}", mean, spread))
  cells: list[Sequence[object]] = [row for _, *row in sorted(rows)]
  cells += [(workdir, 1, "not finite", "", "") for _, workdir, scores in results if not scores]
  return style.table(["", "runs", f"valid/{score}", f"test/{score}", "deviation"], cells)
