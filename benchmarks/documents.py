"""What documents packed into rows cost: operators with `starts` beside those without.

  python benchmarks/documents.py --out results/documents

writes results/documents.json and .png (a minute on 2 cores; --quick: seconds, smaller, and nothing
is written without --out). Float32; the result and the gradients by all arguments. Ratios are to
"none", no `starts`; "one" is one document a row, "many" 16 of random lengths: medians over
repetitions of paired times, taken by turns.
"""

import argparse
import functools
import json
import pathlib

import timing

from dpjax.analysis import style

SHAPE = dict(batch=2, length=2048, width=512, heads=8)
QUICK_SHAPE = dict(batch=2, length=96, width=16, heads=2)
NUM_DOCUMENTS = 16
TOKENS_A_BOUNDARY = 5
SEED = 0


def make_cases(batch, length, width, heads):
  """The operators and their arguments, by name."""
  import jax.numpy as jnp
  import numpy as np

  from dpjax import ops

  generator = np.random.default_rng(SEED)
  boundaries = (generator.uniform(size=(batch, length)) < 1 / TOKENS_A_BOUNDARY).astype(np.int32)

  def draw(*shape):
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)

  def pool(inputs, starts=None):
    segments = ops.pool_segments(inputs, boundaries, length - 1, starts=starts)
    return ops.upsample_segments(segments, boundaries, starts=starts)

  per_head = (batch, length, heads, width // heads)
  taps = (length, width // 4, width // 4)
  relative = draw(length, *per_head[2:]), draw(*per_head[2:]), draw(*per_head[2:])
  return {
    "shift_and_sum": (
      ops.shift_and_sum,
      (draw(batch, length, 1, width), draw(batch, length, 1, ops.num_levels(length))),
    ),
    "attention": (ops.causal_attention, [draw(*per_head)] * 3),
    "relative_attention": (ops.relative_attention, (*[draw(*per_head)] * 3, *relative)),
    "pooling": (pool, [draw(batch, length, width)]),
    **{
      f"convolution, rank {rank}": (
        ops.causal_convolution,
        (draw(batch, length, taps[1]), draw(*taps[:rank])),
      )
      for rank in (1, 2, 3)
    },
  }


def run(*arguments, operator, starts):
  """The result, and the gradients of half its squares' sum."""
  import jax

  result, pull = jax.vjp(functools.partial(operator, starts=starts), *arguments)
  return result, *pull(result)


def compare(operator, arguments, all_starts, repetitions):
  """Milliseconds, ratio to "none" and temporary MiB by the name of the starts."""
  compiled = {
    name: timing.compile_timed(functools.partial(run, operator=operator, starts=x), *arguments)[0]
    for name, x in all_starts.items()
  }
  calls = {name: functools.partial(f, *arguments) for name, f in compiled.items()}
  seconds = timing.measure(calls, repetitions, max_seconds=30)
  return {
    name: timing.summarize(seconds[name], seconds["none"])
    | {"temporary_mib": timing.temporary_mib(f)}
    for name, f in compiled.items()
  }


@style.applied()
def draw(cases, path):
  """Ratios by operator."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 3.6), layout="constrained")
  axis = figure.subplots()
  labels = {"one": "one document a row", "many": f"{NUM_DOCUMENTS} documents a row"}
  for i, (starts, label) in enumerate(labels.items()):
    places = [number + 0.4 * i for number in range(len(cases))]
    ratios = [rows[starts]["ratio"] for rows in cases.values()]
    axis.barh(places, ratios, 0.38, color=style.COLOURS[i], label=label)
    for place, ratio in zip(places, ratios, strict=True):
      axis.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=8)
  axis.axvline(1.0, color="0.3", linewidth=1)
  axis.set_yticks([number + 0.2 for number in range(len(cases))], [*cases])
  axis.invert_yaxis()
  axis.grid(False, axis="y")
  axis.set(xscale="log", xlabel="time, over that without starts", xlim=(0.2, 15))
  axis.legend(loc="lower right")
  style.finish(figure)
  figure.savefig(path, dpi=130)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/documents, and nothing is written if --quick"
  )
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  import numpy as np

  shape = QUICK_SHAPE if arguments.quick else SHAPE
  one = np.zeros((shape["batch"], shape["length"]), np.int32)
  one[:, 0] = 1
  many, generator = one.copy(), np.random.default_rng(SEED)
  for row in many:
    row[generator.choice(np.arange(1, shape["length"]), NUM_DOCUMENTS - 1, replace=False)] = 1
  all_starts = {"none": None, "one": one, "many": many}
  report = {"machine": timing.describe_machine(), "seed": SEED, **shape, "cases": {}}
  for name, case in make_cases(**shape).items():
    rows = compare(*case, all_starts, 3 if arguments.quick else 11)
    report["cases"][name] = rows
    for starts, row in rows.items():
      print(f"{name:24}{starts:6}{row['milliseconds']:10.2f} ms {row['ratio']:7.3f} x", flush=True)
  if arguments.out or not arguments.quick:
    out = pathlib.Path(arguments.out or "results/documents")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw(report["cases"], out.with_suffix(".png"))


if __name__ == "__main__":
  main()
