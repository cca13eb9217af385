"""Texts that know where each of their documents begins.

  documents with a line between them, or with titles    Marked
  a JSON object on each line                            JsonLines
  a file for each document                              FileDocuments

`JsonLines` and `FileDocuments` add a line end to documents without one.
"""

import abc
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dpjax.data import chunks
from dpjax.data.chunks import Chunks
from dpjax.data.sources import reading
from dpjax.errors import UserError

FORMS = (
  "a folder of .txt files, .jsonl, .txt with data.separator, and childrens_books, openwebtext, "
  "wiki40b, wikitext*, cc100 and lm1b have documents, unless cleaned"
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Documents(abc.ABC):
  """A text in parts, like `dpjax.data.chunks.Text`, that knows its documents."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Its size in bytes, at least roughly."""

  @abc.abstractmethod
  def documents(self) -> Iterator[Iterable[str]]:
    """Yields the documents, none of them empty, each in parts like those of `Chunks`.

    Raises:
      UserError: a document cannot be read.
    """

  def __iter__(self) -> Iterator[str]:
    """Yields the parts of all documents."""
    for document in self.documents():
      yield from document


@dataclasses.dataclass(frozen=True)
class Marked(Documents):
  r"""Documents separated by marks in the text.

    "one\n--\ntwo\n", begins "^--\n"  ->  "one\n--\n" and "two\n"

  All characters stay, marks included: joined, the documents are the text.

  Attributes:
    text: the whole text.
    begins: a regular expression for bytes, in which ^ is the beginning of a line. A
      document begins at the end of each match, and at the beginning of the text.
  """

  text: Chunks
  begins: str

  def __len__(self) -> int:
    """The text's size in bytes."""
    return len(self.text)

  def __iter__(self) -> Iterator[str]:
    """Yields the parts of the text regardless of documents; vocabularies are learned from these."""
    return iter(self.text)

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`."""
    content, begin, end = self.text.content, self.text.begin, self.text.end
    for match in self._pattern().finditer(content, begin, end):
      if match.end() > begin:
        yield dataclasses.replace(self.text, begin=begin, end=match.end())
        begin = match.end()
    if end > begin:
      yield dataclasses.replace(self.text, begin=begin)

  def has_marks(self) -> bool:
    """Whether any mark is found."""
    return self._pattern().search(self.text.content, self.text.begin, self.text.end) is not None

  def _pattern(self) -> re.Pattern[bytes]:
    return re.compile(self.begins.encode(), re.M)


@dataclasses.dataclass(frozen=True)
class JsonLines(Documents):
  """Documents that are strings in JSON objects, one on each line; blank lines are skipped.

  Attributes:
    lines: the whole text.
    field: the name of the string.
  """

  lines: Chunks
  field: str

  def __len__(self) -> int:
    """The lines' size in bytes."""
    return len(self.lines)

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`; drops a byte-order mark."""
    content, begin, source = self.lines.content, self.lines.begin, self.lines.source
    while begin < self.lines.end:
      end = content.find(b"\n", begin, self.lines.end) + 1 or self.lines.end
      line = content[begin:end].strip()
      if line:
        yield from _document(self._text(line, begin), source)
      begin = end

  def _text(self, line: bytes, place: int) -> str:
    try:
      text = json.loads(line)[self.field]
      if not isinstance(text, str):
        raise TypeError(f"{self.field} of the type {type(text).__name__}")
      text.encode()
      return text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise UserError(
        f"data.path: expected a JSON object with a string {self.field!r} (data.text_field) a "
        f"line, got another line at offset {place} of {self.lines.source} ({error!r})"
      ) from error


@dataclasses.dataclass(frozen=True)
class FileDocuments(Documents):
  """Documents that are files, plain or compressed, in the given order; each is read whole.

  Attributes:
    paths: the paths of the files.
    size: the size of all files on disk, in bytes.
  """

  paths: Sequence[Path]
  size: int

  def __len__(self) -> int:
    """The files' size in bytes."""
    return self.size

  def documents(self) -> Iterator[Iterable[str]]:
    """See `Documents`; drops byte-order marks."""
    for path in self.paths:
      yield from _document(reading.read_text(path), str(path))


def line_pattern(separator: str) -> str:
  """`Marked.begins` for documents with a separator line."""
  return rf"^{re.escape(separator)}\r?\n"


def _document(text: str, source: str) -> Iterator[Iterable[str]]:
  """The parts of a document; none if it is empty."""
  if not text:
    return
  text = text if text.endswith("\n") else text + "\n"
  if len(text) <= chunks.CHUNK_BYTES:
    yield [text]
  else:
    content = text.encode()
    yield Chunks(content, 0, len(content), source)
