"""The tokens of a run: found in data_dir, where all runs share them, or made there."""

import hashlib
import json
import os
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

# Paths that may lead elsewhere in another process: the first process prepares what is in them.
_LOCAL_PATHS = ("data.path", "data.data_dir", "data.manual_dir")


def tokenize_only(config: ConfigDict, workdir: str | Path) -> Tokens:
  """Makes the folder of a run and its tokens, as `train` does first."""
  workdir = Path(os.path.expanduser(workdir))
  check_processes(config, workdir)
  config = sections.expand_paths(config)
  rules.check(config)
  with run_files.lock(workdir):
    data = open_data(config, workdir)
    run_files.write_config(workdir, config)
  return data


def check_processes(config: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` in every process unless all have the same settings, folder and text."""
  check_settings(config, workdir)
  if jax.process_count() > 1:
    _check_files(sections.expand_paths(config))


def check_settings(config: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` in every process unless all have the same settings and folder."""
  settings = {key: repr(value) for key, value in sections.flatten(config).items()}
  processes.check_same({"workdir": os.path.realpath(workdir), **settings})


def _check_files(config: ConfigDict) -> None:
  """Raises a `UserError` in every process unless paths lead to the same, and texts are equal."""
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
  return prepare_tokens(config, workdir / "data", fresh=_is_fresh(config, workdir))


def find_or_make_tokens(config: ConfigDict, workdir: str | Path) -> Tokens:
  """The tokens that `train` would read, made in data_dir if missing; writes nothing to `workdir`.

  Raises:
    UserError: as for `train`, as far as its folder and its tokens go.
  """
  workdir = Path(os.path.expanduser(workdir))
  check_processes(config, workdir)
  config = sections.expand_paths(config)
  rules.check(config)
  run_files.check_workdir(workdir)
  folder = workdir / "data"
  if not _is_fresh(config, workdir) and folder.exists():
    return find_tokens(config, read_tokens(config, folder))
  processes.on_first_process(lambda: _make_tokens(config))
  return processes.on_every_process(lambda: _make_tokens(config))


def _is_fresh(config: ConfigDict, workdir: Path) -> bool:
  """Whether a run begins in a folder, whose tokens, if any, may be from other settings.

  Raises a `UserError` if the run that is there has other settings, or a setting names no run.
  """
  resumes = run_files.resumes(workdir, config)
  runs = {"train.init_from": config.train.init_from}
  if run_files.needs_run(config):
    runs["model.boundaries.run"] = config.model.boundaries.run
  for key, folder in runs.items():
    if folder and not resumes and not run_files.is_run(run_files.find(folder)):
      raise UserError(f"{key}: expected the folder of a run, got {folder}")
  files.check_local("data.data_dir", config.data.data_dir)
  folder = (workdir / "data").resolve()
  data_dir = Path(config.data.data_dir).resolve()
  if data_dir.is_relative_to(folder):
    raise UserError(f"data.data_dir: expected a folder outside of {folder}, got {data_dir}")
  is_fresh = not (resumes and run_files.has_saved(workdir))
  if is_fresh:
    check_apart(config.data, workdir)
  return is_fresh


def check_apart(data: ConfigDict, workdir: Path) -> None:
  """Raises a `UserError` if a run would write among its texts.

  These are folders that are the run's own, patterns that also match its files, which the next start
  would read as texts, and what lies where it keeps its data.
  """
  texts = {data.path: "data.path"} if data.path else {}
  if data.mixture:
    texts |= {x: "data.mixture" for x in mixture.parse(data.mixture) if not sources.is_name(x)}
  run = Path(os.path.realpath(workdir))
  written = [run / name for name in run_files.ALWAYS_WRITTEN]
  for text, key in texts.items():
    path = os.path.realpath(os.path.expanduser(text))
    is_inside = Path(path) == run or Path(path).is_relative_to(run / "data")
    if is_inside or any(_matches(each, path) for each in written):
      raise UserError(
        f"workdir: expected a folder of its own, got {workdir}, where {key} has texts, {text}, "
        "among which the run would write its files"
      )


def _matches(path: Path, pattern: str) -> bool:
  """Whether a path matches a pattern, in which ** matches any folders."""
  root, folders, rest = pattern.partition("**")
  if folders:
    return path.is_relative_to(root) and path.match(os.path.basename(rest) or "*")
  return path.match(pattern)


def prepare_tokens(config: ConfigDict, folder: Path, *, fresh: bool = False) -> Tokens:
  """Opens the corpus in `folder`, and tokenizes it first if it is missing.

  The tokens are in data_dir/tokens, for all runs with the same data, and `folder` refers to them.
  Without `config.data.tokenizer.file`, `config.train.init_from` gives the tokenizer. `fresh`
  replaces an existing corpus.

  Raises:
    ValueError: `data.<setting>: ...`, or the folder is damaged or cannot be written.
  """

  def prepare() -> None:
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
  """The tokens of a run; missing ones are recreated in data_dir."""
  return data if data.has_tokens else _make_on_all_processes(config, data)


def with_documents(config: ConfigDict, data: Tokens) -> Tokens:
  """The same corpus with its documents, in data_dir, made if missing."""
  config = config.copy_and_resolve_references()
  config.data.isolate_documents = True
  return _make_on_all_processes(config, data)


def read_tokens(config: ConfigDict, folder: Path) -> Tokens:
  """Opens the corpus in `folder`, whose tokens may be missing; see `open_tokens`."""
  boundaries = _text_boundaries(config)
  data = open_tokens(folder, config.data.data_dir, boundaries)
  if (data.boundaries is None) != (boundaries is None):
    expected = "none of the text" if boundaries is None else "those of the text"
    raise UserError(
      f"{folder / files.RECORD}: expected boundaries as in the run's settings, {expected}, got "
      "the opposite"
    )
  return data


def _make_on_all_processes(config: ConfigDict, before: Tokens) -> Tokens:
  processes.on_first_process(lambda: _make_again(config, before))
  # Each reads its own text.
  return processes.on_every_process(lambda: _make_again(config, before))


def _make_again(config: ConfigDict, before: Tokens) -> Tokens:
  """Recreates the tokens of a run from the same text."""
  try:
    data = _make_tokens(config, before.tokenizer)
  except UserError as error:
    expected = f"{before.folder}: expected to make the tokens of a run again"
    raise UserError(f"{expected}, got: {error}") from error
  if _identity(data) != _identity(before):
    expected = f"{before.folder}: expected the text, vocabulary and Unigram model of the run"
    raise UserError(f"{expected}, got others with its settings")
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
    num_sources = len(ready.counts["train"].get("sources", []))
    pairs["data.mixture"] = (
      f"{num_sources} sources",
      f"{len(mixture.parse(data.mixture))} sources",
    )
  if tokenizer is None:
    for name, value in origin.get("tokenizer", {}).items():
      pairs[_tokenizer_key(name)] = (value, data.tokenizer.get(name))
  elif tokenizer.to_json() != ready.tokenizer.to_json():
    raise UserError(f"data.path: expected tokens of the run's vocabulary, got {data.path}")
  for key, (expected, got) in pairs.items():
    if json.dumps(expected) != json.dumps(got):
      raise UserError(f"{key}: expected {expected}, as in the tokens of {data.path}, got {got}")
  return ready


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
    raise UserError(f"{key}: {expected}, got {source}, whose drops what it does not know")
  fields = {**tokenizer.fields(), "name": tokenizer.name}
  for name in ("name", "lower_text", "lower_pieces"):
    value = config.data.tokenizer.get(name)
    # A default may not be the user's choice.
    if value not in (None, "characters", False, fields.get(name)):
      expected = f"expected {fields.get(name, False)}, as in the tokenizer of {source}"
      raise UserError(f"{_tokenizer_key(name)}: {expected}, got {value}")
  return tokenizer
