"""Evaluation: every token counts once, in the authors' windows; documents as if alone."""

import json

import numpy as np
import pytest

from dpjax.data.batches import DocumentStarts, EvaluationDocuments, EvaluationWindows, TokenStream
from tests import helpers

GOLDEN = helpers.ROOT / "tests/golden/I_eval_windows.json"


@pytest.mark.parametrize("golden", json.loads(GOLDEN.read_text())["cases"])
def test_windows_are_the_authors(golden):
  stream = np.random.default_rng(7).integers(1, 97, golden["stream_len"])
  window, stride = golden["tgt_len"] + golden["ext_len"], golden["tgt_len"]
  closes = (stream % 3 == 0).astype(np.uint8)
  # Their stream's first token is no target; here it is what stands before the stream.
  start = DocumentStarts.of_one(int(stream[0]), int(closes[0]))
  batches = EvaluationWindows(TokenStream(stream[1:], closes[1:], start), window, stride, 3)
  assert len(batches) == -(-len(golden["windows"]) // 3)
  each = [batches.batch(index) for index in range(len(batches))]
  windows = [{name: x[name][b] for name in x} for x in each for b in range(3)]
  assert not any(x["weights"].any() for x in windows[len(golden["windows"]) :])
  for batch, expected in zip(windows, golden["windows"], strict=False):
    data = stream[expected["data_begin"] : expected["data_end"]]
    targets = stream[expected["target_begin"] : expected["target_end"]]
    scored = np.flatnonzero(batch["weights"])
    np.testing.assert_array_equal(batch["tokens"][: len(data)], data)
    np.testing.assert_array_equal(batch["boundaries"][: len(data)], data % 3 == 0)
    np.testing.assert_array_equal(batch["targets"][scored], targets)
    # The last of the window's real tokens, in one piece, are scored.
    np.testing.assert_array_equal(scored, np.arange(len(data) - len(targets), len(data)))


def test_a_part_of_the_windows_is_drawn_once_and_counts_its_tokens():
  tokens, boundaries = np.arange(3, 74), np.arange(71) % 2
  whole, part, again, *others = (
    EvaluationWindows(TokenStream(tokens, boundaries, DocumentStarts.of_one(2)), 5, 3, 6, most)
    for most in (0, 20, 20, 70, 71, 99)
  )
  assert len(part) == 2 and whole.share == 1
  assert all(other.share == 1 and len(other) == 4 for other in others)  # That is all.

  def rows(windows):
    result = [windows.batch(index) for index in range(len(windows))]
    return {name: np.concatenate([x[name] for x in result]) for name in result[0]}

  reference, result = rows(whole), rows(part)
  np.testing.assert_equal(result, rows(again))
  is_real = result["weights"].any(axis=1)
  assert is_real.sum() == 7 and is_real[:7].all()
  chosen = [np.flatnonzero((reference["targets"] == x).all(axis=1)) for x in result["targets"][:7]]
  chosen = np.concatenate(chosen)
  assert len(chosen) == 7 and (np.diff(chosen) > 0).all() and np.ptp(chosen) > 12
  for name, array in result.items():
    np.testing.assert_array_equal(array[:7], reference[name][chosen])
  assert part.share * 71 == pytest.approx(result["weights"].sum())


START, PAD, FIRST = 5, 3, 20
LENGTH = 83
STREAM = np.arange(FIRST, FIRST + LENGTH, dtype=np.uint16)  # a token tells its place
# Documents of one token, of two, and longer than a window.
BEGINS = np.array([0, 1, 2, 4, 30, 31, 37, 40, 60, 61, 82])
BOUNDARIES = np.array([0, 1, 1], np.uint8)[np.arange(LENGTH) % 3]


def alone(window, stride):
  """The windows of each document by itself, as (tokens, targets, weights, boundaries)."""
  result = []
  for begin, end in zip(BEGINS, [*BEGINS[1:], LENGTH], strict=True):
    start = DocumentStarts.of_one(START, 1)
    stream = TokenStream(STREAM[begin:end], BOUNDARIES[begin:end], start)
    windows = EvaluationWindows(stream, window, stride, 1)
    for index in range(len(windows)):
      batch = {name: rows[0] for name, rows in windows.batch(index).items()}
      real = batch["targets"] > 0
      names = ("tokens", "targets", "weights", "boundaries")
      result.append([batch[name][real].tolist() for name in names])
  return result


@pytest.mark.parametrize(
  "window, stride, batch_size", [(11, 4, 2), (5, 5, 7), (1, 1, 2), (97, 31, 7)]
)
def test_windows_of_evaluation_are_those_of_each_alone(window, stride, batch_size):
  stream = TokenStream(STREAM, BOUNDARIES, DocumentStarts(BEGINS, START, 1), PAD)
  batches = EvaluationDocuments(stream, window, stride, batch_size)
  expected, result, free = alone(window, stride), [], 0
  for index in range(len(batches)):
    batch = batches.batch(index)
    assert batch["tokens"].shape == (batch_size, window)
    assert (batch["document_starts"][:, 0] == 1).all()
    for b in range(batch_size):
      row = {name: rows[b] for name, rows in batch.items()}
      real = row["targets"] > 0
      size = int(real.sum())
      assert real[:size].all()  # what is filled up lies behind
      assert (row["tokens"][size:] == PAD).all() and not row["weights"][size:].any()
      assert not row["document_starts"][max(1, size) :].any()
      begins = np.flatnonzero(row["document_starts"][:size])
      if not size:
        continue
      # The first window of this row had no room in the row before.
      assert not result or np.append(begins, size)[1] > free
      free = window - size
      names = ("tokens", "targets", "weights", "boundaries")
      result += [
        [row[name][begin:end].tolist() for name in names]
        for begin, end in zip(begins, [*begins[1:], size], strict=True)
      ]
  assert result == expected
  counted = [np.array(targets)[np.array(weights) > 0] for _, targets, weights, _ in result]
  assert np.concatenate(counted).tolist() == STREAM.tolist()
