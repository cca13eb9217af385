"""Encodes a text as arrays of numbers, part by part, in threads."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from dpjax.data import chunks, making
from dpjax.data.documents import Documents
from dpjax.errors import UserError
from dpjax.text.tokens import Tokenizer
from dpjax.text.unigram import whole_words

LARGE_BYTES = 2**25  # from here on a bar is shown

Part = TypeVar("Part")
Result = TypeVar("Result")


class Counter:
  r"""Counts the characters, words and bytes of a text in parts.

    ["to b", "e\n"]  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}

  Words are separated by white space, and each line end counts as a word.
  """

  def __init__(self):
    self._sha256 = hashlib.sha256()
    self._characters = self._words = self._bytes = 0
    self._in_word = False

  def add(self, part: str) -> int:
    """Counts a part and returns its size in bytes."""
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
  """Encodes a part of a text as tokens and, with `segment`, boundaries.

  Attributes:
    tokenizer: makes the tokens.
    segment: makes the boundaries of a text's tokens, or None.
  """

  tokenizer: Tokenizer
  segment: Callable[[str, Tokenizer], np.ndarray] | None = None

  def __call__(self, part: str) -> list[np.ndarray]:
    """The arrays of `suffixes`."""
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

  @property
  def suffixes(self) -> list[str]:
    """The suffixes of the files after the split's name."""
    return [".bin"] if self.segment is None else [".bin", ".boundaries.bin"]

  def parts(self, text: Iterable[str]) -> Iterable[str]:
    """The parts of a text; for boundaries they end with whole words."""
    return self.tokenizer.parts(text) if self.segment is None else whole_words(text)

  def encode_group(self, group: list[tuple[str, bool]]) -> list[list[np.ndarray]]:
    """The arrays of each part of `groups`, one by one."""
    return [self(part) for part, _ in group]

  def groups(self, text: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of pairs: a part, and whether a document begins with it.

    Documents are encoded one by one, as if alone; many short ones form a group.
    """
    if not isinstance(text, Documents):
      for part in self.parts(text):
        yield [(part, False)]
      return
    group, size = [], 0
    for document in text.documents():
      for i, part in enumerate(self.parts(document)):
        group.append((part, i == 0))
        size += len(part)
        if size >= chunks.CHUNK_BYTES:
          yield group
          group, size = [], 0
    if group:
      yield group


def encode_text(text: Iterable[str], size: int, encoder: Encoder, folder: Path, split: str) -> dict:
  """Encodes a text into files in a folder, unless an earlier call has done so.

  Args:
    text: parts of up to about 1 MiB, or `Documents`.
    size: the size of the text in bytes, at least roughly.
    encoder: makes arrays of parts.
    folder: receives <split>.bin and the like, and <split>.json once they are complete. For
      `Documents` also <split>.documents.bin: the first token of each document, int64,
      increasing.
    split: the name of the files.

  Returns:
    "tokens", the counts of `Counter` and, for `Documents`, "documents". Documents without
    tokens do not count.

  Raises:
    ValueError: from the text or the tokenizer.
  """
  note = folder / f"{split}.json"
  if done := making.read_json(note):
    return done
  counter, tokens, num_documents, is_begun = Counter(), 0, 0, False
  suffixes = encoder.suffixes + [".documents.bin"] * isinstance(text, Documents)
  # Those of words remember them, and are not for several threads.
  num_threads = 0 if encoder.segment is None else 1
  files = [(folder / f"{split}{suffix}").open("wb") for suffix in suffixes]
  try:
    with tqdm(
      total=size, desc=f"encoding {split}", unit="B", unit_scale=True, disable=size < LARGE_BYTES
    ) as bar:
      for group, encoded in _in_threads(encoder.encode_group, encoder.groups(text), num_threads):
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
        columns += [np.array(begins, np.int64)] * isinstance(text, Documents)
        for file, column in zip(files, columns, strict=True):
          column.tofile(file)
    for file in files:
      file.flush()
      os.fsync(file.fileno())
  finally:
    for file in files:
      file.close()
  done = {"tokens": tokens, **counter.result()}
  if isinstance(text, Documents):
    done["documents"] = num_documents
  making.write_json(note, done)
  return done


def _in_threads(
  work: Callable[[Part], Result], parts: Iterable[Part], num_threads: int = 0
) -> Iterator[tuple[Part, Result]]:
  """Yields pairs of a part and its result, in order, and holds few at a time.

  The libraries release the interpreter's lock; some use all cores within a call.
  """
  waiting: collections.deque = collections.deque()
  num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  num_threads = num_threads or max(2, num_cores or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
    for part in parts:
      waiting.append((part, threads.submit(work, part)))
      if len(waiting) > num_threads + 1:
        part, future = waiting.popleft()
        yield part, future.result()
    for part, future in waiting:
      yield part, future.result()
