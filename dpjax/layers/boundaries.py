"""Kinds of boundaries: where segments end, and how a predictor learns it.

B batch, T position, D width.

A kind is one Linen module. `dpjax.models.hourglass.Hourglass` asks it where segments end
and how to pool them, `dpjax.training.losses.Objective` what it adds to the loss. A new kind
subclasses `Boundaries`, and `dpjax.register_boundaries` gives it a name.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.ops.segments import METHODS


class Found(NamedTuple):
  """Where segments end.

  Attributes:
    boundaries: [B, T], 0 or 1. Integers, or floats through which a gradient passes.
    logits: [B, T], of a boundary's probability; None without a predictor.
    probabilities: [B, T], of a boundary, where the model's output depends on them.
    state: from `init_state`, after these tokens.
  """

  boundaries: jax.Array
  logits: jax.Array | None = None
  probabilities: jax.Array | None = None
  state: Any = ()


class Boundaries(nn.Module):
  """The base of all kinds: fields are settings, and every method has a default.

  Attributes:
    needs_text: whether its boundaries are computed from the text during preparation; then
      batches have "boundaries", [B, T].
    suits_segments: whether it can pool segments again, which are no tokens: `tokens` is
      None then, and a batch of its `loss` has "weights" alone.
    takes_noise: whether it draws boundaries at random, and takes `noise`.
    has_null_group: whether a learned vector and a LayerNorm go before the middle. Without
      them the first token of each row and document has to be a boundary.
    needs_run: whether it reads with the model of another run. Its setting `run` is the
      folder of that run. Its field `frozen` receives the model, whose parameters are stored
      under "frozen" and are not trained.
    is_endless: whether it also finds boundaries beyond the model's window.
  """

  needs_text: ClassVar[bool] = False
  suits_segments: ClassVar[bool] = False
  takes_noise: ClassVar[bool] = False
  has_null_group: ClassVar[bool] = True
  needs_run: ClassVar[bool] = False
  is_endless: ClassVar[bool] = True
  reads_logits: ClassVar[bool] = False

  @property
  def pooling_method(self) -> str:
    """The `method` of `dpjax.ops.pool_segments`: how a segment becomes a vector."""
    return getattr(self, "pooling", "mean")

  @property
  def lengths_compiled(self) -> int:
    """The number of capacities to compile if S is known only on the device."""
    return getattr(self, "num_capacities", 1)

  @property
  def draws_in_evaluation(self) -> bool:
    """Whether it draws in evaluation, too."""
    return False

  @property
  def has_cache(self) -> bool:
    """Whether it can go on from `init_state`."""
    return True

  def settings_for(self, tokenizer: Any) -> dict[str, Any]:
    """Fills in settings that follow from the tokenizer.

    Args:
      tokenizer: from `dpjax.text`.

    Raises:
      ValueError: `data.tokenizer: ...`, the kind cannot do with its tokens.
    """
    del tokenizer
    return {}

  def __call__(
    self,
    hidden: jax.Array,
    tokens: Any,
    *,
    deterministic: bool = True,
    noise: jax.Array | None = None,
    start: jax.Array | None = None,
    state: Any = None,
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
  ) -> Found:
    """Finds where segments end, from the tokens so far alone.

    Args:
      hidden: [B, T, D], what the first stack makes of the tokens.
      tokens: [B, T], ids; None where the vectors are those of segments.
      deterministic: False in training; draws come from the "dropout" stream.
      noise: [B, T] in (0, 1), in place of a draw.
      start: [B], int32, how many tokens of each row came before; None: none did.
      state: from `init_state` or the last call, if rows go on; None: rows begin.
      lengths: [B], int32, how many tokens of each row are real; None: all.
      starts: [B, T], 1 where a document begins, else 0; it sees nothing of what came before.
        None: a row is one document. A kind may leave it out; then a model refuses documents.
    """
    raise NotImplementedError

  def init_state(self, batch: int, width: int) -> Any:
    """The state before the first token, for B rows of width D."""
    del batch, width
    return ()

  def blend(
    self,
    segments: jax.Array,
    probabilities: jax.Array | None,
    previous: jax.Array | None,
    starts: jax.Array | None = None,
  ) -> jax.Array:
    """Changes the segments that tokens read, after the middle; by default not at all.

    Args:
      segments: [B, S, D], of the middle, without the null group.
      probabilities: [B, S], those of `Found` at the boundaries that end the segments.
      previous: [B, D], what was read last, where rows go on.
      starts: [B, S], 1 at the first segment of each document, else 0; None: there is one.
    """
    del probabilities, previous, starts
    return segments

  def join(self, read: jax.Array, hidden: jax.Array, found: Found) -> jax.Array:
    """The input of the last stack, [B, T, D]: what tokens read plus their own vectors."""
    del found
    return read + hidden

  def most_segments(self, length: int) -> int | None:
    """How many segments any row of T tokens has; None: it depends on the tokens."""
    del length
    return None

  def count_in(self, tokens: np.ndarray) -> np.ndarray | None:
    """[B], the segments that end in each of the host's rows [B, T]; None: unknown there."""
    del tokens
    return None

  def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """The boundaries' part of a batch's loss, and the targets that scores compare with.

    Args:
      output: `dpjax.models.language_model.LanguageModelOutput`.
      batch: as `dpjax.training.losses.Objective.sums` takes it. Where rows are several
        documents it has "starts", [B, T].

    Returns:
      Nats, a sum over tokens that count, float32; and [B, T], 0 or 1, or None.
    """
    del output, batch
    return jnp.zeros(()), None


class NoBoundaries(Boundaries):
  """A model without token pooling."""


class Fixed(Boundaries):
  """Segments of one length k: they end at k - 1, 2k - 1, ... (Eq. 2).

  Attributes:
    shortening_factor: k.
    offset: place of the first boundary; None: k - 1. The authors' code has 0.
    pooling: "mean", or "last" (sub-sampling).
  """

  suits_segments: ClassVar[bool] = True

  shortening_factor: int = 2
  offset: int | None = None
  pooling: str = "mean"

  def __post_init__(self):
    """Refuses settings that no segments can have."""
    at_least_one("shortening_factor", self.shortening_factor)
    if self.offset is not None and not 0 <= self.offset < self.shortening_factor:
      raise ValueError(
        f"offset: expected None or 0 to shortening_factor - 1 = "
        f"{self.shortening_factor - 1}, got {self.offset}"
      )
    check_pooling(self.pooling)
    super().__post_init__()

  @property
  def _first(self) -> int:
    return self.shortening_factor - 1 if self.offset is None else self.offset

  def __call__(
    self,
    hidden,
    tokens,
    *,
    deterministic=True,
    noise=None,
    start=None,
    state=None,
    lengths=None,
    starts=None,
  ):
    """See `Boundaries`."""
    del tokens, deterministic, noise, state, lengths
    shape = hidden.shape[:2]
    return Found(
      ops.fixed_boundaries(shape, self.shortening_factor, self._first, start=start, starts=starts)
    )

  def most_segments(self, length: int) -> int:
    """See `Boundaries`."""
    return len(range(self._first, length, self.shortening_factor))


class Whitespace(Boundaries):
  """A segment ends with each token that ends a word.

  Attributes:
    space_ids: those tokens; (): the tokenizer's.
    pooling: see `Fixed`.
    num_capacities: lengths that the middle is compiled for.
  """

  space_ids: tuple[int, ...] = ()
  pooling: str = "mean"
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    check_ids(self.space_ids)
    check_pooling(self.pooling)
    at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  def __call__(
    self,
    hidden,
    tokens,
    *,
    deterministic=True,
    noise=None,
    start=None,
    state=None,
    lengths=None,
    starts=None,
  ):
    """See `Boundaries`."""
    del hidden, deterministic, noise, start, state, lengths, starts
    return Found(ops.whitespace_boundaries(tokens, self.space_ids))

  def settings_for(self, tokenizer):
    """See `Boundaries`."""
    space_ids = self.space_ids or tokenizer.space_ids
    if not space_ids:
      raise UserError(
        "data.tokenizer: expected one with a space or a line end among its tokens, for the "
        f"boundaries whitespace, got {tokenizer.kind} without"
      )
    return {"space_ids": space_ids}

  def count_in(self, tokens: np.ndarray) -> np.ndarray:
    """See `Boundaries`."""
    return np.isin(tokens, self.space_ids).sum(axis=1)


class SpaceByte(Boundaries):
  """A segment ends with the first of each run of spacelike bytes: for any script, and code.

  Attributes:
    space_ids: tokens whose first byte is spacelike; (): the tokenizer's.
    end_ids: tokens whose last byte is; (): likewise.
    pooling: as in `Fixed`; SpaceByte's own is "last".
    num_capacities: lengths that the middle is compiled for.

  Source: Slagle 2024, arXiv:2404.14408, Sec. 3.
  """

  space_ids: tuple[int, ...] = ()
  end_ids: tuple[int, ...] = ()
  pooling: str = "mean"
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    check_ids(self.space_ids)
    check_ids(self.end_ids, "end_ids")
    check_pooling(self.pooling)
    at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  def __call__(
    self,
    hidden,
    tokens,
    *,
    deterministic=True,
    noise=None,
    start=None,
    state=None,
    lengths=None,
    starts=None,
  ):
    """See `Boundaries`."""
    del hidden, deterministic, noise, start
    found = ops.spacelike_boundaries(
      tokens, self.space_ids, self.end_ids, previous=state, starts=starts
    )
    if state is None:
      return Found(found)
    ends = jnp.isin(tokens, np.asarray(self.end_ids, np.int32))
    return Found(found, state=newest(state, ends, lengths))

  def init_state(self, batch: int, width: int) -> jax.Array:
    """[B], whether the last token ends with a spacelike byte."""
    del width
    return jnp.zeros(batch, bool)

  def settings_for(self, tokenizer):
    """See `Boundaries`."""
    tokens = tokenizer.as_bytes()
    first, last = (
      tuple(i for i, token in enumerate(tokens) if _is_spacelike(token[place])) for place in (0, -1)
    )
    return {"space_ids": self.space_ids or first, "end_ids": self.end_ids or last}

  def count_in(self, tokens: np.ndarray) -> np.ndarray:
    """See `Boundaries`."""
    begins, ends = np.isin(tokens, self.space_ids), np.isin(tokens, self.end_ids)
    return begins[:, 0] + (begins[:, 1:] & ~ends[:, :-1]).sum(axis=1)


def newest(before: jax.Array, now: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """[B, ...], of each row's last real token in `now`, [B, T, ...], or what was before."""
  if lengths is None:
    return now[:, -1]
  seen = jnp.concatenate([before[:, None].astype(now.dtype), now], axis=1)
  return jax.vmap(lambda row, length: row[length])(seen, lengths)


def _is_spacelike(byte: int) -> bool:
  return not (chr(byte).isascii() and chr(byte).isalnum() or 0x80 <= byte < 0xC0)


def at_least_one(name: str, value: int) -> None:
  """Refuses a setting below 1."""
  if value < 1:
    raise ValueError(f"{name}: expected at least 1, got {value}")


def check_pooling(pooling: str) -> None:
  """Refuses a way of pooling that `dpjax.ops.pool_segments` does not know."""
  if pooling not in METHODS:
    known = ", ".join(METHODS)
    raise ValueError(f"pooling: expected one of {known}, got {pooling}")


def check_ids(ids: tuple[int, ...], name: str = "space_ids") -> None:
  """Refuses values that are not token ids."""
  if not all(type(i) is int and i >= 0 for i in ids):
    raise ValueError(f"{name}: expected token ids, got {ids}")
