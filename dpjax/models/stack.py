"""Blocks in sequence, scanned over their parameters. B batch, T position, D width."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray, PyTree

from dpjax import ops
from dpjax.layers.block import Block
from dpjax.layers.common import Params
from dpjax.layers.mixer import Cache, Context, Mixer
from dpjax.ops import arrays


class Buckets(NamedTuple):
  """The lengths that a stack is compiled for; see `dpjax.ops.run_in_bucket`.

  Attributes:
    sizes: increasing lengths, the last is T; () for T only.
    required: int32, the number of positions that will be read; None for all.
  """

  sizes: tuple[int, ...] = ()
  required: jax.Array | None = None


class Stack(nn.Module):
  """Layers of P blocks in turn: layer i is block i mod P.

  The parameters of block p are in `blocks_p`, those of its layers stacked, [its layers, ...].

  Attributes:
    num_layers: N, the number of layers.
    blocks: P `dpjax.layers.Block`s, P <= N.
    out_norm: a norm after the last layer, or None.
    scan_layers: whether to compile the P blocks once and loop over them, or to compile N layers.
    remat: whether to keep only each layer's input for the gradient.
    residual_dtype: the dtype of the sum of branches and of the result; None: the input's.

  Raises:
    ValueError: `num_layers` is not a positive integer, or there are no blocks.
  """

  num_layers: int
  blocks: tuple[Block, ...]
  out_norm: nn.Module | None = None
  scan_layers: bool = True
  remat: bool = False
  residual_dtype: DTypeLike | None = None

  def __post_init__(self):
    arrays.integer("num_layers", self.num_layers)
    if not self.blocks or not all(isinstance(block, Block) for block in self.blocks):
      raise ValueError(f"blocks: expected a tuple of layers.Block, got {self.blocks!r}")
    super().__post_init__()

  def __call__(
    self, x_btd: jax.Array, context: Context | None = None, buckets: Buckets | None = None
  ) -> jax.Array:
    """[B, T, D] -> [B, T, D], for whole rows, at the smallest of the buckets that suffices."""
    x_btd = self.cast_residual(x_btd)
    context = context or Context()
    buckets = buckets or Buckets()
    # Whole rows read neither, and a branch of `run_in_bucket` would carry them.
    context = context.replace(lengths=None, num_before=None)
    if self.is_initializing():
      self._create(x_btd, context.replace(deterministic=True))
    blocks, params = self._unbound_blocks()
    keys = self._draw_keys(context)
    runs = [functools.partial(run_block, block, buckets) for block in blocks]
    if self.remat and len(buckets.sizes) < 2:
      # Within a scan, the loop itself separates the two passes.
      runs = [jax.checkpoint(run, prevent_cse=not self.scan_layers) for run in runs]

    def run_period(x_btd, layers):
      for run, (params, key) in zip(runs, layers, strict=True):
        x_btd = run(params, x_btd, context, key)
      return x_btd, None

    count = self.num_layers // len(blocks)
    periods = [_first(pair, count) for pair in zip(params, keys, strict=True)]
    unroll = 1 if self.scan_layers else count
    x_btd, _ = jax.lax.scan(run_period, x_btd, periods, unroll=unroll)
    for p in range(self.num_layers % len(blocks)):
      layer, key = take_layer((params[p], keys[p]), count)
      x_btd = runs[p](layer, x_btd, context, key)
    return x_btd if self.out_norm is None else self.out_norm(x_btd)

  def step(
    self, x_btd: jax.Array, caches: tuple[Cache, ...], context: Context
  ) -> tuple[jax.Array, tuple[Cache, ...]]:
    """The outputs for the next T positions, [B, T, D], and the new cache of each layer.

    A chunk is read in a loop over periods of P layers, which is compiled once. For single
    positions the loop would copy each layer's cache, and `unstack` avoids copies of parameters.
    """
    x_btd = self.cast_residual(x_btd)
    blocks, params = self._unbound_blocks()
    period = len(blocks)
    new: list[Cache] = []
    if x_btd.shape[1] > 1 and self.scan_layers:
      whole = self.num_layers // period * period
      x_btd, new = _step_periods(blocks, params, x_btd, caches[:whole], context)
    for i in range(len(new), self.num_layers):
      variables = {"params": take_layer(params[i % period], i // period)}
      x_btd, cache = blocks[i % period].apply(variables, x_btd, caches[i], context, method="step")
      new.append(cache)
    return x_btd if self.out_norm is None else self.out_norm(x_btd), tuple(new)

  def cast_residual(self, x_btd: jax.Array) -> jax.Array:
    """The input in `residual_dtype`."""
    return x_btd if self.residual_dtype is None else x_btd.astype(self.residual_dtype)

  def _create(self, x_btd: jax.Array, context: Context) -> None:
    """Creates the parameters."""
    for p, block in enumerate(self.blocks):
      create = nn.scan(
        lambda block, x_btd, _: (block(x_btd, context), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=len(range(p, self.num_layers, len(self.blocks))),
      )
      create(block, x_btd, None)

  def _unbound_blocks(self) -> tuple[tuple[Block, ...], list[Params]]:
    """The blocks as pure functions, and the parameters of each."""
    stack, variables = self.unbind()
    params = [variables["params"][f"blocks_{p}"] for p in range(len(self.blocks))]
    return stack.blocks, params

  def _draw_keys(self, context: Context) -> list[PRNGKeyArray | None]:
    """For each block the keys of its layers, [its layers]; None without random draws."""
    if context.deterministic or not self.has_rng("dropout"):
      return [None] * len(self.blocks)
    keys = jax.random.split(self.make_rng("dropout"), self.num_layers)
    return [keys[p :: len(self.blocks)] for p in range(len(self.blocks))]

  def unstack(self, params: Params) -> tuple["UnstackedStack", Params]:
    """The stack with arrays of their own for each layer, and its parameters, copied."""
    period = len(self.blocks)
    blocks = tuple(self.blocks[i % period] for i in range(self.num_layers))
    layers = {}
    for i in range(self.num_layers):
      layers[f"blocks_{i}"] = take_layer(params[f"blocks_{i % period}"], i // period)
    if self.out_norm is not None:
      layers["out_norm"] = params["out_norm"]
    stack = UnstackedStack(
      self.num_layers,
      blocks,
      out_norm=self.out_norm,
      residual_dtype=self.residual_dtype,
      parent=None,
    )
    return stack, layers

  @property
  def mixers(self) -> tuple[Mixer, ...]:
    """The mixers of the blocks, in order."""
    return tuple(block.mixer for block in self.blocks)

  @property
  def shares_positions(self) -> bool:
    """Whether some of its mixers take `context.positions`."""
    return any(mixer.make_positions() is not None for mixer in self.mixers)

  @property
  def max_length(self) -> int:
    """The longest T of its mixers."""
    return max(mixer.max_length for mixer in self.mixers)

  @property
  def has_cache(self) -> bool:
    """Whether its mixers have a cache."""
    return all(mixer.has_cache for mixer in self.mixers)

  @property
  def bounded_parts(self) -> tuple[str, ...]:
    """The classes, by name, of the mixers that cannot go beyond `max_length`, even with a cache."""
    return tuple(type(mixer).__name__ for mixer in self.mixers if not mixer.is_unbounded)

  def init_cache(self, batch: int, width: int) -> tuple[Cache, ...]:
    """A cache for each layer, for B rows of width D."""
    mixers = self.mixers
    return tuple(mixers[i % len(mixers)].init_cache(batch, width) for i in range(self.num_layers))


class UnstackedStack(Stack):
  """The layers of a `Stack`, from its `unstack`: it only steps, and copies no parameters.

  The parameters of layer i are in `blocks_i`, without an axis of layers.
  """

  def __call__(
    self, x_btd: jax.Array, context: Context | None = None, buckets: Buckets | None = None
  ) -> jax.Array:
    """Raises a `ValueError`."""
    raise ValueError("unstacked layers: expected a call of `step`, got one of whole rows")

  def step(
    self, x_btd: jax.Array, caches: tuple[Cache, ...], context: Context
  ) -> tuple[jax.Array, tuple[Cache, ...]]:
    """See `Stack.step`."""
    x_btd = self.cast_residual(x_btd)
    blocks, params = self._unbound_blocks()
    new = []
    for block, layer, cache in zip(blocks, params, caches, strict=True):
      # Layers may share a block, to whose methods Flax would give the first layer's parameters.
      x_btd, cache = block.apply({"params": layer}, x_btd, cache, context, method="step")
      new.append(cache)
    return x_btd if self.out_norm is None else self.out_norm(x_btd), tuple(new)

  def unstack(self, params: Params) -> tuple["UnstackedStack", Params]:
    """The stack and its parameters as they are."""
    return self, params


def run_block(
  block: Block,
  buckets: Buckets,
  params: Params,
  x_btd: jax.Array,
  context: Context,
  key: PRNGKeyArray | None = None,
) -> jax.Array:
  """A block with its parameters on whole rows, at the smallest of the buckets that suffices."""

  def run(x_btd, params, context, key):
    rngs = {} if key is None else {"dropout": key}
    y_btd = block.apply({"params": params}, x_btd, context.truncate(x_btd.shape[1]), rngs=rngs)
    assert isinstance(y_btd, jax.Array)
    return y_btd

  if not buckets.sizes:
    return run(x_btd, params, context, key)
  return ops.run_in_bucket(run, buckets.sizes, buckets.required, x_btd, params, context, key)


def _step_periods(
  blocks: Sequence[Block],
  params: Sequence[Params],
  x_btd: jax.Array,
  caches: Sequence[Cache],
  context: Context,
) -> tuple[jax.Array, list[Cache]]:
  """The steps of whole periods of layers, in a loop."""
  period = len(blocks)
  count = len(caches) // period
  layers = []
  for p in range(period):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches[p::period])
    layers.append((_first(params[p], count), stacked))

  def run_period(x_btd, layers):
    new = []
    for block, (params, cache) in zip(blocks, layers, strict=True):
      x_btd, cache = block.apply({"params": params}, x_btd, cache, context, method="step")
      new.append(cache)
    return x_btd, new

  x_btd, new = jax.lax.scan(run_period, x_btd, layers)
  return x_btd, [take_layer(new[i % period], i // period) for i in range(len(caches))]


def share_positions(
  module: Callable[..., object] | None, stack: Stack, context: Context, length: int, width: int
) -> Context:
  """The context of a stack whose mixers share positions: `module` makes so many distances."""
  if module is None or not stack.shares_positions:
    return context.replace(positions=None)
  return context.replace(positions=module(length, width, deterministic=context.deterministic))


def take_layer(tree: PyTree, i: int) -> PyTree:
  """Entry i of each array."""
  return jax.tree.map(lambda x: x[i], tree)


def _first(tree: PyTree, count: int) -> PyTree:
  """The first entries of each array; the arrays themselves if that is all."""
  return jax.tree.map(lambda x: x if len(x) == count else x[:count], tree)
