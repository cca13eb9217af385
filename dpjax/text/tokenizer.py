r"""Tokenizers by name, their base class, incremental decoding, and shared helpers."""

import abc
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpjax import files
from dpjax.errors import UserError, unknown

FORMAT = 1
MAX_PIECES = 2**24  # limit for a trained vocabulary that fits the libraries' memory
LINE = re.compile(r"(?<=\S\n)(?=[^\W\d_])")  # between lines that no word spans
# White space that tokenizers lose; characters that normalisation changes; every UTF-8 byte.
_POINTS = [*range(0xC0), *range(0xC0, 0x800, 0x40), 0x800, *range(0x1000, 0x10000, 0x1000)]
_POINTS += range(0x10000, 0x110000, 0x40000)
_PROBE = "  a  b\t\tc \r\n\n \u00e9\u2581\u2582 \N{GRINNING FACE}\n Ab cD e\u0301 \u2126 \ufb01 "
_PROBE += "\uff21 \u00bd \u2047 x\u00ad\u200b\ufeff " + "".join(map(chr, _POINTS))
_COMPLETE = ("characters", "wordpiece")  # each token holds complete characters
_INCOMPLETE = 3  # the most bytes of an incomplete character, each decoded as U+FFFD


class Tokenizer(abc.ABC):
  r"""Text to ids 0 .. vocab_size - 1, and back.

  Attributes:
    name: the name in configurations and files.
    vocab_size: V, the number of ids.
    start_id: the id before the first token of a text: the line end, if the vocabulary has one.
    end_id: the id that ends a text, and generation; None if there is none.
    begins_texts: whether generation begins with `start_id` even before a prompt.
    unknown_id: the id for text outside the vocabulary; None if it covers everything.
    lossless: whether `decode(encode(text)) == text`, for any text without unknown parts.
    space_ids: the ids of the space and the line end, for "characters" (if known) and "bytes".
    byte_ids: the ids of bytes that are decoded together, so that later ones change their text.
    is_character_level: whether each token is a character or a part of one.
  """

  name: str
  vocab_size: int
  start_id: int
  end_id: int | None = None
  begins_texts: bool = False
  unknown_id: int | None = None
  lossless: bool
  space_ids: tuple[int, ...] = ()
  byte_ids: frozenset[int] = frozenset()
  is_character_level: bool = False

  @classmethod
  def train(cls, chunks: Iterable[str], *_, **settings) -> "Tokenizer":
    """Makes the tokenizer; see `train_tokenizer`. Each class names its own settings."""
    raise NotImplementedError

  def encode(self, text: str) -> np.ndarray:
    """The ids of a text, int32 [N].

    Raises a `ValueError`, `text: ...`, for what is no text, or a lone surrogate, which UTF-8 cannot
    encode.
    """
    if not isinstance(text, str):
      raise UserError(f"text: expected a text, got {text!r:.60}")
    try:
      text.encode()
    except UnicodeEncodeError as error:
      message = "text: expected Unicode text, got a lone surrogate at index"
      raise UserError(f"{message} {error.start}") from error
    return self._encode(text)

  @abc.abstractmethod
  def _encode(self, text: str) -> np.ndarray:
    """`encode` for a text without lone surrogates."""

  def encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a context and of its continuation; joined, they are those of the full text.

    The former are the longest common prefix of the ids of the full text and of the context.

      "a b", " c"  ->  the ids of "a", " " and of "b c", if that is a piece
    """
    ids = self.encode(context + continuation)
    prefix = self.encode(context)
    size = min(len(ids), len(prefix))
    size = next(iter(np.flatnonzero(ids[:size] != prefix[:size])), size)
    return ids[:size], ids[size:]

  def keeps_text(self, ids: np.ndarray) -> bool:
    """Whether the ids [N] represent all of a text, so that their -ln P is that of the text."""
    return self.lossless and not self.count_unknown(ids)

  def count_unknown(self, ids: np.ndarray) -> int:
    """The number of ids [N] that stand for unknown parts of a text."""
    if self.unknown_id is None:
      return 0
    blocks = (ids[i : i + 2**24] for i in range(0, len(ids), 2**24))  # may be memory-mapped
    return sum(int(np.count_nonzero(block == self.unknown_id)) for block in blocks)

  def describe_unknown(self, texts: Mapping[str, np.ndarray]) -> str:
    """A message with the number of unknown ids in each text; "" if there are none."""
    counts = {name: self.count_unknown(ids) for name, ids in texts.items()}
    if not any(counts.values()):
      return ""
    text = ", ".join(f"{count:,} in {name}" for name, count in counts.items())
    return f"tokens for what the vocabulary does not know: {text}"

  @abc.abstractmethod
  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of ids [N], each in 0 .. vocab_size - 1."""

  def character_ends(self, text: str) -> np.ndarray:
    r"""The index of each character's last token in `encode(text)`.

    "b\u00e9 b"  ->  "characters": 0 1 2 3; "bytes": 0 2 3 4

    The other tokenizers raise a `UserError`: their tokens are not parts of single characters.
    """
    raise self._subword_error("Unigram")

  def as_bytes(self) -> list[bytes]:
    """The UTF-8 bytes of each id, at least one; see `character_ends`."""
    raise self._subword_error("SpaceByte")

  def _subword_error(self, boundaries: str) -> UserError:
    expected = f"data.tokenizer: expected characters or bytes with {boundaries} boundaries"
    return UserError(f"{expected}, got {self.name}")

  def fields(self) -> dict:
    """The JSON values from which `from_fields` builds an equal tokenizer."""
    return {}

  @classmethod
  def from_fields(cls, fields: dict) -> "Tokenizer":
    """The tokenizer that `fields` came from."""
    return cls()

  def to_json(self) -> str:
    """The tokenizer as JSON, including its vocabulary, for `tokenizer_from_json`."""
    content = {"format": FORMAT, "name": self.name, **self.fields()}
    return json.dumps(content, ensure_ascii=False)


def tokenizer_classes() -> dict[str, type[Tokenizer]]:
  """All tokenizers by name; imported here, since they import their base class."""
  from dpjax.text import characters, pieces, sentencepiece

  classes = (
    characters.Characters,
    characters.Bytes,
    characters.BytesWithEnds,
    pieces.WordPiece,
    pieces.BytePairs,
    sentencepiece.SentencePieceBpe,
    sentencepiece.SentencePieceUnigram,
  )
  return {each.name: each for each in classes}


def train_tokenizer(name: str, chunks: Iterable[str], **settings: str | int) -> Tokenizer:
  """Makes a tokenizer: trained on a text, or loaded from a vocabulary file.

  Args:
    name: "characters", "bytes", "bytes_with_ends", "wordpiece", "bpe", "sentencepiece_bpe" or
      "sentencepiece_unigram".
    chunks: the text in parts, preferably cut after line ends; not a bare iterator.
    **settings: the settings of this `data.tokenizer`, the arguments of the class's `train`. A
      `file` is loaded; without one, a vocabulary of `vocab_size` entries is trained.

  Returns:
    The tokenizer; equal arguments give an equal one.

  Raises:
    ValueError: a setting `data.tokenizer...` is wrong.
  """
  classes = tokenizer_classes()
  if name not in classes:
    raise unknown("data.tokenizer", classes, name)
  return classes[name].train(chunks, **settings)


def load_tokenizer(source: str | Path, setting: str = "data.tokenizer.file") -> Tokenizer | None:
  """The tokenizer of a run, from its folder or tokenizer.json; a `ValueError` if damaged.

  None if the source is something else, such as a vocabulary for `train_tokenizer`.
  """
  path = Path(source, "data", "tokenizer.json")
  if not (is_run := path.is_file()):
    path = Path(source)
    if path.suffix != ".json" or not path.is_file():
      return None
  try:
    content = files.read_file(path)
    # Other libraries' files have no format.
    is_ours = is_run or "format" in json.loads(content)
    return tokenizer_from_json(content) if is_ours else None
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise file_error("a tokenizer.json", f"{path} ({error})", setting) from error


def tokenizer_from_json(text: str | bytes) -> Tokenizer:
  """Reads a tokenizer from the JSON of `Tokenizer.to_json`; a `ValueError` if damaged."""
  try:
    content = json.loads(text)
    if content["format"] > FORMAT:
      raise UserError(f"a later format than {FORMAT}: {content['format']}")
    return tokenizer_classes()[content["name"]].from_fields(content)
  except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
    answer = e if isinstance(e, UserError) else repr(e)
    expected = "tokenizer.json: expected the JSON of a tokenizer"
    raise UserError(f"{expected}, got a damaged one: {answer}") from e


class TextStream:
  r"""Decodes tokens as they arrive, and never changes earlier output.

    "".join(push(ids) for ids in parts) + finish() = tokenizer.decode(all ids)

  For the bytes of "\u00e9 e", one by one:

    push([195])  ->  ""   (half a character)    push([169])  ->  "\u00e9"    push([32])  ->  " "

  After a prompt, the output is what `decode` adds to the prompt's text. Text is returned at once,
  except that up to three final U+FFFD, which may begin a character, wait for the next token, and
  bytes that a BPE decodes together wait for the last one. Each push decodes the new tokens and, as
  context, those of the last returned text, as in Hugging Face's text-generation-inference.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: str = ""):
    """Begins a text of this tokenizer, or continues a prompt."""
    self._tokenizer = tokenizer
    self._begin(tokenizer.encode(prompt).tolist() if prompt else [])
    # A trailing space may have no token; the next word then adds it again.
    text = tokenizer.decode(self._ids)
    self._drops_space = prompt[-1:].isspace() and not text[-1:].isspace()

  def push(self, ids: Sequence[int] | np.ndarray) -> str:
    """Takes the next tokens, [N], and returns the new text that is certain, perhaps "".

    An id outside 0 .. V - 1 raises a `ValueError`, and the call then has no effect.
    """
    self._ids += as_ids(ids, self._tokenizer.vocab_size).tolist()
    is_byte = self._tokenizer.byte_ids.__contains__
    num_pending = len([*itertools.takewhile(is_byte, reversed(self._ids))])
    text = self._tokenizer.decode(self._ids[: len(self._ids) - num_pending])
    end = "" if self._tokenizer.name in _COMPLETE else text[-_INCOMPLETE:]
    certain = len(text) - len(end) + len(end.rstrip("\N{REPLACEMENT CHARACTER}"))
    new = text[self._length : certain]
    self._length = max(self._length, certain)
    if new.strip() and certain == len(text) and not num_pending:
      self._begin(self._ids[self._num_context :])
    return self._drop_space(new)

  def finish(self) -> str:
    """Ends the text: returns the rest, and begins a new text."""
    rest = self._drop_space(self._tokenizer.decode(self._ids)[self._length :])
    self._begin([])
    self._drops_space = False
    return rest

  def _begin(self, context: list[int]) -> None:
    """Keeps the tokens of a context, all of whose text was returned."""
    self._ids = context
    self._num_context = len(context)
    self._length = len(self._tokenizer.decode(context))

  def _drop_space(self, new: str) -> str:
    if new and self._drops_space:
      self._drops_space = False
      return new.removeprefix(" ")
    return new


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


def rate_cut(before: str, after: str) -> int:
  r"""Rates how well a cut between lines preserves subwords; two characters per side suffice.

  2: for all tokenizers whose words end with lines, "one\n|two". 1: for GPT-2,
  "one\n|\ntwo" and "one\n| two", but not "one\n\n|two": splitting into words groups the white space
  before a word, except for its last character. 0: otherwise.
  """
  if not before.endswith("\n") or not after:
    return 0
  if _is_space(after[0]):
    return int(len(after) > 1 and not _is_space(after[1]))
  if len(before) < 2 or _is_space(before[-2]):
    return 0
  return 2 if LINE.search(before[-2:] + after[0]) else 1


def _is_space(character: str) -> bool:
  """Whether Unicode classifies a character as white space; Python adds four separators."""
  return character.isspace() and not "\x1c" <= character <= "\x1f"


def file_error(expected: str, got: str, setting: str = "data.tokenizer.file") -> UserError:
  """The error for a wrong vocabulary file."""
  return UserError(f"{setting}: expected {expected}, got {got}")


def size_error(expected: str, got: int, setting: str = "data.tokenizer.vocab_size") -> UserError:
  """The error for a vocabulary that cannot have the requested size."""
  return UserError(f"{setting}: expected {expected}, got {got}")


def check_size(vocab_size: int, minimum: int, reason: str = "") -> None:
  """Checks the size of a vocabulary to train."""
  if vocab_size < minimum:
    raise size_error(f"at least {minimum:,}{reason}", vocab_size)
  if vocab_size > MAX_PIECES:
    raise size_error(f"at most {MAX_PIECES:,}", vocab_size)


def is_lossless(tokenizer: Tokenizer, more: str = "") -> bool:
  """Whether decoding restores a difficult text, with and without leading spaces."""
  texts = _PROBE + more, (_PROBE + more).lstrip()
  return all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
