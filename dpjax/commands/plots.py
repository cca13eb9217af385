"""Plots training costs and scores of runs from their folders, and prints a table.

  dpjax plots runs/she runs/attention                     writes progress.png here
  dpjax plots runs/she --metric=train/grad_norm --log=y
  dpjax plots runs/* --figure=curves --every=2000 --width=3.3 --out=costs.pdf

--figure is one of

  progress  median training costs beside validation scores
  metric    a logged score, --metric, over the batch number
  curves    medians of the training costs of every 2,000 batches over the batch number

Runs that differ only in the seed, or have the same label, are drawn as one line, their mean, with a
band of +-1 standard deviation. A run may still be in training.
"""

from argparse import Namespace
from collections.abc import Sequence

from dpjax.analysis import curves, plots
from dpjax.commands.command_line import Parser, local_path, path, start
from dpjax.errors import UserError


def main(words: Sequence[str] | None = None) -> None:
  """Prints the table and draws the figure described by the command line."""
  parser = Parser("plots", __doc__, is_distributed=False)
  add = parser.add_argument
  add("runs", metavar="RUN", nargs="+", type=path, help="the folder of a run")
  about = f"a file: {', '.join(plots.SUFFIXES)}; by default FIGURE.png in the current folder"
  add("--out", type=local_path, help=about)
  add("--figure", choices=plots.FIGURES, help="default: progress, metric with --metric")
  add("--metric", help="a logged score: valid/perplexity or train/grad_norm")
  about = "batches per median, in curves and, with any figure, in the table's costs; by default "
  about += "2,000, or a tenth of the shortest run if that is less"
  add("--every", type=int, help=about)
  add("--labels", help="labels of the runs, in order: a,b")
  add("--log", default="", help="logarithmic axes: x, y or x,y")
  add("--width", type=float, default=9.0, help="width of the figure in inches")
  start(parser, _plot, words)


def _plot(options: Namespace) -> None:
  figure = options.figure or ("metric" if options.metric else "progress")
  out = options.out or f"{figure}.png"
  plots.check_suffix(out)
  log = [axis for axis in options.log.split(",") if axis]
  if not {*log} <= {"x", "y"}:
    raise UserError(f"log: expected x, y or x,y, got {options.log}")
  if not 1.5 <= options.width <= 40:
    raise UserError(f"width: expected 1.5 to 40 inches, got {options.width}")
  labels = options.labels.split(",") if options.labels else None
  records = curves.read_runs(options.runs, labels)
  every = plots.default_every(records) if options.every is None else options.every
  metric = None
  if figure != "curves":
    metric = plots.find_metric(records, options.metric)
  elif options.metric:
    raise UserError(
      f"metric: expected only with --figure=progress or --figure=metric, got {options.metric}"
    )
  if figure == "metric" and not metric:
    raise UserError("metric: expected runs that were evaluated, got none")
  picture = plots.draw(
    records, figure=figure, every=every, metric=metric, log=log, width=options.width
  )
  scores = curves.score_table(records, every, metric)
  table = curves.cost_table(records, every) if figure == "curves" else scores
  plots.report(table, records, ["model.mixer"])
  plots.write(picture, out)
  print(f"\nThe figure: {out}")
