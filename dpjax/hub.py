"""Models on the Hugging Face Hub, hf://OWNER/NAME or hf://OWNER/NAME@REVISION.

Cache, token, server and offline mode are those of `huggingface_hub`: HF_HOME; `hf auth login` or
HF_TOKEN; HF_ENDPOINT; HF_HUB_OFFLINE=1.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpjax.errors import UserError

PREFIX = "hf://"


def is_address(path: Any) -> bool:
  """Whether a path is the address of a model on the Hub."""
  return isinstance(path, str) and path.startswith(PREFIX)


def split_address(address: str) -> tuple[str, str | None]:
  """OWNER/NAME and the revision, if given; a `UserError` for any other form."""
  match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@(\S+))?", address, re.ASCII)
  if not match:
    raise UserError(f"{address}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, got neither")
  return match[1], match[2]


@contextlib.contextmanager
def one_line(key: str, expected: str = "a repository that can be read") -> Iterator[None]:
  """Turns errors of `huggingface_hub` into a one-line `UserError`; disk errors pass through."""
  from huggingface_hub import utils

  try:
    yield
  except Exception as error:  # Several libraries raise here.
    if isinstance(error, OSError) and error.errno:
      raise
    # After a failed upload or a missing local copy, the cause has the server's answer.
    wraps = type(error) is RuntimeError or isinstance(error, utils.LocalEntryNotFoundError)
    is_answer = wraps and isinstance(error.__cause__, utils.HfHubHTTPError)
    reason = " ".join(str(error.__cause__ if is_answer else error).split())
    raise UserError(f"{key}: expected {expected}, got {reason}") from error


def download(address: str, names: Sequence[str]) -> Path:
  """Downloads those of the files that a model has to the library's cache; returns the folder.

  Raises:
    UserError: the model cannot be read.
  """
  from huggingface_hub import snapshot_download

  repository, revision = split_address(address)
  with one_line(address):
    return Path(
      snapshot_download(
        repository, revision=revision, allow_patterns=[*names], library_name="dpjax"
      )
    )


def check_fetched(address: str, missing: Sequence[str]) -> None:
  """Raises a `UserError` if files are missing only because the Hub cannot be reached."""
  from huggingface_hub import HfApi

  repository, revision = split_address(address)
  try:
    HfApi(library_name="dpjax").model_info(repository, revision=revision)
  except Exception as error:  # Several libraries raise here.
    command = f"hf download {repository}{f' --revision {revision}' if revision else ''}"
    raise UserError(
      f"{address}: expected a complete copy in the cache without a connection, got one without "
      f"{', '.join(missing)}; `{command}` fetches it, online"
    ) from error


def upload(folder: Path, address: str, names: Sequence[str], *, private: bool = False) -> None:
  """Commits a folder to a model, made if missing; deletes its other files that are in `names`.

  A revision is a branch, made if missing.

  Raises:
    UserError: the model cannot be written, or is public although `private` is set.
  """
  from huggingface_hub import HfApi

  repository, branch = split_address(address)
  api = HfApi(library_name="dpjax")
  with one_line(address, "a repository that can be written"):
    api.create_repo(repository, private=private or None, exist_ok=True)
    is_public = private and not api.model_info(repository).private
    if branch and not is_public:
      api.create_branch(repository, branch=branch, exist_ok=True)
    if not is_public:
      api.upload_folder(
        repo_id=repository,
        folder_path=folder,
        revision=branch,
        commit_message="Upload a model of dpjax",
        delete_patterns=[*names],
      )
  if is_public:
    raise UserError(f"private: expected a private repository, got {address}, which is public")
