"""Makes the documentation's pages that show what models read, and the picture of one.

python docs/draw_pages.py

pages/boundaries.html shows two of models/, pages/hnet.html a small two-stage H-Net, which it
trains in a minute or two on Python's manual, in runs/look_hnet. The picture needs Chromium and
pip install -e '.[browser]'.
"""

import shutil
from pathlib import Path

import dpjax
from dpjax import files

ROOT = Path(__file__).parents[1]
STORY = (
  'Once upon a time there was a little girl. "Grandmother," she said one morning, "may I go into '
  'the wood to gather strawberries?"'
)
MANUAL = "The statement raises an exception if the name of the module is not found in the package."


def hnet() -> dpjax.runs.Run:
  """The H-Net of pages/hnet.html, trained if it is missing."""
  folder = ROOT / "runs/look_hnet"
  if not folder.exists():
    config = dpjax.config.load("hnet:two,tiny")
    config.data.name = "python_manual"
    config.model.update(dict(width=64, max_length=256, boundaries=dict(weight=0.1)))
    config.train.update(dict(num_steps=300, eval_every_steps=300, learning_rate=3e-3))
    dpjax.train(config, folder)
  return dpjax.load(folder)


def draw(page: Path, picture: Path) -> None:
  """Takes a screenshot of a page, wide enough for two runs side by side, pointing at a token."""
  from playwright.sync_api import sync_playwright

  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
      args=["--no-sandbox"],
    )
    tab = browser.new_page(viewport={"width": 1220, "height": 660}, color_scheme="light")
    tab.goto(page.as_uri())
    tab.locator("section .u").nth(23).click()
    tab.screenshot(path=picture)
    browser.close()


def main() -> None:
  """Writes the pages and the picture."""
  stories = [dpjax.load(ROOT / "models" / f"{name}-books") for name in ("routing", "whitespace")]
  pages = {"boundaries": dpjax.look(stories, STORY), "hnet": dpjax.look(hnet(), MANUAL)}
  for name, page in pages.items():
    files.write_file(ROOT / f"docs/pages/{name}.html", page.encode())
  draw(ROOT / "docs/pages/boundaries.html", ROOT / "docs/pictures/look.png")


if __name__ == "__main__":
  main()
