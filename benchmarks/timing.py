"""What the benchmarks share: a quiet allocator, interleaved timing, the machine."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence

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
    os.execve(
      sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR}
    )


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
  calls: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, np.ndarray]:
  """Times the calls by turns, each starting a repetition as often as the others.

  Args:
    calls: by name; each is run to its end (results are waited for).
    repetitions: timed rounds, after one that is not.

  Returns:
    By name, seconds of every repetition: [repetitions]. Under "page_faults", minor
    faults a repetition, all calls together.
  """
  import jax

  names = list(calls)
  seconds = {name: np.zeros(repetitions) for name in names}
  faults = np.zeros(repetitions)
  for name in names:
    jax.block_until_ready(calls[name]())
  for i in range(repetitions):
    first = i % len(names)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for name in names[first:] + names[:first]:
      start = time.perf_counter()
      jax.block_until_ready(calls[name]())
      seconds[name][i] = time.perf_counter() - start
    faults[i] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
  return seconds | {"page_faults": faults}


def ratio(seconds: np.ndarray, base: Sequence[float] | np.ndarray) -> float:
  """The median over repetitions of the paired ratio."""
  return float(np.median(seconds / np.asarray(base)))
