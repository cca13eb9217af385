r"""Tests whether one configuration is better than another, over several seeds.

  dpjax significance train --config=configs/quickstart.py --seeds=0,1,2 \
    --workdir=runs/a
  dpjax significance compare runs/a runs/b --baseline=runs/none

The first trains one run for each seed as dpjax train does, in runs/a/seed_0 and so on, and
resumes unfinished runs. The second tests each folder's scores against the baseline's.

Source: the pooling paper, Table 1: paired t-tests over 3 seeds, p < 0.05. Here p values are
two-sided, without a correction for the number of folders.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpjax.errors import Interrupted, UserError


class Row(NamedTuple):
  """A configuration beside the baseline.

  Attributes:
    name: the configuration's name.
    mean: the mean of its scores.
    deviation: the sample standard deviation of its scores (over n - 1).
    difference: the mean of its scores minus the baseline's.
    p_value: the p-value of the test.
    verdict: "lower" or "higher" if the p-value is below alpha, else "".
  """

  name: str
  mean: float
  deviation: float
  difference: float
  p_value: float
  verdict: str


def compare(
  scores: Mapping[str, Mapping[int, float]], baseline: str, alpha: float = 0.05
) -> list[Row]:
  """Tests each configuration against the baseline by a paired t-test.

    d_s = score of seed s - the baseline's of seed s,    s = 1 .. n
    t   = mean(d) / (deviation(d) / sqrt(n)),            p = P(|Student's t of n - 1| > |t|)

    >>> scores = {"none": {0: 1.25, 1: 1.5, 2: 1.0}, "pooled": {0: 1.0, 1: 1.0, 2: 0.75}}
    >>> row = compare(scores, "none")[1]
    >>> row.name, round(row.difference, 3), round(row.p_value, 3), row.verdict
    ('pooled', -0.333, 0.057, '')

  Differences that are all equal give p = 0, or p = 1 if they are all 0.

  Args:
    scores: the scores of each configuration, by seed.
    baseline: the name of the baseline in `scores`.
    alpha: the significance level, in (0, 1).

  Raises:
    ValueError: a setting is out of range, there are fewer than 2 seeds, the seeds differ
      from the baseline's, or SciPy is missing.
  """
  if not 0 < alpha < 1:
    raise UserError(f"alpha: expected a number in (0, 1), got {alpha}")
  if baseline not in scores:
    raise UserError(f"baseline: expected one of {', '.join(scores)}, got {baseline}")
  seeds, rows = sorted(scores[baseline]), []
  if len(seeds) < 2:
    raise UserError(f"seeds: expected at least 2 of {baseline}, got {seeds}")
  for name, by_seed in scores.items():
    if sorted(by_seed) != seeds:
      raise UserError(f"seeds: expected {seeds} of {name}, got {sorted(by_seed)}")
    values = [by_seed[seed] for seed in seeds]
    differences = [by_seed[seed] - scores[baseline][seed] for seed in seeds]
    mean, p_value = statistics.fmean(differences), _p_value(differences)
    verdict = ("lower" if mean < 0 else "higher") if p_value < alpha else ""
    own = statistics.fmean(values), statistics.stdev(values)
    rows.append(Row(name, *own, mean, p_value, verdict))
  return rows


def read_scores(
  folder: str | Path, score: str = "bits_per_character", split: str = "test"
) -> dict[int, float]:
  """Reads a score of the best checkpoint of each run `folder`/seed_<n>, by seed.

  Raises:
    ValueError: there are no runs, a run lacks the score, or the score is not finite.
  """
  runs = {path.name.removeprefix("seed_"): path for path in Path(folder).glob("seed_*")}
  # As the runner writes them, so that no two are one number.
  is_number = re.compile("0|[1-9][0-9]*").fullmatch
  seeds = sorted((seed for seed in runs if is_number(seed)), key=int)
  if not seeds:
    raise UserError(f"workdir: expected runs seed_<n> in {folder}, got none")
  return {int(seed): _read_score(runs[seed], score, split) for seed in seeds}


def format_table(rows: Sequence[Row]) -> str:
  """Formats the rows as a table with a header."""
  width = max(len(row.name) for row in rows)
  lines = [" " * width + "      mean  deviation  difference         p"]
  for name, mean, deviation, difference, p_value, verdict in rows:
    cells = f"{mean:10.4f}{deviation:11.4f}{difference:+12.4f}{p_value:10.4f}  {verdict}"
    lines.append(name.ljust(width) + cells.rstrip())
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains or compares, by the first word of the command line."""
  from dpjax.commands import flags as command_line

  arguments = sys.argv[1:] if arguments is None else arguments
  if arguments[:1] == ["train"]:
    return _start_training(arguments[1:])
  parser = argparse.ArgumentParser(prog="dpjax significance")
  parser.add_argument("command", choices=("train", "compare"), help="train --help is more")
  parser.add_argument("folder", nargs="+", type=os.path.expanduser, help="with the runs seed_<n>")
  parser.add_argument(
    "--baseline", required=True, type=os.path.expanduser, help="the folder to compare with"
  )
  parser.add_argument("--score", default="bits_per_character")
  parser.add_argument("--split", choices=("train", "valid", "test"), default="test")
  parser.add_argument("--alpha", type=float, default=0.05)
  with command_line.parsed(parser, arguments) as given:
    folders = dict.fromkeys(str(Path(x)) for x in [given.baseline, *given.folder])
    scores = {x: read_scores(x, given.score, given.split) for x in folders}
    baseline, *_ = folders
    table = format_table(compare(scores, baseline, given.alpha))
    print(f"{given.score} of the {given.split} split, seeds {[*scores[baseline]]}\n")
    print(f"{table}\n\nlower, higher: than {baseline}, p < {given.alpha:g}")


def _start_training(arguments: Sequence[str]) -> None:
  from absl import flags

  from dpjax.commands import flags as command_line

  # Defined here alone, since absl's flags are those of the whole process.
  flags.adopt_module_key_flags(command_line)
  config = command_line.define_config(required=True)
  workdir = flags.DEFINE(command_line.PATH, "workdir", None, "of the runs seed_<n>", required=True)
  seeds = flags.DEFINE_list("seeds", "0,1,2", "of the runs")
  sys.argv = [sys.argv[0], *arguments]
  command_line.start(lambda _: _train(config.value, workdir.value, seeds.value))


def _train(config, workdir: str, seeds: Sequence[str]) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.training import loop

  # Python makes no number of thousands of digits, and no seed has so many.
  numbers = [int(seed) for seed in seeds if seed.isdecimal() and len(seed) < 20]
  if not numbers or len({*numbers}) != len(seeds):
    raise UserError(f"seeds: expected whole numbers, each once, got {','.join(seeds)}")
  for seed in numbers:
    config.seed, folder = seed, Path(workdir) / f"seed_{seed}"
    try:
      run, scores = run_lib.train(config, folder)
    except loop.NonFiniteError as error:
      sys.exit(f"{folder}: {error}")
    except Interrupted as error:
      error.args = (f"{folder}: {error}",)
      raise
    if jax.process_index() == 0:
      print(f"\n{folder}, the test split, by step {run.step} (best by validation):")
      print(run_lib.table(scores), flush=True)


def _read_score(run: Path, score: str, split: str) -> float:
  from dpjax.training import checkpoints  # Comparing needs no JAX otherwise.

  best = checkpoints.find_best(run / "checkpoints")
  pattern = rf"scores_{split}_({best or '[0-9]+'})\.json"
  files = [path for path in run.glob("*.json") if re.fullmatch(pattern, path.name)]
  if len(files) != 1:
    raise UserError(
      f"split: expected scores_{split}_<best step>.json in {run}, got "
      f"{len(files)} of them; dpjax evaluate --split={split} writes one"
    )
  try:
    scores = dict(json.loads(files[0].read_text(encoding="utf-8"))["scores"])
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise UserError(f"split: expected scores in {files[0]}, got {error!r}") from error
  known = {
    name: float(value)
    for name, value in scores.items()
    if type(value) in (int, float) and abs(value) <= sys.float_info.max
  }
  if score not in known:
    names = ", ".join(known)
    raise UserError(f"score: expected one of {names} (of {files[0]}), got {score}")
  return known[score]


def _p_value(differences: Sequence[float]) -> float:
  from scipy import special

  mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
  if not deviation:
    return float(not mean)
  t = abs(mean) / deviation * math.sqrt(len(differences))
  return float(2 * special.stdtr(len(differences) - 1, -t))


if __name__ == "__main__":
  main()
