"""Runs of an experiment and their records, at the scale "tiny"."""

import functools
import itertools
import json
import math
import signal

import jax
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.data import batches
from reproduce import experiment, papers, report, scales
from tests import helpers

ROW = next(row for row in papers.TABLES["extractors-fig8"].rows if row.name == "me")


@pytest.fixture(scope="module", autouse=True)
def promotion():
  """Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def do(runs, seed=3, row=ROW, scale="tiny", **settings):
  record, signalled = experiment.do(row, seed, scale, str(runs), **settings)
  assert signalled is None
  return record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  runs = tmp_path_factory.mktemp("runs")
  return runs, do(runs)


def after(count):
  """Says at the count-th question, and ever after, that it is time."""
  asked = itertools.count(1)
  return lambda: next(asked) >= count


def same(record):
  """What two runs of one seed have in common."""
  free = ("minutes", "resumed", "command", "date")
  return {key: x for key, x in record.items() if key not in free}


def test_the_record_of_a_run_that_is_done(finished):
  runs, record = finished
  json.dumps(record, allow_nan=False)
  _, folder, _ = experiment.configure(ROW, 3, "tiny", runs)
  run = dpjax.load(folder)
  assert (record["status"], record["reason"], record["seed"]) == ("done", "", 3)
  assert (record["step"], record["num_steps"], record["best_step"]) == (4, 4, run.step)
  scored = json.loads((folder / f"scores_test_{run.step}.json").read_text())["scores"]
  assert record["scores"] == scored | {"median_cost": record["costs"]["medians"][-1]}
  assert [point["step"] for point in record["validation"]] == [2, 4]
  assert record["validation"][-1]["perplexity"] == pytest.approx(
    math.exp(record["validation"][-1]["nats_per_token"])
  )
  assert record["costs"]["every"] == 2 and len(record["costs"]["medians"]) == 2
  assert record["text"] == "python_manual"
  assert record["tokens"]["train"] == run.data.counts["train"]["tokens"]
  assert record["vocab_size"] == run.tokenizer.vocab_size
  assert record["parameters"] == sum(x.size for x in jax.tree.leaves(run.params))
  assert record["changes"]["train.num_steps"] == [60_000, 4]
  assert run.config.seed == 3
  assert record["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_stopped_by_the_time_and_taken_up(finished, tmp_path):
  _, whole = finished
  record = do(tmp_path, should_stop=after(3))
  assert (record["status"], record["step"], record["num_steps"]) == ("partial", 3, 4)
  assert record["reason"] == "Stopped at step 3 of 4, which is saved."
  # Validation is scored where it stopped, too; the test split is not touched.
  first, second = record["validation"]
  assert (first, second["step"]) == (whole["validation"][0], 3)
  assert first["nats_per_token"] != second["nats_per_token"]
  assert record["scores"] == {} and record["parameters"] == whole["parameters"]
  again = do(tmp_path)
  assert same(again) == same(whole)
  assert (whole["resumed"], record["resumed"], again["resumed"]) == (False, False, True)


@pytest.mark.slow
def test_a_signal_ends_it_and_its_record_is_told(tmp_path, monkeypatch):
  read = batches.RandomWindows.batch

  def batch(self, step, rows=slice(None)):
    if step == 1:
      signal.raise_signal(signal.SIGTERM)
    return read(self, step, rows)

  monkeypatch.setattr(batches.RandomWindows, "batch", batch)
  # The time is over once the run has saved: what ended it is the signal all the same.
  record, signalled = experiment.do(ROW, 3, "tiny", str(tmp_path), should_stop=after(2))
  assert signalled is not None and signalled.signal == signal.SIGTERM
  assert (record["status"], record["step"]) == ("partial", 2)


def test_what_cannot_be_is_left_out(tmp_path):
  (tmp_path / "texts").mkdir()
  record = do(tmp_path / "runs", scale="cpu", data=str(tmp_path / "texts"))
  assert record["status"] == "left_out"
  assert record["reason"].startswith("data: expected a folder childrens_books or child")
  assert not (tmp_path / "runs").exists()
  row = next(row for row in papers.TABLES["dispatcher-table1"].rows if row.after)
  record = do(tmp_path, row=row, initial_run=tmp_path / "nowhere")
  assert record["reason"] == (
    f"train.initial_run: expected the folder of a run, got {tmp_path / 'nowhere'}"
  )


def test_what_diverges_says_so(tmp_path, monkeypatch):
  usual = scales.configure

  def configure(name, scale):
    config = usual(name, scale)
    config.train.learning_rate = 1e30
    return config

  monkeypatch.setattr(scales, "configure", configure)
  record = do(tmp_path, seed=0)
  assert record["status"] == "diverged" and "expected a finite" in record["reason"]
  assert record["changes"]["train.learning_rate"] == [1e-3, 1e30]
  # Adam's first update has the size of the rate: one loss was finite.
  assert record["step"] == 1 and record["costs"]["last"] == pytest.approx(5.7, abs=0.2)


def test_an_error_that_nobody_expected_is_told_and_left_out(tmp_path, monkeypatch, capsys):
  def train(*arguments, **settings):
    raise NotImplementedError("of this kind")

  monkeypatch.setattr(experiment.run_lib, "train", train)
  record = do(tmp_path, seed=0)
  assert record["status"] == "left_out"
  assert record["reason"] == "NotImplementedError: of this kind"
  assert "Traceback" in capsys.readouterr().err


def test_texts_and_vocabularies_of_a_folder(tmp_path, monkeypatch):
  (tmp_path / "penn_treebank").mkdir()
  (tmp_path / "wiki40b_fi_books.txt").write_text("kirja\n")
  rows = {row.name: row for table in papers.TABLES.values() for row in table.rows}
  folders, texts = set(), []

  def configured(name, scale="paper", data=str(tmp_path)):
    config, folder, text = experiment.configure(rows[name], 5, scale, "runs", data)
    config_lib.check(config)
    folders.add(folder)
    texts.append(text)
    return config

  config = configured("ptb/msa")
  assert config.data.path == str((tmp_path / "penn_treebank").resolve())
  assert config.data.manual_dir == str(tmp_path / "vocabularies")
  assert (config.data.data_dir, config.seed) == ("runs/data", 5)
  config = configured("wiki40b_fi/none", "cpu")
  assert config.data.path == str((tmp_path / "wiki40b_fi_books.txt").resolve())
  assert config.data.clean and config.data.language == "fi"
  # Without a folder, what is missing is downloaded to where train.py would.
  config = configured("ptb/msa", data="")
  assert (config.data.path, config.data.data_dir) == ("", "data")
  config = configured("ptb/msa", "tiny")
  assert (config.data.path, config.data.data_dir) == ("", "runs/data")
  assert texts == ["penn_treebank", "wiki40b_fi_books", "penn_treebank", "python_manual"]
  # What is made otherwise, or of another text, lies elsewhere.
  assert configured("wiki40b_fi/none", "cpu", "").data.path == ""
  assert len(folders) == 4
  monkeypatch.setattr(scales, "changes", lambda name, scale: {"model.width": [512, 9]})
  configured("ptb/msa")
  assert len(folders) == 5


def test_the_committed_records_are_of_what_would_be_run_now():
  known = functools.cache(scales.changes)
  contents = report.read(helpers.ROOT / "results/reproduce", "cpu")
  records = [
    record for content in contents for row in content.get("rows", ()) for record in row["runs"]
  ]
  assert len(records) > 100
  for record in records:
    assert record["changes"] == known(record["config"], "cpu"), record["row"]
