"""Makes the tokens of a corpus, in shards, so that a stopped process repeats at most one."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.data.sources import Corpus
from dpjax.data.text_file import JoinedText, TextFile, TextParts, has_documents
from dpjax.data.token_files import FORMAT, Counts, Encoder, Tokens, open_encoder, open_tokens
from dpjax.errors import UserError
from dpjax.files import JsonObject
from dpjax.text.boundaries import TextBoundaries
from dpjax.text.tokenizer import Tokenizer, tokenizer_classes, train_tokenizer

SHARD_SIZE = 2**25  # characters
LARGE_BYTES = 2**25  # larger texts show a progress bar
MAX_TRAIN_BYTES = 2**30  # of text to train a vocabulary on
_INPUTS = "inputs.json"  # identifies the shards

Chunk = list[tuple[str, bool]]  # see `TextFile.chunks`


def tokenize(
  corpus: Corpus,
  folder: str | Path,
  tokenizer: str | Tokenizer,
  *,
  shared: bool = False,
  boundaries: TextBoundaries | None = None,
  **settings: str | int,
) -> Tokens:
  """Trains a tokenizer on the train split, and writes the tokens of every split, once.

  Opens existing tokens of the same text and settings, and replaces others. Continues the work of a
  stopped process. A vocabulary is trained on at most 1 GiB, spread over the train split.

  Args:
    corpus: the text. If its `about` is empty, it counts as a new text each time.
    folder: receives the files.
    tokenizer: its name, or the tokenizer itself.
    shared: whether to write into a subfolder of `folder`, named after its content.
    boundaries: None, or the `TextBoundaries` of a module such as `dpjax.layers.Unigram`. Only with
      the tokenizers "characters" and "bytes".
    **settings: the settings of a tokenizer to make; see `dpjax.text.train_tokenizer`.

  Raises:
    UserError: from the text, tokenizer or boundaries; or the folder cannot be written.
  """
  if isinstance(tokenizer, str):
    vocabulary = None  # that of a file with all of its entries; otherwise trained on the text
    if settings.get("file"):
      of_file = {x: y for x, y in settings.items() if x != "restrict_vocabulary"}
      vocabulary = train_tokenizer(tokenizer, (), **of_file)
    recipe = _Recipe(corpus, tokenizer, vocabulary, settings, boundaries)
  else:
    recipe = _Recipe(corpus, tokenizer.name, tokenizer, settings, boundaries)
  if boundaries is not None and not recipe.is_character_level:
    names = " or ".join(_character_tokenizers())
    raise UserError(
      f"data.tokenizer: expected {names} with boundaries that follow from the text, "
      f"got {recipe.name}"
    )
  folder = Path(folder)
  if shared:
    folder /= recipe.folder_name()
  shards = folder.with_name(f"{folder.name}.shards")
  files.build_once(folder, recipe.inputs, functools.partial(recipe.build, shards))
  shutil.rmtree(shards, ignore_errors=True)
  return open_tokens(folder, boundaries=boundaries)


def _character_tokenizers() -> list[str]:
  return [name for name, each in tokenizer_classes().items() if each.is_character_level]


@dataclasses.dataclass(frozen=True)
class _Recipe:
  """All that the tokens of a corpus depend on.

  Attributes:
    name: that of the tokenizer.
    tokenizer: None: it is trained on the text; else its whole vocabulary.
    settings: of the tokenizer.
  """

  corpus: Corpus
  name: str
  tokenizer: Tokenizer | None
  settings: Mapping[str, str | int]
  boundaries: TextBoundaries | None

  @property
  def is_character_level(self) -> bool:
    """Whether its tokens are characters or parts of them."""
    if self.tokenizer is not None:
      return self.tokenizer.is_character_level
    return self.name in _character_tokenizers()

  @functools.cached_property
  def origin(self) -> JsonObject:
    """What identifies the tokens, as JSON values."""
    ignored = ("file",) if self.tokenizer is None else ("file", "vocab_size")
    settings = {x: y for x, y in self.settings.items() if x not in ignored}
    origin: JsonObject = {
      "corpus": dict(self.corpus.about) or {"unknown": time.time_ns()},
      "sizes": {split: len(text) for split, text in self.corpus.splits.items()},
      "tokenizer": {"name": self.name, **settings},
    }
    if self.tokenizer is not None:
      origin["vocabulary"] = _digest(self.tokenizer.to_json())
    if self.boundaries is not None:
      origin["unigram"] = self.boundaries.key
    return origin

  @property
  def inputs(self) -> JsonObject:
    """What the folder of the tokens records."""
    inputs = {
      "format": FORMAT,
      "name": self.corpus.name,
      "unigram": self.boundaries is not None,
      "origin": self.origin,
    }
    return json.loads(json.dumps(inputs))

  def folder_name(self) -> str:
    """A name for the folder, of its own for each content."""
    digest = _digest(json.dumps(self.origin, sort_keys=True))
    return f"{files.short_name(self.corpus.name)}_{self.name}_{digest[:8]}"

  def build(self, shards: Path, folder: Path) -> JsonObject:
    """Fills a folder, with the help of the shards of a stopped process; returns what to record."""
    if files.read_json(shards / _INPUTS) == self.inputs:
      encoder = open_encoder(shards, self.boundaries)
    else:
      shutil.rmtree(shards, ignore_errors=True)
      encoder = self._train()
      shards.mkdir()
      encoder.write(shards)
      files.write_json(shards / _INPUTS, self.inputs)
    encoder.write(folder)
    counts: dict[str, Counts] = {}
    try:
      for split, text in self.corpus.splits.items():
        counts[split] = encode_text(text, encoder, folder, split, shards)
        for unit in ("tokens", "words"):
          if not counts[split][unit]:
            where = f"the {split} split of {self.corpus.name}"
            raise UserError(f"data.path: expected {unit} in every split, got none in {where}")
    except UserError:
      shutil.rmtree(shards)
      raise
    checksums = {path.name: files.checksum(path) for path in sorted(folder.glob("*.bin"))}
    return {"splits": counts, "checksums": checksums}

  def _train(self) -> Encoder:
    """The tokenizer of the text, and the model fitted for its boundaries."""
    text = self.corpus.splits["train"]
    sample = _Sample(text)
    try:
      tokenizer = self.tokenizer
      if tokenizer is None or self.settings.get("restrict_vocabulary", False):
        takes_all = self.is_character_level or self.settings.get("file")
        tokenizer = train_tokenizer(self.name, text if takes_all else sample, **self.settings)
      fitted = b"" if self.boundaries is None else self.boundaries.fit(sample)
      return Encoder(tokenizer, self.boundaries, fitted)
    except ValueError as error:
      raise sample.error or error from error


class _Sample:
  """Parts of a text, spread evenly, up to `MAX_TRAIN_BYTES` in total."""

  def __init__(self, text: TextParts):
    self._text = text
    self.error: ValueError | None = None  # raised while reading the text; libraries wrap it

  def __iter__(self) -> Iterator[str]:
    share = min(1.0, MAX_TRAIN_BYTES / max(1, len(self._text)))
    read = 0
    taken = 0
    try:
      for part in self._text:
        read += len(part)
        if taken < min(read * share, MAX_TRAIN_BYTES):
          taken += len(part)
          yield part
    except ValueError as error:
      self.error = error
      raise


def _digest(content: str) -> str:
  return hashlib.sha256(content.encode()).hexdigest()


class Counter:
  r"""Counts a text given in parts.

    "to b", "e\n"  ->  6 characters, 3 words, 6 bytes

  Words are separated by white space, and each line end counts as a word.
  """

  def __init__(self):
    self._sha256 = hashlib.sha256()
    self._characters = 0
    self._words = 0
    self._bytes = 0
    self._in_word = False

  def add(self, part: str) -> int:
    """Counts a part and returns its size in bytes."""
    encoded = part.encode()
    if part:
      self._sha256.update(encoded)
      self._characters += len(part)
      self._bytes += len(encoded)
      self._words += len(part.split()) + part.count("\n")
      if self._in_word and not part[0].isspace():
        self._words -= 1  # It continues a word of the last part.
      self._in_word = not part[-1].isspace()
    return len(encoded)

  def result(self, num_tokens: int) -> Counts:
    """The counts so far, and the number of tokens of these parts."""
    return {
      "tokens": num_tokens,
      "characters": self._characters,
      "words": self._words,
      "bytes": self._bytes,
      "sha256": self.checksum(),
    }

  def checksum(self) -> str:
    """The SHA-256 of the text so far."""
    return self._sha256.hexdigest()


def count_text(parts: Iterable[str], num_tokens: int) -> Counts:
  """The counts of a text in parts, which has a number of tokens; see `Counter`."""
  counter = Counter()
  for part in parts:
    counter.add(part)
  return counter.result(num_tokens)


def encode_text(
  text: TextParts, encoder: Encoder, folder: Path, split: str, shards: Path
) -> Counts:
  """Encodes a text into files in `folder`, reusing finished parts in `shards`.

  A document without tokens does not count.
  """
  texts = list(text.texts) if isinstance(text, JoinedText) else [text]
  counter = Counter()
  num_tokens = 0
  sources = []  # the tokens of each
  starts = [np.zeros(0, np.int64)]
  with contextlib.ExitStack() as stack:
    workers = stack.enter_context(_Workers(encoder, split, sum(map(len, texts))))
    names = [f"{split}.bin"]
    if encoder.boundaries is not None:
      names.append(f"{split}.boundaries.bin")
    outputs = [stack.enter_context((folder / name).open("wb")) for name in names]
    for source, each in enumerate(texts):
      begin = num_tokens
      for i, chunks in enumerate(_shards(each)):
        sizes = [sum(counter.add(part) for part, _ in chunk) for chunk in chunks]
        path = shards / f"{split}-{source}-{i:05}.npz"
        digest = counter.checksum()
        arrays = _load_shard(path, digest)
        if arrays:
          workers.skip(sum(sizes))
        else:
          arrays = workers.encode_shard(chunks, sizes)
          with files.replacing_file(path) as file:
            np.savez(file, *arrays, digest=digest)
        starts.append(num_tokens + arrays[-1])
        num_tokens += len(arrays[0])
        for file, array in zip(outputs, arrays, strict=False):
          file.write(array.data)
      sources.append(num_tokens - begin)
    counts = counter.result(num_tokens)
    if all(map(has_documents, texts)):
      # A document without tokens has the same start as the next one.
      documents = np.unique(np.concatenate(starts))
      documents = documents[documents < num_tokens]
      counts["documents"] = len(documents)
      outputs.append(stack.enter_context((folder / f"{split}.documents.bin").open("wb")))
      outputs[-1].write(documents.data)
    files.sync(*outputs)
  if isinstance(text, JoinedText):
    counts["sources"] = sources
  return counts


class _Workers:
  """Threads that encode the shards of a text, with a progress bar; a context manager."""

  def __init__(self, encoder: Encoder, split: str, num_bytes: int):
    self._encoder = encoder
    # Boundaries of words cache their results, which is not safe in several threads.
    num_threads = 1 if encoder.boundaries is not None else max(2, os.cpu_count() or 1)
    self._threads = concurrent.futures.ThreadPoolExecutor(num_threads)
    self._bar = tqdm(
      total=num_bytes,
      desc=f"encoding {split}",
      unit="B",
      unit_scale=True,
      disable=True if num_bytes < LARGE_BYTES else None,  # None: hidden without a terminal
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()
    self._threads.shutdown(cancel_futures=True)

  def skip(self, num_bytes: int) -> None:
    """Counts a shard that need not be encoded."""
    self._bar.update(num_bytes)

  def encode_shard(self, chunks: list[Chunk], sizes: list[int]) -> list[np.ndarray]:
    """The ids, any boundaries, and the tokens at which documents begin."""
    encoded = []
    for size, parts in zip(sizes, self._threads.map(self._encode, chunks), strict=True):
      encoded += parts
      self._bar.update(size)
    arrays = [np.concatenate(column) for column in zip(*encoded, strict=True)]
    begins = np.cumsum([0, *(len(x[0]) for x in encoded)], dtype=np.int64)[:-1]
    is_first = np.array([first for chunk in chunks for _, first in chunk])
    return [*arrays, begins[is_first]]

  def _encode(self, chunk: Chunk) -> list[list[np.ndarray]]:
    return [self._encoder(part) for part, _ in chunk]


def _shards(text: TextParts) -> Iterator[list[Chunk]]:
  """Lists of chunks with about `SHARD_SIZE` characters."""
  chunks = text.chunks() if isinstance(text, TextFile) else ([(part, False)] for part in text)
  shard = []
  size = 0
  for chunk in chunks:
    shard.append(chunk)
    size += sum(len(part) for part, _ in chunk)
    if size >= SHARD_SIZE:
      yield shard
      shard = []
      size = 0
  if shard:
    yield shard


def _load_shard(path: Path, digest: str) -> list[np.ndarray]:
  """The arrays of a shard; [] if it is missing, or if the text up to its end has changed."""
  if not path.exists():
    return []
  with np.load(path) as content:
    names = [name for name in content.files if name != "digest"]
    return [content[name] for name in names] if str(content["digest"]) == digest else []
