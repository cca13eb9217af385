"""Embedding -> a stack of blocks -> logits. B batch, T position, D width, V vocabulary."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax.layers import blocks, embeddings, initializers


class LanguageModelOutput(NamedTuple):
  """What a language model returns.

  Attributes:
    logits: [B, T, V]; row t is for token t + 1.
  """

  logits: jax.Array


class LanguageModel(nn.Module):
  """A causal language model around any mixer.

  The layers' parameters are stacked, [num_layers, ...], whether the layers are scanned
  or unrolled, so that either form reads the other's checkpoints.

  Attributes:
    vocab_size: V.
    width: D.
    num_layers: number of blocks.
    max_length: the longest T.
    make_block: called with `name`, gives a `dpjax.layers.blocks.Block`.
    positions: "sinusoidal" or "learned".
    dropout: of the embeddings.
    final_norm: a LayerNorm before the output layer (pre-norm models have it).
    scan_layers: compile one layer and loop over it; else compile each layer.
    remat: keep only each layer's input for the gradient, and compute the rest again.
    init_std: of the weights of embeddings and logits, N(0, init_std**2), the biases
      being 0; 0: U(-0.1, 0.1), the biases 0.
    dtype: of the computation; parameters are float32.
  """

  vocab_size: int
  width: int
  num_layers: int
  max_length: int
  make_block: Callable[..., nn.Module]
  positions: str = "sinusoidal"
  dropout: float = 0.0
  final_norm: bool = False
  scan_layers: bool = True
  remat: bool = False
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, tokens: jax.Array, *, deterministic: bool = True
  ) -> LanguageModelOutput:
    """[B, T] token ids -> logits [B, T, V].

    Args:
      tokens: [B, T], integers in [0, V).
      deterministic: False in training: dropout draws from the "dropout" stream.

    Returns:
      `LanguageModelOutput`.

    Raises:
      ValueError: T is above `max_length`.
    """
    x_btd = embeddings.TokenAndPosition(
      self.vocab_size,
      self.width,
      self.max_length,
      self.positions,
      self.dropout,
      self.init_std,
      self.dtype,
      name="embedding",
    )(tokens, deterministic=deterministic)

    def apply_block(block, x_btd, _):
      return block(x_btd, deterministic=deterministic), None

    if self.remat:
      # Within a scan the loop itself keeps the two passes apart.
      apply_block = nn.remat(apply_block, prevent_cse=not self.scan_layers)
    scan = nn.scan(
      apply_block,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      length=self.num_layers,
      unroll=1 if self.scan_layers else self.num_layers,
    )
    x_btd, _ = scan(self.make_block(name="layers"), x_btd, None)
    if self.final_norm:
      x_btd = blocks.layer_norm(self.dtype, "final_norm")(x_btd)
    logits_btv = nn.Dense(
      self.vocab_size,
      dtype=self.dtype,
      kernel_init=initializers.weights(
        self.init_std, initializers.symmetric_uniform(0.1)
      ),
      name="logits",
    )(x_btd)
    return LanguageModelOutput(logits_btv)
