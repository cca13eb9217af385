"""Shows how runs read a text.

  dpjax look runs/gumbel runs/spaces --text="the quick brown fox" --out=page.html

prints the text with a mark at the end of each segment. With --out, it writes a self-contained
HTML page that shows all runs side by side, token by token. `dpjax.analysis.page` lists the marks.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpjax import files
from dpjax.commands.command_line import Parser, local_path, path, start
from dpjax.commands.processes import check_platform

if TYPE_CHECKING:
  from dpjax.runs import Run

_DEFAULT_TOKENS = 120


def main(words: Sequence[str] | None = None) -> None:
  """Prints the segments, and writes the page."""
  parser = Parser("look", __doc__, is_distributed=False)
  add = parser.add_argument
  add("runs", metavar="RUN", nargs="+", type=path, help="the folder of a run")
  add("--text", help="a text or a file; default: the beginning of the first run's test split")
  add("--out", type=local_path, help="a file for the page, such as page.html")
  start(parser, _look, words)


def _look(options: Namespace) -> None:
  from dpjax import runs
  from dpjax.analysis import page, reading

  check_platform()
  loaded = [runs.load(folder) for folder in options.runs]
  text = _read_text(loaded[0], options.text)
  segmentations = [reading.segment(run, text) for run in loaded]
  for folder, segmentation in zip(options.runs, segmentations, strict=True):
    if len(loaded) > 1:
      print(f"{folder}:")
    print(page.describe(segmentation))
  if options.out:
    files.write_output(Path(options.out), page.write(loaded, text, segmentations).encode())


def _read_text(run: "Run", text: str | None) -> str:
  """The text of --text, of the file that it names, or the beginning of the test split.

  A `UserError` if it names a folder, a device or a pipe.
  """
  from dpjax.data import readers

  if text is None:
    return run.tokenizer.decode(run.tokens("test")[: min(_DEFAULT_TOKENS, run.window)])
  name = os.path.expanduser(text)
  return readers.read_text(name, "--text") if os.path.exists(name) else text
