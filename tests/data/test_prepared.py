import hashlib
import json

import numpy as np
import pytest
from dpjax.data.corpora import load_corpus
from dpjax.data.prepared import count_text, open_prepared, prepare

from dpjax.data import chunks, corpora, prepared
from dpjax.errors import UserError
from dpjax.layers import Unigram
from dpjax.text.unigram import UnigramBoundaries, train_unigram
from tests.text.test_subwords import family

SPLITS = {
  "train": "one  two\r\nthree\u2003four \u00e9\n\n five" * 31,
  "valid": "one two\r\n\r\nthree",
  "test": " \nfour\n",
}


@pytest.fixture
def corpus(tmp_path):
  folder = tmp_path / "texts"
  folder.mkdir()
  for split, text in SPLITS.items():
    (folder / f"{split}.txt").write_bytes(text.encode())
  return load_corpus(path=folder)


@pytest.mark.parametrize("chunk_bytes", [11, 2**20])
@pytest.mark.parametrize(
  "kind, size", [("characters", 0), ("bytes", 0), ("bpe", 263), ("sentencepiece_bpe", 283)]
)
def test_tokens_are_those_of_the_text(tmp_path, monkeypatch, corpus, chunk_bytes, kind, size):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
  data = prepare(corpus, tmp_path / "data", kind, vocab_size=size)
  for split, text in SPLITS.items():
    tokens = data.splits[split]
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert data.tokenizer.decode(tokens) == text
    assert data.counts[split] == {
      "tokens": len(tokens),
      "characters": len(text),
      "words": len(text.split()) + text.count("\n"),
      "bytes": len(text.encode()),
      "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
  assert data.name == "texts"
  assert not (tmp_path / "data.partial").exists()


@pytest.mark.parametrize("kind, size", [("bpe", 290), ("sentencepiece_unigram", 278)])
def test_subwords_do_not_depend_on_the_parts(tmp_path, monkeypatch, kind, size):
  text = "one two\n\nthree\n  four\n\n\n five \u00e9\n\u00e9\n\u2003six\n" * 23
  (tmp_path / "texts").mkdir()
  for split in SPLITS:
    (tmp_path / "texts" / f"{split}.txt").write_bytes(text.encode())
  corpus = load_corpus(path=tmp_path / "texts")
  whole = prepare(corpus, tmp_path / "whole", kind, vocab_size=size)
  expected = whole.tokenizer.encode(text)
  monkeypatch.setattr(prepared, "train_tokenizer", lambda *_, **__: whole.tokenizer)
  for chunk_bytes in range(31, 53):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    data = prepare(corpus, tmp_path / "data", kind)
    np.testing.assert_array_equal(data.splits["train"], expected)


@pytest.mark.parametrize("name", ["llama 3", "llama 2"])
def test_files_of_other_families_do_not_depend_on_the_parts(tmp_path, monkeypatch, name):
  text = "One.\nTwo\n\nthree\n  four;\n\n\n five \u00e9\n\u00e9\n/six\n" * 23
  (tmp_path / "texts").mkdir()
  for split in SPLITS:
    (tmp_path / "texts" / f"{split}.txt").write_bytes(text.encode())
  raw = family(name)
  raw.save(str(tmp_path / "tokenizer.json"))
  expected = raw.encode(text, add_special_tokens=False).ids
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 41)
  data = prepare(
    load_corpus(path=tmp_path / "texts"),
    tmp_path / "data",
    "bpe",
    file=str(tmp_path / "tokenizer.json"),
  )
  assert data.splits["train"].tolist() == expected


def test_counts_do_not_depend_on_the_parts():
  text = "a bc\n\n  de\tf\u00e9 \u2003g\r\nh i"
  whole = count_text([text])
  assert whole["words"] == 7 + 3
  for first in range(len(text)):
    for second in range(first, len(text)):
      parts = [text[:first], text[first:second], text[second:]]
      assert count_text(parts) == whole


def test_opened_again(tmp_path, corpus):
  written = prepare(corpus, tmp_path / "data", "characters")
  read = open_prepared(tmp_path / "data")
  assert read.counts == written.counts and read.name == written.name
  assert read.tokenizer.to_json() == written.tokenizer.to_json()
  for split in SPLITS:
    np.testing.assert_array_equal(read.splits[split], written.splits[split])
    assert not read.splits[split].flags.writeable


@pytest.mark.parametrize("extra, dtype", [(0, np.uint16), (1, np.int32)])
def test_dtype_holds_the_largest_id(tmp_path, monkeypatch, corpus, extra, dtype):
  class Wide(prepared.Tokenizer):
    kind, start_id, lossless, vocab_size = "characters", 0, True, 2**16 + extra
    decode = from_fields = fields = None

    def _encode(self, text):
      return np.full(len(text), self.vocab_size - 1, np.int32)

    def to_json(self):
      return '{"format": 1, "kind": "bytes"}'

  monkeypatch.setattr(prepared, "train_tokenizer", lambda kind, chunks: Wide())
  data = prepare(corpus, tmp_path / "data", "characters")
  assert data.splits["test"].dtype == dtype
  assert set(data.splits["test"].tolist()) == {2**16 + extra - 1}


def test_what_a_kill_left_is_replaced(tmp_path, corpus):
  partial = tmp_path / "data.partial"
  partial.mkdir()
  (partial / "train.bin").write_bytes(b"half")
  (partial / "other").write_bytes(b"")
  prepare(corpus, tmp_path / "data", "bytes")
  assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
    "data.json",
    "test.bin",
    "tokenizer.json",
    "train.bin",
    "valid.bin",
  ]
  assert not partial.exists()


def test_an_earlier_folder_is_replaced(tmp_path, corpus):
  prepare(corpus, tmp_path / "data", "bytes")
  data = prepare(corpus, tmp_path / "data", "characters")
  assert data.tokenizer.kind == "characters"


def test_a_folder_of_something_else_is_refused(tmp_path, corpus):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "mine.txt").write_text("not to be lost")
  with pytest.raises(ValueError, match="workdir: .* which holds something else"):
    prepare(corpus, tmp_path / "data", "bytes")
  assert (tmp_path / "data" / "mine.txt").read_text() == "not to be lost"


def test_made_once(tmp_path, monkeypatch, corpus):
  first = prepare(corpus, tmp_path / "tokens", "bytes", shared=True)
  assert first.folder.parent == tmp_path / "tokens" and first.folder.name.startswith("texts_bytes_")
  made = (first.folder / "train.bin").stat().st_mtime_ns
  for _ in range(2):
    again = prepare(corpus, tmp_path / "tokens", "bytes", shared=True)
    assert again.folder == first.folder
  assert (first.folder / "train.bin").stat().st_mtime_ns == made
  # Of a text that does not say what it is, nothing is known.
  nameless = corpora.Corpus("mine", {split: [text] for split, text in SPLITS.items()})
  prepare(nameless, tmp_path / "data", "bytes")
  nameless.splits["train"][0] = SPLITS["train"][::-1]
  data = prepare(nameless, tmp_path / "data", "bytes")
  assert data.tokenizer.decode(data.splits["train"]) == SPLITS["train"][::-1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, UserError])
def test_an_error_on_the_way(tmp_path, monkeypatch, corpus, error):
  """As of a disk that is full: what is done stays, where the next call can go on."""

  def fail(path, content):
    if path.name == "test.json":
      raise error(28, "No space left on device")
    written(path, content)

  written = prepared.making.write_json
  with monkeypatch.context() as patch:
    patch.setattr(prepared.making, "write_json", fail)
    with pytest.raises((error, UserError), match="No space left"):
      prepare(corpus, tmp_path / "data", "bytes")
  assert not (tmp_path / "data").exists()
  assert (tmp_path / "data.partial").exists() == (error is not UserError)
  data = prepare(corpus, tmp_path / "data", "bytes")
  assert bytes(data.splits["train"].astype(np.uint8)) == SPLITS["train"].encode()
  # Other settings begin anew.
  assert prepare(corpus, tmp_path / "data", "characters").tokenizer.kind == "characters"


@pytest.mark.parametrize("kind", ["characters", "sentencepiece_bpe", "bpe"])
def test_text_that_is_not_utf_8_is_named(tmp_path, monkeypatch, corpus, kind):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 5)
  (tmp_path / "texts" / "train.txt").write_bytes(b"one\ncaf\xe9")
  corpus = load_corpus(path=tmp_path / "texts")
  with pytest.raises(ValueError, match="^data.path: .*offset 7 of .*train.txt"):
    prepare(corpus, tmp_path / "data", kind, vocab_size=300)
  assert not (tmp_path / "data").exists()


def test_split_without_words(tmp_path, corpus):
  (tmp_path / "texts" / "valid.txt").write_bytes(b"   ")
  corpus = load_corpus(path=tmp_path / "texts")
  with pytest.raises(ValueError, match="data.path: expected words .*none in the valid "):
    prepare(corpus, tmp_path / "data", "bytes")


def test_split_without_tokens(tmp_path, corpus):
  (tmp_path / "texts" / "valid.txt").write_bytes(b"   ")
  (tmp_path / "vocab.txt").write_text("[UNK]\none\n")
  corpus = load_corpus(path=tmp_path / "texts")
  with pytest.raises(ValueError, match="data.path: .*none in the valid split"):
    prepare(corpus, tmp_path / "data", "wordpiece", file=str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "tokenizer.json", "data.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damage_is_named(tmp_path, corpus, name, damage):
  prepare(corpus, tmp_path / "data", "characters")
  file = tmp_path / "data" / name
  content = file.read_bytes()
  file.unlink()
  if damage == "short":
    file.write_bytes(content[:-3])
  with pytest.raises(ValueError, match=f"{name}: expected"):
    open_prepared(tmp_path / "data").check()


COUNTS = {"tokens": 3, "words": 2, "characters": 3, "bytes": 3, "sha256": "5a"}


@pytest.mark.parametrize(
  "change",
  [
    {"dtype": "bits"},
    {"dtype": "float32"},
    {"splits": []},
    {"splits": [3]},
    {"name": [3]},
    {"format": None},
    {"format": float("inf")},
    {"checksums": [5, 7]},
    {"checksums": 5},
    {"splits": {"train": {"tokens": 3}}},
    {"splits": dict.fromkeys(SPLITS, 3)},
    *(
      {"splits": dict.fromkeys(SPLITS, COUNTS | wrong)}
      for wrong in (
        {"words": 0},
        {"tokens": 3.5},
        {"bytes": "3"},
        {"characters": None},
        {"sha256": 5},
      )
    ),
  ],
)
def test_damaged_counts(tmp_path, corpus, change):
  prepare(corpus, tmp_path / "data", "characters")
  file = tmp_path / "data" / "data.json"
  file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
  with pytest.raises(ValueError, match="data.json: expected the counts"):
    open_prepared(tmp_path / "data")


@pytest.mark.parametrize("key", COUNTS)
def test_counts_that_lack_one(tmp_path, corpus, key):
  prepare(corpus, tmp_path / "data", "characters")
  file = tmp_path / "data" / "data.json"
  content = json.loads(file.read_text())
  del content["splits"]["valid"][key]
  for text in (json.dumps(content), "[" * 10**5, "[3]"):
    file.write_text(text)
    with pytest.raises(UserError, match="data.json: expected the counts"):
      open_prepared(tmp_path / "data")


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "valid.boundaries.bin"])
def test_a_changed_file_is_found_when_it_is_checked(tmp_path, corpus, name):
  prepare(corpus, tmp_path / "data", "characters", boundaries=UNIGRAM).check()
  file = tmp_path / "data" / name
  content = bytearray(file.read_bytes())
  split, *_ = name.split(".")
  for place in (0, -2):  # An id, or a boundary, becomes another one that is valid.
    content[place] ^= 1
    file.write_bytes(content)
    data = open_prepared(tmp_path / "data")
    for splits in ((), (split,)):
      with pytest.raises(
        UserError,
        match=f"^{file}: expected what was prepared, got a file that was .* remove {file.parent}, ",
      ):
        data.check(*splits)
    data.check(*SPLITS.keys() - {split})
    content[place] ^= 1
  file.write_bytes(content)
  open_prepared(tmp_path / "data").check()


def test_data_of_an_earlier_version_have_no_checksums(tmp_path, corpus):
  data = prepare(corpus, tmp_path / "data", "characters")
  size = data.tokenizer.vocab_size
  file = tmp_path / "data" / "data.json"
  content = json.loads(file.read_text())
  assert content["checksums"].keys() == {f"{split}.bin" for split in SPLITS}
  del content["checksums"]
  file.write_text(json.dumps(content))
  tokens = np.fromfile(tmp_path / "data" / "test.bin", np.uint16)
  for tokens[1], is_known in ((size - 1, True), (size, False)):
    tokens.tofile(tmp_path / "data" / "test.bin")
    data = open_prepared(tmp_path / "data")
    data.check("train", "valid")
    if is_known:
      data.check()
      continue
    with pytest.raises(
      UserError,
      match=rf"test.bin: expected ids 0 \.\. {size - 1}, got "
      rf"\d+ \.\. {size}; ",
    ):
      data.check()


def test_later_format(tmp_path, corpus):
  prepare(corpus, tmp_path / "data", "characters")
  file = tmp_path / "data" / "data.json"
  file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
  with pytest.raises(ValueError, match="data.json: expected a format up to 1, got 2"):
    open_prepared(tmp_path / "data")


UNIGRAM = Unigram(1, size=18)


@pytest.mark.parametrize("chunk_bytes", [11, 2**20])
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_boundaries_are_those_of_the_text(tmp_path, monkeypatch, corpus, chunk_bytes, kind):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)  # 11: words are cut
  data = prepare(corpus, tmp_path / "data", kind, boundaries=UNIGRAM)
  unigram = UnigramBoundaries(train_unigram(corpus.splits["train"], 18))
  assert data.learned == unigram.model
  assert data.boundaries is not None and list(data.boundaries) == list(SPLITS)
  for split, text in SPLITS.items():
    found = data.boundaries[split]
    assert isinstance(found, np.memmap) and found.dtype == np.uint8
    assert not found.flags.writeable and len(found) == data.counts[split]["tokens"]
    np.testing.assert_array_equal(found, unigram.of_tokens(text, data.tokenizer))
    spaces = np.isin(data.splits[split], data.tokenizer.space_ids)
    assert found[spaces].all() and spaces.sum() == text.count(" ") + text.count("\n")
  np.testing.assert_array_equal(data.segment(SPLITS["valid"]), data.boundaries["valid"])
  assert 0.1 < data.segment("onetwothree").mean() < 1


def test_boundaries_opened_again(tmp_path, corpus):
  written = prepare(corpus, tmp_path / "data", "bytes", boundaries=UNIGRAM)
  read = open_prepared(tmp_path / "data", boundaries=UNIGRAM)
  assert read.learned == written.learned
  for split in SPLITS:
    np.testing.assert_array_equal(read.boundaries[split], written.boundaries[split])
  plain = prepare(corpus, tmp_path / "data", "bytes")
  assert plain.boundaries is None and not plain.learned
  with pytest.raises(ValueError, match="data: expected texts with boundaries of the text"):
    plain.segment("one")


def test_boundaries_by_a_file(tmp_path, corpus):
  file = tmp_path / "other.model"
  file.write_bytes(train_unigram(["ot tw re " * 11], 9))
  data = prepare(
    corpus, tmp_path / "data", "characters", boundaries=Unigram(1, file=str(file), size=18)
  )
  assert data.learned == file.read_bytes()
  with pytest.raises(ValueError, match="^model.boundaries.file: .*none.model"):
    prepare(corpus, tmp_path / "data", "characters", boundaries=Unigram(1, file="none.model"))


def test_boundaries_of_subwords_are_refused(tmp_path, monkeypatch, corpus):
  with pytest.raises(ValueError, match="^model.boundaries.size: expected at most "):
    prepare(corpus, tmp_path / "data", "bytes", boundaries=Unigram(1, size=1000))
  # Before anything is learned.
  monkeypatch.setattr(prepared, "train_tokenizer", lambda *_, **__: 1 / 0)
  with pytest.raises(
    ValueError,
    match="^data.tokenizer: expected characters or bytes with Unigram boundaries, got bpe",
  ):
    prepare(corpus, tmp_path / "data", "bpe", vocab_size=263, boundaries=UNIGRAM)
  assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["train.boundaries.bin", "test.boundaries.bin", "unigram.model"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damage_of_boundaries_is_named(tmp_path, corpus, name, damage):
  prepare(corpus, tmp_path / "data", "characters", boundaries=UNIGRAM)
  file = tmp_path / "data" / name
  content = file.read_bytes()
  file.unlink()
  if damage == "short":
    file.write_bytes(content[:-1])
  with pytest.raises(ValueError, match=f"{name}: expected"):
    open_prepared(tmp_path / "data", boundaries=UNIGRAM).check()


def test_data_of_an_earlier_version_have_no_boundaries(tmp_path, corpus):
  prepare(corpus, tmp_path / "data", "bytes", boundaries=UNIGRAM)
  content = json.loads((tmp_path / "data" / "data.json").read_text())
  assert content["format"] == 1 and content.pop("unigram") is True
  # As an earlier version wrote it.
  (tmp_path / "data" / "data.json").write_text(json.dumps(content))
  for name in ("unigram.model", *(f"{split}.boundaries.bin" for split in SPLITS)):
    (tmp_path / "data" / name).unlink()
  data = open_prepared(tmp_path / "data")
  assert data.boundaries is None and data.tokenizer.kind == "bytes"
