"""Folders in data_dir: built once, complete, and again where they are not."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from dpjax import files
from dpjax.errors import UserError
from dpjax.files import RECORD, build_once, read_record


def build(calls):
  def fill(folder):
    calls.append(folder)
    (folder / "a.txt").write_text("some text")
    return {"words": 2}

  return fill


def test_once_and_again_where_a_file_is_not_complete(tmp_path):
  target, calls = tmp_path / "new" / "text", []
  target.parent.mkdir()
  for damage in (Path.exists, lambda file: file.write_text("some"), Path.unlink):
    record = build_once(target, {"version": 3}, build(calls))
    assert record["words"] == 2 and record["files"]["a.txt"] == 9
    assert (target / "a.txt").read_text() == "some text"
    assert build_once(target, {"version": 3}, build(calls)) == record
    damage(target / "a.txt")
  assert len(calls) == 2 and not read_record(target, {})
  (target / RECORD).write_text('{"version": 3, "files": null}')
  assert build_once(target, {"version": 3}, build(calls)) == record and len(calls) == 3
  build_once(target, {"version": 4}, build(calls))
  assert not read_record(target, {"version": 3}) and len(calls) == 4
  assert sorted(path.name for path in target.parent.iterdir()) == ["text", "text.lock"]


def test_a_folder_of_something_else_stays(tmp_path):
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "mine.txt").write_text("mine")
  with pytest.raises(UserError, match="text: expected a folder that dpjax can replace"):
    build_once(tmp_path / "text", {}, build([]))
  assert [path.name for path in (tmp_path / "text").iterdir()] == ["mine.txt"]


def test_a_stop_while_a_folder_is_replaced_loses_nothing(tmp_path, monkeypatch):
  target = tmp_path / "text"
  old = tmp_path / "text.replaced"
  build_once(target, {"version": 3}, build([]))
  rename = os.replace

  def replace(source, destination):
    if Path(source).suffix == ".partial":
      raise KeyboardInterrupt
    rename(source, destination)

  monkeypatch.setattr(os, "replace", replace)
  with pytest.raises(KeyboardInterrupt):
    build_once(target, {"version": 4}, build([]))
  assert read_record(target, {"version": 3}) and not old.exists()
  # A kill at the same time leaves both, and one after it the old folder beside the new one.
  calls = []
  target.rename(old)
  build_once(target, {"version": 3}, build(calls))
  assert not calls and not old.exists()
  monkeypatch.undo()
  shutil.copytree(target, old)
  build_once(target, {"version": 4}, build(calls))
  assert len(calls) == 1 and read_record(target, {"version": 4})
  assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "text.lock"]


def test_a_folder_that_is_a_link_stays_one(tmp_path):
  target = tmp_path / "text"
  (tmp_path / "elsewhere").mkdir()
  target.symlink_to("elsewhere")
  for version in (3, 4):
    build_once(target, {"version": version}, build([]))
    assert target.is_symlink() and read_record(tmp_path / "elsewhere", {"version": version})


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
  def fail(*_, **__):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(files, "lock_descriptor", fail)
  assert build_once(tmp_path / "text", {}, build([]))["words"] == 2
  assert "this file system has no locks (No locks available)" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_unfinished_folder_goes_and_a_killed_one_is_built_anew(tmp_path, error):
  target, calls = tmp_path / "text", []
  partial = tmp_path / "text.partial"

  def fail(folder):
    build(calls)(folder)
    raise error(28, "No space left on device")

  with pytest.raises((error, UserError), match="No space left"):
    build_once(target, {"version": 3}, fail)
  assert not target.exists() and not partial.exists()
  partial.mkdir()
  (partial / "b.txt").touch()
  build_once(target, {"version": 3}, build(calls))
  assert not partial.exists() and not (target / "b.txt").exists()
