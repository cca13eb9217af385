"""Texts by name or by path, in three splits, read in parts so that any size streams."""

import dataclasses
import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dpjax.data import catalog, texts
from dpjax.data.texts import SPLITS
from dpjax.errors import UserError
from dpjax.text.tokenizer import is_clean_cut

CHUNK_BYTES = 2**20


class Text(Protocol):
  """A text in parts of about 1 MiB; each iteration yields it anew."""

  def __len__(self) -> int:
    """Its size in bytes, at least roughly."""
    ...

  def __iter__(self) -> Iterator[str]:
    """Yields the parts."""
    ...


@dataclasses.dataclass(frozen=True)
class Chunks:
  """A stretch of UTF-8 text; each iteration yields it anew, in parts of type str.

  A part has up to 1 MiB and ends with a line, where there is such a place so that
  subwords are those of the whole text (`dpjax.text.tokenizer.is_clean_cut`). Where lines
  are longer it ends before a space, and without spaces anywhere between characters.
  Joined, the parts are the text as it stands, line ends included.

  Attributes:
    content: bytes, or a mapped file.
    begin: where in `content` the stretch begins, bytes.
    end: where it ends.
    source: what to call `content` in messages.
  """

  content: bytes | mmap.mmap
  begin: int
  end: int
  source: str

  def __len__(self) -> int:
    """The stretch's size in bytes."""
    return self.end - self.begin

  def __iter__(self) -> Iterator[str]:
    """Yields the parts.

    Raises:
      ValueError: `data.path: ...`, with the place of the first byte that is not UTF-8.
    """
    begin = self.begin
    while begin < self.end:
      end = self._cut(begin)
      try:
        yield self.content[begin:end].decode()
      except UnicodeDecodeError as error:
        raise UserError(
          f"data.path: expected UTF-8 text, got byte "
          f"{error.object[error.start]:#04x} at offset "
          f"{begin + error.start} of {self.source}"
        ) from error
      begin = end

  def _cut(self, begin: int) -> int:
    """Where the part that begins at `begin` ends."""
    end = begin + CHUNK_BYTES
    if end >= self.end:
      return self.end
    last = place = self.content.rfind(b"\n", begin, end) + 1
    while place:
      # Two characters have up to eight bytes, of which some may be of a third.
      before = self.content[max(begin, place - 8) : place].decode(errors="ignore")
      if is_clean_cut(before, self.content[place : place + 8].decode(errors="ignore")):
        return place
      place = self.content.rfind(b"\n", begin, place - 1) + 1
    if last:
      return last
    space = self.content.rfind(b" ", begin + 1, end)
    return space if space > 0 else _between_characters(self.content, end)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A text in three splits.

  Attributes:
    name: what to call it.
    splits: "train", "valid" and "test".
    about: where it is from and how it was made, as JSON values.
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
) -> Corpus:
  """Opens a text; it is not read before it is asked for, unless it has to be made first.

  Args:
    name: "python_manual", the language manual that comes with Python (its text differs
      a little between Python's versions), or of `dpjax.data.catalog`, where no path is
      given.
    path: a UTF-8 text file, which is cut into the splits in this order, at line ends
      where there are lines; or a folder with train.txt, valid.txt (or validation.txt)
      and test.txt.
    split_fractions: of a single text, in bytes; train takes what rounding leaves.
    language: "en", "fi", ..., of a corpus that has several, and of `clean`.
    clean: as `dpjax.text.cleaning.clean` does.
    max_characters: of train, valid and test, from the beginning of each, once it is
      clean; 0 is all. A corpus that is train alone is cut into the three in this order.
    data_dir: where corpora that have a name, and cleaned ones, are kept once made.
    manual_dir: where files lie that were downloaded by hand; "" is data_dir/manual.

  Returns:
    The corpus.

  Raises:
    ValueError: `data.<setting>: expected ..., got ...`: nothing there, an empty file or
      split, a folder that lacks a split, no permission, an unknown name or language, a
      file that has to be given by hand, or a download that failed.
  """
  if path:
    corpus = _from_path(Path(path), split_fractions)
  elif name == "python_manual":
    content = _python_manual()
    about = {
      "name": name,
      "sha256": hashlib.sha256(content).hexdigest(),
      "split_fractions": list(split_fractions),
    }
    corpus = Corpus(name, _cut_splits(content, split_fractions, name), about)
  else:
    entry = catalog.find(name, language)
    if language and not entry.languages and not clean:
      raise UserError(
        f"data.language: expected '' for {name}, unless data.clean is True, got {language!r}"
      )
    is_enough = [0 < most <= held for most, held in zip(max_characters, entry.head, strict=False)]
    splits, about = catalog.open_records(
      name,
      language,
      Path(data_dir),
      manual_dir,
      only_head=bool(is_enough) and all(is_enough),
    )
    corpus = Corpus("_".join(filter(None, (name, language))), splits, about)
  if clean or any(max_characters):
    folder = texts.make(
      corpus.name,
      corpus.splits,
      corpus.about,
      Path(data_dir, "texts"),
      language if clean else "",
      max_characters,
    )
    made = _from_path(folder, split_fractions)
    return Corpus(corpus.name, made.splits, texts.read_about(folder))
  missing = [split for split in SPLITS if split not in corpus.splits]
  if missing:
    raise UserError(
      f"data.max_characters: expected a size of every split, as {corpus.name} has no "
      f"{' and no '.join(missing)} of its own, got {tuple(max_characters)}"
    )
  return corpus


def _from_path(path: Path, split_fractions: Sequence[float]) -> Corpus:
  try:
    if path.is_dir():
      splits = {split: _open_split(path, split) for split in SPLITS}
      files = [Path(chunks.source) for chunks in splits.values()]
      return Corpus(path.name, splits, {"files": list(map(_identity, files))})
    content = _open(path)
    about = {"files": [_identity(path)], "split_fractions": list(split_fractions)}
  except OSError as error:
    raise UserError(
      f"data.path: expected a readable text file or folder, got "
      f"{error.filename or path} ({error.strerror})"
    ) from error
  return Corpus(path.stem, _cut_splits(content, split_fractions, str(path)), about)


def _identity(path: Path) -> list:
  """Place, size and time of a file: those of another text differ."""
  found = path.stat()
  return [str(path.resolve()), found.st_size, found.st_mtime_ns]


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


def _open(path: Path) -> mmap.mmap:
  # Opening a pipe would wait, and some devices never end.
  if path.exists() and not path.is_file():
    raise UserError(
      f"data.path: expected a readable text file or folder, got {path} (no regular file)"
    )
  with path.open("rb") as file:
    if path.stat().st_size == 0:
      raise UserError(f"data.path: expected a text, got the empty file {path}")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_split(folder: Path, split: str) -> Chunks:
  names = [f"{split}.txt"] + ["validation.txt"] * (split == "valid")
  path = next((folder / name for name in names if (folder / name).exists()), None)
  if path is None:
    raise UserError(f"data.path: expected {' or '.join(names)} in the folder, got {folder} without")
  content = _open(path)
  return Chunks(content, 0, len(content), str(path))


def _cut_splits(content, fractions: Sequence[float], source: str) -> dict[str, Chunks]:
  size = len(content)
  valid, test = (int(size * fraction) for fraction in fractions[1:])
  first = _line_end(content, 0, size - valid - test)
  second = _line_end(content, first, size - test)
  stretches = {"train": (0, first), "valid": (first, second), "test": (second, size)}
  if any(begin == end for begin, end in stretches.values()):
    raise UserError(
      f"data.path: expected a text long enough for three splits, got {size} bytes in {source}"
    )
  return {split: Chunks(content, *stretches[split], source) for split in SPLITS}


def _line_end(content, begin: int, end: int) -> int:
  """The last line end in the second half of begin .. end, or `end` if there is none."""
  line_end = content.rfind(b"\n", (begin + end) // 2, end) + 1
  return line_end or _between_characters(content, end)


def _between_characters(content, place: int) -> int:
  """The last place at or before `place` where a UTF-8 character begins."""
  for begin in range(place, max(0, place - 4), -1):
    if begin == len(content) or content[begin] & 0xC0 != 0x80:
      return begin
  return place
