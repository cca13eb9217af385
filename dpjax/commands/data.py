"""Lists, prepares and cleans texts.

  dpjax data list
  dpjax data prepare wikitext2
  dpjax data prepare wiki40b --language=fi --head
  dpjax data prepare tfds:NAME
  dpjax data clean --language=fi raw.txt clean.txt

`prepare` downloads a corpus, as training does by itself. `clean` cleans a text like text8, in
the alphabet of the language; "-" is standard input or output.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpjax.data import catalog
from dpjax.errors import UserError, exit_on_user_error

PART = 2**20  # characters


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the action that the first word of the command line names."""
  plain = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser("dpjax data", description=__doc__, formatter_class=plain)
  path, commands = os.path.expanduser, parser.add_subparsers(dest="command", required=True)
  listing = commands.add_parser("list", help="list names, sizes, licences, and what is prepared")
  prepare = commands.add_parser("prepare", help="download and prepare a corpus")
  prepare.add_argument("name")
  prepare.add_argument("--language", default="", help="language, if the corpus has several")
  about = "only the first part, enough for 400M characters, if the corpus has one"
  prepare.add_argument("--head", action="store_true", help=about)
  prepare.add_argument("--manual_dir", type=path, default="", help="data_dir/manual")
  for command in (listing, prepare):
    command.add_argument("--data_dir", type=path, default="data", help="data")
  cleaning = commands.add_parser("clean", help="clean a text as text8 is cleaned")
  cleaning.add_argument("source", type=path, help="a text in UTF-8, or -")
  cleaning.add_argument("target", type=path, help="the clean one, or -")
  cleaning.add_argument("--language", required=True)
  given = parser.parse_args(arguments)
  try:
    with exit_on_user_error():
      {"list": _list, "prepare": _prepare, "clean": _clean}[given.command](given)
  except BrokenPipeError:
    sys.stderr.close()  # the reader has enough


def _list(given) -> None:
  data_dir = Path(given.data_dir)
  print(f"{catalog.PYTHON_MANUAL}: the language manual that comes with Python; 0.4 MB")
  for name, entry in catalog.ENTRIES.items():
    made = [
      f"{language}{' (head)' * head}".strip() or "yes"
      for language in entry.languages or ("",)
      for head in (False, True)[: 1 + bool(entry.head)]
      if catalog.is_made(name, data_dir, language, head)
    ]
    print(f"\n{name}: {entry.title}")
    if entry.languages:
      print(f"  languages  {', '.join(entry.languages)}")
    print(
      f"  size       {entry.size}\n  licence    {entry.licence}\n"
      f"  source     {entry.source}\n  prepared   {', '.join(made) or 'no'}"
    )


def _prepare(given) -> None:
  where = given.language, given.data_dir, given.manual_dir
  for split, text in catalog.open_named(given.name, *where, is_head=given.head).splits.items():
    print(f"{split:6}{len(text) / 1e6:12,.1f} MB")


def _clean(given) -> None:
  from dpjax.text import cleaning

  cleaned = cleaning.clean_chunks(_read(given.source), given.language)
  if given.target == "-":
    for part in cleaned:
      sys.stdout.buffer.write(part.encode())
    return
  partial = Path(given.target + ".partial")
  try:
    with partial.open("w", encoding="utf-8", newline="") as target:
      target.writelines(cleaned)
    os.replace(partial, given.target)
  finally:
    partial.unlink(missing_ok=True)


def _read(name: str) -> Iterator[str]:
  """The parts of a text file, or of standard input for "-"."""
  try:
    with contextlib.ExitStack() as stack:
      # In bytes: Python's text may pass over errors.
      source = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
      file = io.TextIOWrapper(source, encoding="utf-8", newline="")
      while part := file.read(PART):
        yield part
      file.detach()
  except UnicodeDecodeError as error:
    raise UserError(f"{name}: expected a text in UTF-8, got {error}") from error
