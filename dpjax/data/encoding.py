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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.data.encoder import Encoder, TextBoundaries, open_encoder
from dpjax.data.sources import Corpus
from dpjax.data.text_file import Mixed, Text
from dpjax.data.token_files import FORMAT, Tokens, open_tokens
from dpjax.errors import UserError
from dpjax.text.factory import CHARACTER_TOKENIZERS, train_tokenizer
from dpjax.text.tokenizer import Tokenizer

SHARD_SIZE = 2**25  # characters
LARGE_BYTES = 2**25  # larger texts show a progress bar
MAX_TRAIN_BYTES = 2**30  # of text to train a vocabulary on
_INPUTS = "inputs.json"  # identifies the shards

Chunk = list[tuple[str, bool]]  # see `Text.chunks`


def tokenize(
  corpus: Corpus,
  folder: str | Path,
  tokenizer: str | Tokenizer,
  *,
  shared: bool = False,
  boundaries: TextBoundaries | None = None,
  **settings: Any,
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
    recipe = _Recipe(corpus, tokenizer, _loaded(tokenizer, settings), settings, boundaries)
  else:
    recipe = _Recipe(corpus, tokenizer.name, tokenizer, settings, boundaries)
  recipe.check()
  folder = Path(folder)
  if shared:
    folder /= recipe.folder_name()
  shards = folder.with_name(f"{folder.name}.shards")
  files.build_once(folder, recipe.inputs, functools.partial(recipe.build, shards))
  shutil.rmtree(shards, ignore_errors=True)
  return open_tokens(folder, boundaries=boundaries)


def _loaded(name: str, settings: Mapping[str, Any]) -> Tokenizer | None:
  """The tokenizer of the vocabulary file among the settings, if any, with all of its entries."""
  if not settings.get("file"):
    return None
  of_file = {x: y for x, y in settings.items() if x != "restrict_vocabulary"}
  return train_tokenizer(name, (), **of_file)


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
  settings: Mapping[str, Any]
  boundaries: TextBoundaries | None

  def check(self) -> None:
    """Raises a `UserError` for boundaries of the text that a tokenizer cannot have."""
    if self.boundaries is not None and self.name not in CHARACTER_TOKENIZERS:
      names = " or ".join(CHARACTER_TOKENIZERS)
      raise UserError(
        f"data.tokenizer: expected {names} with boundaries that follow from the text, "
        f"got {self.name}"
      )

  @functools.cached_property
  def origin(self) -> dict[str, Any]:
    """What identifies the tokens, as JSON values."""
    ignored = ("file",) if self.tokenizer is None else ("file", "vocab_size")
    settings = {x: y for x, y in self.settings.items() if x not in ignored}
    origin: dict[str, Any] = {
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
  def inputs(self) -> dict[str, Any]:
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

  def build(self, shards: Path, folder: Path) -> dict[str, Any]:
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
    counts = {}
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
    return {"dtype": encoder.dtype.name, "splits": counts, "checksums": checksums}

  def _train(self) -> Encoder:
    """The tokenizer of the text, and the model fitted for its boundaries."""
    text = self.corpus.splits["train"]
    sample = _Sample(text)
    try:
      tokenizer = self.tokenizer
      if tokenizer is None or self.settings.get("restrict_vocabulary", False):
        takes_all = self.name in CHARACTER_TOKENIZERS or self.settings.get("file")
        tokenizer = train_tokenizer(self.name, text if takes_all else sample, **self.settings)
      fitted = b"" if self.boundaries is None else self.boundaries.fit(sample)
      return Encoder(tokenizer, self.boundaries, fitted)
    except ValueError as error:
      raise sample.error or error from error


class _Sample:
  """Parts of a text, spread evenly, up to `MAX_TRAIN_BYTES` in total."""

  def __init__(self, text: Text | Mixed):
    self._text = text
    self.error: ValueError | None = None  # raised while reading the text; libraries wrap it

  def __iter__(self) -> Iterator[str]:
    share = min(1.0, MAX_TRAIN_BYTES / max(1, len(self._text)))
    read = taken = 0
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


def encode_text(
  text: Text | Mixed | Sequence[str], encoder: Encoder, folder: Path, split: str, shards: Path
) -> dict[str, Any]:
  """Encodes a text into files in `folder`, reusing finished parts in `shards`.

  Returns "tokens" and the counts of `count_text`; where documents are known, "documents", which
  does not count those without tokens; and for `Mixed`, "sources", the tokens of each.
  """
  texts = list(text.texts) if isinstance(text, Mixed) else [text]
  counter, sources = Counter(), [0] * len(texts)
  starts = [np.zeros(0, np.int64)]
  with contextlib.ExitStack() as stack:
    encode = stack.enter_context(_Threads(encoder, split, sum(map(len, texts))))
    names = [f"{split}.bin"]
    if encoder.boundaries is not None:
      names.append(f"{split}.boundaries.bin")
    outputs = [stack.enter_context((folder / name).open("wb")) for name in names]
    for source, each in enumerate(texts):
      for i, chunks in enumerate(_shards(each)):
        sizes = [sum(counter.add(part) for part, _ in chunk) for chunk in chunks]
        path, digest = shards / f"{split}-{source}-{i:05}.npz", counter.result()["sha256"]
        arrays = _load_shard(path, digest)
        if arrays:
          encode.skip(sum(sizes))
        else:
          arrays = encode.shard(chunks, sizes)
          with files.replacing_file(path) as file:
            np.savez(file, *arrays, digest=digest)
        starts.append(sum(sources) + arrays[-1])
        sources[source] += len(arrays[0])
        for file, array in zip(outputs, arrays, strict=False):
          file.write(array.data)
    counts = {"tokens": sum(sources), **counter.result()}
    if all(getattr(x, "has_documents", False) for x in texts):
      # A document without tokens has the same start as the next one.
      documents = np.unique(np.concatenate(starts))
      documents = documents[documents < counts["tokens"]]
      counts["documents"] = len(documents)
      outputs.append(stack.enter_context((folder / f"{split}.documents.bin").open("wb")))
      outputs[-1].write(documents.data)
    files.sync(*outputs)
  if isinstance(text, Mixed):
    counts["sources"] = sources
  return counts


class _Threads(contextlib.ExitStack):
  """Encodes the shards of a text in several threads, with a progress bar."""

  def __init__(self, encoder: Encoder, split: str, num_bytes: int):
    super().__init__()
    self._encoder = encoder
    # Boundaries of words cache their results, which is not safe in several threads.
    num_threads = 1 if encoder.boundaries is not None else max(2, os.cpu_count() or 1)
    self._threads = concurrent.futures.ThreadPoolExecutor(num_threads)
    self.callback(self._threads.shutdown, cancel_futures=True)
    hidden = True if num_bytes < LARGE_BYTES else None  # None: hidden without a terminal
    about = f"encoding {split}"
    bar = tqdm(total=num_bytes, desc=about, unit="B", unit_scale=True, disable=hidden)
    self._bar = self.enter_context(bar)

  def skip(self, num_bytes: int) -> None:
    """Counts a shard that need not be encoded."""
    self._bar.update(num_bytes)

  def shard(self, chunks: list[Chunk], sizes: list[int]) -> list[np.ndarray]:
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
