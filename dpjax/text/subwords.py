"""SentencePiece and BPE subwords; those trained here are lossless."""

import base64
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from dpjax.errors import UserError
from dpjax.text.tokenizer import (
  Tokenizer,
  as_ids,
  check_ids,
  cut_lines,
  file_error,
  library_call,
  library_tokenizer,
  read_file,
  read_json,
  size_error,
)

# White space of every kind, in places where tokenizers like to lose it; what a
# normalisation changes; every byte that UTF-8 has.
_PROBE = (
  "  a  b\t\tc \r\n\n \u00e9\u2581\u2582 \N{GRINNING FACE}\n "
  "Ab cD e\u0301 \u2126 \ufb01 \uff21 \u00bd \u2047 x\u00ad\u200b\ufeff "
  + "".join(
    map(
      chr,
      (
        *range(0xC0),
        *range(0xC0, 0x800, 0x40),
        0x800,
        *range(0x1000, 0x10000, 0x1000),
        *range(0x10000, 0x110000, 0x40000),
      ),
    )
  )
)
# Line ends after and before all that the rules of pre-tokenizers tell apart.
_SIDES = (
  "a",
  "B",
  "7",
  ".",
  ")",
  "/",
  "_",
  "'s",
  "\u00e9",
  "\u4e2d",
  "\u2581",
  "\N{GRINNING FACE}",
)
_GAPS = (
  "\n",
  "\n\n",
  "\n\n\n",
  " \n",
  "  \n",
  "\n ",
  "\n  ",
  " \n ",
  "\n \n ",
  "\n\n ",
  "\t\n",
  "\n\t",
  "\r\n",
  "\r\n\r\n",
  "\u2003\n",
  "\n\u2003",
  " ",
  "  ",
)
_CUT_PROBE = "\n".join(
  f"\n{left}{gap}{right}" for left in _SIDES for gap in _GAPS for right in _SIDES
)
# Where GPT-2's rule cuts a text in any case: where `_cut_as_bpe` does, and where the
# parts of a text end (`is_clean_cut`, else before a space).
_GPT2_PLACES = r"(?=\n\S)|(?<=\S\n)(?=\S)|(?<=\n)(?=\s\S)|(?<=\S)(?= \S)"
# Other rules cut at some of these: behind a line end, or between two words.
_LETTER = r"[^\W\d_]"
_PLACES = tuple(
  f"(?<={before})(?={after}{_LETTER})"
  for before, after in (
    (r"\S\n", ""),
    (r"\S\n", " "),
    (r"\s\n", ""),
    (r"\s\n", " "),
    (_LETTER, " "),
  )
)
_LINE = re.compile(r"(?=\n\S)")
BLOCK = 2**12  # characters that the threads of BPE take at a time
MOST_WHOLE = 2**24  # characters without a place to cut; encoding them takes 2 GB
END_OF_TEXT = "<|endoftext|>"  # GPT-2's mark between documents
_SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


class SentencePiece(Tokenizer):
  r"""SentencePiece, as Unigram or BPE; models trained here are lossless.

  A line end is the piece of "\n" if the model has it, else its end-of-sentence id.
  """

  def __init__(self, kind: str, model: bytes):
    """Takes the content of a `.model` file.

    Raises:
      ValueError: the content is not a model.
    """
    import sentencepiece

    try:
      if not model:
        raise RuntimeError("empty")
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
    self.lossless = _is_lossless(self, _PROBE)

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
    """Learns `vocab_size` pieces, including bytes, three marks and the line end."""
    import sentencepiece

    model = io.BytesIO()
    lines = (line.removesuffix("\n") for chunk in chunks for line in cut_lines(chunk, 4096))
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
        raise size_error(f"at least {too_small[1]} for this text", vocab_size) from error
      raise UserError(
        f"data.tokenizer: expected a text that {kind} can learn from, "
        f"got SentencePiece's answer {error}"
      ) from error
    return cls(kind, model.getvalue())

  def _encode(self, text: str) -> np.ndarray:
    parts = list(cut_lines(text, 2**14))  # its time is not linear in a part's length
    ends = [self._line_end >= 0 and part.endswith("\n") for part in parts]
    lines = [part[:-1] if end else part for part, end in zip(parts, ends, strict=True)]
    # Parts of a text have threads of their own (`dpjax.data.encoding`), which wait less for
    # each other than those of the library, by a third.
    found, tails = self._processor.encode(lines, num_threads=1), ([], [self._line_end])
    if _SPACE_MARK in text and self._mark_ids:
      found = [
        self._encode_marks(line) if _SPACE_MARK in line else ids
        for line, ids in zip(lines, found, strict=True)
      ]
    ids = (part for ids, end in zip(found, ends, strict=True) for part in (ids, tails[end]))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32)

  def _encode_marks(self, line: str) -> list[int]:
    """Encodes a text that contains U+2581, which would decode as a space."""
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
  """BPE of the `tokenizers` library: GPT-2's, or as described by a file.

  Most files cut a text into words before merging, each with its own rules. GPT-2's rule cuts at
  every line end, so lines can be encoded in parallel; Llama 3's joins some line ends to the
  text before them, and Llama 2's does not cut at all. Loading a file tests its rule on a text.
  The ids are always those of the whole text.
  """

  kind = "bpe"

  def __init__(self, raw):
    """Takes the library's tokenizer.

    Raises:
      ValueError: it is not BPE.
    """
    self._raw = raw
    if type(raw.model).__name__ != "BPE" or raw.decoder is None:
      raise UserError("a tokenizer that is not BPE")
    # A file can ask for them; neither is for the text of a language model.
    raw.no_truncation()
    raw.no_padding()
    raw.model.dropout = None
    # Ids may have gaps, so that there are fewer pieces.
    self.vocab_size = max(raw.get_vocab().values(), default=-1) + 1
    known = map(raw.token_to_id, ("\u010a", "\n", "<0x0A>", END_OF_TEXT))
    self.start_id = next((i for i in known if i is not None), 0)  # U+010A is "\n"
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    byte_ids = [raw.token_to_id(piece) for piece in byte_pieces]
    self.open_ids = frozenset(
      i
      for i, piece in zip(byte_ids, byte_pieces, strict=True)
      if i is not None and self.decode([i]) != piece
    )
    if raw.model.unk_token and len(self.open_ids) < 256:
      self.unknown_id = raw.token_to_id(raw.model.unk_token)
    marks = [token.content for token in raw.get_added_tokens_decoder().values()]
    probe = _CUT_PROBE + "".join(f" {mark} \n{mark}\n\na" for mark in marks)
    self._is_like_gpt2 = self._can_cut(_GPT2_PLACES, probe)
    self._places = None
    if not self._is_like_gpt2:
      places = [place for place in _PLACES if self._can_cut(place, probe)]
      self._places = re.compile("|".join(places) or r"(?!)")
    self.lossless = _is_lossless(self, _PROBE + "".join(f" {mark} \n" for mark in marks))

  @classmethod
  def load(cls, file: str) -> "BytePairs":
    """Reads a `tokenizer.json`, or the pair of a merges file and its vocabulary."""
    from tokenizers import models

    path = Path(file)
    try:
      if path.suffix == ".json":
        return cls(library_tokenizer(read_json(read_file(path))))
      merges = path / "merges.txt" if path.is_dir() else path
      if not merges.name.endswith("merges.txt"):
        raise UserError("another name")
      vocabulary = merges.with_name(merges.name[: -len("merges.txt")] + "vocab.json")
      read_file(merges)
      ids = read_json(read_file(vocabulary))
      check_ids([*ids.values()] if isinstance(ids, dict) else [])
      model = library_call(models.BPE.from_file, str(vocabulary), str(merges))
      return cls(_byte_level(model))
    except ValueError as error:
      if str(error).startswith("data."):
        raise
      raise file_error(
        "a tokenizer.json of BPE, or <any>merges.txt with "
        "<any>vocab.json beside it, or their folder",
        f"{file} ({error})",
      ) from error

  @classmethod
  def train(cls, chunks: Iterable[str], vocab_size: int) -> "BytePairs":
    """Learns `vocab_size` pieces: `<|endoftext|>`, the bytes, and merges."""
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

  def _encode(self, text: str) -> np.ndarray:
    return self._encode_parts(_cut_as_bpe(text, BLOCK) if self._is_like_gpt2 else [text])

  def _encode_parts(self, parts: list[str]) -> np.ndarray:
    found = library_call(self._raw.encode_batch_fast, parts, add_special_tokens=False)
    return np.array(list(itertools.chain.from_iterable(f.ids for f in found)), np.int32)

  def _can_cut(self, places: str, probe: str) -> bool:
    """Whether cutting a text at all of these places preserves its ids."""
    # Pieces with a line end or a space inside can go across a place.
    probe += self._crossing
    whole = self._encode_parts([probe])
    return np.array_equal(self._encode_parts(re.split(places, probe)), whole)

  @cached_property
  def _crossing(self) -> str:
    ids = [[i] for i in sorted(self._raw.get_vocab().values())]
    pieces = library_call(self._raw.decode_batch, ids, skip_special_tokens=False)
    found = filter(re.compile(r"\n[^\n]|\S[\n ]").search, pieces)
    return "".join(f"x{piece}x .{piece} x" for piece in found)

  def parts(self, chunks: Iterable[str]) -> Iterator[str]:
    """See `Tokenizer`."""
    if self._places is None:
      yield from chunks
      return
    held = ""
    for chunk in chunks:
      held += chunk
      cut = max((found.end() for found in self._places.finditer(held)), default=0)
      if cut:
        yield held[:cut]
        held = held[cut:]
      if len(held) > MOST_WHOLE:
        raise file_error(
          "a tokenizer by which long texts can be cut without a change of their ids, or "
          f"a text of up to {MOST_WHOLE:,} characters a split",
          "a longer one",
        )
    if held:
      yield held

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    ids = as_ids(ids, self.vocab_size).tolist()
    return library_call(self._raw.decode, ids, skip_special_tokens=False)

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {"tokenizer": json.loads(self._raw.to_str())}

  @classmethod
  def from_fields(cls, kind: str, fields: dict) -> "BytePairs":
    """See `Tokenizer`."""
    return cls(library_tokenizer(fields["tokenizer"]))


def _is_lossless(tokenizer: Tokenizer, probe: str) -> bool:
  """Whether decoding restores a text, with and without leading spaces."""
  texts = probe, probe.lstrip()
  return all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def _cut_as_bpe(text: str, least: int = 1) -> list[str]:
  r"""Cuts a text where GPT-2's rule always cuts: before a "\n" followed by a non-space.

  Each part but the last has at least the given number of characters.
  """
  parts, begin = [], 0
  while begin < len(text):
    cut = _LINE.search(text, begin + least)
    end = cut.start() if cut else len(text)
    parts.append(text[begin:end])
    begin = end
  return parts


def _byte_level(model):
  """Byte-level BPE around a model, without adding a leading space."""
  from tokenizers import Tokenizer as LibraryTokenizer
  from tokenizers import decoders, pre_tokenizers

  raw = LibraryTokenizer(model)
  raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  raw.decoder = decoders.ByteLevel()
  # In GPT-2's files it is an entry, and only what is special is not cut into bytes.
  if raw.token_to_id(END_OF_TEXT) is not None:
    raw.add_special_tokens([END_OF_TEXT])
  return raw
