"""Lists the named corpora, with their sizes and licences: dpjax data list."""

import argparse
from collections.abc import Sequence

from dpjax.config.registry import load_plugins
from dpjax.data import corpus


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the action that the first word of the command line names."""
  parser = argparse.ArgumentParser("dpjax data", description=__doc__)
  parser.add_argument("command", choices=["list"], help="list names, sizes, licences and sources")
  parser.parse_args(arguments)
  load_plugins()
  for name, source in corpus.SOURCES.items():
    print(f"{name}: {source.title}")
    print(
      f"  size       {source.size}\n  licence    {source.licence}\n  source     {source.source}\n"
    )
