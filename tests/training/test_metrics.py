import math

import jax
import numpy as np
import pytest

import dpjax
from dpjax.training import metrics
from tests import helpers

BY_HAND = {"nats_per_token": 4 * math.log(2), "perplexity": 16.0, "perplexity_per_word": 32.0}


def test_text_scores_by_hand():
  # "no no\nyes\n": 5 tokens; "no", "no", "yes" and two line ends; 10 characters, of which
  # one stands here for two bytes.
  counts, nats = {"tokens": 5, "words": 4}, 20 * math.log(2)
  assert metrics.text_scores(nats, counts) == pytest.approx(BY_HAND)  # of a text that was lost
  scores = metrics.text_scores(nats, counts | {"characters": 10, "bytes": 11})
  assert scores == pytest.approx(BY_HAND | {"bits_per_character": 2.0, "bits_per_byte": 20 / 11})


def test_a_run_whose_tokenizer_loses_text_reports_no_bits(text, tmp_path, capsys):
  config = helpers.small_config(text, num_steps=2, eval_every_steps=2)
  config.data.tokenizer = dpjax.config.tokenizer("wordpiece", vocab_size=43, lower_text=True)
  with jax.numpy_dtype_promotion("standard"):
    run, scores = dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  names = {"nats_per_token", "perplexity", "perplexity_per_word"}
  assert scores.keys() == names
  of_text = run.score("The cat\nsat")
  bits = {"bits_per_character", "bits_per_byte"}
  assert of_text.keys() == names | bits and all(math.isnan(of_text[name]) for name in bits)
  [valid] = helpers.reports(tmp_path / "run", "valid")
  assert names <= valid.keys() and "bits" not in " ".join(valid)
  printed = capsys.readouterr().out
  assert (
    "perplexity" in printed and printed.count("bits") == printed.count("no bits per character") == 1
  )
  why = "(no bits per character: the tokens do not hold the whole text)"
  assert dpjax.runs.table(scores).endswith(why)


def test_a_perplexity_beyond_floats_is_infinite():
  counts = {"tokens": 1, "words": 2, "characters": 3, "bytes": 3}
  scores = metrics.text_scores(1000.0, counts)
  assert scores["perplexity"] == math.inf
  assert scores["perplexity_per_word"] == pytest.approx(math.exp(500))
  assert metrics.text_scores(math.nan, counts)["perplexity"] != scores["perplexity"]


SUMS = dict(nats=30.0, count=40.0, boundary_nats=10.0, boundaries=8.0, segments=18.0)
SUMS |= dict(segments_max=7.0, rows=4.0, positions=26.0, slots=16.0)
TARGETS = dict(targets=5.0, hits=4.0, agreements=35.0)


def test_boundary_scores_by_hand():
  expected = {
    "boundary_loss": 0.25,
    "p_ones": 0.2,
    "shortening_factor": 5.0,
    "shortening_factor_padded": 1.625,
    "segments_mean": 4.5,
    "segments_max": 7.0,
  }
  assert metrics.boundary_scores(SUMS) == pytest.approx(expected)
  of_targets = {"precision": 0.5, "recall": 0.8, "f1": 8 / 13, "accuracy": 0.875}
  assert metrics.boundary_scores(SUMS | TARGETS) == pytest.approx(expected | of_targets)
  # Of 8 tokens that begin a segment 1.5 nats each, of all 0.75.
  assert metrics.boundary_scores(SUMS | {"start_nats": 12.0})["enrichment"] == 2.0
  assert metrics.boundary_scores({"nats": 30.0, "count": 40.0}) == {}
  none = SUMS | TARGETS | dict(boundaries=0.0, targets=0.0, hits=0.0, segments=0.0)
  scores = metrics.boundary_scores(none)
  assert scores["p_ones"] == 0 and scores["shortening_factor"] == math.inf
  assert all(math.isnan(scores[name]) for name in ("precision", "recall", "f1"))
  written = metrics.for_json(scores)
  not_finite = {name for name, value in written.items() if value is None}
  assert not_finite == {"shortening_factor", "precision", "recall", "f1"}
  assert written["accuracy"] == 0.875 and written.keys() == scores.keys()


def test_sums_add_up_over_batches_in_float64():
  first = {"nats": np.float32(2**24), "segments_max": np.float32(5)}
  second = {"nats": np.float32(1), "segments_max": np.float32(3)}
  sums = metrics.add(metrics.add({}, first), second)
  # In float32 the 1 would be lost.
  assert sums == {"nats": 2**24 + 1, "segments_max": 5}
  assert all(type(value) is float for value in sums.values())
  assert metrics.add({}, {"debt_max": -2.0}) == {"debt_max": -2.0}
  assert metrics.add(sums, None) == sums and metrics.add(sums, None) is not sums
