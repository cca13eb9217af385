"""Encodes a text as arrays of numbers, part by part, in threads."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from dpjax.data import corpus
from dpjax.data.corpus import Documents, Text
from dpjax.errors import UserError
from dpjax.text.tokens import Tokenizer
from dpjax.text.unigram import whole_words

LARGE_BYTES = 2**25  # from here on a bar is shown

Part = TypeVar("Part")
Result = TypeVar("Result")


class Counter:
  r"""Counts a text in parts.

    "to b", "e\n"  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}

  Words are separated by white space, and each line end counts as a word.
  """

  def __init__(self):
    self._sha256 = hashlib.sha256()
    self._counts = {"characters": 0, "words": 0, "bytes": 0}
    self._in_word = False

  def add(self, part: str) -> int:
    """Counts a part and returns its size in bytes."""
    encoded = part.encode()
    if part:
      self._sha256.update(encoded)
      self._counts["characters"] += len(part)
      self._counts["bytes"] += len(encoded)
      # A word may go on from the last part.
      is_split = self._in_word and not part[0].isspace()
      self._counts["words"] += len(part.split()) + part.count("\n") - is_split
      self._in_word = not part[-1].isspace()
    return len(encoded)

  def result(self) -> dict:
    """The counts so far."""
    return {**self._counts, "sha256": self._sha256.hexdigest()}


def count_text(parts: Iterable[str]) -> dict:
  """The counts of a text in parts; see `Counter`."""
  counter = Counter()
  for part in parts:
    counter.add(part)
  return counter.result()


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes a part of a text."""

  tokenizer: Tokenizer
  segment: Callable[[str, Tokenizer], np.ndarray] | None = None

  def __call__(self, part: str) -> list[np.ndarray]:
    """The tokens' ids and, with `segment`, their boundaries."""
    arrays = [self.tokenizer.encode(part).astype(self.dtype)]
    if self.segment is not None:
      found = np.asarray(self.segment(part, self.tokenizer))
      if found.shape != arrays[0].shape or not np.isin(found, (0, 1)).all():
        raise UserError(
          f"model.boundaries: expected 0 or 1 for each of {len(arrays[0])} tokens of a text, got "
          f"{found.shape} of {found.dtype}"
        )
      arrays.append(found.astype(np.uint8))
    return arrays

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens on disk."""
    return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)

  def groups(self, text: Text) -> Iterator[list[tuple[str, bool]]]:
    """Groups of pairs: a part, and whether a document begins with it.

    Documents are encoded as if alone; with boundaries, parts end with whole words.
    """
    cut = self.tokenizer.parts if self.segment is None else whole_words
    if not isinstance(text, Documents):
      yield from ([(part, False)] for part in cut(text))
      return
    group, size = [], 0
    for document in text.documents():
      for i, part in enumerate(cut(document)):
        group.append((part, i == 0))
        size += len(part)
        if size >= corpus.CHUNK_BYTES:
          yield group
          group, size = [], 0
    if group:
      yield group


def encode_text(text: Text, encoder: Encoder, folder: Path, split: str) -> dict:
  """Encodes a text into files of `dpjax.data.tokens`.

  Returns "tokens", the counts of `count_text` and, for `Documents`, "documents", which does not
  count those without tokens.
  """
  counter, tokens, num_documents, is_begun = Counter(), 0, 0, False
  has_documents = isinstance(text, Documents)
  has_boundaries = encoder.segment is not None
  # Boundaries of words cache what they find, which is not safe in several threads.
  num_threads = 1 if has_boundaries else max(2, os.cpu_count() or 1)

  def encode(group: list[tuple[str, bool]]) -> list[list[np.ndarray]]:
    return [encoder(part) for part, _ in group]

  with contextlib.ExitStack() as stack:
    suffixes = ["", *[".boundaries"] * has_boundaries, *[".documents"] * has_documents]
    opened = [stack.enter_context((folder / f"{split}{x}.bin").open("wb")) for x in suffixes]
    hidden, about = len(text) < LARGE_BYTES, f"encoding {split}"
    bar = tqdm(total=len(text), desc=about, unit="B", unit_scale=True, disable=hidden)
    stack.enter_context(bar)
    for group, encoded in map_in_order(encode, encoder.groups(text), num_threads):
      begins = []
      for (part, is_first), arrays in zip(group, encoded, strict=True):
        bar.update(counter.add(part))
        is_begun |= is_first
        if is_begun and len(arrays[0]):
          begins.append(tokens)
          is_begun = False
        tokens += len(arrays[0])
      num_documents += len(begins)
      columns = [np.concatenate(column) for column in zip(*encoded, strict=True)]
      columns += [np.array(begins, np.int64)] * has_documents
      for file, column in zip(opened, columns, strict=True):
        column.tofile(file)
    for file in opened:
      file.flush()
      os.fsync(file.fileno())
  counts = {"tokens": tokens, **counter.result()}
  return counts | ({"documents": num_documents} if has_documents else {})


def map_in_order(
  work: Callable[[Part], Result], parts: Iterable[Part], num_threads: int
) -> Iterator[tuple[Part, Result]]:
  """Yields pairs of a part and its result, in order, and holds few at a time."""
  waiting: collections.deque = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
    for part in parts:
      waiting.append((part, threads.submit(work, part)))
      if len(waiting) > num_threads + 1:
        part, future = waiting.popleft()
        yield part, future.result()
    for part, future in waiting:
      yield part, future.result()
