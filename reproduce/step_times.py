"""Seconds and memory of training steps: Dispatcher paper, Fig. 2; pooling paper, Fig. 5.

The papers' sizes, handed to `benchmarks/training_step.py`, which says what a step is and
times it: its part "lengths" is Fig. 2, and "hourglass" at several factors is Fig. 5.
Memory is the compiler's plan of what a step needs beside parameters, Adam's moments and
the batch; the pooling paper has the whole.

Sources: Cetoli, CLASP 2022, Fig. 2; Nawrot et al. 2023, arXiv:2211.09761, Sec. 5, Fig. 5.
"""

import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Any

import training_step

_NAMES = {"dispatcher": "Dispatcher", "attention": "masked self-attention", "vanilla": "no pooling"}
_BOTH = ("float32", "bfloat16")
_LENGTHS = training_step.SIZES["lengths"] | dict(repetitions=7)
_LENGTHS["model"] = _LENGTHS["model"] | dict(vocab_size=20_044)
_FACTORS = training_step.SIZES["hourglass"] | dict(repetitions=7, factors=(2, 3, 4, 6, 8))
_SIZES: dict[str, dict[str, Any]] = {
  "dispatcher-fig2": {
    "tiny": training_step.QUICK["lengths"] | dict(lengths=(16, 32), dtypes=_BOTH),
    "cpu": _LENGTHS | dict(lengths=(512, 1024, 2048, 4096)),
    "paper": _LENGTHS | dict(lengths=tuple(512 * 2**i for i in range(8)), dtypes=_BOTH),
  },
  "pooling-fig5": {
    "tiny": training_step.QUICK["hourglass"] | dict(factors=(2, 4)),
    "cpu": _FACTORS | dict(batch=1),
    "paper": _FACTORS
    | dict(batch=8, dtypes=_BOTH, model=_FACTORS["model"] | dict(max_length=2048)),
  },
}


def planned(name: str, scale: str) -> int:
  """How many points there are, of both models at each length, or without pooling once."""
  sizes = _SIZES[name][scale]
  count = 2 * len(sizes["lengths"]) if "lengths" in sizes else len(sizes["factors"]) + 1
  return count * len(sizes.get("dtypes", _BOTH[:1]))


def measure(
  name: str, scale: str, known: Collection[int], *, put: Callable, seconds: Callable[[], float]
) -> None:
  """Measures the points of a figure.

  Args:
    name: "dispatcher-fig2" or "pooling-fig5".
    scale: "tiny", "cpu" or "paper".
    known: factors that are not measured again; lengths are measured together.
    put: called with each point: "model", "baseline", "dtype", "place", "seconds",
      "temporary_mib", "ratio" and "memory_ratio" (over the baseline, measured in turns),
      "left_out" (why it has no numbers, or ""), "settings" and "repetitions".
    seconds: that are left; asked before each pair of models.
  """
  sizes = _SIZES[name][scale]
  dtypes = ",".join(sizes.get("dtypes", _BOTH[:1]))
  run = training_step.choose_run(
    training_step.parse_arguments(["--no_torch", f"--dtypes={dtypes}"])
  )
  if "lengths" in sizes:
    limit = min(seconds(), 1800.0)
    found: Any = training_step.Lengths(sizes | dict(most_seconds=limit), run).measure()["rows"]
    for dtype in dtypes.split(","):
      # What is left out at one length has no rows of the longer ones.
      last: dict[str, Any] = {}
      for length in sizes["lengths"]:
        last |= {x["name"]: x for x in found if (x["dtype"], x["length"]) == (dtype, length)}
        ours, base = last["dispatcher"], last["attention"]
        put(_point(sizes, ours, length, base, ours.get("over_attention")))
        put(_point(sizes, base, length))
    return
  for factor in sizes["factors"]:
    if factor in known:
      continue
    if seconds() <= 0:
      return
    rows: Any
    try:
      found = training_step.compare_hourglass(sizes | dict(factor=factor), run)
      rows = [row | row["sides"]["jax"] for row in found]
    except training_step.WorkerError as error:
      rows = [dict(name="fixed", dtype=x, left_out=str(error)) for x in dtypes.split(",")]
    none = {row["dtype"]: row for row in rows if row["name"] == "vanilla"}
    for row in rows:
      if row["name"] == "vanilla":
        put(_point(sizes, row, 1))
      else:
        ratio = row.get("over_baseline", {}).get("jax")
        put(_point(sizes, row, factor, none.get(row["dtype"], {}), ratio))


def _point(sizes: Mapping[str, Any], row: Mapping[str, Any], place: int, base=None, ratio=None):
  """A row of the benchmark as a point, beside its baseline's row."""
  model, times = sizes["model"], row.get("seconds", ())
  memory, other = row.get("temporary_mib"), (base or {}).get("temporary_mib")
  baseline = "no pooling" if "factors" in sizes else "masked self-attention"
  settings = {"batch": sizes["batch"], "tokens": model.get("max_length", place)}
  settings["layers"] = sum(sizes["layers"]) if "layers" in sizes else model["num_layers"]
  settings |= {key: model[key] for key in ("width", "feed_forward_width", "vocab_size")}
  settings["dropout"] = sizes.get("dropout", model.get("dropout"))
  return {
    "model": _NAMES.get(row["name"], "fixed segments"),
    "baseline": None if base is None else baseline,
    "dtype": row["dtype"],
    "place": place,
    "seconds": statistics.median(times) if times else None,
    "temporary_mib": memory,
    "ratio": None if base is None else ratio,
    "memory_ratio": memory / other if memory and other else None,
    "left_out": row.get("left_out", ""),
    "settings": settings | {"repetitions": sizes["repetitions"]},
    "repetitions": len(times),
  }
