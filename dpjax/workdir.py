"""The files in a run's folder.

config.json      the settings, as they were given
data/            the tokens of each split, the vocabulary, how long the texts are
checkpoints/     last/ and best/ (by validation)
metrics.jsonl    scores of each report; tensorboard/ has the same
scores_<split>_<step>.json    of a whole split, written by train.py and evaluate.py
"""

import json
import os
from pathlib import Path

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from dpjax import config as config_lib
from dpjax.data import corpora, prepared


def prepare_data(config: ConfigDict, folder: Path) -> prepared.Prepared:
  """Opens the corpus in `folder`, having made it first where it is missing.

  Args:
    config: of which `config.data` says what to make.
    folder: all processes of a run must see the same.

  Returns:
    The corpus as tokens.

  Raises:
    ValueError: `data.<setting>: expected ..., got ...`, or the folder is damaged.
  """
  if jax.process_index() == 0 and not folder.exists():
    settings = config.data
    corpus = corpora.load_corpus(settings.name, settings.path, settings.split_fractions)
    prepared.prepare(
      corpus,
      folder,
      settings.tokenizer,
      file=settings.tokenizer_file,
      vocab_size=settings.tokenizer_size,
      lower_text=settings.lower_text,
      lower_pieces=settings.lower_pieces,
      restrict=settings.restrict_vocabulary,
    )
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("corpus prepared")
  return prepared.open_prepared(folder)


def claim(workdir: Path, config: ConfigDict) -> None:
  """Makes the folder this configuration's, unless it is another's.

  Raises:
    ValueError: a run of another configuration is in it, or it cannot be written.
  """
  path = workdir / "config.json"
  settings = config.to_dict()
  if path.exists():
    differences = config_lib.differences(_read_json(path), settings)
    if differences:
      raise ValueError(
        f"workdir: expected an empty folder or a run of this configuration, got "
        f"{workdir}, whose run has another: {'; '.join(differences)}"
      )
  if jax.process_index() == 0:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      write_json(path, settings)
    except OSError as error:
      raise ValueError(
        f"workdir: expected a folder that can be written, got {workdir} "
        f"({error.strerror})"
      ) from error


def read_config(workdir: Path) -> ConfigDict:
  """The settings of the run in a folder.

  Raises:
    ValueError: there is no run, or its settings cannot be read.
  """
  path = workdir / "config.json"
  if not path.exists():
    raise ValueError(f"workdir: expected the folder of a run, got {workdir}")
  return config_lib.from_dict(_read_json(path))


def write_json(path: Path, value) -> None:
  """Writes a file whole or not at all."""
  temporary = path.with_suffix(".tmp")
  temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
  os.replace(temporary, path)


def _read_json(path: Path) -> dict:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"workdir: expected a readable {path}, got: {error}") from error
