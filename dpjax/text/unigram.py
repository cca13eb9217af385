r"""Unigram boundaries: SentencePiece's cuts of words, as targets for a predictor.

With a model that cuts "ab" | "c" and "c" | "ba":

  text        a b c _ c b a _ _ a b c \n c      (_ is the space)
  boundaries  0 1 0 1 1 0 0 1 1 0 1 0 1  0

Source: Sec. 3.1.2 of the pooling paper (Nawrot et al. 2023, arXiv:2211.09761); Kudo 2018,
arXiv:1804.10959.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.sentencepiece import SPACE_MARK, train_pieces
from dpjax.text.tokenizer import MAX_PIECES, Tokenizer, cut_lines, file_error, size_error

_MAX_WORD = 2**14
_MAX_WORDS = 2**21  # in the cache


class UnigramBoundaries:
  """The segmentation of a Unigram model: each word, between spaces and line ends, on its own.

    b_t = 1  where t is the last character of a piece that is not its word's last one,
             and where t is a space or a line end
    b_t = 0  elsewhere

  The authors' code puts the boundaries of the first word of a stream one character late; this does
  not. A word whose length the model changes, by normalisation or by spelling it in bytes, is one
  piece. A word of more than 2^14 characters is cut into parts of that length.
  """

  def __init__(self, model: bytes):
    """Takes a model; a `ValueError` if it is not a SentencePiece model of the type Unigram."""
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    model_class = proto.ModelProto  # pyright: ignore[reportAttributeAccessIssue]  (made on import)
    try:
      content = model_class.FromString(model)
    except DecodeError:
      content = model_class()
    if not content.pieces or content.trainer_spec.model_type != content.trainer_spec.UNIGRAM:
      raise UserError("model: expected a SentencePiece model of the type unigram, got another file")
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self._boundaries: dict[str, bytes] = {}  # of cached words, one byte per character

  def __call__(self, text: str) -> np.ndarray:
    """The boundaries of a text, uint8 [number of characters].

    Parts of a text have the same boundaries as the full text, if none splits a word.
    """
    words = text.replace("\n", " ").split(" ")
    if len(self._boundaries) > _MAX_WORDS:
      self._boundaries.clear()
    new = [word for word in dict.fromkeys(words) if word not in self._boundaries]
    self._boundaries.update(zip(new, self._cut(new), strict=True))
    # The separator between two words is a boundary.
    boundaries = b"\1".join([self._boundaries[word] for word in words])
    return np.frombuffer(boundaries, np.uint8).copy()

  def of_tokens(self, text: str, tokenizer: Tokenizer) -> np.ndarray:
    r"""The boundaries of a text's tokens, characters or bytes, uint8 [number of tokens].

    A character's boundary belongs to its last token; with the model above,

      "b\u00e9 b" in bytes, which are b, C3, A9, space, b  ->  0 0 0 1 0
    """
    ends = tokenizer.character_ends(text)
    boundaries = np.zeros(ends[-1] + 1 if len(ends) else 0, np.uint8)
    boundaries[ends] = self(text)
    return boundaries

  def _cut(self, words: list[str]) -> Iterator[bytes]:
    """The boundaries of single words."""
    parts_of = [
      [word[begin : begin + _MAX_WORD] for begin in range(0, len(word), _MAX_WORD)]
      for word in words
    ]
    pieces = iter(self._processor.encode(sum(parts_of, []), out_type=str) if words else [])
    for word, parts in zip(words, parts_of, strict=True):
      boundaries = np.zeros(len(word), np.uint8)
      lengths = [length for part in parts for length in _lengths(part, next(pieces))]
      boundaries[np.cumsum(lengths[:-1], dtype=int) - 1] = 1
      yield boundaries.tobytes()


def _lengths(word: str, pieces: list[str]) -> list[int]:
  """The number of a word's characters in each piece, at least 1."""
  lengths = [len(piece) for piece in pieces]
  # Excludes the mark that stands for a space before the word.
  if sum(lengths) == len(word) + 1 and pieces[0][0] == SPACE_MARK:
    lengths[0] -= 1
  return [length for length in lengths if length] if sum(lengths) == len(word) else [len(word)]


def train_unigram(chunks: Iterable[str], vocab_size: int) -> bytes:
  """Trains a Unigram model, the content of a `.model` file, as the pooling paper's authors do.

  Every character except white space is a piece. Words are cut into pieces of up to 16
  characters, which do not mix scripts or join digits. Only runs of spaces are normalised. Equal
  chunks, none of which splits a word, give equal models; three of the pieces are marks (unknown,
  begin, end).

  Raises a `ValueError`, `model.boundaries.size: ...`, or `data.path: ...` for a text without words.

  Source: Sec. 4.2 of the pooling paper; the settings are those recorded in the authors' models.
  """
  setting = "model.boundaries.size"
  if not 4 <= vocab_size <= MAX_PIECES:
    raise size_error(f"4 to {MAX_PIECES:,}", vocab_size, setting)
  # Cutting a long line at a space does not change its words.
  lines = (line for chunk in chunks for line in cut_lines(chunk, 4096))
  lines = filter(str.strip, lines)
  if (first := next(lines, None)) is None:
    raise UserError("data.path: expected a text that has words, got one without")
  return train_pieces(
    itertools.chain([first], lines),
    setting,
    vocab_size=vocab_size,
    model_type="unigram",
    character_coverage=1.0,
    split_by_whitespace=True,
    split_by_number=True,
    split_digits=True,
    split_by_unicode_script=True,
    max_sentencepiece_length=16,
    remove_extra_whitespaces=True,
    add_dummy_prefix=True,
  )


def load_unigram(file: str | Path) -> bytes:
  """The content of a SentencePiece `.model` file; a `ValueError` for other types than Unigram."""
  try:
    UnigramBoundaries(model := files.read_file(file))
  except (OSError, ValueError) as error:
    expected = "a SentencePiece model of the type unigram"
    raise file_error(expected, f"{file} ({error})", "model.boundaries.file") from error
  return model
