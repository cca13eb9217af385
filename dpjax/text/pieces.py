"""BPE and WordPiece from the `tokenizers` library; a BPE that is trained here is lossless."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.tokenizer import (
  LINE,
  Tokenizer,
  as_ids,
  check_size,
  cut_lines,
  file_error,
  is_lossless,
  size_error,
)

# Parts of a line, cut where words end, or within words of more than 4,096 characters: the time to
# train on a word grows with the square of its length.
_LONG = re.compile(r".{1,4096}(?<=\S)(?=[ \n])|.{1,4096}", re.S)
END_OF_TEXT = "<|endoftext|>"  # GPT-2's mark between documents


def library_tokenizer(content: dict):
  """A tokenizer of the `tokenizers` library from its own JSON; a `ValueError` if it is invalid."""
  from tokenizers import Tokenizer as LibraryTokenizer

  return library_call(LibraryTokenizer.from_str, json.dumps(content))


def library_call(call, *arguments, **options):
  """Calls the `tokenizers` library, and turns its errors into a `UserError`."""
  try:
    return call(*arguments, **options)
  except BaseException as error:
    # A panic is not an Exception.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    answer = " ".join(str(error).split())
    raise UserError(
      f"tokenizer: expected one that the tokenizers library can use, got its answer: {answer}"
    ) from error


class BytePairs(Tokenizer):
  """BPE of the `tokenizers` library: GPT-2's, or as described by a file.

  Encoding takes over 100 bytes of memory per character, so pass long texts in chunks.
  """

  name = "bpe"

  def __init__(self, raw):
    """Takes the library's tokenizer; a `ValueError` if it is not BPE."""
    self._raw = raw
    if type(raw.model).__name__ != "BPE" or raw.decoder is None:
      raise UserError("a tokenizer that is not BPE")
    raw.no_truncation()  # A file may enable these three.
    raw.no_padding()
    raw.model.dropout = None
    self.vocab_size = max(raw.get_vocab().values(), default=-1) + 1  # Ids may have gaps.
    starts = map(raw.token_to_id, ("\u010a", "\n", "<0x0A>", END_OF_TEXT))
    self.start_id = next((i for i in starts if i is not None), 0)  # U+010A is "\n"
    pieces = {raw.token_to_id(piece): piece for piece in (f"<0x{i:02X}>" for i in range(256))}
    pieces.pop(None, None)
    self.byte_ids = frozenset(i for i in pieces if self.decode([i]) != pieces[i])
    if raw.model.unk_token and len(self.byte_ids) < 256:
      self.unknown_id = raw.token_to_id(raw.model.unk_token)
    marks = [token.content for token in raw.get_added_tokens_decoder().values()]
    self.lossless = is_lossless(self, "".join(f" {mark} \n" for mark in marks))

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
  def train(cls, chunks: Iterable[str], *, file: str = "", vocab_size: int = 8000) -> "BytePairs":
    """Loads byte pairs, or trains them: `<|endoftext|>`, the bytes, and merges.

    Args:
      chunks: the text.
      file: a `tokenizer.json`, `<any>merges.txt` beside `<any>vocab.json`, or their folder.
      vocab_size: the maximum number of pieces to train, at least 257.
    """
    from tokenizers import models, pre_tokenizers, trainers

    if file:
      return cls.load(file)
    check_size(vocab_size, 257, " (the bytes and one mark)")
    raw = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
      vocab_size=vocab_size,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      special_tokens=[END_OF_TEXT],
      show_progress=False,
    )
    lines = (line for chunk in chunks for line in LINE.split(chunk))
    raw.train_from_iterator((part for line in lines for part in _LONG.findall(line)), trainer)
    return cls(raw)

  def _encode(self, text: str) -> np.ndarray:
    (encoded,) = library_call(self._raw.encode_batch_fast, [text], add_special_tokens=False)
    return np.array(encoded.ids, np.int32)

  def decode(self, ids) -> str:
    """See `Tokenizer`."""
    ids = as_ids(ids, self.vocab_size).tolist()
    return library_call(self._raw.decode, ids, skip_special_tokens=False)

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {"tokenizer": json.loads(self._raw.to_str())}

  @classmethod
  def from_fields(cls, fields: dict) -> "BytePairs":
    """See `Tokenizer`."""
    return cls(library_tokenizer(fields["tokenizer"]))


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


class WordPiece(Tokenizer):
  r"""BERT's WordPiece, cased, with a line-end token for each "\n"; not lossless.

  The vocabulary is the file's, and a line ends with its `[SEP]` or an added `<eos>`; its pieces may
  be lower-cased, and restricted to those of the train split. A restricted one uses the order of the
  Dispatcher's authors: `<unk>`, `<pad>`, `<sos>`, `<eos>`, then the pieces by decreasing frequency,
  ties in the order of their characters.
  """

  name = "wordpiece"
  lossless = False

  def __init__(self, raw, pieces: Sequence[str], lower_text: bool, lower_pieces: bool):
    """Takes the library's tokenizer and the vocabulary in the order of its ids."""
    self._raw = raw
    self._pieces = list(pieces)
    self._lower_text = lower_text
    self._lower_pieces = lower_pieces
    ids = {piece: i for i, piece in enumerate(self._pieces)}
    self.vocab_size = len(ids)
    self.start_id = ids["<eos>"] if "<eos>" in ids else ids["[SEP]"]
    self.unknown_id = unknown = ids["<unk>"] if "<unk>" in ids else ids["[UNK]"]
    table = [ids.get(piece, unknown) for piece in _raw_pieces(raw, lower_pieces)]
    self._table = np.array([*table, self.start_id], np.int32)

  @classmethod
  def train(
    cls,
    chunks: Iterable[str],
    *,
    file: str = "",
    vocab_size: int = 8000,
    lower_text: bool = False,
    lower_pieces: bool = False,
    restrict_vocabulary: bool = False,
  ) -> "WordPiece":
    """Loads or trains BERT's pieces, and makes the vocabulary from them.

    Args:
      chunks: the text.
      file: a `vocab.txt`, one piece on each line, including `[UNK]`; without `[SEP]`, `<eos>` is
        added for the line end.
      vocab_size: the maximum number of pieces to train.
      lower_text: whether to lower-case the text first.
      lower_pieces: whether to lower-case the pieces, found in the cased text.
      restrict_vocabulary: whether to keep only the pieces in this text.
    """
    raw = _bert(_read_pieces(file)) if file else _train_bert(chunks, vocab_size, lower_text)
    raw_pieces = _raw_pieces(raw, lower_pieces)
    pieces = list(dict.fromkeys(raw_pieces))
    if restrict_vocabulary:
      pieces = _restrict(raw, raw_pieces, chunks, lower_text)
    elif "<eos>" not in pieces and "[SEP]" not in pieces:
      pieces.append("<eos>")
    return cls(raw, pieces, lower_text, lower_pieces)

  def _encode(self, text: str) -> np.ndarray:
    return self._table[_encode_raw(self._raw, text, self._lower_text)]

  def decode(self, ids) -> str:
    """Joins `##` pieces, puts spaces between words, and ends lines."""
    parts = []
    joins = True  # the next piece, without a space before it
    for i in as_ids(ids, self.vocab_size):
      piece = "\n" if i == self.start_id else self._pieces[i]
      continues = piece.startswith("##") and len(piece) > 2
      if not (joins or continues or piece == "\n"):
        parts.append(" ")
      parts.append(piece[2:] if continues else piece)
      joins = piece == "\n"
    return "".join(parts)

  def fields(self) -> dict:
    """See `Tokenizer`."""
    return {
      "tokenizer": json.loads(self._raw.to_str()),
      "pieces": self._pieces,
      "lower_text": self._lower_text,
      "lower_pieces": self._lower_pieces,
    }

  @classmethod
  def from_fields(cls, fields: dict) -> "WordPiece":
    """See `Tokenizer`."""
    raw = library_tokenizer(fields["tokenizer"])
    return cls(raw, fields["pieces"], fields["lower_text"], fields["lower_pieces"])


def _bert(vocabulary: dict[str, int]):
  """BERT's cased WordPiece, which keeps accents, over raw pieces."""
  from tokenizers import Tokenizer as LibraryTokenizer
  from tokenizers import models, normalizers, pre_tokenizers

  raw = LibraryTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
  raw.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
  raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  marks = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
  raw.add_special_tokens([mark for mark in marks if mark in vocabulary])
  return raw


def _train_bert(chunks: Iterable[str], vocab_size: int, lower: bool):
  check_size(vocab_size, 1)
  marks = ["[UNK]", "<eos>"]
  alphabet = _train_pieces(chunks, 0, lower, marks)
  if len(alphabet) > vocab_size:
    raise size_error(f"at least {len(alphabet)} for the characters of this text", vocab_size)
  # The trainer numbers the characters within words in a random order, by which it then
  # breaks ties between merges; given as marks, they have the same numbers every time.
  marks += sorted(piece for piece in alphabet if len(piece) == 3 and piece[:2] == "##")
  return _bert(_train_pieces(chunks, vocab_size, lower, marks))


def _train_pieces(chunks, vocab_size: int, lower: bool, marks: list[str]) -> dict[str, int]:
  """Raw pieces: the marks, the characters of a text, merges up to `vocab_size`."""
  from tokenizers import trainers

  raw = _bert({})
  trainer = trainers.WordPieceTrainer(
    vocab_size=vocab_size,
    min_frequency=2,
    limit_alphabet=1000,
    special_tokens=marks,
    show_progress=False,
  )
  lines = (line for chunk in chunks for line in cut_lines(chunk, 2**14))
  raw.train_from_iterator(map(str.lower, lines) if lower else lines, trainer)
  return raw.get_vocab()


def _read_pieces(file: str) -> dict[str, int]:
  """Reads a vocab.txt, as a mapping from pieces to line numbers."""
  expected = "a WordPiece vocabulary in UTF-8, each piece once, [UNK] among them"
  try:
    lines = files.read_file(file).decode(errors="replace").rstrip("\r\n").split("\n")
  except (OSError, ValueError) as error:
    raise file_error(expected, f"{file} ({error})") from error
  pieces = {line.rstrip("\r"): i for i, line in enumerate(lines)}
  if "[UNK]" not in pieces or len(pieces) < len(lines):
    raise file_error(expected, file)
  return pieces


def _raw_pieces(raw, lower: bool) -> list[str]:
  """The library's pieces in the order of its ids, in the vocabulary's case."""
  pieces = [raw.id_to_token(i) for i in range(raw.get_vocab_size())]
  return [x.lower() if lower and x not in ("[UNK]", "[SEP]") else x for x in pieces]


def _encode_raw(raw, text: str, lower: bool) -> np.ndarray:
  r"""The library's ids of a text, and one past its last id for each "\n"."""
  lines = (text.lower() if lower else text).split("\n")
  line_end = [raw.get_vocab_size()]
  encoded = library_call(raw.encode_batch_fast, lines, add_special_tokens=False)
  ids = list(itertools.chain.from_iterable(x.ids + line_end for x in encoded))
  return np.array(ids[:-1], np.int32)


def _restrict(raw, raw_pieces, chunks: Iterable[str], lower: bool) -> list[str]:
  """The authors' four marks, then the pieces of a text, most frequent first."""
  counts = Counter()
  names = [*raw_pieces, "<eos>"]
  for chunk in chunks:
    counts.update(names[i] for i in _encode_raw(raw, chunk, lower))
  marks = ["<unk>", "<pad>", "<sos>", "<eos>"]
  return marks + sorted(counts.keys() - marks, key=lambda piece: (-counts[piece], piece))
