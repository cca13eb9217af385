"""Times programs in turn; shared by the benchmarks.

A case has programs that do the same work, one of which is its base. They run in turn, round by
round, first with the machine to themselves and then beside a neighbour, a process that copies
memory on one core. A ratio is the median over rounds of a program's time over the base's.

A report is JSON: for each part the machine, the command and the cases,

  {"case": "gradient, B 4 T 512 D 512", "base": "unrolled", "rows": {"loop": {
    "temporary_mib": 57.1, "compile_seconds": 0.4,
    "quiet": {"milliseconds": 21.0, "quartiles": [20.8, 21.5], "ratio": 0.9}, "busy": {...}}}}

with a table on the terminal and a figure beside the file. Parts of an earlier report that are not
measured again are kept, each with the machine that measured it.
"""

import argparse
import concurrent.futures as futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

# By default glibc maps a new buffer of 32 MiB or more for every call, and the page faults (about
# 7 ms for 32 MiB) hide what is measured. With these, the heap never shrinks.
ALLOCATOR = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(2**40),
  "MALLOC_TOP_PAD_": str(2**30),
}
NEIGHBOUR = """
import os
import numpy as np
if hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
x = np.zeros(2**25)
y = x.copy()
print("ready", flush=True)
while True:
  np.copyto(y, x)
"""
LEAST_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Program:
  """A program to time.

  Attributes:
    run: runs it once to completion, and returns the seconds.
    facts: what the report says about it besides times.
  """

  run: Callable[[], float]
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
  """Programs to compare.

  Attributes:
    name: says what they compute.
    base: the program that ratios are relative to.
    programs: the programs by name; a string says why one is left out.
    sizes: what the report says about the work besides its name.
  """

  name: str
  base: str
  programs: Mapping[str, Program | str]
  sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def compiled(function: Callable, *arguments: Any, max_mib: float | None = None) -> Program | str:
  """Compiles a function for these arguments; returns why not if it needs too much memory.

  Args:
    function: what the program computes.
    *arguments: its arguments.
    max_mib: the most temporary memory, MiB; None is 60% of the machine's memory.
  """
  import jax

  start = time.perf_counter()
  executable = jax.jit(function).lower(*arguments).compile()
  seconds = time.perf_counter() - start
  mib = executable.memory_analysis().temp_size_in_bytes / 2**20
  if max_mib is None:
    max_mib = 0.6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
  if mib > max_mib:
    return too_large(mib)
  facts = {"temporary_mib": mib, "compile_seconds": seconds}

  def run(calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
      result = executable(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls

  if jax.default_backend() != "cpu":  # Calls are accepted while the previous one is computed.
    run()
    calls = max(1, min(20, int(0.02 / run())))
    return Program(lambda: run(calls), facts)
  return Program(run, facts)


def too_large(mib: float) -> str:
  """Says why a program is left out that needs this much temporary memory."""
  return f"needs {mib / 1024:.1f} GiB of temporary memory"


def compile_all(functions: Mapping[str, Callable], *arguments: Any) -> dict[str, Program | str]:
  """Applies `compiled` to each function; for an accelerator, on all cores of its host at once."""
  import jax

  is_cpu = jax.default_backend() == "cpu"
  with futures.ThreadPoolExecutor(1 if is_cpu else os.cpu_count()) as pool:
    found = pool.map(lambda function: compiled(function, *arguments), functions.values())
    return dict(zip(functions, found, strict=True))


class Process:
  """A program in a separate process, which answers lines of JSON (`serve`).

  Args:
    command: the arguments of the interpreter.
    environment: variables besides this process's and `ALLOCATOR`.
  """

  def __init__(self, command: Iterable[str], environment: Mapping[str, str] | None = None):
    self._process = subprocess.Popen(
      [sys.executable, *command],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, **ALLOCATOR, **(environment or {})},
    )

  def read(self) -> dict[str, Any]:
    """Reads its next line.

    Raises:
      RuntimeError: it has ended.
    """
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"a process ended with status {self._process.wait()}")
    return json.loads(line)

  def ask(self, question: str = "run") -> dict[str, Any]:
    """Sends a line, and returns the answer."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(question + "\n")
      self._process.stdin.flush()
    return self.read()

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()


def serve(facts: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]) -> None:
  """Prints the facts of a program, then the result of one run for every line read."""
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    print(json.dumps(run()), flush=True)


def peak_mib() -> float:
  """The peak memory of this process, MiB."""
  import resource  # Unix only

  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == "darwin" else 2**10)


def draw_text(batch: int, length: int, vocab_size: int) -> np.ndarray:
  """[B, T + 1], random ids, the same in every process."""
  generator = np.random.default_rng(0)
  return generator.integers(0, vocab_size, (batch, length + 1)).astype(np.int32)


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
  """A process that copies memory on one core for the duration of the block."""
  with subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE) as process:
    try:
      process.stdout.readline()
      yield
    finally:
      process.kill()


def take_turns(
  programs: Mapping[str, Program], rounds: int, max_seconds: float
) -> dict[str, np.ndarray]:
  """The seconds of every round, [rounds]; no round begins after `max_seconds`."""
  names = [*programs]
  seconds: dict[str, list[float]] = {name: [] for name in names}
  begin = time.perf_counter()
  for number in range(rounds):
    if number >= LEAST_ROUNDS and time.perf_counter() - begin > max_seconds:
      break
    first = number % len(names)
    for name in names[first:] + names[:first]:
      seconds[name].append(programs[name].run())
  return {name: np.array(x) for name, x in seconds.items()}


def conditions_of_device() -> tuple[str, ...]:
  """The conditions to measure: a neighbour on the CPU does not disturb an accelerator."""
  import jax

  return ("quiet", "busy") if jax.default_backend() == "cpu" else ("quiet",)


def compare(
  case: Case, *, rounds: int, max_seconds: float, conditions: Iterable[str] = ("quiet", "busy")
) -> dict[str, Any]:
  """Measures a case, and returns its entry in the report.

  Args:
    case: the programs.
    rounds: the number of rounds in each condition.
    max_seconds: see `take_turns`; a program whose first run takes a third of it is left out,
      unless it is the base.
    conditions: some of "quiet" and "busy".

  Raises:
    RuntimeError: the base is left out.
  """
  rows: dict[str, dict[str, Any]] = {}
  programs = {}
  for name, program in case.programs.items():
    if isinstance(program, str):
      rows[name] = {"left_out": program}
      continue
    seconds = program.run()
    rows[name] = dict(program.facts)
    if name != case.base and seconds > max_seconds / LEAST_ROUNDS:
      rows[name]["left_out"] = f"a run takes {seconds:.1f} s"
    else:
      programs[name] = program
  if case.base not in programs:
    raise RuntimeError(f"{case.name}: {case.base} {rows[case.base]['left_out']}")
  for condition in conditions:
    with contextlib.nullcontext() if condition == "quiet" else neighbour():
      seconds = take_turns(programs, rounds, max_seconds)
    for name, times in seconds.items():
      low, middle, high = (float(x) for x in np.percentile(times * 1e3, [25, 50, 75]))
      rows[name][condition] = {
        "milliseconds": middle,
        "quartiles": [low, high],
        "ratio": float(np.median(times / seconds[case.base])),
      }
  return {"case": case.name, "base": case.base, **case.sizes, "rows": rows}


def product_rate(dtype: str) -> float:
  """Operations per second of a large matrix product on one device, the maximum of a few runs.

  The size of the square matrices doubles from 1,024 until a product takes 20 ms, or to 8,192.
  """
  import jax
  import jax.numpy as jnp

  multiply = jax.jit(jnp.matmul)

  def seconds(x: jax.Array) -> float:
    start = time.perf_counter()
    multiply(x, x).block_until_ready()
    return time.perf_counter() - start

  for size in (1024, 2048, 4096, 8192):
    x = jnp.ones((size, size), dtype)
    seconds(x)  # compiles
    if seconds(x) > 0.02:
      break
  return 2 * size**3 / min(seconds(x) for _ in range(9))


def describe_machine() -> dict[str, Any]:
  """The device, the processor and its rate, its cores, the versions and the allocator.

  Processors of one name may be generations apart: the family, the model, and the rates of a large
  product identify it.
  """
  import jax

  facts = {}
  with contextlib.suppress(OSError):
    lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = dict([part.strip() for part in line.split(":", 1)] for line in lines)
  flags = facts.get("flags", "").split()
  rates = {x: round(product_rate(x) / 1e9) for x in ("float32", "bfloat16")}
  return {
    "device": jax.devices()[0].device_kind,
    "processor": facts.get("model name", platform.processor()),
    "family_and_model": [facts.get(name) for name in ("cpu family", "model")],
    "instructions": [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if x in flags],
    "gflops_of_products": rates,
    "cores": os.cpu_count(),
    "jax": jax.__version__,
    "python": platform.python_version(),
    "allocator": ALLOCATOR,
    "load_average": os.getloadavg()[0],
  }


def table(entry: Mapping[str, Any]) -> str:
  """Formats the entry of a case as a Markdown table."""
  lines = [f"{entry['case']} (ratios to {entry['base']})", ""]
  lines += [
    "| program | ms | ratio | beside a neighbour | MiB | compiled in |",
    "|---|" + "---:|" * 5,
  ]
  for name, row in entry["rows"].items():
    if "left_out" in row:
      lines.append(f"| {name} | {row['left_out']} | | | | |")
      continue
    quiet, busy = (row.get(x, {}) for x in ("quiet", "busy"))
    cells = [quiet.get("milliseconds"), quiet.get("ratio"), busy.get("ratio")]
    cells += [row.get("temporary_mib"), row.get("compile_seconds")]
    lines.append(f"| {name} | {' | '.join('-' if x is None else f'{x:.3g}' for x in cells)} |")
  return "\n".join([*lines, ""])


def draw_ratios(report: Mapping[str, Any], path: pathlib.Path) -> None:
  """Bars of all ratios, a panel for each case."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  from dpjax.analysis import style

  entries = [entry for part in report["parts"].values() for entry in part["cases"]]
  with style.applied():
    columns = min(3, len(entries))
    rows = -(-len(entries) // columns)
    figure, axes = pyplot.subplots(
      rows, columns, figsize=(6 * columns, 2.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(entries) :]:
      axis.remove()
    for axis, entry in zip(axes.flat, entries, strict=False):
      names = [*entry["rows"]]
      for shift, condition in ((-0.2, "quiet"), (0.2, "busy")):
        found = [entry["rows"][name].get(condition, {}).get("ratio", 0) for name in names]
        places = [place + shift for place in range(len(names))]
        axis.barh(places, found, 0.38, label="alone" if condition == "quiet" else "with neighbour")
      axis.axvline(1, color="gray", linewidth=0.5)
      axis.set_yticks(range(len(names)), names, fontsize=7)
      axis.invert_yaxis()
      axis.set_title(f"{entry['case']}: time / {entry['base']}", fontsize=7, loc="left")
    axes.flat[0].legend(fontsize=7)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(
  description: str,
  parts: Mapping[str, Callable[[bool], Iterable[Case]]],
  *,
  name: str,
  rounds: int = 9,
  max_seconds: float = 30.0,
  conditions: Iterable[str] = (),
  draw: Callable[[Mapping[str, Any], pathlib.Path], None] = draw_ratios,
) -> None:
  """A benchmark's command line: measures parts, prints tables, writes a report.

  Args:
    description: the benchmark's docstring.
    parts: functions by name that return cases, small ones if the argument is true.
    name: the name of the report in results/.
    rounds: see `compare`.
    max_seconds: see `compare`.
    conditions: see `compare`; () for all that the device has.
    draw: writes the figure of a report.
  """
  parser = argparse.ArgumentParser(description=description.splitlines()[0])
  parser.add_argument(
    "--out", help=f"path without suffix; results/{name}, or nothing is written with --quick"
  )
  parser.add_argument("--quick", action="store_true", help="small cases, three rounds")
  parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each condition")
  parser.add_argument("--parts", default=",".join(parts), help=",".join(parts))
  parser.add_argument(
    "--as_installed", action="store_true", help="with glibc's defaults, as users run programs"
  )
  arguments = parser.parse_args()
  if arguments.rounds < 1:
    parser.error(f"--rounds: expected at least 1, got {arguments.rounds}")
  if arguments.as_installed:
    ALLOCATOR.clear()
  elif any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):
    # The allocator reads them when a program starts.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR})
  chosen = arguments.parts.split(",")
  if unknown := [part for part in chosen if part not in parts]:
    parser.error(f"--parts: expected some of {', '.join(parts)}, got {', '.join(unknown)}")
  out = pathlib.Path(arguments.out or f"results/{name}")
  is_written = arguments.out or not arguments.quick
  path = out.with_suffix(".json")
  report: dict[str, Any] = {"parts": {}}
  if is_written and path.exists():
    report = json.loads(path.read_text(encoding="utf-8"))
  for part in chosen:
    command = " ".join(["python", *sys.orig_argv[1:]])
    report["parts"][part] = {"command": command, "machine": describe_machine(), "cases": []}
    for case in parts[part](arguments.quick):
      rounds = LEAST_ROUNDS if arguments.quick else arguments.rounds
      entry = compare(
        case,
        rounds=rounds,
        max_seconds=max_seconds,
        conditions=conditions or conditions_of_device(),
      )
      report["parts"][part]["cases"].append(entry)
      print(table(entry), flush=True)
      if is_written:
        out.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
  if is_written and importlib.util.find_spec("matplotlib"):
    draw(report, out.with_suffix(".png"))
