r"""Cleans text as in text8: lower-case words of one alphabet, spaces and line ends.

  "Built in 1907, the \"Mill\""  ->  "built in one nine zero seven the mill"

In this order:

  1. Structure marks of wiki40b become line ends, anywhere in the text.
  2. Unicode NFKC; NFC if look-alike characters are not folded.
  3. A letter of the alphabet stays, in lower case; a decimal digit is spelt out as a word; a
     diacritic of the language is removed; any other letter that looks like one of the
     alphabet becomes that letter; spaces and line ends stay; everything else becomes a space.
  4. A run of spaces becomes one space, a run of line ends and spaces one line end; none
     stays at the beginning or the end.

Cleaning a clean text changes nothing. For a text of your own:

  python -m dpjax_papers.cleaning en < my.txt > clean.txt

Source: Sec. 4.1 of the pooling paper (Nawrot et al. 2023, arXiv:2211.09761); `cleaners/`
of PiotrNawrot/dynamic-pooling@1e6f360. Differences from that code: look-alikes follow NFKC
and Unicode's table of confusables (UTS 39, from the package confusable-homoglyphs); marks that are
not between line ends are also removed; Hebrew diacritics are removed and cut no words; Vietnamese
may be decomposed; and digits of all scripts count as digits.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dpjax.data.readers import decode, optional
from dpjax.errors import exit_on_user_error, unknown

_MARKER = re.compile("_START_ARTICLE_|_START_SECTION_|_START_PARAGRAPH_|_NEWLINE_")
_OVERLAPPING_MARKER = re.compile(f"(?=({_MARKER.pattern}))")
_REACH = len("_START_PARAGRAPH_") - 1  # how far a mark extends on either side of a cut in it
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_BLOCK = 2**14


class Language(NamedTuple):
  """The characters that cleaning keeps, and the names of digits.

  Attributes:
    alphabet: the letters, and signs if any, in lower case; without spaces and digits.
    digits: the names of 0 to 9, in letters of the alphabet.
    folds: whether characters that look like a letter of the alphabet become that letter.
    diacritics: characters to remove without splitting a word.
  """

  alphabet: str
  digits: tuple[str, ...]
  folds: bool = True
  diacritics: str = ""


_LATIN = "abcdefghijklmnopqrstuvwxyz"

# The points and accents, and what goes with them; not maqaf, paseq and sof pasuq.
_HEBREW = map(chr, (*range(0x591, 0x5C8), 0xFB1E, 0x34F))
_HEBREW_DIACRITICS = "".join(x for x in _HEBREW if unicodedata.category(x) == "Mn")

#: The languages of the pooling paper, by their names in wiki40b.
LANGUAGES: dict[str, Language] = {
  "en": Language(_LATIN, tuple("zero one two three four five six seven eight nine".split())),
  "fi": Language(
    _LATIN + "åäö",
    tuple("nolla yksi kaksi kolme neljä viisi kuusi seitsemän kahdeksan yhdeksän".split()),
  ),
  "he": Language(  # Letters and final forms, geresh, gershayim and maqaf.
    "אבגדהוזחטיכלמנסעפצקרשתךםןףץ׳״־",
    tuple("אפס אחד שנים שלשה ארבעה חמשה ששה שבעה שמונה תשעה".split()),
    folds=False,
    diacritics=_HEBREW_DIACRITICS,
  ),
  "vi": Language(
    "abcdeghiklmnopqrstuvxyđàáảãạăằắẳẵặâầấẩẫậèéẻẽẹêềếểễệìíỉĩịòóỏõọôồốổỗộơờớởỡợùúủũụưừứửữựỳýỷỹỵ",
    tuple("không một hai ba bốn năm sáu bảy tám chín".split()),
  ),
}


def clean(text: str, language: str) -> str:
  r"""Cleans a text; see the module's docstring for the steps.

    clean("Νοthing_NEWLINE_ in 19\t cafés", "en")  ->  "nothing\nin one nine caf s"

  The first two letters are Greek. A language not in `LANGUAGES` raises a `ValueError`.
  """
  return "".join(clean_chunks([text], language))


def clean_chunks(chunks: Iterable[str], language: str) -> Iterator[str]:
  """Cleans a text in parts, cut anywhere, and yields parts of other lengths.

    ["Mi", "ll_NEW", "LINE_ 1", "9"]  ->  joined, "mill", a line end and "one nine"

  Joined, the result equals `clean` on the joined text. Memory is limited to the longest chunk
  and some ten thousand characters, if characters below U+0300 occur now and then.
  """
  if language not in LANGUAGES:
    raise unknown("language", LANGUAGES, language)
  return _join(_cut(chunks), LANGUAGES[language])


def _join(blocks: Iterable[str], language: Language) -> Iterator[str]:
  gap = None  # the white space before the next word; None before the first
  for block in blocks:
    text = _map_characters(block, language)
    words = text.strip()
    begin = text[: text.index(words[0])] if words else text
    gap = None if gap is None else _collapse(gap + begin)
    if not words:
      continue
    lines = filter(None, [" ".join(line.split()) for line in words.split("\n")])
    yield (gap or "") + "\n".join(lines)
    gap = _collapse(text[len(begin) + len(words) :])


def _collapse(white_space: str) -> str:
  """The one character that replaces a run of spaces and line ends."""
  return "\n" if "\n" in white_space else white_space[:1]


def _map_characters(text: str, language: Language) -> str:
  """Steps 1 to 3: letters, spaces and line ends, not yet collapsed."""
  text = unicodedata.normalize("NFKC" if language.folds else "NFC", _MARKER.sub("\n", text))
  table = _Table(language)
  if language.alphabet.isascii():
    # For pure ASCII, the next line is twenty times as fast.
    text = _FOREIGN.sub(lambda match: match[0].translate(table), text)
  text = text.translate(table)
  for digit, name in enumerate(language.digits):
    text = text.replace(str(digit), f" {name} ")
  return text


def _cut(chunks: Iterable[str]) -> Iterator[str]:
  """Cuts a text again at places where steps 1 to 3 treat the parts like the full text."""
  buffer, size, enough = [], 0, _BLOCK
  for chunk in chunks:
    for begin in range(0, len(chunk), _BLOCK):
      buffer.append(chunk[begin : begin + _BLOCK])
      size += len(buffer[-1])
      if size < enough:
        continue
      text = "".join(buffer)
      end = _last_cut(text)
      if end:
        yield text[:end]
      buffer, size = [text[end:]], len(text) - end
      enough = max(_BLOCK, 2 * size)
  yield "".join(buffer)


def _last_cut(text: str) -> int:
  """The last index at which the text can be cut, 0 if there is none."""
  for i in range(len(text) - _REACH, 0, -1):
    # Nothing below U+0300 combines in a normal form with what precedes it.
    if text[i] < "\u0300":
      markers = _OVERLAPPING_MARKER.finditer(text, max(0, i - _REACH), i + _REACH)
      if not any(match.start() < i < match.end(1) for match in markers):
        return i
  return 0


@functools.lru_cache(maxsize=16)
class _Table(dict):
  """A table for `str.translate`, filled when a character is first looked up."""

  def __init__(self, language: Language):
    super().__init__(dict.fromkeys(map(ord, language.diacritics), ""))
    self._letters = frozenset(language.alphabet)
    self._folds = language.folds

  def __missing__(self, code: int) -> str:
    result = character = chr(code)
    if (digit := unicodedata.decimal(character, None)) is not None:
      result = str(digit)
    elif character not in " \n":
      # Only the dotted I has two characters in lower case.
      result = "".join(filter(self._letters.__contains__, character.lower()))
      result = result or (self._folds and self._fold(character)) or " "
    self[code] = result
    return result

  def _fold(self, character: str) -> str:
    """The letter of the alphabet that a character looks like, if any."""
    if unicodedata.category(character)[0] != "L":  # such as a stroke for l
      return ""
    base, *marks = unicodedata.normalize("NFD", character)
    if marks:  # such as the Cyrillic a with two dots
      if base.lower() in self._letters:
        return ""
      letter = unicodedata.normalize("NFC", self._fold(base) + "".join(marks))
      return letter if letter in self._letters else ""
    # Those that share an entry with it, then those that resemble the same one: the table
    # has I and what looks like I under l, and the eth and the D with stroke under D.
    near = _look_alikes(character)
    near += [other for middle in near for other in _look_alikes(middle)]
    near = [other for other in near if len(other) == 1 and other.lower() in self._letters]
    category = unicodedata.category(character)
    near.sort(key=lambda other: unicodedata.category(other) != category)
    return near[0].lower() if near else ""


def _look_alikes(character: str) -> list[str]:
  """The look-alikes of a character, or of a few, from Unicode's table."""
  table = optional("confusable_homoglyphs.confusables", "confusable-homoglyphs").confusables_data
  return [entry["c"] for entry in table.get(character, ())]


def main() -> None:
  """Cleans the standard input, in UTF-8, in the language that the command line names."""
  with exit_on_user_error():
    language = sys.argv[1] if len(sys.argv) == 2 else ""
    for chunk in clean_chunks(decode(sys.stdin.buffer), language):
      sys.stdout.buffer.write(chunk.encode())


if __name__ == "__main__":
  main()
