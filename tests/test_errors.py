"""A script ends with one line for what its user can correct, and a traceback otherwise."""

import errno
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import errors
from dpjax.errors import Interrupted, UserError, exit_on_user_error, unknown_setting
from tests import helpers

TOLD = [
  (lambda: dpjax.config.mixer("wee"), r"^mixer: expected one of .* did you mean we\?"),
  (lambda: open("nowhere/x.json", "w"), "^nowhere/x.json: expected to read or write it, got: "),
  (lambda: open("a\nb\x1b[2J/x"), r"^a\\nb\\x1b\[2J/x: expected to read or write it, got: "),
  (lambda: np.zeros(2**60, np.uint8), "^Out of memory: .+ train.batch_size"),
  (lambda: jax.jit(lambda: jnp.zeros(2**50, jnp.uint8))(), "^Out of memory: .*RESOURCE_EXHAUSTED"),
]
SETTINGS = (
  "train.grad_clip_norm train.learning_rate train.log_every_steps sample.length model.num_layers"
)
RAISED = [
  (lambda: jnp.ones((2, 3)).reshape(5), (TypeError, ValueError)),
  (lambda: os.close(10**6), OSError),  # which names no file
  (lambda: exec("raise jax.errors.JaxRuntimeError('INTERNAL: a defect')"), RuntimeError),
]


@pytest.mark.parametrize("fail, message", TOLD)
def test_what_a_user_can_correct_is_one_line(fail, message, monkeypatch):
  with pytest.raises(SystemExit, match=message) as end, exit_on_user_error():
    fail()
  assert "\n" not in end.value.code
  monkeypatch.setenv("DPJAX_TRACEBACK", "1")
  with pytest.raises(Exception) as error, exit_on_user_error():
    fail()
  assert not isinstance(error.value, SystemExit)


@pytest.mark.parametrize(
  "key, nearest",
  [
    ("lr", "is train.learning_rate"),
    ("train.l", "are train.learning_rate, train.log_every_steps, sample.length"),
    ("model.layers", "is model.num_layers"),
  ],
)
def test_an_unknown_setting_may_be_an_abbreviation(key, nearest):
  error = unknown_setting(key, SETTINGS.split())
  assert str(error).endswith(f"; the nearest known {nearest}")


@pytest.mark.parametrize("fail, variant", RAISED)
def test_what_may_be_a_defect_keeps_its_traceback(fail, variant):
  with pytest.raises(variant) as error, exit_on_user_error():
    fail()
  assert not isinstance(error.value, UserError)


@pytest.fixture
def full_disk():
  """No file of this process may become longer than 400 bytes, as on a disk that is full."""
  resource = pytest.importorskip("resource")
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  name = "jax_persistent_cache_min_compile_time_secs"  # JAX would leave half an entry.
  seconds = jax.config.values[name]
  jax.config.update(name, 1e9)
  resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, before)
  jax.config.update(name, seconds)


def test_a_full_disk_is_one_line_and_leaves_no_part(finished, tmp_path, full_disk, capsys):
  run, image = finished[0], tmp_path / "x.svg"
  image.write_text("the one before")
  for words in (
    ("plots", run, f"--out={image}"),
    ("evaluate", f"--workdir={run}", f"--out={tmp_path}"),
  ):
    said = helpers.command(*words)
    assert str(said).startswith(f"{tmp_path}/") and "expected to read or write it, got: " in said
    assert [x.name for x in tmp_path.iterdir()] == ["x.svg"] and "\n" not in said
  assert image.read_text() == "the one before"
  shown = capsys.readouterr().out
  assert "Median cost of" in shown and "bits per character" in shown
  with pytest.raises(SystemExit, match="^disk: expected room to write, got: [^\\n]*$"):
    with exit_on_user_error():
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 1)])
def test_an_interrupted_run_exits_as_its_signal_would(number, status, capsys):
  with pytest.raises(SystemExit) as end, exit_on_user_error():
    raise Interrupted(3, 7, number)
  assert end.value.code == status
  assert capsys.readouterr().out == (
    "Stopped at step 3 of 7, which is saved. The same command resumes the run.\n"
  )


def test_an_interrupt_shows_no_traceback(monkeypatch, capsys):
  monkeypatch.setattr(os, "_exit", sys.exit)
  with pytest.raises(SystemExit) as end, exit_on_user_error():
    raise KeyboardInterrupt
  assert end.value.code == 130 and capsys.readouterr().err == "\nInterrupted\n"


def test_a_state_beyond_the_memory_is_refused_before_it_is_made(text, tmp_path, standard_promotion):
  config = helpers.small_config(text)
  config.model.update(width=300_000, feed_forward_width=300_000)
  message = "^model.num_layers, model.width, .* fit the .* GiB of memory, got "
  with pytest.raises(UserError, match=message):
    dpjax.train(config, tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
  ("error", "is_lost"),
  [
    (jax.errors.JaxRuntimeError("Gloo AllReduce failed: Connection closed by peer"), True),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    (RuntimeError("Gloo is a word of somebody else's, too"), False),
    (None, False),
  ],
)
def test_only_an_error_of_communication_is_a_lost_process(error, is_lost, monkeypatch):
  assert not errors.is_lost_process(error)  # of a process that is alone
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  assert errors.is_lost_process(error) == is_lost
