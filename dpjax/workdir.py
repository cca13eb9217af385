"""The files in a run's folder.

config.json      the settings, as they were given
data/            the tokens of each split, the vocabulary, how long the texts are; with
                 unigram boundaries, these and the model that found them
checkpoints/     last/ and best/ (by validation)
metrics.jsonl    scores of each report; tensorboard/ has the same
losses.f32       the loss of every update, as float32
scores_<split>_<step>.json    of a whole split, written by train.py and evaluate.py
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax import config as config_lib
from dpjax.config import ConfigDict
from dpjax.data import corpora, prepared


def check(workdir: Path, config: ConfigDict) -> bool:
  """Whether the folder holds a run of this configuration to go on with.

  Raises:
    ValueError: it holds a run of another configuration, or it cannot be made.
  """
  path = workdir / "config.json"
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise _not_writable(workdir, error) from error
  if not path.exists():
    if (workdir / "checkpoints").exists():
      raise ValueError(
        f"workdir: expected an empty folder or a whole run, got {workdir}, which has "
        "checkpoints and no config.json"
      )
    return False
  differences = config_lib.differences(_read_json(path), config.to_dict())
  if differences:
    raise ValueError(
      f"workdir: expected an empty folder or a run of this configuration, got {workdir}, "
      f"whose run has another: {'; '.join(differences)}"
    )
  return True


def claim(workdir: Path, config: ConfigDict) -> None:
  """Makes the folder this configuration's, once all is known to be in order.

  Raises:
    ValueError: it cannot be written.
  """

  def write() -> None:
    try:
      write_json(workdir / "config.json", config.to_dict())
    except OSError as error:
      raise _not_writable(workdir, error) from error

  _on_first_process(write)


def prepare_data(
  config: ConfigDict, folder: Path, *, anew: bool = False
) -> prepared.Prepared:
  """Opens the corpus in `folder`, having made it first where it is missing.

  Args:
    config: of which `config.data` says what to make.
    folder: all processes of a run must see the same.
    anew: make it even if there is one.

  Returns:
    The corpus as tokens.

  Raises:
    ValueError: `data.<setting>: expected ..., got ...`, or the folder is damaged or
      cannot be written.
  """

  def make() -> None:
    if folder.exists() and not anew:
      return
    settings, unigram = config.data, None
    if config.model.boundaries == "unigram":
      unigram = dict(file=settings.unigram_file, vocab_size=settings.unigram_size)
    corpus = corpora.load_corpus(settings.name, settings.path, settings.split_fractions)
    try:
      prepared.prepare(
        corpus,
        folder,
        settings.tokenizer,
        file=settings.tokenizer_file,
        vocab_size=settings.tokenizer_size,
        lower_text=settings.lower_text,
        lower_pieces=settings.lower_pieces,
        restrict=settings.restrict_vocabulary,
        unigram=unigram,
      )
    except OSError as error:
      raise _not_writable(folder, error) from error

  _on_first_process(make)
  return prepared.open_prepared(folder)


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
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
      raise ValueError(f"{type(content).__name__} for a dict of settings")
    return content
  except (OSError, ValueError) as error:
    raise ValueError(f"workdir: expected a readable {path}, got: {error}") from error


def _on_first_process(work: Callable[[], None]) -> None:
  """Does it once for all processes, which wait, and all raise what it raises."""
  message = ""
  if jax.process_index() == 0:
    try:
      work()
    except ValueError as error:
      message = str(error)
  if jax.process_count() > 1:
    encoded = np.zeros(4096, np.uint8)
    letters = np.frombuffer(message.encode()[: encoded.size], np.uint8)
    encoded[: letters.size] = letters
    encoded = np.asarray(multihost_utils.broadcast_one_to_all(encoded))
    message = encoded.tobytes().rstrip(b"\0").decode(errors="replace")
  if message:
    raise ValueError(message)


def _not_writable(folder: Path, error: OSError) -> ValueError:
  return ValueError(
    f"workdir: expected a folder that can be written, got {folder} ({error.strerror})"
  )
