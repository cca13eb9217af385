"""The Extractors in place of self-attention. B batch, T position, D width, l window.

Source: Chen 2023, arXiv:2308.07661, Sec. 5. There are no biases; x_i is the layer's input
at position i, a row vector:

  SHE  e_i = sum over j <= i of x_j W_{i-j}            W [l, D, D]   (Eq. 23)
  HE   e_i = sum over j <= i of (x_j W_in) * w_{i-j}   w [l, D]      (Eqs. 27, 28)
  WE   e_i = sum over j <= i of x_j * w_{i-j}          w [l, D]      (Eq. 26)
  ME   y_i = sum over j <= i of x_j w_{i-j}            w [l]         (Eq. 29)

  SHE, HE, WE then   a = (x W_adj) * e                               (Eq. 24)
                     y = a W_out                                     (Eq. 25)

with * element-wise. As written, the sums cost O(l**2); `dpjax.ops.causal_convolution` also
has forms that cost O(l log l).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import initializers, mixer

# From so many taps on, tokens one by one are cheaper with an online convolution
# (benchmarks/generation.py).
ONLINE_LENGTH = 1024

_Cache = ops.ConvolutionCache | ops.OnlineConvolutionCache


class HE(nn.Module):
  """The higher-performance Extractor: l D + 3 D**2 parameters.

  Attributes:
    max_length: l, the window: the longest T, and the number of taps.
    adjustment: whether to apply Eq. 24; otherwise a = e.
    output_projection: whether to apply Eq. 25; otherwise y = a. Without both, the layer is
      HE's extraction alone, the variant at the end of Sec. 5.
    implementation: see `dpjax.ops.causal_convolution`.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults, for
      the taps those of a convolution.
    dtype: the dtype of the computation; parameters are float32.
  """

  max_length: int
  adjustment: bool = True
  output_projection: bool = True
  implementation: str | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    """Checks that the settings are in range."""
    mixer.check_settings(self, sizes=("max_length",), implementations=ops.CAUSAL_CONVOLUTION)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: _Cache | None = None,
    lengths: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    mixer.check_input(inputs, max_length=self.max_length, num_heads=1, is_start=is_start)
    y_btd, cache = self._extraction(inputs, cache, lengths, is_start)
    if self.adjustment:
      y_btd = _linear(self, "adjustment", inputs) * y_btd
    if self.output_projection:
      y_btd = _linear(self, "out", y_btd)
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> _Cache:
    """See `dpjax.layers.mixer.Mixer`; the inputs so far, [B, max_length, D], or more."""
    return _init_cache(self, batch, width)

  def _extraction(self, inputs: jax.Array, *cached):
    return _extract(self, _linear(self, "values", inputs), cached, inputs.shape[-1])


class SHE(HE):
  """The super high-performance Extractor: l D**2 + 2 D**2 parameters.

  For the attributes see `HE`.
  """

  def init_cache(self, batch: int, width: int) -> ops.ConvolutionCache:
    """See `dpjax.layers.mixer.Mixer`; the inputs so far, [B, max_length, D]."""
    return ops.init_convolution_cache(batch, self.max_length, width, self.dtype)

  def _extraction(self, inputs: jax.Array, *cached):
    return _extract(self, inputs, cached, inputs.shape[-1], inputs.shape[-1])


class WE(HE):
  """The worthwhile Extractor: l D + 2 D**2 parameters.

  For the attributes see `HE`.
  """

  def _extraction(self, inputs: jax.Array, *cached):
    return _extract(self, inputs, cached, inputs.shape[-1])


class ME(nn.Module):
  """The minimalist Extractor: only the sum, l parameters.

  Attributes:
    max_length: l, the window: the longest T, and the number of taps.
    implementation: see `dpjax.ops.causal_convolution`.
    init_std: see `HE`.
    dtype: the dtype of the computation; parameters are float32.
  """

  max_length: int
  implementation: str | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    """Checks that the settings are in range."""
    mixer.check_settings(self, sizes=("max_length",), implementations=ops.CAUSAL_CONVOLUTION)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: _Cache | None = None,
    lengths: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    mixer.check_input(inputs, max_length=self.max_length, num_heads=1, is_start=is_start)
    y_btd, cache = _extract(self, inputs, (cache, lengths, is_start))
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> _Cache:
    """See `dpjax.layers.mixer.Mixer`; the inputs so far, [B, max_length, D], or more."""
    return _init_cache(self, batch, width)


def _extract(module, x_btd: jax.Array, cached, *tap_shape: int):
  """The sum, and the cache after it, or None."""
  length = module.max_length
  fan_in = length * (tap_shape[0] if len(tap_shape) == 2 else 1)
  taps = module.param(
    "taps",
    initializers.weights(module.init_std, initializers.symmetric_uniform(fan_in**-0.5)),
    (length, *tap_shape),
    jnp.float32,
  )
  x_btd, taps = x_btd.astype(module.dtype), taps.astype(module.dtype)
  cache, lengths, is_start = cached
  if cache is not None:
    return ops.causal_convolution_cached(x_btd, taps, cache, lengths=lengths, is_start=is_start)
  y_btd = ops.causal_convolution(
    x_btd, taps, is_start=is_start, implementation=module.implementation
  )
  return y_btd, None


def _init_cache(module, batch: int, width: int) -> _Cache:
  is_long = module.max_length >= ONLINE_LENGTH
  init = ops.init_online_convolution_cache if is_long else ops.init_convolution_cache
  return init(batch, module.max_length, width, module.dtype)


def _linear(module, name: str, x_btd: jax.Array) -> jax.Array:
  return nn.Dense(
    x_btd.shape[-1],
    use_bias=False,
    dtype=module.dtype,
    kernel_init=initializers.weights(module.init_std, initializers.linear_kernel),
    dot_general=ops.dot_general,
    name=name,
  )(x_btd)
