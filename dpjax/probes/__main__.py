r"""Probes long-range recall, of mixers trained for it or of a trained run.

  dpjax probes --train --work=runs/probes --json=probes.json --out=probes.png
  dpjax probes runs/quickstart --out=probe.png

With --train, small models of equal size learn the tasks of `dpjax.probes.tasks`, and are scored
by the distance of the answer, on rows 1, 2 and 4 times as long as in training. Each (task, mixer,
seed) becomes a file in --work, and is not trained again. A run of `dpjax train` gets random tokens
twice, and is scored for both times.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import files, registry
from dpjax import run as run_lib
from dpjax.analysis import plots, style
from dpjax.commands import flags as command_line
from dpjax.errors import UserError, unknown
from dpjax.probes import tasks, training
from dpjax.training import losses

if TYPE_CHECKING:
  from matplotlib.figure import Figure

TINY = dict(length=16, window=4, width=16, num_steps=12, batch_size=8, num_test_rows=16)
NUM_BINS = 16  # of distances, for each length


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains and tests as the command line says, prints a table and writes files."""
  about = "Long-range recall of mixers, or of a run, by distance."
  parser = argparse.ArgumentParser(prog="dpjax probes", description=about)
  path, fields = os.path.expanduser, dataclasses.fields(training.Settings)
  parser.add_argument("run", nargs="?", metavar="RUN", type=path, help="folder of dpjax train")
  parser.add_argument("--train", action="store_true", help="train mixers for the tasks")
  parser.add_argument("--work", type=path, default="runs/probes", help="folder of the results")
  parser.add_argument("--mixers", help="a,b; else all that are registered")
  parser.add_argument("--tasks", help="a,b; else recall,copying,induction")
  parser.add_argument("--seeds", type=int, default=3, help="0, 1, ..: how many")
  parser.add_argument("--tiny", action="store_true", help="small and short: does it run?")
  for field in fields:
    parser.add_argument(f"--{field.name}", type=type(field.default), help=field.metadata["help"])
  parser.add_argument("--json", type=path, help="a file for the results")
  parser.add_argument("--out", type=path, help=f"a picture: {', '.join(plots.SUFFIXES)}")
  with command_line.parsed(parser, arguments) as given:
    if given.out:
      plots.check_suffix(given.out)
    if bool(given.run) == given.train:
      got = "both" if given.run else "neither"
      raise UserError(f"run: expected the folder of a run, or --train, got {got}")
    values = {x.name: getattr(given, x.name) for x in fields if getattr(given, x.name) is not None}
    if given.run:
      if others := values.keys() - {"num_test_rows"}:
        raise UserError(f"{min(others)}: expected --train with it, got the folder of a run")
      command_line.check_platform()
      content = repeat(run_lib.load(given.run), values.get("num_test_rows", 64))
    else:
      settings = training.Settings(**(TINY if given.tiny else {}) | values)
      mixers = _names("mixers", given.mixers, registry.mixers.names())
      names = _names("tasks", given.tasks, list(tasks.TASKS))
      if given.seeds < 1:
        raise UserError(f"seeds: expected at least 1, got {given.seeds}")
      command_line.check_platform()
      jobs = list(itertools.product(range(given.seeds), names, mixers))
      content = summarise(settings, _train(settings, Path(given.work), jobs))
    print(format_table(content))
    if given.json:
      files.write_json(Path(given.json), content)
    if given.out:
      plots.write(draw(content), given.out)


def _names(flag: str, given: str | None, known: Sequence[str]) -> Sequence[str]:
  names = known if given is None else list(dict.fromkeys(given.split(",")))
  if wrong := [name for name in names if name not in known]:
    raise unknown(flag, known, wrong[0])
  return names


def _train(settings: training.Settings, work: Path, jobs: Sequence) -> list[dict[str, Any]]:
  """The results of all models, from files where there are any."""
  file = work / "settings.json"
  if files.read_json(file) not in ({}, dataclasses.asdict(settings)):
    raise UserError(f"work: expected a folder with results of these settings, got {work}")
  files.write_json(file, dataclasses.asdict(settings))
  trainer, results = functools.cache(functools.partial(training.trainer, settings)), []
  for seed, task, mixer in jobs:
    file = work / f"{task}_{mixer}_{seed}.json"
    result = files.read_json(file)
    if not result:
      result = dict(task=task, mixer=mixer, seed=seed, **trainer(mixer)(task, seed))
      files.write_json(file, result)
      print(f"{file.stem}: loss {result['loss']:.3f}, {result['seconds']} s", flush=True)
    results.append(result)
  return results


def summarise(settings: training.Settings, models: Sequence[Mapping]) -> dict[str, Any]:
  """Summarises the results of `_train`, as JSON values.

  "results" has for each task, mixer and length the distances of bins, "from" and "to" (both
  included), the "mean" and "deviation" of their accuracy over seeds (None without answers), and
  both up to the smallest reach ("near") and beyond it ("far").
  """
  about = ("parameters", "width", "feed_forward_width", "reach")
  mixers = {model["mixer"]: {name: model[name] for name in about} for model in models}
  reaches = [mixer["reach"] for mixer in mixers.values() if mixer["reach"]]
  near = min(reaches, default=settings.num_layers * (settings.window - 1))
  groups: dict[tuple, list[Mapping]] = {}
  for model in models:
    for length, test in model["tests"].items():
      groups.setdefault((model["task"], model["mixer"], int(length)), []).append(test)
  results = []
  for (task, mixer, length), tests in groups.items():
    edges = [length * i // NUM_BINS for i in range(NUM_BINS + 1)]
    bins = [_accuracy(tests, a + 1, b) for a, b in zip(edges, edges[1:], strict=False)]
    row = {"task": task, "mixer": mixer, "length": length, "seeds": len(tests)}
    row |= {"from": [edge + 1 for edge in edges[:-1]], "to": edges[1:]}
    row |= {"mean": [mean for mean, _ in bins], "deviation": [x for _, x in bins]}
    row |= {"near": _accuracy(tests, 1, near), "far": _accuracy(tests, near + 1, length)}
    results.append(row)
  chance = {row["task"]: tasks.chance(row["task"], settings.contents) for row in results}
  content = {"settings": dataclasses.asdict(settings), "chance": chance, "near": near}
  return content | {"mixers": mixers, "results": results}


def _accuracy(tests: Sequence[Mapping], first: int, last: int) -> tuple[float | None, float | None]:
  """Mean and standard deviation, over seeds, of the accuracy at distances from first to last."""
  part = slice(first, last + 1)
  sums = [(sum(test["hits"][part]), sum(test["counts"][part])) for test in tests]
  found = [hits / count for hits, count in sums if count]
  if not found:
    return None, None
  return float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else None


def repeat(run: run_lib.Run, num_rows: int, seed: int = 0) -> dict[str, Any]:
  """Shows a run n random tokens and the same again, and scores both times.

    n = 3: reads 5 2 9 5 2, of 5 2 9 5 2 9
    first time: predicts 2 9; again: predicts 2 9

  Each answer is n - 1 positions before the one that predicts it. The first token does not count,
  as nothing indicates the repetition. There are `num_rows` for each n: the powers of 2, and the
  largest that fits the window. Returns JSON values: "rows" has a "distance", n - 1, and "first" and
  "again", each with "nats" per token and "accuracy".
  """
  longest = (run.window + 1) // 2
  if longest < 2:
    raise UserError(f"run: expected a model.max_length of at least 3, got {run.window}")
  if num_rows < 1:
    raise UserError(f"num_test_rows: expected at least 1, got {num_rows}")

  @jax.jit
  def score(params, tokens, targets, weights):
    rngs = {"dropout": jax.random.key(0)}  # Boundaries may be drawn in evaluation, too.
    output: Any = run.model.apply({"params": params}, tokens, rngs=rngs)
    nats, count = losses.cross_entropy(output.logits, targets, weights)
    hits = (output.logits.argmax(-1) == targets) * weights
    return nats / count, jnp.sum(hits) / count

  size, rows = run.config.model.vocab_size, []
  for n in sorted({2**i for i in range(1, longest.bit_length())} | {longest}):
    once = np.random.default_rng((seed, n)).integers(size, size=(num_rows, n))
    tokens = np.concatenate([once, once], axis=1).astype(np.int32)
    row: dict[str, Any] = {"distance": n - 1}
    for name, begin in (("first", 0), ("again", n)):
      weights = np.zeros((num_rows, 2 * n - 1), np.float32)
      weights[:, begin : begin + n - 1] = 1
      nats, accuracy = score(run.params, tokens[:, :-1], tokens[:, 1:], weights)
      row[name] = {"nats": float(nats), "accuracy": float(accuracy)}
    rows.append(row)
  about = {"run": str(run.workdir), "mixer": run.name, "reach": training.reach(run.config.model)}
  return about | {"vocabulary": size, "rows": rows}


def format_table(content: Mapping[str, Any]) -> str:
  """Formats a result of `repeat`, or accuracy near and far of `summarise`."""
  if "rows" in content:
    size, reach = content["vocabulary"], content["reach"] or "all"
    title = f"{content['mixer']}: random tokens twice, {size:,} entries (ln {math.log(size):.3f})"
    keys = [(key, part) for key in ("nats", "accuracy") for part in ("first", "again")]
    rows = [
      [row["distance"], *(f"{row[part][key]:.3f}" for key, part in keys)] for row in content["rows"]
    ]
    heads = ["distance", *(f"{key}, {part}" for key, part in keys)]
    return f"{title}, reach {reach}\n" + style.table(heads, rows)

  def cell(mean: float | None, deviation: float | None) -> str:
    spread = "" if deviation is None else f" ± {deviation:.3f}"
    return "-" if mean is None else f"{mean:.3f}{spread}"

  lengths = sorted({row["length"] for row in content["results"]})
  near, length = content["near"], content["settings"]["length"]
  lines = [
    f"Accuracy of test rows of {', '.join(map(str, lengths))} tokens at distances up to {near} "
    f"and beyond; mean and deviation over seeds. Training rows have {length} tokens."
  ]
  heads = [f"{x}: {part}" for x in lengths for part in (f"..{near}", f"{near + 1}..")]
  for task, chance in content["chance"].items():
    rows = []
    for mixer, about in content["mixers"].items():
      found = [x for x in content["results"] if (x["task"], x["mixer"]) == (task, mixer)]
      cells = [cell(*row[part]) for row in found for part in ("near", "far")]
      rows.append([mixer, f"{about['parameters']:,}", about["reach"] or "all", *cells])
    table = style.table(["mixer", "parameters", "reach", *heads], rows)
    lines += ["", f"{task} (chance {chance:.3f})", table]
  return "\n".join(lines)


@style.applied()
def draw(content: Mapping[str, Any]) -> "Figure":
  """Draws a result of `repeat`, or accuracy by distance: a panel for each task and length."""
  from matplotlib.figure import Figure

  if "rows" in content:
    canvas = Figure(figsize=(9, 3.2), layout="constrained")
    distances = [row["distance"] for row in content["rows"]]
    for axes, key in zip(canvas.subplots(1, 2), ("nats", "accuracy"), strict=True):
      for i, part in enumerate(("again", "first")):
        scores = [row[part][key] for row in content["rows"]]
        axes.plot(distances, scores, **style.line(i), marker=".", label=part)
      axes.set_xscale("log", base=2)
      axes.set(xlabel="distance (tokens)", title=key, ylim=(0, None))
    canvas.axes[0].legend(frameon=False)
    style.finish(canvas)
    return canvas
  results, names, mixers = content["results"], list(content["chance"]), list(content["mixers"])
  lengths = sorted({row["length"] for row in results})
  reaches = {mixer["reach"] for mixer in content["mixers"].values() if mixer["reach"]}
  canvas = Figure(figsize=(4 * len(lengths) + 2, 2.6 * len(names) + 0.6), layout="constrained")
  panels = canvas.subplots(len(names), len(lengths), squeeze=False, sharey=True)
  for (i, task), (j, length) in itertools.product(enumerate(names), enumerate(lengths)):
    axes = panels[i, j]
    rows = [row for row in results if (row["task"], row["length"]) == (task, length)]
    for row in rows:
      x = (np.array(row["from"]) + row["to"]) / 2
      mean, deviation = np.array([row["mean"], row["deviation"]], float)  # NaN for None
      known, look = ~np.isnan(mean), style.line(mixers.index(row["mixer"]))
      x, mean, spread = x[known], mean[known], np.nan_to_num(deviation)[known]
      axes.plot(x, mean, **look, marker=".", label=row["mixer"])
      axes.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.15, lw=0)
    axes.axhline(content["chance"][task], color="0.6", linestyle=":")
    for reach in sorted(reach for reach in reaches if reach < length):
      axes.axvline(reach, color="0.3", linestyle="--", linewidth=1)
      axes.text(reach, 0.5, f" reach {reach}", fontsize=8, color="0.3")
    axes.set(title=f"{task}, rows of {length}", xlim=(0, length), ylim=(-0.03, 1.03))
    axes.set_xlabel("distance of the answer (tokens)" if i == len(names) - 1 else "")
    axes.set_ylabel("" if j else "accuracy")
  handles, labels = panels[0, 0].get_legend_handles_labels()
  canvas.legend(handles, labels, loc="outside right upper", frameon=False)
  style.finish(canvas)
  return canvas


if __name__ == "__main__":
  main()
