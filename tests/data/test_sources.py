"""Named corpora, end to end, on small files of their real formats."""

import csv
import dataclasses
import gzip
import hashlib
import io
import itertools
import lzma
import re
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from dpjax.data import catalog
from dpjax.data.sources import (
  Source,
  cc100,
  childrens_books,
  lm1b,
  openwebtext,
  reading,
  text8,
  wiki40b,
  wikitext,
)
from dpjax.data.text import load_corpus
from dpjax.errors import UserError
from dpjax.text.subwords import BytePairs

# Blank lines, one without words, and what other readers take for the end of a line.
LINES = (" = Se\u00f1or = \n", "\n", " \n", " a \r b \u2028 \u05d0\u05d1 \U0001f600 \x85 \n")
SPLITS = {
  "train": "".join(LINES) * 97,
  "valid": "valid" + "".join(LINES) * 7 + " no end",
  "test": "test" + "".join(LINES) * 11,
}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEXT8 = " ".join(ALPHABET[i % 26 : i % 26 + 1 + i % 7] for i in range(4000))[:18013]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  monkeypatch.setattr(reading, "PIECE", 997)


@pytest.fixture
def read(tmp_path):
  """Makes a corpus; its splits as text."""

  def make(name, language="", **settings):
    corpus = catalog.open_named(name, language, tmp_path / "data", tmp_path / "manual", **settings)
    return {split: "".join(text) for split, text in corpus.splits.items()}

  return make


def give(tmp_path, name, content):
  """Puts a file into the manual folder."""
  path = tmp_path / "manual" / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)
  return path


def zipped(members, compression=zipfile.ZIP_DEFLATED):
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", compression) as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  return buffer.getvalue()


def tarred(members):
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name)
      info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return buffer.getvalue()


def wikitext_members(version):
  ending = "raw" if version.endswith("raw") else "tokens"
  return {f"{version}/wiki.{split}.{ending}": text.encode() for split, text in SPLITS.items()}


def ptb_members(prefix):
  folder = f"{prefix}simple-examples"
  others = ("ptb.char.train.txt", "ptb-train.txt", "ptb.valid.txt~", "old.ptb.test.txt")
  return (
    {f"{folder}/": b"", f"{folder}/README": b"r"}
    | {f"{folder}/data/{name}": b"another\n" for name in others}
    | {f"{folder}/data/ptb.{split}.txt": text.encode() for split, text in SPLITS.items()}
  )


def lm1b_members():
  """Shards in an order that is not theirs."""
  folder = f"{LM1B}/training-monolingual.tokenized.shuffled"
  train = {
    f"{folder}/news.en-{i * 37 % 100:05d}-of-00100": f"shard {i} {LINES[3]}".encode()
    for i in range(1, 100)
  }
  folder = f"{LM1B}/heldout-monolingual.tokenized.shuffled"
  others = {
    f"{folder}/news.en.heldout-{i * 7 % 50:05d}-of-00050": f"heldout {i * 7 % 50} .\n\n".encode()
    for i in range(50)
  }
  return {f"{LM1B}/": b"", f"{LM1B}/README": b"r"} | others | train


LM1B_MEMBERS = lm1b_members()
CASES = {
  "text8": (
    zipped({"text8": TEXT8}),
    {"train": TEXT8[:-1800], "valid": TEXT8[-1800:-900], "test": TEXT8[-900:]},
  ),
  "lm1b": (
    tarred(LM1B_MEMBERS),
    {
      "train": b"".join(x for name, x in LM1B_MEMBERS.items() if "/news.en-" in name).decode(),
      "valid": "heldout 1 .\n\n",
      "test": "heldout 0 .\n\n",
    },
  ),
} | {
  version.replace("wikitext-", "wikitext").replace("-", "_"): (
    zipped(wikitext_members(version)),
    SPLITS,
  )
  for version in wikitext.ARCHIVES
}


def expect(monkeypatch, name, content, address=""):
  """Makes the source expect this archive, perhaps at another address; the file's name."""
  version = name.replace("wikitext", "wikitext-").replace("_", "-")
  module = {"text8": text8, "lm1b": lm1b}.get(name)
  file = module.ARCHIVE if module else wikitext.ARCHIVES[version]
  url = f"{address}/{file.name}" if address else file.url
  digits = hashlib.sha256(content).hexdigest()
  file = dataclasses.replace(file, url=url, checksum=f"sha256:{digits}")
  if module:
    monkeypatch.setattr(module, "ARCHIVE", file)
  else:
    monkeypatch.setitem(wikitext.ARCHIVES, version, file)
  return file.name


@pytest.mark.parametrize("name", CASES)
def test_archives(name, site, read, monkeypatch):
  content, splits = CASES[name]
  site.files[f"/{expect(monkeypatch, name, content, site.url)}"] = content
  for _ in range(2):  # The second time, the text is there.
    assert read(name) == splits
    assert len(site.asked) == 1


@pytest.mark.parametrize("form", ["./", ""])
def test_penn_treebank_from_the_manual_folder(form, read, tmp_path):
  give(tmp_path, "simple-examples.tgz", tarred(ptb_members(form)))
  assert read("penn_treebank") == SPLITS


def test_penn_treebank_is_not_downloaded(read, tmp_path):
  with pytest.raises(UserError, match=f"simple-examples.tgz .or a folder .* {tmp_path}/manual"):
    read("penn_treebank")


def spoil(content):
  """Other bytes near the beginning of what is compressed."""
  return content[:97] + b"\xff" * 23 + content[120:]


def letter_changed():
  content = bytearray(zipped({"text8": TEXT8}, zipfile.ZIP_STORED))
  content[content.index(TEXT8[:50].encode()) + 7] ^= 1
  return bytes(content)


WIKI2 = wikitext_members("wikitext-2")
TRAIN = "archive with wikitext-2/wiki.train.tokens"
DAMAGED = {
  "text8, not a zip": ("text8", b"no zip", "expected a zip archive with text8"),
  "text8, no member": ("text8", zipped({"other": "a"}), "expected a zip archive with text8"),
  "text8, not UTF-8": ("text8", zipped({"text8": b"a" * 997 + b"\xe9"}), "with text8 in UTF-8"),
  "text8, one letter": ("text8", letter_changed(), "with text8 in UTF-8, got .*CRC"),
  "wikitext, of another": ("wikitext2", CASES["wikitext103"][0], TRAIN),
  "wikitext, no text": (
    "wikitext2",
    zipped(WIKI2 | {"wikitext-2/wiki.test.tokens": b"a\xe9\n"}),
    "archive with wikitext-2/wiki.test.tokens in UTF-8",
  ),
  "wikitext, leads out": ("wikitext2", zipped({"../a": b"a"} | WIKI2), r"\.\./a, which leads out"),
  "wikitext, cut": ("wikitext2", CASES["wikitext2"][0][:-97], TRAIN),
  "lm1b, bytes changed": ("lm1b", spoil(CASES["lm1b"][0]), "expected a tar.gz archive"),
  "lm1b, no tar in it": ("lm1b", gzip.compress(b"a" * 9973), "expected a tar.gz archive"),
  "lm1b, cut": ("lm1b", CASES["lm1b"][0][:-997], "expected a tar.gz archive"),
  "lm1b, leads out": ("lm1b", tarred({"a/../../b": b"a"}), "b, which leads out"),
  "wikitext, no valid": (
    "wikitext2",
    zipped(WIKI2 | {"wikitext-2/wiki.valid.tokens": b""}),
    "wikitext2: expected text in the split valid",
  ),
  "lm1b, a shard less": (
    "lm1b",
    tarred({k: v for k, v in LM1B_MEMBERS.items() if "n-00001" not in k}),
    "expected 99 members .*got 98",
  ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archive(case, read, tmp_path, monkeypatch):
  name, content, message = DAMAGED[case]
  path = give(tmp_path, expect(monkeypatch, name, content), content)
  with pytest.raises(UserError, match=f"{path}: .*{message}|^{message}"):
    read(name)
  assert not list((tmp_path / "data" / "texts").glob("*.partial"))


def parquet(texts, column="text", **kwargs) -> bytes:
  numbers = [f"Q{i}" for i in range(len(texts))]
  table = pa.table({"wikidata_id": numbers, column: texts, "version_id": numbers})
  sink = pa.BufferOutputStream()
  pq.write_table(table, sink, row_group_size=5, **kwargs)
  return sink.getvalue().to_pybytes()


def article(title, text):
  return f"\n_START_ARTICLE_\n{title}\n_START_PARAGRAPH_\n{text}"


PLAIN = [article("Ähtäri", f"Kunta, jossa on {i} järveä._NEWLINE_Näin.") for i in range(7)]
WIKI = {
  "train-00000-of-00003.parquet": PLAIN[:3],
  "train-00001-of-00003.parquet": [PLAIN[3], "", None, PLAIN[4]],
  "train-00002-of-00003.parquet": ["last"],
  "validation-00000-of-00001.parquet": [PLAIN[5]],
  "test-00000-of-00001.parquet": [PLAIN[6]],
}
WIKI_TEXT = {"train": "".join(PLAIN[:5]) + "last", "valid": PLAIN[5], "test": PLAIN[6]}
WIKI_FILES = {name: parquet(texts) for name, texts in WIKI.items()}
REPOSITORY = "google/wiki40b"


def parquet_names(site):
  return [name for name in site.names() if name.endswith(".parquet")]


@pytest.mark.parametrize("as_printed", [False, True])
def test_wiki40b(site, read, as_printed):
  def form(text):
    return repr(text.encode()) if as_printed and text is not None else text

  quoted = '\n_START_ARTICLE_\nIt\'s "שלום" \\n'  # Python prints it in other quotes
  files = {name: parquet([form(x) for x in texts]) for name, texts in WIKI.items()}
  files["test-00000-of-00001.parquet"] = parquet([form("\nit's"), form(quoted)])
  site.publish(REPOSITORY, "fi", files)
  assert read("wiki40b", "fi") == WIKI_TEXT | {"test": "\nit's" + quoted}
  assert sorted(parquet_names(site)) == sorted(files)  # each file once


def test_the_head_of_wiki40b_needs_no_more_files(site, read, monkeypatch):
  site.publish(REPOSITORY, "en", WIKI_FILES)
  most = {"train": len(PLAIN[0]) + 1, "valid": 10**6, "test": 1}
  monkeypatch.setattr(wiki40b, "HEAD_CHARACTERS", most)
  text = read("wiki40b", "en", is_head=True)
  assert text == WIKI_TEXT | {"train": PLAIN[0] + PLAIN[1]}  # whole articles
  assert parquet_names(site) == [name for name in WIKI if "0000-of" in name]
  assert read("wiki40b", "en") == WIKI_TEXT
  assert len(parquet_names(site)) == 5
  # Where all of it is there, the head is not made.
  monkeypatch.setattr(wiki40b, "HEAD_CHARACTERS", None)
  assert read("wiki40b", "en", is_head=True) == WIKI_TEXT


@pytest.mark.parametrize("lacks", [False, True])
def test_a_copy_of_the_repository_needs_no_list(site, read, tmp_path, lacks):
  name = "train-00001-of-00003.parquet"
  for other, content in WIKI_FILES.items():
    if not (lacks and other == name):
      give(tmp_path, f"wiki40b/fi/{other}", content)
  if lacks:
    site.publish(REPOSITORY, "fi", WIKI_FILES)
  assert read("wiki40b", "fi") == WIKI_TEXT
  assert parquet_names(site) == [name] * lacks and bool(site.asked) == lacks


@pytest.mark.parametrize("names", [None, [], ["train-00001-of-00002.parquet"], ["a.parquet"]])
def test_a_list_that_cannot_be_used(site, read, names):
  if names is not None:
    site.publish(REPOSITORY, "fi", dict.fromkeys(names, b"a"))
  with pytest.raises(UserError, match="hf://datasets/google/wiki40b/fi: expected"):
    read("wiki40b", "fi")


@pytest.mark.parametrize(
  "content",
  [
    b"<html>no Parquet</html>",
    parquet(["a"])[:-9],
    parquet(["a"], column="content"),
    parquet([3, 5]),
    parquet([article("a", "b" * 99)] * 7, compression="none").replace(b"bbbb", b"b\xffbb"),
  ],
)
def test_a_damaged_parquet_file(tmp_path, content):
  path = give(tmp_path, "some.parquet", content)
  with pytest.raises(UserError, match="some.parquet: expected a Parquet file"):
    list(reading.parquet_texts(path))


@pytest.mark.parametrize("text", ["b'\\n_START_ARTI", "b'\\xff'", "b'' + 1"])
def test_an_article_that_was_not_printed_bytes(read, tmp_path, text):
  for name in WIKI:
    give(tmp_path, f"wiki40b/he/{name}", parquet([text]))
  with pytest.raises(UserError, match=r"train-00000-of-00003.parquet: expected article"):
    read("wiki40b", "he")


def test_openwebtext(site, read):
  documents = [f"Page {i}: naïve\n\nend" for i in range(2003)]
  documents[5], documents[998], documents[1998] = "", "", "二\n"
  files = {
    "train-00000-of-00002.parquet": parquet(documents[:997]),
    "train-00001-of-00002.parquet": parquet(documents[997:]),
  }
  site.publish(openwebtext.REPOSITORY, "plain_text", files)
  text, end = read("openwebtext"), "\n<|endoftext|>\n"
  assert text["valid"] == end + "二\n" + end
  assert text["test"] == documents[999] + end + documents[1999] + end
  assert text["train"] == "".join(d + end for i, d in enumerate(documents) if i % 1000 < 998)
  assert sorted(parquet_names(site)) == sorted(files)  # each once


def test_the_mark_between_pages_is_one_token():
  tokenizer = BytePairs.train(["some text of some pages"], 260)
  ids = tokenizer.encode(f"text\n{openwebtext.SEPARATOR}\nPage")
  is_mark = ids == tokenizer.encode(openwebtext.SEPARATOR)[0]
  assert is_mark.tolist() == [False] * 5 + [True] + [False] * 5


DOCUMENTS = [f"Sivu {i}, äö.\n{'päivä ' * (i % 7)}\n\n" for i in range(1, 4000)]


def test_cc100_takes_the_beginning(site, read, monkeypatch):
  packed = lzma.compress("".join(DOCUMENTS).encode())
  site.files["/fi.txt.xz"] = packed
  monkeypatch.setattr(cc100, "BASE_URL", site.url)
  monkeypatch.setattr(cc100, "HEAD_BYTES", len(packed) // 2)
  text = read("cc100", "fi")
  assert list(text) == ["train"] and site.sent <= len(packed) // 2
  count = text["train"].count("\n\n")
  assert text["train"] == "".join(DOCUMENTS[:count]) and 1000 < count < 3999


def test_cc100_in_the_manual_folder(site, read, tmp_path, monkeypatch):
  streams = ["".join(DOCUMENTS[:50]), "\n", "".join(DOCUMENTS[50:]) + "no blank line"]
  for language in ("en", "vi"):
    packed = b"".join(lzma.compress(x.encode()) for x in streams)
    give(tmp_path, f"cc100-{language}.txt.xz", packed)
  assert read("cc100", "en") == {"train": "".join(streams)}
  monkeypatch.setattr(cc100, "MAX_CHARACTERS", len("".join(DOCUMENTS[:16])) + 1)
  assert read("cc100", "vi") == {"train": "".join(DOCUMENTS[:17])}
  assert site.asked == []


@pytest.mark.parametrize(
  "content",
  [b"plain text", lzma.compress(b"a\xff\n\nb"), lzma.compress(b"ab\n" * 9)[:-9] + b"\0" * 9],
)
def test_a_damaged_xz_file(tmp_path, content):
  path = give(tmp_path, "en.txt.xz", content)
  with pytest.raises(UserError, match="en.txt.xz: expected UTF-8 text packed by xz"):
    list(cc100.read_documents(path))


def gutenberg(body, start="THE PROJECT GUTENBERG EBOOK A BOOK", credits=""):
  text = (
    f"\ufeffThe Project Gutenberg eBook of A Book\n\nTitle: A Book\n\n"
    f"*** START OF {start} ***\n\n\n\n{credits}\n\n\n{body}\n\n\n\n"
    f"*** END OF {start} ***\n\nUpdated editions will replace the previous one\n"
  )
  return text.replace("\n", "\r\n").encode()


BOOKS = {
  11: ("train", "   ALICE\n\n“Oh dear!” *  *  *  café\n\n\n\nTHE END"),
  8: ("test", "One"),
  17: ("validation", "Two"),
  5: ("train", "Three _words_ more"),
  23: ("train", "Last"),
}


@pytest.mark.parametrize("is_served", [False, True])
def test_childrens_books(site, read, tmp_path, monkeypatch, is_served):
  rows = [f'{i}\t{split}\t"A Book\tSome, One\n' for i, (split, _) in BOOKS.items()]
  (tmp_path / "list.tsv").write_text("id\tsplit\ttitle\tauthor\n" + "".join(rows))
  monkeypatch.setattr(childrens_books, "BOOKS", tmp_path / "list.tsv")
  monkeypatch.setattr(childrens_books, "BASE_URL", site.url)
  for i, (_, body) in BOOKS.items():
    if is_served:
      site.files[f"/{i}/pg{i}.txt"] = gutenberg(body)
    else:
      give(tmp_path, f"pg{i}.txt", gutenberg(body))
  assert read("childrens_books") == {
    "train": BOOKS[11][1] + "\n<|endofbook|>\nThree _words_ more\n<|endofbook|>\nLast\n",
    "valid": "Two\n",
    "test": "One\n",
  }
  assert sorted(site.asked) == sorted(site.files)


def test_the_list_of_childrens_books():
  with childrens_books.BOOKS.open(encoding="utf-8") as table:
    rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
  numbers = {
    split: [int(row["id"]) for row in rows if row["split"] == split]
    for split in ("train", "validation", "test")
  }
  assert len(numbers["train"]) == 100 and len({int(row["id"]) for row in rows}) == 106
  assert numbers["validation"] == [1448, 902, 4358]
  assert numbers["test"] == [271, 473, 419]
  assert all(row["title"] and row["author"] for row in rows)


@pytest.mark.parametrize(
  "content",
  [
    gutenberg("A\n\nB", "THIS PROJECT GUTENBERG EBOOK THE\nBOOK"),
    gutenberg("A\n\nB\n\n\nEnd of Project Gutenberg's A Book, by One"),
    gutenberg("A\n\nB\n\nEnd of the Project Gutenberg EBook of A Book"),
    gutenberg(
      "A\n\nB",
      credits="Produced by Some One and the Online Distributed\n"
      "Proofreading Team at https://www.pgdp.net",
    ),
    gutenberg(
      "A\n\nB",
      credits="E-text prepared by Some One\n\n\n\nNote: Project Gutenberg "
      "also has an HTML version of this\n      file\n      See 7-h.htm",
    ),
    "\ufeff*** START OF THE PROJECT GUTENBERG EBOOK A ***\nA\n\nB\n*** END OF THIS PROJECT "
    "GUTENBERG EBOOK A ***\n".encode(),
    b"***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\r\nWhy?\r\n"
    b"*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.07.00*END*\r\n\r\n"
    b"A\r\n\r\nB\r\n\r\nEnd of The Project Gutenberg Etext of A Book\r\n",
    gutenberg("A\n\nB", credits="This etext was prepared by One\n\nTranscribed from the 1897 ed."),
  ],
)
def test_what_is_not_the_books_own_is_cut_off(tmp_path, content):
  assert childrens_books.read_book(give(tmp_path, "pg7.txt", content)) == "A\n\nB\n"


@pytest.mark.parametrize(
  "content, expected",
  [
    (b"A book\n*** END OF THE PROJECT GUTENBERG EBOOK A ***\n", "none of the first"),
    (gutenberg("A").replace(b"END", b"ENE"), "none of the second"),
    (gutenberg("caf\xe9").decode().encode("latin-1", "ignore"), "in UTF-8"),
  ],
)
def test_a_file_that_is_no_book(tmp_path, content, expected):
  with pytest.raises(UserError, match=f"pg7.txt: expected a book .*{expected}"):
    childrens_books.read_book(give(tmp_path, "pg7.txt", content))


def test_packed_splits_in_the_manual_folder(site, read, tmp_path):
  for split in SPLITS:
    give(tmp_path, f"wiki40b/fi/{split}.txt.xz", lzma.compress(f"{split} ä\n".encode()))
  assert read("wiki40b", "fi") == {split: f"{split} ä\n" for split in SPLITS}
  assert site.asked == []


@pytest.mark.parametrize("missing", SPLITS)
def test_splits_that_lie_ready_are_all_of_them(read, tmp_path, missing):
  for name in SPLITS.keys() - {missing}:
    give(tmp_path, f"childrens_books/{name}.txt", b"a")
  with pytest.raises(UserError, match=f"data.manual_dir: .* without {missing}.txt"):
    read("childrens_books")


def test_an_own_source(read, tmp_path):
  def pieces(files, language):
    text = "".join(reading.text_file(files.manual_dir / f"{language}.txt"))
    for split in ("train", "test", "train"):  # in any order
      yield split, f"{text} {split}\n"

  source = Source("Mine", pieces, "mine", "small", "me", languages=("la",))
  catalog.register_corpus("mine", source)
  try:
    with pytest.raises(UserError, match="name: expected a new one"):
      catalog.register_corpus("mine", source)
    give(tmp_path, "la.txt", b"vale")
    assert read("mine", "la") == {"train": "vale train\nvale train\n", "test": "vale test\n"}
  finally:
    del catalog.ENTRIES["mine"]
  for name in ("text8", "python_manual", "a/b", "tfds:x"):
    with pytest.raises(UserError, match="name: expected a new one"):
      catalog.register_corpus(name, source)


class SmallTextForTests(tfds.core.GeneratorBasedBuilder):
  """A corpus of TensorFlow Datasets, which registers itself."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ("whole", "train", "image")]

  def _info(self):
    kinds = {"image": "label"}
    name = kinds.get(self.builder_config.name, "text")
    features = tfds.features.FeaturesDict({name: tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    splits = ["train", "validation", "test", "unsupervised"]
    return {split: self._generate_examples(split) for split in splits[: 1 + 3 * self._is_whole]}

  @property
  def _is_whole(self):
    return self.builder_config.name == "whole"

  def _generate_examples(self, split):
    (name,) = self.info.features
    for i in range(1100 if split == "train" else 3):
      yield i, {name: f"{split} {i} ä" + "\n" * (i % 2)}


def lines(split, numbers):
  return "".join(f"{split} {i} ä\n" for i in numbers)


def test_tensorflow_datasets(read, tmp_path):
  pytest.importorskip("array_record")
  text = read("tfds:small_text_for_tests/whole")
  assert text == {
    "train": lines("train", range(1100)),
    "valid": lines("validation", range(3)),
    "test": lines("test", range(3)),
  }
  text = load_corpus(
    "tfds:small_text_for_tests/train", split_fractions=(0.7, 0.2, 0.1), data_dir=tmp_path / "data"
  ).splits
  parts = ["".join(text[split]) for split in SPLITS]
  assert "".join(parts) == lines("train", range(1100))
  assert all(part.endswith("\n") for part in parts)
  assert len(parts[1]) / len("".join(parts)) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
  "name, message",
  [("small_text_for_tests/image", "(KeyError: 'text')"), ("none_of_these", "none_of")],
)
def test_what_tensorflow_datasets_cannot_make(read, name, message):
  with pytest.raises(UserError, match=f"^data.name: .*{re.escape(message)}.*$") as error:
    read(f"tfds:{name}")
  assert "\n" not in str(error.value)


def test_missing_splits_are_cut_from_the_end_of_train(tmp_path, monkeypatch):
  text = lines("line", range(100)) + "no end"
  for given in itertools.chain.from_iterable(itertools.combinations(SPLITS, n) for n in (1, 2, 3)):
    if "train" not in given:
      continue
    source = Source("", lambda files, given=given: ((x, text) for x in given), "", "", "")
    name = "_".join(given)
    monkeypatch.setitem(catalog.ENTRIES, name, source)
    splits = load_corpus(name, data_dir=tmp_path).splits
    found = {split: "".join(parts) for split, parts in splits.items()}
    assert list(found) == list(SPLITS) and all(found.values())
    assert "".join(x for split, x in found.items() if split not in given[1:]) == text
    assert all(found[split] == text for split in given[1:])
