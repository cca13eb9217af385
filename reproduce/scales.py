"""The papers' experiments as they are, or made small.

paper  as configs/ has it
cpu    a small model and few steps on the same text: minutes on a processor
tiny   a few steps on Python's own manual: seconds, to see that all of it works

What a figure varies stays as it is: windows, layers, heads, boundaries. Numbers of the two
reduced scales are not to be compared with a paper's.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from dpjax import config as config_lib
from dpjax.config import ConfigDict
from dpjax.data import catalog
from dpjax.errors import UserError

SCALES = ("tiny", "cpu", "paper")
# What says where things lie or what is shown, and changes no number.
_FREE = (
  "seed",
  "data.path",
  "data.data_dir",
  "data.manual_dir",
  "train.initial_run",
  "train.log_every_steps",
  "sample.",
)

# By the scale and by what a configuration's file begins with; msa is as dispatcher.
_CHANGES: dict[tuple[str, str], dict[str, Any]] = {
  ("cpu", "dispatcher"): {
    "model.num_layers": 2,
    "model.width": 128,
    "model.feed_forward_width": 128,
    "model.max_length": 128,
    "train.batch_size": 10,
    "train.learning_rate": 1e-3,
    "train.schedule.warmup_steps": 50,
    "train.num_steps": 1_000,
    "train.eval_every_steps": 250,
    "train.median_every_steps": 100,
  },
  ("cpu", "extractors"): {
    "model.num_layers": 2,
    "model.max_length": 64,
    "train.batch_size": 16,
    "train.num_steps": 800,
    "train.eval_every_steps": 400,
    "train.median_every_steps": 200,
  },
  ("cpu", "pooling"): {
    "model.num_layers": 3,
    "model.first.num_layers": 1,
    "model.last.num_layers": 1,
    "model.width": 64,
    "model.feed_forward_width": 256,
    "model.mixer.num_heads": 4,
    "model.max_length": 128,
    "model.boundaries.num_capacities": 1,
    "train.learning_rate": 1e-3,
    "train.schedule.warmup_steps": 20,
    "train.num_steps": 200,
    "train.eval_every_steps": 200,
    "train.median_every_steps": 40,
    "eval.stride": 128,
  },
  ("tiny", "dispatcher"): {
    "model.num_layers": 2,
    "model.width": 12,
    "model.feed_forward_width": 20,
    "model.max_length": 17,
  },
  # 128 is the least width that has 128 heads.
  ("tiny", "extractors"): {
    "model.num_layers": 2,
    "model.feed_forward_width": 20,
    "model.max_length": 17,
  },
  ("tiny", "pooling"): {
    "model.num_layers": 2,
    "model.first.num_layers": 1,
    "model.last.num_layers": 1,
    "model.width": 12,
    "model.feed_forward_width": 20,
    "model.mixer.num_heads": 3,
    "model.max_length": 34,
    "model.boundaries.num_capacities": 1,
    "train.schedule.warmup_steps": 1,
    "eval.stride": 17,
    "model.boundaries.size": 150,
  },
}
_OF_ALL: dict[str, dict[str, Any]] = {
  "cpu": {"data.max_characters": (0, 60_000, 60_000)},
  "tiny": {
    "data.name": catalog.ONE_MORE,
    "data.language": "",
    "data.clean": False,
    "data.max_characters": (60_000, 3_000, 3_000),
    "data.tokenizer_file": "",
    "data.tokenizer_size": 300,
    "train.batch_size": 8,
    "train.num_steps": 4,
    "train.eval_every_steps": 2,
    "train.median_every_steps": 2,
    "train.checkpoint_every_steps": 4,
  },
}
_OF_COMPONENTS = ("model.boundaries.num_capacities", "model.boundaries.size")
# No sample, and of two units of a duration not the other one.
_UNSET = {"sample.prompt": "", "train.num_epochs": 0.0, "train.eval_every_epochs": 0.0}
# Many runs each: what these figures vary, and how long a run is then.
_FIGURES = {
  "fig10_": (("model.num_layers", "model.max_length"), 400),
  "fig11_": (("model.num_layers", "model.max_length"), 400),
  "middle_": (("model.num_layers", "model.first.num_layers", "model.last.num_layers"), 60),
}


def load(name: str) -> ConfigDict:
  """The configuration "FILE:VARIANT" of the repository.

  Raises:
    ValueError: configs/ is not there.
  """
  file, _, variant = name.partition(":")
  root = str(Path(__file__).parents[1])
  if root not in sys.path:
    sys.path.append(root)
  try:
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
  except ModuleNotFoundError as error:
    if not (error.name or "").startswith("configs"):
      raise
    raise UserError(
      f"configs: expected dpjax to be installed from its repository (pip "
      f"install -e .), where {file} is, got {root} without"
    ) from error
  return module.get_config(*[variant] * bool(variant))


def configure(name: str, scale: str) -> ConfigDict:
  """The configuration "FILE:VARIANT" at a scale.

  Args:
    name: of `load`.
    scale: one of `SCALES`.

  Returns:
    A configuration that `dpjax.config.check` takes.

  Raises:
    ValueError: the scale is none of them, or as `load`.
  """
  if scale not in SCALES:
    raise UserError(f"scale: expected one of {', '.join(SCALES)}, got {scale}")
  config = load(name)
  if scale == "paper":
    return config
  family = Path(name.partition(":")[0]).stem.partition("_")[0].replace("msa", "dispatcher")
  changes = {**_UNSET, **_OF_ALL[scale], **_CHANGES[scale, family]}
  for word, (varied, num_steps) in _FIGURES.items():
    if f",{word}" in name:
      changes = {key: value for key, value in changes.items() if key not in varied}
      if scale == "cpu":
        steps = {
          "num_steps": num_steps,
          "eval_every_steps": num_steps,
          "median_every_steps": num_steps // 5,
        }
        changes |= {f"train.{key}": value for key, value in steps.items()}
  if scale == "cpu":
    # Of a corpus that is large or has no splits of its own, the first part is taken.
    _, *others = _OF_ALL["cpu"]["data.max_characters"]
    changes["data.max_characters"] = (config.data.max_characters[0], *others)
    if config.train.initial_run:
      changes["train.learning_rate"] /= 6  # as the paper's of the two
  is_vanilla = not config_lib.is_pooled(config.model)
  if family == "pooling" and is_vanilla and "model.num_layers" in changes:
    for side in ("first", "last"):
      changes["model.num_layers"] += changes.pop(f"model.{side}.num_layers")
  config.unlock()
  for key, value in changes.items():
    parents, _, setting = key.rpartition(".")
    section = config_lib.get(config, parents)
    # A component may lack it.
    if setting in section or key not in _OF_COMPONENTS:
      section[setting] = value
  return config


def changes(paper: ConfigDict, ours: ConfigDict) -> dict[str, list]:
  """What a run has otherwise than the paper's: {"model.width": [512, 128]}.

  What changes no number is left out: places, the seed, samples.
  """
  there, here = config_lib.flatten(paper), config_lib.flatten(ours)
  return {
    key: [there[key], here[key]]
    for key in there
    if there[key] != here[key] and not key.startswith(_FREE)
  }


def find_text(folder: str | Path, name: str, language: str = "") -> Path:
  """The text of a corpus in a folder of texts.

  It is NAME or, of a corpus that has several languages, NAME_LANGUAGE: a folder with
  {train,valid,test}.txt, or a file with the ending .txt. A stand-in for it, as part of the
  text, has a name that goes on after that: text8_prefix.txt, wiki40b_fi_books.txt.

  Raises:
    ValueError: there is none, or there is more than one.
  """
  wanted = stem(name, language)
  known = {
    stem(other, tongue)
    for other, entry in catalog.ENTRIES.items()
    for tongue in entry.languages or ("",)
  } - {wanted}

  def is_it(path: Path) -> bool:
    found = path.name.removesuffix(".txt")
    is_text = path.is_dir() or path.suffix == ".txt"
    return is_text and found not in known and f"{found}_".startswith(f"{wanted}_")

  paths = sorted(filter(is_it, Path(folder).glob("*")))
  exact = [path for path in paths if path.name.removesuffix(".txt") == wanted]
  if len(exact or paths) != 1:
    got = ", ".join(path.name for path in exact or paths) or "none"
    raise UserError(f"data: expected a folder {wanted} or {wanted}.txt in {folder}, got {got}")
  return (exact or paths)[0]


def stem(name: str, language: str = "") -> str:
  """The name of a corpus with its language, where it has several."""
  has_several = name in catalog.ENTRIES and bool(catalog.ENTRIES[name].languages)
  return f"{name}_{language}" if has_several else name
