r"""Table 1 of the Dispatcher's paper on Penn Treebank, from runs at its size.

  python train.py --config=configs/dispatcher_ptb.py --config.data.path=ptb \
      --config.train.accumulate_steps=5 --config.train.patience=10 --workdir=runs/dispatcher_ptb
  python benchmarks/table1_ptb.py runs/dispatcher_ptb runs/msa_ptb --out=results/table1_ptb

Writes what each run has reached so far, finished or not, into OUT/dispatcher.json and
OUT/msa.json: the validation curve of all its pieces, hours, and, of a finished run, the
test perplexity of its best epoch, with every token counted once, and by the protocol of the
authors' code: ten rows, windows of 512 tokens without context, each row's first token no
target. A picture has both curves over the epochs.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import jax
import timing
from matplotlib import pyplot as plt

import dpjax
from dpjax import config as config_lib
from dpjax.analysis import style
from dpjax.data import batches

PAPER = {"dispatcher": 35.40, "msa": 40.58}  # test perplexity
NAMES = {"dispatcher": "plain Dispatcher", "msa": "masked self-attention"}
STOPPED_S = 3600.0  # between two reports: the run was not running


def hours_of(reports: list[dict]) -> float:
  """How long the pieces of a run took together, by the times of its reports."""
  times = [report["time"] for report in reports]
  gaps = (after - before for before, after in zip(times, times[1:], strict=False))
  return sum(gap for gap in gaps if gap < STOPPED_S) / 3600


def has_lost_patience(curve: list[dict], patience: int) -> bool:
  """Whether the last `patience` evaluations gave no new best (`config.train.patience`)."""
  scores = [point["valid_perplexity"] for point in curve]
  return 0 < patience <= len(scores) - 1 - scores.index(min(scores))


def authors_perplexity(run, split: str) -> float:
  """Perplexity of all targets of B rows in windows of T, each without context."""
  rows, window = run.config.eval.batch_size, run.config.model.max_length
  text = batches.ContiguousRows(run.data.splits[split], rows, window)
  nats = count = 0.0
  for step in range(text.steps_per_epoch):
    sums = run._scorer.step(run.params, text.batch(step), step)
    nats, count = nats + float(sums["nats"]), count + float(sums["count"])
  return math.exp(nats / count)


def describe(folder: Path) -> dict:
  """What a run has reached."""
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  reports = [json.loads(line) for line in lines]
  run = dpjax.load(folder)
  text = batches.ContiguousRows(
    run.data.splits["train"], run.config.train.batch_size, run.config.model.max_length
  )
  curve = [
    {
      "epoch": report["step"] / text.steps_per_epoch,
      "step": report["step"],
      "valid_perplexity": report["perplexity"],
    }
    for report in reports
    if report["split"] == "valid"
  ]
  steps = max(report["step"] for report in reports)
  num_steps = config_lib.steps_in(run.config.train, "num", steps_per_epoch=text.steps_per_epoch)
  machine = timing.describe_machine()
  best = min(curve, key=lambda point: point["valid_perplexity"])
  is_finished = steps >= num_steps or has_lost_patience(curve, run.config.train.patience)
  row = {
    "is_finished": is_finished,
    "test_perplexity": None,
    "test_perplexity_authors_protocol": None,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
    "steps": steps,
    "num_steps": num_steps,
    "epochs": steps / text.steps_per_epoch,
    "best_epoch": best["epoch"],
    "best_valid_perplexity": best["valid_perplexity"],
    "hours": hours_of(reports),
    "training_tokens": run.data.counts["train"]["tokens"],
    "curve": curve,
    "machine": {key: machine[key] for key in ("device", "processor", "cores")},
  }
  if is_finished:
    row["test_perplexity"] = run.score_split("test")["perplexity"]
    row["test_perplexity_authors_protocol"] = authors_perplexity(run, "test")
  return row


@style.applied()
def draw(rows: dict[str, dict], file: Path) -> None:
  """Validation perplexity over epochs, one curve a model."""
  figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  for name, row in rows.items():
    points = [(point["epoch"], point["valid_perplexity"]) for point in row["curve"]]
    axis.plot(*zip(*points, strict=True), marker=".", label=NAMES.get(name, name))
  axis.set(
    xlabel="epoch",
    ylabel="validation perplexity",
    yscale="log",
    title="Penn Treebank, the paper's size",
  )
  axis.legend()
  style.finish(figure)
  figure.savefig(file, dpi=120)
  plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="+", type=Path, help="NAME_ptb, trained or training")
  parser.add_argument("--out", type=Path, default=Path("results/table1_ptb"))
  given = parser.parse_args(arguments)
  given.out.mkdir(parents=True, exist_ok=True)
  rows = {folder.name.partition("_")[0]: describe(folder) for folder in given.folders}
  for name, row in rows.items():
    content = {"paper_test_perplexity": PAPER.get(name), **row}
    text = json.dumps(content, indent=1) + "\n"
    (given.out / f"{name}.json").write_text(text, encoding="utf-8")
    print(
      f"{NAMES.get(name, name)}: {row['steps']:,} of {row['num_steps']:,} steps in "
      f"{row['hours']:.1f} hours, best validation {row['best_valid_perplexity']:.2f}, "
      f"test {row['test_perplexity'] or 'not yet'}"
    )
  draw(rows, given.out / "validation.png")


if __name__ == "__main__":
  main()
