"""What a corpus that has a name says of itself."""

import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Source:
  """A corpus.

  Attributes:
    title: what it is, in a few words.
    read: a generator function of `dpjax.data.download.Files`, and of `language` and
      `is_head` where there are languages and a head, that yields pairs of a split,
      "train", "valid" or "test", and a piece of its text. A corpus need not have all three:
      what lacks is cut from the end of train.
    licence: in a few words.
    size: of its text or download, in words.
    source: where it is from.
    languages: of which one has to be named; (): it has but one.
    head: of train, valid and test, how many clean characters its first part, which
      `is_head` asks for, is sure to hold; (): there is none.
    version: to be raised when the same files come out as another text.
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
