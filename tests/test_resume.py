"""Runs that are stopped or killed, and runs of several processes, end like a whole one."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import chex
import jax
import optax
import pytest

import dpjax
from dpjax.config import schema, sections
from dpjax.config.setting import Setting
from dpjax.errors import Interrupted
from dpjax.runs import prepare, processes
from tests import helpers


def averaged(text):
  optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.lion(0.01))
  settings = dict(ema_decay=0.6, param_sharding="fsdp", grad_accum_steps=2, batch_size=16)
  return helpers.small_config(text, **settings), dict(model=helpers.bigrams, optimizer=optimizer)


def mixed(text):
  config = helpers.small_config(text, sampling="random_windows")
  other = helpers.write_text(text.parent / "other.txt")
  config.data.path, config.data.mixture = "", f"{text}=3,{other}=1"
  return config, dict(model=helpers.bigrams)


def bfloat16(text):
  config = helpers.small_config(text, matmul_dtype="bfloat16")
  config.model.dtype = "bfloat16"
  return config, {}


def scheduled_rate(text):
  config = helpers.pooled_config(text, "gumbel")
  config.model.mixer = "short_convolution"
  config.model.boundaries.target_schedule = (0.9, 5)
  config.train.stage_multipliers = (2.0, 0.5)
  return config, {}


@pytest.mark.parametrize(
  "case",
  [helpers.slow_unless(x is averaged, x) for x in (averaged, mixed, bfloat16, scheduled_rate)],
)
@pytest.mark.usefixtures("standard_promotion")
def test_a_run_stopped_at_any_update_ends_like_one_that_was_not(text, tmp_path, case):
  config, options = case(text)
  whole, scores = dpjax.train(config, tmp_path / "whole", **options)
  reports = []
  options["callbacks"] = [lambda step, metrics, state: reports.append((step, [*metrics]))]
  done = 0
  # Before the first checkpoint, at one, at an evaluation, and right after, between two reports.
  for step in (1, 4, 6, 7):
    answers, done = iter([*[False] * (step - done - 1), True]), step
    with pytest.raises(Interrupted, match=f"step {step} of 12"):
      dpjax.train(config, tmp_path / "parts", **options, should_stop=answers.__next__)
  parts, scores_of_parts = dpjax.train(config, tmp_path / "parts", **options)
  chex.assert_trees_all_equal(parts.params, whole.params)
  assert scores_of_parts == scores
  losses = (tmp_path / "parts/losses.f32").read_bytes()
  assert losses == (tmp_path / "whole/losses.f32").read_bytes() and len(losses) == 4 * 12
  # No report is missed, and none comes twice.
  assert [step for step, names in reports if "train/loss" in names] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("step, is_moved", [(4, False), (6, True)])
@pytest.mark.usefixtures("standard_promotion")
def test_a_run_whose_folder_is_gone_ends_and_the_same_command_starts_again(
  text, tmp_path, step, is_moved
):
  config, workdir = helpers.small_config(text), tmp_path / "run"
  seen = []

  def remove(done, *_):
    seen.append(done)
    if done == step and seen.count(done) == 1:
      while workdir.exists():  # A checkpoint may just be written.
        workdir.rename(tmp_path / "moved") if is_moved else shutil.rmtree(workdir, True)

  message = f"^workdir: expected the folder where training started, got {workdir}, which is gone"
  with pytest.raises(dpjax.UserError, match=message):
    dpjax.train(config, workdir, model=helpers.bigrams, callbacks=[remove])
  assert seen[-1] <= step + 2
  assert dpjax.train(config, workdir, model=helpers.bigrams)[0].step


def start(
  config, workdir, *arguments, script=helpers.ROOT / "train.py", folder=None, **changes
) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, str(script), *helpers.overrides(config), f"--workdir={workdir}", *arguments],
    cwd=folder,
    env=helpers.environment(**changes),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process: subprocess.Popen, seconds: float = 600) -> str:
  """Waits for the end of a script, or ends it; gives what it printed."""
  try:
    return process.communicate(timeout=seconds)[0]
  finally:
    process.kill()


def last_step(workdir) -> int:
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
  return steps[-1] if steps else 0


def unfinished_saves(workdir) -> set[tuple]:
  result = set()
  for path in workdir.glob("checkpoints/*orbax-checkpoint-tmp*"):
    with contextlib.suppress(FileNotFoundError):  # It was just finished.
      result.add((path, path.stat().st_ino))
  return result


def wait_until(is_time, processes, seconds: float = 300) -> None:
  """Looks often, until it is time, a process has ended, or too long has passed."""
  end = time.monotonic() + seconds
  while all(process.poll() is None for process in processes) and not is_time():
    if time.monotonic() > end:
      for process in processes:
        process.kill()
      raise TimeoutError(f"nothing happened in {seconds} seconds")
    time.sleep(0.001)


def kill_when(process, is_time) -> None:
  """SIGKILL at the moment that `is_time` says, or none if the run ends before."""
  wait_until(is_time, [process])
  process.kill()
  process.communicate()


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_as_one_that_never_was(text, tmp_path):
  draw = random.Random(7)
  # Wide enough that writing a checkpoint takes a while.
  config = helpers.small_config(
    text, num_steps=60, eval_every_steps=20, checkpoint_every_steps=7, log_every_steps=1
  )
  config.model.update(dict(width=96, feed_forward_width=384))
  config.train.sampling = "random_windows"
  whole = tmp_path / "whole"
  killed = tmp_path / "killed"
  undisturbed = start(config, whole)
  begin, delay = time.monotonic(), draw.uniform(0.5, 5)
  kill_when(start(config, killed), lambda: time.monotonic() > begin + delay)
  printed = finish(undisturbed)
  assert "The test split" in printed, printed

  number = draw.randrange(5, 55)
  kill_when(start(config, killed), lambda: last_step(killed) >= number)
  for _ in range(5):  # The save may end between the look and the kill.
    left = unfinished_saves(killed)
    process = start(config, killed)
    kill_when(process, lambda left=left: unfinished_saves(killed) - left)
    was_saving = unfinished_saves(killed) - left
    if was_saving:
      break
  assert was_saving, "expected the kill to fall inside a save"
  printed = finish(start(config, killed))
  assert "The test split" in printed, printed
  losses = (killed / "losses.f32").read_bytes()
  assert losses == (whole / "losses.f32").read_bytes() and len(losses) == 4 * 60
  for step in (60, None):  # the last, and the best
    one, other = dpjax.load(whole, step), dpjax.load(killed, step)
    assert one.step == other.step
    chex.assert_trees_all_equal(one.params, other.params)


def endless(text):
  steps = ("num_steps", "eval_every_steps", "checkpoint_every_steps")
  return helpers.small_config(text, **dict.fromkeys(steps, 100_000))


def start_two(
  config, workdir, words=((), ()), folders=(None, None), **changes
) -> list[subprocess.Popen]:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  position = f"--coordinator=127.0.0.1:{port}", "--num_processes=2"
  return [
    start(
      config,
      workdir,
      *(*position, f"--process_id={number}", *words[number]),
      folder=folders[number],
      NPROC="4",
      **changes,
    )
    for number in range(2)
  ]


def finish_all(processes: list[subprocess.Popen], seconds: float = 600) -> list[str]:
  try:
    return [finish(process, seconds) for process in processes]
  finally:
    for process in processes:
      process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fsdp", "whitespace"])
def test_two_processes_train_as_one(text, tmp_path, variant):
  config = helpers.small_config(text, num_steps=10, eval_every_steps=5)
  if variant == "whitespace":
    # One process finds the capacity in the tokens, two find it on the device.
    config = helpers.pooled_config(text, variant, num_steps=10, eval_every_steps=5)
  else:
    config.train.param_sharding = variant
    config.sample.update(dict(prompt="the cat", length=9))
  processes = start_two(config, tmp_path / "two")
  printed = finish_all(processes)
  assert [process.returncode for process in processes] == [0, 0], printed
  assert "2 processes, 2 devices" in printed[0] and "The test split" in printed[0]
  if variant == "fsdp":
    assert "A sample:\nthe cat" in printed[0] and "A sample" not in printed[1]
  printed = finish(start(config, tmp_path / "one"))
  assert printed.count("The test split") == 1
  params = [dpjax.load(tmp_path / name, 10).params for name in ("two", "one")]
  # Adam divides small gradients by their size, and so makes more of their rounding.
  chex.assert_trees_all_close(*params, atol=1e-4)
  one, two = (dpjax.load(tmp_path / name) for name in ("one", "two"))
  text = "the cat sat on a mat"
  assert one.score(text) == pytest.approx(two.score(text), rel=1e-4)


@pytest.mark.slow
def test_two_processes_stop_together_and_refuse_together(text, tmp_path):
  config = endless(text)
  processes = start_two(config, tmp_path / "run")
  wait_until(lambda: last_step(tmp_path / "run") >= 3, processes)
  processes[1].send_signal(signal.SIGTERM)
  printed = finish_all(processes)
  assert [process.returncode for process in processes] == [143, 143], printed
  assert "which is saved" in printed[0]
  assert dpjax.load(tmp_path / "run").step >= 3
  config.data.path = str(tmp_path / "missing.txt")
  processes = start_two(config, tmp_path / "refused")
  printed = finish_all(processes)
  assert [process.returncode for process in processes] == [1, 1], printed
  assert "data.path: " in printed[0] and "see that process's log" in printed[1]
  assert not any("Traceback" in text for text in printed), printed


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_process_ends_the_other_with_one_line_and_both_resume(text, tmp_path, number):
  config = helpers.small_config(
    text, num_steps=300, eval_every_steps=300, checkpoint_every_steps=20, log_every_steps=1
  )
  whole = tmp_path / "whole"
  killed = tmp_path / "killed"
  processes = start_two(config, killed)
  wait_until(lambda: last_step(killed) >= 30, processes)
  processes[number].kill()
  printed = finish(processes[1 - number], seconds=60)
  assert processes[1 - number].returncode == 1, printed
  expected = (
    "processes: expected all to go on, but another one has ended or cannot be reached, got: "
  )
  last = printed.splitlines()[-1]
  assert last.startswith(expected) and last.endswith("again; training resumes."), printed
  assert "Traceback" not in printed
  for workdir in (killed, whole):
    processes = start_two(config, workdir)
    printed = finish_all(processes)
    assert [process.returncode for process in processes] == [0, 0], printed
    assert ("Resuming from the checkpoint" in printed[0]) == (workdir == killed)
  losses = (killed / "losses.f32").read_bytes()
  assert losses == (whole / "losses.f32").read_bytes() and len(losses) == 4 * 300
  chex.assert_trees_all_equal(*(dpjax.load(path, 300).params for path in (whole, killed)))


# What differs in the second process, and what both say.
DIFFERENT = {
  "learning rate": ("--config.train.learning_rate=0.5", "train.learning_rate = 0.003 .* and 0.5 "),
  "dropout": ("--config.model.dropout=0.4", "model.dropout = 0.1 .* and 0.4 "),
  "free setting": (
    "--config.train.checkpoint_every_steps=3",
    "train.checkpoint_every_steps = 4 .* and 3 ",
  ),
  "text": ("--config.data.path=other.txt", "data.path = '.*text.txt' .* and 'other.txt' "),
  "folder": ("--workdir=other", "--workdir = .*/run .* and .*/other "),
  "task": ("--tokenize_only", "--tokenize_only = False .* and True "),
}


def another(declared: schema.Declaration, value):
  """A value of the setting that differs from `value`."""
  if isinstance(declared, schema.ComponentSetting):
    return declared.registry.section(next(x for x in declared.registry.names() if x != value.name))
  assert isinstance(declared, Setting)
  if declared.choices:
    return next(x for x in declared.choices if x != value)
  values = {bool: True, int: 7, float: 0.25, str: "another", tuple: (0.5, 0.25, 0.25)}
  return values[declared.value_type]


@pytest.mark.parametrize("section", [schema.Train, schema.Data])
def test_every_setting_is_compared_between_processes(section, tmp_path, monkeypatch):
  texts = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def gather(text):
    texts.append(text)
    return [texts[0], text]  # The first call is that of process 0.

  monkeypatch.setattr(processes, "_gather_texts", gather)
  prepare.check_settings(dpjax.config.default(), tmp_path)
  for name, declared in schema.declared(section).items():
    config = dpjax.config.default()
    key = f"{section.__name__.lower()}.{name}"
    sections.set_value(config, key, another(declared, sections.get(config, key)))
    message = rf"^processes: expected the same in all, got {key}\b"
    with pytest.raises(dpjax.UserError, match=message):
      prepare.check_settings(config, tmp_path)


def test_paths_are_compared_by_where_they_lead(tmp_path, monkeypatch):
  compared = []
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes, "check_same", compared.append)
  monkeypatch.setattr(processes, "have_same", lambda value: True)
  (tmp_path / "first").mkdir()
  config = dpjax.config.default()
  config.train.init_from = "./first"
  config.data.tokenizer.file = "hf://owner/name"  # not a file here
  prepare.check_settings_and_files(config, pathlib.Path("run"))
  place = os.path.realpath(tmp_path)
  assert compared[0]["workdir"] == os.path.join(place, "run")
  assert compared[1:] == [{"train.init_from": os.path.join(place, "first")}]


def test_what_one_process_does_not_have_is_not_compared(monkeypatch):
  gathered = []
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  monkeypatch.setattr(processes, "_gather_texts", lambda text: map(json.dumps, gathered))
  gathered[:] = [{"a": "x"}, {"a": None}, {"a": "x"}]
  processes.check_same({})
  gathered[2] = {"a": "y"}
  with pytest.raises(dpjax.UserError, match="got a = x in process 0 and y in process 2$"):
    processes.check_same({})
  gathered[1] = {}
  with pytest.raises(dpjax.UserError, match="got a = x in process 0 and none in process 1$"):
    processes.check_same({})


@pytest.mark.slow
def test_two_processes_plan_a_run_and_do_not_write_into_it(text, tmp_path):
  config = helpers.small_config(text)
  words = [("--dry_run",), ("--dry_run",)]
  processes = start_two(config, tmp_path / "run", words)
  printed = finish_all(processes)
  assert [process.returncode for process in processes] == [0, 0], printed
  assert all("one update takes" in text for text in printed), printed
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("word, message", DIFFERENT.values(), ids=DIFFERENT)
def test_processes_with_different_settings_refuse_to_train(text, tmp_path, word, message):
  config = helpers.small_config(text)
  processes = start_two(config, tmp_path / "run", words=[(), (word,)])
  printed = finish_all(processes, seconds=60)
  assert [process.returncode for process in processes] == [1, 1], printed
  for output in printed:
    (line,) = [x for x in output.splitlines() if not x.startswith(("[Gloo]", "2 processes"))]
    assert re.search(f"^processes: expected the same in all, got {message}in process 1", line), line
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_in_two_folders_compare_their_texts(text, tmp_path):
  folders = [tmp_path / "a", tmp_path / "b"]
  for i, folder in enumerate(folders):
    folder.mkdir()
    shutil.copy(text, folder / "t.txt")
    os.utime(folder / "t.txt", (0, i))
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  config.data.path = "t.txt"
  words = [(), (f"--workdir={folders[1]}/.././run",)]  # one new folder by two names
  printed = finish_all(start_two(config, "../run", words, folders))
  assert "The test split" in printed[0], printed
  content = (folders[1] / "t.txt").read_bytes()
  (folders[1] / "t.txt").write_bytes(content[::-1])
  processes = start_two(config, tmp_path / "other", folders=folders)
  printed = finish_all(processes, seconds=60)
  assert [process.returncode for process in processes] == [1, 1], printed
  size = f"{len(content):,} bytes with SHA-256"
  message = rf"^processes: expected .*, got the text of data.path = {size} .* and {size} .* 1$"
  for output in printed:
    (line,) = [x for x in output.splitlines() if not x.startswith(("[Gloo]", "2 processes"))]
    assert re.search(message, line), line
  assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_an_error_of_one_process_stops_both_and_moves_nothing(text, tmp_path):
  config = helpers.small_config(text, num_steps=6, eval_every_steps=6, checkpoint_every_steps=2)
  config.sample.prompt = ""
  printed = finish_all(start_two(config, tmp_path / "run"))
  assert "The test split" in printed[0], printed
  config.train.num_steps = 8
  script = tmp_path / "script.py"
  script.write_text(f"""
import errno, os, runpy, sys
import orbax.checkpoint as ocp

read = ocp.PyTreeCheckpointHandler.restore

def restore(self, directory, *arguments, **settings):
  if "--process_id=1" in sys.argv:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
  return read(self, directory, *arguments, **settings)

ocp.PyTreeCheckpointHandler.restore = restore
runpy.run_path({str(helpers.ROOT / "train.py")!r}, run_name="__main__")
""")
  processes = start_two(config, tmp_path / "run", script=script)
  printed = finish_all(processes)
  assert all(process.returncode for process in processes), printed
  assert "checkpoints/6: expected to read or write it, got: Stale file handle" in printed[1]
  assert "another process could not read" in printed[0]
  assert not [*(tmp_path / "run" / "checkpoints").glob("*.damaged-*")]
  assert dpjax.load(tmp_path / "run", 6).step == 6
