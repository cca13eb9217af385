"""The named corpora, one module each: their origin, files and the code that reads their text."""

import dataclasses
import os
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.errors import UserError

RETRIES = 2  # after a second, and after two more


@dataclasses.dataclass(frozen=True)
class Source:
  """A named corpus.

  Attributes:
    title: a short description.
    read: a generator function of `Files` (and of `language` and `is_head`,
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
    has_json_lines: whether its text is of `reading.json_line`, a document a line.
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
  has_json_lines: bool = False


@dataclasses.dataclass(frozen=True)
class File:
  """A file that can be downloaded.

  Attributes:
    url: http, https, or hf://datasets/OWNER/NAME/PATH or hf://OWNER/NAME/PATH at huggingface.co.
    name: its name in the folder; "" takes the last part of the URL.
    checksum: "sha256:..." or "md5:..."; "" accepts any content.
    head_bytes: the bytes to fetch from its beginning; 0 for all.
  """

  url: str
  name: str = ""
  checksum: str = ""
  head_bytes: int = 0

  def __post_init__(self):
    if not self.name:
      path = urllib.parse.urlsplit(self.url).path
      object.__setattr__(self, "name", urllib.parse.unquote(path.rpartition("/")[2]))


class Files:
  """The files of corpora and vocabularies, in `manual_dir` or the downloads' `folder`."""

  def __init__(self, data_dir: str | Path, manual_dir: str | Path = ""):
    self.manual_dir = Path(manual_dir or Path(data_dir, "manual"))
    self.folder = Path(data_dir, "downloads")

  def get(self, file: File, *, by_hand: bool = True) -> Path:
    """Finds a file in the manual folder (if `by_hand`) or among the downloads, or downloads it.

    Raises:
      UserError: it cannot be downloaded, or has another checksum.
    """
    given = self.manual_dir / file.name
    if by_hand and given.is_file():
      kind, _, digits = file.checksum.partition(":")
      if digits and (found := files.checksum(given, kind)) != digits:
        raise UserError(
          f"{given}: expected {file.checksum}, got {kind}:{found}; get it again from {file.url}, "
          "or remove it"
        )
      return given
    import pooch

    def fetch(url: str, path: Any, _) -> None:
      if url.startswith("hf://"):
        return _fetch_from_hub(url, Path(path))
      # Unpacked on the way, it would have another checksum.
      headers = {"Accept-Encoding": "identity", "User-Agent": "dpjax"}
      if file.head_bytes:
        headers["Range"] = f"bytes=0-{file.head_bytes - 1}"
      has_bar = sys.stderr.isatty()
      pooch.HTTPDownloader(has_bar, chunk_size=2**20, headers=headers)(url, path, None)
      if 0 < file.head_bytes < os.path.getsize(path):
        os.truncate(path, file.head_bytes)

    downloads: Any = pooch.create(
      self.folder.resolve(),
      base_url="",
      registry={file.name: file.checksum or None},
      urls={file.name: file.url},
      retry_if_failed=RETRIES,
    )
    try:
      return Path(downloads.fetch(file.name, downloader=fetch))
    except Exception as error:  # Of several libraries.
      if isinstance(error, OSError) and error.errno:
        raise  # Of the disk.
      said = " ".join(str(error).split()).rstrip(".")
      raise UserError(
        f"{file.url}: expected the file, got {said}; download it yourself and put it as "
        f"{file.name} into {self.manual_dir}"
      ) from error


def _fetch_from_hub(url: str, path: Path) -> None:
  import huggingface_hub

  parts = url.removeprefix("hf://").split("/")
  kind = "dataset" if parts[0] == "datasets" else None
  owner, name, *place = parts[1:] if kind else parts
  with tempfile.TemporaryDirectory(dir=path.parent) as folder:
    found = huggingface_hub.hf_hub_download(
      f"{owner}/{name}", "/".join(place), repo_type=kind, local_dir=folder
    )
    os.replace(found, path)
