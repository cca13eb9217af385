"""Lists the named corpora, with their sizes and licences: dpjax data list."""

import argparse
from collections.abc import Sequence

from dpjax.data import catalog


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the action that the first word of the command line names."""
  parser = argparse.ArgumentParser("dpjax data", description=__doc__)
  parser.add_argument("command", choices=["list"], help="list names, sizes, licences and sources")
  parser.parse_args(arguments)
  print(f"{catalog.PYTHON_MANUAL}: the language manual that comes with Python; 0.4 MB")
  for name, entry in catalog.ENTRIES.items():
    print(f"\n{name}: {entry.title}")
    if entry.languages:
      print(f"  languages  {', '.join(entry.languages)}")
    print(f"  size       {entry.size}\n  licence    {entry.licence}\n  source     {entry.source}")
