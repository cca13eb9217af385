"""SentencePiece and byte-level BPE: subwords that keep the whole text."""

import base64
import io
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dpjax.errors import UserError
from dpjax.text.tokenizer import (
  Tokenizer,
  as_ids,
  cut_lines,
  file_error,
  library_call,
  library_tokenizer,
  read_file,
  size_error,
)

# White space of every kind, in places where tokenizers like to lose it.
_PROBE = "  a  b\t\tc \r\n\n \u00e9\u2581\u2582 \N{GRINNING FACE}\n "
END_OF_TEXT = "<|endoftext|>"  # GPT-2's mark between documents
_SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


class SentencePiece(Tokenizer):
  r"""SentencePiece, as Unigram or as BPE; one that is learned here is lossless.

  A line end is the piece of "\n" where the model has it, else its end-of-sentence id.
  """

  def __init__(self, kind: str, model: bytes):
    """Takes the content of a `.model` file.

    Raises:
      ValueError: it is none.
    """
    import sentencepiece

    try:
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
      raise UserError("not a SentencePiece model") from error
    self.kind = kind
    self._model = model
    self.vocab_size = self._processor.vocab_size()
    newline, end_id = self._id("\n"), self._processor.eos_id()
    self._has_newline = newline >= 0
    self._line_end = newline if self._has_newline else end_id  # -1: there is neither
    mark_ids = [self._id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
    self._mark_ids = mark_ids if min(mark_ids) >= 0 else []
    # Pieces for bytes stand for what it has not.
    self.unknown_id = None if self._mark_ids else self._processor.unk_id()
    self.start_id = max(0, self._line_end)
    self.lossless = self.decode(self.encode(_PROBE)) == _PROBE

  @classmethod
  def load(cls, kind: str, file: str) -> "SentencePiece":
    """Reads a `.model` file."""
    try:
      return cls(kind, read_file(file))
    except ValueError as error:
      if str(error).startswith("data."):
        raise
      raise file_error("a SentencePiece .model", file) from error

  @classmethod
  def train(cls, kind: str, chunks: Iterable[str], vocab_size: int) -> "SentencePiece":
    """Learns `vocab_size` pieces; bytes, three marks and the line end are of them."""
    import sentencepiece

    model = io.BytesIO()
    lines = (line.removesuffix("\n") for chunk in chunks
             for line in cut_lines(chunk, 4096))
    try:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=filter(None, lines),
        model_writer=model,
        model_type=kind.removeprefix("sentencepiece_"),
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        max_sentence_length=4 * 4096,
        num_threads=1,  # another number gives other pieces
        minloglevel=2,
      )
    except (RuntimeError, OSError) as error:
      too_large = re.search(r"size too high.* value <= (\d+)", str(error))
      if too_large:
        raise size_error(f"at most {too_large[1]} for this text", vocab_size) from error
      too_small = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
      if too_small:
        raise size_error(f"at least {too_small[1]} for this text",
                         vocab_size) from error
      raise UserError(f"data.tokenizer: expected a text that {kind} can learn from, "
                      f"got SentencePiece's answer {error}") from error
    return cls(kind, model.getvalue())

  def encode(self, text: str) -> np.ndarray:
    """See `Tokenizer`."""
    parts = list(cut_lines(text, 2**14))  # its time is not linear in a part's length
    ends = [self._line_end >= 0 and part.endswith("\n") for part in parts]
    lines = [part[:-1] if end else part for part, end in zip(parts, ends, strict=True)]
    found, tails = self._processor.encode(lines), ([], [self._line_end])
    if _SPACE_MARK in text and self._mark_ids:
      found = [
        self._encode_marks(line) if _SPACE_MARK in line else ids
        for line, ids in zip(lines, found, strict=True)
      ]
    ids = (part for ids, end in zip(found, ends, strict=True) for part in (ids, tails[end]))
    return np.array(list(itertools.chain.from_iterable(ids)), np.int32)

  def _encode_marks(self, line: str) -> list[int]:
    """Encodes a text that has U+2581 itself, which would come back as a space."""
    first, *rest = self._processor.encode(line.split(_SPACE_MARK))
    return first + [i for ids in rest for i in (*self._mark_ids, *ids)]

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
  def from_fields(cls, kind: str, fields: dict) -> "SentencePiece":
    """See `Tokenizer`."""
    return cls(kind, base64.b64decode(fields["model"], validate=True))

  def _id(self, piece: str) -> int:
    """A piece's id, -1 if the model has no such piece."""
    found = self._processor.piece_to_id(piece)
    return found if self._processor.id_to_piece(found) == piece else -1


class BytePairs(Tokenizer):
  """Byte-level BPE, as GPT-2 has it."""

  kind = "bpe"

  def __init__(self, raw):
    """Takes the library's tokenizer.

    Raises:
      ValueError: it is none of byte-level BPE.
    """
    self._raw = raw
    if type(raw.model).__name__ != "BPE" or raw.decoder is None:
      raise UserError("a tokenizer that is not byte-level BPE")
    self.vocab_size = raw.get_vocab_size()
    known = (raw.token_to_id(piece) for piece in ("\u010a", END_OF_TEXT))
    self.start_id = next((i for i in known if i is not None), 0)  # U+010A is "\n"
    self.lossless = self.decode(self.encode(_PROBE)) == _PROBE

  @classmethod
  def load(cls, file: str) -> "BytePairs":
    """Reads a `tokenizer.json`, or the pair of a merges file and its vocabulary."""
    from tokenizers import models

    path = Path(file)
    try:
      if path.suffix == ".json":
        return cls(library_tokenizer(json.loads(read_file(path))))
      merges = path / "merges.txt" if path.is_dir() else path
      if not merges.name.endswith("merges.txt"):
        raise UserError("another name")
      vocabulary = merges.with_name(merges.name[:-len("merges.txt")] + "vocab.json")
      read_file(merges)
      read_file(vocabulary)
      model = library_call(models.BPE.from_file, str(vocabulary), str(merges))
      return cls(_byte_level(model))
    except ValueError as error:
      if str(error).startswith("data."):
        raise
      raise file_error("a tokenizer.json of byte-level BPE, or <any>merges.txt with "
                       "<any>vocab.json beside it, or their folder", file) from error

  @classmethod
  def train(cls, chunks: Iterable[str], vocab_size: int) -> "BytePairs":
    """Learns `vocab_size` pieces: `<|endoftext|>`, the bytes, and merges of them."""
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < 257:
      raise size_error("at least 257 (the bytes and one mark)", vocab_size)
    raw = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[END_OF_TEXT],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    )
    parts = (part for chunk in chunks for part in _cut_as_bpe(chunk))
    raw.train_from_iterator(parts, trainer)
    return cls(raw)

  def encode(self, text: str) -> np.ndarray:
    """See `Tokenizer`."""
    found = self._raw.encode_batch_fast(_cut_as_bpe(text), add_special_tokens=False)
    return np.array(list(itertools.chain.from_iterable(f.ids for f in found)), np.int32)

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    return self._raw.decode(as_ids(ids, self.vocab_size).tolist(),
                            skip_special_tokens=False)

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {"tokenizer": json.loads(self._raw.to_str())}

  @classmethod
  def from_fields(cls, kind: str, fields: dict) -> "BytePairs":
    """See `Tokenizer`."""
    return cls(library_tokenizer(fields["tokenizer"]))


def _cut_as_bpe(text: str) -> list[str]:
  r"""Cuts a text where GPT-2's rule cuts in any case: before a "\n" and a non-space."""
  return re.split(r"(?=\n\S)", text)


def _byte_level(model):
  """Byte-level BPE without a space in front of the text, round a model."""
  from tokenizers import Tokenizer as LibraryTokenizer
  from tokenizers import decoders, pre_tokenizers

  raw = LibraryTokenizer(model)
  raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  raw.decoder = decoders.ByteLevel()
  # In GPT-2's files it is an entry, and only what is special is not cut into bytes.
  if raw.token_to_id(END_OF_TEXT) is not None:
    raw.add_special_tokens([END_OF_TEXT])
  return raw
