"""A text becomes arrays of numbers, part by part, in threads."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dpjax.data import making
from dpjax.text.tokens import Tokenizer
from dpjax.text.unigram import UnigramBoundaries, whole_words

LARGE_BYTES = 2**25  # from here on a bar is shown


class Counter:
  r"""Counts a text that comes in parts.

    ["to b", "e\n"]  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}

  Words are separated by white space, and each line end counts as one.
  """

  def __init__(self):
    self._sha256 = hashlib.sha256()
    self._characters = self._words = self._bytes = 0
    self._in_word = False

  def add(self, part: str) -> int:
    """Counts a part, and says how many bytes it has."""
    if not part:
      return 0
    encoded = part.encode()
    self._sha256.update(encoded)
    self._characters += len(part)
    self._bytes += len(encoded)
    self._words += len(part.split()) + part.count("\n")
    # The same word, begun in the last part.
    self._words -= self._in_word and not part[:1].isspace()
    self._in_word = not part[-1:].isspace()
    return len(encoded)

  def result(self) -> dict:
    """The counts so far."""
    return {
      "characters": self._characters,
      "words": self._words,
      "bytes": self._bytes,
      "sha256": self._sha256.hexdigest(),
    }


@dataclasses.dataclass(frozen=True)
class Encoder:
  """What is made of a part of a text: tokens and, if asked for, their boundaries.

  Attributes:
    tokenizer: of the tokens.
    unigram: None, or what gives the boundaries.
  """

  tokenizer: Tokenizer
  unigram: UnigramBoundaries | None = None

  def __call__(self, part: str) -> list[np.ndarray]:
    """The arrays of `suffixes`."""
    arrays = [self.tokenizer.encode(part).astype(self.dtype)]
    if self.unigram is not None:
      arrays.append(self.unigram.of_tokens(part, self.tokenizer).astype(np.uint8))
    return arrays

  @property
  def dtype(self) -> np.dtype:
    """Of the tokens on disk."""
    return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)

  @property
  def suffixes(self) -> list[str]:
    """Of the files, behind the split's name."""
    return [".bin"] if self.unigram is None else [".bin", ".boundaries.bin"]

  def parts(self, text: Iterable[str]) -> Iterable[str]:
    """The parts of a text as this takes them: boundaries need whole words."""
    return self.tokenizer.parts(text) if self.unigram is None else whole_words(text)


def encode_text(text: Iterable[str], size: int, encoder: Encoder, folder: Path, split: str) -> dict:
  """Encodes a text into files of a folder, unless an earlier call has done it.

  Args:
    text: parts of up to about 1 MiB.
    size: of the text in bytes, at least roughly.
    encoder: makes arrays of parts.
    folder: where <split>.bin and its like are, and <split>.json says that they are whole.
    split: name of the files.

  Returns:
    "tokens" and the counts of `Counter`.

  Raises:
    ValueError: of the text or the tokenizer.
  """
  note = folder / f"{split}.json"
  if done := making.read_json(note):
    return done
  counter, tokens = Counter(), 0
  files = [(folder / f"{split}{suffix}").open("wb") for suffix in encoder.suffixes]
  try:
    with tqdm(
      total=size, desc=f"encoding {split}", unit="B", unit_scale=True, disable=size < LARGE_BYTES
    ) as bar:
      for part, arrays in _in_threads(encoder, encoder.parts(text)):
        bar.update(counter.add(part))
        tokens += len(arrays[0])
        for file, array in zip(files, arrays, strict=True):
          array.tofile(file)
    for file in files:
      file.flush()
      os.fsync(file.fileno())
  finally:
    for file in files:
      file.close()
  done = {"tokens": tokens, **counter.result()}
  making.write_json(note, done)
  return done


def _in_threads(encoder: Encoder, parts: Iterable[str]) -> Iterator[tuple[str, list[np.ndarray]]]:
  """Pairs of part and what became of it, in order; few are held at a time.

  The libraries let other threads work while they do; some use all cores within a call.
  """
  waiting: collections.deque = collections.deque()
  num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  num_threads = max(2, num_cores or 1) if encoder.unigram is None else 1  # which remembers words
  with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
    for part in parts:
      waiting.append((part, threads.submit(encoder, part)))
      if len(waiting) > num_threads + 1:
        part, future = waiting.popleft()
        yield part, future.result()
    for part, future in waiting:
      yield part, future.result()
