"""Multiple-choice questions: the most likely of several continuations of a context.

Scores follow lm-evaluation-harness
(EleutherAI/lm-evaluation-harness:lm_eval/api/model.py and task.py), with three differences: a
start token precedes the context if the window has room for it, as in all scores of dpjax;
lengths are in bytes (its `acc_bytes`), while its `acc_norm` counts characters, the same for
ASCII; and no space is added beside white space.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax.data.questions import Question
from dpjax.errors import UserError
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import sharding

_PARTS = (8, 4, 2, 1)  # Rows are as long as the window over one of these.


class Row(NamedTuple):
  """A context and a choice: `inputs` and `targets` [N], of which the last `count` are scored."""

  inputs: np.ndarray
  targets: np.ndarray
  count: int


def encode_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[np.ndarray, np.ndarray]:
  """The tokens of a context, and of a choice that follows it.

    "a cat ", "sat"  ->  the tokens of "a cat", the further tokens of "a cat sat"

  White space at the end of the context moves to the choice. If there is none between the two, a
  space is inserted, unless the context is empty.
  """
  stripped = context.rstrip()
  space = context[len(stripped) :]
  if stripped and not space and not choice[0].isspace():
    space = " "
  return tokenizer.encode_pair(stripped, space + choice)


def make_row(context: np.ndarray, choice: np.ndarray, start_id: int, window: int) -> Row:
  """The inputs and targets of a context and a choice.

    start token 9, context 3 1 4, choice 1 5  ->  inputs 9 3 1 4 1, targets 3 1 4 1 5, count 2
    the same, window 3                        ->  inputs     1 4 1, targets     4 1 5

  Args:
    context: [N], N >= 0.
    choice: [M], 1 <= M <= window.
    start_id: the start token.
    window: the maximum number of tokens that the model sees; earlier ones are cut.
  """
  ids = np.concatenate([[start_id], context, choice]).astype(np.int32)[-window - 1 :]
  return Row(ids[:-1], ids[1:], len(choice))


def make_rows(tokenizer: Tokenizer, questions: Sequence[Question], window: int) -> list[Row]:
  """A row for every choice of every question, in order.

  Raises:
    ValueError: a choice has no tokens, or more than the window; the message has the number of
      its question, from 1.
  """
  rows = []
  for number, question in enumerate(questions, 1):
    for choice in question.choices:
      context_ids, ids = encode_pair(tokenizer, question.context, choice)
      if not 1 <= len(ids) <= window:
        raise UserError(
          f"choices: expected 1 to {window} tokens (the window) in each choice of question "
          f"{number}, got {len(ids)} in {choice[:60]!r}"
        )
      rows.append(make_row(context_ids, ids, tokenizer.start_id, window))
  return rows


def log_likelihoods(
  step: Callable[..., jax.Array],
  params: Any,
  rows: Sequence[Row],
  mesh: Mesh,
  *,
  window: int,
  batch_size: int,
  pad_id: int = 0,
) -> np.ndarray:
  """Scores rows in batches of similar lengths.

  Args:
    step: from `dpjax.training.step.jit_row_step`.
    params: the model's parameters.
    rows: from `make_row`.
    mesh: the devices.
    window: the longest row; batches have this length, or a half, a quarter or an eighth of it.
    batch_size: the number of rows in a batch, a multiple of the number of devices.
    pad_id: the token that pads rows.

  Returns:
    [number of rows], float64: the sum of log softmax(logits)[target] over the scored targets,
    in nats.
  """
  found = np.zeros(len(rows))
  mine = sharding.process_rows(batch_size)
  for index, (length, numbers) in enumerate(_batches(rows, window, batch_size)):
    batch: dict[str, np.ndarray] = {
      "tokens": np.full((batch_size, length), pad_id, np.int32),
      "targets": np.zeros((batch_size, length), np.int32),
      "weights": np.zeros((batch_size, length), np.float32),
    }
    for b, number in enumerate(numbers):
      inputs, targets, count = rows[number]
      batch["tokens"][b, : len(inputs)] = inputs
      batch["targets"][b, : len(targets)] = targets
      batch["weights"][b, len(targets) - count : len(targets)] = 1
    fed = sharding.put_batch({name: x[mine] for name, x in batch.items()}, mesh)
    found[numbers] = -np.asarray(step(params, fed, index), np.float64)[: len(numbers)]
  return found


def accuracies(likelihoods: np.ndarray, questions: Sequence[Question]) -> dict[str, float]:
  """The share of questions whose most likely choice is right.

    accuracy           of the largest log-likelihood
    accuracy_per_byte  of the largest log-likelihood over the UTF-8 bytes of the choice

  Args:
    likelihoods: the log-likelihoods of all choices, question by question.
    questions: at least one.

  Returns:
    "questions", their number; "chance", the accuracy of guessing; and the above, each with
    its standard error, "..._error": s / sqrt(N), with s over N - 1; nan for one question. The
    first of equal choices wins.
  """
  right, per_byte, at = [], [], 0
  for question in questions:
    of_choices = likelihoods[at : at + len(question.choices)]
    sizes = np.array([len(choice.encode()) for choice in question.choices])
    right.append(np.argmax(of_choices) == question.answer)
    per_byte.append(np.argmax(of_choices / sizes) == question.answer)
    at += len(question.choices)
  chance = np.mean([1 / len(question.choices) for question in questions])
  scores = {"questions": len(questions), "chance": float(chance)}
  for name, hits in (("accuracy", right), ("accuracy_per_byte", per_byte)):
    mean, count = float(np.mean(hits)), len(hits)
    error = math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else math.nan
    scores |= {name: mean, f"{name}_error": error}
  return scores


def _batches(rows: Sequence[Row], window: int, batch_size: int) -> Iterator[tuple[int, list[int]]]:
  """The length of each batch, and the indices of its rows."""
  lengths = [-(-window // part) for part in _PARTS]
  by_length: dict[int, list[int]] = {length: [] for length in lengths}
  for number, row in enumerate(rows):
    by_length[next(x for x in lengths if x >= len(row.targets))].append(number)
  for length, numbers in by_length.items():
    for begin in range(0, len(numbers), batch_size):
      yield length, numbers[begin : begin + batch_size]
