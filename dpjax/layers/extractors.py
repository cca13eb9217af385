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

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.common import linear, symmetric_uniform, weights


class ME(nn.Module):
  """The minimalist Extractor: only the sum, l parameters.

  Attributes:
    max_length: l, the window: the longest T, and the number of taps.
    implementation: see `dpjax.ops.causal_convolution`.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
    out_scale: a factor of the output matrix's initial values.
  """

  max_length: int
  implementation: str | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    mixer.check_settings(self, sizes=("max_length",), implementations=ops.CAUSAL_CONVOLUTION)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: Any = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    inputs = mixer.check_input(
      inputs, max_length=self.max_length, document_starts=document_starts, cache=cache
    )
    x_btd, tap_shape = self._prepare(inputs)
    shape = self.max_length, *tap_shape
    fan_in = shape[0] * (shape[1] if len(shape) == 3 else 1)
    init = weights(self.init_std, symmetric_uniform(fan_in**-0.5))
    taps = self.param("taps", init, shape, jnp.float32).astype(self.dtype)
    x_btd = x_btd.astype(self.dtype)
    if cache is not None:
      y_btd, cache = ops.causal_convolution_cached(x_btd, taps, cache, lengths=lengths)
      return self._finish(inputs, y_btd), cache
    options: Any = dict(document_starts=document_starts, implementation=self.implementation)
    return self._finish(inputs, ops.causal_convolution(x_btd, taps, **options))

  def init_cache(self, batch: int, width: int) -> ops.ConvolutionCache:
    """See `dpjax.layers.mixer.Mixer`; the inputs so far, [B, max_length, D]."""
    return ops.init_convolution_cache(batch, self.max_length, width, self.dtype)

  def _prepare(self, inputs: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """The inputs of the convolution, and the shape of a tap."""
    return inputs, ()

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

  def _prepare(self, inputs: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    return inputs, inputs.shape[2:]

  def _finish(self, inputs: jax.Array, e_btd: jax.Array) -> jax.Array:
    width = inputs.shape[-1]
    a_btd = linear(self, width, "adjustment")(inputs) * e_btd if self.adjustment else e_btd
    out = linear(self, width, "out", scale=self.out_scale)
    return out(a_btd) if self.output_projection else a_btd


class HE(WE):
  """The higher-performance Extractor: l D + 3 D**2 parameters, with the attributes of `WE`.

  Without adjustment and output projection, it is the variant at the end of Sec. 5.
  """

  def _prepare(self, inputs: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    return linear(self, inputs.shape[-1], "values")(inputs), inputs.shape[2:]


class SHE(WE):
  """The super high-performance Extractor: (l + 2) D**2 parameters, with the attributes of `WE`."""

  def _prepare(self, inputs: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    return inputs, 2 * inputs.shape[2:]
