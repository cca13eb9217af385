"""Blocks in sequence, scanned over their parameters. B batch, T position, D width."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.block import Block
from dpjax.ops import arrays


class BlockGroup(nn.Module):
  """Alternating blocks, with parameters in `place_0`, `place_1` and so on."""

  place: tuple[Block, ...]


class Stack(nn.Module):
  """Blocks with stacked parameters, scanned or unrolled.

  The parameters of one `block` are [num_layers, ...], in the scope of the stack. With P > 1
  distinct blocks (`in_turn`), layer i is block i mod P: whole periods are scanned, with parameters
  [num_layers // P, ...] in `period.place_p`; num_layers mod P layers follow, with parameters
  [1, ...] in `rest.place_p`.

  Attributes:
    num_layers: the number of layers.
    block: a `dpjax.layers.Block`; None with alternating blocks.
    period: the alternating blocks; None if there are fewer layers.
    rest: the blocks of the layers after the last whole period; None without such layers.
    scan_layers: whether to compile one layer, or period, and loop over it.
    remat: whether to keep only each layer's input for the gradient.
    residual_dtype: the dtype of the sum of branches and of the result; None: the input's.

  Raises:
    ValueError: `num_layers` is not a positive integer, or there are no blocks.
  """

  num_layers: int
  block: Block | None = None
  period: BlockGroup | None = None
  rest: BlockGroup | None = None
  scan_layers: bool = True
  remat: bool = False
  residual_dtype: Any = None

  def __post_init__(self):
    arrays.integers(num_layers=self.num_layers)
    has_blocks = any(x is not None for x in (self.block, self.period, self.rest))
    if not has_blocks or not all(hasattr(block, "mixer") for block in self.blocks):
      raise UserError(f"block: expected a layers.Block, or Stack.in_turn, got {self.block!r}")
    super().__post_init__()

  @classmethod
  def in_turn(
    cls, num_layers: int, make_blocks: Sequence[Callable[[], Block]], **options: Any
  ) -> "Stack":
    """A stack whose layer i is a block of `make_blocks[i mod P]`, for P functions."""

    def make_group(count: int) -> BlockGroup | None:
      return BlockGroup(tuple(make() for make in make_blocks[:count])) if count else None

    if len(make_blocks) == 1:
      return cls(num_layers, make_blocks[0](), **options)
    num_periods, num_left = divmod(num_layers, len(make_blocks))
    period = make_group(len(make_blocks)) if num_periods else None
    return cls(num_layers, period=period, rest=make_group(num_left), **options)

  def setup(self):
    """Keeps the parameters of one block in the scope of the stack."""
    if self.block is not None:
      nn.share_scope(self, self.block)

  def __call__(
    self,
    x_btd: jax.Array,
    *,
    deterministic: bool = True,
    positions: Any = None,
    document_starts: jax.Array | None = None,
    bucket_sizes: Sequence[int] = (),
    required_length: jax.Array | None = None,
  ) -> jax.Array:
    """[B, T, D] -> [B, T, D].

    Args:
      x_btd: [B, T, D].
      deterministic: False in training.
      positions: what mixers share, from `dpjax.layers.attention.SharedPositions`.
      document_starts: see `LanguageModel`.
      bucket_sizes: the lengths of `dpjax.ops.run_in_bucket`; () for T only.
      required_length: see `dpjax.ops.run_in_bucket`.
    """
    x_btd = self.cast_residual(x_btd)
    inputs = {"positions": positions, "document_starts": document_starts}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    run = functools.partial(
      _run_block,
      deterministic=deterministic,
      bucket_sizes=bucket_sizes,
      required_length=required_length,
      inputs=inputs,
    )
    if self.remat and len(bucket_sizes) < 2:
      # Within a scan, the loop itself separates the two passes.
      run = nn.remat(run, prevent_cse=not self.scan_layers)

    def run_group(group, x_btd, _):
      for block in getattr(group, "place", (group,)):
        x_btd = run(block, x_btd)
      return x_btd, None

    groups = [(self.block, self.num_layers)]
    if self.block is None:
      groups = [(self.period, self.num_layers // len(self.blocks)), (self.rest, 1)]
    for group, length in groups:
      if group is None:
        continue
      scan = nn.scan(
        run_group,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=length,
        unroll=1 if self.scan_layers else length,
      )
      x_btd, _ = scan(group, x_btd, None)
    return x_btd

  def step(
    self,
    x_btd: jax.Array,
    caches: tuple,
    lengths: jax.Array | None = None,
    *,
    positions: Any = None,
  ) -> tuple[jax.Array, tuple]:
    """Returns the outputs for the next T tokens, [B, T, D], and the new cache of each layer.

    A chunk is read in a loop over the layers, which is compiled once, unless the parameters are
    from `unstack`. For single tokens, the loop would copy each layer's parameters and cache.

    Args:
      x_btd: [B, T, D].
      caches: from `init_cache` or the previous call.
      lengths: [B], int32, the number of real tokens in each row; None means all.
      positions: as in a call, for `max_length` distances.
    """
    x_btd, params = self.cast_residual(x_btd), self.variables["params"]
    blocks = self.unbind()[0].blocks

    def run(x_btd, pairs) -> Any:
      new_caches = []
      for block, (params, cache) in zip(itertools.cycle(blocks), pairs, strict=False):
        inputs = {} if positions is None or not _shares(block) else {"positions": positions}
        inputs |= dict(cache=cache, lengths=lengths)
        x_btd, cache = block.apply({"params": params}, x_btd, **inputs)
        new_caches.append(cache)
      return x_btd, new_caches

    num_blocks, num_looped, looped = len(blocks), 0, []
    has_periods = self.block is not None or self.period is not None
    if x_btd.shape[1] > 1 and self.scan_layers and has_periods and "0" not in params:
      num_looped = self.num_layers // num_blocks * num_blocks
      stacked = [params]
      if self.block is None:
        stacked = [params["period"][f"place_{i}"] for i in range(num_blocks)]
      caches_of = [caches[i:num_looped:num_blocks] for i in range(num_blocks)]
      caches_of = [jax.tree.map(lambda *x: jnp.stack(x), *of_block) for of_block in caches_of]
      x_btd, new = jax.lax.scan(run, x_btd, list(zip(stacked, caches_of, strict=True)))
      looped = [_layer(new[i % num_blocks], i // num_blocks) for i in range(num_looped)]
    layers = self.unstack(params) if num_looped < self.num_layers else {}
    pairs = [(layers[str(i)], caches[i]) for i in range(num_looped, self.num_layers)]
    x_btd, rest = run(x_btd, pairs)
    return x_btd, (*looped, *rest)

  def cast_residual(self, x_btd: jax.Array) -> jax.Array:
    """The input in `residual_dtype`."""
    return x_btd if self.residual_dtype is None else x_btd.astype(self.residual_dtype)

  def unstack(self, params: Mapping) -> Mapping:
    """A copy of the parameters, separate for each layer, under "0", "1", ..."""
    if "0" in params:
      return params
    num_blocks, layers = len(self.blocks), {}
    for i in range(self.num_layers):
      index, offset = divmod(i, num_blocks)
      layer = params
      if self.block is None:
        is_left = self.period is None or i >= self.num_layers - self.num_layers % num_blocks
        index = 0 if is_left else index
        layer = params["rest" if is_left else "period"][f"place_{offset}"]
      layers[str(i)] = _layer(layer, index)
    return layers

  @property
  def blocks(self) -> tuple[Block, ...]:
    """The distinct blocks, in order."""
    if self.block is not None:
      return (self.block,)
    group = self.rest if self.period is None else self.period
    assert group is not None
    return group.place

  @property
  def mixers(self) -> list[Any]:
    """The mixers of the distinct blocks, in order."""
    return [block.mixer for block in self.blocks]

  @property
  def shares_positions(self) -> bool:
    """Whether some of its mixers take `positions` that layers share."""
    return any(map(_shares, self.blocks))

  @property
  def num_distances(self) -> int:
    """The maximum number of distances that mixers with shared positions read."""
    return max(block.mixer.max_length for block in self.blocks if _shares(block))

  @property
  def has_cache(self) -> bool:
    """Whether its mixers have a cache."""
    return all(hasattr(mixer, "init_cache") for mixer in self.mixers)

  def init_cache(self, batch: int, width: int) -> tuple:
    """A cache for each layer, for B rows of width D."""
    mixers = self.mixers
    layers = (mixers[i % len(mixers)] for i in range(self.num_layers))
    return tuple(mixer.init_cache(batch, width) for mixer in layers)


def is_stacked(params: Any) -> Any:
  """A tree of bools: whether the first axis of each array indexes the layers of a `Stack`."""
  gains = "mixer_norm/scale"  # in every block: [D], or [num_layers, D]

  def is_of_stack(path, x):
    return x.ndim == 2 and jax.tree_util.keystr(path[-2:], simple=True, separator="/") == gains

  stacks = {path[:-2] for path, x in jax.tree.leaves_with_path(params) if is_of_stack(path, x)}
  return jax.tree.map_with_path(
    lambda path, _: any(path[:i] in stacks for i in range(len(path))), params
  )


def _shares(block: Any) -> bool:
  return hasattr(block.mixer, "make_positions")


def _layer(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: x[i], tree)


def _run_block(block, x_btd, *, deterministic, bucket_sizes, required_length, inputs):
  """Runs a block, given several lengths at the smallest that suffices."""
  if not _shares(block):
    inputs = {name: x for name, x in inputs.items() if name != "positions"}
  # A direct call creates the parameters, which are the same for any length.
  if not bucket_sizes or block.is_initializing():
    return block(x_btd, deterministic=deterministic, **inputs)
  has_key = not deterministic and block.has_rng("dropout")
  key = block.make_rng("dropout") if has_key else None
  free, variables = block.unbind()

  def run(x_btd, params, inputs, key):
    if "document_starts" in inputs:
      inputs = {**inputs, "document_starts": inputs["document_starts"][:, : x_btd.shape[1]]}
    rngs = {"dropout": key} if has_key else {}
    return free.apply({"params": params}, x_btd, deterministic=deterministic, rngs=rngs, **inputs)

  return ops.run_in_bucket(
    run, bucket_sizes, required_length, x_btd, variables["params"], inputs, key
  )
