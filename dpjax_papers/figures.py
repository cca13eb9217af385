"""Draws further figures of the Extractors' paper from run folders.

  python -m dpjax_papers.figures by_length runs/* --out=lengths.pdf --width=3.3

  every_batch  the training cost of every batch (Fig. 9)
  by_length    the median of the last 2,000 batches over the context window (Fig. 10)
  by_layers    the same over the number of layers (Fig. 11)

In the last two, runs with the same label or mixer form a line, through the mean of runs of one
size. The table of medians is also printed. `dpjax plots --figure=curves` draws Figs. 7 and 8.

Source: "Attention Is Not All You Need Anymore", Sec. 6.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dpjax.analysis import curves, plots, style
from dpjax.analysis.curves import Record, setting
from dpjax.errors import exit_on_user_error, unknown

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# The setting on the horizontal axis, and the name of that axis.
_SIZES = {
  "by_length": ("model.max_length", "context window (tokens)"),
  "by_layers": ("model.num_layers", "layers"),
}
FIGURES = ("every_batch", *_SIZES)


def draw(runs: Sequence[Record], figure: str, every: int = 2000, width: float = 9.0) -> "Figure":
  """Draws runs, from `dpjax.analysis.curves.read_runs`.

  Args:
    runs: at least one, each with `every` updates or more.
    figure: one of `FIGURES`.
    every: updates in a median.
    width: inches; see `dpjax.analysis.plots.draw`.
  """
  if figure not in FIGURES:
    raise unknown("figure", FIGURES, figure)
  if figure in _SIZES:
    panel = partial(_draw_sizes, runs=runs, every=every, setting_and_name=_SIZES[figure])
  else:
    panel = partial(
      plots.draw_lines,
      runs=runs,
      curve=lambda run: dict(enumerate(run.losses, 1)),
      label="training cost (nats per token)",
      **dict(linewidth=0.4, alpha=0.6, marker=""),
    )
  return plots.lay_out([panel], width=width)


def _draw_sizes(
  axes: "Axes", runs: Sequence[Record], every: int, setting_and_name: tuple[str, str]
) -> None:
  """Draws the last medians over a setting, a line for each label or mixer."""
  (key, name), labels = setting_and_name, [x.label or curves.mixer_name(x.config) for x in runs]
  for i, (label, group) in enumerate(curves.group(labels, runs).items()):
    medians = [curves.last_median(run.losses, every) for run in group]
    by_size = curves.group([setting(run.config, key) for run in group], medians)
    sizes = sorted(by_size)
    means = [np.mean(by_size[size]) for size in sizes]
    axes.plot(sizes, means, **style.line(i), label=label, marker="o")
  axes.set_xscale("log", base=2)
  ticks = sorted({setting(run.config, key) for run in runs})
  axes.set_xticks(ticks, [*map(str, ticks)])
  axes.set_xticks([], minor=True)
  axes.set(xlabel=name, ylabel=f"median cost of the last {every:,} batches (nats per token)")


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table and draws the figure given on the command line."""
  path = os.path.expanduser
  parser = argparse.ArgumentParser(prog="python -m dpjax_papers.figures")
  parser.add_argument("figure", choices=FIGURES)
  parser.add_argument("runs", metavar="RUN", nargs="+", type=path, help="the folder of a run")
  parser.add_argument("--out", type=path, help="a file; by default FIGURE.png here")
  parser.add_argument("--every", type=int, help="batches per median; default: as in dpjax plots")
  parser.add_argument("--labels", help="labels of the runs, in order: a,b")
  parser.add_argument("--width", type=float, default=9.0, help="width in inches")
  options = parser.parse_args(arguments)
  with exit_on_user_error(vars(options)):
    out = options.out or f"{options.figure}.png"
    plots.check_suffix(out)
    runs = curves.read_runs(options.runs, options.labels and options.labels.split(","))
    every = plots.default_every(runs) if options.every is None else options.every
    picture = draw(runs, options.figure, every, options.width)
    allowed = ["model.mixer", *_SIZES.get(options.figure, ())[:1]]
    plots.report(curves.cost_table(runs, every), runs, allowed)
    plots.write(picture, out)
    print(f"\nThe figure: {out}")


if __name__ == "__main__":
  main()
