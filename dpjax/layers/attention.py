"""Masked self-attention (MSA), the baseline, and that of Transformer-XL.

B batch, T position, H head, E feature of a head, D width, R distance.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import dropout, initializers, mixer


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


class RelativePositions(NamedTuple):
  """What the relative attention of several layers shares.

  Attributes:
    table: [R, D], embeddings of the distances 0 .. R - 1.
    content_bias: [H, E], added to the queries that meet keys.
    position_bias: [H, E], added to the queries that meet positions.
  """

  table: jax.Array
  content_bias: jax.Array
  position_bias: jax.Array


class SharedPositions(nn.Module):
  """Makes `RelativePositions`; its two biases are those of all layers that it serves.

  Attributes:
    num_heads: H, a divisor of D.
    dropout: of the table, drawn once a call.
    init_std: of the biases, N(0, init_std**2); 0: they begin at 0.
    dtype: of the computation; parameters are float32.
  """

  num_heads: int
  dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, length: int, width: int, *, deterministic: bool = True
  ) -> RelativePositions:
    """The distances 0 .. length - 1, for layers of the given width."""
    shape = (self.num_heads, width // self.num_heads)
    init = initializers.weights(self.init_std, nn.initializers.zeros)
    content, position = (
      self.param(name, init, shape, jnp.float32).astype(self.dtype)
      for name in ("content_bias", "position_bias")
    )
    table = jnp.asarray(ops.relative_positions(length, width), self.dtype)
    table = dropout.Dropout(self.dropout)(table, deterministic=deterministic)
    return RelativePositions(table, content, position)


class RelativeAttention(nn.Module):
  """Multi-head attention with relative positions (`dpjax.ops.relative_attention`).

  Queries, keys and values come from one [D, 3D] matrix, positions from a [D, D] one; all
  have biases, which begin at 0.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T.
    dropout: probability with which an attention weight is dropped in training.
    position_dropout: of the table of distances, where the layer has its own.
    init_std: of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: of the computation; parameters are float32.
  """

  num_heads: int
  max_length: int
  dropout: float = 0.0
  position_dropout: float = 0.0
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    positions: RelativePositions | None = None,
  ) -> jax.Array:
    """Mixes [B, T, D]; `positions` of at least T distances are those that layers share."""
    mixer.check_input(inputs, max_length=self.max_length, num_heads=self.num_heads)
    length, width = inputs.shape[1:]
    if positions is None:
      positions = SharedPositions(
        self.num_heads, self.position_dropout, self.init_std, self.dtype, name="positions"
      )(length, width, deterministic=deterministic)
    per_head = (-1, self.num_heads, width // self.num_heads)
    kernel_init = initializers.weights(self.init_std, initializers.linear_kernel)
    qkv_btpd = nn.DenseGeneral(
      (3, width), dtype=self.dtype, kernel_init=kernel_init, name="queries_keys_values"
    )(inputs)
    qkv_btphe = qkv_btpd.reshape(*inputs.shape[:2], 3, *per_head[1:])
    r_rd = nn.Dense(
      width, dtype=self.dtype, kernel_init=kernel_init, name="distances"
    )(positions.table[:length])
    rate = 0.0 if deterministic else self.dropout
    y_bthe = ops.relative_attention(
      qkv_btphe[:, :, 0],
      qkv_btphe[:, :, 1],
      qkv_btphe[:, :, 2],
      r_rd.reshape(per_head),
      positions.content_bias,
      positions.position_bias,
      dropout_rate=rate,
      dropout_key=self.make_rng("dropout") if rate else None,
    )
    return nn.Dense(width, dtype=self.dtype, kernel_init=kernel_init, name="out")(
      y_bthe.reshape(inputs.shape)
    )
