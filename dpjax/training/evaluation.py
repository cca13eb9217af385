"""Scores whole texts, every token once."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from functools import cached_property

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from tqdm import tqdm

from dpjax.data import batches
from dpjax.data.token_files import Split
from dpjax.errors import UserError
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import losses, metrics, sharding
from dpjax.training.trainer import jit_eval_step

_log = logging.getLogger(__name__)


def evaluate(
  eval_step: Callable[..., Mapping[str, jax.Array]],
  params: Mapping,
  windows: batches.EvaluationWindows | batches.EvaluationDocuments,
  counts: Mapping[str, float],
  mesh: Mesh,
  *,
  progress: bool = False,
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None,
) -> dict[str, float]:
  """Scores a text by `dpjax.training.metrics.text_scores` and `boundary_scores`.

  `eval_step` is from `dpjax.training.jit_eval_step`; `windows` are the batches of the text, with
  every token weighted once. For `counts` see `text_scores`, for `capacity` see
  `dpjax.training.Trainer`. `progress` shows a progress bar.
  """
  rows = sharding.process_rows(windows.batch_size)
  pending, sums = None, {}
  hidden = None if progress else True  # None: hidden without a terminal
  for index in tqdm(range(len(windows)), "evaluating", leave=False, disable=hidden):
    batch = windows.batch(index, rows)
    bucket = capacity(batch)
    previous, batch = pending, sharding.put_batch(batch, mesh)
    pending = eval_step(params, batch, index, capacity=bucket)
    sums = metrics.add(sums, previous)  # Reads one while the next is computed.
  sums = metrics.add(sums, pending)
  return metrics.text_scores(sums["nats"], counts) | metrics.boundary_scores(sums)


def _warn_of_rounding(scores: Mapping[str, float], warned: set[str]) -> None:
  """Warns once if evaluation finds far more or fewer boundaries than training."""
  for name in scores.keys() - warned:
    stem, is_drawn, number = name.partition("p_ones_drawn")
    drawn, rounded = scores[name], scores.get(f"p_ones_rounded{number}", math.nan)
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

  The model sees `window` tokens (0: `max_length`) and scores the last `stride` (0: all) of them.
  """

  model: nn.Module
  objective: losses.Objective
  tokenizer: Tokenizer
  max_length: int
  window: int
  stride: int
  batch_size: int
  pad_id: int
  capacity: Callable[[Mapping[str, np.ndarray]], int | None]

  def sizes(self, window: int = 0, stride: int = 0) -> tuple[int, int]:
    """The window and stride in tokens (0: the scorer's); larger values raise a `ValueError`."""
    window = window or self.window or self.max_length
    if not 1 <= window <= self.max_length:
      expected = f"expected 1 to model.max_length = {self.max_length}"
      raise UserError(f"eval.window: {expected}, got {window}")
    return window, stride or min(self.stride, window) or window

  def score(
    self,
    params: Mapping,
    text: Split,
    *,
    window: int = 0,
    stride: int = 0,
    max_tokens: int = 0,
    progress: bool = False,
  ) -> dict[str, float]:
    """Runs `evaluate` on a text, first token included; omits bits if its tokens lose text.

    Documents are scored independently. `max_tokens` scores that many tokens in fixed random
    windows, and estimates the other counts from their share; 0 scores all.
    """
    counts: dict[str, float] = {"tokens": text.counts["tokens"], "words": text.counts["words"]}
    if self.tokenizer.keeps_text(text.tokens):
      counts |= {"characters": text.counts["characters"], "bytes": text.counts["bytes"]}
    window, stride = self.sizes(window, stride)
    # Rounded up to a multiple of the devices: rows without text do not count.
    num_rows = -(-self.batch_size // self._mesh.size) * self._mesh.size
    begins = np.zeros(1, np.int64) if text.documents is None else text.documents
    starts = document_starts(begins, self.tokenizer)
    stream = batches.TokenStream(text.tokens, text.boundaries, starts, self.pad_id)
    if text.documents is None:
      windows = batches.EvaluationWindows(stream, window, stride, num_rows, max_tokens)
      if windows.share < 1:
        counts = {unit: count * windows.share for unit, count in counts.items()}
    else:
      windows = batches.EvaluationDocuments(stream, window, stride, num_rows)
    scores = evaluate(
      self.step, params, windows, counts, self._mesh, progress=progress, capacity=self.capacity
    )
    if jax.process_index() == 0:
      _warn_of_rounding(scores, self._warned)
    return scores

  @cached_property
  def step(self) -> Callable[..., Mapping[str, jax.Array]]:
    """The compiled step."""
    return jit_eval_step(self.model, self._mesh, self.objective)

  @cached_property
  def _warned(self) -> set[str]:
    return set()

  @cached_property
  def _mesh(self) -> Mesh:
    return sharding.make_mesh()
