"""What the runs of a table gave beside the paper's numbers, as files.

`summarise` turns records of runs into the content of a table, and `write` keeps it as JSON,
Markdown and a figure. Nothing here trains.
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpjax import complexity, plots, significance
from dpjax.errors import UserError
from reproduce import figures, pages, papers, scales

# Of two records of one seed the later of these counts.
STATUSES = ("left_out", "partial", "diverged", "done")


def summarise(table: papers.Table, scale: str, records: Iterable[Mapping]) -> dict[str, Any]:
  """Puts the records of runs beside the paper's rows.

  A record is a row's where their configurations are one, so that several tables may share
  a run. Means, sample deviations and tests are over runs that are done, and over scores
  that are finite; a test is `dpjax.significance.compare`'s, of the seeds that the row and
  the first baseline of its group have in common, at least 2. "is_better" says that it is
  lower than all of them by such a test, p < 0.05.
  """
  records = sorted(records, key=lambda record: record["seed"])
  score, rows = table.scores[0], []
  for row in table.rows:
    runs = [record for record in records if record["config"] == row.config]
    scores = {key: [*_by_seed(runs, key).values()] for key in table.scores}
    fields = dataclasses.asdict(row)
    del fields["after"]
    rows.append(
      fields
      | {
        "runs": runs,
        "mean": {key: statistics.fmean(x) for key, x in scores.items() if x},
        "deviation": {
          key: statistics.stdev(x) if len(x) > 1 else None for key, x in scores.items() if x
        },
        "seeds": sum(run["status"] == "done" for run in runs),
        "test": None,
        "is_better": False,
      }
    )
  for row in rows if table.baselines else ():
    of_group = [x for x in rows if x["group"] == row["group"] and x is not row]
    bases = [x for x in of_group if x["name"].rpartition("/")[2] in table.baselines]
    tests = [_test(row, base, score) for base in bases]
    row["test"] = tests[0] if tests else None
    row["is_better"] = len(tests) == len(table.baselines) and all(
      test is not None and test["verdict"] == "lower" for test in tests
    )
  # What began with another run has another vocabulary: its scores are of other tokens.
  apart = {row.name for row in table.rows if row.after}
  return {
    **_head(table, scale),
    "seeds": len({run["seed"] for row in rows for run in row["runs"]}),
    "scores": [*table.scores],
    "rows": rows,
    "order": _order([row for row in rows if row["name"] not in apart], score),
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


def step_times(table: papers.Table, scale: str, points: Sequence, planned: int) -> dict[str, Any]:
  """Puts points of `reproduce.step_times.measure`, of `planned` ones, under their head."""
  return {**_head(table, scale), "planned": planned, "points": [*points]}


def write(content: Mapping[str, Any], folder: str | Path) -> None:
  """Writes the files of a content: .json, .md and, where there is a figure, .png.

  Their name is `reproduce.pages.file_name`'s. Each is written whole or not at all. Numbers
  that are not finite become null.
  """
  content = _finite(content)
  name = pages.file_name(content["table"], content["scale"])
  path = Path(folder, name)
  path.parent.mkdir(parents=True, exist_ok=True)
  replace(path.with_suffix(".json"), json.dumps(content, indent=2, allow_nan=False) + "\n")
  text, figure = pages.markdown(content), figures.draw(content)
  if figure is not None:
    text += f"\n![{name}]({name}.png)\n"
    temporary = path.with_name(f".tmp_{name}.png")
    plots.write(figure, temporary)
    os.replace(temporary, path.with_suffix(".png"))
  replace(path.with_suffix(".md"), text)


def replace(path: Path, text: str) -> None:
  """Writes a file whole, or leaves the one that is there."""
  temporary = path.with_name(f".tmp_{path.name}")
  temporary.write_text(text, encoding="utf-8")
  os.replace(temporary, path)


def read(folder: str | Path, scale: str | None = None) -> list[dict[str, Any]]:
  """Reads what `write` wrote, of a scale or of all, in the order of `papers.TABLES`.

  Raises:
    ValueError: a file cannot be read.
  """
  contents = []
  for name, size in itertools.product(
    papers.TABLES, scales.SCALES[::-1] if scale is None else (scale,)
  ):
    path = Path(folder) / f"{pages.file_name(name, size)}.json"
    if path.exists():
      try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["table"] != name or not {"rows", "points"} & {*content}:
          raise ValueError("another JSON")
      except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"folder: expected a table in {path}, got: {error}") from error
      contents.append(content)
  return contents


def _head(table: papers.Table, scale: str) -> dict[str, Any]:
  keys = ("title", "source", "kind", "axis")
  fields = {key: getattr(table, key) for key in keys}
  return {"table": table.name, "scale": scale, **fields, "claims": [*table.claims]}


def _by_seed(runs: Iterable[Mapping[str, Any]], score: str) -> dict[int, float]:
  done = {run["seed"]: run["scores"].get(score) for run in runs if run["status"] == "done"}
  return {seed: x for seed, x in done.items() if x is not None and math.isfinite(x)}


def _test(row: Mapping[str, Any], base: Mapping[str, Any], score: str) -> dict[str, Any] | None:
  ours, theirs = _by_seed(row["runs"], score), _by_seed(base["runs"], score)
  common = sorted(ours.keys() & theirs.keys())
  if len(common) < 2:
    return None
  pair = {"baseline": theirs, "row": ours}
  chosen = {key: {seed: x[seed] for seed in common} for key, x in pair.items()}
  _, test = significance.compare(chosen, "baseline")
  fields = {key: getattr(test, key) for key in ("difference", "p_value", "verdict")}
  return fields | {"score": score, "baseline": base["name"], "seeds": len(common)}


def _order(rows: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any] | None:
  """Of how many pairs of a group, whose numbers the paper has apart, ours agree."""
  same = pairs = printed = 0
  for a, b in itertools.combinations(rows, 2):
    if a["group"] == b["group"] and score in a["paper"] and score in b["paper"]:
      theirs = a["paper"][score] - b["paper"][score]
      printed += theirs != 0
      if theirs and score in a["mean"] and score in b["mean"]:
        pairs += 1
        same += theirs * (a["mean"][score] - b["mean"][score]) > 0
  found = {"score": score, "same": same, "pairs": pairs, "paper_pairs": printed}
  return found if pairs else None


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite(x) for key, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(x) for x in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
