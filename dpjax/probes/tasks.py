"""Recall, copying and induction: rows of random tokens with answers earlier in the row.

Token 0 is padding, 1 the separator, 2 the trigger; tokens from 3 on are contents. An answer's
distance is that of its position from the one that predicts it: a model whose position t reaches
back to t - R can only guess beyond R.

  recall     k=a 0 k=b 0 | b a b    pairs of a key and a value, then keys: predict their values
  copying    7 4 6 1 7 4 6          tokens, 1, the same tokens again
  induction  7 4 2 9 6 5 8 2        predict the token that followed the trigger: 9

Sources: Arora et al. 2023, arXiv:2312.04927 (multi-query associative recall); Jelassi et al.
2024, arXiv:2402.01032 (copying); Olsson et al. 2022, arXiv:2209.11895, and Gu and Dao 2023,
arXiv:2312.00752 (induction heads). Differences: a pair of recall is one token, and rows of any
length have `NUM_KEYS` of them; docs/probes.md says why.
"""

from typing import NamedTuple

import numpy as np

SEPARATOR, TRIGGER, FIRST_CONTENT = 1, 2, 3
NUM_KEYS = 8  # of recall, and as many values
NUM_NOISE = 16  # contents of induction
TRAINING, TEST = 0, 1  # streams of random numbers: no test row is drawn as a training row is


class Examples(NamedTuple):
  """Rows of a task, int32 [B, T]; answers and distances where they are predicted, else 0."""

  tokens: np.ndarray
  targets: np.ndarray
  distances: np.ndarray


def chance(task: str, contents: int) -> float:
  """The accuracy of a guess among all possible answers of the task."""
  return 1 / {"recall": NUM_KEYS, "copying": contents, "induction": NUM_NOISE}[task]


def _recall(rng, num_rows: int, length: int, contents: int) -> Examples:
  """The first half has a pair for each key, at random places; the second consists of keys.

  Key i is the token 3 + i, value j is 3 + `NUM_KEYS` + j, their pair 3 + `NUM_KEYS` (2 + i) + j.
  """
  half = length // 2
  tokens, targets, distances = np.zeros((3, num_rows, length), np.int32)
  values = rng.integers(NUM_KEYS, size=(num_rows, NUM_KEYS))
  places = _permutations(rng, num_rows, half)[:, :NUM_KEYS]
  queries = rng.integers(NUM_KEYS, size=(num_rows, half))
  pairs = FIRST_CONTENT + NUM_KEYS * (2 + np.arange(NUM_KEYS)) + values
  np.put_along_axis(tokens, places, pairs, 1)
  tokens[:, half:] = FIRST_CONTENT + queries
  targets[:, half:] = FIRST_CONTENT + NUM_KEYS + np.take_along_axis(values, queries, 1)
  distances[:, half:] = np.arange(half, length) - np.take_along_axis(places, queries, 1)
  return Examples(tokens, targets, distances)


def _copying(rng, num_rows: int, length: int, contents: int) -> Examples:
  """Draws n different tokens, the separator, the tokens again, and 0; n is in 1 .. T / 2."""
  half = length // 2
  copied = FIRST_CONTENT + _permutations(rng, num_rows, contents)[:, :half]
  tokens, targets, distances = np.zeros((3, num_rows, length + 1), np.int32)
  for row, n in enumerate(rng.integers(1, half + 1, size=num_rows)):
    tokens[row, :n] = tokens[row, n + 1 : 2 * n + 1] = copied[row, :n]
    tokens[row, n] = SEPARATOR
    targets[row, n : 2 * n] = copied[row, :n]
    distances[row, n : 2 * n] = n
  return Examples(tokens[:, :-1], targets[:, :-1], distances[:, :-1])


def _induction(rng, num_rows: int, length: int, contents: int) -> Examples:
  """Random tokens; the trigger at the end, and at a distance uniform in 1 .. T - 2."""
  tokens, targets, distances = np.zeros((3, num_rows, length), np.int32)
  tokens[:] = FIRST_CONTENT + rng.integers(NUM_NOISE, size=tokens.shape)
  tokens[:, -1] = TRIGGER
  distances[:, -1] = rng.integers(1, length - 1, size=num_rows)
  index, places = np.arange(num_rows), length - 1 - distances[:, -1]
  tokens[index, places - 1] = TRIGGER
  targets[:, -1] = tokens[index, places]
  return Examples(tokens, targets, distances)


def _permutations(rng, num_rows: int, count: int) -> np.ndarray:
  """[B, count], a random permutation of 0 .. count - 1 in each row."""
  return rng.permuted(np.tile(np.arange(count), (num_rows, 1)), axis=1)


TASKS = {"recall": _recall, "copying": _copying, "induction": _induction}


def draw(task: str, size: tuple[int, int], contents: int, seed: tuple[int, ...]) -> Examples:
  """Draws rows of a task, of size B, T; T is even and at least 2 `NUM_KEYS`."""
  return TASKS[task](np.random.default_rng(seed), *size, contents)
