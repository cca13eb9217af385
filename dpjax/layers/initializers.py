"""Initializers of the authors' models: PyTorch's defaults, or N(0, s**2)."""

import functools
from typing import Any

import jax
from flax import linen as nn

from dpjax import ops
from dpjax.ops.products import promote

# How linear layers multiply.
PRODUCTS: Any = dict(dot_general=ops.dot_general, promote_dtype=promote)
# U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the weights of torch.nn.Linear.
linear_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def weights(std: float, default: nn.initializers.Initializer) -> nn.initializers.Initializer:
  """N(0, std**2), as in the Extractors' paper (Sec. 6); `default` if std is 0."""
  return nn.initializers.normal(std) if std else default


def symmetric_uniform(bound: float) -> nn.initializers.Initializer:
  """U(-bound, bound); with bound = 1/sqrt(fan_in), the biases of torch.nn.Linear."""
  return functools.partial(jax.random.uniform, minval=-bound, maxval=bound)


def norm_gains(std: float) -> nn.initializers.Initializer:
  """N(1, std**2), the gains of a LayerNorm; all 1 if std is 0."""
  return (lambda *x: 1 + nn.initializers.normal(std)(*x)) if std else nn.initializers.ones


def linear(module: Any, features: int, name: str, **options: Any) -> nn.Dense:
  """A linear layer of a module, with the weights of its `init_std`; without bias by default."""
  return nn.Dense(
    features,
    dtype=module.dtype,
    kernel_init=weights(module.init_std, linear_kernel),
    **PRODUCTS,
    name=name,
    **{"use_bias": False, **options},
  )
