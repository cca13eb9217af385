"""Causal attention, plain and relative, and rotary positions.

B batch, T position, S position of a key, H head, E feature of a head, D width, R distance.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.ops import checks
from dpjax.ops.attention_tiles import tiled
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.dropout import dropout
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.platforms import by_platform, has_cuda, is_symbolic
from dpjax.ops.products import factor_dtype, product, sum_dtype


def _block_sizes(length: int) -> dict[str, int]:
  """The default sizes of tiles, by platform.

  By results/ops.json on a CPU; by results/ops_h200.json on a GPU, which launches several
  kernels for each tile; on a TPU, where tiles should stay in the core's memory, by the bytes that
  compiled programs move.
  """
  return {"cpu": 128, "tpu": min(max(256, length // 16), 1024), "default": 1024}


@automatic_axes
def causal_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  dropout_rate: float = 0.0,
  dropout_key: jax.Array | None = None,
  document_starts: jax.Array | None = None,
  window: int | None = None,
  block_size: int | None = None,
) -> jax.Array:
  """Attends from every position to itself and to all positions before it.

    weights[b, h, t, s] = softmax over s <= t of queries[b, t, h] . keys[b, s, h] / sqrt(E)
    output[b, t, h]     = sum over s <= t of weights[b, h, t, s] values[b, s, h]

  Inputs longer than `block_size` take one tile of block_size x block_size at a time and
  recompute the weights in the backward pass: O(B H block_size**2 + B H T E) memory, and
  reverse-mode derivatives only. The softmax is in float32, or in float64 if an argument is.
  By default an NVIDIA GPU takes cuDNN's kernel for bfloat16 and float16, where it has one and
  without dropout, `document_starts` and `window`.

  With a window of w, s >= t - w + 1, and tiles outside of this band are skipped: O(T w E) time.

  Args:
    queries: [B, T, H, E], floats.
    keys: [B, T, H, E], floats.
    values: [B, T, H, E], floats.
    dropout_rate: the probability in [0, 1) of `dropout` of the weights.
    dropout_key: its random key; the draw also depends on `block_size`.
    document_starts: [B, T], 1 at the first token of each document, else 0: a position attends only
      to its own document. None means that each row is one document.
    window: w, the most keys that a query sees, its own included; None for all.
    block_size: the most queries and keys of a tile. None: 128 on a CPU, 256 to 1,024 by T on a
      TPU, else 1,024 or cuDNN's, and with a window at most that many, or 128.

  Returns:
    [B, T, H, E], in the dtype of `values`.

  Raises:
    ValueError: shapes or dtypes do not match, or a key for the dropout is missing.

  Source: Vaswani et al. 2017, Sec. 3.2; the baseline (MSA) of aclanthology.org/2022.clasp-1.3,
  Sec. 3. Tiles: Dao et al. 2022, arXiv:2205.14135, Alg. 1 and 4.
  """
  arrays = queries, keys, values = checks.arrays(**_axes(queries, keys, values))
  place_bt, sizes = _check(queries, dropout_rate, dropout_key, document_starts, block_size, window)

  def attend(size: int, queries, keys, values):
    if size:
      return tiled(queries, keys, values, None, place_bt, dropout_rate, dropout_key, size)
    # JAX's own always takes the softmax in float32.
    is_plain = not dropout_rate and len({x.dtype for x in arrays}) == 1
    is_plain &= sum_dtype(*arrays) == jnp.float32
    if is_plain and factor_dtype(queries, keys) is None:
      mask = None if place_bt is None else _sees(place_bt)
      return jax.nn.dot_product_attention(queries, keys, values, mask=mask, is_causal=mask is None)
    scores_bhts = product("bthe,bshe->bhts", queries, keys)
    return _attend(scores_bhts, values, place_bt, dropout_rate, dropout_key)

  runs: dict[str, Any] = {name: functools.partial(attend, size) for name, size in sizes.items()}
  if block_size is None and not dropout_rate and place_bt is None and _has_cudnn(*arrays):
    runs["cuda"] = _attend_by_cudnn
  return by_platform(runs, *arrays)


@automatic_axes
def relative_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  positions: jax.Array,
  content_bias: jax.Array,
  position_bias: jax.Array,
  *,
  dropout_rate: float = 0.0,
  dropout_key: jax.Array | None = None,
  document_starts: jax.Array | None = None,
  block_size: int | None = None,
) -> jax.Array:
  """Attends from every position to itself and the past, by content and by distance.

    score[b, h, t, s] = ((queries[b, t, h] + content_bias[h]) . keys[b, s, h]
                       + (queries[b, t, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, t, h]   = sum over s <= t of softmax(score[b, h, t])[s] values[b, s, h]

  `positions` are [R, H, E], R >= T; row r is for the distance r = t - s. The biases, [H, E], are u
  and v of the source. The other arguments, the result and the errors are those of
  `causal_attention`.

  Source: Dai et al. 2019, arXiv:1901.02860, Sec. 3.3; without memory in Nawrot et al.
  2023, arXiv:2211.09761, Sec. 4.2.
  """
  queries, keys, values, positions, content_bias, position_bias = checks.arrays(
    **_axes(queries, keys, values),
    positions=(positions, "R>=T H E"),
    content_bias=(content_bias, "H E"),
    position_bias=(position_bias, "H E"),
  )
  place_bt, sizes = _check(queries, dropout_rate, dropout_key, document_starts, block_size)
  positions = positions[: queries.shape[1]]

  def attend(size: int, queries, keys, values, *relative):
    if size:
      return tiled(queries, keys, values, relative, place_bt, dropout_rate, dropout_key, size)
    positions, content_bias, position_bias = relative
    scores_bhts = product("bthe,bshe->bhts", queries + content_bias[None, None], keys)
    # The farthest first, so that column s of row t is s + T - 1 - t.
    farthest_first_rhe, queries = positions[::-1], queries + position_bias[None, None]
    scores_bhts += _align(product("bthe,rhe->bhtr", queries, farthest_first_rhe))
    return _attend(scores_bhts, values, place_bt, dropout_rate, dropout_key)

  runs = {name: functools.partial(attend, size) for name, size in sizes.items()}
  return by_platform(runs, queries, keys, values, positions, content_bias, position_bias)


def relative_positions(length: int, width: int) -> np.ndarray:
  """Sinusoidal embeddings of distances, sines first.

    table[r, i]       = sin(r / 10000 ** (2i / D))     0 <= i < ceil(D / 2)
    table[r, D/2 + i] = cos(r / 10000 ** (2i / D))

  The table is [length, width], float32. Source: see `relative_attention`.
  """
  checks.integers(length=length, width=width)
  angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  return np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width].astype(np.float32)


def rotary_angles(length: int, features: int, base: float = 10_000.0) -> np.ndarray:
  """The angles of positions 0 .. T - 1, in radians, without whole turns.

    angles[t, i] = t base ** (-2 i / E)  mod 2 pi,  i = 0 .. E / 2 - 1

  `length` is T, `features` E, even. The result is float32, computed in float64: distant positions
  lose no digits.

  Raises:
    ValueError: `features` is odd, or a number is out of range.

  Source: Su et al. 2021, arXiv:2104.09864, Sec. 3.2.2.
  """
  checks.integers(length=length, features=features)
  checks.number("base", base, "a number above 0", lambda x: 0 < x < np.inf)
  if features % 2:
    raise ValueError(f"features: expected an even number for rotary positions, got {features}")
  frequencies = float(base) ** (-np.arange(0, features, 2) / features)
  angles = np.arange(length)[:, None] * frequencies
  return (angles % (2 * np.pi)).astype(np.float32)


@automatic_axes
def rotate(inputs: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates the pairs of features (i, i + E / 2) by their angles.

    output[i]         = x[i] cos(angles[i]) - x[i + E / 2] sin(angles[i])
    output[i + E / 2] = x[i] sin(angles[i]) + x[i + E / 2] cos(angles[i])

  The product of a rotated query and a rotated key depends on their positions only through the
  distance. The inputs are [B, T, H, E], floats, the angles [B, T, E / 2] or [1, T, E / 2].
  Computed in float32, or in float64 for such inputs.

  Raises:
    ValueError: the shapes do not match.

  Source: see `rotary_angles`, where the pairs are (2 i, 2 i + 1); pairs across halves are those
  of GPT-NeoX and Llama.
  """
  inputs = checks.array("inputs", inputs, "B T H E")
  batch, length, _, features = inputs.shape
  if features % 2:
    raise ValueError(f"inputs: expected an even E of [B, T, H, E], got the shape {inputs.shape}")
  axes, sizes = "1 T F | B T F", dict(B=batch, T=length, F=features // 2)
  angles = checks.array("angles", angles, axes, **sizes)
  dtype = sum_dtype(inputs)
  angles = angles.astype(dtype)[:, :, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  x, y = jnp.split(inputs.astype(dtype), 2, axis=-1)
  return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1).astype(inputs.dtype)


def _axes(queries, keys, values) -> dict:
  parts = dict(queries=queries, keys=keys, values=values)
  return {name: (x, "B T>=1 H E>=1") for name, x in parts.items()}


def _has_cudnn(*arrays: jax.Array) -> bool:
  """Whether JAX is installed with cuDNN's attention, and it takes these arrays."""
  try:
    can_be = has_cuda() and not is_symbolic(arrays[0])
    return can_be and bool(jax.eval_shape(_attend_by_cudnn, *arrays))
  # How JAX says that cuDNN is missing, or lacks a kernel for a size or a dtype.
  except (RuntimeError, NotImplementedError, ValueError):
    return False


def _attend_by_cudnn(queries, keys, values) -> jax.Array:
  return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="cudnn")


def _check(queries, dropout_rate, dropout_key, document_starts, block_size, window=None) -> tuple:
  """How far back queries see, [B or 1, T] or None, and by platform the size of blocks or 0."""
  checks.rate("dropout_rate", dropout_rate)
  if dropout_rate:
    checks.key("dropout_key", dropout_key, f" for dropout_rate = {dropout_rate}")
  place_bt, length, chosen = None, queries.shape[1], {"default": block_size}
  if block_size is None:
    chosen = _block_sizes(length)
  else:
    checks.integer("block_size", block_size)
  if document_starts is not None:
    place_bt = document_places(check_starts(document_starts, queries.shape[:2]))
  if window is not None and checks.integer("window", window) < length:
    if place_bt is None:  # Of all rows, [1, T], so that devices need not exchange any.
      place_bt = jnp.arange(length, dtype=jnp.int32)[None]
    place_bt = jnp.minimum(place_bt, window - 1)
    if block_size is None:
      chosen = {name: min(size, max(window, chosen["cpu"])) for name, size in chosen.items()}

  def even(size: int) -> int:
    # Blocks of a multiple of 8 fill the processor's vectors.
    return 0 if length <= size else min(size, -(-length // (8 * -(-length // size))) * 8)

  sizes = {name: even(size) for name, size in chosen.items()}
  return place_bt, sizes if len(set(sizes.values())) > 1 else {"default": sizes["default"]}


def _align(by_distance_bhtr: jax.Array) -> jax.Array:
  """Moves row t left by T - 1 - t: [c b a], [f e d], [i h g]  ->  [a . .], [e d .], [i h g]."""
  batch, heads, length, _ = by_distance_bhtr.shape
  # With one column more, a row of the flat array begins one place earlier each time.
  padded = jnp.pad(by_distance_bhtr, ((0, 0), (0, 0), (0, 0), (1, 0)))
  return padded.reshape(batch, heads, length + 1, length)[:, :, 1:]


def _sees(place_bt: jax.Array) -> jax.Array:
  """[B, 1, T, S], whether key s is in the document of query t, and not after it."""
  index_t = jnp.arange(place_bt.shape[1], dtype=jnp.int32)
  lag_ts = index_t[:, None] - index_t[None]
  return ((lag_ts >= 0)[None] & (lag_ts[None] <= place_bt[..., None]))[:, None]


def _attend(scores_bhts, values_bshe, place_bt, dropout_rate: float, dropout_key):
  """Causal softmax of the scores over sqrt(E), dropout, and the sum of the values."""
  _, length, _, features = values_bshe.shape
  if place_bt is None:
    sees_bhts = jnp.tril(jnp.ones((length, length), bool))[None, None]
  else:
    sees_bhts = _sees(place_bt)
  scores_bhts = jnp.where(sees_bhts, scores_bhts * features**-0.5, -jnp.inf)
  weights_bhts = jax.nn.softmax(scores_bhts, axis=-1)
  if dropout_rate:
    weights_bhts = dropout(weights_bhts, dropout_rate, dropout_key)
  y_bthe = product("bhts,bshe->bthe", weights_bhts.astype(values_bshe.dtype), values_bshe)
  return y_bthe.astype(values_bshe.dtype)
