"""Datasets of the Hugging Face Hub, as the name hf:OWNER/NAME[@REVISION][:CONFIG/SPLIT/COLUMN].

Takes the strings of a column, "text" or "content" by default, of Parquet files or JSON lines, each
a document. The files are those that the dataset's card gives for the configuration. Without such a
card, they are those in the folder CONFIG, whose paths name the split (validation, valid, val, dev).
With a SPLIT, that one is cut into train, valid and test.

Downloads stay in the library's cache; `dpjax.hub` says how to give a token, or work offline.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpjax import hub
from dpjax.data.sources import Files, Source, reading
from dpjax.errors import UserError

PREFIX = "hf:"
COLUMNS = ("text", "content")
# The words for a split, as in the library `datasets`.
WORDS = {
  "train": ("train", "training"),
  "valid": ("validation", "valid", "val", "dev"),
  "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in WORDS.items() for word in words}
_FILE = re.compile(r".*\.(parquet|jsonl?)(\.(gz|xz|bz2|zst))?")


def parse(name: str) -> tuple[str, str | None, str, str, str]:
  """The repository, revision, configuration, split and column of a name; "" where none is given."""
  match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([^\s:]+))?(?::(\S*))?", name, re.ASCII)
  parts = (match[3] or "").split("/") if match else ()
  if not match or len(parts) > 3:
    expected = "hf:OWNER/NAME[@REVISION][:CONFIG/SPLIT/COLUMN]"
    raise UserError(f"data.name: expected {expected}, got {name}")
  config, split, column = [*parts, "", ""][:3]
  return match[1], match[2], config, split, column


def source(name: str) -> Source:
  """The corpus for a name that begins with `PREFIX`."""
  repository, revision, config, split, column = parse(name)

  def read(files: Files) -> Iterator[tuple[str, str]]:
    from huggingface_hub import HfApi, hf_hub_download

    expected = f"a dataset {name} that can be read"
    with hub.one_line("data.name", expected):
      about = HfApi(library_name="dpjax").dataset_info(repository, revision=revision)
    card = about.card_data.to_dict() if about.card_data else {}
    names = sorted(x.rfilename for x in about.siblings or ())
    chosen = choose_files(name, names, card.get("configs") or (), config, split)
    for part, file in ((part, file) for part, found in chosen.items() for file in found):
      with hub.one_line("data.name", expected):
        path = hf_hub_download(repository, file, repo_type="dataset", revision=about.sha)
      for text in reading.texts(path, [column] if column else COLUMNS):
        yield part, reading.json_line(text)

  about = "a dataset of the Hugging Face Hub", read, "its own", "not known"
  return Source(*about, f"huggingface.co/datasets/{repository}", has_json_lines=True)


def choose_files(
  name: str, files: Sequence[str], configs: Sequence[Mapping], config: str = "", split: str = ""
) -> dict[str, list[str]]:
  """The files of each split of a dataset.

    a/train-0.parquet, a/val-0.parquet, config "a"  ->  {"train": [...], "valid": [...]}

  Args:
    name: of the corpus, for messages.
    files: the paths of all files.
    configs: the configurations in the dataset's card.
    config: the one to take; "": the default, or the only one.
    split: the split to take as train; "": all three.

  Raises:
    UserError: there is no such configuration, split, or file.
  """
  files = [file for file in files if _FILE.fullmatch(file)]
  by_config = {x.get("config_name", "default"): _of_card(x, files) for x in configs}
  usual = next((x.get("config_name", "default") for x in configs if x.get("default")), "default")
  if not by_config:
    usual = ""
    for file in files:
      # Of other files of this kind, some describe the dataset.
      if not file.endswith(".json") or _words(file):
        by_config.setdefault(_folder(file), []).append(((_words(file) or ["train"])[0], file))
  config = config or (usual if usual in by_config or len(by_config) != 1 else [*by_config][0])
  if not by_config:
    raise UserError(f"data.name: expected a dataset of Parquet files or JSON lines, got {name}")
  if config not in by_config:
    known = ", ".join(name or "''" for name in sorted(by_config))
    expected = f"expected a configuration (hf:OWNER/NAME:CONFIG), one of {known}"
    raise UserError(f"data.name: {expected}, got {name}")
  found = by_config[config]
  if any(file.endswith(".parquet") for _, file in found):  # the same in another form
    found = [(word, file) for word, file in found if file.endswith(".parquet")]
  chosen: dict[str, list[str]] = {}
  for word, file in found:
    is_asked = split in (word, *re.split(r"[/.-]", file)) if split else word in _SPLITS
    if is_asked:
      chosen.setdefault("train" if split else _SPLITS[word], []).append(file)
  if "train" not in chosen:
    known = ", ".join(sorted({word for word, _ in found})) or "none"
    expected = f"expected a split (hf:OWNER/NAME:CONFIG/SPLIT), one of {known}"
    raise UserError(f"data.name: {expected}, got {name}")
  return chosen


def _of_card(config: Mapping[str, Any], files: Sequence[str]) -> list[tuple[str, str]]:
  """Pairs of a split and a file of a configuration in a card."""
  given, folder = config.get("data_files") or ["*"], config.get("data_dir", "")
  pairs = []
  for entry in [given] if isinstance(given, str) else given:
    entry = entry if isinstance(entry, Mapping) else {"path": entry}
    patterns, split = entry["path"], str(entry.get("split", ""))
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
      for file in fnmatch.filter(files, f"{folder}/{pattern}".strip("/")):
        pairs.append((split or (_words(file) or ["train"])[0], file))
  return pairs


def _words(file: str) -> list[str]:
  """The words for splits in a path, those of the file's name first."""
  parts = [re.split("[^a-z]+", part) for part in reversed(file.lower().split("/"))]
  return [word for part in parts for word in part if word in _SPLITS]


def _folder(file: str) -> str:
  """The folder of a file, without parts that are named for a split or `data`."""
  return "/".join(part for part in file.split("/")[:-1] if part not in (*_SPLITS, "data"))
