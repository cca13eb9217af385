"""Experiments by name or by file."""

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from dpjax.errors import UserError
from dpjax.registry import ConfigDict


def load(experiment: str) -> ConfigDict:
  """The configuration of an experiment.

    load("quickstart")               a packaged one
    load("quickstart:tiny")          its variant
    load("mine/experiment.py:wide")  of a file: what its get_config("wide") gives

  Raises:
    UserError: there is no such experiment, or it raises an error.
  """
  path, _, variant = experiment.partition(":")
  packaged = _folder() / f"{path}.py"
  if not Path(path).exists() and packaged.parent == _folder() and packaged.exists():
    path = str(packaged)
  if not Path(path).is_file():
    names = ", ".join(sorted(file.stem for file in _folder().glob("*.py")))
    raise UserError(f"--config: expected a Python file or one of {names}, got {path or 'none'}")
  try:
    with _importable():
      module = runpy.run_path(path, run_name="config")
    if "get_config" not in module:
      raise AttributeError("it has no attribute 'get_config'")
    config = module["get_config"](*[variant] * bool(variant))
    if not isinstance(config, ConfigDict):
      raise TypeError(f"get_config() gave a value of type {type(config).__name__}")
    return config
  # The file is a program of the user's, with errors of any type.
  except Exception as error:
    if os.environ.get("DPJAX_TRACEBACK"):
      raise
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" ({path}, line {lines[-1]})" if lines else ""
    if isinstance(error, UserError):
      raise UserError(f"--config: {message}{where}") from error
    raise UserError(
      "--config: expected a Python file whose get_config() gives a ConfigDict, got "
      f"{type(error).__name__}: {message}{where}"
    ) from error


def _folder() -> Path:
  """Where the packaged experiments lie: in the wheel, or in a clone beside the package."""
  package = Path(__file__).parents[1]
  wheel = package / "configs"
  return wheel if wheel.is_dir() else package.parent / "configs"


@contextlib.contextmanager
def _importable() -> Iterator[None]:
  """Lets experiments import others, as `from configs import quickstart`."""
  place = str(_folder().parent)
  sys.path.append(place)
  try:
    yield
  finally:
    sys.path.remove(place)
