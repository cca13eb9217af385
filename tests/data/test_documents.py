"""Texts made of documents: each form of them, and where in the tokens they begin."""

import gzip
import json
import lzma

import numpy as np
import pytest

from dpjax import files
from dpjax.data import catalog
from dpjax.data import corpus as corpus_lib
from dpjax.data import tokens as tokens_lib
from dpjax.data.corpus import Chunks
from dpjax.data.encoding import Encoder, encode_text
from dpjax.data.sources.source import Source
from dpjax.data.text import load_corpus
from dpjax.errors import UserError
from dpjax.text.tokens import train_tokenizer

# Of different lengths; some end without a line end, begin with white space or are one letter.
TEXTS = [
  *("one two\n", "  three four five", "s", "six\n\n", "\n seven \u00e9ight\n", "nine\nten\n"),
  *("eleven twelve thirteen", "\u4e00\u4e8c\n", "fourteen\n", "a b c d e", "fifteen\n", "x"),
]
WHOLE = [text if text.endswith("\n") else text + "\n" for text in TEXTS]
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def found(text):
  return ["".join(document) for document in text.documents()]


def all_found(corpus):
  return {split: found(text) for split, text in corpus.splits.items()}


def in_order(splits):
  return [document for split in corpus_lib.SPLITS for document in splits[split]]


def as_json(texts, field="text"):
  # Escaped and not, with other fields, and with blank lines between.
  lines = [json.dumps({"n": i, field: x}, ensure_ascii=i % 2 == 0) for i, x in enumerate(texts)]
  return "\n \n".join(lines).encode()


@pytest.fixture(params=["", ".gz", ".xz"])
def packing(request):
  return request.param


@pytest.fixture(params=[b"", corpus_lib.BYTE_ORDER_MARK], ids=["", "mark"])
def mark(request):
  return request.param


@pytest.mark.parametrize("how", ["joined", "isolated"])
def test_json_lines(tmp_path, packing, mark, how):
  path = tmp_path / f"texts.jsonl{packing}"
  path.write_bytes(PACKERS[packing](mark + as_json(["", *TEXTS], "body") + b"\n"))
  settings = dict(text_field="body", data_dir=tmp_path / "data", documents=how)
  corpus = load_corpus(path=path, split_fractions=(0.5, 0.2, 0.3), **settings)
  splits = all_found(corpus)
  assert in_order(splits) == WHOLE and all(splits.values())
  assert corpus.name == "texts" and len("".join(corpus.splits["train"])) == len(
    "".join(splits["train"])
  )
  assert all_found(corpus) == splits  # again


def test_json_lines_of_splits(tmp_path, packing):
  names = {"train": "train", "valid": "validation", "test": "test"}
  for i, stem in enumerate(names.values()):
    (tmp_path / f"{stem}.jsonl{packing}").write_bytes(PACKERS[packing](as_json(TEXTS[i::3])))
  corpus = load_corpus(path=tmp_path, documents="isolated", data_dir=tmp_path / "data")
  assert all_found(corpus) == {split: WHOLE[i::3] for i, split in enumerate(names)}


def test_a_folder_of_files(tmp_path, packing, mark):
  folder = tmp_path / "mine"
  for i, text in enumerate(TEXTS):
    place = folder / ("b" if i > 6 else "a")
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{i:02}.txt{packing}").write_bytes(PACKERS[packing](mark + text.encode()))
  (folder / "a" / "03x.txt").write_bytes(b"")  # empty: no document
  (folder / "README.md").write_bytes(b"no text")
  for how in ("joined", "isolated"):
    corpus = load_corpus(path=folder, documents=how, split_fractions=(0.6, 0.2, 0.2))
    splits = all_found(corpus)
    assert in_order(splits) == WHOLE and all(splits.values())
    assert corpus.name == "mine"
  if not packing and not mark:  # as many whole files as fit
    ends = np.cumsum([len(text.encode()) for text in TEXTS])
    num_files = np.searchsorted(ends, ends[-1] * np.array([0.6, 0.8]), "right")
    assert np.cumsum([len(splits["train"]), len(splits["valid"])]).tolist() == num_files.tolist()
  for split in ("train", "valid", "test"):
    (folder / split).mkdir()
    (folder / split / f"x.txt{packing}").write_bytes(PACKERS[packing](split.encode()))
  corpus = load_corpus(path=folder)
  assert all_found(corpus) == {x: [f"{x}\n"] for x in corpus_lib.SPLITS}
  (folder / "valid" / f"x.txt{packing}").unlink()
  with pytest.raises(UserError, match="^data.path: expected .txt files, each a document.*valid$"):
    load_corpus(path=folder)


@pytest.mark.parametrize("separator", ["<|end of book|>", "***", "--", " = "])
def test_a_line_between(tmp_path, packing, mark, separator):
  content = f"{separator}\n".join(WHOLE)
  (tmp_path / "texts").mkdir()
  path = tmp_path / "texts" / f"books.txt{packing}"
  path.write_bytes(PACKERS[packing](mark + content.encode()))
  for split in corpus_lib.SPLITS:
    (path.parent / f"{split}.txt{packing}").write_bytes(path.read_bytes())
  settings = dict(separator=separator, data_dir=tmp_path / "data")
  corpus = load_corpus(path=path.parent, documents="isolated", **settings)
  expected = [f"{text}{separator}\n" for text in WHOLE[:-1]] + WHOLE[-1:]
  assert all_found(corpus) == dict.fromkeys(corpus_lib.SPLITS, expected)
  # One file is cut where it is cut when joined; a document on the cut becomes two.
  splits = {}
  for how in ("joined", "isolated"):
    corpus = load_corpus(path=path, documents=how, split_fractions=(0.5, 0.2, 0.3), **settings)
    splits[how] = {split: "".join(text) for split, text in corpus.splits.items()}
  assert splits["joined"] == splits["isolated"]
  assert "".join(in_order(all_found(corpus))) == content
  assert isinstance(load_corpus(path=path, **settings).splits["train"], Chunks)


def test_lines_with_carriage_returns(tmp_path):
  text = Chunks(b"one\r\n--\r\ntwo --\n--\nthree\n--", 0, 27, "")
  marked = corpus_lib.Marked(text, corpus_lib.line_pattern("--"))
  assert found(marked) == ["one\r\n--\r\n", "two --\n--\n", "three\n--"]


MARKS = {
  "childrens_books": ["A\nb\n<|endofbook|>\n", "C <|endofbook|>\n<|endofbook|>\n", "D\n"],
  "openwebtext": ["A\n\nb\n<|endoftext|>\n", "C\n<|endoftext|>\n"],
  "wiki40b": [
    "\n_START_ARTICLE_\nAhti\n_START_PARAGRAPH_\nAhti on",
    "\n_START_ARTICLE_\nB\n_START_SECTION_\nC",
  ],
  "wikitext2": [
    " \n = Homarus = \n \n It = x = \n \n = = A = = \n \n = 3 \n \n",
    " = A = B = \n \n c = \n \n",
    " = C ( D ) = \n \n e \n",
  ],
  "cc100": ["a\nb\n\n", "c\n\n", "\nd\ne\n\n"],
  "lm1b": ["A sentence .\n", "b .\n", "c .\n"],
}


@pytest.mark.parametrize("name", MARKS)
def test_corpora_that_have_a_name(tmp_path, name):
  language = "fi" if catalog.ENTRIES[name].languages else ""
  folder = tmp_path / "manual" / name / language
  folder.mkdir(parents=True)
  for split in corpus_lib.SPLITS:
    (folder / f"{split}.txt").write_bytes("".join(MARKS[name]).encode())
  settings = dict(language=language, data_dir=tmp_path, manual_dir=tmp_path / "manual")
  corpus = load_corpus(name, documents="isolated", **settings)
  assert all_found(corpus) == dict.fromkeys(corpus_lib.SPLITS, MARKS[name])
  joined = load_corpus(name, **settings)
  assert corpus.about == {**joined.about, "documents": catalog.ENTRIES[name].documents}
  assert [*joined.splits["train"]] == [*corpus.splits["train"]]


@pytest.mark.parametrize(
  "kind, size, chunk_bytes",
  [
    *(("characters", 0, 7), ("bytes", 0, 7), ("bytes", 0, 2**20), ("bpe", 270, 29)),
    *(("bpe", 270, 2**20), ("sentencepiece_bpe", 290, 29), ("wordpiece", 67, 29)),
  ],
)
def test_tokens_are_those_of_each_alone(tmp_path, monkeypatch, kind, size, chunk_bytes):
  folder = tmp_path / "texts"
  folder.mkdir()
  texts = {"train": WHOLE * 7, "valid": WHOLE[3:], "test": WHOLE[:4]}
  for split, content in texts.items():
    (folder / f"{split}.jsonl").write_bytes(as_json(content))
  corpus = load_corpus(path=folder)
  whole = tokens_lib.tokenize(corpus, tmp_path / "whole", kind, vocab_size=size)
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", chunk_bytes)
  monkeypatch.setattr(tokens_lib, "train_tokenizer", lambda *_, **__: whole.tokenizer)
  data = tokens_lib.tokenize(corpus, tmp_path / "data", kind)
  assert data.documents is not None
  for split, content in texts.items():
    begins, tokens = data.documents[split], data.splits[split]
    assert begins.dtype == np.int64 and isinstance(begins, np.memmap)
    alone = [whole.tokenizer.encode(text) for text in content]
    pieces = np.split(tokens, begins[1:])
    assert [x.tolist() for x in pieces] == [x.tolist() for x in alone]
    assert data.counts[split]["documents"] == len(begins)
    text = "".join(content)
    assert data.counts[split]["characters"] == len(text)
    assert data.counts[split]["words"] == len(text.split()) + text.count("\n")
  data.check()


def test_a_document_without_tokens_is_none(tmp_path):
  class Blank(corpus_lib.Documents):
    def __len__(self):
      return 0

    def documents(self):
      return iter([["  "], ["b"], [" ", " a b"], [""], ["a"], ["  "]])

  (tmp_path / "vocab.txt").write_text("[UNK]\na\nb\n")
  tokenizer = train_tokenizer("wordpiece", (), file=str(tmp_path / "vocab.txt"))
  result = encode_text(Blank(), 0, Encoder(tokenizer), tmp_path, "train")
  assert np.fromfile(tmp_path / "train.bin", np.uint16).tolist() == [2, 1, 2, 1]
  assert np.fromfile(tmp_path / "train.documents.bin", np.int64).tolist() == [0, 1, 3]
  assert (result["tokens"], result["documents"]) == (4, 3)


def test_joined_marks_leave_the_tokens_as_they_were(tmp_path):
  (tmp_path / "b.txt").write_text("--\n".join(WHOLE * 9), encoding="utf-8")
  made = {}
  for how in ("joined", "isolated"):
    corpus = load_corpus(path=tmp_path / "b.txt", documents=how, separator="--")
    made[how] = tokens_lib.tokenize(corpus, tmp_path / "tokens", "characters", shared=True)
  plain = load_corpus(path=tmp_path / "b.txt")
  again = tokens_lib.tokenize(plain, tmp_path / "tokens", "characters", shared=True)
  assert again.folder == made["joined"].folder
  assert made["joined"].folder != made["isolated"].folder
  assert made["joined"].documents is None and "documents" not in made["joined"].counts["train"]
  assert not [*made["joined"].folder.glob("*.documents.bin")]
  for split in corpus_lib.SPLITS:
    np.testing.assert_array_equal(made["joined"].splits[split], made["isolated"].splits[split])


def test_a_kill_in_the_middle_and_damage(tmp_path, monkeypatch):
  (tmp_path / "x.jsonl").write_bytes(as_json(TEXTS * 3))
  corpus = load_corpus(path=tmp_path / "x.jsonl", split_fractions=(0.5, 0.3, 0.2))
  expected = tokens_lib.tokenize(corpus, tmp_path / "expected", "bytes")

  def fail(path, content):
    if path.name == "valid.json":
      raise KeyboardInterrupt
    written(path, content)

  written = files.write_json
  with monkeypatch.context() as patch:
    patch.setattr(files, "write_json", fail)
    with pytest.raises(KeyboardInterrupt):
      tokens_lib.tokenize(corpus, tmp_path / "data", "bytes")
  left = tmp_path / "data.partial"
  assert (left / "train.json").exists() and (left / "valid.documents.bin").exists()
  with monkeypatch.context() as patch:  # train is not read again
    train = corpus.splits["train"]
    read = type(train).documents
    patch.setattr(type(train), "documents", lambda text: 1 / 0 if text == train else read(text))
    data = tokens_lib.tokenize(corpus, tmp_path / "data", "bytes")
  for split in corpus_lib.SPLITS:
    np.testing.assert_array_equal(data.documents[split], expected.documents[split])
    np.testing.assert_array_equal(data.splits[split], expected.splits[split])
  file = data.folder / "test.documents.bin"
  content = file.read_bytes()
  file.write_bytes(content[:-8] + np.int64(3).tobytes())
  with pytest.raises(UserError, match="test.documents.bin: expected what was prepared"):
    tokens_lib.open_tokens(tmp_path / "data").check()
  file.write_bytes(content[:-8])
  opened = tokens_lib.open_tokens(tmp_path / "data")
  assert not opened.has_tokens
  with pytest.raises(UserError, match=f"test.documents.bin: expected {len(content)} bytes"):
    opened.check("test")


def test_memory_does_not_grow_with_the_text(monkeypatch):
  """A few documents are held at a time, whatever their number."""
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 101)

  class Many(corpus_lib.Documents):
    def __len__(self):
      return 0

    def documents(self):
      for i in range(10_000):
        yield [f"document {i}\n"]

  sizes = [len(group) for group in Encoder(train_tokenizer("bytes", ())).groups(Many())]
  assert sum(sizes) == 10_000 and max(sizes) < 11


WITHOUT = "^data.documents: expected joined for {}, which does not say where documents begin"


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(path="a.txt"), WITHOUT.format("a")),
    (dict(), WITHOUT.format("python_manual")),
    (dict(name="penn_treebank"), WITHOUT.format("penn_treebank")),
    (dict(path="a.txt", separator="--", clean=True, language="en"), WITHOUT.format("a")),
    (dict(path="a.jsonl", max_characters=(9, 9, 9)), "^data.max_characters: expected .0, 0, 0."),
    (dict(path="a.txt", separator="-- --"), "data.separator: expected a text with marks"),
    (dict(path="a.txt", text_field="body"), "^data.text_field: expected 'text' unless .* 'body'"),
    (dict(path="a.jsonl", separator="--"), "^data.separator: expected '' unless data.path"),
    (dict(separator="--"), "^data.separator: expected '' unless data.path"),
    (dict(path="few"), "^data.path: expected files for three splits, each a document, got 2"),
    (dict(path="a.txt.gz"), "a.txt.gz: expected a text in UTF-8, got"),
    (dict(path="b.jsonl"), "^data.path: .*long enough for three splits"),
  ],
)
def test_refusals(tmp_path, monkeypatch, settings, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.txt").write_text("--\n".join(WHOLE * 3))
  (tmp_path / "a.txt.gz").write_bytes(b"no archive")
  (tmp_path / "a.jsonl").write_bytes(as_json(TEXTS))
  (tmp_path / "b.jsonl").write_bytes(as_json(TEXTS[:1]))
  for name in "xy":
    (tmp_path / "few").mkdir(exist_ok=True)
    (tmp_path / "few" / f"{name}.txt").write_text(name)
  for split in corpus_lib.SPLITS:
    folder = tmp_path / "data/manual/penn_treebank"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.txt").write_text("a sentence \n")
  with pytest.raises(UserError, match=message) as error:
    load_corpus(documents="isolated", **settings)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "line", ["[1]", "{", '{"other": "a"}', '{"text": 3}', '{"text": null}', '{"text": "\\ud800"}']
)
def test_a_line_that_is_no_document(tmp_path, line):
  path = tmp_path / "texts.jsonl"
  path.write_bytes(as_json(["a", "b"]) + b"\n" + line.encode() + b"\n" + as_json(["c"] * 9))
  corpus = load_corpus(path=path)
  place = len(as_json(["a", "b"])) + 1
  expected = rf"^data.path: .*string 'text' .data.text_field.*offset {place} of .*texts.jsonl"
  with pytest.raises(UserError, match=expected):
    all_found(corpus)


def test_a_source_of_ones_own(tmp_path, monkeypatch):
  def read(files):
    for split in corpus_lib.SPLITS:
      for text in WHOLE[:5]:
        yield split, f"# {text}"

  source = Source("Mine", read, "mine", "small", "me", documents=r"(?=^# )")
  monkeypatch.setitem(catalog.ENTRIES, "mine", source)
  corpus = load_corpus("mine", data_dir=tmp_path, documents="isolated")
  assert all_found(corpus)["valid"] == [f"# {text}" for text in WHOLE[:5]]
