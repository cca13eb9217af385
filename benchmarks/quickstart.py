"""How soon the quickstart passes what counting gives, in minutes of its command.

python benchmarks/quickstart.py --out results/quickstart

trains configs/quickstart.py as a user does, with a checkpoint every 25 steps, scores the
test split by each of them, and compares with the Witten-Bell models of
benchmarks/witten_bell.py on the same split. Writes results/quickstart.json and .png.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import timing
import witten_bell

from dpjax.analysis import style

ROOT = pathlib.Path(__file__).parents[1]
EVERY = 25


def train(workdir: pathlib.Path) -> tuple[float, float]:
  """When the command began and ended."""
  begin = time.time()
  flags = ("log_every_steps=1", f"checkpoint_every_steps={EVERY}", "keep_checkpoints=999")
  subprocess.run(
    [
      sys.executable,
      str(ROOT / "train.py"),
      f"--config={ROOT}/configs/quickstart.py",
      f"--workdir={workdir}",
      *(f"--config.train.{flag}" for flag in flags),
    ],
    check=True,
  )
  return begin, time.time()


def curve(workdir: pathlib.Path, begin: float) -> list[dict[str, float]]:
  """Step, minutes since `begin` and bits per character of the test split."""
  import dpjax

  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  times = {line["step"]: line["time"] for line in lines if line["split"] == "train"}
  points = []
  for step in sorted(times):
    if step % EVERY == 0 or step == max(times):
      scores = dpjax.load(workdir, step).score_split("test")
      minutes = (times[step] - begin) / 60
      bits = scores["bits_per_character"]
      points.append({"step": step, "minutes": minutes, "bits_per_character": bits})
  return points


def counted(workdir: pathlib.Path) -> dict[int, float]:
  """Bits per character of the Witten-Bell model by characters of context."""
  from dpjax.data.prepared import open_prepared

  data = open_prepared(workdir / "data")
  bits = {}
  for order in range(3):
    found = witten_bell.probabilities(
      np.asarray(data.splits["train"]),
      np.asarray(data.splits["test"]),
      vocab_size=data.tokenizer.vocab_size,
      order=order,
      start_id=data.tokenizer.start_id,
    )
    bits[order] = float(-np.log2(found).mean())
  return bits


def minutes_to_pass(points: list[dict[str, float]], bits: float) -> float | None:
  """Minutes of the first point below `bits`; None if there is none."""
  below = [point["minutes"] for point in points if point["bits_per_character"] < bits]
  return min(below, default=None)


@style.applied()
def draw(result: dict, path: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
  minutes = [point["minutes"] for point in result["curve"]]
  axes.plot(minutes, [p["bits_per_character"] for p in result["curve"]], marker=".")
  for order, bits in result["witten_bell"].items():
    axes.axhline(bits, linestyle="--", color="grey", linewidth=1)
    axes.text(
      max(minutes), bits, f"Witten-Bell, {order} characters", ha="right", va="bottom", fontsize=8
    )
  axes.set(
    xlabel="minutes since the command was given",
    ylabel="test bits per character",
    title="configs/quickstart.py",
  )
  style.finish(figure)
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, default="results/quickstart")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    begin, end = train(workdir)
    points, bits = curve(workdir, begin), counted(workdir)
  result = {
    "machine": timing.describe_machine() | {"allocator": "default"},
    "minutes_of_the_command": (end - begin) / 60,
    "test_bits_per_character": points[-1]["bits_per_character"],
    "witten_bell": bits,
    "minutes_to_pass": {order: minutes_to_pass(points, bits[order]) for order in bits},
    "curve": points,
  }
  arguments.out.parent.mkdir(parents=True, exist_ok=True)
  with arguments.out.with_suffix(".json").open("w") as file:
    json.dump(result, file, indent=2)
  draw(result, arguments.out.with_suffix(".png"))
  summary = {key: value for key, value in result.items() if key != "curve"}
  print(json.dumps(summary, indent=2))


if __name__ == "__main__":
  main()
