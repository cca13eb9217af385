"""106 English children's books of Project Gutenberg, 35 MB, 100/3/3 whole books a split.

The list, our choice, is childrens_books.tsv beside this module (id, split, title, author). Source:
https://www.gutenberg.org/ebooks/ID, fetched as pgID.txt from Project Gutenberg's mirror. Header,
licence, footer and the credits at the beginning go, line ends are LF, and a line <|endofbook|>
stands between two books.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.corpus import line_pattern
from dpjax.data.sources import File, Files, Source
from dpjax.errors import UserError

# Project Gutenberg asks programs to use its mirrors; the site itself blocks them.
BASE_URL = "https://gutenberg.pglaf.org/cache/epub"
BOOKS = Path(__file__).with_suffix(".tsv")
SEPARATOR = "<|endofbook|>\n"

_START = re.compile(
  r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG E-?(?:BOOK|TEXT)[^*]*\*{3}.*\n|"
  r"^\*END[* ]THE SMALL PRINT.*\*END\*.*\n",
  re.M,  # the latter until about 2003
)
_END = re.compile(
  r"^(?:\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG|"
  r"End of (?:the |this )?Project Gutenberg)",
  re.M | re.I,
)
_CREDIT = re.compile(
  r"note: project gutenberg|"
  r"(?:this )?(?:e-?text|e-?book|file) (?:was )?(?:prepared|produced|made|scanned)\b|"
  r"(?:produced|prepared|transcribed|scanned|digiti[sz]ed) (?:and \w+ )?(?:by|from)\b",
  re.I,
)


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The books of the list, split by split."""
  with BOOKS.open(encoding="utf-8") as table:
    rows = [*csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)]
  for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
    for i, number in enumerate(row["id"] for row in rows if row["split"] == name):
      book = read_book(files.get(File(f"{BASE_URL}/{number}/pg{number}.txt")))
      yield split, SEPARATOR * (i > 0) + book


def read_book(path: Path) -> str:
  """The text of a book without Project Gutenberg's header and footer.

  Raises:
    UserError: the file is not UTF-8, or Project Gutenberg's first or last line is missing.
  """
  try:
    text = path.read_text(encoding="utf-8-sig")  # also makes line ends LF
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: expected a book in UTF-8, got {error}") from error
  starts = list(_START.finditer(text))
  end = _END.search(text, starts[-1].end()) if starts else None
  if end is None:
    raise UserError(
      f"{path}: expected a book between the lines *** START OF THE PROJECT GUTENBERG EBOOK ... *** "
      f"and *** END OF ..., got none of the {'second' if starts else 'first'}"
    )
  text = _drop_blank(text[starts[-1].end() : end.start()])
  while _CREDIT.match(text):
    text = _drop_blank(text.partition("\n\n")[2])
  return text.rstrip() + "\n"


def _drop_blank(text: str) -> str:
  return re.sub(r"\A(?:[^\S\n]*\n)+", "", text)


SOURCE = Source(
  "106 children's books of Project Gutenberg",
  read,
  "public domain in the USA",
  "35 MB",
  "Project Gutenberg, gutenberg.org; the list is ours",
  documents=line_pattern(SEPARATOR.rstrip()),
)
