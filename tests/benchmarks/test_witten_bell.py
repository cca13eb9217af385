"""The counting model against its formula, character by character."""

import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks import witten_bell
from dpjax.data.corpora import load_corpus
from dpjax.data.prepared import prepare

VOCAB, START = 7, 3
DRAW = np.random.default_rng(11)
TRAIN = DRAW.choice(VOCAB - 1, size=89, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
# With the character that the train split lacks, and contexts that it lacks.
TEXT = DRAW.integers(VOCAB, size=41)


def by_hand(train, context, character, order):
  """p(character | context), from dictionaries."""
  if order < 0:
    return 1 / VOCAB
  history = tuple(context[len(context) - order :])
  followers = Counter()
  padded = [START, *train]
  for place in range(1, len(padded)):
    if place >= order and tuple(padded[place - order : place]) == history:
      followers[padded[place]] += 1
  shorter = by_hand(train, context, character, order - 1)
  if not followers:
    return shorter
  types = len(followers)
  return (followers[character] + types * shorter) / (followers.total() + types)


def scored(text, order):
  return witten_bell.probabilities(
    TRAIN, np.asarray(text), vocab_size=VOCAB, order=order, start_id=START
  )


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_is_the_formula(order):
  padded = [START, *TEXT.tolist()]
  expected = [
    by_hand(TRAIN.tolist(), padded[:place], padded[place], min(order, place))
    for place in range(1, len(padded))
  ]
  np.testing.assert_allclose(scored(TEXT, order), expected, rtol=1e-12)


@pytest.mark.parametrize("context", [[], [2], [0, 5], [6, 6, 4]])
def test_probabilities_sum_to_one(context, order=2):
  last = [scored([*context, character], order)[-1] for character in range(VOCAB)]
  assert sum(last) == pytest.approx(1.0, abs=1e-12) and min(last) > 0


def test_prints_bits_of_a_runs_split(text, tmp_path, monkeypatch, capsys):
  data = prepare(load_corpus(path=text), tmp_path / "data", "characters")
  monkeypatch.setattr(sys, "argv", ["", f"--workdir={tmp_path}", "--split=valid"])
  witten_bell.main()
  head, *lines = capsys.readouterr().out.splitlines()
  assert head == f"text, valid split of {data.counts['valid']['characters']:,} characters:"
  bits = [float(line.split(": ")[1].split()[0]) for line in lines]
  # Words of few letters: each character of context helps.
  assert np.log2(data.tokenizer.vocab_size) > bits[0] > bits[1] > bits[2] > 0


def test_bad_input_is_refused(text, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["", f"--workdir={tmp_path}"])
  with pytest.raises(SystemExit, match="data.json: expected"):
    witten_bell.main()
  prepare(load_corpus(path=text), tmp_path / "data", "bytes")
  with pytest.raises(SystemExit, match="data.tokenizer: expected characters, got bytes"):
    witten_bell.main()
