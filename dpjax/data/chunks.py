"""Texts in parts, so that a text of any size can be streamed."""

import dataclasses
import mmap
from collections.abc import Iterator
from typing import Protocol

from dpjax.errors import UserError
from dpjax.text.tokenizer import is_clean_cut

CHUNK_BYTES = 2**20
LEARN_BYTES = 2**30  # of text, that a vocabulary is learned on at most


class Text(Protocol):
  """A text in parts of about 1 MiB; can be iterated again and again."""

  def __len__(self) -> int:
    """Its size in bytes, at least roughly."""
    ...

  def __iter__(self) -> Iterator[str]:
    """Yields the parts."""
    ...


@dataclasses.dataclass(frozen=True)
class Chunks:
  """A range of UTF-8 text, yielded in parts of type str.

  A part has up to 1 MiB and ends with a line, at a place that does not change the subwords of
  the whole text (`dpjax.text.tokenizer.is_clean_cut`). Within longer lines it ends before a
  space, and without spaces between any two characters. Joined, the parts are the exact text,
  line ends included.

  Attributes:
    content: bytes, or a mapped file.
    begin: the first byte of the range in `content`.
    end: the byte after its last one.
    source: the name of `content` in messages.
  """

  content: bytes | mmap.mmap
  begin: int
  end: int
  source: str

  def __len__(self) -> int:
    """The range's size in bytes."""
    return self.end - self.begin

  def __iter__(self) -> Iterator[str]:
    """Yields the parts.

    Raises:
      ValueError: `data.path: ...`, with the place of the first byte that is not UTF-8.
    """
    begin = self.begin
    while begin < self.end:
      end = self._cut(begin)
      try:
        yield self.content[begin:end].decode()
      except UnicodeDecodeError as error:
        raise UserError(
          f"data.path: expected UTF-8 text, got byte "
          f"{error.object[error.start]:#04x} at offset "
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
    return space if space > 0 else between_characters(self.content, end)


def between_characters(content, place: int) -> int:
  """The last place at or before `place` where a UTF-8 character begins."""
  for begin in range(place, max(0, place - 4), -1):
    if begin == len(content) or content[begin] & 0xC0 != 0x80:
      return begin
  return place


class Sample:
  """Parts of a text, spread evenly, up to `LEARN_BYTES` of them."""

  def __init__(self, text: Text):
    """Takes the text; stores an error in reading it in `error`."""
    self._text = text
    self.error: ValueError | None = None

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
