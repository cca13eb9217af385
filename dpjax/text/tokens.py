"""Tokenizers by name: trained on a text, loaded from a file, saved as JSON."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dpjax import files
from dpjax.errors import UserError, unknown
from dpjax.text.subwords import BytePairs, SentencePiece
from dpjax.text.tokenizer import FORMAT, MOST_PIECES, Tokenizer, as_ids, file_error, size_error
from dpjax.text.wordpiece import WordPiece


class Characters(Tokenizer):
  r"""One id for each character, by code point; the last one, V - 1, for all others, U+FFFD.

  of "to be\nor not":  encode("be\n")  ->  [2, 3, 0]    decode([2, 3, 8])  ->  "be\ufffd"
  """

  kind = "characters"
  lossless = True

  def __init__(self, characters: str):
    """Takes the known characters, each once, sorted."""
    self._characters = characters
    self.vocab_size = len(characters) + 1
    self.unknown_id = self.vocab_size - 1
    points = list(map(ord, characters))
    # Ids by code point; the last place is that of all points beyond.
    self._table = np.full(max(points, default=0) + 2, self.vocab_size - 1, np.int32)
    self._table[points] = np.arange(len(points))
    self.start_id = max(0, characters.find("\n"))
    self.space_ids = tuple(characters.index(x) for x in " \n" if x in characters)

  @classmethod
  def train(cls, chunks: Iterable[str]) -> "Characters":
    """Collects the characters of a text."""
    known: set[str] = set()
    for chunk in chunks:
      known.update(chunk)
    return cls("".join(sorted(known)))

  def _encode(self, text: str) -> np.ndarray:
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return self._table[np.minimum(points, len(self._table) - 1)]

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    characters = self._characters + "\N{REPLACEMENT CHARACTER}"
    return "".join(characters[i] for i in as_ids(ids, self.vocab_size))

  def character_ends(self, text: str) -> np.ndarray:
    """See `Tokenizer`."""
    return np.arange(len(text))

  def as_bytes(self) -> list[bytes]:
    """See `Tokenizer`."""
    return [self.decode([i]).encode() for i in range(self.vocab_size)]

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {"characters": self._characters}

  @classmethod
  def from_fields(cls, kind: str, fields: dict) -> "Characters":
    """See `Tokenizer`."""
    if list(fields["characters"]) != sorted(set(fields["characters"])):
      raise UserError("characters that are not sorted")
    return cls(fields["characters"])


class Bytes(Tokenizer):
  """The bytes of UTF-8 as ids; invalid UTF-8 decodes as U+FFFD."""

  kind = "bytes"
  vocab_size = 256
  start_id = ord("\n")
  lossless = True
  space_ids = (ord(" "), ord("\n"))

  def _encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    return bytes(as_ids(ids, 256).tolist()).decode(errors="replace")

  def character_ends(self, text: str) -> np.ndarray:
    """See `Tokenizer`."""
    continues = self.encode(text) & 0xC0 == 0x80  # not the first byte of a character
    return np.flatnonzero(np.append(~continues, len(text) > 0)[1:])

  def as_bytes(self) -> list[bytes]:
    """See `Tokenizer`."""
    return [bytes([i]) for i in range(256)]


KINDS = {
  "characters": Characters,
  "bytes": Bytes,
  "sentencepiece_unigram": SentencePiece,
  "sentencepiece_bpe": SentencePiece,
  "wordpiece": WordPiece,
  "bpe": BytePairs,
}
CHARACTER_KINDS = ("characters", "bytes")  # whose tokens are parts of single characters


def train_tokenizer(
  kind: str,
  chunks: Iterable[str],
  *,
  vocab_size: int = 0,
  file: str = "",
  lower_text: bool = False,
  lower_pieces: bool = False,
  restrict: bool = False,
) -> Tokenizer:
  r"""Makes a tokenizer: learned from a text, or loaded from a vocabulary file.

  Args:
    kind: a key of `KINDS`. "characters" and "bytes" have no settings.
    chunks: the text in parts, preferably cut after line ends; not a bare iterator.
    vocab_size: V of a learned vocabulary; "wordpiece" and "bpe" may find fewer pieces.
    file: a vocabulary to load instead. SentencePiece: a `.model`. WordPiece: a `vocab.txt`, one
      piece on each line, including `[UNK]`; without `[SEP]`, `<eos>` is added for the line end.
      BPE: a `tokenizer.json`, or `<any>merges.txt` beside its `<any>vocab.json`, or their folder.
    lower_text: of "wordpiece": whether to lower-case the text first.
    lower_pieces: of "wordpiece": whether to lower-case the pieces, found in the cased text.
    restrict: of "wordpiece": whether to keep only the pieces in this text.

  Returns:
    The tokenizer; equal arguments give an equal one.

  Raises:
    ValueError: a setting `data.tokenizer...` is wrong, or of another kind.
  """
  if kind not in KINDS:
    raise unknown("data.tokenizer", KINDS, kind)
  switches = {"lower_text": lower_text, "lower_pieces": lower_pieces}
  for name, value in (switches | {"restrict_vocabulary": restrict}).items():
    if value and kind != "wordpiece":
      raise UserError(f"data.{name}: expected False with the tokenizer {kind}, got True")
  if kind in CHARACTER_KINDS:
    if file:
      expected = f"data.tokenizer_file: expected none, or a run's folder, with the tokenizer {kind}"
      raise UserError(f"{expected}, got {file}")
    return Characters.train(chunks) if kind == "characters" else Bytes()
  if not file and vocab_size > MOST_PIECES:
    raise size_error(f"at most {MOST_PIECES:,}", vocab_size)
  if kind == "wordpiece":
    return WordPiece.train(chunks, vocab_size, file, **switches, restrict=restrict)
  if kind == "bpe":
    return BytePairs.load(file) if file else BytePairs.train(chunks, vocab_size)
  if file:
    return SentencePiece.load(kind, file)
  return SentencePiece.train(kind, chunks, vocab_size)


def load_tokenizer(place: str | Path, setting: str = "data.tokenizer_file") -> Tokenizer | None:
  """The tokenizer of a run, from its folder or tokenizer.json; a `ValueError` if damaged.

  None if the place is of another kind, such as a vocabulary for `train_tokenizer`.
  """
  path = Path(place, "data", "tokenizer.json")
  if not (is_run := path.is_file()):
    path = Path(place)
    if path.suffix != ".json" or not path.is_file():
      return None
  try:
    content = files.read_file(path)
    # Other libraries' files have no kind.
    is_own = is_run or "kind" in json.loads(content)
    return tokenizer_from_json(content) if is_own else None
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise file_error("a tokenizer.json", f"{path} ({error})", setting) from error


def tokenizer_from_json(text: str | bytes) -> Tokenizer:
  """Reads a tokenizer from the JSON of `Tokenizer.to_json`; a `ValueError` if damaged."""
  try:
    content = json.loads(text)
    if content["format"] > FORMAT:
      raise UserError(f"a later format than {FORMAT}: {content['format']}")
    return KINDS[content["kind"]].from_fields(content["kind"], content)
  except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
    answer = e if isinstance(e, UserError) else repr(e)
    expected = "tokenizer.json: expected the JSON of a tokenizer"
    raise UserError(f"{expected}, got a damaged one: {answer}") from e
