"""The One Billion Word benchmark: sentences of news."""

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.builders.base import TextBuilder
from dpjax.data.download import File
from dpjax.errors import UserError


class Lm1b(TextBuilder, skip_registration=True):
  """The One Billion Word benchmark: sentences in English, tokenised and shuffled.

  A sentence a line, 0.8 billion words. Train is the 99 shards of the training part, in
  the order in which the archive has them, which is always the same. Of the 50 held-out
  shards the first (heldout-00000) is the test split, as in the literature (Jozefowicz et
  al. 2016, "Exploring the Limits of Language Modeling"), and the second (heldout-00001)
  is validation: no paper of ours names one, and what is chosen by it must not be the
  test split. The others are not used.

  Source: Chelba et al. 2013, arxiv.org/abs/1312.3005; statmt.org/lm-benchmark. Licence:
  none is stated; the sentences are of the news crawl of WMT 2011, given for research.
  """

  name = "lm1b"
  FILES = (
    File(
      "http://www.statmt.org/lm-benchmark/"
      "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
      # tensorflow_datasets/datasets/lm1b/checksums.tsv of github.com/tensorflow/datasets.
      checksum="sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
      size=1_792_209_805,
    ),
  )

  def texts(self, get):
    """The shards of the three splits; the archive is gone through once for each."""
    path = get(self.FILES[0])
    heldout = r"heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-{}-of-00050"
    train = r"training-monolingual\.tokenized\.shuffled/news\.en-\d{5}-of-00100"
    return {
      "train": read_tar(path, train, members=99),
      "validation": read_tar(path, heldout.format("00001")),
      "test": read_tar(path, heldout.format("00000")),
    }


def read_tar(path: Path, pattern: str, *, members: int = 1) -> Iterator[str]:
  """The lines of some members of a tar.gz archive, which is read as a stream.

  Args:
    path: the archive.
    pattern: regular expression for the end of the members' paths: whole names of a file
      and of the folders before it.
    members: how many there are; the rest of the archive after the last is not read.

  Returns:
    The lines, their ends included; member after member in the order of the archive.

  Raises:
    ValueError: the archive is cut off or damaged or has fewer such members, or their
      text is not UTF-8.
  """
  seen = 0
  try:
    # The module gzip notices where an archive is cut off, tarfile by itself does not.
    with gzip.open(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
      for member in archive:
        is_wanted = re.fullmatch(f"(.*/)?{pattern}", member.name)
        content = archive.extractfile(member) if is_wanted else None
        if content is not None:
          yield from (line.decode() for line in content)
          seen += 1
          if seen == members:
            return
  except (gzip.BadGzipFile, tarfile.TarError, zlib.error, EOFError, UnicodeDecodeError) as error:
    raise UserError(
      f"{path}: expected a tar.gz archive with {members} members {pattern} in UTF-8, got {error}"
    ) from error
  raise UserError(f"{path}: expected {members} members {pattern}, got {seen}")
