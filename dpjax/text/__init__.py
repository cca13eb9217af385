"""Text to token ids and back."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.text.characters import Bytes as Bytes
  from dpjax.text.characters import BytesWithEnds as BytesWithEnds
  from dpjax.text.characters import Characters as Characters
  from dpjax.text.pieces import BytePairs as BytePairs
  from dpjax.text.pieces import WordPiece as WordPiece
  from dpjax.text.sentencepiece import SentencePiece as SentencePiece
  from dpjax.text.tokenizer import TextStream as TextStream
  from dpjax.text.tokenizer import Tokenizer as Tokenizer
  from dpjax.text.tokenizer import tokenizer_from_json as tokenizer_from_json
  from dpjax.text.tokenizer import train_tokenizer as train_tokenizer
  from dpjax.text.unigram import UnigramBoundaries as UnigramBoundaries
  from dpjax.text.unigram import train_unigram as train_unigram
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
