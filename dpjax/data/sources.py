"""Corpora: any source becomes three splits, each a range of a UTF-8 file.

a plain .txt                                    the file itself
anything compressed, JSON lines, Parquet,       data_dir/texts/NAME/train.txt, and the offsets
several files, or a named corpus                of the documents in train.offsets.npy
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dpjax import files
from dpjax.config.registry import load_plugins
from dpjax.config.schema import Data
from dpjax.data import readers, remote
from dpjax.data.mixture import parse
from dpjax.data.remote import Files, Source
from dpjax.data.text_file import (
  SPLITS,
  JoinedText,
  TextFile,
  TextParts,
  cut_splits,
  has_documents,
  open_plain,
  write_texts,
)
from dpjax.errors import UserError, unknown
from dpjax.files import JsonObject

PYTHON_MANUAL = "python_manual"


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A text in three splits.

  Attributes:
    name: the name of the corpus.
    splits: "train", "valid" and "test", each the parts of its text, as strings.
    about: the text's origin and preparation, as JSON values.
  """

  name: str
  splits: Mapping[str, TextParts]
  about: JsonObject = dataclasses.field(default_factory=dict)


def load_corpus(source: str | Path | Data = "", **settings: str | Path | bool | tuple) -> Corpus:
  """Opens a text, which is written to `data_dir` first unless it is a plain file.

    load_corpus("my.txt")
    load_corpus("notes.jsonl", isolate_documents=True)
    load_corpus(name="wikitext103", data_dir="data")

  Args:
    source: the `path` of a text, or the settings `config.data`.
      A path is a UTF-8 text, cut into the splits in order, at line ends if it has lines; a .jsonl
      with one document per line; a .parquet with one per row; several such files in sequence, given
      by a pattern with *; or a folder with train.txt, valid.txt (or validation.txt) and test.txt,
      or these as .jsonl or .parquet. In a folder without these, each .txt file is a document, also
      in subfolders; documents are cut into the splits in the order of their paths, or taken from
      subfolders train, valid and test. All may be compressed (.gz, .xz, .bz2, .zst).
    **settings: fields of `dpjax.config.Data`; the tokenizer is ignored.
      Without a path, `name` is "python_manual", the language manual that comes with Python, or
      another name of `dpjax data list`, hf:OWNER/NAME or tfds:NAME.
      With a `mixture`, each split joins those of all sources.
      Of `split_fractions`, in bytes, train takes the rounding error. Documents of .jsonl, .parquet
      and folders are not cut, and each split has at least one. A text with a `separator` is cut at
      line ends, perhaps within a document.
      Folders and patterns leave out the files that dpjax keeps in `data_dir`.

  Raises:
    UserError: `data.<setting>: expected ..., got ...`: a text that is missing, empty, too short
      or not readable, an unknown name, or a failed download.
  """
  data = source if isinstance(source, Data) else Data(path=str(source))
  data = dataclasses.replace(data, **settings)
  if data.mixture:
    corpora = [_open_source(each, data) for each in parse(data.mixture)]
  else:
    corpora = [_open(data)]
  if data.text_field != "text" and not any("text_field" in corpus.about for corpus in corpora):
    expected = "expected 'text' unless data.path is of .jsonl or .parquet"
    raise UserError(f"data.text_field: {expected}, got {data.text_field!r}")
  if data.separator and not any(map(_takes_separator, corpora)):
    expected = "expected '' unless data.path is of .txt files with several documents"
    raise UserError(f"data.separator: {expected}, got {data.separator!r}")
  if not data.mixture:
    return corpora[0]
  splits = {x: JoinedText([corpus.splits[x] for corpus in corpora]) for x in SPLITS}
  about = {"sources": [{"name": corpus.name, **corpus.about} for corpus in corpora]}
  return Corpus("+".join(corpus.name for corpus in corpora), splits, about)


def _takes_separator(corpus: Corpus) -> bool:
  """Whether a separator marks, or would mark, where documents begin."""
  return "files" in corpus.about and ("documents" in corpus.about or not _has_documents(corpus))


def _has_documents(corpus: Corpus) -> bool:
  return all(map(has_documents, corpus.splits.values()))


def _open_source(source: str, data: Data) -> Corpus:
  """Opens a source of a mixture."""
  changes = {"name": source, "path": ""} if is_name(source) else {"path": source}
  try:
    return _open(dataclasses.replace(data, **changes))
  except UserError as error:
    expected = "expected sources that can be opened"
    raise UserError(f"data.mixture: {expected}, got {source} ({error})") from error


def _open(data: Data) -> Corpus:
  """The corpus at a path, or else with a name; finds its documents if they are isolated."""
  if data.path:
    corpus = _open_path(data)
    marks = readers.line_pattern(data.separator) if data.separator else ""
  else:
    corpus = _open_name(data)
    marks = find_source(data.name).documents
  if not data.isolate_documents or _has_documents(corpus):
    return corpus
  if not marks:
    raise UserError(
      f"data.isolate_documents: expected False for {corpus.name}, which does not say where "
      "documents begin, got True (.jsonl, .parquet, a folder of .txt files, .txt with "
      "data.separator, datasets of the Hugging Face Hub and some corpora have documents)"
    )
  splits = {
    split: dataclasses.replace(text, marks=marks)
    for split, text in corpus.splits.items()
    if isinstance(text, TextFile)
  }
  if len([*itertools.islice(splits["train"].find_marks(), 2)]) < 2:
    missing = f"line {data.separator!r}" if data.path else repr(marks)
    raise UserError(
      "data.isolate_documents, data.separator: expected a text with marks between documents, got "
      f"{corpus.name}, which has no {missing}"
    )
  return Corpus(corpus.name, splits, {**corpus.about, "documents": marks})


def _open_path(data: Data) -> Corpus:
  """The text of a file, a pattern or a folder; `about` identifies its files."""
  path = Path(os.path.expanduser(data.path))
  texts: dict[str, TextFile] = {}
  ids = []
  about: JsonObject = {"files": ids}
  try:
    by_split = _find_files(path, data.data_dir)
    for split, paths in by_split.items():
      # In a folder, each file is a document, except train.txt, valid.txt and test.txt.
      are_documents = path.is_dir() and (not split or paths[0].parent != path)
      texts[split], each = _open_files(paths, data, are_documents=are_documents)
      ids += each.pop("files")
      about |= each
  except OSError as error:
    raise UserError(
      f"data.path: expected a readable text file or folder, got "
      f"{error.filename or path} ({error.strerror})"
    ) from error
  if "" in texts:
    about["split_fractions"] = list(data.split_fractions)
    texts = cut_splits(texts[""], data.split_fractions, str(path))
  return Corpus(path.name if path.is_dir() else _corpus_name(by_split[""]), texts, about)


def _is_compressed(path: Path) -> bool:
  return path.suffix in readers.COMPRESSED


def _file_type(path: Path) -> str:
  """The type of a file, one of `readers.RECORDS` or ".txt"; ignores a compression suffix."""
  suffix = Path(path.stem).suffix if _is_compressed(path) else path.suffix
  return suffix if suffix in readers.RECORDS else ".txt"


def _stems(split: str) -> tuple[str, ...]:
  """The names that the file of a split may have, without suffixes."""
  return (split, "validation") if split == "valid" else (split,)


def _find_split(folder: Path, split: str, suffixes: Sequence[str] = (".txt",)) -> Path | None:
  """The file of a split, plain or compressed; None if there is none."""
  for suffix in suffixes:
    for compression in ("", *readers.COMPRESSED):
      for stem in _stems(split):
        if (path := folder / f"{stem}{suffix}{compression}").exists():
          return path
  return None


def _corpus_name(paths: Sequence[Path]) -> str:
  """The name of a file without its suffixes, or of the folder of several files."""
  if len(paths) > 1:
    return paths[0].resolve().parent.name
  return Path(paths[0].stem).stem if _is_compressed(paths[0]) else paths[0].stem


def _find_files(path: Path, data_dir: str | Path) -> dict[str, list[Path]]:
  """The files of each split, or, under the key "", those of one text to cut."""
  if not path.is_dir():
    paths = [path]
    if not path.exists() and glob.has_magic(str(path)):
      matches = [Path(x) for x in glob.glob(str(path), recursive=True) if not os.path.isdir(x)]
      if not (paths := _without_own(matches, path, data_dir)):
        raise UserError(f"data.path: expected files that match a pattern, got none for {path}")
    return {"": paths}
  by_split = {}
  for split in SPLITS:
    if file := _find_split(path, split, (".txt", *readers.RECORDS)):
      by_split[split] = [file]
    elif folder := next((path / x for x in _stems(split) if (path / x).is_dir()), None):
      if not (paths := _text_files(folder, data_dir)):
        raise UserError(f"data.path: expected .txt files, each a document, got none in {folder}")
      by_split[split] = paths
  if not by_split and (paths := _text_files(path, data_dir)):
    return {"": paths}
  for split in SPLITS:
    if split not in by_split:
      raise UserError(
        f"data.path: expected {' or '.join(f'{x}.txt' for x in _stems(split))} in the "
        f"folder, or as .jsonl or .parquet, or a folder of documents, got {path} without"
      )
  return by_split


def _text_files(folder: Path, data_dir: str | Path) -> list[Path]:
  """The .txt files in a folder, except those that dpjax keeps in data_dir.

  What is neither a file nor a folder, such as a pipe, is among them, so that it is refused; but not
  the links with which Emacs locks a file, .#NAME.
  """
  endings = (".txt", *(f".txt{suffix}" for suffix in readers.COMPRESSED))
  if folder.resolve().parent == folder.resolve():
    raise UserError(f"data.path: expected a folder of documents, got {folder}, that of all files")
  paths = (x for x in folder.rglob("*.txt*") if x.name.endswith(endings) and not x.is_dir())
  return _without_own([x for x in paths if not x.name.startswith(".#")], folder, data_dir)


def _without_own(paths: Sequence[Path], source: Path, data_dir: str | Path) -> list[Path]:
  """The files of a folder or pattern, sorted, except those that dpjax keeps in data_dir.

  Otherwise the next start would read them as further texts. If the source itself is in such a
  folder, the user means its files.
  """
  kept = [Path(data_dir, name).resolve() for name in ("downloads", "manual", "texts", "tokens")]
  kept = [folder for folder in kept if not source.resolve().is_relative_to(folder)]
  is_own = {
    folder: any(folder.resolve().is_relative_to(x) for x in kept)
    for folder in {path.parent for path in paths}
  }
  return sorted(path for path in paths if not is_own[path.parent])


def _open_files(
  paths: Sequence[Path], data: Data, *, are_documents: bool
) -> tuple[TextFile, JsonObject]:
  """The text of files, and values that identify it."""
  (file_type, *others) = sorted({_file_type(path) for path in paths})
  if others:
    names = ", ".join([file_type, *others])
    raise UserError(f"data.path: expected files of one type, got {names}")
  for path in paths:
    path.stat()  # raises if it is missing
    if not path.is_file():
      expected = "expected a readable text file or folder"
      raise UserError(f"data.path: {expected}, got {path} (not a regular file)")
  ids = identify(paths)
  about: JsonObject = {"files": ids if len(ids) == 1 else [_digest(ids)]}
  read: Callable[[Path], Iterable[str]] = readers.read_blocks
  if file_type != ".txt":
    about["text_field"] = data.text_field
    read = functools.partial(readers.read_records, columns=[data.text_field])
    are_documents = True
  elif are_documents:
    read = _read_document
  elif len(paths) == 1 and not _is_compressed(paths[0]):
    return open_plain(paths[0]), about
  inputs = {**about, "are_documents": are_documents}
  name = f"{files.short_name(_corpus_name(paths))}_{_digest(inputs)[:8]}"

  def read_all() -> Iterator[tuple[str, str]]:
    return (("train", text) for path in paths for text in read(path))

  folder = Path(data.data_dir, "texts", name)
  texts, _ = write_texts(folder, {"of": inputs}, read_all, are_documents=are_documents)
  return texts["train"], about


def find_texts(data: Data) -> list[Path]:
  """The files of `data.path` and of the paths in `data.mixture`; [] if one cannot be found.

  Of a folder of tokens, it is the file that has their checksums.
  """
  paths = [data.path] if data.path else []
  paths += [source for source in parse(data.mixture) if not is_name(source)]
  texts = []
  try:
    for path in [Path(os.path.expanduser(x)) for x in paths]:
      if (path / "train.bin").is_file():
        texts.append(path / files.RECORD)
      else:
        by_split = _find_files(path, data.data_dir)
        texts += itertools.chain.from_iterable(by_split.values())
    return texts if all(path.is_file() for path in texts) else []
  except (OSError, UserError):
    return []


def identify(paths: Sequence[Path]) -> list[list]:
  """The paths, sizes and modification times of files, which stay equal while no file changes."""
  return [[str(x.resolve()), x.stat().st_size, x.stat().st_mtime_ns] for x in paths]


def describe_content(paths: Sequence[Path]) -> str:
  """The size and a checksum of what files contain, which copies share."""
  size = sum(path.stat().st_size for path in paths)
  sums = [files.checksum(path) for path in paths]
  digest = sums[0] if len(sums) == 1 else _digest(sums)
  return f"{size:,} bytes with SHA-256 {digest[:12]}"


def _read_document(path: Path) -> list[str]:
  return [readers.read_text(path)]


def _digest(value: JsonObject | list) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_manual(_: Files) -> Iterator[tuple[str, str]]:
  """The language manual of Python."""
  try:
    from pydoc_data.topics import topics
  except ImportError as error:
    raise UserError(
      "data.name: expected a Python with its manual (pydoc_data.topics), got one without; install "
      "it (Debian, Ubuntu: apt install libpython3-stdlib) or give your own text with data.path"
    ) from error
  yield "train", "\n".join(topics[topic] for topic in sorted(topics))


SOURCES = {
  PYTHON_MANUAL: Source(
    "the language manual that comes with Python",
    _read_manual,
    licence="PSF",
    size="0.4 MB",
    source="docs.python.org/3/reference",
    version=sys.hexversion,
  )
}


def register_corpus(name: str, source: Source) -> None:
  """Registers a corpus for `data.name`; a `UserError` if the name is taken or not an identifier."""
  if name in SOURCES or not name.isidentifier():
    raise UserError(f"name: expected a new one, of letters, digits and _, got {name!r}")
  SOURCES[name] = source


def find_source(name: str) -> Source:
  """The corpus with a registered name, hf:NAME or tfds:NAME; a `UserError` for any other."""
  for prefix, source in remote.PREFIXES.items():
    if name.startswith(prefix):
      return source(name)
  if name not in SOURCES:
    load_plugins()
  if name not in SOURCES:
    others = ("hf:OWNER/NAME of the Hugging Face Hub", "tfds:NAME of TensorFlow Datasets")
    is_old = len(SOURCES) == 1  # installed before the entry point existed
    note = " (in a clone, `pip install -e .` adds the papers' corpora)" if is_old else ""
    raise unknown("data.name", (*SOURCES, *others, "or a data.path"), name, note)
  return SOURCES[name]


def is_name(source: str) -> bool:
  """Whether a source of a mixture is the name of a corpus, not a path."""
  load_plugins()
  return source in SOURCES or source.startswith(tuple(remote.PREFIXES))


def may_be_named(source: str, name: str) -> bool:
  """Whether a source of a mixture may give a corpus of this name; its files may be missing."""
  if is_name(source):
    return name == _folder_name(source)
  if glob.has_magic(source):  # The files that it matches give the name.
    return True
  path = Path(os.path.expanduser(source))
  return name in (path.name, _corpus_name([path]))


def _folder_name(name: str) -> str:
  """The folder of a named corpus in data_dir/texts."""
  return re.sub(r"[^\w.-]", "_", name)


def read_source(name: str, all_files: Files) -> Iterator[tuple[str, str]]:
  """The pieces of a named corpus.

  train.txt, valid.txt and test.txt, plain or compressed, in a folder NAME of the manual folder
  take precedence.
  """
  folder = all_files.manual_dir / name
  paths = {x: path for x in SPLITS if (path := _find_split(folder, x))}
  if not paths:
    return find_source(name).read(all_files)
  if missing := [f"{split}.txt" for split in SPLITS if split not in paths]:
    raise UserError(
      f"data.manual_dir: expected train.txt, valid.txt and test.txt, got {folder} "
      f"without {', '.join(missing)}"
    )
  return ((split, piece) for split, path in paths.items() for piece in readers.read_blocks(path))


def _open_name(data: Data) -> Corpus:
  """The text of a named corpus, in data_dir; missing splits are cut from the end of train."""
  name = data.name
  source = find_source(name)
  all_files = Files(data.data_dir, data.manual_dir)
  folder = all_files.texts / _folder_name(name)
  are_documents = source.yields_documents
  about: JsonObject = {"name": name, "version": source.version, "are_documents": are_documents}

  def read() -> Iterator[tuple[str, str]]:
    print(f"preparing {folder.name} in {folder.parent}", flush=True)
    return read_source(name, all_files)

  splits, about["texts"] = write_texts(folder, about, read, are_documents=are_documents)
  if len(splits) < len(SPLITS):
    fractions = [
      0.0 if split in splits else fraction
      for split, fraction in zip(SPLITS, data.split_fractions, strict=True)
    ]
    splits = {**cut_splits(splits.pop("train"), fractions, folder.name), **splits}
    about["split_fractions"] = list(data.split_fractions)
  return Corpus(folder.name, splits, about)
