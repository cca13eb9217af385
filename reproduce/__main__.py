r"""Trains the rows of the papers' tables and puts our numbers beside the papers'.

  python -m reproduce pooling-table2 --scale=tiny
  python -m reproduce pooling-table1 --scale=cpu --seeds=0,1,2 --data=texts
  python -m reproduce all --scale=paper --data=texts

The first word is a table's name, several with commas between them, or "all". Each row and seed is a
run in a folder of its own below --runs, as dpjax train makes it: started again, it resumes. The
report, OUT/TABLE_SCALE.json and .md, is written after each run.

  paper  the paper's settings        cpu  small models, few steps, the same texts
  tiny   seconds, on Python's manual

If an accelerator is available only for minutes, tokenize on another machine, then train in time:

  python -m reproduce dispatcher-table1 --data=texts --rows=ptb/dispatcher,ptb/msa --tokenize=tokens
  python -m reproduce dispatcher-table1 --data=tokens --rows=ptb/dispatcher,ptb/msa --minutes=9

Status 1: a row has no result.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from dpjax import run as run_lib
from dpjax.commands import flags as command_line
from dpjax.config import ConfigDict
from dpjax.errors import UserError
from dpjax.files import read_json, write_json
from reproduce import papers, scales
from reproduce import report as report_lib
from reproduce import rows as rows_lib

flags.adopt_module_key_flags(command_line)
_SCALE = flags.DEFINE_enum("scale", "paper", scales.SCALES, "the size of models, texts and runs")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "the seeds of each row, with commas between them")
_ROWS = flags.DEFINE_list("rows", [], "rows to train, in this order; without, all of the tables'")
_MINUTES = flags.DEFINE_float(
  "minutes",
  0.0,
  "the time limit, 0 for none. Runs in the reports of --out are kept. The time of other runs is "
  "estimated from their first updates, and one that needs more than is left is stopped and listed",
  lower_bound=0.0,
)
_DATA = flags.DEFINE_string(
  "data",
  "",
  "a folder of texts, each a folder or .txt file by its corpus's name (the name of a "
  "stand-in goes on after that), and of vocabularies in its folder "
  "vocabularies; or a folder that --tokenize made; empty: what is missing is downloaded into data/",
)
_TOKENIZE = flags.DEFINE_string(
  "tokenize", "", "a folder for the tokens of the rows, to use as --data elsewhere; trains nothing"
)
_RUNS = flags.DEFINE_string("runs", "runs/reproduce", "where the runs' folders are made")
_OUT = flags.DEFINE_string("out", "results/reproduce", "where the reports are written")


def main(names: str) -> None:
  """Trains what the flags name, and prints the reports."""
  end = time.perf_counter() + 60 * _MINUTES.value if _MINUTES.value else math.inf
  tables = papers.find(names)
  rows = papers.select(tables, _ROWS.value)
  if not all(seed.isdecimal() for seed in _SEEDS.value) or not _SEEDS.value:
    raise UserError(f"seeds: expected integers of at least 0, got {','.join(_SEEDS.value)}")
  if _DATA.value and not Path(_DATA.value).is_dir():
    raise UserError(f"data: expected a folder of texts, got {_DATA.value}")
  if _TOKENIZE.value:
    for table, row in rows:
      _tokenize(_Job(table, row, 0), Path(_TOKENIZE.value))
    return
  reports = {table.name: _report(table) for table in tables}
  runs = [_Job(table, row, int(seed)) for table, row in rows for seed in _SEEDS.value]
  entries = [reports[job.table.name]["rows"][job.row.name]["runs"] for job in runs]
  missing = []
  for i, (job, entry) in enumerate(zip(runs, entries, strict=True)):
    print(f"\n{job.row.name}, seed {job.seed}", flush=True)
    if _has_result(job, entry):
      print("The report has it.", flush=True)
      continue
    others = zip(runs[i + 1 :], entries[i + 1 :], strict=True)
    following = (x for x, known in others if x.row is not job.row and not _has_result(x, known))
    entry[str(job.seed)] = _train(job, entry, end, next(following, None))
    if "left_out" in entry[str(job.seed)]:
      missing.append(f"{job.row.name}, seed {job.seed}")
    _write(job.table, reports[job.table.name])
  for table in tables:
    print("\n" + report_lib.markdown(table, reports[table.name]))
  if missing:
    sys.exit(f"{len(missing)} runs have no result: {'; '.join(missing)}")


class _Job(NamedTuple):
  """One run: a row of a table with a seed."""

  table: papers.Table
  row: papers.Row
  seed: int

  def configure(self) -> tuple[ConfigDict, Path]:
    """The configuration of the run and its folder; a `UserError` without its text."""
    config = scales.configure(self.row.config, _SCALE.value)
    config.seed = self.seed
    text, path = scales.find_text(config, _DATA.value)
    if path is not None:
      config.data.path = str(path.resolve())
      config.data.manual_dir = str(Path(_DATA.value, "vocabularies"))
    config.data.data_dir = str(Path(_RUNS.value, "data"))
    scales.cut(config, _SCALE.value)
    for row in self.table.rows:
      if row.name == self.row.after:
        config.train.init_from = str(self._replace(row=row).configure()[1].resolve())
    slug = self.row.config.removeprefix("configs/").replace(".py", "").replace(":", "_")
    return config, Path(_RUNS.value, _SCALE.value, text, slug, f"seed_{self.seed}")


def _has_result(job: _Job, entry: Mapping[str, Any]) -> bool:
  """Whether the report has the scores of a run with these settings."""
  run = entry.get(str(job.seed), {})
  if "scores" not in run:
    return False
  try:
    return run.get("settings") == scales.settings(job.configure()[0])
  except UserError:  # Without its text it cannot be trained again.
    return True


def _train(
  job: _Job, entry: Mapping[str, Any], end: float, following: _Job | None
) -> dict[str, Any]:
  """Trains one run, if there is time, and returns its entry in the report."""
  # What the row took with another seed, or what it was expected to take before.
  sizes = [run.get("seconds", run.get("expected_seconds", 0.0)) for run in entry.values()]
  expected = max(sizes, default=0.0) or rows_lib.LAST_SECONDS
  if expected > (left := end - time.perf_counter()):
    reason = f"needs about {expected:.0f} seconds; {max(0.0, left):.0f} are left"
    print(reason, file=sys.stderr, flush=True)
    return {"left_out": reason, **({"expected_seconds": expected} if any(sizes) else {})}

  def plan_following() -> rows_lib.Plan | None:
    return following and rows_lib.Plan.make(*following.configure())

  try:
    config, folder = job.configure()
  except UserError as error:
    print(error, file=sys.stderr, flush=True)
    return {"left_out": " ".join(str(error).split())}
  return rows_lib.train(config, folder, end, job.table.scores, plan_following)


def _tokenize(job: _Job, folder: Path) -> None:
  """Copies the tokens of a run into FOLDER/TEXT/TOKENIZER, unless they are there."""
  config, workdir = job.configure()
  text, _ = scales.find_text(config, _DATA.value)
  target = folder / text / scales.tokens_name(config)
  if not target.exists():
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run_lib.tokenize(config, workdir).folder, partial)
    partial.rename(target)
  print(f"{job.row.name}: {target}", flush=True)


def _report(table: papers.Table) -> dict[str, Any]:
  """A report without runs, or with --minutes the one that is there."""
  before = read_json(_path(table)).get("rows", {}) if _MINUTES.value else {}
  return {
    "table": table.name,
    "source": table.source,
    "scale": _SCALE.value,
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "rows": {
      row.name: {
        "config": row.config,
        "changes": scales.changes(row.config, _SCALE.value),
        "paper": dict(row.paper),
        "runs": before.get(row.name, {}).get("runs", {}),
      }
      for row in table.rows
    },
  }


def _path(table: papers.Table) -> Path:
  return Path(_OUT.value, f"{table.name}_{_SCALE.value}.json")


def _write(table: papers.Table, report: Mapping[str, Any]) -> None:
  path = _path(table)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_json(path, json.loads(json.dumps(report)))
  path.with_suffix(".md").write_text(report_lib.markdown(table, report), encoding="utf-8")


if __name__ == "__main__":
  if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    if not {"--help", "--helpfull", "-h"} & {*sys.argv}:
      sys.exit("TABLE: expected a name or all as the first word, got none; --help has more")
    command_line.start(lambda _: None)
  else:
    table_names = sys.argv.pop(1)
    command_line.start(lambda _: main(table_names))
