"""Named sources: downloaded files, and datasets of the Hugging Face Hub and TensorFlow.

hf:OWNER/NAME[@REVISION][:CONFIG/SPLIT/COLUMN] reads a document from each string in a column ("text"
or "content" by default) of Parquet files or JSON lines. The files are those that the dataset card
lists for the configuration. Without such a card, they are those in the folder CONFIG whose paths
name the split (validation, valid, val, dev). A given SPLIT is cut into train, valid and test.
Downloads stay in the library's cache; see `dpjax.hub` for tokens and offline mode.

tfds:NAME or tfds:NAME/CONFIG reads the feature "text" of each example of a dataset's train,
validation and test, and adds a line end. Many builders do not need TensorFlow
(https://www.tensorflow.org/datasets/tfless_tfds).
"""

import dataclasses
import fnmatch
import os
import re
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpjax import files, hub
from dpjax.config.registry import load_plugins
from dpjax.data import readers
from dpjax.data.readers import optional
from dpjax.errors import UserError
from dpjax.files import JsonObject

RETRIES = 2  # after one second, then after two more
COLUMNS = ("text", "content")
# The words for a split, as in the library `datasets`.
WORDS = {
  "train": ("train", "training"),
  "valid": ("validation", "valid", "val", "dev"),
  "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in WORDS.items() for word in words}
_FILE = re.compile(r".*\.(parquet|jsonl?)(\.(gz|xz|bz2|zst))?")
_EXAMPLES = 1024  # read together from TensorFlow Datasets; one by one takes thirty times as long


@dataclasses.dataclass(frozen=True)
class Source:
  """A named corpus.

  Attributes:
    title: a short description.
    read: a generator function of `Files` that yields pairs of a split, "train", "valid" or "test",
      and a piece of its text. Missing splits are cut from the end of train.
    licence: the licence in a few words.
    size: the size of its text or download, such as "5 MB".
    source: its origin.
    version: increase it when the same files yield another text.
    documents: the pattern of document marks, as for `dpjax.data.text_file.TextFile`; "" if unknown.
    yields_documents: whether each piece is a document.
  """

  title: str
  read: Callable[["Files"], Iterator[tuple[str, str]]]
  licence: str
  size: str
  source: str
  version: int = 1
  documents: str = ""
  yields_documents: bool = False


@dataclasses.dataclass(frozen=True)
class File:
  """A file that can be downloaded.

  Attributes:
    url: http, https, or hf://datasets/OWNER/NAME/PATH or hf://OWNER/NAME/PATH at huggingface.co.
    name: its name in the folder; "" takes the last part of the URL.
    checksum: "sha256:..." or "md5:..."; "" accepts any content.
    head_bytes: the bytes to fetch from its beginning; 0 for all.
  """

  url: str
  name: str = ""
  checksum: str = ""
  head_bytes: int = 0

  def __post_init__(self):
    if not self.name:
      path = urllib.parse.urlsplit(self.url).path
      object.__setattr__(self, "name", urllib.parse.unquote(path.rpartition("/")[2]))


class Files:
  """The files of corpora and vocabularies, in `manual_dir` or downloaded to `folder`.

  `texts` is the folder for the texts read from them.
  """

  def __init__(self, data_dir: str | Path, manual_dir: str | Path = ""):
    self.manual_dir = Path(manual_dir or Path(data_dir, "manual"))
    self.folder = Path(data_dir, "downloads")
    self.texts = Path(data_dir, "texts")

  def get(self, file: File, *, by_hand: bool = True) -> Path:
    """Finds a file in the manual folder (if `by_hand`) or among the downloads, or downloads it.

    Raises:
      UserError: it cannot be downloaded, or has another checksum.
    """
    path = self.manual_dir / file.name
    if by_hand and path.is_file():
      algorithm, _, digits = file.checksum.partition(":")
      if digits and (result := files.checksum(path, algorithm)) != digits:
        raise UserError(
          f"{path}: expected {file.checksum}, got {algorithm}:{result}; get it again from "
          f"{file.url}, or remove it"
        )
      return path
    pooch = optional("pooch")

    def fetch(url: str, path: str, _) -> None:
      if url.startswith("hf://"):
        return _fetch_from_hub(url, Path(path))
      # Transparent decompression would change the checksum.
      headers = {"Accept-Encoding": "identity", "User-Agent": "dpjax"}
      if file.head_bytes:
        headers["Range"] = f"bytes=0-{file.head_bytes - 1}"
      has_bar = sys.stderr.isatty()
      pooch.HTTPDownloader(has_bar, chunk_size=2**20, headers=headers)(url, path, None)
      if 0 < file.head_bytes < os.path.getsize(path):
        os.truncate(path, file.head_bytes)

    downloads = pooch.create(
      self.folder.resolve(),
      base_url="",
      registry={file.name: file.checksum or None},
      urls={file.name: file.url},
      retry_if_failed=RETRIES,
    )
    try:
      return Path(downloads.fetch(file.name, downloader=fetch))
    except Exception as error:  # Several libraries raise here.
      if isinstance(error, OSError) and error.errno:
        raise  # A disk error.
      message = " ".join(str(error).split()).rstrip(".")
      raise UserError(
        f"{file.url}: expected the file, got {message}; download it yourself and put it as "
        f"{file.name} into {self.manual_dir}"
      ) from error


def _fetch_from_hub(url: str, path: Path) -> None:
  parts = url.removeprefix("hf://").split("/")
  repo_type = "dataset" if parts[0] == "datasets" else None
  owner, name, *rest = parts[1:] if repo_type else parts
  with tempfile.TemporaryDirectory(dir=path.parent) as folder:
    download = optional("huggingface_hub").hf_hub_download
    result = download(f"{owner}/{name}", "/".join(rest), repo_type=repo_type, local_dir=folder)
    os.replace(result, path)


# The files of each vocabulary, kept in one folder, by name.
VOCABULARIES: dict[str, tuple[File, ...]] = {}


def register_vocabulary(name: str, *vocabulary_files: File) -> None:
  """Registers a vocabulary for `data.tokenizer.file`, the file to open first."""
  VOCABULARIES[name] = vocabulary_files


def find_vocabulary(name: str, data_dir: str | Path, manual_dir: str | Path = "") -> str:
  """The path of a vocabulary: a downloaded one of `VOCABULARIES`, or `name` as a path."""
  if name and name not in VOCABULARIES:
    load_plugins()
  if name not in VOCABULARIES:
    return name
  required = VOCABULARIES[name]
  all_files = Files(data_dir, manual_dir)
  by_hand = all((all_files.manual_dir / file.name).exists() for file in required)
  paths = [all_files.get(file, by_hand=by_hand) for file in required]
  return str(paths[0])


class HubName(NamedTuple):
  """The parts of hf:REPOSITORY[@REVISION][:CONFIG/SPLIT/COLUMN]; "" or None if omitted."""

  repository: str
  revision: str | None
  config: str
  split: str
  column: str


def parse_hub(name: str) -> HubName:
  """The parts of a name; a `UserError` if it has another form."""
  match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([^\s:]+))?(?::(\S*))?", name, re.ASCII)
  parts = (match[3] or "").split("/") if match else ()
  if not match or len(parts) > 3:
    expected = "hf:OWNER/NAME[@REVISION][:CONFIG/SPLIT/COLUMN]"
    raise UserError(f"data.name: expected {expected}, got {name}")
  config, split, column = [*parts, "", ""][:3]
  return HubName(match[1], match[2], config, split, column)


def hub_source(name: str) -> Source:
  """The corpus named hf:NAME."""
  repository, revision, config, split, column = parse_hub(name)

  def read(_: Files) -> Iterator[tuple[str, str]]:
    library = optional("huggingface_hub")
    expected = f"a dataset {name} that can be read"
    with hub.one_line("data.name", expected):
      about = library.HfApi(library_name="dpjax").dataset_info(repository, revision=revision)
    card = about.card_data.to_dict() if about.card_data else {}
    names = sorted(x.rfilename for x in about.siblings or ())
    chosen = choose_files(name, names, card.get("configs") or (), config, split)
    for part, file in ((part, file) for part, paths in chosen.items() for file in paths):
      with hub.one_line("data.name", expected):
        path = library.hf_hub_download(repository, file, repo_type="dataset", revision=about.sha)
      for text in readers.read_records(path, [column] if column else COLUMNS):
        yield part, text

  return Source(
    "a dataset of the Hugging Face Hub",
    read,
    licence="its own",
    size="not known",
    source=f"huggingface.co/datasets/{repository}",
    yields_documents=True,
  )


def choose_files(
  name: str, files: Sequence[str], configs: Sequence[JsonObject], config: str = "", split: str = ""
) -> dict[str, list[str]]:
  """The files of each split of a dataset.

    a/train-0.parquet, a/val-0.parquet, config "a"  ->  {"train": [...], "valid": [...]}

  Args:
    name: the corpus, for messages.
    files: the paths of all files.
    configs: the configurations in the dataset's card.
    config: the configuration to take; "": the default, or the only one.
    split: the split to take as train; "": all three.

  Raises:
    UserError: the configuration, split, or file does not exist.
  """
  files = [file for file in files if _FILE.fullmatch(file)]
  by_config = {x.get("config_name", "default"): _of_card(x, files) for x in configs}
  default = next((x.get("config_name", "default") for x in configs if x.get("default")), "default")
  if not by_config:
    default = ""
    for file in files:
      # Other .json files may describe the dataset.
      if not file.endswith(".json") or _words(file):
        by_config.setdefault(_folder(file), []).append(((_words(file) or ["train"])[0], file))
  config = config or (default if default in by_config or len(by_config) != 1 else [*by_config][0])
  if not by_config:
    raise UserError(f"data.name: expected a dataset of Parquet files or JSON lines, got {name}")
  if config not in by_config:
    names = ", ".join(name or "''" for name in sorted(by_config))
    expected = f"expected a configuration (hf:OWNER/NAME:CONFIG), one of {names}"
    raise UserError(f"data.name: {expected}, got {name}")
  pairs = by_config[config]
  if any(file.endswith(".parquet") for _, file in pairs):  # The other files have the same data.
    pairs = [(word, file) for word, file in pairs if file.endswith(".parquet")]
  chosen: dict[str, list[str]] = {}
  for word, file in pairs:
    if split in (word, *re.split(r"[/.-]", file)) if split else word in _SPLITS:
      chosen.setdefault("train" if split else _SPLITS[word], []).append(file)
  if "train" not in chosen:
    words = ", ".join(sorted({word for word, _ in pairs})) or "none"
    expected = f"expected a split (hf:OWNER/NAME:CONFIG/SPLIT), one of {words}"
    raise UserError(f"data.name: {expected}, got {name}")
  return chosen


def _of_card(config: JsonObject, files: Sequence[str]) -> list[tuple[str, str]]:
  """Pairs of a split and a file, for a configuration in a dataset card."""
  entries = config.get("data_files") or ["*"]
  folder = config.get("data_dir", "")
  pairs = []
  for entry in [entries] if isinstance(entries, str) else entries:
    entry = entry if isinstance(entry, Mapping) else {"path": entry}
    patterns = entry["path"]
    split = str(entry.get("split", ""))
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
      for file in fnmatch.filter(files, f"{folder}/{pattern}".strip("/")):
        pairs.append((split or (_words(file) or ["train"])[0], file))
  return pairs


def _words(file: str) -> list[str]:
  """The words for splits in a path, those of the file's name first."""
  parts = [re.split("[^a-z]+", part) for part in reversed(file.lower().split("/"))]
  return [word for part in parts for word in part if word in _SPLITS]


def _folder(file: str) -> str:
  """The folder of a file, without parts that are named after a split or `data`."""
  return "/".join(part for part in file.split("/")[:-1] if part not in (*_SPLITS, "data"))


def tfds_source(name: str) -> Source:
  """The corpus named tfds:NAME."""

  def read(files: Files) -> Iterator[tuple[str, str]]:
    tfds = optional("tensorflow_datasets", "tensorflow-datasets")
    folder = str(files.folder / "tfds")
    config = tfds.download.DownloadConfig(manual_dir=files.manual_dir, try_download_gcs=False)
    try:
      # array_record does not need TensorFlow.
      builder = tfds.builder(
        name.removeprefix("tfds:"), data_dir=folder, file_format="array_record"
      )
      builder.download_and_prepare(download_dir=f"{folder}/downloads", download_config=config)
      for split in (
        x for x in ("train", "validation", "valid", "test") if x in builder.info.splits
      ):
        examples = builder.as_data_source(split)
        for begin in range(0, len(examples), _EXAMPLES):
          numbers = range(begin, min(begin + _EXAMPLES, len(examples)))
          for example in examples.__getitems__(numbers):
            yield _SPLITS[split], example["text"].decode().removesuffix("\n") + "\n"
    # Builders may raise any error; disk errors are reported elsewhere.
    except Exception as error:
      if isinstance(error, OSError) and error.errno:
        raise
      message = str(error).partition("\n")[0]  # The rest may list all known names.
      raise UserError(
        "data.name: expected a corpus with a feature text that TensorFlow Datasets can make here, "
        f"got {name} ({type(error).__name__}: {message})"
      ) from error

  return Source(name, read, licence="its own", size="not known", source="tensorflow.org/datasets")


PREFIXES: dict[str, Callable[[str], Source]] = {"hf:": hub_source, "tfds:": tfds_source}
