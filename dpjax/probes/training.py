"""Trains mixers of equal size on a task, and tests them by distance. B rows, T tokens of a row."""

import bisect
import dataclasses
import math
import time
from collections.abc import Mapping
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

# Their window is `max_length`; that of a Dispatcher is 2**num_levels.
EXTRACTORS, DISPATCHERS = ("she", "he", "we", "me"), ("dispatcher", "dispatcher_multihead")
# Test rows are so many times as long as those of training.
FACTORS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that all models of a comparison share.

  Attributes:
    length: T in training.
    window: l of the Extractors and 2**K of the Dispatchers, a power of 2. With T / 2, two
      layers reach across a row of training, but not across the longer rows of tests.
    width: D of attention; the other models have as many parameters.
    num_layers: the number of blocks.
    num_steps: the number of updates.
    batch_size: B; twice as many for induction, whose rows have one answer.
    learning_rate: the peak learning rate.
    num_test_rows: the number of test rows of each length; a multiple of 2 B.
  """

  length: int = 32
  window: int = 16
  width: int = 64
  num_layers: int = 2
  num_steps: int = 1000
  batch_size: int = 32
  learning_rate: float = 3e-3
  num_test_rows: int = 512

  @property
  def lengths(self) -> list[int]:
    """The lengths of test rows."""
    return [factor * self.length for factor in FACTORS]

  @property
  def contents(self) -> int:
    """The number of contents in the vocabulary."""
    return tasks.num_contents(max(self.lengths))

  def check(self) -> None:
    """Checks that the settings suit all tasks and models.

    Raises:
      UserError: `setting: expected ..., got ...`.
    """
    for field in dataclasses.fields(self):
      setting = registry.Setting(type(field.default), field.default, False)
      registry.check_value(field.name, getattr(self, field.name), setting)
    least, rows = 2 * tasks.NUM_KEYS, self.batch_size
    is_power = self.window >= 2 and self.window & (self.window - 1) == 0
    for name, is_right, expected in (
      ("length", self.length >= least and self.length % 2 == 0, f"an even number from {least} on"),
      ("window", is_power and self.window <= self.length, f"a power of 2 up to {self.length}"),
      ("width", self.width >= 8 and self.width % 8 == 0, "a multiple of 8"),
      ("num_layers", self.num_layers >= 1, "at least 1"),
      ("num_steps", self.num_steps >= 10, "at least 10"),
      ("batch_size", rows >= 1, "at least 1"),
      ("learning_rate", 0 < self.learning_rate < 1, "a number in (0, 1)"),
      (
        "num_test_rows",
        rows > 0 and self.num_test_rows > 0 and self.num_test_rows % (2 * rows) == 0,
        f"a multiple of 2 batch_size = {2 * rows}",
      ),
    ):
      if not is_right:
        raise UserError(f"{name}: expected {expected}, got {getattr(self, name)}")


def model_config(settings: Settings, mixer: str, width: int, hidden_width: int) -> ConfigDict:
  """`config.model` of a mixer in the frame of configs/modern_transformer.py.

  The frame has no positions of its own, as attention has rotary positions, a Dispatcher its
  levels and an Extractor its taps. So all models read rows longer than in training.
  """
  model = config_lib.load("modern_transformer").model
  known, given = registry.mixers.settings(mixer), {}
  if "num_heads" in known and mixer != "dispatcher":  # whose heads would share their matrices
    given["num_heads"] = 4
  if "num_levels" in known:
    given["num_levels"] = settings.window.bit_length() - 1
  if "rotary_base" in known:
    given |= dict(rotary_base=10_000.0, use_bias=False)
  if mixer in EXTRACTORS:
    given["implementation"] = "scan"  # the cheapest where rows are longer than the window
  model.mixer = config_lib.mixer(mixer, **given)
  model.update(
    dict(
      vocab_size=tasks.FIRST_CONTENT + settings.contents,
      num_layers=settings.num_layers,
      width=width,
      feed_forward_width=hidden_width,
      max_length=settings.window if mixer in EXTRACTORS else max(settings.lengths),
      dropout=0.0,
      init_std=0.0,  # PyTorch's defaults: the frame's 0.02 is for wider models
    )
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


def num_parameters(model: Mapping) -> int:
  """The number of parameters of a model, from its settings."""
  ids = jnp.zeros((1, 1), jnp.int32)
  shapes = jax.eval_shape(lambda: build_model(model).init(jax.random.key(0), ids))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def equal_model(settings: Settings, mixer: str) -> tuple[ConfigDict, int]:
  """A mixer's `config.model` with as many parameters as attention's, and their number.

  The width is the largest multiple of 8 at which the model has at most attention's parameters,
  with feed-forward networks 8 / 3 times as wide; these are then widened to reach them.
  """

  def count(width: int, more: int = 0) -> int:
    return num_parameters(model_config(settings, mixer, width, _hidden_width(width) + more))

  usual = model_config(settings, "attention", settings.width, _hidden_width(settings.width))
  target = num_parameters(usual)
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
  return model_config(settings, mixer, width, _hidden_width(width) + more), found


def _hidden_width(width: int) -> int:
  return width * 8 // 3  # as SwiGLU has three matrices


class Trainee:
  """A mixer's model, with the programs that train and test it for any task and seed.

  Attributes:
    config: `config.model`.
    num_parameters: the number of parameters of the model.
  """

  def __init__(self, settings: Settings, mixer: str):
    """Finds the sizes of the model; compiles nothing yet."""
    self.config, self.num_parameters = equal_model(settings, mixer)
    self._settings, self._has_documents = settings, mixer in EXTRACTORS
    section = config_lib.load("modern_transformer").train
    section.learning_rate = settings.learning_rate
    section.schedule.warmup_steps = settings.num_steps // 10
    model = build_model(self.config)
    optimizer = optimizers.build_optimizer(section, settings.num_steps)
    self._mesh = sharding.make_mesh()
    shapes = step_lib.abstract_state(model, optimizer, 0, self._mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init = partial(step_lib.init_state, model, optimizer)
    self._init = jax.jit(init, out_shardings=shardings)
    self._step = step_lib.jit_train_step(model, optimizer, shardings, self._mesh)

    @jax.jit
    def predict(params, tokens, known):
      return model.apply({"params": params}, tokens, **known).logits.argmax(-1)

    self._predict = predict

  def run(self, task: str, seed: int) -> dict[str, Any]:
    """Trains for a task, and tests.

    Args:
      task: a name of `dpjax.probes.tasks.TASKS`.
      seed: the seed of parameters and rows.

    Returns:
      JSON values: "parameters", "width", "feed_forward_width", "reach", "loss" (the mean over
      the last tenth of the updates), "seconds" of processor time, and "tests": for each length
      the "hits" and "counts" of answers by distance, from 0 on.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    began, state = time.process_time(), self._init(seed)
    steps, losses = self._settings.num_steps, []
    batches = self._rows(task, self._settings.length, seed, tasks.TRAINING)
    for step in range(steps):
      batch = sharding.put_batch(batches.batch(step), self._mesh)
      state, measured = self._step(state, batch)
      losses.append(float(measured["loss"]))  # many updates under way can stall XLA's CPUs
    loss = sum(losses[-(steps // 10) :]) / (steps // 10)
    if not math.isfinite(loss):
      raise FloatingPointError(f"{task}, {self.config.mixer.name}, seed {seed}: loss {loss}")
    return {
      "parameters": self.num_parameters,
      "width": self.config.width,
      "feed_forward_width": self.config.feed_forward_width,
      "reach": reach(self.config),
      "loss": loss,
      "tests": {
        str(length): self.test(state.params, task, length, seed)
        for length in self._settings.lengths
      },
      "seconds": round(time.process_time() - began, 1),
    }

  def test(self, params: dict, task: str, length: int, seed: int) -> dict[str, list[int]]:
    """Counts right answers in test rows by distance: "hits" and "counts", each [T]."""
    batches = self._rows(task, length, seed, tasks.TEST)
    hits, counts = np.zeros((2, length), np.int64)
    for step in range(self._settings.num_test_rows // batches.batch_size):
      drawn = batches.draw(step)
      batch = tasks.to_batch(drawn, slice(None), self._has_documents)
      known = {"is_start": batch["is_start"]} if self._has_documents else {}
      predicted = np.asarray(self._predict(params, batch["tokens"], known))
      is_answer = drawn.distances > 0
      is_hit = is_answer & (predicted == drawn.targets)
      counts += np.bincount(drawn.distances[is_answer], minlength=length)
      hits += np.bincount(drawn.distances[is_hit], minlength=length)
    return {"hits": hits.tolist(), "counts": counts.tolist()}

  def _rows(self, task: str, length: int, seed: int, stream: int) -> tasks.TaskBatches:
    # A row of induction has a single answer.
    size = self._settings.batch_size * (2 if task == "induction" else 1)
    return tasks.TaskBatches(
      task, size, length, self._settings.contents, seed, stream, self._has_documents
    )
