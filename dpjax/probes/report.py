"""Reports recall by distance: a JSON of all results, a table and a figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.analysis import style

if TYPE_CHECKING:
  from matplotlib.figure import Figure

NUM_BINS = 16  # of distances, for each length


def summarise(settings: Mapping, records: Sequence[Mapping], chance: Mapping) -> dict[str, Any]:
  """Summarises accuracy by distance: mean and standard deviation over seeds.

  Args:
    settings: the settings of the comparison, with "window", "num_layers" and "length".
    records: from `dpjax.probes.training.train`, with "mixer", "task" and "seed".
    chance: the accuracy of a guess for each task.

  Returns:
    JSON values: "settings", "chance", "mixers", and "results" for each task, mixer and length
    with the distances of bins, "from" and "to" (both included), the "mean" and "deviation" of
    each (None without answers), and the same for distances up to the smallest reach ("near")
    and beyond it ("far").
  """
  mixers = {
    record["mixer"]: {x: record[x] for x in ("parameters", "width", "feed_forward_width", "reach")}
    for record in records
  }
  reaches = [x["reach"] for x in mixers.values() if x["reach"]]
  split = min(reaches, default=settings["num_layers"] * (settings["window"] - 1))
  grouped: dict[tuple, list[Mapping]] = {}
  for record in records:
    for length, scores in record["tests"].items():
      grouped.setdefault((record["task"], record["mixer"], int(length)), []).append(scores)
  results = []
  for (task, mixer, length), found in grouped.items():
    edges = [length * i // NUM_BINS for i in range(NUM_BINS + 1)]
    bins = [_over_seeds(found, low + 1, high) for low, high in zip(edges, edges[1:], strict=False)]
    near, far = _over_seeds(found, 1, split), _over_seeds(found, split + 1, length)
    results.append(
      {
        "task": task,
        "mixer": mixer,
        "length": length,
        "seeds": len(found),
        "from": [low + 1 for low in edges[:-1]],
        "to": edges[1:],
        "mean": [mean for mean, _ in bins],
        "deviation": [deviation for _, deviation in bins],
        "near": near,
        "far": far,
      }
    )
  return {
    "settings": dict(settings),
    "chance": dict(chance),
    "near": split,
    "mixers": mixers,
    "results": results,
  }


def _over_seeds(found: Sequence[Mapping], low: int, high: int) -> tuple[float | None, float | None]:
  """Mean and standard deviation, over seeds, of the accuracy at distances from `low` to `high`."""
  each = []
  for scores in found:
    hits, counts = (sum(scores[name][low : high + 1]) for name in ("hits", "counts"))
    if counts:
      each.append(hits / counts)
  if not each:
    return None, None
  deviation = float(np.std(each, ddof=1)) if len(each) > 1 else None
  return float(np.mean(each)), deviation


def format_table(content: Mapping[str, Any]) -> str:
  """Formats accuracy near and far, for each task, mixer and length of test rows."""
  lengths = sorted({row["length"] for row in content["results"]})
  by_key = {(row["task"], row["mixer"], row["length"]): row for row in content["results"]}
  split = content["near"]
  heads = [f"{x}: {part}" for x in lengths for part in (f"..{split}", f"{split + 1}..")]
  lines = [
    f"Accuracy of test rows of {', '.join(map(str, lengths))} tokens at distances up to {split} "
    f"and beyond; mean and deviation over seeds. Training rows have "
    f"{content['settings']['length']} tokens."
  ]
  for task in dict.fromkeys(row["task"] for row in content["results"]):
    lines += ["", f"{task} (chance {content['chance'][task]:.3f})"]
    lines.append(f"{'mixer':22}{'parameters':>11}{'reach':>7}" + "".join(f"{x:>14}" for x in heads))
    for mixer, about in content["mixers"].items():
      rows = [by_key.get((task, mixer, length)) for length in lengths]
      if not any(rows):
        continue
      cells = [_cell(row and row[part]) for row in rows for part in ("near", "far")]
      lines.append(
        f"{mixer:22}{about['parameters']:>11,}{about['reach'] or 'all':>7}"
        + "".join(f"{x:>14}" for x in cells)
      )
  return "\n".join(lines)


def _cell(score: Sequence[float | None] | None) -> str:
  if score is None or score[0] is None:
    return "-"
  return f"{score[0]:.3f}" + ("" if score[1] is None else f" ± {score[1]:.3f}")


@style.applied()
def draw(content: Mapping[str, Any]) -> "Figure":
  """Draws accuracy over distance: a row of panels for each task, a column for each length."""
  from matplotlib.figure import Figure

  results = content["results"]
  names = list(dict.fromkeys(row["task"] for row in results))
  lengths = sorted({row["length"] for row in results})
  canvas = Figure(figsize=(4 * len(lengths) + 2, 2.6 * len(names) + 0.6), layout="constrained")
  panels = canvas.subplots(len(names), len(lengths), squeeze=False, sharey=True)
  looks = {mixer: style.line(i) for i, mixer in enumerate(content["mixers"])}
  reaches = sorted({x["reach"] for x in content["mixers"].values() if x["reach"]})
  for row in results:
    axes = panels[names.index(row["task"])][lengths.index(row["length"])]
    known = [i for i, mean in enumerate(row["mean"]) if mean is not None]
    x = [(row["from"][i] + row["to"][i]) / 2 for i in known]
    mean = np.array([row["mean"][i] for i in known])
    spread = np.array([row["deviation"][i] or 0.0 for i in known])
    look = looks[row["mixer"]]
    axes.plot(x, mean, **look, marker=".", label=row["mixer"])
    axes.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.15, lw=0)
  for task, line in zip(names, panels, strict=True):
    for length, axes in zip(lengths, line, strict=True):
      axes.axhline(content["chance"][task], color="0.6", linestyle=":")
      for reach in (x for x in reaches if x < length):
        axes.axvline(reach, color="0.3", linestyle="--", linewidth=1)
        axes.text(reach, 0.5, f" reach {reach}", fontsize=8, color="0.3")
      axes.set(title=f"{task}, rows of {length}", xlim=(0, length), ylim=(-0.03, 1.03))
    line[0].set_ylabel("accuracy")
  for axes in panels[-1]:
    axes.set_xlabel("distance of the answer (tokens)")
  handles, labels = panels[0][0].get_legend_handles_labels()
  canvas.legend(handles, labels, loc="outside right upper", frameon=False)
  style.finish(canvas)
  return canvas
