import json
import pathlib

import numpy as np
import pytest

from dpjax.data.batches import ContiguousRows, EvaluationWindows

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "I_eval_windows.json"
DTYPES = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}


def check(batch, shape):
  assert list(batch) == list(DTYPES)
  for name, array in batch.items():
    assert array.shape == shape and array.dtype == DTYPES[name]


def test_rows_by_example():
  batches = ContiguousRows(np.arange(11, dtype=np.uint16), batch_size=2, window=3)
  first, second = batches.batch(0), batches.batch(1)
  assert batches.steps_per_epoch == 2
  assert first["tokens"].tolist() == [[0, 1, 2], [5, 6, 7]]
  assert first["targets"].tolist() == [[1, 2, 3], [6, 7, 8]]
  assert first["weights"].tolist() == [[1, 1, 1], [1, 1, 1]]
  assert second["tokens"].tolist() == [[3, 0, 0], [8, 0, 0]]
  assert second["targets"].tolist() == [[4, 0, 0], [9, 0, 0]]
  assert second["weights"].tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("num_tokens, window", [(107, 7), (103, 5), (106, 20), (107, 3)])
def test_an_epoch_has_every_target_once(num_tokens, window):
  tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
  batches = ContiguousRows(tokens, batch_size=5, window=window)
  length = num_tokens // 5
  found = [[] for _ in range(5)]
  for step in range(batches.steps_per_epoch):
    batch = batches.batch(step)
    check(batch, (5, window))
    real = batch["weights"] == 1
    assert np.all(batch["weights"][~real] == 0)
    np.testing.assert_array_equal((batch["targets"] - batch["tokens"])[real], 1)
    for row in range(5):
      found[row] += batch["targets"][row, real[row]].tolist()
  for row in range(5):
    assert found[row] == tokens[row * length:(row + 1) * length][1:].tolist()


def test_epochs_repeat():
  batches = ContiguousRows(np.arange(61), batch_size=3, window=7)
  assert batches.steps_per_epoch == 3
  for step in range(3):
    for epoch in (1, 13):
      np.testing.assert_equal(batches.batch(step + 3 * epoch), batches.batch(step))


def make(kind, tokens):
  if kind == "rows":
    return ContiguousRows(tokens, batch_size=6, window=5)
  return EvaluationWindows(tokens, 5, 3, batch_size=6, start_id=2)


@pytest.mark.parametrize("kind", ["rows", "windows"])
def test_hosts_take_their_own_rows(kind):
  batches = make(kind, np.arange(71))
  for index in range(3):
    whole = batches.batch(index)
    for rows in (slice(0, 2), slice(2, 6), slice(5, 6)):
      part = batches.batch(index, rows)
      check(part, (rows.stop - rows.start, 5))
      np.testing.assert_equal(part, {name: whole[name][rows] for name in whole})


@pytest.mark.parametrize("kind", ["rows", "windows"])
def test_mapped_tokens_give_plain_arrays(tmp_path, kind):
  tokens = np.arange(71, dtype=np.uint16)
  tokens.tofile(tmp_path / "tokens.bin")
  mapped = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
  batch = make(kind, mapped).batch(1)
  np.testing.assert_equal(batch, make(kind, tokens).batch(1))
  assert all(type(array) is np.ndarray for array in batch.values())


def test_window_longer_than_the_rows():
  ContiguousRows(np.arange(24), batch_size=3, window=7)
  with pytest.raises(ValueError, match=r"train.window: expected at most 7 \(24 tokens"):
    ContiguousRows(np.arange(24), batch_size=3, window=8)
  with pytest.raises(ValueError, match="train.window: expected at most 0 "):
    ContiguousRows(np.arange(2), batch_size=3, window=8)


@pytest.mark.parametrize("case", [0, 1])
def test_windows_are_the_authors(case):
  golden = json.loads(GOLDEN.read_text())["cases"][case]
  stream = np.random.default_rng(7).integers(1, 97, golden["stream_len"])
  window, stride = golden["tgt_len"] + golden["ext_len"], golden["tgt_len"]
  # Their stream's first token is no target; here it is what stands before the stream.
  batches = EvaluationWindows(stream[1:], window, stride, 1, start_id=int(stream[0]))
  assert len(batches) == len(golden["windows"])
  for index, expected in enumerate(golden["windows"]):
    batch = {name: array[0] for name, array in batches.batch(index).items()}
    data = stream[expected["data_begin"]:expected["data_end"]]
    targets = stream[expected["target_begin"]:expected["target_end"]]
    scored = np.flatnonzero(batch["weights"])
    np.testing.assert_array_equal(batch["tokens"][:len(data)], data)
    np.testing.assert_array_equal(batch["targets"][scored], targets)
    # The last of the window's real tokens, in one piece, are scored.
    np.testing.assert_array_equal(
      scored, np.arange(len(data) - len(targets), len(data)))


@pytest.mark.parametrize("window, stride", [(7, 7), (7, 3), (7, 1), (11, 5), (61, 13)])
@pytest.mark.parametrize("num_tokens", [1, 5, 53])
def test_every_token_counts_once(window, stride, num_tokens):
  tokens = np.arange(10, 10 + num_tokens, dtype=np.uint16)
  batches = EvaluationWindows(tokens, window, stride, batch_size=3, start_id=9)
  counted = []
  for index in range(len(batches)):
    batch = batches.batch(index)
    check(batch, (3, window))
    for row in range(3):
      real = batch["targets"][row] > 0
      np.testing.assert_array_equal(batch["tokens"][row] > 0, real)
      np.testing.assert_array_equal(
        batch["tokens"][row, real], batch["targets"][row, real] - 1)
      weights = batch["weights"][row]
      assert not weights[~real].any()
      counted += batch["targets"][row, weights == 1].tolist()
      first = int(np.sum(real) - weights.sum())  # context: what fits, or all there is
      if real.any() and real.all():
        assert first == window - weights.sum()
      elif real.any() and batch["tokens"][row, 0] != 9:
        assert counted[-1] == tokens[-1]
  assert counted == tokens.tolist()


def test_windows_by_example():
  batches = EvaluationWindows(np.arange(1, 6), 3, 2, batch_size=2, start_id=7)
  first, second = batches.batch(0), batches.batch(1)
  assert len(batches) == 2
  assert first["tokens"].tolist() == [[7, 1, 0], [1, 2, 3]]
  assert first["targets"].tolist() == [[1, 2, 0], [2, 3, 4]]
  assert first["weights"].tolist() == [[1, 1, 0], [0, 1, 1]]
  assert second["tokens"].tolist() == [[3, 4, 0], [0, 0, 0]]
  assert second["targets"].tolist() == [[4, 5, 0], [0, 0, 0]]
  assert second["weights"].tolist() == [[0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("stride", [0, -1, 8])
def test_stride_outside_the_window(stride):
  with pytest.raises(ValueError, match=r"eval.stride: expected 1 \.\. 7 .*, got "):
    EvaluationWindows(np.arange(53), 7, stride, batch_size=3, start_id=0)
