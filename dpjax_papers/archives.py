"""Streams text out of archives and Parquet files, without unpacking them to disk."""

import fnmatch
import gzip
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dpjax.data.readers import DAMAGES, damage, decode, optional
from dpjax.data.remote import File, Files
from dpjax.errors import UserError

_DAMAGES = (*DAMAGES, zipfile.BadZipFile, tarfile.TarError, KeyError)


def head(texts: Iterable[str], num_characters: float) -> Iterator[str]:
  """Yields the first texts, uncut, until they have this many characters."""
  size = 0
  for text in texts:
    yield text
    size += len(text)
    if size >= num_characters:
      return


def zip_member(path: Path, member: str) -> Iterator[str]:
  """The text of a member of a zip archive, which is checked at the end.

  Raises:
    UserError: the archive is damaged, lacks the member or has one whose name leads out of it, or
      the text is not UTF-8.
  """
  try:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
      _check_names(archive.namelist())
      yield from decode(file)
  except _DAMAGES as error:
    raise damage(path, f"a zip archive with {member} in UTF-8", error) from error


def _check_names(names: Iterable[str]) -> None:
  for name in names:
    if name.startswith("/") or ".." in name.split("/"):
      raise KeyError(f"the name {name}, which leads out of it")


def tar_members(path: Path, required: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str]]:
  """The text of members of a tar.gz archive, in its order, with errors as in `zip_member`.

  `required` maps each split to a regular expression for the end of paths, and a number of members.
  """
  left = {split: count for split, (_, count) in required.items()}
  try:
    # gzip detects a truncated archive; tarfile alone does not.
    with gzip.open(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
      for member in archive:
        _check_names([member.name])
        for split, (pattern, _) in required.items():
          if left[split] and re.fullmatch(f"(.*/)?{pattern}", member.name):
            if content := archive.extractfile(member):
              yield from ((split, piece) for piece in decode(content))
              left[split] -= 1
        if not any(left.values()):
          return
  except _DAMAGES as error:
    names = ", ".join(pattern for pattern, _ in required.values())
    raise damage(path, f"a tar.gz archive with {names} in UTF-8", error) from error
  for split, count in left.items():
    if count:
      pattern, expected = required[split]
      raise UserError(f"{path}: expected {expected} members {pattern}, got {expected - count}")


def hub_parquet(
  files: Files, corpus: str, repository: str, folder: str, split: str
) -> Iterator[Path]:
  """Yields the files FOLDER/SPLIT-00000-of-00019.parquet ... of a dataset at huggingface.co.

  The manual folder may hold them under the corpus's name (wiki40b/fi/train-00000-of-...).
  """
  pattern = f"{split}-?????-of-?????.parquet"
  names = sorted(path.name for path in (files.manual_dir / corpus / folder).glob(pattern))
  if not _is_complete(names):
    address = f"hf://datasets/{repository}/{folder}"
    library = optional("huggingface_hub")
    try:
      listed = library.HfApi().list_repo_files(repository, repo_type="dataset")
    except Exception as error:  # Several libraries raise.
      raise UserError(f"{address}: expected a list of files, got {error!r}") from error
    names = sorted(Path(x).name for x in fnmatch.filter(listed, f"{folder}/{pattern}"))
    if not _is_complete(names):
      raise UserError(
        f"{address}: expected all of {split}-00000-of-NNNNN.parquet and so on, got "
        f"{', '.join(names) or 'none'}"
      )
  for name in names:
    path = f"{folder}/{name}"
    yield files.get(File(f"hf://datasets/{repository}/{path}", f"{corpus}/{path}"))


def _is_complete(names: Sequence[str]) -> bool:
  """Whether there are NNNNN names that end with -of-NNNNN.parquet."""
  return bool(names) and len(names) == int(names[0].removesuffix(".parquet")[-5:])
