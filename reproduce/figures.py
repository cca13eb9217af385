"""The figure of a table, from its content alone; JAX is not loaded."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpjax.analysis import plots
from reproduce import papers

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Content = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]


def draw(content: Content) -> "Figure | None":
  """Draws what there is of a table.

    step times        seconds over the tokens; or time and memory over the factor
    rows with places  the mean of the first score over the place, a line a label; where
                      the place is the shortening factor, over the one measured
    numbers printed   the paper's and ours side by side, a row of panels a group
    else              median training costs over the batches; of partial runs, too,
                      where no other is there

  Args:
    content: of `reproduce.report.summarise`, or of a file.

  Returns:
    The figure, or None where there is nothing to draw.
  """
  kind, rows = content.get("kind", "runs"), content.get("rows", ())
  table = papers.TABLES.get(content.get("table", ""))
  axis = content.get("axis") or (table.axis if table else "")
  scores = content.get("scores") or (table.scores if table else ())
  if kind == "step_times":
    return _step_times(content, axis)
  if kind != "runs" or not scores:
    return None
  score = scores[0]
  if axis:
    lines: Lines = {}
    is_measured = axis == papers.FACTOR.replace("_", " ")
    for row in rows:
      place, value = row.get("place"), (row.get("mean") or {}).get(score)
      if is_measured:
        place = (row.get("mean") or {}).get(papers.FACTOR, place)
      if place is not None and value is not None:
        label = row["label"].partition(",")[0] if is_measured else row["label"]
        lines.setdefault(label, []).append((place, value))
    axis += ", measured" * is_measured
    return _one(content, lines, axis, score.replace("_", " "))
  if any(score in (row.get("paper") or {}) for row in rows):
    return _beside(content, score)
  return _one(content, _curves(rows), "batch", "median cost (nats per token)", marker=".")


def _curves(rows: Sequence[Content]) -> Lines:
  """Means over seeds of the medians of every so many batches."""
  lines: Lines = {}
  for row in rows:
    for status, mark in (("done", ""), ("partial", " (partial)")):
      runs = [
        run["costs"]
        for run in row.get("runs", ())
        if run.get("status") == status and (run.get("costs") or {}).get("medians")
      ]
      if runs:
        columns = zip(*(run["medians"] for run in runs), strict=False)
        known = [[x for x in column if _is_number(x)] for column in columns]
        every = runs[0].get("every") or 1
        lines[row["label"] + mark] = [
          (every * (i + 1), statistics.fmean(x)) for i, x in enumerate(known) if x
        ]
        break
  return lines


def _one(
  content: Content, lines: Lines, xlabel: str, ylabel: str, marker: str = "o"
) -> "Figure | None":
  if not any(lines.values()):
    return None
  canvas, axes = _canvas(content)
  _plot(axes, lines, marker)
  _legend(axes)
  axes.set(xlabel=xlabel, ylabel=ylabel)
  if marker == "o" and len({x for points in lines.values() for x, _ in points}) > 1:
    _doubling(axes, lines)
  return canvas


def _step_times(content: Content, axis: str) -> "Figure | None":
  def lines(key: str) -> Lines:
    found: Lines = {}
    for point in content.get("points", ()):
      x, y = point.get("place"), point.get(key)
      if not point.get("left_out") and _is_number(x) and _is_number(y):
        label = f"{point.get('model')}, {point.get('dtype')}"
        found.setdefault(label, []).append((x, y))
    return found

  if axis != papers.FACTOR.replace("_", " "):
    seconds = lines("seconds")
    canvas = _one(content, seconds, axis, "seconds of a step")
    if canvas is not None:
      canvas.axes[0].set_yscale("log")
    return canvas
  panels = {"time": lines("ratio"), "memory": lines("memory_ratio")}
  panels = {name: found for name, found in panels.items() if found}
  if not panels:
    return None
  canvas, *all_axes = _canvas(content, columns=len(panels))
  for axes, (name, found) in zip(all_axes, panels.items(), strict=True):
    _plot(axes, found, "o")
    axes.set(xlabel=axis, ylabel=f"{name} over that without pooling")
    axes.set_ylim(bottom=0)
  _legend(all_axes[-1])
  return canvas


def _beside(content: Content, score: str) -> "Figure | None":
  """A row of panels a group: the paper's numbers on the left and ours on the right."""
  groups: dict[str, list[Content]] = {}
  for row in content["rows"]:
    if score in (row.get("paper") or {}):
      groups.setdefault(row.get("group", ""), []).append(row)
  groups = {
    group: rows
    for group, rows in groups.items()
    if any(score in (row.get("mean") or {}) for row in rows)
  }
  if not groups:
    return None
  from matplotlib.figure import Figure

  height = 1.2 + sum(0.5 + 0.3 * len(rows) for rows in groups.values())
  canvas = Figure(figsize=(9, height), layout="constrained")
  canvas.suptitle(_title(content))
  # At another scale the numbers of one side would lie in a heap.
  share = "row" if content.get("scale") == "paper" else "none"
  panels = canvas.subplots(
    len(groups),
    2,
    sharey="row",
    sharex=share,
    squeeze=False,
    height_ratios=[0.5 + 0.3 * len(rows) for rows in groups.values()],
  )
  for (group, rows), (left, right) in zip(groups.items(), panels, strict=True):
    for axes, key, name in ((left, "paper", "the paper's"), (right, "mean", "ours")):
      points = [(row[key][score], i) for i, row in enumerate(rows) if score in (row.get(key) or {})]
      axes.scatter(*zip(*points, strict=True), color=plots.style(key == "mean")["color"])
      axes.set_title(f"{group}, {name}" if group else name, fontsize="medium")
      axes.locator_params(axis="x", nbins=5)
      _grid(axes)
    for i, row in enumerate(rows):
      deviation = (row.get("deviation") or {}).get(score)
      if deviation is not None:
        colour = plots.style(1)["color"]
        right.errorbar(row["mean"][score], i, xerr=deviation, color=colour)
    left.set_yticks(range(len(rows)), [row["label"] for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
  for axes in panels[-1]:
    axes.set_xlabel(score.replace("_", " "))
  return canvas


def _canvas(content: Content, columns: int = 1) -> tuple[Any, ...]:
  from matplotlib.figure import Figure

  canvas = Figure(figsize=(9, 5), layout="constrained")
  canvas.suptitle(_title(content))
  return canvas, *canvas.subplots(1, columns, squeeze=False)[0]


def _plot(axes: "Axes", lines: Lines, marker: str) -> None:
  for i, (label, points) in enumerate(lines.items()):
    if points:
      x, y = zip(*sorted(points), strict=True)
      axes.plot(x, y, **plots.style(i), label=label, marker=marker)
  _grid(axes)


def _legend(axes: "Axes") -> None:
  axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _doubling(axes: "Axes", lines: Lines) -> None:
  """Places that double, as most do, lie at equal distances; far ones in decades."""
  places = sorted({x for points in lines.values() for x, _ in points})
  if places[0] > 0 and places[-1] > 50 * places[0]:
    axes.set_xscale("log")
  elif all(b >= 2 * a > 0 for a, b in zip(places, places[1:], strict=False)):
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{x:,g}" for x in places])
    axes.set_xticks([], minor=True)


def _grid(axes: "Axes") -> None:
  axes.grid(True, color="0.85")
  axes.set_axisbelow(True)


def _title(content: Content) -> str:
  scale = content.get("scale")
  return f"{content.get('table')}{'' if scale == 'paper' else f', reduced ({scale})'}"


def _is_number(x: Any) -> bool:
  return x is not None and math.isfinite(x)
