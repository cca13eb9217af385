"""The selective state space of Mamba-2, in chunks, and its cached form.

The state s before a chunk of Q positions, and the positions q = 0 .. Q - 1 of the chunk give, with
l_q = sum over k <= q of dt_k a,

    y_q = sum over p <= q of exp(l_q - l_p) (c_q . b_p) dt_p x_p        within the chunk
        + exp(l_q) s c_q                                                of the state before it
    s'  = exp(l_{Q-1}) s + sum over p of exp(l_{Q-1} - l_p) dt_p x_p b_p^T

which are the paper's diagonal blocks, its left factors, and its center and right factors. Between
documents every exp is 0.

B batch, T position, H head, P feature of a head, G group of R = H / G heads, N feature of the
state, Q and S position of a chunk. `a`, `b`, `c` and `dt` are named as in the paper, whose state is
h.

Source: Dao and Gu 2024, arXiv:2405.21060, Sec. 6.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.backend import automatic_axes
from dpjax.ops.documents import mask_padding
from dpjax.ops.placement import pvary_like
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

  A document's first position multiplies the state before it by 0, and 0 times nan is nan: nan or
  infinity in an input reaches every position of its chunk and all later ones, also in other
  documents.

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
  return _run(chunk_size, _Rows(inputs, dt, a, b, c, document_starts), state)[0]


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
  # With dt = 0 the state neither decays nor grows; and 0 times nan or inf would be nan.
  dt, _ = mask_padding(dt, lengths)
  inputs, _ = mask_padding(inputs, lengths)
  b, _ = mask_padding(b, lengths)
  rows = _Rows(inputs, dt, a, b, c, None)
  return _run(chunk_size, rows, state) if inputs.shape[1] > 1 else _step(rows, state)


def _check_groups(inputs, b) -> None:
  heads = inputs.shape[2]
  groups = b.shape[2]
  if not groups or heads % groups:
    raise ValueError(f"b: expected G that divides H = {heads}, got G = {groups}")


class _Rows(NamedTuple):
  """The arguments at all positions of rows, or at those of a chunk."""

  x: jax.Array  # [B, Q, H, P]
  dt: jax.Array  # [B, Q, H]
  a: jax.Array  # [H], at every position
  b: jax.Array  # [B, Q, G, N]
  c: jax.Array  # [B, Q, G, N]
  starts: jax.Array | None  # [B, Q]

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of states and sums."""
    return sum_dtype(self.x, self.dt, self.a, self.b, self.c)

  @property
  def groups(self) -> tuple[int, int]:
    """G, R."""
    return self.b.shape[2], self.x.shape[2] // self.b.shape[2]

  def at_positions(self, function: Callable[[jax.Array], jax.Array]) -> "_Rows":
    """Applies a function to all arrays with positions."""
    x, dt, b, c = (function(z) for z in (self.x, self.dt, self.b, self.c))
    starts = None if self.starts is None else function(self.starts)
    return _Rows(x, dt, self.a, b, c, starts)


def _step(rows: _Rows, state) -> tuple[jax.Array, jax.Array]:
  """The recurrence for rows of one position."""
  dtype = rows.dtype
  heads_of_group = rows.groups[1]
  b_bhn = jnp.repeat(rows.b[:, 0].astype(dtype), heads_of_group, axis=1)
  c_bhn = jnp.repeat(rows.c[:, 0].astype(dtype), heads_of_group, axis=1)
  dt_bh = rows.dt[:, 0].astype(dtype)
  written_bhp = dt_bh[..., None] * rows.x[:, 0].astype(dtype)
  decay_bh = jnp.exp(dt_bh * rows.a.astype(dtype)[None])
  s_bhpn = decay_bh[..., None, None] * state.astype(dtype)
  s_bhpn += written_bhp[..., None] * b_bhn[:, :, None]
  y_bhp = jnp.sum(s_bhpn * c_bhn[:, :, None], axis=-1)
  return y_bhp[:, None].astype(rows.x.dtype), s_bhpn.astype(state.dtype)


def _run(size: int, rows: _Rows, state) -> tuple[jax.Array, jax.Array]:
  """The outputs of rows in chunks of `size` positions, and the state after them."""
  return _run_chunks(size, *pvary_like((rows, state)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_chunks(size, rows: _Rows, state):
  return _forward(size, rows, state)[0]


def _forward(size, rows: _Rows, state):
  length = rows.x.shape[1]
  size, count = _divide(length, size)
  padded = rows.at_positions(lambda z: _pad(z, size * count))
  padded, first = pvary_like((padded, state.astype(rows.dtype)))

  def step(state, i):
    y_bqhp, state = _chunk(padded.at_positions(lambda z: _take(z, i, size)), state)
    return state, y_bqhp

  last, y_nbqhp = lax.scan(step, first, jnp.arange(count))
  y_bthp = _join(y_nbqhp, length)
  return (y_bthp, last.astype(state.dtype)), (rows, state)


def _backward(size, residuals, grads):
  rows, state = residuals
  by_y, by_last = grads
  length = rows.x.shape[1]
  size, count = _divide(length, size)
  padded = rows.at_positions(lambda z: _pad(z, size * count))
  by_y = _pad(by_y, size * count)
  padded, by_y, first = pvary_like((padded, by_y, state.astype(rows.dtype)))

  def advance(state, i):
    return _advance(padded.at_positions(lambda z: _take(z, i, size)), state), state

  # First the state before each chunk; then, from the last chunk to the first, the gradients.
  _, before = lax.scan(advance, first, jnp.arange(count))

  def step(carry, i_and_state):
    by_a, by_state = carry
    i, state = i_and_state
    chunk = padded.at_positions(lambda z: _take(z, i, size))

    def run(floats: _Rows, state):
      return _chunk(floats._replace(starts=chunk.starts), state)

    _, transpose = jax.vjp(run, chunk._replace(starts=None), state)
    by_chunk, by_state = transpose((_take(by_y, i, size), by_state))
    return (by_a + by_chunk.a, by_state), by_chunk._replace(a=None)

  by_a = jnp.zeros_like(rows.a, rows.dtype)
  by_a, by_last, _ = pvary_like((by_a, by_last.astype(rows.dtype), first))
  indices = jnp.arange(count)
  (by_a, by_state), by_chunks = lax.scan(step, (by_a, by_last), (indices, before), reverse=True)
  by_rows = by_chunks.at_positions(lambda z: _join(z, length))
  by_rows = by_rows._replace(a=by_a.astype(rows.a.dtype))
  return by_rows, by_state.astype(state.dtype)


_run_chunks.defvjp(_forward, _backward)


def _divide(length: int, size: int) -> tuple[int, int]:
  """The positions of a chunk, at most T, and the number of chunks."""
  size = min(size, length)
  return size, -(-length // size)


def _pad(z: jax.Array, length: int) -> jax.Array:
  """Rows of a length; padding has dt = 0."""
  missing = length - z.shape[1]
  return jnp.pad(z, ((0, 0), (0, missing)) + ((0, 0),) * (z.ndim - 2)) if missing else z


def _take(z: jax.Array, i, size: int) -> jax.Array:
  """Chunk i of rows."""
  return lax.dynamic_slice_in_dim(z, i * size, size, 1)


def _join(chunks: jax.Array, length: int) -> jax.Array:
  """Chunks [N, B, Q, ...] as rows [B, T, ...], without the padding."""
  rows = jnp.moveaxis(chunks, 0, 1)
  return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]


class _Decays(NamedTuple):
  """Factors within a chunk, each in [0, 1], and 0 between documents, with l_q of the module."""

  logarithm: jax.Array  # dt_q a, [B, Q, G, R]
  document: jax.Array | None  # which document of the chunk, [B, Q]; 0 began before it
  from_before: jax.Array  # exp(l_q), from the end of the chunk before, [B, Q, G, R]
  to_end: jax.Array  # exp(l_{Q-1} - l_q), to the end of this chunk, [B, Q, G, R]
  over: jax.Array  # exp(l_{Q-1}), from the end of the chunk before to that of this one, [B, G, R]


def _decays(chunk: _Rows) -> _Decays:
  shape = *chunk.x.shape[:2], *chunk.groups
  dtype = chunk.dtype
  decay = (chunk.dt.astype(dtype) * chunk.a.astype(dtype)[None, None]).reshape(shape)
  # Sums from either side: with the difference of two, small terms would lose their digits.
  from_before = jnp.exp(jnp.cumsum(decay, axis=1))
  after = jnp.pad(decay[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
  to_end = jnp.exp(lax.cumsum(after, axis=1, reverse=True))
  document_bq = None
  if chunk.starts is not None:
    document_bq = jnp.cumsum(chunk.starts, axis=1)
    from_before = jnp.where((document_bq == 0)[..., None, None], from_before, 0)
    to_end = jnp.where((document_bq == document_bq[:, -1:])[..., None, None], to_end, 0)
  return _Decays(decay, document_bq, from_before, to_end, from_before[:, -1])


def _decay_matrix(decays: _Decays, starts_bq) -> jax.Array:
  """exp(l_q - l_s) for s <= q of one document, else 0, [B, G, R, Q, S]: the paper's L."""
  size = decays.logarithm.shape[1]
  sees = jnp.tril(jnp.ones((size, size), bool))[None]
  if decays.document is not None:
    sees &= decays.document[:, :, None] == decays.document[:, None]
  sums = _sums_between(decays.logarithm, starts_bq)
  return jnp.exp(jnp.where(sees[:, None, None], sums, -jnp.inf))


@jax.custom_vjp
def _sums_between(decay_bqgr, starts_bq):
  """The sum over s < k <= q of decay[k], [B, G, R, Q, S], for q and s of one document."""
  # Differences of sums so far, each a float and what its rounding lost: as precise as the sum of
  # the terms between. With differences of floats, small terms would lose their digits.
  is_start = jnp.zeros(decay_bqgr.shape[:2], bool) if starts_bq is None else starts_bq.astype(bool)

  def add(left, right):
    x, x_lost, x_starts = left
    y, y_lost, y_starts = right
    total = x + y
    y_part = total - x
    lost = (x - (total - y_part)) + (y - y_part)  # Knuth 1997, Sec. 4.2.2, Theorem B.
    total = jnp.where(y_starts, y, total)
    return total, jnp.where(y_starts, y_lost, x_lost + y_lost + lost), x_starts | y_starts

  terms = (decay_bqgr, jnp.zeros_like(decay_bqgr), is_start[..., None, None])
  total, lost, _ = lax.associative_scan(add, terms, axis=1)

  def differences(x_bqgr):
    """x_q - x_s."""
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


def _chunk(chunk: _Rows, state):
  """The outputs of a chunk, [B, Q, H, P], and the state after it, [B, H, P, N]."""
  decays = _decays(chunk)
  written = _written(chunk)
  # Within the chunk: y = (L * c b^T) (dt x).
  scores = product("bqgn,bsgn->bgqs", chunk.c, chunk.b)
  weights = scores[:, :, None] * _decay_matrix(decays, chunk.starts)
  y = product("bgrqs,bsgrp->bqgrp", weights.astype(chunk.x.dtype), written)
  # Of the state before it: exp(l) s c.
  s_bgrpn = state.reshape(state.shape[0], *chunk.groups, *state.shape[2:])
  read = product("bqgn,bgrpn->bqgrp", chunk.c, s_bgrpn.astype(chunk.c.dtype))
  y += read * decays.from_before[..., None]
  y = y.astype(chunk.x.dtype).reshape(chunk.x.shape)
  return y, _next_state(chunk, decays, written, state)


def _advance(chunk: _Rows, state):
  return _next_state(chunk, _decays(chunk), _written(chunk), state)


def _written(chunk: _Rows) -> jax.Array:
  """Dt x, [B, Q, G, R, P]."""
  x = chunk.x.astype(chunk.dtype) * chunk.dt.astype(chunk.dtype)[..., None]
  return x.astype(chunk.x.dtype).reshape(*x.shape[:2], *chunk.groups, x.shape[3])


def _next_state(chunk: _Rows, decays: _Decays, written, state):
  """exp(l_{Q-1}) s + sum over p of exp(l_{Q-1} - l_p) dt_p x_p b_p^T."""
  kept = written.astype(decays.to_end.dtype) * decays.to_end[..., None]
  added = product("bsgrp,bsgn->bgrpn", kept.astype(chunk.x.dtype), chunk.b)
  over = decays.over.reshape(state.shape[0], state.shape[1])
  return over[..., None, None] * state + added.reshape(state.shape)
