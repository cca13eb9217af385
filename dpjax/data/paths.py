"""Texts by path: files, plain or compressed, and folders of files, cut into three splits."""

import bisect
import hashlib
import itertools
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpjax.data import making
from dpjax.data.chunks import Chunks, Text, between_characters
from dpjax.data.documents import BYTE_ORDER_MARK, FileDocuments, JsonLines
from dpjax.data.sources import reading
from dpjax.errors import UserError

SPLITS = ("train", "valid", "test")


def open_path(
  path: Path, split_fractions: Sequence[float], field: str, texts: Path
) -> tuple[str, dict[str, Text], dict]:
  """Opens a path as `dpjax.data.corpora.load_corpus` describes.

  Args:
    path: a file or a folder.
    split_fractions: the shares of the splits, for a text without splits.
    field: the field of the text in .jsonl.
    texts: the folder for decompressed files.

  Returns:
    A name, the splits, and the identity of their files, as JSON values.

  Raises:
    UserError: the path or the fractions cannot be used.
  """
  try:
    if path.is_dir():
      return _from_folder(path, split_fractions, field, texts)
    plain = _unpacked(path, texts)
    content = _open(plain)
    name = (path if plain == path else Path(path.stem)).stem
    about: dict[str, Any] = {"files": [_identity(path)], "split_fractions": list(split_fractions)}
    if plain.suffix != ".jsonl":
      return name, dict(cut_splits(content, split_fractions, str(path))), about
    lines = cut_splits(content, split_fractions, str(path), whole_lines=True)
    splits: dict[str, Text] = {x: JsonLines(stretch, field) for x, stretch in lines.items()}
    return name, splits, {**about, "text_field": field}
  except OSError as error:
    raise UserError(
      f"data.path: expected a readable text file or folder, got "
      f"{error.filename or path} ({error.strerror})"
    ) from error


def _from_folder(
  path: Path, split_fractions: Sequence[float], field: str, texts: Path
) -> tuple[str, dict[str, Text], dict]:
  """The splits in a folder, or its files as documents."""
  found = {split: _find_split(path, split) for split in SPLITS}
  if not any(found.values()) and (files := _text_files(path)):
    about = {"documents": _identities(files), "split_fractions": list(split_fractions)}
    return path.name, _cut_files(files, split_fractions, path), about
  splits: dict[str, Any] = {}
  about: dict[str, Any] = {"files": []}
  for split, file in found.items():
    if file is None:
      splits[split] = open_split(path, split)  # which says what is missing
    elif not file.suffix:
      files = _text_files(file)
      if not files:
        raise UserError(f"data.path: expected .txt files, each a document, got none in {file}")
      splits[split] = FileDocuments(files, sum(x.stat().st_size for x in files))
      about["files"].append(_identities(files))
    else:
      plain = _unpacked(file, texts)
      content = _open(plain)
      splits[split] = Chunks(content, _begin(content), len(content), str(file))
      about["files"].append(_identity(file))
      if plain.suffix == ".jsonl":
        splits[split] = JsonLines(splits[split], field)
        about["text_field"] = field
  return path.name, splits, about


def _find_split(folder: Path, split: str) -> Path | None:
  """The file of a split, or the folder of its documents; None without either."""
  stems = (split, "validation") if split == "valid" else (split,)
  kinds = [kind + packing for kind in (".txt", ".jsonl") for packing in reading.OPENERS]
  places = [folder / f"{stem}{kind}" for kind in (*kinds, "") for stem in stems]
  return next((x for x in places if (x.is_dir() if x.name in stems else x.exists())), None)


def _text_files(folder: Path) -> list[Path]:
  endings = tuple(f".txt{packing}" for packing in reading.OPENERS)
  return sorted(x for x in folder.rglob("*.txt*") if x.name.endswith(endings) and x.is_file())


def _cut_files(files: Sequence[Path], fractions: Sequence[float], source: Path) -> dict:
  """Divides whole files among the splits by size on disk, at least one to each."""
  if len(files) < len(SPLITS):
    raise UserError(
      f"data.path: expected files for three splits, each a document, got {len(files)} in {source}"
    )
  sizes = [file.stat().st_size for file in files]
  ends = list(itertools.accumulate(sizes))
  first, second = (bisect.bisect(ends, ends[-1] * x) for x in (fractions[0], 1 - fractions[2]))
  first = min(max(1, first), len(files) - 2)
  second = min(max(first + 1, second), len(files) - 1)
  stretches = (slice(first), slice(first, second), slice(second, None))
  return {x: FileDocuments(files[y], sum(sizes[y])) for x, y in zip(SPLITS, stretches, strict=True)}


def _unpacked(path: Path, texts: Path) -> Path:
  """The path of a plain file; a compressed one is decompressed once."""
  if path.suffix == "" or path.suffix not in reading.OPENERS or not path.is_file():
    return path
  digits = _identities([path])[:8]
  target = texts / f"{Path(path.stem).stem}_{digits}{Path(path.stem).suffix or '.txt'}"

  def make(folder: Path) -> dict[str, Any]:
    with (folder / target.name).open("wb") as file:
      for piece in reading.text_file(path):
        file.write(piece.encode())
      file.flush()
      os.fsync(file.fileno())
      return {"size": file.tell()}

  making.make_once(target, {"unpacked": _identity(path)}, make, is_file=True)
  return target


def _identities(files: Sequence[Path]) -> str:
  """`_identity` of many files, short."""
  return hashlib.sha256(json.dumps([*map(_identity, files)]).encode()).hexdigest()


def _identity(path: Path) -> list:
  """The path, size and time of a file, which differ for another text."""
  found = path.stat()
  return [str(path.resolve()), found.st_size, found.st_mtime_ns]


def _open(path: Path) -> mmap.mmap:
  # Opening a pipe would wait, and some devices never end.
  if path.exists() and not path.is_file():
    raise UserError(
      f"data.path: expected a readable text file or folder, got {path} (no regular file)"
    )
  with path.open("rb") as file:
    if path.stat().st_size == 0:
      raise UserError(f"data.path: expected a text, got the empty file {path}")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def open_split(folder: Path, split: str) -> Chunks:
  """The text of a split in a folder.

  Raises:
    UserError: it is missing or empty.
  """
  names = [f"{split}.txt"] + ["validation.txt"] * (split == "valid")
  path = next((folder / name for name in names if (folder / name).exists()), None)
  if path is None:
    raise UserError(
      f"data.path: expected {' or '.join(names)} in the folder, or as .jsonl, packed, or a folder "
      f"of documents, got {folder} without"
    )
  content = _open(path)
  return Chunks(content, _begin(content), len(content), str(path))


def cut_splits(
  content, fractions: Sequence[float], source: str, *, whole_lines: bool = False
) -> dict[str, Chunks]:
  """Cuts a text into three, in order, by bytes; a split with the share 0 is empty.

  Args:
    content: bytes, or a mapped file.
    fractions: the shares of the splits.
    source: the name of the text in messages.
    whole_lines: whether to cut only at line ends, however long the lines are.

  Raises:
    UserError: the text is too short.
  """
  size = len(content)
  valid, test = (int(size * fraction) for fraction in fractions[1:])
  if whole_lines:
    second = content.rfind(b"\n", 0, size - test) + 1
    first = content.rfind(b"\n", 0, max(0, min(size - valid - test, second - 1))) + 1
  else:
    first = _line_end(content, 0, size - valid - test)
    second = _line_end(content, first, size - test) if valid else first
  second = second if test else size
  stretches: dict[str, tuple[int, int]] = {
    "train": (_begin(content), first),
    "valid": (first, second),
    "test": (second, size),
  }
  wanted = [split for split, share in zip(SPLITS, fractions, strict=True) if share]
  if any(begin == end for begin, end in (stretches[split] for split in {"train", *wanted})):
    raise UserError(
      f"data.path: expected a text long enough for three splits, got {size} bytes in {source}"
    )
  return {split: Chunks(content, *stretches[split], source) for split in SPLITS}


def _begin(content) -> int:
  """The beginning of a text, after a byte-order mark if there is one."""
  return len(BYTE_ORDER_MARK) if content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0


def _line_end(content, begin: int, end: int) -> int:
  """The last line end in the second half of begin .. end, or `end` if there is none."""
  line_end = content.rfind(b"\n", (begin + end) // 2, end) + 1
  return line_end or between_characters(content, end)
