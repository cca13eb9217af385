r"""Runs with different boundaries side by side: bits, shortening, time, and their segments.

  python benchmarks/pooling_runs.py runs/text8_none runs/text8_gumbel ... \
      --command="python train.py --config=configs/pooling_text8.py:NAME ..." \
      --out=results/pooling_text8_prefix.json

A run's name is what follows the last "_" of its folder. Of each the report has

  test      the scores of its test split, and "paper", those of the pooling paper (Table 1,
            text8); where a predictor has a target, what F1 would be if it found boundaries
            everywhere, or at random as often as the target does
  step      the time of a training step with the trained parameters. The runs take turns in
            one process, on the same batches; "ratio" is to the first run's, the median
            over the batches
  share     boundaries a character in training, [step, share] of every report. Where the
            kind has an aim (routing's 1 / N, gumbel's prior): in how many reports the
            share is within a third of it, and from which step on it stays there
  places    on which characters of the test split boundaries fall: a space, the first
            letter of a word, its last, or another. "of_boundaries" is a place's share of
            the boundaries, "of_characters" its share of the text, which boundaries at
            random would have, "found" the share of its characters that are boundaries;
            all of the second halves of 256 windows, which have a context
  segments  sentences of the test split, a | behind each segment

Sentences begin and end with a word: text8 has no full stops. The picture, of the same name,
has bits over the shortening factor here and in the paper, the share of boundaries, and the
segments of the sentence in the middle. Runs that differ in more than their boundaries (and
number of layers, of the vanilla model) are refused.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import jax
import numpy as np
import timing
from matplotlib import pyplot as plt

import dpjax
from dpjax import config as config_lib
from dpjax import run as run_lib
from dpjax.analysis import segmentation, style
from dpjax.run import build, workdir
from dpjax.training import optimizer, sharding, step

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
PLACES = ("space", "first letter", "last letter", "another letter")
ROWS = 256  # windows of the test split that boundaries are counted in
SENTENCES, SENTENCE = 5, 100  # how many, of about how many characters


def describe(folder: Path, run: run_lib.Run) -> dict:
  """What a finished run reached."""
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
  share = [
    [report["step"], report["p_ones"]]
    for report in reports
    if report["split"] == "train" and "p_ones" in report
  ]
  if share:
    row["share"] = share
    aim = aim_of(run.config.model.boundaries)
    if aim:
      row["aim"] = {"share": aim, **follow(share, aim)}
  return row


def aim_of(boundaries: config_lib.ConfigDict) -> float | None:
  """Boundaries a token that a kind is taught to have."""
  if "factor" in boundaries:
    return 1 / boundaries.factor
  return boundaries.get("prior")


def follow(share: Sequence[tuple[int, float]], aim: float) -> dict:
  """How often a share is within a third of its aim, and since when always (or None)."""
  outside = [at for at, found in share if abs(found - aim) > aim / 3]
  later = [at for at, _ in share if not outside or at > outside[-1]]
  return {
    "reports": len(share),
    "within_a_third": len(share) - len(outside),
    "since_step": later[0] if later else None,
  }


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


def find_boundaries(run: run_lib.Run, tokens_nt: np.ndarray) -> np.ndarray:
  """[N, T], bool: where segments end in windows [N, T], read by themselves."""

  @jax.jit
  def apply(params, tokens_bt):
    found = run.model.apply({"params": params}, tokens_bt).boundaries
    return jax.numpy.zeros(tokens_bt.shape) if found is None else found

  parts = np.split(tokens_nt, range(8, len(tokens_nt), 8))
  return np.concatenate([np.asarray(apply(run.params, part)) for part in parts]) > 0.5


def places_of(text: str) -> np.ndarray:
  """Which of PLACES each character has; "i am" -> 1, 0, 1, 2."""
  padded = f" {text} "
  return np.array(
    [
      0 if letter.isspace() else 1 if before.isspace() else 2 if after.isspace() else 3
      for before, letter, after in zip(padded, text, padded[2:], strict=False)
    ]
  )


def count_places(boundaries: np.ndarray, places: np.ndarray) -> dict:
  """By place: its share of the boundaries and of the text, and how much of it is found."""
  return {
    name: {
      "of_boundaries": float((places[boundaries] == i).mean()),
      "of_characters": float((places == i).mean()),
      "found": float(boundaries[places == i].mean()),
    }
    for i, name in enumerate(PLACES)
  }


def choose_sentences(text_nt: list[str]) -> list[tuple[int, slice]]:
  """Windows, evenly spread, and the words about the middle of each."""
  chosen = []
  for row in np.linspace(0, len(text_nt) - 1, min(SENTENCES, len(text_nt)), dtype=int):
    text = text_nt[row]
    start = text.find(" ", len(text) // 3) + 1
    end = text.rfind(" ", start, start + SENTENCE + 1)
    chosen.append((int(row), slice(start, end if end > start else len(text))))
  return chosen


def read_segments(runs: Sequence[run_lib.Run]) -> tuple[list[dict], list[str], np.ndarray]:
  """Each run's places and segments; one sentence's text, and boundaries [R, T]."""
  first, length = runs[0], runs[0].config.model.max_length
  assert first.data is not None
  tokens = np.asarray(first.data.splits["test"])
  count = min(ROWS, len(tokens) // length)
  tokens_nt = tokens[: count * length].reshape(count, length)
  text_nt = [first.tokenizer.decode(row) for row in tokens_nt]
  places = places_of("".join(text_nt)).reshape(count, length)
  # The second half of each window, which has a context.
  half = slice(length // 2, None)
  sentences = choose_sentences(text_nt)
  rows, drawn = [], []
  for run in runs:
    found = find_boundaries(run, tokens_nt)
    row = {}
    if found[:, half].any():
      row["places"] = count_places(found[:, half], places[:, half])
    unknown = np.zeros(length, np.float32)
    row["segments"] = [
      segmentation.render(
        segmentation.Segmentation([*text_nt[i][part]], found[i, part], unknown, None)
      )
      for i, part in sentences
    ]
    rows.append(row)
    drawn.append(found[sentences[len(sentences) // 2]])
  i, part = sentences[len(sentences) // 2]
  return rows, [*text_nt[i][part]], np.stack(drawn)


def make_step(run: run_lib.Run, num_batches: int) -> Callable[[], jax.Array]:
  """A call of it is one update at the rate 0, by the next of the run's first batches."""
  mesh, config = sharding.make_mesh(), run.config.copy_and_resolve_references()
  assert run.data is not None
  batches = build.train_batches(config, run.data)
  config.train.learning_rate = 0.0  # The boundaries stay where they are.
  update = optimizer.build_optimizer(config.train, 2**31)
  state = step.jit_init(run.model, update, config.seed, mesh)
  places = jax.tree.map(lambda leaf: leaf.sharding, state)
  params = jax.tree.map(jax.numpy.copy, run.params)  # A step uses up what it is given.
  state = dataclasses.replace(state, params=params)
  train = step.jit_train_step(
    run.model, update, places, mesh, objective=build.objective(config.model)
  )
  capacity, done = build.capacity(config.model), 0

  def call() -> jax.Array:
    nonlocal state, done
    batch = batches.batch(done % num_batches, slice(0, batches.batch_size))
    done += 1
    placed = sharding.put_batch(batch, mesh)
    state, measured = train(state, placed, capacity=capacity(batch))
    return measured["loss"]

  return call


def time_steps(names: Sequence[str], runs: Sequence[run_lib.Run], repetitions: int) -> list[dict]:
  """A step of each run beside one of the first."""
  calls = {}
  for name, run in zip(names, runs, strict=True):
    calls[name] = make_step(run, repetitions)
    for _ in range(repetitions):  # Every capacity that comes is compiled.
      calls[name]()
    print(f"{name}: compiled", flush=True)
  seconds = timing.measure(calls, repetitions)
  return [timing.summarize(seconds[name], seconds[names[0]]) for name in names]


@style.applied()
def draw(rows: list[dict], letters: list[str], ends: np.ndarray, file: Path) -> None:
  """Ours, the paper's and the share of boundaries; below, the segments of a sentence."""
  figure = plt.figure(figsize=(13, 4.4 + 0.3 * len(rows)), layout="constrained")
  grid = figure.add_gridspec(2, 3, height_ratios=[4, 0.3 * len(rows) + 0.4])
  here, paper, shares = (figure.add_subplot(grid[0, i]) for i in range(3))
  for axis, key, title in ((here, "test", "here"), (paper, "paper", "the paper")):
    points: dict[tuple[float, float], list[str]] = {}
    for row in rows:
      if key in row:
        point = row[key]["shortening_factor"], row[key]["bits_per_character"]
        points.setdefault(point, []).append(row["name"])
    for point, names in points.items():
      axis.plot(*point, "o", color="C0")
      axis.annotate("\n".join(names), point, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axis.set(title=title, xlabel="shortening factor", ylabel="bits per character")
    axis.margins(0.3, 0.15)
  for i, row in enumerate(rows):
    if "share" in row:
      look = style.line(i)
      shares.plot(*zip(*row["share"], strict=True), **look, label=row["name"])
      if row["boundaries"] == "routing":
        aim = row["aim"]["share"]
        shares.axhspan(2 / 3 * aim, 4 / 3 * aim, color="0.92", zorder=0)
  shares.set(title="in training", xlabel="step", ylabel="boundaries a character")
  shares.set_ylim(bottom=0)
  shares.legend(fontsize=8)
  draw_segments(figure.add_subplot(grid[1, :]), rows, letters, ends)
  style.finish(figure)
  figure.savefig(file, dpi=120)
  plt.close(figure)


def draw_segments(axis, rows: list[dict], letters: list[str], ends: np.ndarray) -> None:
  """A line a run; two shades by turns, a segment each."""
  before = np.cumsum(ends, axis=1) - ends
  axis.grid(False)
  axis.imshow(before % 2, cmap="Blues", vmin=-0.4, vmax=3, aspect="auto")
  for y in range(len(rows)):
    for x, letter in enumerate(letters):
      axis.text(
        x,
        y,
        segmentation.visible(letter),
        family="monospace",
        fontsize=8,
        ha="center",
        va="center",
        parse_math=False,
      )
  axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
  axis.set_xticks([])
  axis.set_title("segments of a sentence of the test split")


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes the report and its picture, and prints the scores."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="+", type=Path)
  parser.add_argument("--command", default="", help="what trained them")
  parser.add_argument("--commit", default="", help="at which version")
  parser.add_argument("--note", default="")
  parser.add_argument("--repetitions", type=int, default=20, help="steps that are timed")
  parser.add_argument("--out", type=Path, required=True)
  given = parser.parse_args(arguments)
  try:
    config = check_alike(given.folders)
    runs = [dpjax.load(folder) for folder in given.folders]
    rows = [describe(*each) for each in zip(given.folders, runs, strict=True)]
  except (ValueError, OSError) as error:
    sys.exit(str(error))
  found, letters, ends = read_segments(runs)
  steps = time_steps([row["name"] for row in rows], runs, given.repetitions)
  for row, segments, seconds in zip(rows, found, steps, strict=True):
    row |= {"step": seconds, **segments}
  machine = timing.describe_machine()
  assert runs[0].data is not None
  result = {
    "note": given.note,
    "machine": {
      key: machine[key] for key in ("device", "processor", "cores", "jax", "load_average")
    },
    # Of the runs; what gathers them is above.
    "command": given.command,
    "commit": given.commit,
    "model": {
      **{key: config["model"][key] for key in ("width", "feed_forward_width", "max_length")},
      "num_heads": config["model"]["mixer"]["num_heads"],
    },
    "train": {
      **{key: config["train"][key] for key in ("batch_size", "num_steps", "learning_rate")},
      "warmup_steps": config["train"]["schedule"].get("warmup_steps", 0),
    },
    "characters": {split: counts["characters"] for split, counts in runs[0].data.counts.items()},
    "repetitions": given.repetitions,
    "runs": rows,
  }
  given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
  draw(rows, letters, ends, given.out.with_suffix(".png"))
  for row in rows:
    test = row["test"]
    print(
      f"{row['name']:12s}{test['bits_per_character']:8.4f}"
      f"{test['shortening_factor']:8.3f}{row['step']['milliseconds']:8.1f} ms"
    )


if __name__ == "__main__":
  timing.restart_with_quiet_allocator()
  main()
