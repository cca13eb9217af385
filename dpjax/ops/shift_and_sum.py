"""Shift-and-sum, the token mixer of the Dispatcher, over whole sequences.

B batch, T position, H head, E feature of a head, K level.

Source: Alg. 1 of aclanthology.org/2022.clasp-1.3; the authors' code is
fractalego/dispatcher@239608c:dispatcher/dispatcher_model.py, whose heads cut positions.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.ops import checks
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.platforms import (
  by_platform,
  has_libtpu,
  has_triton,
  is_symbolic,
  num_devices,
  pvary_like,
)
from dpjax.ops.products import sum_dtype

_BLOCK = 128  # features of a row whose gradients a CPU computes at a time


def num_levels(max_length: int) -> int:
  """The number of levels that reach across `max_length` >= 1 positions: 5 -> 3, 512 -> 9.

  It is the smallest K with 2**K >= max_length.
  """
  return (checks.integer("max_length", max_length) - 1).bit_length()


@automatic_axes
def shift_and_sum(
  values: jax.Array,
  gates: jax.Array,
  *,
  level_keep: jax.Array | None = None,
  document_starts: jax.Array | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Adds to every position a gated sum over the positions before it.

  For k = 0 .. K-1, where v_k[t] is zero for t < 0:

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  Position t of the result depends on positions t - 2**K + 1 .. t, for O(T * K) work. For one head
  of one feature and two levels with gates of 1,

    [1, 10, 100, 1000] -> [1, 11, 110, 1100] -> [1, 11, 111, 1111].

  Sums are in float32, or in float64 if an argument is. The implementations are

  - "loop", Alg. 1 to the letter: the reference. In it alone a later inf or nan affects the past.
  - "unrolled", with static shifts.
  - "recompute", whose backward pass recomputes the levels: O(B T H E) memory between the passes
    instead of O(B T H E K). On a CPU it takes one row and some of its features at a time, whose
    levels fit into the caches.
  - "pallas" (`dpjax.ops.shift_and_sum_pallas`), kernels for a GPU and a TPU.

  The last two have only reverse-mode derivatives.

  Args:
    values: [B, T, H, E], floats.
    gates: [B, T, H, K], floats without unit; the paper's are in (0, 1).
    level_keep: [K] booleans: a level with False is skipped, without rescaling (Dispatcher
      dropout, Sec. 2.1). None keeps all.
    document_starts: [B, T], 1 at the first token of each document, else 0: gates[t, k] counts as 0
      if t - 2**k lies before the document. None means that each row is one document.
    implementation: one of the names above; None takes "pallas" on an NVIDIA GPU, and on a TPU (one,
      or those of a run) if T fits, except within `jax.shard_map` and with a symbolic batch;
      "recompute" elsewhere.

  Returns:
    [B, T, H, E], in the dtype of `values`.

  Raises:
    ValueError: shapes or dtypes do not match, or the implementation is unknown.
  """
  values, gates, level_keep = checks.arrays(
    values=(values, "B T H E"),
    gates=(gates, "B T H K"),
    level_keep=(level_keep, "K | None", checks.BOOLEANS),
  )
  checks.choice("implementation", implementation, SHIFT_AND_SUM, or_none=True)
  if document_starts is not None:
    document_starts = check_starts(document_starts, values.shape[:2])
  if 0 in (values.size, gates.shape[3]) or values.shape[1] == 1:
    return values
  levels = min(gates.shape[3], num_levels(values.shape[1]))
  gates = gates[..., :levels]
  if document_starts is not None:
    shifts_k = 2 ** jnp.arange(levels, dtype=jnp.int32)
    is_within_btk = document_places(document_starts)[..., None] >= shifts_k[None, None]
    gates = jnp.where(is_within_btk[:, :, None], gates, 0)
  if level_keep is not None:
    level_keep = level_keep[:levels]
  values, gates = pvary_like((values, gates))
  run = _run_default if implementation is None else SHIFT_AND_SUM[implementation]
  with checks.reverse_mode('implementation: expected "unrolled" or "loop"'):
    return run(values, gates, level_keep)


@automatic_axes
def dispatch_matrix(gates: jax.Array, *, level_keep: jax.Array | None = None) -> jax.Array:
  """The matrix of `shift_and_sum`, [B, H, T, T], a product of its levels.

    M = (I + D_{K-1} S^(2^(K-1))) ... (I + D_1 S^2) (I + D_0 S)

  where D_k is the diagonal matrix of gates[:, k] and S shifts by one position, so that
  shift_and_sum(values, gates)[t] = sum over s of M[t, s] values[s], like an attention map. For
  T = 3 and two levels with the gates a and b,

    [[1, 0, 0], [a[1], 1, 0], [b[2], a[2], 1]].

  `gates` are [B, T, H, K]; the result is float32, or float64 for such gates. See `shift_and_sum`.
  """
  gates = checks.array("gates", gates, "B T H K")
  shape, dtype = (*gates.shape[:3], gates.shape[1]), sum_dtype(gates)
  # Within `jax.shard_map` these zeros vary over devices as the gates do.
  zeros_bths = jnp.zeros_like(gates, dtype, shape=shape)
  eye_bths = zeros_bths + jnp.eye(shape[1], dtype=dtype)[None, :, None, :]
  return jnp.moveaxis(shift_and_sum(eye_bths, gates, level_keep=level_keep), 1, 2)


def _run_if(keep, level, v):
  """level(v) if `keep` is True, else v without the level's work."""
  return level(v) if keep is None else lax.cond(keep, level, lambda v: v, v)


def _loop(values, gates, level_keep):
  position = jnp.arange(values.shape[1])[None, :, None]
  dtype = sum_dtype(values, gates)

  def body(k, v_bthe):
    def level(v_bthe):
      c_bth = (position >= 2**k).astype(dtype) * gates[..., k].astype(dtype)
      return v_bthe + c_bth[..., None] * jnp.roll(v_bthe, 2**k, axis=1)

    return _run_if(None if level_keep is None else level_keep[k], level, v_bthe)

  v_bthe = lax.fori_loop(0, gates.shape[3], body, values.astype(dtype))
  return v_bthe.astype(values.dtype)


def _unrolled(values, gates, level_keep):
  dtype = sum_dtype(values, gates)
  if level_keep is not None:  # Without branches, before each of which a GPU waits for its host.
    gates = jnp.where(level_keep, gates, 0)
  v_bthe = values.astype(dtype)
  for k in range(gates.shape[3]):
    past_bthe = jnp.pad(v_bthe, ((0, 0), (2**k, 0), (0, 0), (0, 0)))[:, : v_bthe.shape[1]]
    v_bthe += gates[..., k, None].astype(dtype) * past_bthe
  return v_bthe.astype(values.dtype)


def _each_row(run, *arrays):
  """`run` of one row of each device at a time: what its levels write stays in a CPU's caches."""
  devices = num_devices()
  if is_symbolic(arrays[0]) or len(arrays[0]) % devices:
    devices = 1
  rows = [jnp.moveaxis(x.reshape(devices, -1, *x.shape[1:]), 1, 0) for x in arrays]
  results = lax.map(lambda x: run(*x), rows)
  return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(-1, *y.shape[2:]), results)


def _scan(values, gates, level_keep):
  length, dtype = values.shape[1], sum_dtype(values, gates)

  def body(v_bthe, x):
    c_bth, shift, keep = x

    def level(v_bthe):
      padded = jnp.pad(v_bthe, ((0, 0), (length, 0), (0, 0), (0, 0)))
      past_bthe = lax.dynamic_slice_in_dim(padded, length - shift, length, axis=1)
      return v_bthe + c_bth[..., None] * past_bthe

    return _run_if(keep, level, v_bthe), None

  c_kbth = jnp.moveaxis(gates.astype(dtype), 3, 0)
  shifts = 2 ** jnp.arange(gates.shape[3])
  v_bthe, _ = lax.scan(body, values.astype(dtype), (c_kbth, shifts, level_keep))
  return v_bthe.astype(values.dtype)


def _recompute_backward(residuals, grad):
  values, gates, level_keep = residuals
  cpu, default = (partial(f, level_keep=level_keep) for f in (_pull_rows, _pull))
  return *by_platform({"cpu": cpu, "default": default}, values, gates, grad), None


def _pull(values, gates, grad, level_keep):
  return jax.vjp(partial(_unrolled, level_keep=level_keep), values, gates)[1](grad)


def _pull_rows(values, gates, grad, level_keep):
  if level_keep is None:
    # With branches between the levels, XLA does not compute a level again for each later one.
    level_keep = lax.optimization_barrier(jnp.ones(gates.shape[3], bool))
  rows, features, levels = values.shape[0], values.shape[3], gates.shape[3]
  # All levels of one block take at most the room of two levels of all features and rows.
  room = 2 * (1 if is_symbolic(values) else rows) * features // levels
  size = min(features, _BLOCK, max(room // 8 * 8, -(-room // 2)))
  return _each_row(partial(_pull_blocks, size, level_keep=level_keep), values, gates, grad)


def _pull_blocks(size, values, gates, grad, level_keep):
  features, levels = values.shape[3], gates.shape[3]
  dtype = sum_dtype(values, gates)
  c_bth = [gates[..., k].astype(dtype) for k in range(levels)]

  def write(x, part, start):
    return jnp.concatenate([x[:, :start], part, x[:, start + part.shape[1] :]], axis=1)

  def block(i, carry):
    dv_bthe, dc_bth = carry[0], list(carry[1])
    # The last block begins early if `size` does not divide the features: the features that it
    # shares with the one before count once in the gates.
    start = jnp.minimum(i * size, features - size)
    fresh_e = (start + jnp.arange(size) >= i * size).astype(dtype)

    def cut(x_bthe):
      return lax.dynamic_slice_in_dim(x_bthe, start, size, axis=3).astype(dtype)

    v_bthe = [cut(values)]
    for k in range(levels - 1):

      def level(v_bthe, shift=2**k, c_bth=c_bth[k]):
        more_bthe = c_bth[:, shift:, :, None] * v_bthe[:, :-shift]
        return write(v_bthe, v_bthe[:, shift:] + more_bthe, shift)

      v_bthe.append(_run_if(level_keep[k], level, v_bthe[k]))

    g_bthe = cut(grad)
    for k in reversed(range(levels)):

      def gradients(g_dc, shift=2**k, c_bth=c_bth[k], v_bthe=v_bthe[k]):
        g_bthe, dc_bth = g_dc
        # A product with ones, as XLA's sum over the last axis is slow on CPU.
        more_bth = jnp.einsum(
          "bthe,e->bth", g_bthe[:, shift:] * v_bthe[:, :-shift], fresh_e, precision="highest"
        )
        dc_bth = write(dc_bth, dc_bth[:, shift:] + more_bth, shift)
        more_bthe = c_bth[:, shift:, :, None] * g_bthe[:, shift:]
        return write(g_bthe, g_bthe[:, :-shift] + more_bthe, 0), dc_bth

      g_bthe, dc_bth[k] = _run_if(level_keep[k], gradients, (g_bthe, dc_bth[k]))

    dv_bthe = lax.dynamic_update_slice_in_dim(dv_bthe, g_bthe.astype(values.dtype), start, axis=3)
    return dv_bthe, dc_bth

  init = grad, [jnp.zeros_like(c) for c in c_bth]
  dv_bthe, dc_bth = lax.fori_loop(0, -(-features // size), block, init)
  return dv_bthe, jnp.stack(dc_bth, axis=3).astype(gates.dtype)


@jax.custom_vjp
def _recompute(values, gates, level_keep):
  scan, default = (partial(run, level_keep=level_keep) for run in (_scan, _unrolled))
  return by_platform({"cpu": partial(_each_row, scan), "default": default}, values, gates)


_recompute.defvjp(lambda *x: (_recompute(*x), x), _recompute_backward)


def _pallas(values, gates, level_keep, platform=None):
  from dpjax.ops import shift_and_sum_pallas as kernels

  return kernels.shift_and_sum(values, gates, level_keep, platform=platform)


def _run_default(values, gates, level_keep):
  # By results/ops.json on a CPU, results/ops_h200.json on a GPU, and on a TPU by the
  # bytes that its compiler's programs move: results/compiled_ops.json.
  runs: dict[str, Any] = {"default": lambda *x: _recompute(*x, level_keep)}
  is_float64 = sum_dtype(values, gates) == jnp.float64
  # The kernels do not say over which axes of `jax.shard_map` a result varies.
  is_manual = jax.sharding.get_abstract_mesh().manual_axes
  if not (is_float64 or is_manual or is_symbolic(values)):
    if has_triton():
      runs["cuda"] = partial(_pallas, level_keep=level_keep, platform="gpu")
    if has_libtpu():
      from dpjax.ops import shift_and_sum_tpu as tpu

      if tpu.suits(values, gates):
        runs["tpu"] = partial(_pallas, level_keep=level_keep, platform="tpu")
  return by_platform(runs, values, gates)


SHIFT_AND_SUM = {
  "loop": _loop,
  "unrolled": _unrolled,
  "recompute": _recompute,
  "pallas": _pallas,
}
