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

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from dpjax import command_line
from dpjax.errors import Interrupted, UserError
from reproduce import papers

PAGE = Path("docs/reproduce.md")

flags.adopt_module_key_flags(command_line)
_FLAGS = (
  flags.DEFINE_string(
    "scale", "paper", "paper; or cpu, small models; or tiny, seconds on Python's manual"
  ),
  flags.DEFINE_integer("seeds", 1, "runs of each experiment, of seeds 0, 1, ..."),
  flags.DEFINE_string(
    "data",
    "",
    "a folder of texts, each a folder or .txt file by its corpus's name (with "
    "_LANGUAGE, where it has several; a stand-in's goes on after that), and of vocabularies "
    "in its folder vocabularies; empty: what is missing is downloaded into data/",
  ),
  flags.DEFINE_string("runs", "runs/reproduce", "where the runs' folders are made"),
  flags.DEFINE_string("out", "results/reproduce", "where the reports are written"),
  flags.DEFINE_float("minutes", 0.0, "no step is begun after so many; 0: no limit"),
  flags.DEFINE_float(
    "minutes_each", 0.0, "nor one of a run that took so many in this call; 0: no limit"
  ),
)


def main(names: str) -> None:
  """Does what is missing of the tables, and prints their reports."""
  # Loaded once the flags are known to be right, as JAX takes a while.
  import jax

  from reproduce import pages, report, scales, work

  given: dict[str, Any] = {flag.name: flag.value for flag in _FLAGS}
  if names == "report":
    contents = report.read(given["out"])
    if not contents:
      raise UserError(f"out: expected a folder with reports, got {given['out']} without")
    if not PAGE.parent.is_dir():
      raise UserError(
        f"report: expected to be started in the repository of dpjax, where {PAGE} is, got "
        f"{Path.cwd()}"
      )
    report.replace(PAGE, pages.page(contents))
    print(f"{pages.headline(contents)}\n{PAGE}")
    return
  tables = papers.find(names)
  for name, is_right, expected in (
    ("scale", given["scale"] in scales.SCALES, f"one of {', '.join(scales.SCALES)}"),
    ("seeds", 1 <= given["seeds"] <= 1000, "at least 1 and at most 1,000"),
    ("minutes", 0 <= given["minutes"] < math.inf, "at least 0"),
    ("minutes_each", 0 <= given["minutes_each"] < math.inf, "at least 0"),
    ("data", not given["data"] or Path(given["data"]).is_dir(), "a folder of texts"),
  ):
    if not is_right:
      raise UserError(f"{name}: expected {expected}, got {given[name]}")
  if jax.process_count() > 1:
    raise UserError(f"num_processes: expected 1, got {jax.process_count()}")
  job, stopped = work.Work(tables, **given), None
  try:
    job.run()
  except Interrupted as error:
    stopped = error
  for content in job.write():
    print(f"\n{pages.markdown(content)}")
  print(f"\nThe reports are in {given['out']}.")
  if stopped is not None:
    raise stopped
  if missing := job.without_result():
    sys.exit("\n".join([f"{len(missing)} without a result:", *missing]))


def _start(arguments: Sequence[str]) -> None:
  # A GPU is shared with the processes whose steps are timed.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if not arguments or arguments[0].startswith("-"):
    if not {"--help", "--helpfull", "-h"} & {*arguments}:
      sys.exit("TABLE: expected a name, all or report as the first word, got none; --help has more")
  else:
    del sys.argv[1]
  command_line.start(lambda _: main(arguments[0]))


if __name__ == "__main__":
  _start(sys.argv[1:])
