"""All benchmarks by one command, and what they found beside what was promised.

  python benchmarks/suite.py                    all of them, about an hour on 2 cores
  python benchmarks/suite.py --only=pooling,hourglass
  python benchmarks/suite.py --quick            all of them, small: do they run?
  python benchmarks/suite.py --summary          nothing is run: results/ is read

Each runs in a process of its own and writes results/NAME.json and .png (with --quick
nothing). Then a table compares results/ with the bars of `BARS`, on the machine that the
reports name. A benchmark that fails does not stop the others; the exit status is 1 then.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results"
# What runs beyond the usual.
MORE = {"training_step": ["--parts=dispatcher,extractors,hourglass,lengths"]}
# The longest last: what is interrupted has most of the others.
NAMES = (
  "shift_and_sum", "attention", "pooling", "hourglass", "training_step", "generation",
  "causal_convolution",
)


def _case(report, **sizes):
  """The one case of a report with these sizes."""
  (case,) = [x for x in report["cases"] if all(x[k] == v for k, v in sizes.items())]
  return case


def _shift_and_sum(kind, key, length):
  def read(report):
    rows = _case(report, length=length)[kind]
    if key == "ratio":
      return rows["recompute"]["ratio"]
    return rows["recompute"][key] / rows["unrolled"][key]

  return read


def _convolution(rank, length, batch, base, key="milliseconds"):
  def read(report):
    from dpjax.ops.causal_convolution import choose_implementation

    case = _case(report, rank=rank, length=length, batch=batch)
    rows = case["gradient"]["implementations"]
    chosen = choose_implementation(rank, batch, length, "cpu", 1)
    if key == "milliseconds":
      return rows[chosen][f"ratio_to_{base}"]
    return rows[chosen][key] / rows[base][key]

  return read


def _pooling(operator, kind):
  return lambda report: _case(report, batch=8, length=2048)["operators"][operator][kind][
    "segments_known"
  ]["ratio"]


def _middle(key, base):
  def read(report):
    found = []
    for case in report["cases"]:
      rows = case.get("middle", {}).get("implementations", {})
      if rows:
        found.append(rows["run_at_capacity"][key] / rows[base][key])
    return max(found)

  return read


def _step(allocator):
  def read(report):
    rows = report["parts"]["dispatcher"]["rows"][allocator]
    (row,) = [
      x for x in rows
      if (x["name"], x["command"], x["dtype"]) == ("dispatcher", "train", "float32")
      and x["dropout"]
    ]
    return row["over"]["torch"]

  return read


# What, its report, the bar, how it is read. Ratios; the lower the better.
BARS: tuple[tuple[str, str, float, Callable[[dict], float]], ...] = (
  ("shift-and-sum, gradient, T 4096: memory / unrolled", "shift_and_sum", 0.25,
   _shift_and_sum("gradient", "temporary_mib", 4096)),
  ("shift-and-sum, forward, T 4096: time / unrolled", "shift_and_sum", 0.55,
   _shift_and_sum("forward", "ratio", 4096)),
  ("shift-and-sum, gradient, T 4096: time / unrolled", "shift_and_sum", 0.45,
   _shift_and_sum("gradient", "ratio", 4096)),
  ("shift-and-sum, forward, T 16384: time / unrolled", "shift_and_sum", 0.55,
   _shift_and_sum("forward", "ratio", 16384)),
  ("shift-and-sum, gradient, T 16384: time / unrolled", "shift_and_sum", 0.45,
   _shift_and_sum("gradient", "ratio", 16384)),
  ("6 Dispatcher layers, gradient: memory / unrolled", "shift_and_sum", 0.35,
   lambda report: report["stack"]["mixers"]["recompute"]["temporary_mib_ratio"]),
  ("SHE, gradient, l 128, B 16: time / scan on lags", "causal_convolution", 0.3,
   _convolution(3, 128, 16, "plain")),
  ("WE, gradient, l 1024: time / scan on lags", "causal_convolution", 0.03,
   _convolution(2, 1024, 2, "plain")),
  ("WE, gradient, l 1024: memory / scan on lags", "causal_convolution", 0.03,
   _convolution(2, 1024, 2, "plain", "temporary_mib")),
  ("ME, gradient, l 4096: time / Toeplitz", "causal_convolution", 0.1,
   _convolution(1, 4096, 1, "toeplitz")),
  ("pool, forward: time / one-hot", "pooling", 0.25, _pooling("pool", "forward")),
  ("up-sample, forward: time / one-hot", "pooling", 0.1, _pooling("upsample", "forward")),
  ("pool, backward: time / one-hot", "pooling", 0.15, _pooling("pool", "backward")),
  ("up-sample, backward: time / one-hot", "pooling", 0.25,
   _pooling("upsample", "backward")),
  ("middle block: time / the right capacity (custom VJP)", "pooling", 1.8,
   _middle("milliseconds", "known")),
  ("middle block: memory / padding", "pooling", 1.1, _middle("temporary_mib", "padded")),
  ("Dispatcher, training step: time / PyTorch, usual malloc", "training_step", 1.3,
   _step("usual")),
  ("Dispatcher, training step: time / PyTorch, quiet malloc", "training_step", 1.3,
   _step("quiet")),
)


def load(name: str) -> dict | None:
  path = RESULTS / f"{name}.json"
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def compare_with_bars() -> list[dict]:
  """The bars and what results/ says of them; None where it does not."""
  reports = {name: load(name) for name in NAMES}
  rows = []
  for what, name, bar, read in BARS:
    try:
      found = read(reports[name] or {})
    except (KeyError, ValueError):  # No such report, or no such row in it.
      found = None
    rows.append({"what": what, "report": name, "bar": bar, "found": found})
  return rows


def print_table(rows: list[dict]) -> None:
  for row in rows:
    found = "-" if row["found"] is None else f"{row['found']:.3f}"
    is_met = row["found"] is not None and row["found"] <= row["bar"]
    verdict = "met" if is_met else "NOT MET"
    print(f"{row['what']:58}{found:>8}  <= {row['bar']:<5} {verdict}")


def run(name: str, is_quick: bool, more: list[str]) -> bool:
  """Whether the benchmark came to its end."""
  command = [sys.executable, str(FOLDER / f"{name}.py"), *more]
  command += ["--quick"] if is_quick else ["--out", str(RESULTS / name)]
  print(f"== {name}", flush=True)
  start = time.perf_counter()
  status = subprocess.run(command, check=False).returncode
  minutes = (time.perf_counter() - start) / 60
  end = "done" if status == 0 else f"failed with status {status}"
  print(f"== {name}: {end} after {minutes:.1f} minutes", flush=True)
  return status == 0


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default=",".join(NAMES), help="names, by commas")
  parser.add_argument("--quick", action="store_true", help="small; nothing is written")
  parser.add_argument("--summary", action="store_true", help="run nothing")
  parser.add_argument("--text", help="of benchmarks/generation.py: a file of text8")
  arguments = parser.parse_args()
  names = arguments.only.split(",")
  unknown = [name for name in names if name not in NAMES]
  if unknown:
    parser.error(f"--only: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
  failed = []
  for name in [] if arguments.summary else names:
    more = list(MORE.get(name, ()))
    if name == "generation" and arguments.text:
      more += ["--text", arguments.text]
    if not run(name, arguments.quick, more):
      failed.append(name)
  if not arguments.quick:
    print_table(compare_with_bars())
  if failed:
    sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
  main()
