"""Windows of documents, place by place: what each input, target and start is."""

import numpy as np
import pytest

from dpjax.data.batches import (
  ContiguousRows,
  DocumentStarts,
  RandomWindows,
  ShuffledWindows,
)
from dpjax.data.evaluation_batches import EvaluationDocuments, EvaluationWindows
from dpjax.errors import UserError

START, PAD, FIRST = 5, 3, 20
LENGTH = 83
STREAM = np.arange(FIRST, FIRST + LENGTH, dtype=np.uint16)  # a token tells its place
# Documents of one token, of two, and longer than a window.
BEGINS = np.array([0, 1, 2, 4, 30, 31, 37, 40, 60, 61, 82])
BOUNDARIES = np.array([0, 1, 1], np.uint8)[np.arange(LENGTH) % 3]
WINDOW, ROWS = 11, 3


def make(kind, documents=None, **options):
  options["boundaries"] = BOUNDARIES
  if kind is not ContiguousRows:
    options["seed"] = 7
  if kind is not RandomWindows:
    options["pad_id"] = PAD
  return kind(STREAM, ROWS, WINDOW, documents=documents, **options)


@pytest.mark.parametrize("kind", [ContiguousRows, RandomWindows, ShuffledWindows])
@pytest.mark.parametrize("begins", [BEGINS, [0], np.arange(LENGTH)], ids=["some", "one", "all"])
def test_windows_of_training(kind, begins):
  starts = DocumentStarts(np.array(begins), START, start_boundary=2)
  joined, isolated = make(kind), make(kind, starts)
  seen = set()
  assert joined.steps_per_epoch == isolated.steps_per_epoch
  for step in range(2 * joined.steps_per_epoch + 1):
    before, batch = joined.batch(step), isolated.batch(step)
    assert [*batch] == [*before, "is_start"] and batch["is_start"].dtype == np.int32
    # What is predicted, and what counts, is the same.
    np.testing.assert_array_equal(batch["targets"], before["targets"])
    np.testing.assert_array_equal(batch["weights"], before["weights"])
    for b, row in enumerate(batch["targets"]):
      for t, target in enumerate(row):
        place = int(target) - FIRST
        at_seam = kind is ShuffledWindows and place % (LENGTH // ROWS) == 0
        is_first = target > 0 and (place in begins or at_seam)
        assert batch["is_start"][b, t] == (is_first or t == 0)
        assert batch["tokens"][b, t] == (START if is_first else before["tokens"][b, t])
        assert batch["boundaries"][b, t] == (2 if is_first else before["boundaries"][b, t])
        if is_first:
          seen.add(place)
        elif target and t:  # the same document's token before
          assert batch["tokens"][b, t] == target - 1
  if kind is RandomWindows:
    assert seen == {*begins} - {0}


def test_without_documents_there_are_no_starts():
  for kind in (ContiguousRows, RandomWindows, ShuffledWindows):
    assert "is_start" not in make(kind).batch(1)


def test_hosts_take_their_own_rows():
  for kind in (ContiguousRows, RandomWindows, ShuffledWindows):
    batches = make(kind, DocumentStarts(BEGINS, START))
    whole, part = batches.batch(2), batches.batch(2, slice(1, 3))
    for name, rows in part.items():
      np.testing.assert_array_equal(rows, whole[name][1:3])


def alone(window, stride):
  """The windows of each document by itself, as (tokens, targets, weights, boundaries)."""
  found = []
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
      found.append([batch[name][real].tolist() for name in names])
  return found


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
  expected, found, free = alone(window, stride), [], 0
  for index in range(len(batches)):
    batch = batches.batch(index)
    assert batch["tokens"].shape == (batch_size, window)
    assert (batch["is_start"][:, 0] == 1).all()
    part = batches.batch(index, slice(1, batch_size))
    for b in range(batch_size):
      row = {name: rows[b] for name, rows in batch.items()}
      if b:
        assert all((part[name][b - 1] == values).all() for name, values in row.items())
      real = row["targets"] > 0
      size = int(real.sum())
      assert real[:size].all()  # what is filled up lies behind
      assert (row["tokens"][size:] == PAD).all() and not row["weights"][size:].any()
      assert not row["is_start"][max(1, size) :].any()
      begins = np.flatnonzero(row["is_start"][:size])
      if not size:
        continue
      # The first window of this row had no room in the row before.
      assert not found or np.append(begins, size)[1] > free
      free = window - size
      names = ("tokens", "targets", "weights", "boundaries")
      found += [
        [row[name][begin:end].tolist() for name in names]
        for begin, end in zip(begins, [*begins[1:], size], strict=True)
      ]
  assert found == expected
  counted = [np.array(targets)[np.array(weights) > 0] for _, targets, weights, _ in found]
  assert np.concatenate(counted).tolist() == STREAM.tolist()


def test_rows_are_fewer_than_documents():
  begins = np.arange(0, LENGTH, 2)
  batches = EvaluationDocuments(STREAM, 12, 12, 1, DocumentStarts(begins, START))
  assert len(batches) == 7  # of 12 places, where each of 42 documents by itself takes one


@pytest.mark.parametrize(
  "begins", [[], [1, 5], [0, 5, 5], [0, 7, 5], [0, LENGTH], [[0, 1]]], ids=str
)
@pytest.mark.parametrize("kind", ["train", "random", "evaluation"])
def test_wrong_places_are_refused(kind, begins):
  starts = DocumentStarts(np.array(begins, np.int64), START)
  with pytest.raises(UserError, match="^documents: expected places that rise from 0 to at most 82"):
    if kind == "evaluation":
      EvaluationDocuments(STREAM, 11, 4, 2, starts)
    else:
      make(ContiguousRows if kind == "train" else RandomWindows, starts)


def test_a_stride_beyond_the_window_is_refused():
  with pytest.raises(UserError, match="^eval.stride: expected 1 .. 11"):
    EvaluationDocuments(STREAM, 11, 12, 2, DocumentStarts(BEGINS, START))
