"""A corpus as tokens on disk: encoded once, then memory-mapped.

  train.bin ...             ids, uint16, or int32 for more than 65,536 of them
  train.boundaries.bin ...  boundaries of the text, uint8, one for each token
  train.documents.bin ...   the first token of each document, int64, increasing
  tokenizer.json, unigram.model (what the boundaries learned)
  data.json                 counts, and the checksums of the .bin files

All runs share these folders of data_dir/tokens. A run's own folder, a reference, has only the
small files and, in data.json, the path of the others.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import files
from dpjax.data.corpus import SPLITS, Corpus, Text
from dpjax.data.encoding import Encoder, Progress, encode_text
from dpjax.errors import UserError
from dpjax.text.tokens import CHARACTER_KINDS, Tokenizer, tokenizer_from_json, train_tokenizer

FORMAT = 1
LEARN_BYTES = 2**30  # of text, that a vocabulary is learned from at most
UNITS = ("tokens", "characters", "words", "bytes")
_LEARNED = "unigram.model"  # of any kind of boundaries


class _Arrays(collections.UserDict[str, Any]):
  """The array of each split, in a file of its own, mapped; the first use reads it all to check."""

  def __init__(
    self, folder: Path, suffix: str, dtype: Any, sizes: Mapping[str, int], sums: Mapping[str, str]
  ):
    self._dtype, self._unchecked = np.dtype(dtype), {**sums}
    item = self._dtype.itemsize
    self.data = {x: (folder / f"{x}{suffix}", int(sizes[x]) * item) for x in sizes}

  def __getitem__(self, split: str) -> np.memmap:
    path, size = self.data[split]
    found = path.stat().st_size if path.exists() else "no such file"
    if found != size:
      raise UserError(
        f"{path}: expected {size} bytes, got {found}; `dpjax train --workdir=RUN --tokenize_only` "
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
    tokenizer: the one that made its tokens.
    splits: "train", "valid", "test": ids [N], uint16 or int32.
    counts: for each split, "tokens", "characters", "words", "bytes" and the text's "sha256".
      Words are separated by white space, and each line end counts as a word. Of a mixture also
      "sources", the tokens of each source, which follow each other.
    boundaries: None, or for each split the boundaries of its text, 0 or 1, uint8 [N].
    learned: what their kind learned from the train split, b"" if nothing.
    kind: None, or their kind (`dpjax.layers.Boundaries`), for other texts.
    folder: the folder of the files.
    checksums: SHA-256 of the .bin files, by name.
    documents: None, or for each split the first tokens of documents, int64, increasing from 0.
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
    """Reads whole splits, all by default, that were not used before.

    Raises:
      UserError: a file is missing or has changed; the message names it.
    """
    for split in splits or self.splits:
      for arrays in filter(None, (self.splits, self.boundaries, self.documents)):
        arrays[split]  # noqa: B018  (raises what is wrong with the file)

  def segment(self, text: str) -> np.ndarray:
    """The boundaries of another text's tokens, uint8 [number of tokens].

    Raises:
      UserError: these tokens were made or opened without.
    """
    if self.boundaries is None or self.kind is None:
      raise UserError(f"data: expected {self.name} with boundaries of the text, got it without")
    return _encoder(self.tokenizer, self.kind, self.learned)(text)[1]


def tokenize(
  corpus: Corpus,
  folder: str | Path,
  kind: str | Tokenizer,
  *,
  shared: bool = False,
  boundaries: Any = None,
  **settings: Any,
) -> Tokens:
  """Trains a tokenizer on the train split, and writes the tokens of every split, once.

  Opens existing tokens of the same text and settings, and replaces others. Continues what a stopped
  process began. A vocabulary is learned from at most 1 GiB, spread over the train split.

  Args:
    corpus: the text. If its `about` is empty, it counts as a new text each time.
    folder: receives the files.
    kind: the kind of the tokenizer, or the tokenizer itself.
    shared: whether to write into a subfolder of `folder`, named after its content.
    boundaries: None, or a kind of boundaries that needs the text, such as
      `dpjax.layers.Unigram`. Only with the tokenizers "characters" and "bytes".
    **settings: of a tokenizer to make; see `dpjax.text.tokens.train_tokenizer`.

  Raises:
    UserError: from the text, tokenizer or boundaries; or the folder cannot be written.
  """
  name, known = (kind.kind, kind) if isinstance(kind, Tokenizer) else (kind, None)
  if known is None and settings.get("file"):
    whole = {key: value for key, value in settings.items() if key != "restrict"}
    known = train_tokenizer(name, (), **whole)
  has_boundaries = boundaries is not None
  if has_boundaries and name not in CHARACTER_KINDS:
    raise UserError(
      f"data.tokenizer: expected {' or '.join(CHARACTER_KINDS)} with "
      f"{type(boundaries).__name__} boundaries, got {name}"
    )
  made: dict[str, Any] = {
    "corpus": dict(corpus.about) or {"unknown": time.time_ns()},
    "sizes": {split: len(text) for split, text in corpus.splits.items()},
    "kind": name,
    **{key: settings.get(key, False) for key in ("lower_text", "lower_pieces", "restrict")},
  }
  if known is not None:
    made["vocabulary"] = _digest(known.to_json())
  elif name not in CHARACTER_KINDS:
    made["vocab_size"] = settings.get("vocab_size", 0)
  if has_boundaries:
    made["unigram"] = boundaries.key
  folder = Path(folder)
  if shared:
    folder /= (
      f"{files.short_name(corpus.name)}_{name}_{_digest(json.dumps(made, sort_keys=True))[:8]}"
    )
  inputs = {"format": FORMAT, "name": corpus.name, "unigram": has_boundaries, "made": made}

  def build(partial: Path) -> dict[str, Any]:
    progress = Progress(partial, json.loads(json.dumps(inputs)))
    if progress.splits:
      tokenizer, learned = _open_encoder(partial, boundaries)
    else:
      given = kind if known is None or settings.get("restrict") else known
      tokenizer, learned = _learn(corpus, given, boundaries, settings)
      _write_encoder(partial, tokenizer, learned)
    encoder = _encoder(tokenizer, boundaries, learned)
    counts = {}
    for split, text in corpus.splits.items():
      counts[split] = encode_text(text, encoder, partial, split, progress)
      if missing := [unit for unit in ("tokens", "words") if not counts[split][unit]]:
        where = f"the {split} split of {corpus.name}"
        raise UserError(f"data.path: expected {missing[0]} in every split, got none in {where}")
    checksums = {path.name: files.checksum(path) for path in sorted(partial.glob("*.bin"))}
    (partial / files.PROGRESS).unlink(missing_ok=True)
    for _ in files.left_beside(partial / files.PROGRESS):
      pass
    return {"dtype": encoder.dtype.name, "splits": counts, "checksums": checksums}

  files.build_once(folder, inputs, build)
  return open_tokens(folder, boundaries=boundaries)


def _digest(content: str) -> str:
  return hashlib.sha256(content.encode()).hexdigest()


class _Sample:
  """Parts of a text, spread evenly, up to `LEARN_BYTES` of them."""

  def __init__(self, text: Text):
    self._text = text
    self.error: ValueError | None = None  # in reading the text; libraries wrap it

  def __iter__(self) -> Iterator[str]:
    share = min(1.0, LEARN_BYTES / max(1, len(self._text)))
    seen = given = 0
    try:
      for part in self._text:
        seen += len(part)
        if given >= LEARN_BYTES:  # The length is that of packed files.
          return
        if given < seen * share:
          given += len(part)
          yield part
    except ValueError as error:
      self.error = error
      raise


def _learn(
  corpus: Corpus, kind: str | Tokenizer, boundaries: Any, settings: Mapping
) -> tuple[Tokenizer, bytes]:
  """The tokenizer of a text, and what its boundaries learn."""
  text = corpus.splits["train"]
  sample = _Sample(text)
  try:
    if not isinstance(kind, Tokenizer):
      is_whole = kind in CHARACTER_KINDS or settings.get("file")
      kind = train_tokenizer(kind, text if is_whole else sample, **settings)
    return kind, b"" if boundaries is None else boundaries.fit(sample)
  except ValueError as error:
    raise sample.error or error from error


def _encoder(tokenizer: Tokenizer, boundaries: Any, learned: bytes) -> Encoder:
  of_text = None if boundaries is None else functools.partial(boundaries.compute, fitted=learned)
  return Encoder(tokenizer, of_text)


def _write_encoder(folder: Path, tokenizer: Tokenizer, learned: bytes) -> None:
  if learned:
    (folder / _LEARNED).write_bytes(learned)
  (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")


def _open_encoder(folder: Path, boundaries: Any) -> tuple[Tokenizer, bytes]:
  """The tokenizer and what boundaries learned, as `_write_encoder` wrote them."""
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizer_from_json(files.read_file(path).decode())
    path = folder / _LEARNED
    learned = files.read_file(path) if path.exists() else b""
    if boundaries is not None:
      _encoder(tokenizer, boundaries, learned)("")
  except (OSError, ValueError) as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  return tokenizer, learned


def write_reference(data: Tokens, folder: str | Path, *, is_export: bool = False) -> None:
  """Makes a folder with what a model needs of its tokens, and the path of the others.

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
    _write_encoder(partial, data.tokenizer, data.learned)
    files.write_json(partial / files.RECORD, content)


def open_tokens(
  folder: str | Path,
  data_dir: str | Path = "",
  boundaries: Any = None,
  *,
  is_checked: bool = False,
) -> Tokens:
  """Opens a folder that `tokenize` or `write_reference` wrote.

  Args:
    folder: the folder with data.json.
    data_dir: "", or where to look for the tokens of a reference that was moved.
    boundaries: None, or the kind that `tokenize` was given, for other texts.
    is_checked: whether the files were checked just now, so that first use reads none whole.

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
      given = Path(os.path.normpath(folder.resolve() / content["tokens"]))
      moved = Path(data_dir, "tokens", given.name)
      tokens = moved if (moved / "train.bin").exists() and not given.exists() else given
    sizes = {split: counts[split]["tokens"] for split in SPLITS}
    sums = {} if is_checked else checksums
    splits = _Arrays(tokens, ".bin", dtype, sizes, sums)
    kind = arrays = documents = None
    if content["unigram"]:
      kind, arrays = boundaries, _Arrays(tokens, ".boundaries.bin", np.uint8, sizes, sums)
    if all("documents" in counts[split] for split in SPLITS):
      sizes = {split: counts[split]["documents"] for split in SPLITS}
      documents = _Arrays(tokens, ".documents.bin", np.int64, sizes, sums)
  except OSError as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
    raise UserError(
      f"{path}: expected the counts of tokens, got damaged JSON ({error!r})"
    ) from error
  if version != FORMAT:
    raise UserError(f"{path}: expected format {FORMAT}, got {version}, of another dpjax")
  tokenizer, learned = _open_encoder(folder, kind)
  return Tokens(
    name, tokenizer, splits, counts, arrays, learned, kind, tokens, checksums, documents
  )
