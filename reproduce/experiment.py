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
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import timing

from dpjax import run as run_lib
from dpjax.analysis import costs, folders
from dpjax.config import ConfigDict
from dpjax.data import catalog
from dpjax.errors import Interrupted, UserError
from dpjax.training import loop
from reproduce import scales
from reproduce.papers import Row

_CURVE = ("nats_per_token", "perplexity", "bits_per_character")


def configure(
  row: Row, seed: int, scale: str, runs: str, data: str = "", initial_run: str | Path = ""
) -> tuple[ConfigDict, Path, str]:
  """What a run is made of.

  Args:
    row: which experiment.
    seed: which of its runs.
    scale: one of `scales.SCALES`.
    runs: the folder of the runs, and of what is made of their texts.
    data: a folder of texts, as `scales.find_text` has it, whose folder "vocabularies" has
      the files of `dpjax.data.catalog.VOCABULARIES`; "": both are downloaded into data/.
    initial_run: the folder of the run that it begins with, or "".

  Returns:
    The configuration; the run's folder, which tables share, while what is changed for a
    scale or made of another text has another; and the text's name.

  Raises:
    ValueError: the text is not there.
  """
  config = scales.configure(row.config, scale)
  config.seed = seed
  # Whole names: a run that goes on is recognised by them.
  config.train.initial_run = str(initial_run and Path(initial_run).resolve())
  text, path = scales.find_text(config, data)
  if path is not None or config.data.name == catalog.ONE_MORE:
    config.data.data_dir = str(Path(runs, "data"))
  if path is not None:
    config.data.path = str(path.resolve())
    config.data.manual_dir = str(Path(data, "vocabularies"))
    if config.data.language and not config.data.clean:
      config.data.language = ""
  slug = row.config.removeprefix("configs/").replace(".py", "").replace(":", "/")
  what = json.dumps([scales.changes(row.config, scale), text], sort_keys=True)
  digits = hashlib.sha256(what.encode()).hexdigest()[:8]
  return config, Path(runs, scale, f"{slug}_{digits}", f"seed_{seed}"), text


def do(
  row: Row,
  seed: int,
  scale: str,
  runs: str,
  data: str = "",
  initial_run: str | Path = "",
  should_stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], Interrupted | None]:
  """Trains, or goes on, and scores the test split.

  Where `should_stop`, asked after every update, ends it, the validation split is scored
  with what there is. The other arguments are those of `configure`.

  Returns:
    The record, with what could not be done as its status and reason; and the interruption
    where a signal came.
  """
  begin, signalled = time.monotonic(), None
  record = left_out(row, seed, scale, "")
  try:
    config, workdir, record["text"] = configure(row, seed, scale, runs, data, initial_run)
    record["resumed"] = (workdir / "checkpoints").exists()
    try:
      run, scores = run_lib.train(config, workdir, should_stop=should_stop)
      record |= describe(run, workdir) | {"status": "done", "best_step": run.step}
      record["num_steps"] = record["step"]
      record["scores"] = scores | {"median_cost": record["costs"]["last"]}
    except Interrupted as error:
      run = run_lib.load(workdir, error.step)
      record |= describe(run, workdir) | {"status": "partial", "reason": str(error)}
      record["num_steps"] = error.num_steps
      if error.signal is None:
        scores = run.score_split("valid", progress=True)
        record["validation"].append(_point(error.step, scores))
      else:
        signalled = error
    except loop.NonFiniteError as error:
      record |= _curves(workdir, config) | {"status": "diverged", "reason": str(error)}
  # A queue that runs overnight goes on with the next.
  except Exception as error:
    record["reason"] = " ".join(str(error).split())
    if not isinstance(error, (UserError, OSError)):
      traceback.print_exc()
      record["reason"] = f"{type(error).__name__}: {record['reason'][:300]}"
  jax.clear_caches()  # A process that makes many models would keep the code of all.
  record["minutes"] = round((time.monotonic() - begin) / 60, 2)
  return record, signalled


def left_out(row: Row, seed: int, scale: str, reason: str) -> dict[str, Any]:
  """The record of a run that was not begun, and why."""
  what = {"row": row.name, "config": row.config, "seed": seed}
  what |= {"status": "left_out", "reason": reason, "step": 0, "scores": {}}
  changes = scales.changes(row.config, scale)
  return what | {"changes": changes, "minutes": 0.0, "resumed": False} | about()


def about() -> dict[str, Any]:
  """The machine, the versions, the command and the day."""
  machine = timing.describe_machine() | {"devices": jax.device_count()}
  packages = ("dpjax", "jax", "jaxlib", "flax", "optax")
  return {
    "machine": {key: machine[key] for key in ("device", "devices", "processor", "cores")},
    "versions": {name: metadata.version(name) for name in packages}
    | {"python": platform.python_version()},
    "command": machine["command"],
    "date": datetime.date.today().isoformat(),
  }


def describe(run: run_lib.Run, workdir: Path) -> dict[str, Any]:
  """What a record has of a run that was trained, or is being trained, in a folder."""
  assert run.data is not None
  return _curves(workdir, run.config) | {
    "tokens": {split: counts["tokens"] for split, counts in run.data.counts.items()},
    "vocab_size": run.config.model.vocab_size,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
  }


def _curves(workdir: Path, config: ConfigDict) -> dict[str, Any]:
  """The losses and validations in a run's files, and its number of updates."""
  losses, every = folders.read_losses(workdir), config.train.median_every_steps
  lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  reports = [json.loads(line) for line in lines]
  return {
    "step": len(losses),
    "validation": [_point(x["step"], x) for x in reports if x["split"] == "valid"],
    "costs": {
      "every": every,
      "medians": costs.medians(losses, every).tolist() if len(losses) >= every else [],
      "last": costs.last_median(losses, min(every, len(losses))) if len(losses) else None,
    },
  }


def _point(step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
  return {"step": step, **{name: scores[name] for name in _CURVE if name in scores}}
