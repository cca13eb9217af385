"""Shift-and-sum, the token mixer of the Dispatcher, in O(T log T).

Letters: B batch, T position, H head, E feature of a head, K level.

Source: Alg. 1 of aclanthology.org/2022.clasp-1.3; the authors' code is
fractalego/dispatcher@239608c:dispatcher/dispatcher_model.py. Differences: with
several heads, the authors' reshape cuts positions, while heads here are an axis of
their own; sums here are in float32 or more.
"""

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.ops import checks
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.experimental.shift_and_sum_matrix import matrix_form
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.products import sum_dtype


def num_levels(max_length: int) -> int:
  """The number of levels with shifts 1, 2, 4, ... that reach across `max_length` positions.

  The smallest K with 2**K >= max_length: 1 -> 0, 2 -> 1, 5 -> 3, 512 -> 9.

  Args:
    max_length: the number of positions, at least 1.

  Returns:
    ceil(log2(max_length)).

  Raises:
    ValueError: `max_length` is below 1.
  """
  return (checks.integer("max_length", max_length) - 1).bit_length()


@automatic_axes
def shift_and_sum(
  values: jax.Array,
  gates: jax.Array,
  *,
  level_keep: jax.Array | None = None,
  is_start: jax.Array | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Adds to every position a gated sum over the positions before it.

  For k = 0 .. K-1, where v_k[t] is zero for t < 0:

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  The result at position t depends on positions t - 2**K + 1 .. t. The work is O(T * K);
  levels with 2**k >= T have no effect and are skipped. For one head of one feature and
  two levels with gates of 1,

    [1, 10, 100, 1000] -> [1, 11, 110, 1100] -> [1, 11, 111, 1111].

  Sums are in float32, or in float64 if an argument is. The implementations are

  - "loop", Alg. 1 to the letter: the reference.
  - "unrolled", with static shifts.
  - "recompute", whose backward pass stores only `values` and `gates` and recomputes the
    levels, one block of features at a time. Training takes O(B * T * D) memory,
    D = H * E, instead of O(B * T * D * K).
  - "matrix", two products with banded matrices, O(T**1.5) work, for hardware with matrix
    products much faster than its memory. It stores as little as "recompute", but skips no
    work of a dropped level, rounds bfloat16 between the two products, and lets a later inf
    or nan affect the past.
  - "pallas", kernels for a GPU and a TPU that read and write the values a few times instead
    of at every level (`dpjax.ops.experimental.shift_and_sum_pallas`). It stores as little as
    "recompute", and a dropped level costs as much as a kept one. If `jax.jit` distributes a
    batch, every device computes all of it (except within `jax.shard_map`).

  The last three have only reverse-mode derivatives.

  Args:
    values: [B, T, H, E], floats.
    gates: [B, T, H, K], floats without unit; the paper's are in (0, 1).
    level_keep: [K] booleans: a level with False is skipped, including its work (except
      by "matrix" and "pallas"), without rescaling (Dispatcher dropout, Sec. 2.1). None
      keeps all.
    is_start: [B, T], 1 at the first token of each document, else 0: a document gives the same
      result as alone, because gates[t, k] counts as 0 if t - 2**k lies before it. None means
      that each row is one document.
    implementation: one of the names above; None takes the fastest as measured.

  Returns:
    [B, T, H, E], in the dtype of `values`.

  Raises:
    ValueError: `gates`, `level_keep` or `is_start` does not match `values`, an array has
      the wrong kind of dtype, or the implementation is unknown.
  """
  values, gates, level_keep = checks.arrays(
    values=(values, "B T H E"),
    gates=(gates, "B T H K"),
    level_keep=(level_keep, "K | None", checks.BOOLEANS),
  )
  checks.choice("implementation", implementation, IMPLEMENTATIONS, or_none=True)
  if implementation is None:
    implementation = DEFAULT_IMPLEMENTATION
  levels = min(gates.shape[3], num_levels(max(values.shape[1], 1)))
  if is_start is not None:
    is_start = check_starts(is_start, values.shape[:2])
  if levels == 0 or values.size == 0:
    return values
  if is_start is not None:
    shifts_k = 2 ** jnp.arange(levels, dtype=jnp.int32)
    is_within_btk = document_places(is_start)[..., None] >= shifts_k[None, None]
    gates = jnp.where(is_within_btk[:, :, None], gates[..., :levels], 0)
  if level_keep is not None:
    level_keep = level_keep[:levels]
  with checks.reverse_mode('implementation: expected "unrolled" or "loop"'):
    return IMPLEMENTATIONS[implementation](values, gates[..., :levels], level_keep)


@automatic_axes
def dispatch_matrix(gates: jax.Array, *, level_keep: jax.Array | None = None) -> jax.Array:
  """The matrix of `shift_and_sum`, a product of its levels.

    M = (I + D_{K-1} S^(2^(K-1))) ... (I + D_1 S^2) (I + D_0 S)

  where D_k is the diagonal matrix of gates[:, k] and S shifts by one position,
  so that shift_and_sum(values, gates)[t] = sum over s of M[t, s] values[s]. M is
  lower triangular with a diagonal of ones, and corresponds to an attention map. For
  T = 3 and two levels with the gates a and b,

    [[1, 0, 0], [a[1], 1, 0], [b[2], a[2], 1]].

  Args:
    gates: [B, T, H, K], floats.
    level_keep: see `shift_and_sum`.

  Returns:
    [B, H, T, T], float32, or float64 for such gates; axis 2 is the output position, axis 3
    the input position.

  Raises:
    ValueError: see `shift_and_sum`.
  """
  gates = checks.array("gates", gates, "B T H K")
  batch, length, heads, _ = gates.shape
  eye_tt = jnp.eye(length, dtype=sum_dtype(gates))
  # Within `jax.shard_map` these zeros vary over devices as the gates do.
  zeros_bths = jnp.zeros_like(gates, eye_tt.dtype, shape=(batch, length, heads, length))
  eye_bths = zeros_bths + eye_tt[None, :, None, :]
  m_bths = shift_and_sum(eye_bths, gates, level_keep=level_keep)
  return jnp.moveaxis(m_bths, 1, 2)


def _run_if(keep, level, v):
  """level(v) if `keep` is True, else v without the level's work."""
  return level(v) if keep is None else lax.cond(keep, level, lambda v: v, v)


def _loop(values, gates, level_keep):
  position = jnp.arange(values.shape[1])[None, :, None]
  dtype = sum_dtype(values, gates)

  def body(k, v_bthe):
    shift = 2**k

    def level(v_bthe):
      mask = (position >= shift).astype(dtype)
      c_bth = mask * gates[..., k].astype(dtype)
      return v_bthe + c_bth[..., None] * jnp.roll(v_bthe, shift, axis=1)

    return _run_if(None if level_keep is None else level_keep[k], level, v_bthe)

  v_bthe = lax.fori_loop(0, gates.shape[3], body, values.astype(dtype))
  return v_bthe.astype(values.dtype)


def _unrolled(values, gates, level_keep):
  dtype = sum_dtype(values, gates)
  v_bthe = values.astype(dtype)
  for k in range(gates.shape[3]):
    c_bthe = gates[..., k, None].astype(dtype)

    def level(v_bthe, shift=2**k, c_bthe=c_bthe):
      past_bthe = jnp.pad(v_bthe, ((0, 0), (shift, 0), (0, 0), (0, 0)))
      return v_bthe + c_bthe * past_bthe[:, : v_bthe.shape[1]]

    v_bthe = _run_if(None if level_keep is None else level_keep[k], level, v_bthe)
  return v_bthe.astype(values.dtype)


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


def _recompute_forward(values, gates, level_keep):
  return _scan(values, gates, level_keep), (values, gates, level_keep)


def _recompute_backward(residuals, grad):
  values, gates, level_keep = residuals
  features, levels = values.shape[3], gates.shape[3]
  dtype = sum_dtype(values, gates)
  keep = [None] * levels if level_keep is None else list(level_keep)
  c_bth = [gates[..., k].astype(dtype) for k in range(levels)]
  # All levels of one block take the room of one or two levels of all features;
  # blocks of whole vectors of 8 are the faster ones.
  size = min(features, max(-(-features // levels), 2 * features // levels // 8 * 8))

  def write(x, part, start):
    if level_keep is not None:
      return jnp.concatenate([x[:, :start], part, x[:, start + part.shape[1] :]], axis=1)
    # Where no branch parts the levels, XLA would fuse the concatenation into
    # the levels that follow and compute it again in each of them.
    return lax.dynamic_update_slice_in_dim(x, part, start, axis=1)

  def block(i, carry):
    dv_bthe, dc_bth = carry[0], list(carry[1])
    # The last block begins early where `size` does not divide the features:
    # what it shares with the one before it must count once in the gates.
    start = jnp.minimum(i * size, features - size)
    fresh_e = (start + jnp.arange(size) >= i * size).astype(dtype)

    def cut(x_bthe):
      x_bthe = lax.dynamic_slice_in_dim(x_bthe, start, size, axis=3)
      return x_bthe.astype(dtype)

    v_bthe = [cut(values)]
    for k in range(levels - 1):

      def level(v_bthe, shift=2**k, c_bth=c_bth[k]):
        more_bthe = c_bth[:, shift:, :, None] * v_bthe[:, :-shift]
        return write(v_bthe, v_bthe[:, shift:] + more_bthe, shift)

      v_bthe.append(_run_if(keep[k], level, v_bthe[k]))

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

      g_bthe, dc_bth[k] = _run_if(keep[k], gradients, (g_bthe, dc_bth[k]))

    dv_bthe = lax.dynamic_update_slice_in_dim(dv_bthe, g_bthe.astype(values.dtype), start, axis=3)
    return dv_bthe, dc_bth

  def all_blocks(dv_dc):
    return lax.fori_loop(0, -(-features // size), block, dv_dc)

  any_keep = None if level_keep is None else level_keep.any()
  init = grad, [jnp.zeros_like(c) for c in c_bth]
  dv_bthe, dc_bth = _run_if(any_keep, all_blocks, init)
  return dv_bthe, jnp.stack(dc_bth, axis=3).astype(gates.dtype), None


_recompute = jax.custom_vjp(_scan)
_recompute.defvjp(_recompute_forward, _recompute_backward)


def _pallas(values, gates, level_keep):
  from dpjax.ops.experimental import shift_and_sum_pallas as kernels

  return kernels.shift_and_sum(values, gates, level_keep)


IMPLEMENTATIONS = {
  "loop": _loop,
  "unrolled": _unrolled,
  "recompute": _recompute,
  "matrix": matrix_form,
  "pallas": _pallas,
}

# By results/shift_and_sum.json, on a CPU: the fastest in training, with the least
# memory; its forward pass alone is as fast as "loop". No accelerator has been measured.
DEFAULT_IMPLEMENTATION = "recompute"
