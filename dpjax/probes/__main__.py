r"""Probes long-range recall, of mixers trained for it or of a trained run.

  dpjax probes --train --work=runs/probes --json=probes.json --out=probes.png
  dpjax probes runs/quickstart --out=probe.png

With --train, small models of equal size, one for each mixer, learn synthetic tasks
(`dpjax.probes.tasks`): recall, copying, induction. The result is accuracy by the distance of
the answer, on rows as long as in training and 2 and 4 times as long. Each (task, mixer, seed)
becomes a file in --work, so the same command resumes an interrupted comparison; --part=1/3
does a third of the work, and --summary only reads existing files.

For a run of `dpjax train`, the command presents random tokens twice, and compares the nats per
token of the first and the second time.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpjax.analysis import plots
from dpjax.errors import UserError

_MOST_SEEDS = 1000
# Of --tiny, a few seconds a model.
TINY = dict(length=16, window=4, width=16, num_steps=12, batch_size=8, num_test_rows=16)


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains and tests as the command line says, prints a table and writes files."""
  from dpjax.commands import flags as command_line

  with command_line.parsed(_parser(), arguments) as given:
    if given.out:
      plots.check_suffix(given.out)
    if bool(given.run) == (given.train or given.summary):
      raise UserError(
        "run: expected the folder of a run, or --train or --summary, got "
        + ("both" if given.run else "neither")
      )
    if given.run:
      content, table, draw = _probe_run(given)
    else:
      content, table, draw = _compare(given)
    print(table)
    if given.json:
      from dpjax.data import making

      making.write_json(Path(given.json), content)
    if given.out:
      plots.write(draw(content), given.out)


def _parser() -> argparse.ArgumentParser:
  about = "Long-range recall of mixers, or of a run, by distance."
  parser = argparse.ArgumentParser(prog="dpjax probes", description=about)
  parser.add_argument(
    "run", nargs="?", metavar="RUN", type=os.path.expanduser, help="its folder, of dpjax train"
  )
  parser.add_argument("--train", action="store_true", help="train mixers for the tasks")
  parser.add_argument("--summary", action="store_true", help="read what --work has, train nothing")
  parser.add_argument(
    "--work", type=os.path.expanduser, default="runs/probes", help="a folder for what is done"
  )
  parser.add_argument("--mixers", help="a,b; else all that are registered")
  parser.add_argument("--tasks", help="a,b; else recall,copying,induction")
  parser.add_argument("--seeds", type=int, default=3, help="0, 1, ..: how many")
  parser.add_argument("--part", default="1/1", help="i/n: the i-th of n shares of the work")
  parser.add_argument("--tiny", action="store_true", help="small and short: does it run?")
  about = {
    "length": "tokens of training rows",
    "window": "taps of Extractors, and 2**levels of Dispatchers",
    "width": "of attention; the others have as many parameters",
    "num_layers": "blocks of each model",
    "num_steps": "updates",
    "batch_size": "rows of an update",
    "learning_rate": "its peak",
    "num_test_rows": "of each length; of RUN, of each distance",
  }
  for name, text in about.items():
    parser.add_argument(f"--{name}", type=float if name == "learning_rate" else int, help=text)
  parser.add_argument("--json", type=os.path.expanduser, help="a file for the results")
  parser.add_argument(
    "--out", type=os.path.expanduser, help=f"a picture: {', '.join(plots.SUFFIXES)}"
  )
  parser.set_defaults(settings=tuple(about))
  return parser


def _probe_run(given: argparse.Namespace):
  from dpjax import run as run_lib
  from dpjax.commands import flags as command_line
  from dpjax.probes import repeats

  for name in ("mixers", "tasks", *given.settings):
    if getattr(given, name) is not None and name != "num_test_rows":
      raise UserError(f"{name}: expected --train with it, got the folder of a run")
  rows = 64 if given.num_test_rows is None else given.num_test_rows
  if rows < 1:
    raise UserError(f"num_test_rows: expected at least 1, got {rows}")
  command_line.check_platform()
  run = run_lib.load(given.run)
  content = repeats.score(run, repeats.default_periods(run.window), rows, seed=0)
  return content, repeats.format_table(content), repeats.draw


def _compare(given: argparse.Namespace):
  import dataclasses
  import functools

  from dpjax import registry
  from dpjax.commands import flags as command_line
  from dpjax.data import making
  from dpjax.probes import report, tasks, training

  work = Path(given.work)
  there = _read(work / "settings.json") if (work / "settings.json").exists() else {}
  if not {*there} <= {*given.settings}:
    raise UserError(f"work: expected the settings of results in {work}, got {', '.join(there)}")
  values: dict[str, Any] = dict(TINY) if given.tiny else dict(there)
  values |= {x: getattr(given, x) for x in given.settings if getattr(given, x) is not None}
  settings = training.Settings(**values)
  settings.check()
  mixers = _chosen("mixers", given.mixers, registry.mixers.names())
  names = _chosen("tasks", given.tasks, tuple(tasks.TASKS))
  if not 1 <= given.seeds <= _MOST_SEEDS:
    raise UserError(f"seeds: expected 1 to {_MOST_SEEDS:,}, got {given.seeds}")
  first, count = _part(given.part)
  jobs = [(x, y, seed) for seed in range(given.seeds) for x in names for y in mixers]
  for name, before in there.items():
    if values.get(name, before) != before:
      expected = f"{before}, as for the results in {work}, or another folder"
      raise UserError(f"{name}: expected {expected}, got {values[name]}")
  if given.train:
    command_line.check_platform()
    making.write_json(work / "settings.json", dataclasses.asdict(settings))
    trainees = functools.cache(functools.partial(training.Trainee, settings))
    share = jobs[first - 1 :: count]
    for number, (task, mixer, seed) in enumerate(share, 1):
      path = work / f"{task}_{mixer}_{seed}.json"
      if path.exists():
        continue
      found = trainees(mixer).run(task, seed)
      making.write_json(path, {"task": task, "mixer": mixer, "seed": seed, **found})
      loss, seconds = found["loss"], found["seconds"]
      print(f"[{number} of {len(share)}] {path.stem}: loss {loss:.3f}, {seconds} s", flush=True)
  paths = [work / f"{task}_{mixer}_{seed}.json" for task, mixer, seed in jobs]
  records = [_read(path) for path in paths if path.exists()]
  if not records:
    raise UserError(f"work: expected a folder with results, got {work} without")
  missing = len(paths) - len(records)
  chance = {task: tasks.chance(task, settings.contents) for task in names}
  try:
    content = report.summarise(dataclasses.asdict(settings), records, chance)
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(f"work: expected results of this command in {work}, got {error!r}") from error
  note = f"\n\n{missing} of {len(paths)} models are missing." if missing else ""
  return content, report.format_table(content) + note, report.draw


def _chosen(flag: str, names: str | None, known: Sequence[str]) -> list[str]:
  if names is None:
    return list(known)
  wrong = [name for name in names.split(",") if name not in known]
  if wrong:
    raise UserError(f"{flag}: expected some of {', '.join(known)}, got {wrong[0] or 'none'}")
  return list(dict.fromkeys(names.split(",")))


def _part(text: str) -> tuple[int, int]:
  first, _, count = text.partition("/")
  are_numbers = first.isdecimal() and count.isdecimal() and len(text) < 20
  if not (are_numbers and 1 <= int(first) <= int(count)):
    raise UserError(f"part: expected i/n with 1 <= i <= n, got {text}")
  return int(first), int(count)


def _read(path: Path) -> dict[str, Any]:
  """The JSON object in a file of --work."""
  try:
    # Another, as a pipe that nobody writes to, may have no end.
    content = json.loads(path.read_text("utf-8")) if path.is_file() else None
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"work: expected JSON in {path}, got: {error}") from error
  if not isinstance(content, dict):
    raise UserError(f"work: expected a file with a JSON object, got {path}")
  return content


if __name__ == "__main__":
  main()
