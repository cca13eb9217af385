r"""Trains the rows of the papers' tables and puts our numbers beside the papers'.

  python -m reproduce pooling-table2 --scale=tiny
  python -m reproduce pooling-table1 --scale=cpu --seeds=0,1,2 --data=texts
  python -m reproduce all --scale=paper --data=texts

The first word is a table's name, several with commas between them, or "all". Each row and seed is a
run in a folder of its own below --runs, as dpjax train makes it: started again, it resumes. The
report, OUT/TABLE_SCALE.json and .md, is written after each run.

  paper  the paper's settings        cpu  small models, few steps, the same texts
  tiny   seconds, on Python's manual

Status 1: a row has no result.
"""

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import flags

from dpjax import run as run_lib
from dpjax.analysis import runs as runs_lib
from dpjax.commands import flags as command_line
from dpjax.config import ConfigDict
from dpjax.errors import UserError
from dpjax.files import write_json
from dpjax.training.loop import NonFiniteError
from reproduce import papers, scales
from reproduce import report as report_lib

flags.adopt_module_key_flags(command_line)
_SCALE = flags.DEFINE_enum("scale", "paper", scales.SCALES, "the size of models, texts and runs")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "the seeds of each row, with commas between them")
_DATA = flags.DEFINE_string(
  "data",
  "",
  "a folder of texts, each a folder or .txt file by its corpus's name (with _LANGUAGE, where it "
  "has several; the name of a stand-in goes on after that), and of vocabularies in its folder "
  "vocabularies; empty: what is missing is downloaded into data/",
)
_RUNS = flags.DEFINE_string("runs", "runs/reproduce", "where the runs' folders are made")
_OUT = flags.DEFINE_string("out", "results/reproduce", "where the reports are written")


def main(names: str) -> None:
  """Trains what the flags name, and prints the reports."""
  tables = papers.find(names)
  if not all(seed.isdecimal() for seed in _SEEDS.value) or not _SEEDS.value:
    raise UserError(f"seeds: expected integers of at least 0, got {','.join(_SEEDS.value)}")
  if _DATA.value and not Path(_DATA.value).is_dir():
    raise UserError(f"data: expected a folder of texts, got {_DATA.value}")
  missing = 0
  for table in tables:
    report = _report(table)
    # A row that others start from comes first.
    firsts = {row.after for row in table.rows}
    for row in sorted(table.rows, key=lambda row: 2 * bool(row.after) - (row.name in firsts)):
      for seed in _SEEDS.value:
        report["rows"][row.name]["runs"][seed] = _run(row, table, int(seed))
        _write(table, report)
    print("\n" + report_lib.markdown(table, report))
    runs = [run for row in report["rows"].values() for run in row["runs"].values()]
    missing += sum("left_out" in run for run in runs)
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


def _run(row: papers.Row, table: papers.Table, seed: int) -> dict[str, Any]:
  """Trains one row with one seed: its scores, or why there are none."""
  try:
    config, folder = configure(row, seed)
    if row.after:
      (first,) = (other for other in table.rows if other.name == row.after)
      config.train.initial_run = str(configure(first, seed)[1].resolve())
    print(f"\n{row.name}, seed {seed}: {folder}", flush=True)
    run, scores = run_lib.train(config, folder)
    losses = runs_lib.read_losses(folder)
    every = min(config.train.median_every_steps, len(losses))
    scores["median_cost"] = runs_lib.last_median(losses, every)
    jax.clear_caches()  # Otherwise a process keeps the programs of all its models.
    sizes = [leaf.size for leaf in jax.tree.leaves(run.params)]
    return {"scores": scores, "step": len(losses), "best_step": run.step, "parameters": sum(sizes)}
  except (UserError, NonFiniteError, OSError) as error:
    print(error, file=sys.stderr, flush=True)
    return {"left_out": " ".join(str(error).split())}


def _report(table: papers.Table) -> dict[str, Any]:
  """A report without runs."""
  return {
    "table": table.name,
    "source": table.source,
    "scale": _SCALE.value,
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "machine": f"{jax.device_count()} {jax.devices()[0].device_kind}, {platform.processor()}",
    "versions": {name: metadata.version(name) for name in ("dpjax", "jax", "flax", "optax")},
    "rows": {
      row.name: {
        "config": row.config,
        "changes": scales.changes(row.config, _SCALE.value),
        "paper": dict(row.paper),
        "runs": {},
      }
      for row in table.rows
    },
  }


def _write(table: papers.Table, report: Mapping[str, Any]) -> None:
  path = Path(_OUT.value, f"{table.name}_{_SCALE.value}.json")
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
