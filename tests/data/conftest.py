"""One web site for all tests of data, which may refuse, or break off in the middle."""

import hashlib
import http.server
import json
import os
import re
import threading

import pytest


class Site(http.server.ThreadingHTTPServer):
  """A site of `files`, path to bytes; knows what it was `asked` for, and has `sent`."""

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_port}"
    self.clear()

  def clear(self):
    self.files, self.asked, self.sent = {}, [], 0
    self.refusals, self.break_after, self.has_ranges = [], None, True

  def publish(self, repository, folder, files):
    """Puts the files of a dataset, and the list of them, where huggingface.co has them."""
    entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}]
    for name, content in files.items():
      self.files[f"/datasets/{repository}/resolve/main/{folder}/{name}"] = content
      size = {"size": len(content), "path": f"{folder}/{name}"}
      entries.append({"type": "file", "oid": "1" * 40, **size})
    self.files[f"/api/datasets/{repository}/tree/main"] = json.dumps(entries).encode()

  def names(self):
    """The last parts of what was asked for."""
    return [path.rsplit("/", 1)[1] for path in self.asked]


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Site

  def log_message(self, *_):
    pass

  def do_HEAD(self):
    content = self.server.files.get(self.path.partition("?")[0])
    self.answer(404 if content is None else 200, content or b"", is_head=True)

  def do_GET(self):
    site, path = self.server, self.path.partition("?")[0]
    site.asked.append(path)
    content = site.files.get(path)
    status = site.refusals.pop(0) if site.refusals else 200 if content is not None else 404
    content = content or b""
    wanted = re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", ""))
    if status == 200 and wanted and site.has_ranges:
      status, content = 206, content[: int(wanted[1]) + 1]
    self.answer(status, content if status < 300 else b"")

  def answer(self, status, content, is_head=False):
    self.close_connection = True
    self.send_response(status)
    etag = f'"{hashlib.sha256(content).hexdigest()}"'
    headers = {"ETag": etag, "X-Repo-Commit": "a" * 40, "Content-Length": len(content)}
    for key, value in (headers | {"Connection": "close"}).items():
      self.send_header(key, str(value))
    self.end_headers()
    if not is_head:
      content = content[: self.server.break_after]
      self.server.sent += len(content)
      self.wfile.write(content)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
  monkeypatch.setattr(os, "fsync", lambda file: None)


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

  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
  monkeypatch.setattr(constants, "ENDPOINT", running_site.url)
  template = running_site.url + "/{repo_id}/resolve/{revision}/{filename}"
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  running_site.clear()
  return running_site
