"""The notebook of examples/: what is committed is clean, and every cell runs.

The cells run as plain Python, in a process of their own: Jupyter would bring many more
packages, and open ports, to do the same.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import helpers

NOTEBOOK = helpers.ROOT / "examples/tour.ipynb"
FAMILIES = ["dispatcher", "extractor", "attention", "pooling"]
KEYS = {
  "markdown": {"cell_type", "id", "metadata", "source"},
  "code": {"cell_type", "id", "metadata", "source", "outputs", "execution_count"},
}


def code_cells() -> list[tuple[str, str]]:
  """Name and code of each cell that has any."""
  cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
  return [
    (f"{NOTEBOOK.name}, {cell['id']}", "".join(cell["source"]))
    for cell in cells
    if cell["cell_type"] == "code"
  ]


def run_cells(folder: Path) -> None:
  """Runs the cells as Jupyter does, and writes the figures they show, and some values."""
  # What the notebook imports it has to find by itself.
  sys.path[:] = [path for path in sys.path if Path(path).resolve() != helpers.ROOT]
  import matplotlib.pyplot as plt
  from matplotlib.figure import Figure

  names, figures = {"__name__": "__main__"}, []
  for name, code in code_cells():
    *body, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
      body, last = [*body, last], None
    exec(compile(ast.Module(body, []), name, "exec"), names)
    if last is not None:
      shown = eval(compile(ast.Expression(last.value), name, "eval"), names)
      figures += [shown] if isinstance(shown, Figure) else []
    figures += map(plt.figure, plt.get_fignums())
    for i, figure in enumerate(figures):
      if not (folder / f"{i}.png").exists():
        figure.savefig(folder / f"{i}.png")
    plt.close("all")
  np.savez(folder / "matrices.npz", *(m_bhts[0] for m_bhts in names["matrices"]))
  values = {key: names[key] for key in ("LINE", "texts", "rendered", "differences")}
  (folder / "values.json").write_text(json.dumps(values), encoding="utf-8")


def test_the_notebook_is_committed_clean():
  written = NOTEBOOK.read_text(encoding="utf-8")
  content = json.loads(written)
  # As Jupyter writes it, so that a later edit shows as what it changes.
  assert written == json.dumps(content, indent=1, ensure_ascii=False) + "\n"
  assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
  assert content["metadata"] == {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
  }
  cells = content["cells"]
  assert len({cell["id"] for cell in cells}) == len(cells)
  for cell in cells:
    assert set(cell) == KEYS[cell["cell_type"]], cell["id"]
    assert not cell["metadata"] and "".join(cell["source"]).strip(), cell["id"]
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
  for name, code in code_cells():
    compile(code, name, "exec")
    assert all(len(line) <= 100 for line in code.splitlines()), name
  assert not re.search(r"/(work|tmp|home|Users|root)/|[A-Z]:\\", written)


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
  before = sorted(NOTEBOOK.parent.iterdir())
  call = "import pathlib, sys; from tests import test_examples as t; "
  done = subprocess.run(
    [sys.executable, "-c", f"{call}t.run_cells(pathlib.Path(sys.argv[1]))", tmp_path],
    # Quick to compile, as what the tests themselves do.
    env=helpers.environment(
      DPJAX_TOUR_STEPS="12", MPLBACKEND="agg", XLA_FLAGS=os.environ["XLA_FLAGS"]
    ),
    cwd=NOTEBOOK.parent,  # where Jupyter starts
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert sorted(NOTEBOOK.parent.iterdir()) == before

  # The costs, the Dispatcher's matrices, the segments.
  figures = sorted(tmp_path.glob("*.png"))
  assert [figure.name for figure in figures] == ["0.png", "1.png", "2.png"]
  assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)
  assert min(figure.stat().st_size for figure in figures) > 8_000

  values = json.loads((tmp_path / "values.json").read_text(encoding="utf-8"))
  assert [*values["texts"]] == [*values["differences"]] == FAMILIES
  for name in FAMILIES:
    assert len(values["texts"][name]) == 100, name
    assert values["differences"][name] < 1e-4, name
    assert f"--- {name} ---\nThe statement" in done.stdout
  assert values["rendered"].startswith("The␣|statement␣|raises␣|")

  matrices = np.load(tmp_path / "matrices.npz")
  assert len(matrices) == 2
  length = len(values["LINE"])
  for name, m_hts in matrices.items():
    assert m_hts.shape == (4, length, length), name
    np.testing.assert_array_equal(np.triu(m_hts), np.tile(np.eye(length), (4, 1, 1)))
    assert np.abs(np.tril(m_hts, -1)).max() > 0.01, name
