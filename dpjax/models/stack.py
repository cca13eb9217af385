"""Blocks one after the other, scanned over their parameters. B batch, T position, D width."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.ops import checks


class Places(nn.Module):
  """Blocks in turn, with parameters in `place_0`, `place_1` and so on."""

  make_blocks: tuple[Callable[..., nn.Module], ...]

  def setup(self):
    """Makes the blocks."""
    self.place = [make() for make in self.make_blocks]


class Pattern(nn.Module):
  """The modules of `Stack` with P > 1 blocks: of whole periods, and of layers behind the last."""

  make_blocks: tuple[Callable[..., nn.Module], ...]
  num_layers: int

  def setup(self):
    """Makes `period`, `rest` or both."""
    number = len(self.make_blocks)
    if self.num_layers >= number:
      self.period = Places(self.make_blocks)
    if left := self.num_layers % number:
      self.rest = Places(self.make_blocks[:left])


@dataclasses.dataclass(frozen=True)
class Stack:
  """Blocks with stacked parameters, [num_layers, ...], scanned or unrolled.

  Of P > 1 blocks in turn, layer i is the block i mod P. Whole periods are scanned, with parameters
  [num_layers // P, ...] in `period.place_p`; num_layers mod P layers follow, with parameters
  [1, ...] in `rest.place_p`.

  Attributes:
    num_layers: the number of layers.
    make_block: makes a `dpjax.layers.blocks.Block` from its `name`; or several of these in turn.
    scan_layers: whether to compile one layer, or period, and loop over it.
    remat: whether to keep only each layer's input for the gradient.

  Raises:
    ValueError: `num_layers` is no positive integer, or `make_block` makes something else.
  """

  num_layers: int
  make_block: Callable[..., nn.Module] | tuple[Callable[..., nn.Module], ...]
  scan_layers: bool = True
  remat: bool = False

  def __post_init__(self):
    """Checks that the blocks can be made."""
    checks.integers(num_layers=self.num_layers)
    self.make_mixers()

  def __call__(
    self,
    x_btd: jax.Array,
    *,
    name: str,
    deterministic: bool,
    positions: nn.Module | None = None,
    sizes: Sequence[int] = (),
    needed: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> jax.Array:
    """[B, T, D] -> [B, T, D]; call it within a compact method of the module around.

    Args:
      x_btd: [B, T, D].
      name: the name of the parameters in that module.
      deterministic: False in training.
      positions: from `dpjax.layers.attention.SharedPositions`, if mixers share them.
      sizes: the capacities of `dpjax.ops.run_at_capacity`; () for T alone.
      needed: see `dpjax.ops.run_at_capacity`.
      document_starts: see `LanguageModel`.
    """
    shared = None
    if positions is not None and self.has_positions:
      shared = positions(x_btd.shape[1], x_btd.shape[2], deterministic=deterministic)

    def apply_block(block, x_btd):
      own = _own_positions(shared, block)
      # Parameters are made by a direct call, which any capacity would make alike.
      if not sizes or block.is_initializing():
        return block(x_btd, deterministic=deterministic, **_mixer_arguments(own, document_starts))
      has_key = not deterministic and block.has_rng("dropout")
      key = block.make_rng("dropout") if has_key else None
      free = block.clone(parent=None)

      def at_capacity(x_btd, params, own, key, document_starts):
        starts = None if document_starts is None else document_starts[:, : x_btd.shape[1]]
        given = _mixer_arguments(own, starts)
        given |= dict(deterministic=deterministic, rngs={"dropout": key} if has_key else {})
        return free.apply({"params": params}, x_btd, **given)

      arguments = block.variables["params"], own, key, document_starts
      return ops.run_at_capacity(at_capacity, sizes, needed, x_btd, *arguments)

    if self.remat and len(sizes) < 2:
      # Within a scan the loop itself keeps the two passes apart.
      apply_block = nn.remat(apply_block, prevent_cse=not self.scan_layers)

    def apply_places(module, x_btd, _):
      for block in getattr(module, "place", [module]):
        x_btd = apply_block(block, x_btd)
      return x_btd, None

    module, number = self._module(name), len(self.make_blocks)
    parts = [(module, self.num_layers)]
    if number > 1:
      parts = [(module.period, self.num_layers // number)] if self.num_layers >= number else []
      parts += [(module.rest, 1)] if self.num_layers % number else []
    for part, length in parts:
      scan = nn.scan(
        apply_places,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=length,
        unroll=1 if self.scan_layers else length,
      )
      x_btd, _ = scan(part, x_btd, None)
    return x_btd

  def with_caches(
    self, width: int, *, name: str, positions: nn.Module | None = None
  ) -> Callable[..., tuple[jax.Array, tuple]]:
    """A function, (x_btd, caches, lengths) -> [B, T, D], new caches, also for `lax.while_loop`."""
    params = self._module(name).variables["params"]
    layers = params if "0" in params else self.unstack(params)
    blocks, number = [make(parent=None) for make in self.make_blocks], len(self.make_blocks)
    shared = None
    if positions is not None and self.has_positions:
      longest = max(x.max_length for x in self.make_mixers() if hasattr(x, "make_positions"))
      shared = positions(longest, width)

    def apply_block(place, x_btd, params, cache, lengths) -> Any:
      given = _mixer_arguments(_own_positions(shared, blocks[place]), None)
      return blocks[place].apply({"params": params}, x_btd, cache=cache, lengths=lengths, **given)

    def function(x_btd, caches, lengths=None):
      after, num_scanned = [], 0
      if x_btd.shape[1] > 1 and self.scan_layers and self.num_layers >= number:
        num_scanned = self.num_layers - self.num_layers % number
        each = [(layers[str(i)], caches[i]) for i in range(num_scanned)]
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *each[p::number]) for p in range(number)]

        def apply_places(x_btd, period):
          new = [None] * number
          for place, (params, cache) in enumerate(period):
            x_btd, new[place] = apply_block(place, x_btd, params, cache, lengths)
          return x_btd, new

        x_btd, new = jax.lax.scan(apply_places, x_btd, stacked)
        after = [_layer(new[i % number], i // number) for i in range(num_scanned)]
      # A loop would copy each layer's parameters and cache, for every single token.
      for i in range(num_scanned, self.num_layers):
        x_btd, cache = apply_block(i % number, x_btd, layers[str(i)], caches[i], lengths)
        after.append(cache)
      return x_btd, tuple(after)

    return function

  def unstack(self, params: Mapping) -> dict:
    """A copy of the parameters, separate for each layer, under "0", "1", ...."""
    number = len(self.make_blocks)
    if number == 1:
      return {str(i): _layer(params, i) for i in range(self.num_layers)}
    places = [i % number for i in range(self.num_layers)]
    num_scanned = self.num_layers - self.num_layers % number
    return {
      str(i): _layer(params["period"][f"place_{place}"], i // number)
      if i < num_scanned
      else _layer(params["rest"][f"place_{place}"], 0)
      for i, place in enumerate(places)
    }

  @property
  def make_blocks(self) -> tuple[Callable[..., nn.Module], ...]:
    """`make_block` as a tuple."""
    return self.make_block if isinstance(self.make_block, tuple) else (self.make_block,)

  @property
  def has_positions(self) -> bool:
    """Whether some of its mixers take `positions` that layers share."""
    return any(hasattr(mixer, "make_positions") for mixer in self.make_mixers())

  @property
  def has_cache(self) -> bool:
    """Whether its mixers have a cache."""
    return all(hasattr(mixer, "init_cache") for mixer in self.make_mixers())

  def init_cache(self, batch: int, width: int) -> tuple:
    """A cache for each layer, for B rows of width D."""
    mixers = self.make_mixers()
    layers = (mixers[i % len(mixers)] for i in range(self.num_layers))
    return tuple(mixer.init_cache(batch, width) for mixer in layers)

  def make_mixers(self) -> list[Any]:
    """The mixers of the blocks in turn, without parameters."""
    made: list[Any] = [make(parent=None) if callable(make) else make for make in self.make_blocks]
    if not made or not all(hasattr(block, "make_mixer") for block in made):
      expected = "expected a function that makes a layers.Block, or a tuple of such functions"
      raise UserError(f"make_block: {expected}, got {self.make_block!r}")
    return [block.make_mixer(parent=None) for block in made]

  def _module(self, name: str) -> Any:
    if len(self.make_blocks) == 1:
      return self.make_blocks[0](name=name)
    return Pattern(self.make_blocks, self.num_layers, name=name)


def is_stacked(params: Any) -> Any:
  """Whether the first axis of each array counts the layers of a `Stack`: a tree of bools."""
  kernel = "feed_forward/hidden/kernel"  # of every block: [D, F], or [num_layers, D, F]

  def is_of_stack(path, x):
    return x.ndim == 3 and jax.tree_util.keystr(path[-3:], simple=True, separator="/") == kernel

  stacks = {path[:-3] for path, x in jax.tree.leaves_with_path(params) if is_of_stack(path, x)}
  return jax.tree.map_with_path(
    lambda path, _: any(path[:i] in stacks for i in range(len(path))), params
  )


def _own_positions(shared: Any, block: Any) -> Any:
  """The shared positions for a block whose mixer takes them, else None."""
  has_own = shared is not None and hasattr(block.make_mixer(parent=None), "make_positions")
  return shared if has_own else None


def _mixer_arguments(positions: Any, document_starts: jax.Array | None) -> dict[str, Any]:
  """The arguments that a mixer may lack, unless they are None."""
  given = {"positions": positions, "document_starts": document_starts}
  return {name: value for name, value in given.items() if value is not None}


def _layer(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: x[i], tree)
