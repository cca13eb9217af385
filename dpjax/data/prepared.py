"""A corpus as tokens on disk: encoded once, memory-mapped ever after.

A folder holds {train,valid,test}.bin (uint16, or int32 where there are more than 65,536
ids), tokenizer.json, and data.json with what can be counted; with Unigram boundaries
also {train,valid,test}.boundaries.bin (uint8, one a token) and unigram.model.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dpjax.data.corpora import SPLITS, Corpus
from dpjax.text.tokens import (
  CHARACTER_KINDS,
  Tokenizer,
  tokenizer_from_json,
  train_tokenizer,
)
from dpjax.text.unigram import (
  UnigramBoundaries,
  load_unigram,
  train_unigram,
  whole_words,
)

FORMAT = 1  # with and without boundaries: who does not know of them reads the rest alike
_LARGE_BYTES = 2**25  # from here on a bar is shown


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A corpus that is ready to be batched.

  Attributes:
    name: the corpus's.
    tokenizer: the one its tokens are of.
    splits: "train", "valid", "test": ids [N], uint16 or int32, mapped read-only.
    counts: of each split: "tokens", "characters", "words", "bytes", "sha256" (of the
      text). Words are separated by white space, and each line end counts as one.
    boundaries: None, or of each split the Unigram boundaries of its tokens: 0 or 1,
      uint8 [N], mapped read-only.
    unigram: None, or what gives those of another text.
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]
  counts: Mapping[str, dict]
  boundaries: Mapping[str, np.ndarray] | None = None
  unigram: UnigramBoundaries | None = None

  def segment(self, text: str) -> np.ndarray:
    """The Unigram boundaries of another text's tokens, uint8 [number of tokens].

    Raises:
      ValueError: the data were prepared without.
    """
    if self.unigram is None:
      raise ValueError(f"data: expected {self.name} with Unigram boundaries, got it "
                       "prepared without")
    return self.unigram.of_tokens(text, self.tokenizer)


def prepare(
  corpus: Corpus,
  folder: str | Path,
  kind: str,
  *,
  unigram: Mapping | None = None,
  **settings,
) -> Prepared:
  """Makes a tokenizer on the train split, and writes the tokens of every split.

  The folder appears at the end, whole; one that an earlier call made is replaced.

  Args:
    corpus: the text.
    folder: where to write; beside it, `<folder>.partial` is used on the way.
    kind: of the tokenizer.
    unigram: None, or, for boundaries, {"file": a SentencePiece `.model` to load, or ""
      to learn one on the train split, "vocab_size": how many pieces to learn}. With
      the kinds "characters" and "bytes" only.
    **settings: of the tokenizer, as `dpjax.text.tokens.train_tokenizer` takes them.

  Returns:
    `open_prepared(folder)`.

  Raises:
    ValueError: of the text (`data.path: ...`), the tokenizer (`data.tokenizer...`) or
      the boundaries (`data.unigram_...`), or there is a folder that holds something
      else.
    OSError: the folder cannot be written.
  """
  folder = Path(folder)
  if folder.exists() and any(folder.iterdir()) and not (folder / "data.json").exists():
    raise ValueError(f"workdir: expected room for prepared data, got {folder}, which "
                     "holds something else")
  if unigram is not None and kind not in CHARACTER_KINDS:
    raise ValueError(f"data.tokenizer: expected {' or '.join(CHARACTER_KINDS)} with "
                     f"Unigram boundaries, got {kind}")
  counts = {split: count_text(chunks) for split, chunks in corpus.splits.items()}
  tokenizer = train_tokenizer(kind, corpus.splits["train"], **settings)
  segmentation = None if unigram is None else _segmentation(corpus, **unigram)
  dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
  partial = folder.with_name(folder.name + ".partial")
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  try:
    for split, chunks in corpus.splits.items():
      tokens = _write_array(partial / f"{split}.bin", chunks, len(chunks),
                            lambda chunk: tokenizer.encode(chunk).astype(dtype),
                            f"encoding {split}")
      if not tokens:
        raise ValueError(f"data.path: expected tokens in every split, got none in the "
                         f"{split} split of {corpus.name}")
      counts[split] = {"tokens": tokens, **counts[split]}
      if segmentation is not None:
        _write_array(partial / f"{split}.boundaries.bin", whole_words(chunks), len(chunks),
                     lambda part: segmentation.of_tokens(part, tokenizer),
                     f"segmenting {split}")
    _write_text(partial / "tokenizer.json", tokenizer.to_json())
    content = {"format": FORMAT, "name": corpus.name, "dtype": dtype.name,
               "splits": counts}
    if segmentation is not None:
      (partial / "unigram.model").write_bytes(segmentation.model)
      content["unigram"] = True
    _write_text(partial / "data.json", json.dumps(content, indent=2))
    if (folder / "data.json").exists():
      shutil.rmtree(folder)
    os.replace(partial, folder)
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return open_prepared(folder)


def open_prepared(folder: str | Path) -> Prepared:
  """Opens what `prepare` wrote.

  Raises:
    ValueError: a file is missing, shorter or longer than it was, or damaged; the
      message names it.
  """
  folder = Path(folder)
  path = folder / "data.json"
  text = _read_text(path)
  try:
    content = json.loads(text)
    name, dtype = content["name"], np.dtype(content["dtype"])
    version, counts = int(content["format"]), content["splits"]
    sizes = {split: int(counts[split]["tokens"]) for split in SPLITS}
    has_boundaries = bool(content.get("unigram", False))
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: expected the counts of prepared data, got damaged JSON "
                     f"({error!r})") from error
  if version > FORMAT:
    raise ValueError(f"{path}: expected a format up to {FORMAT}, got {version}: a "
                     "later version of dpjax wrote it")
  splits = {split: _map(folder / f"{split}.bin", dtype, size)
            for split, size in sizes.items()}
  tokenizer = tokenizer_from_json(_read_text(folder / "tokenizer.json"))
  if not has_boundaries:
    return Prepared(name, tokenizer, splits, counts)
  boundaries = {split: _map(folder / f"{split}.boundaries.bin", np.dtype(np.uint8), size)
                for split, size in sizes.items()}
  path = folder / "unigram.model"
  try:
    unigram = UnigramBoundaries(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: expected the Unigram model of prepared data, got "
                     f"another file, or none ({error})") from error
  return Prepared(name, tokenizer, splits, counts, boundaries, unigram)


def count_text(chunks: Iterable[str]) -> dict:
  r"""Counts a text that comes in parts.

  ["to b", "e\n"]  ->  {"characters": 6, "words": 3, "bytes": 6, "sha256": ...}
  """
  sha256 = hashlib.sha256()
  characters = words = num_bytes = 0
  in_word = False
  for chunk in filter(None, chunks):
    encoded = chunk.encode()
    sha256.update(encoded)
    characters += len(chunk)
    num_bytes += len(encoded)
    words += len(chunk.split()) + chunk.count("\n")
    words -= in_word and not chunk[:1].isspace()  # the same word, begun in the last one
    in_word = not chunk[-1:].isspace()
  return {"characters": characters, "words": words, "bytes": num_bytes,
          "sha256": sha256.hexdigest()}


def _segmentation(corpus: Corpus, file: str = "", vocab_size: int = 0):
  if file:
    return UnigramBoundaries(load_unigram(file))
  return UnigramBoundaries(train_unigram(corpus.splits["train"], vocab_size))


def _write_array(
  path: Path,
  parts: Iterable[str],
  num_bytes: int,
  convert: Callable[[str], np.ndarray],
  title: str,
) -> int:
  """Writes what the parts of a text become, and says how many numbers they are."""
  size = 0
  quiet = num_bytes < _LARGE_BYTES
  with path.open("wb") as file, tqdm(total=num_bytes, desc=title, unit="B",
                                     unit_scale=True, disable=quiet) as bar:
    for part in parts:
      array = convert(part)
      file.write(array.tobytes())
      size += len(array)
      if not quiet:
        bar.update(len(part.encode()))
  return size


def _map(path: Path, dtype: np.dtype, size: int) -> np.memmap:
  expected = size * dtype.itemsize
  found = path.stat().st_size if path.exists() else "no such file"
  if found != expected:
    raise ValueError(f"{path}: expected {expected} bytes, got {found}")
  return np.memmap(path, dtype, "r")


def _write_text(path: Path, text: str) -> None:
  path.write_text(text, encoding="utf-8", newline="\n")


def _read_text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: expected a readable file of prepared data, got "
                     f"{error}") from error
