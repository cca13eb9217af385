"""What the builders share: files in, one split after the other out, without TensorFlow.

TensorFlow Datasets (4.9) runs without TensorFlow where it writes array_record, reads no
archive itself, and buffers no split above 1 GiB (its writer holds or spills all of it).
So the builders here open archives with Python's own modules, and write every record as
it comes.
"""

import bz2
import errno
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.core import example_serializer

from dpjax.data import download
from dpjax.data.download import File
from dpjax.errors import UserError
from dpjax.text.tokenizer import is_clean_cut

RECORD_BYTES = 2**20
SHARD_BYTES = 2**28
OPENERS = {"": open, ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
CONTENTS = "text.json"  # bytes and SHA-256 of each split's text
PLAIN_STEMS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A corpus as text alone, in the order that it has.

  A record has about 1 MiB of text: `{"text": bytes}`, UTF-8; joined, the records of a
  split are its text. A class for a corpus says where it is from and what its splits are:

    class Text8(TextBuilder, skip_registration=True):
      name = "text8"
      FILES = (File("http://.../text8.zip"),)

      def texts(self, get):
        text = read(get(self.FILES[0]))
        return {"train": [text[:90]], "validation": [text[90:]]}

  Whatever it is from: where the manual folder has a folder of the corpus's name with
  train.txt, valid.txt and test.txt, plain or packed (of a corpus with languages: one for
  each, wiki40b/fi), those are the splits.
  """

  VERSION = tfds.core.Version("1.0.0")
  FILES: tuple[File, ...] = ()
  manual_dir: Path | None = None  # known once it is prepared

  def texts(self, get: Callable[[File], Path]) -> dict[str, Iterable[str]]:
    """The splits, "train", "validation", "test" or some of them, as pieces of text.

    Args:
      get: finds a file in the manual folder, or downloads it.

    Returns:
      By split, what is to be joined to its text; gone through once, one split after
      the other, so that files may be asked for, and read, on the way.
    """
    raise NotImplementedError

  def _plain_texts(self) -> dict[str, Iterable[str]]:
    """Splits that lie in the manual folder as they are; {} where there are none."""
    if not self.manual_dir:
      return {}
    config = self.builder_config.name.removesuffix("_head") if self.builder_config else ""
    folder = self.manual_dir / self.name / config
    found = {}
    for split, stems in PLAIN_STEMS.items():
      names = [f"{stem}.txt{suffix}" for stem in stems for suffix in OPENERS]
      path = next((folder / x for x in names if (folder / x).exists()), None)
      if path is not None:
        found[split] = read_text(path)
    if missing := [PLAIN_STEMS[split][0] for split in PLAIN_STEMS if split not in found]:
      if not found:
        return {}
      raise UserError(
        f"data.manual_dir: expected train.txt, valid.txt and test.txt, got "
        f"{folder} without {', '.join(f'{stem}.txt' for stem in missing)}"
      )
    return found

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )

  def _log_download_bytes(self) -> None:
    """Nothing: sizes are not known beforehand, and downloads show their own bars."""

  def _log_download_done(self) -> None:
    """Nothing."""

  def _split_generators(self, dl_manager):
    self.manual_dir = dl_manager._manual_dir and Path(dl_manager._manual_dir)
    get = functools.partial(
      download.download, folder=Path(dl_manager.download_dir), manual_dir=self.manual_dir
    )
    texts = self._plain_texts() or self.texts(get)
    return {split: self._generate_examples(pieces) for split, pieces in texts.items()}

  def _generate_examples(self, pieces: Iterable[str]):
    return ((i, {"text": text}) for i, text in enumerate(join(pieces)))

  def _generate_splits(self, dl_manager, download_config):
    features: Any = self.info.features
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    most = download_config.max_examples_per_split
    infos, texts = [], {}
    for split, examples in self._split_generators(dl_manager).items():
      template = self._get_filename_template(split_name=split)
      counter = texts[split] = _Counter()
      records = (
        serializer.serialize_example(features.encode_example(example))
        for _, example in counter.count(itertools.islice(examples, most or None))
      )
      lengths, size = _write_shards(records, template)
      if not lengths:
        raise UserError(f"{self.name}: expected text in the split {split}, got none")
      infos.append(
        tfds.core.SplitInfo(
          name=split, shard_lengths=lengths, num_bytes=size, filename_template=template
        )
      )
    contents = {split: counter.result() for split, counter in texts.items()}
    path = Path(self.data_dir, CONTENTS)
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return infos


class _Counter:
  """Counts the text of records that pass."""

  def __init__(self):
    self._sha256, self._bytes = hashlib.sha256(), 0

  def count(self, examples):
    for i, example in examples:
      text = example["text"].encode()
      self._sha256.update(text)
      self._bytes += len(text)
      yield i, example

  def result(self) -> dict:
    return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


def read_text(path: Path) -> Iterator[str]:
  """A UTF-8 text as it stands, in pieces, packed (.xz, .gz, .bz2) or not.

  Raises:
    ValueError: it is not UTF-8, or the archive is damaged.
  """
  opener = OPENERS[path.suffix if path.suffix in OPENERS else ""]
  try:
    with opener(path, "rt", encoding="utf-8", newline="") as file:
      while piece := file.read(RECORD_BYTES):
        yield piece
  except (UnicodeDecodeError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
    if isinstance(error, OSError) and error.errno:  # else of gzip or bz2
      raise
    raise UserError(f"{path}: expected a text in UTF-8, got {error}") from error


def join(pieces: Iterable[str]) -> Iterator[str]:
  """Pieces of text, put together or cut to about 1 MiB each; nothing is lost."""
  held, size = [], 0
  for piece in pieces:
    held.append(piece)
    size += len(piece)
    if size < RECORD_BYTES + 2:
      continue
    text = "".join(held)
    begin = 0
    # Two characters more, by which a cut is judged.
    while len(text) - begin >= RECORD_BYTES + 2:
      end = _cut(text, begin, begin + RECORD_BYTES)
      yield text[begin:end]
      begin = end
    held = [text[begin:]]
    size = len(held[0])
  if size:
    yield "".join(held)


def _cut(text: str, begin: int, end: int) -> int:
  """Between two lines of text[begin:end], else before its last space, else `end`."""
  last = place = text.rfind("\n", begin, end) + 1
  while place:
    if is_clean_cut(text[max(begin, place - 2) : place], text[place : place + 2]):
      return place
    place = text.rfind("\n", begin, place - 1) + 1
  return last or max(text.rfind(" ", begin + 1, end), 0) or end


def _write_shards(records: Iterable[bytes], template) -> tuple[list[int], int]:
  """Writes records one by one; how many each shard has, and the bytes of all."""
  lengths, sizes, paths = [], [], []
  try:
    _write_records(records, template, lengths, sizes, paths)
  except RuntimeError as error:  # of the library, when the disk is full for one
    raise OSError(errno.EIO, f"cannot write it: {error}", str(paths[-1])) from error
  names = template.sharded_filepaths(len(paths))
  for path, name in zip(paths, names, strict=True):
    path.rename(name)
  return lengths, sum(sizes)


def _write_records(records, template, lengths: list, sizes: list, paths: list) -> None:
  writer = None
  try:
    for record in records:
      if writer is None or sizes[-1] >= SHARD_BYTES:
        if writer is not None:
          writer.close()
        paths.append(template.data_dir / f"{template.split}.{len(paths)}.partial")
        lengths.append(0)
        sizes.append(0)
        writer = ArrayRecordWriter(str(paths[-1]), "group_size:1")
      writer.write(record)
      lengths[-1] += 1
      sizes[-1] += len(record)
  finally:
    if writer is not None and writer.is_open():
      writer.close()
