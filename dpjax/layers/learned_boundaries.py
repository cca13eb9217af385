"""Boundaries found by a predictor, a router or another model."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.layers.block import FeedForward
from dpjax.layers.boundaries import Boundaries, BoundaryOutput, check_target, newest
from dpjax.layers.mixer import Cache
from dpjax.layers.segment_readers import SegmentReader, Smoothing
from dpjax.ops import arrays
from dpjax.ops.entropies import check_rule
from dpjax.text.boundaries import TextBoundaries
from dpjax.text.unigram import UnigramBoundaries, load_unigram, train_unigram

_segmentation = lru_cache(maxsize=1)(UnigramBoundaries)  # caches words


class _Predicted(Boundaries):
  """A predictor (Linear, GELU, Linear) on the first stack's vectors: b = [p > 0.5]."""

  separates_documents: ClassVar[bool] = True

  predictor_width: int
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32

  def setup(self):
    arrays.integers(predictor_width=self.predictor_width)
    self._predictor = FeedForward(
      self.predictor_width, "gelu", init_std=self.init_std, dtype=self.dtype, out_width=1
    )
    nn.share_scope(self, self._predictor)

  def _logits(self, hidden: jax.Array) -> jax.Array:
    return self._predictor(arrays.check("hidden", hidden, Float[Array, "B T D"]))[..., 0]

  def find(self, hidden, tokens, context, cache, noise):
    logits = self._logits(hidden)
    return BoundaryOutput((logits > 0).astype(jnp.int32), logits)

  def init_cache(self, batch: int, width: int) -> Cache:
    return ()


@dataclasses.dataclass(frozen=True)
class UnigramText(TextBoundaries):
  """The ends of a Unigram tokenizer's pieces; for the fields see `Unigram`."""

  file: str
  size: int

  @property
  def key(self) -> Any:
    return hashlib.sha256(load_unigram(self.file)).hexdigest() if self.file else self.size

  def fit(self, texts: Iterable[str]) -> bytes:
    return load_unigram(self.file) if self.file else train_unigram(texts, self.size)

  def compute(self, text: str, tokenizer: Any, fitted: bytes) -> np.ndarray:
    return _segmentation(fitted).of_tokens(text, tokenizer)


class Unigram(_Predicted):
  """A predictor that learns by cross-entropy where the pieces of a Unigram tokenizer end.

  Attributes:
    file: a SentencePiece `.model`; "" trains one on the train split.
    size: the number of pieces to train.
    double_sigmoid: whether the loss takes probabilities for logits, as in the authors' code.
  """

  file: str = ""
  size: int = 10_000
  double_sigmoid: bool = False
  pooling: str = "mean"
  num_buckets: int = 5

  def __post_init__(self):
    arrays.integers(size=self.size)
    super().__post_init__()

  @property
  def text_boundaries(self) -> "UnigramText":
    return UnigramText(self.file, self.size)

  def loss(self, stage, batch, logits=None):
    targets = batch["boundaries"]
    return _cross_entropy(stage.logits, targets, batch["weights"], self.double_sigmoid), targets


class EntropySpikes(_Predicted):
  """A predictor that learns the spikes of the model's own conditional entropy (Eq. 6).

  No gradient passes through the spikes. Only tokens that count take part; the first of them is
  always a spike.

  Attributes:
    left: k of Eq. 6: the number of earlier positions that a spike exceeds.
    double_sigmoid: see `Unigram`.
  """

  reads_logits: ClassVar[bool] = True

  left: int = 2
  double_sigmoid: bool = False
  pooling: str = "mean"
  num_buckets: int = 5

  def __post_init__(self):
    arrays.integers(left=self.left)
    super().__post_init__()

  def loss(self, stage, batch, logits=None):
    assert logits is not None
    entropies = ops.conditional_entropy(jax.lax.stop_gradient(logits))
    entropies = jnp.where(batch["weights"] > 0, entropies, -jnp.inf)
    targets = ops.entropy_spikes(entropies, self.left, document_starts=stage.document_starts)
    return _cross_entropy(stage.logits, targets, batch["weights"], self.double_sigmoid), targets


class Gumbel(_Predicted):
  """A predictor that learns end to end, with boundaries drawn from a Gumbel-sigmoid (Eq. 5).

  Its loss is -log Binomial(k; L, prior) / L for k boundaries among L tokens (Eq. 7). The
  mean over rows is weighted by L, so that parts of a batch add up.

  Attributes:
    temperature: tau.
    prior: alpha, the expected boundaries per token, in (0, 1).
    sample: whether to draw also in evaluation, as in the authors' code; else round (Sec. 3.1).
    space_ids: the reference for the boundaries' scores: tokens that end words; () takes the
      tokenizer's.
    target_schedule: () or (first, updates): the target moves linearly from `first` to `prior`.
  """

  suits_segments: ClassVar[bool] = True
  is_stochastic: ClassVar[bool] = True

  temperature: float = 0.5
  prior: float = 0.2
  sample: bool = False
  space_ids: tuple[int, ...] = ()
  num_buckets: int = 5
  target_schedule: tuple = ()  # pyright: ignore[reportIncompatibleVariableOverride]

  def __post_init__(self):
    arrays.number("temperature", self.temperature, "above 0", lambda x: 0 < x < math.inf)
    check_target(self, "prior", "a number in (0, 1)", lambda x: 0 < x < 1)
    super().__post_init__()

  @property
  def segment_length(self) -> float:
    return 1 / self.prior

  @property
  def samples_in_eval(self) -> bool:
    return self.sample

  def resolve(self, tokenizer):
    return {"space_ids": self.space_ids or tokenizer.space_ids}

  def find(self, hidden, tokens, context, cache, noise):
    logits = self._logits(hidden)
    if context.deterministic and not self.sample and noise is None:
      return BoundaryOutput((logits > 0).astype(jnp.int32), logits)  # p > 0.5
    key = self.make_rng("dropout") if noise is None else None
    return BoundaryOutput(
      ops.gumbel_sigmoid(logits, self.temperature, key=key, noise=noise), logits
    )

  def loss(self, stage, batch, logits=None):
    weights = batch["weights"]
    targets = None
    options = dict(weights=weights, document_starts=stage.document_starts)
    loss_b = self._row_losses(stage.boundaries.astype(jnp.float32), batch, options)
    if self.space_ids and "tokens" in batch:
      targets = ops.whitespace_boundaries(batch["tokens"], self.space_ids)
    return jnp.sum(loss_b * jnp.sum(weights, axis=1)), targets

  def _row_losses(self, boundaries, batch, options) -> jax.Array:
    return ops.binomial_prior_loss(boundaries, self.scheduled(self.prior, batch), **options)


class FlexiTokens(Gumbel):
  """Gumbel's predictor with a range of rates in place of a prior, `dpjax.ops.rate_bounds_loss`.

  A row's loss is how far its boundary rate is above `prior`, or below
  `prior - num_deviations * deviation`; between them it is 0. The mean
  over rows is weighted by their tokens.

  Attributes:
    prior: alpha, the highest boundary rate without a loss, in (0, 1).
    deviation: sigma, a standard deviation of rates, measured on text.
    num_deviations: lambda; the lowest rate is this many deviations below.

  For the other attributes see `Gumbel`.

  Source: Owodunni et al. 2025, arXiv:2507.12720; owos/flexitokens@4f9f4fa.
  """

  deviation: float = 0.02
  num_deviations: float = 3.0

  def __post_init__(self):
    for name in ("deviation", "num_deviations"):
      arrays.number(name, getattr(self, name), "at least 0", lambda x: 0 <= x < math.inf)
    super().__post_init__()

  def _row_losses(self, boundaries, batch, options) -> jax.Array:
    highest = self.scheduled(self.prior, batch)
    lowest = highest - self.num_deviations * self.deviation
    return ops.rate_bounds_loss(boundaries, highest, lowest, **options)


class Routing(Boundaries):
  """H-Net's routing (`dpjax.ops.route`): segments end where neighbouring vectors differ.

    y_t = straight_through(p_t, b_t) e_m + W_r h_t + a_r,  m the last closed segment

  with the middle's vectors e smoothed by p (`Smoothing`), in float32. The loss is `weight` times
  `dpjax.ops.ratio_loss`.

  Attributes:
    factor: N, the target number of tokens per segment, above 1.
    weight: the weight of the ratio loss.
    target_schedule: () or (first, updates): the target moves linearly from `first` to `factor`.
    width: D.
    dtype: the dtype of the router's projections; the rest is float32.

  Source: Hwang et al. 2025, arXiv:2507.07955; goombalab/hnet@3673fe1.
  """

  separates_documents: ClassVar[bool] = True
  suits_segments: ClassVar[bool] = True
  reader: ClassVar[type[SegmentReader]] = Smoothing
  reads_share: ClassVar[bool] = True
  pooling: ClassVar[str] = "last"

  width: int
  factor: float = 4.5
  weight: float = 0.03
  num_buckets: int = 5
  dtype: DTypeLike = jnp.float32
  target_schedule: tuple = ()  # pyright: ignore[reportIncompatibleVariableOverride]

  def __post_init__(self):
    arrays.integers(width=self.width)
    check_target(self, "factor", "above 1", lambda x: 1 < x < math.inf)
    arrays.number("weight", self.weight, "at least 0", lambda x: 0 <= x < math.inf)
    super().__post_init__()

  @property
  def segment_length(self) -> float:
    return self.factor

  def setup(self):
    """Initialises the router to the cosine of neighbouring vectors, and the residual to 0."""
    self._query, self._key = (
      self.param(name, lambda key: jnp.eye(self.width, dtype=jnp.float32))
      for name in ("query", "key")
    )
    self._residual = nn.Dense(self.width, kernel_init=nn.initializers.zeros, name="residual")

  def find(self, hidden, tokens, context, cache, noise):
    hidden = arrays.check("hidden", hidden, Float[Array, f"B T {self.width}"])
    kernels = self._query.astype(self.dtype), self._key.astype(self.dtype)
    probabilities, boundaries = ops.route(
      hidden,
      *kernels,
      previous=cache,
      num_before=context.num_before,
      document_starts=context.document_starts,
    )
    after = () if cache is None else newest(cache, hidden, context.lengths)
    return BoundaryOutput(boundaries, probabilities=probabilities, cache=after)

  def init_cache(self, batch: int, width: int) -> jax.Array:
    """[B, D], the vector of the last token."""
    return jnp.zeros((batch, width), self.dtype)

  def residual(self, hidden):
    return self._residual(hidden.astype(jnp.float32))

  def loss(self, stage, batch, logits=None):
    assert stage.probabilities is not None
    weights = batch["weights"]
    share = batch.get("boundary_share")
    factor = self.scheduled(self.factor, batch)
    ratio = ops.ratio_loss(
      stage.boundaries, stage.probabilities, factor, weights=weights, share=share
    )
    return self.weight * ratio * jnp.sum(weights), None


class EntropyCache(NamedTuple):
  """The cache of `EntropyThreshold`."""

  frozen: Cache  # the frozen model's
  entropy: jax.Array  # [B], nats, of the last token
  boundary: jax.Array  # [B], 0 or 1


class EntropyThreshold(Boundaries):
  """A segment ends where a small, trained model is unsure of the next token, as in BLT.

  The small model reads the same tokens in the same windows. It is frozen: no gradient reaches
  it, and training does not update it. `model.init` draws its parameters;
  `dpjax.models.build.with_frozen` inserts the trained ones.

  Attributes:
    run: the folder of the small model's run, with the same vocabulary.
    rule: "global", "monotonic" or "combined"; see `dpjax.ops.entropy_threshold`.
    theta: nats; `dpjax calibrate` finds it for a target length of segments.
    theta_add: nats, for the rule "combined".
    frozen: the small model, whose `max_length` is at least this model's.

  Source: Pagnoni et al. 2024, arXiv:2412.09871, Sec. 2.3.
  """

  separates_documents: ClassVar[bool] = True
  needs_run: ClassVar[bool] = True
  is_unbounded: ClassVar[bool] = False

  run: str = ""
  rule: str = "global"
  theta: float | None = None
  theta_add: float = 0.0
  pooling: str = "mean"
  num_buckets: int = 5
  frozen: Any = None

  def __post_init__(self):
    if not self.run:
      raise ValueError("run: expected the folder of a run, got ''")
    check_rule(self.rule, self.theta_add)
    if self.theta is None:
      raise ValueError("theta: expected a number, which dpjax calibrate finds, got None")
    arrays.number("theta", self.theta)
    super().__post_init__()

  @property
  def has_cache(self) -> bool:
    return self.frozen.has_cache

  def find(self, hidden, tokens, context, cache, noise):
    assert self.theta is not None
    rule = self.rule, self.theta, self.theta_add
    starts = context.document_starts
    lengths = context.lengths
    if cache is None:
      entropies = ops.conditional_entropy(self.frozen(tokens, document_starts=starts).logits)
      return BoundaryOutput(ops.entropy_threshold(entropies, *rule, document_starts=starts))
    output, frozen = self.frozen.step(tokens, cache.frozen, lengths=lengths)
    entropies = ops.conditional_entropy(output.logits)
    previous = cache.entropy, cache.boundary
    boundaries = ops.entropy_threshold(entropies, *rule, previous=previous)
    entropy = newest(cache.entropy, entropies, lengths)
    boundary = newest(cache.boundary, boundaries, lengths)
    return BoundaryOutput(boundaries, cache=EntropyCache(frozen, entropy, boundary))

  def init_cache(self, batch: int, width: int) -> EntropyCache:
    """The cache before the first token; the first entropy counts as a rise."""
    none = jnp.full(batch, -jnp.inf, jnp.float32)  # A weak type would compile steps twice.
    return EntropyCache(self.frozen.init_cache(batch), none, jnp.zeros(batch, jnp.int32))


def _cross_entropy(
  logits: jax.Array | None, targets: jax.Array, weights: jax.Array, double_sigmoid: bool
) -> jax.Array:
  assert logits is not None
  logits_bt = jnp.where(weights == 0, 0, logits.astype(jnp.float32))
  if double_sigmoid:
    logits_bt = jax.nn.sigmoid(logits_bt)
  nats_bt = optax.sigmoid_binary_cross_entropy(logits_bt, targets.astype(jnp.float32))
  return jnp.sum(nats_bt * weights)
