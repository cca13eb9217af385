"""Embedding -> blocks -> logits. B batch, T position, D width, V vocabulary."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from dpjax import ops
from dpjax.layers import blocks, embeddings, initializers
from dpjax.models.stack import Stack
from dpjax.ops import checks
from dpjax.ops.documents import document_length, starts_in_chunk
from dpjax.ops.explicit_axes import automatic_axes


class LanguageModelCache(NamedTuple):
  """The cache of a model after the tokens so far.

  Attributes:
    length: [B], int32, the number of tokens so far in each row's last document.
    layers: the cache of each layer's mixer in order; with token pooling, a
      `dpjax.models.hourglass.HourglassCache`.
  """

  length: jax.Array
  layers: Any


class LanguageModelOutput(NamedTuple):
  """The output of a language model.

  Attributes:
    logits: [B, T, V]; row t is for token t + 1.
    boundaries: [B, T], 1 where a segment ends, else 0; None without token pooling. For the
      dtype see `dpjax.models.hourglass.HourglassOutput`.
    boundary_logits: [B, T], the predictor's logits; None without one.
    cache: the new cache, if one was given.
    boundary_probabilities: [B, T], if the boundaries have them beside logits.
    inner: a `dpjax.models.hourglass.StageBoundaries`, if segments are pooled again.
    hidden: [B, T, D], the input of `LanguageModel.output_layer`, which makes the logits.
  """

  logits: jax.Array
  boundaries: jax.Array | None = None
  boundary_logits: jax.Array | None = None
  cache: LanguageModelCache | None = None
  boundary_probabilities: jax.Array | None = None
  inner: Any = None
  hidden: jax.Array | None = None


class LanguageModel(nn.Module):
  """A causal language model around any mixer.

  Attributes:
    vocab_size: V.
    width: D.
    max_length: the longest T.
    layers: the blocks in order; None with an hourglass.
    make_hourglass: makes a `dpjax.models.hourglass.Hourglass` from its `name`, or None.
    make_positions: makes, from a `name`, the positions and biases that the relative
      attention of all `layers` shares; None without relative attention.
    positions: "sinusoidal", "learned" or "none".
    dropout: the dropout rate of the embeddings.
    final_norm: whether there is a norm before the output layer, as in pre-norm models.
    init_std: standard deviation of embeddings and output weights, N(0, init_std**2);
      0: U(-0.1, 0.1). Biases are 0.
    norm_init_std: standard deviation of the gains of the final norm.
    dtype: the dtype of the computation; parameters are float32.
    norm_kind: the kind of the final norm; see `dpjax.layers.blocks.Norm`.
    use_bias: whether the final norm and the logits have biases.
    tie_embeddings: whether the logits are products with the token table, without a bias,
      instead of a matrix of their own (Press and Wolf 2017, arXiv:1608.05859).
    norm_epsilon: that of the final norm.
  """

  vocab_size: int
  width: int
  max_length: int
  layers: Stack | None = None
  make_hourglass: Callable[..., nn.Module] | None = None
  make_positions: Callable[..., nn.Module] | None = None
  positions: str = "sinusoidal"
  dropout: float = 0.0
  final_norm: bool = False
  init_std: float = 0.0
  norm_init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  norm_kind: str = "layer_norm"
  use_bias: bool = True
  tie_embeddings: bool = False
  norm_epsilon: float = 1e-5

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
    is_start: jax.Array | None = None,
  ) -> LanguageModelOutput:
    """[B, T] token ids -> logits [B, T, V].

    With a cache, the tokens continue from it, and the logits equal those of a pass over whole
    rows:

      cache = model.init_cache(batch)
      output = model.apply(variables, prompt, cache=cache)
      output = model.apply(variables, token, cache=output.cache)    # [B, 1], and so on

    Caches are for inference, without dropout or gradients.

    Args:
      tokens: [B, T], integers in [0, V).
      deterministic: False in training, where dropout draws from the "dropout" stream.
      boundaries: [B, T], 0 or 1, the ends of segments for a model with token pooling,
        instead of its own.
      boundary_noise: see `dpjax.models.hourglass.Hourglass`.
      capacity: see `dpjax.models.hourglass.Hourglass`.
      cache: None, or from `init_cache` or the previous output.
      lengths: [B], int32, with a cache: the number of real tokens in each row, before its
        padding, which has no effect; None means all.
      is_start: [B, T], 1 at the first token of each document, else 0. A row then holds several
        documents, and each gives the same outputs as alone; the row may be longer than
        `max_length`, a document may not. With a cache, the first of a row may be 0 to
        continue its document. None means that each row is one document.

    Returns:
      `LanguageModelOutput`.

    Raises:
      ValueError: T is above `max_length`; `boundaries`, `boundary_noise` or `capacity` is
        wrong, or given to a model without token pooling; a cache is given in training or
        to `init`; `lengths` are given without a cache; or `is_start` is wrong, or given to a
        model whose mixers or boundaries do not take them.
    """
    if cache is not None and not deterministic:
      raise ValueError("deterministic: expected True with a cache, got False")
    if cache is not None and self.is_initializing():
      raise ValueError("cache: expected none in `init`, got one")
    if cache is None and lengths is not None:
      raise ValueError("lengths: expected none without a cache, got some")
    if cache is not None:
      checks.record(
        "cache", cache, LanguageModelCache, dict(B=len(tokens)), length=("B", jnp.int32)
      )
    if is_start is not None and cache is None:
      is_start = ops.check_starts(is_start, tokens.shape)
    elif is_start is not None and cache is not None:
      is_start = starts_in_chunk(is_start, tokens.shape, lengths)
      is_start = is_start.at[:, 0].max((cache.length == 0).astype(is_start.dtype))
    embedding = embeddings.TokenAndPosition(
      self.vocab_size,
      self.width,
      self.max_length,
      self.positions,
      self.dropout,
      self.init_std,
      self.dtype,
      name="embedding",
    )
    x_btd = embedding(
      tokens,
      deterministic=deterministic,
      num_before=None if cache is None else cache.length,
      is_start=is_start,
    )
    of_pooling: dict[str, Any] = dict(
      boundaries=boundaries, boundary_noise=boundary_noise, capacity=capacity
    )
    found: dict[str, Any] = {}
    if self.make_hourglass is not None:
      if cache is not None:
        of_pooling |= dict(cache=cache.layers, num_before=cache.length, lengths=lengths)
      found = self.make_hourglass(name="hourglass")(
        x_btd, tokens, deterministic=deterministic, is_start=is_start, **of_pooling
      )._asdict()
      x_btd, layers = found.pop("hidden"), found.pop("cache")
    else:
      given = [name for name, value in of_pooling.items() if value is not None]
      if self.layers is None:
        raise ValueError("layers, make_hourglass: expected one of them, got neither")
      if given:
        raise ValueError(
          f"{', '.join(given)}: expected none for a model without token pooling, got some"
        )
      positions = None
      if self.make_positions is not None:
        positions = self.make_positions(name="relative_positions")
      named: dict[str, Any] = dict(name="layers", positions=positions)
      if cache is None:
        x_btd = self.layers(x_btd, deterministic=deterministic, is_start=is_start, **named)
      else:
        step = self.layers.with_caches(self.width, **named)
        x_btd, layers = step(x_btd, cache.layers, lengths, is_start)
    if cache is not None:
      if is_start is None:
        length = cache.length + (tokens.shape[1] if lengths is None else lengths)
      else:
        length = document_length(is_start, cache.length, lengths)
      cache = LanguageModelCache(length, layers)
    if self.final_norm:
      norm = self.norm_kind, self.dtype, self.norm_init_std, self.use_bias, self.norm_epsilon
      x_btd = blocks.Norm(*norm, name="final_norm")(x_btd)
    if self.tie_embeddings:
      table_vd = embedding.variables["params"]["tokens"]["embedding"].astype(self.dtype)
      contract = ((2,), (0,)), ((), ())
      logits_btv = ops.dot_general(x_btd, table_vd.T, contract)
      return LanguageModelOutput(logits_btv, cache=cache, hidden=x_btd, **found)
    logits_btv = nn.Dense(
      self.vocab_size,
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, initializers.symmetric_uniform(0.1)),
      dot_general=ops.dot_general,
      name="logits",
    )(x_btd)
    return LanguageModelOutput(logits_btv, cache=cache, hidden=x_btd, **found)

  @nn.nowrap
  def apply(self, variables: Mapping, tokens: ArrayLike, *args, **kwargs) -> Any:
    """`flax.linen.Module.apply`, also for arrays on a mesh with explicit axes."""

    def of_tokens(tokens, variables, args, kwargs):
      return nn.Module.apply(self, variables, tokens, *args, **kwargs)

    return automatic_axes(of_tokens)(tokens, variables, args, kwargs)

  def output_layer(self, params: Mapping) -> tuple[jax.Array, jax.Array | None]:
    """The kernel [D, V] and bias [V] that make logits from `LanguageModelOutput.hidden`.

      logits = hidden @ kernel + bias

    The bias is None in a model without biases or with tied embeddings.
    """
    if self.tie_embeddings:
      return params["embedding"]["tokens"]["embedding"].T, None
    return params["logits"]["kernel"], params["logits"].get("bias")

  def unstack(self, params: Mapping) -> dict:
    """A copy of the parameters, separate for each layer.

    `apply` with a cache takes either form. With this one, made before a loop over single
    tokens, the steps copy no parameters.
    """
    if self.layers is not None:
      return {**params, "layers": self.layers.unstack(params["layers"])}
    hourglass = self._hourglass().unstack(params["hourglass"])
    return {**params, "hourglass": hourglass}

  @property
  def has_cache(self) -> bool:
    """Whether all mixers have a cache; else each new token takes a pass over the window."""
    if self.layers is not None:
      return self.layers.has_cache
    return self._hourglass().has_cache

  def init_cache(self, batch: int) -> LanguageModelCache:
    """The cache of B rows before the first token; it needs no parameters."""
    if self.layers is not None:
      layers = self.layers.init_caches(batch, self.width)
    else:
      layers = self._hourglass().init_cache(batch, self.width)
    return LanguageModelCache(jnp.zeros(batch, jnp.int32), layers)

  def _hourglass(self) -> Any:
    if self.make_hourglass is None:
      raise ValueError("layers, make_hourglass: expected one of them, got neither")
    return self.make_hourglass(parent=None)


def frozen_path(model: nn.Module) -> tuple[str, ...]:
  """Where in a model's parameters those of the frozen model lie that its boundaries use.

  Returns:
    The names from the outside in; () for a model without one.
  """
  if not isinstance(model, LanguageModel) or model.make_hourglass is None:
    return ()
  boundaries = model.make_hourglass(parent=None).make_boundaries(parent=None)
  needs_run = getattr(boundaries, "needs_run", False)
  return ("hourglass", "boundary_predictor", "frozen") if needs_run else ()


def with_frozen(params: Mapping, frozen: Mapping) -> dict:
  """A model's parameters, with these for the frozen model that its boundaries use."""
  inner = params["hourglass"]
  boundaries = {**inner["boundary_predictor"], "frozen": frozen}
  return {**params, "hourglass": {**inner, "boundary_predictor": boundaries}}
