"""Recall, copying and induction: rows of random tokens with answers earlier in the row.

B rows, T tokens of a row, V entries of the vocabulary. Token 0 is padding, 1 the separator, 2
the trigger; tokens from 3 on are contents. The distance of an answer is the difference of its
position and the position that predicts it. A model whose position t reaches back to t - R can
only guess beyond distance R.

  recall     k=a 0 k=b 0 | b a b    pairs of a key and a value, then keys: predict their values
  copying    7 4 6 1 7 4 6          tokens, 1, the same tokens again
  induction  7 4 2 9 6 5 8 2        predict the token that followed the trigger: 9

Sources: Arora et al. 2023, arXiv:2312.04927 (multi-query associative recall); Jelassi et al.
2024, arXiv:2402.01032 (copying); Olsson et al. 2022, arXiv:2209.11895, and Gu and Dao 2023,
arXiv:2312.00752 (induction heads). Differences: a pair of recall is one of `NUM_KEYS` x
`NUM_KEYS` tokens, because small models need far more updates to learn that a value belongs to
the key before it than to look up a key; and rows of any length have `NUM_KEYS` pairs, so that
longer rows have longer distances but no more to remember.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

SEPARATOR, TRIGGER, FIRST_CONTENT = 1, 2, 3
NUM_KEYS = 8  # of recall, and as many values
NUM_NOISE = 16  # contents of induction
# Of random numbers: no test row is drawn as a training row is.
TRAINING, TEST = 0, 1


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows of a task; all fields are int32, [B, T].

  Attributes:
    tokens: the inputs of the model.
    targets: the answers at the positions that predict them, else 0.
    distances: the distances of the answers, else 0.
  """

  tokens: np.ndarray
  targets: np.ndarray
  distances: np.ndarray


def num_contents(longest: int) -> int:
  """The number of contents that suffices for all tasks with rows of up to `longest` tokens."""
  return max(NUM_KEYS * (2 + NUM_KEYS), longest // 2)


def recall(rng: np.random.Generator, num_rows: int, length: int, contents: int) -> Rows:
  """Draws rows of multi-query associative recall.

  The first half has a pair of each key and a random value, at random places, and 0 elsewhere;
  the second half consists of random keys. Key i is the token 3 + i, value j is
  3 + `NUM_KEYS` + j and their pair 3 + `NUM_KEYS` (2 + i) + j.

  Args:
    rng: the generator of random numbers.
    num_rows: B.
    length: T, even and at least 2 `NUM_KEYS`.
    contents: the number of contents; the task uses the first `NUM_KEYS` (2 + `NUM_KEYS`).
  """
  del contents
  half = length // 2
  rows = _empty(num_rows, length)
  keys = np.arange(NUM_KEYS)[None]
  values = rng.integers(NUM_KEYS, size=(num_rows, NUM_KEYS))
  places = _distinct(rng, num_rows, half)[:, :NUM_KEYS]
  asked = rng.integers(NUM_KEYS, size=(num_rows, half))
  pairs = FIRST_CONTENT + NUM_KEYS * (2 + keys) + values
  np.put_along_axis(rows.tokens, places, pairs, 1)
  rows.tokens[:, half:] = FIRST_CONTENT + asked
  answers = np.take_along_axis(values, asked, 1)
  rows.targets[:, half:] = FIRST_CONTENT + NUM_KEYS + answers
  rows.distances[:, half:] = np.arange(half, length)[None] - np.take_along_axis(places, asked, 1)
  return rows


def copying(rng: np.random.Generator, num_rows: int, length: int, contents: int) -> Rows:
  """Draws rows of n different tokens, the separator, the tokens again, and 0.

  n is uniform in 1 .. T / 2, and is the distance of all answers of the row. The separator and
  the tokens after it predict them.

  Args:
    rng: the generator of random numbers.
    num_rows: B.
    length: T, even.
    contents: the number of contents, at least T / 2.
  """
  half = length // 2
  copied = FIRST_CONTENT + _distinct(rng, num_rows, contents)[:, :half]
  rows = _empty(num_rows, length + 1)
  for row, n in enumerate(rng.integers(1, half + 1, size=num_rows)):
    rows.tokens[row, :n] = rows.tokens[row, n + 1 : 2 * n + 1] = copied[row, :n]
    rows.tokens[row, n] = SEPARATOR
    rows.targets[row, n : 2 * n] = copied[row, :n]
    rows.distances[row, n : 2 * n] = n
  return Rows(rows.tokens[:, :-1], rows.targets[:, :-1], rows.distances[:, :-1])


def induction(rng: np.random.Generator, num_rows: int, length: int, contents: int) -> Rows:
  """Draws rows of random tokens with the trigger once inside and again at the end.

  The answer at the end is the token after the first trigger; its distance is uniform in
  1 .. T - 2.

  Args:
    rng: the generator of random numbers.
    num_rows: B.
    length: T, at least 3.
    contents: the number of contents; the task uses the first `NUM_NOISE`.
  """
  del contents
  rows = _empty(num_rows, length)
  rows.tokens[:] = FIRST_CONTENT + rng.integers(NUM_NOISE, size=rows.tokens.shape)
  rows.tokens[:, -1] = TRIGGER
  distances = rng.integers(1, length - 1, size=num_rows)
  index, places = np.arange(num_rows), length - 1 - distances
  rows.tokens[index, places - 1] = TRIGGER
  rows.targets[:, -1] = rows.tokens[index, places]
  rows.distances[:, -1] = distances
  return rows


TASKS: dict[str, Callable[[np.random.Generator, int, int, int], Rows]] = {
  "recall": recall,
  "copying": copying,
  "induction": induction,
}


def chance(task: str, contents: int) -> float:
  """The accuracy of a guess among all possible answers of the task."""
  return 1 / {"recall": NUM_KEYS, "copying": contents, "induction": NUM_NOISE}[task]


@dataclasses.dataclass(frozen=True)
class TaskBatches:
  """Batches of a task as a function of the step (`dpjax.training.loop.TrainBatches`).

  Attributes:
    task: a name of `TASKS`.
    batch_size: B.
    window: T.
    contents: entries of the vocabulary.
    seed: the seed of the random numbers.
    stream: `TRAINING` or `TEST`.
    has_documents: whether "is_start" marks each row as a document, so that a mixer with a
      `max_length` below T takes it, and sees `max_length` positions as usual.
  """

  task: str
  batch_size: int
  window: int
  contents: int
  seed: int
  stream: int = TRAINING
  has_documents: bool = False

  def draw(self, step: int) -> Rows:
    """All rows of a step."""
    rng = np.random.default_rng((self.seed, self.stream, step))
    return TASKS[self.task](rng, self.batch_size, self.window, self.contents)

  def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of the batch of a step; targets that are not answers have weight 0."""
    return to_batch(self.draw(step), rows, self.has_documents)


def to_batch(drawn: Rows, rows: slice, has_documents: bool) -> dict[str, np.ndarray]:
  """Converts rows to a batch for `dpjax.training.step`."""
  found = {
    "tokens": drawn.tokens[rows],
    "targets": drawn.targets[rows],
    "weights": (drawn.distances[rows] > 0).astype(np.float32),
  }
  if has_documents:
    found["is_start"] = np.zeros_like(found["tokens"])
    found["is_start"][:, 0] = 1
  return found


def _empty(num_rows: int, length: int) -> Rows:
  tokens, targets, distances = np.zeros((3, num_rows, length), np.int32)
  return Rows(tokens, targets, distances)


def _distinct(rng: np.random.Generator, num_rows: int, count: int) -> np.ndarray:
  """[B, count], a random permutation of 0 .. count - 1 in each row."""
  return rng.permuted(np.tile(np.arange(count), (num_rows, 1)), axis=1)
