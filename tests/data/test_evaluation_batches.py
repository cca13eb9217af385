"""Evaluation: every token counts once, in the authors' windows; documents as if alone."""

import json
import pathlib

import numpy as np
import pytest

from dpjax.data.batches import DocumentStarts, EvaluationDocuments, EvaluationWindows

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "I_eval_windows.json"


@pytest.mark.parametrize("case", [0, 1])
def test_windows_are_the_authors(case):
  golden = json.loads(GOLDEN.read_text())["cases"][case]
  stream = np.random.default_rng(7).integers(1, 97, golden["stream_len"])
  window, stride = golden["tgt_len"] + golden["ext_len"], golden["tgt_len"]
  closes = (stream % 3 == 0).astype(np.uint8)
  # Their stream's first token is no target; here it is what stands before the stream.
  batches = EvaluationWindows(
    stream[1:],
    window,
    stride,
    1,
    start_id=int(stream[0]),
    boundaries=closes[1:],
    start_boundary=int(closes[0]),
  )
  assert len(batches) == len(golden["windows"])
  for index, expected in enumerate(golden["windows"]):
    batch = {name: array[0] for name, array in batches.batch(index).items()}
    data = stream[expected["data_begin"] : expected["data_end"]]
    targets = stream[expected["target_begin"] : expected["target_end"]]
    scored = np.flatnonzero(batch["weights"])
    np.testing.assert_array_equal(batch["tokens"][: len(data)], data)
    np.testing.assert_array_equal(batch["boundaries"][: len(data)], data % 3 == 0)
    np.testing.assert_array_equal(batch["targets"][scored], targets)
    # The last of the window's real tokens, in one piece, are scored.
    np.testing.assert_array_equal(scored, np.arange(len(data) - len(targets), len(data)))


@pytest.mark.parametrize("window, stride", [(7, 7), (7, 3), (7, 1), (11, 5), (61, 13)])
@pytest.mark.parametrize("num_tokens", [1, 5, 53])
def test_every_token_counts_once(window, stride, num_tokens):
  tokens = np.arange(10, 10 + num_tokens, dtype=np.uint16)
  batches = EvaluationWindows(tokens, window, stride, batch_size=3, start_id=9)
  counted = []
  for index in range(len(batches)):
    batch = batches.batch(index)
    for row in range(3):
      real = batch["targets"][row] > 0
      np.testing.assert_array_equal(batch["tokens"][row] > 0, real)
      np.testing.assert_array_equal(batch["tokens"][row, real], batch["targets"][row, real] - 1)
      weights = batch["weights"][row]
      assert not weights[~real].any()
      counted += batch["targets"][row, weights == 1].tolist()
      first = int(np.sum(real) - weights.sum())  # context: what fits, or all there is
      if real.any() and real.all():
        assert first == window - weights.sum()
      elif real.any() and batch["tokens"][row, 0] != 9:
        assert counted[-1] == tokens[-1]
  assert counted == tokens.tolist()


@pytest.mark.parametrize("size", [6, 4])
def test_a_part_of_the_windows_is_drawn_once_and_counts_its_tokens(size):
  tokens = np.arange(3, 74)
  settings = dict(boundaries=np.arange(71) % 2)
  whole, part, again = (
    EvaluationWindows(tokens, 5, 3, batch_size=size, start_id=2, max_tokens=most, **settings)
    for most in (0, 20, 20)
  )
  assert len(part) == -(-7 // size) and whole.share == 1

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


def test_more_tokens_than_there_are_is_all():
  for most in (70, 71, 99):
    windows = EvaluationWindows(np.arange(71), 5, 3, 6, start_id=2, max_tokens=most)
    assert windows.share == 1 and len(windows) == 4


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
    windows = EvaluationWindows(
      STREAM[begin:end],
      window,
      stride,
      1,
      START,
      boundaries=BOUNDARIES[begin:end],
      start_boundary=1,
    )
    for index in range(len(windows)):
      batch = {name: rows[0] for name, rows in windows.batch(index).items()}
      real = batch["targets"] > 0
      names = ("tokens", "targets", "weights", "boundaries")
      result.append([batch[name][real].tolist() for name in names])
  return result


@pytest.mark.parametrize("window, stride", [(11, 11), (11, 4), (11, 1), (5, 5), (1, 1), (97, 31)])
@pytest.mark.parametrize("batch_size", [2, 7])
def test_windows_of_evaluation_are_those_of_each_alone(window, stride, batch_size):
  batches = EvaluationDocuments(
    STREAM,
    window,
    stride,
    batch_size,
    DocumentStarts(BEGINS, START, start_boundary=1),
    boundaries=BOUNDARIES,
    pad_id=PAD,
  )
  expected, result, free = alone(window, stride), [], 0
  for index in range(len(batches)):
    batch = batches.batch(index)
    assert batch["tokens"].shape == (batch_size, window)
    assert (batch["document_starts"][:, 0] == 1).all()
    part = batches.batch(index, slice(1, batch_size))
    for b in range(batch_size):
      row = {name: rows[b] for name, rows in batch.items()}
      if b:
        assert all((part[name][b - 1] == values).all() for name, values in row.items())
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


def test_rows_are_fewer_than_documents():
  begins = np.arange(0, LENGTH, 2)
  batches = EvaluationDocuments(STREAM, 12, 12, 1, DocumentStarts(begins, START))
  assert len(batches) == 7  # of 12 places, where each of 42 documents by itself takes one
