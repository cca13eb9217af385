"""Files from the internet: resumed, retried, checked, or given by hand.

Of a file "a.zip" a folder of downloads has

  a.zip               whole and checked
  a.zip.json          its record: "url", "size", "sha256", "date" and more
  a.zip.partial       its first bytes, while the rest is on the way
  a.zip.partial.json  what they are of: "url", "etag", "last_modified", "size"
  a.zip.lock          locked by the process that downloads; stays, and is empty
  a.zip.bad           what came last, and was not what the checksum says

The file appears whole, by a rename, and its record after it. So a process can be killed
at any moment: the next one goes on from the bytes that there are. What has no record is
not taken for whole (unless it has a checksum that it agrees with).
"""

import contextlib
import dataclasses
import datetime
import email.utils
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from dpjax.errors import UserError

PAUSES_S = (2.0, 6.0, 18.0, 54.0)  # between tries without a new byte; then it gives up
LONGEST_PAUSE_S = 600.0  # whatever a server asks for
TIMEOUT_S = 60.0  # to connect, and from byte to byte
CHUNK_BYTES = 2**16
SHOWN_BYTES = 10**6  # smaller files come without a progress bar

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class File:
  """A file that can be downloaded.

  Attributes:
    url: from where, http or https.
    name: in the folder; "": the last part of the URL.
    checksum: "sha256:..." or "md5:...", of a source that can be cited; "": what the
      first download gave is written down and compared ever after.
    size: bytes, or 0 where they are not known; with `head_bytes` too, of the whole file.
    head_bytes: 0, or to fetch so many bytes from the beginning alone; there is no
      `checksum` then.
  """

  url: str
  name: str = ""
  checksum: str = ""
  size: int = 0
  head_bytes: int = 0


def download(
  file: File,
  folder: Path,
  *,
  manual_dir: Path | None = None,
  progress: bool = True,
) -> Path:
  """Finds the file in `manual_dir` or `folder`, or downloads it into `folder`.

    file = File("https://host/text8.zip", size=31344016)
    download(file, Path("data"))                             data/text8.zip
    download(file, Path("data"), manual_dir=Path("given"))   given/text8.zip, if it is there

  A transfer that breaks is taken up where it broke, in this call or the next, if the
  server still has the same file (by ETag or Last-Modified; where it tells neither, only a
  file with a checksum is taken up). After 5 tries in a row without a new byte, with
  pauses of `PAUSES_S` or what the server asks for between them, it gives up; where the
  server says that there is no such file or no permission, at once.

  The first download's SHA-256 is in the record, `<name>.json`. Where there is no
  `checksum`, each later download from the same URL must give the same; to accept
  another, delete the record. A file that is there already is compared by its size
  alone; `verify` reads all of it. A file in `manual_dir` is compared with `checksum` and
  `size` at each call.

  Of several processes that ask for the same file, one downloads and the others wait.

  Args:
    file: which one.
    folder: where downloads lie; made if it is not there. One that cannot be written does
      for files that are whole.
    manual_dir: None, or where files lie that were got by hand.
    progress: shows a bar, with MB/s, for files above 1 MB.

  Returns:
    Where it lies. With `head_bytes`, the file has so many bytes, or fewer if there are
    no more; one in `manual_dir` may have more.

  Raises:
    ValueError: it cannot be had, or is not what is expected. The message says what to
      do by hand.
    OSError: `folder` cannot be written, or has no room. What came so far stays.
  """
  _check(file)
  places = _Places(Path(folder), _name(file), manual_dir)
  if manual_dir is not None and places.manual.is_file():
    _check_manual(file, places.manual)
    return places.manual
  if _is_whole(file, places):
    return places.whole
  by_hand = places.by_hand(file)
  if urllib.parse.urlsplit(file.url).scheme not in ("http", "https"):
    raise UserError(f"File.url: expected http:// or https://, got {file.url!r}; {by_hand}")
  try:
    places.folder.mkdir(parents=True, exist_ok=True)
    with locked(places.lock):
      _finish_what_was_killed(places)
      if not _is_whole(file, places) and not _adopt(file, places):
        _fetch(file, places, progress)
  except OSError as error:
    raise _not_writable(file, places, error) from error
  return places.whole


def verify(file: File, folder: Path) -> Path:
  """Reads the downloaded file in `folder`, and compares it with record and checksum.

    verify(File("https://host/text8.zip"), Path("data"))  data/text8.zip

  Returns:
    Where it lies.

  Raises:
    ValueError: it is not there, or damaged.
  """
  _check(file)
  places = _Places(Path(folder), _name(file), None)
  if not _is_whole(file, places):
    raise UserError(
      f"{places.whole}: expected a whole file with a record that agrees "
      f"({places.record}), got none; download it"
    )
  expected = f"sha256:{(_read_record(places.record) or {})['sha256']}"
  for checksum in {expected, file.checksum or expected}:
    came = _digest(places.whole, checksum)
    if came != checksum.lower():
      raise UserError(
        f"{places.whole}: expected {checksum}, got {came}; delete it to download it again"
      )
  return places.whole


class _Places:
  """Where what of a file lies."""

  def __init__(self, folder: Path, name: str, manual_dir: Path | None):
    self.folder = folder
    self.name = name
    self.whole = folder / name
    self.record = folder / f"{name}.json"
    self.partial = folder / f"{name}.partial"
    self.state = folder / f"{name}.partial.json"
    self.lock = folder / f"{name}.lock"
    self.bad = folder / f"{name}.bad"
    self.manual_dir = manual_dir
    self.manual = Path(manual_dir or "", name)

  def by_hand(self, file: File) -> str:
    """What a user can do."""
    where = self.manual_dir or "a folder that you name with --manual_dir"
    return f"download {file.url} yourself and put it as {self.name} into {where}"


class _BrokenError(Exception):
  """What may go better at the next try, `wait_s` seconds later at the earliest."""

  def __init__(self, reason: str, wait_s: float = 0.0):
    super().__init__(reason)
    self.wait_s = wait_s


def _check(file: File) -> None:
  if not re.fullmatch("|sha256:[0-9a-fA-F]{64}|md5:[0-9a-fA-F]{32}", file.checksum):
    raise UserError(
      "File.checksum: expected sha256: and 64, or md5: and 32 hexadecimal "
      f"digits, got {file.checksum!r}"
    )
  for key in ("size", "head_bytes"):
    if getattr(file, key) < 0:
      raise UserError(f"File.{key}: expected 0 or more, got {getattr(file, key)}")
  if file.checksum and file.head_bytes:
    raise UserError(
      "File.checksum: expected none with head_bytes, as it is of the whole "
      f"file, got {file.checksum}"
    )


def _name(file: File) -> str:
  path = urllib.parse.urlsplit(file.url).path
  name = file.name or urllib.parse.unquote(path.rpartition("/")[2])
  if name in ("", ".", "..") or "/" in name or "\0" in name:
    raise UserError(f"File.name: expected the name of a file, got {name!r} (url {file.url!r})")
  return name


def _check_manual(file: File, path: Path) -> None:
  size = path.stat().st_size
  least = min(file.size, file.head_bytes or file.size)
  if file.size and not least <= size <= file.size:
    expected = f"{file.size} bytes" if least == file.size else f"{least} bytes or more"
    raise UserError(
      f"{path}: expected {expected}, got {size}; get it again from {file.url}, or remove it"
    )
  if file.checksum:
    came = _digest(path, file.checksum)
    if came != file.checksum.lower():
      raise UserError(
        f"{path}: expected {file.checksum}, got {came}; get it again from {file.url}, or remove it"
      )


def _is_whole(file: File, places: _Places) -> bool:
  """Whether the file is there, has its size, and the record is of what is asked for."""
  record = _read_record(places.record)
  if record is None or not places.whole.is_file():
    return False
  size = places.whole.stat().st_size
  if size != record["size"] or file.head_bytes != record.get("head_bytes", 0):
    return False
  if file.size and size != min(file.size, file.head_bytes or file.size):
    return False
  if file.checksum:
    known = (f"sha256:{record['sha256']}", record.get("checksum"))
    return file.checksum.lower() in known
  return record["url"] == file.url


def _finish_what_was_killed(places: _Places) -> None:
  """Writes the record of a file that was renamed just before the process ended."""
  record = _read_json(places.state).get("record")
  if record and places.whole.is_file() and not places.partial.exists():
    if _digest(places.whole, "sha256:") == f"sha256:{record['sha256']}":
      _write_json(places.record, record)
    places.state.unlink()


def _adopt(file: File, places: _Places) -> bool:
  """Takes a file without a record that agrees, if it has the checksum asked for."""
  if not file.checksum or not places.whole.is_file():
    return False
  if file.size not in (0, places.whole.stat().st_size):
    return False
  if _digest(places.whole, file.checksum) != file.checksum.lower():
    return False
  _write_json(places.record, _make_record(file, places.whole, {}))
  return True


def _fetch(file: File, places: _Places, progress: bool) -> None:
  """Downloads into the partial file, checks it, and puts it into place."""
  places.bad.unlink(missing_ok=True)
  first = None if file.checksum else _read_record(places.record)
  if first is not None and (first["url"], first.get("head_bytes", 0)) != (
    file.url,
    file.head_bytes,
  ):
    first = None
  transfer = _Transfer(file, places, first, progress)
  transfer.run()
  with places.partial.open("rb") as partial:
    os.fsync(partial.fileno())
  record = _make_record(file, places.partial, transfer.state)
  _check_what_came(file, places, record, first)
  _write_json(places.state, {**transfer.state, "record": record})
  os.replace(places.partial, places.whole)
  _write_json(places.record, record)
  places.state.unlink()


def _check_what_came(file: File, places: _Places, record: dict, first: dict | None):
  by_hand = places.by_hand(file)
  if file.checksum:
    came = f"sha256:{record['sha256']}"
    if not file.checksum.startswith("sha256:"):
      came = _digest(places.partial, file.checksum)
    if came != file.checksum.lower():
      os.replace(places.partial, places.bad)
      places.state.unlink()
      raise UserError(
        f"{file.url}: expected {file.checksum}, got {came} "
        f"({record['size']} bytes, kept as {places.bad} to look at); call "
        f"again, or {by_hand}"
      )
  expected = min(file.size, file.head_bytes or file.size)
  if file.size and record["size"] != expected:
    os.replace(places.partial, places.bad)
    places.state.unlink()
    raise UserError(
      f"{file.url}: expected {expected} bytes, got {record['size']} (kept "
      f"as {places.bad} to look at); call again, or {by_hand}"
    )
  if first is not None and first["sha256"] != record["sha256"]:
    raise UserError(
      f"{file.url}: expected sha256:{first['sha256']}, as it was at the "
      f"first download ({first.get('date')}), got sha256:"
      f"{record['sha256']}; to accept what came, delete {places.record}; "
      f"to download it again, delete {places.partial}; or {by_hand}"
    )


class _Transfer:
  """A file on its way into the partial one.

  Attributes:
    state: what the partial file's bytes are of: "url", "etag" and "last_modified" ("":
      the server tells none), "size" of the whole file (None: not known yet). {} before
      the first byte.
  """

  def __init__(self, file: File, places: _Places, first: dict | None, progress: bool):
    self._file = file
    self._places = places
    self._first = first
    self._progress = progress
    self._bar = None
    self._restarts = 0
    self._by_hand = places.by_hand(file)
    self.state = _read_json(places.state)
    if self.state.get("url") != file.url:
      self._drop()

  def run(self) -> None:
    """Requests until all is there.

    Raises:
      ValueError: it gave up.
    """
    failures, furthest = 0, self._length()
    if self._file.head_bytes and self._length() > self._file.head_bytes:
      os.truncate(self._places.partial, self._file.head_bytes)
    try:
      while not self._is_complete():
        length = self._length()
        try:
          self._request()
        except _BrokenError as broken:
          failures = 0 if self._length() > length else failures + 1
          # Where each try starts over, bytes that come again are no progress.
          if self._length() > furthest:
            furthest, self._restarts = self._length(), 0
          if max(failures, self._restarts) > len(PAUSES_S):
            raise UserError(
              f"{self._file.url}: expected the file, got {broken}, after "
              f"{max(failures, self._restarts)} tries; {self._length()} bytes of it are "
              f"in {self._places.partial}; call again to go on from there, or "
              f"{self._by_hand}"
            ) from broken
          pause = PAUSES_S[max(failures - 1, 0)] if PAUSES_S else 0.0
          pause = max(pause, min(broken.wait_s, LONGEST_PAUSE_S))
          _log.warning("%s: %s; trying again in %g s", self._file.url, broken, pause)
          _pause(pause)
    finally:
      if self._bar is not None:
        self._bar.close()

  def _length(self) -> int:
    partial = self._places.partial
    return partial.stat().st_size if partial.exists() else 0

  def _target(self) -> int | None:
    """How many bytes are wanted, as far as is known."""
    known = (self._file.head_bytes or None, self.state.get("size"))
    return min((x for x in known if x is not None), default=None)

  def _is_complete(self) -> bool:
    target = self._target()
    is_begun = self.state and self._places.partial.exists()
    return bool(is_begun) and target is not None and self._length() >= target

  def _drop(self) -> None:
    """Forgets the bytes that there are: they first, then what they were of."""
    if self._length():
      self._restarts += 1
    self._places.partial.unlink(missing_ok=True)
    self._places.state.unlink(missing_ok=True)
    self.state = {}

  def _begin(self, response, size: int | None) -> None:
    """Makes an empty partial file, and writes down what its bytes will be of."""
    self._drop()
    self._places.partial.touch()
    etag, modified = _identity(response)
    self.state = {"url": self._file.url, "etag": etag, "last_modified": modified, "size": size}
    _write_json(self._places.state, self.state)

  def _set_size(self, size: int) -> None:
    self.state["size"] = size
    _write_json(self._places.state, self.state)

  def _validator(self) -> str:
    """What tells the server which version the bytes are of; a weak ETag may not."""
    etag = self.state.get("etag", "")
    if etag and not etag.startswith("W/"):
      return etag
    return self.state.get("last_modified", "")

  def _request(self) -> None:
    """One request, and what comes of it."""
    file = self._file
    # Bytes of two versions would make a file that no checksum tells from a good one.
    if self._length() and not self._validator() and not file.checksum:
      self._drop()
    have = self._length()
    headers = {}
    if have or file.head_bytes:
      last = file.head_bytes - 1 if file.head_bytes else ""
      headers["Range"] = f"bytes={have}-{last}"
    if have and self._validator():
      headers["If-Range"] = self._validator()
    with contextlib.closing(_get(file.url, headers, self._by_hand)) as response:
      if response.status_code == 200:
        size = response.headers.get("Content-Length", "")
        self._begin(response, int(size) if size.isdigit() else None)
      elif response.status_code == 206:
        self._go_on(response, have)
      elif response.status_code == 416:
        return self._end(response, have)
      else:
        raise _refusal(file.url, response, self._by_hand)
      self._check_size()
      self._check_room()
      self._read(response)

  def _go_on(self, response, have: int) -> None:
    """Makes sure that the bytes to come are those after the ones that there are."""
    start, size = _content_range(response)
    if start != have or (have and not self._is_same(response, size)):
      self._drop()
      raise _BrokenError(f"bytes from {start} on, of another version maybe, not from {have} on")
    if not have:
      self._begin(response, size)
    elif size is not None and self.state["size"] is None:
      self._set_size(size)

  def _end(self, response, have: int) -> None:
    """There are no bytes after those that there are: all are there, or they are wrong."""
    _, size = _content_range(response)
    if have == 0 == size:
      self._begin(response, 0)
    elif have and have == size and self._is_same(response, size):
      self._set_size(have)
    else:
      self._drop()
      raise _BrokenError(f"no bytes from {have} on, where the file has {size} bytes")

  def _is_same(self, response, size: int | None) -> bool:
    """Whether a response is of the version that the bytes are of, as far as it tells."""
    etag, modified = _identity(response)
    if size is not None and self.state["size"] not in (None, size):
      return False
    if etag and self.state["etag"]:
      return etag == self.state["etag"]
    return not modified or modified == self.state["last_modified"]

  def _check_size(self) -> None:
    """Stops before gigabytes come that cannot be right."""
    file, size, target = self._file, self.state["size"], self._target()
    if file.size and size not in (None, file.size):
      self._drop()
      raise UserError(f"{file.url}: expected {file.size} bytes, got {size}; {self._by_hand}")
    if self._first is not None and size is not None and target != self._first["size"]:
      self._drop()
      raise UserError(
        f"{file.url}: expected {self._first['size']} bytes, as at the first download "
        f"({self._first.get('date')}), got {target}; to accept the new file, delete "
        f"{self._places.record}; or {self._by_hand}"
      )

  def _check_room(self) -> None:
    target = self._target() or self._file.size
    if target - self._length() > shutil.disk_usage(self._places.folder).free:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def _read(self, response) -> None:
    """Writes what comes, each chunk at once, so that little is lost in a crash."""
    target, length = self._target(), self._length()
    bar = self._show(target, length)
    with self._places.partial.open("ab", buffering=0) as partial:
      for chunk in _chunks(response):
        chunk = chunk if target is None else chunk[: target - length]
        _write(partial, chunk)
        length += len(chunk)
        bar.update(len(chunk))
        if length == target:
          break
    if target is None:
      self._end_without_length(response, length)
    elif length < target:
      raise _BrokenError(f"{length} of {target} bytes")

  def _end_without_length(self, response, length: int) -> None:
    """The server did not say how much it sends: is it all?"""
    file = self._file
    if length < file.size:
      raise _BrokenError(f"{length} of {file.size} bytes")
    is_chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    if not (is_chunked or file.size or file.checksum):
      self._drop()
      raise UserError(
        f"{file.url}: expected a server that tells the file's size, got "
        f"{length} bytes of which none knows if they are all; "
        f"{self._by_hand}"
      )
    self._set_size(length)

  def _show(self, target: int | None, length: int) -> tqdm:
    if self._bar is None:
      is_small = target is not None and target <= SHOWN_BYTES
      self._bar = tqdm(
        total=target,
        initial=length,
        desc=self._places.name,
        unit="B",
        unit_scale=True,
        mininterval=1.0,
        disable=not self._progress or is_small,
      )
    self._bar.reset(target)  # the rate is this try's
    self._bar.initial = self._bar.n = self._bar.last_print_n = length
    return self._bar


def _get(url: str, headers: dict, by_hand: str):
  """The response to a request, its body still to come."""
  import requests
  import urllib3

  # What comes packed on the way would not have the length that the server tells.
  headers = {"Accept-Encoding": "identity", "User-Agent": "dpjax", **headers}
  try:
    return requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S)
  except (urllib3.exceptions.HTTPError, OSError) as error:  # requests' own are OSErrors
    if isinstance(error, ValueError | requests.TooManyRedirects):
      raise UserError(f"{url}: expected a file, got {error}; {by_hand}") from error
    raise _BrokenError(str(error)) from error


def _chunks(response) -> Iterator[bytes]:
  """The body as it comes, nothing unpacked."""
  import http.client

  import urllib3

  # `read` waits until a chunk is full, and loses it if the connection breaks meanwhile.
  read = getattr(response.raw, "read1", response.raw.read)
  while True:
    try:
      chunk = read(CHUNK_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
      name = type(error).__name__
      raise _BrokenError(f"a connection that broke ({name})") from error
    if not chunk:
      return
    yield chunk


def _refusal(url: str, response, by_hand: str) -> Exception:
  """The error of a status that brings no bytes: another try may help, or none."""
  status = response.status_code
  said = f"{status} {response.reason}"
  if status >= 500 or status in (408, 425, 429):
    return _BrokenError(said, _retry_after(response))
  return UserError(f"{url}: expected the file, got {said}; {by_hand}")


def _retry_after(response) -> float:
  """How long the server wants to be left alone, seconds."""
  value = response.headers.get("Retry-After", "").strip()
  if value.isdigit():
    return float(value)
  try:
    return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
  except (TypeError, ValueError):
    return 0.0


def _identity(response) -> tuple[str, str]:
  """ETag and Last-Modified, "" where there is none."""
  return response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")


def _content_range(response) -> tuple[int | None, int | None]:
  """First byte and size of the whole file, None where they are not told."""
  value = response.headers.get("Content-Range", "")
  match = re.fullmatch(r"\s*bytes\s+(?:(\d+)-\d+|\*)/(?:(\d+)|\*)\s*", value)
  if match is None:
    return None, None
  start, size = (None if x is None else int(x) for x in match.groups())
  return start, size


def _make_record(file: File, path: Path, state: dict) -> dict:
  now = datetime.datetime.now(datetime.UTC)
  return {
    "url": file.url,
    "size": path.stat().st_size,
    "sha256": _digest(path, "sha256:").partition(":")[2],
    "date": now.isoformat(timespec="seconds"),
    "head_bytes": file.head_bytes,
    "checksum": file.checksum.lower(),
    "etag": state.get("etag", ""),
    "last_modified": state.get("last_modified", ""),
  }


def _digest(path: Path, checksum: str) -> str:
  """The file's checksum, of the same kind as the one given."""
  kind = checksum.partition(":")[0]
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
  return f"{kind}:{digest.hexdigest()}"


def _read_record(path: Path) -> dict | None:
  """What was written down about a file, None if nothing was.

  Raises:
    ValueError: it cannot be read. (To go on without would be to compare with nothing.)
  """
  if not path.exists():
    return None
  record = _read_json(path)
  kinds = {"url": str, "size": int, "sha256": str}
  if not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
    raise UserError(
      f"{path}: expected the record of a download (url, size, sha256), got "
      "something else; delete it to download the file again"
    )
  return record


def _read_json(path: Path) -> dict:
  """What is in the file, {} if it is not there or not what it should be."""
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except (FileNotFoundError, ValueError):
    return {}
  return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: dict) -> None:
  """Writes the file whole or not at all; what was renamed before stays renamed."""
  temporary = path.with_name(path.name + ".tmp")
  with temporary.open("w", encoding="utf-8") as file:
    file.write(json.dumps(content, indent=2) + "\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def _write(file, content: bytes) -> None:
  """Writes all of it: a nearly full disk may take a part."""
  rest = memoryview(content)
  while rest:
    rest = rest[file.write(rest) :]


def _pause(seconds: float) -> None:
  time.sleep(seconds)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Waits until no other process has the file locked, and locks it.

  Args:
    path: an empty file, made if it is not there; it stays.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      _log.warning("%s: another process makes what is to be there; waiting for it", path)
      fcntl.flock(file, fcntl.LOCK_EX)
    try:
      yield
    finally:
      fcntl.flock(file, fcntl.LOCK_UN)


def _not_writable(file: File, places: _Places, error: OSError) -> OSError:
  """The error of a folder without room or permission, in words."""
  needed = free = "an unknown number of"
  with contextlib.suppress(OSError):
    size = _read_json(places.state).get("size") or file.size
    size = min(size or file.head_bytes, file.head_bytes or size)
    have = places.partial.stat().st_size if places.partial.exists() else 0
    needed = size - have if size else needed
  with contextlib.suppress(OSError):
    existing = next(x for x in (places.folder, *places.folder.parents) if x.exists())
    free = shutil.disk_usage(existing).free
  return OSError(
    error.errno,
    f"{error.strerror or error}; {places.name} needs {needed} bytes more there, and {free} "
    "bytes are free. What came so far stays, and the next call goes on from it; or "
    f"{places.by_hand(file)}",
    str(places.folder),
  )
