"""Plots training costs and scores of runs.

Runs that differ only in the seed, or have the same label, are drawn as one line, their mean, with a
band of +-1 standard deviation. `dpjax_papers.figures` has other figures of "Attention Is Not All
You Need Anymore", Sec. 6, the source of the medians.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import files
from dpjax.analysis import curves, style
from dpjax.analysis.curves import Record
from dpjax.errors import UserError, unknown

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

FIGURES = ("progress", "metric", "curves")
SUFFIXES = (".png", ".pdf", ".svg")
# The first one that all runs have is drawn; the first two do not depend on the tokenizer.
SCORES = ("bits_per_character", "perplexity_per_word", "perplexity", "nats_per_token")
_VALIDATION = tuple(f"valid/{name}" for name in SCORES)
_NARROW = 5.0  # inches; one column of a paper


def draw(
  runs: Sequence[Record],
  *,
  figure: str = "curves",
  every: int = 2000,
  metric: str | None = None,
  log: Sequence[str] = (),
  width: float = 9.0,
) -> "Figure":
  """Draws runs.

  Args:
    runs: at least one, each with `every` updates or more, else a `ValueError` is raised.
    figure: one of `FIGURES`.
    every: updates in a median; unused by "metric".
    metric: the score drawn by "progress" and "metric", from `find_metric`.
    log: the axes with a logarithmic scale, from "x" and "y".
    width: inches; a figure narrower than 5 is laid out for one column of a paper.
  """
  if figure not in FIGURES:
    raise unknown("figure", FIGURES, figure)
  panels = []
  if figure != "metric":
    label = f"median cost of each {every:,} batches (nats per token)"
    label = "training cost (nats per token)" if every == 1 else label

    def medians(run: Record) -> Mapping[int, float]:
      return {every * i: y for i, y in enumerate(curves.medians(run.losses, every), 1)}

    panels.append(partial(draw_lines, runs=runs, curve=medians, label=label))
  if figure != "curves" and metric:
    split, _, name = metric.partition("/")
    split = {"train": "training", "valid": "validation"}.get(split, split)
    label = f"{split} {name.replace('_', ' ')}"
    panels.append(
      partial(draw_lines, runs=runs, curve=lambda run: run.scores.get(metric, {}), label=label)
    )
  return lay_out(panels, log, width)


def lay_out(
  panels: Sequence[Callable[["Axes"], None]], log: Sequence[str] = (), width: float = 9.0
) -> "Figure":
  """Draws panels side by side, or one below the other in a narrow figure, over one legend."""
  from matplotlib.figure import Figure

  if width < _NARROW:
    shape = (len(panels), 1)
    font_size = 8
    height = width * 0.6  # inches
  else:
    shape = (1, len(panels))
    font_size = 10
    height = width * (5 / 9)
  letter = 0.0083 * font_size  # inches
  with style.applied(font_size):
    canvas = Figure(figsize=(width, height * shape[0]), layout="constrained")
    for axes, draw_panel in zip(canvas.subplots(*shape, squeeze=False).flat, panels, strict=True):
      draw_panel(axes)
      if "x" in log:
        axes.set_xscale("log")
      elif axes.get_xscale() == "linear":
        axes.locator_params("x", nbins=max(1, int((width / shape[1] - 1) / letter / 8)))
      if "y" in log:
        axes.set_yscale("log")
      axes.set_ylabel(textwrap.fill(axes.get_ylabel(), int((height - 0.6) / letter)))
    lines = {line.get_label(): line for axes in canvas.axes for line in axes.get_lines()}
    names = [style.plain(textwrap.fill(str(x), int(width / letter) - 6)) for x in lines]
    # Below the panels, which keep their size, in as many columns as there is room for.
    longest = max((len(part) for name in names for part in name.split("\n")), default=0)
    columns = max(1, int(width / letter / (longest + 6)))
    legend = canvas.legend(lines.values(), names, loc="outside lower left", ncols=columns)
    for handle in legend.get_lines():
      handle.set(linewidth=1.5, alpha=1)
    num_lines = max(sum(1.5 + x.count("\n") for x in names[i::columns]) for i in range(columns))
    canvas.set_figheight(canvas.get_figheight() + 0.0175 * font_size * num_lines)
    style.finish(canvas)
  return canvas


def draw_lines(
  axes: "Axes",
  runs: Sequence[Record],
  curve: Callable[[Record], Mapping[int, float]],
  label: str,
  **look: Any,
) -> None:
  """Draws a line over batches for each run name: the mean, with a band.

  `curve` returns a run's values by batch, `label` describes them, and `look` is passed to
  `matplotlib.axes.Axes.plot`.
  """
  groups = curves.group(curves.names(runs, seeds=False), runs)
  for i, (name, group) in enumerate(groups.items()):
    lines = [curve(run) for run in group]
    x = sorted(set.intersection(*map(set, lines)))
    if not x:
      continue
    y = np.array([[values[at] for at in x] for values in lines])
    mean = y.mean(axis=0)
    line = style.line(i)
    if len(group) > 1:
      name += f", {len(group)} seeds"
      band = y.std(axis=0, ddof=1)
      axes.fill_between(x, mean - band, mean + band, color=line["color"], alpha=0.2, linewidth=0)
    marker = "." if len(x) <= 50 else "none"
    axes.plot(x, mean, label=name, **{**line, "marker": marker, **look})
  axes.set(xlabel="batch", ylabel=style.plain(label))


def find_metric(runs: Sequence[Record], metric: str | None = None) -> str | None:
  """The logged score to draw: the given one, which a run must have, such as "valid/perplexity".

  None selects validation bits per character if all evaluated runs have it, else perplexity.
  """
  if metric is None:
    logged = [run.scores for run in runs if any(name in run.scores for name in _VALIDATION)]
    shared = (name for name in _VALIDATION if all(name in scores for scores in logged))
    return next(shared, None) if logged else None
  choices = sorted({name for run in runs for name in run.scores})
  if metric not in choices:
    raise UserError(f"metric: expected one of {', '.join(choices) or 'none yet'}, got {metric}")
  return metric


def default_every(runs: Sequence[Record]) -> int:
  """The updates in a median: 2,000, or a tenth of the shortest run if that is less."""
  lengths = [len(run.losses) for run in runs]
  if not all(lengths):
    folder = runs[lengths.index(0)].folder
    raise UserError(f"workdir: expected a run with updates, got {folder} with none")
  return min(2000, -(-min(lengths) // 10))


def write(figure: "Figure", path: str | Path) -> None:
  """Writes a figure in the format given by the file's suffix, one of `SUFFIXES`."""
  check_suffix(path)
  content = io.BytesIO()
  dpi = 300 if figure.get_figwidth() < _NARROW else 150
  figure.savefig(content, format=Path(path).suffix[1:], dpi=dpi)
  files.write_output(Path(path), content.getvalue())


def check_suffix(path: str | Path) -> None:
  """Raises a `ValueError` for a file whose suffix is not in `SUFFIXES`."""
  if Path(path).suffix not in SUFFIXES:
    raise UserError(f"out: expected a file that ends in {', '.join(SUFFIXES)}, got {path}")


def report(table: str, runs: Sequence[Record], allowed: Sequence[str]) -> None:
  """Prints a table, and what makes the runs hard to compare; see `dpjax.analysis.curves.notes`."""
  print(table)
  if notes := curves.notes(runs, allowed):
    print("\nCompare these runs with care:", *notes, sep="\n  ")
