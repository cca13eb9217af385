"""Texts by path and by name, whole, cleaned or cut: what they hold, and that they are whole."""

import argparse
import builtins
import gzip
import os
import sys
import types

import pytest

from dpjax.analysis import calibrate
from dpjax.data import catalog
from dpjax.data import corpus as corpus_lib
from dpjax.data import text as text_lib
from dpjax.data.sources.source import Source
from dpjax.data.text import load_corpus
from dpjax.errors import UserError
from dpjax.text.cleaning import clean
from dpjax.text.tokens import Bytes

SPLITS = {"train": "a\r\nb \u00e9\n", "valid": "c\n\n", "test": " d"}


def write(folder, splits):
  for split, text in splits.items():
    (folder / f"{split}.txt").write_bytes(text.encode())
  return folder


def joined(corpus):
  return {split: "".join(chunks) for split, chunks in corpus.splits.items()}


@pytest.mark.parametrize("valid", ["valid", "validation"])
def test_folder(tmp_path, valid):
  write(tmp_path, SPLITS)
  (tmp_path / "valid.txt").rename(tmp_path / f"{valid}.txt")
  corpus = load_corpus("ignored", tmp_path)
  assert joined(corpus) == SPLITS
  assert joined(corpus) == SPLITS  # again
  assert corpus.name == tmp_path.name
  assert {split: len(chunks) for split, chunks in corpus.splits.items()} == {
    "train": 8,
    "valid": 3,
    "test": 2,
  }


def test_file_is_cut_at_line_ends_in_order(tmp_path):
  lines = [f"line {i} \u00e9\r\n" for i in range(101)]
  path = tmp_path / "lines.txt"
  path.write_bytes("".join(lines).encode())
  splits = joined(load_corpus(path=str(path), split_fractions=(0.7, 0.2, 0.1)))
  assert "".join(splits.values()) == "".join(lines)
  assert all(text.endswith("\n") for text in splits.values())
  sizes = [len(text) / len("".join(lines)) for text in splits.values()]
  assert sizes == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


def test_file_of_one_line_is_cut_exactly(tmp_path):
  path = tmp_path / "text8"
  path.write_bytes(b"word " * 205)
  splits = joined(load_corpus(path=path))
  # Valid and test are rounded down, train takes the rest.
  assert [len(splits[split]) for split in corpus_lib.SPLITS] == [923, 51, 51]


def test_file_is_cut_between_characters(tmp_path):
  path = tmp_path / "emoji.txt"
  path.write_bytes(("\N{GRINNING FACE}" * 53).encode())
  assert "".join(joined(load_corpus(path=path)).values()) == "\N{GRINNING FACE}" * 53


@pytest.mark.parametrize(
  "text, ends",
  [
    ("one line\n" * 97, "\n"),
    ("two \u00e9\n\n" * 97, "\n"),
    ("\u00e9 " * 307, "\u00e9"),
    ("\N{GRINNING FACE}" * 101, "\N{GRINNING FACE}"),
  ],
)
def test_parts_join_to_the_text(tmp_path, monkeypatch, text, ends):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 61)
  write(tmp_path, {**SPLITS, "train": text})
  parts = list(load_corpus(path=tmp_path).splits["train"])
  assert "".join(parts) == text
  assert len(parts) > 5 and max(len(part.encode()) for part in parts) <= 61
  assert all(part.endswith(ends) for part in parts[:-1])


def test_not_utf_8(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 7)
  write(tmp_path, SPLITS)
  (tmp_path / "valid.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
  corpus = load_corpus(path=tmp_path)
  with pytest.raises(ValueError, match="data.path: .* 0xe9 at offset 11 of .*valid.txt"):
    list(corpus.splits["valid"])


def test_missing(tmp_path):
  with pytest.raises(ValueError, match="^data.path: .*nothing.txt .No such file"):
    load_corpus(path=tmp_path / "nothing.txt")


@pytest.mark.parametrize("split", SPLITS)
def test_folder_that_lacks_a_split(tmp_path, split):
  write(tmp_path, SPLITS)
  (tmp_path / f"{split}.txt").unlink()
  with pytest.raises(ValueError, match=f"^data.path: expected {split}.txt"):
    load_corpus(path=tmp_path)


@pytest.mark.parametrize("split", SPLITS)
def test_empty_split(tmp_path, split):
  write(tmp_path, {**SPLITS, split: ""})
  with pytest.raises(ValueError, match=f"^data.path: .*empty file .*{split}.txt"):
    load_corpus(path=tmp_path)


def test_empty_and_tiny_file(tmp_path):
  path = tmp_path / "text.txt"
  path.write_bytes(b"")
  with pytest.raises(ValueError, match="^data.path: .*empty file"):
    load_corpus(path=path)
  path.write_bytes(b"abcdefg")
  with pytest.raises(ValueError, match="^data.path: .*three splits, got 7 bytes"):
    load_corpus(path=path)


def test_no_permission(tmp_path, monkeypatch):
  def refuse(path, *arguments, **settings):
    raise PermissionError(13, "Permission denied", str(path))

  path = write(tmp_path, SPLITS) / "train.txt"
  monkeypatch.setattr("pathlib.Path.open", refuse)
  with pytest.raises(ValueError, match="^data.path: .*train.txt .Permission denied"):
    load_corpus(path=path)
  with pytest.raises(ValueError, match="^data.path: .*train.txt .Permission denied"):
    load_corpus(path=tmp_path)


def test_unknown_name():
  with pytest.raises(ValueError, match="^data.name: .*did you mean python_manual"):
    load_corpus("python_manuel")


def test_what_is_no_regular_file_is_not_opened(tmp_path):
  """A pipe would be waited for, and /dev/zero never ends."""
  write(tmp_path, SPLITS)
  os.mkfifo(tmp_path / "pipe")
  for place in (tmp_path / "pipe", "/dev/zero"):
    with pytest.raises(UserError, match=rf"^data.path: .*{place} \(no regular file\)"):
      load_corpus(path=place)
  for make in (os.mkfifo, os.mkdir):
    (tmp_path / "test.txt").unlink()
    make(tmp_path / "test.txt")
    with pytest.raises(UserError, match=r"^data.path: .*test.txt \(no regular file\)"):
      load_corpus(path=tmp_path)


def test_python_manual():
  pytest.importorskip("pydoc_data.topics")
  splits = joined(load_corpus("python_manual"))
  text = "".join(splits.values())
  assert 'The "assert" statement' in text
  assert len(text) > 4 * 10**5
  assert len(splits["train"]) / len(text) == pytest.approx(0.9, abs=0.01)


def test_python_without_its_manual(monkeypatch):
  real = builtins.__import__

  def without(name, *arguments, **settings):
    if name.startswith("pydoc_data"):
      raise ImportError(name)
    return real(name, *arguments, **settings)

  monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
  monkeypatch.setattr(builtins, "__import__", without)
  with pytest.raises(ValueError, match="libpython3-stdlib.*data.path"):
    load_corpus("python_manual")


RAW = {
  "train": "A Cat, 2 caf\u00e9s!\n\nThe end.\n" * 41,
  "valid": "Bees: 13\r\n" * 17,
  "test": "No \u0416 here...  \t ok\n" * 19,
}


@pytest.fixture
def make(tmp_path):
  """Opens `folder`'s text, cleaned or cut."""

  def load(folder=None, **settings):
    if folder is None:
      folder = tmp_path / "books"
      folder.mkdir(exist_ok=True)
      if not (folder / "test.txt").exists():
        write(folder, RAW)
    return load_corpus(path=folder, data_dir=tmp_path / "data", **settings)

  return load


def test_it_is_clean_and_cut(make, monkeypatch):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 29)
  sizes = (301, 0, 43)
  corpus = make(clean=True, language="en", max_characters=sizes)
  for (split, found), size in zip(joined(corpus).items(), sizes, strict=True):
    expected = clean(RAW[split], "en")
    assert found == (expected[:size] if size else expected) and len(found) > 40
    assert corpus.about["texts"][split]["characters"] == len(found)
  assert corpus.name == "books" and corpus.about["clean"] == "en"


def test_it_is_cut_without_being_cleaned(make, capsys):
  sizes = (100, 50, 10**6)
  found = joined(make(max_characters=sizes))
  assert found == {split: RAW[split][:size] for split, size in zip(RAW, sizes, strict=True)}
  assert "books: the test split has" in capsys.readouterr().out


def test_it_is_made_once(make, monkeypatch, tmp_path):
  settings = dict(clean=True, language="en")
  first = joined(make(**settings))
  with monkeypatch.context() as patch:
    patch.setattr(text_lib, "_clean_and_cut", lambda *_: 1 / 0)
    assert joined(make(**settings)) == first
    with pytest.raises(ZeroDivisionError):  # another is made anew
      make(clean=True, language="fi")
  assert joined(make(clean=True, language="fi")) != first
  # So is that of a text that has changed.
  path = tmp_path / "books" / "train.txt"
  path.write_bytes(path.read_bytes().replace(b"Cat", b"Tac"))
  assert joined(make(**settings))["train"] == first["train"].replace("cat", "tac") != first["train"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, OSError])
def test_what_is_not_whole_is_made_anew(make, monkeypatch, tmp_path, error):
  def fail(*_):
    yield "valid", "half"
    yield "train", "half"
    raise error(28, "No space left on device")

  settings = dict(clean=True, language="en", max_characters=(99, 9, 9))
  with monkeypatch.context() as patch:
    patch.setattr(text_lib, "_clean_and_cut", fail)
    with pytest.raises((error, UserError), match="No space left"):
      make(**settings)
  assert not list((tmp_path / "data" / "texts").glob("*/data.json"))
  expected = {split: clean(RAW[split], "en")[: 99 if split == "train" else 9] for split in RAW}
  assert joined(make(**settings)) == expected


def test_one_split_is_cut_into_three(monkeypatch, tmp_path):
  parts = ["abc d", "efgh", "", "ij klmnop"]
  whole = "".join(parts)
  source = Source("", lambda files: (("train", part) for part in parts), "", "", "")
  monkeypatch.setitem(catalog.ENTRIES, "one", source)
  corpus = load_corpus("one", data_dir=tmp_path, max_characters=(7, 3, 4))
  assert [*joined(corpus).values()] == [whole[:7], whole[7:10], whole[10:14]]
  with pytest.raises(UserError, match="data.max_characters: .* none left .* test split"):
    load_corpus("one", data_dir=tmp_path, max_characters=(7, 11, 4))


def test_an_unknown_language_is_refused(make, tmp_path):
  with pytest.raises(UserError, match="^data.language: .*"):
    make(clean=True, language="xx")
  assert not list((tmp_path / "data" / "texts").glob("*/data.json"))


@pytest.mark.parametrize(
  "sizes, head",
  [
    ((400_000_000, 2_000_000, 2_000_000), True),
    ((1000, 0, 0), False),
    ((1000, 10_000_000, 1000), False),
    ((500_000_000, 1000, 1000), False),
  ],
)
def test_the_first_part_is_taken_where_it_is_enough(monkeypatch, tmp_path, sizes, head):
  asked = []
  monkeypatch.setattr(catalog, "open_named", lambda *_, is_head: asked.append(is_head) or 1 / 0)
  with pytest.raises(ZeroDivisionError):
    load_corpus("wiki40b", language="fi", max_characters=sizes, data_dir=tmp_path)
  assert asked == [head]


def test_a_text_is_read_as_data_path_reads_it(tmp_path):
  """With its line ends, and without a byte-order mark; packed, too."""
  content = b"\xef\xbb\xbf" + b"a\r\nb\rc\n\xef\xbb\xbf" * 41
  (tmp_path / "text.txt").write_bytes(content)
  (tmp_path / "text.txt.gz").write_bytes(gzip.compress(content))
  run = types.SimpleNamespace(tokenizer=Bytes())
  for name in ("text.txt", "text.txt.gz"):
    corpus = load_corpus(path=tmp_path / name, data_dir=tmp_path)
    expected = "".join(joined(corpus).values())
    found = calibrate._tokens(run, argparse.Namespace(text=str(tmp_path / name)))
    assert run.tokenizer.decode(found) == expected == content[3:].decode()
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(UserError, match="^text: expected .*no regular file"):
    calibrate._tokens(run, argparse.Namespace(text=str(tmp_path / "pipe")))
