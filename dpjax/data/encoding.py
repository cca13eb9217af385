"""Encodes a text into token files, in shards, so that a stopped process repeats at most one."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.data.text import Mixed, Text
from dpjax.errors import UserError
from dpjax.text.tokenizer import Tokenizer

SHARD_SIZE = 2**25  # characters
LARGE_BYTES = 2**25  # larger texts show a progress bar

Chunk = list[tuple[str, bool]]  # see `Text.chunks`


class Counter:
  r"""Counts a text given in parts.

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
      # A word may continue from the last part.
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
      boundaries = np.asarray(self.segment(part, self.tokenizer))
      if boundaries.shape != arrays[0].shape or not np.isin(boundaries, (0, 1)).all():
        raise UserError(
          f"model.boundaries: expected 0 or 1 for each of {len(arrays[0])} tokens of a text, got "
          f"{boundaries.shape} of {boundaries.dtype}"
        )
      arrays.append(boundaries.astype(np.uint8))
    return arrays

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens on disk."""
    return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)


def encode_text(
  text: Text | Mixed | Iterable[str], encoder: Encoder, folder: Path, split: str, shards: Path
) -> dict:
  """Encodes a text into files in `folder`, reusing finished parts in `shards`.

  Returns "tokens" and the counts of `count_text`; where documents are known, "documents", which
  does not count those without tokens; and for `Mixed`, "sources", the tokens of each.
  """
  texts: Any = text.texts if isinstance(text, Mixed) else [text]
  has_documents = all(getattr(x, "has_documents", False) for x in texts)
  # Boundaries of words cache their results, which is not safe in several threads.
  num_threads = 1 if encoder.segment else max(2, os.cpu_count() or 1)
  total = sum(map(len, texts))
  hidden = True if total < LARGE_BYTES else None  # None: hidden without a terminal
  counter, sources, starts = Counter(), [0] * len(texts), [np.zeros(0, np.int64)]
  with contextlib.ExitStack() as stack:
    threads = concurrent.futures.ThreadPoolExecutor(num_threads)
    stack.callback(threads.shutdown, cancel_futures=True)
    bar = tqdm(total=total, desc=f"encoding {split}", unit="B", unit_scale=True, disable=hidden)
    stack.enter_context(bar)

    def encode(chunk: Chunk) -> list[list[np.ndarray]]:
      return [encoder(part) for part, _ in chunk]

    suffixes = ["", *[".boundaries"] * (encoder.segment is not None)]
    outputs = [stack.enter_context((folder / f"{split}{x}.bin").open("wb")) for x in suffixes]
    for source, each in enumerate(texts):
      for i, chunks in enumerate(_shards(each)):
        sizes = [sum(counter.add(part) for part, _ in chunk) for chunk in chunks]
        path, digest = shards / f"{split}-{source}-{i:05}.npz", counter.result()["sha256"]
        if not (arrays := _load_shard(path, digest)):
          encoded = []
          for size, parts in zip(sizes, threads.map(encode, chunks), strict=True):
            encoded += parts
            bar.update(size)
          arrays = [np.concatenate(column) for column in zip(*encoded, strict=True)]
          begins = np.cumsum([0, *(len(x[0]) for x in encoded)], dtype=np.int64)[:-1]
          arrays.append(begins[np.array([is_first for chunk in chunks for _, is_first in chunk])])
          with files.replacing_file(path) as file:
            np.savez(file, *arrays, digest=digest)
        else:
          bar.update(sum(sizes))
        starts.append(sum(sources) + arrays[-1])
        sources[source] += len(arrays[0])
        for file, array in zip(outputs, arrays, strict=False):
          file.write(array.data)
    counts = {"tokens": sum(sources), **counter.result()}
    if has_documents:
      # A document without tokens has the same start as the next one.
      documents = np.unique(np.concatenate(starts))
      documents = documents[documents < counts["tokens"]]
      counts["documents"] = len(documents)
      outputs.append(stack.enter_context((folder / f"{split}.documents.bin").open("wb")))
      outputs[-1].write(documents.data)
    files.sync(*outputs)
  return counts | ({"sources": sources} if isinstance(text, Mixed) else {})


def _shards(text: Text | Iterable[str]) -> Iterator[list[Chunk]]:
  """Lists of chunks with about `SHARD_SIZE` characters."""
  shard, size = [], 0
  for chunk in text.chunks() if isinstance(text, Text) else ([(part, False)] for part in text):
    shard.append(chunk)
    size += sum(len(part) for part, _ in chunk)
    if size >= SHARD_SIZE:
      yield shard
      shard, size = [], 0
  if shard:
    yield shard


def _load_shard(path: Path, digest: str) -> list[np.ndarray]:
  """The arrays of a shard; [] if it is missing, or if the text up to its end has changed."""
  if not path.exists():
    return []
  with np.load(path) as content:
    names = [name for name in content.files if name != "digest"]
    return [content[name] for name in names] if str(content["digest"]) == digest else []
