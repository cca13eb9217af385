"""The tokens of a run: found in data_dir, where all runs share them, or made there."""

import fnmatch
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from dpjax import files
from dpjax.config import rules, schema, sections
from dpjax.config.setting import ConfigDict
from dpjax.data import mixture, remote, sources
from dpjax.data.encoding import tokenize
from dpjax.data.token_files import Tokens, open_tokens, write_reference
from dpjax.errors import UserError, not_writable
from dpjax.interop import hnet
from dpjax.models.build import build_boundaries
from dpjax.runs import processes, run_files
from dpjax.text.boundaries import TextBoundaries
from dpjax.text.characters import BytesWithEnds
from dpjax.text.tokenizer import Tokenizer, load_tokenizer

# Paths that may lead to different folders in different processes; the first process prepares their
# contents.
_LOCAL_PATHS = ("data.path", "data.data_dir", "data.manual_dir")


def tokenize_only(config: ConfigDict, workdir: str | Path) -> Tokens:
  """Makes the folder of a run and its tokens, as `train` does first."""
  workdir = Path(os.path.expanduser(workdir))
  check_settings_and_files(config, workdir)
  config = sections.expand_paths(config)
  rules.check(config)
  with run_files.lock(workdir):
    data = open_data(config, workdir)
    run_files.write_config(workdir, config)
  return data


def check_settings_and_files(config: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` in every process unless all have the same settings, folder and text."""
  check_settings(config, workdir)
  if jax.process_count() > 1:
    _check_files(sections.expand_paths(config))


def check_settings(config: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` in every process unless all have the same settings and folder."""
  settings = {key: repr(value) for key, value in sections.flatten(config).items()}
  processes.check_same({"workdir": os.path.realpath(workdir), **settings})


def _check_files(config: ConfigDict) -> None:
  """Compares the processes' files.

  Raises a `UserError` in every process unless all paths lead to the same files and all texts are
  equal.
  """
  real_paths = {
    key: os.path.realpath(value)
    for key, value, setting in sections.walk(config)
    if isinstance(value, str) and setting.is_path and key not in _LOCAL_PATHS
    if os.path.exists(value)
  }
  processes.check_same(real_paths)
  data = schema.Data(**config.data)
  texts = sources.find_texts(data)
  # Only copies have to be read.
  if not processes.have_same(str(sources.identify(texts))):
    content = processes.on_every_process(lambda: sources.describe_content(texts) if texts else None)
    key = "data.mixture" if data.mixture else "data.path"
    processes.check_same({f"the text of {key}": content})


def open_data(config: ConfigDict, workdir: Path) -> Tokens:
  """Opens the tokens of a run that trains in a locked folder; see `prepare_tokens`.

  Raises:
    UserError: the run has other settings, a setting names no run, or as for `prepare_tokens`.
  """
  begins = processes.on_every_process(lambda: _check_start(config, workdir))
  return prepare_tokens(config, workdir / "data", fresh=begins)


def find_or_make_tokens(config: ConfigDict, workdir: str | Path) -> Tokens:
  """The tokens that `train` would read, made in data_dir if missing; writes nothing to `workdir`.

  Raises:
    UserError: as for `train`, as far as its folder and its tokens go.
  """
  workdir = Path(os.path.expanduser(workdir))
  check_settings_and_files(config, workdir)
  config = sections.expand_paths(config)
  rules.check(config)
  run_files.check_workdir(workdir)
  folder = workdir / "data"
  begins = processes.on_every_process(lambda: _check_start(config, workdir))
  has_tokens = not begins and folder.exists()
  processes.check_same({f"the tokens of the run in {workdir}": "some" if has_tokens else "none"})
  if has_tokens:
    return find_tokens(config, processes.on_every_process(lambda: read_tokens(config, folder)))
  return processes.first_then_all(lambda: _make_tokens(config))


def _check_start(config: ConfigDict, workdir: Path) -> bool:
  """Returns whether a run begins in a folder, whose tokens, if any, may be from other settings.

  Raises a `UserError` if the run that is there has other settings, a setting names no run, data_dir
  is an address or in the run's data/, or as for `check_apart`.
  """
  resumes = run_files.resumes(workdir, config)
  runs = {"train.init_from": config.train.init_from}
  if run_files.needs_run(config):
    runs["model.boundaries.run"] = config.model.boundaries.run
  for key, address in runs.items():
    if address and not resumes and not run_files.is_run(run_files.find(address)):
      raise UserError(f"{key}: expected the folder of a run, got {address}")
  files.check_local("data.data_dir", config.data.data_dir)
  data_folder = (workdir / "data").resolve()
  data_dir = Path(config.data.data_dir).resolve()
  if data_dir.is_relative_to(data_folder):
    raise UserError(f"data.data_dir: expected a folder outside of {data_folder}, got {data_dir}")
  begins = not (resumes and run_files.has_saved(workdir))
  if begins:
    check_apart(config.data, workdir)
  return begins


def check_apart(data: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` if a run would write among its own texts.

  They are the run's folder or lie in its data/, or a pattern also matches files that the run
  writes, which the next start would read as texts.
  """
  texts = {data.path: "data.path"} if data.path else {}
  if data.mixture:
    texts |= {x: "data.mixture" for x in mixture.parse(data.mixture) if not sources.is_name(x)}
  run = Path(os.path.realpath(workdir))
  written = [run / name for name in run_files.ALWAYS_WRITTEN]
  for text, key in texts.items():
    path = Path(os.path.realpath(os.path.expanduser(text)))
    is_inside = path == run or path.is_relative_to(run / "data")
    if is_inside or any(_matches(each.parts, path.parts) for each in written):
      raise UserError(
        f"workdir: expected a folder of its own, got {workdir}: the run would write its files "
        f"among the texts of {key}, {text}"
      )


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
  """Whether `glob` finds the path with these parts by a pattern's parts; ** is any folders.

  ("a", "b", "c.txt"), ("a", "**", "*.txt")  ->  True
  """
  if not pattern:
    return not parts
  if pattern[0] == "**" and _matches(parts, pattern[1:]):
    return True
  if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
    return False
  if pattern[0] == "**":
    return _matches(parts[1:], pattern)
  return fnmatch.fnmatch(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def prepare_tokens(config: ConfigDict, folder: Path, *, fresh: bool = False) -> Tokens:
  """Opens the corpus in `folder`, and tokenizes it first if it is missing.

  The tokens are in data_dir/tokens, for all runs with the same data, and `folder` refers to them.
  Without `config.data.tokenizer.file`, `config.train.init_from` gives the tokenizer. `fresh`
  replaces an existing corpus.

  Raises:
    ValueError: `data.<setting>: ...`, or the folder is damaged or cannot be written.
  """

  def prepare() -> None:
    files.bring_back(folder)
    if fresh or not folder.exists():
      data = _make_tokens(config)
    else:
      before = read_tokens(config, folder)
      if before.has_tokens:
        return
      data = _make_again(config, before)
    try:
      write_reference(data, folder)
    except OSError as error:
      raise not_writable("workdir", folder, error) from error

  def read() -> Tokens:
    data = read_tokens(config, folder)
    data.check()
    return data

  processes.on_first_process(prepare)
  data = processes.on_every_process(read)
  digest = hashlib.sha256(repr(_identity(data)).encode()).hexdigest()
  processes.check_same({"the text and vocabulary of the run": digest[:12]})
  return data


def find_tokens(config: ConfigDict, data: Tokens) -> Tokens:
  """The tokens of a run; missing ones are recreated in data_dir. All processes must call it."""
  has_tokens = data.has_tokens
  if processes.have_same(str(has_tokens)) and has_tokens:
    return data
  return processes.first_then_all(lambda: _make_again(config, data))


def with_documents(config: ConfigDict, data: Tokens) -> Tokens:
  """The same corpus with its documents, in data_dir, made if missing."""
  config = config.copy_and_resolve_references()
  config.data.isolate_documents = True
  return processes.first_then_all(lambda: _make_again(config, data))


def read_tokens(config: ConfigDict, folder: Path) -> Tokens:
  """Opens the corpus in `folder`, whose tokens may be missing; see `open_tokens`."""
  boundaries = _text_boundaries(config)
  data = open_tokens(folder, config.data.data_dir, boundaries)
  if (data.boundaries is None) != (boundaries is None):
    expected = "no boundaries" if boundaries is None else "boundaries"
    got = "some" if boundaries is None else "none"
    raise UserError(
      f"{folder / files.RECORD}: expected {expected} of the text, as in the run's settings, got "
      f"{got}"
    )
  return data


def _make_again(config: ConfigDict, before: Tokens) -> Tokens:
  """Recreates the tokens of a run from the same text."""
  try:
    data = _make_tokens(config, before.tokenizer)
  except UserError as error:
    expected = "expected to be able to recreate the run's tokens"
    raise UserError(f"{before.folder}: {expected}, got: {error}") from error
  if _identity(data) != _identity(before):
    expected = "expected its settings to give the run's text, vocabulary and Unigram model"
    raise UserError(f"{before.folder}: {expected}, got different ones")
  return data


def _identity(data: Tokens) -> tuple[dict[str, str], str, bytes]:
  """The checksums of the text, the vocabulary, and the model fitted for the boundaries."""
  checksums = {split: counts["sha256"] for split, counts in data.counts.items()}
  return checksums, data.tokenizer.to_json(), data.fitted


def _text_boundaries(config: ConfigDict) -> TextBoundaries | None:
  """The object that computes boundaries from the text, or None."""
  stages = build_boundaries(config.model)
  return stages[0].text_boundaries if stages else None


def _make_tokens(config: ConfigDict, run_tokenizer: Tokenizer | None = None) -> Tokens:
  """The tokens in `data.path` or data_dir, encoded if missing, with `run_tokenizer` if needed."""
  data = config.data
  tokenizer = _loaded_tokenizer(config, run_tokenizer)
  if data.path and Path(data.path, "train.bin").is_file():
    return _open_ready(config, tokenizer)
  corpus = sources.load_corpus(schema.Data(**data))
  folder = Path(data.data_dir, "tokens")
  boundaries = _text_boundaries(config)
  if tokenizer is not None:
    return tokenize(corpus, folder, tokenizer, shared=True, boundaries=boundaries)
  settings = dict(data.tokenizer)
  name = settings.pop("name")
  if settings["file"]:
    settings["file"] = remote.find_vocabulary(settings["file"], data.data_dir, data.manual_dir)
  return tokenize(corpus, folder, name, shared=True, boundaries=boundaries, **settings)


def _open_ready(config: ConfigDict, tokenizer: Tokenizer | None) -> Tokens:
  """The tokens in `data.path`; a `UserError` if they were encoded with other settings."""
  data = config.data
  boundaries = _text_boundaries(config)
  ready = open_tokens(data.path, boundaries=boundaries)
  origin = files.load_json(Path(data.path, files.RECORD)).get("origin")
  if origin is None:
    raise UserError(f"data.path: expected tokens of this version, got earlier ones in {data.path}")
  pairs = {
    "model.boundaries": (
      _describe_boundaries(origin.get("unigram")),
      _describe_boundaries(None if boundaries is None else boundaries.key),
    ),
    "data.isolate_documents": (
      data.isolate_documents and ready.documents is not None,
      data.isolate_documents,
    ),
  }
  if data.mixture:  # Without one, the tokens of a mixture are one text.
    _check_sources([*mixture.parse(data.mixture)], origin, data.path)
  if tokenizer is None:
    for name, value in origin.get("tokenizer", {}).items():
      pairs[_tokenizer_key(name)] = (value, data.tokenizer.get(name))
  elif tokenizer.to_json() != ready.tokenizer.to_json():
    raise UserError(f"data.path: expected tokens of the run's vocabulary, got {data.path}")
  for key, (expected, got) in pairs.items():
    if json.dumps(expected) != json.dumps(got):
      raise UserError(f"{key}: expected {expected}, as in the tokens of {data.path}, got {got}")
  return ready


def _check_sources(sources_given: Sequence[str], origin: files.JsonObject, path: str) -> None:
  """Raises a `UserError` unless tokens are those of the sources given, in their order."""
  names = [source["name"] for source in origin.get("corpus", {}).get("sources", [])]
  are_same = len(names) == len(sources_given)
  if not are_same or not all(map(sources.may_be_named, sources_given, names)):
    expected = f"the sources {', '.join(names)}, in this order" if names else "none"
    raise UserError(
      f"data.mixture: expected {expected}, as in the tokens of {path}, got "
      f"{', '.join(sources_given)}"
    )


def _describe_boundaries(key: object) -> str:
  return f"unigram, {key}" if key else "none of the text"


def _tokenizer_key(name: str) -> str:
  return "data.tokenizer" if name == "name" else f"data.tokenizer.{name}"


def _loaded_tokenizer(config: ConfigDict, run_tokenizer: Tokenizer | None) -> Tokenizer | None:
  """The tokenizer of the run that the settings name, if any, or its copy, `run_tokenizer`."""
  file = config.data.tokenizer.file
  key = "data.tokenizer.file" if file else "train.init_from"
  source = file or config.train.init_from
  if not source:
    return None
  tokenizer = run_tokenizer
  if tokenizer is None:
    folder = run_files.find(source)
    is_released = hnet.find(folder) is not None
    tokenizer = BytesWithEnds() if is_released else load_tokenizer(folder, key)
  if tokenizer is None:
    if not file:
      raise UserError(f"{key}: expected the folder of a run with its tokenizer, got {source}")
    return None
  # U+0378 is unassigned, so that no vocabulary has it.
  if run_tokenizer is None and tokenizer.unknown_id is None and not len(tokenizer.encode("\u0378")):
    expected = "expected a tokenizer with bytes or an unknown token"
    raise UserError(f"{key}: {expected}, got {source}, whose tokenizer drops unknown characters")
  fields = {**tokenizer.fields(), "name": tokenizer.name}
  for name in ("name", "lower_text", "lower_pieces"):
    value = config.data.tokenizer.get(name)
    # A default value may not have been the user's choice.
    if value not in (None, "characters", False, fields.get(name)):
      expected = f"expected {fields.get(name, False)}, as in the tokenizer of {source}"
      raise UserError(f"{_tokenizer_key(name)}: {expected}, got {value}")
  return tokenizer
