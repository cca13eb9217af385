r"""Finds the theta at which `entropy_threshold` boundaries give segments of a target length.

  dpjax calibrate runs/bytes --factor=4.5

reads the run's valid split with its model, and prints theta, the mean length of a segment,
and the flags for dpjax train:

  theta 1.335: 4.5 bytes a segment, of 5,242,880 bytes in windows of 512

Lengths are in tokens. A tail shorter than a window is dropped.
"""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.errors import UserError

if TYPE_CHECKING:
  import jax

  from dpjax.run import Run


def entropies(run: "Run", tokens: np.ndarray, window: int) -> "jax.Array":
  """The entropy of a model's prediction of each next token, [B, T], in nats, float32.

  The tokens [N] are cut into B windows of T = `window`, each read on its own; one if N < T.
  """
  import jax
  import jax.numpy as jnp

  from dpjax.ops import conditional_entropy

  window = min(window, len(tokens))
  count, size = len(tokens) // window, run.config.eval.batch_size
  rows = np.zeros((-(-count // size) * size, window), np.int32)
  rows[:count] = tokens[: count * window].reshape(count, window)

  @jax.jit
  def read(params, tokens_bt):
    output: Any = run.model.apply({"params": params}, tokens_bt)
    return conditional_entropy(output.logits).astype(jnp.float32)

  parts = [read(run.params, rows[i : i + size]) for i in range(0, len(rows), size)]
  return jnp.concatenate(parts)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints theta for the run and the length given on the command line."""
  from dpjax.commands import flags as command_line

  about = "The theta of entropy_threshold boundaries for a mean length of segments."
  parser, path = argparse.ArgumentParser(prog="dpjax calibrate", description=about), os.path
  parser.add_argument("run", metavar="RUN", type=path.expanduser, help="the folder of a run")
  about = "wanted mean length of segments, in tokens of the run"
  parser.add_argument("--factor", type=float, required=True, help=about)
  parser.add_argument("--rule", default="global", help="global, monotonic or combined")
  about = "second threshold in nats, for combined"
  parser.add_argument("--theta_add", type=float, default=0.0, help=about)
  parser.add_argument("--split", default="valid", help="split of the run's corpus to read")
  about = "tokens read at once: model.max_length of the run to train; default: this run's"
  parser.add_argument("--window", type=int, help=about)
  with command_line.parsed(parser, arguments) as given:
    from dpjax import ops
    from dpjax import run as run_lib

    command_line.check_platform()
    run = run_lib.load(given.run)
    run_lib.check_frozen(run)
    window = run.window if given.window is None else given.window
    if not 1 <= window <= run.window:
      raise UserError(f"window: expected 1 to model.max_length = {run.window}, got {window}")
    found, rule = entropies(run, run.tokens(given.split), window), (given.rule, given.theta_add)
    theta = f"{ops.entropy_theta(found, given.factor, *rule):.6g}"
    ends = int(ops.entropy_threshold(found, rule[0], float(theta), rule[1]).sum())
    kind = run.tokenizer.kind
    unit = kind if kind in ("characters", "bytes") else "tokens"
    print(
      f"theta {theta}: {found.size / max(ends, 1):.4g} {unit} a segment, of "
      f"{found.size:,} {unit} in windows of {found.shape[1]:,}"
    )
    settings = {"": "entropy_threshold", ".run": given.run, ".rule": given.rule, ".theta": theta}
    if given.theta_add:
      settings[".theta_add"] = given.theta_add
    print(*(f"--config.model.boundaries{key}={x}" for key, x in settings.items()))
