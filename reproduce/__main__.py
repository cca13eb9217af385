r"""Runs the papers' tables and figures, and reports ours beside theirs.

  python -m reproduce extractors-table7
  python -m reproduce pooling-table1 --scale=cpu --seeds=3 --data=texts
  python -m reproduce all --scale=paper --data=texts --minutes=25 --minutes_each=4
  python -m reproduce report

The first word is a table's name, or several with commas between them, or "all", the most
valuable first. What is finished, by the reports in --out, is not done again, and a run that
was stopped goes on. "report" writes docs/reproduce.md anew, from results/reproduce.

Status 1: some of it has no result, and not for want of time. 128 + a signal's number: the
signal ended it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from dpjax.commands import flags as command_line
from dpjax.errors import UserError
from reproduce import papers

PAGE = "docs/reproduce.md"
_MOST_SEEDS = 1000

flags.adopt_module_key_flags(command_line)
_SCALE = flags.DEFINE_string(
  "scale", "paper", "paper; or cpu, small models; or tiny, seconds on Python's manual"
)
_SEEDS = flags.DEFINE_integer("seeds", 1, "runs of each experiment, of seeds 0, 1, ...")
_DATA = flags.DEFINE_string(
  "data",
  "",
  "a folder of texts, each a folder or .txt file by its corpus's name (with "
  "_LANGUAGE, where it has several; a stand-in's goes on after that), and of vocabularies "
  "in its folder vocabularies; empty: what is missing is downloaded into data/",
)
_RUNS = flags.DEFINE_string("runs", "runs/reproduce", "where the runs' folders are made")
_OUT = flags.DEFINE_string("out", "results/reproduce", "where the reports are written")
_MINUTES = flags.DEFINE_float("minutes", 0.0, "no step is begun after so many; 0: no limit")
_MINUTES_EACH = flags.DEFINE_float(
  "minutes_each", 0.0, "nor one of a run that took so many in this call; 0: no limit"
)


def main(names: str) -> None:
  """Does what is missing of the tables, and prints their reports."""
  # Loaded once the flags are known to be right, as JAX takes a while.
  from reproduce import experiment, pages, report, work

  if names == "report":
    contents = report.read(_OUT.value)
    if not contents:
      raise UserError(f"out: expected a folder with reports, got {_OUT.value} without")
    path = Path(PAGE)
    if not path.parent.is_dir():
      raise UserError(
        f"report: expected to be started in the repository of dpjax, where "
        f"{path} is, got {Path.cwd()}"
      )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(pages.page(contents), encoding="utf-8")
    os.replace(temporary, path)
    print(f"{pages.headline(contents)}\n{path}")
    return
  tables = papers.find(names)
  if _SEEDS.value > _MOST_SEEDS:
    raise UserError(f"seeds: expected at most {_MOST_SEEDS:,}, got {_SEEDS.value}")
  job = work.Work(
    tables,
    work.Settings(
      _SCALE.value,
      _SEEDS.value,
      _DATA.value,
      _RUNS.value,
      _OUT.value,
      _MINUTES.value,
      _MINUTES_EACH.value,
    ),
  )
  stopped = None
  try:
    job.run()
  except experiment.Stopped as error:
    stopped = error
  for content in job.write():
    print(f"\n{pages.markdown(content)}")
  print(f"\nThe reports are in {_OUT.value}.")
  if stopped is not None:
    raise stopped
  missing = job.without_result()
  if missing:
    sys.exit("\n".join([f"{len(missing)} without a result:", *missing]))


def _start(arguments: Sequence[str]) -> None:
  if not arguments or arguments[0].startswith("-"):
    if not {"--help", "--helpfull", "-h"} & {*arguments}:
      sys.exit("TABLE: expected a name, all or report as the first word, got none; --help has more")
  else:
    del sys.argv[1]
  command_line.start(lambda _: main(arguments[0]))


if __name__ == "__main__":
  _start(sys.argv[1:])
