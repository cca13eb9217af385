"""Time and memory of the implementations of `dpjax.ops.shift_and_sum`.

  python benchmarks/shift_and_sum.py --out results/shift_and_sum

writes results/shift_and_sum.json and .png (about 4 minutes on 2 cores; --quick: half a
minute, smaller). All ratios are to "unrolled", medians over repetitions of paired times;
"gradient" is the result and both gradients.

"cases" are the implementations in float32, "bfloat16" the same with such numbers, "copy"
being one read and one write of the values, what a perfect kernel would take.
`level_dropout` compares the default with each level skipped with probability p, averaged
over draws, to no level skipped. "lengths" has the default beside masked self-attention of
one head: `jax.nn.dot_product_attention` (on a GPU by cuDNN, in bfloat16), and "tiles",
`dpjax.ops.causal_attention`. "stack" is the gradient of 6 layers: mixers with residuals
alone, whole blocks, and blocks of which only the inputs are kept (`remat`).
"""

import argparse
import functools
import json
import pathlib

import timing

from dpjax.analysis import style

SHAPES = [(4, 512, 512), (1, 4096, 512), (1, 16384, 256)]
ACCELERATOR_SHAPES = [*SHAPES, (8, 4096, 1024)]
QUICK_SHAPES = [(2, 128, 128), (1, 1024, 128)]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (128, 512)
WIDTH = 512
STACK = dict(batch=4, length=512, width=512, num_layers=6)
QUICK_STACK = dict(batch=2, length=96, width=32, num_layers=3)
IMPLEMENTATIONS = ("unrolled", "loop", "recompute", "matrix")
BASE = "unrolled"
SEED = 0


def implementations():
  """Those to compare; the kernel where it is compiled and not interpreted."""
  import jax

  more = () if jax.default_backend() == "cpu" else ("pallas",)
  return IMPLEMENTATIONS + more


def make_arrays(batch, length, width, dtype="float32"):
  """Values, gates of one head for every level, and the gradient's weights."""
  import jax.numpy as jnp
  import numpy as np

  from dpjax import ops

  generator = np.random.default_rng(SEED)
  values = generator.standard_normal((batch, length, 1, width))
  gates = generator.uniform(0, 0.3, (batch, length, 1, ops.num_levels(length)))
  weights = generator.standard_normal(values.shape)
  return tuple(jnp.asarray(x, dtype) for x in (values, gates, weights))


def forward(values, gates, weights, level_keep=None, implementation=None):
  from dpjax import ops

  return ops.shift_and_sum(values, gates, level_keep=level_keep, implementation=implementation)


def gradient(values, gates, weights, level_keep=None, implementation=None):
  import jax

  result, pull = jax.vjp(lambda *x: forward(*x, None, level_keep, implementation), values, gates)
  return result, *pull(weights)


def copy(values, gates, weights):
  return values + 1


def attention(values, gates, weights):
  """Of one head with the values as queries and keys, too."""
  import jax

  is_cudnn = jax.default_backend() == "gpu" and values.dtype == "bfloat16"
  return jax.nn.dot_product_attention(
    values, values, values, is_causal=True, implementation="cudnn" if is_cudnn else None
  )


def tiles(values, gates, weights):
  from dpjax import ops

  return ops.causal_attention(values, values, values)


def gradient_of(function, values, gates, weights):
  import jax

  result, pull = jax.vjp(lambda x: function(x, gates, weights), values)
  return result, *pull(weights)


def compare(functions, arrays, repetitions, base=BASE, max_seconds=60):
  """Milliseconds, ratio, temporary MiB and compilation of every function by its name."""
  import numpy as np

  compiled = {name: timing.compile_timed(f, *arrays) for name, f in functions.items()}
  left_out = [
    name for name, (f, _) in compiled.items() if timing.temporary_mib(f) > timing.most_mib()
  ]
  calls = {
    name: functools.partial(f, *arrays) for name, (f, _) in compiled.items() if name not in left_out
  }
  seconds = timing.measure(calls, repetitions, max_seconds=max_seconds)
  rows = {
    name: {"temporary_mib": timing.temporary_mib(f), "compile_seconds": compile_seconds}
    for name, (f, compile_seconds) in compiled.items()
  }
  for name in calls:
    rows[name] |= timing.summarize(seconds[name], seconds[base])
  return rows | {
    "repetitions": len(seconds[base]),
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def compare_implementations(function, arrays, repetitions):
  functions = {name: functools.partial(function, implementation=name) for name in implementations()}
  if function is forward:
    functions["copy"] = copy
  return compare(functions, arrays, repetitions)


def compare_lengths(lengths, width, dtype, repetitions):
  """The default and attention by length, until attention needs too much memory."""
  rows = []
  for length in lengths:
    arrays = make_arrays(1, length, width, dtype)
    row = {"length": length, "width": width, "dtype": dtype}
    of_attention = {"attention": attention, "tiles": tiles}
    gradients = {name: functools.partial(gradient_of, f) for name, f in of_attention.items()}
    for kind, functions in (
      ("forward", {"shift_and_sum": forward} | of_attention),
      ("gradient", {"shift_and_sum": gradient} | gradients),
    ):
      # [T, T] weights and what their gradient keeps of them.
      if 16 * length**2 / 2**20 > timing.most_mib():
        functions.pop("attention")
      row[kind] = compare(functions, arrays, repetitions, base="shift_and_sum", max_seconds=20)
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


def compare_stacks(batch, length, width, num_layers, repetitions):
  """Gradients of a stack of layers by parameters and inputs, by the implementation."""
  import jax
  import jax.numpy as jnp
  from flax import linen as nn

  from dpjax.layers import blocks, dispatcher
  from dpjax.models.stack import Stack

  class Layers(nn.Module):
    """Mixers with residuals, or blocks."""

    kind: str
    implementation: str | None

    @nn.compact
    def __call__(self, x):
      mixer = functools.partial(
        dispatcher.Dispatcher,
        num_heads=1,
        max_length=length,
        implementation=self.implementation,
      )
      if self.kind == "mixers":
        for i in range(num_layers):
          x = x + mixer(name=f"layer_{i}")(x)
        return x
      block = functools.partial(blocks.Block, make_mixer=mixer, hidden_width=width)
      stack = Stack(num_layers, block, remat=self.kind == "blocks, remat")
      return stack(x, name="layers", deterministic=True)

  x = make_arrays(batch, length, width)[0][:, :, 0]

  def loss(params, x, model):
    return jnp.sum(model.apply({"params": params}, x) ** 2)

  report = {}
  for kind in ("mixers", "blocks", "blocks, remat"):
    functions = {}
    for name in (BASE, "recompute", "matrix"):
      model = Layers(kind, name)
      functions[name] = jax.grad(functools.partial(loss, model=model), argnums=(0, 1))
    params = jax.jit(model.init)(jax.random.key(SEED), x)["params"]
    rows = compare(functions, (params, x), repetitions)
    for name in functions:
      memory = rows[name]["temporary_mib"]
      rows[name]["temporary_mib_ratio"] = memory / rows[BASE]["temporary_mib"]
    report[kind] = rows
    print(kind, json.dumps(rows), flush=True)
  return report


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


@style.applied()
def draw_figure(report, path):
  """Bars by implementation: time and memory; lines by length, beside attention."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  kinds = ("forward", "gradient")
  figure, axes = pyplot.subplots(2, 3, figsize=(16, 8))
  labels = ["B{batch} T{length} D{width}".format(**case) for case in report["cases"]]
  names = [x for x in report["cases"][0]["gradient"] if x in report["implementations"]]
  for column, kind in enumerate(kinds):
    for row, (key, title) in enumerate(
      [("ratio", "time / unrolled"), ("temporary_mib", "temporary memory, MiB")]
    ):
      axis = axes[row, column]
      for i, name in enumerate(names):
        heights = [case[kind][name].get(key, 0) for case in report["cases"]]
        places = [x + (i - len(names) / 2) * 0.2 for x in range(len(labels))]
        axis.bar(places, heights, 0.18, label=name)
      axis.set_xticks(range(len(labels)), labels)
      axis.set_title(f"{kind}: {title}")
  for row, kind in enumerate(kinds):
    axis = axes[row, 2]
    for dtype in dict.fromkeys(x["dtype"] for x in report["lengths"]):
      marks = {"shift_and_sum": "o-", "attention": "x--", "tiles": "+:"}
      for name, mark in marks.items():
        points = [
          (x["length"], x[kind][name]["milliseconds"])
          for x in report["lengths"]
          if x["dtype"] == dtype and "milliseconds" in x[kind].get(name, {})
        ]
        if points:
          axis.plot(*zip(*points, strict=True), mark, label=f"{name}, {dtype}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{kind}: ms by T, B 1, D {report['lengths'][0]['width']}")
    axis.legend()
  axes[0, 0].legend()
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=100)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out",
    help="path, no suffix; results/shift_and_sum, and nothing is written if --quick",
  )
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  import jax

  quick = arguments.quick
  is_accelerator = jax.default_backend() != "cpu"
  repetitions, draws = (3, 4) if quick else (9, 16)
  shapes = ACCELERATOR_SHAPES if is_accelerator else SHAPES
  report = {
    "machine": timing.describe_machine(),
    "repetitions": repetitions,
    "base": BASE,
    "implementations": implementations(),
    "cases": [],
    "bfloat16": [],
    "lengths": [],
  }
  for dtype, key in (("float32", "cases"), ("bfloat16", "bfloat16")):
    for batch, length, width in QUICK_SHAPES if quick else shapes:
      arrays = make_arrays(batch, length, width, dtype)
      case = {
        "batch": batch,
        "length": length,
        "width": width,
        "forward": compare_implementations(forward, arrays, repetitions),
        "gradient": compare_implementations(gradient, arrays, repetitions),
      }
      if dtype == "float32":
        case["level_dropout"] = compare_level_dropout(arrays, (0.0, 0.2, 0.9), draws, repetitions)
      report[key].append(case)
      print(json.dumps(case), flush=True)
  lengths, width = (QUICK_LENGTHS, 64) if quick else (LENGTHS, WIDTH)
  for dtype in ("float32", "bfloat16") if is_accelerator else ("float32",):
    report["lengths"] += compare_lengths(lengths, width, dtype, repetitions)
  report["stack"] = compare_stacks(**(QUICK_STACK if quick else STACK), repetitions=repetitions)
  if arguments.out or not quick:
    out = pathlib.Path(arguments.out or "results/shift_and_sum")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
