"""Compares mixers in today's Transformer on books, with equal parameters and equal tokens.

  python benchmarks/books.py --books=FOLDER --workdir=runs/books --out=results/books_relatives

FOLDER has train.txt, valid.txt and test.txt, with a line <|endofbook|> between two books. The model
is `configs/modern_transformer.py:small`; the feed-forward width makes up for the parameters of the
mixer. Each mixer is trained with seed 0 at three learning rates. The three mixers that are best by
validation are then trained at their best rate with two more seeds. All runs with one seed see the
same rows. The mixers of jax-linear-attention need `dpjax[relatives]`.

As many runs train at once as there are cores, each on its own core, so that speeds are measured
beside other runs. A run that has ended is not trained again, and one that was interrupted is
resumed. A run is scored with its best parameters by validation. The report has each run's scores;
the figure, validation over updates at the best rate.
"""

import argparse
import concurrent.futures as futures
import functools
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import jax

import dpjax
from dpjax import config
from dpjax.analysis import curves, style
from dpjax.config import loading
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError
from dpjax.models.build import build_model, init_params

ATTENTION = dict(name="attention", num_heads=4, use_bias=False, rotary_base=10_000.0)
WE = dict(name="we")
GATED_DELTANET = dict(name="gated_deltanet")
# The mixers that take turns in the layers.
MIXERS: dict[str, list[dict[str, Any]]] = {
  "attention": [ATTENTION],
  "dispatcher": [dict(name="dispatcher_multihead", num_heads=4)],
  "we": [WE],
  "he": [dict(name="he")],
  "mamba2": [dict(name="mamba2")],
  "gated_deltanet": [GATED_DELTANET],
  "kda": [dict(name="kda")],
  "log_linear_mamba2": [dict(name="log_linear_mamba2")],
  "we x 3, attention": [WE, WE, WE, ATTENTION],
  "gated_deltanet x 3, attention": [GATED_DELTANET, GATED_DELTANET, GATED_DELTANET, ATTENTION],
}
RATES = (0.002, 0.004, 0.008)
SEEDS = (0, 1, 2)
T_QUANTILE = 4.303  # Student's t, 97.5%, 2 degrees of freedom: 3 seeds
SPLITS = ("train", "valid", "test")


def sections(mixer: str) -> tuple[ConfigDict, ...]:
  """`model.mixer`."""
  return tuple(config.mixer(**section) for section in MIXERS[mixer])


def settings(mixer: str, rate: float, seed: int, updates: int) -> ConfigDict:
  """The configuration of a run, without its text."""
  experiment = config.load("modern_transformer:small")
  experiment.seed = seed
  experiment.model.mixer = sections(mixer)
  experiment.model.feed_forward_width = feed_forward_width(mixer)
  experiment.data.separator = "<|endofbook|>"
  training = experiment.train
  training.update(dict(learning_rate=rate, num_steps=updates))
  training.schedule.warmup_steps = min(100, updates // 2)
  training.eval_every_steps = max(1, updates // 4)
  training.log_every_steps = max(1, min(20, updates // 2))
  experiment.eval.max_tokens = 100_000
  experiment.sample.prompt = ""
  return experiment


def count_parameters(mixer: str, feed_forward: int) -> int:
  """The number of parameters of the model with a mixer."""
  model = config.load("modern_transformer:small").model
  model.update(dict(mixer=sections(mixer), feed_forward_width=feed_forward, vocab_size=5000))
  built = build_model(model)
  params = jax.eval_shape(lambda key: init_params(built, key), jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(params))


@functools.cache
def feed_forward_width(mixer: str) -> int:
  """The width with which the model has as many parameters as with attention, or nearly."""
  width = config.load("modern_transformer:small").model.feed_forward_width
  excess = count_parameters(mixer, width) - count_parameters("attention", width)
  per_feature = count_parameters(mixer, width + 1) - count_parameters(mixer, width)
  return width - round(excess / per_feature)


def folder(arguments: argparse.Namespace, mixer: str, rate: float, seed: int) -> Path:
  """A run's folder; runs of another length have others."""
  name = mixer.replace(", ", "_").replace(" ", "_")
  return arguments.workdir / f"{arguments.updates}_updates" / name / f"{rate}" / f"seed_{seed}"


def digest(arguments: argparse.Namespace, mixer: str, rate: float, seed: int) -> str:
  """SHA-256 of a run's settings and of the texts."""
  experiment = settings(mixer, rate, seed, arguments.updates)
  sha256 = hashlib.sha256(loading.digest(experiment.to_dict()).encode())
  for split in SPLITS:
    sha256.update((arguments.books / f"{split}.txt").read_bytes())
  return sha256.hexdigest()


def train(arguments: argparse.Namespace, mixer: str, rate: float, seed: int) -> None:
  """Trains a run, and writes its entry of the report into its folder."""
  experiment = settings(mixer, rate, seed, arguments.updates)
  experiment.data.path = str(arguments.books.resolve())
  run_folder = folder(arguments, mixer, rate, seed)
  run, test = dpjax.train(experiment, run_folder)
  scores = curves.read_scores(run_folder)
  entry = {
    "mixer": mixer,
    "learning_rate": rate,
    "seed": seed,
    "feed_forward_width": experiment.model.feed_forward_width,
    "parameters": sum(x.size for x in jax.tree.leaves(run.params)),
    "tokens_per_second": statistics.median(scores["train/tokens_per_second"].values()),
    "valid": scores["valid/bits_per_character"],
    "test": {name: test[name] for name in ("bits_per_character", "perplexity")},
    "digest": digest(arguments, mixer, rate, seed),
  }
  (run_folder / "entry.json").write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")


def train_all(
  arguments: argparse.Namespace, runs: Sequence[tuple[str, float, int]]
) -> list[dict[str, Any]]:
  """The entries of runs; those that have none yet are trained, one on each core."""
  free_cores: queue.SimpleQueue[int] = queue.SimpleQueue()
  cores = sorted(os.sched_getaffinity(0))
  for core in cores:
    free_cores.put(core)

  def train_in_a_process(run: tuple[str, float, int], run_folder: Path) -> None:
    run_folder.mkdir(parents=True, exist_ok=True)
    log = run_folder.with_suffix(".log")
    core = free_cores.get()
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += [f"--run={json.dumps(run)}", f"--core={core}"]
    with open(log, "wb") as file:
      done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    free_cores.put(core)
    if done.returncode:
      raise SystemExit(f"{run}: ended with status {done.returncode}; see {log}")

  def entry_of(run: tuple[str, float, int]) -> dict[str, Any]:
    run_folder = folder(arguments, *run)
    path = run_folder / "entry.json"
    if not path.exists():
      train_in_a_process(run, run_folder)
    entry = json.loads(path.read_text(encoding="utf-8"))
    if entry.get("digest") != digest(arguments, *run):
      raise SystemExit(f"--workdir: expected runs with these texts and settings, got {run_folder}")
    print(run, entry["test"], flush=True)
    return entry

  with futures.ThreadPoolExecutor(len(cores)) as pool:
    return [*pool.map(entry_of, runs)]


def best_validation(entry: Mapping[str, Any]) -> float:
  """Bits per character of the parameters that a run keeps."""
  return min(entry["valid"].values())


def rank(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Each mixer's run with seed 0 at its best rate by validation, the best first."""
  best: dict[str, Mapping[str, Any]] = {}
  for entry in entries:
    name = entry["mixer"]
    if entry["seed"] != SEEDS[0]:
      continue
    if name not in best or best_validation(entry) < best_validation(best[name]):
      best[name] = entry
  return sorted(best.values(), key=best_validation)


def rows(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """A row of the table for each mixer, the best by validation first."""
  found = []
  for best in rank(entries):
    mine = [x for x in entries if x["mixer"] == best["mixer"]]
    repeated = [x for x in mine if x["learning_rate"] == best["learning_rate"]]
    bits = [x["test"]["bits_per_character"] for x in repeated]
    row = {name: best[name] for name in ("mixer", "parameters", "feed_forward_width")}
    row["rate"] = best["learning_rate"]
    row["bits_at_rates"] = {
      str(x["learning_rate"]): x["test"]["bits_per_character"]
      for x in mine
      if x["seed"] == SEEDS[0]
    }
    row["bits_per_character"] = statistics.fmean(bits)
    if len(bits) == len(SEEDS):
      row["interval"] = T_QUANTILE * statistics.stdev(bits) / len(bits) ** 0.5
    row["perplexity"] = statistics.fmean(x["test"]["perplexity"] for x in repeated)
    row["tokens_per_second"] = statistics.median(x["tokens_per_second"] for x in mine)
    found.append(row)
  return found


def table(report: Mapping[str, Any]) -> str:
  """The rows as a Markdown table."""
  heads = ["mixer", "parameters", *(f"bits at {rate}" for rate in RATES)]
  heads += ["best rate", "bits per character", "perplexity", "tokens a second"]
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  for row in report["rows"]:
    bits = f"{row['bits_per_character']:.3f}"
    if "interval" in row:
      bits += f" ± {row['interval']:.3f}"
    cells = [row["mixer"], f"{row['parameters'] / 1e6:.2f}M"]
    cells += [f"{row['bits_at_rates'][str(rate)]:.3f}" for rate in RATES]
    cells += [
      f"{row['rate']}",
      bits,
      f"{row['perplexity']:.1f}",
      f"{row['tokens_per_second']:,.0f}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def draw(report: Mapping[str, Any], path: Path) -> None:
  """Validation over updates, each mixer at its best rate."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  with style.applied():
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, entry in enumerate(rank(report["runs"])):
      updates = [int(update) for update in entry["valid"]]
      axis.plot(updates, [*entry["valid"].values()], label=entry["mixer"], **style.line(number))
    axis.set_xlabel("updates")
    axis.set_ylabel("bits per character, validation")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--books", type=Path, required=True, help="the folder of the texts")
  parser.add_argument("--workdir", type=Path, required=True, help="a folder for the runs")
  parser.add_argument("--out", type=Path, required=True, help="path of the report, without suffix")
  parser.add_argument("--updates", type=int, default=500)
  parser.add_argument("--finalists", type=int, default=3, help="mixers trained with all seeds")
  parser.add_argument("--mixers", default=";".join(MIXERS), help="; between them")
  parser.add_argument("--run", help=argparse.SUPPRESS)
  parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.run:
    os.sched_setaffinity(0, {arguments.core})
    train(arguments, *json.loads(arguments.run))
    return
  mixers = arguments.mixers.split(";")
  if unknown := [name for name in mixers if name not in MIXERS]:
    parser.error(f"--mixers: expected some of {'; '.join(MIXERS)}, got {'; '.join(unknown)}")
  if not all((arguments.books / f"{split}.txt").is_file() for split in SPLITS):
    got = arguments.books
    parser.error(f"--books: expected a folder with train.txt, valid.txt and test.txt, got {got}")
  if arguments.updates < 1:
    parser.error(f"--updates: expected at least 1, got {arguments.updates}")
  if arguments.finalists < 0:
    parser.error(f"--finalists: expected at least 0, got {arguments.finalists}")
  for name in mixers:
    try:
      feed_forward_width(name)
    except UserError as error:
      parser.error(f"--mixers: {error}")
  entries = train_all(arguments, [(name, rate, SEEDS[0]) for rate in RATES for name in mixers])
  finalists = rank(entries)[: arguments.finalists]
  repeats = [(x["mixer"], x["learning_rate"], seed) for x in finalists for seed in SEEDS[1:]]
  entries += train_all(arguments, repeats)
  report = {
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "machine": harness.describe_machine(),
    "updates": arguments.updates,
    "rows": rows(entries),
    "runs": entries,
  }
  arguments.out.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(report, indent=2) + "\n"
  arguments.out.with_suffix(".json").write_text(text, encoding="utf-8")
  draw(report, arguments.out.with_suffix(".png"))
  print(table(report))


if __name__ == "__main__":
  main()
