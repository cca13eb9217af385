"""The base class of tokenizers, and shared helpers."""

import abc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dpjax.errors import UserError

FORMAT = 1
MOST_PIECES = 2**24  # that are learned; the libraries have memory for them


class Tokenizer(abc.ABC):
  r"""Text to ids 0 .. vocab_size - 1, and back.

  Attributes:
    kind: the name in configurations and files.
    vocab_size: V, the number of ids.
    start_id: the id before the first token of a text: the line end, if the vocabulary has one.
    unknown_id: the id for text outside the vocabulary; None if it covers everything.
    lossless: whether `decode(encode(text)) == text`, for any text without unknown parts.
    space_ids: the ids of the space and the line end, of "characters" (if known) and "bytes".
    open_ids: the ids whose text later tokens can change: bytes that are decoded together.
  """

  kind: str
  vocab_size: int
  start_id: int
  unknown_id: int | None = None
  lossless: bool
  space_ids: tuple[int, ...] = ()
  open_ids: frozenset[int] = frozenset()

  def encode(self, text: str) -> np.ndarray:
    """The ids of a text, int32 [N]; those of its `parts`, joined.

    Raises a `ValueError`, `text: ...`, for a lone surrogate, which UTF-8 cannot encode.
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      message = "text: expected Unicode text, got a lone surrogate at place"
      raise UserError(f"{message} {error.start}") from error
    return self._encode(text)

  @abc.abstractmethod
  def _encode(self, text: str) -> np.ndarray:
    """`encode` of a text without lone surrogates."""

  def parts(self, chunks: Iterable[str]) -> Iterable[str]:
    """Cuts a text again so that the parts have the ids of the whole; chunks end with lines."""
    return chunks

  def encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a context and of its continuation: together, those of the whole text.

    The first are the longest common prefix of the ids of the whole and of the context alone.

      "a b", " c"  ->  the ids of "a", " " and of "b c", if that is a piece
    """
    ids, alone = self.encode(context + continuation), self.encode(context)
    size = min(len(ids), len(alone))
    size = next(iter(np.flatnonzero(ids[:size] != alone[:size])), size)
    return ids[:size], ids[size:]

  def keeps_text(self, ids: np.ndarray) -> bool:
    """Whether the ids [N] represent all of a text, so that their -ln P is that of the text."""
    return self.lossless and not self.count_unknown(ids)

  def count_unknown(self, ids: np.ndarray) -> int:
    """The number of ids [N] that stand for unknown parts of a text."""
    if self.unknown_id is None:
      return 0
    blocks = (ids[i : i + 2**24] for i in range(0, len(ids), 2**24))  # of a mapped file
    return sum(int(np.count_nonzero(block == self.unknown_id)) for block in blocks)

  def describe_unknown(self, texts: Mapping[str, np.ndarray]) -> str:
    """Says how many ids of each text stand for unknown parts of it; "" if none does."""
    counts = {name: self.count_unknown(ids) for name, ids in texts.items()}
    shown = ", ".join(f"{count:,} in {name}" for name, count in counts.items())
    return any(counts.values()) * f"tokens for what the vocabulary does not know: {shown}"

  @abc.abstractmethod
  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of ids [N], each in 0 .. vocab_size - 1."""

  def character_ends(self, text: str) -> np.ndarray:
    r"""The place of each character's last token among `encode(text)`.

    "b\u00e9 b"  ->  "characters": 0 1 2 3; "bytes": 0 2 3 4

    The other kinds raise a `UserError`: their tokens are not parts of single characters.
    """
    raise self._subword_error("Unigram")

  def as_bytes(self) -> list[bytes]:
    """The UTF-8 bytes of each id, at least one; see `character_ends`."""
    raise self._subword_error("SpaceByte")

  def _subword_error(self, boundaries: str) -> UserError:
    expected = f"data.tokenizer: expected characters or bytes with {boundaries} boundaries"
    return UserError(f"{expected}, got {self.kind}")

  def fields(self) -> dict:
    """The JSON values from which `from_fields` builds an equal tokenizer."""
    return {}

  @classmethod
  def from_fields(cls, kind: str, fields: dict) -> "Tokenizer":
    """The tokenizer that `fields` came from."""
    return cls()

  def to_json(self) -> str:
    """The whole tokenizer as JSON, including its vocabulary, for `tokenizer_from_json`."""
    content = {"format": FORMAT, "kind": self.kind, **self.fields()}
    return json.dumps(content, ensure_ascii=False)


def as_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
  """Ids as an int64 array [N]; a `ValueError` if one is outside 0 .. vocab_size - 1."""
  array = np.asarray(ids, np.int64).reshape(-1)
  if array.size and not 0 <= array.min() <= array.max() < vocab_size:
    raise UserError(f"ids: expected 0 .. {vocab_size - 1}, got {array.min()} .. {array.max()}")
  return array


def cut_lines(text: str, longest: int) -> Iterator[str]:
  r"""Cuts a text into lines, and lines longer than `longest` before a space.

    "one\ntwo three\n", 6  ->  "one\n", "two", " three", "\n"

  Only "\n" ends a line. Without a space in reach, the cut may be anywhere.
  """
  for line in re.findall(r"[^\n]*\n|[^\n]+", text):
    begin = 0
    while len(line) - begin > longest:
      space = line.rfind(" ", begin + 1, begin + longest + 1)
      end = space if space > 0 else begin + longest
      yield line[begin:end]
      begin = end
    yield line[begin:]


def is_clean_cut(before: str, after: str) -> bool:
  r"""Whether a cut between two lines preserves the subwords; two characters on each side suffice.

  "one\n|two", "one\n|\ntwo" and "one\n| two" are clean cuts, "one\n\n|two" is not: splitting
  into words groups the white space before a word, except for its last character.
  """
  if not before.endswith("\n") or not after:
    return False
  if _is_space(after[0]):
    return len(after) > 1 and not _is_space(after[1])
  return len(before) > 1 and not _is_space(before[-2])


def _is_space(character: str) -> bool:
  """Whether Unicode classifies it as white space; Python adds four separators."""
  return character.isspace() and not "\x1c" <= character <= "\x1f"


def file_error(expected: str, got: str, setting: str = "data.tokenizer_file") -> UserError:
  """The error for a vocabulary file of the wrong kind."""
  return UserError(f"{setting}: expected {expected}, got {got}")


def size_error(expected: str, got: int, setting: str = "data.tokenizer_size") -> UserError:
  """The error for a vocabulary that cannot have the requested size."""
  return UserError(f"{setting}: expected {expected}, got {got}")


def library_tokenizer(content: dict):
  """A tokenizer of the `tokenizers` library from its own JSON; a `ValueError` if it is none."""
  from tokenizers import Tokenizer as LibraryTokenizer

  return library_call(LibraryTokenizer.from_str, json.dumps(content))


def library_call(call, *arguments, **options):
  """Calls the `tokenizers` library, and turns its errors into a `UserError`."""
  try:
    return call(*arguments, **options)
  except BaseException as error:
    # A panic is no Exception.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    answer = " ".join(str(error).split())
    raise UserError(
      f"tokenizer: expected one that the tokenizers library can use, got its answer: {answer}"
    ) from error
