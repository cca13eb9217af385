"""The description of a named corpus."""

import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Source:
  """A corpus.

  Attributes:
    title: a short description.
    read: a generator function of `dpjax.data.download.Files`, and of `language` and
      `is_head` where there are languages and a head, that yields pairs of a split,
      "train", "valid" or "test", and a piece of its text. Missing splits are cut from the
      end of train.
    licence: in a few words.
    size: the size of its text or download, such as "5 MB".
    source: its origin.
    languages: one of which the user names; (): there is only one.
    head: of train, valid and test, how many clean characters its first part, which
      `is_head` asks for, is sure to hold; (): there is none.
    version: raise it when the same files give another text.
    documents: where its documents begin, as `dpjax.data.documents.Marked.begins`; "": that
      cannot be told.
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
