"""SentencePiece, as Unigram or BPE."""

import base64
import io
import re
from collections.abc import Iterable

import numpy as np

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.tokenizer import (
  Tokenizer,
  as_ids,
  check_size,
  cut_lines,
  file_error,
  is_lossless,
  size_error,
)

SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


class SentencePiece(Tokenizer):
  r"""SentencePiece, as Unigram or BPE; models trained here are lossless.

  A line end is encoded as the piece "\n" if the model has it, else as its end-of-sentence id.
  """

  def __init__(self, model: bytes):
    """Takes the content of a `.model` file; a `ValueError` if it is invalid."""
    import sentencepiece

    try:
      if not model:
        raise RuntimeError("empty")
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
      raise UserError("not a SentencePiece model") from error
    self._model = model
    self.vocab_size = self._processor.vocab_size()
    newline = self._id("\n")
    self._has_newline = newline >= 0
    self._line_end = newline if self._has_newline else self._processor.eos_id()  # -1: neither
    mark_ids = [self._id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    self._mark_ids = mark_ids if min(mark_ids) >= 0 else []
    # A model with pieces for bytes covers everything.
    self.unknown_id = None if self._mark_ids else self._processor.unk_id()
    self.start_id = max(0, self._line_end)
    self.lossless = is_lossless(self)

  @classmethod
  def train(
    cls, chunks: Iterable[str], *, file: str = "", vocab_size: int = 8000
  ) -> "SentencePiece":
    """Loads a SentencePiece model, or trains one with bytes, marks, space and line end.

    Args:
      chunks: the text.
      file: a `.model`.
      vocab_size: the number of pieces to train.
    """
    if file:
      try:
        return cls(files.read_file(file))
      except (OSError, ValueError) as error:
        raise file_error("a SentencePiece .model", f"{file} ({error})") from error
    check_size(vocab_size, 1)
    lines = (line for chunk in chunks for line in cut_lines(chunk, 4096))
    model = train_pieces(
      lines,
      "data.tokenizer.vocab_size",
      vocab_size,
      model_type=cls.name.removeprefix("sentencepiece_"),
      # The others make it lossless.
      byte_fallback=True,
      allow_whitespace_only_pieces=True,
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      user_defined_symbols=["\n"],
      required_chars=SPACE_MARK,  # Its bytes do not decode as a space.
    )
    return cls(model)

  def _encode(self, text: str) -> np.ndarray:
    parts = list(cut_lines(text, 2**14))  # the encoding time is not linear in the length
    ends = [self._line_end >= 0 and part.endswith("\n") for part in parts]
    lines = [part[:-1] if end else part for part, end in zip(parts, ends, strict=True)]
    # Chunks of a text already have their own threads (`dpjax.data.encoding`).
    encoded = self._processor.encode(lines, num_threads=1)
    ids: list[int] = []
    for line, line_ids, end in zip(lines, encoded, ends, strict=True):
      if self._mark_ids and SPACE_MARK in line:  # It would decode as a space.
        line_ids, *rest = self._processor.encode(line.split(SPACE_MARK))
        line_ids += [i for part in rest for i in (*self._mark_ids, *part)]
      ids += line_ids
      if end:
        ids.append(self._line_end)
    return np.array(ids, np.int32)

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    ids = as_ids(ids, self.vocab_size)
    if self._has_newline or self._line_end < 0:
      return self._processor.decode(ids.tolist())
    lines = np.split(ids, np.flatnonzero(ids == self._line_end))
    return "\n".join(self._processor.decode(line.tolist()) for line in lines)

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {"model": base64.b64encode(self._model).decode()}

  @classmethod
  def from_fields(cls, fields: dict) -> "SentencePiece":
    """See `Tokenizer`."""
    return cls(base64.b64decode(fields["model"], validate=True))

  def _id(self, piece: str) -> int:
    """A piece's id, -1 if the model has no such piece."""
    i = self._processor.piece_to_id(piece)
    return i if self._processor.id_to_piece(i) == piece else -1


class SentencePieceBpe(SentencePiece):
  """SentencePiece with byte pairs."""

  name = "sentencepiece_bpe"


class SentencePieceUnigram(SentencePiece):
  """SentencePiece with a Unigram model."""

  name = "sentencepiece_unigram"


def train_pieces(lines: Iterable[str], setting: str, vocab_size: int, **settings) -> bytes:
  """Trains a SentencePiece model; equal lines give equal models.

  Raises a `ValueError`, `setting: ...`, if the text does not allow this number of pieces, and
  `data.path: ...` if it cannot be trained on.
  """
  import sentencepiece

  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=filter(None, (line.removesuffix("\n") for line in lines)),
      model_writer=model,
      vocab_size=vocab_size,
      normalization_rule_name="identity",
      max_sentence_length=4 * 4096,  # SentencePiece skips longer lines.
      num_threads=1,  # the pieces depend on this number
      minloglevel=2,
      **settings,
    )
  except (RuntimeError, OSError) as error:
    for pattern, bound in (
      (r"size too high.* value <= (\d+)", "at most"),
      (r"required_chars\. \d+ vs (\d+)", "at least"),
    ):
      if match := re.search(pattern, str(error)):
        raise size_error(f"{bound} {match[1]} for this text", vocab_size, setting) from error
    expected = "data.path: expected a text that SentencePiece can be trained on"
    raise UserError(f"{expected}, got its answer {error}") from error
  return model.getvalue()
