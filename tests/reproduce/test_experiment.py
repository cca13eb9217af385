"""Runs of an experiment and their records, at the scale "tiny"."""

import itertools
import json
import math
import signal
from pathlib import Path

import jax
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.data import batches
from dpjax.reproduce import experiment, papers, scales

ROW = next(row for row in papers.TABLES["extractors-fig8"].rows if row.name == "me")


@pytest.fixture(scope="module", autouse=True)
def promotion():
  """Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  runs = tmp_path_factory.mktemp("runs")
  return runs, experiment.do(ROW, 3, "tiny", runs=runs)


def after(count):
  """Says at the count-th question, and ever after, that it is time."""
  asked = itertools.count(1)
  return lambda: next(asked) >= count


def same(record):
  """What two runs of one seed have in common."""
  return {key: x for key, x in record.items() if key not in ("minutes", "command", "date")}


def test_the_record_of_a_run_that_is_done(finished):
  runs, record = finished
  json.dumps(record, allow_nan=False)
  folder = experiment.folder(runs, "tiny", ROW.config, 3)
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


def test_stopped_by_the_time_and_taken_up(finished, tmp_path):
  _, whole = finished
  record = experiment.do(ROW, 3, "tiny", runs=tmp_path, should_stop=after(3))
  assert (record["status"], record["step"], record["num_steps"]) == ("partial", 3, 4)
  assert record["reason"] == "Stopped at step 3 of 4, which is saved."
  # Validation is scored where it stopped, too; the test split is not touched.
  first, second = record["validation"]
  assert (first, second["step"]) == (whole["validation"][0], 3)
  assert first["nats_per_token"] != second["nats_per_token"]
  assert record["scores"] == {} and record["parameters"] == whole["parameters"]
  assert same(experiment.do(ROW, 3, "tiny", runs=tmp_path)) == same(whole)


def test_a_signal_ends_it_and_its_record_is_told(tmp_path, monkeypatch):
  read = batches.RandomWindows.batch

  def batch(self, step, rows=slice(None)):
    if step == 1:
      signal.raise_signal(signal.SIGTERM)
    return read(self, step, rows)

  monkeypatch.setattr(batches.RandomWindows, "batch", batch)
  with pytest.raises(experiment.Stopped, match="Stopped at step 2 of 4") as stopped:
    experiment.do(ROW, 3, "tiny", runs=tmp_path)
  assert (stopped.value.record["status"], stopped.value.record["step"]) == ("partial", 2)


def test_what_cannot_be_is_left_out(tmp_path):
  (tmp_path / "texts").mkdir()
  settings = dict(runs=tmp_path / "runs", data=tmp_path / "texts")
  record = experiment.do(ROW, 0, "cpu", **settings)
  assert record["status"] == "left_out"
  assert record["reason"].startswith("data: expected a folder childrens_books or child")
  assert not (tmp_path / "runs").exists()
  row = next(row for row in papers.TABLES["dispatcher-table1"].rows if row.after)
  record = experiment.do(row, 0, "tiny", runs=tmp_path, initial_run=tmp_path / "nowhere")
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
  record = experiment.do(ROW, 0, "tiny", runs=tmp_path)
  assert record["status"] == "diverged" and "expected a finite" in record["reason"]
  assert record["changes"]["train.learning_rate"] == [1e-3, 1e30]


def test_texts_and_vocabularies_of_a_folder(tmp_path):
  (tmp_path / "penn_treebank").mkdir()
  (tmp_path / "wiki40b_fi_books.txt").write_text("kirja\n")
  rows = {row.name: row for table in papers.TABLES.values() for row in table.rows}

  def configured(name, scale="paper", data=tmp_path):
    config = experiment.configure(rows[name], 5, scale, runs="runs", data=data)
    config_lib.check(config)
    return config

  config = configured("ptb/msa")
  assert config.data.path == str(tmp_path / "penn_treebank")
  assert config.data.manual_dir == str(tmp_path / "vocabularies")
  assert (config.data.data_dir, config.seed) == ("runs/data", 5)
  config = configured("wiki40b_fi/none", "cpu")
  assert config.data.path == str(tmp_path / "wiki40b_fi_books.txt")
  assert config.data.clean and config.data.language == "fi"
  # Without a folder, what is missing is downloaded to where train.py would.
  config = configured("ptb/msa", data="")
  assert (config.data.path, config.data.data_dir) == ("", "data")
  assert configured("ptb/msa", "tiny").data.path == ""


def test_tables_that_share_an_experiment_share_its_folder():
  folders = {
    experiment.folder("runs", "cpu", row.config, 1): row.config
    for table in papers.TABLES.values() for row in table.rows
  }
  assert len(folders) == len({*folders.values()})
  folder = experiment.folder("a", "cpu", "configs/msa_ptb.py", 2)
  assert folder == Path("a/cpu/msa_ptb/seed_2")
