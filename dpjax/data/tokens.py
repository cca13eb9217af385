"""A corpus as tokens on disk: encoded once, then memory-mapped.

  train.bin ...             ids, uint16, or int32 if there are more than 65,536
  train.boundaries.bin ...  boundaries of the text, uint8, one for each token
  train.documents.bin ...   the first token of each document, int64, increasing
  tokenizer.json, unigram.model (fitted for the boundaries)
  data.json                 counts, and the checksums of the .bin files

All runs share these folders of data_dir/tokens. A run's folder is a reference: it has only the
small files and, in data.json, the path of the others. While a folder is being written, NAME.shards
next to it has the tokens of each 32 MiB of text, so that a stopped process repeats at most one.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import files
from dpjax.data.corpus import Corpus
from dpjax.data.encoding import Encoder, encode_text
from dpjax.data.text import SPLITS, Mixed, Text
from dpjax.errors import UserError
from dpjax.text.factory import CHARACTER_TOKENIZERS, tokenizer_from_json, train_tokenizer
from dpjax.text.tokenizer import Tokenizer

FORMAT = 1
MAX_TRAIN_BYTES = 2**30  # of text to train a vocabulary on
UNITS = ("tokens", "characters", "words", "bytes")
_FITTED = "unigram.model"  # for any type of boundaries
_INPUTS = "inputs.json"  # identifies the shards


class _Arrays(collections.UserDict[str, Any]):
  """One memory-mapped array for each split, verified in full on first access."""

  def __init__(
    self, folder: Path, suffix: str, dtype: Any, sizes: Mapping[str, int], sums: Mapping[str, str]
  ):
    self._dtype, self._unchecked = np.dtype(dtype), {**sums}
    item = self._dtype.itemsize
    self.data = {x: (folder / f"{x}{suffix}", int(sizes[x]) * item) for x in sizes}

  def __getitem__(self, split: str) -> np.memmap:
    path, size = self.data[split]
    actual = path.stat().st_size if path.exists() else "no such file"
    if actual != size:
      raise UserError(
        f"{path}: expected {size} bytes, got {actual}; `dpjax train --workdir=RUN --tokenize_only` "
        "makes the tokens of a run again"
      )
    expected = self._unchecked.get(path.name)
    if expected and files.checksum(path) != expected:
      raise UserError(
        f"{path}: expected the tokens as they were made, got a file that was changed; put a "
        f"copy in its place, or remove {path.resolve().parent}, which training with the run's "
        "settings makes again"
      )
    self._unchecked.pop(path.name, None)
    return np.memmap(path, self._dtype, "r")

  def are_there(self) -> bool:
    return all(path.exists() and path.stat().st_size == size for path, size in self.data.values())


@dataclasses.dataclass(frozen=True)
class Tokens:
  """A corpus as tokens; the arrays are checked and mapped read-only at first use.

  Attributes:
    name: the name of the corpus.
    tokenizer: the tokenizer that encoded it.
    splits: "train", "valid", "test": ids [N], uint16 or int32.
    counts: for each split, "tokens", "characters", "words", "bytes" and the text's "sha256".
      Words are separated by white space, and each line end counts as a word. For a mixture also
      "sources", the number of tokens of each source, in the order of the stream.
    boundaries: None, or for each split the boundaries of its text, 0 or 1, uint8 [N].
    fitted: the model fitted to the train split for the boundaries, b"" if none.
    text_boundaries: None, or the `TextBoundaries` that computed them, to segment other texts.
    folder: the folder of the files.
    checksums: SHA-256 of the .bin files, by name.
    documents: None, or for each split the first tokens of documents, int64, increasing from 0.
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]
  counts: Mapping[str, dict]
  boundaries: Mapping[str, np.ndarray] | None = None
  fitted: bytes = b""
  text_boundaries: Any = None
  folder: Path = Path()
  checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
  documents: Mapping[str, np.ndarray] | None = None

  @property
  def has_tokens(self) -> bool:
    """Whether the arrays exist and have the expected sizes."""
    arrays = (self.splits, self.boundaries, self.documents)
    return all(each.are_there() for each in arrays if isinstance(each, _Arrays))

  def check(self, *splits: str) -> None:
    """Reads splits in full, all by default, unless they were used before.

    Raises:
      UserError: a file is missing or has changed; the message names it.
    """
    for split in splits or self.splits:
      for arrays in filter(None, (self.splits, self.boundaries, self.documents)):
        arrays[split]  # noqa: B018  (raises what is wrong with the file)

  def segment(self, text: str) -> np.ndarray:
    """The boundaries of another text's tokens, uint8 [number of tokens].

    Raises:
      UserError: these tokens have no boundaries.
    """
    if self.boundaries is None or self.text_boundaries is None:
      raise UserError(f"data: expected {self.name} with boundaries of the text, got it without")
    return _encoder(self.tokenizer, self.text_boundaries, self.fitted)(text)[1]


def tokenize(
  corpus: Corpus,
  folder: str | Path,
  tokenizer: str | Tokenizer,
  *,
  shared: bool = False,
  boundaries: Any = None,
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
  is_name = isinstance(tokenizer, str)
  name, loaded = (tokenizer, None) if is_name else (tokenizer.name, tokenizer)
  restricts = settings.get("restrict_vocabulary", False)
  if loaded is None and settings.get("file"):
    of_file = {x: y for x, y in settings.items() if x != "restrict_vocabulary"}
    loaded = train_tokenizer(name, (), **of_file)
  has_boundaries = boundaries is not None
  if has_boundaries and name not in CHARACTER_TOKENIZERS:
    names = " or ".join(CHARACTER_TOKENIZERS)
    raise UserError(
      f"data.tokenizer: expected {names} with boundaries that follow from the text, got {name}"
    )
  ignored = ("file",) if loaded is None else ("file", "vocab_size")
  origin: dict[str, Any] = {
    "corpus": dict(corpus.about) or {"unknown": time.time_ns()},
    "sizes": {split: len(text) for split, text in corpus.splits.items()},
    "tokenizer": {"name": name, **{x: settings[x] for x in settings if x not in ignored}},
  }
  if loaded is not None:
    origin["vocabulary"] = _digest(loaded.to_json())
  if has_boundaries:
    origin["unigram"] = boundaries.key
  folder = Path(folder)
  if shared:
    folder /= (
      f"{files.short_name(corpus.name)}_{name}_{_digest(json.dumps(origin, sort_keys=True))[:8]}"
    )
  inputs = {"format": FORMAT, "name": corpus.name, "unigram": has_boundaries, "origin": origin}
  inputs = json.loads(json.dumps(inputs))
  shards = folder.with_name(f"{folder.name}.shards")

  def build(partial: Path) -> dict[str, Any]:
    counts = {}
    if files.read_json(shards / _INPUTS) == inputs:
      trained, fitted = _open_encoder(shards, boundaries)
    else:
      shutil.rmtree(shards, ignore_errors=True)
      to_train = tokenizer if loaded is None or restricts else loaded
      trained, fitted = _train(corpus, to_train, boundaries, settings)
      shards.mkdir()
      _write_encoder(shards, trained, fitted)
      files.write_json(shards / _INPUTS, inputs)
    _write_encoder(partial, trained, fitted)
    encoder = _encoder(trained, boundaries, fitted)
    try:
      for split, text in corpus.splits.items():
        counts[split] = encode_text(text, encoder, partial, split, shards)
        if missing := [unit for unit in ("tokens", "words") if not counts[split][unit]]:
          where = f"the {split} split of {corpus.name}"
          raise UserError(f"data.path: expected {missing[0]} in every split, got none in {where}")
    except UserError:
      shutil.rmtree(shards)
      raise
    checksums = {path.name: files.checksum(path) for path in sorted(partial.glob("*.bin"))}
    return {"dtype": encoder.dtype.name, "splits": counts, "checksums": checksums}

  files.build_once(folder, inputs, build)
  shutil.rmtree(shards, ignore_errors=True)
  return open_tokens(folder, boundaries=boundaries)


def _digest(content: str) -> str:
  return hashlib.sha256(content.encode()).hexdigest()


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


def _train(
  corpus: Corpus, tokenizer: str | Tokenizer, boundaries: Any, settings: Mapping
) -> tuple[Tokenizer, bytes]:
  """The tokenizer of a text, and the model fitted for its boundaries."""
  text = corpus.splits["train"]
  sample = _Sample(text)
  try:
    if isinstance(tokenizer, str):
      takes_all = tokenizer in CHARACTER_TOKENIZERS or settings.get("file")
      tokenizer = train_tokenizer(tokenizer, text if takes_all else sample, **settings)
    return tokenizer, b"" if boundaries is None else boundaries.fit(sample)
  except ValueError as error:
    raise sample.error or error from error


def _encoder(tokenizer: Tokenizer, boundaries: Any, fitted: bytes) -> Encoder:
  of_text = None if boundaries is None else functools.partial(boundaries.compute, fitted=fitted)
  return Encoder(tokenizer, of_text)


def _write_encoder(folder: Path, tokenizer: Tokenizer, fitted: bytes) -> None:
  if fitted:
    (folder / _FITTED).write_bytes(fitted)
  (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")


def _open_encoder(folder: Path, boundaries: Any) -> tuple[Tokenizer, bytes]:
  """Reads the tokenizer and the fitted model that `_write_encoder` wrote."""
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizer_from_json(files.read_file(path).decode())
    path = folder / _FITTED
    fitted = files.read_file(path) if path.exists() else b""
    if boundaries is not None:
      _encoder(tokenizer, boundaries, fitted)("")
  except (OSError, ValueError) as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  return tokenizer, fitted


def write_reference(data: Tokens, folder: str | Path, *, is_export: bool = False) -> None:
  """Makes a folder with the files that a model needs, and the path of its tokens.

  An export has only their name. Raises a `UserError` for a folder that holds something else.
  """
  folder, tokens = Path(folder).resolve(), data.folder.resolve()
  path = os.path.relpath(tokens, folder) if tokens.drive == folder.drive else str(tokens)
  content = {
    "format": FORMAT,
    "name": data.name,
    "unigram": data.boundaries is not None,
    "dtype": Encoder(data.tokenizer).dtype.name,
    "splits": dict(data.counts),
    "checksums": dict(data.checksums),
    "tokens": data.folder.name if is_export else path,
  }
  with files.replacing(folder) as partial:
    _write_encoder(partial, data.tokenizer, data.fitted)
    files.write_json(partial / files.RECORD, content)


def open_tokens(folder: str | Path, data_dir: str | Path = "", boundaries: Any = None) -> Tokens:
  """Opens a folder that `tokenize` or `write_reference` wrote.

  Args:
    folder: the folder with data.json.
    data_dir: "", or where to look for the tokens of a reference that was moved.
    boundaries: None, or the `boundaries` given to `tokenize`, to segment other texts.

  Raises:
    UserError: a file is missing or damaged; the message names it.
  """
  folder = Path(folder)
  path = folder / files.RECORD
  try:
    content = files.load_json(path)
    version, name, dtype = content["format"], str(content["name"]), np.dtype(content["dtype"])
    counts = {split: dict(content["splits"][split]) for split in SPLITS}
    if any(int(counts[split][unit]) < 1 for split in SPLITS for unit in UNITS):
      raise UserError("a split without text")
    checksums = {str(x): str(y) for x, y in dict(content["checksums"]).items()}
    tokens = folder
    if "tokens" in content:
      tokens = Path(os.path.normpath(folder.resolve() / content["tokens"]))
      moved = Path(data_dir, "tokens", tokens.name)
      tokens = moved if (moved / "train.bin").exists() and not tokens.exists() else tokens
    sizes = {split: counts[split]["tokens"] for split in SPLITS}
    splits = _Arrays(tokens, ".bin", dtype, sizes, checksums)
    text_boundaries = arrays = documents = None
    if content["unigram"]:
      text_boundaries = boundaries
      arrays = _Arrays(tokens, ".boundaries.bin", np.uint8, sizes, checksums)
    if all("documents" in counts[split] for split in SPLITS):
      sizes = {split: counts[split]["documents"] for split in SPLITS}
      documents = _Arrays(tokens, ".documents.bin", np.int64, sizes, checksums)
  except OSError as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
    raise UserError(
      f"{path}: expected the counts of tokens, got damaged JSON ({error!r})"
    ) from error
  if version != FORMAT:
    raise UserError(f"{path}: expected format {FORMAT}, got {version}, of another version of dpjax")
  tokenizer, fitted = _open_encoder(folder, text_boundaries)
  return Tokens(
    *(name, tokenizer, splits, counts, arrays, fitted, text_boundaries),
    *(tokens, checksums, documents),
  )
