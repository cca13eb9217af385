"""Downloads from a site that does all that networks and servers do wrong."""

import errno
import gzip
import hashlib
import json
import logging
import threading

import numpy as np
import pytest

from dpjax.data import download as module
from dpjax.data.download import File, Files
from dpjax.errors import UserError
from tests.data.conftest import Plan

SIZE = 7919
CONTENT = np.random.default_rng(1).bytes(SIZE)
OTHER = np.random.default_rng(2).bytes(SIZE)
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
PATH = "/a%20b/t.zip"
WHOLE = ["t.zip", "t.zip.json", "t.zip.lock"]


@pytest.fixture
def served(site):
  site.files[PATH] = CONTENT
  return site


@pytest.fixture
def files(tmp_path):
  return Files(tmp_path / "data")


def url(site):
  return f"{site.url}{PATH}?x=y"


def names(files):
  return sorted(path.name for path in files.folder.iterdir())


def record(files):
  return json.loads((files.folder / "t.zip.json").read_text())


def assert_whole(files, content=CONTENT):
  assert (files.folder / "t.zip").read_bytes() == content
  assert names(files) == WHOLE
  assert record(files)["size"] == len(content)
  assert record(files)["sha256"] == hashlib.sha256(content).hexdigest()


def ranges(site):
  return [headers.get("Range", "") for headers in site.headers]


def test_downloads_once_and_writes_it_down(served, files):
  file = File(url(served), size=SIZE)
  assert files.get(file) == files.folder / "t.zip"
  assert_whole(files)
  files.get(file)
  files.get(File(url(served)))
  assert len(served.asked) == 1 and record(files)["url"] == url(served)
  # Not whole any more: it is downloaded again.
  (files.folder / "t.zip").write_bytes(CONTENT[:-1])
  files.get(file)
  assert_whole(files)


@pytest.mark.parametrize("digest", ["sha256", "md5"])
def test_what_has_another_checksum_is_refused(served, files, digest):
  good = f"{digest}:{hashlib.new(digest, CONTENT).hexdigest()}"
  served.files[PATH] = OTHER
  with pytest.raises(UserError, match=f"t.zip: expected {good}, got {digest}:.* put it as t.zip"):
    files.get(File(url(served), checksum=good))
  assert names(files) == ["t.zip.lock"]
  served.files[PATH] = CONTENT
  files.get(File(url(served), checksum=good))
  assert_whole(files)
  # What was whole for another checksum is not for this one.
  with pytest.raises(UserError, match="expected sha256:00"):
    files.get(File(url(served), checksum=f"sha256:{'0' * 64}"))


def test_wrong_size_is_seen_before_it_comes(served, files):
  with pytest.raises(UserError, match=f"expected a file of 7 bytes, got {SIZE}"):
    files.get(File(url(served), size=7))
  # What a server does not say is known at the end.
  served.usual = Plan(length="chunked")
  with pytest.raises(UserError, match=f"expected 7 bytes, got {SIZE}"):
    files.get(File(url(served), size=7))


def test_broken_again_and_again(served, files):
  served.plans = [Plan(break_after=1000) for _ in range(7)]
  files.get(File(url(served)))
  assert_whole(files)
  assert ranges(served) == ["", *(f"bytes={i}000-" for i in range(1, 8))]


def test_gives_up_where_nothing_comes_and_goes_on_in_the_next_call(served, files):
  served.plans = [Plan(break_after=1000), *[Plan(break_after=0)] * module.TRIES]
  with pytest.raises(UserError, match="broke 5 times in a row .* call again to go on"):
    files.get(File(url(served)))
  assert not (files.folder / "t.zip").exists()
  files.get(File(url(served)))
  assert_whole(files)
  assert ranges(served)[-1] == "bytes=1000-"


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refused_at_once(served, files, status):
  served.plans = [Plan(status=status)]
  with pytest.raises(UserError, match=f"expected the file, got {status} .* put it as t.zip"):
    files.get(File(url(served)))
  assert len(served.asked) == 1


def test_refused_in_the_middle_keeps_what_came(served, files):
  served.plans = [Plan(break_after=1000), *[Plan(status=503)] * 5]
  with pytest.raises(UserError, match="got 503 .* call again to go on"):
    files.get(File(url(served)))
  files.get(File(url(served)))
  assert_whole(files)
  assert ranges(served)[-1] == "bytes=1000-"


def test_what_version_0_1_has_left(served, files):
  """Its partial download was a file; a file from another address is known by its checksum."""
  files.folder.mkdir(parents=True)
  (files.folder / "t.zip.partial").write_bytes(b"half")
  files.get(File(url(served)))
  assert_whole(files)
  (files.folder / "t.zip.json").write_text('{"url": "https://elsewhere/t.zip", "size": 5}')
  asked = len(served.asked)
  digits = hashlib.sha256(CONTENT).hexdigest()
  files.get(File(f"{served.url}/other", name="t.zip", checksum=f"sha256:{digits}"))
  assert_whole(files)
  assert len(served.asked) == asked


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_refused_for_now(served, files, status):
  served.plans = [Plan(status=status)] * 4
  files.get(File(url(served)))
  assert_whole(files)
  served.plans = [Plan(status=status)] * 5
  with pytest.raises(UserError, match=f"expected the file, got {status}"):
    files.get(File(url(served), name="other"))


def test_a_server_may_ask_for_a_long_pause_but_not_for_hours(served, files, monkeypatch):
  pauses = []
  monkeypatch.setattr("urllib3.util.retry.time.sleep", pauses.append)
  served.plans = [Plan(status=503, headers={"Retry-After": x}) for x in ("7", "86400")]
  files.get(File(url(served)))
  assert pauses == [7, module.LONGEST_PAUSE_S]


def test_nobody_listens(files, monkeypatch):
  monkeypatch.setattr(module, "PAUSE_S", 0.0)
  with pytest.raises(UserError, match="expected the file, got .*refused"):
    files.get(File("http://127.0.0.1:1/t.zip"))


@pytest.mark.parametrize("ignore_if_range", [False, True])
@pytest.mark.parametrize("by", ["etag", "modified"])
def test_changed_between_two_tries(served, files, by, ignore_if_range):
  if by == "modified":
    served.etag = 'W/"weak"'

  class Changing(Plan):
    @property
    def break_after(self):  # the moment in which the answer is on its way
      served.files[PATH] = OTHER
      if by == "modified":
        served.modified = "Sat, 03 Jan 1970 00:00:00 GMT"
      return 1000

    @break_after.setter
    def break_after(self, value):
      pass

  served.plans = [Changing()]
  served.usual = Plan(ignore_if_range=ignore_if_range)
  files.get(File(url(served)))
  assert_whole(files, OTHER)
  assert ranges(served)[1] == "bytes=1000-" and served.headers[1]["If-Range"]


@pytest.mark.parametrize("checksum", ["", SHA256])
def test_without_a_version_only_a_checksum_makes_going_on_safe(served, files, checksum):
  served.etag = served.modified = ""
  served.plans = [Plan(break_after=1000)]
  files.get(File(url(served), checksum=checksum))
  assert_whole(files)
  assert ranges(served) == ["", "bytes=1000-" if checksum else ""]


def test_what_a_kill_left_is_gone_on_with(served, files, monkeypatch):
  class Killed(BaseException):
    pass

  def get(stop_at, **settings):
    update = module.tqdm.update

    def stopping(bar, n=1):
      stopping.seen += n
      if stopping.seen >= stop_at:
        raise Killed
      return update(bar, n)

    stopping.seen = 0
    with monkeypatch.context() as patch:
      patch.setattr(module.tqdm, "update", stopping)
      patch.setattr(module, "CHUNK_BYTES", 512)
      files.get(File(url(served), **settings))

  with pytest.raises(Killed):
    get(3000)
  assert names(files) == ["t.zip.lock", "t.zip.partial"]
  have = (files.folder / "t.zip.partial" / "t.zip").stat().st_size
  assert 2500 < have < SIZE
  get(10**9)
  assert_whole(files)
  assert ranges(served) == ["", f"bytes={have}-"]
  # Of another file, it is of no use.
  served.files["/other"] = OTHER
  (files.folder / "t.zip").unlink()
  with pytest.raises(Killed):
    get(3000)
  files.get(File(f"{served.url}/other", name="t.zip"))
  assert_whole(files, OTHER) and ranges(served)[-1] == ""


@pytest.mark.parametrize("length", ["chunked", None])
def test_without_content_length(served, files, length):
  served.usual = Plan(length=length)
  if length is None:
    with pytest.raises(UserError, match="expected a file of a size that the server tells"):
      files.get(File(url(served)))
    files.get(File(url(served), checksum=SHA256))
  else:
    served.plans = [Plan(length=length, break_after=1000)]
    files.get(File(url(served)))
  assert_whole(files)


def test_what_is_called_packed_is_kept_as_it_comes(served, files):
  served.files[PATH] = gzip.compress(CONTENT)
  served.usual = Plan(headers={"Content-Encoding": "gzip"})
  files.get(File(url(served)))
  assert_whole(files, served.files[PATH])


@pytest.mark.parametrize("size", [0, 10])
@pytest.mark.parametrize("ignore_range", [False, True])
def test_head(served, files, ignore_range, size):
  served.usual = Plan(ignore_range=ignore_range)
  file = File(url(served), head_bytes=1000, size=SIZE * bool(size))
  files.get(file)
  assert_whole(files, CONTENT[:1000])
  files.get(file)
  assert len(served.asked) == 1 and ranges(served) == ["bytes=0-999"]
  # All of it is another file; and a head may be longer than that.
  files.get(File(url(served), head_bytes=10**6))
  assert_whole(files)


def test_another_content_than_at_the_first_download(served, files):
  files.get(File(url(served)))
  (files.folder / "t.zip").unlink()
  served.files[PATH] = OTHER
  with pytest.raises(UserError, match="as at the first download, .* delete .*t.zip.json"):
    files.get(File(url(served)))
  (files.folder / "t.zip.json").unlink()
  files.get(File(url(served)))
  assert_whole(files, OTHER)


def test_manual_file_goes_first(served, files):
  files.manual_dir.mkdir(parents=True)
  given = files.manual_dir / "t.zip"
  given.write_bytes(CONTENT)
  for settings in ({}, {"checksum": SHA256, "size": SIZE}, {"size": SIZE, "head_bytes": 100}):
    assert files.get(File(url(served), **settings)) == given
  with pytest.raises(UserError, match=f"{given}: expected 7 bytes, got {SIZE}; get it again"):
    files.get(File(url(served), size=7))
  given.write_bytes(OTHER)
  with pytest.raises(UserError, match=f"{given}: expected sha256.* or remove it"):
    files.get(File(url(served), checksum=SHA256))
  assert served.asked == []


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(name="a/b"), "File.name"),
    (dict(name=".."), "File.name"),
    (dict(url="http://host/"), "File.name"),
    (dict(checksum="sha256:12"), "File.checksum"),
    (dict(url="ftp://host/a"), "File.url"),
  ],
)
def test_wrong_requests(files, settings, message):
  with pytest.raises(UserError, match=message):
    files.get(File(**({"url": "http://host/a"} | settings)))


def test_disk_full(served, files, monkeypatch):
  def full(path, content):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))

  with monkeypatch.context() as patch:
    patch.setattr(module, "write_json", full)
    with pytest.raises(UserError, match="data.data_dir: .*downloads .No space left on device"):
      files.get(File(url(served)))
  assert not (files.folder / "t.zip").exists()
  files.get(File(url(served)))
  assert_whole(files)


def test_one_of_two_downloads(served, files):
  gate = threading.Event()
  served.plans = [Plan(gate=gate)]

  class Listener(logging.Handler):
    def emit(self, record):
      gate.set()  # the second one waits

  listener = Listener()
  log = logging.getLogger("dpjax.data.making")
  log.addHandler(listener)
  try:
    threads = [threading.Thread(target=files.get, args=(File(url(served)),)) for _ in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  finally:
    log.removeHandler(listener)
  assert_whole(files)
  assert len(served.asked) == 1


def test_hugging_face(site, files):
  site.publish("some/one", "a", {"t.zip": CONTENT})
  file = File("hf://datasets/some/one/a/t.zip", checksum=SHA256)
  assert files.get(file) == files.folder / "t.zip"
  assert_whole(files)
  site.asked.clear()
  files.get(file)
  assert site.asked == []
  with pytest.raises(UserError, match="hf://datasets/some/one/a/none: expected the file"):
    files.get(File("hf://datasets/some/one/a/none"))
  with pytest.raises(UserError, match="other: expected sha256:00"):
    files.get(File(file.url, "other", checksum=f"sha256:{'0' * 64}"))


def test_a_hugging_face_transfer_that_breaks(site, files):
  site.publish("some/one", "a", {"t.zip": CONTENT})
  site.plans = [Plan(break_after=3000)]
  files.get(File("hf://datasets/some/one/a/t.zip", checksum=SHA256))
  assert_whole(files)
