"""Texts made clean or cut short: what they hold, and that they are made once, and whole."""

import json

import pytest

from dpjax.data import corpora, texts
from dpjax.data.corpora import load_corpus
from dpjax.text.cleaning import clean

SPLITS = {
  "train": "A Cat, 2 caf\u00e9s!\n\nThe end.\n" * 41,
  "valid": "Bees: 13\r\n" * 17,
  "test": "No \u0416 here...  \t ok\n" * 19,
}


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / "books"
  path.mkdir()
  for split, text in SPLITS.items():
    (path / f"{split}.txt").write_text(text, encoding="utf-8", newline="")
  return path


def joined(corpus):
  return {split: "".join(parts) for split, parts in corpus.splits.items()}


def make(folder, **settings):
  return load_corpus(path=folder, data_dir=folder.parent / "data", **settings)


def test_it_is_clean_and_cut(folder, monkeypatch):
  monkeypatch.setattr(corpora, "CHUNK_BYTES", 29)
  sizes = (301, 0, 43)
  corpus = make(folder, clean=True, language="en", max_characters=sizes)
  for (split, found), size in zip(joined(corpus).items(), sizes, strict=True):
    expected = clean(SPLITS[split], "en")
    assert found == (expected[:size] if size else expected) and len(found) > 40
  assert corpus.name == "books"
  assert corpus.about["clean"] == "en"
  assert corpus.about["characters"] == {k: len(v) for k, v in joined(corpus).items()}


def test_it_is_cut_without_being_cleaned(folder):
  sizes = (100, 50, 10**6)
  found = joined(make(folder, max_characters=sizes))
  assert found == {split: SPLITS[split][:size] for split, size in zip(SPLITS, sizes, strict=True)}


def test_it_is_made_once(folder, monkeypatch):
  settings = dict(clean=True, language="en")
  first = joined(make(folder, **settings))
  monkeypatch.setattr(texts, "_clean", lambda *_: 1 / 0)
  assert joined(make(folder, **settings)) == first
  with pytest.raises(ZeroDivisionError):  # another is made anew
    make(folder, clean=True, language="fi")
  monkeypatch.undo()
  assert joined(make(folder, clean=True, language="fi")) != first
  assert joined(make(folder, **settings)) == first


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, OSError])
def test_what_is_not_whole_is_made_anew(folder, monkeypatch, error):
  expected = joined(make(folder, clean=True, language="en"))
  data = folder.parent / "data" / "texts"
  (made,) = (path for path in data.iterdir() if path.is_dir())

  def fail(text, language):
    yield "half"
    raise error(28, "No space left on device")

  for path in [*made.iterdir()]:
    path.unlink()
  made.rmdir()
  monkeypatch.setattr(texts, "_clean", fail)
  with pytest.raises((error, ValueError), match="No space left"):
    make(folder, clean=True, language="en")
  assert not made.exists()
  monkeypatch.undo()
  assert joined(make(folder, clean=True, language="en")) == expected


def test_one_split_is_cut_into_three(tmp_path):
  parts = ["abc d", "efgh", "", "ij klmnop"]
  whole = "".join(parts)
  folder = texts.make("one", {"train": parts}, {}, tmp_path, "", (7, 3, 4))
  found = [(folder / f"{split}.txt").read_text() for split in ("train", "valid", "test")]
  assert found == [whole[:7], whole[7:10], whole[10:14]]
  about = json.loads((folder / "text.json").read_text())
  assert about["characters"] == {"train": 7, "valid": 3, "test": 4}
  with pytest.raises(ValueError, match="data.max_characters: .* none left .* test split"):
    texts.make("one", {"train": parts}, {}, tmp_path, "", (7, 11, 4))
  with pytest.raises(ValueError, match="data.max_characters: expected a size of every"):
    texts.make("one", {"train": parts}, {}, tmp_path, "", (7, 11, 0))


def test_a_text_that_has_changed_is_made_anew(folder):
  first = joined(make(folder, clean=True, language="en"))
  path = folder / "train.txt"
  path.write_text(
    path.read_text(encoding="utf-8").replace("Cat", "Tac"), encoding="utf-8", newline=""
  )
  second = joined(make(folder, clean=True, language="en"))
  assert second["train"] == first["train"].replace("cat", "tac") != first["train"]


def test_too_short_a_split_is_told_of(folder, capsys):
  make(folder, max_characters=(10**6, 10, 10))
  assert "books: the train split has" in capsys.readouterr().out


def test_an_unknown_language_is_refused(folder):
  with pytest.raises(ValueError, match="^data.language: .*"):
    make(folder, clean=True, language="xx")
  assert not list((folder.parent / "data" / "texts").glob("*/text.json"))
