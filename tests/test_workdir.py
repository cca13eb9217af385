"""One process at a time trains in a run's folder."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from dpjax import config as config_lib
from dpjax.errors import UserError
from dpjax.run import workdir as workdir_lib
from tests import helpers

HOLD = """
import pathlib, sys, time
from dpjax.run import workdir
with workdir.hold(pathlib.Path(sys.argv[1])):
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


def test_a_second_process_is_told_who_trains_until_that_ends_however_it_does(owner, tmp_path):
  message = (
    f"workdir: expected a folder in which no other process trains, got {tmp_path}, in "
    f"which process {owner.pid} on {socket.gethostname()} does"
  )
  with pytest.raises(UserError) as error:
    with workdir_lib.hold(tmp_path):
      pass
  assert str(error.value) == message
  # The refusal has not written its own name over the owner's.
  with pytest.raises(UserError, match=f"process {owner.pid} on"):
    with workdir_lib.hold(tmp_path):
      pass
  owner.kill()
  owner.wait()
  for _ in range(2):  # and with the block
    with workdir_lib.hold(tmp_path):
      own = f"process {os.getpid()} on {socket.gethostname()}\n"
      assert (tmp_path / "lock").read_text() == own


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog):
  def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", refuse)
  with workdir_lib.hold(tmp_path / "run"):
    assert (tmp_path / "run").is_dir()
  assert "has no locks (No locks available)" in caplog.text


def test_a_run_that_saved_nothing_gives_way_to_other_settings(tmp_path):
  config = config_lib.default()
  workdir_lib.claim(tmp_path, config)
  config.train.batch_size = 10
  (tmp_path / "checkpoints" / "last").mkdir(parents=True)
  assert not workdir_lib.check(tmp_path, config)
  (tmp_path / "checkpoints" / "last" / "30").mkdir()
  with pytest.raises(UserError, match="train.batch_size: 20 there, 10 here"):
    workdir_lib.check(tmp_path, config)


def test_any_error_of_the_first_process_reaches_the_others(monkeypatch):
  """Else they would wait for a message that never comes."""
  sent = []

  def broadcast(value):
    sent.append(value)
    return value

  monkeypatch.setattr(workdir_lib.jax, "process_count", lambda: 2)
  monkeypatch.setattr(workdir_lib.multihost_utils, "broadcast_one_to_all", broadcast)

  def fail():
    raise OSError(errno.EIO, "Input/output error")

  with pytest.raises(OSError, match="Input/output error"):
    workdir_lib.on_first_process(fail)
  assert b"Input/output error" in sent[-1].tobytes()
