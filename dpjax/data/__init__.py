"""Texts, tokens on disk, and batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.data.batches import ContiguousRows as ContiguousRows
  from dpjax.data.batches import DocumentStarts as DocumentStarts
  from dpjax.data.batches import EvaluationDocuments as EvaluationDocuments
  from dpjax.data.batches import EvaluationWindows as EvaluationWindows
  from dpjax.data.batches import RandomWindows as RandomWindows
  from dpjax.data.batches import ShuffledWindows as ShuffledWindows
  from dpjax.data.batches import TokenStream as TokenStream
  from dpjax.data.encoding import tokenize as tokenize
  from dpjax.data.mixture import MixedWindows as MixedWindows
  from dpjax.data.remote import Source as Source
  from dpjax.data.sources import Corpus as Corpus
  from dpjax.data.sources import load_corpus as load_corpus
  from dpjax.data.sources import register_corpus as register_corpus
  from dpjax.data.token_files import Counts as Counts
  from dpjax.data.token_files import Split as Split
  from dpjax.data.token_files import Tokens as Tokens
  from dpjax.data.token_files import open_tokens as open_tokens
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
