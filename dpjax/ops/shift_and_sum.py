"""Shift-and-sum, the token mixer of the Dispatcher: over sequences, and in chunks.

B batch, T position, C position of a chunk, H head, E feature of a head, K level, M slot of the
rings that a chunk touches.

Source: Alg. 1 of aclanthology.org/2022.clasp-1.3; the authors' code is
fractalego/dispatcher@239608c:dispatcher/dispatcher_model.py, whose heads split positions.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.backend import automatic_axes, by_platform, each_row, has_triton, opaque, write_over
from dpjax.ops.documents import check_lengths, document_positions, is_real
from dpjax.ops.placement import is_symbolic, pvary_like
from dpjax.ops.products import sum_dtype

_BLOCK = 128  # features of a row whose gradients a CPU computes at a time


def num_levels(max_length: int) -> int:
  """The number of levels that reach across `max_length` >= 1 positions: 5 -> 3, 512 -> 9.

  It is the smallest K with 2**K >= max_length.
  """
  return (arrays.integer("max_length", max_length) - 1).bit_length()


@automatic_axes
@typed
def shift_and_sum(
  values: Float[Array, "B T H E"],
  gates: Float[Array, "B T H K"],
  *,
  level_keep: Bool[Array, "K"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B T H E"]:
  """Adds to every position a gated sum over the positions before it.

  For k = 0 .. K-1, where v_k[t] is zero for t < 0:

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  Position t of the result depends on positions t - 2**K + 1 .. t, for O(T * K) work. For one head
  of one feature and two levels with gates of 1,

    [1, 10, 100, 1000] -> [1, 11, 110, 1100] -> [1, 11, 111, 1111].

  Sums are in float32, or in float64 if an argument is. The implementations are

  - "loop", Alg. 1 to the letter: the reference. Only it lets a later inf or nan affect the past.
  - "unrolled", with static shifts.
  - "recompute", whose backward pass recomputes the levels: O(B T H E) memory between the passes
    instead of O(B T H E K). On a CPU it takes one row and some of its features at a time, whose
    levels fit into the caches.
  - "pallas" (`dpjax.ops.shift_and_sum_gpu`), kernels for a GPU.

  The last two have only reverse-mode derivatives.

  Args:
    values: v_0.
    gates: without unit; the paper's are in (0, 1).
    level_keep: a level with False is skipped, without rescaling (Dispatcher dropout, Sec. 2.1).
      None keeps all.
    document_starts: 1 at the first token of each document, else 0: gates[t, k] counts as 0 if
      t - 2**k lies before the document. None means that each row is one document. As 0 times nan
      is nan, nan or infinity in one document reaches the later ones of its row.
    implementation: one of the names above; None takes "pallas" on an NVIDIA GPU, except within
      `jax.shard_map` and with a symbolic batch, and "recompute" elsewhere.

  Returns:
    v_K, in the dtype of `values`.

  Raises:
    ValueError: shapes or dtypes do not match, or the implementation is unknown.
  """
  arrays.choice("implementation", implementation, SHIFT_AND_SUM, or_none=True)
  if 0 in (values.size, gates.shape[3]) or values.shape[1] == 1:
    return values
  levels = min(gates.shape[3], num_levels(values.shape[1]))
  gates = gates[..., :levels]
  if document_starts is not None:
    shifts_k = 2 ** jnp.arange(levels, dtype=jnp.int32)
    is_within_btk = document_positions(document_starts)[..., None] >= shifts_k[None, None]
    gates = jnp.where(is_within_btk[:, :, None], gates, 0)
  if level_keep is not None:
    level_keep = level_keep[:levels]
  values, gates = pvary_like((values, gates))
  run = _run_default if implementation is None else SHIFT_AND_SUM[implementation]
  with arrays.reverse_mode('implementation: expected "unrolled" or "loop"'):
    return run(values, gates, level_keep)


@automatic_axes
@typed
def dispatch_matrix(
  gates: Float[Array, "B T H K"], *, level_keep: Bool[Array, "K"] | None = None
) -> Float[Array, "B H T T"]:
  """The matrix of `shift_and_sum`, a product of its levels.

    M = (I + D_{K-1} S^(2^(K-1))) ... (I + D_1 S^2) (I + D_0 S)

  where D_k is the diagonal matrix of gates[:, k] and S shifts by one position, so that
  shift_and_sum(values, gates)[t] = sum over s of M[t, s] values[s], like an attention map. For
  T = 3 and two levels with the gates a and b,

    [[1, 0, 0], [a[1], 1, 0], [b[2], a[2], 1]].

  The result is float32, or float64 for float64 gates. See `shift_and_sum`.
  """
  shape = *gates.shape[:3], gates.shape[1]
  dtype = sum_dtype(gates)
  # Within `jax.shard_map` these zeros vary over devices as the gates do.
  zeros_bths = jnp.zeros_like(gates, dtype, shape=shape)
  eye_bths = zeros_bths + jnp.eye(shape[1], dtype=dtype)[None, :, None, :]
  return jnp.moveaxis(shift_and_sum(eye_bths, gates, level_keep=level_keep), 1, 2)


class ShiftAndSumCache(NamedTuple):
  """The cache of `shift_and_sum_cached`: the inputs v_k of each level at the last tokens.

  Attributes:
    ring: float32 or float64: the last 2**k values v_k of level k begin at slot 2**k - 1; among
      them, position t has slot t mod 2**k. Initially zeros.
    length: the number of tokens so far in each row.
  """

  ring: Float[Array, "B 2**K-1 H E"]
  length: Int32[Array, "B"]


def init_shift_and_sum_cache(
  batch: int, num_heads: int, features: int, num_levels: int, dtype: DTypeLike = jnp.float32
) -> ShiftAndSumCache:
  """The cache before the first token: 4 * B * (2**K - 1) * H * E bytes of zeros, a fixed size.

  B rows, H heads of E features, K <= 30 levels; `dtype`, a float, is that of values and gates.
  """
  arrays.integers(batch=batch, num_heads=num_heads, features=features)
  arrays.integer("num_levels", num_levels, 0, 30)
  arrays.float_dtype(dtype)
  ring = jnp.zeros((batch, 2**num_levels - 1, num_heads, features), dtype)
  return ShiftAndSumCache(ring.astype(sum_dtype(ring)), jnp.zeros(batch, jnp.int32))


@automatic_axes
@typed
def shift_and_sum_cached(
  values: Float[Array, "B C H E"],
  gates: Float[Array, "B C H K"],
  cache: ShiftAndSumCache,
  *,
  lengths: Integer[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C H E"], ShiftAndSumCache]:
  """`shift_and_sum` of a chunk that continues each row where its cache ended.

    v_{k+1}[t] = v_k[t] + gates[t, k] * v_k[t - 2**k]

  with t the position in a row of any length, for any division into chunks; v_k of
  positions before the chunk comes from the cache. For one head of one feature and two levels whose
  gates are 1, the row 1, 10, 100, 1000 in chunks of three tokens and one:

    [1, 10, 100] -> [1, 11, 111], ring [100 | 110, 11],   length 3
    [1000]       -> [1111],       ring [1000 | 110, 1100], length 4

  A token takes O(H * E * K) work. A donated cache is updated in place.

  Args:
    values: v_0 of the chunk, C >= 1.
    gates: see `shift_and_sum`.
    cache: from `init_shift_and_sum_cache` or the previous call.
    lengths: see `causal_attention_cached`.

  Returns:
    v_K, in the dtype of `values`, 0 at the padding, and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, `lengths` are not in 0 .. C.
  """
  arrays.check_not_empty(values=values)
  arrays.check_dtype(sum_dtype(values, gates), **{"cache.ring": cache.ring})
  chunk = values.shape[1]
  levels = gates.shape[3]
  v_bche = jnp.asarray(values, cache.ring.dtype)
  c_bchk = jnp.asarray(gates, cache.ring.dtype)
  real_bc11 = None
  if lengths is not None:
    lengths = check_lengths(lengths, chunk)
    real_bc11 = is_real(lengths, chunk)[..., None, None]
    v_bche = jnp.where(real_bc11, v_bche, 0)
    c_bchk = jnp.where(real_bc11, c_bchk, 0)
  new_length = cache.length + (chunk if lengths is None else lengths)
  if levels == 0:
    return v_bche.astype(values.dtype), ShiftAndSumCache(cache.ring, new_length)

  # At level k a chunk reads and writes 2**k slots, or as many as it has tokens. All levels share
  # one gather and one scatter, since each of them would copy the ring.
  touched = [min(chunk, 2**k) for k in range(levels)]
  token_m = np.concatenate([np.arange(size, dtype=np.int32) for size in touched])
  # Both the first slot of a level and the bits of t mod 2**k.
  ones_m = np.repeat(2 ** np.arange(levels, dtype=np.int32) - 1, touched)
  slots_bm = ones_m[None] + ((cache.length[:, None] + token_m[None]) & ones_m[None])
  read_bmhe = jax.vmap(_read)(cache.ring, slots_bm)
  written = []
  for k, past_bmhe in enumerate(jnp.split(read_bmhe, np.cumsum(touched)[:-1], axis=1)):
    size = 2**k
    c_bche = c_bchk[..., k, None]
    if chunk <= size:
      kept = v_bche if real_bc11 is None else jnp.where(real_bc11, v_bche, past_bmhe)
      written.append(kept)
      v_bche += c_bche * past_bmhe
      continue
    written.append(_newest(v_bche, past_bmhe, lengths))
    first = v_bche[:, :size] + c_bche[:, :size] * past_bmhe
    rest = v_bche[:, size:] + c_bche[:, size:] * v_bche[:, :-size]
    v_bche = write_over(v_bche, (first, rest), axis=1)

  @jax.vmap
  def write(ring, slots, new):
    return ring.at[slots].set(new, mode="promise_in_bounds", unique_indices=True)

  ring = write(cache.ring, slots_bm, jnp.concatenate(written, axis=1))
  if real_bc11 is not None:
    v_bche = jnp.where(real_bc11, v_bche, 0)  # Zero gates do not stop an inf.
  return v_bche.astype(values.dtype), ShiftAndSumCache(ring, new_length)


def _read(ring, slots):
  return ring.at[slots].get(mode="promise_in_bounds")


def _newest(v_bche, past_bmhe, lengths):
  """The last M < C real values of past and chunk, each at its position modulo M."""
  chunk = v_bche.shape[1]
  size = past_bmhe.shape[1]
  if lengths is None:
    return jnp.roll(v_bche[:, -size:], chunk % size, axis=1)
  index_m = jnp.arange(size, dtype=jnp.int32)[None]
  # The last real token with that index, negative if the chunk has none.
  token_bm = index_m + ((lengths[:, None] - 1 - index_m) & -size)
  newest_bmhe = jax.vmap(_read)(v_bche, jnp.maximum(token_bm, 0))
  return jnp.where((token_bm >= 0)[..., None, None], newest_bmhe, past_bmhe)


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
  if level_keep is not None:  # No branches: before each, a GPU would wait for its host.
    gates = jnp.where(level_keep, gates, 0)
  v_bthe = values.astype(dtype)
  for k in range(gates.shape[3]):
    past_bthe = jnp.pad(v_bthe, ((0, 0), (2**k, 0), (0, 0), (0, 0)))[:, : v_bthe.shape[1]]
    v_bthe += gates[..., k, None].astype(dtype) * past_bthe
  return v_bthe.astype(values.dtype)


def _scan(values, gates, level_keep):
  length = values.shape[1]
  dtype = sum_dtype(values, gates)

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
  runs = {
    "cpu": partial(_pull_rows, level_keep=level_keep),
    "default": partial(_pull, level_keep=level_keep),
  }
  by_values, by_gates = by_platform(runs, values, gates, grad)
  return by_values, by_gates, None


def _pull(values, gates, grad, level_keep):
  return jax.vjp(partial(_unrolled, level_keep=level_keep), values, gates)[1](grad)


def _pull_rows(values, gates, grad, level_keep):
  if level_keep is None:
    level_keep = opaque(jnp.ones(gates.shape[3], bool))  # All levels, each still a branch.
  rows = values.shape[0]
  features = values.shape[3]
  levels = gates.shape[3]
  # All levels of one block take at most the memory of two levels of all features and rows.
  room = 2 * (1 if is_symbolic(values) else rows) * features // levels
  size = min(features, _BLOCK, max(room // 8 * 8, -(-room // 2)))
  return each_row(partial(_pull_blocks, size, level_keep=level_keep), values, gates, grad)


def _pull_blocks(size, values, gates, grad, level_keep):
  features = values.shape[3]
  levels = gates.shape[3]
  dtype = sum_dtype(values, gates)
  c_bth = [gates[..., k].astype(dtype) for k in range(levels)]

  def write(x, rows, start):
    return jnp.concatenate([x[:, :start], rows, x[:, start + rows.shape[1] :]], axis=1)

  def block(i, carry):
    dv_bthe, dc_bth = carry
    dc_bth = list(dc_bth)
    # The last block begins early if `size` does not divide the features: features that it
    # shares with the previous block count once in the gates.
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
  runs = {
    "cpu": partial(each_row, partial(_scan, level_keep=level_keep)),
    "default": partial(_unrolled, level_keep=level_keep),
  }
  return by_platform(runs, values, gates)


_recompute.defvjp(lambda *x: (_recompute(*x), x), _recompute_backward)


def _pallas(values, gates, level_keep, interpret=None):
  from dpjax.ops import shift_and_sum_gpu

  return shift_and_sum_gpu.shift_and_sum(values, gates, level_keep, interpret=interpret)


def _run_default(values, gates, level_keep):
  # Chosen by results/ops.json for a CPU, and results/ops_h200.json for a GPU.
  runs: dict[str, Callable[..., jax.Array]] = {"default": lambda *x: _recompute(*x, level_keep)}
  is_float64 = sum_dtype(values, gates) == jnp.float64
  # The kernels do not say over which axes of `jax.shard_map` a result varies.
  is_manual = jax.sharding.get_abstract_mesh().manual_axes
  if has_triton() and not (is_float64 or is_manual or is_symbolic(values)):
    runs["cuda"] = partial(_pallas, level_keep=level_keep, interpret=False)
  return by_platform(runs, values, gates)


SHIFT_AND_SUM = {
  "loop": _loop,
  "unrolled": _unrolled,
  "recompute": _recompute,
  "pallas": _pallas,
}
