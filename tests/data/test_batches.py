import json
import pathlib

import numpy as np
import pytest

from dpjax.data.batches import (
  ContiguousRows,
  RandomWindows,
  ShuffledWindows,
)
from dpjax.data.evaluation_batches import EvaluationWindows

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "I_eval_windows.json"
DTYPES = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "boundaries": np.int32}


def check(batch, shape):
  assert list(batch) == list(DTYPES)[: len(batch)] and len(batch) >= 3
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
    assert found[row] == tokens[row * length : (row + 1) * length][1:].tolist()


def test_epochs_repeat():
  batches = ContiguousRows(np.arange(61), batch_size=3, window=7)
  assert batches.steps_per_epoch == 3
  for step in range(3):
    for epoch in (1, 13):
      np.testing.assert_equal(batches.batch(step + 3 * epoch), batches.batch(step))


@pytest.mark.parametrize(
  "num_tokens, window, batch_size",
  # Windows that fill the last batch of an epoch, that do not, and one alone.
  [(47, 7, 5), (50, 7, 6), (8, 7, 3), (13, 4, 20)],
)
def test_an_epoch_has_the_window_of_every_offset_once(num_tokens, window, batch_size):
  tokens = np.arange(3, num_tokens + 3, dtype=np.uint16)
  batches = RandomWindows(tokens, batch_size, window, seed=5)
  num_windows = num_tokens - window
  assert batches.steps_per_epoch == -(-num_windows // batch_size)
  offsets = []
  for step in range(-(-3 * num_windows // batch_size)):
    batch = batches.batch(step)
    check(batch, (batch_size, window))
    assert np.all(batch["weights"] == 1)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(np.diff(batch["tokens"], axis=1), 1)
    offsets += (batch["tokens"][:, 0] - 3).tolist()
  epochs = [offsets[i * num_windows :][:num_windows] for i in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(num_windows))
  if num_windows > 10:
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def offsets_of(num_windows, seed, steps, batch_size=16):
  batches = RandomWindows(np.arange(num_windows + 2), batch_size, 2, seed)
  return np.concatenate([batches.batch(step)["tokens"][:, 0] for step in steps])


def test_the_order_of_windows_is_of_its_seed_and_looks_random():
  first, second = (offsets_of(4096, seed, range(256)) for seed in (7, 8))
  np.testing.assert_array_equal(first, offsets_of(4096, 7, range(256)))
  assert np.mean(first == second) < 0.005
  for order in (first, second):
    # Of 4096 numbers, correlations have a deviation of 1/64.
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 5 / 64
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / 64
    # Neighbours stay neighbours about twice by chance.
    assert np.sum(np.abs(np.diff(order)) == 1) < 15


def test_every_order_of_four_windows_comes_up():
  orders = [tuple(offsets_of(4, seed, [0], batch_size=4)) for seed in range(600)]
  counts = [orders.count(order) for order in set(orders)]
  # 25 each, with a deviation of 5.
  assert len(counts) == 24 and min(counts) > 5 and max(counts) < 50


def test_a_large_corpus_costs_no_memory_and_a_seed_of_32_bits_will_do():
  tokens = np.broadcast_to(np.uint16(3), 10**10)
  batch = RandomWindows(tokens, 5, 7, seed=2**32 - 1).batch(10**9)
  check(batch, (5, 7))


@pytest.mark.parametrize("num_tokens", [2, 7])
def test_too_few_tokens_for_a_window(num_tokens):
  with pytest.raises(ValueError, match=f"at most {num_tokens - 1} .* got 7"):
    RandomWindows(np.arange(num_tokens), 2, window=7, seed=0)


def test_shuffled_by_example():
  tokens = np.arange(11, dtype=np.uint16)
  batches = ShuffledWindows(tokens, batch_size=2, window=2, seed=0)
  assert (batches.batch_size, batches.window, batches.steps_per_epoch) == (2, 2, 2)
  # The epoch whose shifts and order are those of the docstring.
  for epoch in range(400):
    first, second = batches.batch(2 * epoch), batches.batch(2 * epoch + 1)
    if first["tokens"].tolist() == [[0, 1], [7, 8]]:
      break
  assert first["targets"].tolist() == [[1, 2], [8, 9]]
  assert second["tokens"].tolist() == [[3, 4], [5, 6]]
  assert second["targets"].tolist() == [[4, 0], [6, 7]]
  assert first["weights"].tolist() == second["weights"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("num_tokens, window", [(107, 7), (106, 20), (107, 3)])
def test_a_shuffled_epoch_is_each_row_rolled(num_tokens, window):
  batches = ShuffledWindows(np.arange(1, num_tokens + 1), 5, window, seed=3)
  count, length = batches.steps_per_epoch, num_tokens // 5
  begin_b1 = 1 + length * np.arange(5)[:, None]
  assert count == -(-(length - 1) // window)
  for epoch in range(3):
    found = [batches.batch(epoch * count + i) for i in range(count)]
    seen = np.concatenate([batch["tokens"][:, batch["weights"][0] == 1] for batch in found], axis=1)
    # The token that is no input is the last one of the rolled row.
    shift_b1 = (seen.sum(axis=1) - np.sum(begin_b1 + np.arange(length), axis=1))[:, None]
    shift_b1 = (1 - shift_b1 - begin_b1) % length
    rolled_bn = begin_b1 + (np.arange(length) + shift_b1) % length
    assert len(np.unique(shift_b1)) > 1
    places = []
    for batch in found:
      check(batch, (5, window))
      (place,) = set(np.nonzero(rolled_bn == batch["tokens"][:, :1])[1].tolist())
      places.append(place)
      real = min(window, length - 1 - place)
      expected = rolled_bn[:, place : place + real + 1]
      np.testing.assert_array_equal(batch["tokens"][:, :real], expected[:, :-1])
      np.testing.assert_array_equal(batch["targets"][:, :real], expected[:, 1:])
      np.testing.assert_array_equal(batch["weights"], np.tile(np.arange(window) < real, (5, 1)))
      assert not batch["tokens"][:, real:].any() and not batch["targets"][:, real:].any()
    assert sorted(places) == list(range(0, length - 1, window))


def orders_and_shifts(seed, num_epochs):
  """Of 4 windows of 7 tokens in a row of 29: their order, and where the row begins."""
  batches = ShuffledWindows(np.arange(29), 1, 7, seed)
  orders, shifts = [], []
  for epoch in range(num_epochs):
    found = [batches.batch(4 * epoch + i)["tokens"] for i in range(4)]
    begin = (29 * 14 - sum(tokens.sum() for tokens in found) + 1) % 29
    orders.append(tuple(int(tokens[0, 0] - begin) % 29 // 7 for tokens in found))
    shifts.append(int(begin))
  return orders, shifts


def test_shifts_and_orders_are_of_the_seed_and_the_epoch():
  orders, shifts = orders_and_shifts(5, 240)
  first = orders[:7], shifts[:7]
  assert orders_and_shifts(5, 7) == first
  other = orders_and_shifts(6, 7)
  assert other[0] != first[0] and other[1] != first[1]
  counts = [orders.count(order) for order in set(orders)]
  # Of 24 orders 10 each, with a deviation of 3; of 29 shifts 8 each.
  assert len(counts) == 24 and max(counts) < 25
  counts = np.bincount(shifts, minlength=29)
  assert len(counts) == 29 and counts.min() >= 1 and counts.max() < 22


def make(kind, tokens, **settings):
  if kind == "random":
    return RandomWindows(tokens, batch_size=6, window=5, seed=11, **settings)
  if kind == "rows":
    return ContiguousRows(tokens, batch_size=6, window=5, **settings)
  if kind == "shuffled":
    return ShuffledWindows(tokens, batch_size=6, window=5, seed=11, **settings)
  return EvaluationWindows(tokens, 5, 3, batch_size=6, start_id=2, **settings)


KINDS = ["rows", "random", "shuffled", "windows"]


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_those_of_the_inputs(kind):
  # Tokens from 3 up, so that each tells its place; 2 stands before them.
  boundaries = np.random.default_rng(1).integers(0, 2, 71).astype(np.uint8)
  by_token = np.concatenate([[0, 0, 0], boundaries])
  batches = make(kind, np.arange(3, 74), boundaries=boundaries)
  plain = make(kind, np.arange(3, 74))
  for index in range(4):
    batch = batches.batch(index)
    check(batch, (6, 5))
    np.testing.assert_array_equal(batch["boundaries"], by_token[batch["tokens"]])
    found = batch.pop("boundaries")
    assert 0 < found.mean() < 1 and (found[batch["tokens"] == 0] == 0).all()
    np.testing.assert_equal(batch, plain.batch(index))


def test_boundary_before_the_text():
  settings = dict(boundaries=np.array([1, 0, 1, 1, 1], np.uint8))
  for start in (0, 1):
    batches = EvaluationWindows(
      np.arange(1, 6), 3, 2, batch_size=2, start_id=7, start_boundary=start, **settings
    )
    assert batches.batch(0)["boundaries"].tolist() == [[start, 1, 0], [1, 0, 1]]
    assert batches.batch(1)["boundaries"].tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_boundaries_as_tokens(kind):
  with pytest.raises(
    ValueError, match="boundaries: expected one for each of the 71 tokens, got 70"
  ):
    make(kind, np.arange(71), boundaries=np.zeros(70, np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_take_their_own_rows(kind):
  batches = make(kind, np.arange(71), boundaries=np.arange(71) % 3 // 2)
  for index in range(3):
    whole = batches.batch(index)
    for rows in (slice(0, 2), slice(2, 6), slice(5, 6)):
      part = batches.batch(index, rows)
      check(part, (rows.stop - rows.start, 5))
      np.testing.assert_equal(part, {name: whole[name][rows] for name in whole})


@pytest.mark.parametrize("kind", KINDS)
def test_mapped_tokens_give_plain_arrays(tmp_path, kind):
  tokens = np.arange(71, dtype=np.uint16)
  boundaries = (tokens % 3 // 2).astype(np.uint8)
  tokens.tofile(tmp_path / "tokens.bin")
  boundaries.tofile(tmp_path / "boundaries.bin")
  mapped = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
  mapped_too = np.memmap(tmp_path / "boundaries.bin", np.uint8, "r")
  batch = make(kind, mapped, boundaries=mapped_too).batch(1)
  np.testing.assert_equal(batch, make(kind, tokens, boundaries=boundaries).batch(1))
  assert all(type(array) is np.ndarray for array in batch.values())


def test_window_longer_than_the_rows():
  ContiguousRows(np.arange(24), batch_size=3, window=7)
  with pytest.raises(ValueError, match=r"train.window: expected at most 7 \(24 tokens"):
    ContiguousRows(np.arange(24), batch_size=3, window=8)
  with pytest.raises(ValueError, match="train.window: expected at most 0 "):
    ContiguousRows(np.arange(2), batch_size=3, window=8)
  ShuffledWindows(np.arange(24), batch_size=3, window=7, seed=0)
  with pytest.raises(ValueError, match=r"train.window: expected at most 7 \(24 tokens"):
    ShuffledWindows(np.arange(24), batch_size=3, window=8, seed=0)


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
    check(batch, (3, window))
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


def test_what_fills_up_a_window():
  """A window that is not full needs no more segments: its places may be no space."""
  tokens = np.arange(1, 12, dtype=np.uint16)
  for kind in (ContiguousRows, ShuffledWindows):
    seed = () if kind is ContiguousRows else (5,)
    made = kind(tokens, 2, 3, *seed, pad_id=77)
    for step in range(made.steps_per_epoch):
      batch = made.batch(step)
      np.testing.assert_array_equal(batch["tokens"] == 77, batch["weights"] == 0)
      assert not batch["targets"][batch["weights"] == 0].any()
  windows = EvaluationWindows(tokens, 4, 3, 3, 0, pad_id=77)
  whole = [windows.batch(index)["tokens"] for index in range(len(windows))]
  expected = EvaluationWindows(tokens, 4, 3, 3, 99)
  for index, tokens_bt in enumerate(whole):
    # Nothing else in the text is 0.
    np.testing.assert_array_equal(tokens_bt == 77, expected.batch(index)["tokens"] == 0)
  assert sum((tokens_bt == 77).sum() for tokens_bt in whole) > 4


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
    found = [windows.batch(index) for index in range(len(windows))]
    return {name: np.concatenate([x[name] for x in found]) for name in found[0]}

  known, found = rows(whole), rows(part)
  np.testing.assert_equal(found, rows(again))
  is_real = found["weights"].any(axis=1)
  assert is_real.sum() == 7 and is_real[:7].all()
  chosen = [np.flatnonzero((known["targets"] == x).all(axis=1)) for x in found["targets"][:7]]
  chosen = np.concatenate(chosen)
  assert len(chosen) == 7 and (np.diff(chosen) > 0).all() and np.ptp(chosen) > 12
  for name, array in found.items():
    np.testing.assert_array_equal(array[:7], known[name][chosen])
  assert part.share * 71 == pytest.approx(found["weights"].sum())


def test_more_tokens_than_there_are_is_all():
  for most in (70, 71, 99):
    windows = EvaluationWindows(np.arange(71), 5, 3, 6, start_id=2, max_tokens=most)
    assert windows.share == 1 and len(windows) == 4
