"""The Extractors in place of self-attention. B batch, T position, D width, l window.

Source: Chen 2023, arXiv:2308.07661, Sec. 5. There are no biases; x_i is the layer's input
at position i, a row vector:

  SHE  e_i = sum over j <= i of x_j W_{i-j}            W [l, D, D]   (Eq. 23)
  HE   e_i = sum over j <= i of (x_j W_in) * w_{i-j}   w [l, D]      (Eqs. 27, 28)
  WE   e_i = sum over j <= i of x_j * w_{i-j}          w [l, D]      (Eq. 26)
  ME   y_i = sum over j <= i of x_j w_{i-j}            w [l]         (Eq. 29)

  SHE, HE, WE then   a = (x W_adj) * e                               (Eq. 24)
                     y = a W_out                                     (Eq. 25)

with * element-wise.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers.common import check_settings, linear, symmetric_uniform, weights
from dpjax.layers.mixer import Context, Mixer


class ME(Mixer):
  """The minimalist Extractor: only the sum, l parameters.

  Attributes:
    max_length: l, the window: the longest T, and the number of taps.
    implementation: see `dpjax.ops.causal_convolution`.

  For the other attributes see `Mixer`.
  """

  separates_documents: ClassVar[bool] = True

  implementation: str | None = None

  def __post_init__(self):
    check_settings(self, implementations=ops.CAUSAL_CONVOLUTION)
    super().__post_init__()

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: ops.ConvolutionCache | None
  ) -> tuple[jax.Array, ops.ConvolutionCache | None]:
    """See `Mixer`."""
    x_btd = self._values(inputs).astype(self.dtype)
    shape = self.max_length, *self._tap_shape(inputs.shape[-1])
    fan_in = self.max_length * (inputs.shape[-1] if len(shape) == 3 else 1)
    init = weights(self.init_std, symmetric_uniform(fan_in**-0.5))
    taps = self.param("taps", init, shape, jnp.float32).astype(self.dtype)
    if cache is None:
      e_btd = ops.causal_convolution(
        x_btd,
        taps,
        document_starts=context.document_starts,
        implementation=self.implementation,
      )
    else:
      e_btd, cache = ops.causal_convolution_cached(x_btd, taps, cache, lengths=context.lengths)
    return self._finish(inputs, e_btd), cache

  def init_cache(self, batch: int, width: int) -> ops.ConvolutionCache:
    """See `Mixer`; the inputs so far, [B, max_length, D]."""
    return ops.init_convolution_cache(batch, self.max_length, width, self.dtype)

  def _values(self, inputs: jax.Array) -> jax.Array:
    """The inputs of the convolution."""
    return inputs

  def _tap_shape(self, width: int) -> tuple[int, ...]:
    return ()

  def _finish(self, inputs: jax.Array, e_btd: jax.Array) -> jax.Array:
    return e_btd


class WE(ME):
  """The worthwhile Extractor: l D + 2 D**2 parameters; other attributes are those of `ME`.

  Attributes:
    adjustment: whether to apply Eq. 24; otherwise a = e.
    output_projection: whether to apply Eq. 25; otherwise y = a.
  """

  adjustment: bool = True
  output_projection: bool = True

  def _tap_shape(self, width: int) -> tuple[int, ...]:
    return (width,)

  def _finish(self, inputs: jax.Array, e_btd: jax.Array) -> jax.Array:
    width = inputs.shape[-1]
    if self.adjustment:
      e_btd = linear(self, width, "adjustment")(inputs) * e_btd
    if self.output_projection:
      e_btd = linear(self, width, "out", scale=self.out_scale)(e_btd)
    return e_btd


class HE(WE):
  """The higher-performance Extractor: l D + 3 D**2 parameters, with the attributes of `WE`.

  Without adjustment and output projection, it is the variant at the end of Sec. 5.
  """

  def _values(self, inputs: jax.Array) -> jax.Array:
    return linear(self, inputs.shape[-1], "values")(inputs)


class SHE(WE):
  """The super high-performance Extractor: (l + 2) D**2 parameters, with the attributes of `WE`."""

  def _tap_shape(self, width: int) -> tuple[int, ...]:
    return (width, width)
