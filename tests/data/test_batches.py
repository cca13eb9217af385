"""Batches, place by place: what each token, target, weight, boundary and start is."""

import collections

import numpy as np
import pytest

from dpjax.data.batches import (
  ContiguousRows,
  DocumentStarts,
  EvaluationDocuments,
  EvaluationWindows,
  RandomWindows,
  ShuffledWindows,
  TokenStream,
)
from dpjax.data.mixture import MixedWindows
from dpjax.errors import UserError

DTYPES = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "boundaries": np.int32}


def check(batch, shape):
  assert list(batch) == list(DTYPES)[: len(batch)] and len(batch) >= 3
  for name, array in batch.items():
    assert array.shape == shape and array.dtype == DTYPES[name]


@pytest.mark.parametrize("num_tokens, window", [(107, 7), (106, 20)])
def test_an_epoch_has_every_target_once(num_tokens, window):
  tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
  batches = ContiguousRows(TokenStream(tokens), batch_size=5, window=window)
  length = num_tokens // 5
  result = [[] for _ in range(5)]
  for step in range(batches.steps_per_epoch):
    batch = batches.batch(step)
    check(batch, (5, window))
    np.testing.assert_equal(batches.batch(step + 13 * batches.steps_per_epoch), batch)
    real = batch["weights"] == 1
    assert np.all(batch["weights"][~real] == 0)
    np.testing.assert_array_equal((batch["targets"] - batch["tokens"])[real], 1)
    for row in range(5):
      result[row] += batch["targets"][row, real[row]].tolist()
  for row in range(5):
    assert result[row] == tokens[row * length : (row + 1) * length][1:].tolist()


# Windows that do not fill the last batch of a round, and one alone.
@pytest.mark.parametrize("num_tokens, window, batch_size", [(50, 7, 6), (8, 7, 3)])
def test_a_round_has_the_window_of_every_offset_once(num_tokens, window, batch_size):
  tokens = np.arange(3, num_tokens + 3, dtype=np.uint16)
  batches = RandomWindows(TokenStream(tokens), batch_size, window, seed=5)
  num_windows = num_tokens - window
  # An epoch reads the tokens once: 7 windows of 7 for 49 targets, in batches of 6; and 1.
  assert batches.steps_per_epoch == (2 if num_tokens == 50 else 1)
  offsets = []
  for step in range(-(-3 * num_windows // batch_size)):
    batch = batches.batch(step)
    check(batch, (batch_size, window))
    assert np.all(batch["weights"] == 1)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(np.diff(batch["tokens"], axis=1), 1)
    offsets += (batch["tokens"][:, 0] - 3).tolist()
  rounds = [offsets[i * num_windows :][:num_windows] for i in range(3)]
  for order in rounds:
    assert sorted(order) == list(range(num_windows))
  if num_windows > 10:
    assert rounds[0] != rounds[1] != rounds[2] != sorted(rounds[2])


def offsets_of(num_windows, seed, steps, batch_size=16):
  batches = RandomWindows(TokenStream(np.arange(num_windows + 2)), batch_size, 2, seed)
  return np.concatenate([batches.batch(step)["tokens"][:, 0] for step in steps])


def test_the_order_of_windows_is_of_its_seed_and_looks_random():
  first, second = (offsets_of(4096, seed, range(256)) for seed in (7, 8))
  some = (130, 3, 131)  # in any order
  np.testing.assert_array_equal(offsets_of(4096, 7, some), first.reshape(256, 16)[[*some]].ravel())
  assert np.mean(first == second) < 0.005
  for order in (first, second):
    # Of 4096 numbers, correlations have a deviation of 1/64.
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 5 / 64
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / 64
    # Neighbours stay neighbours about twice by chance.
    assert np.sum(np.abs(np.diff(order)) == 1) < 15


def test_a_large_corpus_costs_no_memory_and_a_seed_of_32_bits_will_do():
  tokens = np.broadcast_to(np.uint16(3), 10**10)
  batch = RandomWindows(TokenStream(tokens), 5, 7, seed=2**32 - 1).batch(10**9)
  check(batch, (5, 7))


def read_epoch(batches, epoch, length):
  """Checks an epoch of rolled rows; where each row ends in the stream, and its windows' order."""
  count, rows, window = batches.steps_per_epoch, batches.batch_size, batches.window
  result = [batches.batch(epoch * count + i) for i in range(count)]
  for batch in result:
    check(batch, (rows, window))
  tokens, targets, weights = (np.stack([x[name] for x in result], 1) for name in [*DTYPES][:3])
  real = weights == 1
  assert not tokens[~real].any() and not targets[~real].any() and not weights[~real].any()
  row, place = np.divmod(tokens - 1, length)
  following = row * length + (place + 1) % length + 1
  np.testing.assert_array_equal(targets[real], following[real])
  inside = real[..., 1:]
  np.testing.assert_array_equal(tokens[..., 1:][inside], targets[..., :-1][inside])
  ends, orders = [], []
  for b in range(rows):
    # One token of the row is no input, but the last target.
    (end,) = {*range(1 + b * length, 1 + (b + 1) * length)} - {*tokens[b][real[b]].tolist()}
    begins = (tokens[b, :, 0] - end - 1) % length
    assert sorted(begins) == list(range(0, length - 1, window))
    ends.append(end)
    orders.append((begins // window).tolist())
  assert orders == orders[:1] * rows
  return [end - b * length for b, end in enumerate(ends)], orders[0]


@pytest.mark.parametrize("num_tokens, window", [(107, 7), (106, 20)])
def test_a_shuffled_epoch_is_each_row_rolled(num_tokens, window):
  batches = ShuffledWindows(TokenStream(np.arange(1, num_tokens + 1)), 5, window, seed=3)
  assert batches.steps_per_epoch == -(-(num_tokens // 5 - 1) // window)
  for epoch in range(3):
    ends, _ = read_epoch(batches, epoch, num_tokens // 5)
    assert len({*ends}) > 1


def test_shifts_and_orders_are_of_the_seed_and_the_epoch():
  def read(seed, num_epochs):
    batches = ShuffledWindows(TokenStream(np.arange(1, 30)), 1, 7, seed)
    return [read_epoch(batches, epoch, 29) for epoch in range(num_epochs)]

  epochs = read(5, 240)
  assert read(5, 7) == epochs[:7]
  others = zip(*read(6, 7), strict=True)
  assert all(x != y for x, y in zip(others, zip(*epochs[:7], strict=True), strict=True))
  orders = collections.Counter(tuple(order) for _, order in epochs)
  ends = collections.Counter(end for (end,), _ in epochs)
  # Of 24 orders 10 each, with a deviation of 3; of 29 shifts 8 each.
  assert len(orders) == 24 and max(orders.values()) < 25
  assert len(ends) == 29 and max(ends.values()) < 22


VARIANTS = {
  "rows": lambda **stream: ContiguousRows(TokenStream(**stream), 6, 4),
  "random": lambda **stream: RandomWindows(TokenStream(**stream), 6, 4, 11),
  "shuffled": lambda **stream: ShuffledWindows(TokenStream(**stream), 6, 4, 11),
  "mixed": lambda **stream: MixedWindows(
    TokenStream(**stream), 6, 4, 11, sizes=(40, 31), shares=(0.7, 0.3)
  ),
  "windows": lambda **stream: EvaluationWindows(TokenStream(**stream), 5, 3, 6),
  "documents": lambda **stream: EvaluationDocuments(TokenStream(**stream), 5, 3, 6),
}
# Documents of one token, of two, and longer than a window.
BEGINS = np.array([0, 1, 2, 4, 30, 31, 37, 40, 60, 61, 70])


@pytest.mark.parametrize("variant", VARIANTS)
def test_boundaries_padding_rows_of_a_host_and_mapped_files(tmp_path, variant):
  # Tokens from 3 up, so that each tells its place; 2 stands before them, 1 is the padding.
  tokens = np.arange(3, 74, dtype=np.uint16)
  boundaries = np.random.default_rng(1).integers(0, 2, 71).astype(np.uint8)
  by_token = np.concatenate([[0, 0, 0], boundaries])
  begins = np.zeros(1, int) if variant == "windows" else BEGINS
  options = {"documents": DocumentStarts(begins, 2), "pad_id": 1}
  batches, plain = (
    VARIANTS[variant](tokens=tokens, boundaries=boundaries, **options),
    VARIANTS[variant](tokens=tokens, **options),
  )
  for array, name in ((tokens, "tokens"), (boundaries, "boundaries")):
    array.tofile(tmp_path / name)
  mapped = VARIANTS[variant](
    tokens=np.memmap(tmp_path / "tokens", np.uint16, "r"),
    boundaries=np.memmap(tmp_path / "boundaries", np.uint8, "r"),
    **options,
  )
  num_padded = 0
  for index in (2, 0, 1):
    batch = batches.batch(index)
    np.testing.assert_equal(batch, mapped.batch(index))
    assert all(type(array) is np.ndarray for array in mapped.batch(index).values())
    for rows in (slice(0, 2), slice(2, 6), slice(5, 6)):
      part = {name: array[rows] for name, array in batch.items()}
      np.testing.assert_equal(batches.batch(index, rows), part)
    assert ("document_starts" in batch) == (variant != "windows")
    batch = {name: batch[name] for name in batch if name != "document_starts"}
    check({name: batch[name] for name in DTYPES}, batch["tokens"].shape)
    np.testing.assert_array_equal(batch["boundaries"], by_token[batch["tokens"]])
    result, is_padding = batch.pop("boundaries"), batch["tokens"] == 1
    assert 0 < result.mean() < 1 and not result[is_padding].any()
    assert not batch["weights"][is_padding].any()
    np.testing.assert_array_equal(is_padding, batch["targets"] == 0)
    np.testing.assert_equal(batch, {name: plain.batch(index)[name] for name in batch})
    num_padded += is_padding.sum()
  assert bool(num_padded) == (variant not in ("random", "mixed"))


@pytest.mark.parametrize("variant", ["rows", "random", "shuffled", "mixed"])
def test_documents_of_training(variant):
  stream, boundaries = np.arange(20, 91), np.array([0, 1, 1])[np.arange(71) % 3]
  starts = DocumentStarts(BEGINS, 5, start_boundary=2)
  options = dict(boundaries=boundaries, pad_id=4)
  joined, isolated = (
    VARIANTS[variant](tokens=stream, **options),
    VARIANTS[variant](tokens=stream, documents=starts, **options),
  )
  seen = set()
  assert joined.steps_per_epoch == isolated.steps_per_epoch
  for step in range(36):  # three rounds of random windows
    before, batch = joined.batch(step), isolated.batch(step)
    assert [*batch] == [*before, "document_starts"] and batch["document_starts"].dtype == np.int32
    # What is predicted, and what counts, is the same.
    np.testing.assert_array_equal(batch["targets"], before["targets"])
    np.testing.assert_array_equal(batch["weights"], before["weights"])
    position = batch["targets"] - 20
    is_first = np.isin(position, BEGINS)
    if variant == "shuffled":  # A document begins at the seam, too.
      is_first |= (position >= 0) & (position % 11 == 0)
    np.testing.assert_array_equal(batch["document_starts"][:, 1:], is_first[:, 1:])
    assert (batch["document_starts"][:, 0] == 1).all()
    np.testing.assert_array_equal(batch["tokens"], np.where(is_first, 5, before["tokens"]))
    expected = np.where(is_first, 2, before["boundaries"])
    np.testing.assert_array_equal(batch["boundaries"], expected)
    seen |= {*position[is_first].tolist()}
  if variant == "random":
    assert seen == {*BEGINS} - {0}


@pytest.mark.parametrize(
  "make, message",
  [
    (
      lambda: VARIANTS["rows"](tokens=np.arange(71), boundaries=np.zeros(70)),
      "boundaries: expected one for each of the 71 tokens, got 70",
    ),
    (
      lambda: EvaluationWindows(
        TokenStream(np.arange(53), documents=DocumentStarts.of_one(0)), 7, 8, 3
      ),
      r"eval.stride: expected 1 \.\. 7 .*",
    ),
    (
      lambda: RandomWindows(TokenStream(np.arange(7)), 2, 7, 0),
      "train.window: expected at most 6 .* got 7",
    ),
    (
      lambda: ContiguousRows(TokenStream(np.arange(24)), 3, 8),
      r"train.window: .* at most 7 \(24 tokens",
    ),
    (lambda: ContiguousRows(TokenStream(np.arange(2)), 3, 8), "train.window: expected at most 0 "),
  ],
)
def test_refusals(make, message):
  with pytest.raises(UserError, match=f"^{message}"):
    make()
