"""Causal convolution token by token, with explicit caches.

B batch, C positions of a chunk, T position, L tap, D feature read, E feature written, K inputs
of the smallest block, J doublings of it, U inputs of a block.

Sources: Chen 2023, arXiv:2308.07661, Sec. 5, for the sums; Fischer and Stockmeyer, "Fast on-line
integer multiplication", JCSS 9, 1974, for the blocks of `OnlineConvolutionCache`; Oncescu et al.
2024, arXiv:2410.12982, for their use in decoding.
"""

import functools
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from dpjax.ops import checks
from dpjax.ops.causal_convolution import causal_convolution
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.lengths import check_lengths, is_real
from dpjax.ops.products import sum_dtype


class ConvolutionCache(NamedTuple):
  """The last L inputs of every row; a step costs O(L D), with matrix taps O(L D E).

  Attributes:
    inputs: [B, L, D], a ring: position t is at t modulo L; zeros for missing inputs.
    length: [B] int32, the number of inputs so far in each row.
  """

  inputs: jax.Array
  length: jax.Array


class OnlineConvolutionCache(NamedTuple):
  """The last L inputs, and their contributions to future outputs.

  For taps that are numbers or vectors. T steps cost O(D T log(T)**2) instead of O(D T L): at the
  end of a block of 2**j steps, an FFT computes the contribution of their inputs to as many future
  outputs. The block is the largest power of two that divides the number of the step,

    step     1  2  3  4  5  6  7  8
    block    1  2  1  4  1  2  1  8

  and replaces the smaller ones before it: after step 7 there are blocks of 4, 2 and 1, and
  after step 8 one of 8. Inputs in blocks of fewer than K take no FFT: a step sums them. A block of
  L or more, or a chunk of more than one position, covers all inputs so far, and the count of steps,
  which all rows share, restarts.

  Attributes:
    inputs: [B, L, D]; see `ConvolutionCache`.
    length: [B] int32; see `ConvolutionCache`.
    begun: [B, J + 1] int32, the length when `step` was last a multiple of K 2**j.
    pending: J + 1 arrays [B, K 2**j, D], the last one [B, L, D], float32 or float64: the
      contribution of block j to the outputs from position `begun[:, j]` on. Except for the
      last, it is valid while `step` has the bit K 2**j.
    step: [] int32, the number of calls since the count began, less than K 2**J.
  """

  inputs: jax.Array
  length: jax.Array
  begun: jax.Array
  pending: tuple[jax.Array, ...]
  step: jax.Array


_Cache = TypeVar("_Cache", ConvolutionCache, OnlineConvolutionCache)


def init_convolution_cache(
  batch: int, num_taps: int, width: int, dtype: jnp.dtype = jnp.float32
) -> ConvolutionCache:
  """An empty `ConvolutionCache` for B rows, L taps, the width D and inputs of a float dtype."""
  checks.integers(batch=batch, num_taps=num_taps, width=width)
  checks.float_dtype(dtype)
  return ConvolutionCache(jnp.zeros((batch, num_taps, width), dtype), jnp.zeros(batch, jnp.int32))


def init_online_convolution_cache(
  batch: int, num_taps: int, width: int, dtype: jnp.dtype = jnp.float32, *, block: int = 32
) -> OnlineConvolutionCache:
  """An empty `OnlineConvolutionCache`; see `init_convolution_cache`.

  `block` is K, a power of two. For K = 32 and 300 taps there are blocks of 32, 64, 128 and 256
  inputs, and every 512 steps a block of all inputs: J = 4.
  """
  inputs, length = init_convolution_cache(batch, num_taps, width, dtype)
  if checks.integer("block", block) & (block - 1):
    raise ValueError(f"block: expected a power of two, got {block}")
  doublings = (max(_power_of_two(num_taps) // block, 1) - 1).bit_length()
  sizes = [*(block << j for j in range(doublings)), num_taps]
  begun = jnp.zeros((batch, len(sizes)), jnp.int32)
  pending = tuple(jnp.zeros((batch, size, width), sum_dtype(inputs)) for size in sizes)
  return OnlineConvolutionCache(inputs, length, begun, pending, jnp.zeros((), jnp.int32))


@automatic_axes
def causal_convolution_cached(
  inputs: jax.Array, taps: jax.Array, cache: _Cache, *, lengths: ArrayLike | None = None
) -> tuple[jax.Array, _Cache]:
  """Continues every row of a causal convolution from its cache.

    y[b, t] = sum over s of inputs[b, s] * taps[t - s], t - L < s <= t

  Up to L positions, this equals `causal_convolution` of all inputs so far, for any division
  into chunks. For the taps 2, 3 the chunks [1], [10, 100] become [2], [23, 230].

  A chunk of more than one position costs about `causal_convolution` of L + C positions, and an
  input of inf or nan may affect earlier outputs of its chunk, and with an `OnlineConvolutionCache`
  some outputs after it has left the sum.

  Args:
    inputs: [B, C, D], floats, C at least 1.
    taps: [L], [L, D] or [L, D, E], floats, the same in every call; [L, D, E] not with an
      `OnlineConvolutionCache`.
    cache: the cache of the inputs so far.
    lengths: [B], see `causal_attention_cached`; outputs of the padding are meaningless.

  Returns:
    [B, C, D], with matrix taps [B, C, E], in the dtype of `inputs`, and the cache after the chunk.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, lengths are outside of 0 .. C.
  """
  inputs, taps = _check(inputs, taps, cache)
  batch, chunk, _ = inputs.shape
  if lengths is None:
    lengths_b = jnp.full(batch, chunk, jnp.int32)
  else:
    lengths_b = check_lengths(lengths, batch, chunk)
    inputs = jnp.where(is_real(lengths_b, chunk)[:, :, None], inputs, 0)
  if chunk == 1:
    step: Any = _step if isinstance(cache, ConvolutionCache) else _online_step
    return step(inputs, taps, cache, lengths_b)
  num_taps = taps.shape[0]
  past_bld = _read(cache.inputs, cache.length[:, None] + _range(1 - num_taps, 0)[None])
  y_bte = causal_convolution(
    jnp.concatenate([past_bld, inputs], axis=1),
    jnp.pad(taps, [(0, chunk - 1)] + [(0, 0)] * (taps.ndim - 1)),
  )
  ring_bld = _write(cache, inputs, lengths_b)
  cache = cache._replace(inputs=ring_bld, length=cache.length + lengths_b)
  if isinstance(cache, OnlineConvolutionCache):
    # The next step computes the contribution of all inputs.
    cache = cache._replace(step=jnp.zeros((), jnp.int32))
  return y_bte[:, num_taps - 1 :], cast(_Cache, cache)


def _check(inputs, taps, cache):
  sizes: dict[str, int] = {}
  inputs, taps = checks.arrays(
    sizes, inputs=(inputs, "B>=1 C>=1 D>=1"), taps=(taps, "L | L D | L D E")
  )
  fields: dict[str, tuple] = dict(inputs=("B L D", inputs.dtype), length=("B", jnp.int32))
  if not isinstance(cache, OnlineConvolutionCache):
    checks.record("cache", cache, ConvolutionCache, sizes, **fields)
    return inputs, taps
  if taps.ndim == 3:
    expected = "[L] or [L, D] with an OnlineConvolutionCache"
    raise ValueError(f"taps: expected {expected}, got shape {taps.shape}")
  fields |= dict(begun=("B J", jnp.int32), step=("", jnp.int32))
  checks.record("cache", cache, OnlineConvolutionCache, sizes, **fields)
  if not isinstance(cache.pending, tuple) or len(cache.pending) != sizes["J"]:
    raise ValueError(f"cache.pending: expected {sizes['J']} arrays, got {cache.pending!r}")
  for given in cache.pending:
    checks.array("cache.pending", given, "B U D", sum_dtype(inputs), B=sizes["B"], D=sizes["D"])
  return inputs, taps


def _range(*bounds):
  return jnp.arange(*bounds, dtype=jnp.int32)


def _power_of_two(size):
  """The smallest power of two that is at least `size`."""
  return 1 << (size - 1).bit_length()


def _read(ring_bld, position_bu):
  """Some positions of a ring, [B, U, D]."""
  take = jax.vmap(lambda x, slots: x.at[slots].get(mode="promise_in_bounds"))
  return take(ring_bld, position_bu % ring_bld.shape[1])


def _write(cache, inputs, lengths_b):
  """The ring with the first `lengths_b` of `inputs`, for each row."""
  ring_bld, length_b = cache.inputs, cache.length
  num_taps, chunk = ring_bld.shape[1], inputs.shape[1]
  if chunk == 1:
    # In place where the cache is donated. A row without an input gets a zero at the place of
    # the input L positions before, which is not read again.
    write = jax.vmap(lambda x, slot, new: x.at[slot].set(new))
    return write(ring_bld, length_b % num_taps, inputs[:, 0])
  last_b = length_b + lengths_b - 1
  ago_bl = (last_b[:, None] - _range(num_taps)[None]) % num_taps
  index_bl = lengths_b[:, None] - 1 - ago_bl
  new_bld = jnp.take_along_axis(inputs, index_bl.clip(0, chunk - 1)[:, :, None], axis=1)
  return jnp.where((index_bl >= 0)[:, :, None], new_bld, ring_bld)


def _sum_of(x_bld, taps):
  """[B, E], the sum of inputs times taps."""
  if taps.ndim == 3:
    return jnp.einsum("bld,lde->be", x_bld, taps)
  return (x_bld * (taps if taps.ndim == 2 else taps[:, None])[None]).sum(axis=1)


def _step(x_b1d, taps, cache, lengths_b):
  # The ring is written before it is read, as XLA would copy it otherwise.
  dtype = sum_dtype(x_b1d, taps)
  ring_bld = _write(cache, x_b1d, lengths_b)
  newest_bl = cache.length[:, None] - _range(taps.shape[0])[None]
  y_be = _sum_of(_read(ring_bld, newest_bl).astype(dtype), taps.astype(dtype))
  return y_be[:, None].astype(x_b1d.dtype), ConvolutionCache(ring_bld, cache.length + lengths_b)


def _online_step(x_b1d, taps, cache, lengths_b):
  dtype = sum_dtype(x_b1d, taps)
  w = taps.astype(dtype)
  last = len(cache.pending) - 1
  block = cache.pending[0].shape[1] if last else _power_of_two(w.shape[0])
  # The ring is written before it is read, and the blocks read after they are written: in any
  # other order XLA copies them at every step.
  ring_bld = _write(cache, x_b1d, lengths_b)

  def when(condition, change, value):
    return lax.cond(condition, change, lambda x: x, value)

  def complete(state):
    begun_bj, pending = state

    def given_by(j, _):
      # Without the input L before this step's, which the ring has just lost.
      size = w.shape[0] - 1 if j == last else block << j
      x_bud = _read(ring_bld, (cache.length - size)[:, None] + _range(size)[None]).astype(dtype)
      if j == last:
        x_bud = jnp.pad(x_bud, ((0, 0), (1, 0), (0, 0)))
      else:
        since_b = cache.length - begun_bj[:, j]
        is_inside_bu = (size - _range(size))[None] <= since_b[:, None]
        x_bud = jnp.where(is_inside_bu[:, :, None], x_bud, 0)
      return _given(x_bud, w).astype(pending[j].dtype)

    pending = tuple(
      when(
        cache.step == 0 if j == last else cache.step % (2 * block << j) == block << j,
        functools.partial(given_by, j),
        pending[j],
      )
      for j in range(last + 1)
    )
    begins_j = cache.step % jnp.asarray([block << j for j in range(last + 1)], jnp.int32)
    begun_bj = jnp.where((begins_j == 0)[None], cache.length[:, None], begun_bj)
    return begun_bj, pending

  begun_bj, pending = when(cache.step % block == 0, complete, (cache.begun, cache.pending))

  # The newest inputs, which are in no block.
  count = min(block, w.shape[0]) - 1
  past_bud = _read(ring_bld, cache.length[:, None] - 1 - _range(count)[None]).astype(dtype)
  is_new_bu = _range(count)[None] < (cache.length - begun_bj[:, 0])[:, None]
  past_bud = jnp.where(is_new_bu[:, :, None], past_bud, 0)
  y_bd = _sum_of(x_b1d.astype(dtype), w[:1]) + _sum_of(past_bud, w[1 : count + 1])
  for j, given_bud in enumerate(pending):
    since_b = cache.length - begun_bj[:, j]
    counts_b = since_b < given_bud.shape[1]
    if j < last:
      counts_b &= jnp.full_like(counts_b, cache.step & (block << j) > 0)
    given_bd = _read(given_bud, since_b[:, None])[:, 0].astype(dtype)
    y_bd += jnp.where(counts_b[:, None], given_bd, 0)
  length_b, step = cache.length + lengths_b, (cache.step + 1) % (block << last)
  cache = OnlineConvolutionCache(ring_bld, length_b, begun_bj, pending, step)
  return y_bd[:, None].astype(x_b1d.dtype), cache


def _given(x_bud, w):
  """The contribution of U inputs to the U outputs after them, [B, U, D]."""
  size = x_bud.shape[1]
  # Of 3 U - 1 sums those from U to 2 U: the last ones may fall on the first.
  period = 2 * _power_of_two(size)
  x_bfd = jnp.fft.rfft(x_bud, period, axis=1)
  w_fd = jnp.fft.rfft(w[: 2 * size], period, axis=0)
  y_btd = jnp.fft.irfft(x_bfd * w_fd.reshape(1, w_fd.shape[0], -1), period, axis=1)
  return y_btd[:, size : 2 * size]
