"""Tokenizers by name: trained on a text, loaded from a file, saved as JSON."""

import json
from collections.abc import Iterable
from pathlib import Path

from dpjax import files
from dpjax.errors import UserError, unknown
from dpjax.text.characters import Bytes, BytesWithEnds, Characters
from dpjax.text.pieces import BytePairs, WordPiece
from dpjax.text.sentencepiece import SentencePiece
from dpjax.text.tokenizer import FORMAT, MAX_PIECES, Tokenizer, file_error, size_error

KINDS = {
  "characters": Characters,
  "bytes": Bytes,
  "bytes_with_ends": BytesWithEnds,
  "sentencepiece_unigram": SentencePiece,
  "sentencepiece_bpe": SentencePiece,
  "wordpiece": WordPiece,
  "bpe": BytePairs,
}
CHARACTER_KINDS = (
  "characters",
  "bytes",
  "bytes_with_ends",
)  # whose tokens are parts of single characters


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
  r"""Makes a tokenizer: trained on a text, or loaded from a vocabulary file.

  Args:
    kind: a key of `KINDS`. Characters and bytes have no settings.
    chunks: the text in parts, preferably cut after line ends; not a bare iterator.
    vocab_size: V of a vocabulary that is trained; "wordpiece" and "bpe" may find fewer pieces.
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
    return Characters.train(chunks) if kind == "characters" else KINDS[kind]()
  if not file and vocab_size > MAX_PIECES:
    raise size_error(f"at most {MAX_PIECES:,}", vocab_size)
  if kind == "wordpiece":
    return WordPiece.train(chunks, vocab_size, file, **switches, restrict=restrict)
  if kind == "bpe":
    return BytePairs.load(file) if file else BytePairs.train(chunks, vocab_size)
  if file:
    return SentencePiece.load(kind, file)
  return SentencePiece.train(kind, chunks, vocab_size)


def load_tokenizer(source: str | Path, setting: str = "data.tokenizer_file") -> Tokenizer | None:
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
    # Other libraries' files have no kind.
    is_ours = is_run or "kind" in json.loads(content)
    return tokenizer_from_json(content) if is_ours else None
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
