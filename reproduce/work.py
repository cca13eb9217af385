"""Does the experiments of tables: what is missing, in order, within a time limit."""

import dataclasses
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dpjax.errors import UserError
from reproduce import experiment, report, scales, step_times
from reproduce.pages import file_name
from reproduce.papers import TABLES, Row, Table


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to work.

  Attributes:
    scale: one of `reproduce.scales.SCALES`.
    seeds: runs of each experiment, those of the seeds 0, 1, ...
    data: as `reproduce.experiment.configure`.
    runs: where the runs' folders are.
    out: where the reports are; what they hold is not done again.
    minutes: after so many no step is begun; 0: no limit.
    minutes_each: nor one of a run that has taken so many of this call; 0: no limit.
  """

  scale: str
  seeds: int = 1
  data: str = ""
  runs: str = "runs/reproduce"
  out: str = "results/reproduce"
  minutes: float = 0.0
  minutes_each: float = 0.0

  def check(self) -> None:
    """Refuses what cannot be followed.

    Raises:
      ValueError: `setting: expected ..., got ...`.
    """
    if self.scale not in scales.SCALES:
      known = ", ".join(scales.SCALES)
      raise UserError(f"scale: expected one of {known}, got {self.scale}")
    if self.seeds < 1:
      raise UserError(f"seeds: expected at least 1, got {self.seeds}")
    for key in ("minutes", "minutes_each"):
      if not 0 <= getattr(self, key) < math.inf:
        raise UserError(f"{key}: expected at least 0, got {getattr(self, key)}")
    if self.data and not Path(self.data).is_dir():
      raise UserError(f"data: expected a folder of texts, got {self.data}")
    if jax.process_count() > 1:
      raise UserError(f"num_processes: expected 1, got {jax.process_count()}")


@dataclasses.dataclass(frozen=True)
class _Run:
  """One to be made: its row and seed, and the row whose parameters it begins with."""

  row: Row
  seed: int
  after: Row | None

  @property
  def key(self) -> tuple[str, int]:
    return self.row.config, self.seed


class Work:
  """The experiments of some tables, and what is known of them.

  Args:
    tables: the most valuable first.
    settings: how to work.

  Raises:
    ValueError: as `Settings.check`, or a report that is there cannot be read.
  """

  def __init__(self, tables: Sequence[Table], settings: Settings):
    settings.check()
    self._tables, self._settings = tables, settings
    self._began = time.monotonic()
    self._records: dict[tuple[str, int], dict[str, Any]] = {}
    self._points: dict[str, list[dict[str, Any]]] = {}
    self._errors: list[str] = []
    self._read()

  def run(self) -> None:
    """Does what is missing, and writes the reports as it goes.

    Raises:
      reproduce.experiment.Stopped: a signal came; all is saved.
    """
    self.write([table for table in self._tables if table.kind == "counts"])
    todo = [job for job in self._jobs() if isinstance(job, Table) or not self._has(job)]
    if self._settings.minutes_each:
      # Those that have had a turn come after those that have had none.
      todo.sort(key=lambda job: isinstance(job, _Run) and self._status(job) == "partial")
    times: list[float] = []
    for i, job in enumerate(todo):
      if self._is_over():
        print(f"The time is over; {len(todo) - i} of {len(todo)} were not begun.")
        break
      place = f"\n[{i + 1} of {len(todo)}]"
      if isinstance(job, Table):
        print(f"{place} {job.name}", flush=True)
        self._measure(job)
        continue
      print(
        f"{place} {job.row.name}, seed {job.seed}{self._left(times, len(todo) - i)}", flush=True
      )
      begin = time.monotonic()
      status = self._do(job)
      if status != "left_out":
        times.append(time.monotonic() - begin)

  def write(self, tables: Sequence[Table] | None = None) -> list[dict[str, Any]]:
    """Writes the reports of all tables, or of these, and gives what they hold.

    Those of which nothing has been begun are left out.
    """
    tables = self._tables if tables is None else tables
    contents = [*filter(_is_begun, map(self._content, tables))]
    for content in contents:
      report.write(content, self._settings.out)
    return contents

  def without_result(self) -> list[str]:
    """What has no result, and not for want of time: a line each."""
    lines = [*self._errors]
    for job in self._jobs():
      if isinstance(job, Table):
        points = self._points.get(job.name, [])
        lines += [
          f"{job.name}, {point['model']} at {point['place']}: {point['left_out']}"
          for point in points
          if point["left_out"]
        ]
        continue
      record = self._records.get(job.key, {})
      # Those that wait for another run are wanting time alone, if that one is.
      after = _Run(job.after, job.seed, None) if job.after else job
      is_waiting = after is not job and self._status(after) in ("partial", "missing")
      if record.get("status") in ("left_out", "diverged") and not is_waiting:
        lines.append(f"{job.row.name}, seed {job.seed}: {record['reason']}")
    return lines

  def _jobs(self) -> Iterator[_Run | Table]:
    """All that there is to do, in order; the first seed of everything comes first."""
    seen = set()
    for seed in range(self._settings.seeds):
      for table in self._tables:
        if table.kind == "step_times" and seed == 0:
          yield table
        for run in _in_order(table, seed):
          if run.key not in seen:
            seen.add(run.key)
            yield run

  def _status(self, run: _Run) -> str:
    return self._records.get(run.key, {}).get("status", "missing")

  def _has(self, run: _Run) -> bool:
    """Whether it is finished, and is what would be run now."""
    settings, record = self._settings, self._records.get(run.key, {})
    if record.get("status") not in ("done", "diverged"):
      return False
    if record["changes"] != experiment.changes(run.row.config, settings.scale):
      return False
    try:
      text = experiment.text(run.row.config, settings.scale, settings.data)
    except UserError:
      return True  # Nothing better can be had without the text.
    if record["text"] != text:
      return False
    # Its parameters may be gone, and wanted.
    is_wanted = record["status"] == "done" and any(
      isinstance(job, _Run)
      and job.after == run.row
      and job.seed == run.seed
      and self._status(job) != "done"
      for job in self._jobs()
    )
    return not is_wanted or (self._folder(run.row, run.seed) / "checkpoints").exists()

  def _folder(self, row: Row, seed: int) -> Path:
    settings = self._settings
    try:
      text = experiment.text(row.config, settings.scale, settings.data)
    except UserError:
      text = ""
    return experiment.folder(settings.runs, settings.scale, row.config, seed, text)

  def _do(self, run: _Run) -> str:
    settings, begin = self._settings, time.monotonic()

    def should_stop() -> bool:
      each = settings.minutes_each
      is_long = each > 0 and time.monotonic() - begin > 60 * each
      return is_long or self._is_over()

    first = ""
    if run.after is not None:
      status = self._status(_Run(run.after, run.seed, None))
      if status != "done":
        reason = f"expected a whole run of {run.after.name}, got it {status}"
        return self._end(
          run, experiment.left_out(run.row, run.seed, settings.scale, reason.replace("_", " "))
        )
      first = self._folder(run.after, run.seed)
    try:
      record = experiment.do(
        run.row,
        run.seed,
        settings.scale,
        runs=settings.runs,
        data=settings.data,
        initial_run=first,
        should_stop=should_stop,
      )
    except experiment.Stopped as stopped:
      self._put(run, stopped.record)
      raise
    return self._end(run, record)

  def _end(self, run: _Run, record: dict[str, Any]) -> str:
    if record["reason"]:
      print(record["reason"], flush=True)
    self._put(run, record)
    return record["status"]

  def _put(self, run: _Run, record: dict[str, Any]) -> None:
    self._read()  # Another process may have written meanwhile.
    before = self._records.get(run.key)
    if before and before["status"] == "partial" and record["resumed"]:
      record["minutes"] = round(record["minutes"] + before["minutes"], 2)
    if before is None or _rank(record) >= _rank(before) or record["status"] == "done":
      self._records[run.key] = record
    elif record["reason"]:
      # Nothing that was reached is lost by a call that does not come as far.
      self._records[run.key] = before | {"reason": record["reason"]}
    tables = TABLES | {table.name: table for table in self._tables}
    self.write(
      [
        table
        for table in tables.values()
        if any(row.config == run.row.config for row in table.rows)
        and (table in self._tables or self._has_report(table))
      ]
    )

  def _has_report(self, table: Table) -> bool:
    name = file_name(table.name, self._settings.scale)
    return Path(self._settings.out, f"{name}.json").exists()

  def _read(self) -> None:
    """Takes what the reports hold; of a run that several have, the furthest."""
    for content in report.read(self._settings.out, self._settings.scale):
      self._points.setdefault(content["table"], content.get("points", []))
      for row in content.get("rows", []):
        for record in row.get("runs", []):
          key = record["config"], record["seed"]
          if key not in self._records or _rank(record) > _rank(self._records[key]):
            self._records[key] = record

  def _measure(self, table: Table) -> None:
    points = self._points.setdefault(table.name, [])

    def put(point: dict[str, Any]) -> None:
      points[:] = [x for x in points if _place(x) != _place(point)]
      points.append(point | experiment.about())
      self.write([table])

    machine = experiment.about()["machine"]
    known = [x for x in points if not x["left_out"] and x["machine"] == machine]
    try:
      step_times.measure(
        table.name, self._settings.scale, known, put=put, should_stop=self._is_over
      )
    # A queue that runs overnight goes on with the next.
    except Exception as error:
      traceback.print_exc()
      self._errors.append(f"{table.name}: {type(error).__name__}: {error}")

  def _content(self, table: Table) -> dict[str, Any]:
    scale = self._settings.scale
    if table.kind == "counts":
      return report.counts(table, scale)
    if table.kind == "step_times":
      planned = len(step_times.places(table.name, scale))
      return report.step_times(table, scale, self._points.get(table.name, []), planned)
    return report.summarise(table, scale, [*self._records.values()])

  def _is_over(self) -> bool:
    minutes = self._settings.minutes
    return minutes > 0 and time.monotonic() - self._began > 60 * minutes

  def _left(self, times: Sequence[float], count: int) -> str:
    """How long the rest takes, by the mean of what was done."""
    if not times:
      return ""
    minutes = sum(times) / len(times) * count / 60
    if self._settings.minutes:
      gone = (time.monotonic() - self._began) / 60
      minutes = min(minutes, self._settings.minutes - gone)
    return f", about {minutes:.0f} minutes left"


def _rank(record: Mapping[str, Any]) -> tuple[int, int]:
  """Of two records of a run the higher one counts."""
  order = ("left_out", "partial", "diverged", "done")
  return order.index(record["status"]), record["step"]


def _place(point: Mapping[str, Any]) -> tuple:
  return point["model"], point["dtype"], point["place"]


def _is_begun(content: Mapping[str, Any]) -> bool:
  is_run = any(row.get("runs") for row in content.get("rows", []))
  return is_run or bool(content.get("points")) or content["kind"] == "counts"


def _in_order(table: Table, seed: int) -> list[_Run]:
  """A table's runs: first those that stand alone, then what others begin with, and they."""
  by_name = {row.name: row for row in table.rows}
  firsts = {row.after for row in table.rows if row.after}
  runs = [_Run(row, seed, by_name.get(row.after)) for row in table.rows]
  return sorted(runs, key=lambda run: 2 * bool(run.after) or run.row.name in firsts)
