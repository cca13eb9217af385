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
  minutes                of all calls together
  machine, versions, command, date
"""

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpjax import plots
from dpjax import run as run_lib
from dpjax.config import ConfigDict
from dpjax.data import catalog
from dpjax.reproduce import scales
from dpjax.reproduce.papers import Row
from dpjax.training import loop, metrics

_CURVE = ("nats_per_token", "perplexity", "bits_per_character")


def folder(runs: str | Path, scale: str, config: str, seed: int) -> Path:
  """Where the run of a configuration "FILE:VARIANT" is: tables that have it share it."""
  slug = config.removeprefix("configs/").replace(".py", "").replace(":", "/")
  return Path(runs, scale, slug, f"seed_{seed}")


def changes(config: str, scale: str) -> dict[str, list]:
  """What a configuration has otherwise than the paper at a scale, as JSON has it."""
  found = scales.changes(scales.load(config), scales.configure(config, scale))
  return json.loads(json.dumps(found))


def configure(
  row: Row, seed: int, scale: str, *, runs: str | Path, data: str | Path = "",
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
  config.train.initial_run = str(initial_run)
  if config.data.name == catalog.ONE_MORE:
    config.data.data_dir = str(Path(runs, "data"))
  elif data:
    config.data.data_dir = str(Path(runs, "data"))
    text = scales.find_text(data, config.data.name, config.data.language)
    config.data.path = str(text)
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
    The record; but for its status nothing tells of what could not be done.

  Raises:
    Stopped: a signal came; the run is saved.
  """
  begin = time.monotonic()
  workdir = folder(runs, scale, row.config, seed)
  record = left_out(row, seed, scale, "")
  signalled = None
  try:
    config = configure(row, seed, scale, runs=runs, data=data, initial_run=initial_run)
    run, scores = run_lib.train(config, workdir, should_stop=should_stop)
    costs = _costs(workdir, run.config.train.median_every_steps)
    num_steps = len(plots.read_losses(workdir))
    record |= _describe(run) | {
      "status": "done", "step": num_steps, "num_steps": num_steps, "best_step": run.step,
      "scores": scores | {"median_cost": costs["last"]}, "costs": costs,
    }
  except loop.Interrupted as error:
    signalled = None if should_stop() else error
    run = run_lib.load(workdir, error.step)
    record |= _describe(run) | {
      "status": "partial", "reason": str(error), "step": error.step,
      "num_steps": error.num_steps,
      "costs": _costs(workdir, run.config.train.median_every_steps),
    }
    if signalled is None:
      scores = run.score_split("valid", progress=True)
      record["validation"].append(_point(error.step, scores))
  except loop.NonFiniteError as error:
    record |= {"status": "diverged", "reason": str(error)}
  except (ValueError, OSError) as error:
    record["reason"] = " ".join(str(error).split())
  except jax.errors.JaxRuntimeError as error:
    record["reason"] = str(error).splitlines()[0]
  jax.clear_caches()  # A process that makes many models would keep the code of all.
  record["minutes"] = round((time.monotonic() - begin) / 60, 2)
  record = _for_json(record)
  if signalled is not None:
    raise Stopped(record) from signalled
  return record


class Stopped(Exception):  # noqa: N818
  """A signal ended a run; `record` says what there is of it."""

  def __init__(self, record: dict[str, Any]):
    super().__init__(record["reason"])
    self.record = record


def left_out(row: Row, seed: int, scale: str, reason: str) -> dict[str, Any]:
  """The record of a run that was not begun, and why."""
  return {
    "row": row.name, "config": row.config, "seed": seed, "status": "left_out",
    "reason": reason, "scores": {}, "changes": changes(row.config, scale), "minutes": 0.0,
    **about(),
  }


def about() -> dict[str, Any]:
  """The machine, the versions, the command and the day."""
  names = ("dpjax", "jax", "jaxlib", "flax", "optax")
  return {
    "machine": {
      "device": jax.devices()[0].device_kind, "devices": jax.device_count(),
      "processor": _processor(), "cores": len(os.sched_getaffinity(0)),
    },
    "versions": {
      **{name: metadata.version(name) for name in names},
      "python": platform.python_version(),
    },
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "date": datetime.date.today().isoformat(),
  }


def _describe(run: run_lib.Run) -> dict[str, Any]:
  assert run.data is not None and run.workdir is not None
  lines = (run.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  reports = [json.loads(line) for line in lines]
  path = run.config.data.path
  return {
    "text": Path(path).name.removesuffix(".txt") if path else run.data.name,
    "tokens": {split: counts["tokens"] for split, counts in run.data.counts.items()},
    "vocab_size": run.config.model.vocab_size,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
    "validation": [
      _point(report["step"], report) for report in reports if report["split"] == "valid"
    ],
  }


def _point(step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
  return {"step": step, **{name: scores[name] for name in _CURVE if name in scores}}


def _costs(workdir: Path, every: int) -> dict[str, Any]:
  losses = plots.read_losses(workdir)
  every = min(every, len(losses))
  return {
    "every": every, "medians": plots.medians(losses, every).tolist(),
    "last": plots.last_median(losses, every),
  }


def _for_json(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _for_json(x) for key, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [_for_json(x) for x in value]
  if isinstance(value, (float, np.floating)):
    return metrics.for_json({"": float(value)})[""]
  return value


def _processor() -> str:
  """Its name, which Linux has in a file."""
  try:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
  except OSError:
    return platform.processor()
  names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
  return names[0] if names else platform.processor()
