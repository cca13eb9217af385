"""Reads run folders, names runs, and tabulates their training costs. Does not load JAX.

A run folder has config.json; losses.f32, the loss of every update in nats per token, little-endian
float32, update 1 first, NaN if unknown; and metrics.jsonl, the logged scores. A run may still be
in training.

Source of the costs: "Attention Is Not All You Need Anymore", Sec. 6.
"""

import itertools
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dpjax import files
from dpjax.analysis import style
from dpjax.errors import UserError

# Reporting and computation: they name runs only if nothing else differs, and need no note.
REPORTING = (
  "model.vocab_size",
  "model.scan_layers",
  "model.remat",
  "train.param_sharding",
  "train.num_steps",
  "train.num_epochs",
  "train.log_every_steps",
  "train.eval_every_steps",
  "train.eval_every_epochs",
  "train.checkpoint_every_steps",
  "train.max_to_keep",
)
_MAX_IN_A_NAME = 3
Settings = Mapping[str, Any]  # of a run, as in its JSON
Key = TypeVar("Key")
Value = TypeVar("Value")


class Record(NamedTuple):
  """The data of a run for figures.

  Attributes:
    folder: its path, as given.
    config: its settings.
    losses: [N], float32, the loss of every update in nats per token; NaN if unknown.
    scores: every logged score, as "valid/bits_per_character" -> {update: value}.
    label: its name, if given; several runs may share it.
    text: the name of its corpus, and a part of the checksum of the validation split; "" if unknown.
  """

  folder: str
  config: Settings
  losses: np.ndarray
  scores: Mapping[str, Mapping[int, float]]
  label: str = ""
  text: str = ""


def read_runs(workdirs: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[Record]:
  """Reads run folders, with a label for each if given; otherwise `names` names them.

  Raises a `ValueError` if a file is damaged, or the number of labels differs.
  """
  from dpjax.config.loading import read_settings  # slow to import

  labels = [""] * len(workdirs) if labels is None else labels
  if len(labels) != len(workdirs):
    raise UserError(f"labels: expected one for each of the {len(workdirs)} runs, got {len(labels)}")
  runs = []
  for path, label in zip(workdirs, labels, strict=True):
    config = read_settings(Path(path, "config.json"))
    about = files.read_json(Path(path, "data", files.RECORD))
    checksum = setting(about, "splits.valid.sha256")
    text = f"{about.get('name')} ({str(checksum)[:9]})" if checksum else ""
    runs.append(Record(str(path), config, read_losses(path), read_scores(path), label, text))
  return runs


def read_losses(workdir: str | Path) -> np.ndarray:
  """Reads the loss of every update, float32 [N], nats per token; NaN if unknown.

  Raises a `ValueError` if the file is damaged.
  """
  path = Path(workdir, "losses.f32")
  with files.open_plain(path) as file:
    content = file.read()
  if len(content) % 4:
    raise UserError(f"workdir: expected 4 bytes an update in {path}, got {len(content)} bytes")
  return np.frombuffer(content, "<f4").astype(np.float32)


def read_scores(workdir: str | Path) -> dict[str, dict[int, float]]:
  """Reads the scores that a run logged in `metrics.jsonl`; {} without the file.

    {"step": 20, "split": "valid", "time": 9.5, "perplexity": 7.5}
      ->  {"valid/perplexity": {20: 7.5}}

  Lines that cannot be parsed are skipped: the last line of a run in training may be incomplete.
  """
  path = Path(workdir, "metrics.jsonl")
  scores: dict[str, dict[int, float]] = {}
  lines: list[bytes] = []
  if path.exists():
    with files.open_plain(path) as file:
      lines = file.readlines()
  for line in lines:
    try:
      content = json.loads(line)
      step = operator.index(content["step"])
      split = content["split"]
    except (ValueError, TypeError, KeyError):
      continue
    for name, value in content.items():
      if name not in ("step", "time") and type(value) in (int, float):
        scores.setdefault(f"{split}/{name}", {})[step] = value
  return scores


def mixer_name(config: Settings) -> str:
  """The name of a run's token mixers, and how they differ from their default form.

    >>> mixer_name({"model": {"mixer": {"name": "attention", "num_heads": 32}}})
    'attention, 32 heads'
    >>> mixer_name({"model": {"mixer": {"name": "we", "output_projection": False}}})
    'WE, no output projection'
    >>> mixer_name({"model": {"mixer": [{"name": "we"}] * 2 + [{"name": "short_convolution"}]}})
    '2 x WE + short_convolution'

  Raises a `ValueError` if the settings name no mixer.
  """
  mixer = setting(config, "model.mixer")
  several = mixer if isinstance(mixer, list | tuple) else [mixer]
  if not several or not all(isinstance(setting(x, "name"), str) for x in several):
    raise UserError(f"model.mixer: expected the name of a token mixer, got {mixer}")
  runs = [(name, len([*same])) for name, same in itertools.groupby(map(_mixer_name, several))]
  return " + ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)


def _mixer_name(mixer: Settings) -> str:
  name: str = mixer["name"]
  if name in ("she", "he", "we", "me"):
    missing = [part for part in ("adjustment", "output_projection") if mixer.get(part) is False]
    if len(missing) == 2:
      return f"{name.upper()}, extraction alone"
    return ", ".join([name.upper(), *(f"no {part.replace('_', ' ')}" for part in missing)])
  heads = mixer.get("num_heads")
  titles = {"dispatcher": "Dispatcher", "dispatcher_multihead": "multi-head Dispatcher"}
  title = titles.get(name, name)
  if not heads or (heads == 1 and name != "attention"):
    return title
  return f"{title}, 1 head" if heads == 1 else f"{title}, {heads} heads"


def names(runs: Sequence[Record], seeds: bool = True) -> list[str]:
  """Names runs after their mixers and the settings in which they differ.

    SHE of learning rates 0.1 and 0.2, and HE
      ->  "SHE, learning rate 0.1", "SHE, learning rate 0.2", "HE"

  If many settings differ, those with the most values are named; if none differ, the folders are.
  Runs with a label keep it. Without `seeds`, runs that differ in nothing else share a name.
  """
  result = [run.label or mixer_name(run.config) for run in runs]

  def distinguish(indices: Sequence[int]) -> None:
    for same in group([result[i] for i in indices], indices).values():
      if len(same) == 1 or runs[same[0]].label:
        continue
      columns = differences([runs[i].config for i in same])
      seed = columns.pop("seed", [])
      # Different components also have different settings; their names suffice.
      sections = [key.removesuffix(".name") for key in columns if key.endswith(".name")]
      columns = {k: v for k, v in columns.items() if k.endswith(".name") or not within(k, sections)}
      chosen = {k: v for k, v in columns.items() if not within(k, REPORTING)}
      if not chosen and len({*seed}) == len(same) and not seeds:
        continue
      chosen = chosen or ({"seed": seed} if seed else columns)
      keys = sorted(chosen, key=lambda key: -len({*map(repr, chosen[key])}))[:_MAX_IN_A_NAME]
      for position, i in enumerate(same):
        settings = [_describe(key, chosen[key][position]) for key in keys]
        result[i] = ", ".join([result[i], *settings])
      if len({result[i] for i in same}) > 1:
        distinguish(same)
      else:
        for i in same:
          result[i] += f" ({runs[i].folder})"

  distinguish(range(len(runs)))
  return result


def notes(runs: Sequence[Record], allowed: Sequence[str] = ()) -> list[str]:
  """Sentences on what makes runs hard to compare: texts, settings that differ, unknown losses.

  The seed, settings and sections `allowed` to differ, such as "model.mixer", and `REPORTING` are
  left out.
  """
  labels = names(runs)
  sentences = []
  texts = group([run.text for run in runs], labels)
  if len(texts.keys() - {""}) > 1:
    parts = [f"{text} for {'; '.join(names)}" for text, names in texts.items() if text]
    sentences.append(f"different texts, so their scores do not compare: {' | '.join(parts)}")
  columns = differences([run.config for run in runs])
  columns = {k: v for k, v in columns.items() if not within(k, ("seed", *allowed, *REPORTING))}
  counts = [len(run.losses) for run in runs]
  for key, column in (columns | {"updates": counts}).items():
    by_value = group(map(json.dumps, column), labels)
    if len(by_value) > 1:
      parts = [f"{value} for {'; '.join(names)}" for value, names in by_value.items()]
      sentences.append(f"{key}: {' | '.join(parts)}")
  for run, label, count in zip(runs, labels, counts, strict=True):
    if unknown := int(np.isnan(run.losses).sum()):
      sentences.append(f"{label}: {unknown} of {count} losses are not known, and left out")
  return sentences


def differences(configs: Sequence[Settings]) -> dict[str, list[object]]:
  """The settings in which runs differ, with the value in each run; None if a run lacks it."""
  from dpjax.config import sections

  flat = [sections.flatten(config) for config in configs]
  compared = ("seed", "model", "data", "train")
  keys = sorted({key for config in flat for key in config if within(key, compared)})
  keys.sort(key=lambda key: compared.index(key.partition(".")[0]))
  columns: dict[str, list[object]] = {key: [config.get(key) for config in flat] for key in keys}
  return {key: column for key, column in columns.items() if len({*map(json.dumps, column)}) > 1}


def medians(losses: np.ndarray, every: int) -> np.ndarray:
  """Takes the median of each non-overlapping window of updates.

    >>> medians(np.array([5., 3., 4., 9., 2., np.nan, 1., 7.]), every=3)
    array([4. , 5.5])

  Updates after the last complete window are dropped. Unknown losses (NaN) are ignored; a window
  of only NaN is NaN. Raises a `ValueError` if `every` is not in 1 .. N.
  """
  if not 1 <= every <= len(losses):
    expected = f"at least 1 and at most the {len(losses)} updates of a run"
    raise UserError(f"every: expected {expected}, got {every}")
  count = len(losses) // every
  windows = losses[: count * every].reshape(count, every).astype(np.float64)
  windows = [window[~np.isnan(window)] for window in windows]
  return np.array([np.median(window) if window.size else math.nan for window in windows])


def last_median(losses: np.ndarray, every: int) -> float:
  """The median of the last `every` updates, NaN if none is known; see `medians`."""
  return float(medians(losses[-every:], every)[-1])


def cost_table(runs: Sequence[Record], every: int) -> str:
  """A table of medians: a line for each run, a column for each window of `every` updates."""
  columns = [medians(run.losses, every) for run in runs]
  count = max(len(column) for column in columns)
  rows = []
  for name, run, column in zip(names(runs), runs, columns, strict=True):
    missing = [""] * (count - len(column))
    rows.append([name, *map(_cell, column), *missing, _cell(last_median(run.losses, every))])
  heads = ["", *(every * i for i in range(1, count + 1)), "last"]
  title = f"Median training cost of {every} batches, nats per token; up to batch"
  return f"{title}:\n\n{style.table(heads, rows)}"


def score_table(runs: Sequence[Record], every: int, metric: str | None) -> str:
  """A table of a metric, such as "valid/perplexity", beside the last costs: a line for each run."""
  title = f"Median cost of the last {every} batches, nats per token"
  heads = ["", "batches", "cost"]
  rows = []
  if metric:
    title += f"; {metric}"
    heads += ["last", "lowest", "at batch"]
  for name, run in zip(names(runs), runs, strict=True):
    cells = [name, f"{len(run.losses):,}", _cell(last_median(run.losses, every))]
    if scores := run.scores.get(metric or "", {}):
      lowest = min(scores, key=lambda step: scores[step])
      cells += [_cell(scores[max(scores)]), _cell(scores[lowest]), f"{lowest:,}"]
    rows.append([*cells, *[""] * (len(heads) - len(cells))])
  return f"{title}:\n\n{style.table(heads, rows)}"


def _cell(value: float) -> str:
  return f"{value:.4f}" if math.isfinite(value) else "-"


def setting(config: Settings, key: str) -> Any:
  """The value of a dotted key; None if it is missing."""
  value = config
  for part in key.split("."):
    value = value.get(part) if isinstance(value, Mapping) else None
  return value


def within(key: str, sections: Sequence[str]) -> bool:
  """Whether a setting is one of these, or within one of these sections."""
  return f"{key}.".startswith(tuple(f"{section}." for section in sections))


def group(keys: Iterable[Key], values: Sequence[Value]) -> dict[Key, list[Value]]:
  """Groups values by key, in order."""
  groups: dict[Key, list[Value]] = {}
  for key, value in zip(keys, values, strict=True):
    groups.setdefault(key, []).append(value)
  return groups


def _describe(key: str, value: object) -> str:
  """A setting for a legend: "learning rate 0.1", "boundaries gumbel"."""
  name = (key.partition(".")[2] or key).removesuffix(".name")
  name = re.sub(r"^mixer\.(?!\d)", "", name)
  text = value if isinstance(value, str) else json.dumps(value)
  return f"{name.replace('.', ' ').replace('_', ' ')} {'unset' if value is None else text}"
