"""Scores whole texts, every token once."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dpjax.config.schema import Eval
from dpjax.data import batches
from dpjax.data.token_files import Split
from dpjax.errors import UserError
from dpjax.layers.boundaries import Boundaries
from dpjax.layers.common import Params
from dpjax.models.build import batch_capacity
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import losses, metrics, sharding
from dpjax.training.trainer import Batch, Sums, apply_model, output_layer

_log = logging.getLogger(__name__)


def jit_eval_step(model: nn.Module, mesh: Mesh, objective: losses.Objective) -> Callable[..., Sums]:
  """Compiles (parameters, batch, index, capacity=None) -> the objective's sums of a batch.

  Random draws in evaluation depend only on the batch's index and shape.
  """

  def step(params: Params, batch: Batch, index: jax.Array, capacity: int | None = None) -> Sums:
    key = jax.random.fold_in(jax.random.key(0), index)
    output = apply_model(model, params, batch, key, capacity, deterministic=True)
    return objective.sums(output, batch, output_layer(model, params), scores_starts=True)

  replicated = NamedSharding(mesh, PartitionSpec())
  step = sharding.on_mesh(step, mesh)
  return jax.jit(step, static_argnames="capacity", out_shardings=replicated)


def evaluate(
  eval_step: Callable[..., Mapping[str, jax.Array]],
  params: Params,
  windows: batches.EvaluationWindows | batches.EvaluationDocuments,
  mesh: Mesh,
  *,
  boundaries: Sequence[Boundaries] = (),
  progress: bool = False,
) -> dict[str, float]:
  """Sums the objective over a text, for `text_scores` and `boundary_scores`.

    sums = evaluate(eval_step, params, windows, mesh)
    scores = text_scores(sums["nats"], counts) | boundary_scores(sums)

  Args:
    eval_step: from `jit_eval_step`.
    params: the model's parameters.
    windows: the batches of the text, with every token weighted once.
    mesh: that of the step.
    boundaries: those of a model with token pooling, the outermost first. They are only for speed:
      the step is compiled for the number of segments, where the tokens determine it.
    progress: whether to show a progress bar.
  """
  rows = sharding.process_rows(windows.batch_size)
  pending = None
  sums = {}
  hidden = None if progress else True  # None: hidden without a terminal
  for index in tqdm(range(len(windows)), "evaluating", leave=False, disable=hidden):
    batch = windows.batch(index, rows)
    capacity = batch_capacity(boundaries, batch)
    previous = pending
    pending = eval_step(params, sharding.put_batch(batch, mesh), index, capacity=capacity)
    sums = metrics.add(sums, previous)  # Reads one while the next is computed.
  return metrics.add(sums, pending)


def _warn_of_rounding(scores: Mapping[str, float], warned: set[str]) -> None:
  """Warns once if evaluation finds far more or fewer boundaries than training."""
  for name in scores.keys() - warned:
    stem, is_drawn, number = name.partition("p_ones_drawn")
    drawn = scores[name]
    rounded = scores.get(f"p_ones_rounded{number}", math.nan)
    if is_drawn and max(drawn, rounded) > 2 * min(drawn, rounded):
      warned.add(name)
      _log.warning(
        "Training draws a boundary at %.1f%% of the %s, rounding gives %.1f%%: these scores are "
        "of other segments than those of training. A model trained with sample=True among the "
        "settings of its boundaries also draws in evaluation, as the authors of gumbel do.",
        100 * drawn,
        f"segments in stage {number[1:]}" if number else "tokens",
        100 * rounded,
      )


def document_starts(begins: np.ndarray, tokenizer: Tokenizer) -> batches.DocumentStarts:
  """Documents that begin at these positions, each preceded by the tokenizer's start token."""
  start_id = tokenizer.start_id
  return batches.DocumentStarts(begins, start_id, int(start_id in tokenizer.space_ids))


@dataclasses.dataclass(frozen=True)
class Scorer:
  """Scores texts with one model, compiled once.

  Attributes:
    model: the model.
    objective: sums what is scored.
    tokenizer: that of the texts.
    settings: of `config.eval`. The model sees `window` tokens (0: `max_length`) and scores the
      last `stride` (0: all) of them. `max_tokens` is for `dpjax.runs.Run.validate`.
    max_length: the model's.
    pad_id: the id of padding.
  """

  model: nn.Module
  objective: losses.Objective
  tokenizer: Tokenizer
  settings: Eval
  max_length: int
  pad_id: int

  def sizes(self, window: int = 0, stride: int = 0) -> tuple[int, int]:
    """The window and stride in tokens (0: the settings'); larger values raise a `UserError`."""
    window = window or self.settings.window or self.max_length
    if not 1 <= window <= self.max_length:
      expected = f"expected 1 to model.max_length = {self.max_length}"
      raise UserError(f"eval.window: {expected}, got {window}")
    if not stride:
      stride = min(self.settings.stride or window, window)
    return window, stride

  def score(
    self,
    params: Params,
    text: Split,
    *,
    window: int = 0,
    stride: int = 0,
    max_tokens: int = 0,
    progress: bool = False,
  ) -> dict[str, float]:
    """Scores a text, first token included, as `text_scores` and `boundary_scores` do.

    Omits bits if its tokens lose text. Documents are scored independently. `max_tokens` scores that
    many tokens in fixed random windows, and estimates the other counts from their share; 0 scores
    all.
    """
    counts: dict[str, float] = {"tokens": text.counts["tokens"], "words": text.counts["words"]}
    if self.tokenizer.keeps_text(text.tokens):
      counts |= {"characters": text.counts["characters"], "bytes": text.counts["bytes"]}
    window, stride = self.sizes(window, stride)
    # Rounded up to a multiple of the devices: rows without text do not count.
    num_rows = -(-self.settings.batch_size // self.mesh.size) * self.mesh.size
    begins = np.zeros(1, np.int64) if text.documents is None else text.documents
    starts = document_starts(begins, self.tokenizer)
    stream = batches.TokenStream(text.tokens, text.boundaries, starts, self.pad_id)
    if text.documents is None:
      windows = batches.EvaluationWindows(stream, window, stride, num_rows, max_tokens)
      if windows.share < 1:
        counts = {unit: count * windows.share for unit, count in counts.items()}
    else:
      windows = batches.EvaluationDocuments(stream, window, stride, num_rows)
    boundaries = self.objective.boundaries
    sums = evaluate(self.step, params, windows, self.mesh, boundaries=boundaries, progress=progress)
    scores = metrics.text_scores(sums["nats"], counts) | metrics.boundary_scores(sums)
    if jax.process_index() == 0:
      _warn_of_rounding(scores, self._warned)
    return scores

  @cached_property
  def mesh(self) -> Mesh:
    """All devices."""
    return sharding.make_mesh()

  @cached_property
  def step(self) -> Callable[..., Mapping[str, jax.Array]]:
    """The compiled step, from `jit_eval_step`."""
    return jit_eval_step(self.model, self.mesh, self.objective)

  @cached_property
  def _warned(self) -> set[str]:
    return set()
