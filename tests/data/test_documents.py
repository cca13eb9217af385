"""Texts made of documents: each form of them, and where in the tokens they begin."""

import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpjax.data import catalog
from dpjax.data import corpus as corpus_lib
from dpjax.data.corpus import SPLITS, Chunks, Documents, Marked, line_pattern
from dpjax.data.encoding import Encoder, encode_text
from dpjax.data.text import load_corpus
from dpjax.data.tokens import open_tokens, tokenize
from dpjax.errors import UserError
from dpjax.text.tokens import train_tokenizer

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


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}
MARK = corpus_lib.BYTE_ORDER_MARK


def found(text):
  return ["".join(document) for document in text.documents()]


def all_found(corpus):
  return {split: found(text) for split, text in corpus.splits.items()}


def in_order(splits):
  return [document for split in SPLITS for document in splits[split]]


def as_json(texts, field="text"):
  # Escaped and not, with other fields, and with blank lines between.
  lines = [json.dumps({"n": i, field: x}, ensure_ascii=i % 2 == 0) for i, x in enumerate(texts)]
  return "\n \n".join(lines).encode()


@pytest.fixture(params=[("", MARK), (".gz", b""), (".xz", MARK), (".zst", MARK)], ids=str)
def packing(request):
  """An ending, and the function that packs a text for it, some with a byte-order mark."""
  ending, mark = request.param
  return ending, lambda content: PACKERS[ending](mark + content)


@pytest.mark.parametrize("how", ["joined", "isolated"])
def test_json_lines(tmp_path, packing, how):
  ending, pack = packing
  path = tmp_path / f"texts.jsonl{ending}"
  path.write_bytes(pack(as_json(["", *TEXTS], "body") + b"\n"))
  settings = dict(text_field="body", data_dir=tmp_path / "data", documents=how)
  corpus = load_corpus(path=path, split_fractions=(0.5, 0.2, 0.3), **settings)
  splits = all_found(corpus)
  assert in_order(splits) == WHOLE and all(splits.values()) and corpus.name == "texts"
  assert {x: "".join(text) for x, text in corpus.splits.items()} == {
    x: "".join(texts) for x, texts in splits.items()
  }
  names = {"train": "train", "valid": "validation", "test": "test"}
  for i, stem in enumerate(names.values()):
    (tmp_path / f"{stem}.jsonl{ending}").write_bytes(pack(as_json(TEXTS[i::3])))
  corpus = load_corpus(path=tmp_path, documents=how, data_dir=tmp_path / "data")
  assert all_found(corpus) == {split: WHOLE[i::3] for i, split in enumerate(names)}


def write_parquet(path, texts, field="text"):
  pq.write_table(pa.table({"n": range(len(texts)), field: texts}), path, row_group_size=5)


@pytest.mark.parametrize("how", ["joined", "isolated"])
def test_parquet(tmp_path, how):
  write_parquet(tmp_path / "texts.parquet", [None, *TEXTS], "body")
  settings = dict(data_dir=tmp_path / "data", documents=how, split_fractions=(0.5, 0.2, 0.3))
  corpus = load_corpus(path=tmp_path / "texts.parquet", text_field="body", **settings)
  assert in_order(all_found(corpus)) == WHOLE and corpus.name == "texts"
  for i, split in enumerate(SPLITS):
    write_parquet(tmp_path / f"{split}.parquet", TEXTS[i::3])
  splits = all_found(load_corpus(path=tmp_path, **settings))
  assert splits == {split: WHOLE[i::3] for i, split in enumerate(SPLITS)}
  with pytest.raises(UserError, match="texts.parquet: expected a Parquet .* strings named text,"):
    load_corpus(path=tmp_path / "texts.parquet", **settings)


def test_several_files_by_a_pattern(tmp_path, packing):
  ending, pack = packing
  folder = tmp_path / "shards"
  folder.mkdir()
  for i in range(3):
    part = TEXTS[4 * i : 4 * i + 4]
    (folder / f"{i}.jsonl{ending}").write_bytes(pack(as_json(part, "body")))
    (folder / f"{i}.txt{ending}").write_bytes(pack("".join(WHOLE[4 * i : 4 * i + 4]).encode()))
    write_parquet(folder / f"{i}.parquet", part, "body")
  given = dict(data_dir=tmp_path / "data", split_fractions=(0.5, 0.2, 0.3))
  for kind in (f"jsonl{ending}", "parquet"):
    for _ in range(2):  # The second time, the text is there.
      corpus = load_corpus(path=folder / f"*.{kind}", text_field="body", **given)
      assert in_order(all_found(corpus)) == WHOLE and corpus.name == "shards"
  joined = load_corpus(path=tmp_path / "**" / f"[0-9].txt{ending}", **given)
  assert "".join("".join(x) for x in joined.splits.values()).replace("\ufeff", "") == "".join(WHOLE)
  (folder / f"1.jsonl{ending}").write_bytes(pack(as_json(TEXTS[:1], "body")))
  corpus = load_corpus(path=folder / f"*.jsonl{ending}", text_field="body", **given)
  assert in_order(all_found(corpus)) == WHOLE[:4] + WHOLE[:1] + WHOLE[8:]
  with pytest.raises(UserError, match="^data.path: expected files that match a pattern, got none"):
    load_corpus(path=folder / "*.csv", **given)
  with pytest.raises(UserError, match=r"^data.path: expected files of one kind, got .jsonl, .parq"):
    load_corpus(path=folder / "[0-9].*", **given)


@pytest.mark.parametrize("damage", [lambda x: x[:-9], lambda x: x[:30] + b"\xff" * 9 + x[39:]])
def test_a_damaged_zst_is_named(tmp_path, damage):
  path = tmp_path / "a.txt.zst"
  path.write_bytes(damage(zst("".join(WHOLE).encode() * 9)))
  with pytest.raises(UserError, match="a.txt.zst: expected a text in UTF-8, got "):
    load_corpus(path=path, data_dir=tmp_path / "data")
  assert not [*tmp_path.glob("data/texts/*/data.json")]


def test_a_folder_of_files(tmp_path, packing):
  ending, pack = packing
  folder = tmp_path / "mine"
  for i, text in enumerate(TEXTS):
    place = folder / ("b" if i > 6 else "a")
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{i:02}.txt{ending}").write_bytes(pack(text.encode()))
  (folder / "a" / "03x.txt").write_bytes(b"")  # empty: no document
  (folder / "README.md").write_bytes(b"no text")
  corpus = load_corpus(path=folder, documents="isolated", split_fractions=(0.6, 0.2, 0.2))
  splits = all_found(corpus)
  assert in_order(splits) == WHOLE and all(splits.values()) and corpus.name == "mine"
  for split in SPLITS:
    (folder / split).mkdir()
    (folder / split / f"x.txt{ending}").write_bytes(pack(split.encode()))
  assert all_found(load_corpus(path=folder)) == {x: [f"{x}\n"] for x in SPLITS}
  (folder / "valid" / f"x.txt{ending}").unlink()
  with pytest.raises(UserError, match="^data.path: expected .txt files, each a document.*valid$"):
    load_corpus(path=folder)


def test_files_are_divided_by_size(tmp_path):
  sizes = [7, 300, 2, 40, 40, 11, 90, 3, 30, 77]
  for i, size in enumerate(sizes):
    (tmp_path / f"{i}.txt").write_text("a" * (size - 1) + "\n")
  splits = all_found(load_corpus(path=tmp_path, split_fractions=(0.6, 0.2, 0.2)))
  ends = np.cumsum(sizes)
  expected = np.searchsorted(ends, ends[-1] * np.array([0.6, 0.8]), "right")  # that fit
  assert np.cumsum([len(splits["train"]), len(splits["valid"])]).tolist() == expected.tolist()


@pytest.mark.parametrize("separator", ["<|end of book|>", "***", " = "])
def test_a_line_between(tmp_path, packing, separator):
  ending, pack = packing
  content = f"{separator}\n".join(WHOLE)
  folder = tmp_path / "texts"
  folder.mkdir()
  for stem in ("books", *SPLITS):
    (folder / f"{stem}.txt{ending}").write_bytes(pack(content.encode()))
  settings = dict(separator=separator, data_dir=tmp_path / "data")
  corpus = load_corpus(path=folder, documents="isolated", **settings)
  expected = [f"{text}{separator}\n" for text in WHOLE[:-1]] + WHOLE[-1:]
  assert all_found(corpus) == dict.fromkeys(SPLITS, expected)
  # One file is cut where it is cut when joined; a document on the cut becomes two.
  settings |= dict(path=folder / f"books.txt{ending}", split_fractions=(0.5, 0.2, 0.3))
  joined, isolated = (load_corpus(documents=how, **settings) for how in ("joined", "isolated"))
  for split in SPLITS:
    assert "".join(joined.splits[split]) == "".join(isolated.splits[split])
  assert "".join(in_order(all_found(isolated))) == content
  assert isinstance(joined.splits["train"], Chunks)


def test_lines_with_carriage_returns():
  text = Chunks(b"one\r\n--\r\ntwo --\n--\nthree\n--", 0, 27, "")
  marked = Marked(text, line_pattern("--"))
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
def test_named_corpora(tmp_path, name):
  language = "fi" if catalog.ENTRIES[name].languages else ""
  folder = tmp_path / "manual" / name / language
  folder.mkdir(parents=True)
  for split in SPLITS:
    (folder / f"{split}.txt").write_bytes("".join(MARKS[name]).encode())
  settings = dict(language=language, data_dir=tmp_path, manual_dir=tmp_path / "manual")
  corpus = load_corpus(name, documents="isolated", **settings)
  assert all_found(corpus) == dict.fromkeys(SPLITS, MARKS[name])
  joined = load_corpus(name, **settings)
  assert corpus.about == {**joined.about, "documents": catalog.ENTRIES[name].documents}
  assert [*joined.splits["train"]] == [*corpus.splits["train"]]


@pytest.mark.parametrize(
  "kind, size, chunk_bytes",
  [
    *(("characters", 0, 7), ("bytes", 0, 2**20), ("bpe", 270, 29)),
    *(("sentencepiece_bpe", 290, 29), ("wordpiece", 67, 29)),
  ],
)
def test_tokens_are_those_of_each_alone(tmp_path, monkeypatch, kind, size, chunk_bytes):
  folder = tmp_path / "texts"
  folder.mkdir()
  texts = {"train": WHOLE * 7, "valid": WHOLE[3:], "test": WHOLE[:4]}
  for split, content in texts.items():
    (folder / f"{split}.jsonl").write_bytes(as_json(content))
  tokenizer = train_tokenizer(kind, WHOLE * 7, vocab_size=size)
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", chunk_bytes)
  data = tokenize(load_corpus(path=folder), tmp_path / "data", tokenizer)
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


class Given(Documents):
  """Documents given as lists of parts."""

  def __init__(self, given):
    self.given = given

  def __len__(self):
    return 0

  def documents(self):
    return iter(self.given)


def test_a_document_without_tokens_is_none(tmp_path):
  text = Given([["  "], ["b"], [" ", " a b"], [""], ["a"], ["  "]])
  (tmp_path / "vocab.txt").write_text("[UNK]\na\nb\n")
  tokenizer = train_tokenizer("wordpiece", (), file=str(tmp_path / "vocab.txt"))
  result = encode_text(text, Encoder(tokenizer), tmp_path, "train")
  assert np.fromfile(tmp_path / "train.bin", np.uint16).tolist() == [2, 1, 2, 1]
  assert np.fromfile(tmp_path / "train.documents.bin", np.int64).tolist() == [0, 1, 3]
  assert (result["tokens"], result["documents"]) == (4, 3)


def test_memory_does_not_grow_with_the_text(monkeypatch):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 101)
  text = Given([f"document {i}\n"] for i in range(10_000))
  sizes = [len(group) for group in Encoder(train_tokenizer("bytes", ())).groups(text)]
  assert sum(sizes) == 10_000 and max(sizes) < 11


def test_joined_marks_leave_the_tokens_as_they_were(tmp_path):
  (tmp_path / "b.txt").write_text("--\n".join(WHOLE * 9), encoding="utf-8")
  plain, joined, isolated = (
    tokenize(
      load_corpus(path=tmp_path / "b.txt", **settings), tmp_path / "tokens", "bytes", shared=True
    )
    for settings in ({}, dict(separator="--"), dict(separator="--", documents="isolated"))
  )
  assert plain.folder == joined.folder != isolated.folder
  assert joined.documents is None and "documents" not in joined.counts["train"]
  assert not [*joined.folder.glob("*.documents.bin")]
  for split in SPLITS:
    np.testing.assert_array_equal(joined.splits[split], isolated.splits[split])


def test_a_change_of_the_documents_is_named(tmp_path):
  (tmp_path / "x.jsonl").write_bytes(as_json(TEXTS * 3))
  data = tokenize(load_corpus(path=tmp_path / "x.jsonl"), tmp_path / "data", "bytes")
  file = data.folder / "test.documents.bin"
  file.write_bytes(file.read_bytes()[:-8] + np.int64(3).tobytes())
  with pytest.raises(UserError, match="test.documents.bin: .* a file that was changed"):
    open_tokens(tmp_path / "data").check()


WITHOUT = "^data.documents: expected joined for {}, which does not say where documents begin"


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(path="a.txt"), WITHOUT.format("a")),
    (dict(), WITHOUT.format("python_manual")),
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
  (tmp_path / "few").mkdir()
  for name in "xy":
    (tmp_path / "few" / f"{name}.txt").write_text(name)
  with pytest.raises(UserError, match=message) as error:
    load_corpus(documents="isolated", **settings)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "line", ["[1]", "{", '{"other": "a"}', '{"text": 3}', '{"text": null}', '{"text": "\\ud800"}']
)
def test_a_line_that_is_no_document(tmp_path, line):
  path = tmp_path / "texts.jsonl"
  path.write_bytes(as_json(["a", "b"]) + b"\n" + line.encode() + b"\n" + as_json(["c"] * 9))
  place = len(as_json(["a", "b"])) + 1
  expected = rf"^data.path: .*string 'text' .data.text_field.*offset {place} of .*texts.jsonl"
  with pytest.raises(UserError, match=expected):
    all_found(load_corpus(path=path))
