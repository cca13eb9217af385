"""The report on runs with different boundaries, from small runs."""

import json
import sys

import jax
import numpy as np
import pytest

import dpjax
from dpjax.run import workdir
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import pooling_runs  # noqa: E402

KINDS = ("none", "whitespace", "routing")


@pytest.fixture(scope="module")
def folders(text, tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  with jax.numpy_dtype_promotion("standard"):
    for kind in KINDS:
      if kind == "none":
        config = helpers.small_config(text, num_steps=6)
        helpers.set_model(config.model, hidden_dropout=0.0, mixer_dropout=0.0)
      else:
        config = helpers.pooled_config(text, kind, num_steps=6)
      dpjax.train(config, folder / f"text_{kind}")
  return [folder / f"text_{kind}" for kind in KINDS]


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory):
  out = tmp_path_factory.mktemp("report") / "pooling.json"
  with jax.numpy_dtype_promotion("standard"):
    pooling_runs.main([*map(str, folders), f"--out={out}", "--repetitions=3"])
  assert out.with_suffix(".png").stat().st_size > 10_000
  return out.read_text()


@pytest.mark.slow
def test_the_report_has_the_runs_own_scores_and_no_path(folders, report):
  assert str(folders[0].parent) not in report
  content = json.loads(report)
  for kind, folder, row in zip(KINDS, folders, content["runs"], strict=True):
    run = dpjax.load(folder)
    assert (row["name"], row["best_step"]) == (kind, run.step)
    assert row["test"]["nats_per_token"] == run.score_split("test")["nats_per_token"]
    assert row["step"]["milliseconds"] > 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    share = [[x["step"], x["p_ones"]] for x in lines if "p_ones" in x and "loss" in x]
    assert row.get("share", []) == share
  assert content["runs"][0]["step"]["ratio"] == 1
  assert content["runs"][2]["aim"]["share"] == 1 / 4.5
  assert content["runs"][2]["aim"]["reports"] == 3
  assert "aim" not in content["runs"][1]


@pytest.mark.slow
def test_segments_are_marked_in_one_text(report):
  none, whitespace, routing = (row["segments"] for row in json.loads(report)["runs"])
  assert len(none) == pooling_runs.SENTENCES
  assert not any("|" in text for text in none)
  marked = [text.replace("␣", "␣|").replace("\\n", "\\n|") for text in none]
  assert whitespace == marked
  assert [text.replace("|", "") for text in routing] == none


@pytest.mark.slow
def test_boundaries_on_spaces_are_there_alone(report):
  none, whitespace, _ = json.loads(report)["runs"]
  assert "places" not in none
  assert whitespace["places"]["space"]["of_boundaries"] == 1
  characters = [place["of_characters"] for place in whitespace["places"].values()]
  assert sum(characters) == pytest.approx(1) and 0 < min(characters)


def test_places():
  assert pooling_runs.places_of("i am\nold").tolist() == [1, 0, 1, 2, 0, 1, 3, 2]
  places = pooling_runs.places_of("so it is then")
  found = pooling_runs.count_places(np.ones(places.shape, bool), places)
  assert all(x["of_boundaries"] == x["of_characters"] for x in found.values())
  assert {x["found"] for x in found.values()} == {1}
  # Of 13 characters 3 are spaces; of 2 boundaries one is on a first letter.
  found = pooling_runs.count_places(np.arange(13) % 7 == 3, places)
  assert found["space"]["of_characters"] == 3 / 13
  assert found["first letter"]["of_boundaries"] == 0.5
  assert found["first letter"]["found"] == 0.25


SHARES = [
  *(([0.3, 0.3, 0.3], 3, 5), ([0.21, 0.39, 0.3], 3, 5), ([0.19, 0.3, 0.3], 2, 10)),
  *(([0.3, 0.41, 0.3], 2, 15), ([0.3, 0.3, 0.5], 2, None)),
]


@pytest.mark.parametrize("share, within, since", SHARES)
def test_a_share_beside_its_aim(share, within, since):
  steps = [*zip((5, 10, 15), share, strict=True)]
  expected = {"reports": 3, "within_a_third": within, "since_step": since}
  assert pooling_runs.follow(steps, 0.3) == expected


def test_sentences_are_whole_words():
  text = "one two three four five six seven"
  (row, part), *_ = pooling_runs.choose_sentences([text])
  assert (row, text[part]) == (0, "four five six")


@pytest.mark.slow
def test_runs_that_differ_elsewhere_are_refused(folders, text, tmp_path):
  workdir.claim(tmp_path, helpers.pooled_config(text, "fixed", batch_size=16))
  with pytest.raises(SystemExit, match=r"train\.batch_size"):
    pooling_runs.main([str(folders[0]), str(tmp_path), "--out=x.json"])
  assert not pooling_runs.check_alike(folders)["model"]["hidden_dropout"]
