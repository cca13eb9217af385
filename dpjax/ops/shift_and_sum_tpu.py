"""Shift-and-sum as Pallas kernels for TPUs, which visit the main memory once.

B batch, T position, H head, E feature of a head, K level, R rows of a tile.

A program holds the whole sequence of 128 features of a head in the chip's own memory (VMEM) and
computes all levels there, tile by tile and in place: values and gates are read once, the result is
written once. The backward kernel also holds the input of each level, K T x 128 floats; a longer
sequence takes two visits (`in_parts`), on chips with room for its parts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dpjax.ops.platforms import AXIS, num_devices

_LANES, _ROWS, _ALIGNED = 128, 256, 8
_PART = 4096  # rows of a part
# The chips that are known to have 128 MiB of VMEM; others have at least 16.
_LARGE = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")


def fits(length: int, levels: int) -> bool:
  """Whether the backward kernel fits the VMEM of the chip that is compiled for."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  mib = 112 if device is not None and device.device_kind in _LARGE else 14
  return _needed(length, levels) <= mib * 2**20


def takes(length: int, levels: int) -> bool:
  """Whether the kernels fit, or do so in parts."""
  return fits(length, levels) or fits(_PART + _ROWS, _ROWS.bit_length() - 1)


def suits(values: jax.Array, gates: jax.Array) -> bool:
  """Whether the kernels fit, and their rows lie on one device or are divided as those of a run."""
  mesh = jax.sharding.get_abstract_mesh()
  is_divided = num_devices() == 1 or (mesh.axis_names == (AXIS,) and len(values) % mesh.size == 0)
  return is_divided and takes(values.shape[1], gates.shape[3])


def in_parts(
  run: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array, gates: jax.Array
) -> jax.Array:
  """Shift-and-sum by two calls of it, `run`, on sequences that are shorter.

  The first k levels, at most 8, reach 2**k - 1 rows back, so they take parts of 4,096 rows, each
  with the 256 rows before it. The others shift by multiples of s = 2**k: they are the first levels
  of the sequences p, p + s, p + 2 s, ..., which a reshape makes heads.
  """
  batch, length, heads, features = values.shape
  levels, most = gates.shape[3], _ROWS.bit_length() - 1
  first = levels if levels <= most else min((levels + 1) // 2, most)
  number = -(-length // _PART)
  fill = (0, 0), (0, number * _PART - length), (0, 0), (0, 0)
  y, gates = jnp.pad(values.astype(jnp.float32), fill), jnp.pad(gates, fill)

  def cut(x):
    parts = x.reshape(batch, number, _PART, *x.shape[2:])
    past = jnp.pad(parts[:, :-1, -_ROWS:], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([past, parts], axis=2).reshape(-1, _ROWS + _PART, *x.shape[2:])

  y = run(cut(y), cut(gates[..., :first]))
  y = y.reshape(batch, number, _ROWS + _PART, heads, features)[:, :, _ROWS:]
  if levels > first:
    apart = batch, -1, heads * 2**first
    y = run(y.reshape(*apart, features), gates[..., first:].reshape(*apart, levels - first))
  return y.reshape(batch, -1, heads, features)[:, :length].astype(values.dtype)


def _needed(length: int, levels: int) -> int:
  """Bytes of VMEM: two buffers of five blocks, the levels' inputs and a gradient."""
  return (10 + levels + 2) * (length + _ROWS) * _LANES * 4


def forward(values: jax.Array, gates: jax.Array, *, interpret: bool = False) -> jax.Array:
  """The levels of float32 gates [B, T, H, K] on values [B, T, H, E]."""
  plan = _Plan(values.shape, gates.shape[3], interpret)
  out = jax.ShapeDtypeStruct(plan.shape, values.dtype)
  kernel = partial(_forward_kernel, plan)
  scratch = [pltpu.VMEM((plan.rows + plan.length, _LANES), jnp.float32)]
  arrays = plan.features(values), plan.gates(gates)
  specs = [plan.of_features, plan.of_gates]
  return plan.join(plan.call(kernel, specs, out, plan.of_features, scratch)(*arrays))


def backward(
  values: jax.Array, gates: jax.Array, grad: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """The gradients by values and gates."""
  plan = _Plan(values.shape, gates.shape[3], interpret)
  batch, _, heads, levels = gates.shape
  of_gates = jax.ShapeDtypeStruct((batch, heads, plan.length, levels), jnp.float32)
  out = jax.ShapeDtypeStruct(plan.shape, values.dtype), of_gates
  size = plan.rows + plan.length
  scratch = [pltpu.VMEM((levels, size, _LANES), jnp.float32)]
  scratch += [pltpu.VMEM((plan.length, _LANES), jnp.float32)]
  arrays = plan.features(values), plan.gates(gates), plan.features(grad)
  specs, out_specs = (
    [plan.of_features, plan.of_gates, plan.of_features],
    (plan.of_features, plan.of_gates),
  )
  kernel = partial(_backward_kernel, plan)
  dv, dc = plan.call(kernel, specs, out, out_specs, scratch)(*arrays)
  return plan.join(dv), jnp.moveaxis(dc, 1, 2)[:, : values.shape[1]]


class _Plan:
  """The grid (B, H, blocks of 128 features) over [B, T, H * E], padded."""

  def __init__(self, shape, levels, interpret):
    self.given, self.levels, self.interpret = shape, levels, interpret
    batch, length, heads, features = shape
    self.rows = min(_ROWS, max(_ALIGNED, 1 << (length - 1).bit_length()))
    self.length = -(-length // self.rows) * self.rows
    self.tiles, self.blocks = self.length // self.rows, -(-features // _LANES)
    self.shape = batch, self.length, heads * self.blocks * _LANES
    self.grid = batch, heads, self.blocks
    self.of_features = pl.BlockSpec(
      (None, self.length, _LANES), lambda b, h, c: (b, 0, h * self.blocks + c)
    )
    self.of_gates = pl.BlockSpec((None, None, self.length, levels), lambda b, h, c: (b, h, 0, 0))

  def features(self, x_bthe):
    batch, length, heads, features = self.given
    widths = (0, 0), (0, self.length - length), (0, 0), (0, self.blocks * _LANES - features)
    return jnp.pad(x_bthe, widths).reshape(self.shape)

  def gates(self, c_bthk):
    widths = (0, 0), (0, self.length - self.given[1]), (0, 0), (0, 0)
    return jnp.moveaxis(jnp.pad(c_bthk, widths), 2, 1)

  def join(self, x):
    batch, length, heads, features = self.given
    return x.reshape(batch, self.length, heads, -1)[:, :length, :, :features]

  def call(self, kernel, in_specs, out_shape, out_specs, scratch):
    limit = _needed(self.length, self.levels) + 2**21
    return pl.pallas_call(
      kernel,
      out_shape=out_shape,
      grid=self.grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
      interpret=self.interpret,
    )

  def each(self, run, first=0, last=None, descending=False):
    """Runs a function of each tile's number and first row, in order."""
    last = self.tiles if last is None else last

    def step(i, _):
      tile = last - 1 - i if descending else first + i
      run(tile, pl.multiple_of(tile * self.rows, self.rows))

    jax.lax.fori_loop(0, last - first, step, None)


def _past(plan, v_ref, row, shift):
  """The rows `shift` before a tile's, of an array with R rows of zeros before it."""
  if shift >= plan.rows:
    return v_ref[pl.ds(plan.rows + row - shift, plan.rows)]
  halo = max(shift, _ALIGNED)
  own = v_ref[pl.ds(plan.rows + row, plan.rows)]
  before = v_ref[pl.ds(plan.rows + row - halo, halo)]
  return jnp.concatenate([before[halo - shift :], own[: plan.rows - shift]], axis=0)


def _read(plan, x_ref, v_ref):
  """Copies a block after R rows of zeros."""
  v_ref[: plan.rows] = jnp.zeros((plan.rows, _LANES), jnp.float32)

  def copy(_, row):
    v_ref[pl.ds(plan.rows + row, plan.rows)] = x_ref[pl.ds(row, plan.rows)].astype(jnp.float32)

  plan.each(copy)


def _level(plan, k, c_ref, v_ref, out_ref):
  """One level from `v_ref` to `out_ref`, which may be the same."""
  shift = 2**k
  skipped = shift // plan.rows  # whole tiles without a past

  def run(tile, row):
    place = pl.ds(plan.rows + row, plan.rows)
    past = _past(plan, v_ref, row, shift)
    out_ref[place] = v_ref[place] + c_ref[pl.ds(row, plan.rows), k : k + 1] * past

  # The last tiles first: what they read has not changed yet.
  plan.each(run, skipped, descending=True)
  if v_ref is not out_ref:

    def copy(_, row):
      place = pl.ds(plan.rows + row, plan.rows)
      out_ref[place] = v_ref[place]

    plan.each(copy, 0, skipped)


def _forward_kernel(plan, x_ref, c_ref, out_ref, v_ref):
  _read(plan, x_ref, v_ref)
  for k in range(plan.levels):
    _level(plan, k, c_ref, v_ref, v_ref)

  def write(_, row):
    out_ref[pl.ds(row, plan.rows)] = v_ref[pl.ds(plan.rows + row, plan.rows)].astype(out_ref.dtype)

  plan.each(write)


def _backward_kernel(plan, x_ref, c_ref, g_ref, dx_ref, dc_ref, v_ref, d_ref):
  """The levels again, and from the last to the first their gradients.

  With d_k the gradient by v_k, the input of level k, and s = 2**k,

  dgates[t, k] = sum over e of d_{k+1}[t] * v_k[t - s]
  d_k[t] = d_{k+1}[t] + gates[t + s, k] * d_{k+1}[t + s].
  """
  _read(plan, x_ref, v_ref.at[0])
  for k in range(plan.levels - 1):
    v_ref[k + 1, : plan.rows] = jnp.zeros((plan.rows, _LANES), jnp.float32)
    _level(plan, k, c_ref, v_ref.at[k], v_ref.at[k + 1])

  @pl.when(pl.program_id(2) == 0)
  def _():
    dc_ref[...] = jnp.zeros(dc_ref.shape, jnp.float32)

  def copy(_, row):
    place = pl.ds(row, plan.rows)
    d_ref[place] = g_ref[place].astype(jnp.float32)

  plan.each(copy)
  for k in reversed(range(plan.levels)):
    shift = 2**k
    skipped, before_ref = shift // plan.rows, v_ref.at[k]

    def by_gate(tile, row, k=k, shift=shift, before_ref=before_ref):
      place = pl.ds(row, plan.rows)
      past = _past(plan, before_ref, row, shift)
      total = jnp.sum(d_ref[place] * past, axis=1, keepdims=True)
      dc_ref[place, k : k + 1] += total

    plan.each(by_gate, skipped)

    def by_values(tile, row, k=k, shift=shift, skipped=skipped):
      place = pl.ds(row, plan.rows)
      if skipped:
        later = pl.ds(row + shift, plan.rows)
        more = c_ref[later, k : k + 1] * d_ref[later]
      else:
        halo = max(shift, _ALIGNED)
        # Beyond the last tile there is nothing: it reads its own rows, times zero.
        is_last = tile == plan.tiles - 1
        start = jnp.where(is_last, row, row + plan.rows)
        next_rows = pl.ds(pl.multiple_of(start, _ALIGNED), halo)
        after = c_ref[next_rows, k : k + 1] * d_ref[next_rows]
        after = jnp.where(is_last, jnp.zeros_like(after), after)
        own = c_ref[place, k : k + 1] * d_ref[place]
        more = jnp.concatenate([own[shift:], after[:shift]], axis=0)
      d_ref[place] += more

    # The first tiles first: what they read has not changed yet.
    plan.each(by_values, 0, plan.tiles - skipped)

  def write(_, row):
    place = pl.ds(row, plan.rows)
    dx_ref[place] = d_ref[place].astype(dx_ref.dtype)

  plan.each(write)
