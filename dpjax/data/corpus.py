"""Corpora: three splits of text, which is streamed in parts of about 1 MiB.

  a range of a file or of bytes                             Chunks
  documents with a line between them, or with titles        Marked
  a JSON object on each line                                JsonLines
  a file for each document                                  FileDocuments
  the texts of several sources                              Mixed

The middle three know where their documents begin; the last two of them add missing line ends.
"""

import abc
import contextlib
import dataclasses
import hashlib
import itertools
import json
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from dpjax import files
from dpjax.data.sources import reading
from dpjax.errors import UserError
from dpjax.text.tokenizer import is_clean_cut

SPLITS = ("train", "valid", "test")
CHUNK_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Text(Protocol):
  """A text in parts, for any number of iterations, and its size in bytes, at least roughly."""

  def __len__(self) -> int: ...
  def __iter__(self) -> Iterator[str]: ...


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A text in three splits.

  Attributes:
    name: the name of the corpus.
    splits: "train", "valid" and "test".
    about: the text's origin and preparation, as JSON values.
  """

  name: str
  splits: Mapping[str, Text]
  about: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Chunks:
  """The UTF-8 text of the bytes `begin` .. `end` - 1 of `content`, named `source` in messages.

  A part has up to 1 MiB and ends with a line, where a cut does not change the subwords of the
  whole text (`dpjax.text.tokenizer.is_clean_cut`); within longer lines before a space, and without
  spaces between any two characters. Joined, the parts are the exact text. Iteration raises a
  `UserError` with the place of the first byte that is not UTF-8.
  """

  content: bytes | mmap.mmap
  begin: int
  end: int
  source: str

  @classmethod
  def whole(cls, content: bytes | mmap.mmap, source: str) -> "Chunks":
    """All of a text, without its byte-order mark."""
    begin = len(BYTE_ORDER_MARK) * (content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK)
    return cls(content, begin, len(content), source)

  def __len__(self) -> int:
    return self.end - self.begin

  def __iter__(self) -> Iterator[str]:
    begin = self.begin
    while begin < self.end:
      end = self._cut(begin)
      try:
        yield self.content[begin:end].decode()
        unmap(self.content, begin, end)
      except UnicodeDecodeError as error:
        raise UserError(
          f"data.path: expected UTF-8 text, got byte {error.object[error.start]:#04x} at offset "
          f"{begin + error.start} of {self.source}"
        ) from error
      begin = end

  def _cut(self, begin: int) -> int:
    """Where the part that begins at `begin` ends."""
    end = begin + CHUNK_BYTES
    if end >= self.end:
      return self.end
    last = place = self.content.rfind(b"\n", begin, end) + 1
    while place:
      # Two characters have up to eight bytes, of which some may be of a third.
      before = self.content[max(begin, place - 8) : place].decode(errors="ignore")
      if is_clean_cut(before, self.content[place : place + 8].decode(errors="ignore")):
        return place
      place = self.content.rfind(b"\n", begin, place - 1) + 1
    if last:
      return last
    space = self.content.rfind(b" ", begin + 1, end)
    return space if space > 0 else character_begin(self.content, end)


class Documents(Text, abc.ABC):
  """A `Text` that knows its documents."""

  @abc.abstractmethod
  def documents(self) -> Iterator[Iterable[str]]:
    """Yields the documents, none of them empty, in parts like those of `Chunks`."""

  def __iter__(self) -> Iterator[str]:
    for document in self.documents():
      yield from document


@dataclasses.dataclass(frozen=True)
class Marked(Documents):
  r"""Documents separated by marks, which stay: joined, the documents are the text.

    "one\n--\ntwo\n", begins "^--\n"  ->  "one\n--\n" and "two\n"

  A document begins with the text and after each match of the regular expression `begins`, in
  which ^ is the beginning of a line.
  """

  text: Chunks
  begins: str

  def __len__(self) -> int:
    return len(self.text)

  def __iter__(self) -> Iterator[str]:
    return iter(self.text)  # regardless of documents; vocabularies are learned from these

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`."""
    ends = (match.end() for match in self.marks())
    for begin, end in itertools.pairwise(itertools.chain([self.text.begin], ends, [self.text.end])):
      if begin < end:
        yield dataclasses.replace(self.text, begin=begin, end=end)

  def marks(self) -> Iterator[re.Match]:
    """The matches of `begins`."""
    pattern = re.compile(self.begins.encode(), re.M)
    return pattern.finditer(self.text.content, self.text.begin, self.text.end)


@dataclasses.dataclass(frozen=True)
class JsonLines(Documents):
  """Documents that are the strings `field` of JSON objects, one a line; blank lines are skipped."""

  lines: Chunks
  field: str

  def __len__(self) -> int:
    return len(self.lines)

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`."""
    content, begin, last = self.lines.content, self.lines.begin, self.lines.end
    kept = begin
    while begin < last:
      if begin - kept >= CHUNK_BYTES:
        unmap(content, kept, begin)
        kept = begin
      end = content.find(b"\n", begin, last) + 1 or last
      if line := content[begin:end].strip():
        try:
          text = json.loads(line)[self.field]
          if not isinstance(text, str):
            raise TypeError(f"{self.field} of the type {type(text).__name__}")
          yield from _document(text, self.lines.source)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
          raise UserError(
            f"data.path: expected a JSON object with a string {self.field!r} (data.text_field) a "
            f"line, got another line at offset {begin} of {self.lines.source} ({error!r})"
          ) from error
      begin = end


@dataclasses.dataclass(frozen=True)
class FileDocuments(Documents):
  """Documents that are files, plain or compressed, in order."""

  paths: Sequence[Path]

  def __len__(self) -> int:
    return sum(path.stat().st_size for path in self.paths)

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`; drops byte-order marks."""
    for path in self.paths:
      yield from _document(reading.read_text(path), str(path))


@dataclasses.dataclass(frozen=True)
class Mixed:
  """The texts of the sources of a mixture, in order."""

  texts: Sequence[Text]

  def __len__(self) -> int:
    return sum(map(len, self.texts))

  def __iter__(self) -> Iterator[str]:
    return itertools.chain.from_iterable(self.texts)


def unmap(content: Any, begin: int, end: int) -> None:
  """Removes what was read of a mapped file from the process's memory, where a system can."""
  if isinstance(content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
    begin -= begin % mmap.PAGESIZE
    content.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _document(text: str, source: str) -> Iterator[Iterable[str]]:
  """The parts of a document; none if it is empty."""
  if text:
    content = (text if text.endswith("\n") else text + "\n").encode()
    yield Chunks(content, 0, len(content), source)


def line_pattern(separator: str) -> str:
  """`Marked.begins` for documents with a separator line."""
  return rf"^{re.escape(separator)}\r?\n"


def character_begin(content: Any, place: int) -> int:
  """The last place at or before `place` where a UTF-8 character begins."""
  for begin in range(place, max(0, place - 4), -1):
    if begin == len(content) or content[begin] & 0xC0 != 0x80:
      return begin
  return place


def open_text(path: Path) -> Chunks:
  """The text of a plain file, mapped; a `UserError` if it is empty or no regular file."""
  size = path.stat().st_size
  if not path.is_file():
    raise UserError(
      f"data.path: expected a readable text file or folder, got {path} (no regular file)"
    )
  if not size:
    raise UserError(f"data.path: expected a text, got the empty file {path}")
  with path.open("rb") as file:
    return Chunks.whole(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))


def cut_splits(
  content: Any, fractions: Sequence[float], source: str, *, whole_lines: bool = False
) -> dict[str, Chunks]:
  """Cuts a text, bytes or a mapped file, in order; a split with the share 0 is empty.

  `whole_lines` cuts only at line ends. Raises a `UserError` for a text that is too short.
  """
  size = len(content)
  valid, test = (int(size * fraction) for fraction in fractions[1:])
  if whole_lines:
    second = content.rfind(b"\n", 0, size - test) + 1
    first = content.rfind(b"\n", 0, max(0, min(size - valid - test, second - 1))) + 1
    first = first if valid else second
  else:
    first = _line_end(content, 0, size - valid - test)
    second = _line_end(content, first, size - test) if valid else first
  second = second if test else size
  places = Chunks.whole(content, source).begin, first, second, size
  texts = [Chunks(content, begin, end, source) for begin, end in itertools.pairwise(places)]
  shares = (1, *fractions[1:])
  if any(x.begin >= x.end and share for x, share in zip(texts, shares, strict=True)):
    raise UserError(
      f"data.path: expected a text long enough for three splits, got {size} bytes in {source}"
    )
  return dict(zip(SPLITS, texts, strict=True))


def _line_end(content: Any, begin: int, end: int) -> int:
  """The last line end in the second half of begin .. end, or `end` if there is none."""
  line_end = content.rfind(b"\n", (begin + end) // 2, end) + 1
  return line_end or character_begin(content, end)


def build_texts(
  folder: Path, inputs: Mapping[str, Any], read: Callable[[], Iterable[tuple[str, str]]]
) -> tuple[dict[str, Chunks], dict[str, Any]]:
  """Opens train.txt and so on in a folder, built once from pairs of a split and a piece of text.

  Returns the texts of the splits, and their sizes and checksums.
  """

  def build(partial: Path) -> dict[str, Any]:
    opened, sums, texts = {}, {}, {}
    bar = tqdm(desc=f"writing {folder.name}", unit="B", unit_scale=True, disable=None, leave=False)
    with contextlib.ExitStack() as stack, bar:
      for split, piece in read():
        if split not in opened:
          opened[split] = stack.enter_context((partial / f"{split}.txt").open("wb"))
          sums[split], texts[split] = hashlib.sha256(), {"bytes": 0, "characters": 0}
        bar.update(opened[split].write(content := piece.encode()))
        sums[split].update(content)
        texts[split]["bytes"] += len(content)
        texts[split]["characters"] += len(piece)
      files.sync(*opened.values())
    empty = [split for split in texts if not texts[split]["bytes"]]
    if empty or "train" not in texts:
      raise UserError(f"{folder.name}: expected text in the split {(empty or SPLITS)[0]}, got none")
    return {"texts": {x: {**texts[x], "sha256": sums[x].hexdigest()} for x in texts}}

  texts = files.build_once(folder, inputs, build)["texts"]
  return {x: open_text(folder / f"{x}.txt") for x in SPLITS if x in texts}, texts
