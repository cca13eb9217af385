"""Corpora: each form of a text, its splits, and where its documents begin."""

import gzip
import json
import lzma
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpjax.config.schema import Data
from dpjax.data import readers, sources, text_file
from dpjax.data.remote import Source
from dpjax.data.sources import register_corpus
from dpjax.data.text_file import SPLITS, TextFile
from dpjax.errors import UserError
from tests import helpers

# Of different lengths; some end without a line end, begin with white space or are one letter.
TEXTS = [
  *("one two\n", "  three four five", "s", "six\n\n", "\n seven \u00e9ight\n", "nine\nten\n"),
  *("eleven twelve thirteen", "\u4e00\u4e8c\n", "fourteen\n", "a b c d e", "fifteen\n", "x"),
]
WHOLE = [text if text.endswith("\n") else text + "\n" for text in TEXTS]


def zst(content):
  """Of two frames, as of a file to which another was appended."""
  pack = pa.Codec("zstd").compress
  return b"".join(pack(x, asbytes=True) for x in (content[:40], content[40:]))


COMPRESS = {".jsonl": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}
MARK = text_file.BYTE_ORDER_MARK


def documents(text):
  result = []
  for part, is_first in (pair for chunk in text.chunks() for pair in chunk):
    result += [part] if is_first else []
    result[-1] += "" if is_first else part
  assert "".join(text) == "".join(result)
  return result


def all_documents(corpus):
  return {split: documents(text) for split, text in corpus.splits.items()}


def joined(corpus):
  return {split: "".join(text) for split, text in corpus.splits.items()}


def in_order(splits):
  return [document for split in SPLITS for document in splits[split]]


def as_json(texts, field="text"):
  # Escaped and not, with other fields, and with blank lines between.
  lines = [json.dumps({"n": i, field: x}, ensure_ascii=i % 2 == 0) for i, x in enumerate(texts)]
  return "\n \n".join(lines).encode()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def test_load_corpus_takes_a_path_or_settings(tmp_path):
  path = helpers.write_text(tmp_path / "mine.txt")
  settings = dict(split_fractions=(0.6, 0.3, 0.1), data_dir=str(tmp_path))
  expected = sources.load_corpus(Data(path=str(path), **settings))
  assert expected.name == "mine" and joined(expected) != joined(sources.load_corpus(path))
  for corpus in (
    sources.load_corpus(str(path), **settings),
    sources.load_corpus(path, **settings),
    sources.load_corpus(path=str(path), **settings),
    sources.load_corpus(Data(path=str(path)), **settings),
  ):
    assert corpus == expected
  assert sources.load_corpus().name == sources.PYTHON_MANUAL
  with pytest.raises(TypeError, match="seperator"):
    sources.load_corpus(path, seperator="--")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"])
def test_load_corpus_of_records(tmp_path, suffix):
  def write(stem, texts, field="text"):
    path = tmp_path / f"{stem}{suffix}"
    if suffix == ".parquet":
      path.write_bytes(helpers.parquet(texts, field))
    else:
      path.write_bytes(COMPRESS[path.suffix](MARK + as_json(texts, field) + b"\n"))

  write("texts", ["", *TEXTS, None], "body")
  settings = dict(data_dir=tmp_path / "data", isolate_documents=True)
  settings |= dict(split_fractions=(0.5, 0.2, 0.3), path=tmp_path / f"texts{suffix}")
  corpus = helpers.load_corpus(text_field="body", **settings)
  splits = all_documents(corpus)
  assert in_order(splits) == WHOLE and all(splits.values()) and corpus.name == "texts"
  (written,) = (tmp_path / "data/texts").glob("*/train.txt")
  before = written.stat()
  helpers.load_corpus(text_field="body", **settings)
  after = written.stat()
  assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
  with pytest.raises(UserError, match=f"texts{suffix}: expected a .* string.* text|'text'"):
    helpers.load_corpus(**settings)
  for i, stem in enumerate(("train", "validation", "test")):
    write(stem, TEXTS[i::3])
  corpus = helpers.load_corpus(path=tmp_path, data_dir=tmp_path / "data")
  assert all_documents(corpus) == {split: WHOLE[i::3] for i, split in enumerate(SPLITS)}


def test_several_files_by_a_pattern(tmp_path):
  folder = tmp_path / "shards"
  folder.mkdir()
  for i in range(3):
    part = TEXTS[4 * i : 4 * i + 4]
    (folder / f"{i}.jsonl.zst").write_bytes(zst(as_json(part, "body")))
    text = MARK + "".join(WHOLE[4 * i : 4 * i + 4]).encode()
    (folder / f"{i}.txt.zst").write_bytes(zst(text))
    (folder / f"{i}.parquet").write_bytes(helpers.parquet(part, "body"))
  kwargs = dict(data_dir=tmp_path / "data", split_fractions=(0.5, 0.2, 0.3))
  for pattern in ("*.jsonl.zst", "*.parquet"):
    for _ in range(2):  # The second time, the text is there.
      corpus = helpers.load_corpus(path=folder / pattern, text_field="body", **kwargs)
      assert in_order(all_documents(corpus)) == WHOLE and corpus.name == "shards"
  corpus = helpers.load_corpus(path=tmp_path / "**" / "[0-9].txt.zst", **kwargs)
  assert "".join(joined(corpus).values()) == "".join(WHOLE)
  (folder / "1.jsonl.zst").write_bytes(zst(as_json(TEXTS[:1], "body")))
  corpus = helpers.load_corpus(path=folder / "*.jsonl.zst", text_field="body", **kwargs)
  assert in_order(all_documents(corpus)) == WHOLE[:4] + WHOLE[:1] + WHOLE[8:]
  with pytest.raises(UserError, match="^data.path: expected files that match a pattern, got none"):
    helpers.load_corpus(path=folder / "*.csv", **kwargs)
  with pytest.raises(UserError, match=r"^data.path: expected files of one type, got .jsonl, .parq"):
    helpers.load_corpus(path=folder / "[0-9].*", **kwargs)


@pytest.mark.parametrize("damage", [lambda x: x[:-9], lambda x: x[:30] + b"\xff" * 9 + x[39:]])
@pytest.mark.parametrize("suffix, pack", [("gz", gzip.compress), ("zst", zst)])
def test_a_damaged_text_is_named(tmp_path, damage, suffix, pack):
  path = tmp_path / f"a.txt.{suffix}"
  path.write_bytes(damage(pack("".join(WHOLE).encode() * 9)))
  with pytest.raises(UserError, match=f"a.txt.{suffix}: expected a text in UTF-8, got "):
    helpers.load_corpus(path=path, data_dir=tmp_path / "data")
  assert not [*tmp_path.glob("data/texts/*/data.json")]


def test_a_folder_of_files(tmp_path):
  folder = tmp_path / "mine"
  for i, text in enumerate(TEXTS):
    location = folder / ("b" if i > 6 else "a")
    location.mkdir(parents=True, exist_ok=True)
    (location / f"{i:02}.txt.gz").write_bytes(gzip.compress(MARK + text.encode()))
  (folder / "a" / "03x.txt").write_bytes(b"")  # empty: no document
  (folder / "README.md").write_bytes(b"no text")
  corpus = helpers.load_corpus(path=folder, isolate_documents=True, split_fractions=(0.6, 0.2, 0.2))
  splits = all_documents(corpus)
  assert in_order(splits) == WHOLE and all(splits.values()) and corpus.name == "mine"
  for split in SPLITS:
    (folder / split).mkdir()
    (folder / split / "x.txt").write_bytes(split.encode())
  assert all_documents(helpers.load_corpus(path=folder)) == {x: [f"{x}\n"] for x in SPLITS}
  (folder / "valid" / "x.txt").unlink()
  with pytest.raises(UserError, match="^data.path: expected .txt files, each a document.*valid$"):
    helpers.load_corpus(path=folder)


def test_files_are_divided_by_size(tmp_path):
  sizes = [7, 300, 2, 40, 40, 11, 90, 3, 30, 77]
  for i, size in enumerate(sizes):
    (tmp_path / f"{i}.txt").write_text("a" * (size - 1) + "\n")
  splits = all_documents(helpers.load_corpus(path=tmp_path, split_fractions=(0.6, 0.2, 0.2)))
  ends = np.cumsum(sizes)
  expected = np.searchsorted(ends, ends[-1] * np.array([0.6, 0.8]), "right")  # that fit
  assert np.cumsum([len(splits["train"]), len(splits["valid"])]).tolist() == expected.tolist()


@pytest.mark.parametrize("separator", ["***", " = "])
def test_a_line_between(tmp_path, separator):
  content = f"{separator}\n".join(WHOLE)
  folder = tmp_path / "texts"
  folder.mkdir()
  for stem in ("books", *SPLITS):
    (folder / f"{stem}.txt.xz").write_bytes(lzma.compress(MARK + content.encode()))
  settings = dict(separator=separator, data_dir=tmp_path / "data")
  corpus = helpers.load_corpus(path=folder, isolate_documents=True, **settings)
  expected = [f"{text}{separator}\n" for text in WHOLE[:-1]] + WHOLE[-1:]
  assert all_documents(corpus) == dict.fromkeys(SPLITS, expected)
  # One file is cut where it is cut when joined; a document on the cut becomes two.
  settings |= dict(path=folder / "books.txt.xz", split_fractions=(0.5, 0.2, 0.3))
  joined, isolated = (helpers.load_corpus(isolate_documents=x, **settings) for x in (False, True))
  for split in SPLITS:
    assert "".join(joined.splits[split]) == "".join(isolated.splits[split])
  assert "".join(in_order(all_documents(isolated))) == content
  assert not joined.splits["train"].has_documents


def test_lines_with_carriage_returns(tmp_path):
  (tmp_path / "a").write_bytes(b"one\r\n--\r\ntwo --\n--\nthree\n--")
  text = TextFile(tmp_path / "a", 0, 27, marks=readers.line_pattern("--"))
  assert documents(text) == ["one\r\n--\r\n", "two --\n--\n", "three\n--"]


def test_a_folder_of_splits(tmp_path):
  texts = {"train": "a\r\nb \u00e9\n", "valid": "c\n\n", "test": " d"}
  for split, text in texts.items():
    (tmp_path / f"{split}.txt").write_bytes(text.encode())
  corpus = helpers.load_corpus("ignored", tmp_path)
  assert joined(corpus) == texts and corpus.name == tmp_path.name
  assert not (tmp_path / "data").exists()
  assert [len(text) for text in corpus.splits.values()] == [8, 3, 2]


def test_a_file_is_cut_at_line_ends_in_order(tmp_path):
  full = "".join(f"line {i} \u00e9\r\n" for i in range(101))
  (tmp_path / "lines.txt").write_bytes(full.encode())
  splits = joined(helpers.load_corpus(path=tmp_path / "lines.txt", split_fractions=(0.7, 0.2, 0.1)))
  assert "".join(splits.values()) == full
  assert all(text.endswith("\n") for text in splits.values())
  sizes = [len(text) / len(full) for text in splits.values()]
  assert sizes == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


@pytest.mark.parametrize("text", ["word " * 205, "\N{GRINNING FACE}" * 53])
def test_a_file_of_one_line_is_cut_between_characters(tmp_path, text):
  (tmp_path / "text").write_bytes(text.encode())
  splits = joined(helpers.load_corpus(path=tmp_path / "text"))
  assert "".join(splits.values()) == text and all(splits.values())
  if len(text) == 1025:  # Valid and test are rounded down, train takes the rest.
    assert [len(part) for part in splits.values()] == [923, 51, 51]


@pytest.mark.parametrize(
  "text, ends",
  [
    ("two \u00e9\n\n" * 97, "\n"),
    ("\u00e9 " * 307, "\u00e9"),
    ("\N{GRINNING FACE}" * 101, "\N{GRINNING FACE}"),
  ],
)
def test_chunks_join_to_the_text(tmp_path, monkeypatch, text, ends):
  monkeypatch.setattr(text_file, "CHUNK_BYTES", 61)
  (tmp_path / "a.txt").write_bytes(text.encode())
  parts = [*TextFile(tmp_path / "a.txt", 0, len(text.encode()))]
  assert "".join(parts) == text
  assert len(parts) > 5 and max(len(part.encode()) for part in parts) <= 61
  assert all(part.endswith(ends) for part in parts[:-1])


def test_chunks_of_documents_stay_small(tmp_path, monkeypatch):
  monkeypatch.setattr(text_file, "CHUNK_BYTES", 101)
  texts = [f"document {i} {'x' * (400 * (i == 700))}\n" for i in range(1_000)]
  (tmp_path / "a.jsonl").write_bytes(as_json(texts))
  text = helpers.load_corpus(path=tmp_path / "a.jsonl").splits["train"]
  assert documents(text) == texts[: len(documents(text))]
  assert max(sum(len(part) for part, _ in chunk) for chunk in text.chunks()) <= 101


def test_compressed_texts_and_marks_are_read_as_plain_ones(tmp_path):
  content = MARK + b"a\r\nb\rc\n\xef\xbb\xbf" * 41
  (tmp_path / "text.txt").write_bytes(content)
  long = tmp_path / f"{'n' * 245}.txt.gz"
  long.write_bytes(gzip.compress(content))
  for path in (tmp_path / "text.txt", long):
    text = "".join(joined(helpers.load_corpus(path=path)).values())
    assert readers.read_text(path) == text == content[3:].decode()
  helpers.make_pipe(tmp_path / "pipe")
  with pytest.raises(UserError, match="^text: expected .*not a regular file"):
    readers.read_text(tmp_path / "pipe", "text")


def test_a_compressed_parquet_file_is_named(tmp_path):
  path = tmp_path / "a.parquet.gz"
  path.write_bytes(gzip.compress(helpers.parquet(["text"], "text")))
  with pytest.raises(UserError, match="a.parquet.gz: expected .parquet, which .*, got .gz"):
    helpers.load_corpus(path=path, data_dir=tmp_path / "data")


@pytest.mark.parametrize("place", [".", "**/*.txt"])
def test_a_folder_with_data_dir_in_it_is_the_same_text_again(tmp_path, place):
  data = tmp_path / "data"
  for folder in (data / "downloads", data / "manual" / "x", tmp_path):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(5):
      (folder / f"{i}.txt").write_text(f"{folder.name} {i}\n")
  kwargs = dict(data_dir=data, split_fractions=(0.5, 0.2, 0.3))
  first, again = (helpers.load_corpus(path=tmp_path / place, **kwargs) for _ in range(2))
  expected = "".join(f"{tmp_path.name} {i}\n" for i in range(5))
  assert first == again and "".join(joined(first).values()) == expected
  # Where the user names them, they are the text.
  chosen = helpers.load_corpus(path=data / "manual" / place, **kwargs)
  assert "".join(joined(chosen).values()) == "".join(f"x {i}\n" for i in range(5))


def remove(name):
  return lambda folder: (folder / name).unlink()


def replace(name, make):
  return lambda folder: ((folder / name).unlink(), make(folder / name))


JOINED = "^data.isolate_documents: expected False for {}, which does not say where documents begin"
NO_FILE = r"^data.path: .*{} \(not a regular file\)"


@pytest.mark.parametrize(
  "change, settings, message",
  [
    (remove("valid.txt"), dict(path="."), "^data.path: expected valid.txt"),
    (replace("test.txt", Path.touch), dict(path="."), "^data.path: .*empty file .*test.txt"),
    (None, dict(path="valid.txt"), "^data.path: .*three splits, got 3 bytes"),
    (None, dict(path="few"), "^data.path: .*long enough for three splits, got 4 bytes in few"),
    (None, dict(path="a.txt", separator="-- --"), ".*got a, which has no line '-- --'"),
    (None, dict(path="a.txt"), JOINED.format("a")),
    (None, dict(), JOINED.format("python_manual")),
    (None, dict(path="a.txt", separator="--", text_field="b"), "^data.text_field: .* got 'b'"),
    (None, dict(separator="--", isolate_documents=False), "^data.separator: expected '' unless"),
    # A pipe would be waited for, and /dev/zero never ends.
    (None, dict(path="/dev/zero"), NO_FILE.format("/dev/zero")),
    (replace("test.txt", helpers.make_pipe), dict(path="."), NO_FILE.format("test.txt")),
  ],
)
def test_refusals(tmp_path, monkeypatch, change, settings, message):
  folder = tmp_path / "texts"
  (folder / "few").mkdir(parents=True)
  monkeypatch.chdir(folder)
  for name, text in {"train": "a\nb\n", "valid": "c\n\n", "test": " d"}.items():
    (folder / f"{name}.txt").write_text(text)
  (folder / "a.txt").write_text("--\n".join(WHOLE * 3))
  for name in "xy":
    (folder / "few" / f"{name}.txt").write_text(name)
  if change:
    change(folder)
  with pytest.raises(UserError, match=message) as error:
    helpers.load_corpus(**{"isolate_documents": True, **settings})
  assert "\n" not in str(error.value)


def test_the_files_of_a_text_are_found(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
  for name in ("a.txt", "b.txt", "split/train.txt", "split/valid.txt", "split/test.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"in {name}\n")
  (tmp_path / "tokens").mkdir()
  (tmp_path / "tokens" / "train.bin").touch()
  (tmp_path / "tokens" / "data.json").touch()
  (tmp_path / "empty").mkdir()
  mixture = f"{tmp_path}/b.txt=1,python_manual=1,{tmp_path}/a.txt=2"
  cases = [
    (dict(path="a.txt"), "a.txt"),
    (dict(path="?.txt"), "a.txt b.txt"),
    (dict(path="split"), "split/train.txt split/valid.txt split/test.txt"),
    (dict(path="tokens"), "tokens/data.json"),
    (dict(mixture=mixture), "b.txt a.txt"),
    (dict(mixture="~/b.txt=1"), "b.txt"),
    *((dict(path=name), "") for name in ("none.txt", "none*", "empty")),
  ]
  for settings, expected in cases:
    if "path" in settings:
      settings["path"] = str(tmp_path / settings["path"])
    found = sources.find_texts(Data(**settings))
    assert found == [tmp_path / name for name in expected.split()], settings
  assert sources.find_texts(Data()) == []
  paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
  copies = [Path(shutil.copy(path, tmp_path / "empty")) for path in paths]
  assert sources.identify(copies) != sources.identify(paths) == sources.identify(paths)
  assert sources.describe_content(copies) == sources.describe_content(paths)
  assert sources.describe_content(paths[::-1]) != sources.describe_content(paths)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes in folders")
@pytest.mark.parametrize("path", ["texts", "texts/*/*.txt"])
def test_what_is_no_file_is_named_among_many(tmp_path, path):
  folder = tmp_path / "texts" / "inner.txt"  # a folder, which is no document
  folder.mkdir(parents=True)
  for name in "wxyz":
    (folder / f"{name}.txt").write_text(f"{name} one two\n")
  assert "".join(joined(helpers.load_corpus(path=tmp_path / path)).values()).startswith("w")
  pipe = folder / "z.txt"
  pipe.unlink()
  os.mkfifo(pipe)
  with pytest.raises(UserError, match=NO_FILE.format(pipe)):
    helpers.load_corpus(path=tmp_path / path)
  pipe.unlink()
  pipe.symlink_to("nothing")
  with pytest.raises(UserError, match=f"^data.path: expected a readable .*, got {pipe} "):
    helpers.load_corpus(path=tmp_path / path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
  def refuse(path, *arguments, **settings):
    raise PermissionError(13, "Permission denied", str(path))

  for split in SPLITS:
    (tmp_path / f"{split}.txt").write_bytes(b"one\n")
  monkeypatch.setattr("pathlib.Path.open", refuse)
  for path in (tmp_path / "train.txt", tmp_path):
    with pytest.raises(UserError, match="^data.path: .*train.txt .Permission denied"):
      helpers.load_corpus(path=path)


@pytest.mark.parametrize(
  "line", ["[1]", "{", '{"other": "a"}', '{"text": 3}', '{"text": "\\ud800"}']
)
def test_a_line_that_is_no_document(tmp_path, line):
  path = tmp_path / "texts.jsonl"
  path.write_bytes(as_json(["a", "b"]) + b"\n" + line.encode() + b"\n" + as_json(["c"] * 9))
  with pytest.raises(UserError, match="texts.jsonl: .*string 'text' .data.text_field.*line 4 "):
    helpers.load_corpus(path=path)


def test_the_python_manual(monkeypatch, tmp_path):
  pytest.importorskip("pydoc_data.topics")
  splits = joined(helpers.load_corpus("python_manual"))
  text = "".join(splits.values())
  assert 'The "assert" statement' in text and len(text) > 4 * 10**5
  assert len(splits["train"]) / len(text) == pytest.approx(0.9, abs=0.01)
  monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
  with pytest.raises(UserError, match="libpython3-stdlib.*data.path"):
    helpers.load_corpus("python_manual", data_dir=tmp_path / "new")


@pytest.fixture
def register(monkeypatch):
  """Registers a corpus for one test."""
  monkeypatch.setattr(sources, "SOURCES", dict(sources.SOURCES))
  return lambda name, read, **options: register_corpus(
    name, Source("", read, "", "", "", **options)
  )


def test_a_corpus_of_the_users(register, capsys):
  def read(files):
    assert str(files.manual_dir) == "x"
    for split in ("train", "test", "train"):  # in any order
      yield split, f"text {split}\n"

  register("mine", read)
  expected = {"train": "text train\n", "valid": "text train\n", "test": "text test\n"}
  for _ in range(2):  # The second time, the text is there.
    assert (
      joined(helpers.load_corpus("mine", split_fractions=(0.5, 0.4, 0.1), manual_dir="x"))
      == expected
    )
  assert capsys.readouterr().out == "preparing mine in data/texts\n"
  for name in ("mine", "python_manual", "a/b", "tfds:x"):
    with pytest.raises(UserError, match="name: expected a new one"):
      register(name, read)


@pytest.mark.parametrize(
  "which, yields_documents",
  [(("train",), False), (("train", "valid"), False), (("train", "test"), True), (SPLITS[:2], True)],
)
def test_missing_splits_are_cut_from_the_end_of_train(register, which, yields_documents):
  texts = [f"line {i} \u00e4\n" for i in range(100)]
  register("x", lambda _: ((x, t) for x in which for t in texts), yields_documents=yields_documents)
  corpus = helpers.load_corpus("x", isolate_documents=yields_documents)
  splits = joined(corpus)
  assert list(splits) == list(SPLITS) and all(splits.values())
  assert "".join(text for x, text in splits.items() if x not in which[1:]) == "".join(texts)
  assert all(splits[x] == "".join(texts) for x in which[1:])
  if yields_documents:
    assert documents(corpus.splits["valid"]) == splits["valid"].splitlines(keepends=True)


def test_splits_by_hand_come_first(register, tmp_path):
  register("mine", lambda _: 1 / 0)
  folder = tmp_path / "data/manual/mine"
  folder.mkdir(parents=True)
  for i, split in enumerate(SPLITS):
    if i:
      with pytest.raises(UserError, match=f"data.manual_dir: .* without .*{split}.txt"):
        helpers.load_corpus("mine")
    (folder / f"{split}.txt.xz").write_bytes(lzma.compress(f"{split} \u00e4\n".encode()))
  assert joined(helpers.load_corpus("mine")) == {split: f"{split} \u00e4\n" for split in SPLITS}


def test_an_old_installation_has_no_plugin(monkeypatch):
  monkeypatch.setattr(sources, "load_plugins", lambda: None)
  monkeypatch.setattr(sources, "SOURCES", {"python_manual": 1})
  with pytest.raises(UserError, match="got text8 .in a clone, `pip install -e .` adds"):
    helpers.load_corpus("text8")
