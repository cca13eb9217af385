"""Batches that score every token of a text once: as one stream, or by document."""

import numpy as np

from dpjax.data.batches import DocumentStarts, check_num_boundaries, permute
from dpjax.errors import UserError


class EvaluationWindows:
  """Evaluation batches that score every token of a stream once, the first included.

  Target p is token p, and its input token p - 1, or `start_id` (with `start_boundary`) for p = 0.
  Window i scores the S targets i*S .. i*S + S - 1, S the stride, after as many as fit in T:

    targets max(0, (i + 1)*S - T) .. (i + 1)*S - 1, the last S of them with weight 1

  S = T evaluates without context, as the Dispatcher's authors do; S < T with context, as the
  authors of dynamic pooling do. Padding and the empty rows of the last batch have weight 0.

  With `max_tokens`, ceil(max_tokens / S) windows are drawn, in the order of the text, the same
  ones for all streams of one length; `share` is the share of the N tokens that is scored.
  """

  def __init__(
    self,
    tokens: np.ndarray,
    window: int,
    stride: int,
    batch_size: int,
    start_id: int,
    *,
    boundaries: np.ndarray | None = None,
    start_boundary: int = 0,
    pad_id: int = 0,
    max_tokens: int = 0,
  ):
    """Takes the stream, ids [N] of any integer type, N >= 1; `max_tokens` = 0 takes all.

    Raises:
      UserError: the stride is not in 1 .. window, or there are not N boundaries.
    """
    _check(tokens, boundaries, window, stride)
    self.batch_size, self._window, self._stride, self._pad_id = batch_size, window, stride, pad_id
    self._tokens, self._start_id = tokens, start_id
    self._boundaries, self._start_boundary = boundaries, start_boundary
    self._num_windows = total = -(-len(tokens) // stride)
    self._chosen, self.share = None, 1.0
    if 0 < max_tokens and -(-max_tokens // stride) < total:
      self._num_windows = -(-max_tokens // stride)
      self._chosen = np.sort(permute(np.arange(self._num_windows), total, (0,)))
      ends = np.minimum((self._chosen + 1) * stride, len(tokens))
      self.share = int((ends - self._chosen * stride).sum()) / len(tokens)

  def __len__(self) -> int:
    """The number of batches: ceil(ceil(N / S) / B) for all windows."""
    return -(-self._num_windows // self.batch_size)

  def batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of batch `index`, 0 .. len - 1."""
    window_b1 = index * self.batch_size + np.arange(self.batch_size)[rows, None]
    if self._chosen is not None:
      beyond = -(-len(self._tokens) // self._stride)  # a window without tokens
      window_b1 = np.append(self._chosen, beyond)[np.minimum(window_b1, self._num_windows)]
    end_b1 = (window_b1 + 1) * self._stride
    place_bt = np.maximum(0, end_b1 - self._window) + np.arange(self._window)
    real_bt = place_bt < np.minimum(end_b1, len(self._tokens))
    counted_bt = real_bt & (place_bt >= end_b1 - self._stride)
    place_bt = np.where(real_bt, place_bt, 0)

    def inputs(stream: np.ndarray, first: int, padding: int) -> np.ndarray:
      before_bt = np.where(place_bt == 0, first, stream[np.maximum(0, place_bt - 1)])
      return np.where(real_bt, before_bt, padding).astype(np.int32)

    batch = {
      "tokens": inputs(self._tokens, self._start_id, self._pad_id),
      "targets": np.where(real_bt, self._tokens[place_bt], 0).astype(np.int32),
      "weights": counted_bt.astype(np.float32),
    }
    if self._boundaries is not None:
      batch["boundaries"] = inputs(self._boundaries, self._start_boundary, 0)
    return batch


class EvaluationDocuments:
  """Evaluation batches that score each document as if it stood alone, every token once.

  The windows of a document are those of `EvaluationWindows` for that document alone. Several may
  share a row, and to the model each is a document. With start token 9, T = S = 4:

    tokens 3 1 4 1 5 9 2, documents [3 1 4 1 5] [9 2]
    row 0: tokens [9 3 1 4]  targets [3 1 4 1]  is_start [1 0 0 0]
    row 1: tokens [1 9 9 0]  targets [5 9 2 0]  is_start [1 1 0 0]  weights [1 1 1 0]
  """

  def __init__(
    self,
    tokens: np.ndarray,
    window: int,
    stride: int,
    batch_size: int,
    documents: DocumentStarts,
    *,
    boundaries: np.ndarray | None = None,
    pad_id: int = 0,
  ):
    """Takes a stream as `EvaluationWindows` does, with the same errors."""
    _check(tokens, boundaries, window, stride)
    self.batch_size, self._window, self._stride, self._pad_id = batch_size, window, stride, pad_id
    self._tokens, self._boundaries, self._documents = tokens, boundaries, documents
    sizes = np.diff(documents.begins, append=len(tokens))
    # After each document, how many windows there are; and their places.
    self._num_windows = np.cumsum(-(-sizes // stride))
    begins, ends, _ = self._places(np.arange(self._num_windows[-1]))
    ends = np.cumsum(ends - begins)
    rows = [0]
    while rows[-1] < len(ends):
      taken = ends[rows[-1] - 1] if rows[-1] else 0
      rows.append(int(np.searchsorted(ends, taken + window, "right")))
    self._rows = np.array(rows)  # the first window of each, and the number of windows

  def __len__(self) -> int:
    """The number of batches."""
    return -(-(len(self._rows) - 1) // self.batch_size)

  def batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of batch `index`, 0 .. len - 1."""
    numbers = index * self.batch_size + np.arange(self.batch_size)[rows]
    names = ["tokens", "targets", "weights", "is_start"]
    names += ["boundaries"] * (self._boundaries is not None)
    shape = len(numbers), self._window
    batch = {x: np.zeros(shape, np.float32 if x == "weights" else np.int32) for x in names}
    batch["tokens"][:] = self._pad_id
    batch["is_start"][:, 0] = 1
    for b, number in enumerate(numbers.clip(max=len(self._rows) - 1)):
      windows = np.arange(*self._rows[number : number + 2]) if number + 1 < len(self._rows) else []
      at = 0
      for begin, end, counted in zip(*self._places(windows), strict=True):
        here = slice(at, at + end - begin)
        batch["is_start"][b, at] = 1
        batch["targets"][b, here] = self._tokens[begin:end]
        batch["weights"][b, here] = np.arange(begin, end) >= counted
        self._put(batch["tokens"][b, here], self._tokens, begin, self._documents.start_id)
        if self._boundaries is not None:
          first = self._documents.start_boundary
          self._put(batch["boundaries"][b, here], self._boundaries, begin, first)
        at += end - begin
    return batch

  def _put(self, places: np.ndarray, stream: np.ndarray, begin: int, start: int) -> None:
    """Writes the inputs of the targets from `begin` on: each is the token before."""
    end = begin + len(places)
    places[1:] = stream[begin : end - 1]
    places[0] = start if self._documents.are_begun_at(begin) else stream[begin - 1]

  def _places(self, windows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the targets of windows begin and end in the stream, and from where they count."""
    windows = np.asarray(windows, np.int64)
    number = np.searchsorted(self._num_windows, windows, "right")
    begins = self._documents.begins
    place, end = begins[number], np.append(begins[1:], len(self._tokens))[number]
    before = np.where(number > 0, self._num_windows[number - 1], 0)
    counted = (windows - before) * self._stride
    return (
      place + np.maximum(0, counted + self._stride - self._window),
      np.minimum(place + counted + self._stride, end),
      place + counted,
    )


def _check(tokens: np.ndarray, boundaries: np.ndarray | None, window: int, stride: int) -> None:
  check_num_boundaries(boundaries, tokens)
  if not 1 <= stride <= window:
    raise UserError(f"eval.stride: expected 1 .. {window} (the window), got {stride}")
