"""Tables run at the scale "tiny": what the tests of each paper share."""

import json
import math
import os
import subprocess
import sys

from reproduce import pages, papers
from tests import helpers

# By hand from the papers, in the order of the tables: a row that gets lost is missed here.
_ROWS = (13, 8, 6, 8, 6, 24, 24, 48, 6, 15, 35, 3)
NUM_ROWS = dict(zip(papers.TABLES, _ROWS, strict=True))


def started(name, folder):
  """Runs the command in a process of its own, which compiles as quickly as the tests do."""
  environment = helpers.environment(
    XLA_FLAGS=os.environ["XLA_FLAGS"],
    JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2",
  )
  places = [f"--runs={folder / 'runs'}", f"--out={folder / 'out'}"]
  return subprocess.run(
    [sys.executable, "-m", "reproduce", name, "--scale=tiny", *places],
    cwd=helpers.ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=1800,
    check=False,
  )


def check_table(name, folder):
  """Runs a table; all of its rows must have a result, and the paper's numbers be there."""
  table = papers.TABLES[name]
  done = started(name, folder)
  # Status 1 would say that a row has none.
  assert done.returncode == 0, done.stderr[-3000:]
  file = folder / f"out/{pages.file_name(name, 'tiny')}.json"
  content = json.loads(file.read_text(encoding="utf-8"))
  rows = content["points" if table.kind == "step_times" else "rows"]
  assert len(rows) == NUM_ROWS[name]
  assert file.with_suffix(".png").exists() == (table.kind != "counts")
  text = file.with_suffix(".md").read_text(encoding="utf-8")
  assert pages.markdown(content) in done.stdout and pages.markdown(content) in text
  for row in rows:
    if table.kind == "counts":
      assert row["agrees"] and f"{row['paper']['additions']:,}" in text
    elif table.kind == "step_times":
      assert row["seconds"] > 0 and f"{row['seconds']:.3g}" in text
    else:
      (run,) = row["runs"]
      assert run["status"] == "done" and run["step"] == run["num_steps"] == 4
      assert row["label"] in text
      assert math.isfinite(row["mean"][table.scores[0]])
      for score, number in row["paper"].items():
        digits = {papers.BITS: 3, papers.FACTOR: 1}.get(score, 2)
        assert f"{number:.{digits}f}" in text


def check_going_on(name, folder):
  """The second time nothing is left to do."""
  table = papers.TABLES[name]
  file = folder / f"out/{pages.file_name(name, 'tiny')}.json"
  if not file.exists():
    check_table(name, folder)
  before = file.read_text(encoding="utf-8")
  done = started(name, folder)
  assert done.returncode == 0 and "training tokens" not in done.stdout
  assert file.read_text(encoding="utf-8") == before or table.kind == "step_times"
