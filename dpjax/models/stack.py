"""Blocks one after the other. B batch, T position, D width, S shortened length."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import attention


@dataclasses.dataclass(frozen=True)
class Stack:
  """Equal blocks, whose parameters are stacked, [num_layers, ...].

  They are, whether the layers are scanned or unrolled, so that either form reads the
  other's checkpoints.

  Attributes:
    num_layers: number of blocks.
    make_block: called with `name`, gives a `dpjax.layers.blocks.Block`.
    has_positions: whether its mixers take `positions` that layers share.
    scan_layers: compile one layer and loop over it; else compile each layer.
    remat: keep only each layer's input for the gradient, and compute the rest again.
  """

  num_layers: int
  make_block: Callable[..., nn.Module]
  has_positions: bool = False
  scan_layers: bool = True
  remat: bool = False

  def apply(
    self,
    x_btd: jax.Array,
    *,
    name: str,
    deterministic: bool,
    positions: nn.Module | None = None,
    sizes: Sequence[int] = (),
    needed: jax.Array | None = None,
    caches: Any = None,
    lengths: jax.Array | None = None,
  ) -> Any:
    """Applies the blocks within a compact method of the module that they belong to.

    Args:
      x_btd: [B, T, D].
      name: of their parameters in that module.
      deterministic: False in training.
      positions: `dpjax.layers.attention.SharedPositions`, where the mixers share them.
      sizes: capacities of `dpjax.ops.run_at_capacity` up to T; (): there are none.
      needed: int scalar, how many positions will be read, where there are capacities.
      caches: of `init_caches`, or what the call before gave: x_btd goes on from there.
      lengths: [B], with caches: how many positions of each row are real; None: all.

    Returns:
      [B, T, D], and with caches those after it.
    """
    shared = None
    if self.has_positions and positions is not None:
      length = x_btd.shape[1] if caches is None else self.make_mixer().max_length
      shared = positions(length, x_btd.shape[2], deterministic=deterministic)

    def apply_block(block, x_btd, cache):
      if cache is not None:
        return block(x_btd, cache=cache, lengths=lengths, **_shared(shared))
      # Parameters are made by a direct call, which any capacity would make alike.
      if not sizes or block.is_initializing():
        return block(x_btd, deterministic=deterministic, **_shared(shared)), None
      has_key = not deterministic and block.has_rng("dropout")
      key = block.make_rng("dropout") if has_key else None
      free = block.clone(parent=None)

      def at_capacity(x_btd, params, shared, key):
        return free.apply(
          {"params": params},
          x_btd,
          deterministic=deterministic,
          rngs={"dropout": key} if has_key else {},
          **_shared(shared),
        )

      arguments = block.variables["params"], shared, key
      return ops.run_at_capacity(at_capacity, sizes, needed, x_btd, *arguments), None

    if self.remat and len(sizes) < 2:
      # Within a scan the loop itself keeps the two passes apart.
      apply_block = nn.remat(apply_block, prevent_cse=not self.scan_layers)
    scan = nn.scan(
      apply_block,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      length=self.num_layers,
      unroll=1 if self.scan_layers else self.num_layers,
    )
    x_btd, caches = scan(self.make_block(name=name), x_btd, caches)
    return x_btd if caches is None else (x_btd, caches)

  def init_caches(self, batch: int, width: int) -> Any:
    """Those of all layers for B rows of width D, each array [num_layers, ...]."""
    cache = self.make_mixer().init_cache(batch, width)
    return jax.tree.map(lambda x: jnp.stack([x] * self.num_layers), cache)

  def make_mixer(self) -> Any:
    """A mixer of the blocks on its own, without parameters."""
    block: Any = self.make_block
    return block.keywords["make_mixer"](parent=None)


def _shared(positions: attention.RelativePositions | None) -> dict[str, Any]:
  return {} if positions is None else {"positions": positions}
