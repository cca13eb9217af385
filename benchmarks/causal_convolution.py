"""Time and memory of the implementations of `dpjax.ops.causal_convolution`.

  python benchmarks/causal_convolution.py --out results/causal_convolution

writes results/causal_convolution.json and .png (about 13 minutes on 2 cores, 6 of them
for --parts=cases --dtypes=float32; --quick: 2 minutes, smaller). Ratios are medians
over repetitions of paired times, to "plain", a textbook scan over the lags with JAX's
own gradient, to "toeplitz", and in "cases" to masked self-attention of the same inputs,
the products and the softmax without projections, with 1 head and with 32; "gradient" is
the result and all gradients. Implementations take turns. What needs too much memory or
time is left out, and the report says why. "cases" and "sweep" are of float32; cases of
other dtypes are in "cases_bfloat16" and the like. `choose_implementation` of the op is
read from the gradients of "cases" and "sweep".
"""

import argparse
import functools
import json
import math
import pathlib
import time

import timing

from dpjax.analysis import style

# Taps that are numbers, vectors and matrices, and the Extractors with such.
RANKS = {1: "ME", 2: "WE, HE", 3: "SHE"}
SHAPES = [(16, 128, 128), (2, 1024, 128), (1, 4096, 128)]
# Of float32 alone: the paper's, of its comparison with self-attention.
PAPER_SHAPE = (64, 128, 128)
QUICK_SHAPES = [(4, 32, 32), (1, 128, 32)]
LENGTHS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# Matrix taps of 2048 are 128 MiB.
LONGEST_MATRICES = 1024
SMALL_BATCHES = [(batch, length) for batch in (1, 4) for length in (16, 64, 256)]
ONE_ROW_OF_MATRICES = (1, 1024)
QUICK_LENGTHS = [8, 32]
WIDTH = 128
IMPLEMENTATIONS = ("plain", "scan", "conv", "toeplitz", "fft", "dft")
HEADS = (1, 32)
KINDS = ("forward", "gradient")
PARTS = ("cases", "sweep")
DTYPES = ("float32", "bfloat16")
MAX_BYTES = 4 * 2**30
SEED = 0


def plain(inputs, filters):
  """The sum over the lags as one writes it first."""
  import jax.numpy as jnp
  from jax import lax

  length = inputs.shape[1]

  def body(result, lag_tap):
    lag, tap = lag_tap
    mask = (jnp.arange(length) >= lag).astype(inputs.dtype)[None, :, None]
    past = jnp.roll(inputs, lag, axis=1) * mask
    return result + (past @ tap if tap.ndim == 2 else past * tap), None

  return lax.scan(body, jnp.zeros_like(inputs), (jnp.arange(length), filters))[0]


def forward(inputs, filters, weights, implementation):
  from dpjax import ops

  if implementation == "plain":
    return plain(inputs, filters)
  return ops.causal_convolution(inputs, filters, implementation=implementation)


def gradient(inputs, filters, weights, implementation):
  import jax

  result, pull = jax.vjp(lambda *x: forward(*x, None, implementation), inputs, filters)
  return result, *pull(weights)


def attend(queries, keys, values, heads):
  import jax

  def split(x):
    return x.reshape(*x.shape[:2], heads, -1)

  result = jax.nn.dot_product_attention(split(queries), split(keys), split(values), is_causal=True)
  return result.reshape(queries.shape)


def attention(queries, keys, values, weights, heads, kind):
  import jax

  if kind == "forward":
    return attend(queries, keys, values, heads)
  result, pull = jax.vjp(lambda *x: attend(*x, heads), queries, keys, values)
  return result, *pull(weights)


def make_arrays(rank, batch, length, width, dtype):
  """Inputs, filters, and the gradient's weights."""
  import jax.numpy as jnp
  import numpy as np

  generator = np.random.default_rng(SEED)
  shapes = [(batch, length, width), (length, width, width)[:rank], (batch, length, width)]
  return [jnp.asarray(generator.standard_normal(x), dtype) for x in shapes]


def time_once(call):
  """Seconds of a call, roughly."""
  import jax

  jax.block_until_ready(call())
  seconds = []
  while not seconds or (len(seconds) < 5 and sum(seconds) < 0.2):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def prepare(function, make, length, max_seconds):
  """What is compiled, the seconds of compiling, a call, its seconds, roughly.

  Args:
    function: of arrays.
    make: the arrays of a length.
    length: T.
    max_seconds: of a call. The work grows with the square of the length, so that a short
      call tells of a long one; `math.inf` where it does not.

  Returns:
    A tuple of the four, or one sentence, why it is left out.
  """
  short, factor = length, 1
  while max_seconds < math.inf and short > 256:
    short, factor = short // 4, factor * 16
    arrays = make(short)
    compiled, _ = timing.compile_timed(function, *arrays)
    seconds = factor * time_once(functools.partial(compiled, *arrays))
    if seconds > max_seconds:
      return f"about {seconds:.0f} s a call, by a call of length {short}"
  arrays = make(length)
  compiled, compile_seconds = timing.compile_timed(function, *arrays)
  mib = timing.temporary_mib(compiled)
  if mib * 2**20 > MAX_BYTES:
    return f"needs {mib / 2**10:.1f} GiB of temporary memory"
  call = functools.partial(compiled, *arrays)
  return compiled, compile_seconds, call, time_once(call)


def compare(kind, rank, shape, dtype, names, heads, max_seconds, max_ratio, total_seconds):
  """Milliseconds, ratios, temporary MiB, seconds of compiling: of everything named."""
  import numpy as np

  batch, length, width = shape
  function = {"forward": forward, "gradient": gradient}[kind]

  def make(length):
    return make_arrays(rank, batch, length, width, dtype)

  def make_attention(length):
    inputs, _, weights = make_arrays(1, batch, length, width, dtype)
    return inputs, inputs[:, ::-1], inputs[:, :, ::-1], weights

  prepared = {
    name: prepare(
      functools.partial(function, implementation=name),
      make,
      length,
      math.inf if name in ("fft", "dft") else max_seconds,
    )
    for name in names
  }
  prepared |= {
    f"attention_{count}": prepare(
      functools.partial(attention, heads=count, kind=kind),
      make_attention,
      length,
      max_seconds,
    )
    for count in heads
  }
  left_out = {name: x for name, x in prepared.items() if isinstance(x, str)}
  prepared = {name: x for name, x in prepared.items() if name not in left_out}
  fastest = min(once for name, (*_, once) in prepared.items() if name in names)
  for name in [x for x in names if x in prepared]:
    times = prepared[name][3] / fastest
    if times > max_ratio:
      left_out[name] = f"a call took {times:.0f} times the fastest's"
      del prepared[name]
  once = sum(x[3] for x in prepared.values())
  repetitions = int(np.clip(total_seconds / once, 3, 31))
  calls = {name: x[2] for name, x in prepared.items()}
  seconds = timing.measure(calls, repetitions)
  bases = [x for x in ("plain", "toeplitz") if x in calls]
  bases += [x for x in calls if x not in names]
  rows = {
    name: {
      "milliseconds": float(np.median(seconds[name])) * 1e3,
      "temporary_mib": timing.temporary_mib(compiled),
      "compile_seconds": compile_seconds,
    }
    | {f"ratio_to_{x}": timing.ratio(seconds[name], seconds[x]) for x in bases}
    for name, (compiled, compile_seconds, _, _) in prepared.items()
  }
  return {
    "implementations": {name: rows[name] for name in rows if name in names},
    "attention": {name: rows[name] for name in rows if name not in names},
    "left_out": left_out,
    "repetitions": repetitions,
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def run_case(rank, shape, *, dtype="float32", heads=(), **limits):
  # "plain" adds up in the dtype of its inputs.
  names = [x for x in IMPLEMENTATIONS if dtype == "float32" or x != "plain"]
  case = {"rank": rank, "extractors": RANKS[rank], "dtype": dtype}
  case |= dict(zip(("batch", "length", "width"), shape, strict=True))
  case |= {kind: compare(kind, rank, shape, dtype, names, heads, **limits) for kind in KINDS}
  print(json.dumps(case), flush=True)
  return case


def run_cases(dtype, quick):
  """Of every kind of taps and shape, beside attention."""
  shapes = QUICK_SHAPES if quick else SHAPES
  if dtype == "float32" and not quick:
    shapes = [*shapes, PAPER_SHAPE]
  seconds = {"float32": 6}.get(dtype, 3)
  return [
    run_case(
      rank,
      shape,
      dtype=dtype,
      heads=HEADS,
      max_seconds=4,
      max_ratio=math.inf,
      total_seconds=0.5 if quick else seconds,
    )
    for rank in RANKS
    for shape in shapes
  ]


def run_sweep(quick):
  cases = []
  lengths = QUICK_LENGTHS if quick else LENGTHS
  for rank in RANKS:
    pairs = [(max(1, 2048 // x), x) for x in lengths if rank < 3 or x <= LONGEST_MATRICES]
    small = [] if quick else SMALL_BATCHES + [ONE_ROW_OF_MATRICES] * (rank == 3)
    for batch, length in pairs + small:
      case = run_case(
        rank,
        (batch, length, 32 if quick else WIDTH),
        max_seconds=1,
        max_ratio=6,
        total_seconds=0.2 if quick else 2,
      )
      cases.append(case | {"small_batch": (batch, length) not in pairs})
  return cases


@style.applied()
def draw_figure(report, path):
  """For each kind of taps: time by length; time and memory of the three shapes."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(3, 3, figsize=(15, 11))
  for column, rank in enumerate(RANKS):
    axis = axes[0, column]
    rows = [x for x in report["sweep"] if x["rank"] == rank and not x["small_batch"]]
    for color, name in enumerate(IMPLEMENTATIONS):
      points = [
        (x["length"], x["gradient"]["implementations"][name]["milliseconds"])
        for x in rows
        if name in x["gradient"]["implementations"]
      ]
      if points:
        axis.plot(*zip(*points, strict=True), "o-", color=f"C{color}", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{RANKS[rank]}: gradient, ms by T, B T = 2048")
    cases = [x for x in report["cases"] if x["rank"] == rank]
    if not cases:
      continue
    labels = ["B{batch} T{length} D{width}".format(**x) for x in cases]
    for row, (key, title) in enumerate(
      [("milliseconds", "ms"), ("temporary_mib", "temporary memory, MiB")], start=1
    ):
      axis = axes[row, column]
      for i, name in enumerate(IMPLEMENTATIONS):
        found = [x["gradient"]["implementations"].get(name) for x in cases]
        places = [x + (i - 2.5) * 0.14 for x, y in enumerate(found) if y]
        axis.bar(places, [x[key] for x in found if x], 0.13, color=f"C{i}", label=name)
      axis.set_xticks(range(len(labels)), labels, fontsize=7)
      axis.set_yscale("log")
      axis.set_title(f"{RANKS[rank]}: gradient, {title}")
  if report["cases"]:
    axes[1, len(RANKS) // 2].legend(loc="upper right")
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=100)


def some_of(names):
  """Reads names, separated by commas, of those."""

  def read(text):
    chosen = text.split(",")
    if not set(chosen) <= set(names):
      raise argparse.ArgumentTypeError(
        f"expected some of {','.join(names)}, separated by commas, got {text!r}"
      )
    return chosen

  return read


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="results/causal_convolution", help="path, no suffix")
  parser.add_argument("--quick", action="store_true", help="small, few repetitions")
  parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=",".join(PARTS))
  parser.add_argument(
    "--dtypes",
    type=some_of(DTYPES),
    default=list(DTYPES),
    help=f"of the cases: {','.join(DTYPES)}",
  )
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  report = {
    "machine": timing.describe_machine(),
    "seed": SEED,
    "cases": [],
    "sweep": [],
  }
  for dtype in arguments.dtypes if "cases" in arguments.parts else []:
    key = "cases" if dtype == "float32" else f"cases_{dtype}"
    report[key] = run_cases(dtype, arguments.quick)
  if "sweep" in arguments.parts:
    report["sweep"] = run_sweep(arguments.quick)
  out = pathlib.Path(arguments.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
  draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
