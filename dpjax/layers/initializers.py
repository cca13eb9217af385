"""How parameters begin: PyTorch's defaults, which the authors' models started from."""

import jax
import jax.numpy as jnp
from flax import linen as nn

# U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the weights of torch.nn.Linear.
linear_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def symmetric_uniform(bound: float) -> nn.initializers.Initializer:
  """U(-bound, bound), with bound = 1/sqrt(fan_in) the biases of torch.nn.Linear."""

  def initialize(key, shape, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return initialize
