"""Texts by name or by path, in three splits, read in parts so that any size streams."""

import dataclasses
import difflib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

SPLITS = ("train", "valid", "test")
NAMES = ("python_manual",)
CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Chunks:
  """A stretch of UTF-8 text; each iteration yields it anew, in parts of type str.

  A part has up to 1 MiB and ends with a line; where lines are longer it ends before a
  space, and without spaces anywhere between characters. Joined, the parts are the text
  as it stands, line ends included.

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
        raise ValueError(f"data.path: expected UTF-8 text, got byte "
                         f"{error.object[error.start]:#04x} at offset "
                         f"{begin + error.start} of {self.source}") from error
      begin = end

  def _cut(self, begin: int) -> int:
    """Where the part that begins at `begin` ends."""
    end = begin + CHUNK_BYTES
    if end >= self.end:
      return self.end
    line_end = self.content.rfind(b"\n", begin, end) + 1
    if line_end:
      return line_end
    space = self.content.rfind(b" ", begin + 1, end)
    return space if space > 0 else _between_characters(self.content, end)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A text in three splits.

  Attributes:
    name: what to call it.
    splits: "train", "valid" and "test", each as `Chunks`.
  """

  name: str
  splits: dict[str, Chunks]


def load_corpus(
  name: str = "python_manual",
  path: str | Path = "",
  split_fractions: Sequence[float] = (0.9, 0.05, 0.05),
) -> Corpus:
  """Opens a text; nothing of it is read before it is asked for.

  Args:
    name: of `NAMES`, where no path is given. "python_manual" is the language manual
      that comes with Python (its text differs a little between Python's versions).
    path: a UTF-8 text file, which is cut into the splits in this order, at line ends
      where there are lines; or a folder with train.txt, valid.txt (or validation.txt)
      and test.txt.
    split_fractions: of a single text, in bytes; train takes what rounding leaves.

  Returns:
    The corpus.

  Raises:
    ValueError: `data.path: ...` or `data.name: ...`: nothing there, an empty file or
      split, a folder that lacks a split, no permission, or an unknown name.
  """
  if path:
    path = Path(path)
    try:
      if path.is_dir():
        return Corpus(path.name, {split: _open_split(path, split) for split in SPLITS})
      content = _open(path)
    except OSError as error:
      raise ValueError(f"data.path: expected a readable text file or folder, got "
                       f"{error.filename or path} ({error.strerror})") from error
    return Corpus(path.stem, _cut_splits(content, split_fractions, str(path)))
  if name != "python_manual":
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise ValueError(f"data.name: expected one of {', '.join(NAMES)} (or a data.path), "
                     f"got {name!r}{hint}")
  return Corpus(name, _cut_splits(_python_manual(), split_fractions, name))


def _python_manual() -> bytes:
  try:
    from pydoc_data.topics import topics
  except ImportError as error:
    raise ValueError(
      "data.name: expected a Python with its manual (pydoc_data.topics), got one "
      "without; install it (Debian, Ubuntu: apt install libpython3-stdlib) or give a "
      "text of your own with data.path"
    ) from error
  return "\n".join(topics[topic] for topic in sorted(topics)).encode()


def _open(path: Path) -> mmap.mmap:
  with path.open("rb") as file:
    if path.stat().st_size == 0:
      raise ValueError(f"data.path: expected a text, got the empty file {path}")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_split(folder: Path, split: str) -> Chunks:
  names = [f"{split}.txt"] + ["validation.txt"] * (split == "valid")
  path = next((folder / name for name in names if (folder / name).exists()), None)
  if path is None:
    raise ValueError(f"data.path: expected {' or '.join(names)} in the folder, got "
                     f"{folder} without")
  content = _open(path)
  return Chunks(content, 0, len(content), str(path))


def _cut_splits(content, fractions: Sequence[float], source: str) -> dict[str, Chunks]:
  size = len(content)
  valid, test = (int(size * fraction) for fraction in fractions[1:])
  first = _line_end(content, 0, size - valid - test)
  second = _line_end(content, first, size - test)
  stretches = {"train": (0, first), "valid": (first, second), "test": (second, size)}
  if any(begin == end for begin, end in stretches.values()):
    raise ValueError(f"data.path: expected a text long enough for three splits, got "
                     f"{size} bytes in {source}")
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
