"""Exports a trained run as a small folder for others to load: dpjax export RUN OUT.

OUT may be hf://OWNER/NAME, at the Hugging Face Hub. `dpjax.runs.export` describes the folder.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from dpjax import hub
from dpjax.commands.command_line import Parser, path, start
from dpjax.commands.processes import check_platform


def main(words: Sequence[str] | None = None) -> None:
  """Exports the run given on the command line."""
  parser = Parser("export", __doc__, is_distributed=False)
  add = parser.add_argument
  add("run", metavar="RUN", type=path, help="the folder of a run")
  add("out", metavar="OUT", type=path, help="a new folder, or hf://OWNER/NAME")
  add("--step", type=int, help="checkpoint to export; default: the best by validation")
  about = "float32 or bfloat16; default: float32, or that of an exported RUN"
  add("--dtype", default="", help=about)
  about = "the model's licence for the model card, by its name on the Hub, such as cc-by-4.0"
  add("--license", default="", help=about)
  about = "create a private model on the Hub; the token is from HF_TOKEN or `hf auth login`"
  add("--private", action="store_true", help=about)
  start(parser, _export, words)


def _export(options: Namespace) -> None:
  from dpjax import runs
  from dpjax.runs import run_files

  check_platform()
  run = runs.load(options.run, options.step)
  run.save(options.out, dtype=options.dtype, license=options.license, private=options.private)
  if hub.is_address(options.out):
    print(f"{options.out}: uploaded")
    return
  size = (Path(options.out) / run_files.PARAMETERS).stat().st_size
  print(f"{options.out}: {size / 2**20:,.1f} MiB")
