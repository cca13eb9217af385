"""Parquet files of a Hugging Face repository: how they are found and read."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpjax.data.builders.base import TextBuilder
from dpjax.data.download import File
from dpjax.errors import UserError

HUB = "https://huggingface.co"


class HubBuilder(TextBuilder, skip_registration=True):
  """A corpus in Parquet files of a dataset repository at huggingface.co.

  The files of a split are FOLDER/SPLIT-00000-of-00019.parquet and so on, with a column
  `text`. Which there are, their sizes and their SHA-256 says the site's own list of the
  folder (git-LFS names files by it). The list is downloaded once and kept, and a file
  that it does not fit is refused.

  By hand: a copy of the repository, by the corpus's name, in the manual folder
  (wiki40b/fi/train-00000-of-00002.parquet ...); it needs no list, unless a file lacks.

  Attributes:
    REPOSITORY: owner/name.
  """

  REPOSITORY = ""

  def parquet_paths(self, get: Callable[[File], Path], folder: str, split: str) -> Iterator[Path]:
    """The files of a split in their order, each downloaded when it is its turn.

    Args:
      get: finds or downloads a file.
      folder: of the repository.
      split: what the files' names begin with.

    Raises:
      ValueError: no list, or not every file of the split is in it.
    """
    local = Path(self.manual_dir or "", self.name, folder)
    given = local.glob(f"{split}-*") if self.manual_dir else ()
    known = {path.name: {} for path in given}
    source, listed = local, {}
    if not known:
      source, listed = self._get_list(get, folder)
      known = listed
    pattern = re.compile(rf"{split}-\d{{5}}-of-(\d{{5}})\.parquet")
    counts = {found[1] for name in known if (found := pattern.fullmatch(name))}
    count = counts.pop() if len(counts) == 1 else "0"
    names = [f"{split}-{i:05d}-of-{count}.parquet" for i in range(int(count))]
    if names and not known.keys() >= set(names):
      source, listed = (source, listed) if listed else self._get_list(get, folder)
    if not names or listed and not listed.keys() >= set(names):
      raise UserError(
        f"{source}: expected all of {split}-00000-of-NNNNN.parquet and "
        f"so on, got {', '.join(sorted(listed or known)) or 'nothing'}"
      )
    for name in names:
      if known is not listed and name in known:
        yield local / name
        continue
      url = f"{HUB}/datasets/{self.REPOSITORY}/resolve/main/{folder}/{name}"
      yield get(File(url, f"{self.name}-{folder}-{name}", **listed[name]))

  def _get_list(self, get: Callable[[File], Path], folder: str) -> tuple[Path, dict]:
    url = f"{HUB}/api/datasets/{self.REPOSITORY}/tree/main/{folder}"
    path = get(File(url, f"{self.name}-{folder}-files.json"))
    return path, _read_list(path)


def read_texts(path: Path) -> Iterator[str]:
  """The column `text` of a Parquet file, row by row; a row without is "".

  Raises:
    ValueError: it is damaged, or has no such column.
  """
  try:
    with pq.ParquetFile(path) as file:
      kind = file.schema_arrow.field("text").type
      if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise TypeError(f"text of the type {kind}")
      for i in range(file.num_row_groups):  # all at once, it keeps what it has read
        for batch in file.iter_batches(64, row_groups=[i], columns=["text"]):
          yield from (text or "" for text in batch.column(0).to_pylist())
  except (pa.ArrowException, KeyError, TypeError, OSError, UnicodeError) as error:
    raise UserError(
      f"{path}: expected a Parquet file with a column of strings named text, got {error}"
    ) from error


def _read_list(path: Path) -> dict[str, dict]:
  """By file name, what the site's list says: checksum and size."""
  try:
    return {
      Path(entry["path"]).name: {
        "checksum": f"sha256:{entry['lfs']['oid']}" if "lfs" in entry else "",
        "size": entry.get("size", 0),
      }
      for entry in json.loads(path.read_bytes())
    }
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path}: expected huggingface.co's list of a folder, JSON with "
      f"path, size and lfs.oid, got {error!r}"
    ) from error
