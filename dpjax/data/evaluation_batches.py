"""Batches that score every token of a text once: as one stream, or by document."""

import numpy as np

from dpjax.data.batches import DocumentStarts, check_num_boundaries, permute
from dpjax.errors import UserError


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
    """Takes the stream, ids [N] of any integer type, N >= 1.

    Raises:
      UserError: the stride is not in 1 .. window, or there are not N boundaries.
    """
    check_num_boundaries(boundaries, tokens)
    if not 1 <= stride <= window:
      raise UserError(f"eval.stride: expected 1 .. {window} (the window), got {stride}")
    self.batch_size, self._window, self._stride, self._pad_id = batch_size, window, stride, pad_id
    self._tokens, self._boundaries, self._documents = tokens, boundaries, documents
    # The number of windows up to the end of each document.
    self._ends = np.cumsum(-(-np.diff(documents.begins, append=len(tokens)) // stride))
    self._windows = np.arange(self._ends[-1])
    self._rows = self._fill_rows()

  def _fill_rows(self) -> np.ndarray:
    """The first window of each row, and the number of windows."""
    begins, ends, _ = self._places(self._windows)
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
    shape = len(numbers), self._window
    batch = {
      "tokens": np.full(shape, self._pad_id, np.int32),
      "targets": np.zeros(shape, np.int32),
      "weights": np.zeros(shape, np.float32),
      "is_start": np.zeros(shape, np.int32),
    }
    batch["is_start"][:, 0] = 1
    inputs = [("tokens", self._tokens, self._documents.start_id)]
    if self._boundaries is not None:
      batch["boundaries"] = np.zeros(shape, np.int32)
      inputs += [("boundaries", self._boundaries, self._documents.start_boundary)]
    for b, number in enumerate(numbers):
      first, last = self._rows[[number, number + 1]] if number + 1 < len(self._rows) else (0, 0)
      at = 0
      for begin, end, counted in zip(*self._places(self._windows[first:last]), strict=True):
        here = slice(at, at + end - begin)
        batch["is_start"][b, at] = 1
        batch["targets"][b, here] = self._tokens[begin:end]
        batch["weights"][b, here] = np.arange(begin, end) >= counted
        for name, stream, start in inputs:  # the input of a target is the token before
          batch[name][b, at] = start if self._documents.are_begun_at(begin) else stream[begin - 1]
          batch[name][b, at + 1 : here.stop] = stream[begin : end - 1]
        at = here.stop
    return batch

  def _places(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the targets of windows begin and end in the stream, and from where they count."""
    number = np.searchsorted(self._ends, windows, "right")
    begins = self._documents.begins
    place, end = begins[number], np.append(begins[1:], len(self._tokens))[number]
    before = np.where(number > 0, self._ends[number - 1], 0)
    counted = place + (windows - before) * self._stride
    stop = counted + self._stride
    return np.maximum(place, stop - self._window), np.minimum(stop, end), counted


class EvaluationWindows(EvaluationDocuments):
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
    """Takes a stream as `EvaluationDocuments` does; `max_tokens` = 0 takes all of it."""
    self._max_tokens, self.share = max_tokens, 1.0
    whole = DocumentStarts(np.zeros(1, np.int64), start_id, start_boundary)
    size = tokens, window, stride, batch_size
    super().__init__(*size, whole, boundaries=boundaries, pad_id=pad_id)

  def _fill_rows(self) -> np.ndarray:
    total, wanted = len(self._windows), -(-self._max_tokens // self._stride)
    if 0 < wanted < total:
      self._windows = np.sort(permute(self._windows[:wanted], total, (0,)))
      _, ends, counted = self._places(self._windows)
      self.share = int((ends - counted).sum()) / len(self._tokens)
    return np.arange(len(self._windows) + 1)

  def batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """The given rows of batch `index`, 0 .. len - 1, each a window."""
    batch = super().batch(index, rows)
    del batch["is_start"]
    return batch
