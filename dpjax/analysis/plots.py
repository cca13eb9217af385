"""Pictures of training costs, from run folders.

  dpjax plots runs/she runs/attention --out=costs.png --every=2000

A run folder has config.json, the settings, and losses.f32, the loss of every update in
nats per token (the mean over a batch): little-endian float32, update 1 first, NaN where
one is not known. Nothing else is read, and JAX is not loaded.

Source: "Attention Is Not All You Need Anymore", Sec. 6. --figure is one of

  curves       medians of every 2,000 batches over the batch number (Figs. 7 and 8)
  every_batch  the cost of every batch (Fig. 9)
  by_length    the median of the last 2,000 batches over the context window (Fig. 10)
  by_layers    the same over the number of layers (Fig. 11)

In the last two, runs of one label form a line, through the mean where several share a
place. The table of medians is printed, with what differs between the runs beside the
mixer below it.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.analysis.costs import (
  FIGURES,
  PLACES,
  Costs,
  check_every,
  distinct_labels,
  format_table,
  last_median,
  medians,
  read_runs,
  setting,
  table,
)
from dpjax.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")
# Okabe and Ito's, which the colour-blind can tell apart; without yellow, faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")


def draw(runs: Sequence[Costs], *, figure: str = "curves", every: int = 2000) -> "Figure":
  """Draws a figure of the paper.

  Args:
    runs: at least one.
    figure: one of `FIGURES`.
    every: updates of a window; "every_batch" needs none.

  Returns:
    The figure, in one set of axes.

  Raises:
    ValueError: the figure is unknown, a run has fewer updates than `every`, or its
      settings do not say where it has its place.
  """
  if figure not in FIGURES:
    raise UserError(f"figure: expected one of {', '.join(FIGURES)}, got {figure}")
  from matplotlib.figure import Figure

  canvas = Figure(figsize=(9, 5), layout="constrained")
  axes = canvas.subplots()
  if figure == "every_batch":
    for i, (run, name) in enumerate(zip(runs, distinct_labels(runs), strict=True)):
      x = np.arange(1, len(run.losses) + 1)
      axes.plot(x, run.losses, **style(i), label=name, linewidth=0.4, alpha=0.6)
    axes.set(xlabel="batch", ylabel="training cost (nats per token)")
  elif figure == "curves":
    for i, (run, name) in enumerate(zip(runs, distinct_labels(runs), strict=True)):
      check_every(run.losses, every, run.folder)
      y = medians(run.losses, every)
      x = every * np.arange(1, len(y) + 1)
      axes.plot(x, y, **style(i), label=name, marker=".")
    axes.set(xlabel="batch", ylabel=f"median cost of each {every:,} batches (nats per token)")
  else:
    _draw_places(axes, runs, every, *PLACES[figure])
  axes.grid(True, color="0.85")
  axes.set_axisbelow(True)
  legend = axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
  for handle in legend.get_lines():
    handle.set(linewidth=1.5, alpha=1)
  return canvas


def write(figure: "Figure", path: str | Path) -> None:
  """Writes a figure; what kind of file, its name's end says.

  Raises:
    ValueError: the name ends in none of `SUFFIXES`, or the file cannot be written.
  """
  check_suffix(path)
  _write(path, "out", lambda: figure.savefig(path, dpi=150))


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table and draws the figure that the command line asks for."""
  parser = argparse.ArgumentParser(
    prog="dpjax plots", description="Training costs of runs, from their folders."
  )
  parser.add_argument("run_folder", nargs="+", help="with config.json and losses.f32")
  parser.add_argument("--out", required=True, help=f"a file: {', '.join(SUFFIXES)}")
  parser.add_argument("--figure", choices=FIGURES, default="curves")
  parser.add_argument(
    "--every",
    type=int,
    help="batches of a median; if not given, as the runs report them, "
    "or a tenth of a run that is shorter",
  )
  parser.add_argument("--labels", help="of the runs, in their order: a,b")
  parser.add_argument("--json", help="a file for the table")
  given = parser.parse_args(arguments)
  with exit_on_user_error(vars(given)):
    check_suffix(given.out)
    labels = None if given.labels is None else given.labels.split(",")
    runs = read_runs(given.run_folder, labels)
    shortest = min(runs, key=lambda run: len(run.losses))
    every, most = given.every, len(shortest.losses)
    if every is None:
      reported = _reported(runs)
      every = max((x for x in reported if x <= most), default=-(-most // 10))
      if given.figure == "every_batch":
        every = max(reported)
    if given.figure == "every_batch":  # Which needs no whole window.
      every = min(every, most)
    check_every(shortest.losses, every, shortest.folder)
    content = table(runs, every, given.figure)
    figure = draw(runs, figure=given.figure, every=every)
    print(format_table(content))
    if given.json:
      text = json.dumps(content, indent=2) + "\n"
      _write(given.json, "json", lambda: Path(given.json).write_text(text, "utf-8"))
    write(figure, given.out)


def _draw_places(axes: "Axes", runs: Sequence[Costs], every: int, key: str, name: str) -> None:
  lines: dict[str, dict[int, list[float]]] = {}
  for run in runs:
    place = setting(run.config, key)
    if type(place) is not int or place < 1:
      raise UserError(
        f"{key}: expected an integer of at least 1 in the settings of {run.folder}, got {place}"
      )
    check_every(run.losses, every, run.folder)
    points = lines.setdefault(run.label, {})
    points.setdefault(place, []).append(last_median(run.losses, every))
  for i, (text, points) in enumerate(lines.items()):
    places = sorted(points)
    look = style(i)
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


def style(i: int) -> dict[str, Any]:
  """Of line i: as many as there are colours, then the same with another dash."""
  return {
    "color": _COLOURS[i % len(_COLOURS)],
    "linestyle": _STYLES[i // len(_COLOURS) % len(_STYLES)],
  }


def _reported(runs: Sequence[Costs]) -> list[int]:
  """The updates of which each run reports the median."""
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


def check_suffix(path: str | Path) -> None:
  """Refuses a file that is not of `SUFFIXES`.

  Raises:
    ValueError: it is none.
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
