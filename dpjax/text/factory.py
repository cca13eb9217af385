"""Tokenizers by name: trained on a text, loaded from a file, saved as JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.errors import UserError, unknown
from dpjax.text.characters import Bytes, BytesWithEnds, Characters
from dpjax.text.pieces import BytePairs, WordPiece
from dpjax.text.sentencepiece import SentencePieceBpe, SentencePieceUnigram
from dpjax.text.tokenizer import FORMAT, Tokenizer, file_error

_CLASSES = (
  *(Characters, Bytes, BytesWithEnds, SentencePieceUnigram, SentencePieceBpe),
  *(WordPiece, BytePairs),
)
TOKENIZERS: dict[str, Any] = {each.name: each for each in _CLASSES}
# Their tokens are parts of single characters.
CHARACTER_TOKENIZERS = Characters.name, Bytes.name, BytesWithEnds.name


def train_tokenizer(name: str, chunks: Iterable[str], **settings: Any) -> Tokenizer:
  """Makes a tokenizer: trained on a text, or loaded from a vocabulary file.

  Args:
    name: a key of `TOKENIZERS`.
    chunks: the text in parts, preferably cut after line ends; not a bare iterator.
    **settings: the settings of this `data.tokenizer`, the arguments of the class's `train`. A
      `file` is loaded; without one, a vocabulary of `vocab_size` entries is trained.

  Returns:
    The tokenizer; equal arguments give an equal one.

  Raises:
    ValueError: a setting `data.tokenizer...` is wrong.
  """
  if name not in TOKENIZERS:
    raise unknown("data.tokenizer", TOKENIZERS, name)
  return TOKENIZERS[name].train(chunks, **settings)


def load_tokenizer(source: str | Path, setting: str = "data.tokenizer.file") -> Tokenizer | None:
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
    # Other libraries' files have no format.
    is_ours = is_run or "format" in json.loads(content)
    return tokenizer_from_json(content) if is_ours else None
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise file_error("a tokenizer.json", f"{path} ({error})", setting) from error


def tokenizer_from_json(text: str | bytes) -> Tokenizer:
  """Reads a tokenizer from the JSON of `Tokenizer.to_json`; a `ValueError` if damaged."""
  try:
    content = json.loads(text)
    if content["format"] > FORMAT:
      raise UserError(f"a later format than {FORMAT}: {content['format']}")
    return TOKENIZERS[content["name"]].from_fields(content)
  except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
    answer = e if isinstance(e, UserError) else repr(e)
    expected = "tokenizer.json: expected the JSON of a tokenizer"
    raise UserError(f"{expected}, got a damaged one: {answer}") from e
