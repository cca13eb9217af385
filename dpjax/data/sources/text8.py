"""text8: the first 10^8 cleaned characters of the English Wikipedia of March 2006.

Letters a to z and single spaces, digits spelt out, one line without an end. Splits: 90M, 5M and
5M characters, in order (Mikolov et al. 2012, "Subword language modeling with neural networks").
"""

from collections.abc import Iterator

from dpjax.data.sources import File, Files, Source, reading

ARCHIVE = File(
  "http://mattmahoney.net/dc/text8.zip",
  # Setup.hs of github.com/d61h6k4/tensorflow-text8-input-data.
  checksum="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
)


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The text in the archive, cut in three."""
  text = "".join(reading.zip_member(files.get(ARCHIVE), "text8"))
  second = len(text) - len(text) // 20
  first = second - len(text) // 20
  yield from (("train", text[:first]), ("valid", text[first:second]), ("test", text[second:]))


SOURCE = Source(
  "text8, the first 100M cleaned characters of Wikipedia",
  read,
  "GFDL, CC BY-SA 3.0",
  "100 MB; download 31 MB",
  "Mahoney 2006, mattmahoney.net/dc/textdata.html",
)
