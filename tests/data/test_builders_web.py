"""Corpora from the web, end to end, on small files of their real formats."""

import csv
import hashlib
import json
import lzma
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from dpjax.data.builders import cc100, childrens_books, hub, openwebtext, wiki40b
from dpjax.data.builders.cc100 import CC100, CC100Config
from dpjax.data.builders.childrens_books import ChildrensBooks
from dpjax.data.builders.openwebtext import OpenWebText
from dpjax.data.builders.wiki40b import Wiki40b, Wiki40bConfig

SPLITS = ("train", "validation", "test")


class Site(ThreadingHTTPServer):
  """A site of `files`, path to bytes; knows what it was `asked` for and has `sent`."""

  daemon_threads = True

  def __init__(self):
    self.files, self.asked, self.sent = {}, [], 0
    super().__init__(("127.0.0.1", 0), _Handler)
    self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
  server: Site

  def do_GET(self):
    self.server.asked.append(self.path)
    content = self.server.files.get(self.path)
    if content is None:
      return self.send_error(404)
    size = len(content)
    part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if part:
      begin, end = int(part[1]), min(int(part[2] or size - 1) + 1, size)
      content = content[begin:end]
      self.send_response(206)
      self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
    else:
      self.send_response(200)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.server.sent += len(content)
    self.wfile.write(content)

  def log_message(self, format, *args):
    pass


@pytest.fixture
def site(monkeypatch):
  with Site() as server:
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(hub, "HUB", server.url)
    monkeypatch.setattr(cc100, "BASE_URL", server.url)
    monkeypatch.setattr(childrens_books, "BASE_URL", server.url)
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture
def make(tmp_path):
  """Prepares a corpus; its splits as text."""
  tfds.disable_progress_bar()

  def prepare(builder_class, config=None, *, manual=False):
    builder = builder_class(
      config=config, data_dir=str(tmp_path / "data"), file_format="array_record"
    )
    manual_dir = str(tmp_path / "manual") if manual else None
    builder.download_and_prepare(
      download_dir=str(tmp_path / "downloads"),
      download_config=tfds.download.DownloadConfig(manual_dir=manual_dir),
    )
    sources = {split: builder.as_data_source(split) for split in builder.info.splits}
    return {
      split: b"".join(source[i]["text"] for i in range(len(source))).decode()
      for split, source in sources.items()
    }

  return prepare


def parquet(texts, column="text", **kwargs) -> bytes:
  numbers = [f"Q{i}" for i in range(len(texts))]
  table = pa.table({"wikidata_id": numbers, column: texts, "version_id": numbers})
  sink = pa.BufferOutputStream()
  pq.write_table(table, sink, row_group_size=5, **kwargs)
  return sink.getvalue().to_pybytes()


def publish(site, repository, folder, files):
  """Puts files, and the list of them in the form of huggingface.co, on the site."""
  entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{folder}/old"}]
  for name, content in files.items():
    site.files[f"/datasets/{repository}/resolve/main/{folder}/{name}"] = content
    oid = hashlib.sha256(content).hexdigest()
    lfs = {"oid": oid, "size": len(content), "pointerSize": 134}
    entries.append(
      {
        "type": "file",
        "oid": "1" * 40,
        "size": len(content),
        "lfs": lfs,
        "path": f"{folder}/{name}",
      }
    )
  path = f"/api/datasets/{repository}/tree/main/{folder}"
  site.files[path] = json.dumps(entries).encode()


def names_of(paths):
  return [path.rsplit("/", 1)[1] for path in paths]


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
WIKI_TEXT = {"train": "".join(PLAIN[:5]) + "last", "validation": PLAIN[5], "test": PLAIN[6]}


@pytest.mark.parametrize("as_printed", [False, True])
def test_wiki40b(site, make, as_printed):
  def form(text):
    return repr(text.encode()) if as_printed and text is not None else text

  quoted = '\n_START_ARTICLE_\nIt\'s "שלום" \\n'  # Python prints it in other quotes
  files = {name: parquet([form(x) for x in texts]) for name, texts in WIKI.items()}
  files["test-00000-of-00001.parquet"] = parquet([form("\nit's"), form(quoted)])
  publish(site, "google/wiki40b", "fi", files)
  assert make(Wiki40b, "fi") == WIKI_TEXT | {"test": "\nit's" + quoted}
  assert sorted(names_of(site.asked)) == sorted([*files, "fi"])  # each file once


def test_the_head_of_wiki40b_needs_no_more_files(site, make):
  files = {name: parquet(texts) for name, texts in WIKI.items()}
  publish(site, "google/wiki40b", "en", files)
  most = {"train": len(PLAIN[0]) + 1, "test": 1}
  config = Wiki40bConfig(name="small", language="en", max_characters=most)
  text = make(Wiki40b, config)
  assert text == WIKI_TEXT | {"train": PLAIN[0] + PLAIN[1]}  # whole articles
  assert names_of(site.asked) == ["en", *(f for f in files if "0000-of" in f)]


def test_configs_of_wiki40b():
  configs = Wiki40b.builder_configs
  assert len(wiki40b.LANGUAGES) == 41 and len(configs) == 82
  for language in ("en", "fi", "he", "vi"):
    assert configs[language].language == configs[f"{language}_head"].language == language
    assert configs[language].max_characters == {}
    assert set(configs[f"{language}_head"].max_characters) == set(SPLITS)


def test_a_copy_of_the_repository_needs_no_list(site, make, tmp_path):
  folder = tmp_path / "manual/wiki40b/fi"
  folder.mkdir(parents=True)
  for name, texts in WIKI.items():
    (folder / name).write_bytes(parquet(texts))
  assert make(Wiki40b, "fi", manual=True) == WIKI_TEXT
  assert site.asked == []


def test_what_a_copy_lacks_is_asked_for(site, make, tmp_path):
  folder = tmp_path / "manual/wiki40b/fi"
  folder.mkdir(parents=True)
  files = {name: parquet(texts) for name, texts in WIKI.items()}
  (folder / "train-00001-of-00003.parquet").write_bytes(parquet(["mine"]))
  publish(site, "google/wiki40b", "fi", files)
  text = make(Wiki40b, "fi", manual=True)
  assert text["train"] == "".join(PLAIN[:3]) + "mine" + "last"
  assert "train-00001-of-00003.parquet" not in names_of(site.asked)


def test_a_file_that_is_not_the_listed_one_is_refused(site, make):
  files = {name: parquet(texts) for name, texts in WIKI.items()}
  publish(site, "google/wiki40b", "fi", files)
  name = "train-00001-of-00003.parquet"
  other = bytearray(files[name])
  other[len(other) // 3] ^= 1  # the size is right
  site.files[f"/datasets/google/wiki40b/resolve/main/fi/{name}"] = bytes(other)
  with pytest.raises(ValueError, match=f"{name}.*sha256"):
    make(Wiki40b, "fi")


@pytest.mark.parametrize(
  "listed",
  [
    b"<html>",
    b"{}",
    b'[{"size": 3}]',
    b"[]",
    b'[["train-00000-of-00001.parquet"]]',
    b'[{"path": "fi/train-00001-of-00002.parquet", "size": 3}]',
  ],
)
def test_a_list_that_cannot_be_used(site, make, listed):
  site.files["/api/datasets/google/wiki40b/tree/main/fi"] = listed
  with pytest.raises(ValueError, match="files.json: expected"):
    make(Wiki40b, "fi")


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"<html>no Parquet</html>",
    parquet(["a"])[:-9],
    parquet(["a"], column="content"),
    parquet([3, 5]),
    parquet([b"\xff"]),
    parquet([article("a", "b" * 99)] * 7, compression="none").replace(b"bbbb", b"b\xffbb"),
  ],
)
def test_a_damaged_parquet_file(tmp_path, content):
  path = tmp_path / "some.parquet"
  path.write_bytes(content)
  with pytest.raises(ValueError, match="some.parquet: expected a Parquet file"):
    list(hub.read_texts(path))


@pytest.mark.parametrize("text", ["b'\\n_START_ARTI", "b'\\xff'", "b'' + 1"])
def test_an_article_that_was_not_printed_bytes(site, make, text):
  files = {name: parquet([text]) for name in WIKI}
  publish(site, "google/wiki40b", "he", files)
  with pytest.raises(ValueError, match=r"train-00000-of-00003.parquet: expected article"):
    make(Wiki40b, "he")


def test_openwebtext(site, make):
  documents = [f"Page {i}: naïve\n\nend" for i in range(2003)]
  documents[5], documents[998], documents[1998] = "", "", "二\n"
  files = {
    "train-00000-of-00002.parquet": parquet(documents[:997]),
    "train-00001-of-00002.parquet": parquet(documents[997:]),
  }
  publish(site, "Skylion007/openwebtext", "plain_text", files)
  text = make(OpenWebText)
  end = "\n<|endoftext|>\n"
  assert text["validation"] == end + "二\n" + end
  assert text["test"] == documents[999] + end + documents[1999] + end
  rest = [d for i, d in enumerate(documents) if i % 1000 < 998]
  assert text["train"] == "".join(d + end for d in rest)
  assert sorted(names_of(site.asked)) == ["plain_text", *sorted(files)]  # each once


def test_the_mark_between_pages_is_one_token():
  pytest.importorskip("tokenizers")
  from dpjax.text.subwords import BytePairs

  tokenizer = BytePairs.train(["some text of some pages"], 260)
  ids = tokenizer.encode(f"text\n{openwebtext.SEPARATOR}\nPage")
  np.testing.assert_array_equal(
    ids == tokenizer.encode(openwebtext.SEPARATOR)[0], [False] * 5 + [True] + [False] * 5
  )


DOCUMENTS = [f"Sivu {i}, äö.\n{'päivä ' * (i % 7)}\n\n" for i in range(1, 4000)]


def test_cc100_takes_the_beginning(site, make):
  packed = lzma.compress("".join(DOCUMENTS).encode())
  site.files["/fi.txt.xz"] = packed
  head = len(packed) // 2
  text = make(CC100, CC100Config(name="small", language="fi", head_bytes=head))
  assert list(text) == ["train"] and site.sent <= head
  count = text["train"].count("\n\n")
  assert text["train"] == "".join(DOCUMENTS[:count]) and 1000 < count < 3999
  config = CC100Config(
    name="smaller", language="fi", head_bytes=head, max_characters=len("".join(DOCUMENTS[:16])) + 1
  )
  assert make(CC100, config)["train"] == "".join(DOCUMENTS[:17])


def test_cc100_in_the_manual_folder(site, make, tmp_path):
  (tmp_path / "manual").mkdir()
  streams = ["".join(DOCUMENTS[:50]), "\n", "".join(DOCUMENTS[50:]) + "no blank line"]
  packed = b"".join(lzma.compress(x.encode()) for x in streams)
  (tmp_path / "manual/cc100-en.txt.xz").write_bytes(packed)
  assert make(CC100, "en", manual=True) == {"train": "".join(streams)}
  assert site.asked == []


@pytest.mark.parametrize(
  "content",
  [b"plain text", lzma.compress(b"a\xff\n\nb"), lzma.compress(b"ab\n" * 9)[:-9] + b"\0" * 9],
)
def test_a_damaged_xz_file(tmp_path, content):
  (tmp_path / "en.txt.xz").write_bytes(content)
  with pytest.raises(ValueError, match="en.txt.xz: expected UTF-8 text packed by xz"):
    list(cc100.read_documents(tmp_path / "en.txt.xz"))


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
BOOKS_TEXT = {
  "train": BOOKS[11][1] + "\n<|endofbook|>\nThree _words_ more\n<|endofbook|>\nLast\n",
  "validation": "Two\n",
  "test": "One\n",
}


@pytest.fixture
def few_books(monkeypatch, tmp_path):
  rows = [f'{i}\t{split}\t"A Book\tSome, One\n' for i, (split, _) in BOOKS.items()]
  (tmp_path / "list.tsv").write_text("id\tsplit\ttitle\tauthor\n" + "".join(rows))
  monkeypatch.setattr(childrens_books, "BOOKS", tmp_path / "list.tsv")
  return {i: gutenberg(body) for i, (_, body) in BOOKS.items()}


def test_childrens_books(site, make, few_books):
  site.files = {f"/{i}/pg{i}.txt": content for i, content in few_books.items()}
  assert make(ChildrensBooks) == BOOKS_TEXT
  assert sorted(site.asked) == sorted(site.files)


def test_childrens_books_in_the_manual_folder(site, make, few_books, tmp_path):
  (tmp_path / "manual").mkdir()
  for i, content in few_books.items():
    (tmp_path / f"manual/pg{i}.txt").write_bytes(content)
  assert make(ChildrensBooks, manual=True) == BOOKS_TEXT
  assert site.asked == []


def test_the_list_of_childrens_books():
  with childrens_books.BOOKS.open(encoding="utf-8") as table:
    rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
  numbers = {split: [int(r["id"]) for r in rows if r["split"] == split] for split in SPLITS}
  assert len(numbers["train"]) == 100 and len({int(r["id"]) for r in rows}) == 106
  assert numbers["validation"] == [1448, 902, 4358]
  assert numbers["test"] == [271, 473, 419]
  assert all(r["title"] and r["author"] for r in rows)


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
    gutenberg("A\n\nB", credits="This etext was prepared by One\n\nHTML\n").replace(
      b"HTML", b"Transcribed from the 1897 edition by One"
    ),
  ],
)
def test_what_is_not_the_books_own_is_cut_off(tmp_path, content):
  (tmp_path / "pg7.txt").write_bytes(content)
  assert childrens_books.read_book(tmp_path / "pg7.txt") == "A\n\nB\n"


@pytest.mark.parametrize(
  "content, expected",
  [
    (b"A book\n*** END OF THE PROJECT GUTENBERG EBOOK A ***\n", "none of the first"),
    (gutenberg("A").replace(b"END", b"ENE"), "none of the second"),
    (gutenberg("caf\xe9").decode().encode("latin-1", "ignore"), "in UTF-8"),
  ],
)
def test_a_file_that_is_no_book(tmp_path, content, expected):
  (tmp_path / "pg7.txt").write_bytes(content)
  with pytest.raises(ValueError, match=f"pg7.txt: expected a book .*{expected}"):
    childrens_books.read_book(tmp_path / "pg7.txt")


@pytest.mark.parametrize("builder_class", [Wiki40b, OpenWebText, CC100, ChildrensBooks])
def test_splits_that_lie_ready(site, make, tmp_path, builder_class):
  config = "fi" if builder_class.builder_configs else None
  folder = tmp_path / "manual" / builder_class.name / (config or "")
  folder.mkdir(parents=True)
  for name in ("train", "valid", "test"):
    (folder / f"{name}.txt").write_text(f"{name} ä\n")
  text = make(builder_class, config, manual=True)
  assert text == {"train": "train ä\n", "validation": "valid ä\n", "test": "test ä\n"}
  assert site.asked == []


@pytest.mark.parametrize("missing", ["train", "valid", "test"])
def test_splits_that_lie_ready_are_all_of_them(make, tmp_path, missing):
  folder = tmp_path / "manual" / "childrens_books"
  folder.mkdir(parents=True)
  for name in {"train", "valid", "test"} - {missing}:
    (folder / f"{name}.txt").write_text("a")
  with pytest.raises(ValueError, match=f"data.manual_dir: .* without {missing}.txt"):
    make(ChildrensBooks, manual=True)
