"""WordPiece, with the vocabularies of the Dispatcher paper."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dpjax import files
from dpjax.text.tokenizer import (
  Tokenizer,
  as_ids,
  cut_lines,
  file_error,
  library_call,
  library_tokenizer,
  size_error,
)


class WordPiece(Tokenizer):
  r"""BERT's WordPiece, cased, with a line-end token for each "\n"; not lossless.

  The vocabulary is the file's, and a line ends with its `[SEP]` or an added `<eos>`; its pieces may
  be lower-cased, and restricted to those of the train split. A restricted one has the order of the
  Dispatcher's authors: `<unk>`, `<pad>`, `<sos>`, `<eos>`, then the pieces by decreasing frequency,
  ties by their characters.
  """

  kind = "wordpiece"
  lossless = False

  def __init__(self, raw, pieces: Sequence[str], lower_text: bool, lower_pieces: bool):
    """Takes the library's tokenizer and the vocabulary in the order of its ids."""
    self._raw, self._pieces = raw, list(pieces)
    self._lower_text, self._lower_pieces = lower_text, lower_pieces
    ids = {piece: i for i, piece in enumerate(self._pieces)}
    self.vocab_size = len(ids)
    self.start_id = ids["<eos>"] if "<eos>" in ids else ids["[SEP]"]
    self.unknown_id = unknown = ids["<unk>"] if "<unk>" in ids else ids["[UNK]"]
    table = [ids.get(piece, unknown) for piece in _raw_pieces(raw, lower_pieces)]
    self._table = np.array([*table, self.start_id], np.int32)

  @classmethod
  def train(
    cls, chunks, vocab_size: int, file: str, lower_text: bool, lower_pieces: bool, restrict: bool
  ) -> "WordPiece":
    """Loads or learns the raw pieces, and makes the vocabulary from them."""
    raw = _bert(_read_pieces(file)) if file else _train_bert(chunks, vocab_size, lower_text)
    raw_pieces = _raw_pieces(raw, lower_pieces)
    pieces = list(dict.fromkeys(raw_pieces))
    if restrict:
      pieces = _restrict(raw, raw_pieces, chunks, lower_text)
    elif "<eos>" not in pieces and "[SEP]" not in pieces:
      pieces.append("<eos>")
    return cls(raw, pieces, lower_text, lower_pieces)

  def _encode(self, text: str) -> np.ndarray:
    return self._table[_encode_raw(self._raw, text, self._lower_text)]

  def decode(self, ids) -> str:
    """Joins `##` pieces, puts spaces between words, and ends lines."""
    parts, joins = [], True
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
  def from_fields(cls, kind: str, fields: dict) -> "WordPiece":
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
  marks = ["[UNK]", "<eos>"]
  alphabet = _learn_pieces(chunks, 0, lower, marks)
  if len(alphabet) > vocab_size:
    raise size_error(f"at least {len(alphabet)} for the characters of this text", vocab_size)
  # The trainer numbers the characters within words in a random order, by which it then
  # breaks ties between merges; given as marks, they have the same numbers every time.
  marks += sorted(piece for piece in alphabet if len(piece) == 3 and piece[:2] == "##")
  return _bert(_learn_pieces(chunks, vocab_size, lower, marks))


def _learn_pieces(chunks, vocab_size: int, lower: bool, marks: list[str]) -> dict[str, int]:
  """Raw pieces: the marks, the characters of a text, merges up to `vocab_size`."""
  from tokenizers import trainers

  raw = _bert({})
  settings: Any = dict(min_frequency=2, limit_alphabet=1000, show_progress=False)
  trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=marks, **settings)
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
  found = library_call(raw.encode_batch_fast, lines, add_special_tokens=False)
  ids = list(itertools.chain.from_iterable(f.ids + line_end for f in found))
  return np.array(ids[:-1], np.int32)


def _restrict(raw, raw_pieces, chunks: Iterable[str], lower: bool) -> list[str]:
  """The authors' four marks, then the pieces of a text, most frequent first."""
  counts, names = Counter(), [*raw_pieces, "<eos>"]
  for chunk in chunks:
    counts.update(names[i] for i in _encode_raw(raw, chunk, lower))
  marks = ["<unk>", "<pad>", "<sos>", "<eos>"]
  return marks + sorted(counts.keys() - marks, key=lambda piece: (-counts[piece], piece))
