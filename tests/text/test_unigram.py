import json
import pathlib
import re

import numpy as np
import pytest

from dpjax.text.tokenizer import train_tokenizer
from dpjax.text.unigram import UnigramBoundaries, load_unigram, train_unigram

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "F_spm_boundaries.json"
VERBS = " ".join(
  stem + end
  for stem in ("walk", "talk", "work", "look", "play", "jump")
  for end in ("", "s", "ed", "ing", "er", "able", "ative")
)
LINES = (
  VERBS,
  "on 1 11 1789 11 1789",
  "unwalkable untalked  workings",
  "tab\tbed end\r",
  "\u00e9t\u00e9 \ufb01ne caf\u00e9\u0434\u043e do \u0434\u043e",
  "x\u0434 " * 11,
)
TEXT = "\n".join(LINES) + "\n"


@pytest.fixture(scope="module")
def model():
  return train_unigram([TEXT], 53)


@pytest.fixture(scope="module")
def unigram(model):
  return UnigramBoundaries(model)


class Processor:
  """Says how words are cut, as SentencePiece's does."""

  def __init__(self, pieces):
    self._pieces = pieces

  def encode(self, words, out_type):
    assert out_type is str
    return [self._pieces[word] for word in words]


def cut_as(model, pieces):
  result = UnigramBoundaries(model)
  result._processor = Processor(pieces)
  return result


@pytest.mark.parametrize("group, size", [("plain", "5000"), ("edge", "200")])
def test_boundaries_are_the_authors(model, group, size):
  golden = json.loads(GOLDEN.read_text())["groups"][group]
  recorded = zip(golden["texts"], golden["pieces"][size], golden["positions"][size], strict=True)
  for text, pieces, positions in recorded:
    result = cut_as(model, dict(zip(text.split(" "), pieces, strict=True)))(text)
    # Theirs stand one character late within the first word.
    first = text.index(" ")
    expected = [offset - (offset < first) for offset in positions]
    assert np.flatnonzero(result).tolist() == expected
    assert len(result) == len(text)


def test_pieces_of_each_word_by_itself(unigram):
  expected = []
  for word in re.split("[ \n]", TEXT):
    pieces = unigram._processor.encode(word, out_type=str)
    assert "".join(pieces) == "\u2581" * bool(word) + word
    ends = np.cumsum([len(piece) for piece in pieces], dtype=int) - 2  # the mark, and 0
    expected += [int(offset in ends[:-1]) for offset in range(len(word))] + [1]
  result = unigram(TEXT)
  np.testing.assert_array_equal(result, np.array(expected[:-1], np.uint8), strict=True)
  assert result.sum() > TEXT.count(" ") + TEXT.count("\n") + 20
  assert unigram("").shape == (0,) and unigram(" \n").tolist() == [1, 1]


def test_words_that_change_in_length_are_one_piece(model):
  pieces = {
    "caf\u00e9": ["\u2581ca", "f", "<0xC3>", "<0xA9>"],
    "\ufb01ne": ["\u2581f", "in", "e"],
    "\u2581": [],
    "The": ["\u2581th", "e"],
  }
  result = cut_as(model, pieces)("caf\u00e9 \ufb01ne \u2581 The")
  assert "".join(map(str, result)) == "0000" + "1" + "000" + "1" + "0" + "1" + "010"


def test_long_words_are_cut_in_parts(unigram, monkeypatch):
  monkeypatch.setattr("dpjax.text.unigram._MAX_WORD", 8)
  result = unigram("walking walkingstalkedup")
  parts = [unigram(part) for part in ("walking", "walkings", "talkedup")]
  np.testing.assert_array_equal(result, [*parts[0], 1, *parts[1][:-1], 1, *parts[2]])


def test_tokens_of_characters(unigram):
  text = "working caf\u00e9\u0434\u043e\n\ufb01ne"
  result = unigram(text)
  characters = train_tokenizer("characters", [TEXT])
  np.testing.assert_array_equal(unigram.of_tokens(text, characters), result)
  sizes = [len(character.encode()) for character in text]
  expected = [
    b for one, size in zip(result, sizes, strict=True) for b in [0] * (size - 1) + [int(one)]
  ]
  in_bytes = unigram.of_tokens(text, train_tokenizer("bytes", []))
  assert in_bytes.dtype == np.uint8 and in_bytes.tolist() == expected
  assert unigram.of_tokens("", train_tokenizer("bytes", [])).shape == (0,)


def test_settings_of_the_pieces(unigram):
  processor = unigram._processor
  pieces = {processor.id_to_piece(i).removeprefix("\u2581") for i in range(3, 53)}
  assert processor.vocab_size() == 53
  assert pieces >= set("".join(TEXT.split()))  # every character, as it stands
  assert 3 < max(map(len, pieces)) <= 16
  assert not any(
    re.search(r"\d\d|[a-z]\d|\d[a-z]|[a-z\u00e9][\u0430-\u044f]", piece) for piece in pieces
  )


def test_lines_may_be_long():
  # Longer than a sentence may be for SentencePiece, and what comes last counts too.
  text = "walk talk " * 3001 + "walks \u00e9"
  processor = UnigramBoundaries(train_unigram([text], 12))._processor
  pieces = [processor.id_to_piece(i) for i in range(12)]
  assert {"s", "\u00e9"} <= set(pieces)


def test_sizes_that_the_text_does_not_admit_and_texts_without_words():
  for size, expected in (
    (4001, r"at most \d+ for this text, got 4001"),
    (7, r"at least \d+ for this text, got 7"),
    (2**31, "4 to 16,777,216, got 2147483648"),
  ):
    with pytest.raises(ValueError, match=f"^model.boundaries.size: expected {expected}"):
      train_unigram([TEXT], size)

  for chunks in ([" \t\n", "\r\n"], []):
    with pytest.raises(ValueError, match="^data.path: expected a text that has words"):
      train_unigram(chunks, 50)


def test_model_from_a_file(tmp_path, model):
  (tmp_path / "unigram.model").write_bytes(model)
  assert load_unigram(tmp_path / "unigram.model") == model
  with pytest.raises(ValueError, match="^model.boundaries.file: expected .* got .*none.model"):
    load_unigram(tmp_path / "none.model")
  for content in (b"", b"\xff\xfe\0 not a model", model[:-1], model[:3]):
    (tmp_path / "other.model").write_bytes(content)
    with pytest.raises(ValueError, match="^model.boundaries.file: .*other.model .*another file"):
      load_unigram(tmp_path / "other.model")
  tokenizer = train_tokenizer("sentencepiece_bpe", [TEXT], vocab_size=307)
  (tmp_path / "bpe.model").write_bytes(tokenizer._model)
  with pytest.raises(ValueError, match="^model.boundaries.file: .*bpe.model .*, got another file"):
    load_unigram(tmp_path / "bpe.model")
