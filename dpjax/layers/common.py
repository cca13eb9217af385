"""Shared parts of layers: norms, dropout, linear layers and initial values.

The initial values are those of the authors' models: PyTorch's defaults, or N(0, s**2).
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.errors import unknown
from dpjax.ops import arrays, norms
from dpjax.ops.products import promote

Params = dict[str, Any]  # the parameters of a model: arrays in nested dicts, or trees like them

NORMS = ("layer_norm", "rms_norm")
# U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the weights of torch.nn.Linear.
linear_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def weights(std: float, default: nn.initializers.Initializer) -> nn.initializers.Initializer:
  """N(0, std**2), as in the Extractors' paper (Sec. 6); `default` if std is 0."""
  return nn.initializers.normal(std) if std else default


def symmetric_uniform(bound: float) -> nn.initializers.Initializer:
  """U(-bound, bound); with bound = 1/sqrt(fan_in), the biases of torch.nn.Linear."""
  return functools.partial(jax.random.uniform, minval=-bound, maxval=bound)


class HasInit(Protocol):
  """A module whose fields say how its linear layers begin and compute."""

  init_std: float
  dtype: DTypeLike


def linear(
  module: HasInit,
  features: int,
  name: str,
  *,
  scale: float = 1.0,
  use_bias: bool = False,
  bias_init: nn.initializers.Initializer = nn.initializers.zeros,
) -> nn.Dense:
  """A linear layer with `scale` times the weights of a module's `init_std`; by default no bias."""
  init = weights(module.init_std, linear_kernel)

  def scaled(*args):
    return scale * init(*args)

  return nn.Dense(
    features,
    use_bias=use_bias,
    dtype=module.dtype,
    kernel_init=init if scale == 1 else scaled,
    bias_init=bias_init,
    dot_general=ops.dot_general,
    promote_dtype=promote,  # pyright: ignore[reportArgumentType]
    name=name,
  )


class Norm(nn.Module):
  """A norm over the features, with gains initialised as N(1, gain_std**2).

    layer_norm  gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias
    rms_norm    gain x / sqrt(mean(x**2) + epsilon), without a bias

  Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
  """

  norm_type: str = "layer_norm"
  dtype: DTypeLike = jnp.float32
  gain_std: float = 0.0
  use_bias: bool = True
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Normalizes the last axis."""
    check_settings(self)
    arrays.choice("norm_type", self.norm_type, NORMS)
    x = arrays.check("x", x, Float[Array, "... D"])
    scale = self.param("scale", self._draw_gains, x.shape[-1:], jnp.float32)
    if self.norm_type == "rms_norm":
      return norms.rms_norm(x, scale, epsilon=self.epsilon).astype(self.dtype)
    bias = None
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
    return norms.layer_norm(x, scale, bias, epsilon=self.epsilon).astype(self.dtype)

  def _draw_gains(self, key, shape, dtype):
    if not self.gain_std:
      return jnp.ones(shape, dtype)
    return 1 + nn.initializers.normal(self.gain_std)(key, shape, dtype)


class Dropout(nn.Module):
  """Applies `dpjax.ops.dropout` in training, with keys from the stream "dropout"."""

  rate: float
  after_relu: bool = False

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool) -> jax.Array:
    """[...] -> [...]; `after_relu` applies a ReLU first."""
    if deterministic or not self.rate:
      return nn.relu(inputs) if self.after_relu else inputs
    drop = ops.relu_dropout if self.after_relu else ops.dropout
    return drop(inputs, self.rate, self.make_rng("dropout"))


def check_settings(
  module: nn.Module,
  *,
  sizes: Sequence[str] = (),
  rates: Sequence[str] = (),
  implementations: Collection[str] | None = None,
) -> None:
  """Raises `field: expected ..., got ...` if a field of a module is out of range.

  `sizes` name integers of at least 1, `rates` probabilities below 1; `implementations` are the
  values of the field `implementation` besides None. Every bool, `dtype`, standard deviation
  (`init_std`) and `epsilon` is checked.
  """
  for name in sizes:
    arrays.integer(name, getattr(module, name))
  for name in rates:
    arrays.rate(name, getattr(module, name))
  for field in dataclasses.fields(module):
    _check_field(field.name, field.type, getattr(module, field.name))
  if implementations is None:
    return
  implementation = getattr(module, "implementation", None)
  if implementation is not None and str(implementation) not in implementations:
    raise unknown("implementation", ("None", *implementations), implementation)


def _check_field(name: str, annotation: Any, value: Any) -> None:
  if annotation is bool and not isinstance(value, bool | np.bool_):
    raise ValueError(f"{name}: expected True or False, got {value!r}")
  if name == "dtype":
    arrays.float_dtype(value)
  if name.endswith(("_std", "_scale", "epsilon")):
    arrays.number(name, value, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
