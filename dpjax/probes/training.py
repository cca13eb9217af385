"""Trains mixers of equal size on a task, and tests them by distance. B rows, T tokens of a row."""

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import config as config_lib
from dpjax import ops, registry
from dpjax.errors import UserError
from dpjax.models.build import build_model
from dpjax.probes import tasks
from dpjax.registry import ConfigDict
from dpjax.training import optimizer as optimizers
from dpjax.training import sharding
from dpjax.training import step as step_lib

EXTRACTORS, DISPATCHERS = ("she", "he", "we", "me"), ("dispatcher", "dispatcher_multihead")


def _field(default, about: str) -> Any:
  return dataclasses.field(default=default, metadata={"help": about})


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that all models of a comparison share; wrong ones raise a `UserError`.

  With the window T / 2, two layers reach across a row of training, but not across longer rows.
  """

  length: int = _field(32, "T, tokens of training rows; tests have rows of T, 2 T and 4 T")
  window: int = _field(16, "taps of Extractors, and 2**levels of Dispatchers; a power of 2")
  width: int = _field(64, "of attention; the others have as many parameters")
  num_layers: int = _field(2, "blocks of each model")
  num_steps: int = _field(1000, "updates")
  batch_size: int = _field(32, "rows of an update; twice as many for induction, of one answer each")
  learning_rate: float = _field(3e-3, "its peak")
  num_test_rows: int = _field(512, "of each length; of RUN, of each distance")

  def __post_init__(self):
    powers = [2**i for i in range(1, self.length.bit_length())]
    rows = 2 * max(1, self.batch_size)
    for name, is_right, expected in (
      ("length", self.length in range(16, 2**20, 2), "an even number from 16 on"),
      ("window", self.window in powers, f"a power of 2 up to {self.length}"),
      ("width", self.width in range(8, 2**20, 8), "a multiple of 8"),
      ("num_layers", self.num_layers >= 1, "at least 1"),
      ("num_steps", self.num_steps >= 10, "at least 10"),
      ("batch_size", self.batch_size >= 1, "at least 1"),
      ("learning_rate", 0 < self.learning_rate < 1, "a number in (0, 1)"),
      ("num_test_rows", self.num_test_rows % rows == 0, f"a multiple of 2 batch_size = {rows}"),
    ):
      if not is_right:
        raise UserError(f"{name}: expected {expected}, got {getattr(self, name)}")

  @property
  def lengths(self) -> list[int]:
    """The lengths of test rows."""
    return [self.length, 2 * self.length, 4 * self.length]

  @property
  def contents(self) -> int:
    """The number of contents in the vocabulary."""
    return tasks.num_contents(max(self.lengths))


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
    max_length=settings.window if mixer in EXTRACTORS else max(settings.lengths),
    dropout=0.0,
    init_std=0.0,  # PyTorch's defaults: the frame's 0.02 is for wider models
  )
  return model


def reach(model: Mapping) -> int | None:
  """The number of earlier positions that a stack reads; None if unlimited or unknown.

  A layer reads 2**K - 1 positions back with a Dispatcher, l - 1 with an Extractor; layers add.
  """
  mixer, layers = model["mixer"], model["num_layers"]
  if config_lib.is_pooled(model):
    return None
  if mixer["name"] in DISPATCHERS:
    levels = mixer["num_levels"] or max(1, ops.num_levels(model["max_length"]))
    return layers * (2**levels - 1)
  return layers * (model["max_length"] - 1) if mixer["name"] in EXTRACTORS else None


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
  found = count(width, more)
  if not 0.98 <= found / target <= 1.02:
    raise UserError(
      f"width: expected one at which {mixer} can have attention's {target:,} parameters "
      f"within 2%, got {settings.width}, at which it has {found:,}"
    )
  return model_config(settings, mixer, width, more), found


def trainer(settings: Settings, mixer: str) -> Callable[[str, int], dict[str, Any]]:
  """A function that trains a mixer for a task with a seed, and tests it.

  It shares its compiled programs between tasks and seeds, and returns JSON values: "parameters",
  "width", "feed_forward_width", "reach", "loss" (the mean over the last tenth of the updates),
  "seconds" of processor time, and "tests", by length: see `count_hits`. It raises a
  FloatingPointError if the loss is not finite.
  """
  config, num_parameters = equal_model(settings, mixer)
  section = config_lib.load("modern_transformer").train
  section.learning_rate = settings.learning_rate
  section.schedule.warmup_steps = settings.num_steps // 10
  model = build_model(config)
  optimizer = optimizers.build_optimizer(section, settings.num_steps)
  mesh = sharding.make_mesh()
  state_shape = step_lib.abstract_state(model, optimizer, 0, mesh)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shape)
  init = jax.jit(partial(step_lib.init_state, model, optimizer), out_shardings=shardings)
  train_step = step_lib.jit_train_step(model, optimizer, shardings, mesh)

  @jax.jit
  def predict(params, tokens_bt):
    output = model.apply({"params": params}, tokens_bt, **_is_start(tokens_bt, mixer))
    return output.logits.argmax(-1)

  def train(task: str, seed: int) -> dict[str, Any]:
    began, state, losses = time.process_time(), init(seed), []
    num_rows = settings.batch_size * (2 if task == "induction" else 1)
    size = num_rows, settings.length
    for step in range(settings.num_steps):
      drawn = tasks.draw(task, size, settings.contents, (seed, tasks.TRAINING, step))
      weights = (drawn.distances > 0).astype(np.float32)
      batch = {"tokens": drawn.tokens, "targets": drawn.targets, "weights": weights}
      batch |= _is_start(drawn.tokens, mixer)
      state, measured = train_step(state, sharding.put_batch(batch, mesh))
      losses.append(float(measured["loss"]))  # many updates under way can stall XLA's CPUs
    last = settings.num_steps // 10
    loss = sum(losses[-last:]) / last
    if not math.isfinite(loss):
      raise FloatingPointError(f"{task}, {mixer}, seed {seed}: loss {loss}")
    tests = {}
    for length in settings.lengths:
      size, seeds = (num_rows, length), range(settings.num_test_rows // num_rows)
      batches = (tasks.draw(task, size, settings.contents, (seed, tasks.TEST, i)) for i in seeds)
      tests[str(length)] = count_hits(partial(predict, state.params), batches)
    sizes = {"width": config.width, "feed_forward_width": config.feed_forward_width}
    about = {"parameters": num_parameters, **sizes, "reach": reach(config)}
    seconds = round(time.process_time() - began, 1)
    return {**about, "loss": loss, "tests": tests, "seconds": seconds}

  return train


def count_hits(predict: Callable, batches: Iterable[tasks.Examples]) -> dict[str, list[int]]:
  """Right answers and all answers by distance, from 0 on: "hits" and "counts", each [T]."""
  hits, counts = [], []
  for tokens, targets, distances in batches:
    is_answer = distances > 0
    is_hit = is_answer & (np.asarray(predict(tokens)) == targets)
    counts.append(np.bincount(distances[is_answer], minlength=tokens.shape[1]))
    hits.append(np.bincount(distances[is_hit], minlength=tokens.shape[1]))
  return {"hits": np.sum(hits, axis=0).tolist(), "counts": np.sum(counts, axis=0).tolist()}


def _is_start(tokens_bt, mixer: str) -> dict[str, np.ndarray]:
  """Marks each row as a document, so that an Extractor takes one longer than its `max_length`."""
  is_start = np.zeros(tokens_bt.shape, np.int32)
  is_start[:, 0] = 1
  return {"is_start": is_start} if mixer in EXTRACTORS else {}
