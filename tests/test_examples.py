"""The notebooks of examples/: what is committed is clean, and every cell runs."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import helpers

EXAMPLES = helpers.ROOT / "examples"
SMALL = dict(DPJAX_TOUR_STEPS="12", MPLBACKEND="agg")

# Runs a notebook, and writes how many figures it shows, and some values.
RUN = """
import json, pathlib, sys
import run_notebook

outputs, names = run_notebook.run(pathlib.Path(sys.argv[1]))
shown = [output for cell in outputs for output in cell]
values = {key: names.get(key) for key in ("texts", "rendered", "differences", "message")}
values["figures"] = sum(x["output_type"] == "display_data" for x in shown)
values["text"] = "".join("".join(x["text"]) for x in shown if x["output_type"] == "stream")
values["package"] = names["dpjax"].__file__
pathlib.Path("values.json").write_text(json.dumps(values), encoding="utf-8")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
  """A folder with what the wheel installs."""
  folder = tmp_path_factory.mktemp("wheel")
  build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
  subprocess.run(build, cwd=helpers.ROOT, check=True, capture_output=True)
  (wheel,) = folder.glob("dpjax-*.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "site")
  return folder / "site"


def run(name: str, folder: Path, site: Path) -> dict:
  """Runs a notebook with the wheel, in a folder outside of the clone."""
  for part in ("run_notebook.py", f"{name}.ipynb"):
    shutil.copy(EXAMPLES / part, folder)
  done = subprocess.run(
    [sys.executable, "-c", RUN, f"{name}.ipynb"],
    # Quick to compile, as what the tests themselves do.
    env=helpers.environment(PYTHONPATH=str(site), XLA_FLAGS=os.environ["XLA_FLAGS"], **SMALL),
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  values = json.loads((folder / "values.json").read_text(encoding="utf-8"))
  assert values["package"] == str(site / "dpjax/__init__.py")
  return values


@pytest.mark.parametrize("name", ["tour", "your_own"])
def test_the_notebook_is_committed_clean_with_its_outputs(name):
  written = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
  content = json.loads(written)
  # As Jupyter writes it, so that a later edit shows as what it changes.
  assert written == json.dumps(content, indent=1, ensure_ascii=False) + "\n"
  code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
  for count, cell in enumerate(code, start=1):
    source = "".join(cell["source"])
    assert all(len(line) <= 100 for line in source.splitlines()), cell["id"]
    assert cell["execution_count"] == count, cell["id"]
    assert cell["outputs"] or "print(" not in source, cell["id"]
  kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
  assert kinds.count("display_data") >= 2 and "error" not in kinds
  assert len(written) < 1_000_000
  assert not re.search(r"/(work|tmp|home|Users|root)/|[A-Z]:\\", written)


def test_the_first_cell_installs_dpjax_where_it_is_missing(tmp_path, monkeypatch):
  first, other = (
    next("".join(x["source"]) for x in content["cells"] if x["cell_type"] == "code")
    for content in (json.loads(path.read_text("utf-8")) for path in EXAMPLES.glob("*.ipynb"))
  )
  assert first == other
  called = []
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("DPJAX_SOURCE", raising=False)
  monkeypatch.setattr(subprocess, "run", lambda words, **_: called.append(words))
  exec(first, {})
  assert not called
  monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
  with pytest.raises(AssertionError, match="expected dpjax-.* beside the notebook"):
    exec(first, {})
  Path("dpjax-0.2.0-py3-none-any.whl").touch()
  exec(first, {})
  monkeypatch.setenv("DPJAX_SOURCE", "git+https://host.invalid/dpjax")
  exec(first, {})
  pip = [sys.executable, "-m", "pip", "install", "--quiet"]
  assert called == [[*pip, "dpjax-0.2.0-py3-none-any.whl"], [*pip, os.environ["DPJAX_SOURCE"]]]


def test_stored_outputs_do_not_name_temporary_folders(tmp_path):
  program = runpy.run_path(str(EXAMPLES / "run_notebook.py"))
  source = (
    "import tempfile\nwith tempfile.TemporaryDirectory() as folder:\n  print(f'in {folder}/data')"
  )
  cell = dict(cell_type="code", id="one", source=[source], outputs=[], execution_count=None)
  notebook = tmp_path / "small.ipynb"
  notebook.write_text(json.dumps(dict(cells=[cell])), encoding="utf-8")
  program["store"](notebook, program["run"](notebook)[0])
  (output,) = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["outputs"]
  assert output["text"] == ["in TEMPORARY/data\n"]


@pytest.mark.slow
def test_every_cell_of_the_tour_runs(tmp_path, site):
  values = run("tour", tmp_path, site)
  assert values["figures"] == 2  # the costs, and the Dispatcher's matrices
  assert [*values["texts"]] == ["dispatcher", "extractor", "attention", "pooling"]
  for name, text in values["texts"].items():
    assert len(text) == 100, name
    assert values["differences"][name] < 1e-4, name
    assert f"--- {name} ---\nThe statement" in values["text"]
  assert values["rendered"].startswith("The␣|statement␣|raises␣|")
  assert "bits per byte" in (tmp_path / "segments.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_cell_of_the_own_mixer_runs(tmp_path, site):
  values = run("your_own", tmp_path, site)
  assert values["figures"] == 2
  assert "an output depends on later inputs" in values["message"]
  assert "keeps the contract: causality" in values["text"]
  assert [len(text) for text in values["texts"].values()] == [100, 100, 100]
