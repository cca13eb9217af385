r"""Trains the rows of the papers' tables and puts our numbers beside the papers'.

  python -m reproduce pooling-table2 --scale=tiny
  python -m reproduce pooling-table1 --scale=cpu --seeds=0,1,2 --data=texts
  python -m reproduce all --scale=paper --data=texts

The first word is a table's name, several with commas between them, or "all". Each row and seed is a
run in a folder of its own below --runs, as dpjax train makes it: started again, it resumes. The
report, OUT/TABLE_SCALE.json and .md, is written after each run.

  paper  the paper's settings        cpu  small models, few steps, the same texts
  tiny   seconds, on Python's manual

For an accelerator that is there for minutes, make the tokens elsewhere, then train what fits:

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
from typing import Any

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
  "train what fits into this time: runs that the reports in --out have are kept, each other one is "
  "timed by its first updates, and one that does not fit is named; 0: no limit",
  lower_bound=0.0,
)
_DATA = flags.DEFINE_string(
  "data",
  "",
  "a folder of texts, each a folder or .txt file by its corpus's name (with _LANGUAGE, where it "
  "has several; the name of a stand-in goes on after that), and of vocabularies in its folder "
  "vocabularies; or a folder that --tokenize made; empty: what is missing is downloaded into data/",
)
_TOKENIZE = flags.DEFINE_string(
  "tokenize", "", "a folder for the tokens of the rows, to be --data elsewhere; trains nothing"
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
    for _, row in rows:
      _tokenize(row, Path(_TOKENIZE.value))
    return
  reports = {table.name: _report(table) for table in tables}
  runs = [(table, row, int(seed)) for table, row in rows for seed in _SEEDS.value]
  missing = 0
  for i, (table, row, seed) in enumerate(runs):
    report = reports[table.name]
    known = report["rows"][row.name]["runs"]
    if "scores" in known.get(str(seed), {}):
      print(f"\n{row.name}, seed {seed}: in the report already", flush=True)
      continue
    print(f"\n{row.name}, seed {seed}", flush=True)
    following = next((x for x in runs[i + 1 :] if x[1] is not row), None)
    known[str(seed)] = _train(known, row, table, seed, end, following)
    missing += "left_out" in known[str(seed)]
    _write(table, report)
  for table in tables:
    print("\n" + report_lib.markdown(table, reports[table.name]))
  if missing:
    sys.exit(f"{missing} runs have no result")


def configure(row: papers.Row, seed: int) -> tuple[ConfigDict, Path]:
  """The configuration of a run and its folder.

  Raises:
    ValueError: its text is not in the folder of texts.
  """
  config = scales.configure(row.config, _SCALE.value)
  config.seed = seed
  text, path = scales.find_text(config, _DATA.value)
  if path is not None:
    config.data.path = str(path.resolve())
    config.data.manual_dir = str(Path(_DATA.value, "vocabularies"))
    config.data.language = config.data.language if config.data.clean else ""
  config.data.data_dir = str(Path(_RUNS.value, "data"))
  slug = row.config.removeprefix("configs/").replace(".py", "").replace(":", "_")
  return config, Path(_RUNS.value, _SCALE.value, text, slug, f"seed_{seed}")


def _train(
  known: Mapping[str, Any], row: papers.Row, table: papers.Table, seed: int, end: float, following
) -> dict[str, Any]:
  """Trains one row with one seed, if there is time: what the report says of it."""
  # What the row took with another seed, or what it was expected to take before.
  sizes = [run.get("seconds", run.get("expected_seconds")) for run in known.values()]
  expected, left = (
    max(filter(None, sizes), default=rows_lib.LAST_SECONDS),
    end - time.perf_counter(),
  )
  if expected > left:
    reason = f"needs about {expected:.0f} seconds, of which {max(0.0, left):.0f} are left"
    print(reason, file=sys.stderr, flush=True)
    return {**known.get(str(seed), {}), "left_out": reason}
  try:
    config, folder = configure(row, seed)
    if row.after:
      (first,) = (other for other in table.rows if other.name == row.after)
      config.train.initial_run = str(configure(first, seed)[1].resolve())
  except UserError as error:
    print(error, file=sys.stderr, flush=True)
    return {"left_out": " ".join(str(error).split())}

  def plan_following() -> rows_lib.Plan | None:
    return following and rows_lib.Plan.make(*configure(following[1], following[2]))

  return rows_lib.train(config, folder, end, table.scores, plan_following)


def _tokenize(row: papers.Row, folder: Path) -> None:
  """Copies the tokens of a row into FOLDER/TEXT/TOKENIZER, unless they are there."""
  config, workdir = configure(row, 0)
  text, path = scales.find_text(config, _DATA.value)
  target = folder / text / scales.tokens_name(config)
  if not target.exists():
    made = run_lib.tokenize(config, workdir)
    shutil.copytree(made.folder, target)
  print(f"{row.name}: {target}", flush=True)


def _report(table: papers.Table) -> dict[str, Any]:
  """A report without runs; with a time, with those that it has already."""
  before = read_json(_path(table)) if _MINUTES.value else {}
  rows: dict[str, Any] = {
    row.name: {
      "config": row.config,
      "changes": scales.changes(row.config, _SCALE.value),
      "paper": dict(row.paper),
      "runs": {},
    }
    for row in table.rows
  }
  for name, row in before.get("rows", {}).items():
    if name in rows and all(row[key] == rows[name][key] for key in ("config", "changes")):
      rows[name]["runs"] = row["runs"]
  return {
    "table": table.name,
    "source": table.source,
    "scale": _SCALE.value,
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "rows": rows,
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
