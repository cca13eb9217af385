"""What holds for every tokenizer; characters and bytes; damaged files; shared helpers."""

import json

import numpy as np
import pytest

from dpjax.config import registry
from dpjax.errors import UserError
from dpjax.layers.boundaries import SpaceByte
from dpjax.ops import spacelike_boundaries
from dpjax.text.tokenizer import (
  as_ids,
  cut_lines,
  rate_cut,
  tokenizer_classes,
  tokenizer_from_json,
  train_tokenizer,
)
from tests import helpers
from tests.text.test_subwords import train_sentencepiece

# Lines of every length, blank ones, and white space that tokenizers like to lose.
LINES = [
  "  leading and trailing  \n",
  "\n",
  "\n",
  "tabs\t\there\t\n",
  "carriage\r\n",
  "\r\n",
  "emoji \N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{BROKEN HEART}, e\u0301 and \u00e9\n",
  "marks \u2581\u2581 \u2581x, \u2585, \u2047, <s> </s> <unk> <eos> <0x0A>\n",
  "a line separator\u2028a no-break\u00a0space\ufeff and a \x7f delete\n",
  "    " + 300 * "the quick brown fox jumps over the lazy dog " + "\n",
  97 * " " + "\n",
  "no line end at the end ",
]
TEXT = "".join(LINES)
SUBWORDS = {"sentencepiece_unigram": 301, "sentencepiece_bpe": 303, "wordpiece": 101, "bpe": 293}
TOKENIZERS = tokenizer_classes()
CHARACTER_TOKENIZERS = [name for name, each in TOKENIZERS.items() if each.is_character_level]
LOSSLESS = [variant for variant in TOKENIZERS if variant != "wordpiece"]


@pytest.fixture(scope="module")
def tokenizers():
  return {
    name: train_tokenizer(name, LINES, **helpers.vocabulary(name, SUBWORDS.get(name, 0)))
    for name in TOKENIZERS
  }


def test_every_tokenizer_has_a_name_in_configurations():
  assert registry.tokenizers.names() == tuple(TOKENIZERS)
  for name, each in TOKENIZERS.items():
    assert each.name == name and registry.tokenizers.component(name) == each.train


@pytest.mark.parametrize("variant", TOKENIZERS)
def test_ids(tokenizers, variant):
  tokenizer = tokenizers[variant]
  ids = tokenizer.encode(TEXT)
  assert tokenizer.name == variant
  assert ids.dtype == np.int32 and ids.ndim == 1
  assert 0 <= ids.min() and ids.max() < tokenizer.vocab_size <= SUBWORDS.get(variant, 256)
  assert tokenizer.encode("").shape == (0,) and tokenizer.decode([]) == ""
  # Parts that end with lines give the same ids; BPE may join blank lines.
  lines = [line for line in LINES if not line.isspace()]
  parts = [tokenizer.encode(line) for line in lines]
  np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode("".join(lines)))
  if tokenizer.begins_texts:
    assert not {tokenizer.start_id, tokenizer.end_id} & {*ids.tolist()}
    return
  # A text starts after a line end.
  assert tokenizer.encode("word\nword")[1:-1].tolist().count(tokenizer.start_id) == 1
  assert tokenizer.decode([tokenizer.start_id]) == "\n"


@pytest.mark.parametrize("variant", LOSSLESS)
def test_lossless(tokenizers, variant):
  tokenizer = tokenizers[variant]
  unseen = "\u05e9\u05dc\u05d5\u05dd \u4e2d\u6587 \N{SNOWMAN}\0\n"
  assert tokenizer.lossless
  for text in (TEXT, *LINES, " ", "  ", "\n", "\n\n\n", " \n ", "\r", "\u2581", unseen):
    if variant != "characters" or set(text) <= set(TEXT):
      assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("variant", TOKENIZERS)
def test_json_holds_all_of_it(tokenizers, variant):
  tokenizer = tokenizers[variant]
  text = tokenizer.to_json()
  again = tokenizer_from_json(text)
  assert json.loads(text)["format"] == 1 and json.loads(text)["name"] == variant
  assert again.to_json() == text
  for name in ("name", "vocab_size", "start_id", "lossless"):
    assert getattr(again, name) == getattr(tokenizer, name)
  ids = tokenizer.encode(TEXT)
  np.testing.assert_array_equal(again.encode(TEXT), ids)
  assert again.decode(ids) == tokenizer.decode(ids)
  twice = train_tokenizer(variant, [TEXT], **helpers.vocabulary(variant, SUBWORDS.get(variant, 0)))
  assert twice.to_json() == text


@pytest.mark.parametrize("variant", TOKENIZERS)
def test_which_ids_hold_their_text(tokenizers, variant):
  tokenizer = tokenizers[variant]
  assert tokenizer.keeps_text(tokenizer.encode(TEXT)) == (variant != "wordpiece")
  # Of the kinds here, "characters" alone has no id for it.
  unseen = tokenizer.encode("the \N{SNOWMAN}")
  assert tokenizer.keeps_text(unseen) == (variant not in ("characters", "wordpiece"))
  with pytest.raises(UserError, match="^text: expected Unicode .* surrogate at index 4$"):
    tokenizer.encode("the\n\udfff cat")


def test_characters_are_sorted_and_the_last_id_is_unknown():
  tokenizer = train_tokenizer("characters", ["to be\n", "or not"])
  assert tokenizer.vocab_size == 9  # "\n", " ", b, e, n, o, r, t, unknown
  assert tokenizer.encode("be\nxt\0\U0010ffff").tolist() == [2, 3, 0, 8, 7, 8, 8]
  assert tokenizer.decode([2, 3, 8, 0]) == "be\ufffd\n"
  assert train_tokenizer("characters", ["no line end"]).start_id == 0


def test_bytes_are_those_of_utf_8():
  tokenizer = train_tokenizer("bytes", [])
  assert tokenizer.encode("\u00e9\n").tolist() == [0xC3, 0xA9, 10]
  assert tokenizer.decode([0xC3, 10, 0xC3, 0xA9]) == "\ufffd\n\u00e9"


def test_spaces_are_the_space_and_the_line_end(tokenizers):
  for variant, tokenizer in tokenizers.items():
    reference = variant in CHARACTER_TOKENIZERS
    assert list(tokenizer.space_ids) == (tokenizer.encode(" \n").tolist() if reference else [])
  for text, ids in (("to be", (0,)), ("to\nbe", (0,)), ("tobe", ())):
    assert train_tokenizer("characters", [text]).space_ids == ids


@pytest.mark.parametrize("variant", CHARACTER_TOKENIZERS)
def test_places_of_the_last_tokens_of_characters(tokenizers, variant):
  tokenizer = tokenizers[variant]
  assert tokenizer.character_ends("").tolist() == []
  expected = [len(tokenizer.encode(TEXT[: end + 1])) - 1 for end in range(200)]
  assert tokenizer.character_ends(TEXT[:200]).tolist() == expected
  message = "^data.tokenizer: expected characters or bytes with Unigram boundaries, got bpe"
  with pytest.raises(ValueError, match=message):
    tokenizers["bpe"].character_ends(TEXT)


@pytest.mark.parametrize(
  "variant, settings, message",
  [
    ("wordpieces", {}, "tokenizer: .*bytes, .*got wordpieces"),
    ("bytes", dict(file="vocabulary.txt"), "tokenizer.file: expected none"),
    *((x, dict(vocab_size=2**31), "tokenizer.vocab_size: .* at most 16,7") for x in SUBWORDS),
    *((x, dict(vocab_size=0), r"tokenizer.vocab_size: .* at least \d") for x in SUBWORDS),
  ],
)
def test_wrong_settings(variant, settings, message):
  with pytest.raises(UserError, match=f"^data.{message}"):
    train_tokenizer(variant, LINES, **settings)


@pytest.mark.parametrize("variant", SUBWORDS)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\0 no vocabulary", b"[" * 10**5])
def test_file_that_is_no_vocabulary(tmp_path, variant, content):
  file = tmp_path / {"bpe": "tokenizer.json"}.get(variant, "vocabulary")
  if content is not None:
    file.write_bytes(content)
  with pytest.raises(UserError, match=f"^data.tokenizer.file: expected .*{file}"):
    train_tokenizer(variant, [TEXT], file=str(file))


@pytest.mark.parametrize(
  "text, reason",
  [
    ("{", ".*Expecting property name"),
    ('{"name": "bytes"}', "KeyError.'format'"),
    ('{"format": 2, "name": "bytes"}', "a later format than 1: 2"),
    ('{"format": 1, "name": "runes"}', "KeyError.'runes'"),
    ("[" * 10**5, "RecursionError"),
    ('{"format": 1, "name": "characters", "characters": "ba"}', "characters that are not sorted"),
    ('{"format": 1, "name": "sentencepiece_bpe", "model": "AAAA"}', "not a SentencePiece model"),
    ('{"format": 1, "name": "bpe", "tokenizer": {}}', "tokenizer: expected one that"),
  ],
)
def test_damaged_json(text, reason):
  with pytest.raises(
    ValueError, match=f"^tokenizer.json: expected .*, got a damaged one: .*{reason}"
  ):
    tokenizer_from_json(text)


def test_spacelike_tokens_are_those_of_the_bytes():
  """SpaceByte's rule over characters is that over their bytes."""
  text = "def f(x): return 'na\u00efve' \u05e9\u05dc\u05d5\u05dd, 3 \u2014 \u00bf 4\n\n"
  result = {}
  for tokenizer in (train_tokenizer("characters", [text]), train_tokenizer("bytes", [])):
    ids = SpaceByte().resolve(tokenizer)
    tokens = tokenizer.encode(text)
    b = np.asarray(spacelike_boundaries(tokens[None], **ids))[0]
    result[tokenizer.name] = b
    assert SpaceByte(**ids).count_segments(tokens[None]) == b.sum()
    assert SpaceByte(space_ids=(4,)).resolve(tokenizer)["space_ids"] == (4,)
  x = np.frombuffer(text.encode(), np.uint8)
  is_word = np.array([chr(c).isalnum() and c < 128 or 128 <= c < 192 for c in x])
  np.testing.assert_array_equal(result["bytes"], ~is_word & np.append(True, is_word[:-1]))
  # A character has a boundary where its first byte has one.
  np.testing.assert_array_equal(result["characters"], result["bytes"][(x & 0xC0) != 0x80])


def test_cut_lines_keeps_every_character():
  text = "one\r\n\ntwo three  four\u2028five\n  " + 23 * "x" + "\n\tend"
  for longest in (2, 7, 100):
    parts = list(cut_lines(text, longest))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= longest + 1  # + 1: of a line's end
  assert parts == ["one\r\n", "\n", "two three  four\u2028five\n", f"  {23 * 'x'}\n", "\tend"]
  assert list(cut_lines("one two three\n", 7)) == ["one two", " three\n"]


@pytest.mark.parametrize("ids", [[-1], np.array([2, 7], np.uint16)])
def test_as_ids_refuses_unknown_ids(ids):
  with pytest.raises(ValueError, match=r"ids: expected 0 \.\. 6, got"):
    as_ids(ids, 7)


def test_bytes_with_ends_have_two_that_no_text_has():
  known = train_tokenizer("bytes_with_ends", [])
  ids = [known.start_id, *known.encode("\u00e9"), 0xC3, ord("("), known.end_id]
  assert ids == [254, 0xC3, 0xA9, 0xC3, 0x28, 255]
  assert known.decode(ids) == "\ufffd\u00e9\ufffd(\ufffd"


def test_clean_cuts_are_those_that_change_no_subword():
  """By the library itself, at every place between two lines of a tricky text."""
  text = "one\ntwo\n\nthree \n four\n\n\n  five\n\t\nsix\u2003\nseven\n\u2003eight \nnine\n"
  bpe = train_tokenizer("bpe", [text * 3, "\n\n\n\n" * 9], vocab_size=275)
  whole = bpe.encode(text * 2).tolist()
  clean = 0
  for position in range(1, len(text)):
    before, after = text[:position], text[position:]
    if rate_cut(before, after):
      assert before.endswith("\n")
      parts = bpe.encode(before).tolist() + bpe.encode(after + text).tolist()
      assert parts == whole
      rate = rate_cut(before[-2:], after[:2])
      assert rate == 1 + (after[0].isalpha() and not before[-2].isspace())
      clean += 1
  assert clean == 4
  for before, after in (("one", "two"), ("", "a"), ("one\n", ""), ("a\n\n", "b")):
    assert rate_cut(before, after) == 0


@pytest.mark.parametrize("name", ["sentencepiece_unigram", "wordpiece", "characters"])
def test_a_pair_has_the_ids_of_the_whole_text(name, tmp_path):
  """The context is the longest common prefix of the whole's ids and of its own."""
  draw = np.random.default_rng(11)
  lines = [" ".join(draw.choice(helpers.WORDS[:5], size=9)) for _ in range(90)]
  spans, file = name == "sentencepiece_unigram", ""
  if spans:  # Pieces may have several words.
    settings = dict(split_by_whitespace=False, vocab_size=97)
    file = train_sentencepiece(tmp_path / "spanning.model", lines, **settings)
  expected = train_tokenizer(name, lines, file=file, **helpers.vocabulary(name, 31))
  others = 0
  for line in lines:
    position = int(draw.integers(len(line)))
    context, rest = line[:position], line[position:]
    ids, of_rest = expected.encode_pair(context, rest)
    whole, alone = expected.encode(line), expected.encode(context)
    assert np.concatenate([ids, of_rest]).tolist() == whole.tolist()
    assert ids.tolist() == alone[: len(ids)].tolist()
    ends = len(ids) in (len(whole), len(alone))
    assert ends or whole[len(ids)] != alone[len(ids)]
    others += len(ids) < len(alone)
  # Where pieces span the border, the context alone has other ids.
  assert others > 40 if spans else others == 0 or name == "wordpiece"
