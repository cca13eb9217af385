"""Lists the named corpora, with their sizes and licences: dpjax data list."""

from argparse import Namespace
from collections.abc import Sequence

from dpjax.commands.command_line import Parser, start
from dpjax.config.registry import load_plugins
from dpjax.data import sources


def main(words: Sequence[str] | None = None) -> None:
  """Runs the action that the first word of the command line names."""
  parser = Parser("data", __doc__, is_distributed=False)
  about = "list names, sizes, licences and sources"
  parser.add_argument("command", choices=["list"], help=about)
  start(parser, _list, words)


def _list(_: Namespace) -> None:
  load_plugins()
  for name, source in sources.SOURCES.items():
    print(f"{name}: {source.title}")
    print(
      f"  size       {source.size}\n  licence    {source.licence}\n  source     {source.source}\n"
    )
