"""Reads configurations: of experiments, by name or by file, and of runs."""

import contextlib
import hashlib
import importlib.machinery
import json
import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpjax import files, registry
from dpjax.config.checks import check
from dpjax.config.sections import COMPONENTS, check_type, default, flatten, middle, place
from dpjax.errors import UserError, unknown_setting
from dpjax.registry import ConfigDict

# Settings that may change on resume: they change the order of sums, rounding and the random
# numbers of dropout and drawn boundaries at most, and which checkpoint is the best. The length
# may change only where the schedule does not depend on it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
FREE_KEYS = tuple(
  """plugins data.data_dir data.manual_dir model.remat model.scan_layers train.accumulate_steps
  train.checkpoint_every_steps train.eval_every_ train.keep_checkpoints train.log_every_steps
  train.parameters train.patience eval. sample.""".split()
)
CHECKSUMS = "checksums"  # in the config.json of an exported run, of each file by name
FREE_NAMES = ("implementation", "num_capacities")  # of components


def load(experiment: str) -> ConfigDict:
  """The configuration of an experiment.

    load("quickstart")               a packaged one
    load("quickstart:tiny")          its variant
    load("mine/experiment.py:wide")  of a file: what its get_config("wide") gives
    load("runs/mine")                of a run: its settings

  Raises:
    UserError: there is no such experiment, or it raises an error.
  """
  drive, path = os.path.splitdrive(os.path.expanduser(experiment))
  path, _, variant = path.partition(":")
  path = drive + path
  packaged = _folder() / f"{path}.py"
  if not Path(path).is_file() and packaged.parent == _folder() and packaged.is_file():
    path = str(packaged)
  if path and Path(path, "config.json").is_file():
    if variant:
      raise UserError(f"--config: expected a run's folder without a variant, got {experiment}")
    return of_run(Path(path))
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
  except (Exception, SystemExit) as error:  # A program of the user's, with errors of any type.
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


def from_dict(settings: Mapping) -> ConfigDict:
  """Reads a configuration from JSON values, with defaults for the rest; raises as `check`."""
  config = _fill(default(), settings)
  check(config)
  return config


def digest(settings: Mapping) -> str:
  """SHA-256 of settings, whatever the white space between them."""
  return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_settings(path: Path) -> dict:
  """The settings in a file of a run; a `UserError` if it cannot be read or was changed."""
  try:
    if not isinstance(content := files.load_json(path), dict):
      raise UserError(f"{type(content).__name__} for a dict of settings")
    sums = content.pop(CHECKSUMS, None)  # of an exported run
    if sums is not None and (not isinstance(sums, dict) or sums.get(path.name) != digest(content)):
      raise UserError("others than were exported")
    return content
  except (OSError, ValueError) as error:
    raise UserError(f"workdir: expected a readable {path}, got: {error}") from error


def of_run(folder: Path) -> ConfigDict:
  """The configuration of a run, with a message of its own for a missing plugin."""
  settings = read_settings(folder / "config.json")
  try:
    return from_dict(settings)
  except UserError as error:
    plugins = settings.get("plugins")
    plugins = plugins if isinstance(plugins, list) else []
    missing = [str(name) for name in plugins if str(name) not in sys.modules]
    if not missing:
      raise
    raise UserError(
      f"plugin: expected {' and '.join(missing)}, with which the run in {folder} was trained, "
      f"got none (--plugin={missing[0]}, or import {missing[0]} in Python): {error}"
    ) from error


def _fill(config: ConfigDict, settings: Mapping, prefix: str = "") -> ConfigDict:
  for name, value in settings.items():
    key = f"{prefix}{name}"
    if name not in config:
      raise unknown_setting(key, flatten(default()))
    if place(key) == "model.middle" and isinstance(value, Mapping):
      config[name] = middle()
    if place(key) in COMPONENTS and isinstance(value, Mapping):
      config[name] = COMPONENTS[place(key)].from_dict(value, key)
    elif COMPONENTS.get(place(key)) is registry.mixers and isinstance(value, list | tuple):
      check_type(key, value, config[name])
      several = registry.in_turn(key, value).items()
      config[name] = tuple(registry.mixers.from_dict(x, own) for own, x in several)
    elif isinstance(config[name], ConfigDict) and isinstance(value, Mapping):
      _fill(config[name], value, f"{key}.")
    else:
      value = registry.as_tuple(value)
      check_type(key, value, config[name])
      config[name] = value
  return config


def differences(old: Mapping, new: Mapping) -> list[str]:
  """The settings that keep `new` from resuming a run of `old`: `key: old there, new here`."""
  there, here = flatten(_fill(default(), old)), flatten(new)
  is_unbounded = here.get("train.schedule.name") == "constant"
  free = FREE_KEYS + LENGTH_KEYS if is_unbounded else FREE_KEYS
  return [
    f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
    for key in sorted(there.keys() | here.keys())
    if there.get(key) != here.get(key)
    and not key.startswith(free)
    and key.rpartition(".")[2] not in FREE_NAMES
  ]
