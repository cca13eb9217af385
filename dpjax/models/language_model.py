"""Embedding -> blocks -> logits. B batch, T position, D width, V vocabulary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int32, Integer

from dpjax import ops
from dpjax.layers import common, embeddings
from dpjax.layers.boundaries import StageOutput
from dpjax.layers.common import Params, check_settings
from dpjax.layers.mixer import Context
from dpjax.models.hourglass import Hourglass, HourglassCache
from dpjax.models.stage import PoolingHints
from dpjax.ops import arrays
from dpjax.ops.backend import automatic_axes
from dpjax.ops.documents import check_lengths


class LanguageModelCache(NamedTuple):
  """The cache of a model after the tokens so far: their number in each row, and its core's."""

  length: Int32[Array, "B"]
  core: HourglassCache


class LanguageModelOutput(NamedTuple):
  """Logits, [B, T, V]: `logits[:, t]` predicts token t + 1.

  `hidden`, [B, T, D], is the input of `LanguageModel.output_layer`; `stages` are the boundaries of
  each pooling, the outermost first, () without pooling and in a step.
  """

  logits: jax.Array
  hidden: jax.Array
  stages: tuple[StageOutput, ...] = ()


class LanguageModel(nn.Module):
  """A causal language model with any mixer.

  The parameters of the core are beside the model's: `layers`, and `stages_i` with token pooling.

  Attributes:
    vocab_size: V.
    width: D.
    max_length: the longest T.
    core: the blocks, a `dpjax.models.Hourglass`, perhaps without stages.
    positions: "sinusoidal", "learned" or "none".
    dropout: the dropout rate of the embeddings.
    final_norm: the norm before the output layer, as in pre-norm models, or None.
    init_std: embeddings and output weights are N(0, init_std**2); 0: U(-0.1, 0.1).
    dtype: the dtype of the computation; parameters are float32.
    use_bias: whether the logits have biases.
    tie_embeddings: whether the logits are products with the token table, without a bias (Press
      and Wolf 2017, arXiv:1608.05859).
    embedding_std: embeddings are N(0, embedding_std**2); 0: `init_std`.
  """

  vocab_size: int
  width: int
  max_length: int
  core: Hourglass
  positions: str = "sinusoidal"
  dropout: float = 0.0
  final_norm: nn.Module | None = None
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32
  use_bias: bool = True
  tie_embeddings: bool = False
  embedding_std: float = 0.0

  def setup(self):
    """Makes the embedding and the output layer."""
    check_settings(self)
    nn.share_scope(self, self.core)
    self.embedding = embeddings.TokenAndPosition(
      self.vocab_size,
      self.width,
      self.max_length,
      self.positions,
      self.dropout,
      self.embedding_std or self.init_std,
      self.dtype,
    )
    if not self.tie_embeddings:
      self.logits = nn.Dense(
        self.vocab_size,
        use_bias=self.use_bias,
        dtype=self.dtype,
        kernel_init=common.weights(self.init_std, common.symmetric_uniform(0.1)),
        dot_general=ops.dot_general,
      )

  def __call__(
    self,
    tokens: jax.Array,
    *,
    deterministic: bool = True,
    document_starts: jax.Array | None = None,
    pooling: PoolingHints | None = None,
  ) -> LanguageModelOutput:
    """[B, T] token ids -> logits [B, T, V].

    Args:
      tokens: [B, T], integers in [0, V).
      deterministic: False in training, where dropout draws from the "dropout" stream.
      document_starts: [B, T], 1 at the first token of each document, else 0. Each document gives
        the same outputs as by itself; rows may be longer than `max_length`, documents may not. None
        means that each row is one document.
      pooling: what the caller knows of the segments, for a model with token pooling.

    Raises:
      ValueError: an argument is not as above, or the model does not support it.
    """
    tokens = arrays.check("tokens", tokens, Integer[Array, "B T"])
    if document_starts is not None:
      document_starts = ops.check_starts(document_starts, tokens.shape)
    self._check_pooling(pooling)
    context = Context(deterministic=deterministic, document_starts=document_starts)
    x_btd = self.embedding(tokens, context)
    hidden_btd, stages = self.core(x_btd, tokens, context, pooling)
    return self._predict(hidden_btd, stages)

  def step(
    self,
    tokens: jax.Array,
    cache: LanguageModelCache,
    *,
    lengths: jax.Array | None = None,
    pooling: PoolingHints | None = None,
  ) -> tuple[LanguageModelOutput, LanguageModelCache]:
    """The logits of the next tokens of each row, and the cache after them.

    They equal those of whole rows:

      output, cache = model.apply(variables, prompt, model.init_cache(batch), method="step")
      output, cache = model.apply(variables, token, cache, method="step")    # [B, 1], and so on

    Args:
      tokens: [B, C], integers in [0, V).
      cache: from `init_cache` or the previous step.
      lengths: [B], int32, the number of real tokens in each row; None means all.
      pooling: see `__call__`; without a capacity.

    Raises:
      ValueError: an argument is not as above, or the model does not support it.
    """
    tokens = arrays.check("tokens", tokens, Integer[Array, "B T"])
    self._check_cache(cache, tokens.shape[0])
    self._check_pooling(pooling)
    if pooling is not None and pooling.capacity is not None:
      raise ValueError(f"capacity: expected none with a cache, got {pooling.capacity}")
    if lengths is not None:  # Layers that loop over blocks cannot see its values.
      lengths = check_lengths(lengths, tokens.shape[1])
    context = Context(lengths=lengths, num_before=cache.length)
    x_bcd = self.embedding(tokens, context)
    hidden_bcd, core = self.core.step(x_bcd, tokens, cache.core, context, pooling)
    num_new = tokens.shape[1] if lengths is None else lengths
    return self._predict(hidden_bcd, ()), LanguageModelCache(cache.length + num_new, core)

  @nn.nowrap
  def apply(self, variables: Mapping, tokens: ArrayLike, *args, **kwargs) -> Any:
    """`flax.linen.Module.apply`, also for arrays on a mesh with explicit axes."""

    def of_tokens(tokens, variables, args, kwargs):
      return nn.Module.apply(self, variables, tokens, *args, **kwargs)

    return automatic_axes(of_tokens)(tokens, variables, args, kwargs)

  def output_layer(self, params: Params) -> tuple[jax.Array, jax.Array | None]:
    """The kernel [D, V] and bias [V], or None, of logits = hidden @ kernel + bias."""
    if self.tie_embeddings:
      return params["embedding"]["tokens"]["embedding"].T, None
    return params["logits"]["kernel"], params["logits"].get("bias")

  def unstack(self, params: Params) -> tuple["LanguageModel", Params]:
    """The model with arrays for each layer, whose single-token steps copy none, and these arrays.

    The model that it returns steps; it does not take whole rows.
    """
    core, params = self.core.unstack(params)
    return self.clone(core=core), params

  @property
  def has_cache(self) -> bool:
    """Whether all mixers have a cache; else each new token takes a pass over the window."""
    return self.core.has_cache

  @property
  def bounded_parts(self) -> tuple[str, ...]:
    """The parts, by name, that cannot go beyond `max_length`, even with a cache; () if all can."""
    names = self.core.bounded_parts
    if self.positions == "learned":
      names = (*names, "learned positions")
    return tuple(dict.fromkeys(names))

  def init_cache(self, batch: int) -> LanguageModelCache:
    """The cache of B rows before the first token; it needs no parameters."""
    return LanguageModelCache(jnp.zeros(batch, jnp.int32), self.core.init_cache(batch, self.width))

  def _predict(self, hidden_btd: jax.Array, stages: tuple[StageOutput, ...]) -> LanguageModelOutput:
    """The output for the core's."""
    if self.final_norm is not None:
      hidden_btd = self.final_norm(hidden_btd)
    if self.tie_embeddings:
      table_vd = self.embedding.variables["params"]["tokens"]["embedding"].astype(self.dtype)
      logits_btv = ops.dot_general(hidden_btd, table_vd.T, (((2,), (0,)), ((), ())))
    else:
      logits_btv = self.logits(hidden_btd)
    return LanguageModelOutput(logits_btv, hidden_btd, stages)

  def _check_pooling(self, pooling: PoolingHints | None) -> None:
    if pooling is None:
      return
    names = [name for name, x in pooling._asdict().items() if x is not None]
    if names and not self.core.stages:
      raise ValueError(
        f"{', '.join(names)}: expected none for a model without token pooling, got some"
      )

  def _check_cache(self, cache: LanguageModelCache, num_rows: int) -> None:
    if self.is_initializing():
      raise ValueError("cache: expected none in `init`, got one")
    arrays.check("cache", cache, LanguageModelCache)
    if cache.length.shape != (num_rows,):
      raise ValueError(f"cache.length: expected {num_rows} rows, got {cache.length.shape[0]}")
