r"""Trains an experiment with several values of its settings, one run after the other.

  dpjax sweep --config=quickstart --config.train.learning_rate=1e-3,3e-3,1e-2 --seeds=0,1 \
    --workdir=runs/rates

Commas separate the values of a setting, or semicolons where there is one: "we;we,attention" has two
values, "(1,2,3);" has one. All combinations are trained as by dpjax train, but values of settings
that --zip=model.width,model.num_layers names go together. Each run has its own folder:

  runs/rates/learning_rate=1e-3/seed_0    a run
  runs/rates/sweep.json                   the test scores of the runs that have ended
  runs/rates/sweep.png                    training and validation of the best

The same command again goes on: it resumes a run that was stopped, and trains none again that ended.
dpjax sweep --table=runs/rates --table=runs/widths trains nothing, and prints one table over both.
"""

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpjax import config as config_lib
from dpjax import files
from dpjax.analysis import plots, style
from dpjax.analysis import runs as runs_lib
from dpjax.config import loading, schema
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

  parser = command_line.Parser("sweep", __doc__)
  several: dict[str, Any] = dict(action="append", default=[])
  parser.add_argument("--workdir", type=command_line.path, help="a folder for the runs")
  about = (
    "settings whose values go together, model.width,model.num_layers; for several groups, again"
  )
  parser.add_argument("--zip", **several, help=about)
  about = "the folder of a sweep to table, with others, in place of training"
  parser.add_argument("--table", **several, type=command_line.path, help=about)
  about = "seeds, with commas between them; default: the configuration's"
  parser.add_argument("--seeds", type=lambda x: x.split(","), default=[], help=about)
  others, settings = _split(sys.argv)
  sys.argv[:] = others
  command_line.start(parser, lambda options: _sweep(settings, options))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """The arguments without those of the configuration, and these."""
  others, settings, rest = [], [], iter(arguments)
  for word in rest:
    if word in ("-config", "--config"):
      settings.append(f"{word}={next(rest, '')}")
    else:
      (settings if re.match(r"--?(no)?config[.=]", word) else others).append(word)
  return others, settings


def plan(
  settings: Sequence[str], seeds: Sequence[int], together: Sequence[str] = ()
) -> Iterator[Planned]:
  """The runs of a sweep.

    --config=quickstart --config.model.width=8,16   ->  width=8/seed_0, width=16/seed_0

  Args:
    settings: arguments of `dpjax train` for its configuration, with several values.
    seeds: those of each combination; none: that of its configuration.
    together: groups of settings that go together, "model.width,model.num_layers".

  Raises:
    UserError: of one of the configurations, or two runs have one name, or settings of a group
      are not there or differ in the number of values.
  """
  keys = [word.partition("=")[0] for word in settings]
  values = [_values(word) for word in settings]
  last = [key.rpartition(".")[2] for key in keys]
  shown = [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]
  folders = set()
  for places in itertools.product(*_places(keys, values, together)):
    at = dict(itertools.chain(*places))
    chosen = [several[at[i]] for i, several in enumerate(values)]
    words = [key + value for key, value in zip(keys, chosen, strict=True)]
    parts = [
      name.lstrip("-") + re.sub(r"[^\w.+=-]+", "-", value)  # for any file system
      for name, value, several in zip(shown, chosen, values, strict=True)
      if len(several) > 1
    ]
    config, name = loading.from_words(words)[0], ",".join(parts)
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


def _places(
  keys: Sequence[str], values: Sequence[Sequence[str]], together: Sequence[str]
) -> list[list[list[tuple[int, int]]]]:
  """For settings that vary alone, or together: for each choice, (setting, number of its value)."""
  names, groups = [key.lstrip("-").removeprefix("config.") for key in keys], []
  for group in together:
    members = [i for i, name in enumerate(names) if name in group.split(",")]
    counts = {names[i]: len(values[i]) for i in members}
    if len(counts) < len(group.split(",")) or len({*counts.values()}) > 1:
      expected = "expected settings of the command line with equal numbers of values"
      raise UserError(f"--zip: {expected}, got {group} with {counts or 'none'}")
    groups.append(members)
  joined = {*itertools.chain(*groups)}
  groups += [[i] for i in range(len(keys)) if i not in joined]
  groups.sort()  # Folders are named in the order of the command line.
  return [[[(i, at) for i in group] for at in range(len(values[group[0]]))] for group in groups]


def _values(word: str) -> list[str]:
  """The values of a setting, each after its "="; of others, what follows their name."""
  key, is_given, text = word.partition("=")
  if key.endswith("-config"):  # Variants have commas.
    return [f"={text}"]
  found = [value for value in text.split(";" if ";" in text else ",") if value]
  return [f"={value}" for value in found or [text]] if is_given else [""]


def _sweep(settings: Sequence[str], given) -> None:
  import jax

  if given.table:
    ended = {
      Path(place, name): entry
      for place in given.table
      for name, entry in files.read_json(Path(place, _TABLE)).items()
      if _is_result(entry)
    }
    if not ended:
      raise UserError(f"--table: expected a folder with {_TABLE}, got {', '.join(given.table)}")
    return _report({path: str(path.parent) for path in ended}, ended)
  if not given.workdir:
    raise UserError("--workdir: expected a folder for the runs, got none")
  try:
    seeds = [*map(int, given.seeds)]
  except ValueError as error:
    got = ",".join(given.seeds)
    raise UserError(f"--seeds: expected integers with commas between them, got {got}") from error
  # All of them are checked before one is trained.
  runs, folder = [*plan(settings, seeds, given.zip)], Path(given.workdir)
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
    of_runs = {folder / run.folder: ended[run.folder] for run in runs}
    _report({folder / run.folder: run.name or "all" for run in runs}, of_runs, folder)


def _is_result(entry: Any) -> bool:
  """Whether an entry of the table is one that `_train` gives."""
  if not isinstance(entry, dict):
    return False
  scores = entry.get("scores")
  return isinstance(entry.get("error"), str) or (isinstance(scores, dict) and bool(scores))


def _has_settings(workdir: Path, config: config_lib.ConfigDict) -> bool:
  """Whether a run has exactly these settings."""
  expected = json.loads(json.dumps(schema.expand_paths(config).to_dict()))
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


def _report(
  names: Mapping[Path, str], ended: Mapping[Path, Any], folder: Path | None = None
) -> None:
  """Prints the scores of runs with these names, the best first, and draws the best in a folder."""
  finite = [path for path in names if "scores" in ended[path]]
  if not finite:
    where = folder or "these sweeps"
    sys.exit(f"train.learning_rate: expected a finite loss of a run, got none in {where}")
  labels = [names[path] for path in finite]
  records = runs_lib.read_runs(finite, labels)
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
    tests = [ended[path]["scores"].get(score) for path, _ in groups[name]]
    is_finite = None not in tests
    mean = f"{statistics.fmean(tests):.4f}" if is_finite else "-"
    spread = f"{statistics.stdev(tests):.4f}" if is_finite and len(tests) > 1 else "-"
    rows.append([name, len(tests), f"{best[name]:.4f}", mean, spread])
  failed = [f"{name}/{path.name}" for path, name in names.items() if path not in finite]
  rows += [[name, 1, "not finite", "", ""] for name in failed]
  print(f"\n{style.table(['', 'runs', metric, f'test/{score}', 'deviation'], rows)}")
  print(f"\nThe best: {rows[0][0]}")
  if folder is None:
    return print(*runs_lib.notes(records, ("model", "data", "train")), sep="\n")
  chosen = {row[0] for row in rows[: len(style.COLOURS)]}
  drawn = [record for record in records if record.label in chosen]
  every = plots.default_every(drawn)
  picture = plots.draw(drawn, figure="progress", every=every, metric=metric)
  plots.write(picture, folder / "sweep.png")
  print(f"The figure: {folder / 'sweep.png'}")
