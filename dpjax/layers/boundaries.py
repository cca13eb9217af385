"""Kinds of boundaries: where the segments of token pooling end, and what teaches it.

B batch, T position, D width.

A kind is one Linen module. `dpjax.models.hourglass.Hourglass` asks it where segments end
and how to pool them, `dpjax.training.losses.Objective` what it adds to the loss. A new kind
subclasses `Boundaries`, and `dpjax.register_boundaries` gives it a name.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers import blocks
from dpjax.ops.boundaries import check_rule
from dpjax.ops.segments import METHODS


class Found(NamedTuple):
  """Where segments end.

  Attributes:
    boundaries: [B, T], 0 or 1. Integers, or floats through which a gradient passes.
    logits: [B, T], of a boundary's probability; None without a predictor.
    probabilities: [B, T], of a boundary, where the model's output depends on them.
    state: of `init_state`, after these tokens.
  """

  boundaries: jax.Array
  logits: jax.Array | None = None
  probabilities: jax.Array | None = None
  state: Any = ()


class Boundaries(nn.Module):
  """The base of all kinds: fields are settings, and every method has a default.

  Attributes:
    needs_text: whether its boundaries are made from the text while that is prepared, so
      that batches have "boundaries", [B, T].
    suits_segments: whether it can pool segments again, which are no tokens: `tokens` is
      None then, and a batch of its `loss` has "weights" alone.
    takes_noise: whether it draws boundaries, and so takes `noise`.
    has_null_group: whether a learned vector and a LayerNorm go before the middle. Without
      them the first token of each row has to be a boundary.
    needs_run: whether it reads with the model of another run. Its setting `run` is that
      run's folder, and its field `frozen` is given the model, whose parameters then lie
      under "frozen" and are not trained.
    is_endless: whether it knows where segments end beyond the model's window, too.
  """

  needs_text: ClassVar[bool] = False
  suits_segments: ClassVar[bool] = False
  takes_noise: ClassVar[bool] = False
  has_null_group: ClassVar[bool] = True
  needs_run: ClassVar[bool] = False
  is_endless: ClassVar[bool] = True

  @property
  def pooling_method(self) -> str:
    """How a segment becomes a vector: of `dpjax.ops.pool_segments`."""
    return getattr(self, "pooling", "mean")

  @property
  def lengths_compiled(self) -> int:
    """For how many lengths the middle is compiled, where S is known on the device alone."""
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
    """Settings that are not given, and follow from the tokenizer.

    Args:
      tokenizer: of `dpjax.text`.

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
  ) -> Found:
    """Says where segments end, from the tokens so far alone.

    Args:
      hidden: [B, T, D], what the first stack makes of the tokens.
      tokens: [B, T], ids; None where the vectors are those of segments.
      deterministic: False in training; draws come from the "dropout" stream.
      noise: [B, T] in (0, 1), in place of a draw.
      start: [B], int32, how many tokens of each row came before; None: none did.
      state: of `init_state` or of the call before, where rows go on; None: they begin.
      lengths: [B], int32, how many tokens of each row are real; None: all.
    """
    raise NotImplementedError

  def init_state(self, batch: int, width: int) -> Any:
    """What is known of the tokens before, of B rows of width D that have not begun."""
    del batch, width
    return ()

  def blend(
    self, segments: jax.Array, probabilities: jax.Array | None, previous: jax.Array | None
  ) -> jax.Array:
    """What tokens read of segments, after the middle: by default what it gives.

    Args:
      segments: [B, S, D], of the middle, without the null group.
      probabilities: [B, S], those of `Found` at the boundaries that end the segments.
      previous: [B, D], what was read last, where rows go on.
    """
    del probabilities, previous
    return segments

  def join(self, read: jax.Array, hidden: jax.Array, found: Found) -> jax.Array:
    """[B, T, D], the last stack's input: what tokens read and what they were."""
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
    """What the boundaries add to the loss of a batch, and what they are compared with.

    Args:
      output: `dpjax.models.language_model.LanguageModelOutput`.
      batch: as `dpjax.training.losses.Objective.sums` takes it.

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
    _at_least_one("shortening_factor", self.shortening_factor)
    if self.offset is not None and not 0 <= self.offset < self.shortening_factor:
      raise ValueError(
        f"offset: expected None or 0 to shortening_factor - 1 = "
        f"{self.shortening_factor - 1}, got {self.offset}"
      )
    _check_pooling(self.pooling)
    super().__post_init__()

  @property
  def _first(self) -> int:
    return self.shortening_factor - 1 if self.offset is None else self.offset

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del tokens, deterministic, noise, state, lengths
    shape = hidden.shape[:2]
    return Found(ops.fixed_boundaries(shape, self.shortening_factor, self._first, start=start))

  def most_segments(self, length: int) -> int:
    """See `Boundaries`."""
    return len(range(self._first, length, self.shortening_factor))


class Whitespace(Boundaries):
  """A segment ends with each token that ends a word.

  Attributes:
    space_ids: those tokens; (): the tokenizer's.
    pooling: as in `Fixed`.
    num_capacities: lengths that the middle is compiled for.
  """

  space_ids: tuple[int, ...] = ()
  pooling: str = "mean"
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    _check_ids(self.space_ids)
    _check_pooling(self.pooling)
    _at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del hidden, deterministic, noise, start, state, lengths
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
    _check_ids(self.space_ids)
    _check_ids(self.end_ids, "end_ids")
    _check_pooling(self.pooling)
    _at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del hidden, deterministic, noise, start
    found = ops.spacelike_boundaries(tokens, self.space_ids, self.end_ids, previous=state)
    if state is None:
      return Found(found)
    ends = jnp.isin(tokens, np.asarray(self.end_ids, np.int32))
    return Found(found, state=_newest(state, ends, lengths))

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


class _Predicted(Boundaries):
  """A predictor, Linear, GELU, Linear, of the first stack's vectors: b = [p > 0.5]."""

  predictor_width: int
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    """Makes the predictor, whose parameters are this module's."""
    self._predictor = blocks.FeedForward(
      self.predictor_width, "gelu", init_std=self.init_std, dtype=self.dtype, out_width=1
    )
    nn.share_scope(self, self._predictor)

  def _logits(self, hidden: jax.Array) -> jax.Array:
    return self._predictor(hidden)[..., 0]

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del tokens, deterministic, noise, start, state, lengths
    logits = self._logits(hidden)
    return Found((logits > 0).astype(jnp.int32), logits)


class Unigram(_Predicted):
  """A predictor that is taught where the pieces of a Unigram tokenizer end.

  Its loss is the mean binary cross-entropy.

  Attributes:
    file: a SentencePiece `.model`; "": one is trained on the train split.
    size: its pieces, where it is trained.
    double_sigmoid: the probabilities take the place of the logits in the loss, as in the
      authors' code.
    pooling: as in `Fixed`.
    num_capacities: lengths that the middle is compiled for.
    predictor_width: of the predictor's hidden layer.
    init_std: of its weights; as `dpjax.layers.blocks.FeedForward`.
    dtype: of the computation.
  """

  needs_text: ClassVar[bool] = True

  file: str = ""
  size: int = 10_000
  double_sigmoid: bool = False
  pooling: str = "mean"
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    _at_least_one("size", self.size)
    _at_least_one("num_capacities", self.num_capacities)
    _check_pooling(self.pooling)
    super().__post_init__()

  def loss(self, output, batch):
    """See `Boundaries`."""
    targets = batch["boundaries"]
    return _cross_entropy(output, targets, batch["weights"], self.double_sigmoid), targets


class EntropySpikes(_Predicted):
  """A predictor that is taught the spikes of the model's own conditional entropy (Eq. 6).

  No gradient passes through the spikes. Only tokens whose target counts have a part, and a
  spike is sought among them alone, so that the first of them is one.

  Attributes:
    left: k of Eq. 6: places before that a spike exceeds.
    double_sigmoid: as in `Unigram`, as the following.
    pooling: likewise.
    num_capacities: likewise.
    predictor_width: likewise.
    init_std: likewise.
    dtype: likewise.
  """

  left: int = 2
  double_sigmoid: bool = False
  pooling: str = "mean"
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    _at_least_one("left", self.left)
    _at_least_one("num_capacities", self.num_capacities)
    _check_pooling(self.pooling)
    super().__post_init__()

  def loss(self, output, batch):
    """See `Boundaries`."""
    entropies = ops.conditional_entropy(jax.lax.stop_gradient(output.logits))
    entropies = jnp.where(batch["weights"] > 0, entropies, -jnp.inf)
    targets = ops.entropy_spikes(entropies, self.left)
    return _cross_entropy(output, targets, batch["weights"], self.double_sigmoid), targets


class Gumbel(_Predicted):
  """A predictor that learns by itself: boundaries drawn from a Gumbel-sigmoid (Eq. 5).

  Its loss is -log Binomial(k; L, prior) / L for k boundaries among L tokens (Eq. 7).

  Attributes:
    temperature: tau.
    prior: alpha, boundaries a token, in (0, 1).
    sample: draw in evaluation, too, as the authors' code does; else round (Sec. 3.1).
    space_ids: tokens that the boundaries are compared with in the scores; (): the
      tokenizer's.
    num_capacities: as in `Unigram`, as the following.
    predictor_width: likewise.
    init_std: likewise.
    dtype: likewise.
  """

  suits_segments: ClassVar[bool] = True
  takes_noise: ClassVar[bool] = True

  temperature: float = 0.5
  prior: float = 0.2
  sample: bool = False
  space_ids: tuple[int, ...] = ()
  num_capacities: int = 8

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    if not self.temperature > 0:
      raise ValueError(f"temperature: expected above 0, got {self.temperature}")
    if not 0 < self.prior < 1:
      raise ValueError(f"prior: expected a number in (0, 1), got {self.prior}")
    _check_ids(self.space_ids)
    _at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  @property
  def draws_in_evaluation(self) -> bool:
    """See `Boundaries`."""
    return self.sample

  def settings_for(self, tokenizer):
    """See `Boundaries`."""
    return {"space_ids": self.space_ids or tokenizer.space_ids}

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del tokens, start, state, lengths
    logits = self._logits(hidden)
    if deterministic and not self.sample and noise is None:
      return Found((logits > 0).astype(jnp.int32), logits)  # p > 0.5
    key = self.make_rng("dropout") if noise is None else None
    return Found(ops.gumbel_sigmoid(logits, self.temperature, key=key, noise=noise), logits)

  def loss(self, output, batch):
    """See `Boundaries`."""
    weights, targets = batch["weights"], None
    boundaries = output.boundaries.astype(jnp.float32)
    nats_b = ops.binomial_prior_loss(boundaries, self.prior, weights=weights)
    if self.space_ids and "tokens" in batch:
      targets = ops.whitespace_boundaries(batch["tokens"], self.space_ids)
    return jnp.sum(nats_b * jnp.sum(weights, axis=1)), targets


class Routing(Boundaries):
  """H-Net's routing: a segment ends where the next vector points away (`dpjax.ops.route`).

    y_t = straight_through(p_t, b_t) e_m + W_r h_t + a_r,  m the last segment that has ended

  with e the middle's vectors smoothed by p (`dpjax.ops.smooth_segments`), in float32. A
  segment's vector is its last token's. Its loss is `weight` times `dpjax.ops.ratio_loss`.

  Attributes:
    factor: N, the tokens a segment that are aimed at, above 1.
    weight: of the ratio loss.
    num_capacities: lengths that the middle is compiled for.
    width: D.
    dtype: of the projections of the router; the rest is float32.

  Source: Hwang et al. 2025, arXiv:2507.07955; goombalab/hnet@3673fe1.
  """

  suits_segments: ClassVar[bool] = True
  has_null_group: ClassVar[bool] = False

  width: int
  factor: float = 4.5
  weight: float = 0.03
  num_capacities: int = 8
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    if not self.factor > 1:
      raise ValueError(f"factor: expected above 1, got {self.factor}")
    if not self.weight >= 0:
      raise ValueError(f"weight: expected at least 0, got {self.weight}")
    _at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  def setup(self):
    """Begins with the cosine of neighbouring vectors, and without a residual."""
    identity = lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)  # noqa: E731
    shape = (self.width, self.width)
    self._query = self.param("query", identity, shape, jnp.float32)
    self._key = self.param("key", identity, shape, jnp.float32)
    self._residual = nn.Dense(self.width, kernel_init=nn.initializers.zeros, name="residual")

  @property
  def pooling_method(self) -> str:
    """See `Boundaries`."""
    return "last"

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del tokens, deterministic, noise
    probabilities, boundaries = ops.route(
      hidden,
      self._query.astype(self.dtype),
      self._key.astype(self.dtype),
      previous=state,
      start=start,
    )
    if state is None:
      return Found(boundaries, probabilities=probabilities)
    state = _newest(state, hidden, lengths)
    return Found(boundaries, probabilities=probabilities, state=state)

  def init_state(self, batch: int, width: int) -> jax.Array:
    """[B, D], the last vector of each row."""
    return jnp.zeros((batch, width), self.dtype)

  def blend(self, segments, probabilities, previous):
    """See `Boundaries`."""
    assert probabilities is not None
    return ops.smooth_segments(segments, probabilities, previous=previous)

  def join(self, read, hidden, found):
    """See `Boundaries`."""
    assert found.probabilities is not None
    chosen = ops.straight_through(found.probabilities, found.boundaries)[..., None]
    sums = chosen * read.astype(jnp.float32) + self._residual(hidden.astype(jnp.float32))
    return sums.astype(hidden.dtype)

  def loss(self, output, batch):
    """See `Boundaries`."""
    weights = batch["weights"]
    ratio = ops.ratio_loss(
      output.boundaries, output.boundary_probabilities, self.factor, weights=weights
    )
    return self.weight * ratio * jnp.sum(weights), None


class EntropyState(NamedTuple):
  """What `EntropyThreshold` knows of the tokens so far.

  Attributes:
    cache: of the frozen model.
    entropy: [B], nats, after the last token.
    boundary: [B], whether a segment ended with it.
  """

  cache: Any
  entropy: jax.Array
  boundary: jax.Array


class EntropyThreshold(Boundaries):
  """A segment ends where a small, trained model is unsure of the next token, as in BLT.

  That model reads the same tokens, in the same windows, and is not trained any further: no
  gradient reaches it, and `dpjax.training.optimizer` leaves it alone. `model.init` draws
  its parameters; `dpjax.models.language_model.with_frozen` puts in the trained ones, as
  `dpjax.train` does. Where it has no cache, the whole model has none.

  Attributes:
    run: the folder of its run, which has this one's vocabulary.
    rule: "global", "monotonic" or "combined": of `dpjax.ops.entropy_threshold`.
    theta: nats; `dpjax calibrate` finds it for a length of segments.
    theta_add: nats, of "combined".
    pooling: as in `Fixed`.
    num_capacities: lengths that the middle is compiled for.
    frozen: the model, whose `max_length` is at least this one's.

  Source: Pagnoni et al. 2024, arXiv:2412.09871, Sec. 2.3.
  """

  needs_run: ClassVar[bool] = True
  is_endless: ClassVar[bool] = False

  run: str = ""
  rule: str = "global"
  theta: float | None = None
  theta_add: float = 0.0
  pooling: str = "mean"
  num_capacities: int = 8
  frozen: Any = None

  def __post_init__(self):
    """Refuses settings out of their ranges."""
    if not self.run:
      raise ValueError("run: expected the folder of a run, got ''")
    check_rule(self.rule, self.theta_add)
    if self.theta is None:
      raise ValueError("theta: expected a number, which dpjax calibrate finds, got None")
    for name in ("theta", "theta_add"):
      if not math.isfinite(getattr(self, name)):
        raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)}")
    _check_pooling(self.pooling)
    _at_least_one("num_capacities", self.num_capacities)
    super().__post_init__()

  @property
  def has_cache(self) -> bool:
    """See `Boundaries`."""
    return self.frozen.has_cache

  def __call__(
    self, hidden, tokens, *, deterministic=True, noise=None, start=None, state=None, lengths=None
  ):
    """See `Boundaries`."""
    del hidden, deterministic, noise, start
    assert self.theta is not None
    decide = partial(
      ops.entropy_threshold, rule=self.rule, theta=self.theta, theta_add=self.theta_add
    )
    if state is None:
      return Found(decide(ops.conditional_entropy(self.frozen(tokens).logits)))
    output = self.frozen(tokens, cache=state.cache, lengths=lengths)
    entropies = ops.conditional_entropy(output.logits)
    found = decide(entropies, previous=(state.entropy, state.boundary))
    state = EntropyState(
      output.cache,
      _newest(state.entropy, entropies, lengths),
      _newest(state.boundary, found, lengths),
    )
    return Found(found, state=state)

  def init_state(self, batch: int, width: int) -> EntropyState:
    """Of rows that have not begun: the first entropy is above the one before it."""
    del width
    none = jnp.full(batch, -jnp.inf, jnp.float32)  # A weak type would compile steps twice.
    return EntropyState(self.frozen.init_cache(batch), none, jnp.zeros(batch, jnp.int32))


def _cross_entropy(output, targets, weights, double_sigmoid: bool) -> jax.Array:
  logits_bt = output.boundary_logits.astype(jnp.float32)
  if double_sigmoid:
    logits_bt = jax.nn.sigmoid(logits_bt)
  nats_bt = optax.sigmoid_binary_cross_entropy(logits_bt, targets.astype(jnp.float32))
  return jnp.sum(nats_bt * weights)


def _newest(before: jax.Array, now: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """[B, ...], of each row's last real token in `now`, [B, T, ...], or what was before."""
  if lengths is None:
    return now[:, -1]
  seen = jnp.concatenate([before[:, None].astype(now.dtype), now], axis=1)
  return jax.vmap(lambda row, length: row[length])(seen, lengths)


def _is_spacelike(byte: int) -> bool:
  return not (chr(byte).isascii() and chr(byte).isalnum() or 0x80 <= byte < 0xC0)


def _at_least_one(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f"{name}: expected at least 1, got {value}")


def _check_pooling(pooling: str) -> None:
  if pooling not in METHODS:
    known = ", ".join(METHODS)
    raise ValueError(f"pooling: expected one of {known}, got {pooling}")


def _check_ids(ids: tuple[int, ...], name: str = "space_ids") -> None:
  if not all(type(i) is int and i >= 0 for i in ids):
    raise ValueError(f"{name}: expected token ids, got {ids}")
