"""The double-gated short convolution of LFM2. B batch, T position, D width, k taps."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.common import linear, symmetric_uniform, weights


class ShortConvolution(nn.Module):
  """A convolution of a few taps between two gates, k D + 4 D**2 parameters and no biases.

    [b, c, v] = x W_in                                    W_in [D, 3 D]
    y_t       = (c_t * sum over j < k of a_j * (b * v)_{t-j}) W_out       a [k, D]

  with * element-wise. It reads k positions; stacked layers read further, and models add attention.

  Attributes:
    max_length: the longest T.
    num_taps: k.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
    out_scale: a factor of the output matrix's initial values.

  Source: Liquid AI 2025, LFM2.
  """

  max_length: int
  num_taps: int = 3
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    mixer.check_settings(self, sizes=("max_length", "num_taps"))
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    cache: jax.Array | None = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]."""
    inputs = mixer.check_input(
      inputs, max_length=self.max_length, document_starts=document_starts, cache=cache
    )
    width = inputs.shape[-1]
    b_btd, c_btd, v_btd = jnp.split(linear(self, 3 * width, "in")(inputs), 3, axis=-1)
    init = weights(self.init_std, symmetric_uniform(self.num_taps**-0.5))
    taps = self.param("taps", init, (self.num_taps, width), jnp.float32).astype(self.dtype)
    if cache is None:
      y_btd = ops.short_convolution(b_btd * v_btd, taps, document_starts=document_starts)
    else:
      y_btd, cache = ops.short_convolution_cached(b_btd * v_btd, taps, cache, lengths=lengths)
    y_btd = linear(self, width, "out", scale=self.out_scale)(c_btd * y_btd)
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> jax.Array:
    """See `dpjax.layers.mixer.Mixer`; [B, k - 1, D]."""
    return ops.init_short_convolution_cache(batch, self.num_taps, width, self.dtype)
