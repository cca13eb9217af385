"""Measures recall of a trained run on random sequences that repeat. T tokens of a row."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.analysis import style
from dpjax.errors import UserError
from dpjax.probes.training import reach

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from dpjax.run import Run


def score(run: "Run", periods: Sequence[int], num_rows: int, seed: int) -> dict[str, Any]:
  """Scores n random tokens and their repetition, for each period n.

    period 3: reads 5 2 9 5 2, of 5 2 9 5 2 9
    first time: predicts 2 9; again: predicts 2 9

  Each answer is n - 1 positions before the one that predicts it. The first token does not count,
  as nothing indicates the repetition. Tokens are uniform over the vocabulary, so the first
  time they are unpredictable.

  Args:
    run: from `dpjax.load`.
    periods: values of n, at least 2, with 2 n - 1 within the model's window.
    num_rows: the number of rows for each period.
    seed: the seed of the tokens.

  Returns:
    JSON values: "mixer", "reach" (`dpjax.probes.training.reach`), "vocabulary" and for each
    period a row of "distance", n - 1, and "first" and "again", each with "nats" per token and
    "accuracy".

  Raises:
    ValueError: a period does not fit the window.
  """
  import jax
  import jax.numpy as jnp

  from dpjax.training import losses

  size, rows = run.config.model.vocab_size, []

  @jax.jit
  def read(params, tokens, targets, weights):
    rngs = {"dropout": jax.random.key(0)}  # Boundaries may be drawn in evaluation, too.
    output: Any = run.model.apply({"params": params}, tokens, rngs=rngs)
    nats, count = losses.cross_entropy(output.logits, targets, weights)
    hits = (output.logits.argmax(-1) == targets) * weights
    return nats / count, jnp.sum(hits) / count

  for n in periods:
    if not 2 <= n <= (run.window + 1) // 2:
      raise UserError(f"periods: expected 2 to {(run.window + 1) // 2}, got {n}")
    once = np.random.default_rng((seed, n)).integers(size, size=(num_rows, n))
    tokens = np.concatenate([once, once], axis=1).astype(np.int32)
    row: dict[str, Any] = {"distance": n - 1}
    for name, begin in (("first", 0), ("again", n)):
      weights = np.zeros((num_rows, 2 * n - 1), np.float32)
      weights[:, begin : begin + n - 1] = 1
      nats, accuracy = read(run.params, tokens[:, :-1], tokens[:, 1:], weights)
      row[name] = {"nats": float(nats), "accuracy": float(accuracy)}
    rows.append(row)
  return {
    "run": str(run.workdir),
    "mixer": run.name,
    "reach": reach(run.config.model),
    "vocabulary": size,
    "rows": rows,
  }


def default_periods(window: int) -> list[int]:
  """Powers of 2, and the longest period that fits."""
  most = (window + 1) // 2
  if most < 2:
    raise UserError(f"run: expected a model.max_length of at least 3, got {window}")
  return sorted({2**i for i in range(1, most.bit_length()) if 2**i <= most} | {most})


def format_table(content: dict[str, Any]) -> str:
  """Formats a line for each distance."""
  lines = [
    f"{content['mixer']}: random tokens twice, {content['vocabulary']:,} entries "
    f"(ln {math.log(content['vocabulary']):.3f}), reach {content['reach'] or 'all'}",
    f"{'distance':>9}{'nats, first':>14}{'again':>9}{'accuracy, first':>18}{'again':>9}",
  ]
  for row in content["rows"]:
    first, again = row["first"], row["again"]
    lines.append(
      f"{row['distance']:>9}{first['nats']:>14.3f}{again['nats']:>9.3f}"
      f"{first['accuracy']:>18.3f}{again['accuracy']:>9.3f}"
    )
  return "\n".join(lines)


@style.applied()
def draw(content: dict[str, Any]) -> "Figure":
  """Draws nats and accuracy over distance, of the first time and the repetition."""
  from matplotlib.figure import Figure

  canvas = Figure(figsize=(9, 3.2), layout="constrained")
  x = [row["distance"] for row in content["rows"]]
  for axes, key, name in zip(
    canvas.subplots(1, 2), ("nats", "accuracy"), ("nats per token", "accuracy"), strict=True
  ):
    for i, part in enumerate(("again", "first")):
      axes.plot(x, [row[part][key] for row in content["rows"]], **style.line(i), marker=".")
    if content["reach"] and content["reach"] <= x[-1]:
      axes.axvline(content["reach"], color="0.3", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="distance (tokens)", ylabel=name)
    axes.set_ylim(bottom=0)
  canvas.axes[0].legend(["again", "first"], frameon=False)
  style.finish(canvas)
  return canvas
