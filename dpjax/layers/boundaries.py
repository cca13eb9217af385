"""Segment boundaries, by rules. B batch, T position, D width.

Boundaries are a Linen module; `dpjax.models.hourglass.Hourglass` uses the segments, and
`dpjax.training.losses.Objective` the loss term. A new class subclasses `Boundaries`;
`dpjax.register_boundaries` gives it a name.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.common import check_settings
from dpjax.layers.mixer import Cache, Context, as_context, check_documents
from dpjax.layers.segment_readers import NullGroup, SegmentReader
from dpjax.ops import arrays
from dpjax.ops.segments import METHODS
from dpjax.text.boundaries import TextBoundaries


class BoundaryOutput(NamedTuple):
  """The ends of segments: boundaries, [B, T], 0 or 1, integers, or floats that pass a gradient.

  A predictor also gives its logits, [B, T]. Probabilities, [B, T], are needed where the reader of
  segments uses them. The cache is that of `find` after these tokens.
  """

  boundaries: jax.Array
  logits: jax.Array | None = None
  probabilities: jax.Array | None = None
  cache: Cache = ()


class StageOutput(NamedTuple):
  """The boundaries of one pooling of a model, [B, T], as in `BoundaryOutput`.

  `document_starts`, [B, T], are 1 where a document begins; None: rows are one document each.
  """

  boundaries: jax.Array
  logits: jax.Array | None = None
  probabilities: jax.Array | None = None
  document_starts: jax.Array | None = None


class Boundaries(nn.Module):
  """The base class: fields are settings; a subclass writes `find`.

  To generate with a cache it also writes `init_cache`, which returns () if `find` needs to know
  nothing of earlier tokens. Without it, generation takes full passes. All other methods have a
  default.

  Attributes:
    separates_documents: whether it reads `context.document_starts`; if not, the model refuses rows
      of several documents.
    suits_segments: whether it can also pool segments: `tokens` is then None, and a batch of its
      `loss` has only "weights" and "boundary_share".
    is_stochastic: whether it draws boundaries of probability sigmoid(logits), and takes `noise`.
    reader: how the middle and the tokens read segments, a subclass of `SegmentReader`: `NullGroup`
      or, for boundaries with probabilities, `Smoothing`.
    needs_run: whether its field `frozen` receives the model of the folder `run`, whose
      parameters are stored under "frozen" and not trained.
    is_unbounded: whether it also finds boundaries beyond the model's window.
    reads_logits: whether its `loss` reads the model's logits.
    reads_share: whether its `loss` reads "boundary_share", counted in a separate pass with
      `train.grad_accum_steps`.
    pooling: "mean", or "last" (sub-sampling). A field of some classes.
    num_buckets: the number of lengths for which the middle is compiled. A field of some classes.
    target_schedule: () or (first, updates): the target of the loss is `first` at update 0, and
      reaches its own value linearly, after that many updates. A field of some classes.
  """

  separates_documents: ClassVar[bool] = False
  suits_segments: ClassVar[bool] = False
  is_stochastic: ClassVar[bool] = False
  reader: ClassVar[type[SegmentReader]] = NullGroup
  needs_run: ClassVar[bool] = False
  is_unbounded: ClassVar[bool] = True
  reads_logits: ClassVar[bool] = False
  reads_share: ClassVar[bool] = False
  pooling = "mean"
  num_buckets = 1
  target_schedule = ()

  def __post_init__(self):
    arrays.choice("pooling", self.pooling, METHODS)
    check_settings(self)
    ops.bucket_sizes(1, self.num_buckets)  # checks the number
    for name in ("space_ids", "end_ids"):
      arrays.ids(name, getattr(self, name, ()))
    super().__post_init__()

  @property
  def segment_length(self) -> float | None:
    """The mean number of vectors in a segment that the settings aim at; None if they do not."""
    return None

  @property
  def samples_in_eval(self) -> bool:
    """Whether it also draws boundaries in evaluation."""
    return False

  @property
  def has_cache(self) -> bool:
    """Whether the class has `init_cache`."""
    return type(self).init_cache is not Boundaries.init_cache

  def resolve(self, tokenizer: Any) -> dict[str, Any]:
    """Settings that follow from the tokenizer; raises a `ValueError` if it is unsuitable."""
    return {}

  @property
  def text_boundaries(self) -> TextBoundaries | None:
    """Computes boundaries from the text; batches then have "boundaries", [B, T]."""
    return None

  def find(
    self,
    hidden: jax.Array,
    tokens: jax.Array | None,
    context: Context,
    cache: Cache,
    noise: jax.Array | None,
  ) -> BoundaryOutput:
    """Finds where segments end; each boundary may depend only on the tokens so far.

    Args:
      hidden: [B, T, D], the output of the first stack.
      tokens: [B, T], ids; None if the vectors are segments.
      context: see `dpjax.layers.Context`; `num_before` is set if there is a cache.
      cache: None for whole rows, or from `init_cache` or the previous call.
      noise: [B, T] in (0, 1), instead of a draw.
    """
    raise NotImplementedError

  def __call__(
    self,
    hidden: jax.Array,
    tokens: jax.Array | None,
    context: Context | None = None,
    *,
    deterministic: bool | None = None,
    document_starts: jax.Array | None = None,
    noise: jax.Array | None = None,
  ) -> BoundaryOutput:
    """The ends of the segments of whole rows; for the arguments see `find`.

    Raises:
      ValueError: there is noise for boundaries that draw nothing, or documents for boundaries that
        do not separate them.
    """
    context = as_context(context, deterministic=deterministic, document_starts=document_starts)
    if context.document_starts is not None:
      check_documents(self)
    self._check_noise(noise)
    return self.find(hidden, tokens, context, None, noise)

  def step(
    self,
    hidden: jax.Array,
    tokens: jax.Array | None,
    cache: Cache,
    context: Context,
    *,
    noise: jax.Array | None = None,
  ) -> BoundaryOutput:
    """The ends of segments among the next positions; `context.num_before` counts those before."""
    self._check_noise(noise)
    return self.find(hidden, tokens, context, cache, noise)

  def _check_noise(self, noise: jax.Array | None) -> None:
    if noise is not None and not self.is_stochastic:
      raise ValueError(f"noise: expected none for {type(self).__name__}, got some")

  def init_cache(self, batch: int, width: int) -> Cache:
    """The cache of B rows of width D before the first token, a pytree of arrays."""
    raise NotImplementedError

  def residual(self, hidden: jax.Array) -> jax.Array:
    """What the last stack reads besides the segments, of the first stack's output, [B, T, D]."""
    return hidden

  def max_segments(self, length: int) -> int | None:
    """The number of segments in any row of T tokens; None if it depends on the tokens."""
    return None

  def count_segments(self, tokens: np.ndarray) -> np.ndarray | None:
    """[B], the number of segments that end in each of the host's rows [B, T]; None if unknown."""
    return None

  def scheduled(self, last: float, batch: Mapping[str, jax.Array]) -> jax.Array | float:
    """The target of a loss at the batch's "update", by `target_schedule`; in evaluation `last`."""
    schedule: tuple = self.target_schedule
    if not schedule or "update" not in batch:
      return last
    first, updates = schedule
    done = jnp.clip(batch["update"].astype(jnp.float32) / updates, 0, 1)
    return first + (last - first) * done

  def loss(
    self, stage: StageOutput, batch: Mapping[str, jax.Array], logits: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array | None]:
    """The boundaries' part of a batch's loss, and the reference boundaries for scores.

    Args:
      stage: what the boundaries gave, and where documents begin.
      batch: see `dpjax.training.losses.Objective.sums`; perhaps with "boundary_share", that of the
        whole batch of which this is a part, and in training "update", the number of updates before.
      logits: [B, T, V], those of the model; None for boundaries of segments.

    Returns the sum over tokens that count, in nats, float32; and [B, T], 0 or 1, or None.
    """
    return jnp.zeros(()), None


class Fixed(Boundaries):
  """Segments of one length k: they end at k - 1, 2k - 1, ... (Eq. 2).

  Attributes:
    shortening_factor: k.
    offset: the position of the first boundary; None means k - 1. The authors' code uses 0.
  """

  separates_documents: ClassVar[bool] = True
  suits_segments: ClassVar[bool] = True

  shortening_factor: int = 2
  offset: int | None = None
  pooling: str = "mean"

  def __post_init__(self):
    arrays.integers(shortening_factor=self.shortening_factor)
    if self.offset is not None:
      arrays.integer("offset", self.offset, 0, self.shortening_factor - 1)
    super().__post_init__()

  def find(self, hidden, tokens, context, cache, noise):
    shape = arrays.check("hidden", hidden, Float[Array, "B T D"]).shape[:2]
    boundaries = ops.fixed_boundaries(
      shape,
      self.shortening_factor,
      self.offset,
      num_before=context.num_before,
      document_starts=context.document_starts,
    )
    return BoundaryOutput(boundaries)

  def init_cache(self, batch: int, width: int) -> Cache:
    return ()

  @property
  def segment_length(self) -> float:
    return self.shortening_factor

  def max_segments(self, length: int) -> int:
    first = self.shortening_factor - 1 if self.offset is None else self.offset
    return len(range(first, length, self.shortening_factor))


class Whitespace(Boundaries):
  """A segment ends with each token that ends a word.

  Attributes:
    space_ids: the tokens that end words; () takes the tokenizer's.
  """

  separates_documents: ClassVar[bool] = True

  space_ids: tuple[int, ...] = ()
  pooling: str = "mean"
  num_buckets: int = 5

  def find(self, hidden, tokens, context, cache, noise):
    assert tokens is not None
    return BoundaryOutput(ops.whitespace_boundaries(tokens, self.space_ids))

  def init_cache(self, batch: int, width: int) -> Cache:
    return ()

  def resolve(self, tokenizer):
    space_ids = self.space_ids or tokenizer.space_ids
    if not space_ids:
      raise UserError(
        "data.tokenizer: expected one with a space or a line end among its tokens, for the "
        f"boundaries whitespace, got {tokenizer.name} without"
      )
    return {"space_ids": space_ids}

  def count_segments(self, tokens: np.ndarray) -> np.ndarray:
    return np.isin(tokens, self.space_ids).sum(axis=1)


class SpaceByte(Boundaries):
  """A segment ends with the first of each run of spacelike bytes, in any script and in code.

  Attributes:
    space_ids: the tokens whose first byte is spacelike; () takes the tokenizer's.
    end_ids: the tokens whose last byte is spacelike; () takes the tokenizer's.
    pooling: see `Boundaries`; the paper uses "last".

  Source: Slagle 2024, arXiv:2404.14408, Sec. 3.
  """

  separates_documents: ClassVar[bool] = True

  space_ids: tuple[int, ...] = ()
  end_ids: tuple[int, ...] = ()
  pooling: str = "mean"
  num_buckets: int = 5

  def find(self, hidden, tokens, context, cache, noise):
    assert tokens is not None
    boundaries = ops.spacelike_boundaries(
      tokens,
      self.space_ids,
      self.end_ids,
      previous=cache,
      document_starts=context.document_starts,
    )
    if cache is None:
      return BoundaryOutput(boundaries)
    ends = jnp.isin(tokens, np.asarray(self.end_ids, np.int32))
    return BoundaryOutput(boundaries, cache=newest(cache, ends, context.lengths))

  def init_cache(self, batch: int, width: int) -> jax.Array:
    """[B], whether the last token ends with a spacelike byte."""
    return jnp.zeros(batch, bool)

  def resolve(self, tokenizer):
    def find(i):
      return tuple(n for n, token in enumerate(tokenizer.as_bytes()) if _is_spacelike(token[i]))

    return {"space_ids": self.space_ids or find(0), "end_ids": self.end_ids or find(-1)}

  def count_segments(self, tokens: np.ndarray) -> np.ndarray:
    begins = np.isin(tokens, self.space_ids)
    ends = np.isin(tokens, self.end_ids)
    return begins[:, 0] + (begins[:, 1:] & ~ends[:, :-1]).sum(axis=1)


def check_target(
  module: Boundaries, name: str, expected: str, is_valid: Callable[[Any], bool]
) -> None:
  """Checks the target of a loss, and its `target_schedule`."""
  arrays.number(name, getattr(module, name), expected, is_valid)
  schedule: Any = module.target_schedule
  is_pair = isinstance(schedule, tuple) and len(schedule) == 2
  is_typed = is_pair and type(schedule[0]) in (int, float) and type(schedule[1]) is int
  if schedule and not (is_typed and is_valid(schedule[0]) and 1 <= schedule[1] < 2**31):
    expected = f"() or (first, updates), as (0.4, 1000), with first {expected}"
    raise ValueError(f"target_schedule: expected {expected}, got {schedule}")


def newest(before: jax.Array, now: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """[B, ...], the values in `now`, [B, T, ...], at each row's last real token, else `before`."""
  if lengths is None:
    return now[:, -1]
  seen = jnp.concatenate([before[:, None].astype(now.dtype), now], axis=1)
  return jax.vmap(lambda row, length: row[length])(seen, lengths)


def _is_spacelike(byte: int) -> bool:
  return not (chr(byte).isascii() and chr(byte).isalnum() or 0x80 <= byte < 0xC0)
