"""What is done, in which order, what is kept, and what stops it; without any training."""

import dataclasses
import json
import types

import pytest

from dpjax.errors import Interrupted, UserError
from reproduce import experiment, figures, papers, scales, work

TABLE = papers.Table(
  "pooling-table2",
  "A table",
  scores=(papers.BITS,),
  rows=(
    papers.Row("second", "after", "configs/dispatcher_finetuned.py:ptb", after="first"),
    papers.Row("alone", "alone", "configs/msa_ptb.py", paper={papers.BITS: 1.5}),
    papers.Row("first", "first", "configs/dispatcher_openwebtext.py"),
  ),
)
OTHER = dataclasses.replace(
  TABLE,
  name="pooling-fig3",
  rows=(
    papers.Row("again", "the same", "configs/msa_ptb.py"),
    papers.Row("more", "more", "configs/dispatcher_ptb.py"),
  ),
)


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still until it is told to go on."""
  now = types.SimpleNamespace(seconds=100.0)
  monkeypatch.setattr(work.time, "monotonic", lambda: now.seconds)
  return now


@pytest.fixture
def done(monkeypatch, clock):
  """What was asked of `experiment.do`, which takes a minute, or as long as may be."""
  calls, results = [], {}

  def do(row, seed, scale, runs, data, initial_run, should_stop):
    is_known = any(call[:2] == (row.name, seed) for call in calls)
    calls.append((row.name, seed, str(initial_run)))
    result = dict(results.get(row.name, {"status": "done"}))
    seconds = result.pop("seconds", 60)
    while seconds and not should_stop():
      seconds -= 1
      clock.seconds += 1
    if seconds:
      result = {"status": "partial", "reason": "Stopped"}
    signalled = Interrupted(3, 7, 15) if result.pop("signal", False) else None
    *_, text = experiment.configure(row, seed, scale, runs, data)
    reached = {"status": "", "step": 5, "num_steps": 7, "minutes": 1.25, "validation": []}
    reached |= {"resumed": is_known, "text": text}
    record = experiment.left_out(row, seed, scale, "") | reached | result
    if record["status"] == "done":
      record["scores"] = {papers.BITS: 1.25 + seed}
    return record, signalled

  monkeypatch.setattr(work.experiment, "do", do)
  monkeypatch.setattr(figures, "draw", lambda content: None)  # Takes most of the time.
  return types.SimpleNamespace(calls=calls, results=results)


def make(tables, folder, **changes):
  return work.Work(tables, "tiny", runs=str(folder / "runs"), out=str(folder / "out"), **changes)


def run(tables, folder, **changes):
  job = make(tables, folder, **changes)
  job.run()
  return job


def workdir(tmp_path, row, seed):
  return experiment.configure(row, seed, "tiny", str(tmp_path / "runs"))[1]


def names(done):
  return [(name, seed) for name, seed, _ in done.calls]


def kept(folder, table=TABLE):
  content = json.loads((folder / f"out/{table.name}_reduced_tiny.json").read_text())
  return {row["name"]: row["runs"] for row in content["rows"]}


def test_every_run_once_and_those_that_others_begin_with_before_them(done, tmp_path):
  run([TABLE, OTHER], tmp_path, seeds=2)
  first = ["alone", "first", "second", "more"]
  assert names(done) == [(name, seed) for seed in (0, 1) for name in first]
  assert done.calls[-2] == ("second", 1, str(workdir(tmp_path, TABLE.rows[2], 1)))
  assert done.calls[0][2] == ""
  # Tables share a run, and each has it in its report.
  assert len(kept(tmp_path)["alone"]) == len(kept(tmp_path, OTHER)["again"]) == 2
  assert (tmp_path / "out/pooling-fig3_reduced_tiny.md").exists()


@pytest.mark.parametrize("status", ["partial", "diverged", "left_out"])
def test_what_begins_with_another_run_waits_for_all_of_it(done, tmp_path, status):
  done.results["first"] = {"status": status, "reason": "Why"}
  run([TABLE], tmp_path)
  assert names(done) == [("alone", 0), ("first", 0)]
  (record,) = kept(tmp_path)["second"]
  got = status.replace("_", " ")
  assert record["status"] == "left_out"
  assert record["reason"] == f"expected a whole run of first, got it {got}"
  done.results.clear()
  run([TABLE], tmp_path)
  # What diverged would do so again.
  assert names(done)[2:] == [("first", 0), ("second", 0)] * (status != "diverged")


def test_what_is_finished_is_not_done_again_and_nothing_of_it_is_lost(done, tmp_path):
  run([TABLE], tmp_path, seeds=2)
  done.calls.clear()
  run([TABLE, OTHER], tmp_path)
  assert names(done) == [("more", 0)]
  assert [x["seed"] for x in kept(tmp_path)["alone"]] == [0, 1]
  assert [x["seed"] for x in kept(tmp_path, OTHER)["again"]] == [0, 1]
  run([TABLE], tmp_path, seeds=3)
  assert names(done)[1:] == [("alone", 2), ("first", 2), ("second", 2)]


def test_of_two_reports_of_a_run_the_later_one_counts(done, tmp_path):
  done.results["again"] = {"status": "partial", "reason": "Stopped", "step": 2}
  run([OTHER], tmp_path)
  run([TABLE], tmp_path)
  assert names(done) == [("again", 0), ("more", 0)] + [
    (name, 0) for name in ("alone", "first", "second")
  ]
  # The report that has it still as it was is not believed, and is brought up to date.
  run([OTHER], tmp_path)
  assert len(done.calls) == 5
  assert kept(tmp_path, OTHER)["again"][0]["status"] == "partial"
  make([OTHER], tmp_path).write()
  assert kept(tmp_path, OTHER)["again"][0]["status"] == "done"


@pytest.mark.parametrize(
  "status, is_again", [("done", False), ("diverged", False), ("partial", True), ("left_out", True)]
)
def test_what_is_tried_again(done, tmp_path, status, is_again):
  done.results["alone"] = {"status": status, "reason": "Why."}
  job = run([TABLE], tmp_path)
  told = [f"alone, seed 0: {'Why.'}"] * (status in ("diverged", "left_out"))
  assert job.without_result() == told
  done.results.clear()
  job = run([TABLE], tmp_path)
  assert names(done)[3:] == [("alone", 0)] * is_again
  assert job.without_result() == told * (not is_again)
  minutes = kept(tmp_path)["alone"][0]["minutes"]
  assert minutes == (2.5 if status == "partial" else 1.25)


@pytest.mark.parametrize(
  "reached, later, kept_step",
  [
    (dict(status="partial", step=4), dict(status="left_out", step=0), 4),
    (dict(status="partial", step=4), dict(status="partial", step=3), 4),
    (dict(status="partial", step=4), dict(status="partial", step=6), 6),
    (dict(status="partial", step=4), dict(status="diverged", step=5), 5),
    (dict(status="left_out", step=0), dict(status="partial", step=2), 2),
  ],
)
def test_what_was_reached_is_not_lost(done, tmp_path, reached, later, kept_step):
  done.results["alone"] = reached | {"reason": "First."}
  run([TABLE], tmp_path)
  done.results["alone"] = later | {"reason": "Then."}
  run([TABLE], tmp_path)
  (record,) = kept(tmp_path)["alone"]
  assert (record["step"], record["reason"]) == (kept_step, "Then.")
  first = record["status"] == reached["status"] and record["step"] == reached["step"]
  assert first == (kept_step == reached["step"])


def test_a_run_on_another_text_or_of_other_settings_does_not_count(done, tmp_path, monkeypatch):
  run([TABLE], tmp_path)
  monkeypatch.setattr(scales, "find_text", lambda config, folder: ("the whole text", None))
  run([TABLE], tmp_path)
  assert len(done.calls) == 6

  # Where the text is missing, there is nothing better to be had.
  def missing(config, folder):
    raise UserError("data: expected a folder")

  with monkeypatch.context() as patch:
    patch.setattr(scales, "find_text", missing)
    run([TABLE], tmp_path)
  assert len(done.calls) == 6
  monkeypatch.setattr(scales, "changes", lambda config, scale: {"seed": [0, 3]})
  run([TABLE], tmp_path)
  assert len(done.calls) == 9


def test_parameters_that_are_gone_and_wanted_are_made_again(done, tmp_path):
  done.results["second"] = {"status": "left_out", "reason": "Why."}
  run([TABLE], tmp_path)
  run([TABLE], tmp_path)
  assert names(done)[3:] == [("first", 0), ("second", 0)]
  (workdir(tmp_path, TABLE.rows[2], 0) / "checkpoints").mkdir(parents=True)
  run([TABLE], tmp_path)
  assert names(done)[5:] == [("second", 0)]


def test_who_has_had_a_turn_comes_after_those_that_have_had_none(done, tmp_path):
  done.results["alone"] = {"seconds": 500}
  run([TABLE], tmp_path, minutes=1)
  assert names(done) == [("alone", 0)]
  run([TABLE], tmp_path, minutes_each=2)
  assert names(done)[1:] == [("first", 0), ("second", 0), ("alone", 0)]


def test_the_time_limits(done, tmp_path, capsys):
  done.results["alone"] = {"seconds": 500}
  done.results["first"] = {"seconds": 40, "status": "done"}
  run([TABLE, OTHER], tmp_path, minutes=2, minutes_each=1)
  # 61 seconds of the first one, 40 of the next; then the time is over within the third.
  assert names(done) == [("alone", 0), ("first", 0), ("second", 0)]
  assert [runs[0]["status"] for runs in kept(tmp_path).values()] == ["partial", "partial", "done"]
  printed = capsys.readouterr().out
  assert "[2 of 4] first, seed 0\n" in printed
  assert "The time is over; 1 of 4 were not begun." in printed


def test_a_signal_ends_it_and_what_there_is_is_kept(done, tmp_path):
  done.results["first"] = {"status": "partial", "reason": "Stopped", "signal": True}
  with pytest.raises(Interrupted):
    run([TABLE], tmp_path)
  assert [len(runs) for runs in kept(tmp_path).values()] == [0, 1, 1]
  assert kept(tmp_path)["first"][0]["status"] == "partial"


def test_step_times_are_kept_point_by_point(done, tmp_path, monkeypatch, capsys):
  table, asked = papers.TABLES["dispatcher-fig2"], []

  def measure(name, scale, known, *, put, seconds):
    asked.append((name, scale, known))
    some = {"model": "Dispatcher", "baseline": None, "dtype": "float32", "settings": {}}
    some |= dict.fromkeys(("seconds", "temporary_mib", "ratio", "memory_ratio"))
    put(some | {"place": 8, "seconds": 0.5, "temporary_mib": 3.0, "left_out": ""})
    put(some | {"place": 16, "left_out": "no room"})
    put(some | {"place": 8, "left_out": "no time"})  # What was reached is not lost.
    raise RuntimeError("broken")

  monkeypatch.setattr(work.step_times, "measure", measure)
  machine = dict(device="one", devices=1, processor="Abacus", cores=2)
  about = experiment.about()
  monkeypatch.setattr(work.experiment, "about", lambda: about | {"machine": machine})
  for _ in range(2):
    run([table], tmp_path)
  machine = machine | {"device": "two"}
  job = run([table], tmp_path)
  # What found no room is tried again, and so is all on another machine.
  assert [known for *_, known in asked] == [set(), {8}, set()]
  content = json.loads((tmp_path / "out/dispatcher-fig2_reduced_tiny.json").read_text())
  assert [point["place"] for point in content["points"]] == [8, 16]
  assert {point["machine"]["device"] for point in content["points"]} == {"two"}
  assert content["planned"] == 8
  # An error that nobody expected ends neither the queue nor what was written.
  assert "RuntimeError: broken" in capsys.readouterr().err
  assert job.without_result() == [
    "dispatcher-fig2: RuntimeError: broken",
    "dispatcher-fig2, Dispatcher at 16: no room",
  ]
  # What has all of its points is not measured again.
  monkeypatch.setattr(work.step_times, "planned", lambda name, scale: 1)
  run([table], tmp_path)
  assert len(asked) == 3


def test_a_damaged_report_is_named(tmp_path):
  (tmp_path / "out").mkdir()
  path = tmp_path / "out/pooling-table2_reduced_tiny.json"
  path.write_text("{")
  with pytest.raises(ValueError, match=str(path)):
    make([TABLE], tmp_path)
  assert path.read_text() == "{"
