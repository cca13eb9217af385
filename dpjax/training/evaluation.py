"""A whole split, each of its tokens counted once."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dpjax.training import metrics, sharding


class EvaluationBatches(Protocol):
  """Batches that weight each token of a text once (`dpjax.data.batches`)."""

  batch_size: int

  def __len__(self) -> int:
    """How many there are."""
    ...

  def batch(self, index: int, rows: slice) -> Mapping[str, np.ndarray]:
    """The given rows of batch `index`."""
    ...


def evaluate(
  eval_step,
  params,
  batches: EvaluationBatches,
  counts: Mapping[str, int],
  mesh: Mesh,
  *,
  progress: bool = False,
) -> dict[str, float]:
  """Scores a text.

  Args:
    eval_step: of `dpjax.training.step.jit_eval_step`.
    params: the model's.
    batches: the text, each token weighted once.
    counts: of the text, as `dpjax.training.metrics.text_scores` takes them.
    mesh: the devices.
    progress: show a bar.

  Returns:
    The scores of `text_scores`.
  """
  rows = sharding.process_rows(batches.batch_size)
  pending, nats = None, 0.0
  hidden = None if progress else True  # None: hidden where there is no terminal
  for index in tqdm(range(len(batches)), "evaluating", leave=False, disable=hidden):
    batch = sharding.put_batch(batches.batch(index, rows), mesh)
    # One sum is read while the next is computed; in float64, so that it stays exact.
    pending, done = eval_step(params, batch), pending
    nats += float(done) if done is not None else 0.0
  nats += float(pending) if pending is not None else 0.0
  return metrics.text_scores(nats, counts)
