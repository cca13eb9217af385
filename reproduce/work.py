"""Does the experiments of tables: what is missing, in order, within a time limit."""

import dataclasses
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpjax.errors import UserError
from reproduce import experiment, report, scales, step_times
from reproduce.papers import Row, Table


@dataclasses.dataclass
class Work:
  """The experiments of some tables, the most valuable first, and what is known of them.

  The seeds are 0, 1, ...; what the reports in `out` hold is not done again. After `minutes`
  no step is begun, nor one of a run that has taken `minutes_each` of this call; 0: no limit.
  The others are as in `reproduce.experiment.configure`.
  """

  tables: Sequence[Table]
  scale: str
  seeds: int = 1
  data: str = ""
  runs: str = "runs/reproduce"
  out: str = "results/reproduce"
  minutes: float = 0.0
  minutes_each: float = 0.0

  def __post_init__(self):
    self._began = time.monotonic()
    self._places = dict(scale=self.scale, runs=self.runs, data=self.data)
    self._records: dict[tuple[str, int], dict[str, Any]] = {}
    self._points: dict[str, list[dict[str, Any]]] = {}
    self._errors: list[str] = []
    self._read()

  def run(self) -> None:
    """Does what is missing, and writes the reports as it goes.

    Raises:
      dpjax.errors.Interrupted: a signal came; all is saved.
    """
    self.write([table for table in self.tables if table.kind == "counts"])
    todo = [job for job in self._jobs() if not self._has(*job)]
    if self.minutes_each:
      # Those that have had a turn come after those that have had none.
      todo.sort(key=lambda job: self._status(*job) == "partial")
    for i, (what, seed) in enumerate(todo):
      if self._seconds_left() <= 0:
        print(f"The time is over; {len(todo) - i} of {len(todo)} were not begun.")
        break
      print(f"\n[{i + 1} of {len(todo)}] {what.name}, seed {seed}", flush=True)
      if isinstance(what, Table):
        self._measure(what)
      else:
        self._do(what, seed)

  def write(self, tables: Sequence[Table] | None = None) -> list[dict[str, Any]]:
    """Writes the reports of all tables, or of these, as far as begun, and gives them."""
    contents, configs = [], {config for config, _ in self._records}
    for table in self.tables if tables is None else tables:
      if table.kind == "counts":
        contents.append(report.counts(table, self.scale))
      elif points := self._points.get(table.name):
        planned = step_times.planned(table.name, self.scale)
        contents.append(report.step_times(table, self.scale, points, planned))
      elif any(row.config in configs for row in table.rows):
        contents.append(report.summarise(table, self.scale, self._records.values()))
    for content in contents:
      report.write(content, self.out)
    return contents

  def without_result(self) -> list[str]:
    """What has no result, and not for want of time: a line each."""
    lines = [*self._errors]
    for what, seed in self._jobs():
      if isinstance(what, Table):
        points = [x for x in self._points.get(what.name, ()) if x["left_out"]]
        lines += [f"{what.name}, {x['model']} at {x['place']}: {x['left_out']}" for x in points]
      elif self._status(what, seed) in ("left_out", "diverged"):
        # What waits for another run lacks time alone, if that run does.
        first = self._first(what)
        if first is None or self._status(first, seed) not in ("partial", "missing"):
          reason = self._records[what.config, seed]["reason"]
          lines.append(f"{what.name}, seed {seed}: {reason}")
    return lines

  def _jobs(self) -> Iterator[tuple[Row | Table, int]]:
    """All that there is to do, the first seed of everything first.

    Of a table, what other rows begin with comes after those that stand alone.
    """
    seen = set()
    for seed in range(self.seeds):
      for table in self.tables:
        if table.kind == "step_times" and seed == 0:
          yield table, seed
        firsts = {row.after for row in table.rows}
        for row in sorted(table.rows, key=lambda x: 2 * bool(x.after) or x.name in firsts):
          if (row.config, seed) not in seen:
            seen.add((row.config, seed))
            yield row, seed

  def _first(self, row: Row) -> Row | None:
    """The row whose parameters a row begins with."""
    rows = (x for table in self.tables for x in table.rows)
    return next((x for x in rows if row.after and x.name == row.after), None)

  def _status(self, what: Row | Table, seed: int) -> str:
    record = self._records.get((getattr(what, "config", ""), seed))
    return record["status"] if record else "missing"

  def _has(self, what: Row | Table, seed: int) -> bool:
    """Whether it is finished, and is what would be run now."""
    if isinstance(what, Table):
      return len(self._known(what)) >= step_times.planned(what.name, self.scale)
    status, rows = self._status(what, seed), [x for table in self.tables for x in table.rows]
    if status not in ("done", "diverged"):
      return False
    record = self._records[what.config, seed]
    if record["changes"] != scales.changes(what.config, self.scale):
      return False
    try:
      _, workdir, text = experiment.configure(what, seed, **self._places)
    except UserError:
      return True  # Nothing better can be had without the text.
    # Its parameters may be gone, and wanted.
    waiting = [x for x in rows if x.after == what.name and self._status(x, seed) != "done"]
    is_gone = status == "done" and waiting and not (workdir / "checkpoints").exists()
    return record["text"] == text and not is_gone

  def _do(self, row: Row, seed: int) -> None:
    begin, first, initial_run = time.monotonic(), self._first(row), ""

    def should_stop() -> bool:
      is_long = 0 < 60 * self.minutes_each < time.monotonic() - begin
      return is_long or self._seconds_left() <= 0

    if first is not None:
      if (status := self._status(first, seed)) != "done":
        reason = f"expected a whole run of {first.name}, got it {status.replace('_', ' ')}"
        self._put(experiment.left_out(row, seed, self.scale, reason))
        return
      _, initial_run, _ = experiment.configure(first, seed, **self._places)
    record, interrupted = experiment.do(
      row, seed, **self._places, initial_run=initial_run, should_stop=should_stop
    )
    self._put(record)
    if interrupted is not None:
      raise interrupted

  def _put(self, record: dict[str, Any]) -> None:
    if record["reason"]:
      print(record["reason"], flush=True)
    self._read()  # Another process may have written meanwhile.
    key = record["config"], record["seed"]
    before = self._records.get(key)
    if before and before["status"] == "partial" and record["resumed"]:
      record["minutes"] = round(record["minutes"] + before["minutes"], 2)
    if before and record["status"] != "done" and _rank(record) < _rank(before):
      # Nothing that was reached is lost by a call that does not come as far.
      record = before | {"reason": record["reason"]}
    self._records[key] = record
    configs = {table.name: [row.config for row in table.rows] for table in self.tables}
    self.write([table for table in self.tables if record["config"] in configs[table.name]])

  def _read(self) -> None:
    """Takes what the reports hold; of a run that several have, the furthest."""
    for content in report.read(self.out, self.scale):
      self._points.setdefault(content["table"], content.get("points", []))
      for record in (x for row in content.get("rows", ()) for x in row.get("runs", ())):
        key = record["config"], record["seed"]
        if key not in self._records or _rank(record) > _rank(self._records[key]):
          self._records[key] = record

  def _known(self, table: Table) -> list[dict[str, Any]]:
    """A figure's points that have numbers of this machine."""
    machine, points = experiment.about()["machine"], self._points.get(table.name, ())
    return [x for x in points if x["machine"] == machine and not x["left_out"]]

  def _measure(self, table: Table) -> None:
    points = self._points.setdefault(table.name, [])
    known = {point["place"] for point in self._known(table)}

    def put(point: dict[str, Any]) -> None:
      keys = ("model", "dtype", "place")
      old = [x for x in points if all(x[key] == point[key] for key in keys)]
      if not point["left_out"] or all(x["left_out"] for x in old):
        points[:] = [x for x in points if x not in old] + [point | experiment.about()]
        self.write([table])

    try:
      step_times.measure(table.name, self.scale, known, put=put, seconds=self._seconds_left)
    # A queue that runs overnight goes on with the next.
    except Exception as error:
      traceback.print_exc()
      self._errors.append(f"{table.name}: {type(error).__name__}: {error}")

  def _seconds_left(self) -> float:
    spent = time.monotonic() - self._began
    return 60 * self.minutes - spent if self.minutes else math.inf


def _rank(record: Mapping[str, Any]) -> tuple[int, int]:
  """Of two records of a run the higher one counts."""
  return report.STATUSES.index(record["status"]), record["step"]
