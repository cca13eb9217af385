"""Tokens, documents, boundaries and counts of a text; resuming; damage and changes are named."""

import hashlib
import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from dpjax import files
from dpjax.data import encoding, text_file, token_files
from dpjax.data.encoding import count_text, encode_text, tokenize
from dpjax.data.sources import Corpus
from dpjax.data.text_file import SPLITS, TextFile
from dpjax.data.token_files import Encoder, open_tokens
from dpjax.errors import UserError
from dpjax.layers import Unigram
from dpjax.text.tokenizer import train_tokenizer
from dpjax.text.unigram import UnigramBoundaries, train_unigram
from tests import helpers

TEXTS = {
  "train": "one  two\r\nthree\u2003four \u00e9\n\n five" * 31,
  "valid": "one two\r\n\r\nthree",
  "test": " \nfour\n",
}
UNIGRAM = Unigram(1, size=18).text_boundaries


def write(folder, texts):
  folder.mkdir()
  for split, text in texts.items():
    (folder / f"{split}.txt").write_bytes(text.encode())
  return folder


@pytest.fixture
def corpus(tmp_path):
  return helpers.load_corpus(path=write(tmp_path / "texts", TEXTS))


@pytest.mark.parametrize(
  "variant, chunk_bytes", [("bytes", 2**20), ("characters", 11), ("sentencepiece_bpe", 11)]
)
def test_tokens_are_those_of_the_text(tmp_path, monkeypatch, corpus, variant, chunk_bytes):
  monkeypatch.setattr(text_file, "CHUNK_BYTES", chunk_bytes)
  tokens = tokenize(corpus, tmp_path / "tokens", variant, **helpers.vocabulary(variant, 283))
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


@pytest.mark.parametrize("variant, size", [("bpe", 290), ("sentencepiece_unigram", 278)])
def test_subwords_do_not_depend_on_the_chunks(tmp_path, monkeypatch, variant, size):
  text = "one two\n\nthree\n  four\n\n\n five \u00e9\n\u00e9\n\u2003six\n" * 23
  (tmp_path / "a.txt").write_bytes(text.encode())
  encoder = Encoder(train_tokenizer(variant, [text], **helpers.vocabulary(variant, size)))
  expected = encoder.tokenizer.encode(text).tolist()
  for chunk_bytes in range(31, 53, 2):
    monkeypatch.setattr(text_file, "CHUNK_BYTES", chunk_bytes)
    parts = [encoder(part)[0] for part in TextFile(tmp_path / "a.txt", 0, len(text.encode()))]
    assert len(parts) > 20 and np.concatenate(parts).tolist() == expected


def test_counts_do_not_depend_on_the_parts():
  text = "a bc\n\n  de\tf\u00e9 \u2003g\r\nh i"
  whole = count_text([text], 7)
  assert whole["words"] == 7 + 3
  for first in range(len(text)):
    for second in range(first, len(text)):
      parts = [text[:first], text[first:second], text[second:]]
      assert count_text(parts, 7) == whole


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_the_dtype_holds_the_largest_id(vocab_size, dtype):
  tokenizer = train_tokenizer("bytes", [])
  tokenizer.vocab_size = vocab_size
  assert Encoder(tokenizer)("text")[0].dtype == dtype


def test_other_tokens_replace_those_in_a_folder(tmp_path, corpus):
  tokenize(corpus, tmp_path / "own", "bytes")
  assert tokenize(corpus, tmp_path / "own", "characters").tokenizer.name == "characters"
  # A text that does not say what it is counts as new.
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
  "split, content, variant, message",
  [
    ("train", b"one\ncaf\xe9", "characters", "^data.path: .*offset 7 of .*train.txt"),
    ("train", b"one\ncaf\xe9", "sentencepiece_bpe", "^data.path: .*offset 7 of .*train.txt"),
    ("valid", b"   ", "bytes", "^data.path: expected words .*none in the valid "),
  ],
)
def test_texts_that_cannot_be_tokenized(
  tmp_path, monkeypatch, corpus, split, content, variant, message
):
  monkeypatch.setattr(text_file, "CHUNK_BYTES", 5)
  (tmp_path / "texts" / f"{split}.txt").write_bytes(content)
  with pytest.raises(UserError, match=message):
    corpus = helpers.load_corpus(path=tmp_path / "texts")
    tokenize(corpus, tmp_path / "tokens", variant, **helpers.vocabulary(variant, 300))
  assert not (tmp_path / "tokens").exists()


@pytest.fixture
def made(tmp_path, corpus):
  """A folder of tokens with boundaries."""
  tokenize(corpus, tmp_path / "tokens", "characters", boundaries=UNIGRAM)
  return tmp_path / "tokens"


FILES = "train.bin tokenizer.json data.json valid.boundaries.bin unigram.model".split()
DAMAGES = [*itertools.product(FILES, ("missing", "short"))]
DAMAGES += [("train.bin", "changed"), ("valid.boundaries.bin", "changed")]


@pytest.mark.parametrize("name, damage", DAMAGES)
def test_damage_is_named(made, name, damage):
  content = bytearray((made / name).read_bytes())
  if damage == "changed":
    content[-2] ^= 1  # An id, or a boundary, becomes another one that is valid.
  (made / name).unlink()
  if damage != "missing":
    (made / name).write_bytes(content if damage == "changed" else content[:-3])
  with pytest.raises(UserError, match=f"{name}: expected"):
    open_tokens(made, boundaries=UNIGRAM).check()


@pytest.mark.parametrize(
  "change, message",
  [
    (
      {"splits": dict.fromkeys(SPLITS, dict(tokens=3, characters=5.5, words=1, bytes=5))},
      "the counts of tokens, got damaged JSON .*5.5 characters",
    ),
    ({"splits": dict.fromkeys(SPLITS, {"tokens": 3})}, "the counts of tokens, got damaged JSON"),
    ({"format": 2}, "format 1, got 2"),
  ],
)
def test_a_damaged_record(made, change, message):
  content = json.loads((made / "data.json").read_text())
  (made / "data.json").write_text(json.dumps({**content, **change}))
  with pytest.raises(UserError, match=f"data.json: expected {message}"):
    open_tokens(made)


@pytest.mark.parametrize("dtype", ["float16", ">u2", "V2", "S2", "bits"])
def test_the_tokenizer_determines_the_dtype_of_tokens(made, dtype):
  expected = open_tokens(made).splits["train"]
  content = json.loads((made / "data.json").read_text())
  (made / "data.json").write_text(json.dumps({**content, "dtype": dtype}))
  tokens = open_tokens(made).splits["train"]
  np.testing.assert_array_equal(tokens, expected, strict=True)


@pytest.mark.parametrize("variant, chunk_bytes", [("characters", 17), ("bytes", 2**20)])
def test_boundaries_are_those_of_the_text(tmp_path, monkeypatch, corpus, variant, chunk_bytes):
  monkeypatch.setattr(text_file, "CHUNK_BYTES", chunk_bytes)
  tokens = tokenize(corpus, tmp_path / "tokens", variant, boundaries=UNIGRAM)
  model = train_unigram(corpus.splits["train"], 18)
  unigram, again = UnigramBoundaries(model), open_tokens(tmp_path / "tokens", boundaries=UNIGRAM)
  assert again.fitted == tokens.fitted == model
  for split, text in TEXTS.items():
    actual = tokens.boundaries[split]
    assert isinstance(actual, np.memmap) and actual.dtype == np.uint8
    np.testing.assert_array_equal(actual, unigram.of_tokens(text, tokens.tokenizer))
    np.testing.assert_array_equal(actual, again.boundaries[split])
    spaces = np.isin(tokens.splits[split], tokens.tokenizer.space_ids)
    assert actual[spaces].all() and spaces.sum() == text.count(" ") + text.count("\n")
  np.testing.assert_array_equal(again.segment(TEXTS["valid"]), tokens.boundaries["valid"])
  assert 0.1 < tokens.segment("onetwothree").mean() < 1


def test_boundaries_that_cannot_be_had(tmp_path, monkeypatch, corpus):
  large = Unigram(1, size=1000).text_boundaries
  with pytest.raises(UserError, match="^model.boundaries.size: expected at most "):
    tokenize(corpus, tmp_path / "tokens", "bytes", boundaries=large)
  monkeypatch.setattr(encoding, "train_tokenizer", lambda *_, **__: 1 / 0)  # nothing is learned
  with pytest.raises(UserError, match="^data.tokenizer: expected characters or bytes .*, got bpe"):
    tokenize(corpus, tmp_path / "tokens", "bpe", boundaries=UNIGRAM)
  assert not (tmp_path / "tokens").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, corpus):
  def fail(path, content):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(files, "write_json", fail)
    with pytest.raises(UserError, match="data.data_dir: .*No space left"):
      tokenize(corpus, tmp_path / "tokens", "bytes")
  assert not (tmp_path / "tokens").exists() and not (tmp_path / "tokens.partial").exists()
  tokens = tokenize(corpus, tmp_path / "tokens", "bytes")
  assert sorted(path.name for path in tmp_path.glob("tokens*")) == ["tokens", "tokens.lock"]
  assert tokens.tokenizer.decode(tokens.splits["train"]) == TEXTS["train"]


def test_without_a_terminal_there_is_no_bar(corpus, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(encoding, "LARGE_BYTES", 1)
  tokenize(corpus, tmp_path / "tokens", "characters")
  assert capsys.readouterr() == ("", "")


# Of different lengths; some begin with white space or are one letter.
DOCUMENTS = [
  *("one two\n", "  three four five\n", "s\n", "six\n\n", "\n seven \u00e9ight\n", "nine\nten\n"),
  *("eleven twelve thirteen\n", "\u4e00\u4e8c\n", "fourteen\n", "a b c d e\n", "fifteen\n", "x\n"),
]


def write_records(path, texts):
  path.write_text("\n".join(json.dumps({"text": x}) for x in texts))
  return path


@pytest.mark.parametrize(
  "variant, size, chunk_bytes", [("characters", 0, 7), ("bpe", 270, 29), ("wordpiece", 67, 2**20)]
)
def test_tokens_are_those_of_each_alone(tmp_path, monkeypatch, variant, size, chunk_bytes):
  folder = tmp_path / "texts"
  folder.mkdir()
  texts = {"train": DOCUMENTS * 7, "valid": DOCUMENTS[3:], "test": DOCUMENTS[:4]}
  for split, content in texts.items():
    write_records(folder / f"{split}.jsonl", content)
  tokenizer = train_tokenizer(variant, DOCUMENTS * 7, **helpers.vocabulary(variant, size))
  monkeypatch.setattr(text_file, "CHUNK_BYTES", chunk_bytes)
  data = tokenize(helpers.load_corpus(path=folder, data_dir=tmp_path), tmp_path / "data", tokenizer)
  for split, content in texts.items():
    begins, tokens = data.documents[split], data.splits[split]
    assert begins.dtype == np.int64 and isinstance(begins, np.memmap)
    alone = [tokenizer.encode(text).tolist() for text in content]
    assert [x.tolist() for x in np.split(tokens, begins[1:])] == alone
    assert data.counts[split]["documents"] == len(begins)
    text = "".join(content)
    assert data.counts[split]["characters"] == len(text)
    assert data.counts[split]["words"] == len(text.split()) + text.count("\n")
  data.check()


def test_a_document_without_tokens_is_none(tmp_path):
  texts = ["  \n", "b\n", "  \n a b\n", "a\n", "   "]
  write_records(tmp_path / "a.jsonl", texts)
  text = helpers.load_corpus(
    path=tmp_path / "a.jsonl", data_dir=tmp_path, split_fractions=(0.4, 0.4, 0.2)
  )
  train = text.splits["train"]
  full = TextFile(train.path, 0, train.path.stat().st_size, train.offsets)
  assert [*full] == [*texts[:-1], "   \n"]

  class Letters(token_files.Tokenizer):
    name, start_id, lossless, vocab_size = "characters", 0, False, 3
    decode = from_fields = None

    def _encode(self, text):
      return np.array([" ab".index(x) for x in text if x in "ab"], np.int32)

  result = encode_text(full, Encoder(Letters()), tmp_path, "train", tmp_path)
  assert np.fromfile(tmp_path / "train.bin", np.uint16).tolist() == [2, 1, 2, 1]
  assert np.fromfile(tmp_path / "train.documents.bin", np.int64).tolist() == [0, 1, 3]
  assert (result["tokens"], result["documents"]) == (4, 3)


def test_joined_marks_leave_the_tokens_as_they_were(tmp_path):
  (tmp_path / "b.txt").write_text("--\n".join(DOCUMENTS * 9), encoding="utf-8")
  plain, joined, isolated = (
    tokenize(
      helpers.load_corpus(path=tmp_path / "b.txt", **settings), tmp_path, "bytes", shared=True
    )
    for settings in ({}, dict(separator="--"), dict(separator="--", isolate_documents=True))
  )
  assert plain.folder == joined.folder != isolated.folder and joined.documents is None
  for split in SPLITS:
    np.testing.assert_array_equal(joined.splits[split], isolated.splits[split])


OF_RECORDS = Unigram(1, size=27).text_boundaries


@pytest.fixture
def records(tmp_path, monkeypatch):
  """Of several shards."""
  monkeypatch.setattr(text_file, "CHUNK_BYTES", 97)
  monkeypatch.setattr(encoding, "SHARD_SIZE", 1000)
  texts = [f"Text {i} is\n{'long ' * (i % 13)}and ends." for i in range(400)] + [""]
  write_records(tmp_path / "reversed.jsonl", [x[::-1] for x in texts])
  path = write_records(tmp_path / "texts.jsonl", texts)
  return helpers.load_corpus(path=path, split_fractions=(0.6, 0.2, 0.2), data_dir=tmp_path)


def content(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_stopped(monkeypatch, number, *arguments, **options):
  """Tokenizes until a number of parts is encoded; whether there are more of them."""
  count, encode = itertools.count(), Encoder.__call__

  def encode_or_stop(self, part):
    if next(count) >= number:
      raise KeyboardInterrupt
    return encode(self, part)

  with monkeypatch.context() as patch:
    patch.setattr(Encoder, "__call__", encode_or_stop)
    try:
      tokenize(*arguments, **options)
    except KeyboardInterrupt:
      return True
    return False


@pytest.mark.parametrize("variant, boundaries", [("bpe", None), ("characters", OF_RECORDS)])
def test_it_resumes_where_it_was_stopped(tmp_path, records, monkeypatch, variant, boundaries):
  options = dict(boundaries=boundaries, **helpers.vocabulary(variant, 300))
  tokenize(records, tmp_path / "once", variant, **options)
  stops, parts = 0, tmp_path / "parts"
  # Any two runs are stopped in other shards.
  while is_stopped(monkeypatch, 57, records, parts, variant, **options):
    assert [*(tmp_path / "parts.shards").glob("*.npz")] and not parts.exists()
    monkeypatch.setattr(
      encoding._Recipe, "_train", lambda *_: 1 / 0
    )  # The vocabulary is kept, too.
    stops += 1
    assert stops < 49
  assert stops > 5 and content(parts) == content(tmp_path / "once")
  assert not (tmp_path / "parts.partial").exists() and not (tmp_path / "parts.shards").exists()


def test_another_text_begins_from_scratch(tmp_path, records, monkeypatch):
  folder, again = tmp_path / "tokens", tmp_path / "again"
  assert is_stopped(monkeypatch, 150, records, folder, "bytes", boundaries=OF_RECORDS)
  # Of other settings, nothing is left over; of the same, the text may have changed nevertheless.
  tokens = tokenize(records, folder, "bytes")
  assert not (folder / "train.boundaries.bin").exists() and not (folder / "unigram.model").exists()
  text = "".join(records.splits["train"])
  assert tokens.tokenizer.decode(tokens.splits["train"]) == text
  assert is_stopped(monkeypatch, 150, records, again, "bytes")
  path = records.splits["train"].path
  path.write_text(path.read_text().replace("Text 7 ", "Text 8 "))
  tokens = tokenize(records, again, "bytes")
  assert tokens.tokenizer.decode(tokens.splits["train"]) == text.replace("Text 7 ", "Text 8 ")


def test_sources_and_documents_resume(tmp_path, records, monkeypatch):
  mixture = f"{tmp_path}/texts.jsonl=1,{tmp_path}/reversed.jsonl=2"
  mixed = helpers.load_corpus(mixture=mixture, isolate_documents=True, data_dir=tmp_path)
  once = tokenize(mixed, tmp_path / "once", "bytes")
  for number in (200, 250):
    assert is_stopped(monkeypatch, number, mixed, tmp_path / "parts", "bytes")
  parts = tokenize(mixed, tmp_path / "parts", "bytes")
  assert parts.counts == once.counts and content(parts.folder) == content(once.folder)
  assert np.all(np.diff(parts.documents["train"]) > 0)


SCRIPT = """
import resource, sys
from dpjax.data import encoding
from dpjax.data.sources import load_corpus
encoding.SHARD_SIZE = 2**22
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = load_corpus(sys.argv[1], data_dir=sys.argv[3])
tokens = encoding.tokenize(corpus, sys.argv[2], "bytes")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin, tokens.counts["train"]["sha256"])
"""


def run(*arguments):
  command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
  return subprocess.Popen(command, cwd=helpers.ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_process_is_followed_by_another_in_little_memory(tmp_path):
  path, line = tmp_path / "big.jsonl", json.dumps({"text": "A line of some words. " * 40}) + "\n"
  path.write_text("".join(line.replace("some", f"{i}") * 1000 for i in range(100)))
  process = run(path, tmp_path / "tokens", tmp_path)
  while len([*tmp_path.glob("tokens.shards/train-*.npz")]) < 5:
    assert process.poll() is None
    time.sleep(0.01)
  process.kill()
  process.wait()
  results = [run(path, tmp_path / x, tmp_path).communicate()[0] for x in ("tokens", "once")]
  (grown, digest), (again, expected) = map(str.split, results)
  assert digest == expected and content(tmp_path / "tokens") == content(tmp_path / "once")
  # Of a mapped file, all would count.
  assert max(int(grown), int(again)) < path.stat().st_size / 1024 / 2
