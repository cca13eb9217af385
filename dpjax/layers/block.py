"""One layer of a model: a mixer and a feed-forward network, each with norm and residual."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.common import Dropout, check_settings, linear, symmetric_uniform
from dpjax.layers.mixer import Cache, Context, Mixer, as_context
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
  dtype: DTypeLike = jnp.float32
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
    bias_init = nn.initializers.zeros
    if not self.init_std:
      bias_init = symmetric_uniform(x.shape[-1] ** -0.5)
    layer = linear(self, features, name, scale=scale, use_bias=self.use_bias, bias_init=bias_init)
    return layer(x)


class Block(nn.Module):
  """A mixer and a feed-forward network, with residuals and dropout.

    post-norm   x = N(x + drop(mix(x)));  x = N(x + drop(ffn(x)))
    pre-norm    x = x + drop(mix(N(x)));  x = x + drop(ffn(N(x)))

  Attributes:
    mixer: a `dpjax.layers.Mixer`.
    feed_forward: a `FeedForward`, or any module that takes `deterministic`; None for no second
      branch.
    mixer_norm: the N of the mixer, such as `Norm()`.
    feed_forward_norm: that of the feed-forward network, another instance; None without one.
    is_pre_norm: whether the norms come before the branches.
    dropout: dropout rate of both branches, before they are added.

  Raises:
    ValueError: `mixer` is no `Mixer`, or the feed-forward network has no norm.
  """

  mixer: Mixer
  feed_forward: nn.Module | None
  mixer_norm: nn.Module
  feed_forward_norm: nn.Module | None
  is_pre_norm: bool = False
  dropout: float = 0.0

  def __post_init__(self):
    if not isinstance(self.mixer, Mixer):
      raise UserError(f"mixer: expected a dpjax.layers.Mixer, got {self.mixer!r}")
    super().__post_init__()

  def __call__(
    self,
    inputs: jax.Array,
    context: Context | None = None,
    *,
    deterministic: bool | None = None,
    document_starts: jax.Array | None = None,
  ) -> jax.Array:
    """[B, T, D] -> [B, T, D], for whole rows; for the arguments see `Mixer`."""
    context = as_context(context, deterministic=deterministic, document_starts=document_starts)
    outputs, _ = self._run(inputs, context, None)
    return outputs

  def step(
    self,
    inputs: jax.Array,
    cache: Cache,
    context: Context | None = None,
    *,
    lengths: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache]:
    """The outputs of the next T positions, [B, T, D], and the mixer's new cache."""
    return self._run(inputs, as_context(context, lengths=lengths), cache)

  @nn.compact
  def _run(self, inputs: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
    x_btd = arrays.check("inputs", inputs, Float[Array, "B T D"])
    check_settings(self, rates=("dropout",))
    branch_btd = self._normed(self.mixer_norm, x_btd)
    if cache is None:
      branch_btd = self.mixer(branch_btd, context)
    else:
      branch_btd, cache = self.mixer.step(branch_btd, cache, context)
    x_btd = self._add(self.mixer_norm, x_btd, branch_btd, context)
    if self.feed_forward is None:
      return x_btd, cache
    if self.feed_forward_norm is None:
      raise ValueError("feed_forward_norm: expected a norm beside a feed-forward network, got None")
    branch_btd = self._normed(self.feed_forward_norm, x_btd)
    branch_btd = self.feed_forward(branch_btd, deterministic=context.deterministic)
    return self._add(self.feed_forward_norm, x_btd, branch_btd, context), cache

  def _normed(self, norm: nn.Module, x_btd: jax.Array) -> jax.Array:
    """The input of a branch."""
    return norm(x_btd) if self.is_pre_norm else x_btd

  def _add(
    self, norm: nn.Module, x_btd: jax.Array, branch_btd: jax.Array, context: Context
  ) -> jax.Array:
    """The sum with the output of a branch."""
    branch_btd = Dropout(self.dropout)(branch_btd, deterministic=context.deterministic)
    if self.is_pre_norm:  # the sum in its own dtype, perhaps a wider one
      return x_btd + branch_btd.astype(x_btd.dtype)
    return norm(x_btd + branch_btd)
