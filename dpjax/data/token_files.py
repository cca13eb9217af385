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

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import DTypeLike

from dpjax import files
from dpjax.data.text_file import SPLITS
from dpjax.errors import UserError
from dpjax.text.boundaries import TextBoundaries
from dpjax.text.tokenizer import Tokenizer, tokenizer_from_json

FORMAT = 1
_FITTED = "unigram.model"


class Counts(TypedDict):
  """The size of a text.

  Attributes:
    tokens: the number of tokens.
    characters: the number of characters.
    words: words are separated by white space, and each line end counts as a word.
    bytes: of UTF-8.
    sha256: the checksum of the text.
    documents: the number of documents with tokens, where they are known.
    sources: of a mixture, the number of tokens of each source, in the order of the stream.
  """

  tokens: int
  characters: int
  words: int
  bytes: int
  sha256: str
  documents: NotRequired[int]
  sources: NotRequired[list[int]]


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes a part of a text.

  Attributes:
    tokenizer: gives the ids.
    boundaries: None, or gives the boundaries of the text.
    fitted: the model that they fitted to the train split; b"" if none.
  """

  tokenizer: Tokenizer
  boundaries: TextBoundaries | None = None
  fitted: bytes = b""

  def __call__(self, part: str) -> list[np.ndarray]:
    """The tokens' ids and, with `boundaries`, their boundaries."""
    ids = self.tokenizer.encode(part).astype(self.dtype)
    if self.boundaries is None:
      return [ids]
    ends = np.asarray(self.boundaries.compute(part, self.tokenizer, fitted=self.fitted))
    if ends.shape != ids.shape or not np.isin(ends, (0, 1)).all():
      raise UserError(
        f"model.boundaries: expected 0 or 1 for each of {len(ids)} tokens of a text, got "
        f"{ends.shape} of {ends.dtype}"
      )
    return [ids, ends.astype(np.uint8)]

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens on disk."""
    return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)

  def write(self, folder: Path) -> None:
    """Writes its files."""
    if self.fitted:
      (folder / _FITTED).write_bytes(self.fitted)
    content = self.tokenizer.to_json()
    (folder / "tokenizer.json").write_text(content, encoding="utf-8", newline="\n")


def open_encoder(folder: Path, boundaries: TextBoundaries | None) -> Encoder:
  """Reads the files of an encoder."""
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizer_from_json(files.read_file(path).decode())
    path = folder / _FITTED
    fitted = files.read_file(path) if path.exists() else b""
    encoder = Encoder(tokenizer, boundaries, fitted)
    if boundaries is not None:
      encoder("")
  except (OSError, ValueError) as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  return encoder


class _Arrays(Mapping[str, np.ndarray]):
  """One memory-mapped array for each split, verified in full on first access."""

  def __init__(
    self,
    folder: Path,
    suffix: str,
    dtype: DTypeLike,
    lengths: Mapping[str, int],
    checksums: Mapping[str, str],
  ):
    self._dtype = np.dtype(dtype)
    self._paths = {split: folder / f"{split}{suffix}" for split in lengths}
    self._sizes = {split: int(length) * self._dtype.itemsize for split, length in lengths.items()}
    self._unchecked = dict(checksums)

  def __getitem__(self, split: str) -> np.ndarray:
    path = self._paths[split]
    size = self._sizes[split]
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
        f"copy in its place, or remove {path.resolve().parent}: training with the run's "
        "settings recreates it"
      )
    self._unchecked.pop(path.name, None)
    return np.memmap(path, self._dtype, "r")

  def __contains__(self, split: object) -> bool:
    return split in self._paths  # without reading a file, which may be missing

  def __iter__(self) -> Iterator[str]:
    return iter(self._paths)

  def __len__(self) -> int:
    return len(self._paths)

  def are_there(self) -> bool:
    """Whether the files exist and have the expected sizes."""
    return all(
      path.exists() and path.stat().st_size == self._sizes[split]
      for split, path in self._paths.items()
    )


@dataclasses.dataclass(frozen=True)
class Split:
  """A text as tokens.

  Attributes:
    tokens: ids [N] of any integer type.
    counts: see `Counts`.
    boundaries: None, or those of the text, 0 or 1, uint8 [N].
    documents: None, or the first tokens of documents, int64, increasing from 0.
  """

  tokens: np.ndarray
  counts: Counts
  boundaries: np.ndarray | None = None
  documents: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
  """A corpus as tokens; the arrays are checked and mapped read-only at first use.

  Attributes:
    name: the name of the corpus.
    tokenizer: the tokenizer that encoded it.
    splits: "train", "valid", "test": ids [N], uint16 or int32.
    counts: for each split, the `Counts` of its text.
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
  counts: Mapping[str, Counts]
  boundaries: Mapping[str, np.ndarray] | None = None
  fitted: bytes = b""
  text_boundaries: TextBoundaries | None = None
  folder: Path = Path()
  checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
  documents: Mapping[str, np.ndarray] | None = None

  def split(self, name: str, *, with_documents: bool = False) -> Split:
    """A split; `with_documents`, with the documents that it must then have."""
    boundaries = None if self.boundaries is None else self.boundaries[name]
    documents = None
    if with_documents:
      assert self.documents is not None
      documents = self.documents[name]
    return Split(self.splits[name], self.counts[name], boundaries, documents)

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
    return Encoder(self.tokenizer, self.text_boundaries, self.fitted)(text)[1]


def write_reference(data: Tokens, folder: str | Path, *, is_export: bool = False) -> None:
  """Makes a folder with the files that a model needs, and the path of its tokens.

  An export has only their name. Raises a `UserError` for a folder that holds something else.
  """
  folder = Path(folder).resolve()
  tokens = data.folder.resolve()
  path = os.path.relpath(tokens, folder) if tokens.drive == folder.drive else str(tokens)
  content = {
    "format": FORMAT,
    "name": data.name,
    "unigram": data.boundaries is not None,
    "splits": dict(data.counts),
    "checksums": dict(data.checksums),
    "tokens": data.folder.name if is_export else path,
  }
  with files.replacing(folder) as partial:
    Encoder(data.tokenizer, fitted=data.fitted).write(partial)
    files.write_json(partial / files.RECORD, content)


def open_tokens(
  folder: str | Path, data_dir: str | Path = "", boundaries: TextBoundaries | None = None
) -> Tokens:
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
  with _telling(path):
    content = files.load_json(path)
    version = content["format"]
    has_boundaries = bool(content["unigram"])
  if version != FORMAT:
    raise UserError(f"{path}: expected format {FORMAT}, got {version}, of another version of dpjax")
  encoder = open_encoder(folder, boundaries if has_boundaries else None)
  with _telling(path):
    return _assemble(content, _find_arrays(content, folder, data_dir), encoder)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
  """Tells the errors of reading a data.json."""
  try:
    yield
  except OSError as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
    raise UserError(
      f"{path}: expected the counts of tokens, got damaged JSON ({error!r})"
    ) from error


def _assemble(content: files.JsonObject, folder: Path, encoder: Encoder) -> Tokens:
  """The tokens in a folder that the content of a data.json describes."""
  counts: dict[str, Counts] = {split: content["splits"][split] for split in SPLITS}
  for each in counts.values():
    for unit in ("tokens", "characters", "words", "bytes"):
      if type(each[unit]) is not int or each[unit] < 1:
        raise ValueError(f"{each[unit]!r} {unit}")
  checksums = {str(x): str(y) for x, y in dict(content["checksums"]).items()}
  sizes = {split: counts[split]["tokens"] for split in SPLITS}
  boundaries = None
  if content["unigram"]:
    boundaries = _Arrays(folder, ".boundaries.bin", np.uint8, sizes, checksums)
  documents = None
  num_documents = {x: each["documents"] for x, each in counts.items() if "documents" in each}
  if len(num_documents) == len(counts):
    documents = _Arrays(folder, ".documents.bin", np.int64, num_documents, checksums)
  return Tokens(
    str(content["name"]),
    encoder.tokenizer,
    _Arrays(folder, ".bin", encoder.dtype, sizes, checksums),
    counts,
    boundaries=boundaries,
    fitted=encoder.fitted,
    text_boundaries=encoder.boundaries,
    folder=folder,
    checksums=checksums,
    documents=documents,
  )


def _find_arrays(content: files.JsonObject, folder: Path, data_dir: str | Path) -> Path:
  """The folder of the arrays: this one, or the one that it refers to, which may have moved."""
  if "tokens" not in content:
    return folder
  tokens = Path(os.path.normpath(folder.resolve() / content["tokens"]))
  moved = Path(data_dir, "tokens", tokens.name)
  return moved if (moved / "train.bin").exists() and not tokens.exists() else tokens
