"""Plots training from run folders.

  dpjax plots runs/she runs/attention                     writes progress.png here
  dpjax plots runs/she --metric=train/grad_norm --log=y
  dpjax plots runs/* --figure=curves --every=2000 --width=3.3in --out=costs.pdf

A run folder has config.json, the settings; losses.f32, the loss of every update in nats per
token (the mean over a batch): little-endian float32, update 1 first, NaN if unknown; and
metrics.jsonl, the logged scores. Nothing else is read, and JAX is not loaded. A run may be
short, or still in training. --figure is one of

  progress     median training costs beside validation scores (the default)
  metric       a logged score, --metric, over the batch number

or, from "Attention Is Not All You Need Anymore", Sec. 6:

  curves       medians of every 2,000 batches over the batch number (Figs. 7 and 8)
  every_batch  the cost of every batch (Fig. 9)
  by_length    the median of the last 2,000 batches over the context window (Fig. 10)
  by_layers    the same over the number of layers (Fig. 11)

Figures over batches draw runs that differ only in the seed as one line, their mean, in a band
of one standard deviation to each side; --seeds=separate draws each run. In the last two
figures, runs with one label form a line, through the mean if several share a place. The command
also prints a table, and below it the settings besides the mixer in which the runs differ.
"""

import argparse
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.analysis import costs, style
from dpjax.analysis.folders import Record, by_seed, distinct_labels, read_runs, setting
from dpjax.errors import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

FIGURES = ("progress", "metric", "curves", "every_batch", *costs.PLACES)
SUFFIXES = (".png", ".pdf", ".svg")
# The first one that all runs have is drawn; the first two do not depend on the tokenizer.
_VALIDATION = tuple(
  f"valid/{name}"
  for name in ("bits_per_character", "perplexity_per_word", "perplexity", "nats_per_token")
)
_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
_NARROW = 5.0  # inches; of one column of a paper


def draw(
  runs: Sequence[Record],
  *,
  figure: str = "curves",
  every: int = 2000,
  metric: str | None = None,
  seeds: str = "mean",
  log: Sequence[str] = (),
  width: float = 9.0,
) -> "Figure":
  """Draws runs.

  Args:
    runs: at least one.
    figure: one of `FIGURES`.
    every: updates in a window; "every_batch" and "metric" need none.
    metric: the score drawn by "progress" and "metric", from `find_metric`.
    seeds: "mean" draws runs that differ only in the seed as one line, the mean at the batches
      that all of them have, in a band of the standard deviation (N - 1); "separate" draws each.
    log: the axes with a logarithmic scale, from "x" and "y".
    width: inches; a figure narrower than 5 is laid out for one column of a paper.

  Returns:
    The figure.

  Raises:
    ValueError: the figure is unknown, a run has fewer updates than `every`, or its
      settings lack the length or layers to place it by.
  """
  if figure not in FIGURES:
    raise UserError(f"figure: expected one of {', '.join(FIGURES)}, got {figure}")
  from matplotlib.figure import Figure

  kinds = [figure]
  if figure == "progress":
    kinds = ["curves", "metric"] if metric else ["curves"]
  is_narrow = width < _NARROW
  shape = (len(kinds), 1) if is_narrow else (1, len(kinds))
  with style.applied(8 if is_narrow else 10):
    size = width, 0.6 * width * shape[0] if is_narrow else width * 5 / 9
    canvas = Figure(figsize=size, layout="constrained")
    for axes, kind in zip(canvas.subplots(*shape, squeeze=False).flat, kinds, strict=True):
      if kind in costs.PLACES:
        _draw_places(axes, runs, every, *costs.PLACES[kind])
      else:
        _draw_curves(axes, runs, kind, every, metric, seeds)
      if "x" in log and kind not in costs.PLACES:
        axes.set_xscale("log")
      if "y" in log:
        axes.set_yscale("log")
      if is_narrow:
        axes.set_ylabel(textwrap.fill(axes.get_ylabel(), 28))
    _add_legend(canvas, is_narrow)
    style.finish(canvas)
  return canvas


def find_metric(runs: Sequence[Record], metric: str | None = None) -> str | None:
  """Finds the logged score to draw.

  Args:
    runs: at least one.
    metric: a name such as "valid/perplexity"; None takes validation bits per character if all
      evaluated runs have it, else perplexity.

  Returns:
    Its name; None if no run was evaluated.

  Raises:
    ValueError: no run has the metric.
  """
  logged = [run.scores for run in runs if any(name in run.scores for name in _VALIDATION)]
  if metric is None:
    shared = (name for name in _VALIDATION if all(name in scores for scores in logged))
    return next(shared, None) if logged else None
  known = sorted({name for run in runs for name in run.scores})
  if metric not in known:
    raise UserError(f"metric: expected one of {', '.join(known) or 'none yet'}, got {metric}")
  return metric


def write(figure: "Figure", path: str | Path) -> None:
  """Writes a figure in the format given by the file's suffix.

  Raises:
    ValueError: the suffix is not in `SUFFIXES`, or the file cannot be written.
  """
  check_suffix(path)
  dpi = 300 if figure.get_figwidth() < _NARROW else 150
  _write(path, "out", lambda: figure.savefig(path, dpi=dpi))


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table and draws the figure described by the command line."""
  from dpjax.commands import flags as command_line

  parser = argparse.ArgumentParser(
    prog="dpjax plots", description="Training costs and scores of runs, from their folders."
  )
  parser.add_argument("run_folder", nargs="+", type=os.path.expanduser, help="of dpjax train")
  parser.add_argument(
    "--out",
    type=os.path.expanduser,
    help=f"a file: {', '.join(SUFFIXES)}; by default FIGURE.png in the current folder",
  )
  parser.add_argument("--figure", choices=FIGURES, help="progress; metric where --metric is given")
  parser.add_argument("--metric", help="a logged score, as valid/perplexity or train/grad_norm")
  parser.add_argument(
    "--every",
    type=int,
    help="batches of a median; if not given, as the runs report them, or fewer where runs are "
    "short",
  )
  parser.add_argument("--labels", help="of the runs, in their order: a,b")
  parser.add_argument(
    "--seeds", choices=("mean", "separate"), default="mean", help="runs that differ in the seed"
  )
  parser.add_argument("--log", default="", help="logarithmic axes: x, y or x,y")
  parser.add_argument("--width", default="9in", help="of the figure, as 3.3in, 8.4cm or 84mm")
  parser.add_argument("--json", type=os.path.expanduser, help="a file for the table")
  with command_line.parsed(parser, arguments) as given:
    figure = given.figure or ("metric" if given.metric else "progress")
    out = given.out or f"{figure}.png"
    check_suffix(out)
    options: dict[str, Any] = dict(figure=figure, seeds=given.seeds)
    options |= dict(log=_axes(given.log), width=_inches(given.width))
    runs = read_runs(given.run_folder, given.labels and given.labels.split(","))
    every = _every(runs, figure) if given.every is None else given.every
    if figure == "every_batch":  # Which needs no whole window.
      every = min(every, *(len(run.losses) for run in runs))
    metric = None
    if figure in ("progress", "metric"):
      metric = find_metric(runs, given.metric)
      if metric is None and figure == "metric":
        raise UserError("metric: expected runs that were evaluated, got none")
    elif given.metric:
      raise UserError(f"metric: expected it with --figure=progress or metric, got {given.metric}")
    content = costs.table(runs, every, figure, metric)
    picture = draw(runs, every=every, metric=metric, **options)
    is_paper = figure not in ("progress", "metric")
    print(costs.format_table(content) if is_paper else costs.format_scores(content))
    if given.json:
      text = json.dumps(content, indent=2) + "\n"
      _write(given.json, "json", lambda: Path(given.json).write_text(text, "utf-8"))
    write(picture, out)
    print(f"\nThe figure: {out}")


def _draw_curves(
  axes: "Axes",
  runs: Sequence[Record],
  kind: str,
  every: int,
  metric: str | None,
  seeds: str,
) -> None:
  """Draws one line for each run, or a mean in a band for runs that differ only in the seed."""
  groups = by_seed(runs) if seeds == "mean" else [[run] for run in runs]
  first = [group[0] for group in groups]
  if seeds == "mean":
    first = [run._replace(config={**run.config, "seed": None}) for run in first]
  for i, (group, name) in enumerate(zip(groups, distinct_labels(first), strict=True)):
    curves = [_curve(run, kind, every, metric) for run in group]
    x = sorted(set.intersection(*map(set, curves)))
    if not x:
      continue
    y = np.array([[curve[at] for at in x] for curve in curves])
    mean, look = y.mean(axis=0), style.line(i)
    if len(group) > 1:
      name += f", {len(group)} seeds"
      band = y.std(axis=0, ddof=1)
      axes.fill_between(x, mean - band, mean + band, color=look["color"], alpha=0.2, linewidth=0)
    if kind == "every_batch":
      look |= dict(linewidth=0.4, alpha=0.6)
    elif len(x) <= 50:
      look |= dict(marker=".")
    axes.plot(x, mean, label=name, **look)
  axes.set(xlabel="batch", ylabel=_describe(kind, every, metric))


def _curve(run: Record, kind: str, every: int, metric: str | None) -> Mapping[int, float]:
  """The values to draw for a run, by update."""
  if kind == "metric":
    return run.scores.get(metric or "", {})
  if kind == "every_batch":
    return dict(enumerate(run.losses, 1))
  costs.check_every(run.losses, every, run.folder)
  return {every * i: y for i, y in enumerate(costs.medians(run.losses, every), 1)}


def _describe(kind: str, every: int, metric: str | None) -> str:
  """The name of the vertical axis."""
  if kind == "metric":
    split, _, name = (metric or "").partition("/")
    split = {"train": "training", "valid": "validation"}.get(split, split)
    return f"{split} {name.replace('_', ' ')}"
  if kind == "every_batch" or every == 1:
    return "training cost (nats per token)"
  return f"median cost of each {every:,} batches (nats per token)"


def _draw_places(axes: "Axes", runs: Sequence[Record], every: int, key: str, name: str) -> None:
  lines: dict[str, dict[int, list[float]]] = {}
  for run in runs:
    place = setting(run.config, key)
    if type(place) is not int or place < 1:
      raise UserError(
        f"{key}: expected an integer of at least 1 in the settings of {run.folder}, got {place}"
      )
    costs.check_every(run.losses, every, run.folder)
    points = lines.setdefault(run.label, {})
    points.setdefault(place, []).append(costs.last_median(run.losses, every))
  for i, (text, points) in enumerate(lines.items()):
    places = sorted(points)
    look = style.line(i)
    means = [np.mean(points[place]) for place in places]
    axes.plot(places, means, **look, label=text, marker="o")
    shared = [(x, y) for x in places if len(points[x]) > 1 for y in points[x]]
    if shared:
      axes.scatter(*zip(*shared, strict=True), color=look["color"], marker="x")
  axes.set_xscale("log", base=2)
  everywhere = sorted({place for points in lines.values() for place in points})
  axes.set_xticks(everywhere, [str(place) for place in everywhere])
  axes.set_xticks([], minor=True)
  axes.set(xlabel=name, ylabel=f"median cost of the last {every:,} batches (nats per token)")


def _add_legend(canvas: "Figure", is_narrow: bool) -> None:
  """Adds one legend for all panels: on the right, or below if there is no room."""
  lines = {line.get_label(): line for axes in canvas.axes for line in axes.get_lines()}
  names = [textwrap.fill(str(name), 42 if is_narrow else 34) for name in lines]
  place = "outside lower left" if is_narrow else "outside right upper"
  legend = canvas.legend(lines.values(), names, loc=place)
  for handle in legend.get_lines():
    handle.set(linewidth=1.5, alpha=1)
  if is_narrow:  # The panels keep their size.
    num_lines = sum(1.5 + name.count("\n") for name in names)
    canvas.set_figheight(canvas.get_figheight() + 0.14 * num_lines)


def _every(runs: Sequence[Record], figure: str) -> int:
  """The updates in a median: as the runs report them, or fewer for short runs."""
  lengths = [len(run.losses) for run in runs]
  reported = _reported(runs)
  if figure == "every_batch":
    return max(reported)
  shortest = min(lengths)
  every = max((x for x in reported if x <= shortest), default=-(-shortest // 10))
  if figure in ("progress", "metric"):  # A curve has more points than the paper's.
    every = min(every, shortest, max(-(-shortest // 10), max(lengths) // 200))
  return every


def _reported(runs: Sequence[Record]) -> list[int]:
  """The updates over which each run reports its median."""
  known = []
  for run in runs:
    every = setting(run.config, "train.median_every_steps")
    every = 2000 if every is None else every
    if type(every) is not int or every < 1:
      raise UserError(
        f"train.median_every_steps: expected an integer of at least 1 in the "
        f"settings of {run.folder}, got {every!r}"
      )
    if not len(run.losses):
      raise UserError(f"workdir: expected a run with updates, got {run.folder} with none")
    known.append(every)
  return known


def _axes(text: str) -> list[str]:
  axes = [axis for axis in text.split(",") if axis]
  if not {*axes} <= {"x", "y"}:
    raise UserError(f"log: expected x, y or x,y, got {text}")
  return axes


def _inches(text: str) -> float:
  found = re.fullmatch(r"([0-9.]+)(in|cm|mm)", text)
  try:
    inches = float(found[1]) * _UNITS[found[2]] if found else 0.0
  except ValueError:
    inches = 0.0
  if not 1.5 <= inches <= 40:
    raise UserError(f"width: expected 1.5in to 40in, or as much in cm or mm, got {text}")
  return inches


def check_suffix(path: str | Path) -> None:
  """Checks that a file's suffix is in `SUFFIXES`.

  Raises:
    ValueError: it is not.
  """
  if Path(path).suffix not in SUFFIXES:
    raise UserError(f"out: expected a file that ends in {', '.join(SUFFIXES)}, got {path}")


def _write(path: str | Path, name: str, work: Callable[[], Any]) -> None:
  try:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    work()
  except OSError as error:
    raise UserError(
      f"{name}: expected a file that can be written, got {path} ({error.strerror})"
    ) from error


if __name__ == "__main__":
  main()
