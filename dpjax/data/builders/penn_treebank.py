"""Penn Treebank in Mikolov's preparation, from the manual folder alone."""

import re
from pathlib import Path

from dpjax.data.builders.base import TextBuilder, read_text
from dpjax.data.builders.lm1b import read_tar
from dpjax.errors import UserError

ARCHIVE = "simple-examples.tgz"
NAMES = {
  "train": "ptb.train.txt",
  "validation": "ptb.valid.txt",
  "test": "ptb.test.txt",
}


class PennTreebank(TextBuilder, skip_registration=True):
  """Penn Treebank, word level: the Wall Street Journal, 10,000 words, numbers as N.

  A sentence a line, in lower case, with a space at either end; all other words are
  `<unk>`. Sections 0-20, 21-22 and 23-24 are train, validation and test: 929,589, 73,760
  and 82,430 tokens with one `<eos>` a line.

  Its licence forbids others to give it away, so nothing is downloaded. The manual folder
  must have `simple-examples.tgz`, or the three files of that archive that are needed:
  ptb.train.txt, ptb.valid.txt and ptb.test.txt.

  Source: Mikolov et al. 2010, "Recurrent neural network based language model",
  fit.vutbr.cz/~imikolov/rnnlm; Marcus et al. 1993. Licence: the Linguistic Data
  Consortium's (LDC99T42, catalog.ldc.upenn.edu/LDC99T42).
  """

  name = "penn_treebank"

  def texts(self, get):
    """The three files, from the archive or as they are.

    Raises:
      ValueError: the manual folder has neither.
    """
    del get  # Nothing is downloaded.
    folder = Path(self.manual_dir or ".")
    archive = folder / ARCHIVE
    if archive.exists():
      return {
        split: read_tar(archive, re.escape(f"simple-examples/data/{name}"))
        for split, name in NAMES.items()
      }
    paths = {split: folder / name for split, name in NAMES.items()}
    if all(path.exists() for path in paths.values()):
      return {split: read_text(path) for split, path in paths.items()}
    raise UserError(
      f"{self.name}: expected {ARCHIVE} (or {', '.join(NAMES.values())}, or a folder "
      f"{self.name} with train.txt, valid.txt, test.txt) in the folder {folder}, got "
      "none of them. The corpus may not be downloaded for you: "
      "with a licence of the Linguistic Data Consortium (catalog.ldc.upenn.edu/LDC99T42) "
      f"take the archive from Mikolov's page, www.fit.vutbr.cz/~imikolov/rnnlm/{ARCHIVE}, "
      "and put it there."
    )
