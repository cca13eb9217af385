"""What a model's settings supply to its parts, besides their own: declared once for each kind.

These fields are not settings. A component receives only those that it declares.
"""

from typing import TYPE_CHECKING, NamedTuple

from dpjax.config.setting import Settings

if TYPE_CHECKING:
  from flax import linen as nn
  from jax.typing import DTypeLike


class ModuleFields(NamedTuple):
  """The fields that all modules around the components have.

  Attributes:
    init_std: the standard deviation of weights; 0: PyTorch's defaults.
    dtype: that of the computation.
  """

  init_std: float
  dtype: "DTypeLike"


class MixerFields(NamedTuple):
  """The fields that a mixer receives from its model; see `dpjax.layers.Mixer`.

  `position_dropout` is the dropout rate of embeddings.
  """

  max_length: int
  position_dropout: float
  init_std: float
  dtype: "DTypeLike"
  out_scale: float


class BoundariesFields(NamedTuple):
  """The fields that boundaries receive from their model.

  Attributes:
    width: D, that of the vectors that they read.
    predictor_width: that of the feed-forward networks.
    init_std: the standard deviation of weights; 0: PyTorch's defaults.
    dtype: that of the computation.
    frozen: the model of another run, for boundaries that use one.
  """

  width: int
  predictor_width: int
  init_std: float
  dtype: "DTypeLike"
  frozen: "nn.Module | None"


def module_fields(model: Settings) -> ModuleFields:
  """The fields of a model, its stages and its feed-forward networks."""
  return ModuleFields(init_std=model["init_std"], dtype=_dtype(model))


def mixer_fields(model: Settings, *, depth: int = 0, out_scale: float = 1.0) -> MixerFields:
  """The fields of a mixer inside `depth` poolings; each pooling may add a null group to a row."""
  return MixerFields(
    max_length=model["max_length"] + depth,
    position_dropout=model["dropout"],
    init_std=model["init_std"],
    dtype=_dtype(model),
    out_scale=out_scale,
  )


def boundaries_fields(model: Settings, frozen: "nn.Module | None" = None) -> BoundariesFields:
  """The fields of the boundaries of a section with the settings of a model."""
  return BoundariesFields(
    width=model["width"],
    predictor_width=model["feed_forward_width"],
    init_std=model["init_std"],
    dtype=_dtype(model),
    frozen=frozen,
  )


def _dtype(model: Settings) -> "DTypeLike":
  import jax.numpy as jnp  # Reading settings does not import JAX; making a component does.

  return jnp.dtype(model["dtype"])
