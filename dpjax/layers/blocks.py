"""One layer of a model: a mixer and a feed-forward network, each with norm and residual."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import initializers
from dpjax.layers.mixer import check_settings, check_takes_starts
from dpjax.ops import checks, norms

NORMS = ("layer_norm", "rms_norm")
ACTIVATIONS = {
  "relu": nn.relu,
  # By erf, as PyTorch's default.
  "gelu": lambda x: nn.gelu(x, approximate=False),
}


class Norm(nn.Module):
  """A norm over the features, with gains initialised as N(1, gain_std**2).

    layer_norm  gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias
    rms_norm    gain x / sqrt(mean(x**2) + epsilon), without a bias

  Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
  """

  kind: str
  dtype: jnp.dtype
  gain_std: float = 0.0
  use_bias: bool = True
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., D] -> [..., D]."""
    check_settings(self)
    checks.choice("kind", self.kind, NORMS)
    x = checks.array("x", x, "... D>=1")
    shape = x.shape[-1:]
    scale = self.param("scale", initializers.norm_gains(self.gain_std), shape, jnp.float32)
    if self.kind == "rms_norm":
      return norms.rms_norm(x, scale, epsilon=self.epsilon).astype(self.dtype)
    bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32) if self.use_bias else None
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


class FeedForward(nn.Module):
  """A network of two layers, or a gated one, at every position.

    relu, gelu  W2 drop(activation(W1 x + b1)) + b2
    swiglu      W2 drop(silu(Wg x + bg) * (W1 x + b1)) + b2

  `out_width` is None for the width of the input; weights are N(0, init_std**2) and biases 0, or,
  for init_std = 0, PyTorch's defaults.

  Source: Shazeer 2020, arXiv:2002.05202, for swiglu.
  """

  hidden_width: int
  activation: str = "relu"
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_width: int | None = None
  use_bias: bool = True

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """[B, T, D] -> [B, T, `out_width`], each position on its own."""
    inputs = checks.array("inputs", inputs, "... D>=1")
    sizes = ("hidden_width",) if self.out_width is None else ("hidden_width", "out_width")
    check_settings(self, sizes=sizes, rates=("dropout",))
    checks.choice("activation", self.activation, (*ACTIVATIONS, "swiglu"))
    width = inputs.shape[-1]
    out_width = width if self.out_width is None else self.out_width
    # One array of rows: each product would keep a reshape of its own for the gradient.
    rows = ops.as_factor(inputs.reshape(-1, width))
    x = self._linear(rows, self.hidden_width, "hidden")
    is_relu = self.activation == "relu"
    if self.activation == "swiglu":
      x *= nn.silu(self._linear(rows, self.hidden_width, "gate"))
    elif not is_relu:
      x = ACTIVATIONS[self.activation](x)
    x = ops.as_factor(Dropout(self.dropout, is_relu)(x, deterministic=deterministic))
    return self._linear(x, out_width, "out").reshape(*inputs.shape[:-1], out_width)

  def _linear(self, x: jax.Array, features: int, name: str) -> jax.Array:
    zeros, uniform = nn.initializers.zeros, initializers.symmetric_uniform(x.shape[-1] ** -0.5)
    options: Any = dict(use_bias=self.use_bias, bias_init=zeros if self.init_std else uniform)
    return initializers.linear(self, features, name, **options)(x)


class Block(nn.Module):
  """A mixer and a feed-forward network, with residuals and dropout.

    norm = "post":  x = N(x + drop(mix(x)));  x = N(x + drop(ffn(x)))
    norm = "pre":   x = x + drop(mix(N(x)));  x = x + drop(ffn(N(x)))

  Attributes:
    make_mixer: makes the mixer (`dpjax.layers.mixer.Mixer`) from its `name`.
    dropout: dropout rate of both branches, before they are added.
    hidden_dropout: the dropout rate within the feed-forward network.
    use_bias: whether norms and the feed-forward network have biases. Mixers have their own.
    init_std: for all others see `FeedForward` and `Norm`.
  """

  make_mixer: Callable[..., nn.Module]
  hidden_width: int
  norm_position: str = "post"
  activation: str = "relu"
  dropout: float = 0.0
  hidden_dropout: float = 0.0
  init_std: float = 0.0
  norm_init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  norm_type: str = "layer_norm"
  use_bias: bool = True
  norm_epsilon: float = 1e-5

  @nn.compact
  def __call__(
    self, inputs: jax.Array, *, deterministic: bool = True, cache: Any = None, **mixer_inputs
  ) -> Any:
    """[B, T, D] -> [B, T, D], with a cache also the mixer's new cache."""
    x = checks.array("inputs", inputs, "B T D>=1")
    check_settings(self, rates=("dropout", "hidden_dropout"))
    checks.choice("norm_position", self.norm_position, ("post", "pre"))
    checks.choice("norm_type", self.norm_type, NORMS)
    mixer = self.make_mixer(name="mixer")
    if "document_starts" in mixer_inputs:
      check_takes_starts(mixer)

    def mix(x: jax.Array, *, deterministic: bool) -> jax.Array:
      nonlocal cache
      if cache is None:
        return mixer(x, deterministic=deterministic, **mixer_inputs)
      y, cache = mixer(x, deterministic=deterministic, cache=cache, **mixer_inputs)
      return y

    hidden = self.hidden_width, self.activation, self.hidden_dropout, self.init_std, self.dtype
    feed_forward = FeedForward(*hidden, use_bias=self.use_bias, name="feed_forward")
    norm = self.norm_type, self.dtype, self.norm_init_std, self.use_bias, self.norm_epsilon
    for branch, norm_name in ((mix, "mixer_norm"), (feed_forward, "feed_forward_norm")):
      normed = Norm(*norm, name=norm_name)
      drop = partial(Dropout(self.dropout), deterministic=deterministic)
      if self.norm_position == "post":
        x = normed(x + drop(branch(x, deterministic=deterministic)))
      else:
        x = x + drop(branch(normed(x), deterministic=deterministic))
    return x if cache is None else (x, cache)
