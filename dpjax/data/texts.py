"""Texts that are cleaned or cut short, made once and kept as plain files."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from dpjax.data.download import locked
from dpjax.errors import UserError

SPLITS = ("train", "valid", "test")
ABOUT = "text.json"
CLEANING = 1  # to be raised when the same text comes out another


def make(
  name: str,
  splits: Mapping[str, Iterable[str]],
  about: Mapping,
  folder: Path,
  language: str,
  max_characters: Sequence[int],
) -> Path:
  """Writes a corpus anew, cleaned, cut short or both, unless it is there already.

  Args:
    name: of the corpus.
    splits: of "train", "valid" and "test"; "train" alone is cut into the three, each
      beginning where the one before ends.
    about: what it is; another gets a place of its own.
    folder: the text is made in folder/<name>_<a few digits>.
    language: as `dpjax.text.cleaning.clean` takes it; "": the text stays as it is.
    max_characters: of train, valid and test, counted once clean; 0 is all.

  Returns:
    The folder with train.txt, valid.txt, test.txt and text.json.

  Raises:
    ValueError: a size is missing where "train" is to be cut, or a split would be empty,
      or the language is unknown, or the folder cannot be written.
  """
  sizes = dict(zip(SPLITS, max_characters, strict=True))
  is_cut = set(splits) == {"train"}
  if is_cut and not all(sizes.values()):
    raise UserError(
      f"data.max_characters: expected a size of every split, as {name} has "
      f"a train split alone, got {tuple(max_characters)}"
    )
  about = dict(about) | {
    "clean": language,
    "max_characters": list(max_characters),
    "cleaning": CLEANING if language else 0,
  }
  digits = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
  target = folder / f"{name}_{digits}"
  try:
    with locked(folder / f"{target.name}.lock"):
      if not (target / ABOUT).exists():
        partial = folder / f"{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        counts, rest = {}, None
        for split in SPLITS:
          if rest is None or not is_cut:
            rest = iter(_clean(splits[split], language))
          counts[split], rest = _write(partial / f"{split}.txt", rest, sizes[split], name)
        text = json.dumps(about | {"characters": counts}, indent=2)
        (partial / ABOUT).write_text(text + "\n", encoding="utf-8")
        os.replace(partial, target)
  except OSError as error:
    raise UserError(
      f"data.data_dir: expected a folder that can be written, got {folder} ({error})"
    ) from error
  return target


def read_about(folder: Path) -> dict:
  """What `make` has written beside a text."""
  return json.loads((folder / ABOUT).read_text(encoding="utf-8"))


def _clean(text: Iterable[str], language: str) -> Iterable[str]:
  if not language:
    return text
  from dpjax.text.cleaning import clean_chunks  # its table takes a moment to load

  return clean_chunks(text, language)


def _write(path: Path, parts: Iterator[str], most: int, name: str):
  """Writes up to `most` characters; how many, and what is left."""
  size = 0
  with (
    path.open("w", encoding="utf-8", newline="") as file,
    tqdm(
      total=most or None,
      desc=f"{name} {path.stem}",
      unit="chars",
      unit_scale=True,
      disable=None,
      leave=False,
    ) as bar,
  ):
    for part in parts:
      taken = part[: most - size] if most else part
      file.write(taken)
      size += len(taken)
      bar.update(len(taken))
      if most and size == most:
        parts = itertools.chain([part[len(taken) :]], parts)
        break
    file.flush()
    os.fsync(file.fileno())
  if not size:
    raise UserError(
      f"data.max_characters: expected a text long enough for every split, "
      f"got none left for the {path.stem} split of {name}"
    )
  if size < most:
    print(
      f"{name}: the {path.stem} split has {size:,} characters, fewer than the "
      f"{most:,} of data.max_characters"
    )
  return size, parts
