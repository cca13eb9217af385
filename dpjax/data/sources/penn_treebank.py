"""Penn Treebank in Mikolov's preparation: the Wall Street Journal, from the manual folder.

One sentence on each line, in lower case; 10,000 words, with N for numbers and `<unk>` for all other
words. Sections 0-20, 21-22 and 23-24 are train, validation and test: 929,589, 73,760 and 82,430
tokens with an `<eos>` for each line. The licence (LDC99T42) forbids redistribution, so nothing is
downloaded. Source: Mikolov et al. 2010, "Recurrent neural network based language model",
fit.vutbr.cz/~imikolov/rnnlm; Marcus et al. 1993.
"""

import re
from collections.abc import Iterator

from dpjax.data.sources import Files, Source, reading
from dpjax.errors import UserError

ARCHIVE = "simple-examples.tgz"


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The three files of the archive."""
  archive = files.manual_dir / ARCHIVE
  if not archive.exists():
    raise UserError(
      f"penn_treebank: expected {ARCHIVE} (or a folder penn_treebank with train.txt, valid.txt, "
      f"test.txt) in the folder {files.manual_dir}, got neither. The corpus may not be downloaded "
      "for you: with a licence of the Linguistic Data Consortium (catalog.ldc.upenn.edu/LDC99T42) "
      f"take the archive from Mikolov's page, www.fit.vutbr.cz/~imikolov/rnnlm/{ARCHIVE}, "
      "and put it there."
    )
  name = "simple-examples/data/ptb.{}.txt"
  splits = ("train", "valid", "test")
  return reading.tar_members(archive, {x: (re.escape(name.format(x)), 1) for x in splits})


SOURCE = Source(
  "Penn Treebank, words, as Mikolov prepared it",
  read,
  "LDC; research only, not to be had without a licence",
  "6 MB; by hand",
  "Mikolov et al. 2010",
)
