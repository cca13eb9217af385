"""A whole split, each of its tokens counted once."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dpjax.training import metrics, sharding


class EvalStep(Protocol):
  """What `dpjax.training.step.jit_eval_step` gives."""

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
  params,
  batches: EvaluationBatches,
  counts: Mapping[str, int],
  mesh: Mesh,
  *,
  progress: bool = False,
  capacity: Callable[[Mapping[str, np.ndarray]], int | None] = lambda batch: None,
) -> dict[str, float]:
  """Scores a text.

  Args:
    eval_step: of `dpjax.training.step.jit_eval_step`.
    params: the model's.
    batches: the text, each token weighted once.
    counts: of the text, as `dpjax.training.metrics.text_scores` takes them.
    mesh: the devices.
    progress: show a bar.
    capacity: batch -> that of `dpjax.models.hourglass.Hourglass`, where it is known.

  Returns:
    The scores of `text_scores`, and those of `dpjax.training.metrics.boundary_scores`.
  """
  rows = sharding.process_rows(batches.batch_size)
  pending, sums = None, {}
  hidden = None if progress else True  # None: hidden where there is no terminal
  for index in tqdm(range(len(batches)), "evaluating", leave=False, disable=hidden):
    batch = batches.batch(index, rows)
    size = capacity(batch)
    # One is read while the next is computed; in float64, so that the sums stay exact.
    measured = eval_step(params, sharding.put_batch(batch, mesh), index, capacity=size)
    pending, done = measured, pending
    sums = metrics.add(sums, done)
  sums = metrics.add(sums, pending)
  return metrics.text_scores(sums["nats"], counts) | metrics.boundary_scores(sums)
