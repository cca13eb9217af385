"""Shift-and-sum as Pallas kernels for GPUs, with Triton.

B batch, T position, H head, E feature of a head, K level; in a pass, N row, G sequence, J level,
C block of features.

A program holds the rows of a tile, vectors over a block of features, in Python variables, so that
a shift only changes an index: between two levels, no row leaves the registers. The J levels of a
pass need 2**J - 1 rows before the tile, and backward also after it: the halo, whose levels are
computed twice. Higher levels shift by multiples of some s = 2**k, so they are the first levels of
the sequences p, p + s, p + 2 * s, .., which the reshape

  [B, T, H, E] -> [B, T / s, s * H, E]

turns into heads. So one kernel computes every pass, of log2(tile) levels or fewer.

JAX 0.11 and 0.12 deprecate Pallas's Triton backend.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from dpjax.ops.backend import by_platform

# Rows of a tile. With one feature per thread, its rows and those of its halo fit a GPU's 255
# registers; the backward kernel holds the rows of each of its levels.
TILE = 64
BACKWARD_TILE = 16
# Features of a block: the threads of a warp, which needs no barrier.
_WARP = 32
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def shift_and_sum(
  values: jax.Array,
  gates: jax.Array,
  level_keep: jax.Array | None = None,
  *,
  interpret: bool | None = None,
  tile: int = TILE,
  backward_tile: int = BACKWARD_TILE,
) -> jax.Array:
  """The kernels of `dpjax.ops.shift_and_sum`, which checks their arguments.

  Sums are in float32. A dropped level costs as much as a kept one. Supports only reverse-mode
  derivatives, which store only `values` and `gates`. Rows may be distributed over devices;
  `jax.shard_map` needs check_vma=False.

  Args:
    values: [B, T, H, E], floats of at most 32 bits, T at least 2.
    gates: [B, T, H, K], likewise, K at least 1 and 2**(K-1) < T.
    level_keep: [K] booleans; the gates of a level with False count as 0. None keeps all.
    interpret: whether to run the kernels as JAX operations; None does so except on a GPU.
    tile: the rows of a tile in the forward pass, a power of 2, at least 2.
    backward_tile: the same in the backward pass.

  Raises:
    ValueError: there is no kernel for a dtype.
  """
  for name, x in (("values", values), ("gates", gates)):
    if x.dtype not in _DTYPES:
      raise ValueError(f"{name}: expected floats of at most 32 bits, got {x.dtype}")
  gates = gates.astype(jnp.float32)
  if level_keep is not None:
    gates = jnp.where(level_keep, gates, jnp.float32(0))

  def run(interpret, values, gates) -> jax.Array:
    return _shift_and_sum(values, gates, _Options(interpret, tile, backward_tile))

  if interpret is not None:
    return run(interpret, values, gates)
  compiled = partial(run, False)
  runs = {"default": partial(run, True), "cuda": compiled, "rocm": compiled}
  return by_platform(runs, values, gates)


class _Options(NamedTuple):
  interpret: bool
  tile: int
  backward_tile: int


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _shift_and_sum(values, gates, options):
  return _of_rows(_run, "b t h e, b t h k -> b t h e", options)(values, gates)


def _run(options, values, gates):
  length = gates.shape[1]
  levels = gates.shape[3]
  passes, padded = _split(length, levels, options.tile)
  x = _cut(values, padded)
  for i, one in enumerate(passes):
    dtype = values.dtype if i == len(passes) - 1 else jnp.float32
    x = _forward(x, _pad(gates, 1, padded), one, dtype, options)
  return _join(x, values.shape)


def _shift_and_sum_bwd(options, residuals, grad):
  rule = "b t h e, b t h k, b t h e -> b t h e, b t h k"
  return _of_rows(_pull, rule, options)(*residuals, grad)


def _pull(options, values, gates, grad):
  length = gates.shape[1]
  levels = gates.shape[3]
  passes, padded = _split(length, levels, options.backward_tile)
  gates = _pad(gates, 1, padded)
  inputs = [_cut(values, padded)]
  for one in passes[:-1]:
    inputs.append(_forward(inputs[-1], gates, one, jnp.float32, options))
  g = _cut(grad, padded)
  by_gates = []
  for i, one in reversed([*enumerate(passes)]):
    dtype = jnp.float32 if i else values.dtype
    g, dc = _backward(inputs[i], g, gates, one, dtype, options)
    by_gates.insert(0, dc)
  dc_bthk = jnp.concatenate(by_gates, axis=3)[:, :length]
  return _join(g, values.shape), dc_bthk


_shift_and_sum.defvjp(lambda *x: (_shift_and_sum(*x), x[:2]), _shift_and_sum_bwd)


@cache
def _of_rows(run, rule, options):
  """Wraps `run` for arrays [B, ...] with rows on several devices, or mapped by `vmap`."""
  run = partial(run, options)

  def partition(mesh, arrays, results):
    rows = arrays[0].sharding  # All arrays have four axes.
    device = mesh.abstract_mesh.abstract_device

    def run_local(*arrays):
      # Pallas may only know the kind of the mesh's devices.
      local = jax.sharding.AbstractMesh((), (), abstract_device=device)
      with jax.sharding.use_abstract_mesh(local):
        return run(*arrays)

    return mesh, run_local, jax.tree.map(lambda _: rows, results), (rows,) * len(arrays)

  undivided = ("t", "h", "e", "k")
  distributed = custom_partitioning(run)
  distributed.def_partition(partition, sharding_rule=rule, need_replication_factors=undivided)
  mapped = jax.custom_batching.custom_vmap(distributed)

  @mapped.def_vmap
  def map_rows(size, are_mapped, *arrays):
    pairs = zip(arrays, are_mapped, strict=True)
    arrays = [x if is_ else jnp.broadcast_to(x, (size, *x.shape)) for x, is_ in pairs]
    results = mapped(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
    results = jax.tree.map(lambda x: x.reshape(arrays[0].shape[:2] + x.shape[1:]), results)
    return results, jax.tree.map(lambda _: True, results)

  return mapped


class _Pass(NamedTuple):
  """Levels first .. first + levels - 1, on tiles of `rows` rows, 2**first apart."""

  first: int
  levels: int
  rows: int


def _split(length, levels, tile):
  """The passes, and T padded to whole tiles of each pass."""
  max_levels = tile.bit_length() - 1
  # The first pass has the remaining levels, so that its halo is a small part of its input.
  firsts = [0, *range(levels % max_levels or max_levels, levels, max_levels)]
  # Powers of 2, so the largest is a multiple of all.
  unit = max(2**k * tile if length > 2**k * tile else 2**k for k in firsts)
  padded = -(-length // unit) * unit
  passes = [
    _Pass(k, end - k, min(tile, padded // 2**k))
    for k, end in zip(firsts, [*firsts[1:], levels], strict=True)
  ]
  return passes, padded


def _cut(x_bthe, length):
  """[B, T, H, E] padded, its features in blocks: [B, T, H, C, E / C]."""
  features = x_bthe.shape[3]
  block = min(_WARP, 2 ** (features - 1).bit_length())
  x_bthe = _pad(_pad(x_bthe, 1, length), 3, -(-features // block) * block)
  return x_bthe.reshape(*x_bthe.shape[:3], -1, block)


def _join(x, shape):
  """The inverse of `_cut`."""
  return x.reshape(*x.shape[:3], -1)[:, : shape[1], :, : shape[3]]


def _pad(x, axis, size):
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths) if x.shape[axis] < size else x


class _Plan:
  """The grid (blocks of features, G, tiles, B) and the blocks of one pass over [B, T, H, C, E / C].

  The rows before, in and after a tile are its "past", "tile" and "future".
  """

  def __init__(self, shape, one, options):
    batch, length, heads, blocks, lanes = shape
    stride = 2**one.first
    self.shape = (batch, length // stride, stride * heads, blocks, lanes)
    self.one = one
    self.options = options
    self.tiles = self.shape[1] // one.rows
    # Rows of the block in which a halo lies: one more than it needs.
    self.halo = 2**one.levels if self.tiles > 1 else one.rows
    self.grid = (blocks, self.shape[2], self.tiles, batch)
    halos = one.rows // self.halo
    last = self.tiles * halos - 1
    # For each side: its first row from the tile's start, its rows, and the index of its block.
    self.sides = {
      "past": (-self.halo, self.halo, lambda i: jnp.maximum(i * halos - 1, 0)),
      "tile": (0, one.rows, lambda i: i),
      "future": (one.rows, self.halo, lambda i: jnp.minimum((i + 1) * halos, last)),
    }

  def call(self, kernel, inputs, out_shape, out_specs):
    """Runs `kernel` on (array, BlockSpec)s."""
    arrays, in_specs = zip(*inputs, strict=True)
    compiler_params = None
    if not self.options.interpret:
      from jax.experimental.pallas import triton as pltriton  # deprecated: may be removed

      compiler_params = pltriton.CompilerParams(num_warps=1, num_stages=1)
    return pl.pallas_call(
      partial(kernel, self),
      out_shape=out_shape,
      grid=self.grid,
      in_specs=in_specs,
      out_specs=out_specs,
      compiler_params=compiler_params,
      interpret=self.options.interpret,
    )(*arrays)

  def rows(self, x, sides):
    """The arguments of `call` for rows of x."""
    return [(x.reshape(self.shape), self.rows_spec(side)) for side in sides]

  def rows_spec(self, side):
    _, size, index = self.sides[side]
    block = None, size, None, None, self.shape[4]
    return pl.BlockSpec(block, lambda e, g, i, b: (b, index(i), g, e, 0))

  def gates(self, gates, sides):
    """The arguments of `call` for gates; a halo's are in a line: [B, G, N / halo, 1, halo * J]."""
    one = self.one
    line = self.halo * one.levels
    gates = gates[..., one.first : one.first + one.levels]
    gates = jnp.moveaxis(gates.reshape(*self.shape[:3], one.levels), 1, 2)
    gates = gates.reshape(*gates.shape[:2], -1, 1, line)

    def spec(side):
      _, size, index = self.sides[side]
      return pl.BlockSpec(
        (None, None, size // self.halo, 1, line),
        lambda e, g, i, b: (b, g, index(i), 0, 0),
      )

    return [(gates, spec(side)) for side in sides]

  def _exist(self, sides):
    """Whether the sequence has rows on each side of this program's tile."""
    tile = pl.program_id(2)
    exists = {"past": tile > 0, "tile": None, "future": tile < self.tiles - 1}
    return {side: exists[side] for side in sides}

  def read(self, refs):
    """{position from the tile's start: its features}, zeros beyond the sequence."""
    rows = {}
    exists = self._exist(refs)
    for side, ref in refs.items():
      start, size, _ = self.sides[side]
      for i in range(size):
        rows[start + i] = _zero_unless(exists[side], ref[i].astype(jnp.float32))
    return rows

  def reader(self, refs):
    """(position from the tile's start, level) -> gate, zero beyond the sequence."""
    exists = self._exist(refs)

    def gate(t, k):
      side = "past" if t < 0 else "tile" if t < self.one.rows else "future"
      i = t - self.sides[side][0]
      c = refs[side][i // self.halo, 0, i % self.halo * self.one.levels + k]
      return _zero_unless(exists[side], c)

    return gate


def _zero_unless(exists, x):
  return x if exists is None else jnp.where(exists, x, 0.0)


def _next_level(v, gate, k, is_single):
  """The rows of level k + 1 that follow from those of level k, {position: row}."""
  shift = 2**k
  return {
    t: row + gate(t, k) * v[t - shift] if t - shift in v else row
    for t, row in v.items()
    if is_single or t - shift in v
  }


def _forward(x, gates, one, dtype, options):
  """The levels of one pass on [B, T, H, C, E / C]."""
  plan = _Plan(x.shape, one, options)
  sides = ("tile", "past") if plan.tiles > 1 else ("tile",)
  out = plan.call(
    partial(_forward_kernel, sides=sides),
    plan.rows(x, sides) + plan.gates(gates, sides),
    jax.ShapeDtypeStruct(plan.shape, dtype),
    plan.rows_spec("tile"),
  )
  return out.reshape(x.shape)


def _forward_kernel(plan, *refs, sides):
  *refs, out_ref = refs
  refs = iter(refs)
  x_refs, gate_refs = ({side: next(refs) for side in sides} for _ in range(2))
  v = plan.read(x_refs)
  gate = plan.reader(gate_refs)
  for k in range(plan.one.levels):
    v = _next_level(v, gate, k, plan.tiles == 1)
  for t in range(plan.one.rows):
    out_ref[t] = v[t].astype(out_ref.dtype)


def _backward(x, g, gates, one, dtype, options):
  """The gradients of one pass with respect to its input x and gates, from that of its result.

  With g_k the gradient with respect to v_k, the rows before level k of the pass,

    dgates[t, k] = sum over e of g_{k+1}[t] * v_k[t - 2**k]
    g_k[t] = g_{k+1}[t] + gates[t + 2**k, k] * g_{k+1}[t + 2**k].
  """
  plan = _Plan(x.shape, one, options)
  sides = [("tile",), ("tile",), ("tile",)]  # of x, g and the gates
  if plan.tiles > 1:
    sides = [("tile", "past"), ("tile", "future"), ("tile", "past", "future")]
  dc_shape = (plan.grid[0], *plan.shape[:3], one.levels)
  dc_spec = pl.BlockSpec(
    (None, None, one.rows, None, one.levels), lambda e, g, i, b: (e, b, i, g, 0)
  )
  dx, dc = plan.call(
    partial(_backward_kernel, sides=sides),
    plan.rows(x, sides[0]) + plan.rows(g, sides[1]) + plan.gates(gates, sides[2]),
    [jax.ShapeDtypeStruct(plan.shape, dtype), jax.ShapeDtypeStruct(dc_shape, jnp.float32)],
    [plan.rows_spec("tile"), dc_spec],
  )
  return dx.reshape(x.shape), dc.sum(axis=0).reshape(*gates.shape[:3], one.levels)


def _backward_kernel(plan, *refs, sides):
  *refs, dx_ref, dc_ref = refs
  refs = iter(refs)
  x_refs, g_refs, gate_refs = ({side: next(refs) for side in group} for group in sides)
  gate = plan.reader(gate_refs)
  is_single = plan.tiles == 1
  levels = plan.one.levels
  v = [plan.read(x_refs)]
  for k in range(levels - 1):
    v.append(_next_level(v[k], gate, k, is_single))
  g = plan.read(g_refs)
  for k in reversed(range(levels)):
    shift = 2**k
    for t in range(plan.one.rows):
      if t - shift in v[k]:
        dc_ref[t, k] = jnp.sum(g[t] * v[k][t - shift], axis=0)
      else:
        dc_ref[t, k] = jnp.float32(0)
    g = {
      t: row + gate(t + shift, k) * g[t + shift] if t + shift in g else row
      for t, row in g.items()
      if is_single or t + shift in g
    }
  for t in range(plan.one.rows):
    dx_ref[t] = g[t].astype(dx_ref.dtype)
