"""A script ends with one line for what its user can correct, and a traceback otherwise."""

import errno
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

import dpjax
from dpjax.errors import Interrupted, UserError, exit_on_user_error
from tests import helpers


def test_a_user_error_exits_with_its_message():
  assert dpjax.UserError is UserError and issubclass(UserError, ValueError)
  with pytest.raises(SystemExit, match=r"^model\.width: expected 8, got 7$"):
    with exit_on_user_error():
      raise UserError("model.width: expected 8, got 7")


def test_a_shape_error_of_jax_keeps_its_type():
  with pytest.raises((TypeError, ValueError)) as caught:
    with exit_on_user_error():
      jnp.ones((2, 3)).reshape(5)
  assert not isinstance(caught.value, UserError)


def test_a_file_that_cannot_be_written_exits_with_its_name(tmp_path):
  with pytest.raises(SystemExit, match=r"nowhere/x.json: expected to read or write it"):
    with exit_on_user_error():
      (tmp_path / "nowhere" / "x.json").write_text("")


def test_an_os_error_without_a_file_is_raised():
  with pytest.raises(OSError, match=os.strerror(errno.EIO)):
    with exit_on_user_error():
      raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 1)])
def test_an_interrupted_run_exits_as_its_signal_would(number, status, capsys):
  with pytest.raises(SystemExit) as end:
    with exit_on_user_error():
      raise Interrupted(3, 7, number)
  assert end.value.code == status
  assert capsys.readouterr().out == (
    "Stopped at step 3 of 7, which is saved. The same command goes on from there.\n"
  )


def test_the_environment_asks_for_the_traceback(monkeypatch):
  monkeypatch.setenv("DPJAX_TRACEBACK", "1")
  with pytest.raises(UserError, match="width"):
    with exit_on_user_error():
      raise UserError("width")


@pytest.mark.slow
@pytest.mark.parametrize("error, has_traceback", [("UserError", False), ("ValueError", True)])
def test_a_script_shows_a_traceback_only_of_what_is_not_the_users(error, has_traceback):
  code = (
    "import dpjax; from dpjax.commands import flags as command_line\n"
    "UserError = dpjax.UserError\n"
    f"def main(_): raise {error}('width: expected 8')\n"
    "command_line.start(main)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=helpers.ROOT, timeout=100
  )
  assert done.returncode == 1
  assert ("Traceback" in done.stderr) == has_traceback
  assert "width: expected 8" in done.stderr
