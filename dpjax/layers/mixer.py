"""The base class of token mixers, and what it knows of their rows. B batch, T position, D width."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.common import check_settings
from dpjax.ops import arrays

Cache = PyTree[jax.Array]


class RelativePositions(NamedTuple):
  """Embeddings of distances, and biases of queries: for keys and for positions."""

  table: Float[Array, "N D"]
  content_bias: Float[Array, "H E"]
  position_bias: Float[Array, "H E"]


class Context(struct.PyTreeNode):
  """What a layer knows of its rows besides their vectors.

  `Context()` are whole rows of one document each, in evaluation. A model makes a context once, and
  each layer hands it on. It is a pytree; `replace` gives one with other values.

  Attributes:
    deterministic: False in training, where layers draw from the stream "dropout".
    document_starts: [B, T], 1 where a document begins, else 0; not with a cache. None: each row is
      one document.
    lengths: [B], int32, the number of real positions in each row, before its padding; None: all.
    num_before: [B], int32, with a cache the number of earlier positions in each row.
    positions: what the layers of relative attention share.
  """

  deterministic: bool = struct.field(pytree_node=False, default=True)
  document_starts: jax.Array | None = None
  lengths: jax.Array | None = None
  num_before: jax.Array | None = None
  positions: RelativePositions | None = None

  def truncate(self, length: int) -> "Context":
    """The context of the first positions of each row."""
    if self.document_starts is None:
      return self
    return self.replace(document_starts=self.document_starts[:, :length])


def as_context(
  context: Context | None,
  *,
  deterministic: bool | None = None,
  document_starts: jax.Array | None = None,
  lengths: jax.Array | None = None,
) -> Context:
  """The context of a call: the one that a layer hands on, or that of a user's keywords.

  `deterministic` is True unless it is passed.

  Raises:
    ValueError: both are passed.
  """
  if context is None:
    return Context(
      deterministic=True if deterministic is None else deterministic,
      document_starts=document_starts,
      lengths=lengths,
    )
  passed = []
  if deterministic is not None:
    passed.append("deterministic")
  if document_starts is not None:
    passed.append("document_starts")
  if lengths is not None:
    passed.append("lengths")
  if passed:
    raise ValueError(
      f"{', '.join(passed)}: expected a field of the context, got a keyword beside it"
    )
  return context


class Mixer(nn.Module, kw_only=True):
  """A token mixer, which replaces self-attention: [B, T, D] -> [B, T, D].

    y = mixer(x)                                whole rows, in evaluation
    y = mixer(x, deterministic=False)           in training
    y = mixer(x, document_starts=starts)        several documents in a row
    y, cache = mixer.step(x, cache)             the next positions of each row

  A subclass writes `mix`, and `init_cache` if it has a cache; the base class checks the inputs. A
  mixer is causal, treats the rows of a batch independently, and takes any 1 <= T <= `max_length`.
  Without `init_cache`, generation takes full passes.

  Attributes:
    separates_documents: whether it reads `context.document_starts`. Each document then has the
      outputs that it would have alone, and rows may be longer than `max_length`. If not, rows of
      several documents are refused.
    is_unbounded: whether a row may grow beyond `max_length` with a cache.
    max_length: the longest T.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
    out_scale: a factor of the output matrix's initial values.
  """

  separates_documents: ClassVar[bool] = False
  is_unbounded: ClassVar[bool] = True

  max_length: int
  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    check_settings(self, sizes=("max_length",))
    super().__post_init__()

  def mix(self, inputs: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
    """Mixes [B, T, D]; returns the outputs and the next cache, or None without a cache.

    Args:
      inputs: [B, T, D]; with a cache the next T positions of each row.
      context: see `Context`.
      cache: None for whole rows, or from `init_cache` or the previous call.
    """
    raise NotImplementedError

  def init_cache(self, batch: int, width: int) -> Cache:
    """The cache of B rows before the first position, a pytree of arrays; it needs no parameters."""
    raise NotImplementedError

  def check_width(self, width: int) -> None:
    """Raises a `ValueError`, `field: expected ..., got ...`, for a width D that does not fit.

    Called with the inputs, and when a configuration is checked. A subclass whose fields depend on D
    writes it.
    """

  def make_positions(self) -> nn.Module | None:
    """The module of positions that this mixer shares with the other layers of a model, or None.

    A model calls one such module, `module(length, width, deterministic=...)`, for all mixers that
    make equal ones, and hands them its result as `context.positions`. Make it with `parent=None`:
    it belongs to the model.
    """
    return None

  @property
  def has_cache(self) -> bool:
    """Whether the class has `init_cache`."""
    return type(self).init_cache is not Mixer.init_cache

  def __call__(
    self,
    inputs: jax.Array,
    context: Context | None = None,
    *,
    deterministic: bool | None = None,
    document_starts: jax.Array | None = None,
  ) -> jax.Array:
    """Mixes whole rows, [B, T, D] -> [B, T, D].

    Args:
      inputs: [B, T, D].
      context: what a model hands on, in place of the keywords.
      deterministic: False in training, which applies dropout; None means True.
      document_starts: [B, T], 1 where a document begins, else 0.

    Raises:
      ValueError: `inputs` is not a float array [B, T, D], or is longer than `max_length` without
        `document_starts`; or the mixer does not separate documents.
    """
    context = as_context(context, deterministic=deterministic, document_starts=document_starts)
    inputs = self._check_inputs(inputs)
    if context.document_starts is not None:
      check_documents(self)
      ops.check_starts(context.document_starts, inputs.shape[:2])
    else:
      _check_length(inputs, self.max_length)
    outputs, _ = self._mix(inputs, context, None)
    return outputs

  def step(
    self,
    inputs: jax.Array,
    cache: Cache,
    context: Context | None = None,
    *,
    lengths: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Mixes the next T positions of each row; returns the outputs and the cache after them.

    Args:
      inputs: [B, T, D].
      cache: from `init_cache` or the previous step.
      context: what a model hands on, in place of the keyword.
      lengths: [B], int32, the number of real positions in each row; None: all. The outputs of
        padding are meaningless.

    Raises:
      ValueError: `inputs` is not a float array [B, T, D], or T exceeds `max_length` in a mixer that
        is not unbounded; or there are `document_starts`.
    """
    context = as_context(context, lengths=lengths)
    inputs = self._check_inputs(inputs)
    if context.document_starts is not None:
      raise ValueError(
        "document_starts: expected None with a cache, whose rows are one document each"
      )
    if not self.is_unbounded:
      _check_length(inputs, self.max_length)
    return self._mix(inputs, context, cache)

  def _mix(self, inputs: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
    """`mix`, whose `ValueError` is a `UserError` with the name of a class that is not dpjax's."""
    try:
      return self.mix(inputs, context, cache)
    except ValueError as error:
      is_ours = type(self).__module__.startswith("dpjax.")
      if is_ours or isinstance(error, UserError):
        raise
      hint = "DPJAX_TRACEBACK=1 shows where"
      raise UserError(f"{type(self).__name__}: {error} ({hint})") from error

  def _check_inputs(self, inputs: jax.Array) -> jax.Array:
    inputs = arrays.check("inputs", inputs, Float[Array, "B T D"])
    arrays.check_not_empty(inputs=inputs)
    self.check_width(inputs.shape[2])
    return inputs


def _check_length(inputs: jax.Array, max_length: int) -> None:
  length = inputs.shape[1]
  if length > max_length:
    raise ValueError(f"inputs: expected T <= max_length = {max_length}, got T = {length}")


def features_per_head(width: int, num_heads: int) -> int:
  """D / H; a `ValueError` if D is not a multiple of H."""
  if width % num_heads:
    raise ValueError(f"num_heads: expected a divisor of the width {width}, got {num_heads}")
  return width // num_heads


def check_documents(module: nn.Module) -> None:
  """Raises a `UserError` if a mixer or boundaries do not keep the documents of a row apart."""
  if not getattr(module, "separates_documents", False):
    raise UserError(
      f"document_starts: expected none for a model with {type(module).__name__}, which does not "
      "keep documents apart (its `separates_documents` is False), got some"
    )
