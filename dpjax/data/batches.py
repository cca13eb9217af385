"""Batches for training and evaluation, pure functions of the step: they have no other state.

Every batch is a dict of "tokens" and "targets", int32 [b, T], and "weights", float32 [b, T]; a
target with weight 0 does not count. A slice selects a host's b rows of the batch's B rows.
Padding is filled with `pad_id`, 0 by default; scores do not depend on it.

Given the boundaries of a `TokenStream`, uint8 [N], 0 or 1, a batch also has those of its input
tokens, "boundaries", int32 [b, T], 0 in the padding:

  tokens 3 1 4 1 5, boundaries 0 1 0 0 1, a window of 3 from the second token on
  tokens [1 4 1]  boundaries [1 0 0]  targets [4 1 5]

Given the documents (`DocumentStarts`), a batch also has "document_starts", int32 [b, T]. It is 1
at the first position of a row and where a document begins: there the input is a start token instead
of the last document's last token, so that no document sees another. With start token 9:

  tokens 3 1 4 1 5, documents [3 1] [4 1 5], a window of 4 from the first token on
  tokens [3 9 4 1]  targets [1 4 1 5]  document_starts [1 1 0 0]
"""

import abc
import dataclasses

import numpy as np

from dpjax.errors import UserError

_DRAWN_STEPS = 64  # steps whose offsets are drawn together


@dataclasses.dataclass(frozen=True)
class DocumentStarts:
  """Where the documents of a stream begin: int64 [number of documents], increasing from 0.

  `start_id` is the token that predicts the first one of each, and `start_boundary` its boundary.
  """

  begins: np.ndarray
  start_id: int
  start_boundary: int = 0

  @classmethod
  def of_one(cls, start_id: int, start_boundary: int = 0) -> "DocumentStarts":
    """A stream that is one document."""
    return cls(np.zeros(1, np.int64), start_id, start_boundary)

  def are_begun_at(self, positions) -> np.ndarray:
    """Whether a document begins at each of the positions, bool."""
    index = np.searchsorted(self.begins, positions).clip(max=len(self.begins) - 1)
    return self.begins[index] == positions


@dataclasses.dataclass(frozen=True)
class TokenStream:
  """A stream of tokens, and what is known of each.

  Attributes:
    tokens: ids [N] of any integer type.
    boundaries: None, or 0 or 1 for each, uint8 [N].
    documents: None, or where documents begin.
    pad_id: the id that fills the padding.

  Raises:
    UserError: there are not N boundaries.
  """

  tokens: np.ndarray
  boundaries: np.ndarray | None = None
  documents: DocumentStarts | None = None
  pad_id: int = 0

  def __post_init__(self):
    if self.boundaries is not None and len(self.boundaries) != len(self.tokens):
      expected = f"one for each of the {len(self.tokens)} tokens"
      raise UserError(f"boundaries: expected {expected}, got {len(self.boundaries)}")


class TrainingWindows(abc.ABC):
  """Batches of B windows, each of T tokens of a stream."""

  def __init__(self, stream: TokenStream, batch_size: int, window: int, seed: int = 0):
    """Takes the stream, and the seed of a random order, >= 0.

    Raises:
      UserError: the stream is too short.
    """
    self.batch_size = batch_size
    self.window = window
    self._stream = stream
    self._seed = seed
    self.steps_per_epoch = self._count_steps()

  @abc.abstractmethod
  def _count_steps(self) -> int:
    """The steps per epoch; raises a `UserError` for a stream that is too short."""

  @abc.abstractmethod
  def _positions(self, step: int, rows: slice) -> tuple[np.ndarray, np.ndarray | bool]:
    """The positions [b, t + 1] of inputs and a last target, and additional document starts."""

  def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of the batch for a step >= 0."""
    stream = self._stream
    position_bt, document_starts_bt = self._positions(step, rows)
    real = position_bt.shape[1] - 1
    padding = ((0, 0), (0, self.window - real))
    tokens = stream.tokens[position_bt].astype(np.int32)
    batch = {
      "tokens": np.pad(tokens[:, :-1], padding, constant_values=stream.pad_id),
      "targets": np.pad(tokens[:, 1:], padding),
      "weights": np.pad(np.ones((len(tokens), real), np.float32), padding),
    }
    if stream.boundaries is not None:
      boundaries = stream.boundaries[position_bt[:, :-1]].astype(np.int32)
      batch["boundaries"] = np.pad(boundaries, padding)
    if stream.documents is not None:
      document_starts_bt = stream.documents.are_begun_at(position_bt) | document_starts_bt
      # The token before a document's first one belongs to another document.
      is_first = np.pad(document_starts_bt[:, 1:], padding)
      batch["tokens"][is_first] = stream.documents.start_id
      if stream.boundaries is not None:
        batch["boundaries"][is_first] = stream.documents.start_boundary
      batch["document_starts"] = is_first.astype(np.int32)
      batch["document_starts"][:, 0] = 1
    return batch


class _Rows(TrainingWindows):
  def _count_steps(self) -> int:
    num_tokens = len(self._stream.tokens)
    self._length = num_tokens // self.batch_size
    if self._length < self.window + 1:
      raise UserError(
        f"train.window: expected at most {max(0, self._length - 1)} ({num_tokens} "
        f"tokens of the train split in {self.batch_size} rows give {self._length} each, the last "
        f"of them only a target), got {self.window}"
      )
    return -(-(self._length - 1) // self.window)

  def _cut(self, index: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Where rows begin in the stream, [b, 1], and the positions of a window in each, [t + 1]."""
    begin = index * self.window
    column_t = begin + np.arange(min(self.window, self._length - 1 - begin) + 1)
    return np.arange(self.batch_size)[rows, None] * self._length, column_t


class ContiguousRows(_Rows):
  """Training batches in order, as in the Dispatcher authors' code.

  The stream is cut into B contiguous rows of n = N // B tokens; batch i of an epoch has tokens
  i*T .. i*T + T - 1 of every row, and the next token of each as its target:

    tokens 0 1 2 3 4 5 6 7 8 9, B = 2, T = 3
    step 0: tokens [[0 1 2] [5 6 7]]  targets [[1 2 3] [6 7 8]]  weights all 1
    step 1: tokens [[3 0 0] [8 0 0]]  targets [[4 0 0] [9 0 0]]  weights [1 0 0] each

  The epoch's last window is padded with weight 0. Every epoch, of ceil((n - 1) / T) steps, is the
  same; the seed has no effect.
  """

  def _positions(self, step: int, rows: slice) -> tuple[np.ndarray, bool]:
    begin_b1, column_t = self._cut(step % self.steps_per_epoch, rows)
    return begin_b1 + column_t, False


class ShuffledWindows(_Rows):
  """Training batches of rolled, cut and shuffled windows, as in the pooling paper.

  The stream is cut as for `ContiguousRows`. In each epoch every row is rolled by its own shift,
  drawn from 0 .. n - 1, and cut into windows of T tokens, which come in a random order, the same
  for all rows. Each target is the next token in the rolled row:

    tokens 0 1 2 3 4 5 6 7 8 9, B = 2, T = 2; an epoch with the shifts 2 and 0:
      rolled rows 3 4 0 1 2 and 5 6 7 8 9; its windows in the order 1 0:
    step 0: tokens [[0 1] [7 8]]  targets [[1 2] [8 9]]  weights all 1
    step 1: tokens [[3 4] [5 6]]  targets [[4 0] [6 7]]  weights all 1

  A window continues over the seam where a row's end meets its beginning (4 and 0 above); with
  documents, one begins there. The window at the rolled row's end is padded with weight 0. Shifts
  and order depend only on the seed and the epoch, s // steps_per_epoch for step s,
  steps_per_epoch = ceil((n - 1) / T).

  Source: App. B of the pooling paper (Nawrot et al. 2023, arXiv:2211.09761).
  """

  def _positions(self, step: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    epoch, draw = divmod(step, self.steps_per_epoch)
    # NumPy ignores zeros at the end of a seed.
    order = _permute(np.array([draw]), self.steps_per_epoch, (self._seed, epoch, 1))
    states = np.random.SeedSequence((self._seed, epoch, 2))
    shifts = states.generate_state(self.batch_size, np.uint64) % np.uint64(self._length)
    begin_b1, column_t = self._cut(int(order[0]), rows)
    column_bt = (column_t - shifts[rows, None].astype(np.int64)) % self._length
    return begin_b1 + column_bt, column_bt == 0


class RandomWindows(TrainingWindows):
  """Training batches of windows at any offset, as in the Extractors' paper.

  A stream of N tokens has N - T windows of T + 1 tokens, one at each offset. A round has every
  window once, in an order that depends only on the seed and the round. Batch s takes draws
  s*B .. s*B + B - 1.

    tokens 0 1 2 3 4 5 6, T = 3, B = 2; the round's offsets in the order 2 0 3 1
    step 0: tokens [[2 3 4] [0 1 2]]  targets [[3 4 5] [1 2 3]]  weights all 1
    step 1: tokens [[3 4 5] [1 2 3]]  targets [[4 5 6] [2 3 4]]  weights all 1

  If a round does not fill its last batch, the next one does. An epoch reads as many tokens as the
  stream has: steps_per_epoch = ceil(ceil((N - 1) / T) / B), about a T-th of a round.

  Source: Chen 2023, arXiv:2308.07661, Sec. 6: 60,000 batches of 64 windows are 0.457 epochs of
  8.4M tokens there, so every offset is a window; the paper's epoch is a round.
  """

  _block = -1  # of steps, with the offsets of their rows
  _offsets = np.zeros(0)

  def _positions(self, step: int, rows: slice) -> tuple[np.ndarray, bool]:
    block, index = divmod(step, _DRAWN_STEPS)
    if block != self._block:  # Drawing for 64 steps takes about three times as long as for one.
      count = _DRAWN_STEPS * self.batch_size
      draws = block * count + np.arange(count)
      offsets = draw(draws, self._num_windows, self._seed)
      self._offsets = offsets.reshape(_DRAWN_STEPS, self.batch_size)
      self._block = block
    return self._offsets[index, rows, None] + np.arange(self.window + 1), False

  def _count_steps(self) -> int:
    num_tokens = len(self._stream.tokens)
    self._num_windows = num_tokens - self.window
    if self._num_windows < 1:
      raise UserError(
        f"train.window: expected at most {max(0, num_tokens - 1)} (the train split has "
        f"{num_tokens} tokens, the last of them only a target), got {self.window}"
      )
    return -(-self._count_cover(num_tokens) // self.batch_size)

  def _count_cover(self, num_tokens: int) -> int:
    """The number of windows whose targets are as many as those of a stream."""
    return -(-(num_tokens - 1) // self.window)


class EvaluationDocuments:
  """Evaluation batches that score each document by itself, every token once.

  The windows of a document are those of `EvaluationWindows` for that document. Several may
  share a row; the model sees each as a document. With start token 9, T = S = 4:

    tokens 3 1 4 1 5 9 2, documents [3 1 4 1 5] [9 2]
    row 0: tokens [9 3 1 4]  targets [3 1 4 1]  document_starts [1 0 0 0]
    row 1: tokens [1 9 9 0]  targets [5 9 2 0]  document_starts [1 1 0 0]  weights [1 1 1 0]
  """

  def __init__(self, stream: TokenStream, window: int, stride: int, batch_size: int):
    """Takes a stream with documents, N >= 1.

    Raises:
      UserError: the stride is not in 1 .. window.
    """
    assert stream.documents is not None
    if not 1 <= stride <= window:
      raise UserError(f"eval.stride: expected 1 .. {window} (the window), got {stride}")
    self.batch_size = batch_size
    self._window = window
    self._stride = stride
    self._stream = stream
    self._documents = stream.documents
    # The number of windows up to the end of each document.
    sizes = np.diff(stream.documents.begins, append=len(stream.tokens))
    self._ends = np.cumsum(-(-sizes // stride))
    self._windows = np.arange(self._ends[-1])
    self._rows = self._fill_rows()

  def _fill_rows(self) -> np.ndarray:
    """The first window of each row, and the number of windows."""
    begins, ends, _ = self._positions(self._windows)
    sizes = np.cumsum(ends - begins)
    rows = [0]
    while rows[-1] < len(sizes):
      taken = sizes[rows[-1] - 1] if rows[-1] else 0
      rows.append(int(np.searchsorted(sizes, taken + self._window, "right")))
    return np.array(rows)

  def __len__(self) -> int:
    """The number of batches."""
    return -(-(len(self._rows) - 1) // self.batch_size)

  def batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of batch `index`, 0 .. len - 1."""
    numbers = index * self.batch_size + np.arange(self.batch_size)[rows]
    shape = (len(numbers), self._window)
    batch = {
      "tokens": np.full(shape, self._stream.pad_id, np.int32),
      "targets": np.zeros(shape, np.int32),
      "weights": np.zeros(shape, np.float32),
      "document_starts": np.zeros(shape, np.int32),
    }
    batch["document_starts"][:, 0] = 1
    inputs = [("tokens", self._stream.tokens, self._documents.start_id)]
    if self._stream.boundaries is not None:
      batch["boundaries"] = np.zeros(shape, np.int32)
      inputs += [("boundaries", self._stream.boundaries, self._documents.start_boundary)]
    for b, number in enumerate(numbers):
      first, last = self._rows[[number, number + 1]] if number + 1 < len(self._rows) else (0, 0)
      at = 0
      for begin, end, counted in zip(*self._positions(self._windows[first:last]), strict=True):
        columns = slice(at, at + end - begin)
        batch["document_starts"][b, at] = 1
        batch["targets"][b, columns] = self._stream.tokens[begin:end]
        batch["weights"][b, columns] = np.arange(begin, end) >= counted
        for name, stream, start in inputs:  # the input of a target is the token before
          batch[name][b, at] = start if self._documents.are_begun_at(begin) else stream[begin - 1]
          batch[name][b, at + 1 : columns.stop] = stream[begin : end - 1]
        at = columns.stop
    return batch

  def _positions(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the targets of windows begin and end in the stream, and from where they count."""
    number = np.searchsorted(self._ends, windows, "right")
    begins = self._documents.begins
    first = begins[number]
    end = np.append(begins[1:], len(self._stream.tokens))[number]
    before = np.where(number > 0, self._ends[number - 1], 0)
    counted = first + (windows - before) * self._stride
    stop = counted + self._stride
    return np.maximum(first, stop - self._window), np.minimum(stop, end), counted


class EvaluationWindows(EvaluationDocuments):
  """Evaluation batches that score every token of a stream once, the first included.

  Target p is token p, and its input token p - 1, or for p = 0 the start token of the only document
  (`DocumentStarts.of_one`).
  Window i scores the S targets i*S .. i*S + S - 1, S the stride, after as many others as fit in T:

    targets max(0, (i + 1)*S - T) .. (i + 1)*S - 1, the last S of them with weight 1

  S = T evaluates without context, as the Dispatcher's authors do; S < T with context, as the
  authors of dynamic pooling do. Padding and the empty rows of the last batch have weight 0.

  With `max_tokens`, ceil(max_tokens / S) windows are drawn and kept in text order, the same for
  all streams of equal length; `share` is the scored share of the N tokens.
  """

  def __init__(
    self, stream: TokenStream, window: int, stride: int, batch_size: int, max_tokens: int = 0
  ):
    """Takes a stream of one document; `max_tokens` = 0 takes all of it."""
    self._max_tokens = max_tokens
    self.share = 1.0
    super().__init__(stream, window, stride, batch_size)

  def _fill_rows(self) -> np.ndarray:
    total = len(self._windows)
    required = -(-self._max_tokens // self._stride)
    if 0 < required < total:
      self._windows = np.sort(_permute(self._windows[:required], total, (0,)))
      _, ends, counted = self._positions(self._windows)
      self.share = int((ends - counted).sum()) / len(self._stream.tokens)
    return np.arange(len(self._windows) + 1)

  def batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of batch `index`, 0 .. len - 1, each a window."""
    batch = super().batch(index, rows)
    del batch["document_starts"]
    return batch


def draw(draws: np.ndarray, num_windows: int, *seeds: int) -> np.ndarray:
  """The window offset of each draw; every window is drawn once per epoch."""
  epochs, indices = np.divmod(draws, num_windows)
  offsets = np.empty_like(indices)
  for epoch in np.unique(epochs):
    is_in_epoch = epochs == epoch
    offsets[is_in_epoch] = _permute(indices[is_in_epoch], num_windows, (*seeds, int(epoch)))
  return offsets


def _permute(indices: np.ndarray, size: int, seeds: tuple[int, ...]) -> np.ndarray:
  """Maps indices by a random permutation of 0 .. size - 1, without a table.

  A Feistel network permutes the numbers below a power of four; results of `size` or above go
  through it again (cycle walking; Black and Rogaway 2002).
  """
  half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
  mask = np.uint64((1 << int(half)) - 1)
  keys = np.random.SeedSequence(seeds).generate_state(8, np.uint64)
  result = indices.astype(np.uint64)
  pending = np.ones(result.shape, bool)
  while pending.any():
    values = result[pending]
    left = values >> half
    right = values & mask
    for key in keys:
      left, right = right, left ^ (_mix(right + key) & mask)
    result[pending] = left << half | right
    pending = result >= size
  return result.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
  """The finalizer of SplitMix64 (Steele et al. 2014): every input bit affects every output bit."""
  values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
  return values ^ values >> np.uint64(31)
