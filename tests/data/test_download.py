"""Downloads: complete under their names, checked, or refused in one line."""

import hashlib

import numpy as np
import pytest

from dpjax.data.sources import File, Files
from dpjax.errors import UserError

CONTENT = np.random.default_rng(1).bytes(7919)
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
HUB = "hf://datasets/some/one/a/t.zip"


@pytest.fixture
def served(site):
  site.files["/a%20b/t.zip"] = CONTENT
  site.publish("some/one", "a", {"t.zip": CONTENT})
  return site


@pytest.fixture
def files(tmp_path):
  return Files(tmp_path / "data")


def get(site, files, **settings):
  return files.get(File(**({"url": f"{site.url}/a%20b/t.zip?x=y"} | settings)))


def names(files):
  return sorted(path.name for path in files.folder.iterdir())


@pytest.mark.parametrize("settings", [{}, {"checksum": SHA256}, {"checksum": MD5}, {"url": HUB}])
def test_a_file_is_downloaded_once(served, files, settings):
  for _ in range(2):
    path = get(served, files, **settings)
    assert path == files.folder / "t.zip" and path.read_bytes() == CONTENT
    assert names(files) == ["t.zip"]
  assert served.names().count("t.zip") == 1


def test_a_changed_file_is_downloaded_again(served, files):
  get(served, files, checksum=SHA256).write_bytes(CONTENT[:-1])
  assert get(served, files, checksum=SHA256).read_bytes() == CONTENT


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"checksum": "sha256:" + "0" * 64}, f"expected sha256:00* but got {SHA256[7:]}"),
    ({"url": HUB, "checksum": "md5:" + "0" * 32}, "expected md5:00* but got"),
    ({"url": "hf://datasets/some/one/a/none"}, "one/a/none: expected the file, got An error"),
    ({"url": "ftp://host/a"}, "ftp://host/a: expected the file, got No connection adapters"),
    ({"url": "http://127.0.0.1:1/t.zip"}, "expected the file, got .*refused"),
  ],
)
def test_refusals(served, files, settings, message):
  with pytest.raises(UserError, match=f"{message}.*; download it yourself and put it as") as error:
    get(served, files, **settings)
  assert "\n" not in str(error.value) and names(files) == []


@pytest.mark.parametrize("url", [{}, {"url": HUB}])
def test_a_transfer_that_breaks_leaves_no_file(served, files, url):
  served.break_after = 1000
  with pytest.raises(UserError, match="expected the file, got "):
    get(served, files, **url)
  assert names(files) == []
  served.break_after = None
  assert get(served, files, **url).read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(served, files):
  served.refusals = [503, 500]
  assert get(served, files).read_bytes() == CONTENT
  served.refusals = [503] * 3
  with pytest.raises(UserError, match="expected the file, got 503"):
    get(served, files, name="other")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_head_of_a_file(served, files, has_ranges):
  served.has_ranges = has_ranges
  assert get(served, files, head_bytes=1000).read_bytes() == CONTENT[:1000]
  assert served.sent == (1000 if has_ranges else len(CONTENT))
  assert get(served, files, name="all", head_bytes=10**6).read_bytes() == CONTENT


def test_a_manual_file_goes_first(served, files):
  given = files.manual_dir / "t.zip"
  given.parent.mkdir(parents=True)
  given.write_bytes(CONTENT)
  for settings in ({}, {"checksum": SHA256}, {"head_bytes": 100}):
    assert get(served, files, **settings) == given
  given.write_bytes(b"other")
  with pytest.raises(UserError, match=f"{given}: expected sha256.* or remove it"):
    get(served, files, checksum=SHA256)
  assert served.asked == []


def test_a_full_disk_is_the_folders_error(served, files, monkeypatch):
  files.folder.parent.mkdir()
  files.folder.write_bytes(b"")  # no folder
  with pytest.raises(OSError, match=str(files.folder)):
    get(served, files)
