"""Encodes a text as arrays of numbers, part by part, in threads."""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.data import corpus
from dpjax.data.corpus import Documents, Mixed, Text
from dpjax.errors import UserError
from dpjax.text.tokens import Tokenizer
from dpjax.text.unigram import whole_words

LARGE_BYTES = 2**25  # from here on a bar is shown
KEEP_BYTES = 2**26  # of text, after which what is encoded is kept for a process that goes on

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


class Progress:
  """What of a corpus is encoded in an unfinished folder, so that a later process can continue.

  Its file has the corpus and, for each split that was begun, how far `encode_text` came.
  """

  def __init__(self, folder: Path, inputs: Mapping[str, Any]):
    """Opens that of the same corpus, or empties the folder."""
    self._path, self._inputs = folder / files.PROGRESS, inputs
    found, self.splits = files.read_json(self._path), {}
    if found.get("inputs") == inputs:
      self.splits = found["splits"]
      return
    for path in folder.iterdir():
      path.unlink()

  def keep(self, split: str, state: dict) -> None:
    """Writes how far a split is encoded, once that is on the disk."""
    self.splits[split] = copy.deepcopy(state)
    files.write_json(self._path, {"inputs": self._inputs, "splits": self.splits})


def encode_text(
  text: Text, encoder: Encoder, folder: Path, split: str, progress: Progress | None = None
) -> dict:
  """Encodes a text into files of `dpjax.data.tokens`, or the rest of it after `progress`.

  Returns "tokens", the counts of `count_text`; for `Documents`, "documents", which does not count
  those without tokens; and for `Mixed`, "sources", the tokens of each.
  """
  texts = text.texts if isinstance(text, Mixed) else [text]
  has_documents = all(isinstance(x, Documents) for x in texts)
  has_boundaries = encoder.segment is not None
  # Boundaries of words cache what they find, which is not safe in several threads.
  num_threads = 1 if has_boundaries else max(2, os.cpu_count() or 1)
  suffixes = ["", *[".boundaries"] * has_boundaries, *[".documents"] * has_documents]
  paths = [folder / f"{split}{x}.bin" for x in suffixes]
  about = f"encoding {split}"
  hidden = True if len(text) < LARGE_BYTES else None  # None: hidden where there is no terminal
  bar = tqdm(total=len(text), desc=about, unit="B", unit_scale=True, disable=hidden)

  def groups() -> Iterator[tuple[int, list[tuple[str, bool]]]]:
    return ((i, group) for i, x in enumerate(texts) for group in encoder.groups(x))

  def encode(numbered: tuple[int, list[tuple[str, bool]]]) -> list[list[np.ndarray]]:
    return [encoder(part) for part, _ in numbered[1]]

  with contextlib.ExitStack() as stack:
    stack.enter_context(bar)
    opened = [stack.enter_context(path.open("ab")) for path in paths]
    state: dict[str, Any] = {"groups": 0, "documents": 0, "is_begun": False}
    state |= {"sources": [0] * len(texts), "sizes": [0] * len(paths)}
    kept = progress.splits.get(split, state) if progress else state
    counter, rest = Counter(), groups()
    for _, group in itertools.islice(rest, kept["groups"]):
      bar.update(sum(counter.add(part) for part, _ in group))
    sizes = [os.fstat(file.fileno()).st_size for file in opened]
    is_whole = all(size >= x for size, x in zip(sizes, kept["sizes"], strict=True))
    if kept["groups"] and is_whole and counter.result() == kept["counts"]:
      state = copy.deepcopy(kept)
    else:  # None is kept, or its text has changed.
      counter, rest = Counter(), groups()
    for file, size in zip(opened, state["sizes"], strict=True):
      file.truncate(size)
    unkept = 0
    for (number, group), encoded in map_in_order(encode, rest, num_threads):
      begins = []
      for (part, is_first), arrays in zip(group, encoded, strict=True):
        unkept += (size := counter.add(part))
        bar.update(size)
        state["is_begun"] |= is_first
        if state["is_begun"] and len(arrays[0]):
          begins.append(sum(state["sources"]))
          state["is_begun"] = False
        state["sources"][number] += len(arrays[0])
      state["groups"] += 1
      state["documents"] += len(begins)
      columns = [np.concatenate(column) for column in zip(*encoded, strict=True)]
      columns += [np.array(begins, np.int64)] * has_documents
      for i, (file, column) in enumerate(zip(opened, columns, strict=True)):
        state["sizes"][i] += file.write(column.data)
      if progress and unkept >= KEEP_BYTES:
        files.sync(*opened)
        progress.keep(split, state | {"counts": counter.result()})
        unkept = 0
    files.sync(*opened)
  counts = {"tokens": sum(state["sources"]), **counter.result()}
  counts |= {"documents": state["documents"]} if has_documents else {}
  return counts | ({"sources": state["sources"]} if isinstance(text, Mixed) else {})


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
