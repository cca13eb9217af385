"""A text becomes arrays of numbers, part by part, in processes, and can be gone on with.

What is done is written down now and then, so that a process that was killed costs the
work since then alone.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dpjax.errors import UserError
from dpjax.text.tokens import Tokenizer, tokenizer_from_json
from dpjax.text.unigram import UnigramBoundaries, whole_words

# From here on a bar is shown, and there are processes: to start them takes seconds.
LARGE_BYTES = 2**25
COMMIT_BYTES = 2**27  # of text, between two notes of what is done


class EncodingError(UserError):
  """A process that encodes has ended early; what is done stays."""


class Counter:
  r"""Counts a text that comes in parts.

    ["to b", "e\n"]  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}

  Words are separated by white space, and each line end counts as one.
  """

  def __init__(self):
    self._sha256 = hashlib.sha256()
    self._characters = self._words = self._bytes = 0
    self._in_word = False

  def add(self, part: str, words: int | None = None) -> int:
    """Counts a part, and says how many bytes it has.

    Args:
      part: of the text.
      words: `count_words` of it, where that is known.
    """
    if not part:
      return 0
    encoded = part.encode()
    self._sha256.update(encoded)
    self._characters += len(part)
    self._bytes += len(encoded)
    self._words += count_words(part) if words is None else words
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


def count_words(text: str) -> int:
  """How many words and line ends a text has by itself."""
  return len(text.split()) + text.count("\n")


@dataclasses.dataclass(frozen=True)
class Encoder:
  """What is made of a part of a text: tokens and, if asked for, their boundaries.

  Attributes:
    tokenizer: of the tokens.
    dtype: of the tokens on disk.
    unigram: None, or what gives the boundaries.
  """

  tokenizer: Tokenizer
  dtype: np.dtype
  unigram: UnigramBoundaries | None = None

  def __call__(self, part: str) -> tuple[list[bytes], int]:
    """The arrays of `suffixes`, as bytes, and `count_words`."""
    tokens = self.tokenizer.encode(part).astype(self.dtype)
    found = [tokens.tobytes()]
    if self.unigram is not None:
      boundaries = self.unigram.of_tokens(part, self.tokenizer)
      found.append(boundaries.astype(np.uint8).tobytes())
    return found, count_words(part)

  @property
  def suffixes(self) -> list[str]:
    """Of the files, behind the split's name."""
    return [".bin"] if self.unigram is None else [".bin", ".boundaries.bin"]

  def parts(self, text: Iterable[str]) -> Iterable[str]:
    """The parts of a text as this takes them: boundaries need whole words."""
    return self.tokenizer.parts(text) if self.unigram is None else whole_words(text)


def encode_text(
  text: Iterable[str],
  size: int,
  encoder: Encoder,
  folder: Path,
  split: str,
  processes: int | None = None,
) -> dict:
  """Encodes a text into files of a folder, or goes on where an earlier call was ended.

  Args:
    text: parts of up to about 1 MiB; each iteration gives them anew.
    size: of the text in bytes, at least roughly.
    encoder: makes arrays of parts.
    folder: where <split>.bin and its like are, and <split>.json says what is done.
    split: name of the files.
    processes: how many encode; None: as many as there are cores, one if the text is
      small.

  Returns:
    "tokens" and the counts of `Counter`.

  Raises:
    ValueError: of the text or the tokenizer.
    EncodingError: a process died.
  """
  paths = [folder / f"{split}{suffix}" for suffix in encoder.suffixes]
  note = folder / f"{split}.json"
  done = _read_note(note, paths)
  if done["parts"] and not _begins_alike(encoder.parts(text), done):
    done = _nothing(paths)
  if done.get("result"):
    return done["result"]
  is_large = size >= LARGE_BYTES
  if processes is None:
    processes = num_cores() if is_large else 1
  counter, sizes, since = Counter(), done["sizes"], 0
  bar = tqdm(total=size, desc=f"encoding {split}", unit="B", unit_scale=True, disable=not is_large)
  files = [path.open("r+b" if path.exists() else "wb") for path in paths]
  try:
    for file, length in zip(files, sizes, strict=True):
      file.truncate(length)
      file.seek(length)

    def waiting() -> Iterator[str]:
      for i, part in enumerate(encoder.parts(text)):
        if i >= done["parts"]:
          yield part
        else:
          bar.update(counter.add(part))

    num_parts = done["parts"]
    for part, (arrays, words) in _map(encoder, waiting(), processes):
      bar.update(counter.add(part, words))
      for file, array in zip(files, arrays, strict=True):
        file.write(array)
      num_parts += 1
      since += len(part)
      if since >= COMMIT_BYTES:
        since = 0
        _write_note(note, files, num_parts, counter)
    counts = counter.result()
    result = {"tokens": files[0].tell() // encoder.dtype.itemsize, **counts}
    _write_note(note, files, num_parts, counter, result)
    return result
  finally:
    bar.close()
    for file in files:
      file.close()


def _map(encoder: Encoder, parts: Iterator[str], processes: int):
  """Pairs of part and what became of it, in order; few are held at a time."""
  if processes < 2:
    for part in parts:
      yield part, encoder(part)
    return
  unigram = None if encoder.unigram is None else encoder.unigram.model
  arguments = encoder.tokenizer.to_json(), encoder.dtype.name, unigram
  # A process of JAX has threads, which a fork would break.
  context = multiprocessing.get_context("spawn")
  pool = concurrent.futures.ProcessPoolExecutor(
    processes, context, initializer=_start, initargs=arguments
  )
  pending: collections.deque = collections.deque()
  try:
    for part in parts:
      pending.append((part, pool.submit(_encode, part)))
      if len(pending) > 2 * processes:
        part, future = pending.popleft()
        yield part, future.result()
    while pending:
      part, future = pending.popleft()
      yield part, future.result()
  except BrokenProcessPool as error:
    raise EncodingError(
      "data: expected processes that encode to live, got one that ended early: it was "
      "killed, or memory was short, or the calling script lacks "
      '`if __name__ == "__main__":`'
    ) from error
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None


def _start(tokenizer: str, dtype: str, unigram: bytes | None) -> None:
  """Makes the encoder of a process that encodes."""
  global _encoder
  # The processes are as many as the cores.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _encoder = Encoder(
    tokenizer_from_json(tokenizer),
    np.dtype(dtype),
    None if unigram is None else UnigramBoundaries(unigram),
  )


def _encode(part: str):
  return _encoder(part) if _encoder else None


def _nothing(paths: list[Path]) -> dict:
  return {"parts": 0, "sizes": [0] * len(paths), "sha256": "", "result": None}


def num_cores() -> int:
  """Those that this process may use, where the system says it."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _read_note(note: Path, paths: list[Path]) -> dict:
  """What is done, as far as the files are there."""
  try:
    done = json.loads(note.read_text(encoding="utf-8"))
    sizes = [path.stat().st_size for path in paths]
    enough = all(x >= y for x, y in zip(sizes, done["sizes"], strict=True))
    return done if enough else _nothing(paths)
  except (OSError, ValueError, KeyError, TypeError):
    return _nothing(paths)


def _begins_alike(parts: Iterable[str], done: dict) -> bool:
  """Whether the text still begins with what has been encoded."""
  sha256 = hashlib.sha256()
  num_parts = 0
  for part in parts:
    if num_parts == done["parts"]:
      # Where all was done there must be no more.
      return not done["result"] and sha256.hexdigest() == done["sha256"]
    sha256.update(part.encode())
    num_parts += 1
  return num_parts == done["parts"] and sha256.hexdigest() == done["sha256"]


def _write_note(note: Path, files, parts: int, counter: Counter, result=None) -> None:
  for file in files:
    file.flush()
    os.fsync(file.fileno())
  done = {
    "parts": parts,
    "sizes": [file.tell() for file in files],
    "sha256": counter.result()["sha256"],
    "result": result,
  }
  partial = note.with_name(note.name + ".partial")
  partial.write_text(json.dumps(done), encoding="utf-8")
  os.replace(partial, note)
