"""Scores in files: a line for each report, and the same for TensorBoard."""

import json
import math
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2

from dpjax.errors import exit_on_user_error
from dpjax.training import reporting
from tests import helpers


def lines(workdir) -> list[dict]:
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def steps(workdir) -> list[int]:
  return [line["step"] for line in lines(workdir)]


def losses(workdir) -> list[float]:
  return np.fromfile(workdir / reporting.LOSSES, "<f4").tolist()


def events(workdir) -> list:
  """The events of all files, oldest first: length, checksum, content, checksum each."""
  parsed = []
  for path in sorted((workdir / "tensorboard").iterdir()):
    content = path.read_bytes()
    while content:
      (size,) = struct.unpack("<Q", content[:8])
      parsed.append(event_pb2.Event.FromString(content[12 : 12 + size]))
      content = content[16 + size :]
  return parsed


def scalars(workdir) -> list[tuple[int, str, float]]:
  return [
    (event.step, value.tag, value.simple_value)
    for event in events(workdir)
    for value in event.summary.value
  ]


def write(workdir, steps, begin=0):
  with reporting.Reporter(workdir, begin, 11) as reporter:
    for step in steps:
      reporter.report(step, "train", {"loss": float(step)})


def test_every_report_is_a_line_and_a_scalar(tmp_path, capsys):
  with reporting.Reporter(tmp_path, 0, 7) as reporter:
    reporter.advance(3.5)
    reporter.report(2, "train", {"loss": 3.5, "mean_over_steps": 2})
    # It is on disk at once: a run may be killed.
    assert len(lines(tmp_path)) == 1
    reporter.report(2, "valid", {"nats_per_token": 2.5})
    reporter.print("step 3: better")
    reported = reporter.new_reports()
  assert "step 3: better\n" in capsys.readouterr().out
  written = lines(tmp_path)
  times = [line.pop("time") for line in written]
  assert times == sorted(times) and abs(times[0] - time.time()) < 60
  assert written == [
    {"step": 2, "split": "train", "loss": 3.5, "mean_over_steps": 2},
    {"step": 2, "split": "valid", "nats_per_token": 2.5},
  ]
  # Over how many steps a mean is, is no curve.
  curves = [(2, "train/loss", 3.5), (2, "valid/nats_per_token", 2.5)]
  assert scalars(tmp_path) == curves
  assert reported == [(step, {name: value}) for step, name, value in curves]


def test_without_a_terminal_reports_of_training_are_plain_lines(tmp_path, capsys, monkeypatch):
  with reporting.Reporter(tmp_path, 0, 1234) as reporter:
    reporter.advance(3.5)
    reporter.report(20, "train", {"loss": 3.5, "tokens_per_second": 56789.4})
    reporter.report(20, "valid", {"nats_per_token": 2.5})
    reporter.report(1040, "train", {"loss": 2.25, "tokens_per_second": math.nan})
  assert capsys.readouterr().err.splitlines() == [
    "step 20 of 1,234: loss 3.5000, 56,789 tokens/s",
    "step 1,040 of 1,234: loss 2.2500",
  ]
  # A terminal has its bar alone.
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
  write(tmp_path, [1])
  printed = capsys.readouterr().err
  assert "training:" in printed and "\r" in printed and "step 1 of" not in printed


def test_lines_after_the_step_of_a_resume_are_dropped(tmp_path):
  write(tmp_path, [2, 3, 4, 7])
  write(tmp_path, [5, 11], begin=3)
  assert steps(tmp_path) == [2, 3, 5, 11]
  assert not list(tmp_path.glob("*.tmp"))
  # TensorBoard's readers drop what came before from this step on.
  starts = [event for event in events(tmp_path) if event.HasField("session_log")]
  assert [event.step for event in starts] == [1, 4]
  assert all(event.session_log.status == event_pb2.SessionLog.START for event in starts)


def test_lines_that_cannot_be_read_are_set_aside(tmp_path):
  write(tmp_path, [2, 3])
  path = tmp_path / "metrics.jsonl"
  damage = b"not JSON", b'{"split": "train"}', b"[2]", b'{"step": "2"}', b'{"a": "\xff"}', bytes(5)
  last = b'{"step": 4, "split": "train", "loss": 4.0}'  # It is completed.
  path.write_bytes(b"\n".join([*damage, path.read_bytes() + last]))
  write(tmp_path, [5], begin=4)
  assert steps(tmp_path) == [2, 3, 4, 5]
  set_aside = (tmp_path / "metrics.jsonl.damaged").read_bytes()
  assert set_aside == b"".join(line + b"\n" for line in damage)
  with path.open("a") as file:
    file.write('{"step": 6, "split": "train", "lo')
  write(tmp_path, [7], begin=6)
  assert steps(tmp_path) == [2, 3, 4, 5, 7]


def test_losses_are_on_disk_at_once_and_follow_a_resume(tmp_path):
  (tmp_path / reporting.LOSSES).write_bytes(np.float32([5, 4, 3, 2]).tobytes() + b"cut")
  with reporting.Reporter(tmp_path, 3, 7) as reporter:
    assert losses(tmp_path) == [5.0, 4.0, 3.0]
    reporter.advance(9.0)
    assert losses(tmp_path) == [5.0, 4.0, 3.0, 9.0]
  with reporting.Reporter(tmp_path, 6, 7) as reporter:  # Losses that are missing are NaN.
    reporter.advance(8.0)
  np.testing.assert_equal(losses(tmp_path), [5, 4, 3, 9, math.nan, math.nan, 8])


def test_other_processes_write_nothing(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(reporting.jax, "process_index", lambda: 1)
  with reporting.Reporter(tmp_path, 0, 7) as reporter:
    reporter.advance(1.0)
    reporter.report(1, "train", {"loss": 1.0})
    reporter.print("step 1: better")
  assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", reporting.LOSSES, "tensorboard"])
def test_what_is_in_the_place_of_a_file_is_told_in_one_line(tmp_path, name):
  path = tmp_path / name
  path.write_text("mine") if name == "tensorboard" else path.mkdir()
  with pytest.raises(SystemExit, match=f"^{path}.*: expected "), exit_on_user_error():
    reporting.Reporter(tmp_path, 2, 7)


def test_a_full_disk_is_told_by_the_report_that_hits_it(tmp_path, capfd):
  resource = pytest.importorskip("resource")
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  report = (2, "valid", {"nats_per_token": 2.5})
  for name in ("whole", "full"):
    (tmp_path / name).mkdir()
  with reporting.Reporter(tmp_path / "whole", 0, 7) as reporter:
    reporter.report(*report)
  (whole,) = (tmp_path / "whole/tensorboard").iterdir()
  reporter = reporting.Reporter(tmp_path / "full", 0, 7)
  with pytest.raises(OSError, match="File too large"), reporter:
    try:
      resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size - 1, limits[1]))
      reporter.report(*report)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert len(lines(tmp_path / "full")) == 1
  assert capfd.readouterr() == ("", "")


def test_reports_start_no_thread_and_import_no_pytorch(tmp_path):
  (tmp_path / "torch.py").write_text("raise OSError('a library is missing')")
  code = f"""
import sys, threading
sys.path.insert(0, {str(tmp_path)!r})
import jax
from dpjax.training import reporting

jax.devices()
before = {{x.name for x in threading.enumerate()}}
with reporting.Reporter({str(tmp_path)!r}, 0, 7) as reporter:
  reporter.report(1, "train", {{"loss": 1.5}})
  started = {{x.name for x in threading.enumerate()}} - before - {{"tqdm_monitor"}}
  print(started, sys.modules.get("torch"))
"""
  options = dict(env=helpers.environment(), capture_output=True, text=True, check=False)
  done = subprocess.run([sys.executable, "-c", code], **options)
  assert (done.stdout, done.stderr) == ("set() None\n", "step 1 of 7: loss 1.5000\n")
  assert scalars(tmp_path) == [(1, "train/loss", 1.5)]
