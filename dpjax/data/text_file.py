"""A text on disk: the bytes of a UTF-8 file, its documents, its splits, and its parts to encode."""

import contextlib
import dataclasses
import functools
import itertools
import mmap
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from tqdm import tqdm

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.tokenizer import rate_cut

SPLITS = ("train", "valid", "test")
CHUNK_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class TextFile:
  r"""The bytes `begin` .. `end` - 1 of a UTF-8 file; iteration yields its parts.

    "one\n--\ntwo\n", marks "^--\n"  ->  the documents "one\n--\n" and "two\n"

  A part is a document, or a chunk of about 1 MiB of a text or of a long document. A chunk ends at
  a line end where a cut does not change the subwords (`dpjax.text.tokenizer.rate_cut`); in longer
  lines, before a space; without spaces, between any two characters. The joined parts are exactly
  the text. Iteration raises a `UserError` that names the first byte that is not UTF-8.

  Attributes:
    path: the file.
    begin: its first byte.
    end: one past its last byte.
    offsets: a .npy file with the offsets in `path` at which documents begin, or None.
    marks: a regular expression, in which ^ is the beginning of a line; documents begin with the
      text and after each match. "" if there is none.
  """

  path: Path
  begin: int
  end: int
  offsets: Path | None = None
  marks: str = ""

  def __len__(self) -> int:
    return self.end - self.begin

  def __iter__(self) -> Iterator[str]:
    return (part for chunk in self.chunks() for part, _ in chunk)

  @property
  def has_documents(self) -> bool:
    """Whether it is known where documents begin."""
    return self.offsets is not None or bool(self.marks)

  @functools.cached_property
  def documents(self) -> np.ndarray:
    """The offsets of documents in the file, int64, increasing; empty if they are unknown."""
    if self.offsets is not None:
      offsets = np.load(self.offsets, mmap_mode="r")
      return offsets[slice(*np.searchsorted(offsets, (self.begin, self.end)))]
    return np.fromiter(self.find_marks(), np.int64)

  def find_marks(self) -> Iterator[int]:
    """Yields `begin`, and where documents begin after the matches of `marks`."""
    if self.marks:
      yield self.begin
      pattern = re.compile(self.marks.encode(), re.M)
      matches = pattern.finditer(_map(self.path), self.begin, self.end)
      # An empty match at the beginning does not begin a second document.
      yield from (x.end() for x in matches if self.begin < x.end() < self.end)

  def chunks(self) -> Iterator[list[tuple[str, bool]]]:
    """Yields lists of pairs, about 1 MiB each: a part, and whether a document begins with it."""
    documents = self.documents
    begin = self.begin
    with files.open_plain(self.path) as file:
      while begin < self.end:
        file.seek(begin)
        content = file.read(min(CHUNK_BYTES + 8, self.end - begin))
        bounds = np.searchsorted(documents, (begin, begin + CHUNK_BYTES + 1))
        starts = {int(x) - begin for x in documents[slice(*bounds)]}
        size = len(content)
        if size > CHUNK_BYTES:
          size = max(starts, default=0) or _cut(content)
        if not size:
          raise UserError(f"{self.path}: expected a file of {self.end} bytes, got one of {begin}")
        edges = itertools.pairwise(sorted({0, size} | {x for x in starts if x < size}))
        yield [(self._decode(content[a:b], begin + a), a in starts) for a, b in edges]
        begin += size

  def _decode(self, content: bytes, offset: int) -> str:
    try:
      return content.decode()
    except UnicodeDecodeError as error:
      raise UserError(
        f"data.path: expected UTF-8 text, got byte {content[error.start]:#04x} at offset "
        f"{offset + error.start} of {self.path}"
      ) from error


def _cut(content: bytes) -> int:
  """The end of the first chunk of a text, given eight bytes beyond `CHUNK_BYTES`."""
  ends: dict[int, int] = {}  # the last line end for each rating of a cut
  end = CHUNK_BYTES + 1
  while 2 not in ends and (end := content.rfind(b"\n", 0, end - 1) + 1):
    # Two characters have up to eight bytes; some of these may belong to a third.
    before = content[max(0, end - 8) : end].decode(errors="ignore")
    after = content[end : end + 8].decode(errors="ignore")
    ends.setdefault(rate_cut(before, after), end)
  if ends:
    return ends[max(ends)]
  space = content.rfind(b" ", 1, CHUNK_BYTES)
  return space if space > 0 else _character_begin(content, CHUNK_BYTES)


def _character_begin(content: bytes | mmap.mmap, offset: int) -> int:
  """The last offset at or before `offset` where a UTF-8 character begins."""
  for begin in range(offset, max(0, offset - 4), -1):
    if begin == len(content) or content[begin] & 0xC0 != 0x80:
      return begin
  return offset


@dataclasses.dataclass(frozen=True)
class JoinedText:
  """The texts of the sources of a mixture, in order."""

  texts: "Sequence[TextParts]"

  def __len__(self) -> int:
    return sum(map(len, self.texts))

  def __iter__(self) -> Iterator[str]:
    return itertools.chain.from_iterable(self.texts)


TextParts = TextFile | JoinedText | Sequence[str]  # iteration yields the parts of the text


def has_documents(text: TextParts) -> bool:
  """Whether it is known where the documents of a text begin."""
  return isinstance(text, TextFile) and text.has_documents


def open_plain(path: Path) -> TextFile:
  """The text of a plain file, without its byte-order mark."""
  if not (size := path.stat().st_size):
    raise UserError(f"data.path: expected a text, got the empty file {path}")
  with path.open("rb") as file:
    has_mark = file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK
  return TextFile(path, len(BYTE_ORDER_MARK) if has_mark else 0, size)


def cut_splits(text: TextFile, fractions: Sequence[float], source: str) -> dict[str, TextFile]:
  """Cuts a text in order, between documents if they are known, else at line ends if there are any.

  A split with the share 0 is empty. Raises a `UserError` for a text that is too short.
  """
  cut = _cut_documents if text.has_documents else _cut_lines
  valid_begin, test_begin = cut(text, fractions)
  splits = {
    "train": dataclasses.replace(text, end=valid_begin),
    "valid": dataclasses.replace(text, begin=valid_begin, end=test_begin),
    "test": dataclasses.replace(text, begin=test_begin),
  }
  for share, each in zip((1.0, *fractions[1:]), splits.values(), strict=True):
    if share and each.end <= each.begin:
      raise UserError(
        f"data.path: expected a text long enough for three splits, got {text.end} bytes in {source}"
      )
  return splits


def _cut_documents(text: TextFile, fractions: Sequence[float]) -> tuple[int, int]:
  """The offsets at which valid and test begin; each split has at least one document."""
  _, valid_share, test_share = fractions
  test_size = int(text.end * test_share)
  valid_size = int(text.end * valid_share)
  num_documents = len(text.documents)
  test = num_documents
  if test_share:
    fewest = 2 if valid_share else 1  # documents before test
    test = _document_before(text, text.end - test_size)
    test = min(max(test, fewest), num_documents - 1)
  valid = test
  if valid_share:
    valid = _document_before(text, text.end - valid_size - test_size)
    valid = min(max(valid, 1), test - 1)
  # An index beyond the documents: the split is empty.
  begins = [int(text.documents[i]) if 0 <= i < num_documents else text.end for i in (valid, test)]
  return begins[0], begins[1]


def _document_before(text: TextFile, offset: int) -> int:
  """The index of the last document that begins at or before an offset, -1 if there is none."""
  return int(np.searchsorted(text.documents, offset, "right")) - 1


def _cut_lines(text: TextFile, fractions: Sequence[float]) -> tuple[int, int]:
  """The offsets at which valid and test begin."""
  content = _map(text.path)
  valid_size = int(text.end * fractions[1])
  test_size = int(text.end * fractions[2])
  valid = _line_end(content, 0, text.end - valid_size - test_size)
  test = _line_end(content, valid, text.end - test_size) if valid_size else valid
  return valid, test if test_size else text.end


def _line_end(content: mmap.mmap, begin: int, end: int) -> int:
  """The last line end in the second half of begin .. end, or `end` if there is none."""
  return content.rfind(b"\n", (begin + end) // 2, end) + 1 or _character_begin(content, end)


def _map(path: Path) -> mmap.mmap:
  """The content of a file that is not empty."""
  with path.open("rb") as file:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def write_texts(
  folder: Path,
  inputs: files.JsonObject,
  read: Callable[[], Iterable[tuple[str, str]]],
  *,
  are_documents: bool = False,
) -> tuple[dict[str, TextFile], files.JsonObject]:
  """Opens train.txt and so on in a folder, written once from pairs of a split and a piece of text.

  With `are_documents`, each piece is a document: it gets a line end if it has none, and its
  offset is stored in train.offsets.npy; empty ones are skipped. Returns the texts of the splits,
  and their sizes and checksums.
  """

  def build(partial: Path) -> files.JsonObject:
    outputs: dict[str, IO[bytes]] = {}
    offsets: dict[str, array[int]] = {}
    bar = tqdm(desc=f"writing {folder.name}", unit="B", unit_scale=True, disable=None, leave=False)
    with contextlib.ExitStack() as stack, bar:
      for split, piece in read():
        if split not in outputs:
          outputs[split] = stack.enter_context((partial / f"{split}.txt").open("wb"))
          offsets[split] = array("q")
        if are_documents and piece:
          offsets[split].append(outputs[split].tell())
          piece += "" if piece.endswith("\n") else "\n"
        bar.update(outputs[split].write(piece.encode()))
      files.sync(*outputs.values())
    if are_documents:
      for split, begins in offsets.items():
        np.save(partial / f"{split}.offsets.npy", np.array(begins, np.int64))
    texts = {split: partial / f"{split}.txt" for split in outputs}
    empty = [split for split, path in texts.items() if not path.stat().st_size]
    if empty or "train" not in texts:
      raise UserError(f"{folder.name}: expected text in the split {(empty or SPLITS)[0]}, got none")
    sums = {x: {"bytes": y.stat().st_size, "sha256": files.checksum(y)} for x, y in texts.items()}
    return {"texts": sums}

  texts = files.build_once(folder, inputs, build)["texts"]
  splits = {}
  for split in (x for x in SPLITS if x in texts):
    offsets = folder / f"{split}.offsets.npy" if are_documents else None
    splits[split] = TextFile(folder / f"{split}.txt", 0, texts[split]["bytes"], offsets)
  return splits, texts
