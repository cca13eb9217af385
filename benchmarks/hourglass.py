"""A training step of models with token pooling beside one without: the paper's Fig. 5.

  python benchmarks/hourglass.py --out results/hourglass

writes results/hourglass.json and .png (about 6 minutes on 2 cores; --quick: a minute,
smaller). The whole model of the pooling paper, 2 + 8 + 2 layers on windows of 2048
characters, dropout 0.1, in float32; a step is the gradient and an update by Adam.

"vanilla" has no pooling. "fixed" has segments of k tokens. "whitespace" ends them with
spaces, which the data shows, so the capacity of the middle layers is known before the
step as in training. "learned" has a predictor, its loss, and a capacity found on the
device; what it would decide is given to it, so that the shortening factor is known:
boundaries at random, or those of "whitespace". The text is words at random, of the length
of English ones. A window is the fullest of as many as the paper's batch has, so that S,
what the middle layers need, is that of a whole batch.

Ratios are to "vanilla", medians over repetitions of paired times; variants take turns.
Temporary memory is the compiler's plan, beside parameters and Adam's moments; that of
"learned" is the plan of its largest capacity. "operations" are those of the matrix
products, 2 for a term, counted by formula; of a layer on n positions

  B n (4 D D + 2 D F) + n D D + 3 B n n D    terms

for queries, keys, values, outputs and the feed-forward network; distances; scores by
content and by distance and the sum of the values, the whole squares, as they are
computed. A gradient takes twice as many as the result (once for the distances, whose
table learns nothing), and "learned" computes its middle layers once more. n of those is
the capacity, under "exact" S itself, with nothing computed once more.

Source: Nawrot et al. 2023, arXiv:2211.09761, Sec. 5 and Fig. 5.
"""

import argparse
import functools
import json
import pathlib

import timing

from dpjax.analysis import style

SETTINGS = dict(
  vocab_size=27,
  width=512,
  feed_forward_width=2048,
  num_heads=8,
  max_length=2048,
  first_layers=2,
  num_layers=8,
  last_layers=2,
  num_capacities=8,
)
QUICK = dict(
  vocab_size=27,
  width=32,
  feed_forward_width=64,
  num_heads=2,
  max_length=96,
  first_layers=1,
  num_layers=2,
  last_layers=1,
  num_capacities=3,
)
COMMON = dict(
  mixer="relative_attention",
  norm="post",
  positions="none",
  activation="gelu",
  dropout=0.1,
  hidden_dropout=0.1,
  mixer_dropout=0.1,
  init_std=0.02,
  norm_init_std=0.02,
)
# Who teaches the predictor; "entropy" computes its targets from the logits.
LEARNED = "entropy"
LEARNED_FACTORS = (2, 4)
FIXED_FACTORS = (2, 4)
PAPERS_BATCH = 8
SPACE = 0
# Letters of a word: 1 and a Poisson variable of this mean.
MORE_LETTERS = 3.7
# Sec. 5: at most, of the vanilla model's.
PAPER = {2: {"time": 0.6, "memory": 0.6}, 4: {"time": 0.4, "memory": 0.5}}
SEED = 0


def draw_text(rows, length):
  """[rows, length + 1], 0 the space and the letters from 1 on."""
  import numpy as np

  generator = np.random.default_rng(SEED)
  size = rows * (length + 1)
  text = generator.integers(1, 27, size)
  words = 1 + generator.poisson(MORE_LETTERS, size)
  ends = np.cumsum(words + 1) - 1
  text[ends[ends < size]] = SPACE
  return text.reshape(rows, length + 1).astype(np.int32)


def fullest(boundaries, batch):
  """The rows with the most boundaries, in falling order."""
  import numpy as np

  return np.argsort(-boundaries.sum(axis=1), kind="stable")[:batch]


def make_variants(settings, batch):
  """Name, settings, batch, given boundaries and capacity of each variant."""
  import numpy as np

  from dpjax import ops

  length = settings["max_length"]
  text = draw_text(max(PAPERS_BATCH, batch), length)
  spaces = (text[:, :-1] == SPACE).astype(np.int32)
  rows = fullest(spaces, batch)
  data = {"tokens": text[rows, :-1], "targets": text[rows, 1:]}
  data["weights"] = np.ones((batch, length), np.float32)
  sizes = ops.capacities(length + 1, settings["num_capacities"])

  def pick(slots):
    return next(size for size in sizes if size >= slots)

  def variant(name, kind, factor, slots, computed, **more):
    return (
      dict(name=name, kind=kind, shortening_factor=factor, slots=slots, computed=computed)
      | {"given": None, "capacity": None, "pooling": {}}
      | more
    )

  variants = [variant("vanilla", "none", 1.0, length, length)]
  for factor in FIXED_FACTORS:
    slots = length // factor + 1
    variants.append(
      variant(
        f"fixed {factor}",
        "fixed",
        float(factor),
        slots,
        slots,
        pooling={"shortening_factor": factor},
      )
    )
  slots, factor = int(spaces[rows].sum(axis=1).max()) + 1, 1 / float(spaces.mean())
  variants.append(
    variant(
      "whitespace",
      "whitespace",
      factor,
      slots,
      pick(slots),
      capacity=pick(slots),
      pooling={"space_ids": (SPACE,)},
    )
  )
  generator = np.random.default_rng(SEED + 1)
  drawn = {}
  for k in LEARNED_FACTORS:
    ends = generator.uniform(size=spaces.shape) < 1 / k
    drawn[f"learned {k}"] = ends.astype(np.int32)
  for name, ends in (drawn | {"learned, words": spaces}).items():
    given, factor = ends[fullest(ends, batch)], 1 / float(ends.mean())
    slots = int(given.sum(axis=1).max()) + 1
    variants.append(variant(name, LEARNED, factor, slots, pick(slots), given=given))
  return data, variants


def model_settings(settings, variant):
  """`config.model` of a variant, whose settings are those that its components have."""
  from dpjax import config

  model = COMMON | settings | {"boundaries": variant["kind"]} | variant["pooling"]
  if variant["kind"] == "none":
    model["num_layers"] += model.pop("first_layers") + model.pop("last_layers")
  return config.from_dict({"model": model}).model


def make_step(model, optimizer, objective, capacity):
  """(state, batch, given boundaries or None) -> the next state and the loss."""
  import jax
  import optax

  from dpjax.training.step import TrainState

  def step(state, batch, given):
    key = jax.random.fold_in(state.key, state.step)
    pooling = {"boundaries": given, "capacity": capacity}

    def loss(params):
      output = model.apply(
        {"params": params},
        batch["tokens"],
        deterministic=False,
        rngs={"dropout": key},
        **{k: x for k, x in pooling.items() if x is not None},
      )
      sums = objective.sums(output, batch)
      return (sums["nats"] + sums.get("boundary_nats", 0.0)) / sums["count"]

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state, state.key), value

  return step


def count_operations(settings, batch, variant):
  """Of a training step: as computed, and at S itself without computing twice."""
  length, width = settings["max_length"], settings["width"]
  hidden = settings["feed_forward_width"]

  def layer(n, passes=3, of_distances=2):
    terms = batch * n * (4 * width**2 + 2 * width * hidden) + 3 * batch * n**2 * width
    return passes * terms + of_distances * n * width**2

  rest = (settings["first_layers"] + settings["last_layers"]) * layer(length)
  rest += 3 * batch * length * width * settings["vocab_size"]
  is_learned = variant["kind"] == LEARNED
  if is_learned:
    rest += 3 * batch * length * (width + 1) * hidden
  middle = layer(variant["computed"], *((4, 4) if is_learned else ()))
  exact = layer(variant["slots"])
  return tuple(2 * (rest + settings["num_layers"] * x) for x in (middle, exact))


def compare(settings, batch, repetitions, max_seconds):
  """A row for every variant, of what they cost and their ratios to the first."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from dpjax.models.build import build_boundaries, build_model
  from dpjax.training import losses
  from dpjax.training.optimizer import make_optimizer
  from dpjax.training.step import init_state

  data, variants = make_variants(settings, batch)
  data = {name: jnp.asarray(x) for name, x in data.items()}
  optimizer = make_optimizer("adam", 2.5e-4, clip_norm=0.25)
  states, programs, calls, rows = {}, {}, {}, {}
  for variant in variants:
    name, kind, given = (variant[key] for key in ("name", "kind", "given"))
    of_model = model_settings(settings, variant)
    model = build_model(of_model)
    # Fixed segments and spaces have the same parameters.
    shared = "pooled" if kind in ("fixed", "whitespace") else kind
    if shared not in states:
      states[shared] = jax.jit(lambda model=model: init_state(model, optimizer, SEED))()
    state = states[shared]
    objective = losses.Objective(build_boundaries(of_model))
    step = make_step(model, optimizer, objective, variant["capacity"])
    arguments = state, data, None if given is None else jnp.asarray(given)
    # What the device decides is data: the learned variants are one program.
    program = kind if kind == LEARNED else name
    if program not in programs:
      programs[program] = timing.compile_timed(step, *arguments)
    compiled, seconds = programs[program]
    mib = timing.temporary_mib(compiled)
    print(f"{name}: compiled in {seconds:.0f} s, {mib:.0f} MiB", flush=True)
    if mib > timing.most_mib():
      raise RuntimeError(f"{name} needs {mib / 1024:.1f} GiB, too much for this machine")
    calls[name] = functools.partial(compiled, *arguments)
    leaves = jax.tree.leaves(state.params)
    operations, exact = count_operations(settings, batch, variant)
    rows[name] = {
      key: variant[key] for key in ("kind", "shortening_factor", "slots", "computed")
    } | {
      "parameters": sum(x.size for x in leaves),
      "state_mib": 3 * sum(x.nbytes for x in leaves) / 2**20,
      "loss": float(calls[name]()[1]),
      "operations": operations,
      "operations_exact": exact,
      "temporary_mib": mib,
      "compile_seconds": seconds,
    }
    if not np.isfinite(rows[name]["loss"]):
      raise RuntimeError(f"{name}: the loss is {rows[name]['loss']}")
  base = rows["vanilla"]
  for row in rows.values():
    for key in ("operations", "operations_exact", "temporary_mib", "compile_seconds"):
      row[f"{key}_ratio"] = row[key] / base[key]
  seconds = timing.measure(calls, repetitions, max_seconds=max_seconds)
  for name, row in rows.items():
    row |= timing.summarize(seconds[name], seconds["vanilla"])
    row["seconds"] = seconds[name].tolist()
  return {
    "variants": rows,
    "repetitions": len(seconds["vanilla"]),
    "page_faults": float(np.median(seconds["page_faults"])),
  }


def print_table(report):
  heads = ("T / S", "comp.", "s", "time", "operations", "exact", "MiB", "memory")
  print(f"\n{'':16}" + "".join(f"{head:>11}" for head in heads))
  length = report["settings"]["max_length"]
  for name, row in report["variants"].items():
    numbers = (
      f"{length / row['slots']:.2f}",
      row["computed"],
      f"{row['milliseconds'] / 1e3:.3f}",
      f"{row['ratio']:.3f}",
      f"{row['operations_ratio']:.3f}",
      f"{row['operations_exact_ratio']:.3f}",
      f"{row['temporary_mib']:.0f}",
      f"{row['temporary_mib_ratio']:.3f}",
    )
    print(f"{name:16}" + "".join(f"{number:>11}" for number in numbers))


@style.applied()
def draw_figure(report, path):
  """Time and memory by the shortening factor, and what the paper says of them."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
  rows = report["variants"]
  known = sorted(
    (x for x in rows.values() if x["kind"] != LEARNED),
    key=lambda row: row["shortening_factor"],
  )
  learned = sorted(
    (x for x in rows.values() if x["kind"] == LEARNED),
    key=lambda row: row["shortening_factor"],
  )
  lines = [
    ("capacity known", known, "C0"),
    ("learned: capacity found on the device", learned, "C1"),
  ]
  for axis, key, quantity, title in (
    (axes[0], "ratio", "time", "time of a training step"),
    (axes[1], "temporary_mib_ratio", "memory", "temporary memory"),
  ):
    for label, found, color in lines:
      factors = [x["shortening_factor"] for x in found]
      axis.plot(factors, [x[key] for x in found], "o-", color=color, label=label)
      if quantity == "time":
        axis.plot(
          factors,
          [x["operations_ratio"] for x in found],
          "--",
          color=color,
          label=f"operations, {label.split(':')[0]}",
        )
    axis.plot(
      list(PAPER),
      [x[quantity] for x in PAPER.values()],
      "kx",
      markersize=9,
      label="the paper (GPU), at most",
    )
    axis.set_title(f"{title} / vanilla")
    axis.set_xlabel("shortening factor")
    axis.set_ylim(bottom=0)
    axis.legend()
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=120)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/hourglass, and nothing is written if --quick"
  )
  parser.add_argument("--batch", type=int, default=1, help="rows of a step")
  parser.add_argument("--quick", action="store_true", help="small, 3 repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  settings = QUICK if arguments.quick else SETTINGS
  report = {
    "command": "python benchmarks/hourglass.py" + " --quick" * arguments.quick,
    "machine": timing.describe_machine(),
    "seed": SEED,
    "batch": arguments.batch,
    "settings": settings | COMMON,
    "paper": PAPER,
  } | compare(settings, arguments.batch, repetitions=3 if arguments.quick else 9, max_seconds=150)
  print_table(report)
  if arguments.out or not arguments.quick:
    out = pathlib.Path(arguments.out or "results/hourglass")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
