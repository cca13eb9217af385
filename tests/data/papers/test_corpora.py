"""The papers' corpora, end to end, on small files of their real formats."""

import dataclasses
import gzip
import io
import lzma
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from dpjax.commands import data as command
from dpjax.data import readers, remote, sources
from dpjax.data.remote import Files
from dpjax.errors import UserError
from dpjax.text.pieces import BytePairs
from dpjax_papers import corpora
from dpjax_papers.cleaning import clean
from tests import helpers

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
def small_blocks(monkeypatch):
  monkeypatch.setattr(readers, "BLOCK_BYTES", 997)
  monkeypatch.setattr(corpora, "BLOCK_BYTES", 997)


@pytest.fixture
def files(tmp_path):
  return Files(tmp_path / "data", tmp_path / "manual")


@pytest.fixture
def read(files):
  """The text of each split that a corpus has."""

  def read_all(name):
    texts = {}
    for split, piece in sources.read_source(name, files):
      texts[split] = texts.get(split, "") + piece
    return texts

  return read_all


def give(tmp_path, name, content):
  """Puts a file into the manual folder."""
  path = tmp_path / "manual" / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)
  return path


def zipped(members):
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
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


def wikitext_members(version, ending):
  return {f"{version}/wiki.{split}.{ending}": text.encode() for split, text in SPLITS.items()}


def ptb_members(prefix):
  folder = f"{prefix}simple-examples"
  others = ("ptb.char.train.txt", "ptb-train.txt", "ptb.valid.txt~", "old.ptb.test.txt")
  members = {f"{folder}/": b""} | {f"{folder}/data/{name}": b"another\n" for name in others}
  return members | {f"{folder}/data/ptb.{x}.txt": text.encode() for x, text in SPLITS.items()}


def lm1b_members():
  """Shards in an order that is not theirs."""
  folder = f"{LM1B}/training-monolingual.tokenized.shuffled"
  numbers = [i * 37 % 100 for i in range(1, 100)]
  train = {f"{folder}/news.en-{i:05}-of-00100": f"shard {i} {LINES[3]}".encode() for i in numbers}
  folder = f"{LM1B}/heldout-monolingual.tokenized.shuffled"
  numbers = [i * 7 % 50 for i in range(50)]
  others = {f"{folder}/news.en.heldout-{i:05}-of-00050": b"heldout %d .\n" % i for i in numbers}
  return {f"{LM1B}/": b"", f"{LM1B}/README": b"r"} | others | train, train


LM1B_MEMBERS, LM1B_TRAIN = lm1b_members()
WIKI2 = wikitext_members("wikitext-2", "tokens")
WIKI103 = wikitext_members("wikitext-103-raw", "raw")
ARCHIVES = {
  "text8": ("text8.zip", zipped({"text8": TEXT8})),
  "lm1b": (f"{LM1B}.tar.gz", tarred(LM1B_MEMBERS)),
  "wikitext2": ("wikitext-2-v1.zip", zipped(WIKI2)),
  "wikitext103_raw": ("wikitext-103-raw-v1.zip", zipped(WIKI103)),
}
OF_LM1B = (b"".join(LM1B_TRAIN.values()).decode(), "heldout 1 .\n", "heldout 0 .\n")
TEXTS = {
  "text8": dict(zip(SPLITS, (TEXT8[:-1800], TEXT8[-1800:-900], TEXT8[-900:]), strict=True)),
  "lm1b": dict(zip(SPLITS, OF_LM1B, strict=True)),
}


@pytest.fixture
def other_archives(site, monkeypatch):
  """Lets the archives be at the site, and have any content."""

  def at_site(file):
    return dataclasses.replace(file, url=f"{site.url}/{file.name}", checksum="")

  for name in ("TEXT8", "LM1B"):
    monkeypatch.setattr(corpora, name, at_site(getattr(corpora, name)))
  for version, file in corpora.WIKITEXT.items():
    monkeypatch.setitem(corpora.WIKITEXT, version, at_site(file))


@pytest.mark.usefixtures("other_archives")
@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(name, site, read):
  file, content = ARCHIVES[name]
  site.plain[f"/{file}"] = content
  assert read(name) == TEXTS.get(name, SPLITS) and len(site.asked) == 1


@pytest.mark.parametrize("form", ["./", ""])
def test_penn_treebank_from_the_manual_folder(form, read, tmp_path):
  give(tmp_path, "simple-examples.tgz", tarred(ptb_members(form)))
  assert read("penn_treebank") == SPLITS


def test_penn_treebank_is_not_downloaded(read, tmp_path):
  with pytest.raises(UserError, match=f"simple-examples.tgz .or a folder .* {tmp_path}/manual"):
    read("penn_treebank")


DAMAGED = {
  "text8, no member": ("text8", zipped({"other": "a"}), "expected a zip archive with text8"),
  "text8, not UTF-8": ("text8", zipped({"text8": b"a" * 997 + b"\xe9"}), "with text8 in UTF-8"),
  "text8, cut": ("text8", ARCHIVES["text8"][1][:-97], "with text8 in UTF-8"),
  "wikitext, leads out": ("wikitext2", zipped({"../a": b"a"} | WIKI2), r"\.\./a, which leads out"),
  "wikitext, no valid": (
    "wikitext2",
    zipped(WIKI2 | {"wikitext-2/wiki.valid.tokens": b""}),
    "^wikitext2: expected text in the split valid",
  ),
  "lm1b, no tar in it": ("lm1b", gzip.compress(b"a" * 9973), "expected a tar.gz archive"),
  "lm1b, cut": ("lm1b", ARCHIVES["lm1b"][1][:-997], "expected a tar.gz archive"),
  "lm1b, leads out": ("lm1b", tarred({"a/../../b": b"a"}), "b, which leads out"),
  "lm1b, a shard less": (
    "lm1b",
    tarred({k: v for k, v in LM1B_MEMBERS.items() if "n-00001" not in k}),
    "expected 99 members .*got 98",
  ),
}


@pytest.mark.usefixtures("other_archives")
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archive(case, tmp_path):
  name, content, message = DAMAGED[case]
  path = give(tmp_path, ARCHIVES[name][0], content)
  with pytest.raises(UserError, match=message if message[0] == "^" else f"{path}: .*{message}"):
    helpers.load_corpus(name, data_dir=tmp_path / "data", manual_dir=tmp_path / "manual")
  assert not list((tmp_path / "data" / "texts").glob("*.partial"))


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
WIKI_FILES = {name: helpers.parquet(texts) for name, texts in WIKI.items()}


def publish(site, files):
  site.publish("datasets/google/wiki40b", {f"fi/{name}": x for name, x in files.items()})


def parquet_names(site):
  return [name for name in site.names() if name.endswith(".parquet")]


def test_wiki40b_as_python_prints_it(site, read):
  quoted = '\n_START_ARTICLE_\nIt\'s "שלום" \\n'  # Python prints it in other quotes
  texts = WIKI | {"test-00000-of-00001.parquet": ["\nit's", quoted]}
  printed = {x: [y and repr(y.encode()) for y in each] for x, each in texts.items()}
  files = {name: helpers.parquet(each) for name, each in printed.items()}
  publish(site, files)
  assert read("wiki40b_fi_raw") == WIKI_TEXT | {"test": "\nit's" + quoted}
  assert sorted(parquet_names(site)) == sorted(files)  # each file once


def test_clean_wiki40b_needs_the_first_files_only(site, read, monkeypatch):
  publish(site, WIKI_FILES)
  sizes = {"train": len(PLAIN[0]) + 1, "valid": 10**6, "test": 1}
  monkeypatch.setattr(corpora, "WIKI40B_HEAD", sizes)
  expected = {"train": PLAIN[0] + PLAIN[1], "valid": PLAIN[5], "test": PLAIN[6]}
  assert read("wiki40b_fi") == {split: clean(text, "fi") for split, text in expected.items()}
  assert parquet_names(site) == [name for name in WIKI if "0000-of" in name]
  assert read("wiki40b_fi_raw") == WIKI_TEXT and len(parquet_names(site)) == 5


@pytest.mark.parametrize("lacks", [False, True])
def test_a_copy_of_the_repository_needs_no_list(site, read, tmp_path, lacks):
  name = "train-00001-of-00003.parquet"
  for other, content in WIKI_FILES.items():
    if not (lacks and other == name):
      give(tmp_path, f"wiki40b/fi/{other}", content)
  if lacks:
    publish(site, WIKI_FILES)
  assert read("wiki40b_fi_raw") == WIKI_TEXT
  assert parquet_names(site) == [name] * lacks and bool(site.asked) == lacks


@pytest.mark.parametrize("names", [None, ["train-00001-of-00002.parquet"], ["a.parquet"]])
def test_a_list_that_cannot_be_used(site, read, names):
  if names is not None:
    publish(site, dict.fromkeys(names, b"a"))
  with pytest.raises(UserError, match="hf://datasets/google/wiki40b/fi: expected"):
    read("wiki40b_fi_raw")


@pytest.mark.parametrize(
  "content",
  [
    b"<html>no Parquet</html>",
    helpers.parquet([article("a", "b" * 99)] * 7, compression="none").replace(b"bbbb", b"b\xffbb"),
  ],
)
def test_a_damaged_parquet_file(tmp_path, content):
  path = give(tmp_path, "some.parquet", content)
  with pytest.raises(UserError, match="some.parquet: expected a Parquet file"):
    list(readers.read_records(path, ["text"]))


@pytest.mark.parametrize("text", ["b'\\n_START_ARTI", "b'\\xff'"])
def test_an_article_that_was_not_printed_bytes(read, tmp_path, text):
  for name in WIKI:
    give(tmp_path, f"wiki40b/he/{name}", helpers.parquet([text]))
  with pytest.raises(UserError, match=r"train-00000-of-00003.parquet: expected article"):
    read("wiki40b_he_raw")


def test_openwebtext(site, read):
  documents = [f"Page {i}: naïve\n\nend" for i in range(2003)]
  documents[5], documents[998], documents[1998] = "", "", "二\n"
  files = {
    "plain_text/train-00000-of-00002.parquet": helpers.parquet(documents[:997]),
    "plain_text/train-00001-of-00002.parquet": helpers.parquet(documents[997:]),
  }
  site.publish(f"datasets/{corpora.OPENWEBTEXT}", files)
  text, end = read("openwebtext"), "\n<|endoftext|>\n"
  assert text["valid"] == end + "二\n" + end
  assert text["test"] == documents[999] + end + documents[1999] + end
  assert text["train"] == "".join(d + end for i, d in enumerate(documents) if i % 1000 < 998)
  assert len(parquet_names(site)) == 2  # each once


def test_the_mark_between_pages_is_one_token():
  tokenizer = BytePairs.train(["some text of some pages"], vocab_size=260)
  ids = tokenizer.encode(f"text\n{corpora.END_OF_PAGE}\nPage")
  is_mark = ids == tokenizer.encode(corpora.END_OF_PAGE)[0]
  assert is_mark.tolist() == [False] * 5 + [True] + [False] * 5


DOCUMENTS = [f"Sivu {i}, äö.\n{'päivä ' * (i % 7)}\n\n" for i in range(1, 4000)]


def test_cc100_takes_the_beginning(site, read, monkeypatch):
  packed = lzma.compress("".join(DOCUMENTS).encode())
  site.plain["/fi.txt.xz"] = packed
  monkeypatch.setattr(corpora, "CC100_URL", site.url)
  monkeypatch.setattr(corpora, "CC100_BYTES", len(packed) // 2)
  text = read("cc100_fi_raw")
  assert list(text) == ["train"] and site.sent <= len(packed) // 2
  count = text["train"].count("\n\n")
  assert text["train"] == "".join(DOCUMENTS[:count]) and 1000 < count < 3999


def test_cc100_in_the_manual_folder(site, read, files, tmp_path, monkeypatch):
  streams = ["".join(DOCUMENTS[:50]), "\n", "".join(DOCUMENTS[50:]) + "no blank line"]
  for language in ("en", "fi"):
    packed = b"".join(lzma.compress(x.encode()) for x in streams)
    give(tmp_path, f"cc100-{language}.txt.xz", packed)
  assert read("cc100_en_raw") == {"train": "".join(streams)}
  # The splits of clean text follow each other.
  texts = corpora.cc100_documents(files, "fi")
  parts = {split: "" for split in SPLITS}
  for split, piece in corpora.cleaned(texts, "fi", (1001, 70, 33)):
    parts[split] += piece
  assert [len(part) for part in parts.values()] == [1001, 70, 33]
  assert clean("".join(DOCUMENTS), "fi").startswith("".join(parts.values()))
  monkeypatch.setattr(corpora, "CC100_CHARACTERS", len("".join(DOCUMENTS[:16])) + 1)
  assert read("cc100_fi_raw") == {"train": "".join(DOCUMENTS[:17])}
  assert site.asked == []


@pytest.mark.parametrize(
  "content", [lzma.compress(b"a\xff\n\nb"), lzma.compress(b"ab\n" * 9)[:-9] + b"\0" * 9]
)
def test_a_damaged_xz_file(tmp_path, read, content):
  give(tmp_path, "cc100-en.txt.xz", content)
  with pytest.raises(UserError, match="en.txt.xz: expected UTF-8 text packed by xz"):
    read("cc100_en")


def test_tiny_corpora_are_the_first_characters():
  pieces = [("valid", "abc"), ("train", "defgh"), ("valid", "ij"), ("train", "k"), ("test", "l")]
  taken = [*corpora.first_characters(iter(pieces + [("valid", "m")]), (4, 4, 1))]
  assert taken == [("valid", "abc"), ("train", "defg"), ("valid", "i"), ("test", "l")]


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


def test_childrens_books(site, read, tmp_path, monkeypatch):
  rows = [f'{i}\t{split}\t"A Book\tSome, One\n' for i, (split, _) in BOOKS.items()]
  (tmp_path / "list.tsv").write_text("id\tsplit\ttitle\tauthor\n" + "".join(rows))
  monkeypatch.setattr(corpora, "BOOKS", tmp_path / "list.tsv")
  monkeypatch.setattr(corpora, "GUTENBERG", site.url)
  site.plain = {f"/{i}/pg{i}.txt": gutenberg(body) for i, (_, body) in BOOKS.items()}
  assert read("childrens_books") == {
    "train": BOOKS[11][1] + "\n<|endofbook|>\nThree _words_ more\n<|endofbook|>\nLast\n",
    "valid": "Two\n",
    "test": "One\n",
  }
  assert len(site.asked) == len(BOOKS)


@pytest.mark.parametrize(
  "content",
  [
    gutenberg("A\n\nB", "THIS PROJECT GUTENBERG EBOOK THE\nBOOK"),
    gutenberg("A\n\nB\n\n\nEnd of Project Gutenberg's A Book, by One"),
    gutenberg("A\n\nB", credits="Produced by Some One and the Online\nTeam at www.pgdp.net"),
    gutenberg("A\n\nB", credits="E-text prepared by One\n\n\nNote: Project Gutenberg\n has HTML"),
    b"***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\r\nWhy?\r\n"
    b"*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.07.00*END*\r\n\r\n"
    b"A\r\n\r\nB\r\n\r\nEnd of The Project Gutenberg Etext of A Book\r\n",
    gutenberg("A\n\nB", credits="This etext was prepared by One\n\nTranscribed from the 1897 ed."),
  ],
)
def test_what_is_not_the_books_own_is_cut_off(tmp_path, content):
  assert corpora.read_book(give(tmp_path, "pg7.txt", content)) == "A\n\nB\n"


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
    corpora.read_book(give(tmp_path, "pg7.txt", content))


MARKS = {
  "childrens_books": ["A\nb\n<|endofbook|>\n", "C <|endofbook|>\n<|endofbook|>\n", "D\n"],
  "openwebtext": ["A\n\nb\n<|endoftext|>\n", "C\n<|endoftext|>\n"],
  "wiki40b_fi_raw": [article("Ahti", "Ahti on"), "\n_START_ARTICLE_\nB\n_START_SECTION_\nC"],
  "wikitext2": [
    " \n = Homarus = \n \n It = x = \n \n = = A = = \n \n = 3 \n \n",
    " = A = B = \n \n c = \n \n",
    " = C ( D ) = \n \n e \n",
  ],
  "cc100_vi_raw": ["a\nb\n\n", "c\n\n", "\nd\ne\n\n"],
  "lm1b": ["A sentence .\n", "b .\n", "c .\n"],
}


@pytest.mark.parametrize("name", MARKS)
def test_documents(tmp_path, name):
  folder = tmp_path / "data/manual" / name
  folder.mkdir(parents=True)
  for split in SPLITS:
    (folder / f"{split}.txt").write_bytes("".join(MARKS[name]).encode())
  corpus = helpers.load_corpus(name, isolate_documents=True, data_dir=tmp_path / "data")
  assert {x: [*text] for x, text in corpus.splits.items()} == dict.fromkeys(SPLITS, MARKS[name])


def test_the_command_lists_all_corpora(capsys):
  command.main(["list"])
  blocks = capsys.readouterr().out.strip().split("\n\n")
  by_name = {block.partition(":")[0]: block for block in blocks}
  assert by_name.keys() == sources.SOURCES.keys() >= {"python_manual", "text8", "wiki40b_fi"}
  assert all("licence" in block for block in blocks)


def test_a_vocabulary_lies_in_one_folder(files, tmp_path, monkeypatch):
  def get(files, file, *, by_hand):
    return (files.manual_dir if by_hand else files.folder) / file.name

  monkeypatch.setattr(remote.Files, "get", get)
  give(tmp_path, "gpt2_merges.txt", b"")
  place = tmp_path / "data", tmp_path / "manual"
  assert remote.find_vocabulary("gpt2", *place) == str(tmp_path / "data/downloads/gpt2_merges.txt")
  give(tmp_path, "gpt2_vocab.json", b"")
  assert remote.find_vocabulary("gpt2", *place) == str(tmp_path / "manual/gpt2_merges.txt")
  assert remote.find_vocabulary("mine.txt", *place) == "mine.txt"


@helpers.needs_locks
def test_two_that_begin_at_once_and_never_import_tensorflow(tmp_path):
  data_dir = tmp_path / "data"
  give(tmp_path, "../data/manual/text8.zip", zipped({"text8": TEXT8}))
  code = (
    "import dataclasses, sys; from dpjax_papers import corpora; "
    "from dpjax.data.sources import load_corpus; "
    "corpora.TEXT8 = dataclasses.replace(corpora.TEXT8, checksum=''); "
    "sys.stdin.readline(); corpus = load_corpus(name='text8', data_dir=sys.argv[1]); "
    "print(len(''.join(corpus.splits['train']))); "
    "assert not {'tensorflow', 'tensorflow_datasets', 'pyarrow'} & {*sys.modules}"
  )
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  words = [sys.executable, "-c", code, str(data_dir)]
  processes = [subprocess.Popen(words, cwd=helpers.ROOT, text=True, **pipes) for _ in range(2)]
  for process in processes:
    process.stdin.write("go\n")
    process.stdin.flush()
  answers = [process.communicate() for process in processes]
  sizes = [int(out.split()[-1]) for out, _ in answers]
  assert sizes == [len(TEXT8) - 2 * (len(TEXT8) // 20)] * 2
  # One has made it.
  assert sorted("preparing" in out for out, _ in answers) == [False, True]
  assert all(not err or "waiting for another" in err for _, err in answers)


def test_the_wheel_has_the_plugin():
  project = tomllib.loads((helpers.ROOT / "pyproject.toml").read_text())
  wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
  plugins = project["project"]["entry-points"]["dpjax.plugins"]
  assert plugins["papers"] == corpora.__name__ and "dpjax_papers" in wheel["packages"]
