"""What lies in data_dir: made once, whole, and made again where it is not whole."""

import errno
import fcntl
from pathlib import Path

import pytest
from dpjax.data.making import make_once, read_record

from dpjax.errors import UserError


def make(calls):
  def fill(folder):
    calls.append(folder)
    (folder / "a.txt").write_text("some text")
    return {"words": 2}

  return fill


def test_once_and_again_where_a_file_is_not_whole(tmp_path):
  target, calls = tmp_path / "new" / "text", []
  target.parent.mkdir()
  for damage in (Path.exists, lambda file: file.write_text("some"), Path.unlink):
    record = make_once(target, {"version": 3}, make(calls))
    assert record["words"] == 2 and record["files"]["a.txt"] == 9
    assert (target / "a.txt").read_text() == "some text"
    assert make_once(target, {"version": 3}, make(calls)) == record
    damage(target / "a.txt")
  assert len(calls) == 2 and read_record(target) is None
  make_once(target, {"version": 4}, make(calls))
  assert read_record(target, {"version": 3}) is None and len(calls) == 3


def test_what_somebody_else_has_put_there_stays(tmp_path):
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "mine.txt").write_text("mine")
  with pytest.raises(UserError, match="expected room .*text, which holds something else"):
    make_once(tmp_path / "text", {}, make([]))
  assert [path.name for path in (tmp_path / "text").iterdir()] == ["mine.txt"]


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
  def fail(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", fail)
  assert make_once(tmp_path / "text", {}, make([]))["words"] == 2
  assert "this file system has no locks (No locks available)" in caplog.text
