"""Sends each report of a run to MLflow.

pip install mlflow
python examples/trackers/mlflow_tracker.py quickstart runs/tracked
"""

import math
import sys
from pathlib import Path

import mlflow

import dpjax


def report(step, metrics, state):
  """A callback of `dpjax.train`. Not every MLflow store accepts nan and infinity."""
  finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
  mlflow.log_metrics(finite, step=step)


def train(config, workdir, **settings):
  """Like `dpjax.train`, within an MLflow run that also has the settings."""
  with mlflow.start_run(run_name=Path(workdir).name):
    mlflow.log_dict(config.to_dict(), "config.json")
    return dpjax.train(config, workdir, callbacks=[report], **settings)


if __name__ == "__main__":
  train(dpjax.config.load(sys.argv[1]), sys.argv[2])
