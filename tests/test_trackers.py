"""The trackers of examples/, with stand-ins for the packages that they report to."""

import contextlib
import csv
import runpy
import sys
import types

import pytest

from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Log:
  """What a tracker was told."""

  def __init__(self):
    self.begun, self.metrics, self.is_open = [], [], False

  @contextlib.contextmanager
  def run(self, **settings):
    self.begun.append(settings)
    self.is_open = True
    yield self
    self.is_open = False

  def log(self, metrics, step):
    assert self.is_open
    self.metrics.append((step, dict(metrics)))


def load(name):
  return runpy.run_path(str(helpers.ROOT / "examples/trackers" / f"{name}.py"))["train"]


@pytest.fixture
def config(text):
  return helpers.small_config(text, num_steps=4, eval_every_steps=4)


def check(told):
  assert [step for step, metrics in told if "train/loss" in metrics] == [2, 4]
  assert [step for step, metrics in told if "valid/perplexity" in metrics] == [4]
  assert all(type(metrics.get("train/loss", 0.0)) is float for _, metrics in told)


def test_weights_and_biases(config, tmp_path, monkeypatch):
  log = Log()
  monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=log.run))
  load("weights_and_biases")(config, tmp_path / "mine", model=helpers.bigrams)
  (settings,) = log.begun
  assert settings["name"] == "mine" and settings["config"]["train"]["num_steps"] == 4
  check(log.metrics)


def test_mlflow(config, tmp_path, monkeypatch):
  log, files = Log(), {}
  mlflow = dict(start_run=log.run, log_metrics=log.log)
  mlflow |= dict(log_dict=lambda content, name: files.update({name: content}))
  monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(**mlflow))
  load("mlflow_tracker")(config, tmp_path / "mine", model=helpers.bigrams)
  assert log.begun == [{"run_name": "mine"}] and files == {"config.json": config.to_dict()}
  # The speed of steps that were compiled is not known, and not sent.
  assert all(value == value for _, metrics in log.metrics for value in metrics.values())
  check(log.metrics)


def test_a_table(config, tmp_path):
  load("csv_tracker")(config, tmp_path / "mine", model=helpers.bigrams)
  told = {}
  for step, name, value in csv.reader((tmp_path / "mine/scores.csv").open(newline="")):
    told.setdefault(int(step), {})[name] = float(value)
  check([*told.items()])
