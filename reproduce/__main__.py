r"""Trains the rows of the papers' tables and puts our numbers beside the papers'.

  python -m reproduce pooling-table2 --scale=tiny
  python -m reproduce pooling-table1 --scale=cpu --seeds=0,1,2 --data=texts
  python -m reproduce all --scale=paper --data=texts

The first argument names a table, several separated by commas, or "all". Each row and seed is a run
in its own folder below --runs, as dpjax train makes it: started again, it resumes. The
report, OUT/TABLE_SCALE.json and .md, is written after each run.

  paper  the paper's settings        cpu  small models, few steps, the same texts
  tiny   seconds, on Python's manual

If an accelerator is available only for minutes, tokenize elsewhere, then train within a time limit:

  python -m reproduce dispatcher-table1 --data=texts --rows=ptb/dispatcher,ptb/msa --tokenize=tokens
  python -m reproduce dispatcher-table1 --data=tokens --rows=ptb/dispatcher,ptb/msa --minutes=9

Exits with status 1 if a row has no result.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dpjax
from dpjax.commands import command_line
from dpjax.config import ConfigDict
from dpjax.errors import UserError
from dpjax.files import read_json, write_json
from reproduce import papers, scales
from reproduce import report as report_lib
from reproduce import rows as rows_lib


class _Options(NamedTuple):
  """The arguments of the command."""

  scale: str
  seeds: list[str]
  rows: list[str]
  minutes: float
  data: str
  tokenize: str
  runs: str
  out: str


def _parser() -> command_line.Parser:
  parser = command_line.Parser("reproduce", __doc__)
  about = "the size of models, texts and runs"
  parser.add_argument("--scale", choices=scales.SCALES, default="paper", help=about)
  about = "comma-separated seeds of each row"
  parser.add_argument("--seeds", type=_words, default=["0"], help=about)
  about = "rows to train, in this order; default: all rows of the tables"
  parser.add_argument("--rows", type=_words, default=[], help=about)
  about = """the time limit, 0 for none. Runs in the reports of --out are kept. The time of other
  runs is estimated from their first updates; one that needs more than is left is stopped and
  listed"""
  parser.add_argument("--minutes", type=minutes, default=0.0, help=about)
  about = """a folder of texts, each a folder or .txt file by its corpus's name (the name of a
  stand-in goes on after that), and of vocabularies in its folder vocabularies; or a folder that
  --tokenize made; by default, what is missing is downloaded into data/"""
  parser.add_argument("--data", type=command_line.path, help=about)
  about = "a folder for the tokens of the rows, to use as --data elsewhere; trains nothing"
  parser.add_argument("--tokenize", type=command_line.local_path, help=about)
  for name, about in (("runs", "the runs' folders"), ("out", "the reports")):
    folder = "runs/reproduce" if name == "runs" else "results/reproduce"
    about = f"where {about} are written"
    parser.add_argument(f"--{name}", type=command_line.local_path, default=folder, help=about)
  return parser


def _words(text: str) -> list[str]:
  return [word for word in text.split(",") if word]


def minutes(text: str) -> float:
  """A finite number of at least 0; argparse names the function in its message."""
  if not 0 <= (value := float(text)) < math.inf:
    raise ValueError
  return value


def main(names: str, options: _Options) -> None:
  """Trains the selected rows, and prints the reports."""
  end = time.perf_counter() + 60 * options.minutes if options.minutes else math.inf
  tables = papers.find(names)
  rows = papers.select(tables, options.rows)
  if not all(seed.isdecimal() for seed in options.seeds) or not options.seeds:
    raise UserError(f"seeds: expected integers of at least 0, got {','.join(options.seeds)}")
  if options.data and not Path(options.data).is_dir():
    raise UserError(f"data: expected a folder of texts, got {options.data}")
  if options.tokenize:
    for table, row in rows:
      _tokenize(_Job(table, row, 0, options), Path(options.tokenize))
    return
  reports = {table.name: _report(table, options) for table in tables}
  runs = [_Job(table, row, int(seed), options) for table, row in rows for seed in options.seeds]
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
    _write(job.table, reports[job.table.name], options)
  for table in tables:
    print("\n" + report_lib.markdown(table, reports[table.name]))
  if missing:
    sys.exit(f"{len(missing)} runs have no result: {'; '.join(missing)}")


class _Job(NamedTuple):
  """One run: a row of a table with a seed."""

  table: papers.Table
  row: papers.Row
  seed: int
  options: _Options

  def configure(self) -> tuple[ConfigDict, Path]:
    """The configuration of the run and its folder; `UserError` if its text is missing."""
    options = self.options
    config = scales.configure(self.row.config, options.scale)
    config.seed = self.seed
    text, path = scales.find_text(config, options.data)
    if path is not None:
      config.data.path = str(path.resolve())
      config.data.manual_dir = str(Path(options.data, "vocabularies"))
    config.data.data_dir = str(Path(options.runs, "data"))
    scales.cut(config, options.scale)
    for row in self.table.rows:
      if row.name == self.row.after:
        config.train.init_from = str(self._replace(row=row).configure()[1].resolve())
    slug = self.row.config.removeprefix("configs/").replace(".py", "").replace(":", "_")
    return config, Path(options.runs, options.scale, text, slug, f"seed_{self.seed}")


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
  # The row's time with another seed, or its earlier estimate.
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
  text, _ = scales.find_text(config, job.options.data)
  target = folder / text / scales.tokens_name(config)
  if not target.exists():
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(dpjax.runs.tokenize_only(config, workdir).folder, partial)
    partial.rename(target)
  print(f"{job.row.name}: {target}", flush=True)


def _report(table: papers.Table, options: _Options) -> dict[str, Any]:
  """An empty report, or with --minutes the existing one."""
  before = read_json(_path(table, options)).get("rows", {}) if options.minutes else {}
  return {
    "table": table.name,
    "source": table.source,
    "scale": options.scale,
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "rows": {
      row.name: {
        "config": row.config,
        "changes": scales.changes(row.config, options.scale),
        "paper": dict(row.paper),
        "runs": before.get(row.name, {}).get("runs", {}),
      }
      for row in table.rows
    },
  }


def _path(table: papers.Table, options: _Options) -> Path:
  return Path(options.out, f"{table.name}_{options.scale}.json")


def _write(table: papers.Table, report: Mapping[str, Any], options: _Options) -> None:
  path = _path(table, options)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_json(path, json.loads(json.dumps(report)))
  path.with_suffix(".md").write_text(report_lib.markdown(table, report), encoding="utf-8")


if __name__ == "__main__":
  is_named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
  if not is_named and not {"--help", "-h"} & {*sys.argv}:
    sys.exit("TABLE: expected a name or all as the first word, got none; --help has more")
  table_names = sys.argv.pop(1) if is_named else ""

  def _main(options: Any) -> None:
    main(table_names, _Options(*(getattr(options, name) for name in _Options._fields)))

  command_line.start(_parser(), _main)
