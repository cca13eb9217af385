"""Checks that JAX computes correctly here, and prints how fast it multiplies: dpjax doctor.

Exits with status 1 if a result is wrong, or an installed version is known to give wrong results.
--help lists the flags common to all commands.
"""

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import __version__, ops
from dpjax.commands.command_line import Parser, start
from dpjax.training import sharding

_PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin flax optax orbax-checkpoint numpy"
_CUDA = "outside of jax.jit, operators give wrong values and NaN on a GPU (jax-ml/jax#40633)"
# What is wrong with a version of a package.
_DEFECTS = {
  ("jaxlib", "0.10.2"): "products of narrow matrices are wrong on a CPU (jax-ml/jax#39103)",
  **dict.fromkeys([(f"jax-cuda{n}-plugin", f"0.11.{i}") for n in (12, 13) for i in (0, 1)], _CUDA),
}


def main(words: Sequence[str] | None = None) -> None:
  """Runs all checks, and lists those that fail."""
  start(Parser("doctor", __doc__), lambda _: _check_all(), words)


def _check_all() -> None:
  _print("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
  _print("dpjax", __version__)
  failures = []
  for package in _PACKAGES.split():
    with contextlib.suppress(metadata.PackageNotFoundError):
      version = metadata.version(package)
      _print(package, version)
      if defect := _DEFECTS.get((package, version)):
        failures.append(f"{package} {version}: {defect}; install another version of jax")
  _print("devices", _devices())
  checks = {
    "operators": _operators,
    "products": _products,
    "attention": _attention,
    "convolution": _convolution,
  }
  for name, check in checks.items():
    message = "right"
    try:
      if not (error := check()) <= 1e-4:
        message = f"expected NumPy's numbers, got a relative error of {error:.2g}"
    except RuntimeError as failure:  # XLA's errors have this type.
      message = f"expected a result, got: {(str(failure).splitlines() or [failure])[0]}"
    _print(name, message)
    if message != "right":
      failures.append(f"{name}: {message}; try another version of jax")
  for dtype in ("float32", "bfloat16"):
    _print(f"speed in {dtype}", f"{_gigaflops(dtype):,.0f} Gflop/s on a device")
  if failures:
    sys.exit("\n".join(["\nwrong:", *failures]))
  print("\nall right")


def _print(name: str, text: str) -> None:
  print(f"{name:20}{text}", flush=True)


def _devices() -> str:
  types = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
  counts = ", ".join(f"{types.count(x)} {x}" for x in dict.fromkeys(types))
  memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
  where = "each, for JAX" if memory else "of the machine"
  return f"{counts}, {(memory or sharding.machine_memory()) / 2**30:.1f} GiB {where}"


def _operators() -> float:
  """The error of operators outside of `jax.jit`, each a program of its own."""
  x = np.arange(1.0, 514.0, dtype=np.float32)
  return _error(jnp.sqrt(jnp.asarray(x)) + 1, np.sqrt(x) + 1)


def _products() -> float:
  """The error of two matrix products. jaxlib 0.10.2 computes the narrow one incorrectly."""
  errors = []
  for shape, columns in (((3, 3), 32_803), ((131, 257), 67)):
    x, y = _draw(shape, (columns, shape[1]))
    # Followed by a sum, since a product alone may take another path.
    multiply = jax.jit(lambda x, y: jnp.sum(jnp.einsum("ij,kj->ik", x, y) ** 2, axis=0))
    with jax.default_matmul_precision("highest"):  # not a GPU's TF32
      result = multiply(x, y)
    expected = np.sum((np.asarray(x, np.float64) @ np.asarray(y, np.float64).T) ** 2, axis=0)
    errors.append(_error(result, expected))
  return float(np.max(errors))


def _attention() -> float:
  """The error of causal attention, which is tiled on a CPU."""
  shape = 2, 203, 3, 16
  queries, keys, values = _draw(shape, shape, shape)
  with jax.default_matmul_precision("highest"):
    result = jax.jit(ops.causal_attention)(queries, keys, values)
  q, k, v = (np.float64(x) for x in (queries, keys, values))
  weights = np.exp(np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(shape[-1]))
  weights *= np.tri(shape[1])
  return _error(result, np.einsum("bhts,bshe->bthe", weights / weights.sum(-1, keepdims=True), v))


def _convolution() -> float:
  """The error of eight causal convolutions at once, in a process that is ended if they hang."""
  # Without the workaround in `ops.causal_convolution`, jaxlib 0.11.1 and 0.11.2 hang on a CPU.
  command = [sys.executable, "-c", _CONVOLUTIONS]
  # The memory of a GPU is taken by this process.
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  try:
    result = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS
    )
  except subprocess.TimeoutExpired:
    raise RuntimeError(f"no end within {_MOST_SECONDS} s") from None
  if result.returncode:
    raise RuntimeError((result.stderr.strip().splitlines() or ["no message"])[-1])
  try:
    return float(result.stdout.splitlines()[-1])  # Python's own start may print, too.
  except (IndexError, ValueError):
    raise RuntimeError(f"the output {result.stdout!r}") from None


_MOST_SECONDS = 120
_CONVOLUTIONS = """
import jax
import numpy as np
from dpjax import ops

rng = np.random.default_rng(0)
inputs = [np.float32(rng.standard_normal((4, 1000, 3 + i))) for i in range(8)]
filters = [np.float32(rng.standard_normal((1000, 3 + i))) for i in range(8)]
convolve = jax.jit(
  lambda xs, ws: [ops.causal_convolution(x, w, implementation="fft") for x, w in zip(xs, ws)]
)
for _ in range(20):
  results = jax.block_until_ready(convolve(inputs, filters))
errors = []
for x, w, y in zip(inputs, filters, results):
  product = np.fft.rfft(np.float64(x), 2000, axis=1) * np.fft.rfft(np.float64(w), 2000, axis=0)
  expected = np.fft.irfft(product, 2000, axis=1)[:, :1000]
  errors.append(np.max(np.abs(y - expected)) / np.max(np.abs(expected)))
print(np.max(errors))
"""


def _draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
  generator = np.random.default_rng(0)
  return [jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes]


def _error(result: jax.Array, expected: np.ndarray) -> float:
  return float(np.max(np.abs(np.float64(result) - expected)) / np.max(np.abs(expected)))


def _gigaflops(dtype: str, size: int = 2048) -> float:
  """The rate of a product of square matrices on one device, the maximum of a few runs."""
  multiply = jax.jit(jnp.matmul)
  x = jnp.ones((size, size), dtype)
  multiply(x, x).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    multiply(x, x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2e-9 * size**3 / min(seconds)
