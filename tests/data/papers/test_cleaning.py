"""Cleaning: by example, against the authors', against a slow one, and however it is cut."""

import json
import pathlib
import re
import tracemalloc
import unicodedata

import pytest

from dpjax_papers import cleaning
from dpjax_papers.cleaning import LANGUAGES, clean, clean_chunks

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "G_cleaners.json"
ITEMS = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]
# Word for word, what the authors' cleaner has and what we have, by number of the item.
DEPARTURES = {
  # A full-width 1 is a digit, not an l; a mark is a line end at the text's end, too.
  0: [("zl two three", "z one two three"), ("\nend start article", "\nend")],
  # 1/2 in one character is two digits.
  1: [("loppu kuusi", "loppu kuusi yksi kaksi")],
  # Without points, words are whole: the digits, and the first word after _NEWLINE_.
  2: [
    ("א ח ד ת ש ע ה א פ ס ת ש ע ה", "אחד תשעה אפס תשעה"),
    ("ש ל ש ה א ר ב ע ה", "שלשה ארבעה"),
    ("ש לו ם", "שלום"),
    ("א פ ס ש ב ע ה", "אפס שבעה"),
    ("ש נ י ם ח מ ש ה", "שנים חמשה"),
  ],
  # The input has two words in decomposed form.
  3: [("tie ng vie t", "tiếng việt")],
  # A mark at the text's begin. The full-width I is an i, 1 and 0 are digits, so is the
  # 1/2; the Cyrillic I looks like an I; the sign of multiplication is no letter; the long
  # s is an s by NFKC.
  5: [("start article\n", ""), ("llol x two k f i", "i one zero i two k one two two s i")],
}
TRICKY = (
  " \n\t_START_ARTICLE__START_ARTICLE_\r\n\r\n a_START_B_NEWLINE_NEWLINE_NEWLINE_c__START_"
  "SECTION_\n_START_PARAGRAPH_\nIn 1907,  he  \n  \r\n walked\u00a0e\u0301 cafe\u0301s"
  "\u2009a\u0323\u0302 a\u0302\u0323 \uff21\uff11\u2075\ufb01 \u1100\u1161\u11a8 ẠẢ Ä"
  " A\u0308 \u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd ש\u034f\u05c1ל \ufb2a צה״ל"
  " וג׳ירף בבית־ספר Νοthing ΟΔΟΣ οδοσ.\u0399 _ _START __NEWLINE__ _newline_ x\u0301\u0301"
  "_START_PARAGRAPH_\u0301 ½ ² ſİß \ud800 \U0001d7d7\U0001d400 ٣\n\n \n end\n\n"
)


def slow_clean(text, name):
  """The rules once more, a character at a time; the look-alikes are the module's."""
  language = LANGUAGES[name]
  for mark in ("ARTICLE", "SECTION", "PARAGRAPH"):
    text = text.replace(f"_START_{mark}_", "\n")
  text = unicodedata.normalize("NFC" if name == "he" else "NFKC", text.replace("_NEWLINE_", "\n"))
  found = ""
  for character in text:
    if character in language.diacritics:
      continue
    if character.lower() in language.alphabet:
      found += character.lower()
    elif character.isdecimal():
      found += f" {language.digits[int(character)]} "
    else:
      found += cleaning._Table(language)[ord(character)]
  return re.sub(" *\n[ \n]*", "\n", re.sub(" +", " ", found)).strip()


@pytest.mark.parametrize("number", range(len(ITEMS)))
def test_golden(number):
  item = ITEMS[number]
  expected = item["output"]
  for theirs, ours in DEPARTURES.get(number, ()):
    assert theirs in expected
    expected = expected.replace(theirs, ours)
  assert clean(item["input"], item["lang"]) == expected


@pytest.mark.parametrize(
  "language, text, expected",
  [
    ("en", 'Built in 1907, the "Mill".', "built in one nine zero seven the mill"),
    ("en", "a\r\nb\rc\td \n \n e\n", "a\nb c d\ne"),
    ("en", "\uff29t \U0001d400nd the o\ufb03ce №\u00a0\u2460", "it and the office no one"),
    ("fi", "Äiti söi 20 leipää; Åbo.", "äiti söi kaksi nolla leipää åbo"),
    ("fi", "A\u0308iti \u04d3iti \u0430\u043b\u0435", "äiti äiti a e"),
    ("he", "בַּיִת 38, ירושלים?", "בית שלשה שמונה ירושלים"),
    ("he", "\ufb2a\ufb4b \u05e9\u034f\u05c1\u05b8\ufb1eם מה־זה׃", "שו שם מה־זה"),
    ("he", "46 57 120 AB аб ＡＢ", "ארבעה ששה חמשה שבעה אחד שנים אפס"),
    ("vi", unicodedata.normalize("NFD", "Tiếng Việt, 1367: ưỡn"), "tiếng việt một ba sáu bảy ưỡn"),
    ("vi", "fjord quiz web", "ord qui eb"),
    ("vi", "\xd0à Nẵng", "đà nẵng"),  # an eth for a D with stroke
  ],
)
def test_by_example(language, text, expected):
  assert clean(text, language) == expected


def test_look_alikes():
  # Cyrillic and Greek; capitals by what they look like, not by what they are.
  assert clean("w\u043erd \u0412\u0430\u0441\u0435", "en") == "word bace"
  assert clean("\u039d\u03bf \u0399\u03a4 \u0406\u0442", "en") == "no it i"
  # Signs and digits are no letters, whatever they look like.
  assert clean("a | b \u2223 c \u00d7 d \u0966 e \u222a", "en") == "a b c d zero e"
  # No letter of the alphabet becomes another, and none of ASCII becomes any.
  for name, language in LANGUAGES.items():
    assert clean(language.alphabet, name) == language.alphabet
    for letter in map(chr, range(0x21, 0x7F)):
      if not letter.isdigit():
        kept = letter.lower() if letter.lower() in language.alphabet else ""
        assert clean(letter, name) == kept


@pytest.mark.parametrize("name", LANGUAGES)
def test_relations(name):
  once = clean(TRICKY, name)
  assert once
  assert set(once) <= set(LANGUAGES[name].alphabet + " \n")
  assert not re.search(r"  |\n\n| \n|\n |^\s|\s$", once)
  assert clean(once, name) == once
  assert once == slow_clean(TRICKY, name)
  letters = f"{LANGUAGES[name].alphabet} 305\n_NEWLINE_{'_'.join(LANGUAGES[name].digits)}"
  assert clean(letters.upper(), name) == clean(letters.replace("NEWLINE", ""), name)
  documents = [TRICKY, letters, "17"]
  parts = [clean(document, name) for document in documents]
  assert clean("\n".join(documents), name) == "\n".join(parts)


@pytest.mark.parametrize("name", LANGUAGES)
def test_any_cut_gives_the_same(name, monkeypatch):
  expected = clean(TRICKY, name)
  for block in (1, 23):
    monkeypatch.setattr(cleaning, "_BLOCK", block)
    found = list(clean_chunks(TRICKY, name))
    assert "".join(found) == expected
    assert len(found) > 4 and all(found)
    for place in range(len(TRICKY)):
      chunks = [TRICKY[:place], "", TRICKY[place : place + 7], TRICKY[place + 7 :]]
      assert "".join(clean_chunks(chunks, name)) == expected, place


def test_memory_is_bounded():
  def chunks():
    for number in range(700):
      yield 97 * f"It was {number} caf\u00e9s.\r\n" if number % 2 else 1999 * "ab"

  tracemalloc.start()
  total = sum(map(len, clean_chunks(chunks(), "en")))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert total > 2e6
  assert peak < 5e5


@pytest.mark.parametrize("text", ["ABC_" * 20000, "__" * 40000])
def test_text_without_spaces_is_cut_too(text):
  parts = list(clean_chunks([text], "en"))
  assert "".join(parts) == slow_clean(text, "en")
  assert len(list(cleaning._cut([text]))) > 2


def test_nothing_and_an_unknown_language():
  for text in ("", " ", "\n \n", "\u0434_NEWLINE_!", "\r"):
    assert list(clean_chunks(text, "en")) == []
  with pytest.raises(ValueError, match="^language: expected one of en, fi, he, vi, got fin; "):
    clean_chunks("text", "fin")  # before anything is taken of it
