import numpy as np
import pytest

from dpjax.text import tokenizer
from dpjax.text.factory import tokenizer_from_json, train_tokenizer
from tests import helpers
from tests.text.test_subwords import train_sentencepiece


def test_cut_lines_keeps_every_character():
  text = "one\r\n\ntwo three  four\u2028five\n  " + 23 * "x" + "\n\tend"
  for longest in (2, 3, 7, 100):
    parts = list(tokenizer.cut_lines(text, longest))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= longest + 1  # + 1: of a line's end
  assert parts == ["one\r\n", "\n", "two three  four\u2028five\n", f"  {23 * 'x'}\n", "\tend"]
  assert list(tokenizer.cut_lines("one two three\n", 7)) == ["one two", " three\n"]
  assert list(tokenizer.cut_lines("one\ntwo three\n", 6)) == ["one\n", "two", " three", "\n"]


@pytest.mark.parametrize("ids", [[3, 7], [-1], np.array([2, 9], np.uint16)])
def test_as_ids_refuses_unknown_ids(ids):
  with pytest.raises(ValueError, match=r"ids: expected 0 \.\. 6, got"):
    tokenizer.as_ids(ids, 7)


def test_bytes_with_ends_have_two_that_no_text_has():
  known = train_tokenizer("bytes_with_ends", [])
  ids = [known.start_id, *known.encode("\u00e9"), 0xC3, ord("("), known.end_id]
  assert ids == [254, 0xC3, 0xA9, 0xC3, 0x28, 255]
  assert known.decode(ids) == "\ufffd\u00e9\ufffd(\ufffd"
  stream = tokenizer.TextStream(known)
  assert "".join(stream.push([i]) for i in ids) + stream.finish() == known.decode(ids)
  assert tokenizer_from_json(known.to_json()).to_json() == known.to_json()


def test_clean_cuts_are_those_that_change_no_subword():
  """By the library itself, at every place between two lines of a tricky text."""
  text = "one\ntwo\n\nthree \n four\n\n\n  five\n\t\nsix\u2003\nseven\n\u2003eight \nnine\n"
  bpe = train_tokenizer("bpe", [text * 3, "\n\n\n\n" * 9], vocab_size=275)
  whole = bpe.encode(text * 2).tolist()
  clean = 0
  for position in range(1, len(text)):
    before, after = text[:position], text[position:]
    if tokenizer.rate_cut(before, after):
      assert before.endswith("\n")
      parts = bpe.encode(before).tolist() + bpe.encode(after + text).tolist()
      assert parts == whole
      rate = tokenizer.rate_cut(before[-2:], after[:2])
      assert rate == 1 + (after[0].isalpha() and not before[-2].isspace())
      clean += 1
  assert clean == 4
  for before, after in (("one", "two"), ("", "a"), ("one\n", ""), ("a\n\n", "b")):
    assert tokenizer.rate_cut(before, after) == 0


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
