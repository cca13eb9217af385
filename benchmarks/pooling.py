"""Token pooling by segments beside the matrix of weights; its middle block at capacities.

  python benchmarks/pooling.py --out results/pooling

writes results/pooling.json and .png (about 7 minutes on 2 cores; --quick: a minute,
smaller). Boundaries drawn at random, one token in 5. `--parts=operators` (a minute) or
`--parts=middle` runs that alone; `--dtypes=float32` leaves out bfloat16, in which the
operators are measured at one shape.

"operators": `dpjax.ops.pool_segments` and `upsample_segments` beside "dense", the form
of the authors of the pooling paper: a matrix [B, T, S] of weights and a product with it,
S that of the batch. "segments" has room for T segments (T + 1 with the null group),
"segments_known" for the batch's. "backward" is the gradient by the vectors alone, a
linear function of the result's; "gradient" is the result and that; "gradient_boundaries"
has the gradient by the boundaries, too, which gumbel needs. "difference" is the largest
to "dense", as a part of its largest number.

"middle": the middle block, result and gradients by inputs and parameters. "padded"
computes T + 1 positions; "known" is compiled for the smallest capacity that holds the
batch, as if the data told it; "run_at_capacity" finds that capacity on the device;
"switch" does it by `lax.switch` with JAX's own gradient. It is in float32, and not run at
the largest of the shapes, which would take too long; there it is null.

Ratios are to "dense" and to "padded" ("ratio_known": to "known"), medians over
repetitions of paired times; implementations take turns. Temporary memory is the
compiler's plan, so "run_at_capacity" states that of its largest capacity. What needs too
much memory is compiled, not run.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 3.
"""

import argparse
import functools
import json
import pathlib
from unittest import mock

import timing

from dpjax.analysis import style

SHAPES = [(4, 512, 512), (2, 2048, 512)]
# Of the operators alone; the last one in the other dtypes, too.
OPERATORS_SHAPES = [(8, 2048, 512)]
QUICK_SHAPES = [(3, 64, 32)]
QUICK_OPERATORS_SHAPES = [(5, 96, 32)]
MIDDLE = dict(num_layers=8, num_heads=8, hidden_width=2048)
QUICK_MIDDLE = dict(num_layers=2, num_heads=2, hidden_width=64)
NUM_CAPACITIES = 8
QUICK_CAPACITIES = 3
TOKENS_A_BOUNDARY = 5
KINDS = {
  "pool": ("forward", "backward", "gradient", "gradient_boundaries"),
  "upsample": ("forward", "backward", "gradient"),
}
FORMS = ("dense", "segments", "segments_known")
MIDDLES = ("padded", "known", "run_at_capacity", "switch")
PARTS = ("operators", "middle")
# Of the largest number; 8 layers in another order of sums differ by less. In bfloat16
# the matrix has rounded weights, and so has the gradient that it gives to boundaries.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
SEED = 0


def draw_boundaries(batch, length):
  """[B, T], 0 or 1, int32, and S: the most segments of a row, and the null group."""
  import numpy as np

  generator = np.random.default_rng(SEED)
  is_end = generator.uniform(size=(batch, length)) < 1 / TOKENS_A_BOUNDARY
  return is_end.astype(np.int32), int(is_end.sum(axis=1).max()) + 1


def dense_weights(index, num_places, axis):
  """[B, T, places]: 1 where index[b, t] is the place, in sums along `axis` made 1.

  Through the 1, as 1 + (index - place), passes the gradient of the index.
  """
  import jax.numpy as jnp

  away_bts = jnp.arange(num_places, dtype=index.dtype)[None, None] - index[..., None]
  weights_bts = jnp.where(away_bts == 0, 1 - away_bts, 0)
  return weights_bts / jnp.maximum(jnp.sum(weights_bts, axis=axis, keepdims=True), 1e-9)


def pool(inputs, boundaries, num_places, is_dense):
  import jax.numpy as jnp

  from dpjax import ops

  if not is_dense:
    return ops.pool_segments(inputs, boundaries, num_places)
  # Numbers of segments are no bfloat16.
  ends_bt = boundaries.astype(jnp.float32)
  weights_bts = dense_weights(jnp.cumsum(ends_bt, axis=1) - ends_bt, num_places, 1)
  return jnp.einsum("btd,bts->bsd", inputs, weights_bts.astype(inputs.dtype))


def upsample(segments, boundaries, num_places, is_dense):
  import jax.numpy as jnp

  from dpjax import ops

  if not is_dense:
    return ops.upsample_segments(segments, boundaries)
  index_bt = jnp.cumsum(boundaries.astype(jnp.float32), axis=1)
  weights_bts = dense_weights(index_bt, num_places, 2)
  return jnp.einsum("bsd,bts->btd", segments, weights_bts.astype(segments.dtype))


def run_operator(vectors, boundaries, weights, *, operator, kind, num_places, is_dense):
  """The result, gradients of its sum times the weights, or both, a tuple."""
  import jax

  function = functools.partial(operator, num_places=num_places, is_dense=is_dense)
  if kind == "forward":
    return (function(vectors, boundaries),)
  if kind in ("backward", "gradient"):
    result, pull = jax.vjp(lambda x: function(x, boundaries), vectors)
    if kind == "backward":  # Does not need the result, so the compiler drops it.
      return pull(weights)
  else:
    result, pull = jax.vjp(function, vectors, boundaries)
  return result, *pull(weights)


def difference(found, expected, dtype="float32"):
  """Largest difference, where both have a place, as a part of the largest number."""
  import jax
  import numpy as np

  parts = []
  leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  for x, y in leaves:
    both = tuple(slice(min(sizes)) for sizes in zip(x.shape, y.shape, strict=True))
    x, y = (np.asarray(z[both], np.float32) for z in (x, y))
    parts.append(np.abs(x - y).max() / np.abs(y).max())
  largest = float(np.max(parts))
  if not largest < MAX_DIFFERENCE[dtype]:
    raise RuntimeError(f"the forms differ by {largest:.1g} of their largest number")
  return largest


def compare_operators(name, kind, shape, dtype="float32", **limits):
  """Milliseconds, ratio, temporary MiB, compilation and difference of every form."""
  import jax.numpy as jnp
  import numpy as np

  batch, length, width = shape
  boundaries_bt, slots = draw_boundaries(batch, length)
  is_float = kind == "gradient_boundaries"
  boundaries_bt = jnp.asarray(boundaries_bt, jnp.float32 if is_float else jnp.int32)
  # The null group is no segment: it goes in front of the pooled ones.
  used = slots - 1 if name == "pool" else slots
  most = length if name == "pool" else length + 1
  generator = np.random.default_rng(SEED + 1)
  tokens_btd = generator.standard_normal(shape).astype(np.float32)
  places_bsd = generator.standard_normal((batch, most, width)).astype(np.float32)
  places_bsd[:, used:] = 0
  compiled, compile_seconds, calls = {}, {}, {}
  for form in FORMS:
    num_places = most if form == "segments" else used
    arrays = [tokens_btd, places_bsd[:, :num_places]]
    vectors, weights = arrays if name == "pool" else arrays[::-1]
    arguments = jnp.asarray(vectors, dtype), boundaries_bt, jnp.asarray(weights, dtype)
    compiled[form], compile_seconds[form] = timing.compile_timed(
      functools.partial(
        run_operator,
        operator=pool if name == "pool" else upsample,
        kind=kind,
        num_places=num_places,
        is_dense=form == "dense",
      ),
      *arguments,
    )
    calls[form] = functools.partial(compiled[form], *arguments)
  expected = calls["dense"]()
  differences = {form: difference(calls[form](), expected, dtype) for form in FORMS}
  seconds = timing.measure(calls, **limits)
  return {
    form: timing.summarize(seconds[form], seconds["dense"])
    | {
      "temporary_mib": timing.temporary_mib(compiled[form]),
      "compile_seconds": compile_seconds[form],
      "difference": differences[form],
    }
    for form in FORMS
  } | {
    "repetitions": len(seconds["dense"]),
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def plain_switch(function, sizes, needed, inputs, *others):
  """`dpjax.ops.run_at_capacity` as one writes it first."""
  import jax
  import jax.numpy as jnp

  def run_first(size, inputs, others):
    outputs = function(inputs[:, :size], *others)
    return jnp.pad(outputs, ((0, 0), (0, inputs.shape[1] - size), (0, 0)))

  index = jnp.searchsorted(jnp.asarray(sizes), needed)
  branches = [functools.partial(run_first, size) for size in sizes]
  return jax.lax.switch(index, branches, inputs, others)


def make_middle(max_length, sizes, num_layers, num_heads, hidden_width):
  """A module of the middle block alone: (inputs, needed) -> outputs, [B, S, D]."""
  from flax import linen as nn

  from dpjax.layers import attention, blocks
  from dpjax.models.stack import Stack

  mixer = functools.partial(attention.RelativeAttention, num_heads=num_heads, max_length=max_length)
  block = functools.partial(
    blocks.Block, make_mixer=mixer, hidden_width=hidden_width, activation="gelu"
  )
  stack = Stack(num_layers, block, has_positions=True)

  class Middle(nn.Module):
    """Of the hourglass."""

    @nn.compact
    def __call__(self, inputs, needed):
      return stack(
        inputs,
        name="middle",
        deterministic=True,
        positions=attention.SharedPositions(num_heads, name="relative_positions"),
        sizes=sizes,
        needed=needed,
      )

  return Middle()


def run_middle(params, inputs, needed, weights, *, name, capacity, sizes, settings):
  """The result and both gradients of its sum times the weights."""
  import jax

  from dpjax import ops

  if name == "known":
    inputs, weights = inputs[:, :capacity], weights[:, :capacity]
  is_switched = name in ("run_at_capacity", "switch")
  middle = make_middle(sizes[-1], sizes if is_switched else (), **settings)
  usual = plain_switch if name == "switch" else ops.run_at_capacity
  with mock.patch.object(ops, "run_at_capacity", usual):
    result, pull = jax.vjp(
      lambda params, x: middle.apply({"params": params}, x, needed), params, inputs
    )
    return result, pull(weights)


def compare_middles(shape, num_capacities, settings, **limits):
  """Milliseconds, temporary MiB and compilation of every way, and ratios."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from dpjax import ops

  batch, length, width = shape
  _, slots = draw_boundaries(batch, length)
  sizes = ops.capacities(length + 1, num_capacities)
  capacity = next(size for size in sizes if size >= slots)
  generator = np.random.default_rng(SEED + 2)
  inputs, weights = generator.standard_normal((2, batch, length + 1, width))
  # What is not read gets no gradient.
  weights[:, slots:] = 0
  inputs, weights = (jnp.asarray(x, jnp.float32) for x in (inputs, weights))
  needed = jnp.asarray(slots, jnp.int32)
  middle = make_middle(sizes[-1], (), **settings)
  params = jax.jit(middle.init)(jax.random.key(SEED), inputs[:, :2], needed)["params"]
  arguments = params, inputs, needed, weights
  rows, calls, left_out = {}, {}, {}
  for name in MIDDLES:
    compiled, seconds = timing.compile_timed(
      functools.partial(run_middle, name=name, capacity=capacity, sizes=sizes, settings=settings),
      *arguments,
    )
    mib = timing.temporary_mib(compiled)
    rows[name] = {"temporary_mib": mib, "compile_seconds": seconds}
    for key in ("temporary_mib", "compile_seconds"):
      rows[name][f"{key}_ratio"] = rows[name][key] / rows["padded"][key]
    if mib > timing.most_mib():
      left_out[name] = f"needs {mib / 1024:.1f} GiB of temporary memory"
    else:
      calls[name] = functools.partial(compiled, *arguments)
  if "padded" not in calls:
    raise RuntimeError(f"padded {left_out['padded']}, too much for this machine")
  expected, by_expected = calls["padded"]()
  for name, call in calls.items():
    result, found = call()
    rows[name]["difference"] = difference(
      (result[:, :slots], join(found)), (expected[:, :slots], join(by_expected))
    )
  del expected, by_expected, result, found
  seconds = timing.measure(calls, **limits)
  for name in calls:
    rows[name] |= timing.summarize(seconds[name], seconds["padded"])
    if "known" in calls:
      rows[name]["ratio_known"] = timing.ratio(seconds[name], seconds["known"])
  return {
    "slots": slots,
    "capacity": capacity,
    "capacities": sizes,
    "implementations": rows,
    "left_out": left_out,
    "repetitions": len(seconds["padded"]),
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def join(gradients):
  """Those of all parameters as one vector: single ones may be 0 in theory; the inputs'."""
  import jax
  import jax.numpy as jnp

  by_params, by_inputs = gradients
  return jnp.concatenate([x.ravel() for x in jax.tree.leaves(by_params)]), by_inputs


def print_table(report):
  for case in report["cases"]:
    print("\n" + label_of(case))
    for name, kinds in (case["operators"] or {}).items():
      for kind, rows in kinds.items():
        for form in FORMS:
          print(
            f"  {name + ' ' + kind:28}{form:16}"
            "{milliseconds:10.2f} ms {ratio:8.3f} x {temporary_mib:9.2f} MiB, compiled "
            "in {compile_seconds:5.1f} s".format(**rows[form])
          )
    middle = case["middle"]
    if middle is None:
      continue
    print("  middle block: S {slots}, capacity {capacity}".format(**middle))
    for name, row in middle["implementations"].items():
      times = middle["left_out"].get(name) or (
        "{milliseconds:10.1f} ms {ratio:8.3f} x, {ratio_known:6.3f} x known".format(
          **{"ratio_known": float("nan")} | row
        )
      )
      print(
        f"    {name:18}{times}"
        "{temporary_mib:10.1f} MiB {temporary_mib_ratio:7.3f} x, compiled in "
        "{compile_seconds:5.1f} s {compile_seconds_ratio:7.2f} x".format(**row)
      )


def label_of(case):
  return "B{batch} T{length} D{width} {dtype}".format(**case)


@style.applied()
def draw_figure(report, path):
  """Operators above, middle blocks below: time, memory, time to compile."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  with_operators = [case for case in report["cases"] if case["operators"]]
  with_middle = [case for case in report["cases"] if case["middle"]]
  columns = max(4, len(with_operators))
  figure, axes = pyplot.subplots(2, columns, figsize=(5 * columns, 8), squeeze=False)
  operators = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
  names = [f"{x}\n{y}".replace("_", "\n") for x, y in operators]

  def draw_operators(axis, case, key, title):
    for i, form in enumerate(FORMS):
      heights = [case["operators"][x][y][form][key] for x, y in operators]
      places = [x + (i - 1) * 0.27 for x in range(len(operators))]
      axis.bar(places, heights, 0.25, label=form)
    axis.set_title(f"{label_of(case)}: {title}", fontsize=10)
    axis.set_yscale("log")
    axis.set_xticks(range(len(names)), names, fontsize=6)

  for axis, case in zip(axes[0], with_operators, strict=False):
    draw_operators(axis, case, "milliseconds", "ms")
  if with_operators:
    largest = [case for case in with_operators if case["dtype"] == "float32"]
    case = (largest or with_operators)[-1]
    draw_operators(axes[1, 0], case, "temporary_mib", "temporary MiB")
    axes[0, 0].legend()
  for axis, key, title in zip(
    axes[1, 1:],
    ("ratio", "temporary_mib_ratio", "compile_seconds_ratio"),
    ("time", "temporary memory", "time to compile"),
    strict=False,
  ):
    for i, name in enumerate(MIDDLES):
      rows = [case["middle"]["implementations"][name] for case in with_middle]
      found = [(x, row[key]) for x, row in enumerate(rows) if key in row]
      axis.bar(
        [x + (i - 1.5) * 0.21 for x, _ in found],
        [y for _, y in found],
        0.2,
        color=f"C{i}",
        label=name,
      )
    axis.axhline(1, color="gray", linewidth=0.5)
    axis.set_xticks(range(len(with_middle)), [label_of(case) for case in with_middle], fontsize=8)
    axis.set_title(f"middle block, gradient: {title} / padded", fontsize=10)
  if with_middle:
    axes[1, 2].legend()
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=100)


def names_of(allowed):
  """A type of an option: some of these names, with commas between them."""

  def parse(text):
    names = text.split(",")
    if not set(names) <= set(allowed):
      raise argparse.ArgumentTypeError(f"expected some of {[*allowed]}, got {text}")
    return names

  return parse


def list_cases(quick, parts, dtypes):
  """Shape, dtype and parts of every case in turn."""
  large = QUICK_OPERATORS_SHAPES if quick else OPERATORS_SHAPES
  cases = []
  for dtype in dtypes:
    if dtype == "float32":
      cases += [(shape, dtype, parts) for shape in (QUICK_SHAPES if quick else SHAPES)]
    if "operators" in parts:
      shapes = large if dtype == "float32" else large[-1:]
      cases += [(shape, dtype, ["operators"]) for shape in shapes]
  return cases


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/pooling, and nothing is written if --quick"
  )
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  parser.add_argument(
    "--parts", type=names_of(PARTS), default=[*PARTS], help=f"of {','.join(PARTS)}"
  )
  parser.add_argument(
    "--dtypes",
    type=names_of(MAX_DIFFERENCE),
    default=[*MAX_DIFFERENCE],
    help=f"of {','.join(MAX_DIFFERENCE)}",
  )
  arguments = parser.parse_args()
  quick = arguments.quick
  cases = list_cases(quick, arguments.parts, arguments.dtypes)
  if not cases:
    parser.error("--dtypes: expected float32 for the middle block, got bfloat16")
  timing.restart_with_quiet_allocator()

  settings = QUICK_MIDDLE if quick else MIDDLE
  report = {
    "command": "python benchmarks/pooling.py" + " --quick" * arguments.quick,
    "machine": timing.describe_machine(),
    "parts": arguments.parts,
    "dtypes": arguments.dtypes,
    "seed": SEED,
    "tokens_a_boundary": TOKENS_A_BOUNDARY,
    "middle": settings,
    "cases": [],
  }
  for shape, dtype, parts in cases:
    case = dict(zip(("batch", "length", "width"), shape, strict=True), dtype=dtype)
    case |= {"operators": None, "middle": None}
    if "operators" in parts:
      case["operators"] = {
        name: {
          kind: compare_operators(
            name, kind, shape, dtype, repetitions=3 if quick else 31, max_seconds=6
          )
          for kind in kinds
        }
        for name, kinds in KINDS.items()
      }
    if "middle" in parts:
      case["middle"] = compare_middles(
        shape,
        QUICK_CAPACITIES if quick else NUM_CAPACITIES,
        settings,
        repetitions=3 if quick else 9,
        max_seconds=50,
      )
    report["cases"].append(case)
  print_table(report)
  if arguments.out or not arguments.quick:
    out = pathlib.Path(arguments.out or "results/pooling")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
