r"""Bits per character over the shortening factor, of runs with different boundaries.

  python benchmarks/pooling_runs.py runs/text8_none runs/text8_gumbel ... \
      --command="python train.py --config=configs/pooling_text8.py:NAME ..." \
      --out=results/pooling_text8_prefix.json

A run's name is what follows the last "_" of its folder. Beside each run's scores of the
test split stand those of the pooling paper (Table 1, text8), and, where a predictor has a
target, what F1 would be if it found boundaries everywhere, or at random as often as the
target does. The picture, of the same name, has both in two panels. Runs that differ in more
than their boundaries (and number of layers, of the vanilla model) are refused.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import jax
import timing
from matplotlib import pyplot as plt

import dpjax
from dpjax import config as config_lib
from dpjax import workdir

# Bits per character, shortening factor.
PAPER = {
  "none": (1.143, 1.0),
  "fixed2": (1.149, 2.0),
  "fixed3": (1.155, 3.0),
  "fixed4": (1.166, 4.0),
  "gumbel": (1.136, 4.6),
  "entropy": (1.138, 4.1),
  "unigram": (1.134, 5.0),
  "whitespace": (1.133, 5.7),
}
OWN = ("model.num_layers", "model.first.", "model.last.", "model.boundaries.")


def describe(folder: Path) -> dict:
  """What a finished run reached."""
  run = dpjax.load(folder)
  name = folder.name.rsplit("_", 1)[-1]
  scores = read(folder / f"scores_test_{run.step}.json")[0]["scores"]
  reports = read(folder / "metrics.jsonl", by_line=True)
  row = {
    "name": name,
    "boundaries": run.config.model.boundaries.name,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
    "best_step": run.step,
    "valid": [
      {"step": report["step"], "bits_per_character": report["bits_per_character"]}
      for report in reports
      if report["split"] == "valid"
    ],
    "test": {"shortening_factor": 1.0, **scores},
  }
  if name in PAPER:
    bits, factor = PAPER[name]
    row["paper"] = {"bits_per_character": bits, "shortening_factor": factor}
  if scores.get("f1"):
    rate = scores["precision"] * scores["p_ones"] / scores["recall"]
    row["target_rate"] = rate
    row["f1_everywhere"] = 2 * rate / (1 + rate)
    row["f1_at_random"] = rate
  return row


def read(file: Path, by_line: bool = False) -> list[dict]:
  """The JSON of a file, whole or a line each."""
  text = file.read_text(encoding="utf-8")
  return [json.loads(part) for part in (text.splitlines() if by_line else [text])]


def check_alike(folders: list[Path]) -> dict:
  """The settings of the first run, where all others have them."""
  configs = [workdir.read_config(folder).to_dict() for folder in folders]
  for folder, config in zip(folders[1:], configs[1:], strict=True):
    lines = config_lib.differences(configs[0], config)
    wrong = [line for line in lines if not line.startswith(OWN)]
    if wrong:
      raise ValueError(f"{folder}: expected the settings of {folders[0]}, got {wrong}")
  return configs[0]


def draw(rows: list[dict], file: Path) -> None:
  """Two panels: ours, and the paper's."""
  figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
  for axis, key, title in ((axes[0], "test", "here"), (axes[1], "paper", "the paper")):
    for row in rows:
      if key in row:
        point = row[key]["shortening_factor"], row[key]["bits_per_character"]
        axis.plot(*point, "o", color="tab:blue")
        axis.annotate(row["name"], point, xytext=(5, 4), textcoords="offset points")
    axis.set(title=title, xlabel="shortening factor", ylabel="bits per character")
    axis.margins(0.15)
  figure.savefig(file, dpi=120)
  plt.close(figure)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="+", type=Path)
  parser.add_argument("--command", default="", help="what trained them")
  parser.add_argument("--commit", default="", help="at which version")
  parser.add_argument("--note", default="")
  parser.add_argument("--out", type=Path, required=True)
  arguments = parser.parse_args()
  try:
    config = check_alike(arguments.folders)
    rows = [describe(folder) for folder in arguments.folders]
  except (ValueError, OSError) as error:
    sys.exit(str(error))
  machine = timing.describe_machine()
  result = {
    "note": arguments.note,
    # Of the runs; what gathers them is above.
    "machine": {key: machine[key] for key in ("device", "processor", "cores", "jax")},
    "command": arguments.command,
    "commit": arguments.commit,
    "model": {
      **{key: config["model"][key]
         for key in ("width", "feed_forward_width", "max_length")},
      "num_heads": config["model"]["mixer"]["num_heads"],
    },
    "train": {
      **{key: config["train"][key] for key in ("batch_size", "num_steps", "learning_rate")},
      "warmup_steps": config["train"]["schedule"]["warmup_steps"],
    },
    "runs": rows,
  }
  arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
  draw(rows, arguments.out.with_suffix(".png"))
  for row in rows:
    test = row["test"]
    print(f"{row['name']:12s}{test['bits_per_character']:8.4f}"
          f"{test['shortening_factor']:8.3f}")


if __name__ == "__main__":
  main()
