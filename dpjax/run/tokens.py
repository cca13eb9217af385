"""Prepares the tokens that `config.data` describes, shared by all runs."""

from pathlib import Path

from dpjax.data import catalog
from dpjax.data.corpus import Corpus
from dpjax.data.text import load_corpus
from dpjax.data.tokens import Tokens, open_tokens, tokenize, write_reference
from dpjax.errors import UserError
from dpjax.registry import ConfigDict
from dpjax.run import build
from dpjax.run.workdir import not_writable, on_first_process
from dpjax.text.tokens import Tokenizer, load_tokenizer


def prepare_data(config: ConfigDict, folder: Path, *, anew: bool = False) -> Tokens:
  """Opens the corpus in `folder`, and makes it first if it is missing.

  The tokens are made in data_dir/tokens, for all runs with the same data, and `folder` refers
  to them. Unless `config.data.tokenizer_file` names a vocabulary, training from another run
  (`config.train.initial_run`) takes over its tokenizer.

  Args:
    config: describes the corpus in `config.data`.
    folder: the folder, the same for all processes of a run.
    anew: whether to replace an existing corpus.

  Returns:
    The corpus as tokens.

  Raises:
    ValueError: `data.<setting>: expected ..., got ...`, or the folder is damaged or
      cannot be written.
  """

  def make() -> None:
    is_there = folder.exists() and not anew
    if not is_there or not _open(config, folder).has_tokens:
      made = _find_again(config, folder) if is_there else _make_tokens(config)
      try:
        write_reference(made, folder)
      except OSError as error:
        raise not_writable(folder, error) from error
    _open(config, folder).check()

  on_first_process(make)
  return _open(config, folder)


def find_tokens(config: ConfigDict, folder: Path) -> Tokens:
  """Opens the corpus in `folder`, and recreates missing tokens in data_dir.

  Raises:
    ValueError: the tokens cannot be recreated, or differ.
  """
  data = _open(config, folder)
  if data.has_tokens:
    return data
  on_first_process(lambda: _find_again(config, folder) and None)
  return _make_tokens(config, data.tokenizer)


def with_documents(config: ConfigDict, data: Tokens) -> Tokens:
  """The same corpus with its documents, in data_dir, made if missing.

  Raises:
    ValueError: its documents are unknown, or the vocabulary differs.
  """
  config = config.copy_and_resolve_references()
  config.data.documents = "isolated"
  on_first_process(lambda: _make_tokens(config, data.tokenizer) and None)
  made = _make_tokens(config, data.tokenizer)
  texts = ({split: x["sha256"] for split, x in each.counts.items()} for each in (made, data))
  if made.tokenizer.to_json() != data.tokenizer.to_json() or len({*map(str, texts)}) > 1:
    raise UserError(
      f"data.documents: expected {data.name} to have the run's text and vocabulary also when "
      "isolated, got another text or vocabulary"
    )
  return made


def _open(config: ConfigDict, folder: Path) -> Tokens:
  return open_tokens(folder, config.data.data_dir, build.text_boundaries(config))


def _find_again(config: ConfigDict, folder: Path) -> Tokens:
  """Recreates the tokens that the run began with."""
  before = _open(config, folder)
  gone = f"{before.folder}: expected the tokens of {folder.parent}, which are gone"
  try:
    made = _make_tokens(config, before.tokenizer)
  except UserError as error:
    raise UserError(
      f"{gone}; `dpjax train --workdir={folder.parent} --prepare_only` makes them "
      f"again from the text, but: {error}"
    ) from error
  if _contents(made) != _contents(before):
    raise UserError(
      f"{gone}, got another text, vocabulary or Unigram model with the run's settings"
    )
  return made


def _contents(data: Tokens) -> tuple:
  """The settings that determine tokens and boundaries."""
  return data.counts, data.tokenizer.to_json(), data.learned


def _make_tokens(config: ConfigDict, own: Tokenizer | None = None) -> Tokens:
  """The tokens in data_dir, made if missing; `own` is the tokenizer of a run that has one."""
  corpus, settings = _load_corpus(config), config.data
  tokens, boundaries = Path(settings.data_dir, "tokens"), build.text_boundaries(config)
  known = _known_tokenizer(config, own)
  if known is not None:
    return tokenize(corpus, tokens, known, shared=True, boundaries=boundaries)
  return tokenize(
    corpus,
    tokens,
    settings.tokenizer,
    shared=True,
    boundaries=boundaries,
    file=catalog.find_vocabulary(settings.tokenizer_file, settings.data_dir, settings.manual_dir),
    vocab_size=settings.tokenizer_size,
    lower_text=settings.lower_text,
    lower_pieces=settings.lower_pieces,
    restrict=settings.restrict_vocabulary,
  )


def _known_tokenizer(config: ConfigDict, own: Tokenizer | None) -> Tokenizer | None:
  """The tokenizer of the run that the settings name, if any; of a begun run, its own copy."""
  settings, initial = config.data, config.train.initial_run
  key = "data.tokenizer_file" if settings.tokenizer_file else "train.initial_run"
  place = settings.tokenizer_file or initial
  if not place:
    return None
  known = own or load_tokenizer(place, key)
  if known is None and not settings.tokenizer_file:
    raise UserError(f"{key}: expected the folder of a run with its tokenizer, got {initial}")
  if known is None:
    return None
  # Of an unassigned character, which no vocabulary has.
  if own is None and known.unknown_id is None and not len(known.encode("\u0378")):
    raise UserError(
      f"{key}: expected a tokenizer with bytes or an unknown token, got {place}, whose drops what "
      "it does not know"
    )
  has = {**known.fields(), "tokenizer": known.kind}
  for name in ("tokenizer", "lower_text", "lower_pieces"):
    # What is the default may not have been asked for.
    if settings[name] not in ("characters", False, has.get(name)):
      raise UserError(
        f"data.{name}: expected {has.get(name, False)}, as in the tokenizer of {place}, got "
        f"{settings[name]}"
      )
  return known


def _load_corpus(config: ConfigDict) -> Corpus:
  settings = config.data
  return load_corpus(
    settings.name,
    settings.path,
    settings.split_fractions,
    language=settings.language,
    clean=settings.clean,
    max_characters=settings.max_characters,
    data_dir=settings.data_dir,
    manual_dir=settings.manual_dir,
    documents=settings.documents,
    text_field=settings.text_field,
    separator=settings.separator,
  )
