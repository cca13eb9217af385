"""CC-100: web pages of Common Crawl of 2018 in a hundred languages; the beginning of one.

Source: https://data.statmt.org/cc-100/en.txt.xz (82 GB packed; fi, he, vi alike); Conneau et al.,
ACL 2020. By hand: put cc100-en.txt.xz, or its first 256 MiB, into the manual folder.

One split, "train": the first documents of the file's first 256 MiB, unchanged, until they reach
520M characters, enough for the pooling paper's 404M after cleaning. A blank line ends a document.
"""

import lzma
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.sources import File, Files, Source, reading

BASE_URL = "https://data.statmt.org/cc-100"
HEAD_BYTES = 2**28
MAX_CHARACTERS = 520 * 10**6


def read(files: Files, language: str) -> Iterator[tuple[str, str]]:
  """The first documents of a language."""
  name = f"{language}.txt.xz"
  path = files.get(File(f"{BASE_URL}/{name}", f"cc100-{name}", head_bytes=HEAD_BYTES))
  yield from (("train", text) for text in reading.head(read_documents(path), MAX_CHARACTERS))


def read_documents(path: Path) -> Iterator[str]:
  """The documents of an .xz file, or the whole ones of its beginning, blank lines included.

  Raises:
    UserError: the file is not .xz, damaged, or not UTF-8.
  """
  rest = b""
  try:
    with lzma.open(path) as file:
      while part := file.read1(reading.PIECE):
        *documents, rest = (rest + part).split(b"\n\n")
        for document in documents:
          yield document.decode() + "\n\n"
    yield rest.decode()
  except EOFError:  # Only the beginning; what is left in `rest` is no whole document.
    return
  except (lzma.LZMAError, UnicodeDecodeError) as error:
    expected = "UTF-8 text packed by xz, or the beginning of such a file"
    raise reading.damage(path, expected, error) from error


SOURCE = Source(
  "CC-100, the beginning of the web pages of one language",
  read,
  "none claimed; Common Crawl's terms of use",
  "0.5 GB; download 0.3 GB",
  "Conneau et al. 2020, arXiv:1911.02116",
  ("en", "fi", "he", "vi"),
  documents=r"\n\n",
)
