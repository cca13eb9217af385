"""Texts by name or by path, in three splits, streamed in parts.

Named, cleaned and shortened texts are made once, in data_dir/texts/NAME, as train.txt,
valid.txt and test.txt.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpjax.data import catalog, making
from dpjax.data.chunks import Text
from dpjax.data.documents import FORMS, Documents, JsonLines, Marked, line_pattern
from dpjax.data.download import Files
from dpjax.data.paths import SPLITS, cut_splits, open_path, open_split
from dpjax.data.sources import reading
from dpjax.errors import UserError

CLEANING = 1  # to be raised when the same text comes out another


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A text in three splits.

  Attributes:
    name: the name of the corpus.
    splits: "train", "valid" and "test".
    about: the text's origin and preparation, as JSON values.
  """

  name: str
  splits: Mapping[str, Text]
  about: dict = dataclasses.field(default_factory=dict)


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
) -> Corpus:
  """Opens a text, which is read only when needed, unless it must be made first.

  Args:
    name: without a path: "python_manual", the language manual that comes with Python (its
      text differs a little between Python's versions), or a name of `dpjax.data.catalog`.
    path: a UTF-8 text file, which is cut into the splits in this order, at line ends
      if it has lines; or a folder with train.txt, valid.txt (or validation.txt)
      and test.txt. A .jsonl file has one document on each line, as have train.jsonl and so
      on. In a folder without these, each .txt file is a document, also in subfolders; the
      documents are cut into the splits in the order of their paths, or taken from
      subfolders train, valid and test. All may be compressed (.gz, .xz, .bz2).
    split_fractions: the shares of a single text, in bytes; train takes the rounding error.
    language: "en", "fi", ..., for a corpus in several languages, and for `clean`.
    clean: whether to apply `dpjax.text.cleaning.clean`.
    max_characters: the number of clean characters to take from the beginning of train, valid
      and test; 0 takes all. If all three are given, a corpus with a train split alone is cut
      into the three in this order.
    data_dir: the folder for named and cleaned texts.
    manual_dir: the folder of files downloaded by hand; "" is data_dir/manual.
    documents: "isolated" makes each split `dpjax.data.documents.Documents`, which knows
      where documents begin; "joined" need not. The text and its splits are the same.
    text_field: the field of the text in .jsonl.
    separator: the line between two documents in .txt.

  Returns:
    The corpus.

  Raises:
    UserError: `data.<setting>: expected ..., got ...`: a missing path, an empty file or
      split, a folder without a split, no permission, an unknown name or language, a
      file that must be downloaded by hand, or a failed download.
  """
  marks = ""
  if path:
    corpus = Corpus(*open_path(Path(path), split_fractions, text_field, Path(data_dir, "texts")))
    marks = line_pattern(separator) if separator else ""
  elif name == catalog.PYTHON_MANUAL:
    content = _python_manual()
    about = {
      "name": name,
      "sha256": hashlib.sha256(content).hexdigest(),
      "split_fractions": list(split_fractions),
    }
    corpus = Corpus(name, cut_splits(content, split_fractions, name), about)
  else:
    entry = catalog.find(name, language)
    if language and not entry.languages and not clean:
      raise UserError(
        f"data.language: expected '' for {name}, unless data.clean is True, got {language!r}"
      )
    is_enough = [0 < most <= held for most, held in zip(max_characters, entry.head, strict=False)]
    is_head = bool(is_enough) and all(is_enough)
    corpus = open_named(name, language, data_dir, manual_dir, is_head=is_head)
    if not (set(corpus.splits) == {"train"} and all(max_characters)):
      corpus = _cut_missing(corpus, split_fractions)
    marks = entry.documents
  if text_field != "text" and not any(isinstance(x, JsonLines) for x in corpus.splits.values()):
    raise UserError(
      f"data.text_field: expected 'text' unless data.path is of .jsonl, got {text_field!r}"
    )
  has_own = any(isinstance(text, Documents) for text in corpus.splits.values())
  if separator and (not path or has_own):
    raise UserError(
      f"data.separator: expected '' unless data.path is of .txt files with several documents, "
      f"got {separator!r}"
    )
  if has_own and documents == "isolated" and any(max_characters):
    raise UserError(
      f"data.max_characters: expected (0, 0, 0) with documents that are files or lines, got "
      f"{tuple(max_characters)}"
    )
  if clean or any(max_characters):
    corpus = _cleaned(corpus, language if clean else "", max_characters, Path(data_dir, "texts"))
  return _with_documents(corpus, "" if clean else marks) if documents == "isolated" else corpus


def _with_documents(corpus: Corpus, marks: str) -> Corpus:
  """The corpus with known documents in every split."""
  splits: dict[str, Any] = dict(corpus.splits)
  if all(isinstance(text, Documents) for text in splits.values()):
    return corpus
  if not marks:
    raise UserError(
      f"data.documents: expected joined for {corpus.name}, which does not say where documents "
      f"begin, got isolated ({FORMS})"
    )
  splits = {x: t if isinstance(t, Documents) else Marked(t, marks) for x, t in splits.items()}
  train = splits["train"]
  if isinstance(train, Marked) and not train.has_marks():
    raise UserError(
      f"data.documents, data.separator: expected a text with marks between documents, got "
      f"{corpus.name}, in which no {marks!r} is found"
    )
  return Corpus(corpus.name, splits, {**corpus.about, "documents": marks})


def open_named(
  name: str,
  language: str,
  data_dir: str | Path,
  manual_dir: str | Path = "",
  *,
  is_head: bool = False,
) -> Corpus:
  """Opens a named corpus with the splits that it has, and makes it first if necessary.

  If the manual folder has a folder of that name (with languages, wiki40b/fi) with train.txt,
  valid.txt and test.txt, plain or compressed, those are the splits.

  Args:
    name: see `dpjax.data.catalog.find`.
    language: for a corpus in several languages.
    data_dir: the folder of texts and downloads.
    manual_dir: see `load_corpus`.
    is_head: whether the first part is enough, if the corpus has one.

  Raises:
    UserError: see `load_corpus`.
  """
  entry = catalog.find(name, language)
  language = language if entry.languages else ""
  # The whole text begins alike.
  is_head = is_head and bool(entry.head) and not is_made(name, data_dir, language)
  about = {"name": name, "language": language, "is_head": is_head, "version": entry.version}
  folder = _named_folder(name, data_dir, language, is_head)

  def make(partial: Path) -> dict[str, Any]:
    print(f"preparing {folder.name} in {folder.parent}", flush=True)
    files = Files(data_dir, manual_dir)
    settings: dict[str, Any] = {"language": language} if entry.languages else {}
    settings |= {"is_head": is_head} if entry.head else {}
    given = _given_by_hand(files.manual_dir / name / language)
    return _write(partial, given or entry.read(files, **settings), name)

  record = making.make_once(folder, about, make)
  splits = {split: open_split(folder, split) for split in SPLITS if split in record["texts"]}
  about["texts"] = record["texts"]
  return Corpus("_".join(filter(None, (_stem(name), language))), splits, about)


def is_made(name: str, data_dir: str | Path, language: str = "", is_head: bool = False) -> bool:
  """Whether the text of a corpus has been made."""
  folder = _named_folder(name, data_dir, language, is_head)
  return making.read_record(folder, {"version": catalog.find(name, language).version}) is not None


def _named_folder(name: str, data_dir: str | Path, language: str, is_head: bool) -> Path:
  stem = "_".join(filter(None, (_stem(name), language, "head" * is_head)))
  return Path(data_dir, "texts", stem)


def _stem(name: str) -> str:
  return re.sub(r"[^\w.-]", "_", name)


def _given_by_hand(folder: Path) -> Iterator[tuple[str, str]] | None:
  """The pieces of the splits in a folder, None if it has none.

  Raises:
    UserError: one of the three is missing.
  """
  paths = {}
  for split in SPLITS:
    stems = (split, "validation") if split == "valid" else (split,)
    names = [f"{stem}.txt{ending}" for stem in stems for ending in reading.OPENERS]
    paths[split] = next((folder / x for x in names if (folder / x).exists()), None)
  missing = [f"{split}.txt" for split, path in paths.items() if path is None]
  if len(missing) == len(SPLITS):
    return None
  if missing:
    raise UserError(
      f"data.manual_dir: expected train.txt, valid.txt and test.txt, got {folder} without "
      f"{', '.join(missing)}"
    )
  return ((split, piece) for split in SPLITS for piece in reading.text_file(paths[split]))


def _write(folder: Path, pieces: Iterable[tuple[str, str]], name: str) -> dict[str, Any]:
  """Writes pairs of split and piece into the files of a text, and counts them."""
  for path in folder.glob("*.txt"):
    path.unlink()
  files, sums, texts = {}, {}, {}
  with contextlib.ExitStack() as stack:
    bar = stack.enter_context(
      tqdm(desc=f"writing {name}", unit="B", unit_scale=True, disable=None, leave=False)
    )
    for split, piece in pieces:
      if split not in files:
        files[split] = stack.enter_context((folder / f"{split}.txt").open("wb"))
        sums[split] = hashlib.sha256()
        texts[split] = {"bytes": 0, "characters": 0}
      content = piece.encode()
      files[split].write(content)
      sums[split].update(content)
      texts[split]["bytes"] += len(content)
      texts[split]["characters"] += len(piece)
      bar.update(len(content))
    for file in files.values():
      file.flush()
      os.fsync(file.fileno())
  empty = [split for split in texts if not texts[split]["bytes"]]
  if empty or "train" not in texts:
    raise UserError(f"{name}: expected text in the split {(empty or SPLITS)[0]}, got none")
  return {"texts": {x: {**texts[x], "sha256": sums[x].hexdigest()} for x in texts}}


def _cut_missing(corpus: Corpus, fractions: Sequence[float]) -> Corpus:
  """The splits of a corpus; missing ones are cut from the end of its train split."""
  missing = [split for split in SPLITS if split not in corpus.splits]
  if not missing:
    return corpus
  train: Any = corpus.splits["train"]
  given = dict(zip(SPLITS, fractions, strict=True))
  wanted = [given[split] if split in missing else 0.0 for split in SPLITS]
  cut = cut_splits(train.content, wanted, train.source)
  splits = {x: cut[x] if x in ("train", *missing) else corpus.splits[x] for x in SPLITS}
  return Corpus(corpus.name, splits, {**corpus.about, "split_fractions": list(fractions)})


def _cleaned(corpus: Corpus, language: str, max_characters: Sequence[int], folder: Path) -> Corpus:
  """A corpus cleaned, cut short or both, made once."""
  about = {
    **corpus.about,
    "clean": language,
    "max_characters": list(max_characters),
    "cleaning": CLEANING if language else 0,
  }
  digits = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
  folder /= f"{corpus.name}_{digits}"
  record = making.make_once(
    folder,
    {"made_of": about},
    lambda partial: _write(partial, _clean_and_cut(corpus, language, max_characters), corpus.name),
  )
  splits = {split: open_split(folder, split) for split in SPLITS}
  return Corpus(corpus.name, splits, {**about, "texts": record["texts"]})


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
        f"data.max_characters: expected a text long enough for every split, got none left "
        f"for the {split} split of {corpus.name}"
      )
    if size < most:
      print(
        f"{corpus.name}: the {split} split has {size:,} characters, fewer than the "
        f"{most:,} of data.max_characters"
      )


def _python_manual() -> bytes:
  try:
    from pydoc_data.topics import topics
  except ImportError as error:
    raise UserError(
      "data.name: expected a Python with its manual (pydoc_data.topics), got one "
      "without; install it (Debian, Ubuntu: apt install libpython3-stdlib) or give a "
      "text of your own with data.path"
    ) from error
  return "\n".join(topics[topic] for topic in sorted(topics)).encode()
