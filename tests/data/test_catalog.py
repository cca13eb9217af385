"""Corpora by name: found, made once, opened, listed; nothing is imported too early."""

import dataclasses
import functools
import subprocess
import sys
import zipfile

import pytest

from dpjax.data import __main__ as command
from dpjax.data import catalog
from dpjax.data.builders import text8
from dpjax.data.corpora import load_corpus
from tests import helpers

WORDS = " ".join(helpers.WORDS) + " "
TEXT8 = WORDS * 23


@pytest.fixture
def data_dir(tmp_path):
  """With text8's archive in the manual folder, as it would be downloaded."""
  manual = tmp_path / "data" / "manual"
  manual.mkdir(parents=True)
  with zipfile.ZipFile(manual / "text8.zip", "w") as archive:
    archive.writestr("text8", TEXT8)
  return tmp_path / "data"


@pytest.fixture(autouse=True)
def without_checksums(monkeypatch):
  files = tuple(dataclasses.replace(file, checksum="", size=0) for file in text8.Text8.FILES)
  monkeypatch.setattr(text8.Text8, "FILES", files)


def test_by_name(data_dir, monkeypatch):
  corpus = load_corpus("text8", data_dir=data_dir)
  tenth = len(TEXT8) // 20
  found = {split: "".join(parts) for split, parts in corpus.splits.items()}
  assert list(found) == ["train", "valid", "test"]
  assert found["valid"] == TEXT8[-2 * tenth : -tenth] and found["test"] == TEXT8[-tenth:]
  assert "".join(found.values()) == TEXT8
  assert all(len(x) >= len(found[split]) for split, x in corpus.splits.items())
  assert corpus.name == "text8" and corpus.about["name"] == "text8"
  # It is opened again without its archive.
  (data_dir / "manual" / "text8.zip").unlink()
  again = load_corpus("text8", data_dir=data_dir)
  assert "".join(again.splits["train"]) == found["train"]


def test_what_a_kill_left_is_removed(data_dir):
  left = data_dir / "text8" / "incomplete.ABC123_1.0.0"
  left.mkdir(parents=True)
  (left / "train.0.partial").write_bytes(b"half")
  assert not catalog.is_prepared("text8", data_dir)
  load_corpus("text8", data_dir=data_dir)
  assert catalog.is_prepared("text8", data_dir) and not left.exists()


def test_a_full_disk(data_dir, monkeypatch):
  from dpjax.data.builders import base

  class Full(base.ArrayRecordWriter):
    def write(self, record):
      raise RuntimeError("write() failed: No space left on device")

  monkeypatch.setattr(base, "ArrayRecordWriter", Full)
  with pytest.raises(ValueError, match="^data.data_dir: .*No space left on device"):
    load_corpus("text8", data_dir=data_dir)
  assert not catalog.is_prepared("text8", data_dir)
  monkeypatch.undo()
  # Undone is also the fixture that takes the checksums away.
  without = dataclasses.replace(text8.Text8.FILES[0], checksum="", size=0)
  monkeypatch.setattr(text8.Text8, "FILES", (without,))
  assert "".join(load_corpus("text8", data_dir=data_dir).splits["test"]) in TEXT8


@pytest.mark.parametrize(
  "name, near",
  [("txt8", "text8"), ("wikitext-2", "wikitext2"), ("ptb", "penn_treebank|text8|lm1b")],
)
def test_unknown_names(name, near):
  with pytest.raises(ValueError, match=f"^data.name: .*{name}'; the nearest is ({near})"):
    load_corpus(name)


@pytest.mark.parametrize("language", ["", "de"])
def test_languages(language):
  with pytest.raises(ValueError, match="^data.language: expected one of en, fi, he, vi"):
    load_corpus("wiki40b", language=language)


def test_what_is_to_be_given_by_hand(tmp_path):
  with pytest.raises(ValueError, match="simple-examples.tgz") as error:
    load_corpus("penn_treebank", data_dir=tmp_path / "data")
  assert str(tmp_path / "data" / "manual") in str(error.value)


def test_every_entry_has_a_builder():
  import importlib

  from dpjax.data.builders.base import TextBuilder

  for name, entry in catalog.ENTRIES.items():
    module, _, class_name = entry.builder.partition(":")
    builder = getattr(importlib.import_module(module), class_name)
    assert issubclass(builder, TextBuilder) and builder.name == name
    configs = set(builder.builder_configs)
    assert {*entry.languages} <= configs
    if entry.head:
      assert {f"{language}_head" for language in entry.languages} <= configs


def test_the_commands(data_dir, capsys):
  command.main(["prepare", "text8", f"--data_dir={data_dir}"])
  first, *lines = capsys.readouterr().out.splitlines()
  assert first.startswith("preparing text8 in ")
  assert [line.split()[0] for line in lines] == ["train", "valid", "test"]
  command.main(["list", f"--data_dir={data_dir}"])
  lines = capsys.readouterr().out.split("\n\n")
  by_name = {block.partition(":")[0]: block for block in lines}
  assert by_name.keys() == {"python_manual", *catalog.ENTRIES}
  assert by_name["text8"].rstrip().endswith("prepared   yes")
  assert all(
    "licence" in block and block.rstrip().endswith("prepared   no")
    for name, block in by_name.items()
    if name not in ("text8", "python_manual")
  )


def test_the_command_that_cleans(tmp_path):
  source, target = tmp_path / "raw.txt", tmp_path / "clean.txt"
  source.write_text("Two: 2\nC\u0410T\n", encoding="utf-8")
  command.main(["clean", "--language=en", str(source), str(target)])
  assert target.read_text().split() == ["two", "two", "cat"]
  for arguments, message in (
    (["clean", "--language=xx", str(source), str(target)], "data.language"),
    (["clean", "--language=en", str(tmp_path / "none"), str(target)], "none: expected"),
    (["prepare", "texte8"], "data.name: .* the nearest is text8"),
  ):
    with pytest.raises(SystemExit, match=message):
      command.main(arguments)
  assert target.read_text().split() == ["two", "two", "cat"]
  # What is not UTF-8 is named, and nothing is touched.
  source.write_bytes(b"Two\n" * 9 + b"\xff")
  with pytest.raises(SystemExit, match="raw.txt: expected a text in UTF-8"):
    command.main(["clean", "--language=en", str(source), str(target)])
  assert target.read_text().split() == ["two", "two", "cat"]
  # A text may be replaced by itself, under whatever name.
  source.write_text("Two\n" * 9)
  (tmp_path / "link.txt").symlink_to(source)
  command.main(["clean", "--language=en", str(tmp_path / "link.txt"), str(source)])
  assert source.read_text().split() == ["two"] * 9
  assert not list(tmp_path.glob("*.partial"))


def test_the_command_that_cleans_in_a_pipe():
  code = "from dpjax.data.__main__ import main; main(['clean', '--language=fi', '-', '-'])"
  run = functools.partial(
    subprocess.run, [sys.executable, "-c", code], cwd=helpers.ROOT, capture_output=True
  )
  done = run(input="Älä 1!\n".encode(), check=True)
  assert done.stdout.decode().strip() == "älä yksi"
  done = run(input=b"\xff")
  assert done.returncode == 1 and b"-: expected a text in UTF-8" in done.stderr


def test_two_that_begin_at_once(data_dir):
  code = (
    "import sys; from dpjax.data.corpora import load_corpus; "
    "from dpjax.data.builders import text8; import dataclasses; "
    "text8.Text8.FILES = tuple(dataclasses.replace(f, checksum='', size=0) "
    "for f in text8.Text8.FILES); sys.stdin.readline(); "
    "corpus = load_corpus('text8', data_dir=sys.argv[1]); "
    "print(len(''.join(corpus.splits['train'])))"
  )
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(data_dir)],
      cwd=helpers.ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  for process in processes:
    process.stdin.write("go\n")
    process.stdin.flush()
  sizes = [process.communicate()[0].split()[-1] for process in processes]
  assert sizes[0] == sizes[1] and int(sizes[0]) > 100


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

  def open_records(*arguments, only_head):
    asked.append(only_head)
    raise ValueError("enough")

  monkeypatch.setattr(catalog, "open_records", open_records)
  with pytest.raises(ValueError, match="enough"):
    load_corpus("wiki40b", language="fi", max_characters=sizes, data_dir=tmp_path)
  assert asked == [head]


def test_a_language_where_there_is_one(tmp_path):
  with pytest.raises(ValueError, match="^data.language: expected '' for text8, unless"):
    load_corpus("text8", language="fi", data_dir=tmp_path)
  with pytest.raises(ValueError, match="^data.name: .* python_manual, which comes with"):
    catalog.find("python_manual")


def test_a_vocabulary_lies_in_one_folder(tmp_path, monkeypatch):
  def download(file, folder, *, manual_dir=None):
    return (manual_dir or folder) / file.name

  monkeypatch.setattr(catalog, "download", download)
  manual = tmp_path / "manual"
  manual.mkdir()
  find = functools.partial(catalog.find_vocabulary, "gpt2", tmp_path, manual)
  (manual / "gpt2_merges.txt").touch()
  assert find() == str(tmp_path / "downloads" / "gpt2_merges.txt")
  (manual / "gpt2_vocab.json").touch()
  assert find() == str(manual / "gpt2_merges.txt")
  assert catalog.find_vocabulary("mine.txt", tmp_path, manual) == "mine.txt"


def test_tensorflow_is_never_imported(data_dir):
  code = (
    "import sys; from dpjax.data.corpora import load_corpus; "
    "assert 'tensorflow_datasets' not in sys.modules; "
    "from dpjax.data.builders import text8; import dataclasses; "
    "text8.Text8.FILES = tuple(dataclasses.replace(f, checksum='', size=0) "
    "for f in text8.Text8.FILES); "
    "corpus = load_corpus('text8', data_dir=sys.argv[1]); "
    "print(len(''.join(corpus.splits['train']))); "
    "assert 'tensorflow' not in sys.modules"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(data_dir)],
    check=True,
    capture_output=True,
    text=True,
    cwd=helpers.ROOT,
  )
  assert int(done.stdout.split()[-1]) == len(TEXT8) - 2 * (len(TEXT8) // 20)
  assert done.stderr == ""
