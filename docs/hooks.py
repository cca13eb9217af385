"""Lets pages show the pictures of results/, which lies beside docs/, and wrap long commands."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files, config):
  """Adds the pictures to the site, as results/..."""
  for path in sorted((ROOT / "results").rglob("*.png")):
    name = path.relative_to(ROOT).as_posix()
    files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown, page, config, files):
  """Points the links that hold in the repository to where the site has the pictures."""
  markdown = markdown.replace("](../results/", "](results/")
  return markdown.replace("](../../results/", "](../results/")  # of the guides


def on_page_content(html, page, config, files):
  """Marks the flags of commands, so that a line that wraps keeps them whole."""

  def mark(block):
    return re.sub(r"(?<!\S)--[^\s<]+", r'<span class="flag">\g<0></span>', block[0])

  html = re.sub(r'<div class="language-text.*?</code>', mark, html, flags=re.DOTALL)
  # Its tables are lists on a narrow screen.
  is_wide = page.file.src_uri == "settings.md"
  return f'<div class="settings">{html}</div>' if is_wide else html
