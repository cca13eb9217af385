"""Time and memory of the implementations of `dpjax.ops.causal_convolution`.

  python benchmarks/causal_convolution.py --out results/causal_convolution

writes results/causal_convolution.json and .png (about 15 minutes on 2 cores; --quick: 1
minute, smaller). Ratios are medians over repetitions of paired times, to "plain", a
textbook scan over the lags with JAX's own gradient, and to "toeplitz"; "gradient" is
the result and both gradients. Implementations take turns. What needs too much memory or
time is left out, and the report says why. `choose_implementation` of the op is read from
the gradients of "cases" and "sweep".
"""

import argparse
import functools
import json
import math
import pathlib
import time

import timing

# Taps that are numbers, vectors and matrices, and the Extractors with such.
RANKS = {1: "ME", 2: "WE, HE", 3: "SHE"}
SHAPES = [(16, 128, 128), (2, 1024, 128), (1, 4096, 128)]
QUICK_SHAPES = [(4, 32, 32), (1, 128, 32)]
LENGTHS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# Matrix taps of 2048 are 128 MiB.
LONGEST_MATRICES = 1024
SMALL_BATCHES = [(batch, length) for batch in (1, 4) for length in (16, 64, 256)]
QUICK_LENGTHS = [8, 32]
WIDTH = 128
IMPLEMENTATIONS = ("plain", "scan", "conv", "toeplitz", "fft", "dft")
KINDS = ("forward", "gradient")
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

  result, pull = jax.vjp(
    lambda *x: forward(*x, None, implementation), inputs, filters
  )
  return result, *pull(weights)


def make_arrays(rank, batch, length, width):
  """Inputs, filters, and the gradient's weights."""
  import jax.numpy as jnp
  import numpy as np

  generator = np.random.default_rng(SEED)
  shapes = [(batch, length, width), (length, width, width)[:rank], (batch, length, width)]
  return [jnp.asarray(generator.standard_normal(x), jnp.float32) for x in shapes]


def prepare(function, implementation, rank, shape, max_seconds):
  """A compiled call, or why there is none, and its seconds, roughly."""
  import jax

  def compile_at(length):
    arrays = make_arrays(rank, shape[0], length, shape[2])
    jitted = jax.jit(functools.partial(function, implementation=implementation))
    compiled = jitted.lower(*arrays).compile()
    if compiled.memory_analysis().temp_size_in_bytes > MAX_BYTES:
      return compiled, None
    return compiled, functools.partial(compiled, *arrays)

  def time_once(call):
    jax.block_until_ready(call())
    seconds = []
    while not seconds or (len(seconds) < 5 and sum(seconds) < 0.2):
      start = time.perf_counter()
      jax.block_until_ready(call())
      seconds.append(time.perf_counter() - start)
    return min(seconds)

  length, factor = shape[1], 1
  if implementation not in ("fft", "dft"):
    # The work grows with the square of the length: a short call tells of a long one.
    while length > 256:
      length, factor = length // 4, factor * 16
      seconds = factor * time_once(compile_at(length)[1])
      if seconds > max_seconds:
        return None, f"about {seconds:.0f} s a call, by a call of length {length}", 0
  compiled, call = compile_at(shape[1])
  if call is None:
    gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    return None, f"needs {gib:.1f} GiB of temporary memory", 0
  return compiled, call, time_once(call)


def compare(function, rank, shape, max_seconds, max_ratio, total_seconds):
  """Milliseconds, ratios and temporary MiB of every implementation."""
  import numpy as np

  compiled, calls, left_out, once = {}, {}, {}, {}
  for name in IMPLEMENTATIONS:
    executable, call, seconds = prepare(function, name, rank, shape, max_seconds)
    if executable is None:
      left_out[name] = call
    else:
      compiled[name], calls[name], once[name] = executable, call, seconds
  fastest = min(once.values())
  for name in [x for x in once if once[x] > max_ratio * fastest]:
    left_out[name] = f"a call took {once.pop(name) / fastest:.0f} times the fastest's"
    del compiled[name], calls[name]
  repetitions = int(np.clip(total_seconds / sum(once.values()), 3, 31))
  seconds = timing.measure(calls, repetitions)
  rows = {}
  for name, executable in compiled.items():
    rows[name] = {
      "milliseconds": float(np.median(seconds[name])) * 1e3,
      "temporary_mib": executable.memory_analysis().temp_size_in_bytes / 2**20,
    }
    for base in ("plain", "toeplitz"):
      if base in seconds:
        rows[name][f"ratio_to_{base}"] = timing.ratio(seconds[name], seconds[base])
  return {
    "implementations": rows,
    "left_out": left_out,
    "repetitions": repetitions,
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def run_case(rank, shape, **limits):
  functions = dict(zip(KINDS, (forward, gradient), strict=True))
  case = {"rank": rank, "extractors": RANKS[rank]}
  case |= dict(zip(("batch", "length", "width"), shape, strict=True))
  case |= {
    kind: compare(function, rank, shape, **limits)
    for kind, function in functions.items()
  }
  print(json.dumps(case), flush=True)
  return case


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
        for x in rows if name in x["gradient"]["implementations"]
      ]
      if points:
        axis.plot(*zip(*points, strict=True), "o-", color=f"C{color}", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{RANKS[rank]}: gradient, ms by T, B T = 2048")
    cases = [x for x in report["cases"] if x["rank"] == rank]
    labels = ["B{batch} T{length} D{width}".format(**x) for x in cases]
    for row, (key, title) in enumerate(
      [("milliseconds", "ms"), ("temporary_mib", "temporary memory, MiB")], start=1
    ):
      axis = axes[row, column]
      for i, name in enumerate(IMPLEMENTATIONS):
        found = [x["gradient"]["implementations"].get(name) for x in cases]
        places = [x + (i - 2.5) * 0.14 for x, y in enumerate(found) if y]
        axis.bar(places, [x[key] for x in found if x], 0.13, color=f"C{i}", label=name)
      axis.set_xticks(range(len(labels)), labels)
      axis.set_yscale("log")
      axis.set_title(f"{RANKS[rank]}: gradient, {title}")
  axes[1, 1].legend(loc="upper right")
  figure.tight_layout()
  figure.savefig(path, dpi=100)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", default="results/causal_convolution", help="path, no suffix"
  )
  parser.add_argument("--quick", action="store_true", help="small, few repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  quick = arguments.quick
  report = {
    "machine": timing.describe_machine(),
    "seed": SEED,
    "cases": [],
    "sweep": [],
  }
  for rank in RANKS:
    for shape in QUICK_SHAPES if quick else SHAPES:
      report["cases"].append(run_case(
        rank, shape, max_seconds=10, max_ratio=math.inf,
        total_seconds=1 if quick else 20,
      ))
    lengths = QUICK_LENGTHS if quick else LENGTHS
    pairs = [(max(1, 2048 // x), x) for x in lengths if rank < 3 or x <= LONGEST_MATRICES]
    width = 32 if quick else WIDTH
    for batch, length in pairs + ([] if quick else SMALL_BATCHES):
      case = run_case(
        rank, (batch, length, width), max_seconds=1, max_ratio=6,
        total_seconds=0.5 if quick else 3,
      )
      report["sweep"].append(case | {"small_batch": (batch, length) not in pairs})
  out = pathlib.Path(arguments.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
  draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
