import math

import pytest

from dpjax.training import metrics


def test_text_scores_by_hand():
  # "no no\nyes\n": 5 tokens; "no", "no", "yes" and two line ends; 10 characters, of which
  # one stands here for two bytes.
  counts = {"tokens": 5, "words": 4, "characters": 10, "bytes": 11}
  scores = metrics.text_scores(20 * math.log(2), counts)
  assert scores == pytest.approx(
    {
      "nats_per_token": 4 * math.log(2),
      "perplexity": 16.0,
      "perplexity_per_word": 32.0,
      "bits_per_character": 2.0,
      "bits_per_byte": 20 / 11,
    }
  )


def test_a_uniform_guess_among_n_has_perplexity_n():
  counts = {"tokens": 13, "words": 13, "characters": 13, "bytes": 13}
  scores = metrics.text_scores(13 * math.log(27), counts)
  assert scores["perplexity"] == pytest.approx(27)
  assert scores["bits_per_character"] == pytest.approx(math.log2(27))


def test_a_perplexity_beyond_floats_is_infinite():
  counts = {"tokens": 1, "words": 2, "characters": 3, "bytes": 3}
  scores = metrics.text_scores(1000.0, counts)
  assert scores["perplexity"] == math.inf
  assert scores["perplexity_per_word"] == pytest.approx(math.exp(500))
  assert metrics.text_scores(math.nan, counts)["perplexity"] != scores["perplexity"]
