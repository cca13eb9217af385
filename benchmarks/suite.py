"""All benchmarks by one command, and what they found beside what was promised.

  python benchmarks/suite.py                    all of them, about an hour on 2 cores
  python benchmarks/suite.py --only=pooling,hourglass
  python benchmarks/suite.py --quick            all of them, small: do they run?
  python benchmarks/suite.py --summary          nothing is run: results/ is read

Each runs in a process of its own and writes results/NAME.json and .png (with --quick
nothing); on a GPU, name another --folder. Then a table compares what is there with the
bars of `BARS`, or with `GPU_BARS`, by the machine that the reports name. A benchmark that
fails does not stop the others; the exit status is 1 then.
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
MORE = {"training_step": ["--parts=dispatcher,paper,extractors,hourglass,flags,lengths"]}
# Of a report that is not there, or has no such row.
UNREADABLE = (IndexError, KeyError, StopIteration, TypeError, ValueError)
# The longest last: what is interrupted has most of the others.
NAMES = (
  "shift_and_sum",
  "attention",
  "pooling",
  "hourglass",
  "training_step",
  "generation",
  "causal_convolution",
)


def _is_gpu(report):
  return report.get("machine", {}).get("device", "cpu") != "cpu"


def _case(report, **sizes):
  """The one case of a report with these sizes."""
  (case,) = [x for x in report["cases"] if all(x[k] == v for k, v in sizes.items())]
  return case


def _shift_and_sum(kind, key, length):
  def read(report):
    rows = _case(report, batch=1, length=length)[kind]
    if key == "ratio":
      return rows["recompute"]["ratio"]
    return rows["recompute"][key] / rows["unrolled"][key]

  return read


def _convolution(rank, length, batch, base, key="milliseconds"):
  def read(report):
    from dpjax.ops.causal_convolution import choose_implementation

    case = _case(report, rank=rank, length=length, batch=batch)
    rows = case["gradient"]["implementations"]
    platform = "gpu" if _is_gpu(report) else "cpu"
    chosen = choose_implementation(rank, batch, length, platform, 1)
    if key == "milliseconds":
      return rows[chosen][f"ratio_to_{base}"]
    return rows[chosen][key] / rows[base][key]

  return read


def _pooling(operator, kind):
  """With room for the segments of the batch or for any: the slower of the two."""

  def read(report):
    case = _case(report, batch=8, length=2048, dtype="float32")
    rows = case["operators"][operator][kind]
    return max(rows[form]["ratio"] for form in ("segments_known", "segments"))

  return read


def _middle(key):
  """The larger of the shapes."""
  return lambda report: max(
    case["middle"]["implementations"]["run_at_capacity"][key]
    for case in report["cases"]
    if case["middle"]
  )


def _step(condition, part="dispatcher", name="dispatcher"):
  """A step of training over that of PyTorch's fastest form."""

  def read(report):
    row = next(
      x
      for x in report["parts"][part]["rows"][condition]
      if (x["name"], x["command"], x["dtype"]) == (name, "train", "float32") and x["dropout"]
    )
    return max(row["over"].values())

  return read


# What, its report, the bar, how it is read. Ratios; the lower the better.
BARS: tuple[tuple[str, str, float, Callable[[dict], float]], ...] = (
  (
    "shift-and-sum, gradient, T 4096: memory / unrolled",
    "shift_and_sum",
    0.25,
    _shift_and_sum("gradient", "temporary_mib", 4096),
  ),
  (
    "shift-and-sum, forward, T 4096: time / unrolled",
    "shift_and_sum",
    0.55,
    _shift_and_sum("forward", "ratio", 4096),
  ),
  (
    "shift-and-sum, gradient, T 4096: time / unrolled",
    "shift_and_sum",
    0.45,
    _shift_and_sum("gradient", "ratio", 4096),
  ),
  (
    "shift-and-sum, forward, T 16384: time / unrolled",
    "shift_and_sum",
    0.55,
    _shift_and_sum("forward", "ratio", 16384),
  ),
  (
    "shift-and-sum, gradient, T 16384: time / unrolled",
    "shift_and_sum",
    0.45,
    _shift_and_sum("gradient", "ratio", 16384),
  ),
  (
    "6 Dispatcher layers, gradient: memory / unrolled",
    "shift_and_sum",
    0.35,
    lambda report: report["stack"]["mixers"]["recompute"]["temporary_mib_ratio"],
  ),
  (
    "SHE, gradient, l 128, B 16: time / scan on lags",
    "causal_convolution",
    0.3,
    _convolution(3, 128, 16, "plain"),
  ),
  (
    "WE, gradient, l 1024: time / scan on lags",
    "causal_convolution",
    0.03,
    _convolution(2, 1024, 2, "plain"),
  ),
  (
    "WE, gradient, l 1024: memory / scan on lags",
    "causal_convolution",
    0.03,
    _convolution(2, 1024, 2, "plain", "temporary_mib"),
  ),
  (
    "ME, gradient, l 4096: time / Toeplitz",
    "causal_convolution",
    0.1,
    _convolution(1, 4096, 1, "toeplitz"),
  ),
  ("pool, forward: time / one-hot", "pooling", 0.25, _pooling("pool", "forward")),
  ("up-sample, forward: time / one-hot", "pooling", 0.1, _pooling("upsample", "forward")),
  ("pool, backward: time / one-hot", "pooling", 0.15, _pooling("pool", "backward")),
  ("up-sample, backward: time / one-hot", "pooling", 0.25, _pooling("upsample", "backward")),
  ("middle block: time / the right capacity (custom VJP)", "pooling", 1.8, _middle("ratio_known")),
  ("middle block: memory / padding", "pooling", 1.1, _middle("temporary_mib_ratio")),
  ("Dispatcher, training step: time / PyTorch", "training_step", 0.7, _step("quiet", "paper")),
  (
    "the same beside a busy neighbour",
    "training_step",
    0.9,
    _step("quiet, busy neighbour", "paper"),
  ),
)


def _lengths_row(report, length):
  (row,) = [x for x in report["lengths"] if (x["length"], x["dtype"]) == (length, "float32")]
  return row["gradient"]


def _over_attention(key, length):
  """Beside the better of JAX's own attention and ours in tiles."""

  def read(report):
    rows = _lengths_row(report, length)
    return rows["shift_and_sum"][key] / min(
      rows[name][key] for name in ("attention", "tiles") if key in rows.get(name, {})
    )

  return read


def _tiles(key):
  def read(report):
    case = _case(report, name="relative", length=2048, rate=0.1)
    return case["forms"]["blocks 128"][key]

  return read


def _hourglass(key):
  return lambda report: report["variants"]["whitespace"][key]


def _with_a_cache(name):
  def read(report):
    rows = [x for x in report["models"] if (x["name"], x["length"]) == (name, 4096)]
    return 1 / rows[0]["times_faster"]

  return read


def _over_copy(kind):
  """The fastest form's time over that of a copy, one read and one write."""

  def read(report):
    rows = _case(report, batch=8, length=4096)
    copy = rows["forward"]["copy"]["milliseconds"]
    forms = [rows[kind].get(name, {}) for name in report["implementations"]]
    return min(x["milliseconds"] for x in forms if "milliseconds" in x) / copy

  return read


def _she_over_attention(report):
  from dpjax.ops.causal_convolution import choose_implementation

  case = _case(report, rank=3, length=128, batch=64)["gradient"]
  chosen = choose_implementation(3, 64, 128, "gpu", 1)
  return case["implementations"][chosen]["ratio_to_attention_32"]


GPU_BARS: tuple[tuple[str, str, float, Callable[[dict], float]], ...] = (
  (
    "shift-and-sum, forward, (8, 4096, 1024): time / copy",
    "shift_and_sum",
    1 / 0.6,
    _over_copy("forward"),
  ),
  (
    "shift-and-sum, gradient, (8, 4096, 1024): time / copy",
    "shift_and_sum",
    1 / 0.4,
    _over_copy("gradient"),
  ),
  ("Dispatcher, training step: time / PyTorch", "training_step", 0.5, _step("usual")),
  (
    "hourglass, fixed 4, training step: time / no pooling",
    "hourglass",
    0.5,
    lambda report: report["variants"]["fixed 4"]["ratio"],
  ),
  (
    "SHE, l 128, B 64, gradient: time / attention, 32 heads",
    "causal_convolution",
    2.0,
    _she_over_attention,
  ),
)


# What a user gains: what, beside what, the report, and how the ratios of time and of
# memory are read from it; None where there is no such ratio.
GAINS: tuple[tuple[str, str, str, Callable | None, Callable | None], ...] = (
  (
    "shift-and-sum, T 4096, D 512, gradient",
    "its levels unrolled, JAX's own gradient",
    "shift_and_sum",
    _shift_and_sum("gradient", "ratio", 4096),
    _shift_and_sum("gradient", "temporary_mib", 4096),
  ),
  (
    "the same",
    "masked self-attention of one head, JAX's or ours in tiles",
    "shift_and_sum",
    _over_attention("milliseconds", 4096),
    _over_attention("temporary_mib", 4096),
  ),
  (
    "the same, T 16384",
    "likewise",
    "shift_and_sum",
    _over_attention("milliseconds", 16384),
    _over_attention("temporary_mib", 16384),
  ),
  (
    "6 Dispatcher layers, T 512, gradient",
    "unrolled",
    "shift_and_sum",
    lambda report: report["stack"]["mixers"]["recompute"]["ratio"],
    lambda report: report["stack"]["mixers"]["recompute"]["temporary_mib_ratio"],
  ),
  (
    "SHE, l 128, B 16, gradient",
    "the sum over the lags",
    "causal_convolution",
    _convolution(3, 128, 16, "plain"),
    _convolution(3, 128, 16, "plain", "temporary_mib"),
  ),
  (
    "WE, l 1024, gradient",
    "the sum over the lags",
    "causal_convolution",
    _convolution(2, 1024, 2, "plain"),
    _convolution(2, 1024, 2, "plain", "temporary_mib"),
  ),
  (
    "ME, l 4096, gradient",
    "a product with a Toeplitz matrix",
    "causal_convolution",
    _convolution(1, 4096, 1, "toeplitz"),
    _convolution(1, 4096, 1, "toeplitz", "temporary_mib"),
  ),
  ("pooling, T 2048, forward", "a one-hot matrix", "pooling", _pooling("pool", "forward"), None),
  ("pooling, backward", "likewise", "pooling", _pooling("pool", "backward"), None),
  ("up-sampling, forward", "likewise", "pooling", _pooling("upsample", "forward"), None),
  ("up-sampling, backward", "likewise", "pooling", _pooling("upsample", "backward"), None),
  (
    "middle layers at the capacity that is found",
    "padded to T + 1",
    "pooling",
    _middle("ratio"),
    _middle("temporary_mib_ratio"),
  ),
  (
    "relative attention in tiles, T 2048, gradient",
    "all weights at once",
    "attention",
    _tiles("ratio"),
    _tiles("temporary_mib_ratio"),
  ),
  (
    "a training step that pools words, T 2048",
    "12 layers without pooling",
    "hourglass",
    _hourglass("ratio"),
    _hourglass("temporary_mib_ratio"),
  ),
  (
    "a token of a Dispatcher with a cache, T 4096",
    "a pass over the window",
    "generation",
    _with_a_cache("dispatcher"),
    None,
  ),
)


def gains(folder: pathlib.Path = RESULTS) -> list[str]:
  """The rows of the table in docs/results.md, as Markdown."""
  rows = []
  for what, beside, name, read_time, read_memory in GAINS:
    cells = []
    for read in (read_time, read_memory):
      try:
        cells.append(f"{read(load(name, folder)):.2g}" if read else "-")
      except UNREADABLE:
        cells.append("?")
    rows.append(f"| {what} | {beside} | {' | '.join(cells)} |")
  return rows


def load(name: str, folder: pathlib.Path = RESULTS) -> dict:
  """A report; {} where there is none."""
  path = folder / f"{name}.json"
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def compare_with_bars(folder: pathlib.Path = RESULTS) -> list[dict]:
  """The bars and what the reports say of them; None where they do not."""
  reports = {name: load(name, folder) for name in NAMES}
  is_gpu = any(map(_is_gpu, reports.values()))
  rows = []
  for what, name, bar, read in GPU_BARS if is_gpu else BARS:
    try:
      found = read(reports[name])
    except UNREADABLE:
      found = None
    rows.append({"what": what, "report": name, "bar": bar, "found": found})
  return rows


def print_table(rows: list[dict]) -> None:
  for row in rows:
    found, verdict = "-", "not measured"
    if row["found"] is not None:
      found = f"{row['found']:.3f}"
      verdict = "met" if row["found"] <= row["bar"] else "NOT MET"
    print(f"{row['what']:58}{found:>8}  <= {row['bar']:<6.3g}{verdict}")


def run(name: str, folder: pathlib.Path | None, more: list[str]) -> bool:
  """Whether the benchmark came to its end; without a folder it is a quick one."""
  command = [sys.executable, str(FOLDER / f"{name}.py"), *more]
  command += ["--quick"] if folder is None else ["--out", str(folder / name)]
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
  parser.add_argument(
    "--folder", type=pathlib.Path, default=RESULTS, help="of the reports; results"
  )
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
    if not run(name, None if arguments.quick else arguments.folder, more):
      failed.append(name)
  if not arguments.quick:
    print_table(compare_with_bars(arguments.folder))
    heads = "\n| ours | beside | time | memory |\n|---|---|---|---|"
    print(heads, *gains(arguments.folder), sep="\n")
  if failed:
    sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
  main()
