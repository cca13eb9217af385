"""Names installed versions of JAX that are known to compute wrongly. Does not load JAX."""

import logging

_log = logging.getLogger(__name__)
_CUDA = (
  ("0.11.0", "0.11.1"),
  "operators outside of jax.jit gave wrong values and NaN on a GPU (jax-ml/jax#40633)",
)
# By package: versions, and what is wrong with them.
_DEFECTS = {
  "jaxlib": (
    ("0.10.2",),
    "some products of narrow matrices are wrong on a CPU (jax-ml/jax#39103)",
  ),
  "jax-cuda12-plugin": _CUDA,
  "jax-cuda13-plugin": _CUDA,
}


def defects() -> list[str]:
  """A line for each installed package that is known to compute wrongly."""
  from importlib import metadata  # slow to import

  found = []
  for package, (versions, about) in _DEFECTS.items():
    try:
      version = metadata.version(package)
    except metadata.PackageNotFoundError:
      continue
    if version in versions:
      found.append(f"{package} {version}: {about}; install another version of jax")
  return found


def warn() -> None:
  """Logs `defects`."""
  for line in defects():
    _log.warning(line)
