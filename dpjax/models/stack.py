"""A stack of blocks. B batch, T position, D width, S shortened length."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import attention


@dataclasses.dataclass(frozen=True)
class Stack:
  """Equal blocks with stacked parameters, [num_layers, ...].

  Scanned and unrolled layers store parameters alike, so each form reads the other's
  checkpoints.

  Attributes:
    num_layers: the number of blocks.
    make_block: makes a `dpjax.layers.blocks.Block` from its `name`.
    has_positions: whether its mixers take `positions` that layers share.
    scan_layers: whether to compile one layer and loop over it; otherwise each is compiled.
    remat: whether to keep only each layer's input for the gradient, and recompute the rest.
  """

  num_layers: int
  make_block: Callable[..., nn.Module]
  has_positions: bool = False
  scan_layers: bool = True
  remat: bool = False

  def __call__(
    self,
    x_btd: jax.Array,
    *,
    name: str,
    deterministic: bool,
    positions: nn.Module | None = None,
    sizes: Sequence[int] = (),
    needed: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> jax.Array:
    """Applies the blocks; call it within a compact method of the module that contains them.

    Args:
      x_btd: [B, T, D].
      name: the name of the parameters in that module.
      deterministic: False in training.
      positions: from `dpjax.layers.attention.SharedPositions`, if the mixers share them.
      sizes: the capacities of `dpjax.ops.run_at_capacity`, up to T; () for T alone.
      needed: int scalar, with capacities: the number of positions that will be read.
      is_start: [B, T], 1 where a document begins, else 0; None for one document.

    Returns:
      [B, T, D].
    """
    shared = None
    if self.has_positions and positions is not None:
      shared = positions(x_btd.shape[1], x_btd.shape[2], deterministic=deterministic)

    def apply_block(block, x_btd, _):
      # Parameters are made by a direct call, which any capacity would make alike.
      if not sizes or block.is_initializing():
        return block(x_btd, deterministic=deterministic, **_given(shared, is_start)), None
      has_key = not deterministic and block.has_rng("dropout")
      key = block.make_rng("dropout") if has_key else None
      free = block.clone(parent=None)

      def at_capacity(x_btd, params, shared, key, is_start):
        if is_start is not None:
          is_start = is_start[:, : x_btd.shape[1]]
        return free.apply(
          {"params": params},
          x_btd,
          deterministic=deterministic,
          rngs={"dropout": key} if has_key else {},
          **_given(shared, is_start),
        )

      arguments = block.variables["params"], shared, key, is_start
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
    return scan(self.make_block(name=name), x_btd, None)[0]

  def with_caches(
    self, width: int, *, name: str, positions: nn.Module | None = None
  ) -> Callable[..., tuple[jax.Array, tuple]]:
    """The blocks as a function that continues from their caches.

      function(x_btd, caches, lengths, is_start) -> [B, T, D], new caches

    `lengths`, [B], is the number of real positions in each row; None means all. `is_start`,
    [B, T], marks the beginnings of documents; None means none. The function closes only over
    arrays, so that it may be called within `lax.cond` and the like. Call `with_caches` within
    a compact method, like `__call__`.

    Args:
      width: D.
      name: see `__call__`.
      positions: see `__call__`.
    """
    block = self.make_block(name=name)
    params, free = block.variables["params"], block.clone(parent=None)
    layers = params if "0" in params else self.unstack(params)
    shared = None
    if self.has_positions and positions is not None:
      shared = positions(self.make_mixer().max_length, width)

    def apply_block(x_btd, params, cache, lengths, is_start) -> Any:
      given = _given(shared, is_start)
      return free.apply({"params": params}, x_btd, cache=cache, lengths=lengths, **given)

    def function(x_btd, caches, lengths=None, is_start=None):
      if x_btd.shape[1] > 1 and self.scan_layers:
        stacked = jax.tree.map(
          lambda *x: jnp.stack(x), *((layers[str(i)], cache) for i, cache in enumerate(caches))
        )
        x_btd, after = jax.lax.scan(
          lambda x_btd, layer: apply_block(x_btd, layer[0], layer[1], lengths, is_start),
          x_btd,
          stacked,
        )
        return x_btd, tuple(_layer(after, i) for i in range(self.num_layers))
      # A loop would copy each layer's parameters and cache, for every single token.
      after = []
      for i, cache in enumerate(caches):
        x_btd, cache = apply_block(x_btd, layers[str(i)], cache, lengths, is_start)
        after.append(cache)
      return x_btd, tuple(after)

    return function

  def unstack(self, params: Mapping) -> dict:
    """A copy of the parameters, separate for each layer, under "0", "1", ...."""
    return {str(i): _layer(params, i) for i in range(self.num_layers)}

  @property
  def has_cache(self) -> bool:
    """Whether its mixers have a cache."""
    return hasattr(self.make_mixer(), "init_cache")

  def init_caches(self, batch: int, width: int) -> tuple:
    """A cache for each layer, for B rows of width D."""
    return tuple(self.make_mixer().init_cache(batch, width) for _ in range(self.num_layers))

  def make_mixer(self) -> Any:
    """A mixer of the blocks, without parameters."""
    block: Any = self.make_block
    return block.keywords["make_mixer"](parent=None)


def _given(
  positions: attention.RelativePositions | None, is_start: jax.Array | None
) -> dict[str, Any]:
  """The optional arguments of mixers without those that are None."""
  given = {"positions": positions, "is_start": is_start}
  return {name: value for name, value in given.items() if value is not None}


def _layer(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: x[i], tree)
