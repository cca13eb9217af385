"""Training costs of runs: medians, and a table of them.

Source: "Attention Is Not All You Need Anymore", Sec. 6.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.analysis.folders import (
  REPORTING,
  Record,
  by_seed,
  differences,
  distinct_labels,
  is_of,
  setting,
)
from dpjax.errors import UserError

# Where a line of the figures "by ..." has its points, and the name of that axis.
PLACES = {
  "by_length": ("model.max_length", "context window (tokens)"),
  "by_layers": ("model.num_layers", "layers"),
}
# What runs may differ in and still be compared: the mixer and its parts, and how a run
# reports. With a section goes all that is in it; the others were settings of the model in
# version 0.1.
_FREE = (
  "model.mixer",
  *(
    f"model.{name}"
    for name in (
      "num_heads",
      "num_levels",
      "attention_bias",
      "adjustment",
      "output_projection",
      "implementation",
    )
  ),
  *REPORTING,
)


def medians(losses: np.ndarray, every: int) -> np.ndarray:
  """Takes the median of each non-overlapping window of updates.

    >>> medians(np.array([5., 3., 4., 9., 2., np.nan, 1., 7.]), every=3)
    array([4. , 5.5])

  Window i holds the updates `every` i + 1 .. `every` (i + 1), counted from 1. Updates after
  the last complete window are dropped. Unknown losses (NaN) are ignored; a window of
  nothing but unknown losses is NaN.

  Args:
    losses: [N], nats per token.
    every: updates in a window, from 1 to N.

  Returns:
    [N // every], float64, nats per token.

  Raises:
    ValueError: `every` is out of range.
  """
  check_every(losses, every, "the losses")
  count = len(losses) // every
  return np.array([_median(part) for part in losses[: count * every].reshape(count, -1)])


def last_median(losses: np.ndarray, every: int) -> float:
  """Takes the median of the last `every` updates.

  Args:
    losses: [N], nats per token.
    every: the number of updates, from 1 to N.

  Returns:
    Nats per token; NaN if none of the losses is known.

  Raises:
    ValueError: `every` is out of range.
  """
  check_every(losses, every, "the losses")
  return _median(losses[-every:])


def table(
  runs: Sequence[Record], every: int, figure: str = "curves", metric: str | None = None
) -> dict[str, Any]:
  """Collects the medians of runs, and notes on differences that make them hard to compare.

  Args:
    runs: at least one.
    every: updates in a window.
    figure: a figure of `dpjax.analysis.plots`; no note is made of the lengths in "by_length" and
      of the layers in "by_layers".
    metric: a logged score to collect as well, such as "valid/perplexity".

  Returns:
    A dictionary that JSON can hold, with None for unknown numbers: "every", "updates" (the
    last one of each window), "runs", each with "name", "folder", "updates", "unknown"
    (losses), "max_length", "num_layers", "medians" and "last"; and "notes", one sentence
    each. With a metric, also its name, "metric", and for each run "scores", pairs of update
    and value.

  Raises:
    ValueError: a run has fewer updates than `every`.
  """
  rows = []
  for run, name in zip(runs, distinct_labels(runs), strict=True):
    check_every(run.losses, every, run.folder)
    rows.append(
      {
        "name": name,
        "folder": run.folder,
        "updates": len(run.losses),
        "unknown": int(np.isnan(run.losses).sum()),
        "max_length": setting(run.config, "model.max_length"),
        "num_layers": setting(run.config, "model.num_layers"),
        "medians": [_number(value) for value in medians(run.losses, every)],
        "last": _number(last_median(run.losses, every)),
      }
    )
    if metric is not None:
      rows[-1]["scores"] = [[*pair] for pair in sorted(run.scores.get(metric, {}).items())]
  windows = max(len(row["medians"]) for row in rows)
  content = {
    "every": every,
    "updates": [every * (i + 1) for i in range(windows)],
    "runs": rows,
    "notes": _notes(runs, figure),
  }
  return content if metric is None else content | {"metric": metric}


def format_table(content: Mapping[str, Any]) -> str:
  """Formats the result of `table`: a line for each run, a column for each window, then notes."""
  every, updates = content["every"], content["updates"]
  rows = []
  for row in content["runs"]:
    missing = [""] * (len(updates) - len(row["medians"]))
    rows.append((row["name"], [*map(_cell, row["medians"]), *missing, _cell(row["last"])]))
  title = f"Median training cost of {every} batches, nats per token; up to batch:"
  return _lay_out(title, [*map(str, updates), "last"], rows, content["notes"])


def format_scores(content: Mapping[str, Any]) -> str:
  """Formats the metric in the result of `table` beside the last costs: one line for each run."""
  every = content["every"]
  title = f"Median cost of the last {every} batches, nats per token"
  if every == 1:
    title = "Cost of the last batch, nats per token"
  heads, rows = ["batches", "cost"], []
  if content.get("metric"):
    title += f"; {content['metric']}"
    heads += ["last", "lowest", "at batch"]
  for row in content["runs"]:
    cells = [f"{row['updates']:,}", _cell(row["last"])]
    if scores := row.get("scores"):
      lowest_at, lowest = min(scores, key=lambda pair: pair[1])
      cells += [_cell(scores[-1][1]), _cell(lowest), f"{lowest_at:,}"]
    rows.append((row["name"], cells))
  return _lay_out(f"{title}:", heads, rows, content["notes"])


def _lay_out(
  title: str,
  heads: Sequence[str],
  rows: Sequence[tuple[str, Sequence[str]]],
  notes: Sequence[str],
) -> str:
  first, width = max(len(name) for name, _ in rows), max(8, *map(len, heads))
  lines = [
    "  ".join([name.ljust(first), *(cell.rjust(width) for cell in cells)])
    for name, cells in [("", heads), *rows]
  ]
  if notes:
    lines += ["", "To be compared with care:", *(f"  {note}" for note in notes)]
  return "\n".join([title, "", *lines])


def _notes(runs: Sequence[Record], figure: str) -> list[str]:
  """Sentences on settings that differ besides the mixer, and on missing losses."""
  free = (*_FREE, *PLACES.get(figure, ())[:1])
  columns = {key: column for key, column in differences(runs).items() if not is_of(key, free)}
  seeds = [sorted(str(run.config.get("seed")) for run in group) for group in by_seed(runs)]
  if all(of_group == seeds[0] for of_group in seeds):  # As many runs of each.
    columns.pop("seed", None)
  columns["updates"] = [len(run.losses) for run in runs]
  names, notes = distinct_labels(runs), []
  for key, column in columns.items():
    found: dict[str, list[str]] = {}
    for value, name in zip(column, names, strict=True):
      found.setdefault(json.dumps(value), []).append(name)
    if len(found) > 1:
      values = [f"{value} for {_some(who)}" for value, who in found.items()]
      notes.append(f"{key}: {' | '.join(values)}")
  for run, name in zip(runs, names, strict=True):
    unknown = int(np.isnan(run.losses).sum())
    if unknown:
      notes.append(f"{name}: {unknown} of {len(run.losses)} losses are not known, and left out")
  return notes


def _some(names: Sequence[str]) -> str:
  if len(names) <= 3:
    return "; ".join(names)
  return f"{names[0]}; {names[1]}; {len(names) - 2} more"


def _median(losses: np.ndarray) -> float:
  known = losses[~np.isnan(losses)].astype(np.float64)
  return float(np.median(known)) if known.size else math.nan


def _number(value: float) -> float | None:
  return float(value) if math.isfinite(value) else None


def _cell(value: float | None) -> str:
  return "-" if value is None else f"{value:.4f}"


def check_every(losses: np.ndarray, every: int, whose: str) -> None:
  """Raises a `ValueError` for a window that is empty or longer than the losses."""
  if not 1 <= every <= len(losses):
    raise UserError(
      f"every: expected at least 1 and at most the {len(losses)} updates of {whose}, got {every}"
    )
