"""A corpus as tokens on disk: encoded once, memory-mapped ever after.

A folder holds {train,valid,test}.bin (uint16, or int32 where there are more than 65,536
ids), tokenizer.json, and data.json with what can be counted.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dpjax.data.corpora import SPLITS, Corpus
from dpjax.text.tokens import Tokenizer, tokenizer_from_json, train_tokenizer

FORMAT = 1
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
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]
  counts: Mapping[str, dict]


def prepare(corpus: Corpus, folder: str | Path, kind: str, **settings) -> Prepared:
  """Makes a tokenizer on the train split, and writes the tokens of every split.

  The folder appears at the end, whole; one that an earlier call made is replaced.

  Args:
    corpus: the text.
    folder: where to write; beside it, `<folder>.partial` is used on the way.
    kind: of the tokenizer.
    **settings: of the tokenizer, as `dpjax.text.tokens.train_tokenizer` takes them.

  Returns:
    `open_prepared(folder)`.

  Raises:
    ValueError: of the text (`data.path: ...`) or the tokenizer (`data.tokenizer...`), or
      there is a folder that holds something else.
    OSError: the folder cannot be written.
  """
  folder = Path(folder)
  if folder.exists() and any(folder.iterdir()) and not (folder / "data.json").exists():
    raise ValueError(f"workdir: expected room for prepared data, got {folder}, which "
                     "holds something else")
  counts = {split: count_text(chunks) for split, chunks in corpus.splits.items()}
  tokenizer = train_tokenizer(kind, corpus.splits["train"], **settings)
  dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
  partial = folder.with_name(folder.name + ".partial")
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  try:
    for split, chunks in corpus.splits.items():
      tokens = _write_tokens(chunks, tokenizer, dtype, partial / f"{split}.bin", split)
      if not tokens:
        raise ValueError(f"data.path: expected tokens in every split, got none in the "
                         f"{split} split of {corpus.name}")
      counts[split] = {"tokens": tokens, **counts[split]}
    _write_text(partial / "tokenizer.json", tokenizer.to_json())
    content = {"format": FORMAT, "name": corpus.name, "dtype": dtype.name,
               "splits": counts}
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
    sizes = {split: int(counts[split]["tokens"]) * dtype.itemsize for split in SPLITS}
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: expected the counts of prepared data, got damaged JSON "
                     f"({error!r})") from error
  if version > FORMAT:
    raise ValueError(f"{path}: expected a format up to {FORMAT}, got {version}: a "
                     "later version of dpjax wrote it")
  splits = {}
  for split, size in sizes.items():
    file = folder / f"{split}.bin"
    found = file.stat().st_size if file.exists() else "no such file"
    if found != size:
      raise ValueError(f"{file}: expected {size} bytes, got {found}")
    splits[split] = np.memmap(file, dtype, "r")
  tokenizer = tokenizer_from_json(_read_text(folder / "tokenizer.json"))
  return Prepared(name, tokenizer, splits, counts)


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


def _write_tokens(chunks, tokenizer, dtype, path: Path, split: str) -> int:
  tokens = 0
  quiet = len(chunks) < _LARGE_BYTES
  with path.open("wb") as file, tqdm(total=len(chunks), desc=f"encoding {split}",
                                     unit="B", unit_scale=True, disable=quiet) as bar:
    for chunk in chunks:
      ids = tokenizer.encode(chunk).astype(dtype)
      file.write(ids.tobytes())
      tokens += len(ids)
      if not quiet:
        bar.update(len(chunk.encode()))
  return tokens


def _write_text(path: Path, text: str) -> None:
  path.write_text(text, encoding="utf-8", newline="\n")


def _read_text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: expected a readable file of prepared data, got "
                     f"{error}") from error
