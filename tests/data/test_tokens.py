"""Tokens, boundaries and counts are those of the whole text; damage and changes are named."""

import hashlib
import json
import time

import numpy as np
import pytest

from dpjax import files
from dpjax.data import corpus as corpus_lib
from dpjax.data import encoding
from dpjax.data import tokens as tokens_lib
from dpjax.data.corpus import SPLITS, Chunks, Corpus
from dpjax.data.encoding import Encoder, count_text, map_in_order
from dpjax.data.text import load_corpus
from dpjax.data.tokens import open_tokens, tokenize
from dpjax.errors import UserError
from dpjax.layers import Unigram
from dpjax.text.tokens import train_tokenizer
from dpjax.text.unigram import UnigramBoundaries, train_unigram

TEXTS = {
  "train": "one  two\r\nthree\u2003four \u00e9\n\n five" * 31,
  "valid": "one two\r\n\r\nthree",
  "test": " \nfour\n",
}
UNIGRAM = Unigram(1, size=18)


def write(folder, texts):
  folder.mkdir()
  for split, text in texts.items():
    (folder / f"{split}.txt").write_bytes(text.encode())
  return folder


@pytest.fixture
def corpus(tmp_path):
  return load_corpus(path=write(tmp_path / "texts", TEXTS))


@pytest.mark.parametrize("chunk_bytes", [11, 2**20])
@pytest.mark.parametrize(
  "kind, size", [("characters", 0), ("bytes", 0), ("bpe", 263), ("sentencepiece_bpe", 283)]
)
def test_tokens_are_those_of_the_text(tmp_path, monkeypatch, corpus, chunk_bytes, kind, size):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", chunk_bytes)
  tokens = tokenize(corpus, tmp_path / "tokens", kind, vocab_size=size)
  again = open_tokens(tmp_path / "tokens")
  again.check()
  assert again.counts == tokens.counts and again.name == tokens.name == "texts"
  assert again.tokenizer.to_json() == tokens.tokenizer.to_json()
  for split, text in TEXTS.items():
    ids = tokens.splits[split]
    assert isinstance(ids, np.memmap) and ids.dtype == np.uint16 and not ids.flags.writeable
    assert tokens.tokenizer.decode(ids) == text
    np.testing.assert_array_equal(again.splits[split], ids)
    assert tokens.counts[split] == {
      "tokens": len(ids),
      "characters": len(text),
      "words": len(text.split()) + text.count("\n"),
      "bytes": len(text.encode()),
      "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


@pytest.mark.parametrize("kind, size", [("bpe", 290), ("sentencepiece_unigram", 278)])
def test_subwords_do_not_depend_on_the_parts(monkeypatch, kind, size):
  text = "one two\n\nthree\n  four\n\n\n five \u00e9\n\u00e9\n\u2003six\n" * 23
  encoder = Encoder(train_tokenizer(kind, [text], vocab_size=size))
  expected = encoder.tokenizer.encode(text).tolist()
  for chunk_bytes in range(31, 53):
    monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", chunk_bytes)
    groups = encoder.groups(Chunks.whole(text.encode(), ""))
    found = [encoder(part)[0] for group in groups for part, _ in group]
    assert len(found) > 20 and np.concatenate(found).tolist() == expected


def test_counts_do_not_depend_on_the_parts():
  text = "a bc\n\n  de\tf\u00e9 \u2003g\r\nh i"
  whole = count_text([text])
  assert whole["words"] == 7 + 3
  for first in range(len(text)):
    for second in range(first, len(text)):
      assert count_text([text[:first], text[first:second], text[second:]]) == whole


def test_parts_stay_in_order_and_few_are_held():
  taken, done = [], []

  def parts():
    for i in range(97):
      taken.append(i)
      assert len(taken) - len(done) < 6
      yield i

  def work(i):
    time.sleep(0.002 * (i % 3))
    return -i

  for part, result in map_in_order(work, parts(), 3):
    done.append(result)
    assert part == -result
  assert done == [-i for i in range(97)]


@pytest.mark.parametrize("extra, dtype", [(0, np.uint16), (1, np.int32)])
def test_the_dtype_holds_the_largest_id(tmp_path, monkeypatch, corpus, extra, dtype):
  class Wide(tokens_lib.Tokenizer):
    kind, start_id, lossless, vocab_size = "characters", 0, True, 2**16 + extra
    decode = from_fields = fields = None

    def _encode(self, text):
      return np.full(len(text), self.vocab_size - 1, np.int32)

    def to_json(self):
      return '{"format": 1, "kind": "bytes"}'

  monkeypatch.setattr(tokens_lib, "train_tokenizer", lambda kind, text: Wide())
  tokens = tokenize(corpus, tmp_path / "tokens", "characters")
  assert tokens.splits["test"].dtype == dtype
  assert set(tokens.splits["test"].tolist()) == {2**16 + extra - 1}


def test_tokens_are_made_once(tmp_path, corpus):
  first = tokenize(corpus, tmp_path / "tokens", "bytes", shared=True)
  assert first.folder.parent == tmp_path / "tokens" and first.folder.name.startswith("texts_bytes_")
  made = (first.folder / "train.bin").stat().st_mtime_ns
  again = tokenize(corpus, tmp_path / "tokens", "bytes", shared=True)
  assert again.folder == first.folder
  assert (first.folder / "train.bin").stat().st_mtime_ns == made
  # Others in the same folder replace them; a text that does not say what it is counts as new.
  tokenize(corpus, tmp_path / "own", "bytes")
  assert tokenize(corpus, tmp_path / "own", "characters").tokenizer.kind == "characters"
  nameless = Corpus("mine", {split: [text] for split, text in TEXTS.items()})
  tokenize(nameless, tmp_path / "own", "bytes")
  nameless.splits["train"][0] = TEXTS["train"][::-1]
  tokens = tokenize(nameless, tmp_path / "own", "bytes")
  assert tokens.tokenizer.decode(tokens.splits["train"]) == TEXTS["train"][::-1]


@pytest.mark.parametrize(
  "name", ["n" * 250, "\u6587" * 83, "\udcff" * 250], ids=["ASCII", "UTF-8", "no UTF-8"]
)
def test_a_long_name_is_cut(tmp_path, name):
  corpus = Corpus(name, {split: [text] for split, text in TEXTS.items()})
  tokens = tokenize(corpus, tmp_path / "tokens", "bytes", shared=True)
  assert (tokens.folder / "train.bin").exists() and tokens.name == name


@pytest.mark.parametrize(
  "texts, kind, message",
  [
    ({"train": b"one\ncaf\xe9"}, "characters", "^data.path: .*offset 7 of .*train.txt"),
    ({"train": b"one\ncaf\xe9"}, "sentencepiece_bpe", "^data.path: .*offset 7 of .*train.txt"),
    ({"train": b"one\ncaf\xe9"}, "bpe", "^data.path: .*offset 7 of .*train.txt"),
    ({"valid": b"   "}, "bytes", "^data.path: expected words .*none in the valid "),
    ({"valid": b"   "}, "wordpiece", "^data.path: .*none in the valid split"),
  ],
)
def test_texts_that_cannot_be_tokenized(tmp_path, monkeypatch, corpus, texts, kind, message):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 5)
  for split, content in texts.items():
    (tmp_path / "texts" / f"{split}.txt").write_bytes(content)
  (tmp_path / "vocab.txt").write_text("[UNK]\none\n")
  settings = {"file": str(tmp_path / "vocab.txt")} if kind == "wordpiece" else {"vocab_size": 300}
  with pytest.raises(UserError, match=message):
    tokenize(load_corpus(path=tmp_path / "texts"), tmp_path / "tokens", kind, **settings)
  assert not (tmp_path / "tokens").exists()


@pytest.fixture
def made(tmp_path, corpus):
  """A folder of tokens with boundaries."""
  tokenize(corpus, tmp_path / "tokens", "characters", boundaries=UNIGRAM)
  return tmp_path / "tokens"


@pytest.mark.parametrize(
  "name", "train.bin test.bin tokenizer.json data.json valid.boundaries.bin unigram.model".split()
)
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damage_is_named(made, name, damage):
  content = (made / name).read_bytes()
  (made / name).unlink()
  if damage == "short":
    (made / name).write_bytes(content[:-3])
  with pytest.raises(UserError, match=f"{name}: expected"):
    open_tokens(made, boundaries=UNIGRAM).check()


@pytest.mark.parametrize(
  "change, message",
  [
    ({"dtype": "bits"}, "the counts of tokens, got damaged JSON"),
    ({"splits": dict.fromkeys(SPLITS, {"tokens": 3})}, "the counts of tokens, got damaged JSON"),
    ({"checksums": 5}, "the counts of tokens, got damaged JSON"),
    ({"format": 2}, "format 1, got 2"),
  ],
)
def test_a_damaged_record(made, change, message):
  content = json.loads((made / "data.json").read_text())
  (made / "data.json").write_text(json.dumps({**content, **change}))
  with pytest.raises(UserError, match=f"data.json: expected {message}"):
    open_tokens(made)


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "valid.boundaries.bin"])
def test_a_changed_file_is_found_when_it_is_checked(made, name):
  content = bytearray((made / name).read_bytes())
  split, *_ = name.split(".")
  for place in (0, -2):  # An id, or a boundary, becomes another one that is valid.
    content[place] ^= 1
    (made / name).write_bytes(content)
    tokens = open_tokens(made)
    for splits in ((), (split,)):
      with pytest.raises(UserError, match=f"^{made / name}: .* changed; .* remove {made}, "):
        tokens.check(*splits)
    tokens.check(*TEXTS.keys() - {split})
    content[place] ^= 1
  (made / name).write_bytes(content)
  open_tokens(made).check()


@pytest.mark.parametrize("chunk_bytes", [11, 2**20])
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_boundaries_are_those_of_the_text(tmp_path, monkeypatch, corpus, chunk_bytes, kind):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", chunk_bytes)  # 11: words are cut
  tokens = tokenize(corpus, tmp_path / "tokens", kind, boundaries=UNIGRAM)
  model = train_unigram(corpus.splits["train"], 18)
  unigram, again = UnigramBoundaries(model), open_tokens(tmp_path / "tokens", boundaries=UNIGRAM)
  assert again.learned == tokens.learned == model
  for split, text in TEXTS.items():
    found = tokens.boundaries[split]
    assert isinstance(found, np.memmap) and found.dtype == np.uint8
    np.testing.assert_array_equal(found, unigram.of_tokens(text, tokens.tokenizer))
    np.testing.assert_array_equal(found, again.boundaries[split])
    spaces = np.isin(tokens.splits[split], tokens.tokenizer.space_ids)
    assert found[spaces].all() and spaces.sum() == text.count(" ") + text.count("\n")
  np.testing.assert_array_equal(again.segment(TEXTS["valid"]), tokens.boundaries["valid"])
  assert 0.1 < tokens.segment("onetwothree").mean() < 1


@pytest.mark.parametrize(
  "kind, boundaries, message",
  [
    ("bytes", Unigram(1, file="none.model"), "model.boundaries.file: .*none.model"),
    ("bytes", Unigram(1, size=1000), "model.boundaries.size: expected at most "),
    ("bpe", UNIGRAM, "data.tokenizer: expected characters or bytes with Unigram .*, got bpe"),
  ],
)
def test_boundaries_that_cannot_be_had(tmp_path, monkeypatch, corpus, kind, boundaries, message):
  if kind == "bpe":  # before anything is learned
    monkeypatch.setattr(tokens_lib, "train_tokenizer", lambda *_, **__: 1 / 0)
  with pytest.raises(UserError, match=f"^{message}"):
    tokenize(corpus, tmp_path / "tokens", kind, boundaries=boundaries)
  assert not (tmp_path / "tokens").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, corpus):
  def fail(path, content):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(files, "write_json", fail)
    with pytest.raises(UserError, match="data.data_dir: .*No space left"):
      tokenize(corpus, tmp_path / "tokens", "bytes")
  assert [path.name for path in tmp_path.glob("tokens*")] == ["tokens.lock"]
  tokens = tokenize(corpus, tmp_path / "tokens", "bytes")
  assert bytes(tokens.splits["train"].astype(np.uint8)) == TEXTS["train"].encode()
  assert sorted(path.name for path in tokens.folder.iterdir()) == [
    *("data.json", "test.bin", "tokenizer.json", "train.bin", "valid.bin")
  ]


def test_without_a_terminal_there_is_no_bar(corpus, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(encoding, "LARGE_BYTES", 1)
  tokenize(corpus, tmp_path / "tokens", "characters")
  assert capsys.readouterr() == ("", "")
