"""Reads run folders for figures, and names the runs. Does not load JAX."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpjax import files
from dpjax.errors import UserError

# Settings that say how a run reports or is computed. Runs are named after the seed only where
# they differ in no other setting, and after these only where the seed is the same, too.
REPORTING = (
  "model.vocab_size",
  "model.scan_layers",
  "model.remat",
  *(
    f"train.{name}"
    for name in (
      "num_steps",
      "num_epochs",
      "log_every_steps",
      "median_every_steps",
      "eval_every_steps",
      "eval_every_epochs",
      "checkpoint_every_steps",
      "keep_checkpoints",
      "parameters",
    )
  ),
)
_MOST_IN_A_NAME = 3


class Record(NamedTuple):
  """A run as figures need it.

  Attributes:
    folder: as given.
    config: its settings.
    losses: [N], float32, the loss of every update in nats per token; NaN if unknown.
    label: the run's label; several runs may share it.
    scores: every logged score, as "valid/bits_per_character" -> {update: value}.
  """

  folder: str
  config: Mapping[str, Any]
  losses: np.ndarray
  label: str
  scores: Mapping[str, Mapping[int, float]] = {}


def read_runs(workdirs: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[Record]:
  """Reads run folders.

  Args:
    workdirs: the folders.
    labels: one for each run; None takes those of `label`.

  Returns:
    One run for each folder, in order.

  Raises:
    ValueError: a folder cannot be read, or the number of labels differs.
  """
  if labels is not None and len(labels) != len(workdirs):
    raise UserError(f"labels: expected one for each of the {len(workdirs)} runs, got {len(labels)}")
  runs = []
  for i, workdir in enumerate(workdirs):
    losses, config = read_losses(workdir), read_config(workdir)
    text = label(config) if labels is None else labels[i]
    runs.append(Record(str(workdir), config, losses, text, read_scores(workdir)))
  return runs


def read_losses(workdir: str | Path) -> np.ndarray:
  """Reads the loss of every update of a run, update 1 first.

  Args:
    workdir: the run's folder.

  Returns:
    [N], float32, nats per token; NaN if unknown.

  Raises:
    ValueError: there is no such folder or file, or the file is damaged.
  """
  content = _read(workdir, "losses.f32")
  if len(content) % 4:
    raise UserError(
      f"workdir: expected 4 bytes an update in {Path(workdir) / 'losses.f32'}, got "
      f"{len(content)} bytes"
    )
  return np.frombuffer(content, "<f4").astype(np.float32)


def read_config(workdir: str | Path) -> dict[str, Any]:
  """Reads the settings in a run's folder.

  Raises:
    ValueError: there is no such folder or file, or it holds no settings.
  """
  try:
    config = _read(workdir, "config.json", files.load_json)
  except UserError:
    raise
  except ValueError as error:
    path = Path(workdir) / "config.json"
    raise UserError(f"workdir: expected JSON in {path}, got: {error}") from error
  sections = ("model", "data", "train")
  if not isinstance(config, dict) or not all(
    isinstance(config.get(section, {}), dict) for section in sections
  ):
    path = Path(workdir) / "config.json"
    raise UserError(f"workdir: expected the settings of a run in {path}, got others")
  return config


def read_scores(workdir: str | Path) -> dict[str, dict[int, float]]:
  """Reads the scores that a run logged in `metrics.jsonl`.

    {"step": 20, "split": "valid", "time": 9.5, "perplexity": 7.5}
      ->  {"valid/perplexity": {20: 7.5}}

  Lines that cannot be parsed are skipped: the last line of a run in training may be incomplete.

  Returns:
    The scores by name and update; empty without the file.
  """
  path = Path(workdir) / "metrics.jsonl"
  scores: dict[str, dict[int, float]] = {}
  for line in path.read_bytes().splitlines() if path.is_file() else []:
    try:
      content = json.loads(line)
      step, split = content["step"], content["split"]
    except (ValueError, TypeError, KeyError, RecursionError):
      continue
    for name, value in content.items():
      if name not in ("step", "time") and type(value) in (int, float):
        scores.setdefault(f"{split}/{name}", {})[step] = value
  return scores


def label(config: Mapping[str, Any]) -> str:
  """Names a run after its token mixer.

    >>> label({"model": {"mixer": {"name": "attention", "num_heads": 32}}})
    'attention, 32 heads'
    >>> label({"model": {"mixer": {"name": "we", "output_projection": False}}})
    'WE, no output projection'

  Args:
    config: the settings of a run.

  Returns:
    The name, followed by settings that differ from the mixer's usual form.

  Raises:
    ValueError: the settings name no mixer.
  """
  settings = setting(config, "model.mixer")
  if isinstance(settings, str):  # Of version 0.1, where the model has them.
    settings = {**config["model"], "name": settings}
  mixer = settings.get("name") if isinstance(settings, Mapping) else settings
  if not isinstance(settings, Mapping) or not isinstance(mixer, str):
    raise UserError(f"model.mixer: expected the name of a token mixer, got {mixer}")
  if mixer in ("she", "he", "we", "me"):
    without = [
      part.replace("_", " ")
      for part in ("adjustment", "output_projection")
      if settings.get(part) is False
    ]
    name = mixer.upper()
    if len(without) == 2:
      return f"{name}, extraction alone"
    return f"{name}, no {without[0]}" if without else name
  names = {"dispatcher": "Dispatcher", "dispatcher_multihead": "multi-head Dispatcher"}
  name, heads = names.get(mixer, mixer), settings.get("num_heads")
  if mixer == "attention" or heads not in (1, None):
    name += f", {heads} {'head' if heads == 1 else 'heads'}"
  return name


def distinct_labels(runs: Sequence[Record]) -> list[str]:
  """Makes labels unique by appending the settings that differ between runs with the same label.

    SHE of learning rates 0.1 and 0.2, and HE
      ->  "SHE, learning rate 0.1", "SHE, learning rate 0.2", "HE"

  If many settings differ, those with the most values are named; if none does, the folders
  are.
  """
  names: list[str] = [""] * len(runs)

  def name(numbers: list[int], given: Sequence[str]) -> None:
    for same in _grouped(given, numbers).values():
      chosen = _telling([runs[i] for i in same]) if len(same) > 1 else {}
      texts = [names[i] or runs[i].label for i in same]
      for j, i in enumerate(same):
        parts = [_say(key, values[j]) for key, values in chosen.items()]
        names[i] = ", ".join([texts[j], *parts])
      if len({names[i] for i in same}) > 1:
        name(same, [names[i] for i in same])
      elif len(same) > 1:
        for i in same:
          names[i] += f" ({runs[i].folder})"

  name([*range(len(runs))], [run.label for run in runs])
  return names


def by_seed(runs: Sequence[Record]) -> list[list[Record]]:
  """Groups runs that differ only in the seed, in the order of their first member."""
  keys = [
    (run.label, json.dumps({**run.config, "seed": None}, sort_keys=True, default=str))
    for run in runs
  ]
  groups = []
  for group in _grouped(keys, runs).values():
    seeds = {json.dumps(run.config.get("seed")) for run in group}
    # Of two runs with the same seed, one is no further sample.
    groups += [group] if len(seeds) == len(group) else [[run] for run in group]
  return groups


def differences(runs: Sequence[Record]) -> dict[str, list[Any]]:
  """The settings in which runs differ, with the value in each run; None if a run lacks it."""
  configs = [*map(_flat, _of_one_version([run.config for run in runs]))]
  keys = sorted({key for config in configs for key in config})
  columns = {
    key: [config.get(key) for config in configs]
    for section in ("seed.", "model.", "data.", "train.")
    for key in keys
    if f"{key}.".startswith(section)
  }
  return {key: column for key, column in columns.items() if len({*map(json.dumps, column)}) > 1}


def setting(config: Mapping[str, Any], key: str) -> Any:
  """The value of a dotted key; None if it is missing."""
  value: Any = config
  for part in key.split("."):
    value = value.get(part) if isinstance(value, Mapping) else None
  return value


def is_of(key: str, places: Sequence[str]) -> bool:
  """Whether a setting is one of these, or lies in one of these sections."""
  return f"{key}.".startswith(tuple(f"{place}." for place in places))


def _telling(runs: Sequence[Record]) -> dict[str, list[Any]]:
  """The few settings that distinguish the runs best."""
  found = differences(runs)
  # Another component has other settings; its name says it all.
  sections = [key.removesuffix(".name") for key in found if key.endswith(".name")]
  found = {
    key: values
    for key, values in found.items()
    if key.endswith(".name") or not is_of(key, sections)
  }
  tiers: list[dict[str, list[Any]]] = [{}, {}, {}]
  for key, values in found.items():
    tiers[1 if key == "seed" else 2 if is_of(key, REPORTING) else 0][key] = values
  telling = next((tier for tier in tiers if tier), {})
  most_values = sorted(telling, key=lambda key: -len({*map(json.dumps, telling[key])}))
  return {key: telling[key] for key in most_values[:_MOST_IN_A_NAME]}


def _say(key: str, value: Any) -> str:
  """A setting for a legend: "learning rate 0.1", "boundaries gumbel"."""
  name = (key.partition(".")[2] or key).removesuffix(".name").removeprefix("mixer.")
  text = value if isinstance(value, str) else json.dumps(value)
  return f"{name.replace('.', ' ').replace('_', ' ')} {'unset' if value is None else text}"


def _grouped(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, list[Any]]:
  groups: dict[Any, list[Any]] = {}
  for key, value in zip(keys, values, strict=True):
    groups.setdefault(key, []).append(value)
  return groups


def _of_one_version(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Renames settings of version 0.1 if some runs have today's names."""
  is_old = [isinstance(setting(config, "model.mixer"), str) for config in configs]
  if all(is_old) or not any(is_old):
    return [*configs]
  from dpjax.config import from_dict  # Loads JAX, which else is not needed.

  try:
    return [
      from_dict(config).to_dict() if old else config
      for config, old in zip(configs, is_old, strict=True)
    ]
  except UserError:  # They are another program's.
    return [*configs]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Settings by their full names, like `dpjax.config.flatten`."""
  flat = {}
  for key, value in settings.items():
    more = isinstance(value, Mapping)
    flat |= _flat(value, f"{prefix}{key}.") if more else {f"{prefix}{key}": value}
  return flat


def _read(workdir: str | Path, name: str, read: Callable[[Path], Any] = Path.read_bytes) -> Any:
  path = Path(workdir) / name
  if not Path(workdir).is_dir():
    raise UserError(f"workdir: expected the folder of a run, got {workdir}")
  try:
    return read(path)
  except OSError as error:
    raise UserError(f"workdir: expected to read {path}, got: {error.strerror}") from error
