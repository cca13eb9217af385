"""One layer of a model: a mixer and a feed-forward network, each with norm and residual."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import dropout, initializers
from dpjax.layers.mixer import check_takes_starts

ACTIVATIONS = {
  "relu": nn.relu,
  # By erf, as PyTorch's default.
  "gelu": lambda x: nn.gelu(x, approximate=False),
}


def layer_norm(dtype: jnp.dtype, name: str, gain_std: float = 0.0) -> nn.LayerNorm:
  """LayerNorm with PyTorch's epsilon; mean and variance are taken in float32.

  The gains begin at N(1, gain_std**2).
  """
  # The variance of the deviations, as PyTorch: a large mean costs it no digits.
  return nn.LayerNorm(
    epsilon=1e-5,
    use_fast_variance=False,
    dtype=dtype,
    scale_init=initializers.norm_gains(gain_std),
    name=name,
  )


class FeedForward(nn.Module):
  """W2 drop(activation(W1 x + b1)) + b2.

  Attributes:
    hidden_width: rows of W2.
    activation: "relu" or "gelu".
    dropout: of the hidden layer.
    init_std: of the weights, N(0, init_std**2), the biases being 0; 0: PyTorch's defaults.
    dtype: of the computation; parameters are float32.
    out_width: columns of W2; None is the width of the input.
  """

  hidden_width: int
  activation: str = "relu"
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_width: int | None = None

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """[B, T, D] -> [B, T, `out_width`], every position by itself."""
    x = self._linear(inputs, self.hidden_width, "hidden")
    x = ACTIVATIONS[self.activation](x)
    x = dropout.Dropout(self.dropout)(x, deterministic=deterministic)
    return self._linear(x, self.out_width or inputs.shape[-1], "out")

  def _linear(self, x: jax.Array, features: int, name: str) -> jax.Array:
    bias_init = initializers.symmetric_uniform(x.shape[-1] ** -0.5)
    return nn.Dense(
      features,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, initializers.linear_kernel),
      bias_init=initializers.biases(self.init_std, bias_init),
      dot_general=ops.dot_general,
      name=name,
    )(x)


class Block(nn.Module):
  """A mixer and a feed-forward network, with residuals and dropout.

    norm = "post":  x = LN(x + drop(mix(x)));  x = LN(x + drop(ffn(x)))
    norm = "pre":   x = x + drop(mix(LN(x)));  x = x + drop(ffn(LN(x)))

  Attributes:
    make_mixer: called with `name`, gives the mixer (`dpjax.layers.mixer.Mixer`).
    hidden_width: of the feed-forward network.
    norm: "post" or "pre".
    activation: "relu" or "gelu".
    dropout: of both branches, before they are added.
    hidden_dropout: within the feed-forward network.
    init_std: of the feed-forward network's weights; as `FeedForward`.
    norm_init_std: of the gains of the norms, N(1, norm_init_std**2).
    dtype: of the computation; parameters are float32.
  """

  make_mixer: Callable[..., nn.Module]
  hidden_width: int
  norm: str = "post"
  activation: str = "relu"
  dropout: float = 0.0
  hidden_dropout: float = 0.0
  init_std: float = 0.0
  norm_init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: Any = None,
    **mixer_inputs,
  ) -> Any:
    """[B, T, D] -> [B, T, D], and with a cache that of the mixer after it.

    The mixer is given `mixer_inputs`, too.
    """
    mixer = self.make_mixer(name="mixer")
    if "starts" in mixer_inputs:
      check_takes_starts(mixer)

    def mix(x: jax.Array, *, deterministic: bool) -> jax.Array:
      nonlocal cache
      if cache is None:
        return mixer(x, deterministic=deterministic, **mixer_inputs)
      y, cache = mixer(x, deterministic=deterministic, cache=cache, **mixer_inputs)
      return y

    feed_forward = FeedForward(
      self.hidden_width,
      self.activation,
      self.hidden_dropout,
      self.init_std,
      self.dtype,
      name="feed_forward",
    )
    x = inputs
    for branch, norm_name in ((mix, "mixer_norm"), (feed_forward, "feed_forward_norm")):
      norm = layer_norm(self.dtype, norm_name, self.norm_init_std)
      drop = partial(dropout.Dropout(self.dropout), deterministic=deterministic)
      if self.norm == "post":
        x = norm(x + drop(branch(x, deterministic=deterministic)))
      else:
        x = x + drop(branch(norm(x), deterministic=deterministic))
    return x if cache is None else (x, cache)
