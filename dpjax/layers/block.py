"""One layer of a model: a mixer and a feed-forward network, each with norm and residual."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.layers.common import Dropout, linear, symmetric_uniform
from dpjax.layers.mixer import check_settings, check_takes_starts
from dpjax.ops import arrays

ACTIVATIONS = {
  "relu": nn.relu,
  # With erf, like PyTorch's default.
  "gelu": lambda x: nn.gelu(x, approximate=False),
}


class FeedForward(nn.Module):
  """A network of two layers, or a gated one, at every position.

    relu, gelu  W2 drop(activation(W1 x + b1)) + b2
    swiglu      W2 drop(silu(Wg x + bg) * (W1 x + b1)) + b2

  `out_width` is None for the width of the input; weights are N(0, init_std**2) and biases 0, or,
  for init_std = 0, PyTorch's defaults, and W2 begins `out_scale` times that.

  Source: Shazeer 2020, arXiv:2002.05202, for swiglu.
  """

  hidden_width: int
  activation: str = "relu"
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_width: int | None = None
  use_bias: bool = True
  out_scale: float = 1.0

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """[..., D] -> [..., `out_width`], each position on its own."""
    inputs = arrays.check("inputs", inputs, Float[Array, "... D"])
    sizes = ("hidden_width",) if self.out_width is None else ("hidden_width", "out_width")
    check_settings(self, sizes=sizes, rates=("dropout",))
    arrays.choice("activation", self.activation, (*ACTIVATIONS, "swiglu"))
    width = inputs.shape[-1]
    out_width = width if self.out_width is None else self.out_width
    # One array of rows: otherwise each product would keep its own reshape for the gradient.
    rows = ops.as_factor(inputs.reshape(-1, width))
    x = self._linear(rows, self.hidden_width, "hidden")
    is_relu = self.activation == "relu"
    if self.activation == "swiglu":
      x *= nn.silu(self._linear(rows, self.hidden_width, "gate"))
    elif not is_relu:
      x = ACTIVATIONS[self.activation](x)
    x = ops.as_factor(Dropout(self.dropout, is_relu)(x, deterministic=deterministic))
    x = self._linear(x, out_width, "out", self.out_scale)
    return x.reshape(*inputs.shape[:-1], out_width)

  def _linear(self, x: jax.Array, features: int, name: str, scale: float = 1.0) -> jax.Array:
    zeros, uniform = nn.initializers.zeros, symmetric_uniform(x.shape[-1] ** -0.5)
    bias_init = zeros if self.init_std else uniform
    options: Any = dict(use_bias=self.use_bias, bias_init=bias_init)
    return linear(self, features, name, scale=scale, **options)(x)


class Block(nn.Module):
  """A mixer and a feed-forward network, with residuals and dropout.

    post-norm   x = N(x + drop(mix(x)));  x = N(x + drop(ffn(x)))
    pre-norm    x = x + drop(mix(N(x)));  x = x + drop(ffn(N(x)))

  Attributes:
    mixer: a `dpjax.layers.mixer.Mixer`.
    feed_forward: a `FeedForward`, or any module that takes `deterministic`; None for no second
      branch.
    mixer_norm: the N of the mixer, such as `Norm()`.
    feed_forward_norm: that of the feed-forward network, another instance, or None.
    is_pre_norm: whether the norms come before the branches.
    dropout: dropout rate of both branches, before they are added.
  """

  mixer: nn.Module
  feed_forward: nn.Module | None
  mixer_norm: nn.Module
  feed_forward_norm: nn.Module | None
  is_pre_norm: bool = False
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self, inputs: jax.Array, *, deterministic: bool = True, cache: Any = None, **mixer_inputs
  ) -> Any:
    """[B, T, D] -> [B, T, D], with a cache also the mixer's new cache."""
    x_btd = arrays.check("inputs", inputs, Float[Array, "B T D"])
    check_settings(self, rates=("dropout",))
    mixer: Any = self.mixer
    if "document_starts" in mixer_inputs:
      check_takes_starts(mixer)

    def mix(x_btd):
      nonlocal cache
      if cache is None:
        return mixer(x_btd, deterministic=deterministic, **mixer_inputs)
      y_btd, cache = mixer(x_btd, deterministic=deterministic, cache=cache, **mixer_inputs)
      return y_btd

    branches: list[Any] = [(mix, self.mixer_norm)]
    if self.feed_forward is not None:
      feed_forward: Any = functools.partial(self.feed_forward, deterministic=deterministic)
      branches.append((feed_forward, self.feed_forward_norm))
    for branch, norm in branches:
      drop = functools.partial(Dropout(self.dropout), deterministic=deterministic)
      if self.is_pre_norm:  # the sum in its own dtype, perhaps a wider one
        x_btd = x_btd + drop(branch(norm(x_btd))).astype(x_btd.dtype)
      else:
        x_btd = norm(x_btd + drop(branch(x_btd)))
    return x_btd if cache is None else (x_btd, cache)
