r"""Trains small mixers to recall, or shows a trained run a repetition.

  dpjax probes --train --work=runs/probes
  dpjax probes runs/quickstart

With --train, small models of equal size learn the tasks of `dpjax.probes.tasks`, and are scored
within and beyond the reach of their layers, on rows 1, 2 and 4 times as long as in training. Each
(task, mixer, seed) becomes a file in --work, and is not trained again; table.json has the table.
A run of `dpjax train` gets random tokens twice, and is scored for both times. T tokens of a row.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import config as config_lib
from dpjax import files
from dpjax import run as run_lib
from dpjax.analysis import style
from dpjax.commands import flags as command_line
from dpjax.config import registry
from dpjax.config.registry import ConfigDict
from dpjax.errors import UserError, unknown
from dpjax.models.build import build_model
from dpjax.probes import tasks
from dpjax.training import losses
from dpjax.training import optimizer as optimizers
from dpjax.training import step as step_lib

EXTRACTORS = ("she", "he", "we", "me")
LIMITED = (  # mixers with a reach
  *("dispatcher", "dispatcher_multihead", "local_attention", "short_convolution"),
  *EXTRACTORS,
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What all models of a comparison share.

  With the window T / 2, two layers reach across a row of training, but not across longer rows.
  """

  length: int = 32  # T of training rows, even; tests have rows of T, 2 T and 4 T
  window: int = 16  # of local attention, taps, and 2**levels of Dispatchers; a power of 2
  width: int = 64  # of attention; the others have as many parameters
  num_layers: int = 2
  num_steps: int = 1000
  batch_size: int = 32  # twice as many for induction, with its one answer a row
  learning_rate: float = 3e-3  # its peak
  num_test_rows: int = 512  # of each length, a multiple of twice the batch size

  @property
  def contents(self) -> int:
    """The number of contents in the vocabulary, which suffices for all tasks."""
    return max(tasks.NUM_KEYS * (2 + tasks.NUM_KEYS), 2 * self.length)

  @property
  def reach(self) -> int:
    """How many earlier positions the layers of a Dispatcher or an Extractor read together."""
    return self.num_layers * (self.window - 1)


TINY = Settings(length=16, window=4, width=16, num_steps=12, batch_size=8, num_test_rows=16)


def model_config(settings: Settings, mixer: str, width: int, more: int = 0) -> ConfigDict:
  """`config.model` of a mixer in the frame of configs/modern_transformer.py.

  It has no positions of its own (attention's are rotary), so all models read rows longer than in
  training. Feed-forward networks are 8 / 3 times as wide as the model, and `more`.
  """
  model = config_lib.load("modern_transformer").model
  known, given = registry.mixers.settings(mixer), {}
  if "num_heads" in known and mixer != "dispatcher":  # whose heads would share their matrices
    given |= dict(num_heads=4)
  if "num_levels" in known:
    given |= dict(num_levels=settings.window.bit_length() - 1)
  given |= {name: settings.window for name in ("window", "num_taps") if name in known}
  if "rotary_base" in known:
    given |= dict(rotary_base=10_000.0, use_bias=False)
  if mixer in EXTRACTORS:  # Here it is the cheapest where rows are longer than the window.
    given |= dict(implementation="scan")
  model.update(
    mixer=config_lib.mixer(mixer, **given),
    vocab_size=tasks.FIRST_CONTENT + settings.contents,
    num_layers=settings.num_layers,
    width=width,
    feed_forward_width=width * 8 // 3 + more,
    max_length=settings.window if mixer in EXTRACTORS else 4 * settings.length,
    dropout=0.0,
    init_std=0.0,  # PyTorch's defaults: the frame's 0.02 is for wider models
  )
  return model


def equal_model(settings: Settings, mixer: str) -> tuple[ConfigDict, int]:
  """A mixer's `config.model` with as many parameters as attention's, and their number.

  The width is the largest multiple of 8 with at most attention's parameters; the feed-forward
  networks are then widened to reach them.
  """

  def count(width: int, more: int = 0, mixer: str = mixer) -> int:
    model = build_model(model_config(settings, mixer, width, more))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))

  target = count(settings.width, mixer="attention")
  widths = range(8, 2 * settings.width + 8, 8)
  width = widths[max(0, bisect.bisect_right(widths, target, key=count) - 1)]
  least = count(width)
  more = max(0, round((target - least) / (count(width, 1) - least)))
  return model_config(settings, mixer, width, more), count(width, more)


def trainer(settings: Settings, mixer: str) -> Callable[[str, int], dict[str, Any]]:
  """A function that trains a mixer for a task with a seed, and tests it.

  It shares its compiled programs between tasks and seeds, and returns JSON values: "parameters",
  "loss", the mean over the last tenth of the updates, and by the length of test rows "tests":
  see `score`.
  """
  config, num_parameters = equal_model(settings, mixer)
  section = config_lib.load("modern_transformer").train
  section.learning_rate = settings.learning_rate
  section.schedule.warmup_steps = settings.num_steps // 10
  model = build_model(config)
  optimizer = optimizers.build_optimizer(section, settings.num_steps)
  init = jax.jit(partial(step_lib.init_state, model, optimizer))
  update = jax.jit(partial(step_lib.train_step, model, optimizer, 1), donate_argnums=0)

  @jax.jit
  def predict(params, tokens_bt):
    output = model.apply({"params": params}, tokens_bt, **document_starts(tokens_bt, mixer))
    return output.logits.argmax(-1)

  def train(task: str, seed: int) -> dict[str, Any]:
    state, costs, last = init(seed), [], settings.num_steps // 10
    num_rows = settings.batch_size * (2 if task == "induction" else 1)

    def draw(length: int, stream: int, i: int) -> tasks.Examples:
      return tasks.draw(task, (num_rows, length), settings.contents, (seed, stream, i))

    for step in range(settings.num_steps):
      drawn = draw(settings.length, tasks.TRAINING, step)
      batch = {
        "tokens": drawn.tokens,
        "targets": drawn.targets,
        **document_starts(drawn.tokens, mixer),
      }
      batch["weights"] = (drawn.distances > 0).astype(np.float32)
      state, measured = update(state, batch)
      costs.append(float(measured["loss"]))  # many updates under way can stall XLA's CPUs
    tests, num_batches = {}, settings.num_test_rows // num_rows
    for length in (settings.length, 2 * settings.length, 4 * settings.length):
      batches = (draw(length, tasks.TEST, i) for i in range(num_batches))
      tests[str(length)] = score(partial(predict, state.params), batches, settings.reach)
    return {"parameters": num_parameters, "loss": sum(costs[-last:]) / last, "tests": tests}

  return train


def score(predict: Callable, batches: Iterable[tasks.Examples], reach: int) -> list[float | None]:
  """Accuracy at distances up to the reach, and beyond it; None without answers."""
  near, far = [], []
  for tokens, targets, distances in batches:
    is_hit = np.asarray(predict(tokens)) == targets
    near.append(is_hit[(distances > 0) & (distances <= reach)])
    far.append(is_hit[distances > reach])
  return [float(x.mean()) if x.size else None for x in map(np.concatenate, (near, far))]


def document_starts(tokens_bt, mixer: str) -> dict[str, np.ndarray]:
  """Marks each row as a document, so that an Extractor takes one longer than its `max_length`."""
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
    row["chance"] = tasks.chance(task, settings.contents)
    for name, values in zip(("near", "far"), zip(*accuracies, strict=True), strict=True):
      known = [x for x in values if x is not None]
      row[name] = float(np.mean(known)) if known else None
      row[f"{name} ±"] = float(np.std(known, ddof=1)) if len(known) > 1 else None
    rows.append(row)
  return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Formats the rows of `summarise` or of `repeat`."""
  formats = {float: ".3f", int: ",", str: ""}
  cells = [["-" if x is None else format(x, formats[type(x)]) for x in r.values()] for r in rows]
  return style.table([*rows[0]], cells)


def repeat(run: run_lib.Run, num_rows: int = 64) -> list[dict[str, Any]]:
  """Shows a run n random tokens and the same again, and scores both times.

    n = 3: reads 5 2 9 5 2, of 5 2 9 5 2 9
    first time: predicts 2 9; again: predicts 2 9

  Returns nats per token for each n, the powers of 2 and the largest that fits the window. Each
  answer is at the "distance" n - 1; nothing indicates the first token again.
  """
  longest, rows = (run.window + 1) // 2, []

  @jax.jit
  def measure(params, tokens, weights):
    rngs = {"dropout": jax.random.key(0)}  # Boundaries may be drawn in evaluation, too.
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


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains and tests as the command line says, prints a table and writes files."""
  about = "Long-range recall of mixers, or of a run, by distance."
  parser, path = argparse.ArgumentParser(prog="dpjax probes", description=about), os.path
  parser.add_argument("run", nargs="?", type=path.expanduser, help="folder of dpjax train")
  parser.add_argument("--train", action="store_true", help="train mixers for the tasks")
  parser.add_argument("--work", type=path.expanduser, default="runs/probes", help="for results")
  parser.add_argument("--mixers", help="a,b; else all that are registered")
  parser.add_argument("--tasks", help="a,b; else recall,copying,induction")
  parser.add_argument("--seeds", type=int, default=3, help="0, 1, ..: how many")
  parser.add_argument("--tiny", action="store_true", help="small and short: does it run?")
  with command_line.parsed(parser, arguments) as given:
    if bool(given.run) == given.train:
      got = "both" if given.run else "neither"
      raise UserError(f"run: expected the folder of a run, or --train, got {got}")
    mixers = _names("mixers", given.mixers, registry.mixers.names())
    names = _names("tasks", given.tasks, [*tasks.TASKS])
    if given.seeds < 1:
      raise UserError(f"seeds: expected at least 1, got {given.seeds}")
    command_line.check_platform()
    if given.run:
      rows = repeat(run_lib.load(given.run))
    else:
      settings, work = TINY if given.tiny else Settings(), Path(given.work)
      jobs = itertools.product(range(given.seeds), names, mixers)
      rows = summarise(settings, _train(settings, work, jobs))
      content = {"settings": dataclasses.asdict(settings), "rows": rows}
      files.write_json(work / "table.json", content)
    print(format_table(rows))


def _names(flag: str, given: str | None, known: Sequence[str]) -> Sequence[str]:
  names = known if given is None else list(dict.fromkeys(given.split(",")))
  if wrong := [name for name in names if name not in known]:
    raise unknown(flag, known, wrong[0])
  return names


def _train(settings: Settings, work: Path, jobs: Iterable) -> list[dict[str, Any]]:
  """The results of all models, from files where there are any."""
  file = work / "settings.json"
  if files.read_json(file) not in ({}, dataclasses.asdict(settings)):
    raise UserError(f"work: expected a folder with results of these settings, got {work}")
  files.write_json(file, dataclasses.asdict(settings))
  trainer_of, results = functools.cache(partial(trainer, settings)), []
  for seed, task, mixer in jobs:
    file = work / f"{task}_{mixer}_{seed}.json"
    result = files.read_json(file)
    if not result:
      result = dict(task=task, mixer=mixer, seed=seed, **trainer_of(mixer)(task, seed))
      files.write_json(file, result)
      print(f"{file.stem}: loss {result['loss']:.3f}", flush=True)
    results.append(result)
  return results
