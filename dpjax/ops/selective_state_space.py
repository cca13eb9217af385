"""The selective state space of Mamba-2, in chunks, and its cached form.

B batch, T position, H head, P feature of a head, G group of R = H / G heads, N feature of the
state, Q position of a chunk. `a`, `b`, `c` and `dt` are named as in the paper.

Source: Dao and Gu 2024, arXiv:2405.21060.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.documents import mask_padding
from dpjax.ops.placement import automatic_axes, pvary_like
from dpjax.ops.products import product, sum_dtype


@automatic_axes
@typed
def selective_state_space(
  inputs: Float[Array, "B T H P"],
  dt: Float[Array, "B T H"],
  a: Float[Array, "H"],
  b: Float[Array, "B T G N"],
  c: Float[Array, "B T G N"],
  *,
  document_starts: Starts[Array, "B T"] | None = None,
  chunk_size: int = 64,
) -> Float[Array, "B T H P"]:
  """Runs a linear recurrence whose decay, writing and reading depend on the position.

    s_t = exp(dt_t a) s_{t-1} + dt_t x_t b_t^T          s_{-1} = 0, [P, N] for each head
    y_t = s_t c_t

  It costs O(T (Q (N + P) + P N)) for each head: products within chunks of Q positions, and a scan
  that carries the state from chunk to chunk. The gradient recomputes each chunk, so it
  stores the arguments and, while it runs, one state for each chunk.

  Args:
    inputs: x.
    dt: steps of at least 0.
    a: decays of at most 0.
    b: what the state adds; G divides H, and head h belongs to the group h G // H.
    c: what is read from the state.
    document_starts: 1 at the first token of each document, else 0; the state before it is 0.
      None means that each row is one document.
    chunk_size: Q; it changes the speed, and the result up to rounding.

  Returns:
    y, in the dtype of `inputs`; states and sums are in float32, or float64 for float64 arrays.

  Raises:
    ValueError: shapes or dtypes do not match.
  """
  _check_groups(inputs, b)
  arrays.integer("chunk_size", chunk_size, 1)
  if inputs.size == 0:
    return inputs
  dtype = sum_dtype(inputs, dt, a, b, c)
  batch, _, heads, width = inputs.shape
  state = init_selective_state(batch, heads, width, b.shape[3], dtype)
  outputs: Any = _run(chunk_size, inputs, dt, a, b, c, document_starts, state)
  return outputs[0]


def init_selective_state(
  batch: int,
  num_heads: int,
  head_width: int,
  state_width: int,
  dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B H P N"]:
  """The state before the first token: zeros."""
  arrays.integers(batch=batch, num_heads=num_heads, head_width=head_width, state_width=state_width)
  arrays.float_dtype(dtype)
  return jnp.zeros((batch, num_heads, head_width, state_width), dtype)


@automatic_axes
@typed
def selective_state_space_cached(
  inputs: Float[Array, "B C H P"],
  dt: Float[Array, "B C H"],
  a: Float[Array, "H"],
  b: Float[Array, "B C G N"],
  c: Float[Array, "B C G N"],
  state: Float[Array, "B H P N"],
  *,
  lengths: Integer[Array, "B"] | None = None,
  chunk_size: int = 64,
) -> tuple[Float[Array, "B C H P"], Float[Array, "B H P N"]]:
  """Continues every row of `selective_state_space`: the outputs equal those of whole rows.

  Args:
    inputs: a chunk of each row; for one position, the recurrence itself runs.
    dt: see `selective_state_space`.
    a: the same in every call.
    b: see `selective_state_space`.
    c: see `selective_state_space`.
    state: from `init_selective_state` or the previous call.
    lengths: see `causal_attention_cached`; outputs of the padding are meaningless.
    chunk_size: Q.

  Returns:
    The outputs, and the state after each row's last real position.

  Raises:
    ValueError: shapes or dtypes do not match, or, unless traced, lengths are outside of 0 .. C.
  """
  _check_groups(inputs, b)
  arrays.integer("chunk_size", chunk_size, 1)
  arrays.check_not_empty(inputs=inputs)
  length, heads = inputs.shape[1:3]
  # With dt = 0 the state neither decays nor grows; and 0 times nan or inf would be nan.
  dt, _ = mask_padding(dt, lengths)
  inputs, _ = mask_padding(inputs, lengths)
  b, _ = mask_padding(b, lengths)
  if length > 1:
    return _run(chunk_size, inputs, dt, a, b, c, None, state)
  dtype, repeats = sum_dtype(inputs, dt, a, b, c), heads // b.shape[2]
  b_bhn, c_bhn = (jnp.repeat(z[:, 0].astype(dtype), repeats, axis=1) for z in (b, c))
  dt_bh = dt[:, 0].astype(dtype)
  written_bhp = dt_bh[..., None] * inputs[:, 0].astype(dtype)
  new = jnp.exp(dt_bh * a.astype(dtype)[None])[..., None, None] * state.astype(dtype)
  new += written_bhp[..., None] * b_bhn[:, :, None]
  y_bhp = jnp.sum(new * c_bhn[:, :, None], axis=-1)
  return y_bhp[:, None].astype(inputs.dtype), new.astype(state.dtype)


def _check_groups(inputs, b) -> None:
  heads, groups = inputs.shape[2], b.shape[2]
  if not groups or heads % groups:
    raise ValueError(f"b: expected G that divides H = {heads}, got G = {groups}")


class _Chunk(NamedTuple):
  """The arguments at the positions of a chunk, [B, Q, ...]."""

  x: jax.Array
  dt: jax.Array
  b: jax.Array
  c: jax.Array
  starts: jax.Array | None


def _run(size, x, dt, a, b, c, starts, state) -> Any:
  x, dt, a, b, c, state = pvary_like((x, dt, a, b, c, state))
  return _run_chunks(size, x, dt, a, b, c, starts, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_chunks(size, x, dt, a, b, c, starts, state) -> Any:
  return _forward(size, x, dt, a, b, c, starts, state)[0]


def _forward(size, x, dt, a, b, c, starts, state):
  row, size, count = _pad(size, _Chunk(x, dt, b, c, starts))
  a, row, carry = pvary_like((a, row, state.astype(sum_dtype(x, dt, a, b, c))))

  def step(carry, i):
    y_bqhp, carry = _chunk(a, _take(row, i, size), carry)
    return carry, y_bqhp

  end, y_cbqhp = lax.scan(step, carry, jnp.arange(count))
  y_bthp = jnp.moveaxis(y_cbqhp, 0, 1).reshape(row.x.shape)[:, : x.shape[1]]
  return (y_bthp, end.astype(state.dtype)), (x, dt, a, b, c, starts, state)


def _backward(size, residuals, grads):
  x, dt, a, b, c, starts, state = residuals
  dtype = sum_dtype(x, dt, a, b, c)
  row, size, count = _pad(size, _Chunk(x, dt, b, c, starts))
  grad_bthp = _pad(size, grads[0])[0]
  a, row, grad_bthp, carry = pvary_like((a, row, grad_bthp, state.astype(dtype)))
  # First the state before each chunk; then, from the last chunk to the first, the gradients.
  _, before = lax.scan(
    lambda carry, i: (_advance(a, _take(row, i, size), carry), carry), carry, jnp.arange(count)
  )

  def step(carry, i_and_state):
    by_a, by_state = carry
    i, state = i_and_state
    chunk = _take(row, i, size)

    def run(a, x, dt, b, c, state):
      return _chunk(a, _Chunk(x, dt, b, c, chunk.starts), state)

    _, transpose = jax.vjp(run, a, *chunk[:4], state)
    more, *by_chunk, by_state = transpose((_take(grad_bthp, i, size), by_state))
    return (by_a + more, by_state), by_chunk

  first = jnp.zeros_like(a, dtype), grads[1].astype(dtype)
  (by_a, by_state), by_chunks = lax.scan(
    step, pvary_like((*first, carry))[:2], (jnp.arange(count), before), reverse=True
  )
  by_row = (
    jnp.moveaxis(y, 0, 1).reshape(z.shape)[:, : x.shape[1]]
    for y, z in zip(by_chunks, row[:4], strict=True)
  )
  by_x, by_dt, by_b, by_c = by_row
  return by_x, by_dt, by_a.astype(a.dtype), by_b, by_c, None, by_state.astype(state.dtype)


_run_chunks.defvjp(_forward, _backward)


def _pad(size: int, tree):
  """Rows padded to whole chunks, Q, and the number of chunks; padding has dt = 0."""
  length = jax.tree.leaves(tree)[0].shape[1]
  size = min(size, length)
  count = -(-length // size)

  def pad(z):
    return jnp.pad(z, ((0, 0), (0, count * size - length)) + ((0, 0),) * (z.ndim - 2))

  return (tree if count * size == length else jax.tree.map(pad, tree)), size, count


def _take(tree, i, size: int):
  return jax.tree.map(lambda z: lax.dynamic_slice_in_dim(z, i * size, size, 1), tree)


class _Decays(NamedTuple):
  """Factors within a chunk, each in [0, 1], and 0 between documents."""

  between: jax.Array  # [B, G, R, Q, S], from the end of position s to that of q >= s
  from_before: jax.Array  # [B, Q, G, R], from the end of the chunk before
  to_end: jax.Array  # [B, Q, G, R], to the end of this chunk
  over: jax.Array  # [B, G, R], from the end of the chunk before to the end of this one
  written: jax.Array  # dt x, [B, Q, G, R, P]


def _decays(a, chunk: _Chunk, *, has_between: bool) -> _Decays:
  (batch, size, heads, width), groups = chunk.x.shape, chunk.b.shape[2]
  shape = batch, size, groups, heads // groups
  dtype = sum_dtype(*chunk[:4], a)
  dt = chunk.dt.astype(dtype)
  decay = (dt * a.astype(dtype)[None, None]).reshape(shape)
  sees = jnp.tril(jnp.ones((size, size), bool))[None]
  # Sums from either side: with the difference of two, small terms would lose their digits.
  from_before = jnp.exp(jnp.cumsum(decay, axis=1))
  after = jnp.pad(decay[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
  to_end = jnp.exp(lax.cumsum(after, axis=1, reverse=True))
  if chunk.starts is not None:
    number_bq = jnp.cumsum(chunk.starts, axis=1)
    sees &= number_bq[:, :, None] == number_bq[:, None]
    from_before = jnp.where((number_bq == 0)[..., None, None], from_before, 0)
    to_end = jnp.where((number_bq == number_bq[:, -1:])[..., None, None], to_end, 0)
  between = from_before
  if has_between:
    lag = _sums_between(decay, chunk.starts)
    between = jnp.exp(jnp.where(sees[:, None, None], lag, -jnp.inf))
  written = (chunk.x.astype(dtype) * dt[..., None]).astype(chunk.x.dtype).reshape(*shape, width)
  return _Decays(between, from_before, to_end, from_before[:, -1], written)


@jax.custom_vjp
def _sums_between(decay_bqgr, starts_bq):
  """The sum over s < k <= q of decay[k], [B, G, R, Q, S], for q and s of one document."""
  # Differences of sums so far, each a float and what its rounding lost: as precise as the sum of
  # the terms between. With differences of floats, small terms would lose their digits.
  is_start = jnp.zeros(decay_bqgr.shape[:2], bool) if starts_bq is None else starts_bq.astype(bool)

  def add(left, right):
    (x, x_lost, x_starts), (y, y_lost, y_starts) = left, right
    total = x + y
    y_part = total - x
    lost = (x - (total - y_part)) + (y - y_part)  # Knuth 1997, Sec. 4.2.2, Theorem B.
    total = jnp.where(y_starts, y, total)
    return total, jnp.where(y_starts, y_lost, x_lost + y_lost + lost), x_starts | y_starts

  start = decay_bqgr, jnp.zeros_like(decay_bqgr), is_start[..., None, None]
  total, lost, _ = lax.associative_scan(add, start, axis=1)

  def differences(x_bqgr):
    x_bgrq = jnp.moveaxis(x_bqgr, 1, -1)
    return x_bgrq[..., :, None] - x_bgrq[..., None, :]

  return differences(total) + differences(lost)


def _sums_between_forward(decay_bqgr, starts_bq):
  return _sums_between(decay_bqgr, starts_bq), decay_bqgr.shape[1]


def _sums_between_backward(size, grad_bgrqs):
  # The gradient by decay[k] is the sum over q >= k > s, again without differences.
  is_later = jnp.tril(jnp.ones((size, size), grad_bgrqs.dtype))
  grad_bgrks = jnp.einsum("qk,bgrqs->bgrks", is_later, grad_bgrqs, precision=lax.Precision.HIGHEST)
  is_earlier = jnp.tril(jnp.ones((size, size), bool), -1)
  grad_bgrk = jnp.sum(jnp.where(is_earlier[None, None, None], grad_bgrks, 0), axis=-1)
  return jnp.moveaxis(grad_bgrk, -1, 1), None


_sums_between.defvjp(_sums_between_forward, _sums_between_backward)


def _chunk(a, chunk: _Chunk, state):
  """The outputs of a chunk, [B, Q, H, P], and the state after it, [B, H, P, N]."""
  decays = _decays(a, chunk, has_between=True)
  scores = product("bqgn,bsgn->bgqs", chunk.c, chunk.b)
  weights = (scores[:, :, None] * decays.between).astype(chunk.x.dtype)
  y = product("bgrqs,bsgrp->bqgrp", weights, decays.written)
  groups, heads = decays.over.shape[1], chunk.x.shape[2]
  by_group = state.reshape(state.shape[0], groups, heads // groups, *state.shape[2:])
  read = product("bqgn,bgrpn->bqgrp", chunk.c, by_group.astype(chunk.c.dtype))
  y += read * decays.from_before[..., None]
  return y.astype(chunk.x.dtype).reshape(chunk.x.shape), _next_state(decays, chunk, state)


def _advance(a, chunk: _Chunk, state):
  return _next_state(_decays(a, chunk, has_between=False), chunk, state)


def _next_state(decays: _Decays, chunk: _Chunk, state):
  written = decays.written.astype(decays.to_end.dtype) * decays.to_end[..., None]
  added = product("bsgrp,bsgn->bgrpn", written.astype(chunk.x.dtype), chunk.b)
  over = decays.over.reshape(state.shape[0], state.shape[1])
  return over[..., None, None] * state + added.reshape(state.shape)
