"""Downloads from a server that does all that networks and servers do wrong."""

import dataclasses
import errno
import gzip
import hashlib
import http.server
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest

from dpjax.data import download as module
from dpjax.data.download import File, download, verify

SIZE = 7919
CONTENT = np.random.default_rng(1).bytes(SIZE)
OTHER = np.random.default_rng(2).bytes(SIZE)
HERE = Path(__file__).parents[2]


def sha256(content):
  return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclasses.dataclass
class Plan:
  """How one request is answered: `status` is an error, where it is not 0."""

  status: int = 0
  headers: dict = dataclasses.field(default_factory=dict)
  break_after: int | None = None  # bytes of the body, then the connection ends
  ignore_range: bool = False
  ignore_if_range: bool = False
  length: str | None = "true"  # Content-Length; "chunked", None: there is none
  gate: threading.Event | None = None  # waited for before the body


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *_):
    pass

  def end_headers(self):
    self.send_header("Connection", "close")
    super().end_headers()

  def do_GET(self):
    server = self.server
    asked = self.headers.get("Range", "")
    condition = self.headers.get("If-Range", "")
    with server.lock:
      server.ranges.append(asked)
      server.conditions.append(condition)
      server.headers.append(dict(self.headers))
      plan = server.plans.pop(0) if server.plans else server.usual
    self.close_connection = True
    try:
      self.answer(server, plan, asked, condition)
    except OSError:
      pass  # the other side has gone

  def answer(self, server, plan, asked, condition):
    if plan.status:
      self.send_response(plan.status)
      for key, value in {"Content-Length": "0", **plan.headers}.items():
        self.send_header(key, value)
      return self.end_headers()
    content, size = server.content, len(server.content)
    is_changed = condition and condition not in (server.etag, server.modified)
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
    ranged = match and not plan.ignore_range
    if ranged and (plan.ignore_if_range or not is_changed):
      begin = int(match[1])
      if begin >= size:
        self.send_response(416)
        self.send_header("Content-Range", f"bytes */{size}")
        self.send_header("Content-Length", "0")
        return self.end_headers()
      end = min(int(match[2] or size - 1), size - 1)
      self.send_response(206)
      self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
      content = content[begin : end + 1]
    else:
      self.send_response(200)
    for key, value in {"ETag": server.etag, "Last-Modified": server.modified}.items():
      if value:
        self.send_header(key, value)
    for key, value in plan.headers.items():
      self.send_header(key, value)
    if plan.length == "chunked":
      self.send_header("Transfer-Encoding", "chunked")
    elif plan.length:
      length = len(content) if plan.length == "true" else int(plan.length)
      self.send_header("Content-Length", str(length))
    self.end_headers()
    if plan.gate:
      self.wfile.flush()
      assert plan.gate.wait(20)
    cut = content[: plan.break_after]
    if plan.length != "chunked":
      return self.wfile.write(cut)
    self.wfile.write(b"%x\r\n%s\r\n" % (len(cut), cut))
    if len(cut) == len(content):
      self.wfile.write(b"0\r\n\r\n")


@pytest.fixture(scope="module")
def running_server():
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.lock = threading.Lock()
  thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
  thread.start()
  yield server
  server.shutdown()
  server.server_close()
  thread.join()


@pytest.fixture
def server(running_server, monkeypatch):
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  running_server.content = CONTENT
  running_server.etag = '"one"'
  running_server.modified = formatdate(86400, usegmt=True)
  running_server.plans, running_server.usual = [], Plan()
  running_server.ranges, running_server.conditions = [], []
  running_server.headers = []
  running_server.url = f"http://127.0.0.1:{running_server.server_port}/a%20b/t.zip?x=y"
  return running_server


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
  """No pause is waited for; they are listed."""
  found = []
  monkeypatch.setattr(module, "_pause", found.append)
  return found


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "new" / "downloads"


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def record(folder, name="t.zip"):
  return json.loads((folder / f"{name}.json").read_text())


WHOLE = ["t.zip", "t.zip.json", "t.zip.lock"]


def assert_whole(folder, content=CONTENT):
  assert (folder / "t.zip").read_bytes() == content
  assert names(folder) == WHOLE
  assert record(folder)["size"] == len(content)
  assert f"sha256:{record(folder)['sha256']}" == sha256(content)


def test_downloads_once_and_writes_it_down(server, folder):
  file = File(server.url)
  assert download(file, folder) == folder / "t.zip"
  assert_whole(folder)
  assert record(folder)["url"] == server.url
  assert re.match(r"\d{4}-\d\d-\d\dT", record(folder)["date"])
  download(file, folder)
  assert server.ranges == [""]
  assert server.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
  "checksum",
  [
    sha256(CONTENT),
    sha256(CONTENT).upper().replace("SHA", "sha"),
    f"md5:{hashlib.md5(CONTENT).hexdigest()}",
  ],
)
def test_checksum(server, folder, checksum):
  file = File(server.url, checksum=checksum, size=SIZE)
  download(file, folder)
  assert_whole(folder)
  # With a checksum it does not matter where the file is from.
  download(dataclasses.replace(file, url=server.url + "z"), folder)
  assert server.ranges == [""] and record(folder)["url"] == server.url
  wrong = checksum[:-1] + ("0" if checksum[-1] != "0" else "1")
  with pytest.raises(
    ValueError, match=f"expected {wrong}, got {checksum.lower()}.*yourself and put it as u.zip"
  ):
    download(File(server.url, "u.zip", checksum=wrong), folder)
  assert not (folder / "u.zip").exists() and not (folder / "u.zip.json").exists()
  assert (folder / "u.zip.bad").read_bytes() == CONTENT
  download(File(server.url, "u.zip", checksum=checksum), folder)
  assert [x for x in names(folder) if x.startswith("u")] == ["u.zip", "u.zip.json", "u.zip.lock"]


def test_wrong_size(server, folder):
  with pytest.raises(ValueError, match=f"expected {SIZE + 1} bytes, got {SIZE}"):
    download(File(server.url, size=SIZE + 1), folder)
  assert names(folder) == ["t.zip.lock"]
  server.plans = [Plan(length="chunked")]
  with pytest.raises(ValueError, match=f"expected {SIZE - 1} bytes, got {SIZE}"):
    download(File(server.url, size=SIZE - 1), folder)
  assert names(folder) == ["t.zip.bad", "t.zip.lock"]
  download(File(server.url), folder)
  with pytest.raises(ValueError, match=f"expected {SIZE - 1} bytes, got {SIZE}"):
    download(File(server.url, size=SIZE - 1), folder)


def test_broken_again_and_again(server, folder, pauses):
  """Each try has some bytes, so that there may be many."""
  server.usual = Plan(break_after=991)
  download(File(server.url), folder)
  assert_whole(folder)
  assert server.ranges == ["", *(f"bytes={991 * i}-" for i in range(1, 8))]
  assert server.conditions == ["", *['"one"'] * 7]
  assert pauses == [module.PAUSES_S[0]] * 7


def test_gives_up_where_nothing_comes_and_goes_on_in_the_next_call(server, folder, pauses):
  server.plans = [Plan(break_after=1009)]
  server.usual = Plan(break_after=0)
  with pytest.raises(
    ValueError,
    match="after 5 tries; 1009 bytes.*call again.*download "
    ".* yourself and put it as t.zip into .*manual_dir",
  ):
    download(File(server.url), folder)
  assert len(server.ranges) == 6
  assert pauses == [module.PAUSES_S[0], *module.PAUSES_S]
  assert list(module.PAUSES_S) == sorted(set(module.PAUSES_S))
  assert names(folder) == ["t.zip.lock", "t.zip.partial", "t.zip.partial.json"]
  state = json.loads((folder / "t.zip.partial.json").read_text())
  assert state == {
    "url": server.url,
    "etag": '"one"',
    "size": SIZE,
    "last_modified": server.modified,
  }
  server.usual = Plan()
  download(File(server.url), folder)
  assert_whole(folder)
  assert server.ranges[6:] == ["bytes=1009-"]


@pytest.mark.parametrize("status", [401, 403, 404, 410, 304])
def test_refused_at_once(server, folder, status):
  server.usual = Plan(status=status)
  with pytest.raises(ValueError, match=f"{status}.*download .* yourself.* into given"):
    download(File(server.url), folder, manual_dir=Path("given"))
  assert len(server.ranges) == 1 and names(folder) == ["t.zip.lock"]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_refused_for_now(server, folder, pauses, status):
  server.plans = [Plan(status=status)] * 4
  download(File(server.url), folder)
  assert_whole(folder)
  assert tuple(pauses) == module.PAUSES_S
  server.usual = Plan(status=status)
  with pytest.raises(ValueError, match=f"{status}.*after 5 tries"):
    download(File(server.url, "u"), folder)
  assert len(server.ranges) == 10


def test_retry_after(server, folder, pauses, monkeypatch):
  monkeypatch.setattr(module.time, "time", lambda: 1e9)
  waits = ("37", formatdate(1e9 + 41, usegmt=True), "1000000", "soon", "0")
  server.plans = [Plan(429 + 74 * (i % 2), {"Retry-After": x}) for i, x in enumerate(waits)]
  server.plans[4:4] = [Plan(break_after=5)]
  download(File(server.url), folder)
  assert_whole(folder)
  own = module.PAUSES_S  # shorter than what the server asks for, as far as it does
  assert pauses == [37, 41, module.LONGEST_PAUSE_S, own[3], own[0], own[0]]


def test_redirected(server, folder):
  server.plans = [Plan(302, {"Location": "/elsewhere"})]
  download(File(server.url), folder)
  assert_whole(folder)
  server.usual = Plan(302, {"Location": "/elsewhere"})
  with pytest.raises(ValueError, match="30 redirects.*yourself"):
    download(File(server.url, "u"), folder)
  assert len(server.ranges) == 2 + 31


def test_timeouts_and_refused_connections(server, folder, pauses, monkeypatch, caplog):
  def patience(seconds):
    pauses.append(seconds)
    module.TIMEOUT_S = 20

  monkeypatch.setattr(module, "TIMEOUT_S", 0.05)  # set back at the test's end
  monkeypatch.setattr(module, "_pause", patience)
  gate = threading.Event()
  server.plans = [Plan(gate=gate)]
  download(File(server.url), folder)
  gate.set()
  assert_whole(folder)
  assert "ReadTimeoutError" in caplog.text
  with socket.socket() as closed:
    closed.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{closed.getsockname()[1]}/u"
    with pytest.raises(ValueError, match="after 5 tries.*yourself"):
      download(File(url), folder)
  assert len(pauses) == 1 + 4


def test_a_server_without_ranges_starts_over(server, folder):
  server.usual = Plan(ignore_range=True)
  server.plans = [Plan(break_after=k, ignore_range=True) for k in (5000, 3000)]
  download(File(server.url), folder)
  assert_whole(folder)
  assert server.ranges == ["", "bytes=5000-", "bytes=3000-"]
  server.plans = [Plan(break_after=k, ignore_range=True) for k in range(11, 19)]
  download(File(server.url, "u"), folder)
  assert (folder / "u").read_bytes() == CONTENT


def test_starting_over_comes_to_an_end(server, folder, pauses):
  """What comes a second time is no progress."""
  server.usual = Plan(break_after=3001, ignore_range=True)
  with pytest.raises(ValueError, match="connection that broke.*after 5 tries; 3001 bytes"):
    download(File(server.url), folder)
  assert len(server.ranges) == 6
  assert pauses == [module.PAUSES_S[0], *module.PAUSES_S]


@pytest.mark.parametrize("ignore_if_range", [False, True])
@pytest.mark.parametrize("by", ["etag", "modified"])
def test_changed_between_two_tries(server, folder, by, ignore_if_range):
  server.etag = server.etag if by == "etag" else ""
  server.plans = [Plan(break_after=1009)]
  server.usual = Plan(break_after=0)
  with pytest.raises(ValueError):
    download(File(server.url), folder)
  before = getattr(server, by)
  server.usual = Plan(ignore_if_range=ignore_if_range)
  server.content = OTHER
  setattr(server, by, '"two"' if by == "etag" else formatdate(99999, usegmt=True))
  server.ranges.clear()
  server.conditions.clear()
  download(File(server.url), folder)
  assert_whole(folder, OTHER)
  assert server.ranges == ["bytes=1009-", ""][: 1 + ignore_if_range]
  assert server.conditions[0] == before


def test_without_a_version_only_a_checksum_makes_going_on_safe(server, folder):
  server.etag = server.modified = ""
  server.plans = [Plan(break_after=13)]
  download(File(server.url), folder)
  assert server.ranges == ["", ""]
  server.plans = [Plan(break_after=13)]
  download(File(server.url, "u", checksum=sha256(CONTENT)), folder)
  assert server.ranges[2:] == ["", "bytes=13-"]
  server.etag = 'W/"one"'  # says that the bytes may differ
  server.plans = [Plan(break_after=13)]
  download(File(server.url, "v"), folder)
  assert server.ranges[4:] == ["", ""]
  assert all((folder / x).read_bytes() == CONTENT for x in ("t.zip", "u", "v"))


def test_another_url_starts_over(server, folder):
  server.plans = [Plan(break_after=13), *[Plan(status=500)] * 5]
  with pytest.raises(ValueError):
    download(File(server.url), folder)
  server.ranges.clear()
  download(File(server.url + "z"), folder)
  assert_whole(folder)
  assert server.ranges == [""]


def test_nothing_after_the_partial_file(server, folder):
  """416: all is there where the size was not known, else it is wrong."""
  server.plans = [Plan(length="chunked", break_after=13)]
  server.content = CONTENT[:17]
  download(File(server.url), folder)
  assert_whole(folder, CONTENT[:17])
  assert server.ranges == ["", "bytes=13-"]
  for size, expected in ((17, ["bytes=17-"]), (19, ["bytes=19-", ""])):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "t.zip.partial").write_bytes(CONTENT[:size])
    state = {"url": server.url, "etag": '"one"', "last_modified": "", "size": None}
    (folder / "t.zip.partial.json").write_text(json.dumps(state))
    server.ranges.clear()
    download(File(server.url), folder)
    assert_whole(folder, CONTENT[:17])
    assert server.ranges == expected


def test_content_length_that_is_too_long(server, folder):
  server.plans = [Plan(length=str(SIZE + 100))]
  download(File(server.url), folder)
  assert_whole(folder)
  assert server.ranges == ["", f"bytes={SIZE}-", ""]
  server.usual = Plan(length=str(SIZE + 100))
  with pytest.raises(ValueError, match="after 5 tries"):
    download(File(server.url, "u"), folder)
  assert not (folder / "u").exists()


def test_without_content_length(server, folder, pauses):
  server.plans = [Plan(length="chunked")]
  download(File(server.url), folder)
  assert_whole(folder)
  # A connection that ends says nothing about the file, if nothing else is known of it.
  server.usual = Plan(length=None)
  with pytest.raises(ValueError, match="tells the file's size"):
    download(File(server.url, "u"), folder)
  assert not (folder / "u").exists() and not (folder / "u.partial").exists()
  download(File(server.url, "v", checksum=sha256(CONTENT)), folder)
  server.plans = [Plan(length=None, break_after=13), Plan(length=None, break_after=17)]
  assert not pauses
  download(File(server.url, "w", size=SIZE), folder)
  assert server.ranges[-2:] == ["bytes=13-", "bytes=30-"] and len(pauses) == 2
  assert (folder / "v").read_bytes() == (folder / "w").read_bytes() == CONTENT


def test_what_is_called_packed_is_kept_as_it_comes(server, folder):
  server.content = gzip.compress(CONTENT)
  server.usual = Plan(headers={"Content-Encoding": "gzip"})
  download(File(server.url), folder)
  assert_whole(folder, server.content)


def test_empty_file(server, folder):
  server.content = b""
  download(File(server.url), folder)
  assert_whole(folder, b"")
  download(File(server.url, "u", head_bytes=5), folder)
  assert (folder / "u").read_bytes() == b""
  state = {"url": server.url, "etag": "", "last_modified": "", "size": 0}
  (folder / "v.partial.json").write_text(json.dumps(state))
  assert download(File(server.url, "v"), folder).read_bytes() == b""


@pytest.mark.parametrize("ignore_range", [False, True])
def test_head(server, folder, monkeypatch, ignore_range):
  write, written = module._write, []
  monkeypatch.setattr(
    module, "_write", lambda file, content: (written.append(len(content)), write(file, content))
  )
  server.content = np.random.default_rng(3).bytes(3_000_017)
  server.usual = Plan(ignore_range=ignore_range)
  server.plans = [Plan(ignore_range=ignore_range, break_after=100)]
  file = File(server.url, head_bytes=1013)
  download(file, folder)
  assert_whole(folder, server.content[:1013])
  assert server.ranges == ["bytes=0-1012", "bytes=100-1012"]
  assert sum(written) == 1013 + 100 * ignore_range and all(written)
  download(file, folder)
  download(dataclasses.replace(file, size=3_000_017), folder)
  assert len(server.ranges) == 2
  # Another length is another file; the head that there was does not stand for it.
  longer = dataclasses.replace(file, head_bytes=1019)
  download(longer, folder)
  assert_whole(folder, server.content[:1019])
  server.content = b"x" + server.content[1:]
  (folder / "t.zip").unlink()
  with pytest.raises(ValueError, match="first download"):
    download(longer, folder)


@pytest.mark.parametrize("ignore_range", [False, True])
def test_head_of_a_short_file(server, folder, ignore_range):
  server.usual = Plan(ignore_range=ignore_range)
  download(File(server.url, head_bytes=SIZE + 5), folder)
  assert_whole(folder)
  download(File(server.url, head_bytes=SIZE + 5), folder)
  assert server.ranges == [f"bytes=0-{SIZE + 4}"]


def test_head_from_a_longer_partial_file(server, folder):
  server.plans = [Plan(break_after=1009), *[Plan(status=500)] * 5]
  with pytest.raises(ValueError):
    download(File(server.url), folder)
  download(File(server.url, head_bytes=503), folder)
  assert_whole(folder, CONTENT[:503])
  assert len(server.ranges) == 6


def test_another_content_than_at_the_first_download(server, folder):
  file = File(server.url)
  path = download(file, folder)
  path.unlink()
  server.content, server.etag = OTHER, '"two"'
  for _ in range(2):
    with pytest.raises(
      ValueError,
      match=f"expected {sha256(CONTENT)}.*first download.* "
      f"got {sha256(OTHER)}; to accept.*delete .*t.zip.json",
    ):
      download(file, folder)
    assert not path.exists()
  (folder / "t.zip.json").unlink()
  download(file, folder)
  assert_whole(folder, OTHER)
  assert server.ranges == ["", ""]  # It was there already.
  path.unlink()
  server.content = OTHER[:-3]
  with pytest.raises(ValueError, match="first download.*delete .*t.zip.json"):
    download(file, folder)
  assert "t.zip.partial" not in names(folder)  # The size was enough to know.
  server.content = OTHER
  download(file, folder)
  assert_whole(folder, OTHER)
  # What another URL gives is not compared.
  server.content = CONTENT
  download(File(server.url + "z"), folder)
  assert_whole(folder)


def test_a_file_that_was_changed_on_disk(server, folder):
  file = File(server.url)
  path = download(file, folder)
  assert verify(file, folder) == path
  path.write_bytes(CONTENT[:-1])
  with pytest.raises(ValueError, match="expected a whole file"):
    verify(file, folder)
  download(file, folder)
  assert_whole(folder)
  path.write_bytes(OTHER)  # the same size: seen by who reads it
  download(file, folder)
  assert len(server.ranges) == 2
  with pytest.raises(ValueError, match=f"expected {sha256(CONTENT)}, got {sha256(OTHER)}"):
    verify(file, folder)


def test_a_file_without_record(server, folder):
  folder.mkdir(parents=True)
  (folder / "t.zip").write_bytes(CONTENT)
  download(File(server.url, checksum=sha256(CONTENT)), folder)
  assert_whole(folder)
  assert not server.ranges
  (folder / "t.zip.json").unlink()
  download(File(server.url), folder)
  assert server.ranges == [""]
  # A process was killed before it wrote the record, and then something else happened.
  state = {"url": server.url, "record": record(folder)}
  (folder / "t.zip.partial.json").write_text(json.dumps(state))
  (folder / "t.zip.json").unlink()
  (folder / "t.zip").write_bytes(OTHER)
  download(File(server.url), folder)
  assert_whole(folder)
  (folder / "t.zip.json").write_text('{"url": ')
  with pytest.raises(ValueError, match="t.zip.json: expected the record of a download"):
    download(File(server.url), folder)


def test_manual_file_goes_first(server, folder, tmp_path):
  manual = tmp_path / "t.zip"
  manual.write_bytes(CONTENT)
  md5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
  for file in (
    File(server.url),
    File("ftp://host/t.zip"),
    File("", "t.zip", md5, SIZE),
    File(server.url, head_bytes=11),
    File(server.url, size=SIZE, head_bytes=11),
  ):
    assert download(file, folder, manual_dir=tmp_path) == manual
  assert not server.ranges and not folder.exists()
  wrong = sha256(OTHER)
  with pytest.raises(ValueError, match=f"t.zip: expected {wrong}, got {sha256(CONTENT)}"):
    download(File(server.url, checksum=wrong), folder, manual_dir=tmp_path)
  for size in (SIZE - 1, SIZE + 1):
    with pytest.raises(ValueError, match=f"t.zip: expected {size} bytes, got {SIZE}"):
      download(File(server.url, size=size), folder, manual_dir=tmp_path)
  with pytest.raises(ValueError, match=f"expected {SIZE + 1} bytes or more, got {SIZE}"):
    download(File(server.url, size=10**6, head_bytes=SIZE + 1), folder, manual_dir=tmp_path)
  manual.unlink()
  assert download(File(server.url), folder, manual_dir=tmp_path) == folder / "t.zip"


@pytest.mark.parametrize(
  "file, message",
  [
    (File("ftp://host/x"), "File.url: expected http.*ftp://host/x.*yourself"),
    (File("file:///etc/passwd"), "File.url"),
    (File("http://"), "File.name"),
    (File("http://host/a/"), "File.name: expected the name.*host/a/"),
    (File("http://host/a%2Fb"), "File.name"),
    (File("http://host/", ".."), "File.name"),
    (File("http://host/x", checksum="sha1:00"), "File.checksum: expected .*sha1"),
    (File("http://host/x", size=-1), "File.size: expected 0 or more, got -1"),
    (File("http://host/x", checksum="md5:" + "0" * 32, head_bytes=1), "File.checksum"),
  ],
)
def test_wrong_requests(file, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    download(file, tmp_path)
  assert not names(tmp_path)


def test_disk_full(server, folder, monkeypatch):
  write = module._write

  def write_until_full(file, content):
    write(file, content[:1009])
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(module, "_write", write_until_full)
  with pytest.raises(OSError) as raised:
    download(File(server.url), folder)
  assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(folder)
  free = r"No space.* needs 6910 bytes more there, and \d+ bytes are free.*yourself"
  assert re.search(free, raised.value.strerror)
  assert names(folder) == ["t.zip.lock", "t.zip.partial", "t.zip.partial.json"]
  monkeypatch.undo()
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  download(File(server.url), folder)
  assert_whole(folder)
  assert server.ranges == ["", "bytes=1009-"]


def test_a_write_may_take_a_part():
  class Pipe:
    taken = b""

    def write(self, content):
      self.taken += bytes(content[:3])
      return len(content[:3])

  pipe = Pipe()
  module._write(pipe, b"0123456")
  assert pipe.taken == b"0123456"


def test_on_disk_before_it_is_called_whole(server, folder, monkeypatch):
  fsync, replace, synced, replaced = os.fsync, os.replace, set(), []

  def note_fsync(number):
    synced.add(os.fstat(number).st_ino)
    fsync(number)

  def note_replace(source, target):
    replaced.append((Path(target).name, os.stat(source).st_ino in synced))
    replace(source, target)

  monkeypatch.setattr(module.os, "fsync", note_fsync)
  monkeypatch.setattr(module.os, "replace", note_replace)
  download(File(server.url), folder)
  assert replaced[-2:] == [("t.zip", True), ("t.zip.json", True)]
  assert all(is_synced for _, is_synced in replaced)


def test_too_little_room_is_seen_before_anything_comes(server, folder, monkeypatch):
  usage = shutil.disk_usage(folder.parents[1])._replace(free=SIZE - 1)
  monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
  with pytest.raises(OSError, match=f"needs {SIZE} bytes more there, and {SIZE - 1} "):
    download(File(server.url), folder)
  assert not (folder / "t.zip.partial").stat().st_size
  assert (folder / "t.zip.partial.json").exists()
  download(File(server.url, "u", head_bytes=13), folder)


def test_no_permission(server, tmp_path, monkeypatch):
  (tmp_path / "file").touch()
  with pytest.raises(NotADirectoryError, match="an unknown number of bytes more.*yourself"):
    download(File(server.url), tmp_path / "file" / "folder")
  folder = tmp_path / "folder"
  download(File(server.url), folder)

  def refuse(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied", "x")

  monkeypatch.setattr(Path, "mkdir", refuse)
  monkeypatch.setattr(module.fcntl, "flock", refuse)
  download(File(server.url), folder)  # whole: nothing is to be written
  with pytest.raises(PermissionError, match="denied; u needs 17 bytes") as raised:
    download(File(server.url, "u", size=17), folder)
  assert raised.value.filename == str(folder)
  assert len(server.ranges) == 1


def test_one_of_two_downloads(server, folder):
  gate, waiting = threading.Event(), threading.Event()
  server.plans = [Plan(gate=gate)]

  class Listener(logging.Handler):
    def emit(self, record):
      if "waiting" in record.getMessage():
        waiting.set()

  listener, found = Listener(), []
  logging.getLogger(module.__name__).addHandler(listener)
  threads = [
    threading.Thread(target=lambda: found.append(download(File(server.url), folder)))
    for _ in range(2)
  ]
  try:
    for thread in threads:
      thread.start()
    assert waiting.wait(20)
    assert not found
  finally:
    gate.set()
    for thread in threads:
      thread.join(20)
    logging.getLogger(module.__name__).removeHandler(listener)
  assert found == [folder / "t.zip"] * 2
  assert server.ranges == [""]
  assert_whole(folder)


# Downloads in processes of which the i-th kills itself after its i-th change on the disk;
# the first that comes to its end is the last.
KILLING = """
import os, pathlib, signal, sys
from dpjax.data import download
url, root, chunk_bytes = sys.argv[1:]
download.CHUNK_BYTES = int(chunk_bytes)
calls = at = 0

def step():
  global calls
  calls += 1
  if calls == at:
    os.kill(os.getpid(), signal.SIGKILL)

def killing(function):
  def call(*args, **kwargs):
    result = function(*args, **kwargs)
    step()
    return result
  return call

while True:
  at += 1
  child = os.fork()
  if not child:
    try:
      names = ("mkdir", "open", "fsync", "replace", "truncate", "unlink")
      for place, name in ((download, "_write"), *((os, x) for x in names)):
        setattr(place, name, killing(getattr(place, name)))
      download.download(download.File(url), pathlib.Path(root, str(at)))
      os._exit(0)
    finally:
      os._exit(1)
  status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  if status != -signal.SIGKILL:
    sys.exit(status)
"""


def test_killed_at_every_step(server, tmp_path):
  command = [sys.executable, "-c", KILLING, server.url, str(tmp_path), "1999"]
  subprocess.run(
    command,
    check=True,
    cwd=HERE,
    timeout=600,
    env={**os.environ, "PYTHONPATH": str(HERE), "NO_PROXY": "127.0.0.1"},
  )
  folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
  seen = set()
  for folder in folders:
    partial, whole = folder / "t.zip.partial", folder / "t.zip"
    had = partial.stat().st_size if partial.exists() else 0
    if whole.exists():
      assert whole.read_bytes() == CONTENT
    state = (had, whole.exists(), (folder / "t.zip.json").exists())
    seen.add(state)
    server.ranges.clear()
    download(File(server.url), folder)
    is_there = whole.exists() and state[1] or had == SIZE
    assert server.ranges == ([] if is_there else [f"bytes={had}-" if had else ""]), state
    assert whole.read_bytes() == CONTENT
    # What is of no use any more may stay if it is the last thing to be removed.
    rest = {"t.zip.partial.json"} if state[2] else set()
    assert set(WHOLE) <= set(names(folder)) <= set(WHOLE) | rest
    assert f"sha256:{record(folder)['sha256']}" == sha256(CONTENT)
  lengths = {had for had, *_ in seen}
  assert {0, 1999, 3998, 5997, SIZE} <= lengths
  assert {(0, True, False), (0, True, True)} <= seen


@pytest.mark.parametrize(
  "size, progress, shown",
  [
    (2_000_003, True, True),
    (2_000_003, False, False),
    (999_983, True, False),
  ],
)
def test_progress(server, folder, monkeypatch, size, progress, shown):
  server.content = bytes(size)
  server.plans = [Plan(break_after=1_000_003)]
  bars = []

  class Bar(module.tqdm):
    def __init__(self, **settings):
      super().__init__(**settings)
      bars.append((self, settings))

    def close(self):
      self.last = str(self) if not self.disable else ""
      super().close()

  monkeypatch.setattr(module, "tqdm", Bar)
  download(File(server.url), folder, progress=progress)
  [(bar, settings)] = bars
  assert settings["disable"] is not shown and settings["desc"] == "t.zip"
  if shown:
    assert bar.n == bar.total == size
    assert re.search(r"100%.* 2.00M/2.00M .*B/s", bar.last)
