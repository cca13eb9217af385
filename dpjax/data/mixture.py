"""Mixtures: batches of several sources, each with its share of the rows."""

import math
from collections.abc import Sequence

import numpy as np

from dpjax.data.batches import RandomWindows, TokenStream, draw
from dpjax.errors import UserError

_BITS = 32  # bits of the fractions that choose a row's source


def parse(mixture: str) -> dict[str, float]:
  """The sources of `data.mixture` and their shares of the rows, which sum to 1.

    "my.txt=3, wikitext103=1"  ->  {"my.txt": 0.75, "wikitext103": 0.25}

  Raises:
    UserError: it is malformed, names a source twice, or a share is below 1e-9.
  """
  weights: dict[str, float] = {}
  for part in filter(None, map(str.strip, mixture.split(","))):
    source, _, number = part.rpartition("=")
    try:
      weight = float(number)
    except ValueError:
      weight = math.nan
    if not source or not 0 < weight < math.inf or source in weights:
      expected = "expected SOURCE=WEIGHT,SOURCE=WEIGHT, with each path or name once, and numbers"
      raise UserError(f"data.mixture: {expected} above 0, got {mixture}")
    weights[source] = weight
  # Scaling by a power of two is exact and keeps the sum finite.
  _, exponent = math.frexp(max(weights.values(), default=1.0))
  weights = {source: math.ldexp(weight, -exponent) for source, weight in weights.items()}
  shares = {source: weight / sum(weights.values()) for source, weight in weights.items()}
  if min(shares.values(), default=1.0) < 1e-9:  # several fractions of 2**-_BITS
    raise UserError(f"data.mixture: expected weights of at least 1e-9 of their sum, got {mixture}")
  return shares


class MixedWindows(RandomWindows):
  """Training batches of windows at any offset of several sources, each with its share of the rows.

  Row r of the run, in batch r // B, is from source s if v(r) lies between the sums of the shares
  before s and up to s. v(r) mirrors the bits of r at the binary point and flips some of them,
  chosen by the seed. So of the first n rows, for any n, a source has its share up to a few rows.
  For the shares 3/4 and 1/4, with no bit flipped:

    rows 0 1 2 3 4 5 6 7, v = 0 1/2 1/4 3/4 1/8 5/8 3/8 7/8  ->  sources 0 0 0 1 0 0 0 1

  The k-th row of a source is draw k of its `RandomWindows`, whose order depends on seed, source and
  round. An epoch reads as many tokens as all sources have: with n of a source,
  steps_per_epoch = ceil(sum of ceil((n - 1) / T) / B).

  Source: van der Corput 1935; among 2**k rows that start at a multiple of 2**k, each of the 2**k
  intervals of length 2**-k has one.
  """

  def __init__(
    self,
    stream: TokenStream,
    batch_size: int,
    window: int,
    seed: int = 0,
    *,
    sizes: Sequence[int],
    shares: Sequence[float],
  ):
    """Takes the concatenated stream of all sources.

    Args:
      stream: N tokens.
      batch_size: B.
      window: T.
      seed: see `RandomWindows`.
      sizes: the number of tokens of each source; they sum to N.
      shares: the share of each source, at least 1e-9; they sum to 1.

    Raises:
      UserError: a source is too short.
    """
    self._begins = np.cumsum([0, *sizes[:-1]])
    self._num_windows = np.array(sizes) - window
    self._sizes = sizes
    self._edges = np.round(np.cumsum([0, *shares]) * 2**_BITS).astype(np.int64)
    self._flipped = np.random.SeedSequence((seed, 3)).generate_state(1, np.uint32).astype(np.int64)
    super().__init__(stream, batch_size, window, seed)

  def sources(self, numbers: np.ndarray) -> np.ndarray:
    """The source of each row, by its number in the run, [b]."""
    values = _mirror(numbers % 2**_BITS) ^ self._flipped
    return np.searchsorted(self._edges, values, "right") - 1

  def _count_before(self, numbers: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """The number of earlier rows with the same source, for each row."""
    first = self._edges[sources]
    last = self._edges[sources + 1]
    periods, numbers = np.divmod(numbers, 2**_BITS)
    count = periods * (last - first)
    for bit in range(_BITS):
      # The 2**bit rows with 0 instead of 1 at this bit of the number, and the same higher bits,
      # take the values `low`, `low` + step, `low` + 2 * step, ...
      step = 2 ** (_BITS - bit)
      low = (_mirror(numbers >> bit + 1 << bit + 1) ^ self._flipped) % step
      below_first, below_last = (-((low - x) // step) for x in (first, last))
      count += (numbers >> bit & 1) * (below_last - below_first)
    return count

  def _positions(self, step: int, rows: slice) -> tuple[np.ndarray, bool]:
    numbers = step * self.batch_size + np.arange(self.batch_size)[rows]
    sources = self.sources(numbers)
    draws = self._count_before(numbers, sources)
    offsets = np.empty_like(numbers)
    for source in np.unique(sources):
      is_of_source = sources == source
      num_windows = int(self._num_windows[source])
      drawn = draw(draws[is_of_source], num_windows, self._seed, int(source) + 1)
      offsets[is_of_source] = self._begins[source] + drawn
    return offsets[:, None] + np.arange(self.window + 1), False

  def _count_steps(self) -> int:
    if (shortest := int(self._num_windows.min()) + self.window) <= self.window:
      raise UserError(
        f"train.window: expected at most {max(0, shortest - 1)} (the shortest source of "
        f"data.mixture has {shortest} training tokens), got {self.window}"
      )
    return -(-sum(self._count_cover(size) for size in self._sizes) // self.batch_size)


def _mirror(values: np.ndarray) -> np.ndarray:
  """The bits of numbers below 2**_BITS in the opposite order."""
  mirrored = np.zeros_like(values)
  for bit in range(_BITS):
    mirrored |= (values >> bit & 1) << _BITS - 1 - bit
  return mirrored
