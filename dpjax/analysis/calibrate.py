r"""Measures the text statistics that `entropy_threshold` and `flexitokens` boundaries need.

  dpjax calibrate runs/bytes --factor=4.5
  dpjax calibrate runs/bytes --rates

reads the run's valid split with its model. The first finds the theta at which `entropy_threshold`
boundaries give segments of a target length, the second the rate of boundaries and its deviation
over rows, for `flexitokens`: of the run's boundaries, or of its words if it has none. Both print
the flags for dpjax train:

  theta 1.335: 4.5 bytes a segment, of 5,242,880 bytes in windows of 512
  rate 0.1761, with a deviation of 0.0128: boundaries for each of the bytes, over 10,240 rows of 512

Lengths are in tokens. A tail shorter than a window is dropped.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.errors import UserError

if TYPE_CHECKING:
  import jax

  from dpjax.run import Run


def entropies(run: "Run", tokens: np.ndarray, window: int) -> "jax.Array":
  """The entropy of a model's prediction of each next token, [B, T], in nats, float32.

  The tokens [N] are cut into B windows of T = `window`, each read independently; B = 1 if N < T.
  """
  from dpjax.ops import conditional_entropy

  return _read(run, tokens, window, lambda _, output: conditional_entropy(output.logits))


def rates(run: "Run", tokens: np.ndarray, window: int) -> "jax.Array":
  """The boundaries for each token, [B], float32, of every window of tokens [N]; see `entropies`.

    r_b = (1 / T) sum over t of b_t

  for the model's boundaries; without pooling, for those after spaces, i.e. of words. Their mean
  and standard deviation are the alpha and sigma of `dpjax.layers.FlexiTokens`. A `ValueError` if
  the model does not pool and no token ends a word.
  """
  from dpjax.ops import whitespace_boundaries

  ids = run.tokenizer.space_ids
  if run.config.model.boundaries.name == "none":
    if not ids:
      raise UserError("run: expected token pooling, or a tokenizer with spaces, got neither")
    return _read(run, tokens, window, lambda x, _: whitespace_boundaries(x, ids).mean(1))
  return _read(run, tokens, window, lambda _, output: output.boundaries.mean(1))


def _read(run: "Run", tokens: np.ndarray, window: int, of_output: Callable) -> "jax.Array":
  """Applies a function to windows, [B, T], and the model's output; returns float32."""
  import jax
  import jax.numpy as jnp

  window = min(window, len(tokens))
  count, size = len(tokens) // window, run.config.eval.batch_size
  rows = np.zeros((-(-count // size) * size, window), np.int32)
  rows[:count] = tokens[: count * window].reshape(count, window)

  @jax.jit
  def read(params, tokens_bt):
    rngs = {"dropout": jax.random.key(0)}  # Some boundaries are sampled.
    output: Any = run.model.apply({"params": params}, tokens_bt, rngs=rngs)
    return of_output(tokens_bt, output).astype(jnp.float32)

  parts = [read(run.params, rows[i : i + size]) for i in range(0, len(rows), size)]
  return jnp.concatenate(parts)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints theta for the target length, or rates, as given on the command line."""
  from dpjax.commands import flags as command_line

  about = "Finds theta for entropy_threshold boundaries, or rates for flexitokens."
  parser, path = argparse.ArgumentParser(prog="dpjax calibrate", description=about), os.path
  parser.add_argument("run", metavar="RUN", type=path.expanduser, help="the folder of a run")
  about = "mean length of segments, in tokens of the run"
  target = parser.add_mutually_exclusive_group(required=True)
  target.add_argument("--factor", type=float, help=about)
  about = "measure the rate of boundaries, and its deviation over rows"
  target.add_argument("--rates", action="store_true", help=about)
  parser.add_argument("--rule", default="global", help="global, monotonic or combined")
  about = "second threshold in nats, for combined"
  parser.add_argument("--theta_add", type=float, default=0.0, help=about)
  parser.add_argument("--split", default="valid", help="split of the run's corpus to read")
  about = "tokens read at once: model.max_length of the run to train; default: this run's"
  parser.add_argument("--window", type=int, help=about)
  with command_line.parsed(parser, arguments) as options:
    from dpjax import ops
    from dpjax import run as run_lib

    command_line.check_platform()
    if options.rates and (options.rule, options.theta_add) != ("global", 0.0):
      raise UserError("rates: expected neither --rule nor --theta_add, which belong to --factor")
    run = run_lib.load(options.run)
    if not options.rates:
      run_lib.check_frozen(run)
    window = run.window if options.window is None else options.window
    if not 1 <= window <= run.window:
      raise UserError(f"window: expected 1 to model.max_length = {run.window}, got {window}")
    tokens, unit = run.tokens(options.split), run.tokenizer.name
    unit = unit if unit in ("characters", "bytes") else "tokens"
    if options.rates:
      rate_b = np.asarray(rates(run, tokens, window))
      rate, deviation = f"{rate_b.mean():.4g}", f"{rate_b.std():.4g}"
      print(
        f"rate {rate}, with a deviation of {deviation}: boundaries for each of the {unit}, over "
        f"{len(rate_b):,} rows of {min(window, len(tokens)):,}"
      )
      settings = {"": "flexitokens", ".prior": rate, ".deviation": deviation}
    else:
      h_bt, rule = entropies(run, tokens, window), (options.rule, options.theta_add)
      theta = f"{ops.entropy_theta(h_bt, options.factor, *rule):.6g}"
      ends = int(ops.entropy_threshold(h_bt, rule[0], float(theta), rule[1]).sum())
      print(
        f"theta {theta}: {h_bt.size / max(ends, 1):.4g} {unit} a segment, of "
        f"{h_bt.size:,} {unit} in windows of {h_bt.shape[1]:,}"
      )
      settings = {
        "": "entropy_threshold",
        ".run": options.run,
        ".rule": options.rule,
        ".theta": theta,
      }
      if options.theta_add:
        settings[".theta_add"] = options.theta_add
    print(*(f"--config.model.boundaries{key}={x}" for key, x in settings.items()))
