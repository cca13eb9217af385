"""A web site on 127.0.0.1: a stand-in for the Hugging Face Hub, and files of any other site."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

TOKEN = "hf_of_the_tests"
NARROW = "hf_narrow"  # without any right


class Hub(http.server.ThreadingHTTPServer):
  """Repositories of models and datasets, and plain files.

  Attributes:
    repositories: by kind and id, "models/me/mine", a dict of "private", "card" (its metadata) and
      "branches", each a list of commits, which are files by path.
    plain: the other files, by path; the site sends a part of them unless it lacks `has_ranges`.
    refusals: the status of the next answers.
    break_after: the bytes after which an answer breaks off.
    asked: methods and paths, in order.
    sent: the bytes of all answers.
  """

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_port}"
    self.clear()

  def clear(self):
    self.repositories, self.plain, self.asked, self.sent = {}, {}, [], 0
    self.refusals, self.break_after, self.has_ranges = [], None, True

  def publish(self, name, files, *, private=False, card=None):
    """Commits files to the main branch of a repository, made if missing."""
    new = {"private": private, "card": card or {}, "branches": {"main": []}}
    commits = self.repositories.setdefault(name, new)["branches"]["main"]
    commits.append({**(commits[-1] if commits else {}), **files})

  def files(self, name, revision="main"):
    """The files of a revision, and its commit; None, None without one."""
    for branch, commits in self.repositories[name]["branches"].items():
      for i, files in enumerate(commits):
        commit = hashlib.sha1(f"{name} {branch} {i}".encode()).hexdigest()
        if revision == commit or revision == branch and i == len(commits) - 1:
          return files, commit
    return None, None

  def names(self):
    """The last parts of the paths of downloads."""
    return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET ")]


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Hub

  def log_message(self, *_):
    pass

  def respond(self):
    method, path = self.command, urllib.parse.unquote(self.path.partition("?")[0])
    self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    self.server.asked.append(f"{method} {path}")
    if self.server.refusals:
      return self.refuse(self.server.refusals.pop(0))
    if path in self.server.plain:
      return self.plain_file(self.server.plain[path])
    token = self.headers.get("Authorization", "").removeprefix("Bearer ")
    if token == NARROW:
      return self.refuse(403)
    if token not in ("", TOKEN):
      return self.refuse(401, X_Error_Message="Invalid credentials in Authorization header")
    if not token and method not in ("GET", "HEAD"):
      return self.refuse(401)
    for pattern, act in ROUTES:
      if match := re.fullmatch(pattern, path):
        return act(self, *match.groups())
    # Addresses of models have no kind, but those of the API.
    kind = "" if path.startswith(("/api/", "/datasets/")) else "models/"
    place = kind + path.removeprefix("/api").removeprefix("/")
    match = re.match(r"(\w+/[^/]+/[\w-]+)(.*)", place)
    name, rest = match.groups() if match else ("", "")
    repository = self.server.repositories.get(name)
    if repository is None or repository["private"] and not token:
      return self.refuse(404 if token else 401, X_Error_Code="RepoNotFound")
    for pattern, act in OF_REPOSITORY:
      if match := re.fullmatch(pattern, rest):
        return act(self, name, *match.groups())
    raise AssertionError(f"{method} {path}")

  do_GET = do_HEAD = do_POST = do_PUT = respond

  def refuse(self, status, **headers):
    self.answer(b'{"error": "no"}', status, **headers)

  def answer(self, content, status=200, **headers):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    self.close_connection = True
    self.send_response(status)
    for key, value in {"Content-Length": len(content), "Connection": "close", **headers}.items():
      self.send_header(key.replace("_", "-"), str(value))
    self.end_headers()
    if self.command != "HEAD":
      content = content[: self.server.break_after]
      self.server.sent += len(content)
      self.wfile.write(content)

  def plain_file(self, content):
    part = re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", ""))
    if part and self.server.has_ranges:
      self.answer(content[: int(part[1]) + 1], 206)
    else:
      self.answer(content)

  def create(self):
    request = json.loads(self.body)
    name = f"{request['organization']}/{request['name']}"
    is_private = request.get("visibility") == "private" or bool(request.get("private"))
    is_new = f"models/{name}" not in self.server.repositories
    if is_new:
      self.server.publish(f"models/{name}", {}, private=is_private)
    self.answer({"url": f"{self.server.url}/{name}"}, 200 if is_new else 409)

  def check_card(self):
    errors = [{"message": "no such licence"}] * (b"license: my own" in self.body)
    self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

  def about(self, name, revision="main"):
    files, commit = self.server.files(name, revision)
    if files is None:
      return self.refuse(404, X_Error_Code="RevisionNotFound")
    repository = self.server.repositories[name]
    siblings = [{"rfilename": path} for path in files]
    about = {"id": name.partition("/")[2], "sha": commit, "private": repository["private"]}
    self.answer({**about, "siblings": siblings, "cardData": repository["card"]})

  def tree(self, name, revision):
    files, _ = self.server.files(name, revision)
    entries = [{"type": "file", "oid": oid(x), "size": len(x), "path": y} for y, x in files.items()]
    self.answer(entries)

  def file(self, name, revision, path):
    files, commit = self.server.files(name, revision)
    if files is None or path not in files:
      return self.refuse(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
    self.answer(files[path], ETag=f'"{oid(files[path])}"', X_Repo_Commit=commit)

  def how_to_upload(self, name, revision):
    how = {"uploadMode": "regular", "shouldIgnore": False}  # not by LFS
    files = [{"path": x["path"], **how} for x in json.loads(self.body)["files"]]
    self.answer({"files": files})

  def branch(self, name, branch):
    branches = self.server.repositories[name]["branches"]
    is_new = branch not in branches
    if is_new:
      branches[branch] = [*branches["main"]]
    self.answer({}, 200 if is_new else 409)

  def commit(self, name, branch):
    commits = self.server.repositories[name]["branches"][branch]
    files = dict(commits[-1])
    for line in map(json.loads, self.body.splitlines()):
      value = line["value"]
      if line["key"] == "file":
        files[value["path"]] = base64.b64decode(value["content"])
      elif line["key"] == "deletedFile":
        del files[value["path"]]
    commits.append(files)
    commit, place = self.server.files(name, branch)[1], name.removeprefix("models/")
    url = f"{self.server.url}/{place}/commit/{commit}"
    self.answer({"commitUrl": url, "commitOid": commit})


def oid(content):
  return hashlib.sha1(content).hexdigest()


ROUTES = [
  ("/api/repos/create", Handler.create),
  ("/api/validate-yaml", Handler.check_card),
]
OF_REPOSITORY = [
  ("", Handler.about),
  (r"/revision/(.*)", Handler.about),
  (r"/tree/([^/]+)", Handler.tree),
  (r"/resolve/([^/]+)/(.*)", Handler.file),
  (r"/preupload/(.*)", Handler.how_to_upload),
  (r"/branch/(.*)", Handler.branch),
  (r"/commit/(.*)", Handler.commit),
]


@contextlib.contextmanager
def running():
  """A server of its own."""
  with Hub() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def use(patch, url: str, cache: Path, token: str = ""):
  """Directs `huggingface_hub`, which reads its variables at its import, to a server."""
  from huggingface_hub import constants

  patch.setenv("NO_PROXY", "127.0.0.1")
  patch.setenv("HF_TOKEN", token)
  patch.setattr(constants, "ENDPOINT", url)
  template = url + "/{repo_id}/resolve/{revision}/{filename}"
  patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  patch.setattr(constants, "HF_HUB_CACHE", str(cache))
  patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
  patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
