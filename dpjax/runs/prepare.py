"""The tokens of a run: found in data_dir, where all runs share them, or made there."""

import json
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.config import schema
from dpjax.config.setting import ConfigDict
from dpjax.data import remote
from dpjax.data.encoding import tokenize
from dpjax.data.sources import load_corpus
from dpjax.data.token_files import Tokens, open_tokens, write_reference
from dpjax.errors import UserError, not_writable
from dpjax.interop import hnet
from dpjax.models.build import build_boundaries
from dpjax.runs.run_files import find, on_first_process
from dpjax.text.characters import BytesWithEnds
from dpjax.text.factory import load_tokenizer
from dpjax.text.tokenizer import Tokenizer


def prepare_tokens(config: ConfigDict, folder: Path, *, fresh: bool = False) -> Tokens:
  """Opens the corpus in `folder`, and tokenizes it first if it is missing.

  The tokens are in data_dir/tokens, for all runs with the same data, and `folder` refers to them.
  Without `config.data.tokenizer.file`, `config.train.init_from` gives the tokenizer. `fresh`
  replaces an existing corpus.

  Raises:
    ValueError: `data.<setting>: ...`, or the folder is damaged or cannot be written.
  """

  def prepare() -> None:
    before = None if fresh or not folder.exists() else read_tokens(config, folder)
    if before is None or not before.has_tokens:
      data = _encode(config) if before is None else _encode_again(config, before)
      try:
        write_reference(data, folder)
      except OSError as error:
        raise not_writable("workdir", folder, error) from error

  on_first_process(prepare)
  data = read_tokens(config, folder)
  data.check()
  return data


def find_tokens(config: ConfigDict, data: Tokens) -> Tokens:
  """The tokens of a run; missing ones are recreated in data_dir."""
  return data if data.has_tokens else _on_all_processes(config, data)


def with_documents(config: ConfigDict, data: Tokens) -> Tokens:
  """The same corpus with its documents, in data_dir, made if missing."""
  config = config.copy_and_resolve_references()
  config.data.isolate_documents = True
  return _on_all_processes(config, data)


def read_tokens(config: ConfigDict, folder: Path) -> Tokens:
  """Opens the corpus in `folder`, whose tokens may be missing; see `open_tokens`."""
  return open_tokens(folder, config.data.data_dir, _text_boundaries(config))


def _on_all_processes(config: ConfigDict, before: Tokens) -> Tokens:
  on_first_process(lambda: _encode_again(config, before) and None)
  return _encode(config, before.tokenizer)


def _encode_again(config: ConfigDict, before: Tokens) -> Tokens:
  """Recreates the tokens of a run from the same text."""
  try:
    data = _encode(config, before.tokenizer)
  except UserError as error:
    expected = f"{before.folder}: expected to make the tokens of a run again"
    raise UserError(f"{expected}, got: {error}") from error
  identities = (
    (
      {split: x["sha256"] for split, x in each.counts.items()},
      each.tokenizer.to_json(),
      each.fitted,
    )
    for each in (data, before)
  )
  if len({*map(str, identities)}) > 1:
    expected = f"{before.folder}: expected the text, vocabulary and Unigram model of the run"
    raise UserError(f"{expected}, got others with its settings")
  return data


def _text_boundaries(config: ConfigDict) -> Any:
  """The object that computes boundaries from the text, or None."""
  return next((x.text_boundaries for x in build_boundaries(config.model)[:1]), None)


def _encode(config: ConfigDict, run_tokenizer: Tokenizer | None = None) -> Tokens:
  """The tokens in `data.path` or data_dir, encoded if missing, with `run_tokenizer` if needed."""
  data, options = config.data, {}
  tokenizer: Any = _loaded_tokenizer(config, run_tokenizer)
  if data.path and Path(data.path, "train.bin").is_file():
    return _open_ready(config, tokenizer)
  corpus = load_corpus(schema.Data(**data))
  if tokenizer is None:
    options = dict(data.tokenizer)
    tokenizer = options.pop("name")
    options["file"] = remote.find_vocabulary(options["file"], data.data_dir, data.manual_dir)
  options |= dict(shared=True, boundaries=_text_boundaries(config))
  return tokenize(corpus, Path(data.data_dir, "tokens"), tokenizer, **options)


def _open_ready(config: ConfigDict, tokenizer: Tokenizer | None) -> Tokens:
  """The tokens in `data.path`; a `UserError` if they were encoded with other settings."""
  data, boundaries = config.data, _text_boundaries(config)
  ready = open_tokens(data.path, boundaries=boundaries)
  origin = files.load_json(Path(data.path, files.RECORD)).get("origin")
  if origin is None:
    raise UserError(f"data.path: expected tokens of this version, got earlier ones in {data.path}")
  keys = origin.get("unigram"), boundaries and boundaries.key
  isolate = data.isolate_documents
  pairs: dict[str, Any] = {
    "model.boundaries": [f"unigram, {key}" if key else "none of the text" for key in keys],
    "data.isolate_documents": [isolate and ready.documents is not None, isolate],
  }
  if tokenizer is None:
    for name, value in origin.get("tokenizer", {}).items():
      pairs[_tokenizer_key(name)] = value, data.tokenizer.get(name)
  elif tokenizer.to_json() != ready.tokenizer.to_json():
    raise UserError(f"data.path: expected tokens of the run's vocabulary, got {data.path}")
  for key, (expected, got) in pairs.items():
    if json.dumps(expected) != json.dumps(got):
      raise UserError(f"{key}: expected {expected}, as in the tokens of {data.path}, got {got}")
  return ready


def _tokenizer_key(name: str) -> str:
  return "data.tokenizer" if name == "name" else f"data.tokenizer.{name}"


def _loaded_tokenizer(config: ConfigDict, run_tokenizer: Tokenizer | None) -> Tokenizer | None:
  """The tokenizer of the run that the settings name, if any, or its copy, `run_tokenizer`."""
  file, init_from = config.data.tokenizer.file, config.train.init_from
  key, source = ("data.tokenizer.file", file) if file else ("train.init_from", init_from)
  tokenizer = run_tokenizer if source else None
  if source and tokenizer is None:
    folder = find(source)
    is_released = hnet.find(folder) is not None
    tokenizer = BytesWithEnds() if is_released else load_tokenizer(folder, key)
  if tokenizer is None:
    if source and not file:
      raise UserError(f"{key}: expected the folder of a run with its tokenizer, got {source}")
    return None
  # U+0378 is unassigned, so that no vocabulary has it.
  if run_tokenizer is None and tokenizer.unknown_id is None and not len(tokenizer.encode("\u0378")):
    expected = "expected a tokenizer with bytes or an unknown token"
    raise UserError(f"{key}: {expected}, got {source}, whose drops what it does not know")
  fields = {**tokenizer.fields(), "name": tokenizer.name}
  for name in ("name", "lower_text", "lower_pieces"):
    value = config.data.tokenizer.get(name)
    # A default may not be the user's choice.
    if value not in (None, "characters", False, fields.get(name)):
      expected = f"expected {fields.get(name, False)}, as in the tokenizer of {source}"
      raise UserError(f"{_tokenizer_key(name)}: {expected}, got {value}")
  return tokenizer
