"""Shared parts of layers: norms, dropout, linear layers and initial values.

The initial values are those of the authors' models: PyTorch's defaults, or N(0, s**2).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.layers.mixer import check_settings
from dpjax.ops import arrays, norms
from dpjax.ops.products import promote

Params = dict[str, Any]  # the parameters of a model: arrays in nested dicts, or trees like them

NORMS = ("layer_norm", "rms_norm")
# Options of linear layers: how they multiply.
PRODUCTS: Any = dict(dot_general=ops.dot_general, promote_dtype=promote)
# U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the weights of torch.nn.Linear.
linear_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def weights(std: float, default: nn.initializers.Initializer) -> nn.initializers.Initializer:
  """N(0, std**2), as in the Extractors' paper (Sec. 6); `default` if std is 0."""
  return nn.initializers.normal(std) if std else default


def symmetric_uniform(bound: float) -> nn.initializers.Initializer:
  """U(-bound, bound); with bound = 1/sqrt(fan_in), the biases of torch.nn.Linear."""
  return functools.partial(jax.random.uniform, minval=-bound, maxval=bound)


def linear(
  module: Any, features: int, name: str, *, scale: float = 1.0, **options: Any
) -> nn.Dense:
  """A linear layer with `scale` times the weights of a module's `init_std`; by default no bias."""
  init = weights(module.init_std, linear_kernel)
  return nn.Dense(
    features,
    dtype=module.dtype,
    kernel_init=init if scale == 1 else lambda *args: scale * init(*args),
    **PRODUCTS,
    name=name,
    **{"use_bias": False, **options},
  )


class Norm(nn.Module):
  """A norm over the features, with gains initialised as N(1, gain_std**2).

    layer_norm  gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias
    rms_norm    gain x / sqrt(mean(x**2) + epsilon), without a bias

  Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
  """

  norm_type: str = "layer_norm"
  dtype: jnp.dtype = jnp.float32
  gain_std: float = 0.0
  use_bias: bool = True
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Normalizes the last axis."""
    check_settings(self)
    arrays.choice("norm_type", self.norm_type, NORMS)
    x = arrays.check("x", x, Float[Array, "... D"])
    ones, normal = nn.initializers.ones, nn.initializers.normal(self.gain_std)
    init = (lambda *args: 1 + normal(*args)) if self.gain_std else ones
    scale = self.param("scale", init, x.shape[-1:], jnp.float32)
    if self.norm_type == "rms_norm":
      return norms.rms_norm(x, scale, epsilon=self.epsilon).astype(self.dtype)
    bias = None
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
    return norms.layer_norm(x, scale, bias, epsilon=self.epsilon).astype(self.dtype)


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
