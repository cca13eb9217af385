"""Time and memory of the operators' implementations, compared with naive ones.

  python benchmarks/ops.py --parts=attention --out results/ops

"forward" is the result, "gradient" the result and all gradients, in float32 unless the case says
otherwise. An accelerator gets larger batches, and only the gradients. "default" is the
operator's choice. The parts:

  products       the three products of a linear layer, base "float32": bfloat16 factors with sums
                 in float32 as XLA computes them, and `ops.products.product`, which moves a factor
  shift_and_sum  each implementation, base "unrolled" (static shifts with JAX's own gradient);
                 "copy" is one read and one write of the values, a kernel's physical limit. Beside
                 attention with one head; also with dropped levels, averaged over draws
  convolution    each implementation for taps of every rank (ME; WE and HE; SHE), base "toeplitz";
                 "plain" is a textbook scan over the lags; attention with 1 and 32 heads
  lengths        the same over lengths and small batches: what `choose_implementation` is read from
  attention      causal and relative attention in tiles, base "whole": all weights at once
  state_space    `selective_state_space` by the size of its chunks, base "attention" of the same
                 width; "PyTorch" is the chunked form of Mamba-2's paper, all chunks at once
  peers          causal attention, base "PyTorch": its `scaled_dot_product_attention`, on views
                 [B, H, T, E] of arrays [B, T, H, E], as in a layer; and `selective_state_space`,
                 base "jla": the same recurrence of jax-linear-attention in chunks. Each where that
                 package is installed, on a CPU
  local          causal attention to the last 256 tokens of 8,192, base "full": to all of them, in
                 tiles; "whole": with all weights at once
  pooling        `pool_segments` and `upsample_segments`, base "dense": the form of the pooling
                 paper's authors, a matrix [B, T, S]. The middle layers at the capacity found on
                 the device, base "padded" (T + 1 positions); "known" is compiled for the capacity

Sources: Dao et al. 2022, arXiv:2205.14135 (tiles); Dao and Gu 2024, arXiv:2405.21060 (state space);
Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
"""

import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import layers, ops
from dpjax.layers.attention import SharedPositions
from dpjax.models.stack import Buckets, Stack

DROP_RATES, DRAWS = (0.0, 0.2, 0.9), 16
TOKENS_A_BOUNDARY = 5
ON_CPU = jax.default_backend() == "cpu"


def draw(*shape: int, dtype: str = "float32") -> jax.Array:
  return jnp.asarray(np.random.default_rng(math.prod(shape)).standard_normal(shape), dtype)


def gradient(function: Callable, *arguments: Any) -> tuple:
  """The result, and the gradients of its sum with respect to all arguments."""
  result, pull = jax.vjp(function, *arguments)
  return result, *pull(jnp.ones_like(result))


def both(
  name: str, base: str, functions: dict[str, Callable], *arguments: Any
) -> Iterator[harness.Case]:
  """A case for the result and one for the gradients."""
  for kind in ("forward", "gradient") if ON_CPU else ("gradient",):
    given = {
      key: function if kind == "forward" else functools.partial(gradient, function)
      for key, function in functions.items()
    }
    yield harness.Case(f"{name}, {kind}", base, harness.compile_all(given, *arguments))


def attend(x_btd: jax.Array, *_: Any, heads: int = 1) -> jax.Array:
  """Masked self-attention of the inputs, without projections."""
  q_bthe = x_btd.reshape(*x_btd.shape[:2], heads, -1)
  return ops.causal_attention(q_bthe, q_bthe, q_bthe).reshape(x_btd.shape)


def products(quick: bool) -> Iterator[harness.Case]:
  specs = {"x w": "rk,kn->rn", "g w^T": "rn,kn->rk", "x^T g": "rk,rn->kn"}
  shapes = [(10_240, 512, 512), (2_048, 512, 8_558)]
  for rows, width, columns in [(24, 16, 8)] if quick else shapes:
    sizes = {"r": rows, "k": width, "n": columns}
    for name, spec in specs.items():
      x, y = (draw(*(sizes[axis] for axis in term)) for term in spec.split("->")[0].split(","))
      low = functools.partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
      wide = functools.partial(jnp.einsum, spec)
      programs = harness.compile_all({"float32": wide}, x, y)
      x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
      ours = functools.partial(ops.products.product, spec)
      programs |= harness.compile_all({"bfloat16": low, "product": ours}, x, y)
      yield harness.Case(f"{name}, {rows} x {width} x {columns}", "float32", programs)


def shift_and_sum(quick: bool) -> Iterator[harness.Case]:
  shapes = [(4, 512, 512), (1, 4096, 512), (1, 16384, 256)]
  if not ON_CPU:
    shapes = [(20, 512, 512), (20, 4096, 512), (4, 16384, 512)]
  for batch, length, width in [(2, 96, 24)] if quick else shapes:
    gates = 0.3 * jax.nn.sigmoid(draw(batch, length, 1, ops.num_levels(length)))
    for dtype in ("float32", "bfloat16"):
      functions = {
        name: functools.partial(ops.shift_and_sum, implementation=name)
        for name in ("unrolled", "loop", "recompute", *([] if ON_CPU else ["pallas"]))
      }
      functions["default"] = ops.shift_and_sum
      functions["copy"] = lambda values, gates: values + 1
      functions["attention"] = lambda values, gates: ops.causal_attention(values, values, values)
      name = f"shift_and_sum, B {batch} T {length} D {width}, {dtype}"
      values = draw(batch, length, 1, width, dtype=dtype)
      yield from both(name, "unrolled", functions, values, gates.astype(dtype))
    values = values.astype("float32")
    yield harness.Case(
      f"shift_and_sum with levels dropped, B {batch} T {length} D {width}, gradient",
      "p = 0.0",
      {f"p = {rate}": dropped(values, gates, rate) for rate in DROP_RATES},
    )


def dropped(values: jax.Array, gates: jax.Array, rate: float) -> harness.Program:
  """The gradient with levels dropped: seconds are the mean over draws."""
  step = jax.jit(
    lambda keep: gradient(lambda *x: ops.shift_and_sum(*x, level_keep=keep), values, gates)
  )
  generator = np.random.default_rng(0)
  keeps = [jnp.asarray(generator.uniform(size=gates.shape[3]) >= rate) for _ in range(DRAWS)]

  def run() -> float:
    start = time.perf_counter()
    for keep in keeps:
      jax.block_until_ready(step(keep))
    return (time.perf_counter() - start) / DRAWS

  return harness.Program(run)


def plain_convolution(inputs: jax.Array, filters: jax.Array) -> jax.Array:
  """The naive sum over the lags."""
  places = jnp.arange(inputs.shape[1])

  def body(result, lag_and_tap):
    lag, tap = lag_and_tap
    past = jnp.roll(inputs, lag, axis=1) * (places >= lag).astype(inputs.dtype)[None, :, None]
    return result + (past @ tap if tap.ndim == 2 else past * tap), None

  return jax.lax.scan(body, jnp.zeros_like(inputs), (places, filters))[0]


def convolutions(rank: int, batch: int, length: int, width: int) -> Iterator[harness.Case]:
  functions: dict[str, Callable] = {
    name: functools.partial(ops.causal_convolution, implementation=name)
    for name in ("toeplitz", "scan", "fft", "dft")
  }
  functions["default"] = ops.causal_convolution
  if ON_CPU:
    functions["plain"] = plain_convolution
  for heads in (1, 32):
    functions[f"attention, {heads} heads"] = functools.partial(attend, heads=heads)
  filters = draw(*(length, width, width)[:rank])
  name = f"convolution, rank {rank}, B {batch} T {length} D {width}"
  yield from both(name, "toeplitz", functions, draw(batch, length, width), filters)


def convolution(quick: bool) -> Iterator[harness.Case]:
  shapes = [(16, 128), (64, 128), (2, 1024), (1, 4096)] if ON_CPU else [(64, 128), (16, 512)]
  for rank in (1, 2, 3):
    for batch, length in [(3, 24)] if quick else shapes:
      yield from convolutions(rank, batch, length, 32 if quick else 128)


def lengths(quick: bool) -> Iterator[harness.Case]:
  for rank in (1, 2, 3):
    shapes = [(max(1, 2048 // length), length) for length in 2 ** np.arange(3, 11 + (rank < 3))]
    shapes += [(batch, length) for batch in (1, 4) for length in (16, 64, 256)]
    for batch, length in [(2, 16)] if quick else shapes:
      yield from convolutions(rank, int(batch), int(length), 32 if quick else 128)


def attention(quick: bool) -> Iterator[harness.Case]:
  shapes = {
    "causal": [(4, 512, 1, 512), (2, 1024, 8, 64), (2, 2048, 8, 64)],
    "relative": [(4, 512, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64)],
  }
  sizes = {"tiles of 64": 64, "128": 128, "256": 256}
  dtypes = ("float32",)
  if not ON_CPU:
    shapes = {
      "causal": [(20, 512, 8, 64), (4, 2048, 8, 64), (1, 8192, 8, 64)],
      "relative": [(4, 512, 8, 64), (4, 2048, 8, 64), (1, 8192, 8, 64)],
    }
    sizes = {"tiles of 512": 512, "1024": 1024, "2048": 2048}
    dtypes = ("float32", "bfloat16")
  cases = [
    (kind, shape, dtype, rate)
    for kind, of_kind in shapes.items()
    for shape in ([(2, 48, 3, 8)] if quick else of_kind)
    for dtype in dtypes
    for rate in ((0.0, 0.1) if ON_CPU or kind == "causal" else (0.0,))
  ]
  for kind, (batch, length, heads, features), dtype, rate in cases:
    arguments = [draw(batch, length, heads, features, dtype=dtype) + i for i in range(3)]
    if kind == "relative":
      shape = heads, features
      arguments += [draw(*x, dtype=dtype) for x in ((length, *shape), shape, shape)]
    known: dict[str, Any] = dict(dropout_rate=rate)
    known |= dict(dropout_key=jax.random.key(0)) if rate else {}
    attend = functools.partial(getattr(ops, f"{kind}_attention"), **known)
    of_case = {"whole": length, **{name: x for name, x in sizes.items() if x <= length}}
    functions = {name: functools.partial(attend, block_size=x) for name, x in of_case.items()}
    name = f"{kind} attention, B {batch} T {length} H {heads} E {features}, dropout {rate}"
    functions["default"] = attend
    yield from both(f"{name}, {dtype}" if len(dtypes) > 1 else name, "whole", functions, *arguments)


def state_space(quick: bool) -> Iterator[harness.Case]:
  heads, features, states = (4, 8, 6) if quick else (8, 64, 128)
  shapes = [(4, 512), (1, 4096)] if ON_CPU else [(32, 512), (4, 4096)]
  for batch, length in [(2, 48)] if quick else shapes:
    arguments = state_space_arguments(batch, length, heads, features, states)
    functions: dict[str, Callable] = {
      f"chunks of {size}": functools.partial(ops.selective_state_space, chunk_size=size)
      for size in ((8, 16) if quick else (32, 64, 128, 256))
    }
    functions["default"] = ops.selective_state_space
    functions["attention"] = lambda x, *_: ops.causal_attention(x, x, x)
    name = f"state space, B {batch} T {length} H {heads} P {features} N {states}"
    for case in both(name, "attention", functions, *arguments):
      programs = dict(case.programs)
      if ON_CPU and importlib.util.find_spec("torch"):
        sizes = (8, 16) if quick else (64, 128)
        for size in sizes:
          programs[f"PyTorch, chunks of {size}"] = torch_state_space(
            case.name.endswith("gradient"), size, *arguments
          )
      yield dataclasses.replace(case, programs=programs)


def state_space_arguments(
  batch: int, length: int, heads: int, features: int, states: int
) -> list[jax.Array]:
  """The arguments of `selective_state_space`: x, dt, a, b and c."""
  return [
    draw(batch, length, heads, features),
    jax.nn.softplus(draw(batch, length, heads) - 4),
    -jnp.exp(draw(heads)),
    *(draw(batch, length, 1, states) + i for i in range(2)),
  ]


def torch_state_space(has_gradient: bool, size: int, *arguments: jax.Array) -> harness.Program:
  """The operator in PyTorch, for lengths that are multiples of the size of a chunk."""
  import torch

  x, dt, a, b, c = (torch.tensor(np.asarray(z), requires_grad=has_gradient) for z in arguments)
  batch, length, heads, features = x.shape
  count = length // size

  def sums_between(decay):
    """[..., i, j], the sum of decay after j up to i; -inf for j > i."""
    total = torch.cumsum(decay, -1)
    lags = total[..., :, None] - total[..., None, :]
    return lags.masked_fill(~torch.ones(lags.shape[-2:], dtype=torch.bool).tril(), -torch.inf)

  def forward():
    decay = (dt * a).reshape(batch, count, size, heads).permute(0, 3, 1, 2)  # [B, H, C, Q]
    written = (x * dt[..., None]).reshape(batch, count, size, heads, features)
    b_bcqn, c_bcqn = (z.reshape(batch, count, size, -1) for z in (b, c))
    scores = torch.einsum("bcqn,bcsn->bcqs", c_bcqn, b_bcqn)
    weights = scores[:, None] * torch.exp(sums_between(decay))
    within = torch.einsum("bhcqs,bcshp->bcqhp", weights, written)
    total = torch.cumsum(decay, -1)
    to_end = torch.exp(total[..., -1:] - total).permute(0, 2, 3, 1)
    states = torch.einsum("bcsn,bcshp->bchpn", b_bcqn, written * to_end[..., None])
    # From each chunk's end to each later chunk's beginning.
    over = torch.exp(sums_between(torch.nn.functional.pad(total[..., -1], (1, 0))))[..., :-1, 1:]
    over = torch.nn.functional.pad(over, (0, 1))[..., :count]
    before = torch.einsum("bhzc,bchpn->bzhpn", over, states)
    read = torch.einsum("bcqn,bchpn->bcqhp", c_bcqn, before)
    result = within + read * torch.exp(total).permute(0, 2, 3, 1)[..., None]
    return result.reshape(x.shape)

  def run() -> float:
    start = time.perf_counter()
    if has_gradient:
      torch.autograd.grad(forward().sum(), (x, dt, a, b, c))
    else:
      forward()
    return time.perf_counter() - start

  expected = ops.selective_state_space(*arguments)
  np.testing.assert_allclose(forward().detach().numpy(), expected, rtol=1e-3, atol=1e-3)
  return harness.Program(run)


def peers(quick: bool) -> Iterator[harness.Case]:
  has_torch = ON_CPU and importlib.util.find_spec("torch")
  has_jla = ON_CPU and importlib.util.find_spec("jla")
  if not has_torch and not has_jla:
    raise SystemExit("--parts: expected PyTorch or jax-linear-attention for peers, on a CPU")
  if has_torch:
    yield from attention_beside_pytorch(quick)
  if has_jla:
    yield from state_space_beside_jla(quick)


def attention_beside_pytorch(quick: bool) -> Iterator[harness.Case]:
  functions = {
    f"tiles of {size}": functools.partial(ops.causal_attention, block_size=size)
    for size in ((16, 24) if quick else (128, 256, 512))
  }
  functions["default"] = ops.causal_attention
  shapes = [(3, 48, 3, 8)] if quick else [(16, 2_048, 8, 64), (1, 8_192, 8, 64)]
  for batch, length, heads, features in shapes:
    queries_keys_values = [draw(batch, length, heads, features) + i for i in range(3)]
    name = f"causal attention, B {batch} T {length} H {heads} E {features}"
    for case in both(name, "PyTorch", functions, *queries_keys_values):
      theirs = torch_attention(case.name.endswith("gradient"), *queries_keys_values)
      yield dataclasses.replace(case, programs={**case.programs, "PyTorch": theirs})


def state_space_beside_jla(quick: bool) -> Iterator[harness.Case]:
  from jla.layers.ssm import mamba2_ssd

  functions = {
    "default": ops.selective_state_space,
    "jla": lambda *x: mamba2_ssd(*x)[0],
    "jla, chunks of 128": lambda *x: mamba2_ssd(*x, chunk_size=128)[0],
  }
  heads, features, states = (4, 8, 6) if quick else (16, 64, 128)
  for batch, length in [(3, 48)] if quick else [(64, 512), (16, 2_048), (1, 32_768)]:
    arguments = state_space_arguments(batch, length, heads, features, states)
    name = f"state space, B {batch} T {length} H {heads} P {features} N {states}"
    yield from both(name, "jla", functions, *arguments)


def torch_attention(has_gradient: bool, *queries_keys_values: jax.Array) -> harness.Program:
  """PyTorch's causal attention."""
  import torch

  heads_first = [np.moveaxis(np.asarray(x), 1, 2) for x in queries_keys_values]
  arguments = [torch.tensor(x, requires_grad=has_gradient) for x in heads_first]
  attend = functools.partial(
    torch.nn.functional.scaled_dot_product_attention, *arguments, is_causal=True
  )

  def run() -> float:
    start = time.perf_counter()
    if has_gradient:
      torch.autograd.grad(attend().sum(), arguments)
    else:
      attend()
    return time.perf_counter() - start

  expected = np.moveaxis(np.asarray(ops.causal_attention(*queries_keys_values)), 1, 2)
  np.testing.assert_allclose(attend().detach().numpy(), expected, rtol=1e-3, atol=1e-3)
  return harness.Program(run)


def local(quick: bool) -> Iterator[harness.Case]:
  batch, length, heads, features, window = (2, 48, 3, 8, 6) if quick else (1, 8192, 2, 64, 256)
  arguments = [draw(batch, length, heads, features) + i for i in range(3)]
  functions = {
    "full": ops.causal_attention,
    "local": functools.partial(ops.causal_attention, window=window),
    "whole": functools.partial(ops.causal_attention, block_size=length),
  }
  name = f"local attention, B {batch} T {length} H {heads} E {features} w {window}"
  yield from both(name, "full", functions, *arguments)


def dense_weights(index_bt: jax.Array, num_segments: int, axis: int) -> jax.Array:
  """[B, T, S], 1 where index[b, t] is the segment, over their sum along an axis."""
  weights_bts = jax.nn.one_hot(index_bt, num_segments)
  return weights_bts / jnp.maximum(jnp.sum(weights_bts, axis=axis, keepdims=True), 1e-9)


def pooling(quick: bool) -> Iterator[harness.Case]:
  for batch, length, width in (
    [(3, 40, 16)] if quick else [(4, 512, 512), (2, 2048, 512), (8, 2048, 512)]
  ):
    boundaries, count = draw_boundaries(batch, length)
    ends = jnp.cumsum(boundaries, axis=1)
    size = f"B {batch} T {length} D {width}"
    yield from both(
      f"pool_segments, {size}",
      "dense",
      {
        "dense": lambda x, b=boundaries, e=ends, n=count: jnp.einsum(
          "btd,bts->bsd", x, dense_weights(e - b, n, 1)
        ),
        "segments": lambda x, b=boundaries, n=length: ops.pool_segments(x, b, n),
        "segments, known": lambda x, b=boundaries, n=count: ops.pool_segments(x, b, n),
      },
      draw(batch, length, width),
    )
    yield from both(
      f"upsample_segments, {size}",
      "dense",
      {
        "dense": lambda x, e=ends, n=count: jnp.einsum(
          "bsd,bts->btd", x, dense_weights(e, n + 1, 2)
        ),
        "segments": lambda x, b=boundaries: ops.upsample_segments(x, b),
      },
      draw(batch, count + 1, width),
    )
    if batch < 8:
      yield middle_layers(batch, length, width, count + 1, quick)


def draw_boundaries(batch: int, length: int) -> tuple[jax.Array, int]:
  """[B, T], one boundary in five tokens; and the largest number of segments in a row."""
  is_end = np.random.default_rng(0).uniform(size=(batch, length)) < 1 / TOKENS_A_BOUNDARY
  return jnp.asarray(is_end, jnp.int32), int(is_end.sum(axis=1).max())


def middle_layers(batch: int, length: int, width: int, needed: int, quick: bool) -> harness.Case:
  """Gradients of the middle layers of the pooling paper's model."""
  num_layers, num_heads, hidden_width = (2, 2, 32) if quick else (8, 8, 2048)
  sizes = ops.bucket_sizes(length + 1, 3 if quick else 5)

  def make_stack() -> Stack:
    mixer = layers.RelativeAttention(num_heads=num_heads, max_length=length + 1)
    block = layers.Block(
      mixer,
      layers.FeedForward(hidden_width, "gelu"),
      mixer_norm=layers.Norm(),
      feed_forward_norm=layers.Norm(),
    )
    return Stack(num_layers, (block,))

  class Middle(nn.Module):
    """The layers with the positions that they share."""

    middle: Stack
    shared_positions: SharedPositions
    sizes: tuple[int, ...] = ()

    def __call__(self, x_bsd, needed):
      positions = self.shared_positions(*x_bsd.shape[1:])
      context = layers.Context(positions=positions)
      return self.middle(x_bsd, context, Buckets(self.sizes, needed))

  def make(sizes=()):
    return Middle(make_stack(), SharedPositions(num_heads), sizes)

  count, inputs = jnp.asarray(needed, jnp.int32), draw(batch, length + 1, width)
  params = jax.jit(make().init)(jax.random.key(0), inputs[:, :2], count)

  def program(sizes: tuple[int, ...], size: int) -> harness.Program | str:
    def step(params, x):
      return gradient(lambda p, x: make(sizes).apply(p, x, count), params, x)

    return harness.compiled(step, params, inputs[:, :size])

  return harness.Case(
    f"middle layers, B {batch} T {length} D {width}, gradient",
    "padded",
    {
      "padded": program((), length + 1),
      "at capacity": program(tuple(sizes), length + 1),
      "known": program((), next(size for size in sizes if size >= needed)),
    },
  )


if __name__ == "__main__":
  PARTS = (
    products,
    shift_and_sum,
    convolution,
    lengths,
    attention,
    state_space,
    peers,
    local,
    pooling,
  )
  harness.main(__doc__, {part.__name__: part for part in PARTS}, name="ops")
