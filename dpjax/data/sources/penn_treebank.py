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
NAMES = {split: f"ptb.{split}.txt" for split in ("train", "valid", "test")}


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The three files, from the archive or the manual folder."""
  archive = files.manual_dir / ARCHIVE
  paths = {split: files.manual_dir / name for split, name in NAMES.items()}
  if archive.exists():
    wanted = {x: (re.escape(f"simple-examples/data/{name}"), 1) for x, name in NAMES.items()}
    yield from reading.tar_members(archive, wanted)
  elif all(path.exists() for path in paths.values()):
    yield from reading.text_files(paths)
  else:
    raise UserError(
      f"penn_treebank: expected {ARCHIVE} (or {', '.join(NAMES.values())}, or a folder "
      f"penn_treebank with train.txt, valid.txt, test.txt) in the folder {files.manual_dir}, "
      "got none of them. The corpus may not be downloaded for you: "
      "with a licence of the Linguistic Data Consortium (catalog.ldc.upenn.edu/LDC99T42) "
      f"take the archive from Mikolov's page, www.fit.vutbr.cz/~imikolov/rnnlm/{ARCHIVE}, "
      "and put it there."
    )


SOURCE = Source(
  "Penn Treebank, words, as Mikolov prepared it",
  read,
  "LDC; research only, not to be had without a licence",
  "6 MB; by hand",
  "Mikolov et al. 2010",
)
