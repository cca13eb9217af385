"""Finds theta for entropy_threshold boundaries, or rates for flexitokens.

  dpjax calibrate runs/bytes --factor=4.5
  dpjax calibrate runs/bytes --rates

reads the run's valid split with its model. The first finds the theta at which entropy_threshold
boundaries give segments of a target length, the second the rate of boundaries and its deviation
over rows, for flexitokens: of the run's boundaries, or of its words if it has none. Both print
the flags for dpjax train:

  theta 1.335: 4.5 bytes a segment, of 5,242,880 bytes in windows of 512
  rate 0.1761, with a deviation of 0.0128: boundaries for each of the bytes, over 10,240 rows of 512
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax.analysis import calibrate
from dpjax.commands.command_line import Parser, path, start
from dpjax.commands.processes import check_platform
from dpjax.errors import UserError

if TYPE_CHECKING:
  from dpjax.runs import Run


def main(words: Sequence[str] | None = None) -> None:
  """Prints theta for the target length, or rates, as given on the command line."""
  parser = Parser("calibrate", __doc__, is_distributed=False)
  parser.add_argument("run", metavar="RUN", type=path, help="the folder of a run")
  target = parser.add_mutually_exclusive_group(required=True)
  about = "mean length of segments, in tokens of the run"
  target.add_argument("--factor", type=float, help=about)
  about = "measure the rate of boundaries, and its deviation over rows"
  target.add_argument("--rates", action="store_true", help=about)
  add = parser.add_argument
  add("--rule", default="global", help="global, monotonic or combined")
  add("--theta_add", type=float, default=0.0, help="second threshold in nats, for combined")
  add("--split", default="valid", help="split of the run's corpus to read")
  about = "tokens read at once: model.max_length of the run to train; default: this run's"
  add("--window", type=int, help=about)
  start(parser, _calibrate, words)


def _calibrate(options: Namespace) -> None:
  from dpjax import runs

  check_platform()
  if options.rates and (options.rule, options.theta_add) != ("global", 0.0):
    raise UserError("rates: expected neither --rule nor --theta_add, which belong to --factor")
  run = runs.load(options.run)
  if not options.rates:
    runs.check_frozen(run)
  window = run.window if options.window is None else options.window
  if not 1 <= window <= run.window:
    raise UserError(f"window: expected 1 to model.max_length = {run.window}, got {window}")
  tokens = run.tokens(options.split)
  unit = run.tokenizer.name if run.tokenizer.is_character_level else "tokens"
  if options.rates:
    settings = _rates(run, tokens, window, unit)
  else:
    settings = _theta(run, tokens, window, unit, options)
  print(*(f"--config.model.boundaries{key}={x}" for key, x in settings.items()))


def _rates(run: "Run", tokens: np.ndarray, window: int, unit: str) -> dict[str, str]:
  """Prints the rate of boundaries; returns the settings of flexitokens."""
  rate_b = np.asarray(calibrate.rates(run, tokens, window))
  rate = f"{rate_b.mean():.4g}"
  deviation = f"{rate_b.std():.4g}"
  print(
    f"rate {rate}, with a deviation of {deviation}: boundaries for each of the {unit}, over "
    f"{len(rate_b):,} rows of {min(window, len(tokens)):,}"
  )
  return {"": "flexitokens", ".prior": rate, ".deviation": deviation}


def _theta(
  run: "Run", tokens: np.ndarray, window: int, unit: str, options: Namespace
) -> dict[str, str]:
  """Prints the theta of a length; returns the settings of entropy_threshold."""
  from dpjax import ops

  h_bt = calibrate.entropies(run, tokens, window)
  rule = options.rule
  theta_add = options.theta_add
  theta = f"{ops.entropy_theta(h_bt, options.factor, rule, theta_add):.6g}"
  ends = int(ops.entropy_threshold(h_bt, rule, float(theta), theta_add).sum())
  print(
    f"theta {theta}: {h_bt.size / max(ends, 1):.4g} {unit} a segment, of "
    f"{h_bt.size:,} {unit} in windows of {h_bt.shape[1]:,}"
  )
  settings = {"": "entropy_threshold", ".run": options.run, ".rule": rule, ".theta": theta}
  if theta_add:
    settings[".theta_add"] = theta_add
  return settings
