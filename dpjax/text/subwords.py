"""SentencePiece and BPE subwords; those trained here are lossless."""

import base64
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.tokenizer import (
  Tokenizer,
  as_ids,
  cut_lines,
  file_error,
  library_call,
  library_tokenizer,
  size_error,
)

# White space where tokenizers lose it; what a normalisation changes; every byte that UTF-8 has.
_POINTS = [*range(0xC0), *range(0xC0, 0x800, 0x40), 0x800, *range(0x1000, 0x10000, 0x1000)]
_POINTS += range(0x10000, 0x110000, 0x40000)
_PROBE = "  a  b\t\tc \r\n\n \u00e9\u2581\u2582 \N{GRINNING FACE}\n Ab cD e\u0301 \u2126 \ufb01 "
_PROBE += "\uff21 \u00bd \u2047 x\u00ad\u200b\ufeff " + "".join(map(chr, _POINTS))
_LINE = re.compile(r"(?<=\S\n)(?=[^\W\d_])")  # between lines that words do not join
# Parts of a line, cut where words end, or within words of more than 4,096 characters: the time to
# learn from a word grows with the square of its length.
_LONG = re.compile(r".{1,4096}(?<=\S)(?=[ \n])|.{1,4096}", re.S)
END_OF_TEXT = "<|endoftext|>"  # GPT-2's mark between documents
SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


class SentencePiece(Tokenizer):
  r"""SentencePiece, as Unigram or BPE; models trained here are lossless.

  A line end is the piece of "\n" if the model has it, else its end-of-sentence id.
  """

  def __init__(self, kind: str, model: bytes):
    """Takes the content of a `.model` file; a `ValueError` if it is none."""
    import sentencepiece

    try:
      if not model:
        raise RuntimeError("empty")
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
      raise UserError("not a SentencePiece model") from error
    self.kind, self._model = kind, model
    self.vocab_size = self._processor.vocab_size()
    newline = self._id("\n")
    self._has_newline = newline >= 0
    self._line_end = newline if self._has_newline else self._processor.eos_id()  # -1: neither
    mark_ids = [self._id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    self._mark_ids = mark_ids if min(mark_ids) >= 0 else []
    # A model with pieces for bytes knows everything.
    self.unknown_id = None if self._mark_ids else self._processor.unk_id()
    self.start_id = max(0, self._line_end)
    self.lossless = _is_lossless(self, _PROBE)

  @classmethod
  def load(cls, kind: str, file: str) -> "SentencePiece":
    """Reads a `.model` file."""
    try:
      return cls(kind, files.read_file(file))
    except (OSError, ValueError) as error:
      raise file_error("a SentencePiece .model", f"{file} ({error})") from error

  @classmethod
  def train(cls, kind: str, chunks: Iterable[str], vocab_size: int) -> "SentencePiece":
    """Learns `vocab_size` pieces, including bytes, three marks, the space and the line end."""
    lines = (line for chunk in chunks for line in cut_lines(chunk, 4096))
    lossless: Any = dict(byte_fallback=True, allow_whitespace_only_pieces=True)
    lossless |= dict(remove_extra_whitespaces=False, add_dummy_prefix=False)
    lossless["required_chars"] = SPACE_MARK  # Its bytes do not decode as a space.
    settings = dict(model_type=kind.removeprefix("sentencepiece_"), user_defined_symbols=["\n"])
    return cls(kind, learn_pieces(lines, "data.tokenizer_size", vocab_size, **settings, **lossless))

  def _encode(self, text: str) -> np.ndarray:
    parts = list(cut_lines(text, 2**14))  # its time is not linear in a part's length
    ends = [self._line_end >= 0 and part.endswith("\n") for part in parts]
    lines = [part[:-1] if end else part for part, end in zip(parts, ends, strict=True)]
    # Parts of a text have threads of their own (`dpjax.data.encoding`).
    found, ids = self._processor.encode(lines, num_threads=1), []
    for line, line_ids, end in zip(lines, found, ends, strict=True):
      if self._mark_ids and SPACE_MARK in line:  # It would decode as a space.
        line_ids, *rest = self._processor.encode(line.split(SPACE_MARK))
        line_ids += [i for part in rest for i in (*self._mark_ids, *part)]
      ids += [*line_ids, *[self._line_end] * end]
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
  def from_fields(cls, kind: str, fields: dict) -> "SentencePiece":
    """See `Tokenizer`."""
    return cls(kind, base64.b64decode(fields["model"], validate=True))

  def _id(self, piece: str) -> int:
    """A piece's id, -1 if the model has no such piece."""
    found = self._processor.piece_to_id(piece)
    return found if self._processor.id_to_piece(found) == piece else -1


def learn_pieces(lines: Iterable[str], setting: str, vocab_size: int, **settings) -> bytes:
  """Learns a SentencePiece model; equal lines give equal models.

  Raises a `ValueError`, `setting: ...`, if the text does not allow this number of pieces, and
  `data.path: ...` if nothing can be learned from it.
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
      num_threads=1,  # another number gives other pieces
      minloglevel=2,
      **settings,
    )
  except (RuntimeError, OSError) as error:
    for pattern, bound in (
      (r"size too high.* value <= (\d+)", "at most"),
      (r"required_chars\. \d+ vs (\d+)", "at least"),
    ):
      if found := re.search(pattern, str(error)):
        raise size_error(f"{bound} {found[1]} for this text", vocab_size, setting) from error
    expected = "data.path: expected a text that SentencePiece can learn from"
    raise UserError(f"{expected}, got its answer {error}") from error
  return model.getvalue()


class BytePairs(Tokenizer):
  """BPE of the `tokenizers` library: GPT-2's, or as described by a file.

  Where words end with lines, as by the rules of GPT-2 and Llama 3, a text is encoded line by
  line; otherwise, as by Llama 2's, whole, which takes over 100 bytes of memory a character.
  """

  kind = "bpe"

  def __init__(self, raw):
    """Takes the library's tokenizer; a `ValueError` if it is not BPE."""
    self._raw = raw
    if type(raw.model).__name__ != "BPE" or raw.decoder is None:
      raise UserError("a tokenizer that is not BPE")
    raw.no_truncation()  # A file can ask for these three.
    raw.no_padding()
    raw.model.dropout = None
    self.vocab_size = max(raw.get_vocab().values(), default=-1) + 1  # Ids may have gaps.
    known = map(raw.token_to_id, ("\u010a", "\n", "<0x0A>", END_OF_TEXT))
    self.start_id = next((i for i in known if i is not None), 0)  # U+010A is "\n"
    pieces = {raw.token_to_id(piece): piece for piece in (f"<0x{i:02X}>" for i in range(256))}
    pieces.pop(None, None)
    self.open_ids = frozenset(i for i in pieces if self.decode([i]) != pieces[i])
    if raw.model.unk_token and len(self.open_ids) < 256:
      self.unknown_id = raw.token_to_id(raw.model.unk_token)
    rule = json.loads(raw.to_str())["pre_tokenizer"] or {}
    self._splits_lines = _splits_lines(raw)
    self._splits_spaces = self._splits_lines and rule.get("use_regex", False)  # as GPT-2's
    marks = [token.content for token in raw.get_added_tokens_decoder().values()]
    self.lossless = _is_lossless(self, _PROBE + "".join(f" {mark} \n" for mark in marks))

  @classmethod
  def load(cls, file: str) -> "BytePairs":
    """Reads a `tokenizer.json`, or the pair of a merges file and its vocabulary."""
    from tokenizers import models

    path = Path(file)
    try:
      if path.suffix == ".json":
        return cls(library_tokenizer(files.load_json(path)))
      merges = path / "merges.txt" if path.is_dir() else path
      if not merges.name.endswith("merges.txt"):
        raise UserError("another name")
      pair = merges.with_name(merges.name.removesuffix("merges.txt") + "vocab.json"), merges
      for each in pair:
        files.read_file(each)
      return cls(_byte_level(library_call(models.BPE.from_file, *map(str, pair))))
    except (OSError, ValueError) as error:
      expected = "a tokenizer.json of BPE, or <any>merges.txt with <any>vocab.json beside it"
      raise file_error(f"{expected}, or their folder", f"{file} ({error})") from error

  @classmethod
  def train(cls, chunks: Iterable[str], vocab_size: int) -> "BytePairs":
    """Learns `vocab_size` pieces: `<|endoftext|>`, the bytes, and merges."""
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < 257:
      raise size_error("at least 257 (the bytes and one mark)", vocab_size)
    raw = _byte_level(models.BPE())
    marks: Any = dict(special_tokens=[END_OF_TEXT], show_progress=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, **marks)
    lines = (line for chunk in chunks for line in _LINE.split(chunk))
    raw.train_from_iterator((part for line in lines for part in _LONG.findall(line)), trainer)
    return cls(raw)

  def _encode(self, text: str) -> np.ndarray:
    lines = _LINE.split(text) if self._splits_lines else [text]
    found = library_call(self._raw.encode_batch_fast, lines, add_special_tokens=False)
    return np.array(list(itertools.chain.from_iterable(f.ids for f in found)), np.int32)

  def parts(self, chunks: Iterable[str]) -> Iterator[str]:
    """See `Tokenizer`."""
    if self._splits_spaces:
      yield from chunks
      return
    held = ""
    for chunk in chunks:
      held += chunk
      ends = [found.end() for found in _LINE.finditer(held)] if self._splits_lines else []
      if ends:
        yield held[: ends[-1]]
        held = held[ends[-1] :]
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


def _splits_lines(raw) -> bool:
  """Whether normaliser, marks and rule let the words of a text be those of its `_LINE`s."""
  marks = raw.get_added_tokens_decoder().values()
  if raw.pre_tokenizer is None or any(x.lstrip or x.rstrip or "\n" in x.content for x in marks):
    return False
  if raw.normalizer and type(raw.normalizer).__name__ not in ("NFC", "NFD", "NFKC", "NFKD"):
    return False

  def words(text: str) -> list[tuple[str, int]]:
    return [(word, end) for word, (_, end) in raw.pre_tokenizer.pre_tokenize_str(text)]

  for character in "aB7.)/_\u00e9\u4e2d\u2581\N{GRINNING FACE}":
    line = f"a {character}\n"
    for after in "bB\u4e2d":
      whole = words(line) + [(word, len(line) + end) for word, end in words(after)]
      if words(line + after) != whole:
        return False
  return True


def _byte_level(model):
  """Byte-level BPE around a model, without adding a leading space."""
  from tokenizers import Tokenizer as LibraryTokenizer
  from tokenizers import decoders, pre_tokenizers

  raw = LibraryTokenizer(model)
  raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  raw.decoder = decoders.ByteLevel()
  if raw.token_to_id(END_OF_TEXT) is not None:  # else it would be cut into bytes
    raw.add_special_tokens([END_OF_TEXT])
  return raw
