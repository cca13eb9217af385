"""Texts by path or by name, in three splits, streamed in parts.

Named, compressed, cleaned and shortened texts are written once, in data_dir/texts/NAME.
"""

import bisect
import functools
import glob
import hashlib
import inspect
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpjax import files
from dpjax.data import catalog
from dpjax.data.corpus import (
  SPLITS,
  Chunks,
  Corpus,
  Documents,
  FileDocuments,
  JsonLines,
  Marked,
  Mixed,
  Text,
  build_texts,
  cut_splits,
  line_pattern,
  open_text,
)
from dpjax.data.mixture import parse
from dpjax.data.sources import reading
from dpjax.errors import UserError

CLEANING = 1  # Raise it when the same text is cleaned differently.


class _Unused(UserError):
  """A setting that one source has no use for, though others of a mixture may."""

  def __init__(self, setting: str, message: str):
    super().__init__(f"data.{setting}: {message}")
    self.setting = setting


def load_corpus(
  name: str = "python_manual",
  path: str | Path = "",
  split_fractions: Sequence[float] = (0.9, 0.05, 0.05),
  *,
  language: str = "",
  clean: bool = False,
  max_characters: Sequence[int] = (0, 0, 0),
  data_dir: str | Path = "data",
  manual_dir: str | Path = "",
  documents: str = "joined",
  text_field: str = "text",
  separator: str = "",
  mixture: str = "",
) -> Corpus:
  """Opens a text, which is read only when needed, unless it must be downloaded or cleaned first.

  Args:
    name: without a path: "python_manual", the language manual that comes with Python, or a
      name of `dpjax.data.catalog`.
    path: a UTF-8 text, cut into the splits in order, at line ends if it has lines; or .jsonl, a
      document on each line; or .parquet, a document in each row; or several such files, one after
      the other, by a pattern with *; or a folder with train.txt, valid.txt (or validation.txt)
      and test.txt, or .jsonl, or .parquet. In a folder without these, each .txt file is a
      document, also in subfolders; they are cut into the splits in the order of their paths, or
      taken from subfolders train, valid and test. All may be compressed (.gz, .xz, .bz2, .zst).
    split_fractions: the shares of a single text, in bytes; train takes the rounding error.
    language: "en", "fi", ..., for a corpus in several languages, and for `clean`.
    clean: whether to apply `dpjax.text.cleaning.clean`.
    max_characters: the clean characters to take from the beginning of train, valid and test; 0
      takes all. With all three, a corpus with a train split alone is cut into them in order.
    data_dir: the folder for named and cleaned texts.
    manual_dir: the folder of files downloaded by hand; "" is data_dir/manual.
    documents: "isolated" makes each split `dpjax.data.corpus.Documents`, of the same text.
    text_field: the field of the text in .jsonl, or its column in .parquet.
    separator: the line between two documents in .txt.
    mixture: "SOURCE=WEIGHT,...", names and paths in the place of one; each split is then
      `dpjax.data.corpus.Mixed`, and the other arguments are those of each source: language, field
      and separator of those that have a use for them.

  Raises:
    UserError: `data.<setting>: expected ..., got ...`: a text that is missing, empty, too short
      or not readable, an unknown name or language, or a failed download.
  """
  if mixture:
    each = {key: x for key, x in locals().items() if key not in ("name", "path", "mixture")}
    return _mixed(mixture, **each)
  marks, texts = "", Path(data_dir, "texts")
  if path:
    corpus = _open_path(Path(path), split_fractions, text_field, texts)
    marks = line_pattern(separator) if separator else ""
  elif name == catalog.PYTHON_MANUAL:
    content = _python_manual()
    about = {"name": name, "sha256": hashlib.sha256(content).hexdigest()}
    about |= {"split_fractions": list(split_fractions)}
    corpus = Corpus(name, cut_splits(content, split_fractions, name), about)
  else:
    entry = catalog.find(name, language)
    if language and not entry.languages and not clean:
      expected = f"expected '' for {name}, unless data.clean is True"
      raise _Unused("language", f"{expected}, got {language!r}")
    # Without a head, `open_named` takes all.
    is_head = all(0 < x <= most for x, most in zip(max_characters, entry.head, strict=False))
    corpus = catalog.open_named(name, language, data_dir, manual_dir, is_head=is_head)
    if not (set(corpus.splits) == {"train"} and all(max_characters)):
      corpus = _cut_missing(corpus, split_fractions, whole_lines=entry.has_json_lines)
    if entry.has_json_lines:
      lines: Any = corpus.splits
      splits = {split: JsonLines(text, "text") for split, text in lines.items()}
      corpus = Corpus(corpus.name, splits, corpus.about)
    marks = entry.documents
  has_own = any(isinstance(text, Documents) for text in corpus.splits.values())
  if text_field != "text" and not any(isinstance(x, JsonLines) for x in corpus.splits.values()):
    expected = "expected 'text' unless data.path is of .jsonl or .parquet"
    raise _Unused("text_field", f"{expected}, got {text_field!r}")
  if separator and (not path or has_own):
    expected = "expected '' unless data.path is of .txt files with several documents"
    raise _Unused("separator", f"{expected}, got {separator!r}")
  if has_own and documents == "isolated" and any(max_characters):
    raise UserError(
      "data.max_characters: expected (0, 0, 0) with documents that are files or lines, got "
      f"{tuple(max_characters)}"
    )
  if clean or any(max_characters):
    corpus = _cleaned(corpus, language if clean else "", max_characters, texts)
  return _with_documents(corpus, "" if clean else marks) if documents == "isolated" else corpus


def _mixed(mixture: str, **settings: Any) -> Corpus:
  """The corpus of the sources of a mixture."""
  corpora, refused = [], []
  for source in parse(mixture):
    place = {"name": source} if catalog.is_name(source) else {"path": os.path.expanduser(source)}
    refused.append({})
    try:
      corpora.append(_open_source({**place, **settings}, refused[-1]))
    except UserError as error:
      expected = "expected sources that can be opened"
      raise UserError(f"data.mixture: {expected}, got {source} ({error})") from error
  for setting in refused[0]:
    if all(setting in each for each in refused):
      raise refused[0][setting]
  splits = {split: Mixed([corpus.splits[split] for corpus in corpora]) for split in SPLITS}
  about = {"sources": [{"name": corpus.name, **corpus.about} for corpus in corpora]}
  return Corpus("+".join(corpus.name for corpus in corpora), splits, about)


def _open_source(settings: Mapping[str, Any], refused: dict[str, UserError]) -> Corpus:
  """The corpus of one source, without the settings that it has no use for, which it notes."""
  try:
    return load_corpus(**settings)
  except _Unused as error:
    refused[error.setting] = error
    default = inspect.signature(load_corpus).parameters[error.setting].default
    return _open_source({**settings, error.setting: default}, refused)


def _with_documents(corpus: Corpus, marks: str) -> Corpus:
  """The corpus with known documents in every split."""
  if all(isinstance(text, Documents) for text in corpus.splits.values()):
    return corpus
  if not marks:
    raise UserError(
      f"data.documents: expected joined for {corpus.name}, which does not say where documents "
      "begin, got isolated (a folder of .txt files, .jsonl, .txt with data.separator, and "
      "childrens_books, openwebtext, wiki40b, wikitext*, cc100 and lm1b have documents, unless "
      "cleaned)"
    )
  splits = {x: Marked(t, marks) if isinstance(t, Chunks) else t for x, t in corpus.splits.items()}
  train = splits["train"]
  if isinstance(train, Marked) and not any(train.marks()):
    raise UserError(
      f"data.documents, data.separator: expected a text with marks between documents, got "
      f"{corpus.name}, in which no {marks!r} is found"
    )
  return Corpus(corpus.name, splits, {**corpus.about, "documents": marks})


def _open_path(path: Path, fractions: Sequence[float], field: str, texts: Path) -> Corpus:
  """The text of a file or a folder; `about` identifies its files."""
  try:
    if path.is_dir():
      return _open_folder(path, fractions, field, texts)
    files = _matching(path)
    text, name = _open_files(files, field, texts), _name(files)
    identity: list[Any] = [*map(_identity, files)]
    identity = identity if len(files) == 1 else [_digest(identity)]
    about: dict[str, Any] = {"files": identity, "split_fractions": list(fractions)}
    if isinstance(text, Chunks):
      return Corpus(name, cut_splits(text.content, fractions, str(path)), about)
    lines = cut_splits(text.lines.content, fractions, str(path), whole_lines=True)
    about["text_field"] = field
    return Corpus(name, {x: JsonLines(part, text.field) for x, part in lines.items()}, about)
  except OSError as error:
    raise UserError(
      f"data.path: expected a readable text file or folder, got "
      f"{error.filename or path} ({error.strerror})"
    ) from error


def _matching(path: Path) -> list[Path]:
  """The file of a path, or those of a pattern, in the order of their names."""
  if path.exists() or not glob.has_magic(str(path)):
    return [path]
  found = sorted(Path(x) for x in glob.glob(str(path), recursive=True) if os.path.isfile(x))
  if not found:
    raise UserError(f"data.path: expected files that match a pattern, got none for {path}")
  return found


def _name(files: Sequence[Path]) -> str:
  """The name of a corpus: that of its file, or of the folder of several."""
  first = files[0]
  if len(files) > 1:
    return first.resolve().parent.name
  return Path(first.stem).stem if first.suffix in reading.OPENERS else first.stem


def _open_folder(path: Path, fractions: Sequence[float], field: str, texts: Path) -> Corpus:
  """The splits in a folder, or its files as documents."""
  found = {split: _find_split(path, split) for split in SPLITS}
  if not any(found.values()) and (files := _text_files(path)):
    about = {"documents": _digest([*map(_identity, files)]), "split_fractions": list(fractions)}
    return Corpus(path.name, _cut_files(files, fractions, path), about)
  splits: dict[str, Text] = {}
  about: dict[str, Any] = {"files": []}
  for split, file in found.items():
    if file is None:
      names = [f"{split}.txt"] + ["validation.txt"] * (split == "valid")
      raise UserError(
        f"data.path: expected {' or '.join(names)} in the folder, or as .jsonl or .parquet, "
        f"packed, or a folder of documents, got {path} without"
      )
    if file.suffix:
      splits[split] = _open_files([file], field, texts)
      about["files"].append(_identity(file))
      about |= {"text_field": field} if isinstance(splits[split], JsonLines) else {}
    else:
      files = _text_files(file)
      if not files:
        raise UserError(f"data.path: expected .txt files, each a document, got none in {file}")
      splits[split] = FileDocuments(files)
      about["files"].append(_digest([*map(_identity, files)]))
  return Corpus(path.name, splits, about)


def _find_split(folder: Path, split: str) -> Path | None:
  """The file of a split, or the folder of its documents."""
  stems = (split, "validation") if split == "valid" else (split,)
  folders = (folder / stem for stem in stems if (folder / stem).is_dir())
  kinds = (".txt", ".jsonl", ".parquet")
  return reading.find_split(folder, split, kinds) or next(folders, None)


def _text_files(folder: Path) -> list[Path]:
  endings = tuple(f".txt{packing}" for packing in reading.OPENERS)
  return sorted(x for x in folder.rglob("*.txt*") if x.name.endswith(endings) and x.is_file())


def _cut_files(files: Sequence[Path], fractions: Sequence[float], source: Path) -> dict:
  """Divides whole files among the splits by size on disk, at least one to each."""
  if len(files) < len(SPLITS):
    raise UserError(
      f"data.path: expected files for three splits, each a document, got {len(files)} in {source}"
    )
  ends = [*itertools.accumulate(file.stat().st_size for file in files)]
  first, second = (bisect.bisect(ends, ends[-1] * x) for x in (fractions[0], 1 - fractions[2]))
  first = min(max(1, first), len(files) - 2)
  second = min(max(first + 1, second), len(files) - 1)
  parts = files[:first], files[first:second], files[second:]
  return {split: FileDocuments(part) for split, part in zip(SPLITS, parts, strict=True)}


def _open_files(paths: Sequence[Path], field: str, texts: Path) -> Chunks | JsonLines:
  """The text of files; that of several, or of one that is not plain text, is written once."""
  path, kinds = paths[0], {_kind(path) for path in paths}
  if len(kinds) > 1:
    raise UserError(f"data.path: expected files of one kind, got {', '.join(sorted(kinds))}")
  is_read = ".parquet" in kinds or len(paths) > 1 and ".jsonl" in kinds
  is_packed = path.suffix != "" and path.suffix in reading.OPENERS
  text = None
  if path.is_file() and (is_read or is_packed or len(paths) > 1):
    ids: Any = [*map(_identity, paths)]
    inputs = {"unpacked": ids[0] if len(ids) == 1 else _digest(ids)}
    if is_read:
      inputs["field"] = field
    name = Path(path.stem).stem if len(paths) == 1 else _name(paths)
    folder = texts / f"{files.short_name(name)}_{_digest([*ids, field] if is_read else ids)[:8]}"
    read = functools.partial(_records, field) if is_read else reading.text_file

    def pieces() -> Iterator[tuple[str, str]]:
      return (("train", piece) for file in paths for piece in read(file))

    text = build_texts(folder, inputs, pieces)[0]["train"]
  text = text or open_text(path)
  if kinds & {".jsonl", ".parquet"}:
    return JsonLines(text, "text" if is_read else field)
  return text


def _kind(path: Path) -> str:
  """The ending that says what a file holds, without that of its packing."""
  plain = Path(path.stem) if path.suffix in reading.OPENERS else path
  return plain.suffix if plain.suffix in (".jsonl", ".parquet") else ".txt"


def _records(field: str, path: Path) -> Iterator[str]:
  return map(reading.json_line, reading.texts(path, [field]))


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _identity(path: Path) -> list:
  """The path, size and time of a file, which differ for another text."""
  found = path.stat()
  return [str(path.resolve()), found.st_size, found.st_mtime_ns]


def _cut_missing(corpus: Corpus, fractions: Sequence[float], *, whole_lines: bool) -> Corpus:
  """The splits of a corpus; missing ones are cut from the end of its train split."""
  if {*SPLITS} <= {*corpus.splits}:
    return corpus
  train: Any = corpus.splits["train"]
  wanted = [0.0 if x in corpus.splits else y for x, y in zip(SPLITS, fractions, strict=True)]
  splits = {**cut_splits(train.content, wanted, train.source, whole_lines=whole_lines)}
  splits |= {x: text for x, text in corpus.splits.items() if x != "train"}
  return Corpus(corpus.name, splits, {**corpus.about, "split_fractions": list(fractions)})


def _cleaned(corpus: Corpus, language: str, max_characters: Sequence[int], texts: Path) -> Corpus:
  """A corpus cleaned, cut short or both."""
  about = {**corpus.about, "clean": language, "max_characters": list(max_characters)}
  about["cleaning"] = CLEANING if language else 0
  folder = texts / f"{files.short_name(corpus.name)}_{_digest(about)[:8]}"
  read = functools.partial(_clean_and_cut, corpus, language, max_characters)
  splits, sizes = build_texts(folder, {"made_of": about}, read)
  return Corpus(corpus.name, splits, {**about, "texts": sizes})


def _clean_and_cut(
  corpus: Corpus, language: str, max_characters: Sequence[int]
) -> Iterator[tuple[str, str]]:
  """Pairs of split and part; a missing split begins where the one before it ends."""
  from dpjax.text.cleaning import clean_chunks  # its table takes a moment to load

  rest: Iterator[str] = iter(())
  for split, most in zip(SPLITS, max_characters, strict=True):
    if split in corpus.splits:
      text = corpus.splits[split]
      rest = iter(clean_chunks(text, language) if language else text)
    size = 0
    for part in rest:
      taken = part[: most - size] if most else part
      size += len(taken)
      yield split, taken
      if most and size == most:
        rest = itertools.chain([part[len(taken) :]], rest)
        break
    if not size:
      raise UserError(
        "data.max_characters: expected a text long enough for every split, got none left for the "
        f"{split} split of {corpus.name}"
      )
    if size < most:
      has = f"{corpus.name}: the {split} split has {size:,} characters"
      print(f"{has}, fewer than the {most:,} of data.max_characters")


def _python_manual() -> bytes:
  try:
    from pydoc_data.topics import topics
  except ImportError as error:
    raise UserError(
      "data.name: expected a Python with its manual (pydoc_data.topics), got one without; install "
      "it (Debian, Ubuntu: apt install libpython3-stdlib) or give your own text with data.path"
    ) from error
  return "\n".join(topics[topic] for topic in sorted(topics)).encode()
