"""The named corpora, one module each: their origin and the code that reads their text."""

import dataclasses
from collections.abc import Callable, Iterator

from dpjax.data.download import File as File
from dpjax.data.download import Files as Files


@dataclasses.dataclass(frozen=True)
class Source:
  """A named corpus.

  Attributes:
    title: a short description.
    read: a generator function of `dpjax.data.download.Files` (and of `language` and `is_head`,
      if the corpus has languages and a head) that yields pairs of a split, "train", "valid" or
      "test", and a piece of its text. Missing splits are cut from the end of train.
    licence: the licence in a few words.
    size: the size of its text or download, such as "5 MB".
    source: its origin.
    languages: the languages to choose from; () if there is only one.
    head: the clean characters of train, valid and test that the first part, read with
      `is_head`, certainly holds; () without such a part.
    version: raise it when the same files give another text.
    documents: how documents begin, see `dpjax.data.corpus.Marked`; "" if unknown.
  """

  title: str
  read: Callable[..., Iterator[tuple[str, str]]]
  licence: str
  size: str
  source: str
  languages: tuple[str, ...] = ()
  head: tuple[int, ...] = ()
  version: int = 1
  documents: str = ""
