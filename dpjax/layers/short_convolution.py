"""The double-gated short convolution of LFM2. B batch, T position, D width, k taps."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers.common import check_settings, linear, symmetric_uniform, weights
from dpjax.layers.mixer import Context, Mixer


class ShortConvolution(Mixer):
  """A convolution of a few taps between two gates, k D + 4 D**2 parameters and no biases.

    [b, c, v] = x W_in                                    W_in [D, 3 D]
    y_t       = (c_t * sum over j < k of a_j * (b * v)_{t-j}) W_out       a [k, D]

  with * element-wise. It reads k positions; stacked layers read further, and models add attention.

  Attributes:
    num_taps: k, the positions that it reads.

  For the other attributes see `Mixer`. Source: Liquid AI 2025, LFM2.
  """

  separates_documents: ClassVar[bool] = True

  num_taps: int = 3

  def __post_init__(self):
    check_settings(self, sizes=("num_taps",))
    super().__post_init__()

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """See `Mixer`."""
    width = inputs.shape[-1]
    b_btd, c_btd, v_btd = jnp.split(linear(self, 3 * width, "in")(inputs), 3, axis=-1)
    init = weights(self.init_std, symmetric_uniform(self.num_taps**-0.5))
    taps = self.param("taps", init, (self.num_taps, width), jnp.float32).astype(self.dtype)
    if cache is None:
      y_btd = ops.short_convolution(b_btd * v_btd, taps, document_starts=context.document_starts)
    else:
      y_btd, cache = ops.short_convolution_cached(
        b_btd * v_btd, taps, cache, lengths=context.lengths
      )
    return linear(self, width, "out", scale=self.out_scale)(c_btd * y_btd), cache

  def init_cache(self, batch: int, width: int) -> jax.Array:
    """See `Mixer`; [B, k - 1, D]."""
    return ops.init_short_convolution_cache(batch, self.num_taps, width, self.dtype)
