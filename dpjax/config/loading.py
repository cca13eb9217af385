"""Reads the configurations of experiments and runs, and overrides from the command line."""

import contextlib
import copy
import hashlib
import importlib.machinery
import json
import os
import re
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dpjax import files
from dpjax.config import registry, sections
from dpjax.config.rules import check
from dpjax.config.setting import ConfigDict, Setting, Settings
from dpjax.errors import UserError, nearest, unknown_setting

CHECKSUMS = "checksums"  # in an exported run's config.json: the checksum of each file, by name


def load(experiment: str) -> ConfigDict:
  """The configuration of an experiment.

    load("quickstart")               a packaged experiment
    load("quickstart:tiny")          its variant "tiny"
    load("mine/experiment.py:wide")  get_config("wide") in a file
    load("runs/mine")                the settings of a run

  A packaged name is the packaged experiment, whatever lies in the working folder; a file is named
  by a suffix or a path, as "./experiment".

  Raises:
    UserError: the experiment does not exist, or it raises an error.
  """
  drive, path = os.path.splitdrive(os.path.expanduser(experiment))
  path, _, variant = path.partition(":")
  path = drive + path
  if path in _packaged():
    # A file here of the same name is not what this asks for, and would be executed.
    return _run_file(str(_folder() / f"{path}.py"), variant, is_packaged=True)
  if path and Path(path, "config.json").is_file():
    if variant:
      raise UserError(f"--config: expected a run's folder without a variant, got {experiment}")
    return of_run(Path(path))
  is_path = path != os.path.basename(path) or Path(path).suffix != ""
  if is_path and Path(path).is_file():
    return _run_file(path, variant, is_packaged=False)
  names = ", ".join(_packaged())
  near = nearest(path, _packaged())
  hint = f"; did you mean {near}?" if near else ""
  if not is_path and Path(path).is_file():
    hint = f"; a file is named by its path, {os.path.join(os.curdir, path)}"
  raise UserError(
    f"--config: expected a Python file, a run's folder, or one of {names}, got {path or 'none'}"
    f"{hint}"
  )


def _run_file(path: str, variant: str, is_packaged: bool) -> ConfigDict:
  """The configuration that a Python file's `get_config` gives."""
  try:
    with _importable(is_first=is_packaged):
      module = runpy.run_path(path, run_name="config")
      if "get_config" not in module:
        raise AttributeError("it has no attribute 'get_config'")
      get_config = module["get_config"]
      config = get_config(variant) if variant else get_config()
    if not isinstance(config, ConfigDict):
      raise TypeError(f"get_config() gave a value of type {type(config).__name__}")
    return config
  except (Exception, SystemExit) as error:  # User code can raise any error.
    message = " ".join(str(error).split())
    if not isinstance(error, UserError):
      expected = "expected a Python file whose get_config() gives a ConfigDict"
      message = f"{expected}, got {type(error).__name__}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" ({path}, line {lines[-1]})" if lines else ""
    raise UserError(f"--config: {message}{where}") from error


def _packaged() -> list[str]:
  """The names of the packaged experiments."""
  return sorted(file.stem for file in _folder().glob("*.py"))


def _folder() -> Path:
  """The folder of the packaged experiments: in the wheel, or beside the package in a clone."""
  package = Path(__file__).parents[1]
  wheel = package / "configs"
  return wheel if wheel.is_dir() else package.parent / "configs"


@contextlib.contextmanager
def _importable(is_first: bool) -> Iterator[None]:
  """Lets experiments import `configs`, both the packaged modules and the user's."""
  spec = importlib.machinery.PathFinder.find_spec("configs")
  theirs = []
  if spec is not None and spec.submodule_search_locations is not None:
    theirs = list(spec.submodule_search_locations)
  kept = {name: sys.modules.pop(name) for name in _modules()}
  package = types.ModuleType("configs")
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


def from_dict(settings: Settings) -> ConfigDict:
  """Builds a configuration from JSON values, with defaults for the rest; raises like `check`."""
  config = sections.fill(settings)
  check(config)
  return config


def digest(settings: Mapping) -> str:
  """SHA-256 of settings, regardless of white space in their file."""
  return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_settings(path: Path) -> dict:
  """The settings in a file of a run; a `UserError` if it cannot be read or was changed."""
  try:
    if not isinstance(content := files.load_json(path), dict):
      raise UserError(f"{type(content).__name__} for a dict of settings")
    sums = content.pop(CHECKSUMS, None)  # only in an exported run
    if sums is not None and (not isinstance(sums, dict) or sums.get(path.name) != digest(content)):
      raise UserError("settings that have changed since the export")
    return without_idle(content)
  except (OSError, ValueError) as error:
    raise UserError(f"workdir: expected a readable {path}, got: {error}") from error


def without_idle(settings: dict) -> dict:
  """Saved settings without values that have no effect, which today's checks refuse.

  Earlier versions took them: `hnet:mamba2,small` had model.middle_resize = padding without a
  middle. Who has such a run could neither load it nor change its settings.
  """
  model = settings.get("model")
  if not isinstance(model, dict):
    return settings
  settings = copy.deepcopy(settings)
  model = settings["model"]
  _clear_rotary_features(model)
  if model.get("middle") is None:
    model.pop("middle_resize", None)
  train = settings.get("train")
  is_pooled = model.get("boundaries") not in (None, "none", {"name": "none"})
  if isinstance(train, dict) and train.get("stage_multipliers") == "auto" and not is_pooled:
    del train["stage_multipliers"]
  return settings


def _clear_rotary_features(section: object) -> None:
  """Removes the rotary features of mixers without a rotary base, in all that a section holds."""
  inner = section if isinstance(section, list) else []
  if isinstance(section, dict):
    inner = section.values()
    if section.get("rotary_base") is None:
      section.pop("rotary_features", None)
  for each in inner:
    _clear_rotary_features(each)


def of_run(folder: Path) -> ConfigDict:
  """The configuration of a run, with a specific error for a missing plugin."""
  settings = read_settings(folder / "config.json")
  try:
    return from_dict(settings)
  except UserError as error:
    plugins = settings.get("plugins")
    names = map(str, plugins) if isinstance(plugins, list) else ()
    missing = [name for name in names if name not in sys.modules]
    if not missing:
      raise
    raise UserError(
      f"plugin: expected {' and '.join(missing)}, with which the run in {folder} was trained, "
      f"got none (--plugin={missing[0]}, or import {missing[0]} in Python): {error}"
    ) from error


def override(config: ConfigDict, words: Sequence[str]) -> tuple[ConfigDict, list[str]]:
  """Changes settings as --config.KEY=VALUE says; returns the configuration and the other words.

    --config.model.width=64 --noconfig.model.use_bias --config.model.mixer=we
    --config.model.mixer=we,attention --config.model.mixer.1.num_heads=4

  Components are chosen first, by name. Of several mixers, those that are already in the
  configuration keep their settings.

  Raises:
    UserError: a setting is unknown, or its value has the wrong type.
  """
  words = _choose_components(config, words)
  settings = {key: setting for key, _, setting in sections.walk(sections.fill(config))}
  others = []
  rest = iter(words)
  for word in rest:
    match = re.fullmatch(r"--?(no)?config\.([^=]*)(?:=(.*))?", word, re.DOTALL)
    if match is None:
      others.append(word)
      continue
    is_negated = match[1] is not None
    key, text = match.group(2, 3)
    if not key:
      raise UserError(f"{word}: expected --config.KEY=VALUE, got no key")
    if key not in settings:
      raise _unknown(config, settings, key)
    is_flag = settings[key].value_type is bool
    if is_negated and text is not None:
      raise UserError(f"--noconfig.{key}: expected no value, got {text or 'an empty one'}")
    if is_negated and not is_flag:
      raise UserError(f"{word}: expected a setting that is True or False, got {key}")
    if is_flag and is_negated:
      text = "False"
    elif is_flag and text is None:
      text = "True"
    elif text is None:
      text = next(rest, "")
    if key.endswith("middle"):
      expected = "expected it in a configuration file, by dpjax.config.middle"
      raise UserError(f"--config.{key}: {expected}, got {text}")
    sections.set_value(config, key, settings[key].parse(f"--config.{key}", text))
  return sections.fill(config, is_complete=True), others


def _choose_components(config: ConfigDict, words: Sequence[str]) -> list[str]:
  """Replaces the components that words choose by name; returns the other words."""
  others = list(words)
  nodes = sections.component_keys(sections.fill(config, is_complete=True))
  for key, node in nodes.items():
    others, choices = take(others, f"config.{key}", f"config.{key}.name")
    if not choices:
      continue
    name = choices[-1]
    if name == "none" and node.is_optional:
      section = None
    elif node.registry is registry.mixers and "," in name:
      before = sections.in_turn(key, sections.get(config, key)).values()
      known = {each["name"]: each for each in before}
      several = [known.get(each, each) for each in name.split(",")]
      section = sections.fill_component(node.registry, several, key)
    else:
      section = sections.fill_component(node.registry, name, key)
    sections.set_value(config, key, section)
  return others


def _unknown(config: ConfigDict, settings: Mapping[str, Setting], key: str) -> UserError:
  """The error for a section or an unknown setting, which names those of a component."""
  if inside := [name for name in settings if name.startswith(f"{key}.")]:
    return UserError(
      f"{key}: expected one of its settings, such as {inside[0]}, got the whole section"
    )
  section = key.rpartition(".")[0]
  names = sections.component_keys(config)
  if f"{section}.name" in settings and re.sub(r"\.\d+$", "", section) in names:
    owner = sections.get(config, section)["name"]
    return unknown_setting(key, [x for x in settings if x.startswith(section)], owner)
  return unknown_setting(key, settings)


def from_words(words: Sequence[str]) -> tuple[ConfigDict | None, list[str]]:
  """The configuration from --config=EXPERIMENT and --config.KEY=VALUE, and the other words."""
  words, experiments = take(words, "config")
  return override(load(experiments[-1]), words) if experiments else (None, words)


def take(words: Sequence[str], *names: str) -> tuple[list[str], list[str]]:
  """Removes --NAME=VALUE and --NAME VALUE from words; returns the others and the values."""
  others = []
  values = []
  rest = iter(words)
  for word in rest:
    flag, equals, value = word.partition("=")
    if flag.startswith("-") and flag.removeprefix("-").removeprefix("-") in names:
      values.append(value if equals else next(rest, ""))
    else:
      others.append(word)
  return others, values


def apply_variant(config: ConfigDict, variant: str) -> ConfigDict:
  """Applies the variant "tiny", which trains in a minute on a CPU; "" changes nothing."""
  if variant not in ("", "tiny"):
    raise UserError(f"expected the variant tiny, or none, got {variant}")
  if variant:
    config.model.update(num_layers=2, width=32, feed_forward_width=64, max_length=64)
    config.train.update(num_steps=50, num_epochs=0.0, eval_every_steps=25, eval_every_epochs=0.0)
    config.train.update(batch_size=8, learning_rate=1e-3)
    if "warmup_steps" in config.train.schedule:
      config.train.schedule.warmup_steps = 5
    config.sample.length = 20
  return config
