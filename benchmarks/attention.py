"""Attention a tile at a time beside all weights at once: time, memory, compilation.

  python benchmarks/attention.py --out results/attention

writes results/attention.json and .png (about 4 minutes on 2 cores; --quick: half a
minute, smaller, and nothing is written without --out). Float32; the result and the
gradients by all arguments, of `dpjax.ops.causal_attention` and `relative_attention`, with
dropout of the weights and without.

"whole" builds all weights, [B, H, T, T]; without dropout and positions it is
`jax.nn.dot_product_attention`. "blocks N" is the same function with block_size=N.

Ratios are to "whole", medians over repetitions of paired times; implementations take
turns. Temporary memory is the compiler's plan, beside arguments and results.
"difference" is the largest to "whole", as a part of the largest number, without dropout:
with it, other weights are dropped. What needs too much memory is compiled, not run. The
default `dpjax.ops.attention.BLOCK_SIZE` is read from this.

Source: Dao et al. 2022, arXiv:2205.14135.
"""

import argparse
import functools
import json
import pathlib

import timing

from dpjax.analysis import style

# Batch, length, heads, features of a head.
SHAPES = {
  "causal": [(4, 512, 1, 512), (2, 1024, 8, 64), (2, 2048, 8, 64)],
  "relative": [(4, 512, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64)],
}
QUICK_SHAPES = {"causal": [(2, 48, 1, 16)], "relative": [(2, 48, 3, 8)]}
BLOCK_SIZES = (64, 128, 256)
QUICK_BLOCK_SIZES = (16,)
DROPOUT_RATES = (0.0, 0.1)
# Of the largest number; sums in another order differ by less.
MAX_DIFFERENCE = 1e-4
SEED = 0


def draw(name, shape):
  """The gradient of the result, and the arguments."""
  import jax.numpy as jnp
  import numpy as np

  _, length, *heads = shape
  shapes = [shape] * 4 + [(length, *heads), heads, heads] * (name == "relative")
  generator = np.random.default_rng(SEED)
  return [jnp.asarray(generator.standard_normal(x), jnp.float32) for x in shapes]


def run(weights, *arguments, name, rate, block_size):
  """The result, and gradients of its sum times the weights."""
  import jax

  from dpjax import ops

  function = functools.partial(
    getattr(ops, f"{name}_attention"),
    dropout_rate=rate,
    dropout_key=jax.random.key(SEED) if rate else None,
    block_size=block_size,
  )
  result, pull = jax.vjp(function, *arguments)
  return result, *pull(weights)


def difference(found, expected):
  """The largest, as a part of the largest number."""
  import numpy as np

  parts = []
  for x, y in zip(found, expected, strict=True):
    x, y = np.asarray(x), np.asarray(y)
    parts.append(np.abs(x - y).max() / np.abs(y).max())
  largest = float(np.max(parts))
  if not largest < MAX_DIFFERENCE:
    raise RuntimeError(f"the forms differ by {largest:.1g} of their largest number")
  return largest


def compare(name, shape, rate, block_sizes, **limits):
  """Milliseconds, temporary MiB, compilation and difference of every form."""
  import numpy as np

  arguments = draw(name, shape)
  sizes = {"whole": shape[1]} | {f"blocks {x}": x for x in block_sizes}
  rows, calls, left_out = {}, {}, {}
  for form, block_size in sizes.items():
    compiled, seconds = timing.compile_timed(
      functools.partial(run, name=name, rate=rate, block_size=block_size), *arguments
    )
    mib = timing.temporary_mib(compiled)
    rows[form] = {"temporary_mib": mib, "compile_seconds": seconds}
    for key in ("temporary_mib", "compile_seconds"):
      rows[form][f"{key}_ratio"] = rows[form][key] / rows["whole"][key]
    if mib > timing.most_mib():
      left_out[form] = f"needs {mib / 1024:.1f} GiB of temporary memory"
    else:
      calls[form] = functools.partial(compiled, *arguments)
  if "whole" not in calls:
    raise RuntimeError(f"whole {left_out['whole']}, too much for this machine")
  if not rate:
    expected = calls["whole"]()
    for form, call in calls.items():
      rows[form]["difference"] = difference(call(), expected)
    del expected
  seconds = timing.measure(calls, **limits)
  for form in calls:
    rows[form] |= timing.summarize(seconds[form], seconds["whole"])
  return {
    "forms": rows,
    "left_out": left_out,
    "repetitions": len(seconds["whole"]),
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def title(case):
  return "{name} B{batch} T{length} H{heads} E{features}, dropout {rate}".format(**case)


def print_table(report):
  for case in report["cases"]:
    print("\n" + title(case))
    for form, row in case["forms"].items():
      times = case["left_out"].get(form) or ("{milliseconds:10.2f} ms {ratio:7.3f} x".format(**row))
      print(
        f"  {form:12}{times}"
        "{temporary_mib:10.1f} MiB {temporary_mib_ratio:7.3f} x, compiled in "
        "{compile_seconds:5.1f} s {compile_seconds_ratio:6.2f} x".format(**row)
      )


@style.applied()
def draw_figure(report, path):
  """Time, memory and time to compile of all cases."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  cases = report["cases"]
  forms = list(cases[0]["forms"])
  figure, axes = pyplot.subplots(1, 3, figsize=(18, 9), sharey=True)
  for axis, key, what in zip(
    axes,
    ("ratio", "temporary_mib_ratio", "compile_seconds_ratio"),
    ("time", "temporary memory", "time to compile"),
    strict=True,
  ):
    for i, form in enumerate(forms):
      rows = [case["forms"][form] for case in cases]
      found = [(place, row[key]) for place, row in enumerate(rows) if key in row]
      axis.barh(
        [place + (i - (len(forms) - 1) / 2) * 0.8 / len(forms) for place, _ in found],
        [x for _, x in found],
        0.75 / len(forms),
        color=f"C{i}",
        label=form,
      )
    axis.axvline(1, color="gray", linewidth=0.5)
    axis.set_title(f"result and gradients: {what} / whole")
  axes[0].set_yticks(range(len(cases)), [title(case) for case in cases])
  axes[0].invert_yaxis()
  axes[0].legend()
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  pyplot.close(figure)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/attention, and nothing is written if --quick"
  )
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  quick = arguments.quick
  report = {
    "command": "python benchmarks/attention.py" + " --quick" * quick,
    "machine": timing.describe_machine(),
    "seed": SEED,
    "cases": [],
  }
  for name, shapes in (QUICK_SHAPES if quick else SHAPES).items():
    for shape in shapes:
      sizes = dict(zip(("batch", "length", "heads", "features"), shape, strict=True))
      for rate in DROPOUT_RATES:
        case = compare(
          name,
          shape,
          rate,
          QUICK_BLOCK_SIZES if quick else BLOCK_SIZES,
          repetitions=3 if quick else 11,
          max_seconds=12,
        )
        report["cases"].append({"name": name, **sizes, "rate": rate, **case})
  print_table(report)
  if arguments.out or not quick:
    out = pathlib.Path(arguments.out or "results/attention")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
