"""Dropout as a module, with keys from the stream "dropout"."""

import jax
from flax import linen as nn

from dpjax import ops


class Dropout(nn.Module):
  """Applies `dpjax.ops.dropout` in training; has no parameters.

  Attributes:
    rate: the probability in [0, 1) that an element is set to zero.
    after_relu: whether to apply a ReLU first.
  """

  rate: float
  after_relu: bool = False

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool) -> jax.Array:
    """[...] -> [...]."""
    if deterministic or not self.rate:
      return nn.relu(inputs) if self.after_relu else inputs
    drop = ops.relu_dropout if self.after_relu else ops.dropout
    return drop(inputs, self.rate, self.make_rng("dropout"))
