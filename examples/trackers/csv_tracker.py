"""Writes each report of a run to a table, one line per number: step, name, value.

python examples/trackers/csv_tracker.py quickstart runs/tracked

It is also a template for any other tracker: only the body of `report` changes.
(The run's own metrics.jsonl has the same numbers.)
"""

import csv
import sys
from pathlib import Path

import dpjax


def train(config, workdir, **settings):
  """Like `dpjax.train`, with a table scores.csv beside the run's own files."""
  path = Path(workdir) / "scores.csv"
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a", newline="", encoding="utf-8") as file:
    table = csv.writer(file)

    def report(step, metrics, state):
      table.writerows([step, name, value] for name, value in metrics.items())
      file.flush()

    return dpjax.train(config, workdir, callbacks=[report], **settings)


if __name__ == "__main__":
  train(dpjax.config.load(sys.argv[1]), sys.argv[2])
