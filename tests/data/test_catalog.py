"""Corpora by name: found, made once, opened, listed; nothing is imported too early."""

import dataclasses
import functools
import subprocess
import sys
import zipfile

import pytest

from dpjax.commands import data as command
from dpjax.data import catalog
from dpjax.data.sources import text8
from dpjax.data.text import load_corpus
from tests import helpers

WORDS = " ".join(helpers.WORDS) + " "
TEXT8 = WORDS * 23


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
  """With text8's archive in the manual folder, as it would be downloaded."""
  manual = tmp_path / "data" / "manual"
  manual.mkdir(parents=True)
  with zipfile.ZipFile(manual / "text8.zip", "w") as archive:
    archive.writestr("text8", TEXT8)
  file = dataclasses.replace(text8.ARCHIVE, checksum="", size=0)
  monkeypatch.setattr(text8, "ARCHIVE", file)
  return tmp_path / "data"


def test_by_name(data_dir):
  corpus = load_corpus("text8", data_dir=data_dir)
  tenth = len(TEXT8) // 20
  found = {split: "".join(parts) for split, parts in corpus.splits.items()}
  assert list(found) == ["train", "valid", "test"]
  assert found["valid"] == TEXT8[-2 * tenth : -tenth] and found["test"] == TEXT8[-tenth:]
  assert "".join(found.values()) == TEXT8
  assert corpus.name == "text8" and corpus.about["name"] == "text8"
  assert catalog.is_made("text8", data_dir)
  # It is opened again without its archive.
  (data_dir / "manual" / "text8.zip").unlink()
  again = load_corpus("text8", data_dir=data_dir)
  assert "".join(again.splits["train"]) == found["train"]


@pytest.mark.parametrize(
  "name, near",
  [("txt8", "text8"), ("wikitext-2", "wikitext2")],
)
def test_unknown_names(name, near):
  with pytest.raises(ValueError, match=f"^data.name: .*{name}; did you mean ({near})"):
    load_corpus(name)


@pytest.mark.parametrize("language", ["", "de"])
def test_languages(language):
  with pytest.raises(ValueError, match="^data.language: expected one of en, fi, he, vi"):
    load_corpus("wiki40b", language=language)


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
    (["prepare", "texte8"], "data.name: .* did you mean text8"),
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
  code = "from dpjax.commands.data import main; main(['clean', '--language=fi', '-', '-'])"
  run = functools.partial(
    subprocess.run, [sys.executable, "-c", code], cwd=helpers.ROOT, capture_output=True
  )
  done = run(input="Älä 1!\n".encode(), check=True)
  assert done.stdout.decode().strip() == "älä yksi"
  done = run(input=b"\xff")
  assert done.returncode == 1 and b"-: expected a text in UTF-8" in done.stderr


def test_a_language_where_there_is_one(tmp_path):
  with pytest.raises(ValueError, match="^data.language: expected '' for text8, unless"):
    load_corpus("text8", language="fi", data_dir=tmp_path)
  with pytest.raises(ValueError, match="^data.name: .* python_manual, which comes with"):
    catalog.find("python_manual")


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


def test_two_that_begin_at_once_and_never_import_tensorflow(data_dir):
  code = (
    "import dataclasses, sys; from dpjax.data.sources import text8; "
    "from dpjax.data.text import load_corpus; "
    "text8.ARCHIVE = dataclasses.replace(text8.ARCHIVE, checksum='', size=0); "
    "sys.stdin.readline(); corpus = load_corpus('text8', data_dir=sys.argv[1]); "
    "print(len(''.join(corpus.splits['train']))); "
    "assert not {'tensorflow', 'tensorflow_datasets', 'pyarrow'} & {*sys.modules}"
  )
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(data_dir)],
      cwd=helpers.ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  for process in processes:
    process.stdin.write("go\n")
    process.stdin.flush()
  answers = [process.communicate() for process in processes]
  sizes = [int(out.split()[-1]) for out, _ in answers]
  assert sizes == [len(TEXT8) - 2 * (len(TEXT8) // 20)] * 2
  # One has made it.
  assert sorted("preparing" in out for out, _ in answers) == [False, True]
  assert all(not err or "waiting for it" in err for _, err in answers)
