"""The tokens that `config.data` describes, shared by all runs."""

import inspect
import json
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.config.registry import ConfigDict
from dpjax.data import remote
from dpjax.data import tokens as data_tokens
from dpjax.data.corpus import load_corpus
from dpjax.data.tokens import Tokens, write_reference
from dpjax.errors import UserError, not_writable
from dpjax.interop import hnet
from dpjax.models.build import build_boundaries
from dpjax.run.workdir import find, on_first_process
from dpjax.text.characters import BytesWithEnds
from dpjax.text.tokens import Tokenizer, load_tokenizer


def open_tokens(config: ConfigDict, folder: Path, *, fresh: bool = False) -> Tokens:
  """Opens the corpus in `folder`, and tokenizes it first if it is missing.

  The tokens lie in data_dir/tokens, for all runs with the same data, and `folder` refers to them.
  Without `config.data.tokenizer_file`, `config.train.init_from` gives the tokenizer. `fresh`
  replaces an existing corpus.

  Raises:
    ValueError: `data.<setting>: ...`, or the folder is damaged or cannot be written.
  """

  def make() -> None:
    is_there = folder.exists() and not fresh
    if not (is_there and read_data(config, folder).has_tokens):
      data = _tokenize_again(config, folder) if is_there else _tokenize(config)
      try:
        write_reference(data, folder)
      except OSError as error:
        raise not_writable("workdir", folder, error) from error
    read_data(config, folder).check()

  on_first_process(make)
  return read_data(config, folder, is_checked=True)


def find_tokens(config: ConfigDict, folder: Path) -> Tokens:
  """Opens the corpus in `folder`, and recreates missing tokens in data_dir."""
  data = read_data(config, folder)
  if data.has_tokens:
    return data
  on_first_process(lambda: _tokenize_again(config, folder) and None)
  return _tokenize(config, data.tokenizer)


def with_documents(config: ConfigDict, data: Tokens) -> Tokens:
  """The same corpus with its documents, in data_dir, made if missing."""
  config = config.copy_and_resolve_references()
  config.data.documents = "isolated"
  on_first_process(lambda: _tokenize(config, data.tokenizer) and None)
  isolated = _tokenize(config, data.tokenizer)
  texts = ({split: x["sha256"] for split, x in each.counts.items()} for each in (isolated, data))
  if isolated.tokenizer.to_json() != data.tokenizer.to_json() or len({*map(str, texts)}) > 1:
    expected = f"expected {data.name} to have the run's text and vocabulary also when isolated"
    raise UserError(f"data.documents: {expected}, got another text or vocabulary")
  return isolated


def read_data(config: ConfigDict, folder: Path, **options: bool) -> Tokens:
  """Opens the corpus in `folder`, whose tokens may be missing; see `data.open_tokens`."""
  return data_tokens.open_tokens(folder, config.data.data_dir, _text_boundaries(config), **options)


def _text_boundaries(config: ConfigDict) -> Any:
  """What computes boundaries from the text, or None."""
  return next((x.text_boundaries for x in build_boundaries(config.model)[:1]), None)


def _tokenize_again(config: ConfigDict, folder: Path) -> Tokens:
  """Recreates the tokens that the run began with."""
  before = read_data(config, folder)
  gone = f"{before.folder}: expected the tokens of {folder.parent}, which are gone"
  try:
    data = _tokenize(config, before.tokenizer)
  except UserError as error:
    command = f"`dpjax train --workdir={folder.parent} --tokenize_only`"
    raise UserError(f"{gone}; {command} makes them again from the text, but: {error}") from error
  now, then = ((x.counts, x.tokenizer.to_json(), x.fitted) for x in (data, before))
  if now != then:
    raise UserError(f"{gone}, got another text, vocabulary or Unigram model with its settings")
  return data


def _tokenize(config: ConfigDict, run_tokenizer: Tokenizer | None = None) -> Tokens:
  """The tokens in `data.path`, or in data_dir, encoded if missing, perhaps by a run's tokenizer."""
  data = config.data
  if data.path and Path(data.path, "train.bin").is_file():
    return _open_ready(config, run_tokenizer)
  arguments = inspect.signature(load_corpus).parameters  # settings of the same names
  corpus = load_corpus(**{name: data[name] for name in arguments})
  options: dict[str, Any] = dict(shared=True, boundaries=_text_boundaries(config))
  tokenizer = _loaded_tokenizer(config, run_tokenizer)
  if tokenizer is None:
    tokenizer = data.tokenizer
    options |= dict(
      file=remote.find_vocabulary(data.tokenizer_file, data.data_dir, data.manual_dir),
      vocab_size=data.tokenizer_size,
      lower_text=data.lower_text,
      lower_pieces=data.lower_pieces,
      restrict=data.restrict_vocabulary,
    )
  return data_tokens.tokenize(corpus, Path(data.data_dir, "tokens"), tokenizer, **options)


# What tokens were encoded with, by the setting.
_SETTINGS = {
  "tokenizer": "kind",
  "lower_text": "lower_text",
  "lower_pieces": "lower_pieces",
  "restrict_vocabulary": "restrict",
  "tokenizer_size": "vocab_size",
}


def _open_ready(config: ConfigDict, run_tokenizer: Tokenizer | None) -> Tokens:
  """The tokens in `data.path`; a `UserError` if they were encoded with other settings."""
  data, boundaries = config.data, _text_boundaries(config)
  ready = data_tokens.open_tokens(data.path, boundaries=boundaries)
  before = dict(files.load_json(Path(data.path, files.RECORD)).get("made", {}))
  sizes = before.get("unigram"), boundaries and boundaries.key
  pairs: dict[str, Any] = {
    "model.boundaries": [f"unigram, {size}" if size else "none of the text" for size in sizes]
  }
  tokenizer = _loaded_tokenizer(config, run_tokenizer)
  if tokenizer is None:
    pairs |= {f"data.{x}": (before[y], data[x]) for x, y in _SETTINGS.items() if y in before}
  elif tokenizer.to_json() != ready.tokenizer.to_json():
    raise UserError(f"data.path: expected tokens of the run's vocabulary, got {data.path}")
  has_documents = ready.documents is not None or data.documents == "joined"
  pairs["data.documents"] = data.documents if has_documents else "joined", data.documents
  for key, (expected, got) in pairs.items():
    if json.dumps(expected) != json.dumps(got):
      raise UserError(f"{key}: expected {expected}, as in the tokens of {data.path}, got {got}")
  return ready


def _loaded_tokenizer(config: ConfigDict, run_tokenizer: Tokenizer | None) -> Tokenizer | None:
  """The tokenizer of the run that the settings name, if any, or its copy, `run_tokenizer`."""
  data = config.data
  key = "data.tokenizer_file" if data.tokenizer_file else "train.init_from"
  source = data.tokenizer_file or config.train.init_from
  tokenizer = run_tokenizer if source else None
  if source and tokenizer is None:
    folder = find(source)
    is_released = hnet.find(folder) is not None
    tokenizer = BytesWithEnds() if is_released else load_tokenizer(folder, key)
  if tokenizer is None:
    if source and not data.tokenizer_file:
      raise UserError(f"{key}: expected the folder of a run with its tokenizer, got {source}")
    return None
  # Of an unassigned character, which no vocabulary has.
  if run_tokenizer is None and tokenizer.unknown_id is None and not len(tokenizer.encode("\u0378")):
    expected = "expected a tokenizer with bytes or an unknown token"
    raise UserError(f"{key}: {expected}, got {source}, whose drops what it does not know")
  fields = {**tokenizer.fields(), "tokenizer": tokenizer.kind}
  for name in ("tokenizer", "lower_text", "lower_pieces"):
    # A default may not have been chosen.
    if data[name] not in ("characters", False, fields.get(name)):
      expected = f"expected {fields.get(name, False)}, as in the tokenizer of {source}"
      raise UserError(f"data.{name}: {expected}, got {data[name]}")
  return tokenizer
