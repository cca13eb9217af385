"""Characters and bytes as tokens."""

from collections.abc import Iterable

import numpy as np

from dpjax.errors import UserError
from dpjax.text.tokenizer import Tokenizer, as_ids, file_error


def check_no_file(name: str, file: str) -> None:
  """Raises a `UserError` for a vocabulary file, which characters and bytes do not have."""
  if file:
    raise file_error(f"none, or a run's folder, with the tokenizer {name}", file)


class Characters(Tokenizer):
  r"""One id per character, by code point; the last id, V - 1, is for all others, U+FFFD.

  for "to be\nor not":  encode("be\n")  ->  [2, 3, 0]    decode([2, 3, 8])  ->  "be\ufffd"
  """

  name = "characters"
  lossless = True
  is_character_level = True

  def __init__(self, characters: str):
    """Takes the characters of the vocabulary, each once, sorted."""
    self._characters = characters
    self.vocab_size = len(characters) + 1
    self.unknown_id = self.vocab_size - 1
    points = list(map(ord, characters))
    # Ids by code point; the last entry is for all points beyond.
    self._table = np.full(max(points, default=0) + 2, self.vocab_size - 1, np.int32)
    self._table[points] = np.arange(len(points))
    self.start_id = max(0, characters.find("\n"))
    self.space_ids = tuple(characters.index(x) for x in " \n" if x in characters)

  @classmethod
  def train(cls, chunks: Iterable[str], *, file: str = "") -> "Characters":
    """Collects the characters of a text.

    Args:
      chunks: the text.
      file: "", or the folder of a run, to take its tokenizer.
    """
    check_no_file(cls.name, file)
    characters: set[str] = set()
    for chunk in chunks:
      characters.update(chunk)
    return cls("".join(sorted(characters)))

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
  def from_fields(cls, fields: dict) -> "Characters":
    """See `Tokenizer`."""
    if list(fields["characters"]) != sorted(set(fields["characters"])):
      raise UserError("characters that are not sorted")
    return cls(fields["characters"])


class Bytes(Tokenizer):
  """The bytes of UTF-8 as ids; invalid UTF-8 decodes as U+FFFD."""

  name = "bytes"
  vocab_size = 256
  start_id = ord("\n")
  lossless = True
  is_character_level = True
  space_ids = (ord(" "), ord("\n"))

  @classmethod
  def train(cls, chunks: Iterable[str], *, file: str = "") -> "Bytes":
    """Returns the same tokenizer for every text.

    Args:
      chunks: the text.
      file: "", or the folder of a run, to take its tokenizer.
    """
    check_no_file(cls.name, file)
    return cls()

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


class BytesWithEnds(Bytes):
  """Bytes, with two that UTF-8 does not use as the beginning and end of a text, as in H-Net."""

  name = "bytes_with_ends"
  start_id = 254
  end_id = 255
  begins_texts = True
