"""Texts by path and by name, whole, cleaned or cut; the command `dpjax data`."""

import dataclasses
import functools
import gzip
import os
import subprocess
import sys
import zipfile

import pytest

from dpjax.commands import data as command
from dpjax.data import catalog
from dpjax.data import corpus as corpus_lib
from dpjax.data import text as text_lib
from dpjax.data.sources import Source, reading, text8
from dpjax.data.text import load_corpus
from dpjax.errors import UserError
from dpjax.text.cleaning import clean
from tests import helpers

TEXTS = {"train": "a\r\nb \u00e9\n", "valid": "c\n\n", "test": " d"}


def write(folder, texts):
  folder.mkdir(exist_ok=True)
  for split, text in texts.items():
    (folder / f"{split}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
  return folder


def joined(corpus):
  return {split: "".join(text) for split, text in corpus.splits.items()}


@pytest.mark.parametrize("valid", ["valid", "validation"])
def test_a_folder(tmp_path, valid):
  write(tmp_path, TEXTS)
  (tmp_path / "valid.txt").rename(tmp_path / f"{valid}.txt")
  corpus = load_corpus("ignored", tmp_path)
  assert joined(corpus) == joined(corpus) == TEXTS
  assert corpus.name == tmp_path.name
  assert [len(text) for text in corpus.splits.values()] == [8, 3, 2]


def test_a_file_is_cut_at_line_ends_in_order(tmp_path):
  whole = "".join(f"line {i} \u00e9\r\n" for i in range(101))
  (tmp_path / "lines.txt").write_bytes(whole.encode())
  splits = joined(load_corpus(path=tmp_path / "lines.txt", split_fractions=(0.7, 0.2, 0.1)))
  assert "".join(splits.values()) == whole
  assert all(text.endswith("\n") for text in splits.values())
  sizes = [len(text) / len(whole) for text in splits.values()]
  assert sizes == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


@pytest.mark.parametrize("text", ["word " * 205, "\N{GRINNING FACE}" * 53])
def test_a_file_of_one_line_is_cut_between_characters(tmp_path, text):
  (tmp_path / "text").write_bytes(text.encode())
  splits = joined(load_corpus(path=tmp_path / "text"))
  assert "".join(splits.values()) == text
  if len(text) == 1025:  # Valid and test are rounded down, train takes the rest.
    assert [len(part) for part in splits.values()] == [923, 51, 51]


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
  parts = list(load_corpus(path=write(tmp_path, {**TEXTS, "train": text})).splits["train"])
  assert "".join(parts) == text
  assert len(parts) > 5 and max(len(part.encode()) for part in parts) <= 61
  assert all(part.endswith(ends) for part in parts[:-1])


def test_packed_texts_and_marks_are_read_everywhere_as_data_path_reads_them(tmp_path):
  content = b"\xef\xbb\xbf" + b"a\r\nb\rc\n\xef\xbb\xbf" * 41
  (tmp_path / "text.txt").write_bytes(content)
  (tmp_path / "text.txt.gz").write_bytes(gzip.compress(content))
  for name in ("text.txt", "text.txt.gz"):
    corpus = load_corpus(path=tmp_path / name, data_dir=tmp_path)
    assert corpus.name == "text"
    expected = "".join(joined(corpus).values())
    assert reading.read_text(tmp_path / name) == expected == content[3:].decode()
  (tmp_path / "text.txt.gz").rename(packed := tmp_path / f"{'n' * 245}.txt.gz")
  assert "".join(joined(load_corpus(path=packed, data_dir=tmp_path)).values()) == expected
  helpers.make_pipe(tmp_path / "pipe")
  with pytest.raises(UserError, match="^text: expected .*no regular file"):
    reading.read_text(tmp_path / "pipe", "text")


def without(split):
  return lambda folder: (folder / f"{split}.txt").unlink()


def replaced(split, make):
  return lambda folder: (without(split)(folder), make(folder / f"{split}.txt"))


@pytest.mark.parametrize(
  "change, settings, message",
  [
    (None, dict(path="none.txt"), "data.path: .*none.txt .No such file"),
    *((without(x), dict(path="."), f"data.path: expected {x}.txt") for x in TEXTS),
    *(
      (replaced(x, lambda file: file.touch()), dict(path="."), f"data.path: .*empty file .*{x}.txt")
      for x in TEXTS
    ),
    (None, dict(path="valid.txt"), "data.path: .*three splits, got 3 bytes"),
    # A pipe would be waited for, and /dev/zero never ends.
    (None, dict(path="/dev/zero"), r"data.path: .*/dev/zero \(no regular file\)"),
    (
      replaced("test", helpers.make_pipe),
      dict(path="test.txt"),
      r"data.path: .*\(no regular file\)",
    ),
    *(
      (replaced("test", make), dict(path="."), r"data.path: .*test.txt \(no regular file\)")
      for make in (helpers.make_pipe, os.mkdir)
    ),
    (None, dict(name="python_manuel"), "data.name: .*did you mean python_manual"),
    (None, dict(name="wikitext-2"), "data.name: .*did you mean wikitext2"),
    (None, dict(name="wiki40b", language="de"), "data.language: expected one of en, fi, he, vi"),
    (None, dict(name="text8", language="fi"), "data.language: expected '' for text8, unless"),
    (None, dict(path=".", clean=True, language="xx"), "data.language: .*xx"),
  ],
)
def test_refusals(tmp_path, monkeypatch, change, settings, message):
  monkeypatch.chdir(write(tmp_path / "texts", TEXTS))
  if change:
    change(tmp_path / "texts")
  with pytest.raises(UserError, match=f"^{message}"):
    load_corpus(**settings)
  assert not [*tmp_path.glob("texts/data/texts/*/data.json")]


def test_what_cannot_be_read(tmp_path, monkeypatch):
  folder = write(tmp_path, TEXTS | {"valid": b"one\ntwo\nthr\xe9e\n"})
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 7)
  with pytest.raises(UserError, match="^data.path: .* 0xe9 at offset 11 of .*valid.txt"):
    list(load_corpus(path=folder).splits["valid"])

  def refuse(path, *arguments, **settings):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr("pathlib.Path.open", refuse)
  for path in (folder / "train.txt", folder):
    with pytest.raises(UserError, match="^data.path: .*train.txt .Permission denied"):
      load_corpus(path=path)


def test_the_python_manual(monkeypatch):
  pytest.importorskip("pydoc_data.topics")
  splits = joined(load_corpus("python_manual"))
  text = "".join(splits.values())
  assert 'The "assert" statement' in text and len(text) > 4 * 10**5
  assert len(splits["train"]) / len(text) == pytest.approx(0.9, abs=0.01)
  monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
  with pytest.raises(UserError, match="libpython3-stdlib.*data.path"):
    load_corpus("python_manual")


RAW = {
  "train": "A Cat, 2 caf\u00e9s!\n\nThe end.\n" * 41,
  "valid": "Bees: 13\r\n" * 17,
  "test": "No \u0416 here...  \t ok\n" * 19,
}


@pytest.fixture
def load(tmp_path):
  """Opens a text, cleaned or cut."""
  folder = write(tmp_path / "books", RAW)
  return functools.partial(load_corpus, path=folder, data_dir=tmp_path / "data")


def test_a_text_is_cleaned_and_cut(load, monkeypatch):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 29)
  sizes = (301, 0, 43)
  corpus = load(clean=True, language="en", max_characters=sizes)
  for (split, found), size in zip(joined(corpus).items(), sizes, strict=True):
    expected = clean(RAW[split], "en")
    assert found == (expected[:size] if size else expected) and len(found) > 40
    assert corpus.about["texts"][split]["characters"] == len(found)
  assert corpus.name == "books" and corpus.about["clean"] == "en"


def test_a_text_is_cut_without_being_cleaned(load, capsys):
  sizes = (100, 50, 10**6)
  found = joined(load(max_characters=sizes))
  assert found == {split: RAW[split][:size] for split, size in zip(RAW, sizes, strict=True)}
  assert "books: the test split has" in capsys.readouterr().out


def test_a_clean_text_is_written_once_and_completely(load, monkeypatch, tmp_path):
  settings = dict(clean=True, language="en")

  def fail(*_):
    yield "valid", "half"
    yield "train", "half"
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(text_lib, "_clean_and_cut", fail)
    with pytest.raises(UserError, match="No space left"):
      load(**settings)
  assert not list((tmp_path / "data" / "texts").glob("*/data.json"))
  first = joined(load(**settings))
  assert first == {split: clean(RAW[split], "en") for split in RAW}
  with monkeypatch.context() as patch:
    patch.setattr(text_lib, "_clean_and_cut", lambda *_: 1 / 0)
    assert joined(load(**settings)) == first
    with pytest.raises(ZeroDivisionError):
      load(clean=True, language="fi")
  path = tmp_path / "books" / "train.txt"
  path.write_bytes(path.read_bytes().replace(b"Cat", b"Tac"))
  assert joined(load(**settings))["train"] == first["train"].replace("cat", "tac") != first["train"]


def test_one_split_is_cut_into_three(monkeypatch, tmp_path):
  parts = ["abc d", "efgh", "", "ij klmnop"]
  whole = "".join(parts)
  source = Source("", lambda files: (("train", part) for part in parts), "", "", "")
  monkeypatch.setitem(catalog.ENTRIES, "one", source)
  corpus = load_corpus("one", data_dir=tmp_path, max_characters=(7, 3, 4))
  assert [*joined(corpus).values()] == [whole[:7], whole[7:10], whole[10:14]]
  with pytest.raises(UserError, match="data.max_characters: .* none left .* test split"):
    load_corpus("one", data_dir=tmp_path, max_characters=(7, 11, 4))


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


TEXT8 = (" ".join(helpers.WORDS) + " ") * 23


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
  """With text8's archive in the manual folder, as it would be downloaded."""
  manual = tmp_path / "data" / "manual"
  manual.mkdir(parents=True)
  with zipfile.ZipFile(manual / "text8.zip", "w") as archive:
    archive.writestr("text8", TEXT8)
  monkeypatch.setattr(text8, "ARCHIVE", dataclasses.replace(text8.ARCHIVE, checksum=""))
  return tmp_path / "data"


def test_a_text_is_made_once_and_its_files_are_not_needed_again(data_dir, capsys):
  corpus = load_corpus("text8", data_dir=data_dir)
  assert capsys.readouterr().out.startswith("preparing text8 in ")
  (data_dir / "manual" / "text8.zip").unlink()
  assert joined(load_corpus("text8", data_dir=data_dir)) == joined(corpus)
  assert "".join(joined(corpus).values()) == TEXT8 and corpus.about["name"] == "text8"


def test_the_command_lists_all_corpora(capsys):
  command.main(["list"])
  blocks = capsys.readouterr().out.split("\n\n")
  by_name = {block.partition(":")[0]: block for block in blocks}
  assert by_name.keys() == {"python_manual", *catalog.ENTRIES}
  assert all("licence" in by_name[name] for name in catalog.ENTRIES)


def test_a_vocabulary_lies_in_one_folder(tmp_path, monkeypatch):
  def get(files, file, *, by_hand):
    return (files.manual_dir if by_hand else files.folder) / file.name

  monkeypatch.setattr(catalog.Files, "get", get)
  manual = tmp_path / "manual"
  manual.mkdir()
  find = functools.partial(catalog.find_vocabulary, "gpt2", tmp_path, manual)
  (manual / "gpt2_merges.txt").touch()
  assert find() == str(tmp_path / "downloads" / "gpt2_merges.txt")
  (manual / "gpt2_vocab.json").touch()
  assert find() == str(manual / "gpt2_merges.txt")
  assert catalog.find_vocabulary("mine.txt", tmp_path, manual) == "mine.txt"


@helpers.needs_locks
def test_two_that_begin_at_once_and_never_import_tensorflow(data_dir):
  code = (
    "import dataclasses, sys; from dpjax.data.sources import text8; "
    "from dpjax.data.text import load_corpus; "
    "text8.ARCHIVE = dataclasses.replace(text8.ARCHIVE, checksum=''); "
    "sys.stdin.readline(); corpus = load_corpus('text8', data_dir=sys.argv[1]); "
    "print(len(''.join(corpus.splits['train']))); "
    "assert not {'tensorflow', 'tensorflow_datasets', 'pyarrow'} & {*sys.modules}"
  )
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  command = [sys.executable, "-c", code, str(data_dir)]
  processes = [subprocess.Popen(command, cwd=helpers.ROOT, text=True, **pipes) for _ in range(2)]
  for process in processes:
    process.stdin.write("go\n")
    process.stdin.flush()
  answers = [process.communicate() for process in processes]
  sizes = [int(out.split()[-1]) for out, _ in answers]
  assert sizes == [len(TEXT8) - 2 * (len(TEXT8) // 20)] * 2
  # One has made it.
  assert sorted("preparing" in out for out, _ in answers) == [False, True]
  assert all(not err or "waiting for another" in err for _, err in answers)
