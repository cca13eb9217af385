"""Every snippet of the README and the documentation runs, from top to bottom.

What a block is, its language says: python runs as it stands, or is written to the file that
its title names; pycon is a doctest; no language are commands; sh is checked for its flags
alone; text and toml are only shown.
"""

import doctest
import re
import shlex
import shutil
from pathlib import Path

import jax
import pytest

import dpjax
from dpjax import __main__ as dpjax_command
from dpjax.config import loading, registry
from dpjax.data import sources
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")

DOCS = helpers.ROOT / "docs"
PAGES = [
  helpers.ROOT / "README.md",
  *sorted(DOCS.glob("*.md")),
  helpers.ROOT / "models/README.md",
  *sorted(DOCS.glob("guides/*.md")),
  *sorted(DOCS.glob("api/*.md")),
]
BLOCK = re.compile(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NOT_RUN = {"pip", "pytest", "mkdocs"}
LINE = "The statement raises an exception if a name is not found. A list is an object, and so on."

# Stands for the packaged experiment wherever a snippet names it.
EXPERIMENT = f"""
import dpjax

def get_config():
  config = dpjax.config.load("{helpers.ROOT}/configs/quickstart.py:tiny")
  config.model.update(dict(num_layers=2, width=16, feed_forward_width=20, max_length=32))
  config.train.update(dict(num_steps=6, eval_every_steps=3, log_every_steps=2))
  config.train.update(dict(checkpoint_every_steps=3))
  config.data.path, config.sample.length = "my.txt", 5
  return config
"""


def blocks(page: Path) -> list[tuple[str, str, str, int]]:
  """Language, title, code and line of each block."""
  text = page.read_text(encoding="utf-8")
  return [(*x.groups(default=""), text.count("\n", 0, x.start()) + 1) for x in BLOCK.finditer(text)]


def commands(code: str) -> list[list[str]]:
  """The words of each command, without the variables before it."""
  lines = code.replace("\\\n", " ").replace(" && ", "\n").splitlines()
  split = [shlex.split(line, comments=True) for line in lines]
  return [[x for x in words if not re.match(r"[A-Z_]+=", x)] for words in split if words]


def run_command(words: list[str]) -> None:
  if words[0] == "python" and words[1] in ("train.py", "evaluate.py", "generate.py"):
    words = ["dpjax", words[1].removesuffix(".py"), *words[2:]]
  if words[0] == "cp":
    shutil.copy(*words[1:])
  if words[0] in {*NOT_RUN, "cp"}:
    return
  assert words[0] == "dpjax", words
  with helpers.arguments(*words):
    dpjax_command.main()


def check_flags(words: list[str]) -> None:
  if words[0] == "dpjax":
    folders = [helpers.ROOT / "dpjax" / name for name in ("commands", "analysis")]
    sources = [path for folder in folders for path in folder.glob("*.py")]
    known = "".join(path.read_text(encoding="utf-8") for path in sources)
    for word in words[2:]:
      name = word.removeprefix("--").partition("=")[0].partition(".")[0]
      assert not word.startswith("--") or f'"{name}"' in known or f'"--{name}"' in known, word


def run_pycon(code: str, names: dict, page: Path, line: int) -> None:
  test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), line)
  test.globs = names
  flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  found = doctest.DocTestRunner(optionflags=flags, verbose=False).run(test, clear_globs=False)
  assert found.attempted and not found.failed, f"{page}, line {line}"


def run(page: Path) -> None:
  names = {"__name__": "__main__"}
  for language, title, code, line in blocks(page):
    if title:
      compile(code, title, "exec")
      Path(title).write_text(code, encoding="utf-8")
    elif language == "python":
      exec(compile("\n" * line + code, str(page), "exec"), names)
    elif language == "pycon":
      run_pycon(code, names, page, line)
    elif language in ("", "sh"):
      for words in commands(code):
        (run_command if language == "" else check_flags)(words)
    else:
      assert language in ("text", "toml"), f"{page}, line {line}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder as a reader has it: a text, and a run trained with the quickstart."""
  folder = tmp_path_factory.mktemp("reader")
  for name in ("configs", "packaged"):
    (folder / name).mkdir()
    (folder / name / "quickstart.py").write_text(EXPERIMENT, encoding="utf-8")
  for path in (helpers.ROOT / "configs").glob("*.py"):
    if path.name != "quickstart.py":
      (folder / "packaged" / path.name).symlink_to(path)
  (folder / "my.txt").write_text(f"{LINE}\n" * 120, encoding="utf-8")
  (folder / "models").symlink_to(helpers.ROOT / "models")
  with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
    patch.chdir(folder)
    patch.setattr(loading, "_folder", lambda: folder / "packaged")
    dpjax.train(dpjax.config.load("quickstart"), "runs/quickstart")
  return folder


@pytest.fixture
def reader(folder, tmp_path, monkeypatch):
  """A copy of it to work in; what is registered there is forgotten afterwards."""
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True, symlinks=True)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(loading, "_folder", lambda: folder / "packaged")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("MPLBACKEND", "agg")
  kinds = registry.mixers, registry.boundaries, registry.optimizers, registry.schedules
  for kind in kinds:
    monkeypatch.setattr(kind, "_registered", dict(kind._registered))
  monkeypatch.setattr(sources, "SOURCES", dict(sources.SOURCES))
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(helpers.ROOT)))
def test_every_snippet_of_the_page_runs(page, reader):
  run(page)
