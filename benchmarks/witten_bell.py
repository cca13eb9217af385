"""What counting gives: bits per character of an interpolated Witten-Bell model.

  python benchmarks/witten_bell.py --workdir=runs/quickstart

The model is trained on the train split of a run's data and scores another one, for 0, 1
and 2 characters of context: what a network has to beat before it has learned anything.
Every character counts once; the first has before it the line end from which dpjax's
evaluation starts, and no more.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from dpjax.data.prepared import open_prepared


def probabilities(
  train: np.ndarray, text: np.ndarray, *, vocab_size: int, order: int, start_id: int
) -> np.ndarray:
  """The probability of every character of a text, given those before it.

    p(c | h) = (count(h c) + types(h) p(c | h')) / (count(h) + types(h))

  with h the `order` characters before c, h' the same without the first of them, types(h)
  how many different characters follow h, and 1 / V for the p(c | h') of an empty h (Witten
  and Bell 1991; Chen and Goodman 1998).

  Args:
    train: ids [N] in [0, V), which are counted.
    text: ids [M] in [0, V), which are scored.
    vocab_size: V.
    order: characters of context; fewer where a text begins.
    start_id: the character before the first of either.

  Returns:
    [M], float64.
  """
  train = np.concatenate([[start_id], train]).astype(np.int64)
  text = np.concatenate([[start_id], text]).astype(np.int64)
  found = np.full(len(text) - 1, 1 / vocab_size)
  for length in range(order + 1):
    seen_contexts, seen = _grams(train, length, vocab_size)
    contexts, grams = _grams(text, length, vocab_size)
    unique, counts = np.unique(seen, return_counts=True)
    count_gram = _look_up(unique, counts, grams)
    count_context = _look_up(*np.unique(seen_contexts, return_counts=True), contexts)
    types = _look_up(*np.unique(unique // vocab_size, return_counts=True), contexts)
    # Where the context is new, the shorter one decides.
    tail = found[len(found) - len(grams) :]
    mixed = (count_gram + types * tail) / np.maximum(count_context + types, 1)
    tail[:] = np.where(types > 0, mixed, tail)
  return found


def _grams(ids: np.ndarray, length: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Each context of that length and each context with its next character, as numbers."""
  # The character before the first is a context, but is not predicted itself.
  first = max(1, length)
  contexts = np.zeros(len(ids) - first, np.int64)
  for back in range(length, 0, -1):
    contexts = contexts * vocab_size + ids[first - back : len(ids) - back]
  return contexts, contexts * vocab_size + ids[first:]


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """values[i] where wanted is keys[i], ascending, and 0 where it is none of them."""
  places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[places] == wanted, values[places], 0)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--workdir", required=True, help="the run's folder")
  parser.add_argument("--split", default="test", choices=("train", "valid", "test"))
  arguments = parser.parse_args()
  try:
    data = open_prepared(Path(arguments.workdir) / "data")
  except ValueError as error:
    sys.exit(str(error))
  tokenizer = data.tokenizer
  if tokenizer.kind != "characters":
    sys.exit(f"data.tokenizer: expected characters, got {tokenizer.kind}")
  text = data.splits[arguments.split]
  print(f"{data.name}, {arguments.split} split of {len(text):,} characters:")
  for order in range(3):
    found = probabilities(
      data.splits["train"],
      text,
      vocab_size=tokenizer.vocab_size,
      order=order,
      start_id=tokenizer.start_id,
    )
    bits = -np.log2(found).mean()
    print(f"  {order} characters of context: {bits:.4f} bits per character")


if __name__ == "__main__":
  main()
