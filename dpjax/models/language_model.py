"""Embedding -> blocks -> logits. B batch, T position, D width, V vocabulary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, Integer

from dpjax import ops
from dpjax.layers import common, embeddings
from dpjax.layers.mixer import check_settings
from dpjax.models.hourglass import Hourglass
from dpjax.models.stack import Stack
from dpjax.ops import arrays
from dpjax.ops.placement import automatic_axes


class LanguageModelCache(NamedTuple):
  """The cache of a model after the tokens so far."""

  length: Int32[Array, "B"]  # the number of tokens so far in each row
  layers: Any  # the cache of each layer's mixer in order, or an `HourglassCache`


class LanguageModelOutput(NamedTuple):
  """Logits, [B, T, V]: `logits[:, t]` predicts token t + 1.

  `hidden`, [B, T, D], is the input of `LanguageModel.output_layer`. With token pooling,
  `boundaries`, [B, T], are 1 where a segment ends; `boundary_logits` and `boundary_probabilities`
  are None if the boundaries do not produce them, and `inner` has those of a second pooling
  (`InnerBoundaries`).
  """

  logits: jax.Array
  boundaries: jax.Array | None = None
  boundary_logits: jax.Array | None = None
  cache: LanguageModelCache | None = None
  boundary_probabilities: jax.Array | None = None
  inner: Any = None
  hidden: jax.Array | None = None


class LanguageModel(nn.Module):
  """A causal language model with any mixer.

  Attributes:
    vocab_size: V.
    width: D.
    max_length: the longest T.
    layers: the blocks in order; None with an hourglass.
    hourglass: a `dpjax.models.Hourglass`; None with `layers`.
    relative_positions: the positions and biases that the relative attention of all `layers` shares,
      from its `make_positions`; None without relative attention.
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
  layers: Stack | None = None
  hourglass: Hourglass | None = None
  relative_positions: nn.Module | None = None
  positions: str = "sinusoidal"
  dropout: float = 0.0
  final_norm: nn.Module | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  use_bias: bool = True
  tie_embeddings: bool = False
  embedding_std: float = 0.0

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    deterministic: bool = True,
    boundaries: jax.Array | None = None,
    boundary_noise: jax.Array | None = None,
    capacity: int | None = None,
    cache: LanguageModelCache | None = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> LanguageModelOutput:
    """[B, T] token ids -> logits [B, T, V].

    With a cache, the tokens continue from it, and the logits equal those of whole rows:

      output = model.apply(variables, prompt, cache=model.init_cache(batch))
      output = model.apply(variables, token, cache=output.cache)    # [B, 1], and so on

    Args:
      tokens: [B, T], integers in [0, V).
      deterministic: False in training, where dropout draws from the "dropout" stream.
      boundaries: see `dpjax.models.Hourglass`, also for the next two.
      boundary_noise: [B, T].
      capacity: S.
      cache: None, or, in inference without `document_starts`, from `init_cache` or the previous
        output.
      lengths: [B], int32, with a cache: the number of real tokens in each row; None means all.
      document_starts: [B, T], 1 at the first token of each document, else 0. Each document gives
        the same outputs as by itself; rows may be longer than `max_length`, documents may not. None
        means that each row is one document.

    Raises:
      ValueError: an argument is not as above, or the model does not support it.
    """
    check_settings(self)
    tokens = arrays.check("tokens", tokens, Integer[Array, "B T"])
    if cache is not None:
      self._check_step(tokens, cache, deterministic, capacity, document_starts)
    elif lengths is not None:
      raise ValueError("lengths: expected none without a cache, got some")
    elif document_starts is not None:
      document_starts = ops.check_starts(document_starts, tokens.shape)
    options: Any = dict(boundaries=boundaries, boundary_noise=boundary_noise)
    num_before = None if cache is None else cache.length
    full: Any = dict(deterministic=deterministic, document_starts=document_starts)
    embedding = embeddings.TokenAndPosition(
      *(self.vocab_size, self.width, self.max_length, self.positions, self.dropout),
      *(self.embedding_std or self.init_std, self.dtype),
      name="embedding",
    )
    x_btd = embedding(tokens, num_before=num_before, **full)
    pooling: dict[str, Any] = {"cache": None}
    if self.hourglass is None:
      stack, positions = self._core(), None
      names = [name for name, x in {**options, "capacity": capacity}.items() if x is not None]
      if names:
        raise ValueError(
          f"{', '.join(names)}: expected none for a model without token pooling, got some"
        )
      if self.relative_positions is not None:
        length = tokens.shape[1] if cache is None else stack.num_distances
        positions = self.relative_positions(length, self.width, deterministic=deterministic)
      if cache is None:
        x_btd = stack(x_btd, positions=positions, **full)
      else:
        x_btd, pooling["cache"] = stack.step(x_btd, cache.layers, lengths, positions=positions)
    else:
      if cache is None:
        output = self.hourglass(x_btd, tokens, capacity=capacity, **full, **options)
      else:
        options |= dict(num_before=num_before, lengths=lengths)
        output = self.hourglass.step(x_btd, tokens, cache.layers, **options)
      pooling = output._asdict()
      x_btd = pooling.pop("hidden")
    layers = pooling.pop("cache")
    if cache is not None:
      num_new = tokens.shape[1] if lengths is None else lengths
      cache = LanguageModelCache(cache.length + num_new, layers)
    if self.final_norm is not None:
      x_btd = self.final_norm(x_btd)
    if self.tie_embeddings:
      table_vd = embedding.variables["params"]["tokens"]["embedding"].astype(self.dtype)
      logits_btv = ops.dot_general(x_btd, table_vd.T, (((2,), (0,)), ((), ())))
    else:
      logits_btv = nn.Dense(
        self.vocab_size,
        use_bias=self.use_bias,
        dtype=self.dtype,
        kernel_init=common.weights(self.init_std, common.symmetric_uniform(0.1)),
        dot_general=ops.dot_general,
        name="logits",
      )(x_btd)
    return LanguageModelOutput(logits_btv, cache=cache, hidden=x_btd, **pooling)

  @nn.nowrap
  def apply(self, variables: Mapping, tokens: ArrayLike, *args, **kwargs) -> Any:
    """`flax.linen.Module.apply`, also for arrays on a mesh with explicit axes."""

    def of_tokens(tokens, variables, args, kwargs):
      return nn.Module.apply(self, variables, tokens, *args, **kwargs)

    return automatic_axes(of_tokens)(tokens, variables, args, kwargs)

  def output_layer(self, params: Mapping) -> tuple[jax.Array, jax.Array | None]:
    """The kernel [D, V] and bias [V], or None, of logits = hidden @ kernel + bias."""
    if self.tie_embeddings:
      return params["embedding"]["tokens"]["embedding"].T, None
    return params["logits"]["kernel"], params["logits"].get("bias")

  def unstack(self, params: Mapping) -> dict:
    """Copies the parameters layer by layer, so that cached steps need not copy them."""
    name = "hourglass" if self.layers is None else "layers"
    return {**params, name: self._core().unstack(params[name])}

  @property
  def has_cache(self) -> bool:
    """Whether all mixers have a cache; else each new token takes a pass over the window."""
    return self._core().has_cache

  def init_cache(self, batch: int) -> LanguageModelCache:
    """The cache of B rows before the first token; it needs no parameters."""
    layers = self._core().init_cache(batch, self.width)
    return LanguageModelCache(jnp.zeros(batch, jnp.int32), layers)

  def _core(self) -> Any:
    core = self.hourglass if self.layers is None else self.layers
    if core is None:
      raise ValueError("layers, hourglass: expected one of them, got neither")
    return core

  def _check_step(self, tokens, cache, deterministic, capacity, document_starts) -> None:
    if not deterministic:
      raise ValueError("deterministic: expected True with a cache, got False")
    if self.is_initializing():
      raise ValueError("cache: expected none in `init`, got one")
    if document_starts is not None:
      raise ValueError("document_starts: expected none with a cache, got some")
    if capacity is not None:
      raise ValueError(f"capacity: expected none with a cache, got {capacity}")
    arrays.check("cache", cache, LanguageModelCache)
    if cache.length.shape != tokens.shape[:1]:
      rows = tokens.shape[0]
      raise ValueError(f"cache.length: expected {rows} rows, got {cache.length.shape[0]}")
