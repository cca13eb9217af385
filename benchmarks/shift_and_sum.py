"""Time and memory of the implementations of `dpjax.ops.shift_and_sum`.

  python benchmarks/shift_and_sum.py --out results/shift_and_sum

writes results/shift_and_sum.json and .png (about 2 minutes on 2 cores; --quick: 20
seconds, smaller). All ratios are to "unrolled", medians over repetitions of paired
times; "gradient" is the result and both gradients. `level_dropout` compares the default
with each level skipped with probability p, averaged over draws, to no level skipped.
"""

import argparse
import functools
import json
import pathlib

import timing

SHAPES = [(4, 512, 512), (1, 4096, 512), (1, 16384, 256)]
QUICK_SHAPES = [(2, 128, 128), (1, 1024, 128)]
IMPLEMENTATIONS = ("unrolled", "loop", "recompute")
BASE = "unrolled"
SEED = 0


def make_arrays(batch, length, width):
  """Values, gates of one head for every level, and the gradient's weights."""
  import jax.numpy as jnp
  import numpy as np

  from dpjax import ops

  generator = np.random.default_rng(SEED)
  values = generator.standard_normal((batch, length, 1, width))
  gates = generator.uniform(0, 0.3, (batch, length, 1, ops.num_levels(length)))
  weights = generator.standard_normal(values.shape)
  return tuple(jnp.asarray(x, jnp.float32) for x in (values, gates, weights))


def forward(values, gates, weights, level_keep=None, implementation=None):
  from dpjax import ops

  return ops.shift_and_sum(
    values, gates, level_keep=level_keep, implementation=implementation
  )


def gradient(values, gates, weights, level_keep=None, implementation=None):
  import jax

  result, pull = jax.vjp(
    lambda *x: forward(*x, None, level_keep, implementation), values, gates
  )
  return result, *pull(weights)


def compare(function, arrays, repetitions):
  """Milliseconds, ratio and temporary MiB of every implementation."""
  import jax
  import numpy as np

  compiled = {
    name: jax.jit(functools.partial(function, implementation=name))
    .lower(*arrays).compile()
    for name in IMPLEMENTATIONS
  }
  calls = {name: functools.partial(f, *arrays) for name, f in compiled.items()}
  seconds = timing.measure(calls, repetitions)
  rows = {
    name: {
      "milliseconds": float(np.median(seconds[name])) * 1e3,
      "ratio": timing.ratio(seconds[name], seconds[BASE]),
      "temporary_mib": f.memory_analysis().temp_size_in_bytes / 2**20,
    }
    for name, f in compiled.items()
  }
  return rows | {"page_faults": float(np.median(seconds["page_faults"]))}


def compare_level_dropout(arrays, rates, draws, repetitions):
  """Time of the default, forward and gradient, by the rate at which levels drop."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  compiled = jax.jit(gradient).lower(*arrays, jnp.ones(arrays[1].shape[3], bool))
  compiled = compiled.compile()
  generator = np.random.default_rng(SEED)
  calls = {"no level_keep": functools.partial(jax.jit(gradient), *arrays)}
  for rate in rates:
    for i in range(draws):
      keep = jnp.asarray(generator.uniform(size=arrays[1].shape[3]) >= rate)
      calls[rate, i] = functools.partial(compiled, *arrays, keep)
  seconds = timing.measure(calls, repetitions)
  # Of a repetition the mean over the draws: what a step costs on average.
  mean = {rate: np.mean([seconds[rate, i] for i in range(draws)], 0) for rate in rates}
  mean["no level_keep"] = seconds["no level_keep"]
  return {
    str(name): {
      "milliseconds": float(np.median(x)) * 1e3,
      "ratio_to_none_dropped": timing.ratio(x, mean[rates[0]]),
    }
    for name, x in mean.items()
  } | {"draws": draws, "seed": SEED}


def draw_figure(report, path):
  """Bars: time above, temporary memory below; forward and gradient side by side."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  kinds = ("forward", "gradient")
  figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True)
  labels = ["B{batch} T{length} D{width}".format(**case) for case in report["cases"]]
  for column, kind in enumerate(kinds):
    for row, (key, title) in enumerate(
      [("ratio", "time / unrolled"), ("temporary_mib", "temporary memory, MiB")]
    ):
      axis = axes[row, column]
      for i, name in enumerate(IMPLEMENTATIONS):
        heights = [case[kind][name][key] for case in report["cases"]]
        places = [x + (i - 1) * 0.27 for x in range(len(labels))]
        axis.bar(places, heights, 0.25, label=name)
      axis.set_xticks(range(len(labels)), labels)
      axis.set_title(f"{kind}: {title}")
  axes[0, 0].legend()
  figure.tight_layout()
  figure.savefig(path, dpi=120)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="results/shift_and_sum", help="path, no suffix")
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  repetitions, draws = (3, 4) if arguments.quick else (9, 16)
  report = {
    "machine": timing.describe_machine(),
    "repetitions": repetitions,
    "base": BASE,
    "cases": [],
  }
  for batch, length, width in QUICK_SHAPES if arguments.quick else SHAPES:
    arrays = make_arrays(batch, length, width)
    case = {
      "batch": batch,
      "length": length,
      "width": width,
      "forward": compare(forward, arrays, repetitions),
      "gradient": compare(gradient, arrays, repetitions),
      "level_dropout": compare_level_dropout(
        arrays, (0.0, 0.2, 0.9), draws, repetitions
      ),
    }
    report["cases"].append(case)
    print(json.dumps(case, indent=2))
  out = pathlib.Path(arguments.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
  draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
