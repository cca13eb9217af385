"""Rows of Table 1 from small runs: curves of all pieces, both protocols, and the report."""

import json
import math
import shutil
import sys

import jax
import numpy as np
import pytest

import dpjax
from reproduce import pages, report
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import table1_ptb  # noqa: E402


def test_a_finished_run(finished, tmp_path):
  workdir = shutil.copytree(finished[0], tmp_path / "dispatcher_ptb", symlinks=True)
  table1_ptb.main([str(workdir), f"--out={tmp_path}", f"--reports={tmp_path}"])
  row = json.loads((tmp_path / "dispatcher.json").read_text())
  run = dpjax.load(workdir)
  assert row["is_finished"] and row["steps"] == row["num_steps"] == 12
  assert [point["step"] for point in row["curve"]] == [6, 12]
  assert row["test_perplexity"] == finished[2]["perplexity"]
  best = min(row["curve"], key=lambda point: point["valid_perplexity"])
  assert row["best_epoch"] == best["epoch"]
  assert row["best_valid_perplexity"] == best["valid_perplexity"]
  # By hand: 8 rows in windows of 19, the first token of each row no target.
  ids = np.asarray(run.data.splits["test"])
  rows = ids[: len(ids) // 8 * 8].reshape(8, -1)
  nats = []
  apply = jax.jit(run.model.apply)
  for begin in range(0, rows.shape[1] - 1, 19):
    inputs = rows[:, begin : begin + 19][:, : rows.shape[1] - 1 - begin]
    targets = rows[:, begin + 1 : begin + 20]
    log_p = jax.nn.log_softmax(apply({"params": run.params}, inputs.astype(np.int32)).logits)
    nats.append(-np.take_along_axis(np.asarray(log_p), targets[..., None].astype(int), -1))
  expected = math.exp(np.concatenate(nats, axis=1).mean())
  assert row["test_perplexity_authors_protocol"] == pytest.approx(expected, rel=1e-5)
  assert row["paper_test_perplexity"] == 35.40 and (tmp_path / "validation.png").exists()
  # The page has the row without any training.
  (content,) = report.read(tmp_path, "paper")
  expected = [row["test_perplexity"], row["test_perplexity_authors_protocol"]]
  page = pages.page([content])
  assert " | 12 of 12 | 35.40 | {:.2f} | {:.2f} | ".format(*expected) in page
  assert "- `model.width` 512 -> " in page and str(tmp_path) not in json.dumps(content)
  # The other row leaves this one as it is.
  workdir.rename(tmp_path / "msa_ptb")
  table1_ptb.main([str(tmp_path / "msa_ptb"), f"--out={tmp_path}", f"--reports={tmp_path}"])
  (both,) = report.read(tmp_path, "paper")
  assert [x["name"] for x in both["rows"] if x["runs"]] == ["ptb/msa", "ptb/dispatcher"]
  assert both["rows"][1] == content["rows"][1]
  # Another seed has a file of its own, and no row.
  workdir = (tmp_path / "msa_ptb").rename(tmp_path / "dispatcher_ptb")
  config = json.loads((workdir / "config.json").read_text())
  (workdir / "config.json").write_text(json.dumps(config | {"seed": 13}))
  rows, page = tmp_path / "dispatcher.json", tmp_path / "dispatcher-table1.json"
  before = rows.read_bytes(), page.read_bytes()
  table1_ptb.main([str(workdir), f"--out={tmp_path}", f"--reports={tmp_path}"])
  assert (rows.read_bytes(), page.read_bytes()) == before
  other = json.loads((tmp_path / "dispatcher_seed13.json").read_text())
  assert other["curve"] == row["curve"] and other["seed"] == 13


@pytest.mark.parametrize("patience", [0, 1])
def test_a_run_that_ended_early(finished, tmp_path, monkeypatch, patience):
  workdir = shutil.copytree(finished[0], tmp_path / "dispatcher_ptb", symlinks=True)
  config = json.loads((workdir / "config.json").read_text())
  config["train"]["patience"] = patience
  (workdir / "config.json").write_text(json.dumps(config))
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  for line in lines:
    if line["split"] == "valid":
      line["perplexity"] = 50.0 + line["step"]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
  monkeypatch.setattr(table1_ptb.config_lib, "steps_in", lambda *_, **__: 99)
  row, record = table1_ptb.describe("dispatcher", workdir)
  assert row["num_steps"] == 99 and row["is_finished"] == bool(patience)
  assert record["status"] == ("done" if patience else "partial")
  assert record["reason"] == ("" if patience else "12 of 99 updates are done")


@pytest.mark.parametrize("name", ["we_ptb", "msa_ptb", "dispatcher_ptb"])
def test_other_folders_are_refused(tmp_path, capsys, name):
  (tmp_path / "dispatcher_ptb").mkdir()
  (tmp_path / "dispatcher_ptb" / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n')
  with pytest.raises(SystemExit):
    table1_ptb.main([str(tmp_path / name), f"--out={tmp_path / 'out'}"])
  got = "got we" if name == "we_ptb" else f"got {tmp_path / name}"
  assert got in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_hours_are_those_of_the_pieces_alone():
  times = [0.0, 600.0, 1200.0, 4500.0, 5100.0]
  assert table1_ptb.hours_of([{"time": time} for time in times]) == pytest.approx(0.5)


@pytest.mark.parametrize(
  ("scores", "patience", "expected"),
  [
    ([9.0, 7.0, 8.0, 7.5, 7.2], 3, True),
    ([9.0, 7.0, 8.0, 7.5, 7.2], 4, False),
    ([9.0, 7.0, 8.0, 7.5, 7.2], 0, False),
    ([9.0, 7.0, 8.0, 6.9], 2, False),
  ],
)
def test_a_run_that_lost_patience_is_finished(scores, patience, expected):
  curve = [{"valid_perplexity": score} for score in scores]
  assert table1_ptb.has_lost_patience(curve, patience) == expected
