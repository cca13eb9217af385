"""Scores of whole texts, each of their tokens counted once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from tqdm import tqdm

from dpjax.data import batches, evaluation_batches
from dpjax.data.questions import Question
from dpjax.errors import UserError
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import losses, metrics, multiple_choice, sharding
from dpjax.training.step import jit_eval_step, jit_row_step


class EvalStep(Protocol):
  """The compiled step of `dpjax.training.step.jit_eval_step`."""

  def __call__(
    self, params, batch: dict[str, jax.Array], index: int, *, capacity: int | None
  ) -> Mapping[str, jax.Array]:
    """The sums of batch `index`."""
    ...


class EvaluationBatches(Protocol):
  """Batches that weight each token of a text once (`dpjax.data.batches`).

  Attributes:
    batch_size: rows of a batch.
  """

  batch_size: int

  def __len__(self) -> int:
    """How many there are."""
    ...

  def batch(self, index: int, rows: slice) -> Mapping[str, np.ndarray]:
    """The given rows of batch `index`."""
    ...


def evaluate(
  eval_step: EvalStep,
  params: Mapping,
  windows: EvaluationBatches,
  counts: Mapping[str, int],
  mesh: Mesh,
  *,
  progress: bool = False,
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None,
) -> dict[str, float]:
  """Scores a text.

  Args:
    eval_step: from `dpjax.training.step.jit_eval_step`.
    params: the model's.
    windows: the text, each token weighted once.
    counts: counts of the text, as `dpjax.training.metrics.text_scores` takes them.
    mesh: the devices.
    progress: show a bar.
    capacity: batch -> that of `dpjax.models.hourglass.Hourglass`, where it is known.

  Returns:
    The scores of `text_scores`, and those of `dpjax.training.metrics.boundary_scores`.
  """
  rows = sharding.process_rows(windows.batch_size)
  pending, sums = None, {}
  hidden = None if progress else True  # None: hidden where there is no terminal
  for index in tqdm(range(len(windows)), "evaluating", leave=False, disable=hidden):
    batch = windows.batch(index, rows)
    size = capacity(batch)
    # One is read while the next is computed; in float64, so that the sums stay exact.
    measured = eval_step(params, sharding.put_batch(batch, mesh), index, capacity=size)
    pending, done = measured, pending
    sums = metrics.add(sums, done)
  sums = metrics.add(sums, pending)
  return metrics.text_scores(sums["nats"], counts) | metrics.boundary_scores(sums)


def document_starts(begins: np.ndarray, tokenizer: Tokenizer) -> batches.DocumentStarts:
  """Documents that begin at these places, each behind the tokenizer's start token."""
  start_id = tokenizer.start_id
  return batches.DocumentStarts(begins, start_id, int(start_id in tokenizer.space_ids))


@dataclasses.dataclass(frozen=True)
class Scorer:
  """Scores texts with one model, compiled once.

  Attributes:
    model: `apply({"params": params}, tokens)` has `logits`.
    objective: what it was trained for.
    tokenizer: the tokenizer of the texts.
    longest: the model's window, tokens.
    window: tokens it sees at once; 0 is all that it can.
    stride: tokens it scores of them, the others being context; 0 is the window.
    batch_size: rows at once.
    pad_id: the token that fills rows up.
    capacity: as `evaluate` takes it.
  """

  model: nn.Module
  objective: losses.Objective
  tokenizer: Tokenizer
  longest: int
  window: int
  stride: int
  batch_size: int
  pad_id: int
  capacity: Callable[[Mapping[str, np.ndarray]], int | None]

  def sizes(self, window: int = 0, stride: int = 0) -> tuple[int, int]:
    """The window and the stride in tokens; 0 is the scorer's own.

    Raises:
      ValueError: the window is longer than the model's.
    """
    window = window or self.window or self.longest
    if not 1 <= window <= self.longest:
      raise UserError(f"eval.window: expected 1 to model.max_length = {self.longest}, got {window}")
    return window, stride or min(self.stride, window) or window

  def score(
    self,
    params,
    tokens: np.ndarray,
    counts: Mapping[str, Any],
    *,
    boundaries: np.ndarray | None = None,
    documents: np.ndarray | None = None,
    window: int = 0,
    stride: int = 0,
    max_tokens: int = 0,
    progress: bool = False,
  ) -> dict[str, float]:
    """Scores a text, its first token included.

    Args:
      params: the model's.
      tokens: the tokens of the text, [N].
      counts: counts of the text, as `dpjax.training.metrics.text_scores` takes them.
      boundaries: those of a Unigram model, [N], where the model needs them.
      documents: the places at which its documents begin, to score each of them as if it
        stood alone; None: it is one.
      window: see `sizes`.
      stride: see `sizes`.
      max_tokens: that are scored, in windows drawn once for all texts of one length, which
        stand for the text: a share of it is taken to have that share of its characters. 0:
        all, and so with `documents`.
      progress: show a bar.

    Returns:
      See `evaluate`, without bits where the tokens do not hold the whole text.

    Raises:
      ValueError: see `sizes`.
    """
    if not self.tokenizer.keeps_text(tokens):
      counts = {unit: counts[unit] for unit in ("tokens", "words")}
    size = tokens, *self.sizes(window, stride), self._num_rows
    given: Any = dict(boundaries=boundaries, pad_id=self.pad_id)
    if documents is None:
      start = document_starts(np.zeros(1, np.int64), self.tokenizer)
      given |= dict(start_boundary=start.start_boundary, max_tokens=max_tokens)
      rows = evaluation_batches.EvaluationWindows(*size, start.start_id, **given)
      if rows.share < 1:
        units = [unit for unit in ("tokens", "words", "characters", "bytes") if unit in counts]
        counts = {unit: counts[unit] * rows.share for unit in units}
    else:
      starts = document_starts(documents, self.tokenizer)
      rows = evaluation_batches.EvaluationDocuments(*size, starts, **given)
    return evaluate(
      self.step, params, rows, counts, self._mesh, progress=progress, capacity=self.capacity
    )

  def choose(self, params, questions: Sequence[Question]) -> dict[str, float]:
    """Answers multiple-choice questions by the likelihood of each choice.

    Args:
      params: the model's.
      questions: at least one.

    Returns:
      See `dpjax.training.multiple_choice.accuracies`.

    Raises:
      ValueError: see `dpjax.training.multiple_choice.make_rows`.
    """
    window, _ = self.sizes()
    rows = multiple_choice.make_rows(self.tokenizer, questions, window)
    size: Any = dict(window=window, batch_size=self._num_rows, pad_id=self.pad_id)
    found = multiple_choice.log_likelihoods(self._row_step, params, rows, self._mesh, **size)
    return multiple_choice.accuracies(found, questions)

  @cached_property
  def step(self) -> EvalStep:
    """The compiled step."""
    return jit_eval_step(self.model, self._mesh, self.objective)

  @cached_property
  def _row_step(self) -> Callable[..., jax.Array]:
    return jit_row_step(self.model, self._mesh)

  @property
  def _num_rows(self) -> int:
    """Whole rows for every device; those without text count nothing."""
    return -(-self.batch_size // self._mesh.size) * self._mesh.size

  @cached_property
  def _mesh(self) -> Mesh:
    return sharding.make_mesh()
