"""Looks whether JAX computes rightly here, and how fast: dpjax doctor.

Exits with status 1 if something is wrong, and says what to try. --help tells of the flags that all
commands have.
"""

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from dpjax import __version__, versions
from dpjax.commands import flags as command_line

_PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin flax optax orbax-checkpoint numpy"
_OTHER_JAX = "try another version of jax"


def main() -> None:
  """Looks at everything, and says what is wrong."""
  command_line.start(command_line.Parser("doctor", __doc__), lambda _: _look())


def _look() -> None:
  from dpjax.training import profiling

  _show("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
  _show("dpjax", __version__)
  for package in _PACKAGES.split():
    with contextlib.suppress(metadata.PackageNotFoundError):
      _show(package, metadata.version(package))
  _show("devices", _devices())
  _show("memory", _memory())
  wrong = versions.defects()
  for name, check in (
    ("operators", _check_operators),
    ("product", _check_products),
    ("attention", _check_attention),
    ("compilation cache", _check_compilation_cache),
  ):
    try:
      message = check()
    except RuntimeError as error:  # XLA's are of this type.
      message = f"expected a result, got: {(str(error).splitlines() or [error])[0]}; {_OTHER_JAX}"
    _show(name, message or "right")
    wrong += [f"{name}: {message}"] * bool(message)
  for dtype in ("float32", "bfloat16"):
    _show(f"products, {dtype}", f"{profiling.product_rate(dtype) / 1e9:,.0f} Gflop/s on a device")
  if wrong:
    sys.exit("\n".join(["\nwrong:", *wrong]))
  print("\nall right")


def _show(name: str, text: str) -> None:
  print(f"{name:20}{text}", flush=True)


def _devices() -> str:
  import jax

  kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
  return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _memory() -> str:
  import jax

  from dpjax.training import profiling

  stats = jax.local_devices()[0].memory_stats() or {}  # None: of the machine's processor
  size, owner = stats.get("bytes_limit", 0), "of each device, for JAX"
  if not size:
    size, owner = profiling.machine_memory(), "of the machine"
  return f"{size / 2**30:.1f} GiB {owner}" if size else "unknown"


def _check_operators() -> str:
  """Operators outside of `jax.jit`, each a program of its own; a message if they are wrong."""
  import jax.numpy as jnp
  import numpy as np

  x = np.arange(1.0, 514.0, dtype=np.float32)
  return _compare("of 513 numbers", jnp.sqrt(jnp.asarray(x)) + 1, np.sqrt(x) + 1, 1e-5)


def _check_products() -> str:
  """Products of matrices, one so narrow that jaxlib 0.10.2 fails; a message if they are wrong."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from dpjax.ops import products

  for shape, columns, dtype, most in (
    ((3, 3), 32_803, "float32", 1e-4),
    ((131, 257), 67, "float32", 1e-4),
    ((131, 257), 67, "bfloat16", 1e-2),
  ):
    x, y = _draw(dtype, shape, (columns, shape[1]))
    # With a sum after it: a product alone may take another path.
    multiply = jax.jit(lambda x, y: jnp.sum(products.product("ij,kj->ik", x, y) ** 2, axis=0))
    with jax.default_matmul_precision("highest"):  # not a GPU's TF32
      found = multiply(x, y)
    expected = np.sum((np.asarray(x, np.float64) @ np.asarray(y, np.float64).T) ** 2, axis=0)
    name = f"of {[*shape]} and {[shape[1], columns]} in {dtype}"
    if message := _compare(name, found, expected, most):
      return message
  return ""


def _check_attention() -> str:
  """Causal attention, in tiles on a CPU; a message if it is wrong."""
  import jax
  import numpy as np

  from dpjax import ops

  shape = 2, 203, 3, 16
  queries, keys, values = _draw("float32", shape, shape, shape)
  with jax.default_matmul_precision("highest"):
    found = jax.jit(ops.causal_attention)(queries, keys, values)
  q, k, v = (np.float64(x) for x in (queries, keys, values))
  weights = np.exp(np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(shape[-1]))
  weights *= np.tri(shape[1])
  expected = np.einsum("bhts,bshe->bthe", weights / weights.sum(axis=-1, keepdims=True), v)
  return _compare(f"of {[*shape]} in float32", found, expected, 1e-4)


def _draw(dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
  import jax.numpy as jnp
  import numpy as np

  generator = np.random.default_rng(0)
  return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def _compare(name: str, found: Any, expected: Any, most: float) -> str:
  """A message unless the arrays are close."""
  import numpy as np

  away = np.max(np.abs(np.float64(found) - expected)) / np.max(np.abs(expected))
  if away <= most:
    return ""
  said = f"expected NumPy's numbers within {most:g}, got numbers {away:.2g} away"
  return f"{name}: {said}; {_OTHER_JAX}"


def _check_compilation_cache() -> str:
  """A message unless a program that was compiled before is found again."""
  import jax
  import jax.numpy as jnp
  from jax import monitoring

  hits = []

  def listen(event: str, **_: Any) -> None:
    hits.extend([event] * event.endswith("/cache_hits"))

  monitoring.register_event_listener(listen)
  try:
    with tempfile.TemporaryDirectory() as folder, _cache_in(folder), _without_stderr():
      for _ in range(2):  # A new function each time, which the process does not know yet.
        jax.jit(lambda x: jnp.cos(x) * 3)(jnp.ones(7)).block_until_ready()
  except OSError as error:
    return f"expected a folder for temporary files, got {error}; try another TMPDIR"
  finally:
    monitoring.unregister_event_listener(listen)
  if hits:
    return ""
  return f"expected a program to be found again, got it compiled twice; {_OTHER_JAX}"


@contextlib.contextmanager
def _cache_in(folder: str) -> Iterator[None]:
  """Keeps all that is compiled in a folder."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  settings = {
    "jax_compilation_cache_dir": folder,
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: jax.config.values[name] for name in settings}

  def choose(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the settings once.

  choose(settings)
  try:
    yield
  finally:
    choose(before)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
  """Hides what XLA writes of each program that it reads for a CPU (jax-ml/jax#38445)."""
  sys.stderr.flush()
  kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(null)
