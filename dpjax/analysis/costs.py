"""Training costs of runs, read from their folders: medians, and a table of them.

Source: "Attention Is Not All You Need Anymore", Sec. 6.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpjax.errors import UserError

FIGURES = ("curves", "every_batch", "by_length", "by_layers")


# Where a line of the figures "by ..." has its points, and the name of that axis.
PLACES = {
  "by_length": ("model.max_length", "context window (tokens)"),
  "by_layers": ("model.num_layers", "layers"),
}


# What runs may differ in and still be compared: the mixer and its parts, what changes no
# result, and how a run reports. With a section goes all that is in it; those of the model
# that have no section were settings of version 0.1.
_FREE = (
  "model.mixer",
  "model.vocab_size",
  "model.scan_layers",
  "model.remat",
  *(
    f"model.{name}"
    for name in (
      "num_heads",
      "num_levels",
      "attention_bias",
      "adjustment",
      "output_projection",
      "implementation",
    )
  ),
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


class Costs(NamedTuple):
  """What is drawn of a run: its folder as given, settings, losses [N] and label."""

  folder: str
  config: Mapping[str, Any]
  losses: np.ndarray
  label: str


def read_losses(workdir: str | Path) -> np.ndarray:
  """Reads the loss of every update of a run, update 1 first.

  Args:
    workdir: the run's folder.

  Returns:
    [N], float32, nats per token; NaN where one is not known.

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
  """Reads the settings of a run as they stand in its folder.

  Raises:
    ValueError: there is no such folder or file, or it holds no settings.
  """
  try:
    config = json.loads(_read(workdir, "config.json"))
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    path = Path(workdir) / "config.json"
    raise UserError(f"workdir: expected JSON in {path}, got: {error}") from error
  sections = ("model", "data", "train")
  if not isinstance(config, dict) or not all(
    isinstance(config.get(section, {}), dict) for section in sections
  ):
    path = Path(workdir) / "config.json"
    raise UserError(f"workdir: expected the settings of a run in {path}, got others")
  return config


def read_runs(workdirs: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[Costs]:
  """Reads run folders.

  Args:
    workdirs: the folders.
    labels: one for each; None takes those of `label`.

  Returns:
    A run for each folder, in their order.

  Raises:
    ValueError: a folder cannot be read, or there are more or fewer labels.
  """
  if labels is not None and len(labels) != len(workdirs):
    raise UserError(f"labels: expected one for each of the {len(workdirs)} runs, got {len(labels)}")
  runs = []
  for i, workdir in enumerate(workdirs):
    losses, config = read_losses(workdir), read_config(workdir)
    text = label(config) if labels is None else labels[i]
    runs.append(Costs(str(workdir), config, losses, text))
  return runs


def label(config: Mapping[str, Any]) -> str:
  """Names a run after its token mixer.

    >>> label({"model": {"mixer": {"name": "attention", "num_heads": 32}}})
    'attention, 32 heads'
    >>> label({"model": {"mixer": {"name": "we", "output_projection": False}}})
    'WE, no output projection'

  Args:
    config: the settings of a run.

  Returns:
    The name, with what departs from the mixer's usual form.

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


def medians(losses: np.ndarray, every: int) -> np.ndarray:
  """Takes the median of each non-overlapping window of updates.

    >>> medians(np.array([5., 3., 4., 9., 2., np.nan, 1., 7.]), every=3)
    array([4. , 5.5])

  Window i has the updates `every` i + 1 .. `every` (i + 1), counted from 1. Updates after
  the last complete window are left out; losses that are not known too, and a window
  without any other is NaN.

  Args:
    losses: [N], nats per token.
    every: updates of a window, from 1 to N.

  Returns:
    [N // every], float64, nats per token.

  Raises:
    ValueError: `every` is out of its range.
  """
  check_every(losses, every, "the losses")
  count = len(losses) // every
  return np.array([_median(part) for part in losses[: count * every].reshape(count, -1)])


def last_median(losses: np.ndarray, every: int) -> float:
  """Takes the median of the last `every` updates, a window of their own.

  Args:
    losses: [N], nats per token.
    every: how many, from 1 to N.

  Returns:
    Nats per token; NaN where none is known.

  Raises:
    ValueError: `every` is out of its range.
  """
  check_every(losses, every, "the losses")
  return _median(losses[-every:])


def table(runs: Sequence[Costs], every: int, figure: str = "curves") -> dict[str, Any]:
  """Gathers the medians of runs, and what makes them hard to compare.

  Args:
    runs: at least one.
    every: updates of a window.
    figure: one of `FIGURES`; what those by length and by layers are drawn over may
      differ, too.

  Returns:
    What JSON can hold, with None for what is not known: "every", "updates" (the last one
    of each window), "runs", each with "name", "folder", "updates", "unknown" (losses),
    "max_length", "num_layers", "medians" and "last"; and "notes", a sentence each.

  Raises:
    ValueError: a run has fewer updates than `every`.
  """
  rows = []
  for run, name in zip(runs, distinct_labels(runs), strict=True):
    check_every(run.losses, every, run.folder)
    rows.append(
      {
        "name": name,
        "folder": run.folder,
        "updates": len(run.losses),
        "unknown": int(np.isnan(run.losses).sum()),
        "max_length": setting(run.config, "model.max_length"),
        "num_layers": setting(run.config, "model.num_layers"),
        "medians": [_number(value) for value in medians(run.losses, every)],
        "last": _number(last_median(run.losses, every)),
      }
    )
  windows = max(len(row["medians"]) for row in rows)
  return {
    "every": every,
    "updates": [every * (i + 1) for i in range(windows)],
    "runs": rows,
    "notes": _notes(runs, figure),
  }


def format_table(content: Mapping[str, Any]) -> str:
  """Lays out what `table` gives: a line a run, a column a window, notes below."""
  rows = content["runs"]
  first = max(len(row["name"]) for row in rows)
  heads = [*map(str, content["updates"]), "last"]
  width = max(8, *map(len, heads))

  def line(name: str, cells: Sequence[str]) -> str:
    return "  ".join([name.ljust(first), *(cell.rjust(width) for cell in cells)])

  lines = [line("", heads)]
  for row in rows:
    missing = [""] * (len(heads) - 1 - len(row["medians"]))
    values = [_cell(value) for value in row["medians"]]
    lines.append(line(row["name"], [*values, *missing, _cell(row["last"])]))
  every = content["every"]
  title = f"Median training cost of {every} batches, nats per token; up to batch:"
  notes = [f"  {note}" for note in content["notes"]]
  if notes:
    notes = ["", "To be compared with care:", *notes]
  return "\n".join([title, "", *lines, *notes])


def distinct_labels(runs: Sequence[Costs]) -> list[str]:
  """The labels, with the folder where several runs share one."""
  labels = [run.label for run in runs]
  return [
    run.label if labels.count(run.label) == 1 else f"{run.label} ({run.folder})" for run in runs
  ]


def _notes(runs: Sequence[Costs], figure: str) -> list[str]:
  """What differs between the runs beside the mixer, and losses that are missing."""
  free = tuple(f"{key}." for key in (*_FREE, *PLACES.get(figure, ())[:1]))
  configs = [*map(_flat, _of_one_version([run.config for run in runs]))]
  keys = sorted({key for config in configs for key in config})
  columns = {
    key: [config.get(key) for config in configs]
    for section in ("seed.", "model.", "data.", "train.")
    for key in keys
    if f"{key}.".startswith(section) and not f"{key}.".startswith(free)
  }
  columns["updates"] = [len(run.losses) for run in runs]
  names, notes = distinct_labels(runs), []
  for key, column in columns.items():
    found: dict[str, list[str]] = {}
    for value, name in zip(column, names, strict=True):
      found.setdefault(json.dumps(value), []).append(name)
    if len(found) > 1:
      values = [f"{value} for {_some(who)}" for value, who in found.items()]
      notes.append(f"{key}: {' | '.join(values)}")
  for run, name in zip(runs, names, strict=True):
    unknown = int(np.isnan(run.losses).sum())
    if unknown:
      notes.append(f"{name}: {unknown} of {len(run.losses)} losses are not known, and left out")
  return notes


def _of_one_version(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Settings of version 0.1 beside those of now get their names of now."""
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
  """Settings by their full names, as `dpjax.config.flatten`."""
  flat = {}
  for key, value in settings.items():
    more = isinstance(value, Mapping)
    flat |= _flat(value, f"{prefix}{key}.") if more else {f"{prefix}{key}": value}
  return flat


def _some(names: Sequence[str]) -> str:
  if len(names) <= 3:
    return "; ".join(names)
  return f"{names[0]}; {names[1]}; {len(names) - 2} more"


def _median(losses: np.ndarray) -> float:
  known = losses[~np.isnan(losses)].astype(np.float64)
  return float(np.median(known)) if known.size else math.nan


def _number(value: float) -> float | None:
  return float(value) if math.isfinite(value) else None


def _cell(value: float | None) -> str:
  return "-" if value is None else f"{value:.4f}"


def setting(config: Mapping[str, Any], key: str) -> Any:
  """The value of a dotted key; None where there is none."""
  value: Any = config
  for part in key.split("."):
    value = value.get(part) if isinstance(value, Mapping) else None
  return value


def check_every(losses: np.ndarray, every: int, whose: str) -> None:
  """Refuses a window that is empty, or longer than the losses."""
  if not 1 <= every <= len(losses):
    raise UserError(
      f"every: expected at least 1 and at most the {len(losses)} updates of {whose}, got {every}"
    )


def _read(workdir: str | Path, name: str) -> bytes:
  path = Path(workdir) / name
  if not Path(workdir).is_dir():
    raise UserError(f"workdir: expected the folder of a run, got {workdir}")
  try:
    return path.read_bytes()
  except OSError as error:
    raise UserError(f"workdir: expected to read {path}, got: {error.strerror}") from error
