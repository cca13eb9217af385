r"""Measures how far back mixers, or a trained run, recall.

  python examples/probes.py --train --work=runs/probes
  python examples/probes.py runs/quickstart

With --train, small models of equal size learn three tasks, in rows of random tokens whose answers
appear earlier in the row. They are scored within and beyond the reach of their layers, on rows 1, 2
and 4 times as long as in training. Each (task, mixer, seed) is stored as a file in --work, and not
trained again; table.json has the table. A run of `dpjax train` reads random tokens twice, and both
readings are scored. docs/probes.md has results.

Token 0 is padding, 1 the separator, 2 the trigger; tokens from 3 on are contents. An answer's
distance is from its position to the one that predicts it: a model whose position t reaches
back to t - R can only guess beyond R.

  recall     k=a 0 k=b 0 | b a b    pairs of a key and a value, then keys: predict their values
  copying    7 4 6 1 7 4 6          tokens, 1, the same tokens again
  induction  7 4 2 9 6 5 8 2        predict the token that followed the trigger: 9

Sources: Arora et al. 2023, arXiv:2312.04927 (multi-query associative recall); Jelassi et al.
2024, arXiv:2402.01032 (copying); Olsson et al. 2022, arXiv:2209.11895, and Gu and Dao 2023,
arXiv:2312.00752 (induction heads). Differences: a pair of recall is one token, and rows of any
length have `NUM_KEYS` of them; docs/probes.md says why. T is the length of a row.
"""

import argparse
import bisect
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import files
from dpjax.analysis import style
from dpjax.config import registry
from dpjax.errors import UserError, exit_on_user_error, unknown
from dpjax.training import losses
from dpjax.training.trainer import Trainer

SEPARATOR, TRIGGER, FIRST_CONTENT = 1, 2, 3
NUM_KEYS = 8  # number of keys, and of values, in recall
NUM_NOISE = 16  # number of content tokens in induction
TRAINING, TEST = 0, 1  # streams of random numbers: training and test rows differ
EXTRACTORS = ("she", "he", "we", "me")
LIMITED = ("dispatcher", "dispatcher_multihead", "local_attention", "short_convolution")
LIMITED += EXTRACTORS  # mixers with a reach


class Examples(NamedTuple):
  """Rows of a task, int32 [B, T]; targets and distances are 0 where nothing is predicted."""

  tokens: np.ndarray
  targets: np.ndarray
  distances: np.ndarray


def recall(rng, num_rows: int, length: int, contents: int) -> Examples:
  """The first half has a pair for each key, at random positions; the second consists of keys.

  Key i is the token 3 + i, value j is 3 + `NUM_KEYS` + j, their pair 3 + `NUM_KEYS` (2 + i) + j.
  """
  half = length // 2
  tokens, targets, distances = np.zeros((3, num_rows, length), np.int32)
  values = rng.integers(NUM_KEYS, size=(num_rows, NUM_KEYS))
  positions = _permutations(rng, num_rows, half)[:, :NUM_KEYS]
  queries = rng.integers(NUM_KEYS, size=(num_rows, half))
  pairs = FIRST_CONTENT + NUM_KEYS * (2 + np.arange(NUM_KEYS)) + values
  np.put_along_axis(tokens, positions, pairs, 1)
  tokens[:, half:] = FIRST_CONTENT + queries
  targets[:, half:] = FIRST_CONTENT + NUM_KEYS + np.take_along_axis(values, queries, 1)
  distances[:, half:] = np.arange(half, length) - np.take_along_axis(positions, queries, 1)
  return Examples(tokens, targets, distances)


def copying(rng, num_rows: int, length: int, contents: int) -> Examples:
  """Draws n different tokens, the separator, the tokens again, and 0; n is in 1 .. T / 2."""
  half = length // 2
  copied = FIRST_CONTENT + _permutations(rng, num_rows, contents)[:, :half]
  tokens, targets, distances = np.zeros((3, num_rows, length + 1), np.int32)
  for row, n in enumerate(rng.integers(1, half + 1, size=num_rows)):
    tokens[row, :n] = tokens[row, n + 1 : 2 * n + 1] = copied[row, :n]
    tokens[row, n] = SEPARATOR
    targets[row, n : 2 * n] = copied[row, :n]
    distances[row, n : 2 * n] = n
  return Examples(tokens[:, :-1], targets[:, :-1], distances[:, :-1])


def induction(rng, num_rows: int, length: int, contents: int) -> Examples:
  """Draws random tokens, the trigger at the end and at a distance uniform in 1 .. T - 2."""
  tokens, targets, distances = np.zeros((3, num_rows, length), np.int32)
  tokens[:] = FIRST_CONTENT + rng.integers(NUM_NOISE, size=tokens.shape)
  tokens[:, -1] = TRIGGER
  distances[:, -1] = rng.integers(1, length - 1, size=num_rows)
  index, positions = np.arange(num_rows), length - 1 - distances[:, -1]
  tokens[index, positions - 1] = TRIGGER
  targets[:, -1] = tokens[index, positions]
  return Examples(tokens, targets, distances)


def _permutations(rng, num_rows: int, count: int) -> np.ndarray:
  """[B, count], a random permutation of 0 .. count - 1 in each row."""
  return rng.permuted(np.tile(np.arange(count), (num_rows, 1)), axis=1)


TASKS = {"recall": recall, "copying": copying, "induction": induction}


def draw(task: str, size: tuple[int, int], contents: int, seed: tuple[int, ...]) -> Examples:
  """Draws rows of a task, of size B, T; T is even and at least 2 `NUM_KEYS`."""
  return TASKS[task](np.random.default_rng(seed), *size, contents)


def chance(task: str, contents: int) -> float:
  """The accuracy of a guess among all possible answers of the task."""
  return 1 / {"recall": NUM_KEYS, "copying": contents, "induction": NUM_NOISE}[task]


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings that all models of a comparison share.

  With the window T / 2, two layers reach across a row of training, but not across longer rows.
  """

  length: int = 32  # T of training rows, even; tests have rows of T, 2 T and 4 T
  window: int = 16  # for local attention, taps, and 2**levels of Dispatchers; a power of 2
  width: int = 64  # for attention; the others have as many parameters
  num_layers: int = 2
  num_steps: int = 1000
  batch_size: int = 32  # twice as many for induction, which has one answer per row
  learning_rate: float = 3e-3  # peak
  num_test_rows: int = 512  # for each length, a multiple of twice the batch size

  @property
  def contents(self) -> int:
    """The number of content tokens in the vocabulary, enough for all tasks."""
    return max(NUM_KEYS * (2 + NUM_KEYS), 2 * self.length)

  @property
  def reach(self) -> int:
    """How many earlier positions the layers of a Dispatcher or an Extractor read together."""
    return self.num_layers * (self.window - 1)


TINY = Settings(length=16, window=4, width=16, num_steps=12, batch_size=8, num_test_rows=16)


def model_config(settings: Settings, mixer: str, width: int, extra: int = 0) -> Any:
  """`config.model` for a mixer in the architecture of configs/modern_transformer.py.

  It has no position table (attention is rotary), so all models can read rows longer than in
  training. Feed-forward networks are 8 / 3 times as wide as the model, plus `extra`.
  """
  model = dpjax.config.load("modern_transformer").model
  names, options = registry.mixers.settings(mixer), {}
  if "num_heads" in names and mixer != "dispatcher":  # whose heads would share their matrices
    options |= dict(num_heads=4)
  if "num_levels" in names:
    options |= dict(num_levels=settings.window.bit_length() - 1)
  if mixer == "mamba2":
    options |= dict(head_width=16)  # divides every width
  else:
    options |= {name: settings.window for name in ("window", "num_taps") if name in names}
  if "rotary_base" in names:
    options |= dict(rotary_base=10_000.0, use_bias=False)
  if mixer in EXTRACTORS:  # the cheapest where rows are longer than the window
    options |= dict(implementation="scan")
  model.update(
    mixer=dpjax.config.mixer(mixer, **options),
    vocab_size=FIRST_CONTENT + settings.contents,
    num_layers=settings.num_layers,
    width=width,
    feed_forward_width=width * 8 // 3 + extra,
    max_length=settings.window if mixer in EXTRACTORS else 4 * settings.length,
    dropout=0.0,
    init_std=0.0,  # PyTorch's defaults; the original 0.02 is for wider models
  )
  return model


def equal_model(settings: Settings, mixer: str) -> tuple[Any, int]:
  """A mixer's `config.model` with as many parameters as attention's, and their number.

  The width is the largest multiple of 8 with at most attention's parameters; the feed-forward
  networks are then widened to reach them.
  """

  def count(width: int, extra: int = 0, mixer: str = mixer) -> int:
    model = dpjax.build_model(model_config(settings, mixer, width, extra))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))

  target = count(settings.width, mixer="attention")
  widths = range(8, 2 * settings.width + 8, 8)
  width = widths[max(0, bisect.bisect_right(widths, target, key=count) - 1)]
  smallest = count(width)
  extra = max(0, round((target - smallest) / (count(width, 1) - smallest)))
  return model_config(settings, mixer, width, extra), count(width, extra)


def trainer(settings: Settings, mixer: str) -> Callable[[str, int], dict[str, Any]]:
  """Returns a function that trains and tests a mixer, given a task and a seed.

  Tasks and seeds share its compiled programs. It returns JSON values: "parameters", "loss" (the
  mean over the last tenth of the updates), and "tests", the results of `score` by the length of
  test rows.
  """
  config, num_parameters = equal_model(settings, mixer)
  section = dpjax.config.load("modern_transformer").train
  section.num_steps = settings.num_steps
  section.learning_rate = settings.learning_rate
  section.schedule.warmup_steps = settings.num_steps // 10
  model = dpjax.build_model(config)
  updates = Trainer(model, dpjax.config.Train(**section), settings.num_steps)
  init = jax.jit(lambda seed: dataclasses.replace(updates, seed=seed).init())
  update = jax.jit(updates.step, donate_argnums=0)

  @jax.jit
  def predict(params, tokens_bt):
    output = model.apply({"params": params}, tokens_bt, **document_starts(tokens_bt, mixer))
    return output.logits.argmax(-1)

  def train(task: str, seed: int) -> dict[str, Any]:
    state, costs, last = init(seed), [], settings.num_steps // 10
    num_rows = settings.batch_size * (2 if task == "induction" else 1)

    def draw_batch(length: int, stream: int, i: int) -> Examples:
      return draw(task, (num_rows, length), settings.contents, (seed, stream, i))

    for step in range(settings.num_steps):
      tokens, targets, distances = draw_batch(settings.length, TRAINING, step)
      batch = {"tokens": tokens, "targets": targets, **document_starts(tokens, mixer)}
      batch["weights"] = (distances > 0).astype(np.float32)
      state, measured = update(state, batch)
      costs.append(float(measured["loss"]))  # many pending updates can stall XLA on CPUs
    tests, num_batches = {}, settings.num_test_rows // num_rows
    for length in (settings.length, 2 * settings.length, 4 * settings.length):
      batches = (draw_batch(length, TEST, i) for i in range(num_batches))
      tests[str(length)] = score(partial(predict, state.params), batches, settings.reach)
    return {"parameters": num_parameters, "loss": sum(costs[-last:]) / last, "tests": tests}

  return train


def score(predict: Callable, batches: Iterable[Examples], reach: int) -> list[float | None]:
  """Accuracy at distances up to the reach, and beyond it; None without answers."""
  near, far = [], []
  for tokens, targets, distances in batches:
    is_hit = np.asarray(predict(tokens)) == targets
    near.append(is_hit[(distances > 0) & (distances <= reach)])
    far.append(is_hit[distances > reach])
  return [float(x.mean()) if x.size else None for x in map(np.concatenate, (near, far))]


def document_starts(tokens_bt, mixer: str) -> dict[str, np.ndarray]:
  """Marks each row as a document, so that an Extractor accepts rows beyond `max_length`."""
  marks_bt = np.zeros(tokens_bt.shape, np.int32)
  marks_bt[:, 0] = 1
  return {"document_starts": marks_bt} if mixer in EXTRACTORS else {}


def summarise(settings: Settings, models: Iterable[Mapping]) -> list[dict[str, Any]]:
  """The rows of a table of `trainer`'s results, with their "task" and "mixer", as JSON values.

  "near" and "far" are means over seeds, None if unknown, beside their standard deviations.
  """
  groups: dict[tuple, list] = {}
  for model in models:
    for length, accuracies in model["tests"].items():
      key = int(length), model["task"], model["mixer"], model["parameters"]
      groups.setdefault(key, []).append(accuracies)
  rows = []
  for key, accuracies in sorted(groups.items(), key=lambda group: group[0][0]):
    length, task, mixer, num_parameters = key
    row: dict[str, Any] = dict(length=length, task=task, mixer=mixer, parameters=num_parameters)
    row["reach"] = settings.reach if mixer in LIMITED else None
    row["chance"] = chance(task, settings.contents)
    for name, values in zip(("near", "far"), zip(*accuracies, strict=True), strict=True):
      values = [x for x in values if x is not None]
      row[name] = float(np.mean(values)) if values else None
      row[f"{name} ±"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    rows.append(row)
  return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Formats the rows of `summarise` or of `repeat`."""
  formats = {float: ".3f", int: ",", str: ""}
  cells = [["-" if x is None else format(x, formats[type(x)]) for x in r.values()] for r in rows]
  return style.table([*rows[0]], cells)


def repeat(run: Any, num_rows: int = 64) -> list[dict[str, Any]]:
  """Shows a run n random tokens twice, and scores both times.

    n = 3: reads 5 2 9 5 2, of 5 2 9 5 2 9
    first time: predicts 2 9; again: predicts 2 9

  Returns nats per token for each n, the powers of 2 and the largest that fits the window. Each
  answer is at the "distance" n - 1; the first token of the repetition is not scored.
  """
  longest, rows = (run.window + 1) // 2, []

  @jax.jit
  def measure(params, tokens, weights):
    rngs = {"dropout": jax.random.key(0)}  # Some boundaries are also drawn in evaluation.
    output: Any = run.model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
    nats, count = losses.cross_entropy(output.logits, tokens[:, 1:], weights)
    return nats / count

  for n in sorted({2**i for i in range(1, longest.bit_length())} | {longest}):
    once = np.random.default_rng((0, n)).integers(run.config.model.vocab_size, size=(num_rows, n))
    tokens, row = np.tile(once.astype(np.int32), 2), {"distance": n - 1}
    for when, begin in (("first time", 0), ("again", n)):
      weights = np.zeros((num_rows, 2 * n - 1), np.float32)
      weights[:, begin : begin + n - 1] = 1
      row[when] = float(measure(run.params, tokens, weights))
    rows.append(row)
  return rows


def train_all(settings: Settings, work: Path, jobs: Iterable) -> list[dict[str, Any]]:
  """The results of all (seed, task, mixer), read from their files if they exist."""
  path = work / "settings.json"
  if files.read_json(path) not in ({}, dataclasses.asdict(settings)):
    raise UserError(f"work: expected a folder with results of these settings, got {work}")
  files.write_json(path, dataclasses.asdict(settings))
  trainer_of, results = functools.cache(partial(trainer, settings)), []
  for seed, task, mixer in jobs:
    path = work / f"{task}_{mixer}_{seed}.json"
    result = files.read_json(path)
    if not result:
      result = dict(task=task, mixer=mixer, seed=seed, **trainer_of(mixer)(task, seed))
      files.write_json(path, result)
      print(f"{path.stem}: loss {result['loss']:.3f}", flush=True)
    results.append(result)
  return results


def _names(flag: str, text: str | None, choices: Sequence[str]) -> Sequence[str]:
  names = choices if text is None else list(dict.fromkeys(text.split(",")))
  if wrong := [name for name in names if name not in choices]:
    raise unknown(flag, choices, wrong[0])
  return names


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the command line: trains and tests, prints a table and writes files."""
  about = "Long-range recall of mixers, or of a run, by distance."
  parser, path = argparse.ArgumentParser(description=about), os.path
  parser.add_argument("run", nargs="?", type=path.expanduser, help="folder of dpjax train")
  parser.add_argument("--train", action="store_true", help="train mixers for the tasks")
  parser.add_argument("--work", type=path.expanduser, default="runs/probes", help="for results")
  parser.add_argument("--mixers", help="a,b; by default all that are registered")
  parser.add_argument("--tasks", help="a,b; by default recall,copying,induction")
  parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ..")
  parser.add_argument("--tiny", action="store_true", help="small and short, to try it out")
  options = parser.parse_args(arguments)
  with exit_on_user_error(vars(options)):
    if bool(options.run) == options.train:
      got = "both" if options.run else "neither"
      raise UserError(f"run: expected the folder of a run, or --train, got {got}")
    mixers = _names("mixers", options.mixers, registry.mixers.names())
    tasks = _names("tasks", options.tasks, [*TASKS])
    if options.seeds < 1:
      raise UserError(f"seeds: expected at least 1, got {options.seeds}")
    if options.run:
      rows = repeat(dpjax.load(options.run))
    else:
      settings, work = TINY if options.tiny else Settings(), Path(options.work)
      jobs = itertools.product(range(options.seeds), tasks, mixers)
      rows = summarise(settings, train_all(settings, work, jobs))
      content = {"settings": dataclasses.asdict(settings), "rows": rows}
      files.write_json(work / "table.json", content)
    print(format_table(rows))


if __name__ == "__main__":
  main()
