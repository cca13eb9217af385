"""The corpora that have a name: what they are, and how to open them.

Nothing of TensorFlow Datasets is imported before a corpus is opened.
"""

import dataclasses
import difflib
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.download import File, download, locked
from dpjax.errors import UserError

ONE_MORE = "python_manual"  # which comes with Python


@dataclasses.dataclass(frozen=True)
class Entry:
  """A corpus.

  Attributes:
    title: what it is, in a few words.
    builder: "module:class" of its `dpjax.data.builders.base.TextBuilder`.
    licence: in a few words.
    size: of its text or download, in words.
    source: where it is from.
    languages: of which one has to be named; (): it has but one.
    head: of train, valid and test, how many clean characters its configuration
      "<language>_head", a first part, is sure to hold; (): there is none.
  """

  title: str
  builder: str
  licence: str
  size: str
  source: str
  languages: tuple[str, ...] = ()
  head: tuple[int, ...] = ()


_BUILDERS = "dpjax.data.builders"
_PAPERS_LANGUAGES = ("en", "fi", "he", "vi")
ENTRIES = {
  "penn_treebank": Entry(
    "Penn Treebank, words, as Mikolov prepared it",
    f"{_BUILDERS}.penn_treebank:PennTreebank",
    "LDC; research only, not to be had without a licence",
    "6 MB; by hand",
    "Mikolov et al. 2010",
  ),
  "wikitext2": Entry(
    "WikiText-2, words",
    f"{_BUILDERS}.wikitext:WikiText2",
    "CC BY-SA 3.0",
    "13 MB",
    "Merity et al. 2016, arXiv:1609.07843",
  ),
  "wikitext103": Entry(
    "WikiText-103, words",
    f"{_BUILDERS}.wikitext:WikiText103",
    "CC BY-SA 3.0",
    "540 MB",
    "Merity et al. 2016, arXiv:1609.07843",
  ),
  "wikitext2_raw": Entry(
    "WikiText-2 as it was written, with all of its words",
    f"{_BUILDERS}.wikitext:WikiText2Raw",
    "CC BY-SA 3.0",
    "13 MB",
    "Merity et al. 2016, arXiv:1609.07843",
  ),
  "wikitext103_raw": Entry(
    "WikiText-103 as it was written, with all of its words",
    f"{_BUILDERS}.wikitext:WikiText103Raw",
    "CC BY-SA 3.0",
    "550 MB",
    "Merity et al. 2016, arXiv:1609.07843",
  ),
  "lm1b": Entry(
    "One Billion Word Benchmark, sentences in a random order",
    f"{_BUILDERS}.lm1b:Lm1b",
    "none stated",
    "4.2 GB; download 1.8 GB",
    "Chelba et al. 2013, arXiv:1312.3005",
  ),
  "openwebtext": Entry(
    "OpenWebText, web pages",
    f"{_BUILDERS}.openwebtext:OpenWebText",
    "CC0 for the packaging; the pages are their authors'",
    "40 GB; download 24 GB",
    "Gokaslan et al. 2019, skylion007.github.io/OpenWebTextCorpus",
  ),
  "text8": Entry(
    "text8, the first 100M cleaned characters of Wikipedia",
    f"{_BUILDERS}.text8:Text8",
    "GFDL, CC BY-SA 3.0",
    "100 MB; download 31 MB",
    "Mahoney 2006, mattmahoney.net/dc/textdata.html",
  ),
  "wiki40b": Entry(
    "Wiki40B, Wikipedia in one language",
    f"{_BUILDERS}.wiki40b:Wiki40b",
    "CC BY-SA 3.0",
    "en 9.4 GB, download 6.2 GB (its head 0.6 GB); he, download 0.8 GB; fi, vi: not known",
    "Guo et al. 2020, aclanthology.org/2020.lrec-1.297",
    _PAPERS_LANGUAGES,
    head=(400_000_000, 3_000_000, 3_000_000),
  ),
  "cc100": Entry(
    "CC-100, the beginning of the web pages of one language",
    f"{_BUILDERS}.cc100:CC100",
    "none claimed; Common Crawl's terms of use",
    "0.5 GB; download 0.3 GB",
    "Conneau et al. 2020, arXiv:1911.02116",
    _PAPERS_LANGUAGES,
  ),
  "childrens_books": Entry(
    "106 children's books of Project Gutenberg",
    f"{_BUILDERS}.childrens_books:ChildrensBooks",
    "public domain in the USA",
    "35 MB",
    "Project Gutenberg, gutenberg.org; the list is ours",
  ),
}


# The vocabularies of the papers: files by the names that their readers expect. Checksums:
# openai/tiktoken, tiktoken_ext/openai_public.py, for gpt2.
VOCABULARIES = {
  "bert_base_cased": (
    File(
      "https://huggingface.co/google-bert/bert-base-cased/resolve/main/vocab.txt",
      name="bert_base_cased_vocab.txt",
    ),
  ),
  "gpt2": (
    File(
      "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
      name="gpt2_merges.txt",
      checksum="sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    File(
      "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
      name="gpt2_vocab.json",
      checksum="sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
  ),
}


class Records:
  """A split as its builder has written it; each iteration reads it anew."""

  def __init__(self, source, size: int):
    """Takes a data source of records and the bytes of their text."""
    self._source = source
    self._size = size

  def __len__(self) -> int:
    """The text's size in bytes."""
    return self._size

  def __iter__(self) -> Iterator[str]:
    """Yields the text of every record."""
    for i in range(len(self._source)):
      yield self._source[i]["text"].decode()


def find(name: str, language: str = "") -> Entry:
  """The entry of a name.

  Raises:
    ValueError: `data.name` is unknown, or `data.language` is missing, or not one of the
      corpus's.
  """
  if name == ONE_MORE:
    raise UserError(f"data.name: expected a corpus to prepare, got {name}, which comes with Python")
  if name not in ENTRIES:
    names = [ONE_MORE, *ENTRIES]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise UserError(
      f"data.name: expected one of {', '.join(names)} (or a data.path), "
      f"got {name!r}; the nearest is {near}"
    )
  entry = ENTRIES[name]
  if entry.languages and language not in entry.languages:
    raise UserError(
      f"data.language: expected one of {', '.join(entry.languages)} for {name}, got {language!r}"
    )
  return entry


def is_prepared(name: str, data_dir: Path, language: str = "", head: bool = False) -> bool:
  """Whether a corpus has been made in a folder."""
  return bool(list(_root(name, data_dir, language, head).glob("*/dataset_info.json")))


def open_records(
  name: str,
  language: str,
  data_dir: Path,
  manual_dir: str | Path = "",
  *,
  only_head: bool = False,
) -> tuple[dict[str, Records], dict]:
  """Opens a corpus, having made it first where it is missing.

  Args:
    name: of `ENTRIES`.
    language: where it has several.
    data_dir: it is made in data_dir/name, its files in data_dir/downloads.
    manual_dir: where files are looked for before they are downloaded; "" is
      data_dir/manual.
    only_head: whether the first part is enough, where there is one.

  Returns:
    Its splits, of "train", "valid" and "test", and what it is.

  Raises:
    ValueError: as `find`; a file that has to be given by hand is not there, or a
      download failed, or a file is damaged; or data_dir cannot be written.
  """
  entry = find(name, language)
  manual_dir = _manual_dir(data_dir, manual_dir)
  import tensorflow_datasets as tfds

  module, _, class_name = entry.builder.partition(":")
  builder_class = getattr(importlib.import_module(module), class_name)
  if only_head and is_prepared(name, data_dir, language):
    only_head = False  # which begins alike
  config = _config(entry, language, only_head)
  try:
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / f"{'_'.join(filter(None, (name, config)))}.lock"):
      # Made within, it knows what another process has just prepared.
      builder = builder_class(
        data_dir=str(data_dir), file_format="array_record", config=config or None
      )
      if not Path(builder.data_dir, "dataset_info.json").exists():
        print(f"preparing {name}{' ' * bool(config)}{config} in {data_dir}", flush=True)
        _remove_leftovers(Path(builder.data_dir))
        builder.download_and_prepare(
          download_dir=str(data_dir / "downloads"),
          download_config=tfds.download.DownloadConfig(
            manual_dir=str(manual_dir), try_download_gcs=False
          ),
        )
    contents = json.loads(Path(builder.data_dir, "text.json").read_text("utf-8"))
  except OSError as error:
    if str(error.filename or "").startswith(str(manual_dir)):
      raise UserError(
        f"data.manual_dir: expected a file that can be read, got "
        f"{error.filename} ({error.strerror})"
      ) from error
    raise UserError(
      f"data.data_dir: expected a folder that can be written, got {data_dir} ({error})"
    ) from error
  splits, texts = {}, {}
  for split, source in (("train", "train"), ("valid", "validation"), ("test", "test")):
    if source in contents:
      texts[split] = contents[source]
      size = contents[source]["bytes"]
      splits[split] = Records(builder.as_data_source(source), size)
  about = {
    "name": name,
    "language": language,
    "configuration": config,
    "version": str(builder.version),
    "source": entry.source,
    "texts": texts,
  }
  return splits, about


def find_vocabulary(name: str, data_dir: Path, manual_dir: str | Path = "") -> str:
  """The path of a vocabulary: one of `VOCABULARIES`, downloaded, or the name itself.

  Raises:
    ValueError: the download failed.
  """
  if name not in VOCABULARIES:
    return name
  files, manual_dir = VOCABULARIES[name], _manual_dir(data_dir, manual_dir)
  # Those of one vocabulary have to lie together.
  given = all((manual_dir / file.name).exists() for file in files)
  try:
    first, *_ = [
      download(file, data_dir / "downloads", manual_dir=manual_dir if given else None)
      for file in files
    ]
  except OSError as error:
    raise UserError(
      f"data.data_dir: expected a folder that can be written, got {data_dir} ({error})"
    ) from error
  return str(first)


def _manual_dir(data_dir: Path, manual_dir: str | Path) -> Path:
  return Path(manual_dir or data_dir / "manual")


def _config(entry: Entry, language: str, only_head: bool) -> str:
  if not entry.languages:
    return ""
  return f"{language}_head" if entry.head and only_head else language


def _root(name: str, data_dir: Path, language: str, head: bool) -> Path:
  return data_dir / name / _config(ENTRIES[name], language, head)


def _remove_leftovers(folder: Path) -> None:
  """What a preparation that was killed has left; who holds the lock is alone."""
  for path in folder.parent.glob(f"incomplete.*_{folder.name}"):
    shutil.rmtree(path, ignore_errors=True)
