r"""Trains an experiment with several values of its settings, one run after the other.

  dpjax sweep --config=quickstart --config.train.learning_rate=1e-3,3e-3,1e-2 --seeds=0,1 \
    --workdir=runs/rates

Commas separate the values of a setting, or semicolons where there is one: "we;we,attention" has two
values, "(1,2,3);" has one. All combinations are trained as by dpjax train, each in its own folder:

  runs/rates/learning_rate=1e-3/seed_0    a run
  runs/rates/sweep.json                   the test scores of the runs that have ended
  runs/rates/sweep.png                    training and validation of the best

The same command again goes on: it resumes a run that was stopped, and trains none again that ended.
"""

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from dpjax import config as config_lib
from dpjax import files
from dpjax.analysis import plots, style
from dpjax.analysis import runs as runs_lib
from dpjax.errors import UserError

_TABLE = "sweep.json"


class Planned(NamedTuple):
  """A run of a sweep.

  Attributes:
    name: the settings that differ, "learning_rate=1e-3"; "" if none do.
    folder: the run's folder, below the sweep's.
    config: its settings.
  """

  name: str
  folder: str
  config: config_lib.ConfigDict


def main() -> None:
  """Trains the runs of the command line, then prints their table and draws the best."""
  from dpjax.commands import flags as command_line

  flags.DEFINE(command_line.PATH, "workdir", None, "a folder for the runs", required=True)
  flags.DEFINE_list("seeds", [], "seeds, with commas between them; default: the configuration's")
  others, settings = _split(sys.argv)
  sys.argv[:] = others
  command_line.start(lambda _: _sweep(settings, flags.FLAGS), __doc__)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """The arguments without those of the configuration, and these."""
  others, settings, rest = [], [], iter(arguments)
  for word in rest:
    if word in ("-config", "--config"):
      settings.append(f"{word}={next(rest, '')}")
    else:
      (settings if re.match(r"--?(no)?config[.=]", word) else others).append(word)
  return others, settings


def plan(settings: Sequence[str], seeds: Sequence[int]) -> Iterator[Planned]:
  """The runs of a sweep.

    --config=quickstart --config.model.width=8,16   ->  width=8/seed_0, width=16/seed_0

  Args:
    settings: arguments of `dpjax train` for its configuration, with several values.
    seeds: those of each combination; none: that of its configuration.

  Raises:
    UserError: of one of the configurations, or two runs have one name.
  """
  from dpjax.commands import flags as command_line

  keys = [word.partition("=")[0] for word in settings]
  values = [_values(word) for word in settings]
  last = [key.rpartition(".")[2] for key in keys]
  shown = [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]
  folders = set()
  for chosen in itertools.product(*values):
    words = [key + value for key, value in zip(keys, chosen, strict=True)]
    parts = [
      name.lstrip("-") + re.sub(r"[^\w.+=-]+", "-", value)  # for any file system
      for name, value, several in zip(shown, chosen, values, strict=True)
      if len(several) > 1
    ]
    config, name = command_line.read_config(words), ",".join(parts)
    if config is None:
      raise UserError("--config: expected an experiment, got none")
    for seed in seeds or [config.seed]:
      own = config.copy_and_resolve_references()
      own.seed = seed
      config_lib.check(own)
      folder = f"{name}/seed_{seed}".lstrip("/")
      if folder in folders:
        raise UserError(f"--config, --seeds: expected values that differ, got {folder} twice")
      folders.add(folder)
      yield Planned(name, folder, own)


def _values(word: str) -> list[str]:
  """The values of a setting, each after its "="; of others, what follows their name."""
  key, is_given, text = word.partition("=")
  if key.endswith("-config"):  # Variants have commas.
    return [f"={text}"]
  found = [value for value in text.split(";" if ";" in text else ",") if value]
  return [f"={value}" for value in found or [text]] if is_given else [""]


def _sweep(settings: Sequence[str], given) -> None:
  import jax

  try:
    seeds = [*map(int, given.seeds)]
  except ValueError as error:
    got = ",".join(given.seeds)
    raise UserError(f"--seeds: expected integers with commas between them, got {got}") from error
  # All of them are checked before one is trained.
  runs, folder = [*plan(settings, seeds)], Path(given.workdir)
  is_first = jax.process_index() == 0
  ended = {name: x for name, x in files.read_json(folder / _TABLE).items() if _is_result(x)}
  for number, run in enumerate(runs, 1):
    is_done = run.folder in ended and _has_settings(folder / run.folder, run.config)
    if is_first:
      said = "has ended" if is_done else "begins"
      print(f"\nRun {number} of {len(runs)} {said}: {folder / run.folder}", flush=True)
    if not is_done:
      ended[run.folder] = _train(run.config, folder / run.folder)
      if is_first:
        files.write_json(folder / _TABLE, ended)
      jax.clear_caches()
  if is_first:
    _report(runs, folder, ended)


def _is_result(entry: Any) -> bool:
  """Whether an entry of the table is one that `_train` gives."""
  if not isinstance(entry, dict):
    return False
  scores = entry.get("scores")
  return isinstance(entry.get("error"), str) or (isinstance(scores, dict) and bool(scores))


def _has_settings(workdir: Path, config: config_lib.ConfigDict) -> bool:
  """Whether a run has exactly these settings."""
  from dpjax.config import sections

  expected = json.loads(json.dumps(sections.expand_paths(config).to_dict()))
  found = files.read_json(workdir / "config.json")
  del expected["plugins"]  # Those of the command line are the run's alone.
  return {key: found.get(key) for key in expected} == expected


def _train(config: config_lib.ConfigDict, workdir: Path) -> dict[str, Any]:
  from dpjax import run as run_lib
  from dpjax.training import loop, metrics

  try:
    run, scores = run_lib.train(config, workdir)
  except loop.NonFiniteError as error:  # The others may fare better.
    print(error, file=sys.stderr, flush=True)
    return {"error": str(error)}
  return {"step": run.step, "scores": metrics.for_json(scores)}


def _report(runs: Sequence[Planned], folder: Path, ended: Mapping[str, Any]) -> None:
  """Prints the scores of all runs, the best first, and draws those of the best."""
  finite = [run for run in runs if "scores" in ended[run.folder]]
  if not finite:
    sys.exit(f"train.learning_rate: expected a finite loss of a run, got none in {folder}")
  labels = [run.name or "all" for run in finite]
  records = runs_lib.read_runs([folder / run.folder for run in finite], labels)
  metric = plots.find_metric(records)
  assert metric  # Training ends with an evaluation.
  score = metric.partition("/")[2]
  groups = runs_lib.group(labels, [*zip(finite, records, strict=True)])
  best = {
    name: statistics.fmean(min(record.scores[metric].values()) for _, record in group)
    for name, group in groups.items()
  }
  rows = []
  for name in sorted(best, key=best.__getitem__):
    tests = [ended[run.folder]["scores"].get(score) for run, _ in groups[name]]
    is_finite = None not in tests
    mean = f"{statistics.fmean(tests):.4f}" if is_finite else "-"
    spread = f"{statistics.stdev(tests):.4f}" if is_finite and len(tests) > 1 else "-"
    rows.append([name, len(tests), f"{best[name]:.4f}", mean, spread])
  rows += [[run.folder, 1, "not finite", "", ""] for run in runs if run not in finite]
  print(f"\n{style.table(['', 'runs', metric, f'test/{score}', 'deviation'], rows)}")
  chosen = {row[0] for row in rows[: len(style.COLOURS)]}
  drawn = [record for record in records if record.label in chosen]
  every = plots.default_every(drawn)
  picture = plots.draw(drawn, figure="progress", every=every, metric=metric)
  plots.write(picture, folder / "sweep.png")
  print(f"\nThe best: {rows[0][0]}\nThe figure: {folder / 'sweep.png'}")
