"""Exports a trained run as a small folder for others to load: dpjax export RUN OUT.

`dpjax.run.export` describes the folder.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from dpjax.commands import flags as command_line


def main(arguments: Sequence[str] | None = None) -> None:
  """Exports the run given on the command line."""
  about = "A trained run as a small folder that others load."
  parser = argparse.ArgumentParser(prog="dpjax export", description=about)
  parser.add_argument("run", metavar="RUN", type=os.path.expanduser, help="the folder of a run")
  parser.add_argument("out", metavar="OUT", type=os.path.expanduser, help="a new folder")
  about = "checkpoint to export; default: the best by validation"
  parser.add_argument("--step", type=int, help=about)
  parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
  with command_line.parsed(parser, arguments) as given:
    from dpjax import run as run_lib
    from dpjax.run import workdir

    command_line.check_platform()
    run_lib.load(given.run, given.step).save(given.out, dtype=given.dtype)
    size = (Path(given.out) / workdir.PARAMETERS).stat().st_size
    print(f"{given.out}: {size / 2**20:,.1f} MiB")
