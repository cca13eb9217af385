"""Causal attention, plain and relative, and rotary positions.

B batch, T position, S position of a key, H head, E feature of a head, D width, R distance.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax.ops import arrays
from dpjax.ops.arrays import Starts, typed
from dpjax.ops.attention_tiles import Inputs, add_bias, tiled
from dpjax.ops.backend import automatic_axes, by_platform, each_row, has_cuda
from dpjax.ops.documents import document_positions
from dpjax.ops.dropout import dropout
from dpjax.ops.placement import is_symbolic
from dpjax.ops.products import factor_dtype, product, sum_dtype


def _default_sizes(length: int, window: int | None, is_plain: bool) -> dict[str, int]:
  """The default sizes of tiles by platform; `is_plain`: no documents, window or positions.

  On a CPU, they are from results/ops.json. On a GPU, where each tile launches several kernels, from
  results/ops_h200.json. On a TPU, tiles should fit in the core's memory; they were chosen by the
  bytes that compiled programs move. Smaller tiles skip more of what a window or documents hide.
  """
  cpu = 256 if is_plain and length >= 1024 else 128
  sizes = {"cpu": cpu, "tpu": min(max(256, length // 16), 1024), "default": 1024}
  if window is None:
    return sizes
  return {name: min(size, max(window, 128)) for name, size in sizes.items()}


@automatic_axes
@typed
def causal_attention(
  queries: Float[Array, "B T H E"],
  keys: Float[Array, "B T H E"],
  values: Float[Array, "B T H E"],
  *,
  dropout_rate: float = 0.0,
  dropout_key: PRNGKeyArray | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
  window: int | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T H E"]:
  """Attends from every position to itself and to all positions before it.

    weights[b, h, t, s] = softmax over s <= t of queries[b, t, h] . keys[b, s, h] / sqrt(E)
    output[b, t, h]     = sum over s <= t of weights[b, h, t, s] values[b, s, h]

  Inputs longer than `block_size` take one tile of block_size x block_size at a time and
  recompute the weights in the backward pass: O(B H block_size**2 + B H T E) memory, and
  reverse-mode derivatives only. The softmax is in float32, or in float64 if an argument is.
  By default an NVIDIA GPU uses cuDNN's kernel for bfloat16 and float16, if there is one, and
  without dropout, `document_starts` and `window`.

  With a window of w, s >= t - w + 1, and tiles outside of this band are skipped: O(T w E) time.

  Positions that are not seen have the weight 0, and 0 times nan is nan: a nan or infinity in a
  value reaches all positions of its row that share a tile with it, even those of other documents.

  Args:
    queries: one for each position and head.
    keys: likewise.
    values: likewise.
    dropout_rate: the probability in [0, 1) of `dropout` of the weights.
    dropout_key: its random key; the draw also depends on `block_size`.
    document_starts: 1 at the first token of each document, else 0: a position attends only to its
      document. None means that each row is one document.
    window: w, the maximum number of keys that a query sees, including its own; None for
      all.
    block_size: the maximum number of queries and keys of a tile. None: on a CPU 128, or 256 if T
      is at least 1,024 and there are no documents, window or positions; on a TPU 256 to 1,024,
      growing with T; else 1,024, or cuDNN's. A window lowers these sizes to max(window, 128).

  Returns:
    The output, in the dtype of `values`.

  Raises:
    ValueError: shapes or dtypes do not match, or a key for the dropout is missing.

  Source: Vaswani et al. 2017, Sec. 3.2; the baseline (MSA) of aclanthology.org/2022.clasp-1.3,
  Sec. 3. Tiles: Dao et al. 2022, arXiv:2205.14135, Alg. 1 and 4.
  """
  qkv = queries, keys, values
  _check_rows(queries, dropout_rate, dropout_key)
  length = queries.shape[1]
  if window is not None and arrays.integer("window", window) >= length:
    window = None
  reach_bt = _reach(length, document_starts, window)
  sizes = _tile_sizes(block_size, length, window, is_plain=reach_bt is None)

  def attend(size: int, queries, keys, values, reach_bt=reach_bt):
    if size:
      inputs = Inputs(queries, keys, values)
      return tiled(inputs, reach_bt, dropout_rate, dropout_key, size)
    # JAX's function always computes the softmax in float32.
    has_one_dtype = len({x.dtype for x in qkv}) == 1
    is_plain = not dropout_rate and has_one_dtype and sum_dtype(*qkv) == jnp.float32
    if is_plain and factor_dtype(queries, keys) is None:
      mask = None if reach_bt is None else _sees(reach_bt)
      return jax.nn.dot_product_attention(queries, keys, values, mask=mask, is_causal=mask is None)
    scores_bhts = product("bthe,bshe->bhts", queries, keys)
    return _attend(scores_bhts, values, reach_bt, dropout_rate, dropout_key)

  runs: dict[str, Callable[..., jax.Array]] = {
    name: functools.partial(attend, size) for name, size in sizes.items()
  }
  size = sizes.get("cpu", sizes["default"])
  if not dropout_rate and _is_faster_by_row(queries, size):
    # The scores of a row stay in the processor's caches, and those of all rows take no memory.
    per_row = [] if reach_bt is None else [jnp.broadcast_to(reach_bt, queries.shape[:2])]
    attend_row = functools.partial(attend, size)
    if not size:
      attend_row = jax.checkpoint(attend_row)
    runs["cpu"] = lambda *qkv: each_row(attend_row, *qkv, *per_row)
  if block_size is None and not dropout_rate and reach_bt is None and _has_cudnn(*qkv):
    runs["cuda"] = _attend_by_cudnn
  return by_platform(runs, *qkv)


@automatic_axes
@typed
def relative_attention(
  queries: Float[Array, "B T H E"],
  keys: Float[Array, "B T H E"],
  values: Float[Array, "B T H E"],
  positions: Float[Array, "R H E"],
  content_bias: Float[Array, "H E"],
  position_bias: Float[Array, "H E"],
  *,
  dropout_rate: float = 0.0,
  dropout_key: PRNGKeyArray | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T H E"]:
  """Attends from every position to itself and the past, by content and by distance.

    score[b, h, t, s] = ((queries[b, t, h] + content_bias[h]) . keys[b, s, h]
                       + (queries[b, t, h] + position_bias[h]) . positions[t - s, h])
                        / sqrt(E)
    output[b, t, h]   = sum over s <= t of softmax(score[b, h, t])[s] values[b, s, h]

  Row r of `positions` is for the distance r = t - s, R >= T. The biases are u and v of the source.
  The other arguments, the result and the errors are those of `causal_attention`.

  Source: Dai et al. 2019, arXiv:1901.02860, Sec. 3.3; without memory in Nawrot et al.
  2023, arXiv:2211.09761, Sec. 4.2.
  """
  _check_rows(queries, dropout_rate, dropout_key)
  length = queries.shape[1]
  check_distances(positions, length)
  positions = positions[:length]
  reach_bt = _reach(length, document_starts, None)
  sizes = _tile_sizes(block_size, length, None, is_plain=False)

  def attend(size: int, queries, keys, values, *relative):
    if size:
      inputs = Inputs(queries, keys, values, relative)
      return tiled(inputs, reach_bt, dropout_rate, dropout_key, size)
    positions, content_bias, position_bias = relative
    scores_bhts = product("bthe,bshe->bhts", add_bias(queries, content_bias), keys)
    # The farthest first, so that column s of row t is s + T - 1 - t.
    farthest_first_rhe = positions[::-1]
    by_distance_bhtr = product(
      "bthe,rhe->bhtr", add_bias(queries, position_bias), farthest_first_rhe
    )
    scores_bhts += _align(by_distance_bhtr)
    return _attend(scores_bhts, values, reach_bt, dropout_rate, dropout_key)

  runs = {name: functools.partial(attend, size) for name, size in sizes.items()}
  return by_platform(runs, queries, keys, values, positions, content_bias, position_bias)


def relative_positions(length: int, width: int) -> Float[np.ndarray, "length width"]:
  """Sinusoidal embeddings of distances, sines first.

    table[r, i]       = sin(r / 10000 ** (2i / D))     0 <= i < ceil(D / 2)
    table[r, D/2 + i] = cos(r / 10000 ** (2i / D))

  The table is float32. Source: see `relative_attention`.
  """
  arrays.integers(length=length, width=width)
  angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  return np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width].astype(np.float32)


def rotary_angles(
  length: int, features: int, base: float = 10_000.0
) -> Float[np.ndarray, "length features/2"]:
  """The angles of positions 0 .. T - 1, in radians, modulo a full turn.

    angles[t, i] = t base ** (-2 i / E)  mod 2 pi,  i = 0 .. E / 2 - 1

  `length` is T, `features` E, even. The result is float32, computed in float64: distant positions
  lose no digits.

  Raises:
    ValueError: `features` is odd, or a number is out of range.

  Source: Su et al. 2021, arXiv:2104.09864, Sec. 3.2.2.
  """
  arrays.integers(length=length, features=features)
  arrays.number("base", base, "a number above 0", lambda x: 0 < x < np.inf)
  if features % 2:
    raise ValueError(f"features: expected an even number for rotary positions, got {features}")
  frequencies = float(base) ** (-np.arange(0, features, 2) / features)
  angles = np.arange(length)[:, None] * frequencies
  return (angles % (2 * np.pi)).astype(np.float32)


@automatic_axes
@typed
def rotate(
  inputs: Float[Array, "B T H E"], angles: Float[Array, "#B T F"]
) -> Float[Array, "B T H E"]:
  """Rotates the pairs of features (i, i + E / 2) by their angles.

    output[i]         = x[i] cos(angles[i]) - x[i + E / 2] sin(angles[i])
    output[i + E / 2] = x[i] sin(angles[i]) + x[i + E / 2] cos(angles[i])

  The product of a rotated query and a rotated key depends on their positions only through the
  distance. E is even; angles [1, T, E / 2] are those of all rows. Fewer than E / 2 angles rotate
  the first features as if they were all, and keep the others. Computed in float32, or in float64
  for float64 inputs.

  Raises:
    ValueError: the shapes do not match.

  Source: see `rotary_angles`, where the pairs are (2 i, 2 i + 1); pairs across halves are those
  of GPT-NeoX and Llama.
  """
  if inputs.shape[3] % 2:
    raise ValueError(f"inputs: expected an even E of [B, T, H, E], got the shape {inputs.shape}")
  rotated = 2 * angles.shape[2]
  if rotated > inputs.shape[3]:
    got = f"{angles.shape} for {inputs.shape}"
    raise ValueError(f"angles: expected at most E / 2 of [B, T, E / 2], got the shape {got}")
  inputs, rest = jnp.split(inputs, [rotated], axis=-1)
  dtype = sum_dtype(inputs)
  angles = angles.astype(dtype)[:, :, None]
  cos = jnp.cos(angles)
  sin = jnp.sin(angles)
  x, y = jnp.split(inputs.astype(dtype), 2, axis=-1)
  turned = jnp.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1).astype(inputs.dtype)
  return jnp.concatenate([turned, rest], axis=-1) if rest.size else turned


def check_distances(positions: jax.Array, length: int) -> None:
  """Checks that there are positions for `length` distances."""
  if len(positions) < length:
    got = arrays.describe(positions)
    raise ValueError(f"positions: expected R of at least {length} of [R, H, E], got {got}")


def _is_faster_by_row(queries: jax.Array, size: int) -> bool:
  """Whether a CPU is faster row by row: one row keeps its cores busy, all exceed its caches.

  `size` is that of a tile; 0 without tiles.
  """
  if is_symbolic(queries):
    return False
  batch, length, heads, _ = queries.shape
  row_bytes = 4 * heads * (size or length) ** 2
  return row_bytes >= 2**17 and batch * row_bytes >= 2**23


def _has_cudnn(*qkv: jax.Array) -> bool:
  """Whether JAX has cuDNN's attention, and it supports these arrays."""
  try:
    can_be = has_cuda() and not is_symbolic(qkv[0])
    return can_be and bool(jax.eval_shape(_attend_by_cudnn, *qkv))
  # How JAX says that cuDNN is missing, or lacks a kernel for a size or a dtype.
  except (RuntimeError, NotImplementedError, ValueError):
    return False


def _attend_by_cudnn(queries, keys, values) -> jax.Array:
  return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="cudnn")


def _check_rows(queries, dropout_rate, dropout_key) -> None:
  arrays.check_not_empty(queries=queries)
  arrays.rate("dropout_rate", dropout_rate)
  arrays.key("dropout_key", dropout_key, dropout_rate)


def _reach(length: int, document_starts, window: int | None) -> jax.Array | None:
  """How many positions before its own a query sees, [B or 1, T]; None for all of its row."""
  reach_bt = None if document_starts is None else document_positions(document_starts)
  if window is None:
    return reach_bt
  if reach_bt is None:  # Shared by all rows, [1, T], so that devices exchange nothing.
    reach_bt = jnp.arange(length, dtype=jnp.int32)[None]
  return jnp.minimum(reach_bt, window - 1)


def _tile_sizes(
  block_size: int | None, length: int, window: int | None, *, is_plain: bool
) -> dict[str, int]:
  """The size of tiles by platform, which divides rows evenly; 0 instead of a single tile."""
  if block_size is None:
    sizes = _default_sizes(length, window, is_plain)
  else:
    sizes = {"default": arrays.integer("block_size", block_size)}

  def even(size: int) -> int:
    if length <= size:
      return 0
    num_tiles = math.ceil(length / size)
    # Multiples of 8 fill the processor's vectors.
    return min(size, 8 * math.ceil(length / (8 * num_tiles)))

  found = {name: even(size) for name, size in sizes.items()}
  # With equal sizes, one program suffices for all platforms.
  return found if len({*found.values()}) > 1 else {"default": found["default"]}


def _align(by_distance_bhtr: jax.Array) -> jax.Array:
  """Moves row t left by T - 1 - t: [c b a], [f e d], [i h g]  ->  [a . .], [e d .], [i h g]."""
  batch, heads, length, _ = by_distance_bhtr.shape
  # With one more column, a row of the flat array begins one element earlier each time.
  padded = jnp.pad(by_distance_bhtr, ((0, 0), (0, 0), (0, 0), (1, 0)))
  return padded.reshape(batch, heads, length + 1, length)[:, :, 1:]


def _sees(reach_bt: jax.Array) -> jax.Array:
  """[B, 1, T, S], whether query t reaches back to key s, which is not after it."""
  index_t = jnp.arange(reach_bt.shape[1], dtype=jnp.int32)
  lag_ts = index_t[:, None] - index_t[None]
  return ((lag_ts >= 0)[None] & (lag_ts[None] <= reach_bt[..., None]))[:, None]


def _attend(scores_bhts, values_bshe, reach_bt, dropout_rate: float, dropout_key):
  """Causal softmax of the scores over sqrt(E), dropout, and the sum of the values."""
  _, length, _, features = values_bshe.shape
  if reach_bt is None:
    sees_bhts = jnp.tril(jnp.ones((length, length), bool))[None, None]
  else:
    sees_bhts = _sees(reach_bt)
  scores_bhts = jnp.where(sees_bhts, scores_bhts * features**-0.5, -jnp.inf)
  weights_bhts = jax.nn.softmax(scores_bhts, axis=-1)
  if dropout_rate:
    weights_bhts = dropout(weights_bhts, dropout_rate, dropout_key)
  y_bthe = product("bhts,bshe->bthe", weights_bhts.astype(values_bshe.dtype), values_bshe)
  return y_bthe.astype(values_bshe.dtype)
