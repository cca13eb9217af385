"""Experiments by name or by file."""

import contextlib
import importlib.machinery
import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpjax.config import saved
from dpjax.errors import UserError
from dpjax.registry import ConfigDict


def load(experiment: str) -> ConfigDict:
  """The configuration of an experiment.

    load("quickstart")               a packaged one
    load("quickstart:tiny")          its variant
    load("mine/experiment.py:wide")  of a file: what its get_config("wide") gives
    load("runs/mine")                of a run: its settings

  Raises:
    UserError: there is no such experiment, or it raises an error.
  """
  path, _, variant = os.path.expanduser(experiment).partition(":")
  packaged = _folder() / f"{path}.py"
  if not Path(path).is_file() and packaged.parent == _folder() and packaged.is_file():
    path = str(packaged)
  if path and Path(path, "config.json").is_file():
    return saved.of_run(Path(path))
  if not Path(path).is_file():
    names = ", ".join(sorted(file.stem for file in _folder().glob("*.py")))
    raise UserError(
      f"--config: expected a Python file, a run's folder, or one of {names}, got {path or 'none'}"
    )
  try:
    with _importable(is_first=path == str(packaged)):
      module = runpy.run_path(path, run_name="config")
      if "get_config" not in module:
        raise AttributeError("it has no attribute 'get_config'")
      config = module["get_config"](*[variant] * bool(variant))
    if not isinstance(config, ConfigDict):
      raise TypeError(f"get_config() gave a value of type {type(config).__name__}")
    return config
  except Exception as error:  # A program of the user's, with errors of any type.
    message = " ".join(str(error).split())
    if not isinstance(error, UserError):
      expected = "expected a Python file whose get_config() gives a ConfigDict"
      message = f"{expected}, got {type(error).__name__}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" ({path}, line {lines[-1]})" if lines else ""
    raise UserError(f"--config: {message}{where}") from error


def _folder() -> Path:
  """The folder of the packaged experiments: in the wheel, or beside the package in a clone."""
  package = Path(__file__).parents[1]
  wheel = package / "configs"
  return wheel if wheel.is_dir() else package.parent / "configs"


@contextlib.contextmanager
def _importable(is_first: bool) -> Iterator[None]:
  """Lets experiments import `configs`: packaged ones, and the user's."""
  found = importlib.machinery.PathFinder.find_spec("configs")
  theirs = [*(found and found.submodule_search_locations or ())]
  kept = {name: sys.modules.pop(name) for name in _modules()}
  package: Any = types.ModuleType("configs")
  package.__path__ = [str(_folder()), *theirs] if is_first else [*theirs, str(_folder())]
  sys.modules["configs"] = package
  try:
    yield
  finally:
    for name in _modules():
      del sys.modules[name]
    sys.modules.update(kept)


def _modules() -> list[str]:
  return [name for name in sys.modules if name.partition(".")[0] == "configs"]
