"""The figure of a table, from its content alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.analysis import plots, style
from dpjax.analysis.folders import Record
from reproduce import papers

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Content = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]
_FACTOR_AXIS = papers.FACTOR.replace("_", " ")


@style.applied()
def draw(content: Content) -> "Figure | None":
  """Draws what there is of a table; None where there is nothing.

  step times        seconds over the tokens; or time and memory over the factor
  rows with places  the mean of the first score over the place, a line a label; where
                    the place is the shortening factor, over the one measured
  numbers printed   the paper's and ours side by side, a row of panels a group
  else              median training costs over the batches, by `dpjax.analysis.plots`
  """
  kind, axis, rows = content["kind"], content["axis"], content.get("rows", ())
  score = content.get("scores", [""])[0]

  if kind == "step_times":
    keys = {"seconds": "seconds of a step"}
    if axis == _FACTOR_AXIS:
      keys = {"ratio": "time over no pooling", "memory_ratio": "memory over no pooling"}
    figure = _lines({name: _points(content, key) for key, name in keys.items()}, axis)
  elif kind == "counts":
    figure = None
  elif axis:
    figure = _lines({score.replace("_", " "): _places(rows, score, axis == _FACTOR_AXIS)}, axis)
  elif any(row["paper"] for row in rows):
    figure = _beside(rows, score)
  else:
    figure = _costs(rows)
  if figure is not None:
    reduced = "" if content["scale"] == "paper" else f", reduced ({content['scale']})"
    figure.suptitle(content["table"] + reduced)
    style.finish(figure)
  return figure


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
  """The second ones by the first.

  >>> grouped([("a", 1), ("b", 2), ("a", 3)])
  {'a': [1, 3], 'b': [2]}
  """
  found: dict[Any, list[Any]] = {}
  for key, x in pairs:
    found.setdefault(key, []).append(x)
  return found


def _points(content: Content, key: str) -> Lines:
  points = [x for x in content["points"] if x[key] is not None]
  return grouped((f"{x['model']}, {x['dtype']}", (x["place"], x[key])) for x in points)


def _places(rows: Sequence[Content], score: str, is_measured: bool) -> Lines:
  pairs = []
  for row in (row for row in rows if score in row["mean"]):
    place, label = row["place"], row["label"]
    if is_measured:
      place, label = row["mean"].get(papers.FACTOR, place), label.partition(",")[0]
    if place is not None:
      pairs.append((label, (place, row["mean"][score])))
  return grouped(pairs)


def _lines(panels: Mapping[str, Lines], xlabel: str) -> "Figure | None":
  """A panel for each name of what is drawn."""
  panels = {name: lines for name, lines in panels.items() if lines}
  if not panels:
    return None
  from matplotlib.figure import Figure

  canvas = Figure(figsize=(9, 5), layout="constrained")
  all_axes = canvas.subplots(1, len(panels), squeeze=False)[0]
  for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
    for i, (label, points) in enumerate(lines.items()):
      axes.plot(*zip(*sorted(points), strict=True), **style.line(i), label=label, marker="o")
    axes.set(xlabel=xlabel, ylabel=name)
    places = sorted({x for points in lines.values() for x, _ in points})
    if len(places) > 1 and all(b >= 2 * a for a, b in zip(places, places[1:], strict=False)):
      axes.set_xscale("log", base=2)
      axes.set_xticks(places, [f"{x:,g}" for x in places])
    if name.startswith("seconds"):
      axes.set_yscale("log")
  all_axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
  return canvas


def _beside(rows: Sequence[Content], score: str) -> "Figure | None":
  """A row of panels a group: the paper's numbers on the left and ours on the right."""
  begun = {row["group"] for row in rows if score in row["mean"]}
  groups = grouped((row["group"], row) for row in rows if row["group"] in begun)
  if not groups:
    return None
  from matplotlib.figure import Figure

  heights = [0.5 + 0.3 * len(rows) for rows in groups.values()]
  canvas = Figure(figsize=(9, 1.2 + sum(heights)), layout="constrained")
  panels = canvas.subplots(len(groups), 2, sharey="row", squeeze=False, height_ratios=heights)
  for (group, rows), pair in zip(groups.items(), panels, strict=True):
    for axes, key, name in zip(pair, ("paper", "mean"), ("the paper's", "ours"), strict=True):
      values = [row[key].get(score, np.nan) for row in rows]
      spread = [(row["deviation"].get(score) or 0) * (key == "mean") for row in rows]
      colour = style.COLOURS[key == "mean"]
      axes.errorbar(values, range(len(rows)), xerr=spread, fmt="o", color=colour)
      axes.set(title=f"{group}, {name}", xlabel=score.replace("_", " "))
      pair[0].set_yticks(range(len(rows)), [row["label"] for row in rows])
    pair[0].set_ylim(len(rows) - 0.5, -0.5)
  return canvas


def _costs(rows: Sequence[Content]) -> "Figure | None":
  """Median costs over the batches, of runs that are done or partial."""
  pairs = [(row["label"], run) for row in rows for run in row["runs"] if run.get("costs")]
  pairs = [(label, run) for label, run in pairs if run["costs"]["medians"]]
  if not pairs:
    return None
  every, runs = pairs[0][1]["costs"]["every"], []
  for label, run in pairs:
    # Losses that have these medians: dpjax draws the same curve of them.
    losses = np.repeat(np.array(run["costs"]["medians"], np.float32), every)
    name = label + " (partial)" * (run["status"] == "partial")
    runs.append(Record(f"seed {run['seed']}", {}, losses, name))
  return plots.draw(runs, every=every)
