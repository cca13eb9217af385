"""One web site for all tests of data, that does what networks and servers do wrong."""

import dataclasses
import hashlib
import http.server
import json
import re
import threading

import pytest


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


class Site(http.server.ThreadingHTTPServer):
  """A site of `files`, path to bytes; knows what it was `asked` for, and has `sent`."""

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_port}"
    self.lock = threading.Lock()
    self.clear()

  def clear(self):
    self.files, self.asked, self.headers, self.sent = {}, [], [], 0
    self.etag, self.modified = None, "Fri, 02 Jan 1970 00:00:00 GMT"
    self.plans, self.usual = [], Plan()

  def publish(self, repository, folder, files):
    """Puts the files of a dataset, and the list of them, where huggingface.co has them."""
    entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{folder}/old"}]
    for name, content in files.items():
      self.files[f"/datasets/{repository}/resolve/main/{folder}/{name}"] = content
      lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
      entry = {"type": "file", "oid": "1" * 40, "size": len(content), "lfs": lfs}
      entries.append(entry | {"path": f"{folder}/{name}"})
    self.files[f"/api/datasets/{repository}/tree/main/{folder}"] = json.dumps(entries).encode()

  def names(self):
    """The last parts of what was asked for."""
    return [path.rsplit("/", 1)[1] for path in self.asked]


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Site

  def log_message(self, *_):
    pass

  def end_headers(self):
    self.send_header("Connection", "close")
    super().end_headers()

  def do_HEAD(self):
    self.close_connection = True
    content = self.server.files.get(self.path.partition("?")[0])
    self.send_response(404 if content is None else 200)
    content = content or b""
    etag = self.server.etag or f'"{hashlib.sha256(content).hexdigest()}"'
    headers = {"ETag": etag, "X-Repo-Commit": "a" * 40, "Content-Length": len(content)}
    for key, value in headers.items():
      self.send_header(key, str(value))
    self.end_headers()

  def do_GET(self):
    self.close_connection = True
    server, path = self.server, self.path.partition("?")[0]
    with server.lock:
      server.asked.append(path)
      server.headers.append(dict(self.headers))
      plan = server.plans.pop(0) if server.plans else server.usual
    try:
      self.answer(plan, server.files.get(path))
    except OSError:
      pass  # the other side has gone

  def answer(self, plan, content):
    if plan.status or content is None:
      self.send_response(plan.status or 404)
      for key, value in {"Content-Length": "0", **plan.headers}.items():
        self.send_header(key, value)
      return self.end_headers()
    size, server = len(content), self.server
    etag = f'"{hashlib.sha256(content).hexdigest()}"' if server.etag is None else server.etag
    condition = self.headers.get("If-Range", "")
    is_changed = condition and condition not in (etag, server.modified)
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if match and not plan.ignore_range and (plan.ignore_if_range or not is_changed):
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
    for key, value in {"ETag": etag, "Last-Modified": server.modified, **plan.headers}.items():
      if value:
        self.send_header(key, value)
    if plan.length == "chunked":
      self.send_header("Transfer-Encoding", "chunked")
    elif plan.length:
      self.send_header(
        "Content-Length", str(len(content)) if plan.length == "true" else plan.length
      )
    self.end_headers()
    if plan.gate:
      self.wfile.flush()
      assert plan.gate.wait(20)
    cut = content[: plan.break_after]
    server.sent += len(cut)
    if plan.length != "chunked":
      return self.wfile.write(cut)
    self.wfile.write(b"%x\r\n%s\r\n" % (len(cut), cut))
    if len(cut) == len(content):
      self.wfile.write(b"0\r\n\r\n")


@pytest.fixture(scope="session")
def running_site():
  with Site() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture
def site(running_site, monkeypatch):
  from huggingface_hub import constants

  from dpjax.data import download

  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.setattr(download, "PAUSE_S", 0.0)
  monkeypatch.setattr(constants, "ENDPOINT", running_site.url)
  template = running_site.url + "/{repo_id}/resolve/{revision}/{filename}"
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  running_site.clear()
  return running_site
