"""Training costs of runs: medians, and a table of them.

Source: "Attention Is Not All You Need Anymore", Sec. 6.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.analysis import runs as runs_lib
from dpjax.analysis import style
from dpjax.analysis.runs import Record, setting
from dpjax.errors import UserError

# Where a line of the figures "by ..." has its points, and the name of that axis.
PLACES = {
  "by_length": ("model.max_length", "context window (tokens)"),
  "by_layers": ("model.num_layers", "layers"),
}


def medians(losses: np.ndarray, every: int) -> np.ndarray:
  """Takes the median of each non-overlapping window of updates.

    >>> medians(np.array([5., 3., 4., 9., 2., np.nan, 1., 7.]), every=3)
    array([4. , 5.5])

  Updates after the last complete window are dropped. Unknown losses (NaN) are ignored; a window
  of nothing else is NaN. Raises a `ValueError` if `every` is not in 1 .. N.
  """
  check_every(losses, every, "the losses")
  count = len(losses) // every
  return np.array([_median(part) for part in losses[: count * every].reshape(count, -1)])


def last_median(losses: np.ndarray, every: int) -> float:
  """The median of the last `every` updates, NaN if none is known; see `medians`."""
  check_every(losses, every, "the losses")
  return _median(losses[-every:])


def check_every(losses: np.ndarray, every: int, owner: str) -> None:
  """Raises a `ValueError` for a window that is empty or longer than the losses."""
  if not 1 <= every <= len(losses):
    raise UserError(
      f"every: expected at least 1 and at most the {len(losses)} updates of {owner}, got {every}"
    )


def table(
  runs: Sequence[Record], every: int, figure: str = "curves", metric: str | None = None
) -> dict[str, Any]:
  """Collects the medians of runs, and notes on differences that make them hard to compare.

  Args:
    runs: at least one.
    every: updates in a window.
    figure: a figure of `dpjax.analysis.plots`; what "by_length" and "by_layers" draw over may
      differ without a note.
    metric: a logged score to collect as well, such as "valid/perplexity".

  Returns:
    JSON values, None for unknown numbers: "every", "updates" (the last one of each window),
    "metric", "notes", and "runs", whose "scores" are pairs of an update and the metric.
  """
  rows = []
  for run, name in zip(runs, runs_lib.names(runs), strict=True):
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
        "scores": [[*pair] for pair in sorted(run.scores.get(metric or "", {}).items())],
      }
    )
  count = max(len(row["medians"]) for row in rows)
  updates = [every * (i + 1) for i in range(count)]
  notes = runs_lib.notes(runs, ("model.mixer", *PLACES.get(figure, ())[:1]))
  return {"every": every, "updates": updates, "metric": metric, "runs": rows, "notes": notes}


def format_table(content: Mapping[str, Any]) -> str:
  """Formats the result of `table`: a line for each run, a column for each window, then notes."""
  updates, rows = content["updates"], []
  for row in content["runs"]:
    missing = [""] * (len(updates) - len(row["medians"]))
    rows.append([row["name"], *map(_cell, row["medians"]), *missing, _cell(row["last"])])
  title = f"Median training cost of {content['every']} batches, nats per token; up to batch:"
  return _format(title, ["", *updates, "last"], rows, content["notes"])


def format_scores(content: Mapping[str, Any]) -> str:
  """Formats the metric in the result of `table` beside the last costs: one line for each run."""
  title = f"Median cost of the last {content['every']} batches, nats per token"
  heads, rows = ["", "batches", "cost"], []
  if content["metric"]:
    title += f"; {content['metric']}"
    heads += ["last", "lowest", "at batch"]
  for row in content["runs"]:
    cells = [row["name"], f"{row['updates']:,}", _cell(row["last"])]
    if scores := row["scores"]:
      lowest_at, lowest = min(scores, key=lambda pair: pair[1])
      cells += [_cell(scores[-1][1]), _cell(lowest), f"{lowest_at:,}"]
    rows.append([*cells, *[""] * (len(heads) - len(cells))])
  return _format(f"{title}:", heads, rows, content["notes"])


def _format(title: str, heads: Sequence, rows: Sequence[Sequence], notes: Sequence[str]) -> str:
  lines = [title, "", style.table(heads, rows)]
  if notes:
    lines += ["", "To be compared with care:", *(f"  {note}" for note in notes)]
  return "\n".join(lines)


def _median(losses: np.ndarray) -> float:
  known = losses[~np.isnan(losses)].astype(np.float64)
  return float(np.median(known)) if known.size else math.nan


def _number(value: float) -> float | None:
  return float(value) if math.isfinite(value) else None


def _cell(value: float | None) -> str:
  return "-" if value is None else f"{value:.4f}"
