import numpy as np
import pytest

from dpjax.text import tokenizer


def test_cut_lines_keeps_every_character():
  text = "one\r\n\ntwo three  four\u2028five\n  " + 23 * "x" + "\n\tend"
  for longest in (2, 3, 7, 100):
    parts = list(tokenizer.cut_lines(text, longest))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= longest + 1  # + 1: of a line's end
  assert parts == ["one\r\n", "\n", "two three  four\u2028five\n", f"  {23 * 'x'}\n", "\tend"]


def test_cut_lines_cuts_before_spaces():
  assert list(tokenizer.cut_lines("one two three\n", 7)) == ["one two", " three\n"]
  assert list(tokenizer.cut_lines("one\ntwo three\n", 6)) == ["one\n", "two", " three", "\n"]


@pytest.mark.parametrize("ids", [[3, 7], [-1], np.array([2, 9], np.uint16)])
def test_as_ids_refuses_unknown_ids(ids):
  with pytest.raises(ValueError, match=r"ids: expected 0 \.\. 6, got"):
    tokenizer.as_ids(ids, 7)


def test_as_ids_takes_lists_and_arrays():
  assert tokenizer.as_ids([], 7).shape == (0,)
  assert tokenizer.as_ids(np.array([6, 0], np.uint16), 7).tolist() == [6, 0]


def test_clean_cuts_are_those_that_change_no_subword():
  """By the library itself, at every place between two lines of a tricky text."""
  from dpjax.text.tokens import train_tokenizer

  text = "one\ntwo\n\nthree \n four\n\n\n  five\n\t\nsix\u2003\nseven\n\u2003eight \nnine\n"
  bpe = train_tokenizer("bpe", [text * 3, "\n\n\n\n" * 9], vocab_size=275)
  whole = bpe.encode(text * 2).tolist()
  clean = 0
  for place in range(1, len(text)):
    before, after = text[:place], text[place:]
    if tokenizer.is_clean_cut(before, after):
      assert before.endswith("\n")
      parts = bpe.encode(before).tolist() + bpe.encode(after + text).tolist()
      assert parts == whole
      assert tokenizer.is_clean_cut(before[-2:], after[:2])
      clean += 1
  assert clean == 4
  for before, after in (("one", "two"), ("", "a"), ("one\n", ""), ("a\n\n", "b")):
    assert not tokenizer.is_clean_cut(before, after)
