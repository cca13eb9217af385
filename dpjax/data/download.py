"""Downloads files: resumed, retried and checked, or supplied by hand."""

import dataclasses
import re
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpjax.data.making import UnfinishedError, checksum, make_once, read_json, write_json
from dpjax.errors import UserError

TRIES = 5  # in a row without a new byte
PAUSE_S = 2.0  # before the second of them; it doubles
LONGEST_PAUSE_S = 600.0  # whatever a server asks for
TIMEOUT_S = 60.0  # to connect, and from byte to byte
CHUNK_BYTES = 2**16
TRY_LATER = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server


@dataclasses.dataclass(frozen=True)
class File:
  """A file that can be downloaded.

  Attributes:
    url: http or https; or hf://datasets/OWNER/NAME/PATH or hf://OWNER/NAME/PATH for a
      repository at huggingface.co.
    name: the file's name in the folder; "" takes the last part of the URL.
    checksum: "sha256:..." or "md5:..." from a source that can be cited; "" records the
      checksum of the first download, which later ones must match.
    size: in bytes, or 0 if unknown.
    head_bytes: the number of bytes to fetch from the beginning, or 0 for all; without a
      `checksum`.
  """

  url: str
  name: str = ""
  checksum: str = ""
  size: int = 0
  head_bytes: int = 0

  def __post_init__(self):
    if not self.name:
      path = urllib.parse.urlsplit(self.url).path
      object.__setattr__(self, "name", urllib.parse.unquote(path.rpartition("/")[2]))
    if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
      raise UserError(f"File.name: expected the name of a file, got {self.name!r}")
    if not re.fullmatch("|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", self.checksum):
      raise UserError(
        "File.checksum: expected sha256: and 64, or md5: and 32 hexadecimal digits, got "
        f"{self.checksum!r}"
      )


class Files:
  """The source of the files of corpora and vocabularies.

  Attributes:
    manual_dir: the folder of files downloaded by hand.
  """

  def __init__(self, data_dir: str | Path, manual_dir: str | Path = ""):
    """Takes the folder of all data; "" is its manual folder."""
    self.manual_dir = Path(manual_dir or Path(data_dir, "manual"))
    self.folder = Path(data_dir, "downloads")

  def get(self, file: File, *, by_hand: bool = True) -> Path:
    """Finds a file in the manual folder or among the downloads, or downloads it.

    A broken transfer resumes, in this call or the next, if the server still has the same file
    (by ETag or Last-Modified; without either, only a file with a checksum resumes).

    Args:
      file: the file.
      by_hand: whether a file in the manual folder will do.

    Returns:
      The path. With `head_bytes`, the file may be shorter, or longer if supplied by hand.

    Raises:
      UserError: the file cannot be downloaded, or is not the expected one. The message says
        how to supply it by hand.
    """
    given = self.manual_dir / file.name
    if by_hand and given.is_file():
      _check(file, given, f"get it again from {file.url}, or remove it", is_given=True)
      return given
    target = self.folder / file.name
    hint = f"download {file.url} yourself and put it as {file.name} into {self.manual_dir}"
    made_of = {"url": file.url, "checksum": file.checksum, "head_bytes": file.head_bytes}
    first = read_json(target.with_name(target.name + ".json"))

    def make(partial: Path) -> Mapping[str, Any]:
      if file.checksum and target.is_file() and _has_checksum(file, target):
        target.replace(partial / file.name)  # Version 0.1 had it from another address.
      elif file.url.startswith("hf://"):
        _fetch_from_hub(file, partial, hint)
      else:
        _fetch(file, partial, hint)
      _check(file, partial / file.name, f"call again, or {hint}")
      sha256 = checksum(partial / file.name)
      is_same_source = {**first, **made_of} == first and not file.checksum
      if is_same_source and first.get("sha256") != sha256:
        raise UserError(
          f"{file.url}: expected sha256:{first.get('sha256')}, as at the first download, got "
          f"sha256:{sha256}; to accept what came, delete {target}.json; or {hint}"
        )
      return {"size": (partial / file.name).stat().st_size, "sha256": sha256}

    make_once(target, made_of, make, is_file=True)
    return target


def _check(file: File, path: Path, hint: str, *, is_given: bool = False) -> None:
  size = path.stat().st_size
  expected = min(file.size, file.head_bytes or file.size)
  if file.size and size != expected and not (is_given and expected <= size <= file.size):
    raise UserError(f"{path}: expected {expected} bytes, got {size}; {hint}")
  kind, _, digits = file.checksum.partition(":")
  if digits and (came := checksum(path, kind)) != digits:
    raise UserError(f"{path}: expected {file.checksum}, got {kind}:{came}; {hint}")


def _has_checksum(file: File, path: Path) -> bool:
  kind, _, digits = file.checksum.partition(":")
  return checksum(path, kind) == digits


def _fetch_from_hub(file: File, partial: Path, by_hand: str) -> None:
  """Downloads a file from huggingface.co with its library, which resumes and retries."""
  import huggingface_hub

  if (partial / file.name).exists():
    return  # It was killed just before the file had its place.
  parts = file.url.removeprefix("hf://").split("/")
  kind = "dataset" if parts[0] == "datasets" else None
  owner, name, *path = parts[1:] if kind else parts
  try:
    found = huggingface_hub.hf_hub_download(
      f"{owner}/{name}", "/".join(path), repo_type=kind, local_dir=partial / "hub"
    )
  # Of several libraries; of the system's own, the disk may be full.
  except Exception as error:
    if isinstance(error, OSError) and error.errno:
      raise
    raise UnfinishedError(f"{file.url}: expected the file, got {error}; {by_hand}") from error
  Path(found).replace(partial / file.name)


def _fetch(file: File, partial: Path, by_hand: str) -> None:
  """Requests a file by HTTP until it is complete."""
  import requests
  import urllib3

  if urllib.parse.urlsplit(file.url).scheme not in ("http", "https"):
    raise UserError(f"File.url: expected http://, https:// or hf://, got {file.url!r}; {by_hand}")
  path, failures = partial / file.name, 0
  with _session() as session, tqdm(desc=file.name, unit="B", unit_scale=True, delay=1) as bar:
    while True:
      have = path.stat().st_size if path.exists() else 0
      try:
        return _request(session, file, path, bar, by_hand)
      except requests.RequestException as error:
        # The session has tried several times to get an answer.
        raise UnfinishedError(
          f"{file.url}: expected the file, got {error}; call again to go on, or {by_hand}"
        ) from error
      except (_BrokenError, urllib3.exceptions.HTTPError) as error:
        failures = 0 if path.exists() and path.stat().st_size > have else failures + 1
        if failures == TRIES:
          raise UnfinishedError(
            f"{file.url}: expected the file, got a connection that broke {TRIES} times in a "
            f"row ({error}); call again to go on, or {by_hand}"
          ) from error
        time.sleep(PAUSE_S * 2**failures)


class _BrokenError(Exception):
  """A transfer that may succeed the next time."""


def _session():
  import requests.adapters
  import urllib3

  class Retry(urllib3.Retry):
    def get_retry_after(self, response):
      seconds = super().get_retry_after(response)
      return seconds and min(seconds, LONGEST_PAUSE_S)

  retry = Retry(
    TRIES - 1,
    backoff_factor=PAUSE_S,
    status_forcelist=TRY_LATER,
    raise_on_status=False,
  )
  session = requests.Session()
  for scheme in ("http://", "https://"):
    session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
  return session


def _request(session, file: File, path: Path, bar: tqdm, by_hand: str) -> None:
  """Makes one request and appends its bytes to those that are there.

  A file beside them records their version: the ETag or time, and the size.
  """
  note = path.with_name("version.json")
  version = read_json(note) if path.exists() else {}
  have = path.stat().st_size if version else 0
  if not version.get("validator") and not file.checksum:
    have = 0  # bytes of two versions would make a file that nothing tells from a good one
  if have and have == _target(file, version):
    return
  # What is packed on the way would have another length than the server tells.
  headers = {"Accept-Encoding": "identity", "User-Agent": "dpjax"}
  if have or file.head_bytes:
    headers["Range"] = f"bytes={have}-{file.head_bytes - 1 if file.head_bytes else ''}"
  if have and version.get("validator"):
    headers["If-Range"] = version["validator"]
  with session.get(file.url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
    if response.status_code not in (200, 206):
      said = f"{response.status_code} {response.reason}"
      if response.status_code in TRY_LATER:
        raise UnfinishedError(
          f"{file.url}: expected the file, got {said}; call again to go on, or {by_hand}"
        )
      path.unlink(missing_ok=True)  # of no use to the server (416), or to anyone
      if response.status_code == 416 and have:
        raise _BrokenError("no more bytes than there are, of a size that is not known")
      raise UserError(f"{file.url}: expected the file, got {said}; {by_hand}")
    found = _version(response)
    if response.status_code == 206:
      start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
      is_same = not have or found == version
      if start is None or int(start[1]) != have or not is_same:
        path.unlink(missing_ok=True)
        raise _BrokenError("bytes of another place or version of the file")
    else:
      have = 0
    size, target = found["size"], _target(file, found)
    is_whole_known = size is not None or file.checksum or file.size or response.raw.chunked
    if not is_whole_known or (file.size and size not in (None, file.size)):
      raise UserError(
        f"{file.url}: expected a file of {file.size or 'a size that the server tells'} "
        f"bytes, got {size}; {by_hand}"
      )
    with path.open("ab" if have else "wb") as partial:
      write_json(note, found)
      bar.reset(target)
      bar.update(have)
      for chunk in response.raw.stream(CHUNK_BYTES, decode_content=False):
        chunk = chunk if target is None else chunk[: target - have]
        partial.write(chunk)
        have += len(chunk)
        bar.update(len(chunk))
        if have == target:
          break
    if have < (target or file.size):
      raise _BrokenError(f"{have} of {target or file.size} bytes")


def _version(response) -> dict[str, Any]:
  """The validator of a response, which identifies the version of a file; "" if none."""
  etag = response.headers.get("ETag", "")
  if response.status_code == 206:
    size = response.headers.get("Content-Range", "").rpartition("/")[2]
  else:
    size = response.headers.get("Content-Length", "")
  return {
    # A weak ETag may stand for other bytes.
    "validator": etag
    if etag and not etag.startswith("W/")
    else response.headers.get("Last-Modified", ""),
    "size": int(size) if size.isdigit() else None,
  }


def _target(file: File, version: Mapping[str, Any]) -> int | None:
  """The number of bytes to fetch, if known."""
  known = (file.head_bytes or None, version.get("size"))
  return min((x for x in known if x is not None), default=None)
