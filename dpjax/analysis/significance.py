r"""Tests whether configurations are better than another one, by paired t-tests over seeds.

  for seed in 0 1 2; do
    dpjax train --config=quickstart --config.seed=$seed --workdir=runs/a/seed_$seed
  done
  dpjax significance runs/a runs/b --baseline=runs/none

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

from dpjax.analysis import style
from dpjax.errors import UserError
from dpjax.files import read_json

_FEW = 5  # seeds, with fewer of which a difference has to be large to be found


def compare(scores: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[float, float]:
  """The mean difference of scores from a baseline's, and p of `scipy.stats.ttest_rel`.

    >>> difference, p = compare({0: 1.0, 1: 1.0, 2: 0.75}, {0: 1.25, 1: 1.5, 2: 1.0})
    >>> round(difference, 3), round(p, 3)
    (-0.333, 0.057)

  Scores are by seed; others than the baseline's, or less than 2, raise a `ValueError`. Equal
  scores give p = 1; other differences that are all equal, p = 0.
  """
  differences = _differences(scores, baseline)
  from scipy import stats

  if not any(differences):
    return 0.0, 1.0
  with warnings.catch_warnings(action="ignore"):  # of differences without a spread
    found = stats.ttest_rel(differences, [0.0] * len(differences))
  return statistics.fmean(differences), float(found.pvalue)


def interval(scores: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[float, float]:
  """The 95% interval of the mean difference, by Student's t with n - 1 degrees; see `compare`.

  >>> low, high = interval({0: 1.0, 1: 1.0, 2: 0.75}, {0: 1.25, 1: 1.5, 2: 1.0})
  >>> round(low, 3), round(high, 3)
  (-0.692, 0.025)
  """
  differences = _differences(scores, baseline)
  from scipy import stats

  mean, n = statistics.fmean(differences), len(differences)
  half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
  return mean - half, mean + half


def _differences(scores: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
  seeds = sorted(baseline)
  if len(seeds) < 2 or sorted(scores) != seeds:
    raise UserError(f"seeds: expected those of the baseline, at least 2, {seeds}, got {[*scores]}")
  return [scores[seed] - baseline[seed] for seed in seeds]


def read_scores(
  folder: str | Path, score: str = "bits_per_character", split: str = "test"
) -> dict[int, float]:
  """A finite score of the best checkpoint of each run `folder`/seed_<n>; a `ValueError` without."""
  runs = [path for path in Path(folder).glob("seed_*") if path.name[5:].isdecimal()]
  if not runs:
    raise UserError(f"workdir: expected runs seed_<n> in {folder}, got none")
  found = {int(run.name[5:]): _read_score(run, score, split) for run in runs}
  return dict(sorted(found.items()))


def _read_score(run: Path, score: str, split: str) -> float:
  from dpjax.training import checkpoints  # Comparing needs no JAX otherwise.

  best = checkpoints.Checkpoints(run / "checkpoints").best_step()
  files = [*run.glob(f"scores_{split}_{best or '*'}.json")]
  if len(files) != 1:
    raise UserError(
      f"split: expected scores_{split}_<best step>.json in {run}, got "
      f"{len(files)} of them; dpjax evaluate --split={split} writes one"
    )
  scores = read_json(files[0]).get("scores", {})
  known = {name: x for name, x in scores.items() if type(x) is float and math.isfinite(x)}
  if score not in known:
    names = ", ".join(known) or "none"
    raise UserError(f"score: expected one of {names} (of {files[0]}), got {score}")
  return known[score]


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints a line for each folder of the command line."""
  from dpjax.commands import flags as command_line

  parser, path = argparse.ArgumentParser(prog="dpjax significance"), os.path.expanduser
  parser.add_argument("folder", nargs="+", type=path, help="with the runs seed_<n>")
  parser.add_argument("--baseline", required=True, type=path, help="the folder to compare with")
  parser.add_argument("--score", default="bits_per_character")
  parser.add_argument("--split", choices=("train", "valid", "test"), default="test")
  with command_line.parsed(parser, arguments) as given:
    folders = dict.fromkeys(str(Path(folder)) for folder in (given.baseline, *given.folder))
    scores = {folder: read_scores(folder, given.score, given.split) for folder in folders}
    baseline, rows = next(iter(scores.values())), []
    for folder, found in scores.items():
      difference, p = compare(found, baseline)
      low, high = interval(found, baseline)
      mean, deviation = statistics.fmean(found.values()), statistics.stdev(found.values())
      cells = f"{len(found)}", f"{mean:.4f}", f"{deviation:.4f}", f"{difference:+.4f}"
      rows.append([folder, *cells, f"{low:+.4f} to {high:+.4f}", f"{p:.4f}"])
    print(f"{given.score} of the {given.split} split, seeds {[*baseline]}")
    print("Paired t-test of the differences by seed, two-sided; their mean with its 95% interval\n")
    heads = ["", "n", "mean", "deviation", "difference", "95% interval", "p"]
    print(style.table(heads, rows))
    if (n := len(baseline)) < _FEW:
      print(f"\n{n} seeds: the test is weak, and rests on normal scores; take {_FEW} or more")
