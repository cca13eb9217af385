"""A stack of several mixers in turn as one mixer, for `dpjax.testing.check_mixer`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from dpjax.layers.block import Block, FeedForward
from dpjax.layers.common import Norm
from dpjax.layers.mixer import check_input
from dpjax.models.stack import Stack


class MixersInTurn(nn.Module):
  """A stack of one layer more than it has mixers, [B, T, D] -> [B, T, D]."""

  layers: Stack
  positions: nn.Module | None
  max_length: int
  dtype: jnp.dtype

  @property
  def mixers(self) -> list[Any]:
    """The mixers in turn."""
    return self.layers.mixers

  def __call__(
    self, inputs, *, deterministic=True, cache=None, lengths=None, document_starts=None
  ) -> Any:
    """See `dpjax.layers.mixer.Mixer`."""
    inputs = check_input(
      inputs, max_length=self.max_length, document_starts=document_starts, cache=cache
    )
    shared = None
    if self.positions is not None:
      length = inputs.shape[1] if cache is None else self.layers.num_distances
      shared = self.positions(length, inputs.shape[2], deterministic=deterministic)
    if cache is not None:
      return self.layers.step(inputs, cache, lengths, positions=shared)
    options: Any = dict(deterministic=deterministic, document_starts=document_starts)
    return self.layers(inputs, positions=shared, **options)

  def init_cache(self, batch: int, width: int) -> tuple:
    """See `dpjax.layers.mixer.Mixer`."""
    return self.layers.init_cache(batch, width)


def make_in_turn(
  makers: Sequence[Callable[..., nn.Module]], max_length: int, dtype: Any = jnp.float32
) -> MixersInTurn:
  """Makes a stack of pre-norm blocks, whose mixers `makers` make; see `check_mixer`."""

  def make_block(make):
    make = partial(make, max_length=max_length)
    mixer = make(dtype=dtype) if hasattr(make(), "dtype") else make()
    norms = Norm(dtype=dtype), Norm(dtype=dtype)
    return Block(mixer, FeedForward(7, "gelu", dtype=dtype), *norms, is_pre_norm=True)

  stack = Stack.in_turn(len(makers) + 1, [partial(make_block, make) for make in makers])
  shared = [x.make_positions()() for x in stack.mixers if hasattr(x, "make_positions")]
  return MixersInTurn(stack, shared[0] if shared else None, max_length, dtype)
