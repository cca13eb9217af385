"""Masked self-attention (MSA), the baseline. B batch, T position, H head, E feature."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import initializers, mixer


class SelfAttention(nn.Module):
  """Multi-head masked self-attention, as torch.nn.MultiheadAttention.

  Queries, keys and values come from one [D, 3D] matrix; all biases begin at 0.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T.
    dropout: probability with which an attention weight is dropped in training.
    use_bias: False as in Chen 2023, arXiv:2308.07661, Eqs. 10-17.
    init_std: of all weights, N(0, init_std**2); 0: PyTorch's, so that the [D, 3D] matrix
      is drawn as one Xavier-uniform matrix.
    dtype: of the computation; parameters are float32.
  """

  num_heads: int
  max_length: int
  dropout: float = 0.0
  use_bias: bool = True
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """Mixes [B, T, D]."""
    mixer.check_input(inputs, max_length=self.max_length, num_heads=self.num_heads)
    width = inputs.shape[-1]
    qkv_btpd = nn.DenseGeneral(
      (3, width),
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, nn.initializers.xavier_uniform()),
      name="queries_keys_values",
    )(inputs)
    qkv_btphe = qkv_btpd.reshape(*inputs.shape[:2], 3, self.num_heads, -1)
    rate = 0.0 if deterministic else self.dropout
    y_bthe = ops.causal_attention(
      *(qkv_btphe[:, :, part] for part in range(3)),
      dropout_rate=rate,
      dropout_key=self.make_rng("dropout") if rate else None,
    )
    return nn.Dense(
      width,
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=initializers.weights(self.init_std, initializers.linear_kernel),
      name="out",
    )(y_bthe.reshape(inputs.shape))
