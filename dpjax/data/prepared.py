"""A corpus as tokens on disk: encoded once, then memory-mapped.

A folder holds {train,valid,test}.bin (uint16, or int32 for more than 65,536 ids),
tokenizer.json, and data.json with counts and the checksums of the .bin files. With boundaries
of the text it also has {train,valid,test}.boundaries.bin (uint8, one for each token) and what
their kind learned, as unigram.model; for a text that knows its documents,
{train,valid,test}.documents.bin (int64, increasing: the first token of each document).

These folders are in data_dir/tokens, shared by all runs. A run's own folder has only the
small files; "tokens" in its data.json is the path of the others.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.data import making
from dpjax.data.chunks import Sample
from dpjax.data.corpora import SPLITS, Corpus
from dpjax.data.encoding import Counter, Encoder, encode_text
from dpjax.errors import UserError
from dpjax.text.tokens import (
  CHARACTER_KINDS,
  Tokenizer,
  tokenizer_from_json,
  train_tokenizer,
)

FORMAT = 1  # Readers without boundary support can still read the rest.
_LEARNED = "unigram.model"  # of any kind of boundaries; named after the first one
MOST_BYTES = 2**28  # of a vocabulary
UNITS = ("tokens", "characters", "words", "bytes")


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A corpus that is ready for batches.

  Attributes:
    name: the name of the corpus.
    tokenizer: the tokenizer that made its tokens.
    splits: "train", "valid", "test": ids [N], uint16 or int32, mapped read-only at first use;
      a model works without its tokens.
    counts: for each split, "tokens", "characters", "words", "bytes" and the text's "sha256".
      Words are separated by white space, and each line end counts as a word.
    boundaries: None, or for each split the boundaries that were computed from its text: 0 or
      1 for each token, uint8 [N], mapped read-only.
    learned: what their kind learned from the train split, b"" if nothing.
    kind: None, or their kind (`dpjax.layers.Boundaries`), for other texts.
    folder: the folder of the files.
    checksums: SHA-256 of the .bin files, by name; {} from earlier versions.
    documents: None, or for each split the places where its documents begin, int64
      [number of documents], increasing from 0, mapped read-only.
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]
  counts: Mapping[str, dict]
  boundaries: Mapping[str, np.ndarray] | None = None
  learned: bytes = b""
  kind: Any = None
  folder: Path = Path()
  checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
  documents: Mapping[str, np.ndarray] | None = None

  @property
  def has_tokens(self) -> bool:
    """Whether the arrays exist and have their sizes."""
    arrays = (self.splits, self.boundaries, self.documents)
    return all(each.are_there() for each in arrays if isinstance(each, _Arrays))

  def check(self, *splits: str) -> None:
    """Reads whole splits, and checks that they have not changed.

    A gigabyte takes less than a second, or as long as the disk needs.

    Args:
      *splits: the names of splits; all by default.

    Raises:
      ValueError: a file has changed, or has ids outside the vocabulary; the message names it.
    """
    for split in splits or self.splits:
      ids = self.splits[split]
      for others in (self.boundaries, self.documents):
        if others is not None:
          others[split]  # noqa: B018  (raises what is wrong with the file)
      for name in (f"{split}.bin", f"{split}.boundaries.bin", f"{split}.documents.bin"):
        expected = self.checksums.get(name)
        if expected is not None and making.checksum(self.folder / name) != expected:
          raise _changed(self.folder / name, "what was prepared", "a file that was changed")
      first, last = ids.min(), ids.max()
      if first < 0 or last >= self.tokenizer.vocab_size:
        raise _changed(
          self.folder / f"{split}.bin",
          f"ids 0 .. {self.tokenizer.vocab_size - 1}",
          f"{first} .. {last}",
        )

  def segment(self, text: str) -> np.ndarray:
    """The boundaries of another text's tokens, uint8 [number of tokens].

    Raises:
      ValueError: the data were prepared, or opened, without boundaries.
    """
    if self.boundaries is None or self.kind is None:
      raise UserError(f"data: expected {self.name} with boundaries of the text, got it without")
    return _encoder(self.tokenizer, self.kind, self.learned)(text)[1]


class _Arrays(Mapping[str, np.ndarray]):
  """The array of each split, in a file of its own, mapped at first use."""

  def __init__(self, folder: Path, ending: str, dtype: np.dtype, sizes: Mapping[str, int]):
    self._folder, self._ending, self._dtype, self._sizes = folder, ending, dtype, sizes

  def __getitem__(self, split: str) -> np.memmap:
    path, expected, found = self._sizes_of(split)
    if found != expected:
      raise UserError(
        f"{path}: expected {expected} bytes, got {'no such file' if found is None else found}; "
        "`dpjax train --workdir=RUN --tokenize_only` makes the tokens of a run again"
      )
    return np.memmap(path, self._dtype, "r")

  def are_there(self) -> bool:
    """Whether all files exist and have their sizes."""
    return all(found == expected for _, expected, found in map(self._sizes_of, self))

  def _sizes_of(self, split: str) -> tuple[Path, int, int | None]:
    """The file of a split, its expected size and its size in bytes."""
    path = self._folder / f"{split}{self._ending}"
    found = path.stat().st_size if path.exists() else None
    return path, self._sizes[split] * self._dtype.itemsize, found

  def __iter__(self) -> Iterator[str]:
    return iter(self._sizes)

  def __len__(self) -> int:
    return len(self._sizes)


def prepare(
  corpus: Corpus,
  folder: str | Path,
  kind: str | Tokenizer,
  *,
  shared: bool = False,
  boundaries: Any = None,
  **settings: Any,
) -> Prepared:
  """Trains a tokenizer on the train split, and writes the tokens of every split, once.

  If tokens of the same text and settings exist, they are opened; others are replaced. A
  killed call leaves `<folder>.partial`; the next call continues from its complete splits.
  Memory does not grow with the text. A vocabulary is learned from at most 1 GiB, spread evenly
  over the train split.

  Args:
    corpus: the text. If its `about` is empty, it counts as a new text each time.
    folder: receives the files.
    kind: the kind of the tokenizer, or the tokenizer itself.
    shared: whether to write into a subfolder of `folder`, named after its content.
    boundaries: None, or a kind of boundaries that needs the text, such as
      `dpjax.layers.Unigram`. Only with the tokenizers "characters" and "bytes".
    **settings: settings of a tokenizer to make; see `dpjax.text.tokens.train_tokenizer`.

  Returns:
    The result of `open_prepared` for the folder.

  Raises:
    UserError: from the text (`data.path: ...`), the tokenizer (`data.tokenizer...`) or
      the boundaries (`model.boundaries....`); or the folder holds something else or cannot
      be written.
  """
  made = {
    "corpus": dict(corpus.about) or {"unknown": time.time_ns()},
    "sizes": {split: len(text) for split, text in corpus.splits.items()},
    **_made_of(kind, boundaries, settings),
  }
  if boundaries is not None and made["kind"] not in CHARACTER_KINDS:
    raise UserError(
      f"data.tokenizer: expected {' or '.join(CHARACTER_KINDS)} with "
      f"{type(boundaries).__name__} boundaries, got {made['kind']}"
    )
  folder = Path(folder)
  if shared:
    digits = _digest(json.dumps(made, sort_keys=True).encode())[:8]
    folder /= f"{corpus.name}_{made['kind']}_{digits}"
  _check_replaceable(folder)
  has_boundaries = boundaries is not None
  made_of = {"format": FORMAT, "name": corpus.name, "unigram": has_boundaries, "made": made}

  def make(partial: Path) -> dict[str, Any]:
    encoder = _resume(partial, boundaries)
    if encoder is None:
      tokenizer, learned = _learn(corpus, kind, boundaries, settings)
      if learned:
        (partial / _LEARNED).write_bytes(learned)
      (partial / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
      encoder = _encoder(tokenizer, boundaries, learned)
    counts = {}
    for split, text in corpus.splits.items():
      counts[split] = encode_text(text, len(text), encoder, partial, split)
      for unit in ("tokens", "words"):
        if not counts[split][unit]:
          raise UserError(
            f"data.path: expected {unit} in every split, got none in the "
            f"{split} split of {corpus.name}"
          )
    checksums = {path.name: making.checksum(path) for path in sorted(partial.glob("*.bin"))}
    for split in corpus.splits:
      (partial / f"{split}.json").unlink()
    return {"dtype": encoder.dtype.name, "splits": counts, "checksums": checksums}

  making.make_once(folder, made_of, make)
  return open_prepared(folder, boundaries=boundaries)


def _made_of(kind: str | Tokenizer, boundaries: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings that affect tokens, apart from the text and file names."""
  known = kind if isinstance(kind, Tokenizer) else None
  if known is None and settings.get("file"):
    whole = {key: value for key, value in settings.items() if key != "restrict"}
    known = train_tokenizer(str(kind), (), **whole)
  name = kind.kind if isinstance(kind, Tokenizer) else kind
  made: dict[str, Any] = {"kind": name} | {
    key: settings.get(key, False) for key in ("lower_text", "lower_pieces", "restrict")
  }
  if known is not None:
    made["vocabulary"] = _digest(known.to_json().encode())
  elif name not in CHARACTER_KINDS:
    made["vocab_size"] = settings.get("vocab_size", 0)
  if boundaries is not None:
    made["unigram"] = boundaries.text_settings()
  return made


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def write_reference(tokens: str | Path, folder: str | Path) -> None:
  """Makes a folder with the small files of prepared data, and the path of the others.

  Args:
    tokens: the folder that `prepare` wrote.
    folder: the folder to make; prepared data in it is replaced.

  Raises:
    UserError: the folder holds something else.
    OSError: it cannot be written.
  """
  tokens, folder = Path(tokens).resolve(), Path(folder).resolve()
  _check_replaceable(folder)
  partial = folder.with_name(folder.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  for name in ("tokenizer.json", _LEARNED):
    if (tokens / name).exists():
      shutil.copyfile(tokens / name, partial / name)
  content = making.read_json(tokens / "data.json")
  making.write_json(partial / "data.json", {**content, "tokens": os.path.relpath(tokens, folder)})
  if folder.exists():
    shutil.rmtree(folder)
  os.replace(partial, folder)


def write_small(data: Prepared, folder: Path) -> None:
  """Makes a folder with what a model needs of prepared data: from what was read, no copies.

  `open_prepared` finds its tokens in data_dir.
  """
  folder.mkdir(parents=True)
  (folder / "tokenizer.json").write_text(data.tokenizer.to_json(), encoding="utf-8", newline="\n")
  if data.learned:
    (folder / _LEARNED).write_bytes(data.learned)
  known = (*UNITS, "sha256", "documents")
  content = {
    "format": FORMAT,
    "name": data.name,
    "unigram": data.boundaries is not None,
    "dtype": Encoder(data.tokenizer).dtype.name,
    "splits": {
      split: {x: counts[x] for x in known if x in counts} for split, counts in data.counts.items()
    },
    "checksums": {str(x): str(y) for x, y in data.checksums.items()},
    "tokens": data.folder.name,
  }
  making.write_json(folder / "data.json", content)


def open_prepared(
  folder: str | Path, data_dir: str | Path = "", boundaries: Any = None
) -> Prepared:
  """Opens a folder that `prepare` or `write_reference` wrote.

  Tokens are not opened until `Prepared.check` or the first use of a split.

  Args:
    folder: the folder with data.json.
    data_dir: "", or the folder to search for the tokens of a reference that was moved.
    boundaries: None, or the kind of boundaries that `prepare` was given, for other texts.

  Raises:
    ValueError: a file is missing or damaged; the message names it.
  """
  folder = Path(folder)
  path = folder / "data.json"
  try:
    content = making.load_json(path)
    name, dtype = content["name"], np.dtype(content["dtype"])
    version, counts = int(content["format"]), content["splits"]
    for split in SPLITS:
      _check_counts(counts[split])
    sizes = {split: counts[split]["tokens"] for split in SPLITS}
    has_boundaries = bool(content.get("unigram", False))
    num_documents = {x: y["documents"] for x, y in counts.items() if "documents" in y}
    if any(not isinstance(x, int) or x < 1 for x in num_documents.values()):
      raise UserError(f"{num_documents} documents")
    checksums = dict(content.get("checksums", {}))
    tokens = _find_tokens(folder, content.get("tokens", ""), data_dir)
    if not isinstance(name, str) or dtype not in (np.uint16, np.int32):
      raise UserError(f"the name {name!r} and the type {dtype}")
  except OSError as error:
    raise _unreadable(path, error) from error
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
    raise UserError(
      f"{path}: expected the counts of prepared data, got damaged JSON ({error!r})"
    ) from error
  if version > FORMAT:
    raise UserError(
      f"{path}: expected a format up to {FORMAT}, got {version}: a later version of dpjax wrote it"
    )
  splits = _Arrays(tokens, ".bin", dtype, sizes)
  tokenizer = tokenizer_from_json(_read_text(folder / "tokenizer.json"))
  documents = None
  if num_documents.keys() >= {*SPLITS}:
    documents = _Arrays(tokens, ".documents.bin", np.dtype(np.int64), num_documents)
  places: dict[str, Any] = dict(folder=tokens, checksums=checksums, documents=documents)
  if not has_boundaries:
    return Prepared(name, tokenizer, splits, counts, **places)
  arrays = _Arrays(tokens, ".boundaries.bin", np.dtype(np.uint8), sizes)
  path = folder / _LEARNED
  try:
    learned = making.read_file(path, MOST_BYTES) if path.exists() else b""
    _encoder(tokenizer, boundaries, learned)("")
  except (OSError, ValueError) as error:
    raise UserError(
      f"{path}: expected what the boundaries of prepared data learned, got another file, or none "
      f"({error})"
    ) from error
  return Prepared(name, tokenizer, splits, counts, arrays, learned, boundaries, **places)


def _find_tokens(folder: Path, tokens: str, data_dir: str | Path) -> Path:
  """The folder of the arrays: beside data.json, as in an earlier version, or elsewhere."""
  places = [folder]
  if tokens:
    found = os.path.normpath(folder.resolve() / tokens)
    places = [Path(found), Path(data_dir, "tokens", Path(tokens).name), folder]
  return next((x for x in places if (x / "train.bin").exists()), places[0])


def count_text(chunks: Iterable[str]) -> dict:
  r"""Counts a text in parts, like `dpjax.data.encoding.Counter`.

  ["to b", "e\n"]  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}
  """
  counter = Counter()
  for chunk in chunks:
    counter.add(chunk)
  return counter.result()


def _check_replaceable(folder: Path) -> None:
  if folder.exists() and any(folder.iterdir()) and not (folder / "data.json").exists():
    raise UserError(
      f"workdir: expected room for prepared data, got {folder}, which holds something else"
    )


def _learn(
  corpus: Corpus, kind: str | Tokenizer, boundaries: Any, settings: Mapping
) -> tuple[Tokenizer, bytes]:
  """The tokenizer of a text, and what its boundaries learn."""
  text = corpus.splits["train"]
  sample = Sample(text)
  learns = kind not in CHARACTER_KINDS and not settings.get("file")
  try:
    known = isinstance(kind, Tokenizer)
    tokenizer = kind if known else train_tokenizer(kind, sample if learns else text, **settings)
    return tokenizer, b"" if boundaries is None else boundaries.learn(sample)
  except ValueError as error:
    # Libraries wrap what goes wrong within the text that they are given.
    raise sample.error or error from error


def _encoder(tokenizer: Tokenizer, boundaries: Any, learned: bytes) -> Encoder:
  if boundaries is None:
    return Encoder(tokenizer)
  return Encoder(tokenizer, functools.partial(boundaries.of_text, learned=learned))


def _resume(folder: Path, boundaries: Any) -> Encoder | None:
  """The encoder of an interrupted call, or None if it had none yet."""
  try:
    tokenizer = tokenizer_from_json(_read_text(folder / "tokenizer.json"))
    path = folder / _LEARNED
    return _encoder(tokenizer, boundaries, path.read_bytes() if path.exists() else b"")
  except (OSError, ValueError):
    return None


def _check_counts(counts: Mapping) -> None:
  for unit in UNITS:
    if type(counts[unit]) is not int or counts[unit] < 1:
      raise UserError(f"{counts[unit]!r} {unit}")
  if not isinstance(counts["sha256"], str):
    raise UserError(f"the checksum {counts['sha256']!r}")


def _changed(path: Path, expected: str, got: str) -> UserError:
  return UserError(
    f"{path}: expected {expected}, got {got}; put a copy in its place, or remove "
    f"{path.resolve().parent}, which training with the run's settings makes again"
  )


def _read_text(path: Path) -> str:
  try:
    return making.read_file(path, MOST_BYTES).decode()
  except (OSError, ValueError) as error:
    raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
  return UserError(f"{path}: expected a readable file of prepared data, got {error}")
