"""What the benchmarks share: a quiet allocator, interleaved timing, the machine."""

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# glibc maps a buffer of 32 MiB or more afresh for every call, and the page faults of
# that (about 7 ms for 32 MiB) hide what is measured. So: one heap that never shrinks.
ALLOCATOR = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(2**40),
  "MALLOC_TOP_PAD_": str(2**30),
}


def restart_with_quiet_allocator() -> None:
  """Starts the program again under `ALLOCATOR`, which is read at its start only."""
  if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR})


def describe_machine() -> dict[str, object]:
  """The processor, the cores this process may use, the versions, the command."""
  import jax

  model = platform.processor()
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo") as lines:
      names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
      model = names[0] if names else model
  return {
    "device": jax.devices()[0].device_kind,
    "processor": model,
    "cores": len(os.sched_getaffinity(0)),
    "jax": jax.__version__,
    "python": platform.python_version(),
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "allocator": ALLOCATOR,
    "load_average": os.getloadavg()[0],
  }


def measure(
  calls: Mapping[str, Callable[[], object]],
  repetitions: int,
  *,
  max_seconds: float = math.inf,
) -> dict[str, np.ndarray]:
  """Times the calls by turns, each starting a repetition as often as the others.

  Args:
    calls: by name; each is run to its end (results are waited for).
    repetitions: timed rounds, after one that is not.
    max_seconds: no further round is begun after so long, once there are three.

  Returns:
    By name, seconds of every repetition: [repetitions], fewer where the time was up.
    Under "page_faults", minor faults a repetition, all calls together.
  """
  import jax

  names = list(calls)
  seconds = {name: np.zeros(repetitions) for name in names}
  faults = np.zeros(repetitions)
  for name in names:
    jax.block_until_ready(calls[name]())
  begin, done = time.perf_counter(), 0
  for i in range(repetitions):
    if i >= 3 and time.perf_counter() - begin > max_seconds:
      break
    first = i % len(names)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for name in names[first:] + names[:first]:
      start = time.perf_counter()
      jax.block_until_ready(calls[name]())
      seconds[name][i] = time.perf_counter() - start
    faults[i] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    done = i + 1
  return {name: x[:done] for name, x in (seconds | {"page_faults": faults}).items()}


def compile_timed(function: Callable, *arguments: object) -> tuple[Any, float]:
  """The compiled function, and the seconds that tracing and compiling it took."""
  import jax

  start = time.perf_counter()
  compiled = jax.jit(function).lower(*arguments).compile()
  return compiled, time.perf_counter() - start


def temporary_mib(compiled: Any) -> float:
  """MiB beside arguments and results, by the compiler's plan."""
  return compiled.memory_analysis().temp_size_in_bytes / 2**20


def most_mib() -> float:
  """What a call may take of this machine: 6 tenths of its memory."""
  return 0.6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def ratio(seconds: np.ndarray, base: Sequence[float] | np.ndarray) -> float:
  """The median over repetitions of the paired ratio."""
  return float(np.median(seconds / np.asarray(base)))


def summarize(seconds: np.ndarray, base: np.ndarray) -> dict[str, float | list[float]]:
  """Median, quartiles and the ratio to `base`, as the reports hold them."""
  low, middle, high = (float(x) for x in np.percentile(seconds * 1e3, [25, 50, 75]))
  return {"milliseconds": middle, "quartiles": [low, high], "ratio": ratio(seconds, base)}
