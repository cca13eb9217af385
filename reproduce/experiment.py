"""One run of an experiment, and the record of what came of it.

A record is what a report holds of a run, as JSON values:

  row, config, seed      which it is
  status, reason         "done"; "partial", which can go on; "diverged"; or "left_out",
                         where something was missing; and why, unless it is done
  changes                what is not as the paper has it, {"model.width": [512, 128]}
  text, tokens           what was read, and the tokens of each split
  vocab_size, parameters
  step, num_steps        updates made, and of a whole run; best_step by validation
  scores                 of the test split, once it is done, by the best parameters; and
                         median_cost, the median training loss of the last batches
  validation             the scores of the validation split, by step
  costs                  median training losses of each `every` batches
  minutes, resumed       of all calls that went on with one another; whether the last did
  machine, versions, command, date    of the last call
"""

import datetime
import hashlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from dpjax import run as run_lib
from dpjax.analysis import plots
from dpjax.config import ConfigDict
from dpjax.data import catalog
from dpjax.data.encoding import num_cores
from dpjax.errors import Interrupted, UserError
from dpjax.training import loop
from reproduce import scales
from reproduce.papers import Row

_CURVE = ("nats_per_token", "perplexity", "bits_per_character")


def folder(runs: str | Path, scale: str, config: str, seed: int, text: str = "") -> Path:
  """Where the run of a configuration "FILE:VARIANT" is: tables that have it share it.

  Runs that differ in what is changed for the scale, or in their text, have others.
  """
  slug = config.removeprefix("configs/").replace(".py", "").replace(":", "/")
  what = json.dumps([changes(config, scale), text], sort_keys=True)
  digits = hashlib.sha256(what.encode()).hexdigest()[:8]
  return Path(runs, scale, f"{slug}_{digits}", f"seed_{seed}")


def text(config: str, scale: str, data: str | Path) -> str:
  """What the text of an experiment is called: the corpus, or its stand-in in a folder.

  Raises:
    ValueError: the folder has none.
  """
  settings = scales.configure(config, scale).data
  if not data or settings.name == catalog.ONE_MORE:
    return scales.stem(settings.name, settings.language)
  found = scales.find_text(data, settings.name, settings.language)
  return found.name.removesuffix(".txt")


def changes(config: str, scale: str) -> dict[str, list]:
  """What a configuration has otherwise than the paper at a scale, as JSON has it."""
  found = scales.changes(scales.load(config), scales.configure(config, scale))
  return json.loads(json.dumps(found))


def configure(
  row: Row,
  seed: int,
  scale: str,
  *,
  runs: str | Path,
  data: str | Path = "",
  initial_run: str | Path = "",
) -> ConfigDict:
  """The configuration of a run with the places of all that it reads.

  Args:
    row: which experiment.
    seed: which of its runs.
    scale: one of `scales.SCALES`.
    runs: the folder of the runs, and of what is made of their texts.
    data: a folder of texts, as `scales.find_text` has it, whose folder "vocabularies" has
      the files of `dpjax.data.catalog.VOCABULARIES`; "": both are downloaded into data/.
    initial_run: the folder of the run that it begins with, or "".

  Raises:
    ValueError: the text is not there.
  """
  config = scales.configure(row.config, scale)
  config.seed = seed
  # Whole names: a run that goes on is recognised by them.
  config.train.initial_run = str(initial_run and Path(initial_run).resolve())
  if config.data.name == catalog.ONE_MORE:
    config.data.data_dir = str(Path(runs, "data"))
  elif data:
    config.data.data_dir = str(Path(runs, "data"))
    found = scales.find_text(data, config.data.name, config.data.language)
    config.data.path = str(found.resolve())
    config.data.manual_dir = str(Path(data, "vocabularies"))
    if config.data.language and not config.data.clean:
      config.data.language = ""
  return config


def do(
  row: Row,
  seed: int,
  scale: str,
  *,
  runs: str | Path,
  data: str | Path = "",
  initial_run: str | Path = "",
  should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
  """Trains, or goes on, and scores the test split.

  Where `should_stop` ends it, the validation split is scored with what there is.

  Args:
    row: as of `configure`.
    seed: likewise.
    scale: likewise.
    runs: likewise.
    data: likewise.
    initial_run: likewise.
    should_stop: asked after every update.

  Returns:
    The record; what could not be done is in its status and reason, and raises nothing.

  Raises:
    Stopped: a signal came; the run is saved.
  """
  begin = time.monotonic()
  record, signalled, is_over = left_out(row, seed, scale, ""), None, False

  def asks() -> bool:
    # The loop does not ask after a step at which a signal came.
    nonlocal is_over
    is_over = should_stop()
    return is_over

  try:
    config = configure(row, seed, scale, runs=runs, data=data, initial_run=initial_run)
    record["text"] = text(row.config, scale, data)
    workdir = folder(runs, scale, row.config, seed, record["text"])
    record["resumed"] = (workdir / "checkpoints").exists()
    try:
      run, scores = run_lib.train(config, workdir, should_stop=asks)
      record |= _describe(run) | _curves(workdir, config)
      record |= {"status": "done", "num_steps": record["step"], "best_step": run.step}
      record["scores"] = scores | {"median_cost": record["costs"]["last"]}
    except Interrupted as error:
      signalled = None if is_over else error
      run = run_lib.load(workdir, error.step)
      record |= _describe(run) | _curves(workdir, config)
      record |= {"status": "partial", "reason": str(error), "num_steps": error.num_steps}
      if signalled is None:
        scores = run.score_split("valid", progress=True)
        record["validation"].append(_point(error.step, scores))
    except loop.NonFiniteError as error:
      record |= _curves(workdir, config) | {"status": "diverged", "reason": str(error)}
  except (UserError, OSError) as error:
    record["reason"] = " ".join(str(error).split())
  # A queue that runs overnight goes on with the next.
  except Exception as error:
    traceback.print_exc()
    record["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
  jax.clear_caches()  # A process that makes many models would keep the code of all.
  record["minutes"] = round((time.monotonic() - begin) / 60, 2)
  if signalled is not None:
    raise Stopped(record, signalled) from signalled
  return record


class Stopped(Interrupted):
  """A signal ended a run; `record` says what there is of it."""

  def __init__(self, record: dict[str, Any], by: Interrupted):
    super().__init__(by.step, by.num_steps, by.signal)
    self.record = record


def left_out(row: Row, seed: int, scale: str, reason: str) -> dict[str, Any]:
  """The record of a run that was not begun, and why."""
  return {
    "row": row.name,
    "config": row.config,
    "seed": seed,
    "status": "left_out",
    "reason": reason,
    "step": 0,
    "scores": {},
    "changes": changes(row.config, scale),
    "minutes": 0.0,
    "resumed": False,
    **about(),
  }


def about() -> dict[str, Any]:
  """The machine, the versions, the command and the day."""
  return {
    "machine": {
      "device": jax.devices()[0].device_kind,
      "devices": jax.device_count(),
      "processor": _processor(),
      "cores": num_cores(),
    },
    "versions": {
      **{name: _version(name) for name in ("dpjax", "jax", "jaxlib", "flax", "optax")},
      "python": platform.python_version(),
    },
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "date": datetime.date.today().isoformat(),
  }


def _describe(run: run_lib.Run) -> dict[str, Any]:
  assert run.data is not None
  return {
    "tokens": {split: counts["tokens"] for split, counts in run.data.counts.items()},
    "vocab_size": run.config.model.vocab_size,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
  }


def _curves(workdir: Path, config: ConfigDict) -> dict[str, Any]:
  """What a run's files have of its losses and validations, and how far it came."""
  losses = plots.read_losses(workdir)
  every = config.train.median_every_steps
  lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  reports = [json.loads(line) for line in lines]
  return {
    "step": len(losses),
    "validation": [
      _point(report["step"], report) for report in reports if report["split"] == "valid"
    ],
    "costs": {
      "every": every,
      "medians": plots.medians(losses, every).tolist() if len(losses) >= every else [],
      "last": plots.last_median(losses, min(every, len(losses))) if len(losses) else None,
    },
  }


def _point(step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
  return {"step": step, **{name: scores[name] for name in _CURVE if name in scores}}


def _version(name: str) -> str:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return "not installed"


def _processor() -> str:
  """Its name, which Linux has in a file."""
  try:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
  except OSError:
    return platform.processor()
  names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
  return names[0] if names else platform.processor()
