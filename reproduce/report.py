"""What the runs of a table gave beside the paper's numbers, as files.

`summarise` turns records of runs into the content of a table, and `write` keeps it as JSON,
Markdown and a figure. Nothing here trains, and JAX is not loaded.
"""

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpjax.analysis import complexity, plots, significance
from dpjax.errors import UserError
from reproduce import pages, papers
from reproduce.figures import draw

SCALES = ("paper", "cpu", "tiny")
# Of two records of one seed the first of these counts.
_STATUSES = ("done", "partial", "diverged", "left_out")


def summarise(
  table: papers.Table, scale: str, records: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
  """Puts the records of runs beside the paper's rows.

  A record is a row's where their configurations are one, so that several tables may share
  a run. Means, sample deviations and tests are over runs that are done, and over scores
  that are finite; a test is `dpjax.analysis.significance.compare`'s, of the seeds that the row and
  the first baseline of its group have in common, at least 2. "is_better" says that it is
  lower than all of them by such a test, p < 0.05.

  Args:
    table: of the kind "runs".
    scale: "paper", "cpu" or "tiny".
    records: of runs; of several of one configuration and seed, the one that came the
      furthest is kept.

  Returns:
    What its JSON holds.
  """
  found: dict[str, dict[int, Mapping[str, Any]]] = {}
  for record in records:
    runs, seed = found.setdefault(record["config"], {}), record["seed"]
    runs[seed] = max(record, runs.get(seed, record), key=_progress)
  rows = [_row(row, table.scores, found.get(row.config, {})) for row in table.rows]
  # Of another vocabulary, so that their scores are of other tokens.
  apart = {row.name for row in table.rows if row.after}
  for row in rows if table.baselines else ():
    bases = [
      x
      for x in rows
      if x["group"] == row["group"]
      and x is not row
      and x["name"].rpartition("/")[2] in table.baselines
    ]
    tests = [_test(row, base, table.scores[0]) for base in bases]
    row["test"] = tests[0] if tests else None
    row["is_better"] = len(tests) == len(table.baselines) and all(
      test is not None and test["verdict"] == "lower" for test in tests
    )
  return {
    **_head(table, scale),
    "seeds": len({run["seed"] for row in rows for run in row["runs"]}),
    "scores": [*table.scores],
    "rows": rows,
    "order": _order(rows, table.scores[0], apart),
  }


def counts(table: papers.Table, scale: str) -> dict[str, Any]:
  """Counts the operations of the Extractors' Table 7 and puts them beside the paper's."""
  ours = complexity.table(length=128, width=128, num_heads=32)
  rows = []
  for label, numbers in papers.TABLE_7.items():
    paper = dict(zip(papers.COUNTS, numbers, strict=True))
    own = {name: getattr(ours[label], name) for name in papers.COUNTS}
    rows.append({"label": label, "paper": paper, "ours": own, "agrees": own == paper})
  return {**_head(table, scale), "rows": rows}


def step_times(
  table: papers.Table, scale: str, points: Sequence[Mapping[str, Any]], planned: int
) -> dict[str, Any]:
  """Puts the points of `reproduce.step_times.measure` under their table's head.

  Args:
    table: of the kind "step_times".
    scale: "paper", "cpu" or "tiny".
    points: those that there are.
    planned: how many there are to be.
  """
  points = [dict(point) for point in points]
  return {**_head(table, scale), "planned": planned, "points": points}


def write(content: Mapping[str, Any], folder: str | Path) -> None:
  """Writes the files of a content: .json, .md and, where there is a figure, .png.

  Their name is `reproduce.pages.file_name`'s. Each is written whole or not
  at all, the JSON first. Numbers that are not finite become null.
  """
  content = _finite(content)
  folder, name = Path(folder), pages.file_name(content["table"], content["scale"])
  lines = json.dumps(content, indent=2, allow_nan=False) + "\n"
  folder.mkdir(parents=True, exist_ok=True)
  _replace(folder / f"{name}.json", lambda path: path.write_text(lines, "utf-8"))
  text, figure = pages.markdown(content), draw(content)
  if figure is not None:
    text += f"\n![{name}]({name}.png)\n"
    _replace(folder / f"{name}.png", lambda path: plots.write(figure, path))
  _replace(folder / f"{name}.md", lambda path: path.write_text(text, "utf-8"))


def read(folder: str | Path, scale: str | None = None) -> list[dict[str, Any]]:
  """Reads what `write` wrote, in the order of `papers.TABLES`, "paper" before "cpu".

  Args:
    folder: of `write`; other files are left alone.
    scale: None reads all.

  Raises:
    ValueError: a file cannot be read.
  """
  scales = SCALES if scale is None else (scale,)
  contents = []
  for name, size in itertools.product(papers.TABLES, scales):
    path = Path(folder) / f"{pages.file_name(name, size)}.json"
    if path.exists():
      try:
        content = json.loads(path.read_text(encoding="utf-8"))
      except (OSError, ValueError) as error:
        raise UserError(f"folder: expected JSON in {path}, got: {error}") from error
      is_table = isinstance(content, dict) and content.get("table") == name
      if not is_table or not {"rows", "points"} & content.keys():
        raise UserError(f"folder: expected a table in {path}, got another JSON")
      contents.append(content)
  return contents


def _head(table: papers.Table, scale: str) -> dict[str, Any]:
  return {
    "table": table.name,
    "title": table.title,
    "source": table.source,
    "scale": scale,
    "kind": table.kind,
    "axis": table.axis,
    "claims": [*table.claims],
  }


def _progress(record: Mapping[str, Any]) -> tuple:
  order = -_STATUSES.index(record["status"])
  return order, record.get("step") or 0, record.get("date") or ""


def _row(
  row: papers.Row, scores: Sequence[str], by_seed: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
  runs = [by_seed[seed] for seed in sorted(by_seed)]
  columns = {score: [*_by_seed(runs, score).values()] for score in scores}
  columns = {score: values for score, values in columns.items() if values}
  return {
    "name": row.name,
    "label": row.label,
    "group": row.group,
    "config": row.config,
    "paper": dict(row.paper),
    "is_starred": row.is_starred,
    "place": row.place,
    "runs": [dict(run) for run in runs],
    "mean": {score: statistics.fmean(x) for score, x in columns.items()},
    "deviation": {
      score: statistics.stdev(x) if len(x) > 1 else None for score, x in columns.items()
    },
    "seeds": sum(run["status"] == "done" for run in runs),
    "test": None,
    "is_better": False,
  }


def _by_seed(runs: Iterable[Mapping[str, Any]], score: str) -> dict[int, float]:
  values = {
    run["seed"]: (run.get("scores") or {}).get(score) for run in runs if run["status"] == "done"
  }
  return {seed: x for seed, x in values.items() if x is not None and math.isfinite(x)}


def _test(row: Mapping[str, Any], base: Mapping[str, Any], score: str) -> dict[str, Any] | None:
  ours, theirs = _by_seed(row["runs"], score), _by_seed(base["runs"], score)
  common = sorted(ours.keys() & theirs.keys())
  if len(common) < 2:
    return None
  pair = {"baseline": theirs, "row": ours}
  chosen = {key: {seed: x[seed] for seed in common} for key, x in pair.items()}
  _, test = significance.compare(chosen, "baseline")
  return {
    "difference": test.difference,
    "p_value": test.p_value,
    "verdict": test.verdict,
    "score": score,
    "baseline": base["name"],
    "seeds": len(common),
  }


def _order(
  rows: Sequence[Mapping[str, Any]], score: str, apart: Container[str]
) -> dict[str, Any] | None:
  same = pairs = printed = 0
  for a, b in itertools.combinations(rows, 2):
    if a["name"] in apart or b["name"] in apart:
      continue
    if a["group"] == b["group"] and score in a["paper"] and score in b["paper"]:
      theirs = a["paper"][score] - b["paper"][score]
      printed += theirs != 0
      if theirs and score in a["mean"] and score in b["mean"]:
        pairs += 1
        same += theirs * (a["mean"][score] - b["mean"][score]) > 0
  if not pairs:
    return None
  return {"score": score, "same": same, "pairs": pairs, "paper_pairs": printed}


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite(x) for key, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(x) for x in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, work: Callable[[Path], Any]) -> None:
  temporary = path.with_name(f".tmp_{path.name}")  # Ends alike: plots.write goes by that.
  try:
    work(temporary)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
