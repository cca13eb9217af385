r"""Tests whether configurations are better than another one, by paired t-tests over seeds.

  for seed in 0 1 2; do
    dpjax train --config=quickstart --config.seed=$seed --workdir=runs/a/seed_$seed
  done
  python -m dpjax_papers.significance runs/a runs/b --baseline=runs/none

Source: the pooling paper, Table 1: paired t-tests over 3 seeds, p < 0.05. Here p values are
two-sided, without a correction for the number of folders.
"""

import argparse
import math
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpjax.analysis import style
from dpjax.errors import UserError, exit_on_user_error
from dpjax.files import read_json

_FEW = 5  # With fewer seeds, only large differences are significant.


class Comparison(NamedTuple):
  """The mean difference from a baseline, its 95% interval, and p."""

  difference: float
  low: float
  high: float
  p: float


def compare(scores: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
  """Compares scores by seed with a baseline's, by `scipy.stats.ttest_rel`.

    >>> found = compare({0: 1.0, 1: 1.0, 2: 0.75}, {0: 1.25, 1: 1.5, 2: 1.0})
    >>> [round(x, 3) for x in found]
    [-0.333, -0.692, 0.025, 0.057]

  If all differences are equal, the interval has zero width, and p = 0, or p = 1 if they are 0.

  Raises:
    ValueError: the seeds are not the baseline's, or fewer than 2.
  """
  from scipy import stats

  seeds = sorted(baseline)
  if len(seeds) < 2 or sorted(scores) != seeds:
    raise UserError(f"seeds: expected those of the baseline, at least 2, {seeds}, got {[*scores]}")
  ours, theirs = ([by_seed[seed] for seed in seeds] for by_seed in (scores, baseline))
  differences = [a - b for a, b in zip(ours, theirs, strict=True)]
  mean = statistics.fmean(differences)
  if len({*differences}) == 1:
    return Comparison(mean, mean, mean, float(mean == 0))
  with warnings.catch_warnings(action="ignore"):  # differences may be nearly equal
    test = stats.ttest_rel(ours, theirs)
  low, high = test.confidence_interval(0.95)
  return Comparison(mean, float(low), float(high), float(test.pvalue))


def read_scores(
  folder: str | Path, score: str = "bits_per_character", split: str = "test"
) -> dict[int, float]:
  """A finite score of the best checkpoint of each run `folder`/seed_<n>, by seed.

  Raises:
    ValueError: there is no run, or one has no such score.
  """
  runs = [path for path in Path(folder).glob("seed_*") if path.name[5:].isdecimal()]
  if not runs:
    raise UserError(f"workdir: expected runs seed_<n> in {folder}, got none")
  return dict(sorted((int(run.name[5:]), _read_score(run, score, split)) for run in runs))


def _read_score(run: Path, score: str, split: str) -> float:
  from dpjax.training import checkpoints  # loads JAX

  best = checkpoints.Checkpoints(run / "checkpoints").best_step()
  paths = [*run.glob(f"scores_{split}_{best or '*'}.json")]
  if len(paths) != 1:
    raise UserError(
      f"split: expected scores_{split}_<best step>.json in {run}, got "
      f"{len(paths)} of them; dpjax evaluate --split={split} writes one"
    )
  scores = read_json(paths[0]).get("scores", {})
  finite = {name: x for name, x in scores.items() if type(x) is float and math.isfinite(x)}
  if score not in finite:
    names = ", ".join(finite) or "none"
    raise UserError(f"score: expected one of {names} (of {paths[0]}), got {score}")
  return finite[score]


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints a line for each folder given on the command line."""
  parser = argparse.ArgumentParser(prog="python -m dpjax_papers.significance")
  path = os.path.expanduser
  parser.add_argument("folder", nargs="+", type=path, help="a folder with the runs seed_<n>")
  parser.add_argument("--baseline", required=True, type=path, help="the folder to compare with")
  parser.add_argument("--score", default="bits_per_character")
  parser.add_argument("--split", choices=("train", "valid", "test"), default="test")
  options = parser.parse_args(arguments)
  with exit_on_user_error(vars(options)):
    folders = dict.fromkeys(str(Path(folder)) for folder in (options.baseline, *options.folder))
    scores = {folder: read_scores(folder, options.score, options.split) for folder in folders}
    baseline, rows = next(iter(scores.values())), []
    for folder, by_seed in scores.items():
      difference, low, high, p = compare(by_seed, baseline)
      mean, deviation = statistics.fmean(by_seed.values()), statistics.stdev(by_seed.values())
      cells = f"{len(by_seed)}", f"{mean:.4f}", f"{deviation:.4f}", f"{difference:+.4f}"
      rows.append([folder, *cells, f"{low:+.4f} to {high:+.4f}", f"{p:.4f}"])
    print(f"{options.score} of the {options.split} split, seeds {[*baseline]}")
    print("Paired t-test of the differences by seed, two-sided; their mean with its 95% interval\n")
    heads = ["", "n", "mean", "deviation", "difference", "95% interval", "p"]
    print(style.table(heads, rows))
    if (n := len(baseline)) < _FEW:
      print(f"\n{n} seeds: the test is weak, and assumes normal scores; use {_FEW} or more")


if __name__ == "__main__":
  main()
