"""One process at a time trains in a run's folder."""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dpjax
from dpjax import files
from dpjax.config import sections
from dpjax.errors import UserError
from dpjax.runs import prepare, run_files
from dpjax.training import reporting
from tests import helpers

HOLD = """
import pathlib, sys, time
from dpjax.runs import run_files
with run_files.lock(pathlib.Path(sys.argv[1])):
  print("locked", flush=True)
  time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
  """A process that trains, as far as the folder's lock can tell."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)],
    cwd=helpers.ROOT,
    text=True,
    stdout=subprocess.PIPE,
    env=helpers.environment(),
  )
  assert process.stdout is not None and process.stdout.readline() == "locked\n"
  with process:
    yield process
    process.kill()


@helpers.needs_locks
def test_a_second_process_is_told_who_trains_until_that_ends_however_it_does(owner, tmp_path):
  message = f"got {tmp_path}, locked by process {owner.pid} on {socket.gethostname()}"
  for _ in range(2):  # The refusal has not written its own name over the owner's.
    with pytest.raises(UserError, match=f"^workdir: expected a folder that is free, {message}$"):
      with run_files.lock(tmp_path):
        pass
  owner.kill()
  owner.wait()
  for _ in range(2):  # and with the block
    with run_files.lock(tmp_path):
      pass
    own = f"\nprocess {os.getpid()} on {socket.gethostname()}\n"
    assert (tmp_path / "lock").read_text() == own


BARE = """
import importlib, pathlib, pkgutil, sys
for name in ("fcntl", "grp", "pwd", "resource"):
  sys.modules[name] = None
import dpjax
for found in pkgutil.walk_packages(dpjax.__path__, "dpjax."):
  importlib.import_module(found.name)
from dpjax.runs import run_files
with run_files.lock(pathlib.Path(sys.argv[1])):
  print("locked")
"""


def test_without_what_unix_alone_has_all_modules_load_and_a_run_takes_its_folder(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", BARE, str(tmp_path)],
    cwd=helpers.ROOT,
    capture_output=True,
    text=True,
    env=helpers.environment(),
  )
  assert done.stdout == "locked\n", done.stderr
  if sys.platform != "win32":  # which has locks of its own
    assert f"{tmp_path / 'lock'}: this file system has no locks (fcntl" in done.stderr
  assert "process " in (tmp_path / "lock").read_text()


def test_a_run_that_saved_nothing_gives_way_to_other_settings(tmp_path):
  config = dpjax.config.default()
  run_files.write_config(tmp_path, config)
  config.train.batch_size = 10
  # As a kill in the first save leaves them.
  (tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir(parents=True)
  (tmp_path / "checkpoints" / "best" / "30.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  assert not run_files.resumes(tmp_path, config)
  (tmp_path / "checkpoints" / "30").mkdir()
  with pytest.raises(UserError, match="train.batch_size: 20 there, 10 here"):
    run_files.resumes(tmp_path, config)


@pytest.mark.usefixtures("standard_promotion")
def test_what_fails_before_training_leaves_no_folder(text, finished, tmp_path):
  config = helpers.small_config(text)
  shutil.copytree(finished[0], tmp_path / "other", symlinks=True)
  for path in (tmp_path / "other/checkpoints").iterdir():
    shutil.rmtree(path)
  (tmp_path / "mine").mkdir()
  before = {*tmp_path.rglob("*")}
  wrong = {
    "data.path": str(tmp_path / "missing"),
    "model.vocab_size": 3,
    "train.init_from": str(tmp_path / "other"),  # is read last
  }
  for key, value in wrong.items():
    changed = dpjax.config.from_dict(config.to_dict())
    sections.set_value(changed, key, value)
    with pytest.raises(UserError, match=f"^{key}: "):
      dpjax.train(changed, tmp_path / "mine/rates/run", model=helpers.bigrams)
    assert {*tmp_path.rglob("*")} == before
  # A folder that was there stays, and so does what the run does not write.
  (tmp_path / "mine/run").mkdir()
  (tmp_path / "mine/run/notes.txt").write_text("mine")
  before = {*tmp_path.rglob("*")}
  with pytest.raises(UserError, match="^train.init_from: "):
    dpjax.train(changed, tmp_path / "mine/run", model=helpers.bigrams)
  assert {*tmp_path.rglob("*")} == before


@pytest.mark.usefixtures("standard_promotion")
def test_a_refused_start_writes_nothing_into_a_run(text, finished, tmp_path):
  folder = Path(shutil.copytree(finished[0], tmp_path / "run", symlinks=True))
  (folder / "lock").write_text("\nprocess 7 on another host\n")

  def contents():
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

  before = contents()
  wrong = {"train.batch_size": 9, "data.path": str(tmp_path / "missing"), "model.vocab_size": 3}
  for key, value in wrong.items():
    config = dpjax.config.from_dict(helpers.small_config(text).to_dict())
    sections.set_value(config, key, value)
    with pytest.raises(UserError, match=f"{key}: "):
      dpjax.train(config, folder)
    assert contents() == before


def test_a_disk_without_room_for_the_lock_keeps_no_folder(text, tmp_path, monkeypatch):
  def open_on_a_full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(files, "open_plain", open_on_a_full_disk)
  before = {*tmp_path.rglob("*")}
  with pytest.raises(UserError, match="^workdir: expected a folder that can be written"):
    dpjax.train(helpers.small_config(text), tmp_path / "new/run")
  assert {*tmp_path.rglob("*")} == before


APART = helpers.cases(r"""
  # A setting, a run's folder, and whether it can be that one.
  data.path={root}/texts                    | texts     | False
  data.path={root}/texts/*                  | texts     | False
  data.path={root}/texts/*                  | texts/run | True
  data.path={root}/texts/*.json*            | texts     | False
  data.path={root}/texts/*/*                | texts/run | False
  data.path={root}/texts/**                 | texts/run | False
  data.path={root}/texts/**/*.jsonl         | texts/a/b | False
  data.path={root}/texts/**/*.txt           | texts/a/b | True
  data.path={root}/*/**/*.jsonl             | texts/run | False
  data.path={root}/*/**/*.jsonl             | run       | False
  data.path={root}/**/texts/*.jsonl         | run       | True
  data.path={root}/**/texts/*.jsonl         | a/texts   | False
  data.path={root}/**/a/**/*.jsonl          | texts/a/b | False
  data.path={root}/**/a/**/*.jsonl          | texts/b   | True
  data.path={root}/**/*.jsonl               | .runs/a   | True
  data.path={root}/**/.runs/*/*.jsonl       | .runs/a   | False
  data.path={root}/texts                    | texts/run | True
  data.path={root}/texts/*.txt              | texts     | True
  data.path={root}/texts/0.txt              | texts     | True
  data.path={root}/run/metrics.jsonl        | run       | False
  data.path={root}/run/data                 | run       | False
  data.path={root}/run/data/0.txt           | run       | False
  data.path={root}/link                     | texts     | False
  data.mixture={root}/texts=1,wikitext103=2 | texts     | False
  data.mixture={root}/texts=1,wikitext103=2 | run       | True
""")


@pytest.mark.parametrize("setting, workdir, is_apart", APART)
def test_a_run_does_not_write_among_its_texts(setting, workdir, is_apart, text, tmp_path):
  (tmp_path / "texts/run").mkdir(parents=True)
  (tmp_path / "link").symlink_to("texts")
  config = helpers.small_config(text)
  config.data.path = ""
  config.train.sampling = "random_windows"
  key, _, value = setting.format(root=tmp_path).partition("=")
  sections.set_value(config, key, value)
  refused = contextlib.nullcontext()
  if is_apart == "False":
    refused = pytest.raises(
      UserError, match=f"^workdir: expected .* {tmp_path}/{workdir}: .* the texts of {key}, "
    )
  with refused:
    prepare.check_apart(config.data, tmp_path / workdir)


@pytest.mark.usefixtures("standard_promotion")
def test_texts_and_tokens_of_the_users_stay_whole(text, finished, tmp_path):
  config = helpers.small_config(text)
  shutil.copytree(finished[1].data.folder, tmp_path / "made/data")
  (tmp_path / "texts").mkdir()
  for name in ("a.txt", "b.txt"):
    helpers.write_text(tmp_path / "texts" / name)
  before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
  for path, workdir in (("made/data", "made"), ("texts/*", "texts"), ("texts", "texts")):
    config.data.path = str(tmp_path / path)
    with pytest.raises(UserError, match="^workdir: expected a folder of its own, "):
      dpjax.train(config, tmp_path / workdir, model=helpers.bigrams)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["metrics.tmp", "checkpoints", "data/tokenizer.json"])
def test_no_link_is_followed_out_of_the_folder(tmp_path, name):
  victim, link = tmp_path / "victim", tmp_path / "run" / name
  link.parent.mkdir(parents=True)
  link.symlink_to(victim)
  with pytest.raises(UserError, match=f"^workdir: .*, got {link}, a link to {victim} "):
    dpjax.train(dpjax.config.default(), tmp_path / "run")
  assert not victim.exists()


def test_links_inside_of_the_folder_and_beside_the_run_are_nobodys_matter(tmp_path):
  (tmp_path / "run" / "elsewhere").mkdir(parents=True)
  (tmp_path / "run" / "checkpoints").symlink_to("elsewhere")
  (tmp_path / "run" / "python").symlink_to("/usr/bin/env")
  (tmp_path / "link").symlink_to("run")
  with run_files.lock(tmp_path / "link"):
    assert (tmp_path / "run" / "lock").exists()


def test_a_file_is_written_anew_and_not_through_a_link(tmp_path):
  (tmp_path / "victim").write_text("of great worth")
  (tmp_path / "scores.json.7.tmp").symlink_to(tmp_path / "victim")
  files.write_json(tmp_path / "scores.json", {"perplexity": 7.5})
  assert (tmp_path / "victim").read_text() == "of great worth"
  assert files.load_json(tmp_path / "scores.json") == {"perplexity": 7.5}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes in folders")
def test_what_the_user_names_is_written_to_and_not_replaced(tmp_path):
  file = tmp_path / "file"
  link = tmp_path / "link"
  pipe = tmp_path / "pipe"
  file.write_text("before")
  link.symlink_to("file")
  os.mkfifo(pipe)
  files.write_output(link, b"new")
  assert link.is_symlink() and file.read_bytes() == b"new"
  files.write_output(Path(os.devnull), b"new")
  with pytest.raises(OSError, match="pipe"):  # that no process reads
    files.write_output(pipe, b"new")
  content = bytes(10**6)  # more than a pipe holds
  with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
    begun = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # A reader from the start.
    writer = threading.Thread(target=files.write_output, args=(pipe, content))
    writer.start()
    assert reader.communicate()[0] == content
    writer.join()
    os.close(begun)
  assert pipe.is_fifo()
  with pytest.raises(OSError, match="folder"):
    (tmp_path / "folder").mkdir()
    files.write_output(tmp_path / "folder", b"new")


HALF = """
import pathlib, sys, time
from dpjax import files
from dpjax.config import sections
with files.replacing_file(pathlib.Path(sys.argv[1])) as file:
  file.write(b"half")
  file.flush()
  print("half", flush=True)
  time.sleep(600)
"""
WRITTEN = {
  "scores.json": lambda path: files.write_json(path, {}),
  "metrics.jsonl": lambda path: reporting.Reporter(path.parent, 0, 7).__exit__(),
}


@helpers.needs_locks
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_killed_process_half_wrote_is_removed_but_not_a_living_ones(tmp_path, name):
  words = [sys.executable, "-c", HALF, str(tmp_path / name)]
  with subprocess.Popen(
    words, env=helpers.environment(), stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    (tmp_path / f"{name}.mine.tmp").write_text("mine")
    WRITTEN[name](tmp_path / name)
    assert sorted(x.read_text() for x in tmp_path.glob("*.tmp")) == ["half", "mine"]
    process.kill()
  WRITTEN[name](tmp_path / name)
  assert [x.read_text() for x in tmp_path.glob("*.tmp")] == ["mine"]
