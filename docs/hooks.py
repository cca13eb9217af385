"""Lets pages show the pictures of results/, which lies beside docs/."""

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
  return markdown.replace("](../results/", "](results/")
