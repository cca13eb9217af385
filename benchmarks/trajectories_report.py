r"""Reports the runs of `benchmarks/trajectories.py` as JSON and pictures.

  python benchmarks/trajectories_report.py runs/trajectories --out=results/trajectories

Writes OUT/same.json, seeds.json, sizes.json, products.json for the runs so far, and pictures.
Models of an earlier report are kept unless their runs are in the folder. Losses are in nats per
token; differences of losses are relative, as root mean squares of every 20 updates.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import matplotlib
import numpy as np
from trajectories import ATTENTION, BATCH, BFLOAT16, LENGTH, LOWER_PEAK, OWN_PEAK, POOLING, SIZES

from dpjax.analysis import style

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 20  # updates that are aggregated
FIRST = 100  # updates in which differences must be small
LAST_BIT = 2.0**-24  # relative, of a float32 loss: the lowest possible floor
MARGIN = {name: math.log(1.02) for name in ATTENTION}  # nats per token: 2% of perplexity
BITS_MARGIN = 0.02 * math.log(2)  # nats per character
SIDES = ("authors", "dpjax")
PRODUCTS = ("float32", *BFLOAT16, "dtype_in_float32")  # the last: dtype's weights scored in float32
# On the test split: nats per token on Penn Treebank, bits per character on text8.
BASELINES = {"dispatcher": "msa"}
PAPER = {
  "dispatcher": math.log(35.40 / 40.58),
  "fixed4": 1.166 - 1.143,
  "whitespace": 1.133 - 1.143,
  "unigram": 1.134 - 1.143,
  "entropy": 1.138 - 1.143,
  "gumbel": 1.136 - 1.143,
}


def differences(here: np.ndarray, there: np.ndarray, window: int = WINDOW) -> np.ndarray:
  """Root mean square of the relative differences of each window of updates."""
  size = min(len(here), len(there)) // window * window
  relative = (here[:size] - there[:size]) / there[:size]
  return np.sqrt(np.mean(relative.reshape(-1, window) ** 2, axis=1))


def first_apart(here: Sequence[float], there: Sequence[float]) -> int | None:
  """The first update whose shares of boundaries differ by one position or more; None if none do."""
  apart = np.abs(np.subtract(here, there)) > 0.5 / (BATCH * LENGTH)
  return int(apart.argmax()) if apart.any() else None


def equivalence(here: Sequence[float], there: Sequence[float], margin: float) -> dict[str, Any]:
  """Two one-sided t-tests (Schuirmann 1987), with Welch's degrees of freedom.

    t = (margin - |mean(here) - mean(there)|) / standard error,  p = P(Student's t > t)

  Equivalent at the level 0.05 if p is below it: the 90% interval of the difference then lies
  within the margin.
  """
  from scipy import special

  a, b = np.asarray(here), np.asarray(there)
  parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
  error = math.sqrt(sum(parts))
  freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
  difference = float(a.mean() - b.mean())
  p_value = float(special.stdtr(freedom, -(margin - abs(difference)) / error))
  return {
    "difference": difference,
    "half_interval_90": float(special.stdtrit(freedom, 0.95)) * error,
    "margin": margin,
    "p_value": p_value,
    "is_equivalent": p_value < 0.05,
  }


def report_same(done: Sequence[Mapping]) -> dict[str, Any]:
  """For each model, both losses, their difference, the floor's, and those of faults.

  "boundaries_differ_at" is the first update with a different number of segments.
  """
  by_name: dict[str, dict[str, Mapping]] = {}
  for row in done:
    by_name.setdefault(row["name"], {})[row["side"]] = row
  models = {}
  for name, rows in by_name.items():
    if not {"authors", "again", "dpjax"} <= rows.keys():
      continue
    sides = {side: np.asarray(row["losses"]) for side, row in rows.items()}
    theirs = sides["authors"]
    found = {side: differences(x, theirs) for side, x in sides.items() if side != "authors"}
    floor = np.maximum(found["again"], LAST_BIT)
    over = {side: found[side] / floor for side in ("dpjax", "exact_adam") if side in found}
    ends = rows["authors"]["p_ones"]
    apart = {side: first_apart(rows[side]["p_ones"], ends) for side in ("again", *over)}
    apart = {side: update for side, update in apart.items() if update is not None}
    means = {
      side: sides[side][: len(found["dpjax"]) * WINDOW].reshape(-1, WINDOW).mean(axis=1)
      for side in SIDES
    }
    models[name] = {
      "most_of_first_100": float(np.abs(sides["dpjax"][:FIRST] / theirs[:FIRST] - 1).max()),
      "most_over_floor_after": {
        side: float(x[FIRST // WINDOW :].max()) for side, x in over.items()
      },
      "boundaries_differ_at": apart,
      "most_over_floor_until_then": {
        side: float(x[: apart[side] // WINDOW].max(initial=0))
        for side, x in over.items()
        if side in apart
      },
      "loss": {side: x.round(5).tolist() for side, x in means.items()},
      "difference": {side: [float(f"{y:.3g}") for y in x] for side, x in found.items()},
    }
  return models


def report_seeds(done: Sequence[Mapping]) -> dict[str, Any]:
  """For each model, the validation losses of both sides, and the test."""
  models: dict[str, Any] = {}
  for row in done:
    models.setdefault(row["name"], {side: [] for side in SIDES})[row["side"]].append(row["valid"])
  for name, sides in models.items():
    if min(len(sides[side]) for side in SIDES) > 1:
      sides |= equivalence(sides["dpjax"], sides["authors"], MARGIN.get(name, BITS_MARGIN))
  return models


def report_products(done: Sequence[Mapping]) -> dict[str, Any]:
  """For each model, the validation losses of each setting by seed, and bfloat16's less float32's.

  The standard deviation and range are those of our float32 seeds in seeds.json. The weights
  of dtype are scored in both dtypes.
  """
  file = Path(__file__).parents[1] / "results/trajectories/seeds.json"
  known = json.loads(file.read_text(encoding="utf-8"))["models"]
  models: dict[str, Any] = {}
  for row in done:
    sides = models.setdefault(row["name"], {side: [] for side in PRODUCTS})
    sides[row["side"]].append(row["valid"])
    if "valid_in_float32" in row:
      sides["dtype_in_float32"].append(row["valid_in_float32"])
  for name, sides in models.items():
    seeds = known.get(name, {}).get("dpjax", [])
    limits = {"margin": MARGIN.get(name, BITS_MARGIN)}
    if seeds:
      limits |= {"standard_deviation": float(np.std(seeds, ddof=1)), "range": float(np.ptp(seeds))}
    pairs = {side: zip(sides[side], sides["float32"], strict=False) for side in PRODUCTS[1:]}
    away = {side: [x - y for x, y in pair] for side, pair in pairs.items()}
    sides |= {"difference": away, **limits}
    for side, values in away.items():
      most = max(map(abs, values), default=math.inf)
      sides[f"{side}_is_within"] = [limit for limit, x in limits.items() if most <= x]
  return models


def report_sizes(done: Sequence[Mapping]) -> dict[str, Any]:
  """For each variant, the difference from its baseline at each size, and a line through them.

  In nats per token for the Dispatcher less self-attention, in bits per character for
  boundaries less none; the line is linear in the logarithm of the baseline's parameters,
  and its slope has a 90% interval, from Student's t of the residuals. "largest" has
  the validation losses of the largest size by model, side and peak rate, and seed.
  """
  from scipy import special

  by_name: dict[str, dict[tuple, dict[int, Mapping]]] = {}
  largest: dict[str, dict[int, float]] = {}
  for row in done:
    size = row["width"], row["num_layers"]
    if row["name"] in ATTENTION and size == SIZES[-1]:
      run = f"{row['name']}, {row['side']}, {row['peak']:g}"
      largest.setdefault(run, {})[row["seed"]] = row["valid"]
    if (row["side"], row["peak"]) != ("dpjax", OWN_PEAK):
      continue
    by_name.setdefault(row["name"], {}).setdefault(size, {})[row["seed"]] = row
  models = {}
  for name in by_name.keys() & PAPER.keys():
    unit = 1.0 if name in ATTENTION else math.log(2)
    baseline = by_name.get(BASELINES.get(name, "none"), {})
    points = []
    for size in sorted(by_name[name].keys() & baseline.keys()):
      pairs = [
        (by_name[name][size][seed]["valid"] - row["valid"]) / unit
        for seed, row in baseline[size].items()
        if seed in by_name[name][size]
      ]
      parameters = next(iter(baseline[size].values()))["parameters"]
      points.append({"size": size, "parameters": parameters, "differences": pairs})
    x, y = np.array(
      [(math.log10(p["parameters"]), y) for p in points for y in p["differences"]]
    ).T.reshape(2, -1)
    if len(points) < 2 or len(x) < 3:
      continue
    (slope, start), spread = np.polyfit(x, y, 1, cov=True)
    models[name] = {
      "paper": PAPER[name],
      "slope_a_decade": float(slope),
      "slope_half_interval_90": float(special.stdtrit(len(x) - 2, 0.95) * spread[0, 0] ** 0.5),
      "at_one_million": float(start + 6 * slope),
      "points": points,
    }
  if "dispatcher" in models:
    models["dispatcher"]["largest"] = largest
  return models


def draw_same(models: Mapping[str, Any]) -> Any:
  """Draws both losses above, and their difference with the floor's and faults below."""
  columns = 4
  bands = -(-len(models) // columns)
  figure, axes = plt.subplots(
    2 * bands, columns, figsize=(14, 5.5 * bands), layout="constrained", squeeze=False, sharex=True
  )
  for axis in axes.flat[len(models) :]:
    axis.set_axis_off()
  for i, (name, model) in enumerate(models.items()):
    band, column = divmod(i, columns)
    above, below = axes[2 * band, column], axes[2 * band + 1, column]
    for axis in (above, below):
      axis.set_axis_on()
    x = WINDOW * (np.arange(len(model["difference"]["dpjax"])) + 1)
    above.plot(x, model["loss"]["authors"], "k", linewidth=3, alpha=0.3, label="authors' code")
    above.plot(x, model["loss"]["dpjax"], "C0", linewidth=1, label="dpjax")
    above.set(title=name, ylabel="loss, nats a token" if column == 0 else None)
    sides = {
      "again": "their code, other threads",
      "dpjax": "dpjax",
      "exact_adam": "dpjax, Adam's corrections exact",
    }
    for side, values in sorted(model["difference"].items()):
      is_fault = side not in sides
      look = {"linestyle": ":" if is_fault else "-", "marker": "." if is_fault else None}
      known = {"again": "0.5", "dpjax": "C0", "exact_adam": "C6"}
      color = known.get(side, f"C{len(below.lines) + 1}")
      label = sides.get(side, f"fault: {side.replace('_', ' ')}")
      below.plot(x[: len(values)], values, color=color, label=label, **look)
    below.set(yscale="log", xlabel="update")
    if column == 0:
      below.set(ylabel="relative difference to theirs")
    below.legend(fontsize=7)
  axes[0, 0].legend(fontsize=7)
  style.finish(figure)
  return figure


def draw_seeds(models: Mapping[str, Any], sides: Sequence[str] = SIDES) -> Any:
  """Draws the validation losses of the sides, and the margin around the first's mean."""
  figure, axes = plt.subplots(
    1, len(models), figsize=(3 * len(models), 3.5), layout="constrained", squeeze=False
  )
  for axis, (name, model) in zip(axes[0], models.items(), strict=True):
    for i, side in enumerate(sides):
      axis.plot([i] * len(model[side]), model[side], "o", alpha=0.6)
    if "margin" in model:
      middle = np.mean(model[sides[0]])
      axis.axhspan(middle - model["margin"], middle + model["margin"], color="0.92", zorder=0)
    axis.set(title=name, xlim=(-0.5, len(sides) - 0.5))
    axis.set_xticks(range(len(sides)), sides, rotation=20 * (len(sides) > 2))
  axes[0, 0].set_ylabel("validation loss, nats a token")
  style.finish(figure)
  return figure


def draw_sizes(models: Mapping[str, Any]) -> Any:
  """Draws differences over parameters, their line, and the paper's difference."""
  columns = 3
  bands = -(-len(models) // columns)
  figure, axes = plt.subplots(
    bands, columns, figsize=(11, 3.2 * bands), layout="constrained", squeeze=False
  )
  for axis in axes.flat[len(models) :]:
    axis.set_axis_off()
  for axis, (name, model) in zip(axes.flat, models.items(), strict=False):
    for point in model["points"]:
      axis.plot([point["parameters"]] * len(point["differences"]), point["differences"], "C0o")
    x = np.array([point["parameters"] for point in model["points"]])
    of_dispatcher, of_msa = (
      model.get("largest", {}).get(f"{kind}, dpjax, {LOWER_PEAK:g}", {}) for kind in ATTENTION
    )
    lower = [of_dispatcher[seed] - of_msa[seed] for seed in of_dispatcher.keys() & of_msa.keys()]
    axis.plot([x[-1]] * len(lower), lower, "C2^", label=f"peak rate {LOWER_PEAK:g}")
    line = model["at_one_million"] + model["slope_a_decade"] * (np.log10(x) - 6)
    axis.plot(x, line, "C0", label="here")
    axis.axhline(model["paper"], color="C1", linestyle="--", label="the paper, at its size")
    axis.axhline(0, color="0.7", linewidth=0.8)
    unit = "nats a token" if name in ATTENTION else "bits a character"
    title = f"{name} less {BASELINES.get(name, 'none')}"
    axis.set(title=title, xscale="log", xlabel="parameters", ylabel=unit)
  if len(models):
    axes[0, 0].legend(fontsize=8)
  style.finish(figure)
  return figure


EXPERIMENTS = {
  "same": (report_same, draw_same),
  "seeds": (report_seeds, draw_seeds),
  "sizes": (report_sizes, draw_sizes),
  "products": (report_products, partial(draw_seeds, sides=PRODUCTS)),
}


@style.applied()
def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("work", type=Path, help="the folder that the runs wrote to")
  parser.add_argument("--out", type=Path, default=Path("results/trajectories"))
  given = parser.parse_args(arguments)
  if not any(given.work.glob("*-*.json")):
    parser.error(
      f"work: expected a folder with runs of benchmarks/trajectories.py, got {given.work}"
    )
  given.out.mkdir(parents=True, exist_ok=True)
  described = harness.describe_machine()
  machine = {key: described[key] for key in ("device", "processor", "cores", "jax")}
  for experiment, (make, draw) in EXPERIMENTS.items():
    files = sorted(given.work.glob(f"{experiment}-*.json"))
    done = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = make(done)
    if not models:
      continue
    for name, model in models.items():
      seconds = math.fsum(row["seconds"] for row in done if row["name"] == name)
      model |= {"minutes": round(seconds / 60, 1), "machine": machine}
    file = given.out / f"{experiment}.json"
    if file.exists():
      models = json.loads(file.read_text(encoding="utf-8"))["models"] | models
    models = {name: models[name] for name in (*ATTENTION, *POOLING) if name in models}
    content = {
      "command": f"python benchmarks/trajectories.py --only={experiment}",
      "models": models,
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    figure = draw(models)
    figure.savefig(given.out / f"{experiment}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
  main()
